"""Errors of a capture in a few lines: the line of the model that cannot be captured,
the reason, and the fix.
"""

from __future__ import annotations

import sysconfig
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fzero.comms.hangs.failures import failed
from fzero.comms.stacked import VmapError
from fzero.comms.traced import collective_that_raised
from fzero.config.config import ConfigError
from fzero.graph.remat import RematError
from fzero.graph.schedule import CompileError
from fzero.model.errors import ParameterError

_OWN = (RematError, VmapError, ParameterError, ConfigError)


@contextmanager
def in_one_graph(model: str) -> Iterator[None]:
    """Raises CompileError, in a few lines, for what a capture of the body raises;
    errors of fzero's own stay as they are.

    Args:
        model: the name of its class.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, _OWN) or _is_raised_by_fzero(error):
            raise
        raise CompileError(_reason(error, model)) from None


@contextmanager
def in_collectives(model: str) -> Iterator[None]:
    """Raises CollectiveError for an error of a collective in a graph."""
    try:
        yield
    except RuntimeError as error:
        collective = collective_that_raised(error)
        if collective is None:
            raise
        raise failed(f"{collective} in the compiled step of {model}", error) from error


def too_often(model: str, num_graphs: int, reason: str | None) -> CompileError:
    """The error for a function that would be captured in every step."""
    return CompileError(
        f"{model}: captured {num_graphs} times, because a value changes from step to step: "
        f"{reason}\nKeep it the same (pad batches to a few shapes, count in a module buffer), "
        f"raise most_graphs of step.program.compiled, or pass compile='block'."
    )


def no_block(name: str, error: Exception) -> CompileError:
    """The error for a block that torch.compile cannot compile."""
    return CompileError(
        f"unit {name!r}: torch.compile cannot compile its forward: "
        f"{textwrap.shorten(str(error), 600)}\nLeave compile='block' out, which shows whether the "
        f"forward itself raises; name other modules in units=, or change that line."
    )


def _is_raised_by_fzero(error: Exception) -> bool:
    """Whether fzero has found the fault, such as a loss that is no scalar, and says so."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and last.filename.startswith(_FZERO)


def _reason(error: BaseException, model: str) -> str:
    """The line that cannot be captured, the user's line that calls it, the reason and
    the fix.
    """
    stack = traceback.extract_tb(error.__traceback__)
    frames = [
        frame
        for frame in stack
        if not frame.filename.startswith(_NOT_THE_MODEL) or _is_package(frame)
    ]
    where = _location(frames[-1]) if frames else model
    users = [frame for frame in frames if not _is_package(frame)]
    if users and users[-1] is not frames[-1]:
        where += f"\ncalled from {_location(users[-1])}"
    return (
        f"{where}\ncannot be captured in one graph: {textwrap.shorten(_text(error), 400)}\n"
        f"Change that line, or pass compile='block', which compiles block by block and runs the "
        f"rest eagerly."
    )


def _text(error: BaseException) -> str:
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return f"it needs the values of a tensor ({error.func}), which a graph does not know"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


_FZERO = str(Path(__file__).parents[1])
_NOT_THE_MODEL = (_FZERO, str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), "<")


def _is_package(frame: traceback.FrameSummary) -> bool:
    """Whether the frame is in an installed package other than torch."""
    return "site-packages" in Path(frame.filename).parts and not frame.filename.startswith(
        _NOT_THE_MODEL[:2]
    )


def _location(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}, line {frame.lineno}: {(frame.line or '').strip()!r}"
