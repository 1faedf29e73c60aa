"""`Forwarder`: the errors of all ranks as one stream, in which an error that several
ranks raise alike is shown once.

1. A line that begins a traceback opens a block of its rank. The first rank's block is
  shown as it comes: it leads.
2. A block that begins like one that was shown is held back, as long as its lines are
  the same.
3. Where a line differs, all that was held is shown, in order. Where a rank ends or
  pauses with the same lines, a line says so.

So no line is lost, and the lines of a rank keep their order.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

HEADER = re.compile(r"\[(?:\S+ )?rank (\d+)\] ")
"""The prefix of a rank's line (`fzero.launch.agent.launch_config`), also of one on
another host.
"""
OF_TORCH = re.compile(r"^\[rank\d+\]: ?")
"""torch.distributed puts it before the lines of a traceback."""
LOGGED = re.compile(r"^\[[IWEF]\d{4} ")
"""A line that torch logs from C++, with the time: it is no part of an error."""
BEGINS = ("Traceback (most recent call last):", '  File "')
"""A traceback begins with the first; a script with a wrong syntax has the second alone.
"""
PAUSE = 2.0
"""Seconds without a line of a rank after which its block has ended."""
STALE = 30.0
"""Seconds after its last line during which a block is compared with those of other
ranks.
"""
MOST = 1000
"""Lines of a block."""


@dataclass(eq=False)
class _Block:
    """Lines of one rank since the beginning of a traceback.

    Attributes:
        held: the lines as they are to be shown; empty in a block that leads.
        lines: the same without what names the rank.
        like: the blocks that lead and begin with these lines; empty where this one
            leads.
        is_open: whether more lines may come.
    """

    rank: str
    held: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    like: list[_Block] = field(default_factory=list)
    is_open: bool = True
    last: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether the lines end as a traceback does, with the error."""
        return len(self.lines) > 1 and not self.lines[-1].startswith((" ", *BEGINS))


class Forwarder:
    """A text stream for the lines of all ranks; other text passes through. It may be
    written to by several threads.
    """

    def __init__(self, to: TextIO, pause: float = PAUSE) -> None:
        self._to, self._pause, self._lock = to, pause, threading.RLock()
        self._open: dict[str, _Block] = {}
        self._begun: dict[str, tuple[str, float]] = {}
        """Per rank: the unfinished line, and when it came. A log may be read before a
        line has ended.
        """
        self._leads: list[_Block] = []
        self._timer: threading.Timer | None = None
        self._last = _Block(""), {""}
        """The block that was shown last, and the ranks that have this error."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._to, name)

    def write(self, text: str) -> int:
        """Shows a line of a rank, or holds it back."""
        with self._lock:
            header = HEADER.match(text)
            if header is None:
                self._to.write(text)
            elif (whole := self._joined(header, text)).endswith("\n"):
                self._line(header[1], whole, OF_TORCH.sub("", whole[header.end() :]))
            else:
                self._begun[header[1]] = whole, time.monotonic()
                self._wait()
        return len(text)

    def _joined(self, header: re.Match[str], text: str) -> str:
        """The line whose beginning came before, if one did."""
        begun, _ = self._begun.pop(header[1], (header[0], 0.0))
        return begun + text[header.end() :]

    def finish(self) -> None:
        """Shows what is held back: there are no more lines."""
        with self._lock:
            for rank in [*self._begun]:
                self._end_line(rank)
            for block in [*self._open.values()]:
                self._close(block)
            if self._timer is not None:
                self._timer.cancel()
            self._to.flush()

    def has_shown_last(self, rank: int, log: Sequence[str]) -> bool:
        """Whether the last error that was shown is that with which a rank's log ends."""
        block, ranks = self._last
        lines = [OF_TORCH.sub("", line) for line in log]
        lines = [line for line in lines if not LOGGED.match(line)]
        return (
            str(rank) in ranks
            and bool(lines)
            and [line.rstrip() for line in block.lines[-1:]] == lines[-1:]
        )

    def _line(self, rank: str, text: str, line: str) -> None:
        block, now = self._open.get(rank), time.monotonic()
        if block is not None and LOGGED.match(line):
            self._close(block)
            block = None
        if block is None:
            if not line.startswith(BEGINS):
                self._to.write(text)
                return
            self._leads = [lead for lead in self._leads if now - lead.last < STALE]
            block = self._open[rank] = _Block(
                rank, like=[lead for lead in self._leads if lead.rank != rank]
            )
            self._wait()
            if not block.like:
                self._leads.append(block)
        block.lines.append(line)
        block.last = now
        self._add(block, text)
        if len(block.lines) > MOST and block.is_open:
            self._close(block)

    def _add(self, block: _Block, text: str) -> None:
        if block in self._leads:
            self._to.write(text)
            self._last = block, {block.rank}
            for other in [other for other in self._open.values() if block in other.like]:
                self._compare(other)
            return
        block.held.append(text)
        self._compare(block)

    def _compare(self, block: _Block) -> None:
        """Shows a block that is held back where it is like no other any more."""
        before, length = block.like, len(block.lines)
        block.like = [
            lead for lead in before if lead.lines[:length] == block.lines[: len(lead.lines)]
        ]
        block.like = [lead for lead in block.like if lead.is_open or length <= len(lead.lines)]
        if not block.like:
            ended = next((lead for lead in before if lead.lines == block.lines[:-1]), None)
            if ended is not None and _Block(block.rank, lines=block.lines[:-1]).is_whole:
                self._say_same(block, ended, length - 1)
                self._to.write(block.held[-1])
                block.is_open = False
                del self._open[block.rank]
            else:
                self._show(block)

    def _close(self, block: _Block) -> None:
        """Ends a block: after a pause, at a line that is no part of it, or at the end
        of its rank.
        """
        block.is_open = False
        self._open.pop(block.rank, None)
        if block in self._leads:
            return
        lead = next(
            (lead for lead in block.like if lead.lines[: len(block.lines)] == block.lines), None
        )
        if lead is not None and (
            block.is_whole or (len(block.lines) > 1 and block.lines == lead.lines)
        ):
            self._say_same(block, lead, len(block.lines))
        else:
            self._show(block)

    def _say_same(self, block: _Block, lead: _Block, num_lines: int) -> None:
        header = HEADER.match(block.held[0])
        assert header is not None
        self._to.write(
            f"{header[0]}has the error of rank {lead.rank}, in the same {num_lines} lines\n"
        )
        if lead is self._last[0]:
            self._last[1].add(block.rank)

    def _show(self, block: _Block) -> None:
        """Shows the lines of a block, which leads from here on."""
        self._to.write("".join(block.held))
        block.held, block.like = [], []
        self._leads.append(block)
        self._last = block, {block.rank}

    def _wait(self) -> None:
        if self._timer is None or not self._timer.is_alive():
            self._timer = threading.Timer(self._pause / 2, self._look)
            self._timer.daemon = True
            self._timer.start()

    def _look(self) -> None:
        """Ends blocks after a pause."""
        with self._lock:
            now = time.monotonic()
            for rank in [
                rank for rank, (_, came) in self._begun.items() if now - came > self._pause
            ]:
                self._end_line(rank)
            for block in [*self._open.values()]:
                if now - block.last > self._pause:
                    self._close(block)
            self._to.flush()
            self._timer = None
            if self._open or self._begun:
                self._wait()

    def _end_line(self, rank: str) -> None:
        text, _ = self._begun.pop(rank)
        header = HEADER.match(text)
        assert header is not None
        self._line(rank, f"{text}\n", f"{OF_TORCH.sub('', text[header.end() :])}\n")
