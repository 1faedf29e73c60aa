"""`Watched`: the digests of what one step computes, in the order in which it computes
them.

They are of the state that the step is given, of each parameter when its module reads it,
of the outputs of each unit, of the gradients that reach a unit's inputs and its
parameters, of the reduced gradients, and of the state and the metrics at the end. A step
in graphs shows the first and the last three only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import get_gradient_edge

from fzero.digests.digest import Digest, digest
from fzero.runtime import phases
from fzero.state import Metrics, TrainState
from fzero.step import TrainStep, end
from fzero.storage.file_tensor import FileTensor
from sharding import Replicated, Sharded, Spec

Phase = Literal["given state", "gather", "forward", "backward", "reduction", "update"]
OWN = ("rng", "hook_states")
"""The parts of a state in which ranks differ."""


class Watched(NamedTuple):
    """One tensor of a step.

    Attributes:
        unit: its unit, "" for none.
        tensor: its name.
        shard: ranks with the same number hold the same values; None if no other rank
            needs to hold them.
    """

    phase: Phase
    unit: str
    tensor: str
    digest: Digest
    shard: int | None = None

    @property
    def place(self) -> tuple[str, str, str]:
        """What it is, without its values."""
        return self.phase, self.unit, self.tensor


class WatchedStep(NamedTuple):
    """A step that ran: its new state and metrics, or its error; and what was watched."""

    result: tuple[TrainState[Tensor], Metrics] | FloatingPointError
    seen: list[Watched]


def watched_step(step: TrainStep, state: TrainState[Tensor], batch: Any) -> WatchedStep:
    """Runs a step. A loss or gradient that is not finite is a result, too: a fault may
    have made it.

    *Collective:* every rank, as `step(state, batch)`.
    """
    run, found = step.runtime, _Watcher(step)
    found.see_state("given state", state)
    state, micro_batches = phases.check(run, state, batch)
    with found.hooks():
        collected = run.program(run, state, micro_batches)
    if collected.transfer is not None:
        collected.transfer.settle()  # gradients in files are read below
    if collected.outcome is None:
        specs = step.specs.grads
        for key, grad in collected.state.grads.items():
            found.see("reduction", found.unit_of_buffer[key], f"grads {key}", grad, specs[key].spec)
    try:
        new, metrics = end(run, collected)
    except FloatingPointError as error:
        return WatchedStep(error, found.seen)
    found.see_state("update", new)
    for name, number in metrics._asdict().items():
        found.see("update", "", f"metrics {name}", number, Replicated())
    return WatchedStep((new, metrics), found.seen)


class _Watcher:
    """Collects what is watched in one step of one rank."""

    def __init__(self, step: TrainStep) -> None:
        self.step, self.seen = step, list[Watched]()
        plan = step.plan
        self.unit_of_buffer = {b.key: unit.name for unit in plan.units for b in unit.buffers}

    def see(self, phase: Phase, unit: str, tensor: str, x: Any, spec: Spec | None = None) -> None:
        """Adds a tensor; with its spec, if ranks hold the same values."""
        if not isinstance(x, Tensor | FileTensor) or (isinstance(x, Tensor) and _is_wrapped(x)):
            return
        shard = None
        if isinstance(spec, Sharded):
            shard = self.step.plan.mesh.shard_of(self.step.data_rank, spec)
        elif isinstance(spec, Replicated):
            shard = 0
        self.seen.append(Watched(phase, unit, tensor, digest(x), shard))

    def see_state(self, phase: Phase, state: TrainState[Tensor]) -> None:
        """Adds the tensors of a state, but for the left-over gradients."""
        for part in TrainState.__annotations__:
            if part != "grads":
                paths, leaves, _ = optree.tree_flatten_with_path(getattr(state, part))
                specs = optree.tree_leaves(getattr(self.step.specs, part))
                for path, leaf, spec in zip(paths, leaves, specs, strict=True):
                    name = " ".join((part, *map(str, path)))
                    unit = self.unit_of_buffer.get(str(path[0]) if path else "", "")
                    self.see(phase, unit, name, leaf, None if part in OWN else spec.spec)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Inside, the modules of an eager step are watched."""
        handles: list[Any] = []
        if self.step.spec.compile is None:
            units = {unit.name for unit in self.step.plan.units}
            for name, module in self.step.spec.model.named_modules():
                handles.append(module.register_forward_pre_hook(self._reads(name, handles)))
                if name in units:
                    handles += [
                        module.register_forward_pre_hook(
                            self._enters(name, handles), with_kwargs=True
                        ),
                        module.register_forward_hook(self._leaves(name)),
                    ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _reads(self, prefix: str, handles: list[Any]) -> Callable[..., None]:
        param_units = self.step.plan.param_units

        def hook(module: nn.Module, args: Any) -> None:
            for key, param in module._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                if param is None or name not in param_units:
                    continue
                unit = param_units[name][0].name
                self.see("gather", unit, f"parameter {name}", param, Replicated())
                self._watch_gradient(param, unit, f"gradient of {name}", handles)

        return hook

    def _enters(self, unit: str, handles: list[Any]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            for index, x in enumerate(_tensors((args, kwargs))):
                if x.requires_grad and torch.is_grad_enabled() and not _is_wrapped(x):
                    name = f"gradient of its input {index}"
                    # of the tensor: the node of a leaf may be gone before it is used
                    handles.append(x.register_hook(partial(self._arrives, unit, name)))  # type: ignore[no-untyped-call]

        return hook

    def _leaves(self, unit: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            for index, x in enumerate(_tensors(out)):
                self.see("forward", unit, f"output {index}", x)

        return hook

    def _arrives(self, unit: str, name: str, grad: Tensor | None) -> None:
        self.see("backward", unit, name, grad)

    def _watch_gradient(self, x: Tensor, unit: str, name: str, handles: list[Any]) -> None:
        if x.requires_grad and torch.is_grad_enabled():
            # of the node, because a parameter may get no hook of its own in a forward
            edge = get_gradient_edge(x)

            def arrives(grads: Sequence[Tensor | None]) -> None:
                self._arrives(unit, name, grads[edge.output_nr])

            handles.append(edge.node.register_prehook(arrives))


def _is_wrapped(x: Tensor) -> bool:
    """Whether it is inside of a transform of torch.func, and has no values to read."""
    return bool(is_functorch_wrapped_tensor(x))


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]
