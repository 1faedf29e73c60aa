"""What does each module of a model do in a forward and a backward that run anyway: how long, and how many operations?

1. Hooks on every module tell when it is called and has returned. Its backward begins with the gradient of its output, and
   ends with that of its input, when all who read that have given theirs; where no input needs a gradient, when the backward
   of another module begins, or the whole ends.
2. An operator of the forward belongs to the module that is being called. Autograd numbers the nodes of its graph as they are
   made, so that in the backward a node's number tells which call made it.
3. What runs with gradients on inside a backward is a forward that runs again (activation checkpointing).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from fzero.common.flops import Counting
from fzero.profiling.reports import ModuleProfile

Part = Literal["forward", "backward", "again"]
_next_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Of the node that autograd makes next, on this thread."""


class _Span(NamedTuple):
    """The numbers of the nodes that a call made: from `start`, and up to `stop[0]`, which is told at its end."""

    start: int
    stop: list[int]
    name: str
    around: int
    """The place of the call that it is a part of; -1 for none."""


class _Backward:
    """The backward of one call: seconds at which it began and ended."""

    __slots__ = ("begin", "end", "name")

    def __init__(self, name: str) -> None:
        self.name, self.begin, self.end = name, float("inf"), 0.0


class ModuleTimer:
    """Times, and counts, the modules of a model inside `forward()` and `backward()`, any number of each.

    Args:
        model: whose modules are watched. Nothing of it is read but its modules' names.
        now: seconds; on a device that computes by itself it waits for that.
        counts: whether operations are counted, which costs every operator a few microseconds.
    """

    def __init__(self, model: nn.Module, now: Callable[[], float], *, counts: bool) -> None:
        self._model, self._now, self._counts = model, now, counts
        self._handles: list[Any] = []
        self._stack: list[tuple[str, float, int]] = []  # name, begin, place of its span
        self._spans: list[_Span] = []
        self._starts: list[int] = []
        self._part: Part = "forward"
        self._calls: list[_Backward] = []
        self._open: list[_Backward] = []  # those that end when another module's begins
        self.seconds: dict[str, defaultdict[str, float]] = {
            "forward": defaultdict(float),
            "backward": defaultdict(float),
        }
        self.flops: dict[Part, Counter[str]] = {"forward": Counter(), "backward": Counter(), "again": Counter()}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, the model runs, and what makes a loss of its outputs."""
        with self._watching("forward"):
            self._enter("")
            try:
                yield
            finally:
                self._leave("")

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, autograd runs."""
        began = self._now()
        with self._watching("backward"):
            yield
        self.seconds["backward"][""] += self._now() - began
        self._close(self._open)
        for call in self._calls:
            if call.begin < call.end:
                self.seconds["backward"][call.name] += call.end - call.begin
            call.begin, call.end = float("inf"), 0.0  # another backward may go through it

    def profiles(self) -> tuple[ModuleProfile, ...]:
        """What was found of every module that was called, parents before children. The watch is over."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return tuple(self._profiles())

    # --- hooks ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _watching(self, part: Literal["forward", "backward"]) -> Iterator[None]:
        self._part, hooks = part, []
        for name, module in self._model.named_modules():
            if name:  # the whole model is what runs inside, whoever calls it
                hooks.append(module.register_forward_pre_hook(self._before(name)))
                after = self._after(name)  # always: torch's checkpoint raises when it has what the backward needs
                hooks.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        try:
            with Counting(self._count) if self._counts else nullcontext():
                yield
        finally:
            self._stack.clear()
            for hook in hooks:
                hook.remove()

    def _before(self, name: str) -> Callable[..., None]:
        return lambda module, args: self._enter(name)

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            self._leave(name)
            outs = [x for x in _tensors(out) if x.requires_grad]
            if outs:
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
            found, began, place = self._stack.pop()
            self._spans[place].stop.append(_next_number())
            if found == name:
                if self._part == "forward":
                    self.seconds["forward"][name] += self._now() - began
                return

    def _watch(self, call: _Backward, outs: list[Tensor], ins: list[Tensor]) -> None:
        def begin(grad: Any) -> None:
            now = self._now()
            self._close([other for other in self._open if not call.name.startswith(f"{other.name}.")], now)
            if call.begin == float("inf"):
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

    # --- counting ------------------------------------------------------------------------------------------------

    def _count(self, flops: int) -> None:
        part = "again" if self._part == "backward" and torch.is_grad_enabled() else self._part
        for name in self._names_of_call() if self._stack else self._names_of_node():
            self.flops[part][name] += flops

    def _names_of_call(self) -> set[str]:
        names = {"", *(name for name, _, _ in self._stack)}
        if self._part == "backward":  # what runs again is not called by the module that it is a part of
            names |= {
                ".".join(parts[:n]) for name in names for parts in [name.split(".")] for n in range(1, len(parts))
            }
        return names

    def _names_of_node(self) -> set[str]:
        """The modules by whose calls the present node of the backward was made."""
        names, node = {""}, torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        place = bisect_right(self._starts, number) - 1
        while place >= 0:
            span = self._spans[place]
            if not span.stop or number < span.stop[0]:
                names.add(span.name)
            place = span.around
        return names

    def _profiles(self) -> Iterator[ModuleProfile]:
        around: list[str] = []  # the names of the modules that the next one may be a part of
        for name, module in self._model.named_modules():
            if name not in self.seconds["forward"]:
                continue  # a list of modules, or one that is not used
            while around and around[-1] and not name.startswith(f"{around[-1]}."):
                around.pop()
            yield ModuleProfile(
                name, type(module).__name__, len(around), sum(param.numel() for param in module.parameters()),
                self.flops["forward"][name], self.flops["backward"][name],
                self.seconds["forward"][name], self.seconds["backward"].get(name, 0.0), self.flops["again"][name],
            )  # fmt: skip
            around.append(name)


def _tensors(tree: Any) -> list[Tensor]:
    tree = dict(tree) if hasattr(tree, "items") else tree
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]
