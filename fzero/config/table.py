"""The table of one configuration, and the reference of all keys.

fzero config FILE          # the effective configuration, the effect of each key, and keys without effect beside others
fzero config --reference   # docs/config.md
"""

from __future__ import annotations

import re
from typing import Any, TypeGuard, get_args

from rich.table import Table
from rich.text import Text

from fzero.config.autotuning import Autotuning
from fzero.config.config import Config
from fzero.config.conflicts import values
from fzero.config.deepspeed_keys import ACCEPTED, HARMLESS, OFF, REFUSED
from fzero.config.fields import Block, block_of
from fzero.config.optimizers import OPTIMIZERS, TorchOptimizer
from fzero.config.schedulers import SCHEDULERS, TorchScheduler

_STYLES = {"conflict": "red", "not yet": "magenta"}


def table(cfg: Config) -> Table:
    """Every honoured key with its value, then the keys without effect, then those without effect beside others."""
    rows = Table(title="configuration", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("key", "value", "", "why"):
        rows.add_column(column, no_wrap=column in ("key", ""))
    for name, value, is_given in values(cfg):
        rows.add_row(name, Text(str(value)), "given" if is_given else "default", "", style=None if is_given else "dim")
    for note in (*cfg.notes, *cfg.conflicts):
        style = _STYLES.get(note.kind, "yellow")
        rows.add_row(note.key, Text(str(note.value)), note.kind, Text(note.reason), style=style)
    return rows


def reference() -> str:
    """The configuration reference as Markdown, made from the models."""
    lines = [
        "# Configuration",
        "",
        "Made by `fzero config --reference`. The keys are DeepSpeed's; a file that you use there is read here, JSON or Hjson.",
        "`fzero config FILE` (or `python -m fzero config FILE`) shows the effective values, and the keys that have no effect",
        "beside others. A key is honoured (the first tables), accepted because it has nothing to do here, or known and not",
        "honoured yet: an error, or a warning where training is correct without it. Any other key is an error with the nearest",
        'name. A value `"auto"` counts as left out.',
        "",
        *_section("Top level", Config),
        "## `optimizer`",
        "",
        "`type` is one of the names below (upper and lower case do not matter), `params` as follows.",
        "",
    ]
    for name, optimizer in OPTIMIZERS.items():
        lines += _section(f"{name}", optimizer.model_fields["params"].annotation, level=3)
    lines += [TorchOptimizer.__doc__ or "", ""]
    lines += ["## `scheduler`", "", "`type` is one of the names below, `params` as follows.", ""]
    for name, scheduler in SCHEDULERS.items():
        lines += _section(f"{name}", scheduler.model_fields["params"].annotation, level=3)
    lines += [TorchScheduler.__doc__ or "", ""]
    lines += _section("`autotuning`", Autotuning, prefix="autotuning.")
    for title, keys in (("Accepted", ACCEPTED), ("Not honoured yet, with a warning", HARMLESS)):
        lines += [f"## {title}", "", "| key | why |", "| --- | --- |"]
        lines += [f"| `{key}` | {reason} |" for key, reason in keys.items()]
        lines += [""]
    lines += ["All `zero_optimization.stage3_*` keys may stand without `stage3_`.", ""]
    lines += ["## Not honoured yet, with an error", "", "| key | what to do |", "| --- | --- |"]
    lines += [f"| `{key}` | {fix} |" for key, fix in REFUSED.items()]
    lines += [
        "",
        "There is neither warning nor error where the value switches the key off: `null`, `false`, a block that is not",
        "enabled, or one of",
        ", ".join(f"`{key}: {str(value).lower()}`" for key, value in sorted(OFF.items())) + ".",
        "",
    ]
    return "\n".join(lines)


def _section(title: str, block: Any, *, level: int = 2, prefix: str = "") -> list[str]:
    """The table of a block, and after it a section for each block in it."""
    lines = [f"{'#' * level} {title}", ""]
    rows: list[str] = []
    inner: list[str] = []
    for name, field in block.model_fields.items():
        meaning = re.sub(r"\s+", " ", field.description or "")
        block_of_field = block_of(field.annotation)
        if block_of_field is not None and name not in ("optimizer", "scheduler"):
            path = f"{prefix}{name}"
            inner += _section(_spellings(path, field.alias), block_of_field, level=level, prefix=f"{path}.")
            if not _is_block(field.annotation):
                rows.append(f"| {_spellings(name, field.alias)} | `None` | {meaning} |")
        elif name not in ("optimizer", "scheduler"):
            default = "required" if field.is_required() else f"`{field.default}`"
            rows.append(f"| {_spellings(name, field.alias)}{_choices(field.annotation)} | {default} | {meaning} |")
    about = [re.sub(r"\s+", " ", block.__doc__), ""] if prefix else []
    return [*lines, *about, "| key | default | meaning |", "| --- | --- | --- |", *rows, "", *inner]


def _is_block(annotation: Any) -> TypeGuard[type[Block]]:
    return isinstance(annotation, type) and issubclass(annotation, Block)


def _spellings(name: str, alias: str | None) -> str:
    return f"`{name}`" + (f" or `{alias}`" if alias else "")


def _choices(annotation: Any) -> str:
    choices = [str(choice) for choice in get_args(annotation) if isinstance(choice, str | int)]
    return f" ({', '.join(choices)})" if choices else ""
