"""How large a file, a class or a function may be, and who may use a private name: a
walk over the source of every module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from test_rooms import MODULES, files, imports, name_of, tree_of

CHARACTERS, STATEMENTS, ATTRIBUTES = 24_000, 50, 15

LARGER = {
    "fzero.deepspeed.engine.engine.Engine": "the attributes that DeepSpeed's engine has",
}
"""Names of what is larger, each with its reason."""

PYTORCHS = {"_base", "_buffers", "_modules", "_ops", "_version"}
"""Attributes of PyTorch's that have no public name; a class of ours may have one of the
same name.
"""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(tree: ast.AST, within: str) -> Iterator[tuple[str, Definition]]:
    """The classes, methods and functions of a module by their qualified names;
    functions inside functions count as a part.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            name = f"{within}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node, name)


def num_statements(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Those of a function and of the functions inside it, without its docstring."""
    has_docstring = ast.get_docstring(node, clean=False) is not None
    return sum(isinstance(part, ast.stmt) for part in ast.walk(node)) - 1 - has_docstring


def num_attributes(node: ast.ClassDef) -> int:
    """Those that methods assign, but for the arguments of `__init__`."""
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    arguments = {
        a.arg for m in methods if m.name == "__init__" for a in [*m.args.args, *m.args.kwonlyargs]
    }
    assigned = {
        part.attr
        for method in methods
        for part in ast.walk(method)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and ast.unparse(part.value) == "self"
    }
    return len({name for name in assigned if name.lstrip("_") not in arguments})


def num_characters(text: str) -> int:
    """Without the spaces that indent lines, of which a narrow layout has more."""
    return sum(len(line.lstrip()) + 1 for line in text.splitlines())


def larger() -> set[str]:
    found = set()
    for path in files("fzero", "sharding"):
        module = name_of(path)
        if num_characters(path.read_text()) > CHARACTERS:
            found.add(module)
        for name, node in definitions(tree_of(path), module):
            if isinstance(node, ast.ClassDef):
                is_larger = num_attributes(node) > ATTRIBUTES
            else:
                is_larger = num_statements(node) > STATEMENTS
            if is_larger:
                found.add(name)
    return found


def is_private(name: str | None) -> bool:
    return (
        name is not None
        and name.startswith("_")
        and not name.startswith("__")
        and name not in PYTORCHS
    )


def private_names(tree: ast.AST) -> set[str]:
    """Private functions, classes and variables of a module, methods and attributes of
    its classes.
    """
    names = {node.name for node in ast.walk(tree) if isinstance(node, Definition)}
    names |= {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    }
    names |= {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    return {name for name in names if is_private(name)}


def private_uses() -> dict[str, int]:
    trees = {name_of(path): (path, tree_of(path)) for path in files("fzero", "sharding")}
    own = {module: private_names(tree) for module, (_, tree) in trees.items()}
    ours, uses = set[str]().union(*own.values()), {}
    for module, (path, tree) in trees.items():
        attributes = [
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and ast.unparse(node.value) not in ("self", "cls", "super()")
        ]
        imported = [name for source, name in imports(path) if source in MODULES]
        number = sum(
            is_private(name) and name in ours - own[module] for name in [*attributes, *imported]
        )
        if number:
            uses[module] = number
    return uses


def test_what_is_large_is_named_with_its_reason() -> None:
    assert larger() == set(LARGER)


def test_private_attributes_are_used_in_their_own_module() -> None:
    assert private_uses() == {}


if __name__ == "__main__":
    print(*sorted(larger()), *sorted(private_uses().items()), sep="\n")
