"""`CompiledStep`: the train step as one graph (forward, backward, collectives, clipping, overflow, optimizer) by torch.compile.

`StepFunctions` are what is captured. The state is *donated*: an in-place write becomes a copy into the same memory at the end
of the graph. `Backend` schedules the captured aten graph: gathers move to their first use and are repeated for the backward,
reductions start when their input is ready, new state is written as soon as no node reads the old one.

Shape letters: W ranks, A micro-steps.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch._dynamo
import torch.fx.traceback
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.weak import WeakTensorKeyDictionary

from fzero.comms.axes import AbstractAxis, ProcessAxis
from fzero.comms.records import CommRecord
from fzero.comms.stacked import Stacked
from fzero.graph.analysis import name_units
from fzero.graph.backends import Backend as TorchBackend, GraphOnly
from fzero.graph.capture_errors import logging_methods, one_graph
from fzero.graph.captured import Captured
from fzero.graph.step_backend import Backend, BackendName, pass_options
from fzero.graph.step_functions import StepFunctions
from fzero.graph.step_inputs import HookStates, Rules, shielded
from fzero.graph.traffic import sent_in
from fzero.plans.plan import Plan
from fzero.runtime.finish import Outcome
from fzero.runtime.loss import LossFn
from fzero.runtime.module_binding import with_own_code
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
        own = WeakTensorKeyDictionary({param: name for name, param in model.named_parameters()})  # type: ignore[no-untyped-call]
        self.is_captured = backend is not None
        self.functions = StepFunctions(
            model, plan, axis, device, rules,
            loss_fn=loss_fn, autocast=autocast, is_captured=self.is_captured, own=own, stacked=stacked,
        )  # fmt: skip
        self._axis, self._device, self.axes = axis, device, self.functions.axes
        exchanges = tuple(along for along in self.axes.values() if not along.is_nccl)
        self.backend = Backend(
            backend or "aot_eager", pass_options(plan), units, modules, own, exchanges, bool(stacked)
        )
        self._name, self._stage = type(model).__name__, plan.stage
        self._full = self._compile(self.functions.full_step, self.backend)
        self._micro = self._compile(self.functions.micro_step, self.backend)
        self._end = self._compile(self.functions.update, self.backend)
        self._alone = self._compile(self.functions.gradients, self.backend)
        self._summed = self._compile(self.functions.sums, self.backend)
        self._graph_of: dict[Callable[..., Any], torch.fx.Graph] = {}  # the graph of each function's last run
        self._sent_by: dict[Callable[..., Any], list[CommRecord]] = {}
        self._observers = (axis.observe,) if isinstance(axis, ProcessAxis) and axis.observe is not None else ()

    def _compile(self, function: Callable[..., Any], backend: TorchBackend) -> Callable[..., Any]:
        if not self.is_captured:
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
        if self.is_captured:
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

    def trace(self, state: TrainState[Tensor], micro_batches: Sequence[Any]) -> list[Captured]:
        """The graphs that a step would run, in order, captured on tensors of a `FakeTensorMode`. Runs nothing.

        The model's Python attributes keep their values.
        """
        flat = (state.params, state.master, state.grads, shielded(state.optimizer))
        buffers = shielded(dict(state.buffers))
        numbers = torch.empty((2,), dtype=torch.float64, device=self._device)
        if len(micro_batches) == 1:
            full = self._compile(self.functions.full_step, self.backend.graph_only)
            return [
                self._captured(full, *flat, buffers, state.hook_states, state.loss_scale, micro_batches[0], numbers)
            ]
        sums: list[bool] = []

        @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # it is called in the capture
        def note(is_sum: bool) -> None:
            sums.append(is_sum)

        def micro_step(*arguments: Any) -> tuple[Tensor, bool]:
            rows, is_sum = self.functions.micro_step(*arguments)
            note(is_sum)
            return rows, is_sum

        shown = self.backend.graph_only
        micro, update = self._compile(micro_step, shown), self._compile(self.functions.update, shown)
        graphs = [
            self._captured(
                micro, state.params, state.grads, buffers, state.hook_states, state.loss_scale, batch, numbers
            )
            for batch in micro_batches
        ]
        rows_A = numbers.new_empty(len(micro_batches), self.functions.num_ranks, 4)
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
