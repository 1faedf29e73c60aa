"""The units of a model: parameters that are gathered, reduced and released together.

1. A block is a unit. Blocks are the modules that the user names, or the repeated
   modules (members of a `ModuleList`, alike ones of a `ModuleDict`).
2. Modules between blocks are joined into units no larger than the largest block.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sharding import plan_buckets


def check_has_shapes(named: Mapping[str, Tensor]) -> None:
    """Raises a ValueError for a lazy parameter or buffer, which has no shape before its
    first forward.
    """
    for name, tensor in named.items():
        if is_lazy(tensor):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise ValueError(
                f"{kind} {name!r}: must have a shape, but a lazy module makes it in its first "
                f"forward; run the model once on a batch before the step is made"
            )


def owners_of(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """The parameters by their first names, and the aliases: every other name of a tied
    parameter or buffer, with its first name."""
    first: dict[int, str] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    named = (*params.items(), *model.named_buffers(remove_duplicate=False))
    aliases = {name: owner for name, x in named if (owner := first.setdefault(id(x), name)) != name}
    return {name: param for name, param in params.items() if name not in aliases}, aliases


def find_units(
    model: nn.Module, owners: dict[str, nn.Parameter], patterns: Sequence[str] | None, cap: int
) -> list[tuple[str, list[str]]]:
    """The units in the order of declaration: (name of the unit, names of its
    parameters); each parameter is in one.

    A block is a unit. Modules between blocks are joined while they stay below the
    largest block (or, without blocks, the largest module) and below `cap` elements.
    """
    blocks = blocks_of(model, patterns)
    runs = _runs(blocks, owners)
    whole = [names for block, names in runs if block is not None] or _by_module(
        list(owners)
    ).values()
    cap = min(cap, max((sum(owners[name].numel() for name in names) for names in whole), default=0))
    units: list[tuple[str, list[str]]] = []
    for block, names in runs:
        if block is not None:
            units.append((block, names))
            continue
        modules = list(_by_module(names).items())
        for bucket in plan_buckets(
            [sum(owners[name].numel() for name in members) for _, members in modules], cap
        ):
            first, last = modules[bucket[0]][0], modules[bucket[-1]][0]
            title = first if first == last else f"{first}..{last}"
            units.append((title, [name for index in bucket for name in modules[index][1]]))
    return units


def blocks_of(model: nn.Module, patterns: Sequence[str] | None = None) -> list[str]:
    """The names of the modules that are units of their own: those that match
    `patterns`, or the repeated blocks.
    """
    return _named_blocks(model, patterns) if patterns is not None else _repeated_blocks(model)


def _by_module(names: Sequence[str]) -> dict[str, list[str]]:
    """The names by the module that owns them."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.rpartition(".")[0] or "(root)", []).append(name)
    return modules


def _repeated_blocks(model: nn.Module, prefix: str = "") -> list[str]:
    """The outermost repeated modules: members of a ModuleList, and of a Sequential or a
    ModuleDict that repeats one.

    A container that is never called (a list in a list) is no block. A Sequential inside
    a Sequential is a block only where a sibling is made of the same classes: in
    (embedding, stack, head) the members of the stack are the blocks. A member of a
    ModuleDict is a block if a sibling has its class, and if it repeats nothing larger
    than a layer. So experts are blocks; an encoder beside a decoder, or the two
    embeddings of a GPT-2, are not.
    """
    children = [
        (f"{prefix}{name}", child) for name, child in model.named_children() if _has_params(child)
    ]
    counts = Counter(_kind_of(child) for _, child in children)
    is_list = isinstance(model, nn.ModuleList)
    most = max((count for kind, count in counts.items() if kind not in _CONTAINERS), default=0)
    repeats = isinstance(model, nn.Sequential) and most > 1
    classes = (
        Counter(type(child) for _, child in children) if isinstance(model, nn.ModuleDict) else {}
    )
    blocks = []
    for name, child in children:
        if isinstance(child, _CONTAINERS):
            is_block = False
        elif classes:
            parts = [child.get_submodule(part) for part in _repeated_blocks(child)]
            is_block = (
                classes[type(child)] > 1 and not _is_layer(child) and all(map(_is_layer, parts))
            )
        elif isinstance(child, nn.Sequential):
            is_block = len(children) > 1 if is_list else repeats and counts[_kind_of(child)] > 1
        else:
            is_block = is_list or repeats
        blocks += [name] if is_block else _repeated_blocks(child, f"{name}.")
    return blocks


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Containers without a forward."""


def _is_layer(module: nn.Module) -> bool:
    """Whether no parameters are in modules inside of it."""
    return not any(map(_has_params, module.children()))


def _kind_of(module: nn.Module) -> Any:
    """The key by which two modules are alike: the class, and for a Sequential also the
    classes of its members.
    """
    return (
        (type(module), *map(_kind_of, module))
        if isinstance(module, nn.Sequential)
        else type(module)
    )


def _named_blocks(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The outermost modules with parameters that match one of the patterns."""
    names = [name for name, module in model.named_modules() if name and _has_params(module)]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"units: {pattern!r} must match a module with parameters and matches none of "
                f"{type(model).__name__}'s; names look like {', '.join(names[:4])}"
            )
    blocks: dict[str, None] = {}
    for name in names:  # named_modules yields a parent before its children
        inside = any(parent in blocks for parent in _parents(name))
        if not inside and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            blocks[name] = None
    return list(blocks)


def _parents(name: str) -> Iterator[str]:
    """The names of the modules that contain `name`, from the outermost in."""
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts)))


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _runs(blocks: Sequence[str], names: Iterable[str]) -> list[tuple[str | None, list[str]]]:
    """The names in their order, in runs of one block: pairs (block, names); the block
    is None outside of blocks.
    """
    known = set(blocks)
    block_of: dict[str, str | None] = {}  # per module, because most have several parameters
    runs: list[tuple[str | None, list[str]]] = []
    for name in names:
        module = name.rpartition(".")[0]
        if module not in block_of:
            block_of[module] = next((parent for parent in _parents(name) if parent in known), None)
        block = block_of[module]
        if not runs or runs[-1][0] != block:
            runs.append((block, []))
        runs[-1][1].append(name)
    return runs
