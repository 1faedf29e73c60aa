"""A parser of command lines whose error about an unknown flag names the nearest known
one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

UNKNOWN = "unrecognized arguments: "  # the start of argparse's message, which lists them


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser`, whose error about an unknown flag names the nearest
    known one.

    Args:
        also: other words for flags that users may try, with the flag that each means.
        how: the arguments of argparse.

    >>> parser = Parser(prog="fzero run", also={"world": "--num_procs"}, add_help=False)
    >>> _ = parser.add_argument("--num_procs")
    >>> parser.nearest("--num-proc=2"), parser.nearest("--word")
    ('--num_procs', '--num_procs')
    """

    def __init__(self, *, also: Mapping[str, str] | None = None, **how: Any) -> None:
        super().__init__(**how)
        self._also = {**(also or {})}
        self._words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The same as argparse's; keeps the words for an error."""
        self._words = [*(args or ())]
        return super().parse_known_args(args, namespace)

    def nearest(self, word: str) -> str | None:
        """The flag whose name is nearest to `word`, if one is near."""
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        flags = {_name(flag): flag for flag in reversed(known)}  # the first of two spellings counts
        near = get_close_matches(_name(word), names := {**self._also, **flags}, 1)
        return names[near[0]] if near else None

    def error(self, message: str) -> NoReturn:
        """Ends the process with code 2, after the message and the nearest flags."""
        if message.startswith(UNKNOWN):
            words: Sequence[str] = message.removeprefix(UNKNOWN).split()
        else:
            # if an argument is missing, all words are flags of this parser: none belongs to a
            # script
            words = self._words if "required" in message else ()
        for word in dict.fromkeys(
            word.partition("=")[0] for word in words if word.startswith("--")
        ):
            known = [flag for flag in self._option_string_actions if flag.startswith(word)]
            if not (known if self.allow_abbrev else word in known):
                near = self.nearest(word)
                hint = f"did you mean {near}?" if near else f"{self.prog} --help lists all"
                message += f"; {word} is no flag, {hint}"
        super().error(message)


def _name(flag: str) -> str:
    return flag.partition("=")[0].lstrip("-").replace("-", "_")
