"""Errors of a capture, in a few lines: the line of the model that cannot be captured, the reason, and the fix."""

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
    """Makes of what torch raises an error of a few lines, in whose place torch tells nothing.

    Args:
        model: its name.
        is_new: whether nothing is captured yet. Later warnings are left alone: to hush some shows others anew.
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
        raise CompileError(_what_stopped(error, model)) from None
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
    """The methods of loggers that tell something, those that packages have added, too: in a graph they tell nothing."""
    prefixes = ("debug", "info", "warn", "error", "exception", "critical", "log")
    return {method for name, method in vars(logging.Logger).items() if name.startswith(prefixes)}


def _what_stopped(error: BaseException, model: str) -> str:
    """Which line of whose code cannot be captured, and why, in a few words."""
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        return _what_changed(error, model)
    stack = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not frame.filename.startswith(_NOT_THE_MODEL) or _is_package(frame)]
    where = _told(frames[-1]) if frames else model
    users = [frame for frame in frames if not _is_package(frame)]
    if users and users[-1] is not frames[-1]:
        where += f"\ncalled from {_told(users[-1])}"
    error = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line.partition("raised exception ")[2] for line in lines if "raised exception " in line]
    why = " ".join(raised[:1] or lines[:2])
    if "returning intermediate with requires_grad_" in why:
        why = "the forward keeps a tensor that has a gradient, in an attribute say; keep its .detach()"
    return (
        f"{where}\ncannot be captured in one graph: {textwrap.shorten(why, 400)}\n"
        f"Change that line, or pass compile='block', which compiles block by block and runs the rest as it is."
    )


def _what_changed(error: BaseException, model: str) -> str:
    """What a step is captured anew for, all the time."""
    found = [frame.f_locals.get("recompile_reason") for frame, _ in traceback.walk_tb(error.__traceback__)]
    reason = next((text for text in found if text), "").partition("\n")[0].partition("(HINT")[0].partition(": ")[2]
    reason = textwrap.shorten(reason.replace("self._module._modules['model']", "model"), 300)
    return (
        f"{model}: captured {torch._dynamo.config.recompile_limit} times, for something changes from step to step: {reason}\n"
        f"Keep it the same (pad batches to a few shapes, keep what the model counts in a buffer), raise "
        f"torch._dynamo.config.recompile_limit, or pass compile='block'."
    )


_NOT_THE_MODEL = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), "<")


def _is_package(frame: traceback.FrameSummary) -> bool:
    """Whether that is code of an installed package, other than torch."""
    return "site-packages" in Path(frame.filename).parts and not frame.filename.startswith(_NOT_THE_MODEL[:2])


def _told(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}, line {frame.lineno}: {(frame.line or '').strip()!r}"
