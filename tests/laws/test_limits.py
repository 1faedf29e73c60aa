"""How large a file, a class or a function may be, and who may use a private name: a
walk over the source of every module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from test_rooms import MODULES, dotted, files, imports, name_of, nodes_of, tree_of

CHARACTERS, STATEMENTS, ATTRIBUTES = 24_000, 50, 15

LARGER = {
    "fzero.deepspeed.engine.engine.Engine": "the attributes that DeepSpeed's engine has",
}
"""Names of what is larger, each with its reason."""

CONSTRUCTORS = {"__init__", "__new__"}
DEEPSPEEDS = "fzero.deepspeed.runtime"
OVERRIDES = {
    f"{DEEPSPEEDS}.lr_schedules.LRRangeTest.step": "its argument has another name there",
    f"{DEEPSPEEDS}.lr_schedules.OneCycle.step": "its argument has another name there",
    **dict.fromkeys(
        (
            f"{DEEPSPEEDS}.pipe.schedule.{name}.num_pipe_buffers"
            for name in ("TrainSchedule", "InferenceSchedule", "DataParallelSchedule")
        ),
        "scripts derive schedules from the base, which has a number there",
    ),
    **dict.fromkeys(
        (
            f"{DEEPSPEEDS}.zero.tiling.TiledLinearReturnBias.{name}"
            for name in ("_reduce_local_output", "_combine_output_splits")
        ),
        "scripts derive classes from both, and replace these there",
    ),
}
"""The methods that replace a concrete one of a base class, each with its reason: only
where DeepSpeed prescribes both classes.
"""

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
        and dotted(part.value) == "self"
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


def private_names(path: Path) -> set[str]:
    """Private functions, classes and variables of a module, methods and attributes of
    its classes.
    """
    names = set[str]()
    for node in nodes_of(path):
        if isinstance(node, Definition):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in names if is_private(name)}


def private_uses() -> dict[str, int]:
    paths = {name_of(path): path for path in files("fzero", "sharding")}
    own = {module: private_names(path) for module, path in paths.items()}
    ours, uses = set[str]().union(*own.values()), {}
    for module, path in paths.items():
        attributes = [
            node.attr
            for node in nodes_of(path)
            if isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and ast.unparse(node.value) not in ("self", "cls", "super()")
        ]
        imported = [name for source, name in imports(path) if source in MODULES]
        number = sum(
            is_private(name) and name in ours - own[module] for name in [*attributes, *imported]
        )
        if number:
            uses[module] = number
    return uses


class Class(NamedTuple):
    """A class of the source: its bases by their qualified names, and its own methods,
    with whether each is concrete.
    """

    bases: list[str]
    methods: dict[str, bool]


def methods_of(node: ast.ClassDef, bases: list[str]) -> dict[str, bool]:
    is_protocol = any(base.split(".")[-1] == "Protocol" for base in bases)
    return {
        part.name: not is_protocol
        and not any("abstractmethod" in ast.unparse(mark) for mark in part.decorator_list)
        for part in node.body
        if isinstance(part, ast.FunctionDef) and part.name not in CONSTRUCTORS
    }


def classes() -> dict[str, Class]:
    """Those of the top level of every module, by their qualified names."""
    found = {}
    for path in files("fzero", "sharding"):
        module, known = name_of(path), dict[str, str]()
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom):
                known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
                named = [known.get(base, f"{module}.{base}") for base in bases]
                found[f"{module}.{node.name}"] = Class(named, methods_of(node, bases))
    return found


def overrides() -> set[str]:
    """`Class.method` for each method that replaces a concrete one of a base of ours;
    constructors aside.
    """
    known = classes()

    def above(name: str) -> Iterator[Class]:
        for base in known[name].bases:
            if base in known:
                yield known[base]
                yield from above(base)

    return {
        f"{name}.{method}"
        for name, own in known.items()
        for method in own.methods
        if next((base.methods[method] for base in above(name) if method in base.methods), False)
    }


def test_what_is_large_is_named_with_its_reason() -> None:
    assert larger() == set(LARGER)


def test_no_method_replaces_a_concrete_one_but_where_others_prescribe_the_classes() -> None:
    assert overrides() == set(OVERRIDES)


def test_private_attributes_are_used_in_their_own_module() -> None:
    assert private_uses() == {}


if __name__ == "__main__":
    print(*sorted(larger()), *sorted(overrides()), *sorted(private_uses().items()), sep="\n")
