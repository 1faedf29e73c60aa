"""The names of DeepSpeed 0.19.6 and 0.19.8, as recorded in names.json: which modules
they have, and where each of their names is defined.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

NameKind = Literal["functions", "classes", "errors", "values", "constants", "modules"]

ROOT = "deepspeed"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One module of DeepSpeed: the names that it defines by kind, and those that it
    imports from its other modules.
    """

    is_package: bool
    is_gone: bool
    """Whether the newer version lacks the module."""
    own: Mapping[str, NameKind]
    constants: Mapping[str, Any]
    attributes: Mapping[str, Mapping[str, str]]
    """The constants of each class that are strings."""
    imported: Mapping[str, tuple[str, str]]
    """(module, name there) of each imported name; the name is "" for a module."""
    stars: tuple[str, ...]
    exported: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Definition:
    """Where DeepSpeed defines a name; a module has the kind "modules" and the name ""."""

    module: str
    name: str
    kind: NameKind

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def _imported(given: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    found = {}
    for module, words in given.items():
        for word in words.split():
            original, colon, name = word.partition(":")
            found[name if colon else original] = (module, original)
    return found


@cache
def modules() -> Mapping[str, Recorded]:
    """Every module of DeepSpeed by its name."""
    raw = json.loads(Path(__file__).with_name("names.json").read_text())["modules"]
    return {name: _recorded(entry) for name, entry in raw.items()}


def _recorded(entry: Mapping[str, Any]) -> Recorded:
    own = {
        name: kind
        for kind in get_args(NameKind)
        if kind != "constants"
        for name in entry.get(kind, "").split()
    }
    return Recorded(
        is_package=entry.get("is_package", False),
        is_gone=entry.get("is_gone", False),
        own=own | dict.fromkeys(entry.get("constants", ()), "constants"),
        constants=entry.get("constants", {}),
        attributes=entry.get("attributes", {}),
        imported=_imported(entry.get("imported", {})),
        stars=tuple(entry.get("stars", "").split()),
        exported=frozenset(entry["exported"].split()) if "exported" in entry else None,
    )


def origin(
    module: str, name: str, *, within: frozenset[tuple[str, str]] = frozenset()
) -> Definition | None:
    """Where DeepSpeed defines what it calls `module.name`; None if it has no such name.

    >>> print(origin("deepspeed", "PipelineModule"))
    deepspeed.runtime.pipe.module.PipelineModule
    >>> origin("deepspeed", "zero")
    Definition(module='deepspeed.runtime.zero', name='', kind='modules')
    >>> origin("deepspeed", "intialize")
    """
    if (module, name) in within or (entry := modules().get(module)) is None:
        return None
    if (kind := entry.own.get(name)) is not None:
        return Definition(module, name, kind)
    if name in entry.imported:
        source, original = entry.imported[name]
        if not original:
            return Definition(source, "", "modules")
        found = origin(source, original, within=within | {(module, name)})
        return found or Definition(
            source, original, "values"
        )  # DeepSpeed imports it from a library by way of another module
    if f"{module}.{name}" in modules():
        return Definition(f"{module}.{name}", "", "modules")
    for source in entry.stars:
        exported = modules()[source].exported if source in modules() else None
        is_public = not name.startswith("_") if exported is None else name in exported
        if (
            is_public
            and (found := origin(source, name, within=within | {(module, name)})) is not None
        ):
            return found
    return None


def names_of(module: str, *, within: frozenset[str] = frozenset()) -> set[str]:
    """Every name of one of DeepSpeed's modules, without its submodules.

    >>> {"MoE", "Experts"} <= names_of("deepspeed.moe.layer")
    True
    """
    entry = modules().get(module)
    if entry is None or module in within:
        return set()
    found = {*entry.own, *entry.imported}
    for source in entry.stars:
        if source in modules():
            exported = modules()[source].exported
            theirs = names_of(source, within=within | {module})
            found |= (
                {x for x in theirs if not x.startswith("_")}
                if exported is None
                else theirs & exported
            )
    return found


def submodules(module: str) -> set[str]:
    """The last parts of the names of a package's modules."""
    return {inner.rpartition(".")[2] for inner in modules() if inner.rpartition(".")[0] == module}
