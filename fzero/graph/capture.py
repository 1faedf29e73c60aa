"""`CompiledStep`: the train step as one graph: forward, backward, collectives,
clipping, overflow, optimizer.

`StepFunctions` are what is traced (`fzero.graph.tracing`). The state is *donated*: a
write into an argument becomes a copy into the same memory at the end of the graph. The
traced aten graph is then scheduled: gathers move to their first use and are repeated
for the backward, reductions start when their input is ready, new state is written as
soon as no node reads the old one.

As with a JAX `jit`, a function is traced again for other shapes, dtypes and constants
in the batch, and where a Python value that the model reads has changed.

Shape letters: W ranks, A micro-steps.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Any, NamedTuple, Self

import optree
import torch
from torch import Tensor
from torch.fx import Graph

from fzero.comms.axes import ProcessAxis
from fzero.comms.records import CommRecord
from fzero.comms.stacked import Stacked, check_draws_nothing
from fzero.graph.backends import BackendName, make_runner
from fzero.graph.capture_errors import in_collectives, in_one_graph, too_often
from fzero.graph.captured import Captured
from fzero.graph.guards import settings
from fzero.graph.holdings import TensorKind
from fzero.graph.schedule import PassOptions
from fzero.graph.step_functions import StepFunctions
from fzero.graph.tracing import Traced, trace
from fzero.graph.traffic import sent_in
from fzero.optim.transforms import Transform
from fzero.plans.plan import Plan
from fzero.runtime.finish import Outcome
from fzero.runtime.step_runtime import StepRuntime
from fzero.state import TrainState

State = TrainState[Tensor]
MOST_GRAPHS = 8
"""The most graphs of one function; a model that needs another one in each step would
spend its time on captures.
"""


def pass_options(plan: Plan) -> PassOptions:
    """The limits of a step's schedule: those of the configuration, and the defaults of
    the eager step for the rest.
    """
    named = {
        "prefetch": plan.prefetch,
        "max_reuse_distance": plan.max_reuse_distance,
        "gather_bucket": plan.gather_bucket,
        "reduce_bucket": plan.reduce_bucket,
    }
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    ahead = PassOptions().ahead if plan.prefetch is None else None
    return PassOptions(ahead=ahead, max_live=plan.max_live, max_reducing=plan.max_reducing, **given)


class ArgumentKind(NamedTuple):
    """The properties of arguments on which a graph depends."""

    treespec: optree.PyTreeSpec
    keys: tuple[tuple[Any, ...], ...]
    leaves: tuple[Any, ...]
    settings: tuple[Any, ...]

    @classmethod
    def of(cls, arguments: Any) -> Self:
        """Shapes, strides, dtypes and devices of tensors; other leaves as they are; the
        present settings of PyTorch.
        """
        # a tree has the keys of its dicts sorted, and code may read them in their order
        keys = list[tuple[Any, ...]]()

        def note(node: Any) -> bool:
            if isinstance(node, dict):
                keys.append(tuple(node))
            return False

        leaves, treespec = optree.tree_flatten(arguments, note, none_is_leaf=True)
        return cls(treespec, tuple(keys), tuple(map(_kind_of, leaves)), settings())


def _kind_of(leaf: Any) -> Any:
    """The compared property of a leaf. For a float it is the text: 0.0 equals -0.0, and
    NaN does not equal itself.
    """
    if isinstance(leaf, Tensor):
        return TensorKind.of(leaf)
    if isinstance(leaf, float):
        return leaf.hex()
    if isinstance(leaf, set):
        return frozenset(leaf)
    kind, is_one_value = type(leaf), isinstance(leaf, Enum | type | FunctionType)
    has_own_eq = any("__eq__" in vars(base) for base in kind.__mro__[:-1])
    if kind.__hash__ is None or (
        not has_own_eq and not is_one_value and getattr(leaf, "__dict__", {})
    ):
        raise ValueError(
            f"batch: must be of tensors, numbers and texts in tuples, lists and dicts where the "
            f"step is one graph, got a {kind.__name__}, whose contents a graph would not read "
            f"anew; take them out (dict(batch), vars(batch), torch.from_numpy), or pass "
            f"compile='block'"
        )
    return leaf


@dataclass(frozen=True, slots=True)
class Compiled:
    """A traced function, and what runs its graph.

    Attributes:
        kind: the kind of the arguments that differ from call to call.
        graph: the graph as scheduled.
        sent: the collectives of one run.
    """

    kind: ArgumentKind
    traced: Traced
    run: Callable[[list[Tensor]], Sequence[Tensor]]
    graph: Graph
    sent: list[CommRecord]

    def misfit(self, kind: ArgumentKind) -> str | None:
        """Why the graph cannot run on such arguments; None if it can."""
        if self.kind.treespec != kind.treespec:
            return f"the batch has the structure {kind.treespec}, and had {self.kind.treespec}"
        if self.kind.keys != kind.keys:
            return f"the dicts of the batch have the keys {kind.keys}, and had {self.kind.keys}"
        for index, (now, then) in enumerate(zip(kind.leaves, self.kind.leaves, strict=True)):
            if type(now) is not type(then) or now != then:
                return f"leaf {index} of the batch is {now}, and was {then}"
        if self.kind.settings != kind.settings:
            return f"the settings of PyTorch are {kind.settings}, and were {self.kind.settings}"
        return self.traced.guard.changed()


class CompiledStep:
    """Captured functions of a step on one rank; with `stacked`, on all ranks at once.

    Without a backend nothing is captured, and the functions run eagerly.

    Without gradient accumulation the step is one graph. With it there are two, a
    micro-step and the update: one graph would hold the forward and the backward A times
    and take A times as long to compile.

    Args:
        run, transforms, stacked: see `StepFunctions`.
        backend: what compiles graphs.

    Attributes:
        graphs: the scheduled aten graph of each capture, in order; a `copy_` writes
            each mutated argument.
        most_graphs: the most graphs of one function.
    """

    def __init__(
        self,
        run: StepRuntime,
        transforms: Callable[[], Callable[..., Transform]],
        backend: BackendName | None,
        stacked: Stacked | None = None,
    ) -> None:
        self.functions = StepFunctions(run, transforms, stacked)
        self.checkpoint = run.changes.recomputed
        self.backend, self.options = backend, pass_options(run.plan)
        self.axes, self.graphs = self.functions.axes, list[Graph]()
        self._runtime, self._stacked, axis = run, stacked, run.ranks
        self.most_graphs = MOST_GRAPHS + run.changes.num_constants
        self._units = {buffer.key: unit.name for unit in run.plan.units for buffer in unit.buffers}
        self._compiled: dict[str, list[Compiled]] = {}
        self._observers = (
            (axis.observe,) if isinstance(axis, ProcessAxis) and axis.observe is not None else ()
        )

    @property
    def is_captured(self) -> bool:
        return self.backend is not None

    def __call__(
        self, state: State, micro_batches: Sequence[Any], step_info: Tensor
    ) -> tuple[Outcome, bool]:
        """Runs one step in place on `state`. *Collective.*

        Args:
            state: donated, its module buffers and the states of comm hooks, too.
            micro_batches: A batches.
            numbers: the number of this pass, a checksum of the hyper-parameters, and 0
                (3,), float64; equal on all ranks.

        Returns:
            The outcome, and whether losses are sums.
        """
        if len(micro_batches) == 1:
            outcome: tuple[Outcome, bool] = self._run(
                "full_step", state, micro_batches[0], step_info
            )
            return outcome
        rows, is_sum = self._accumulate(state, micro_batches, step_info)
        return self._run("update", state, rows, is_sum), is_sum

    def collect(
        self, state: State, micro_batches: Sequence[Any], step_info: Tensor
    ) -> tuple[Tensor, bool]:
        """A step without the update: leaves the mean gradients in `state.grads`, and
        makes its buffers equal. *Collective.*

        For optimizer state that is offloaded, where the graph cannot update it.
        Arguments as for a call.

        Returns:
            The rows of all ranks in each micro-step (A, W, 4): loss, weight or -1, and
            two of `step_info`; whether losses are sums.
        """
        if len(micro_batches) == 1:
            rows, is_sum = self._run("gradients", state, micro_batches[0], step_info)
            return rows[None], is_sum
        rows, is_sum = self._accumulate(state, micro_batches, step_info)
        self._run("sums", state)
        return rows, is_sum

    def evaluate(self, state: State, batch: Any) -> tuple[Tensor, Tensor | None]:
        """The loss of one batch on this rank, and its weight if it is a sum; writes the
        module buffers. *Collective.*
        """
        result: tuple[Tensor, Tensor | None] = self._run("evaluate", state, batch)
        return result

    def _accumulate(
        self, state: State, micro_batches: Sequence[Any], step_info: Tensor
    ) -> tuple[Tensor, bool]:
        """Adds up the gradients of micro-steps; returns the rows of all ranks in each
        (A, W, 4), and whether losses are sums.
        """
        for grads in state.grads.values():
            grads.zero_()
        rows_A = []
        for index, batch in enumerate(micro_batches):
            step_info = step_info.clone()
            step_info[..., 2].fill_(index)
            rows, is_sum = self._run("micro_step", state, batch, step_info)
            rows_A.append(rows)
        return torch.stack(rows_A, rows.dim() - 2), is_sum

    # --- captures ---------------------------------------------------------------------------------

    def _run(self, name: str, state: State, *further: Any) -> Any:
        """Runs one of the `StepFunctions`, captured if need be. Only the `further`
        arguments may differ in their shapes.
        """
        function = getattr(self.functions, name)
        constants: tuple[Hashable, ...] = ()
        if self._runtime.changes.num_constants and name in ("full_step", "gradients", "micro_step"):
            constants = self.functions.model.constants = self._runtime.changes.constants(
                int(state.step.reshape(-1)[0])
            )
        if self.backend is None:
            return function(state, *further)
        kind, known = ArgumentKind.of((further, constants)), self._compiled.setdefault(name, [])
        compiled = next((one for one in known if one.misfit(kind) is None), None)
        if compiled is None:
            if len(known) == self.most_graphs:
                raise too_often(
                    type(self._runtime.spec.model).__name__,
                    self.most_graphs,
                    known[-1].misfit(kind),
                )
            compiled = self._compile(function, (state, *further), kind)
            known.append(compiled)
        tensors = [x for x in optree.tree_leaves((state, *further)) if isinstance(x, Tensor)]
        # The graph holds the casts of an autocast around the step, and what is cast nowhere must
        # not be cast now.
        with (
            torch.no_grad(),
            torch.autocast(self._runtime.device.type, enabled=False),
            in_collectives(type(self._runtime.spec.model).__name__),
        ):
            result = compiled.traced.call(compiled.run, tensors)
        for observe in self._observers:
            for record in compiled.sent:
                observe(record)
        return result

    def _compile(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], kind: ArgumentKind
    ) -> Compiled:
        """Captures a function; rank 0 reports on stderr how long that took."""
        assert self.backend is not None
        began = time.perf_counter()
        traced = self._trace(function, arguments)
        exchanges = tuple(along for along in self.axes.values() if not along.is_nccl)
        runner, graph = make_runner(
            self.backend, traced.module, self.options, self.checkpoint, exchanges
        )
        if self._stacked is not None:
            check_draws_nothing(graph)
        self.graphs.append(graph)
        if self._runtime.ranks.rank == 0:
            name, stage = type(self._runtime.spec.model).__name__, self._runtime.plan.stage
            what = f"a step of {name} in stage {stage} with {self.backend}"
            print(
                f"fzero: compiled {what} in {time.perf_counter() - began:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        return Compiled(kind, traced, runner, graph, sent_in(graph, self.axes))

    def _trace(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Traced:
        spec = self._runtime.spec
        functions = () if spec.loss_fn is None else (spec.loss_fn,)
        with in_one_graph(type(spec.model).__name__):
            traced = trace(
                function, arguments, spec.model, self.checkpoint, functions, held=spec.held or ()
            )
        for node, path in zip(
            traced.graph.find_nodes(op="placeholder"), traced.paths, strict=False
        ):
            if path[0] == 0 and path[2:]:  # a dict of the state
                unit = self._units.get(path[2])
                node.meta |= {} if unit is None else {"unit": unit}
        return traced

    def trace(self, state: State, micro_batches: Sequence[Any]) -> list[Captured]:
        """The graphs that a step would run, in order. Runs nothing, and changes
        nothing.
        """
        if len(micro_batches) == 1:
            step_info = torch.empty((3,), dtype=torch.float64, device=self._runtime.device)
            self.functions.model.constants = self._runtime.changes.constants(0)
            return [
                self._captured(
                    self._trace(self.functions.full_step, (state, micro_batches[0], step_info))
                )
            ]
        micro_steps, is_sum = self.trace_micro_steps(state, micro_batches)
        return [*micro_steps, self.trace_update(state, len(micro_batches), is_sum)]

    def trace_gathers(self, state: State) -> Captured:
        """The graph of the gathers that a step makes at its start, where it gathers
        once.
        """
        return self._captured(self._trace(self.functions.gathered, (state,)))

    def trace_micro_steps(
        self, state: State, micro_batches: Sequence[Any]
    ) -> tuple[list[Captured], bool]:
        """The graphs of micro-steps, and whether losses are sums."""
        step_info = torch.empty((3,), dtype=torch.float64, device=self._runtime.device)
        self.functions.model.constants = self._runtime.changes.constants(0)
        known: dict[ArgumentKind, tuple[Captured, bool]] = {}  # equal micro-steps share a graph
        kinds = [ArgumentKind.of(batch) for batch in micro_batches]
        for kind, batch in zip(kinds, micro_batches, strict=True):
            if kind not in known:
                traced = self._trace(self.functions.micro_step, (state, batch, step_info))
                known[kind] = self._captured(traced), traced.others[1][0]
        return [known[kind][0] for kind in kinds], known[kinds[-1]][1]

    def trace_update(self, state: State, num_micro_steps: int, is_sum: bool) -> Captured:
        """The graph of the end of a step after its micro-steps."""
        rows_A = torch.empty(
            num_micro_steps,
            self.functions.num_ranks,
            4,
            dtype=torch.float64,
            device=self._runtime.device,
        )
        return self._captured(self._trace(self.functions.update, (state, rows_A, is_sum)))

    def _captured(self, traced: Traced) -> Captured:
        names = traced.graph.find_nodes(op="placeholder")
        units = {node.name: node.meta["unit"] for node in names if "unit" in node.meta}
        return Captured(traced.graph, units, self.options, self.checkpoint, self.axes)

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        """The same captured functions; `observe`, too, receives a record of each
        collective.
        """
        twin = copy.copy(self)
        twin._observers = (*self._observers, observe)
        return twin
