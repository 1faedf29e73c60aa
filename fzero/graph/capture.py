"""`CompiledStep`: the train step as one graph (forward, backward, collectives, clipping, overflow, optimizer) by torch.compile.

    params_P = gather(params_S)                               # stage 3
    loss, grads = value_and_grad(model)(params_P, batch)      # the graph contains the backward
    grads_S = reduce_scatter(grads)                           # sums in rank order, as in the eager step
    params_S, optimizer = update(params_S, grads_S, optimizer)

1. Autograd never sees a collective: the leaves are views of gathered buffers, cut by one split.
2. The gradient is a traced `torch.autograd.grad`. It runs the backward of an `autograd.Function`; inside a transform of
   `torch.func`, Dynamo silently ignores it.
3. The state is *donated*: an in-place write becomes a copy into the same memory at the end of the graph.
4. Values that change from step to step (rates, loss scale, counters) are tensors, so that a change causes no new capture.
5. `Backend` schedules the captured aten graph: gathers move to their first use and are repeated for the backward,
   reductions start when their input is ready, new state is written as soon as no node reads the old one.

Shape letters: P padded elements of a flat buffer = F·S, S elements of a shard, F shards (on one axis as many as ranks), W
ranks, A micro-steps.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, Self

import optree
import torch
import torch._dynamo
import torch.fx.traceback
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.weak import WeakTensorKeyDictionary

from fzero.comms import collectives
from fzero.comms.axes import AbstractAxis, ProcessAxis
from fzero.comms.comm_hooks import Sending
from fzero.comms.mesh import AxisMesh, OneRank, stacked_mesh, traced_mesh
from fzero.comms.records import CommRecord
from fzero.comms.stacked import Stacked
from fzero.comms.traced import TracedAxis
from fzero.graph.analysis import name_units
from fzero.graph.backends import Backend as TorchBackend, GraphOnly
from fzero.graph.capture_errors import logging_methods, one_graph
from fzero.graph.captured import Captured
from fzero.graph.remat import BACKWARD
from fzero.graph.step_backend import Backend, BackendName, as_parameter, pass_options
from fzero.graph.step_inputs import Flat, HookStates, Rules, WithLoss, bare, shielded
from fzero.graph.traffic import labelled, sent_in
from fzero.optim.loss_scale import LossScale
from fzero.optim.precision import cast_leaves, stochastic, to_nearest, update_in_graph
from fzero.optim.transforms import skip_if
from fzero.plans.plan import Plan
from fzero.runtime.loss import LossFn, agreed_buffers, is_agreed, mean_of
from fzero.runtime.metrics import Outcome
from fzero.runtime.module_binding import with_own_code
from fzero.runtime.own_params import enter, late, was_changed, wrong_kind
from fzero.runtime.refusals import INSIDE, UNRELATED
from fzero.state import TrainState


class CompiledStep:
    """Captured functions for one model, plan and rank; with `stacked`, for all ranks at once.

    Without a backend nothing is captured, and the functions run eagerly.

    Without gradient accumulation the step is one graph. With it there are two, a micro-step and the update: one graph would
    hold the forward and the backward A times and take A times as long to compile.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        axis: ProcessAxis | AbstractAxis,
        device: torch.device,
        rules: Rules,
        *,
        loss_fn: LossFn | None,
        autocast: torch.dtype | None,
        backend: BackendName | None,
        checkpoint: Sequence[str] = (),
        stacked: Stacked | None = None,
    ) -> None:
        if backend is not None and TorchVersion(torch.__version__) < "2.13":
            raise ValueError(
                f"compile: 'step' and explain() need torch 2.13, whose graphs may contain a backward, got {torch.__version__}; "
                f"pass compile='block', or install a newer torch"
            )
        units = {buffer.key: unit.name for unit in plan.units for buffer in unit.buffers}
        modules = {str(id(model.get_submodule(name))): name for name in checkpoint}
        self._axis, self._device = axis, device
        self._ranks: OneRank | Stacked = stacked or OneRank(plan.shard_of(axis.rank))
        self._graph: AxisMesh[Any] = traced_mesh(axis, plan, device) if stacked is None else stacked_mesh(stacked, plan)
        self.axes = _by_group(self._graph)
        exchanges = tuple(along for along in self.axes.values() if not along.is_nccl)
        own = WeakTensorKeyDictionary({param: name for name, param in model.named_parameters()})  # type: ignore[no-untyped-call]
        self.backend = Backend(
            backend or "aot_eager", pass_options(plan), units, modules, own, exchanges, bool(stacked)
        )
        self._is_captured = backend is not None
        torch._dynamo.allow_in_graph(as_parameter)  # type: ignore[no-untyped-call]
        self._rules, self._name = rules, type(model).__name__
        # A module under two names gets its tensors under one: functional_call could not restore a slot that it fills twice.
        slots: set[str] = set()
        for name, module in model.named_modules():
            for listed in (module.named_parameters, module.named_buffers):
                slots.update(key for key, _ in listed(name, recurse=False, remove_duplicate=False))
        self._aliases = {alias: owner for alias, owner in plan.aliases.items() if alias in slots}
        self._num_micro_steps, self._stage, self._comm_hooks = plan.num_micro_steps, plan.stage, plan.comm_hooks
        self._flats = tuple(Flat.of(buffer, plan) for buffer in plan.flat_buffers)
        self._trained = tuple(flat for flat in self._flats if flat.trainable)
        self._is_cast = {key: cast_leaves(transform) for key, transform in rules.transforms.items()}
        reduces_by_sum = not rules.measures.is_mean
        self._module = WithLoss(model, loss_fn, reduces_by_sum=reduces_by_sum, autocast=autocast, device=device.type)
        self._full = self._compile(self._full_step, self.backend)
        self._micro = self._compile(self._micro_step, self.backend)
        self._end = self._compile(self._update, self.backend)
        self._alone = self._compile(self._gradients, self.backend)
        self._summed = self._compile(self._sums, self.backend)
        self._recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
        self._graph_of: dict[Callable[..., Any], torch.fx.Graph] = {}  # the graph of each function's last run
        self._sent_by: dict[Callable[..., Any], list[CommRecord]] = {}
        self._observers = (axis.observe,) if isinstance(axis, ProcessAxis) and axis.observe is not None else ()

    def _compile(self, function: Callable[..., Any], backend: TorchBackend) -> Callable[..., Any]:
        if not self._is_captured:
            return function
        return torch.compile(with_own_code(function), fullgraph=True, dynamic=False, backend=backend)

    def __call__(
        self,
        state: TrainState[Tensor],
        buffers: dict[str, Tensor],
        hook_states: HookStates,
        micro_batches: Sequence[Any],
        numbers: Tensor,
    ) -> tuple[Outcome, bool]:
        """Runs one step in place on `state` and the module `buffers`. *Collective.*

        Args:
            state: donated.
            buffers: the module's buffers; written.
            hook_states: the states of the comm hooks; written.
            micro_batches: A batches.
            numbers: the number of this pass and a checksum of the hyper-parameters (2,), float64; must be equal on all ranks.

        Returns:
            The outcome, and whether losses are sums.
        """
        flat = (state.params, state.master, state.grads, shielded(state.optimizer))
        buffers = shielded(buffers)
        if len(micro_batches) == 1:
            outcome: tuple[Outcome, bool] = self._run(
                self._full, *flat, buffers, hook_states, state.loss_scale, micro_batches[0], numbers
            )
            return outcome
        rows, is_sum = self._accumulate(state, buffers, hook_states, micro_batches, numbers)
        return self._run(self._end, *flat, buffers, hook_states, state.loss_scale, rows, is_sum), is_sum

    def _accumulate(
        self,
        state: TrainState[Tensor],
        buffers: dict[str, Tensor],
        hook_states: HookStates,
        micro_batches: Sequence[Any],
        numbers: Tensor,
    ) -> tuple[Tensor, bool]:
        """Adds up the gradients of micro-steps; returns the rows of all ranks in each (A, W, 4), and whether losses are sums."""
        for grads in state.grads.values():
            grads.zero_()
        rows_A = []
        for batch in micro_batches:
            rows, is_sum = self._run(
                self._micro, state.params, state.grads, buffers, hook_states, state.loss_scale, batch, numbers
            )
            rows_A.append(rows)
        return torch.stack(rows_A, rows.dim() - 2), is_sum

    def collect(
        self,
        state: TrainState[Tensor],
        buffers: dict[str, Tensor],
        hook_states: HookStates,
        micro_batches: Sequence[Any],
        numbers: Tensor,
    ) -> tuple[Tensor, bool]:
        """A step without the update: leaves the mean gradients in `state.grads`, and makes `buffers` equal. *Collective.*

        For optimizer state that is offloaded, where the graph cannot update it. Arguments as for a call.

        Returns:
            The rows of all ranks in each micro-step (A, W, 4): loss, weight or -1, and `numbers`; whether losses are sums.
        """
        buffers = shielded(buffers)
        if len(micro_batches) == 1:
            rows, is_sum = self._run(
                self._alone,
                state.params,
                state.grads,
                buffers,
                hook_states,
                state.loss_scale,
                micro_batches[0],
                numbers,
            )
            return rows[None], is_sum
        rows, is_sum = self._accumulate(state, buffers, hook_states, micro_batches, numbers)
        self._run(self._summed, state.grads, hook_states, buffers)
        return rows, is_sum

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a captured function; rank 0 reports on stderr how long a capture took."""
        start, num_captured, num_graphs = time.perf_counter(), self.backend.num_captured, len(self.backend.graphs)
        with self._capturing():
            result = function(*arguments)
        if self.backend.num_captured > num_captured and self._axis.rank == 0:
            seconds = time.perf_counter() - start
            message = (
                f"compiled a step of {self._name} in stage {self._stage} with {self.backend.name} in {seconds:.1f} s"
            )
            print(f"fzero: {message}", file=sys.stderr, flush=True)
        if len(self.backend.graphs) > num_graphs:
            self._graph_of[function] = self.backend.graphs[-1]
            self._sent_by.pop(function, None)
        if self._is_captured:
            self._report_sent(function)
        return result

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        # Floats are constants of the graph: Dynamo would first make them inputs, then capture everything a second time.
        quiet = torch._dynamo.config.ignore_logging_functions | logging_methods()
        with (
            one_graph(self._name, is_new=not self.backend.num_captured),
            torch._dynamo.config.patch(
                trace_autograd_ops=True, specialize_float=True, allow_rnn=True, ignore_logging_functions=quiet
            ),
        ):
            yield

    def forward(self, params: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any) -> None:
        """The forward alone, as it runs in a step; writes the `buffers`."""

        def on_one_rank(tensors: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any) -> Tensor:
            return self._forward(tensors, buffers, batch)[0]

        with self._ranks.drawing(), self._unchanged(self._ranks.each(self._cut)(params)) as tensors:
            self._ranks.each(on_one_rank)(tensors, buffers, batch)

    @contextmanager
    def _unchanged(self, tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Raises ParameterError if the body changes parameters, in a step that is not captured."""
        versions = {name: tensor._version for name, tensor in tensors.items()}
        yield tensors
        if any(tensor._version != versions[name] for name, tensor in tensors.items()):
            raise was_changed(None)

    def trace(self, state: TrainState[Tensor], micro_batches: Sequence[Any]) -> list[Captured]:
        """The graphs that a step would run, in order, captured on tensors of a `FakeTensorMode`. Runs nothing.

        The model's Python attributes keep their values.
        """
        flat = (state.params, state.master, state.grads, shielded(state.optimizer))
        buffers = shielded(dict(state.buffers))
        numbers = torch.empty((2,), dtype=torch.float64, device=self._device)
        if len(micro_batches) == 1:
            full = self._compile(self._full_step, self.backend.graph_only)
            return [
                self._captured(full, *flat, buffers, state.hook_states, state.loss_scale, micro_batches[0], numbers)
            ]
        sums: list[bool] = []

        @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # it is called in the capture
        def note(is_sum: bool) -> None:
            sums.append(is_sum)

        def micro_step(*arguments: Any) -> tuple[Tensor, bool]:
            rows, is_sum = self._micro_step(*arguments)
            note(is_sum)
            return rows, is_sum

        shown = self.backend.graph_only
        micro, update = self._compile(micro_step, shown), self._compile(self._update, shown)
        graphs = [
            self._captured(
                micro, state.params, state.grads, buffers, state.hook_states, state.loss_scale, batch, numbers
            )
            for batch in micro_batches
        ]
        rows_A = numbers.new_empty(len(micro_batches), self._graph.world.size, 4)
        return [*graphs, self._captured(update, *flat, buffers, state.hook_states, state.loss_scale, rows_A, sums[-1])]

    def _captured(self, function: Callable[..., Any], *arguments: Any) -> Captured:
        try:
            with self._capturing():
                function(*arguments)
        except GraphOnly as captured:
            named = {name: self.backend.unit_of(source) for name, source in captured.sources.items()}
            units = {name: unit for name, unit in named.items() if unit is not None}
            name_units(captured.graph, units)
            return Captured(captured.graph, units, self.backend.options, self.backend.checkpoint, self.axes)
        raise AssertionError(f"{self._name}: a backend that runs nothing returned a result")

    # --- the captured functions ----------------------------------------------------------------------------------

    def _full_step(
        self,
        params: dict[str, Tensor],
        master: dict[str, Tensor],
        grads: dict[str, Tensor],
        optimizer: dict[str, Any],
        buffers: dict[str, Tensor],
        hook_states: HookStates,
        loss_scale: LossScale[Tensor],
        batch: Any,
        numbers: Tensor,
    ) -> tuple[Outcome, bool]:
        optimizer, buffers = bare(optimizer), bare(buffers)
        row, gradients, is_sum = self._value_and_grad(params, buffers, loss_scale, batch, numbers)

        def finish(
            params: dict[str, Tensor],
            master: dict[str, Tensor],
            grads: dict[str, Tensor],
            optimizer: dict[str, Any],
            buffers: dict[str, Tensor],
            hook_states: HookStates,
            loss_scale: LossScale[Tensor],
            row: Tensor,
            gradients: dict[str, Tensor],
        ) -> Outcome:
            rows, reduced = self._stack_rows(row)[None], self._reduced(gradients, grads, hook_states, is_sum=is_sum)
            return self._updated(params, master, grads, optimizer, buffers, loss_scale, rows, reduced, is_sum=is_sum)

        finished = self._ranks.each(finish)
        return finished(params, master, grads, optimizer, buffers, hook_states, loss_scale, row, gradients), is_sum

    def _gradients(
        self,
        params: dict[str, Tensor],
        grads: dict[str, Tensor],
        buffers: dict[str, Tensor],
        hook_states: HookStates,
        loss_scale: LossScale[Tensor],
        batch: Any,
        numbers: Tensor,
    ) -> tuple[Tensor, bool]:
        """The step without the update; returns the rows of all ranks (W, 4), and whether losses are sums."""
        buffers = bare(buffers)
        row, gradients, is_sum = self._value_and_grad(params, buffers, loss_scale, batch, numbers)
        rows = self._stack_rows(row)
        self._reduced(gradients, grads, hook_states, is_sum=is_sum)
        self._agree(buffers)
        return rows, is_sum

    def _sums(self, grads: dict[str, Tensor], hook_states: HookStates, buffers: dict[str, Tensor]) -> None:
        """The sums over ranks that remain after the last micro-step, in a step without the update."""
        self._summed_up(grads, hook_states)
        self._agree(bare(buffers))

    def _micro_step(
        self,
        params: dict[str, Tensor],
        grads: dict[str, Tensor],
        buffers: dict[str, Tensor],
        hook_states: HookStates,
        loss_scale: LossScale[Tensor],
        batch: Any,
        numbers: Tensor,
    ) -> tuple[Tensor, bool]:
        """Adds the gradients of one micro-batch to `grads`; reduces first those that a rank does not collect in full."""
        row, gradients, is_sum = self._value_and_grad(params, bare(buffers), loss_scale, batch, numbers)

        def add(grads: dict[str, Tensor], hook_states: HookStates, row: Tensor, gradients: dict[str, Tensor]) -> Tensor:
            scale = self._grad_scale(is_sum)
            for flat, grad in self._flattened(gradients):
                kept = grads[flat.key]
                if flat.collects_full:
                    wide = torch.promote_types(torch.promote_types(kept.dtype, grad.dtype), torch.float32)
                    kept.copy_(kept.to(wide).add(grad.to(wide), alpha=scale))
                else:
                    kept.add_(self._reduce(_scaled(grad, scale, flat.reduce_dtype), flat, hook_states))
            return self._stack_rows(row)

        return self._ranks.each(add)(grads, hook_states, row, gradients), is_sum

    def _update(
        self,
        params: dict[str, Tensor],
        master: dict[str, Tensor],
        grads: dict[str, Tensor],
        optimizer: dict[str, Any],
        buffers: dict[str, Tensor],
        hook_states: HookStates,
        loss_scale: LossScale[Tensor],
        rows: Tensor,
        is_sum: bool,
    ) -> Outcome:
        """The metrics and the update, after the last micro-step; `rows` are those of all micro-steps (A, W, 4)."""

        def finish(grads: dict[str, Tensor], hook_states: HookStates, *state: Any) -> Outcome:
            params, master, optimizer, buffers, loss_scale, rows = state
            reduced = self._summed_up(grads, hook_states)
            return self._updated(params, master, grads, optimizer, buffers, loss_scale, rows, reduced, is_sum=is_sum)

        return self._ranks.each(finish)(
            grads, hook_states, params, master, bare(optimizer), bare(buffers), loss_scale, rows
        )

    # --- parts of these, on one rank -----------------------------------------------------------------------------------

    def _reduced(
        self, gradients: dict[str, Tensor], grads: dict[str, Tensor], hook_states: HookStates, *, is_sum: bool
    ) -> dict[str, Tensor]:
        """The sums over ranks of the only micro-step's gradients; also written to `grads`."""
        reduced = {}
        for flat, grad_P in self._flattened(gradients):
            grad = self._reduce(_scaled(grad_P, self._grad_scale(is_sum), flat.reduce_dtype), flat, hook_states)
            grad = self._sum_late(grad, flat, hook_states) if flat.sums_late else grad
            reduced[flat.key] = self._keep(grads, flat, grad)
        return reduced

    def _summed_up(self, grads: dict[str, Tensor], hook_states: HookStates) -> dict[str, Tensor]:
        """The sums over ranks of the gradients that micro-steps collected in `grads`; also written there."""
        reduced = {}
        for flat in self._trained:
            grad = grads[flat.key]
            if flat.collects_full:
                grad = self._keep(grads, flat, self._reduce(grad, flat, hook_states))
            elif flat.sums_late:
                grad = self._keep(grads, flat, self._sum_late(grad, flat, hook_states))
            reduced[flat.key] = grad
        return reduced

    def _updated(
        self,
        params: dict[str, Tensor],
        master: dict[str, Tensor],
        grads: dict[str, Tensor],
        optimizer: dict[str, Any],
        buffers: dict[str, Tensor],
        loss_scale: LossScale[Tensor],
        rows_A: Tensor,
        reduced: dict[str, Tensor],
        *,
        is_sum: bool,
    ) -> Outcome:
        """The metrics and the update, from the sums over ranks `reduced` and the rows (A, W, 4)."""
        rules, rows = self._rules, rows_A.flatten(0, 1)
        mean_loss, weight = mean_of(rows[:, :2], is_sum=is_sum)
        multiple = rules.measures.multiple(weight, loss_scale.scale)
        norm = self._norm(reduced) / multiple
        overflow = ~(norm + mean_loss).isfinite()
        ok = is_agreed(rows[:, :2], is_sum=is_sum) & (rows[:, 2:] == rows[0, 2:]).all()
        if is_sum:
            ok = ok & (rows[:, 1] > 0).any()
        if rules.skips_overflow:
            skip = overflow | ~ok
            new_scale = rules.scaling.update(loss_scale, overflow)
            ok = ok & ~rules.scaling.is_exhausted(loss_scale, overflow)
        else:
            ok = ok & (mean_loss + norm).isfinite()
            skip, new_scale = ~ok, loss_scale
        factor = rules.measures.factor(norm, multiple, overflow, weight)
        for flat in self._trained:
            self._update_flat(flat, params, master, reduced[flat.key], optimizer, skip, factor)
        self._agree(buffers)
        new_scale = LossScale(*(x.clone() for x in new_scale))
        return Outcome(rows_A, mean_loss.float(), norm.float(), overflow, ok, new_scale)

    def _value_and_grad(
        self,
        params: dict[str, Tensor],
        buffers: dict[str, Tensor],
        loss_scale: LossScale[Tensor],
        batch: Any,
        numbers: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor], bool]:
        """One rank's row (4,): loss, weight or -1, `numbers`; its gradients by name; whether losses are sums."""
        tensors = {name: tensor.detach() for name, tensor in self._ranks.each(self._cut)(params).items()}
        leaves = {name: tensors[name].requires_grad_() for flat in self._trained for name in flat.names}
        are_sums: list[bool] = []

        def forward(
            tensors: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any, numbers: Tensor, scale: Tensor
        ) -> tuple[Tensor, Tensor]:
            loss, weight = self._forward(tensors, buffers, batch)
            are_sums.append(weight is not None)
            loss_and_weight = [loss.detach().double(), (-torch.ones_like(loss) if weight is None else weight).double()]
            row = torch.cat([torch.stack(loss_and_weight), numbers]).detach()
            if self._rules.measures.scales_loss:
                loss = loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale
            return loss, row

        with self._ranks.drawing(), nullcontext() if self._is_captured else self._unchanged(tensors):
            loss, row = self._ranks.each(forward)(tensors, buffers, batch, numbers, loss_scale.scale)
        if any(leaf.grad is not None for leaf in leaves.values()):
            raise RuntimeError(INSIDE)
        with torch.fx.traceback.annotate(BACKWARD):
            # Each simulated rank has a loss of its own, and that loss has no gradient in another rank's parameters.
            grads = torch.autograd.grad(
                loss, list(leaves.values()), torch.ones_like(loss) if loss.dim() else None, allow_unused=True
            )
        if all(grad is None for grad in grads):
            raise ValueError(UNRELATED)
        # Not zeros_like: it would read the parameter, and so gather its unit once more.
        grads_by_name = {
            name: torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), grads)
        }
        return row, grads_by_name, are_sums[0]

    def _cut(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parameters by name, cut from gathered flat buffers."""
        tensors: dict[str, Tensor] = {}
        for flat in self._flats:
            hooks = self._comm_hooks.gather if flat.trainable else self._comm_hooks.frozen
            with labelled("gather", flat.key):
                axes = self._graph.axes[: flat.num_param_axes]
                param_P = self._graph.all_gather(params[flat.key], axes, hooks=hooks)
            parts = torch.split(param_P, list(flat.numels))
            tensors |= {name: part.view(shape) for name, shape, part in zip(flat.names, flat.shapes, parts)}
        return tensors

    def _forward(
        self, tensors: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The loss, and its weight if it is a sum; writes the `buffers` that the model changes."""
        tensors = {**{name: as_parameter(tensor, name) for name, tensor in tensors.items()}, **buffers}
        for alias, owner in self._aliases.items():
            tensors[alias] = tensors[owner]
        given = {f"model.{name}": tensor for name, tensor in tensors.items()}
        with nullcontext() if self._is_captured else self._reads_from(tensors):
            loss, weight = torch.func.functional_call(self._module, given, (batch,), tie_weights=False)
        if not self._is_captured:
            for name, tensor in tensors.items():
                if given[f"model.{name}"] is not tensor and name not in buffers:
                    raise late("parameter", name)
        for module in self._recurrent:  # an RNN's list of weights would keep the graph's tensors alive
            module._init_flat_weights()
        for name, buffer_ in buffers.items():
            now = given[
                f"model.{name}"
            ]  # functional_call returns here the tensor that the model assigned to the buffer
            if now is not buffer_:
                if (now.shape, now.dtype) != (buffer_.shape, buffer_.dtype):
                    raise wrong_kind(name, buffer_, now)
                buffer_.copy_(now.detach())
        return loss, weight

    @contextmanager
    def _reads_from(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """In an eager run, the body reads `tensors` through the module's own parameters."""
        own = {id(param): param for param in self._module.parameters()}
        names = {id(param): name for param, name in self.backend.own.items()}
        leave = enter(own, names, tensors.__getitem__)
        try:
            yield
        finally:
            leave()

    def _stack_rows(self, row: Tensor) -> Tensor:
        """The rows of all ranks, in rank order (W, 4)."""
        with labelled("loss_stats"):
            return collectives.stack(row, self._graph.world)

    def _grad_scale(self, is_sum: bool) -> float:
        """The factor on a micro-step's gradients."""
        return 1 / (self._rules.measures.predivide * (1 if is_sum else self._num_micro_steps))

    def _flattened(self, grads: dict[str, Tensor]) -> Iterator[tuple[Flat, Tensor]]:
        """The flat gradients (P)."""
        for flat in self._trained:
            grads_N = [grads[name].reshape(-1) for name in flat.names]
            yield flat, torch.cat([*grads_N, grads_N[0].new_zeros(flat.numels[-1])])

    def _reduce(self, grad_P: Tensor, flat: Flat, hook_states: HookStates) -> Tensor:
        """The sum over ranks: (P) in stage 0, else this rank's shard (S). If it `sums_late`, over the shard axes only."""
        grad_P, states = grad_P.to(flat.reduce_dtype), hook_states.get(flat.key, {})
        how: dict[str, Any] = {"hooks": self._comm_hooks.reduce, "states": states}
        with labelled("reduce", flat.key):
            if flat.sums_full:
                return _end(self._graph.start_all_reduce(grad_P, **how), states)
            when: Literal["now", "later"] = "later" if flat.sums_late else "now"
            return _end(self._graph.start_reduce_scatter(grad_P, sum_replicas=when, **how), states)

    def _sum_late(self, grad_S: Tensor, flat: Flat, hook_states: HookStates) -> Tensor:
        """The sum over the replicate axes of the shards that micro-steps have added up."""
        states = hook_states.get(flat.key, {})
        with labelled("reduce", flat.key):
            sending = self._graph.start_sum_replicas(
                grad_S.to(flat.reduce_dtype), hooks=self._comm_hooks.reduce, states=states
            )
            return _end(sending, states)

    def _keep(self, grads: dict[str, Tensor], flat: Flat, reduced: Tensor) -> Tensor:
        """Writes a reduced gradient to `grads`; returns it in `grad_dtype`."""
        reduced, kept = reduced.to(flat.grad_dtype), grads[flat.key]
        if flat.sums_full or kept.numel() == flat.shard_numel:
            kept.copy_(reduced)
        else:
            self._ranks.write_own(kept, reduced)
        return reduced

    def _update_flat(
        self,
        flat: Flat,
        params: dict[str, Tensor],
        master: dict[str, Tensor],
        reduced: Tensor,
        optimizer: dict[str, Any],
        skip: Tensor,
        factor: Tensor | None,
    ) -> None:
        param, rules = params[flat.key], self._rules
        updated = self._ranks.own(param, flat.shard_numel).clone() if flat.joins else param
        start = 0
        if rules.places is not None:
            start = rules.places[flat.key] + (self._ranks.place(flat.shard_numel) if flat.updates_shard else 0)

        def update(
            skip: Tensor, grad: Tensor, kept: Tensor, state: Any, factor: Tensor | None, out: Tensor | None, start: int
        ) -> None:
            rounding = to_nearest if rules.places is None else stochastic(rules.salts, start)
            transform = skip_if(skip, rules.transforms[flat.key])
            update_in_graph(
                transform, self._is_cast[flat.key], grad, kept, state, factor=factor, rounding=rounding, out=out
            )

        kept, out = (master[flat.key], updated) if flat.has_master else (updated, None)
        self._ranks.in_turn(update, skip, reduced, kept, optimizer[flat.key], factor, out, start)
        if flat.joins:
            with labelled("all_gather_params", flat.key):
                joined = self._graph.all_gather(updated, self._graph.axes[flat.num_param_axes :])
            param.copy_(joined)

    def _norm(self, reduced: dict[str, Tensor]) -> Tensor:
        measures, graph = self._rules.measures, self._graph
        parts = []
        for shard in range(graph.num_shards if self._stage == 0 else 1):
            shards = []
            for flat in self._trained:
                if flat.shard_numel:  # stage 0 has all shards, the other stages this rank's
                    start = shard * flat.shard_numel
                    shards.append(reduced[flat.key][start : start + flat.shard_numel])
            parts.append(measures.norm_part(shards, self._device))
        if self._stage == 0:
            return measures.norm(torch.stack(parts))
        with labelled("norm"):
            rows = graph.stack(parts[0])
        return measures.norm(rows)

    def _agree(self, buffers: dict[str, Tensor]) -> None:
        """Makes module buffers equal on all ranks as in the eager step, but also those that did not change."""
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, tensor in buffers.items():
            if self._graph.world.size > 1 and tensor.numel():
                by_dtype.setdefault(tensor.dtype, []).append(name)
        for names in by_dtype.values():
            with labelled("buffers"):
                rows = collectives.stack(torch.cat([buffers[name].reshape(-1) for name in names]), self._graph.world)
            values = torch.split(agreed_buffers(rows), [buffers[name].numel() for name in names])
            for name, value in zip(names, values):
                buffers[name].copy_(value.view(buffers[name].shape))

    # --- records of what was sent --------------------------------------------------------------------------------

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        """The same captured functions; `observe`, too, receives a record of each collective."""
        twin = copy.copy(self)
        twin._observers = (*self._observers, observe)
        return twin

    def _report_sent(self, function: Callable[..., Any]) -> None:
        """Reports the collectives of a call to the observers, as read from the graph that ran."""
        if self._observers and function not in self._sent_by:
            self._sent_by[function] = sent_in(self._graph_of[function], self.axes)
        for observe in self._observers:
            for record in self._sent_by[function]:
                observe(record)


def _scaled(grad: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The scaled gradient in the dtype in which it is sent, rounded once."""
    grad = grad.to(torch.promote_types(dtype, grad.dtype))
    return (grad if scale == 1 else grad * scale).to(dtype)


def _by_group(mesh: AxisMesh[Any]) -> dict[str, TracedAxis]:
    """The axes of one rank, by the names of their groups in a graph."""
    axes = [axis for axis in (mesh.world, *mesh.axes, *mesh.replicate_axes) if isinstance(axis, TracedAxis)]
    return {axis.group_name: axis for axis in axes if axis.size > 1}


def _end(sending: Sending, states: Mapping[str, Any]) -> Tensor:
    """The result of a reduction; overwrites the states of comm hooks that have changed."""
    result, after = sending.wait()
    for kept, now in zip(optree.tree_leaves(states), optree.tree_leaves(after), strict=True):
        if now is not kept:
            kept.copy_(now)
    return result
