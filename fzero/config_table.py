"""What does a configuration come to, and which keys are there? As a table of one configuration, and as the reference.

python -m fzero config FILE          # the effective configuration, and what each key did
python -m fzero config --reference   # docs/config.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from rich.table import Table

from fzero.config import OPTIMIZERS, SCHEDULERS, Config, TorchOptimizer, TorchScheduler
from fzero.deepspeed_keys import ACCEPTED, NOT_YET, OFF


def table(cfg: Config) -> Table:
    """Every key that is honoured with its value, then the keys that were read and change nothing."""
    rows = Table(title="configuration", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("key", "value", "", "why"):
        rows.add_column(column, no_wrap=column in ("key", ""))
    for name, value, is_given in _values(cfg):
        rows.add_row(name, str(value), "given" if is_given else "default", "", style=None if is_given else "dim")
    for note in cfg.notes:
        rows.add_row(note.key, str(note.value), note.kind, note.reason, style="yellow")
    return rows


def _values(block: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    for key in type(block).model_fields:
        value = getattr(block, key)
        if isinstance(value, BaseModel):
            yield from _values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value, key in block.model_fields_set


def reference() -> str:
    """The configuration reference as Markdown, made from the models."""
    lines = [
        "# Configuration",
        "",
        "Made by `python -m fzero config --reference`. The keys are DeepSpeed's; a file that you use there is read here.",
        "`python -m fzero config FILE` shows what it comes to. A key is honoured (the first tables), accepted because it has",
        "nothing to do here, or known and not honoured yet, which is an error. Any other key is an error with the nearest",
        'name. A value `"auto"` counts as left out.',
        "",
        *_section("Top level", Config, skip=("optimizer", "scheduler", "zero_optimization")),
        *_section("`zero_optimization`", Config.model_fields["zero_optimization"].annotation),
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
    lines += ["## Accepted", "", "| key | why it has nothing to do |", "| --- | --- |"]
    lines += [f"| `{key}` | {reason} |" for key, reason in ACCEPTED.items()]
    lines += ["", "## Not honoured yet", ""]
    lines += [
        "These are errors, unless the value switches them off: `null`, `false`, a block with `enabled: false` or "
        '`device: "none"`, or one of '
        + ", ".join(f"`{key}: {str(value).lower()}`" for key, value in sorted(OFF.items()))
        + ".",
        "",
        ", ".join(f"`{key}`" for key in sorted(NOT_YET)) + ".",
        "",
    ]
    return "\n".join(lines)


def _section(title: str, block: Any, *, level: int = 2, skip: tuple[str, ...] = ()) -> list[str]:
    lines = [f"{'#' * level} {title}", "", "| key | default | meaning |", "| --- | --- | --- |"]
    for name, field in block.model_fields.items():
        if name not in skip:
            default = "required" if field.is_required() else f"`{field.default}`"
            meaning = re.sub(r"\s+", " ", field.description or "")
            lines.append(f"| {_spellings(name, field.alias)}{_choices(field.annotation)} | {default} | {meaning} |")
    return [*lines, ""]


def _spellings(name: str, alias: str | None) -> str:
    return f"`{name}`" + (f" or `{alias}`" if alias else "")


def _choices(annotation: Any) -> str:
    choices = [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return f" ({', '.join(choices)})" if choices else ""
