"""The keys of a configuration without effect, and those that are refused by their name
alone.

`split_keys` walks a configuration once, before the models check any value: keys without
effect become notes, keys that cannot be honoured become problems, and the rest is kept
for the models.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from fzero.config.deepspeed_keys import (
    ACCEPTED,
    HARMLESS,
    INNER,
    INSTEAD,
    KNOWN,
    NOT_YET,
    OFF,
    REFUSED,
    SPELLINGS,
    SWITCHES,
    TYPES,
)

SAYS_NOT_YET = "fzero knows this DeepSpeed key and does not honour it yet"


AUTO = (
    "transformers' Trainer fills it in; elsewhere left to fzero: the default, or what "
    "follows from other keys"
)
"""The reason of a value that is `"auto"`."""


class Note(NamedTuple):
    """A key that was read and has no effect, alone or (`conflict`) beside the other
    keys.
    """

    key: str
    value: Any
    kind: Literal["accepted", "off", "auto", "not yet", "conflict"]
    reason: str


class SplitKeys(NamedTuple):
    """The keys for the models, notes of the keys without effect, and one line for each
    refused key.
    """

    kept: dict[str, Any]
    notes: tuple[Note, ...]
    problems: tuple[str, ...]


def split_keys(
    source: Mapping[str, Any], prefix: str = "", *, honoured: Collection[str] = frozenset()
) -> SplitKeys:
    """Splits a configuration into keys for the models, keys without effect, and keys
    that are refused by their name.

    Args:
        source: the configuration, or a block of it.
        prefix: the dotted name of the block, with a dot at its end.
        honoured: dotted names that this configuration honours and others do not.

    >>> found = split_keys(
    ...     {"steps_per_print": 10, "amp": {"enabled": True}, "gradient_clipping": 0.5}
    ... )
    >>> (
    ...     found.kept,
    ...     [note.key for note in found.notes],
    ...     [line.partition(":")[0] for line in found.problems],
    ... )
    ({'gradient_clipping': 0.5}, ['steps_per_print'], ['amp'])
    >>> split_keys(
    ...     {"optimizer": {"params": {"amsgrad": True}}}, honoured={"optimizer.params.amsgrad"}
    ... ).problems
    ()
    """
    kept: dict[str, Any] = {}
    notes: list[Note] = []
    problems: list[str] = []
    for key, value in source.items():
        given = f"{prefix}{key}"
        name = SPELLINGS.get(given, given)
        twin = INSTEAD.get(name, name).removeprefix(prefix)
        if twin != key and twin in source:
            problems.append(
                f"{given}: stands beside {twin!r}, which is the same; remove one of them"
            )
        elif name in INSTEAD and value is True:
            kept[twin] = {"device": "cpu"}  # before DeepSpeed 0.4
        elif name in ACCEPTED:
            notes.append(Note(given, value, "accepted", ACCEPTED[name]))
            problems += _wrong_type(given, name, value)
            problems += _unknown_inside(name, value)
        elif value == "auto":
            notes.append(Note(given, value, "auto", AUTO))
            if name not in NOT_YET or name in honoured:
                kept[key] = value  # the block drops it where it has such a key
        elif name in honoured:
            kept[key] = value
        elif name in NOT_YET:
            problems += _unknown_inside(name, value)
            if is_off(name, value):
                notes.append(
                    Note(given, value, "off", "it switches off what fzero does not have yet")
                )
            elif name in HARMLESS:
                notes.append(Note(given, value, "not yet", HARMLESS[name]))
            else:
                problems.append(f"{given}: {SAYS_NOT_YET}; {REFUSED[name]}")
        elif name == "zero_optimization" and isinstance(value, bool):
            kept[name] = {"stage": int(value)}  # before DeepSpeed 0.3: true is stage 1
        elif isinstance(value, Mapping):
            kept[key], inner_notes, inner_problems = split_keys(
                value, f"{given}.", honoured=honoured
            )
            notes += inner_notes
            problems += inner_problems
        else:
            kept[key] = value
    return SplitKeys(kept, tuple(notes), tuple(problems))


def is_off(name: str, value: Any) -> bool:
    """Whether a value switches a key off that is not honoured yet.

    >>> is_off("tensorboard", {"output_path": "logs"}), is_off("compile", {"deepcompile": True})
    (True, False)
    """
    if not isinstance(value, Mapping):
        words = {"true": True, "false": False}
        now = words.get(value.lower(), value) if isinstance(value, str) else value
        off = OFF.get(name, False)
        return (
            now is None or now == "auto" or (now in off if isinstance(off, tuple) else now == off)
        )
    default = ("enabled", False) if "enabled" in children(name) else None
    switch = SWITCHES.get(name, default)
    if switch is None:
        return all(is_off(f"{name}.{key}", inner) for key, inner in value.items())
    return is_off(f"{name}.{switch[0]}", value.get(*switch))


def children(name: str) -> set[str]:
    """The keys of one of DeepSpeed's blocks that fzero does not honour; those of the
    top level for an empty name.
    """
    start = f"{name}." if name else ""
    return {
        known.removeprefix(start).partition(".")[0] for known in KNOWN if known.startswith(start)
    }


MOST_PLACES = 3
"""A key of more blocks than this, such as `enabled`, does not show which block was
meant.
"""


def unknown_key(
    location: str, honoured: Collection[str] = (), everywhere: Collection[str] = ()
) -> str:
    """The line for an unknown key: with the nearest name, or the blocks that have the
    key, or all names.

    Args:
        honoured: the keys of its block that fzero honours.
        everywhere: the dotted names of all keys that fzero honours.
    """
    block, _, key = location.rpartition(".")
    known = sorted({*honoured, *children(block)})
    places = {name: name.rpartition(".")[2] for name in {*KNOWN, *everywhere}}
    like = next(iter(difflib.get_close_matches(key, {*places.values()}, n=1, cutoff=0.9)), key)
    elsewhere = sorted(name for name, last in places.items() if last == like)
    nearest = (
        difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        or (elsewhere if len(elsewhere) <= MOST_PLACES else [])
        or difflib.get_close_matches(key, known, n=1)
    )
    hint = (
        f"did you mean {' or '.join(map(repr, nearest))}?"
        if nearest
        else f"known here: {', '.join(honoured or known)}"
    )
    return f"{location}: unknown key; {hint}"


def _unknown_inside(name: str, value: Any) -> Iterator[str]:
    """Lines for the keys of a block that DeepSpeed does not have."""
    known = children(name)
    if not isinstance(value, Mapping):
        if name in INNER and not is_off(name, value) and name not in ACCEPTED:
            yield (
                f"{name}: must be an object, got {value!r}; its keys are "
                f"{', '.join(sorted(known - {'*'}))}"
            )
        return
    for key, inner in value.items():
        if key in known:
            yield from _unknown_inside(f"{name}.{key}", inner)
        elif known and "*" not in known:
            yield unknown_key(f"{name}.{key}")


def _is_number(value: Any) -> bool:
    try:
        return float(value) is not None
    except (TypeError, ValueError):
        return False


_FITS: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "true": lambda value: str(value).lower() in ("true", "yes", "on", "1"),
    "false": lambda value: str(value).lower() in ("false", "no", "off", "0"),
    "a whole number": lambda value: (
        str(value).removeprefix("-").isdigit() or (isinstance(value, float) and value.is_integer())
    ),
    "a number": lambda value: not isinstance(value, bool) and _is_number(value),
    "a text": lambda value: isinstance(value, str),
    "an object": lambda value: isinstance(value, Mapping),
}

_TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names.split()}


def _wrong_type(given: str, name: str, value: Any) -> Iterator[str]:
    kind = _TYPE_OF.get(name)
    if (
        kind
        and value != "auto"
        and not any(_FITS[part](value) for part in kind.replace(" or ", ", ").split(", "))
    ):
        yield f"{given}: must be {kind}, got {value!r}"
