"""`GraphProgram`: a train step that runs as one graph, up to its gradients or with its
update, on one rank or all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypeVar

import optree
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fzero.common.profiler_ranges import profiler_range
from fzero.comms.axes import AbstractAxis, LockstepAxis
from fzero.comms.records import CommRecord
from fzero.comms.stacked import RandomByRank, Stacked
from fzero.config.config import ConfigError
from fzero.graph.capture import CompiledStep
from fzero.graph.captured import Captured
from fzero.model.binding import random_state
from fzero.optim.transforms import Transform
from fzero.plans.leaves import stream_name
from fzero.runtime.batches import plain, without_memory
from fzero.runtime.finish import Collected
from fzero.runtime.inspection import evaluated
from fzero.runtime.outcome import explained
from fzero.runtime.reductions import GradNorms
from fzero.runtime.step_runtime import StepRuntime
from fzero.runtime.update import UpdateNumbers
from fzero.state import TrainState
from fzero.storage.promised import arrived
from fzero.storage.shard_transfer import ShardTransfer, read_later

T = TypeVar("T")
State = TrainState[Tensor]


@dataclass(frozen=True)
class GraphProgram:
    """A step as one graph.

    Attributes:
        compiled: the graph, captured in the first call for each shape of batch.
        hyper: the tensors from which the graph reads the numbers of its update.
        until: what the graph ends with.
        stacked: the ranks, where one graph runs all of them; tensors then have a
            leading dimension of ranks.
    """

    compiled: CompiledStep
    hyper: UpdateNumbers
    until: Literal["gradients", "update"]
    stacked: Stacked | None = None
    is_graph: ClassVar[bool] = True

    @classmethod
    def make(
        cls,
        run: StepRuntime,
        backend: Literal["inductor", "aot_eager"] | None,
        stacked: Stacked | None = None,
        *,
        until: Literal["gradients", "update"] | None = None,
    ) -> Self:
        """The program of a step; `until` None is the gradients where the updated state
        lives off the device.
        """
        if run.changes.not_in_graph:
            raise ConfigError(run.changes.not_in_graph)
        if not run.spec.cfg.zero_optimization.ignore_unused_parameters:
            raise ConfigError(
                "zero_optimization.ignore_unused_parameters: must be true where the whole step is "
                "one graph, which has a gradient for every parameter, got false; leave it out, or "
                "leave out compile='step'"
            )
        if until is None:
            is_away = any(map(run.offload.is_away, run.plan.flat_buffers))
            until = "gradients" if is_away or run.inner_plan is not run.plan else "update"
        plan = run.plan if until == "update" else run.inner_plan
        if until == "update":
            _check_optimizers(run, stacked)
        updater, hyper = run.updater.traced(run.device)

        def transforms() -> Callable[..., Transform]:
            return partial(updater.for_single_use().transform_of, hyper=hyper, tile=None)

        axis = run.ranks
        if isinstance(axis, LockstepAxis):  # this graph is never run
            axis = AbstractAxis(axis.name, axis.size, axis.rank, "gloo", axis.mesh)
        compiled = CompiledStep(replace(run, plan=plan, ranks=axis), transforms, backend, stacked)
        return cls(compiled, hyper, until, stacked)

    def following(self, run: StepRuntime) -> Self:
        """A program of its own: graphs hold the numbers of their optimizers."""
        return type(self).make(run, self.compiled.backend, self.stacked, until=self.until)

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        """The same program, whose collectives are also reported to `observe`."""
        return replace(self, compiled=self.compiled.observed(observe))

    def split(self, run: StepRuntime, state: State, batch: Any) -> list[Any]:
        """This rank's micro-batches."""
        return list(run.batches.split(batch))

    def __call__(self, run: StepRuntime, state: State, micro_batches: list[Any]) -> Collected:
        """One step on this rank's micro-batches, or on those of all ranks, without its
        end. *Collective:* every rank.
        """
        call = self._with_update if self.until == "update" else self._to_gradients
        with explained(run.plan):
            return call(run, arrived(state), micro_batches)

    def _with_update(self, run: StepRuntime, state: State, micro_batches: list[Any]) -> Collected:
        """Writes the hyper-parameters where the graph reads them, and runs it."""
        hyper = run.updater.hyper(int(state.step.reshape(-1)[0]))
        run.updater.write(self.hyper, hyper)
        checksum = run.learned.hyper.checksum(run.updater, state, hyper)
        (outcome, is_sum), buffers, rng, hook_states = self._run(
            self.compiled, run, state, micro_batches, checksum
        )
        return Collected(
            state, outcome.loss_stats, is_sum, buffers, rng, hook_states, hyper, outcome=outcome
        )

    def _to_gradients(self, run: StepRuntime, state: State, micro_batches: list[Any]) -> Collected:
        """The graph up to its gradients, which are moved to where they live."""
        num_updates = read_later(state.step)
        transfer, norms = (
            run.offload.transfer(run.scratch),
            GradNorms(run.rules.loss.of_shard, in_memory=True),
        )
        if run.offload.has_files:
            run.offload.read_ahead(state)
        grads = {
            key: x
            if isinstance(x, Tensor) and x.device == run.device
            else run.scratch.take(x.numel(), x.dtype, run.device)
            for key, x in state.grads.items()
        }
        checksum = run.learned.hyper.checksum(run.updater, state)
        with self._loaded(run, transfer, state) as params:
            given = state._replace(params=params, grads=grads, master={}, optimizer={})
            (stats_AW4, is_sum), buffers, rng, hook_states = self._run(
                self.compiled.collect, run, given, micro_batches, checksum
            )
            del given
        for key, target in state.grads.items():
            grad = grads.pop(key)
            if grad is not target:
                result = transfer.write_back(stream_name("grads", key), target, grad, adds=False)
                norms.reduced(key, target, result, run.device, is_final=True)
                del result
                run.scratch.give(grad)
        del grad
        transfer.settle()
        run.agree_on_files(state)
        hyper = run.updater.hyper(num_updates())
        return Collected(
            state, stats_AW4, is_sum, buffers, rng, hook_states, hyper, transfer, norms
        )

    def evaluate(self, run: StepRuntime, state: State, batch: Any) -> Tensor:
        """The mean loss over ranks, in evaluation mode. *Collective:* every rank."""

        def compute() -> tuple[Tensor, Tensor | None]:
            run.spec.model.eval()
            return self._loss(run, state, batch)

        return evaluated(run, state, compute)

    def _loss(self, run: StepRuntime, state: State, batch: Any) -> tuple[Tensor, Tensor | None]:
        """This rank's loss on a batch, and its weight if it is a sum."""
        run.learned.num_passes += 1
        state = arrived(state)
        buffers = {name: tensor.clone() for name, tensor in state.buffers.items()}
        with self._loaded(run, run.offload.transfer(run.scratch), state) as params:
            given = TrainState(state.step, params, {}, {}, {}, buffers, state.loss_scale, {}, {})
            return self.compiled.evaluate(
                given, run.batches.cast(plain(run.batches.changed(batch)))
            )

    @contextmanager
    def _loaded(
        self, run: StepRuntime, transfer: ShardTransfer, state: State
    ) -> Iterator[dict[str, Any]]:
        """Inside, the flat buffers that a graph reads are on the device: all at its
        start.
        """
        for key, target in state.params.items():
            transfer.prefetch(key, target)
        if self.until == "gradients" and run.inner_plan is not run.plan:
            yield dict(run.inner_params(state.params, transfer))
            return
        params = {key: transfer.load(key, target) for key, target in state.params.items()}
        yield params
        for key, target in state.params.items():
            if params[key] is not target:
                run.scratch.give(params.pop(key))

    def _run(
        self,
        graph: Callable[..., T],
        run: StepRuntime,
        state: State,
        micro_batches: list[Any],
        checksum: int,
    ) -> tuple[T, dict[str, Tensor], dict[str, Tensor], dict[str, dict[str, Any]]]:
        """The result of a graph, then the module buffers, the random state and the
        states of comm hooks after it.
        """
        run.learned.num_passes += 1
        batches = [run.batches.cast(plain(batch)) for batch in micro_batches]
        # the graph writes them
        buffers, hook_states = optree.tree_map(torch.clone, (state.buffers, state.hook_states))
        given = state._replace(buffers=buffers, hook_states=hook_states, rng={})
        with self._drawing(run, state) as rng, profiler_range("step", "in one graph"):
            shape = (3,) if self.stacked is None else (self.stacked.size, 3)
            step_info = torch.zeros(shape, dtype=torch.float64, device=run.device)
            step_info[..., 0].fill_(run.learned.num_passes)  # fills do not wait for the device
            step_info[..., 1].fill_(checksum)
            result = graph(given, batches, step_info)
        return result, buffers, rng, hook_states

    @contextmanager
    def _drawing(self, run: StepRuntime, state: State) -> Iterator[dict[str, Tensor]]:
        """Inside, random numbers are drawn from the states of the state's generators;
        yields those of the next state.
        """
        if self.stacked is None:
            with random_state(state.rng, run.device) as rng:
                yield rng
            return
        rng = dict(state.rng)  # a graph of all ranks draws nothing
        self.stacked.random = drawn = (
            None if self.compiled.is_captured else RandomByRank(state.rng, run.device)
        )
        yield rng
        if drawn is not None:
            rng |= drawn.stacked

    def trace(self, run: StepRuntime, micro_batches: list[Any]) -> list[Captured]:
        """The graphs of a step on these micro-batches; see `TrainStep.trace`."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            state = run.builder.zeros(run.form.specs)
            batches = [run.batches.cast(without_memory(x, run.device)) for x in micro_batches]
            if run.inner_plan is run.plan:
                return self.compiled.trace(state, batches)
            # The step gathers once: its micro-steps compute with the gathered parameters.
            inner = self.make(run, self.compiled.backend, until="gradients").compiled
            numels = {b.key: b.flow.param_numel for b in run.inner_plan.flat_buffers}
            full = state._replace(
                params={key: x.new_empty(numels[key]) for key, x in state.params.items()}
            )
            micro_steps, is_sum = inner.trace_micro_steps(full, batches)
            update = self.compiled.trace_update(state, len(batches), is_sum)
            return [self.compiled.trace_gathers(state), *micro_steps, update]


def _check_optimizers(run: StepRuntime, stacked: Stacked | None) -> None:
    """Raises ConfigError for an optimizer whose update a graph cannot hold."""
    for buffer in run.plan.flat_buffers:
        optimizer = run.updater.optimizers[buffer.group]
        name = getattr(optimizer, "type", optimizer)
        if buffer.trainable and stacked is not None and not optimizer.is_elementwise(buffer.rule):
            raise ConfigError(
                f"optimizer.type: must be elementwise where the ranks are a dimension of tensors, "
                f"got {name!r}, which sends; pass by='lockstep'"
            )
