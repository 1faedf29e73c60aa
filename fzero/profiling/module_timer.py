"""`ModuleTimer`: the seconds and FLOPs of each module of a model, in a forward and
backward that the caller runs.

1. Hooks on every module record when it is called and when it returns. Its backward
   starts with the gradient of its output, and ends with the complete gradient of its
   input. If no input needs a gradient, it ends when the backward of another module
   starts, or with the backward of the model.
2. An operator of the forward belongs to the module that is being called. Autograd
   numbers the nodes of its graph as it creates them; in the backward, a node's number
   identifies the call that created it.
3. Operators that run with gradients enabled inside a backward are a recomputed forward
  (activation checkpointing).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from fzero.common.flops import Counting
from fzero.profiling.reports import ModuleProfile

Part = Literal["forward", "backward", "again"]
PARTS: tuple[Part, ...] = ("forward", "backward", "again")
_next_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The number of the node that autograd creates next, on this thread."""


class _Span(NamedTuple):
    """The numbers of the nodes that a call created: from `start` to `stop[0]`; `stop`
    is empty until the call ends.
    """

    start: int
    stop: list[int]
    name: str
    around: int  # the index of the enclosing call; -1 for none


@dataclass(slots=True, eq=False)
class _Backward:
    """The backward of one call: the times of its begin and end, in seconds."""

    name: str
    begin: float = math.inf
    end: float = 0.0


class ModuleTimer:
    """Times the modules of a model, or counts their operations, inside any number of
    `forward()` and `backward()`.

    Args:
        model: only its modules and their names are used.
        now: the time in seconds; on an asynchronous device it must synchronize first.
        counts: whether to count operations, which costs every operator a few
            microseconds.
    """

    def __init__(self, model: nn.Module, now: Callable[[], float], *, counts: bool) -> None:
        self._model, self._now, self._counts = model, now, counts
        self._handles: list[Any] = []
        self._stack: list[tuple[str, float, int]] = []  # name, begin, index of its span
        self._spans: list[_Span] = []
        self._starts: list[int] = []
        self._part: Part = "forward"
        self._calls: list[_Backward] = []
        self._open: list[_Backward] = []  # those that end when another module's backward begins
        self.seconds: dict[Part, defaultdict[str, float]] = {
            part: defaultdict(float) for part in PARTS[:2]
        }
        self.flops: dict[Part, Counter[str]] = {part: Counter() for part in PARTS}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """In the body, the model and the loss function run."""
        with self._watching("forward"):
            self._enter("")
            try:
                yield
            finally:
                self._leave("")

    @contextmanager
    def backward(self) -> Iterator[None]:
        """In the body, autograd runs."""
        began = self._now()
        with self._watching("backward"):
            yield
        self.seconds["backward"][""] += self._now() - began
        self._close(self._open)
        for call in self._calls:
            if call.begin < call.end:
                self.seconds["backward"][call.name] += call.end - call.begin
            call.begin, call.end = math.inf, 0.0  # another backward may run through the same call

    def profiles(self) -> tuple[ModuleProfile, ...]:
        """The profile of every module that was called, parents before children. Removes
        the hooks.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return tuple(self._profiles())

    # --- hooks ------------------------------------------------------------------------------------

    @contextmanager
    def _watching(self, part: Literal["forward", "backward"]) -> Iterator[None]:
        self._part, hooks = part, []
        for name, module in self._model.named_modules():
            if name:  # the model itself is timed by `forward`, whoever calls it
                hooks.append(
                    module.register_forward_pre_hook(
                        lambda module, args, name=name: self._enter(name)
                    )
                )
                # always: torch's checkpoint raises to stop a recomputation early
                after = self._after(name)
                hooks.append(
                    module.register_forward_hook(after, with_kwargs=True, always_call=True)
                )
        try:
            with Counting(self._count) if self._counts else nullcontext():
                yield
        finally:
            self._stack.clear()
            for hook in hooks:
                hook.remove()

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            self._leave(name)
            if outs := [x for x in _tensors(out) if x.requires_grad]:
                call = _Backward(name)
                self._calls.append(call)
                self._watch(call, outs, [x for x in _tensors((args, kwargs)) if x.requires_grad])

        return hook

    def _enter(self, name: str) -> None:
        around = self._stack[-1][2] if self._stack else -1
        start = max(_next_number(), *self._starts[-1:], 0)  # each thread has numbers of its own
        self._stack.append((name, self._now(), len(self._spans)))
        self._spans.append(_Span(start, [], name, around))
        self._starts.append(start)

    def _leave(self, name: str) -> None:
        while self._stack:  # more than one after an error that the model caught
            called, began, index = self._stack.pop()
            self._spans[index].stop.append(_next_number())
            if called == name:
                if self._part == "forward":
                    self.seconds["forward"][name] += self._now() - began
                return

    def _watch(self, call: _Backward, outs: list[Tensor], ins: list[Tensor]) -> None:
        def begin(grad: Any) -> None:
            now = self._now()
            self._close(
                [other for other in self._open if not call.name.startswith(f"{other.name}.")], now
            )
            if call.begin == math.inf:
                call.begin = now
                if not ins:
                    self._open.append(call)

        def end(grad: Any) -> None:
            call.end = self._now()

        self._handles.append(register_multi_grad_hook(outs, begin, mode="any"))
        self._handles += [x.register_hook(end) for x in ins]  # type: ignore[no-untyped-call]

    def _close(self, calls: list[_Backward], now: float | None = None) -> None:
        for call in list(calls):
            call.end = self._now() if now is None else now
            self._open.remove(call)

    # --- counting ---------------------------------------------------------------------------------

    def _count(self, flops: int) -> None:
        part = "again" if self._part == "backward" and torch.is_grad_enabled() else self._part
        for name in self._names_of_call() if self._stack else self._names_of_node():
            self.flops[part][name] += flops

    def _names_of_call(self) -> set[str]:
        names = {"", *(name for name, _, _ in self._stack)}
        if self._part == "backward":  # the parents of a recomputed module are not called again
            names |= {
                ".".join(name.split(".")[:n])
                for name in names
                for n in range(1, 1 + name.count("."))
            }
        return names

    def _names_of_node(self) -> set[str]:
        """The modules whose calls created the current node of the backward."""
        names, node = {""}, torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        index = bisect_right(self._starts, number) - 1
        while index >= 0:
            span = self._spans[index]
            if not span.stop or number < span.stop[0]:
                names.add(span.name)
            index = span.around
        return names

    def _profiles(self) -> Iterator[ModuleProfile]:
        around: list[str] = []  # the names of the modules that may contain the next one
        for name, module in self._model.named_modules():
            if name not in self.seconds["forward"]:
                continue  # a ModuleList, or an unused module
            while around and around[-1] and not name.startswith(f"{around[-1]}."):
                around.pop()
            flops = {f"{part}_flops": of_module[name] for part, of_module in self.flops.items()}
            forward, backward = (of_module[name] for of_module in self.seconds.values())
            num_params = sum(
                int(getattr(param, "ds_numel", param.numel())) for param in module.parameters()
            )
            yield ModuleProfile(
                name,
                type(module).__name__,
                len(around),
                num_params,
                forward=forward,
                backward=backward,
                **flops,
            )
            around.append(name)


def _tensors(tree: Any) -> list[Tensor]:
    tree = dict(tree) if hasattr(tree, "items") else tree
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]
