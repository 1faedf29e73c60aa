"""The table of one configuration: what each given key comes to. `fzero config FILE`
prints it.

fzero config FILE              # the keys of the file, in its order
fzero config FILE --defaults   # and those that it lacks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fzero.config.config import Config
from fzero.config.conflicts import values
from fzero.config.deepspeed_keys import SPELLINGS
from fzero.config.fields import block_of
from fzero.config.files import changed, read
from fzero.config.unused_keys import Note

_STYLES = {
    "given": None,
    "default": "dim",
    "no effect": "dim",
    "conflict": "red",
    "not yet": "magenta",
}

_STAND_INS = {"total_num_steps": 10**9, "cycle_min_lr": 0.0, "cycle_max_lr": 1e-3}
"""For parameters of a scheduler that are required, and that a program fills in."""
_FOLLOW = ("optimizer.params.lr", "scheduler.params.warmup_num_steps")
"""Keys whose conflicts depend on parameters of the scheduler."""


@dataclass(frozen=True, slots=True)
class ShownConfig:
    """A configuration beside the keys that it was read from.

    Attributes:
        given: the keys as they were given.
        cfg: the configuration; it may have stand-ins for required values that are
            `"auto"`.
    """

    given: Mapping[str, Any]
    cfg: Config

    @classmethod
    def load(cls, source: Mapping[str, Any] | str | Path) -> ShownConfig:
        """Reads a configuration as `Config.load` does, except that a required value may
        be `"auto"`.
        """
        given = read(source) if isinstance(source, str | Path) else source
        scheduler = given.get("scheduler")
        params = scheduler.get("params") if isinstance(scheduler, Mapping) else None
        found = params if isinstance(params, Mapping) else {}
        stand_ins = {key: value for key, value in _STAND_INS.items() if found.get(key) == "auto"}
        return cls(
            given,
            Config.load(
                changed(given, {"scheduler": {"params": stand_ins}}) if stand_ins else given
            ),
        )

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes of the keys without effect, and those of the keys that are
        `"auto"`.
        """
        named = {note.key for note in self.cfg.notes}
        stand_ins = [
            Note(name, "auto", "auto", "required: the program that fills the file in must set it")
            for name in (f"scheduler.params.{key}" for key in _STAND_INS)
            if name not in named and dict(_leaves(self.given, named)).get(name) == "auto"
        ]
        return (*self.cfg.notes, *stand_ins)

    @property
    def conflicts(self) -> tuple[Note, ...]:
        """The conflicts of the configuration that do not depend on a value that is
        `"auto"`.
        """
        is_open = any(
            note.kind == "auto" and note.key.startswith("scheduler.params.") for note in self.notes
        )
        return tuple(note for note in self.cfg.conflicts if not (is_open and note.key in _FOLLOW))

    def values(self) -> dict[str, Any]:
        """Every honoured key with its value; a value that is to be filled in is
        `"auto"`.
        """
        autos = {_ALIASES.get(note.key, note.key) for note in self.notes if note.kind == "auto"}
        return {name: "auto" if name in autos else value for name, value, _ in values(self.cfg)}

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """(key, value, kind, reason) of each given key, in the order of the file."""
        notes = {note.key: note for note in self.notes}
        found = self.values()
        conflicts = {note.key: note.reason for note in self.conflicts}
        given = dict(_leaves(self.given, notes))
        for name, raw in _leaves(self.given, notes):
            own = SPELLINGS.get(name, _ALIASES.get(name, name))
            if name in notes and own not in conflicts:
                yield name, _shown(raw, raw), notes[name].kind, notes[name].reason
            else:
                kind, reason = "conflict" if own in conflicts else "given", conflicts.get(own, "")
                switch = given.get(f"{name.rpartition('.')[0]}.enabled")
                if kind == "conflict" and switch == "auto":  # as in the files of transformers
                    kind, reason = "auto", "has an effect if the Trainer switches its block on"
                elif kind == "conflict" and switch is False:
                    kind = "no effect"
                yield name, _shown(raw, found.get(own, raw)), kind, reason

    def table(self, *, defaults: bool = False) -> Table:
        """The given keys, and with `defaults` all others."""
        rows = Table(title="configuration", title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in ("key", "value", "", "why"):
            rows.add_column(column, no_wrap=column in ("key", ""))
        shown, said = set(), set[str]()
        for name, value, kind, reason in self.rows():
            shown.add(SPELLINGS.get(name, _ALIASES.get(name, name)))
            if kind == "auto":  # most of a file may be: its reason is given once
                reason = "" if reason in said else reason
                said.add(reason)
            rows.add_row(name, Text(value), kind, Text(reason), style=_STYLES.get(kind, "yellow"))
        left = {name: value for name, value in self.values().items() if name not in shown}
        for name, value in left.items() if defaults else ():
            rows.add_row(name, Text(str(value)), "default", "", style=_STYLES["default"])
        if left and not defaults:
            rows.caption = f"{len(left)} other keys have their defaults; --defaults shows them"
            rows.caption_justify = "left"
        return rows


def _leaves(source: Mapping[str, Any], notes: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a configuration by dotted name; a block that a note describes is one
    key.
    """
    for key, value in source.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in notes:
            yield from _leaves(value, notes, f"{name}.")
        else:
            yield name, value


def _shown(raw: Any, value: Any) -> str:
    """A given value, and what it comes to where that is written differently."""
    now = list(value) if isinstance(value, tuple) else value
    if isinstance(raw, Mapping):
        return str(
            {key: "(hidden)" if key == "api_key" and inner else inner for key, inner in raw.items()}
        )
    if type(raw) in (int, float) and type(now) in (int, float) and raw == now:
        return str(now)
    return str(raw) if str(raw).lower() == str(now).lower() else f"{raw} → {now}"


def _aliases(block: Any, prefix: str = "", own_prefix: str = "") -> Iterator[tuple[str, str]]:
    """(another spelling of a key, its own name), for the keys of a block and of the
    blocks in it.
    """
    for name, field in block.model_fields.items():
        for spelling in {name, field.alias or name}:
            yield f"{prefix}{spelling}", f"{own_prefix}{name}"
            inner = block_of(field.annotation)
            if inner is not None and name not in ("optimizer", "scheduler"):
                yield from _aliases(inner, f"{prefix}{spelling}.", f"{own_prefix}{name}.")


_ALIASES = dict(_aliases(Config))
"""The own names of keys by all their spellings."""
