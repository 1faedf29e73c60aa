"""`Recording`: what the steps of a run computed, as sums of each tensor (`Sums`), in a
file of JSON lines.

The file is `recording.jsonl` in the folder of the run. A line is complete, on the disk,
before its step returns; the rest of a line of a killed job is left out by readers. The
first line of each session (each `record` on the folder) says what ran: the header.
Another line is one step. Where a session repeats steps of an earlier one, after a
checkpoint was loaded, its lines replace those.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from fzero.common.safe_files import refuse_link
from fzero.digests.sums import Sums

NAME = "recording.jsonl"
FORMAT = 1

Tensors = dict[str, dict[str, Sums]]
"""The sums of tensors, by quantity and by name of the parameter: "weight", "gradient",
"module buffer", and the optimizer's under its own names."""


class RecordingError(ValueError):
    """A folder holds no recording, or a broken one, or one that does not fit."""


class ModelTensor(NamedTuple):
    """A parameter or module buffer of the recorded model."""

    shape: tuple[int, ...]
    unit: str


@dataclass(frozen=True, kw_only=True)
class Header:
    """What ran.

    Attributes:
        of: a step of fzero, or a plain loop around a module and an optimizer.
        params: the parameters of the model by name, in the order of their declaration.
        buffers: its module buffers.
        settings: in words: versions, commit, precision, stage, ranks, device, compile.
        every: the interval of the recorded steps.
    """

    of: Literal["step", "module"]
    params: dict[str, ModelTensor] = field(repr=False)
    buffers: dict[str, ModelTensor] = field(repr=False)
    settings: Mapping[str, str]
    every: int

    def line(self) -> dict[str, Any]:
        """The header as plain values."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> Self:
        """The inverse of `line`."""
        params, buffers = (
            {name: ModelTensor(tuple(shape), unit) for name, (shape, unit) in line[of].items()}
            for of in ("params", "buffers")
        )
        how: dict[str, Any] = {name: line[name] for name in ("of", "settings", "every")}
        return cls(params=params, buffers=buffers, **how)


class Recorded(NamedTuple):
    """One step of a recording.

    Attributes:
        step: the number of updates before it.
        numbers: loss, gradient norm, learning rate, loss scale; None where unknown.
        clip: the factor of the clipping, for gradients that were recorded before it;
            None for gradients as the optimizer got them.
        skipped: why there was no update, "" if there was one.
        given: the weights and module buffers at the begin of the step.
        made: the gradients; module buffers, optimizer state and weights at its end.
    """

    step: int
    numbers: dict[str, float | None]
    clip: float | None
    skipped: str
    given: Tensors
    made: Tensors

    def line(self, before: Recorded | None) -> dict[str, Any]:
        """The step as plain values. Quantities that the step before has left as they are
        given here are None.
        """
        left: Tensors = {} if before is None else before.made
        given = {of: None if x == left.get(of) else _texts(x) for of, x in self.given.items()}
        how = {"given": given, "made": {of: _texts(x) for of, x in self.made.items()}}
        return {
            **self._asdict(),
            "numbers": {of: finite(x) for of, x in self.numbers.items()},
            **how,
        }

    @classmethod
    def of_line(cls, line: Mapping[str, Any], before: Recorded | None) -> Self:
        """The inverse of `line`."""
        numbers = {name: None if x is None else float(x) for name, x in line["numbers"].items()}
        clip = None if line["clip"] is None else float(line["clip"])
        left: Tensors = {} if before is None else before.made
        given = {of: left[of] if x is None else _sums(x) for of, x in line["given"].items()}
        made = {of: _sums(x) for of, x in line["made"].items()}
        return cls(int(line["step"]), numbers, clip, line["skipped"], given, made)


def finite(x: Any) -> Any:
    """The value; as text, where it is a number for which JSON has no form."""
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def _texts(of: Mapping[str, Sums]) -> dict[str, str]:
    return {name: sums.text() for name, sums in of.items()}


def _sums(texts: Mapping[str, str]) -> dict[str, Sums]:
    return {name: Sums.of_text(text) for name, text in texts.items()}


@dataclass(frozen=True)
class Recording:
    """A recorded run.

    Attributes:
        path: its folder.
        header: that of the last session.
        steps: the steps in order. A step that was repeated after an overflow is there
            several times.
    """

    path: Path
    header: Header
    steps: tuple[Recorded, ...] = field(repr=False)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Reads a recording.

        Args:
            folder: that of `record`, or its file.

        Raises:
            RecordingError: there is no recording, or a line is broken.
        """
        path = Path(folder)
        file = path / NAME if path.is_dir() else path
        header: Header | None = None
        steps: list[Recorded] = []
        before: Recorded | None = None  # of this session
        for number, line in _lines(file):
            try:
                if "format" in line:
                    if line["format"] != FORMAT:
                        raise RecordingError(
                            f"recording: {file} must have format {FORMAT}, got {line['format']}; "
                            f"read it with the version of fzero that wrote it"
                        )
                    header, before = Header.of_line(line), None
                    continue
                step = Recorded.of_line(line, before)
            except RecordingError:
                raise
            except (KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
                raise _broken(file, number, error) from error
            if header is None:
                raise _broken(file, number, "no header before it")
            if before is None:
                steps = [other for other in steps if other.step < step.step]
            before = step
            steps.append(step)
        if header is None:
            raise RecordingError(
                f"recording: {file} must begin with a header, and is empty; record the run again"
            )
        return cls(file.parent, header, tuple(steps))


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The whole lines of a file, with their numbers. A last line without an end is one
    that a killed job began."""
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordingError(
            f"recording: {file} must be a file that fzero.record wrote, and cannot be read "
            f"({error.strerror}); pass the folder that was given to record"
        ) from None
    for number, line in enumerate(lines[:-1], 1):
        try:
            values = json.loads(line)
        except ValueError as error:
            raise _broken(file, number, error) from None
        if not isinstance(values, dict):
            raise _broken(file, number, "no object")
        yield number, values


def _broken(file: Path, number: int, why: object) -> RecordingError:
    return RecordingError(
        f"recording: line {number} of {file} must be one that fzero.record wrote, and is not "
        f"({why}); record the run again, or remove the line"
    )


class Writer:
    """Appends the lines of one session to a recording. Only one at a time may do so."""

    def __init__(self, folder: Path, header: Header) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        refuse_link(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._begin(path, header)
        except BaseException:
            self.close()
            raise

    def _begin(self, path: Path, header: Header) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordingError(
                f"record: folder must be written by one run at a time, and another one writes "
                f"{path}; pass another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        if path.stat().st_size:
            whole = path.read_bytes()
            if not whole.endswith(b"\n"):  # a killed job's
                os.ftruncate(self._fd, whole.rfind(b"\n") + 1)
            if b"\n" in whole:
                before = Recording.load(path).header.params
                check_same_model(path, before, "this run", header.params)
        self.write(header.line())

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends a line. It is on the disk when this returns."""
        packed = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        while packed:
            packed = packed[os.write(self._fd, packed) :]
        os.fsync(self._fd)

    def close(self) -> None:
        """Lets another run write."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        self.close()


def check_same_model(
    first: object, a: Mapping[str, ModelTensor], second: object, b: Mapping[str, ModelTensor]
) -> None:
    """Raises a RecordingError unless two runs have parameters of the same names and
    shapes.
    """
    for name in [*a, *b]:
        x, y = a.get(name), b.get(name)
        if x is None or y is None or x.shape != y.shape:
            found = [f"of shape {z.shape}" if z else "missing" for z in (x, y)]
            raise RecordingError(
                f"recording: the runs must have the same tensors, but {name!r} is {found[0]} in "
                f"{first} and {found[1]} in {second}; compare runs of one model, and record each "
                f"run in a folder of its own"
            )
