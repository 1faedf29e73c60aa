"""Doctests in docstrings become code blocks: Markdown would take `>>>` for a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^[ \t]*>>>.*\n?)(?:^[ \t]*\S.*\n?)*", re.MULTILINE)


def fenced(text: str) -> str:
    """Each run of lines from `>>>` to a blank line, as a code block of its own
    indentation.
    """

    def block(match: re.Match[str]) -> str:
        indent = re.match(r"[ \t]*", match[0])[0]  # type: ignore[index]
        return f"{indent}```pycon\n{match[0].rstrip()}\n{indent}```\n"

    return DOCTEST.sub(block, text)


class Doctests(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)
