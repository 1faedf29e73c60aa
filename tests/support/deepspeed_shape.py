"""What a script sees of every public name of DeepSpeed, there and here: signatures,
defaults, bases, fields, members.

`python tests/support/deepspeed_shape.py` compares the installed DeepSpeed with fzero's
names and records every difference in `deepspeed_differences.json`, from which the page
of names says what is here in part. A function differs where a call that DeepSpeed's
takes would fail, or has another default; a class where it lacks a base, a public
method, a field or a member. `python … real` and `python … alias` print the description
of one package: each needs a process, as both have one name.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("deepspeed_differences.json")
PACKAGES = ("deepspeed", "fzero")


def unwrapped(function: Any) -> Any:
    """The function in a decorator of DeepSpeed's that hides its parameters."""
    names = [x.kind.name for x in inspect.signature(function).parameters.values()]
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inner = [x for x in cells if inspect.isfunction(x) and x.__module__ == function.__module__]
    return inner[0] if names == ["VAR_POSITIONAL", "VAR_KEYWORD"] and len(inner) == 1 else function


def parameters(function: Any) -> list[list[str]] | None:
    """Each parameter's name, kind and default; None where Python does not know them."""
    try:
        found = inspect.signature(unwrapped(function)).parameters.values()
    except (TypeError, ValueError):
        return None
    return [[p.name, p.kind.name, "" if p.default is p.empty else shown(p.default)] for p in found]


def shown(value: Any) -> str:
    """A default, in text that is the same for equal values of both packages."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if type(value).__name__ == "RedOpType":  # torch's, which DeepSpeed's stands for
        return f"ReduceOp.{value.name}"
    if isinstance(value, type) or inspect.isroutine(value):
        return str(value.__name__)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{shown(key)}: {shown(x)}" for key, x in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    if type(value).__module__.partition(".")[0] in PACKAGES:
        return f"{type(value).__name__}(...)"
    return repr(value)


def is_own(value: Any) -> bool:
    """Whether a class or function is of the package that is described."""
    return str(getattr(value, "__module__", None)).partition(".")[0] in PACKAGES


def methods(cls: type) -> dict[str, Any]:
    """The public attributes of a class and its bases: parameters, or "class",
    "property" or "value".
    """
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base is object:
            continue
        for name, value in vars(base).items():
            if name.startswith("_"):
                continue
            inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if isinstance(inner, type):
                found[name] = "class"
            elif callable(inner):
                found[name] = parameters(getattr(cls, name)) or "method"
            else:
                found[name] = "property" if hasattr(type(inner), "__get__") else "value"
    return found


def fields(cls: Any) -> dict[str, list[str]]:
    """The fields of a pydantic model or a dataclass: default and alias of each."""
    if "model_fields" in dir(cls) and not isinstance(
        inspect.getattr_static(cls, "model_fields"), type(None)
    ):
        return {
            name: [
                "required"
                if field.is_required()
                else shown(field.get_default(call_default_factory=True)),
                field.alias or "",
            ]
            for name, field in cls.model_fields.items()
        }
    if "__dataclass_fields__" in dir(cls):
        import dataclasses

        return {
            f.name: [
                shown(f.default_factory())
                if f.default_factory is not dataclasses.MISSING
                else "required"
                if f.default is dataclasses.MISSING
                else shown(f.default),
                "",
            ]
            for f in dataclasses.fields(cls)
        }
    return {}


def described(value: Any) -> dict[str, Any]:
    """What a script sees of one name."""
    if isinstance(value, type):
        bases = [
            f"{b.__module__.partition('.')[0]}.{b.__name__}"
            for b in value.__mro__[1:]
            if b is not object and not is_own(b)
        ]
        own = [b.__name__ for b in value.__mro__[1:] if is_own(b)]
        members = {m.name: shown(m.value) for m in value} if issubclass(value, enum.Enum) else {}  # type: ignore[var-annotated]
        made = parameters(value) if not issubclass(value, enum.Enum | BaseException) else None
        return {
            "kind": "error" if issubclass(value, BaseException) else "class",
            "bases": bases,
            "own": own,
            "init": made,
            "methods": methods(value),
            "fields": fields(value),
            "members": members,
        }
    if inspect.ismodule(value):
        return {"kind": "module"}
    if inspect.isroutine(value) or (callable(value) and hasattr(value, "__wrapped__")):
        return {"kind": "function", "parameters": parameters(value)}
    return {
        "kind": "value",
        "type": type(value).__name__,
        "value": shown(value) if not callable(value) else "",
    }


def described_module(module: Any) -> dict[str, dict[str, Any]]:
    """What a script sees of each public name of one module."""
    found = {}
    for name in dir(module):
        if name.startswith("_"):
            continue
        with contextlib.suppress(Exception):
            found[name] = described(getattr(module, name))
    return found


def main(which: str) -> None:
    """Prints the description of one package."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from fzero.deepspeed import alias, names

    if which == "alias":
        alias.install(announce=False)
    result = {}
    with contextlib.redirect_stdout(sys.stderr):
        for theirs in names.modules():
            try:
                module = importlib.import_module(theirs)
            except BaseException as error:  # DeepSpeed's modules need libraries that are not there
                print(f"{theirs}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            if which == "alias":
                own = {
                    n: alias.own_attribute(theirs, n) or own_elsewhere(theirs, n)
                    for n in names.names_of(theirs)
                }
                result[theirs] = {
                    n: described(x[0])
                    for n, x in own.items()
                    if x is not None and not n.startswith("_")
                }
            else:
                result[theirs] = described_module(module)
    print(json.dumps(result))


def own_elsewhere(module: str, name: str) -> tuple[Any] | None:
    """fzero's object of a name that its module of that name does not have."""
    from fzero.deepspeed import alias, names

    where = names.origin(module, name)
    return None if where is None or where.kind == "modules" else alias.own_object(where, name)


def _of_call(theirs: list[list[str]] | None, ours: list[list[str]] | None) -> list[str]:
    """How calls of one function fail with the other, or mean something else."""
    if theirs is None or ours is None:
        return [] if theirs is None else ["no signature"]
    kinds = {kind for _, kind, _ in ours}
    takes_any, takes_words = "VAR_POSITIONAL" in kinds, "VAR_KEYWORD" in kinds
    by_name, order = {x[0]: x for x in ours}, [x[0] for x in ours if x[1].startswith("POSITIONAL")]
    found, index = [], 0
    for name, kind, default in theirs:
        mine = by_name.get(name)
        if kind.startswith("VAR"):
            if kind not in kinds:
                found.append(f"no {'*' if kind == 'VAR_POSITIONAL' else '**'}{name}")
            continue
        if mine is None:
            if not (takes_words and (takes_any or kind == "KEYWORD_ONLY")):
                found.append(f"no {name}")
        elif default and mine[2] != default:
            found.append(f"{name}={mine[2] or 'required'}, there {default}")
        elif kind.startswith("POSITIONAL") and not takes_any and order[index : index + 1] != [name]:
            found.append(f"{name} at another position")
        index += kind.startswith("POSITIONAL")
    known = {x[0] for x in theirs}
    return found + [
        f"{n} is required"
        for n, k, d in ours
        if n not in known and not k.startswith("VAR") and not d
    ]


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """What a script that is written for the first object finds otherwise in the second."""
    if theirs["kind"] == "module" or theirs["kind"] != ours["kind"]:
        return (
            []
            if theirs["kind"] == ours["kind"]
            else [f"a {ours['kind']}, there a {theirs['kind']}"]
        )
    if theirs["kind"] == "function":
        return _of_call(theirs["parameters"], ours["parameters"])
    if theirs["kind"] == "value":
        is_same = (theirs["type"], theirs["value"]) == (ours["type"], ours["value"])
        return (
            []
            if is_same
            else [
                "another value"
                if len(theirs["value"]) > 40
                else f"{ours['value']}, there {theirs['value']}"
            ]
        )
    found = [f"no base {b}" for key in ("bases", "own") for b in theirs[key] if b not in ours[key]]
    found += [f"made with {x}" if " " in x else x for x in _of_call(theirs["init"], ours["init"])]
    for name, given in theirs["methods"].items():
        mine = ours["methods"].get(name)
        if mine is None:
            found.append(f"no .{name}")
        elif isinstance(given, list) and isinstance(mine, list):
            found += [f".{name}: {x}" for x in _of_call(given[1:], mine[1:])]
    for name, field in theirs["fields"].items():
        mine = ours["fields"].get(name)
        found += (
            []
            if mine == field
            else [f"no field {name}" if mine is None else f"field {name}: {mine}, there {field}"]
        )
    return found + ([] if theirs["members"] == ours["members"] else ["other members"])


def described_package(which: str) -> dict[str, dict[str, Any]]:
    """The description of one package, from a process of its own."""
    command = [sys.executable, __file__, which]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=570)
    found: dict[str, dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def differences() -> dict[str, list[str]]:
    """Every difference of a name that fzero has, by the place where DeepSpeed defines
    it.
    """
    from fzero.deepspeed import names

    real, alias = described_package("real"), described_package("alias")
    found = {}
    for module, ours in alias.items():
        for name in ours.keys() & real.get(module, {}).keys():
            if where := difference(real[module][name], ours[name]):
                found[str(names.origin(module, name))] = where
    return dict(sorted(found.items()))


def as_json(found: Mapping[str, list[str]]) -> str:
    """The record, with one line for each name."""
    return (
        "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}\n"
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        RECORD.write_text(as_json(differences()))
