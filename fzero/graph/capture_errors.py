"""Errors of a capture in a few lines: the line of the model that cannot be captured, the reason, and the fix."""

from __future__ import annotations

import logging
import sysconfig
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.exc

from fzero.comms.failures import failed
from fzero.comms.stacked import VmapError
from fzero.comms.traced import collective_that_raised
from fzero.graph.remat import RematError
from fzero.graph.schedule import CompileError
from fzero.runtime.own_params import ParameterError


@contextmanager
def one_graph(model: str, *, is_new: bool) -> Iterator[None]:
    """Replaces torch's errors by one of a few lines, and silences the logs that would repeat it.

    Args:
        model: the name of its class.
        is_new: whether nothing is captured yet. Later warnings are not filtered: a filter would show others once more.

    Raises:
        CompileError: the body cannot be captured in one graph.
    """
    for logger in _TALKATIVE:
        logger.addFilter(_is_quiet)
    try:
        with warnings.catch_warnings() if is_new else nullcontext():
            if is_new:
                warnings.filterwarnings("ignore", module=r"torch\._dynamo")
            yield
    except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
        if isinstance(inner := getattr(error, "inner_exception", None), RematError | VmapError | ParameterError):
            raise inner from None
        raise CompileError(_reason(error, model)) from None
    except RuntimeError as error:
        collective = collective_that_raised(error)
        if collective is None:
            raise
        raise failed(f"{collective} in the compiled step of {model}", error) from error
    finally:
        for logger in _TALKATIVE:
            logger.removeFilter(_is_quiet)


_TALKATIVE = [logging.getLogger(name) for name in ("torch._dynamo.convert_frame", "torch._subclasses.fake_tensor")]


def _is_quiet(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING


def logging_methods() -> set[Callable[..., Any]]:
    """The logging methods of `logging.Logger`, including those that packages add; Dynamo skips them in a graph."""
    prefixes = ("debug", "info", "warn", "error", "exception", "critical", "log")
    return {method for name, method in vars(logging.Logger).items() if name.startswith(prefixes)}


def _reason(error: BaseException, model: str) -> str:
    """The line that cannot be captured, the user's line that calls it, the reason and the fix."""
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        return _recompile_reason(error, model)
    stack = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not frame.filename.startswith(_NOT_THE_MODEL) or _is_package(frame)]
    where = _location(frames[-1]) if frames else model
    users = [frame for frame in frames if not _is_package(frame)]
    if users and users[-1] is not frames[-1]:
        where += f"\ncalled from {_location(users[-1])}"
    error = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line.partition("raised exception ")[2] for line in lines if "raised exception " in line]
    why = " ".join(raised[:1] or lines[:2])
    if "returning intermediate with requires_grad_" in why:
        why = "the forward stores a tensor that requires grad (in an attribute, say); store its .detach()"
    return (
        f"{where}\ncannot be captured in one graph: {textwrap.shorten(why, 400)}\n"
        f"Change that line, or pass compile='block', which compiles block by block and runs the rest eagerly."
    )


def _recompile_reason(error: BaseException, model: str) -> str:
    """The guard that fails in every step, and so causes a new capture."""
    reasons = [frame.f_locals.get("recompile_reason") for frame, _ in traceback.walk_tb(error.__traceback__)]
    reason = next((text for text in reasons if text), "").partition("\n")[0].partition("(HINT")[0].partition(": ")[2]
    reason = textwrap.shorten(reason.replace("self._module._modules['model']", "model"), 300)
    return (
        f"{model}: captured {torch._dynamo.config.recompile_limit} times, because a value changes from step to step: {reason}\n"
        f"Keep it the same (pad batches to a few shapes, count in a module buffer), raise "
        f"torch._dynamo.config.recompile_limit, or pass compile='block'."
    )


_NOT_THE_MODEL = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), "<")


def _is_package(frame: traceback.FrameSummary) -> bool:
    """Whether the frame is in an installed package other than torch."""
    return "site-packages" in Path(frame.filename).parts and not frame.filename.startswith(_NOT_THE_MODEL[:2])


def _location(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}, line {frame.lineno}: {(frame.line or '').strip()!r}"
