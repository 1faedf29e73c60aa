"""Records the names of DeepSpeed in fzero/deepspeed/names.json:
`python tests/support/deepspeed_names.py OLD NEW`.

OLD and NEW are the unpacked sources of two versions (`pip download --no-deps`). The
record has the names of both: what NEW has, and what only OLD has, since scripts of both
run here. Of a name in both it says what NEW says. It is read with `ast`, so no module
of DeepSpeed is imported. Per module it has the functions, classes, exceptions, values,
constants with their literal values, and the names imported from other modules of
DeepSpeed.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "fzero" / "deepspeed" / "names.json"
KINDS = ("functions", "classes", "errors", "values")


@dataclass
class Names:
    """The names of one module of DeepSpeed."""

    is_package: bool
    functions: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    errors: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)
    constants: dict[str, Any] = field(default_factory=dict)
    # of classes: constants that are strings
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    # "module:name", or "module" for a module itself
    imported: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    exported: set[str] | None = None  # __all__

    def all_names(self) -> set[str]:
        """Every name that the module defines or imports from DeepSpeed."""
        return (
            self.functions
            | self.classes
            | self.errors
            | self.values
            | {*self.constants}
            | {*self.imported}
        )

    def forget(self, name: str) -> None:
        """Removes a name, whatever it is."""
        for names in (self.functions, self.classes, self.errors, self.values):
            names.discard(name)
        self.constants.pop(name, None)
        self.imported.pop(name, None)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also inside `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            yield from statements(inner)
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def source_of(package: Path) -> dict[str, Path]:
    """The file of each module."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if module.replace(".", "").isidentifier():
            found[module] = path
    return found


def assigned(node: ast.stmt) -> list[str]:
    """The names that a statement assigns to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]
    return [
        part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)
    ]


def read(module: str, path: Path, known: dict[str, Path]) -> Names:
    """The names of a module, with its `import *` unresolved."""
    names = Names(is_package=path.name == "__init__.py")
    body = ast.parse(path.read_text()).body
    for node in statements(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.forget(node.name)
            names.functions.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.forget(node.name)
            is_error = any(
                ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases
            )
            (names.errors if is_error else names.classes).add(node.name)
            if texts := class_constants(node):
                names.attributes[node.name] = texts
        elif (
            isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
            and getattr(node, "value", None) is not None
        ):
            add_value(names, node, is_plain=node in body)
        elif isinstance(node, ast.ImportFrom):
            add_imports(names, node, module, known)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name in known:
                    names.imported[alias.asname] = alias.name
    return names


def class_constants(node: ast.ClassDef) -> dict[str, str]:
    """The constants of a class's body that are strings, such as the NAME of a builder
    of operators.
    """
    plain = [
        x for x in node.body if isinstance(x, ast.Assign) and isinstance(x.value, ast.Constant)
    ]
    pairs = [(name, x.value.value) for x in plain for name in assigned(x)]  # type: ignore[attr-defined]
    return {name: value for name, value in pairs if name.isupper() and isinstance(value, str)}


def add_value(names: Names, node: Any, *, is_plain: bool) -> None:
    """Records an assignment; its value, if it is a literal number, string or None of an
    unconditional one.
    """
    try:
        value = ast.literal_eval(node.value)
    except ValueError:
        value = ...
    for name in assigned(node):
        if name == "__all__" and isinstance(value, list):
            names.exported = {*value}
        if name.startswith("__"):
            continue
        was_there = name in names.all_names()
        names.forget(name)
        is_constant = name.isupper() or isinstance(value, str)  # others are the module's state
        is_literal = (
            isinstance(node, ast.Assign)
            and is_constant
            and isinstance(value, str | int | float | bool | None)
        )
        if is_literal and is_plain and not was_there and not isinstance(node.targets[0], ast.Tuple):
            names.constants[name] = value
        else:
            names.values.add(name)


def add_imports(names: Names, node: ast.ImportFrom, module: str, known: dict[str, Path]) -> None:
    """Records what a module imports from other modules of DeepSpeed."""
    package = module.split(".") if names.is_package else module.split(".")[:-1]
    parents = package[: len(package) - node.level + 1] if node.level else []
    source = ".".join([*parents, *filter(None, [node.module])])
    if source.partition(".")[0] != "deepspeed":
        return
    for alias in node.names:
        if alias.name == "*":
            names.stars.append(source)
            continue
        name = alias.asname or alias.name
        if name.startswith("__"):
            continue
        if name in names.functions | names.classes | names.values:
            continue
        inner = f"{source}.{alias.name}"
        names.imported[name] = inner if inner in known else f"{source}:{alias.name}"


def recorded(package: Path) -> dict[str, Names]:
    """The names of every module of a DeepSpeed, from its folder `deepspeed`."""
    known = source_of(package)
    found = {module: read(module, path, known) for module, path in known.items()}
    # its __init__ makes a name of every builder
    for path in (package / "ops" / "op_builder").glob("*.py"):
        builders = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)]
        builders = [name for name in builders if name.endswith("Builder")]
        package_of = found["deepspeed.ops.op_builder"]
        package_of.classes.update(builders)
        texts = (
            found[f"deepspeed.ops.op_builder.{path.stem}"].attributes
            if path.stem != "__init__"
            else {}
        )
        package_of.attributes.update({name: texts[name] for name in builders if name in texts})
    return found


def merged(old: Names, new: Names) -> Names:
    """The names of both; of a name in both what `new` says."""
    older = Names(new.is_package, constants=dict(old.constants), imported=dict(old.imported))
    for kind in KINDS:
        getattr(older, kind).update(getattr(old, kind))
    for name in new.all_names():
        older.forget(name)
    return Names(
        new.is_package,
        *(getattr(older, kind) | getattr(new, kind) for kind in KINDS),
        older.constants | new.constants,
        old.attributes | new.attributes,
        older.imported | new.imported,
        [*new.stars, *old.stars],
        None
        if None in (old.exported, new.exported)
        else {*(old.exported or ()), *(new.exported or ())},
    )


def as_json(found: dict[str, Names], versions: list[str], gone: set[str]) -> str:
    """The record, with one line per module.

    Args:
        versions: of DeepSpeed, the newest last.
        gone: the modules that the newest lacks.
    """
    lines = []
    for module, names in sorted(found.items()):
        sources = defaultdict(list)
        for name, source in sorted(names.imported.items()):
            module_of, _, original = source.partition(":")
            sources[module_of].append(
                "" if not original else name if original == name else f"{original}:{name}"
            )
            if not original:
                sources[module_of][-1] = f":{name}"
        kinds = {kind: " ".join(sorted(getattr(names, kind))) for kind in KINDS}
        imported = {source: " ".join(given) for source, given in sorted(sources.items())}
        of_classes, constants = (
            dict(sorted(names.attributes.items())),
            dict(sorted(names.constants.items())),
        )
        entry = {**kinds, "attributes": of_classes, "constants": constants, "imported": imported}
        kept: dict[str, Any] = {"is_gone": True} if module in gone else {}
        kept |= {"is_package": True} if names.is_package else {}
        kept |= {"stars": " ".join(dict.fromkeys(names.stars))} if names.stars else {}
        kept |= {"exported": " ".join(sorted(names.exported))} if names.exported is not None else {}
        kept |= {kind: value for kind, value in entry.items() if value}
        lines.append(f"{json.dumps(module)}: {json.dumps(kept)}")
    head = json.dumps({"versions": versions})[1:-1]
    return "{" + head + ', "modules": {\n' + ",\n".join(lines) + "\n}}\n"


def version_of(source: Path) -> str:
    """The version of an unpacked source."""
    return (source / "version.txt").read_text().strip()


def record(sources: list[Path]) -> str:
    """The record of the names of two versions, the older one first."""
    old, new = (recorded(source / "deepspeed") for source in sources)
    both = {
        module: merged(old[module], new[module])
        if module in old and module in new
        else (new.get(module) or old[module])
        for module in {*old, *new}
    }
    return as_json(both, [*map(version_of, sources)], {*old} - {*new})


if __name__ == "__main__":
    RECORD.write_text(record([*map(Path, sys.argv[1:])]))
