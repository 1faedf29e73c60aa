"""`DirectBackward`: a backward that the script starts itself, `loss.backward()` or
`torch.autograd.backward`.

    loss = criterion(engine(x), y)
    loss.backward()  # in fp16: engine.scale(loss).backward()
    engine.step()

Autograd reports it in three places, and the first one begins the engine's backward: the
node of an output of the forward, a saved parameter that must be gathered again, and a
parameter's gradient. A callback of autograd ends it, when the last node has run. In
between everything is as in `engine.backward`, with the same collectives in the same
order, on all ranks.

After an error of autograd the callback does not come; then the next call of the engine
ends the backward (`settle`).

On a GPU autograd would run nodes in a thread of its own. The first forward of an engine
switches this off for the thread that calls it, so that the script's backwards run where
fzero's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from fzero.model.errors import OVER
from fzero.runtime.autograd_nodes import Visits, running_visits
from fzero.runtime.eager import ForwardBackward


class Enters(Protocol):
    """Makes the context of a backward: from its visits, its loss (None: not known) and
    whether the graph is kept.
    """

    def __call__(
        self, visits: Visits, loss: Tensor | None, *, retain_graph: bool
    ) -> AbstractContextManager[object]: ...


class DirectBackward:
    """The backwards of one engine that its script starts.

    Args:
        enters: makes the context in which autograd runs.
        passes: the same for a gradient by activations alone, such as
            `torch.autograd.grad(engine(x).sum(), x, create_graph=True)`; from whether the
            graph is kept.
        scales: whether the loss must be multiplied by the loss scale (fp16), by
            `Engine.scale`.
    """

    def __init__(
        self,
        enters: Enters,
        passes: Callable[[bool], AbstractContextManager[object]],
        *,
        scales: bool,
    ) -> None:
        self._enters, self._passes, self._scales = enters, passes, scales
        self._open: ExitStack | None = None
        self._loss: Tensor | None = None

    def scaled(self, loss: Tensor) -> None:
        """Records that the loss of the next backward was multiplied by the loss scale."""
        self._loss = loss.detach()

    def watch(self, work: ForwardBackward, outputs: Any) -> None:
        """Lets a backward from the outputs of a forward begin at their nodes, before
        modules that run again in it.
        """
        work.forwards.begins = lambda: self._begin(work)
        if work.transfer.device.type == "cuda":
            torch.autograd.set_multithreading_enabled(False)

        def begin_early(grads: Any) -> None:
            if work.status == "idle":
                self._begin(work)
            elif work.status == "over":
                raise RuntimeError(OVER)

        # in a transform of torch.func the outputs belong to the graph of its own backward
        is_func = torch._C._are_functorch_transforms_active()
        for tensor in tensors_in(() if is_func else outputs):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begin_early)

    def _begin(self, work: ForwardBackward) -> None:
        """Begins the engine's backward; or, if what autograd runs needs no gradients of
        parameters, lets it gather them.
        """
        if visits := running_visits(work):
            self._enter(visits)
        elif not work.gathers_nothing:
            self._open_until_the_end(self._passes(_keeps_graph()))

    def begin(self, work: ForwardBackward) -> None:
        """Begins the engine's backward, in which autograd brings a gradient from
        outside of the forwards.
        """
        self._enter(running_visits(work))

    @property
    def is_open(self) -> bool:
        """Whether such a backward runs."""
        return self._open is not None

    def _enter(self, visits: Visits) -> None:
        loss, self._loss = self._loss, None
        if self._scales and loss is None:
            raise RuntimeError(
                "loss.backward: in fp16 the loss must be multiplied by the loss scale, and was "
                "not; call engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._open_until_the_end(self._enters(visits, loss, retain_graph=_keeps_graph()))

    def _open_until_the_end(self, context: AbstractContextManager[object]) -> None:
        """Enters a context, and leaves it when autograd has run the last node."""
        with ExitStack() as stack:
            stack.enter_context(context)
            self._open = stack.pop_all()
        Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]

    def _end(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def settle(self) -> None:
        """Ends a backward that an error of autograd has interrupted; its gradients are
        lost.
        """
        opened, self._open = self._open, None
        if opened is not None:
            with suppress(InterruptedBackwardError), opened:
                raise InterruptedBackwardError


def _keeps_graph() -> bool:
    return torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[no-any-return]


class InterruptedBackwardError(RuntimeError):
    """An error of autograd has ended a backward that the script started."""


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """The tensors in the outputs of a module: in mappings, sequences and dataclasses of
    any depth.

    >>> [x.item() for x in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), "c"]})]
    [1, 2]
    """
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from tensors_in(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from tensors_in(value)
    elif is_dataclass(outputs) and not isinstance(outputs, type):
        for field in fields(outputs):
            yield from tensors_in(getattr(outputs, field.name))
