"""Unknown keys where DeepSpeed ignores them: `fzero.initialize` drops them with a
warning; `Config.load` refuses them.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from fzero.config.config import Config
from fzero.config.deepspeed_keys import INSTEAD, SPELLINGS
from fzero.config.fields import block_of, names_in
from fzero.config.unused_keys import children, unknown_key

IGNORED_IN = (
    "activation_checkpointing",
    "aio",
    "eigenvalue",
    "flops_profiler",
    "pipeline",
    "torch_autocast",
)
"""The blocks of which DeepSpeed reads the keys it knows and ignores all others, as it
does at the top level. It refuses unknown keys in other blocks."""


def without_unknown(
    source: Mapping[str, Any], also: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The configuration without the unknown keys that DeepSpeed ignores, and a line for
    each of them.

    Args:
        also: keys of the top level that are known besides those of `Config` and of
            DeepSpeed.

    >>> kept, lines = without_unknown(
    ...     {"zero_optimisation": {}, "flops_profiler": {"enabled": True, "profile": 1}}
    ... )
    >>> kept, lines[0]
    ({'flops_profiler': {'enabled': True}}, "zero_optimisation: unknown key; did you mean 'zero_optimization'?")
    """
    kept, lines = _split(source, "", [*_fields(Config), *also])
    for block in IGNORED_IN:
        if isinstance(kept.get(block), Mapping):
            model = (
                block_of(Config.model_fields[block].annotation)
                if block in Config.model_fields
                else None
            )
            kept[block], of_block = _split(kept[block], block, _fields(model) if model else [])
            lines += of_block
    return kept, lines


def _fields(model: Any) -> list[str]:
    fields = model.model_fields
    return [*fields, *(field.alias for field in fields.values() if field.alias)]


def _split(
    source: Mapping[str, Any], block: str, honoured: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """The known keys of a block, and a line for each other one."""
    prefix = f"{block}." if block else ""
    known = {*honoured, *children(block)}
    older = {
        name.removeprefix(prefix) for name in (*SPELLINGS, *INSTEAD) if name.startswith(prefix)
    }
    kept = {key: value for key, value in source.items() if key in known | older or "*" in known}
    return kept, [_line(f"{prefix}{key}", honoured) for key in source if key not in kept]


def _line(name: str, honoured: Collection[str]) -> str:
    """The line for an unknown key. For a dotted name at the top level, as some programs
    write, it names the block.
    """
    block, _, key = str(name).rpartition(".")
    if block not in honoured:
        return unknown_key(str(name), tuple(honoured), tuple(names_in(Config)))
    model = (
        block_of(Config.model_fields[block].annotation) if block in Config.model_fields else None
    )
    inside = sorted({*(_fields(model) if model else ()), *children(block)})
    nearest = difflib.get_close_matches(key, inside, n=1)
    where = (
        f"{nearest[0]!r} inside the block {block!r}"
        if nearest
        else f"a key inside the block {block!r}"
    )
    return f"{name}: unknown key; did you mean {where}?"
