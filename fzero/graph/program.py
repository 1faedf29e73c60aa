"""`GraphProgram`: a train step of one rank that runs as one graph, up to its gradients or with its update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar

import optree
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fzero.common.profiler_ranges import profiler_range
from fzero.comms.axes import AbstractAxis, LockstepAxis
from fzero.comms.records import CommRecord
from fzero.comms.stacked import Stacked
from fzero.config.config import ConfigError
from fzero.graph.capture import CompiledStep
from fzero.graph.captured import Captured
from fzero.graph.step_inputs import Rules
from fzero.runtime.batches import without_memory
from fzero.runtime.finish import finish
from fzero.runtime.hyper_check import HyperCheck
from fzero.runtime.metrics import check_alike
from fzero.runtime.module_binding import random_state
from fzero.runtime.step_runtime import StepRuntime
from fzero.runtime.update import TracedHyperparams
from fzero.state import Metrics, TrainState, taken
from sharding.views import torch_dtype

T = TypeVar("T")
State = TrainState[Tensor]


@dataclass(frozen=True)
class GraphProgram:
    """A step as one graph.

    Attributes:
        compiled: the graph, captured in the first call for each shape of batch.
        hyperparams: the tensors from which the graph reads what changes about its update.
        until: what the graph ends with.
    """

    compiled: CompiledStep
    hyperparams: TracedHyperparams
    until: Literal["gradients", "update"]

    @classmethod
    def make(
        cls,
        run: StepRuntime,
        backend: Literal["inductor", "aot_eager"] | None,
        stacked: Stacked | None = None,
        *,
        until: Literal["gradients", "update"] | None = None,
    ) -> Self:
        """The program of a step; `until` None is the gradients where the updated state lives off the device."""
        if run.checkpointing.names and run.checkpointing.moves is not None:
            raise ConfigError(
                "activation_checkpointing.cpu_checkpointing: must be false where the whole step is one graph, got true; leave "
                "it out, or pass compile='block'"
            )
        if until is None:
            until = "gradients" if any(map(run.offload.is_away, run.plan.flat_buffers)) else "update"
        hyperparams = run.updater.hyperparams(run.device)
        transforms = run.updater.transforms_by(hyperparams) if until == "update" else {}
        rules = Rules(
            run.rules, run.scaling, run.recipe.cfg.skips_overflow, transforms, run.updater.places, hyperparams.salts
        )
        axis = run.ranks
        if isinstance(axis, LockstepAxis):  # this graph is never run
            axis = AbstractAxis(axis.name, axis.size, axis.rank, "gloo", axis.mesh)
        compiled = CompiledStep(
            run.recipe.model, run.plan, axis, run.device, rules,
            loss_fn=run.recipe.loss_fn, autocast=run.autocast, backend=backend,
            checkpoint=run.checkpointing.names, stacked=stacked,
        )  # fmt: skip
        return cls(compiled, hyperparams, until)

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        """The same program, whose collectives are also reported to `observe`."""
        return replace(self, compiled=self.compiled.observed(observe))

    def __call__(
        self, run: StepRuntime, check: HyperCheck, state: State, buffers: dict[str, Tensor], micro_batches: list[Any],
        *, number: int,
    ) -> tuple[State, Metrics]:  # fmt: skip
        """One step on this rank's micro-batches. *Collective:* every rank.

        Args:
            buffers: copies of the state's module buffers, in which the graph writes.
            number: how many forwards and backwards this rank has run; the ranks compare it.
        """
        call = self._with_update if self.until == "update" else self._then_update
        return call(run, check, state, buffers, micro_batches, number)

    def _with_update(
        self, run: StepRuntime, check: HyperCheck, state: State, buffers: dict[str, Tensor], micro_batches: list[Any],
        number: int,
    ) -> tuple[State, Metrics]:  # fmt: skip
        """Writes the hyper-parameters where the graph reads them, runs it, and raises the errors that it found."""
        hyper = run.updater.hyper(int(state.step))
        run.updater.write_hyperparams(self.hyperparams, hyper)
        checksum = check.checksum(run.updater, state, hyper)
        (outcome, is_sum), rng, hook_states = self._run(
            self.compiled, run, state, buffers, micro_batches, (number, checksum)
        )
        run.metrics.check_outcome(outcome, state, check.named, is_sum=is_sum)
        metrics = Metrics(
            outcome.loss, outcome.norm, self.hyperparams.lr[0].float(), outcome.overflow, state.loss_scale.scale.clone()
        )
        new = run.updater.next_state(taken(state), metrics, outcome.loss_scale, buffers, rng, hook_states)
        return new, metrics

    def _then_update(
        self, run: StepRuntime, check: HyperCheck, state: State, buffers: dict[str, Tensor], micro_batches: list[Any],
        number: int,
    ) -> tuple[State, Metrics]:  # fmt: skip
        """The graph up to its gradients, which are moved to where they live; and the update as in an eager step."""
        transfer = run.offload.transfer(run.scratch, run.rules.of_shard, in_memory=True)
        if run.offload.has_files:
            run.offload.read_ahead(state)
        grads = {
            key: x
            if isinstance(x, Tensor) and x.device == run.device
            else run.scratch.take(x.numel(), x.dtype, run.device)
            for key, x in state.grads.items()
        }
        checksum = check.checksum(run.updater, state)
        (told_AW4, is_sum), rng, hook_states = self._run(
            self.compiled.collect, run, state._replace(grads=grads), buffers, micro_batches, (number, checksum)
        )
        for key, home in state.grads.items():
            grad = grads.pop(key)
            if grad is not home:
                transfer.write_back(f"{key}/grads", home, grad, adds=False, measures=True)
                run.scratch.give(grad)
        del grad
        transfer.settle()
        run.agree_on_files(state)
        check_alike(told_AW4[..., 2:].flatten(0, 1), run.mesh.world, check.named)
        with profiler_range("update"):
            return finish(
                run, check, state, told_AW4[..., :2], buffers, rng, hook_states, is_sum=is_sum, transfer=transfer
            )

    def _run(
        self, graph: Callable[..., T], run: StepRuntime, state: State, buffers: dict[str, Tensor],
        micro_batches: list[Any], numbers: tuple[int, int],
    ) -> tuple[T, dict[str, Tensor], dict[str, dict[str, Any]]]:  # fmt: skip
        """The result of a graph, then the random state and the states of comm hooks after it."""
        batches = [run.batches.cast(batch) for batch in micro_batches]
        hook_states = optree.tree_map(torch.clone, state.hook_states)
        with random_state(state.rng, run.device) as rng, profiler_range("step", "in one graph"):
            numbers_2 = torch.full((2,), float(numbers[0]), dtype=torch.float64, device=run.device)
            numbers_2[1:].fill_(numbers[1])  # fills do not wait for the device
            result = graph(state, buffers, hook_states, batches, numbers_2)
        return result, rng, hook_states

    def trace(self, run: StepRuntime, micro_batches: list[Any]) -> list[Captured]:
        """The graphs of a step on these micro-batches; see `TrainStep.trace`."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            state = optree.tree_map(
                lambda spec: torch.empty(
                    spec.local_shape(run.plan.mesh), dtype=torch_dtype(spec.dtype), device=run.device
                ),
                run.specs,
            )
            return self.compiled.trace(state, [run.batches.cast(without_memory(x, run.device)) for x in micro_batches])
