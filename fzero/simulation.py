"""`simulate`: all ranks of a job in one process.

A simulated state has the structure of one rank's state, and every tensor has a leading
dimension of ranks; so has a batch.

- *As a dimension* (`VmapRanks`): `torch.vmap` runs the functions of a compiled step
  once for all ranks, captured or not. The numbers are those of as many processes, to
  rounding: batched matrix products round differently.
- *In lockstep* (`LockstepRanks`) every rank is a step of its own, with a copy of the
  model that shares its tensors, and they take turns. Any model works, and the bits are
  those of as many processes.

Shape letters: W ranks (the leading dimension), P padded elements of a flat buffer =
W·S, S elements of a shard.
"""

from __future__ import annotations

import copy
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

import optree
import torch
from torch import Tensor, nn

from fzero import graph
from fzero.comms.axes import AbstractAxis, CollectiveError, LockstepAxis
from fzero.comms.lockstep import Hub, StuckError
from fzero.comms.mesh import unfolded
from fzero.comms.records import CommRecord
from fzero.comms.stacked import RandomByRank, Stacked, VmapError
from fzero.config.config import ConfigError
from fzero.graph.schedule import CompileError
from fzero.model.model_check import ModelCheck
from fzero.parallelism import parallelism_of
from fzero.plans.mesh_axes import check_mesh
from fzero.plans.plan import Plan
from fzero.runtime.finish import check_outcome, next_state
from fzero.runtime.init_state import InitFn
from fzero.runtime.step_spec import StepSpec
from fzero.runtime.weights import differing
from fzero.state import Metrics, TrainState
from fzero.step import TrainStep
from fzero.storage.file_tensor import FileTensor, FileTensors
from fzero.storage.state_memory import is_donated, taken
from sharding import Mesh, TensorSpec

__all__ = ["LockstepRanks", "VmapRanks", "simulate", "stacked", "unstacked"]

if TYPE_CHECKING:
    from fzero.graph.program import GraphProgram

T = TypeVar("T")
BackendName = Literal["inductor", "aot_eager"]
AtOnce = Callable[[Any, TrainState[Tensor], Any], tuple[TrainState[Tensor], Metrics]]
"""A step of all ranks at once, of the ranks, their state and their batch."""


def stacked(trees: Sequence[Any]) -> Any:
    """One tree of stacked tensors from the ranks' trees, in rank order."""

    def one(*xs: Any) -> Any:
        if isinstance(xs[0], FileTensor):
            return FileTensors(xs)
        return torch.stack(xs) if isinstance(xs[0], Tensor) else xs[0]

    return optree.tree_map(one, *trees, none_is_leaf=True)


def unstacked(tree: Any, world_size: int) -> list[Any]:
    """The ranks' trees from a tree of stacked tensors. They share its memory; all ranks
    share leaves that are no tensors.
    """
    # each rank's step raises for it
    mark = tree.step if isinstance(tree, TrainState) and is_donated(tree) else None
    for x in optree.tree_leaves(tree):
        if (
            x is not mark
            and isinstance(x, Tensor | FileTensors)
            and (not x.ndim or x.shape[0] != world_size)
        ):
            raise ValueError(
                f"simulate: every tensor must have a leading dimension of {world_size} ranks, got "
                f"shape {tuple(x.shape)}; give each rank its part, for example rearrange(x, '(rank "
                f"b) ... -> rank b ...', rank={world_size})"
            )

    def of_rank(x: Any, rank: int) -> Any:
        if x is mark:
            return x
        if isinstance(x, FileTensors):
            return x[rank]
        return x[rank].data if isinstance(x, Tensor) else x

    tree = dict(tree) if isinstance(tree, Mapping) else tree  # optree looks into dicts only
    return [
        optree.tree_map(partial(of_rank, rank=rank), tree, none_is_leaf=True)
        for rank in range(world_size)
    ]


class RankTrees(Protocol):
    """How the states and batches of all ranks are one."""

    def states_of(self, state: Any) -> list[TrainState[Tensor]]:
        """The state of each rank."""
        ...

    def joined(self, states: Sequence[TrainState[Tensor]], before: Any) -> Any:
        """The state of all ranks; `before` is the one that the step has taken."""
        ...

    def joined_weights(self, of_ranks: Sequence[dict[str, Tensor]], state: Any) -> Any:
        """The weights of all ranks by flat buffer."""
        ...

    def take(self, state: Any, states: Sequence[TrainState[Tensor]]) -> None:
        """Marks a state as donated if a rank has taken its part."""
        ...

    def batches_of(self, batch: Any, num_micro_steps: int) -> list[Any]:
        """The batch of every rank."""
        ...


@dataclass(frozen=True, slots=True)
class StackedTrees:
    """Every tensor has a leading dimension of ranks."""

    world_size: int

    def states_of(self, state: Any) -> list[TrainState[Tensor]]:
        return unstacked(state, self.world_size)

    def joined(self, states: Sequence[TrainState[Tensor]], before: Any) -> Any:
        return stacked(states) if before is None else _restacked(before, states)

    def joined_weights(self, of_ranks: Sequence[dict[str, Tensor]], state: Any) -> Any:
        return {key: state.master.get(key, state.params[key]) for key in of_ranks[0]}

    def take(self, state: Any, states: Sequence[TrainState[Tensor]]) -> None:
        if any(map(is_donated, states)) and not is_donated(state):
            taken(state)

    def batches_of(self, batch: Any, num_micro_steps: int) -> list[Any]:
        if not isinstance(batch, Iterator):
            return unstacked(batch, self.world_size)
        by_step = [unstacked(one, self.world_size) for one in islice(batch, num_micro_steps)]
        return [iter(own) for own in zip(*by_step)] or [iter(()) for _ in range(self.world_size)]


@dataclass(frozen=True, slots=True)
class StageTrees:
    """Those of a pipeline, whose stages hold different parameters: a state is a list
    with the `TrainState` of each rank. A batch has a leading dimension of the ranks
    along "data": all stages of one pipeline read the same samples.
    """

    world_size: int
    num_data: int

    def states_of(self, state: Any) -> list[TrainState[Tensor]]:
        if not isinstance(state, list) or len(state) != self.world_size:
            raise ValueError(
                f"simulate: a pipeline's state must be a list with the TrainState of each of "
                f"{self.world_size} ranks, got {type(state).__name__}; pass that of init() or of "
                f"the last step"
            )
        return state

    def joined(self, states: Sequence[TrainState[Tensor]], before: Any) -> Any:
        return list(states)

    def joined_weights(self, of_ranks: Sequence[dict[str, Tensor]], state: Any) -> Any:
        return list(of_ranks)

    def take(self, state: Any, states: Sequence[TrainState[Tensor]]) -> None:
        """Each rank's own state is marked already."""

    def batches_of(self, batch: Any, num_micro_steps: int) -> list[Any]:
        places = [rank % self.num_data for rank in range(self.world_size)]
        if not isinstance(batch, Iterator):
            parts = unstacked(batch, self.num_data)
            return [parts[place] for place in places]
        by_step = [unstacked(one, self.num_data) for one in islice(batch, num_micro_steps)]
        return [iter([one[place] for one in by_step]) for place in places]


class LockstepRanks:
    """A train step whose ranks take turns in this process; made by `simulate`.

    Attributes:
        steps: each rank's step.
        plan, specs: the plan and the specs, the same on every rank.
    """

    def __init__(
        self,
        spec: StepSpec,
        world_size: int,
        observe: Callable[[int, CommRecord], None] | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self._spec = spec = replace(spec, meta_device=torch.device("cpu"))
        self._hub, self.world_size = Hub(world_size, spec.device), world_size
        self._model_check = ModelCheck(spec.model)

        def make(rank: int) -> TrainStep:
            own = replace(spec, model=_twin(spec), compile=None)
            watch = None if observe is None else lambda sent: observe(rank, sent)
            return TrainStep(own, LockstepAxis("data", world_size, rank, self._hub, watch, mesh))

        self.steps = self._hub.run(make)
        # their models share tensors with the user's, which `_origin` checks
        for step in self.steps:
            step.runtime.learned.model_check.close()
        self._trees: RankTrees = (
            StackedTrees(world_size)
            if parallelism_of(spec).is_uniform
            else StageTrees(world_size, self.plan.world_size)
        )
        self._at_once: AtOnce | None = None

    @property
    def plan(self) -> Plan:
        return self.steps[0].plan

    @property
    def specs(self) -> TrainState[TensorSpec]:
        return self.steps[0].specs

    def init(
        self, params: Mapping[str, Tensor] | None = None, *, init_fn: InitFn | None = None
    ) -> TrainState[Tensor]:
        """A new state of all ranks; arguments as for `TrainStep.init`."""
        self._model_check.record(given=params is not None)
        return self.joined(
            self.on_each(lambda rank: self.steps[rank].init(params, init_fn=init_fn))
        )

    def __call__(self, state: TrainState[Tensor], batch: Any) -> tuple[TrainState[Tensor], Metrics]:
        """One step of all ranks.

        Args:
            state: stacked; donated, unless the step was made with `donate=False`.
            batch: the batch of all ranks, each tensor with a leading dimension of
                ranks; or an iterator of such micro-batches.
        """
        if self._at_once is not None:
            return self._at_once(self, state, batch)
        return self.in_turn(state, batch)

    def in_turn(
        self, state: Any, batch: Any, *, steps: Sequence[Callable[..., Any]] | None = None
    ) -> tuple[Any, Metrics]:
        """One step, rank after rank; `steps` replace those of the ranks (by recorded
        ones, say).
        """
        steps = self.steps if steps is None else steps
        self._model_check.check_at_step(partial(self._differing, state))
        states, batches = self.states_of(state), self.batches_of(batch)
        try:
            results = self.on_each(lambda rank: steps[rank](states[rank], batches[rank]))
            return self.joined([new for new, _ in results], state), results[0][1]
        finally:
            self._trees.take(state, states)

    def evaluate(self, state: TrainState[Tensor], batch: Any) -> Tensor:
        """The mean loss over ranks, as `TrainStep.evaluate`."""
        self._model_check.check(partial(self._differing, state))
        states, batches = self.states_of(state), self.batches_of(batch)
        return self.on_each(lambda rank: self.steps[rank].evaluate(states[rank], batches[rank]))[0]

    def gather(self, state: TrainState[Tensor]) -> dict[str, Tensor]:
        """The full state dict, as `TrainStep.gather`."""
        states = self.states_of(state)
        return self.on_each(lambda rank: self.steps[rank].gather(states[rank], to="rank0"))[0]

    def weights(self, state: TrainState[Tensor]) -> Any:
        """The weights by flat buffer, stacked, as `TrainStep.weights`; in a pipeline a
        list with those of each rank.
        """
        states = self.states_of(state)
        return self._trees.joined_weights(
            self.on_each(lambda rank: self.steps[rank].weights(states[rank])), state
        )

    def with_weights(
        self, state: TrainState[Tensor], weights: Mapping[str, Tensor]
    ) -> TrainState[Tensor]:
        """The state with other weights, as `TrainStep.with_weights`; `state` and
        `weights` are stacked.
        """
        states, of_ranks = self.states_of(state), unstacked(weights, self.world_size)
        return self.joined(
            self.on_each(lambda rank: self.steps[rank].with_weights(states[rank], of_ranks[rank])),
            state,
        )

    def hvp(
        self, state: TrainState[Tensor], batch: Any, vector: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The Hessian's product with a vector, as `TrainStep.hvp`, all stacked; the ranks
        run in lockstep.
        """
        return self._product(TrainStep.hvp, state, batch, vector)

    def gnvp(
        self,
        state: TrainState[Tensor],
        batch: Any,
        vector: Mapping[str, Tensor],
        *,
        outputs: Callable[[Any, Any], Tensor],
        loss: Callable[[Tensor, Any], Any],
    ) -> dict[str, Tensor]:
        """The Gauss–Newton matrix' product, as `TrainStep.gnvp`; see `hvp`."""
        of = partial(TrainStep.gnvp, outputs=outputs, loss=loss)
        return self._product(of, state, batch, vector)

    def _product(
        self,
        product: Callable[..., dict[str, Tensor]],
        state: TrainState[Tensor],
        batch: Any,
        vector: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        given = [
            *zip(
                self.steps,
                self.states_of(state),
                self.batches_of(batch),
                unstacked(vector, self.world_size),
                strict=True,
            )
        ]
        found: dict[str, Tensor] = stacked(self.on_each(lambda rank: product(*given[rank])))
        return found

    def first_overflow(self, state: TrainState[Tensor]) -> str | None:
        """The first parameter whose gradient is not finite, as
        `TrainStep.first_overflow`.
        """
        states = self.states_of(state)
        return self.on_each(lambda rank: self.steps[rank].first_overflow(states[rank]))[0]

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        """The same ranks; rank 0 also reports its collectives to `observe`."""
        twin = copy.copy(self)
        twin.steps = [
            step.observed(observe if rank == 0 else lambda sent: None)
            for rank, step in enumerate(self.steps)
        ]
        return twin

    @property
    def has_agreed(self) -> bool:
        return self.steps[0].has_agreed

    def _differing(self, state: Any, tensors: Mapping[str, Tensor]) -> set[str]:
        """See `fzero.runtime.weights.differing`; of all ranks."""
        ranks = zip(self.steps, self.states_of(state), strict=True)
        return set().union(*(differing(step.runtime, own, tensors) for step, own in ranks))

    def states_of(self, state: Any) -> list[TrainState[Tensor]]:
        """The state of each rank."""
        return self._trees.states_of(state)

    def joined(
        self, states: Sequence[TrainState[Tensor]], before: Any = None
    ) -> TrainState[Tensor]:
        """The state of all ranks; `before` is the one that the step has taken."""
        state: TrainState[Tensor] = self._trees.joined(states, before)
        return state

    def batches_of(self, batch: Any) -> list[Any]:
        """The batch of every rank."""
        return self._trees.batches_of(batch, self.plan.num_micro_steps)

    def on_each(self, function: Callable[[int], T]) -> list[T]:
        """The results of `function(rank)` for every rank, each on its own thread; it
        may call collectives.
        """
        try:
            return self._hub.run(function)
        except StuckError as error:
            raise CollectiveError(f"simulate: {error}") from error


class VmapRanks(LockstepRanks):
    """A train step whose ranks are a dimension; made by `simulate`.

    Rare calls (`init`, `gather`, `evaluate`, `first_overflow`) run in lockstep.

    Args:
        compile: the backend that captures the step; None captures nothing.
        by: `"vmap"`, or `"either"`: the ranks run in lockstep from the first step that
            `torch.vmap` cannot run.
    """

    def __init__(
        self,
        spec: StepSpec,
        world_size: int,
        compile: BackendName | None = None,
        *,
        mesh: Mesh | None = None,
        by: Literal["vmap", "either"] = "vmap",
    ) -> None:
        super().__init__(spec, world_size, mesh=mesh)
        if self.steps[0].runtime.offload.has_files:
            raise ConfigError(
                f"by: must be 'lockstep' where state is in files, got 'vmap' with "
                f"{next(n for n, p in self.plan.placements.items() if p.kind == 'nvme')} there; "
                f"pass by='lockstep'"
            )
        self._runs_by: Literal["vmap", "either", "lockstep"] = by
        self._backend = compile
        self._stacked = Stacked(self.plan.mesh, self.plan.axes)
        self.one_step = self._make(compile)
        self._at_once = VmapRanks._all  # without this object, of which there may be copies

    @property
    def is_in_lockstep(self) -> bool:
        return self._runs_by == "lockstep"

    @property
    def program(self) -> GraphProgram:
        """The graph of all ranks."""
        assert self.one_step.program is not None
        return self.one_step.program

    def check_state(self, state: TrainState[Tensor]) -> None:
        """Raises unless `state` is a state of all ranks."""
        # other rows have the same shapes
        self.steps[0].runtime.check_state(unstacked(state, self.world_size)[0])

    def one_rank(self) -> TrainStep:
        """The step of a single rank, without processes."""
        own = replace(self._spec, model=_twin(self._spec), compile=None)
        return TrainStep(
            own,
            AbstractAxis(
                "data",
                self.world_size,
                backend="gloo",
                mesh=unfolded(self.plan.mesh, self.plan.seq_size),
            ),
        )

    def _make(self, compile: BackendName | None) -> TrainStep:
        """A step of all ranks at once."""
        step = self.one_rank()
        program = graph.program.GraphProgram.make(
            step.runtime, compile, self._stacked, until="update"
        )
        step.runtime = replace(step.runtime, runs=program)
        return step

    def _look(self, state: TrainState[Tensor], batch: Any) -> None:
        """Runs a forward of a copy of the model; raises VmapError if the model has a
        backward that a capture would ignore.
        """
        step = self._make(None)
        assert step.program is not None
        self._stacked.random = RandomByRank(state.rng, step.device)
        with _functions() as found, torch.no_grad(), _quietly():
            own = state._replace(
                buffers={name: tensor.clone() for name, tensor in state.buffers.items()}
            )
            step.program.compiled.functions.model.loss(own, step.runtime.batches.cast(batch))
        if found:
            raise VmapError(
                f"{found[0]} is a torch.autograd.Function, whose backward a capture under "
                f"torch.vmap ignores; pass compile=None"
            )

    def _all(self, state: TrainState[Tensor], batch: Any) -> tuple[TrainState[Tensor], Metrics]:
        """One step of all ranks at once."""
        if self.is_in_lockstep:
            return self.in_turn(state, batch)
        batches = zip(self.steps, self.batches_of(batch), strict=True)
        split = [list(step.runtime.batches.split(own)) for step, own in batches]
        self.check_state(state)
        self._model_check.check_at_step(partial(self._differing, state))
        micro_batches = [stacked(own) for own in zip(*split)]
        kept = optree.tree_leaves((state.params, state.master, state.optimizer))
        versions = [x._version for x in kept]
        try:
            with torch.random.fork_rng(
                devices=[x for x in (self.one_step.device,) if x.type == "cuda"]
            ):
                if self._backend is not None and not self.program.compiled.graphs:
                    self._look(state, micro_batches[0])
                return self._step_of_all(state, micro_batches)
        except (RuntimeError, VmapError, CompileError) as error:
            if isinstance(error, CollectiveError) or [x._version for x in kept] != versions:
                if not is_donated(state):
                    taken(state)
                raise  # an update that has begun must not run again
            # PyTorch's compiler skips code for ever that has failed in it once
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()  # type: ignore[no-untyped-call]
            first_line = textwrap.shorten(str(error).partition("\n")[0], 300)
            reason = (
                f"simulate: torch.vmap cannot run this step for all ranks at once: {first_line}"
            )
            if self._runs_by == "vmap":
                raise VmapError(
                    f"{reason}; by='lockstep' runs any model, and reports other errors"
                ) from error
        # A list, because vmap has already taken the iterator's micro-batches. If lockstep fails,
        # too, vmap was not the cause, so its error is raised unchanged.
        result = self.in_turn(state, iter(micro_batches))
        warnings.warn(f"{reason}; the ranks run in lockstep, which takes longer", stacklevel=2)
        self._runs_by = "lockstep"
        return result

    def _step_of_all(
        self, state: TrainState[Tensor], micro_batches: list[Any]
    ) -> tuple[TrainState[Tensor], Metrics]:
        run = self.one_step.runtime
        state = state if self._spec.donate else optree.tree_map(torch.clone, state)
        with _quietly():
            collected = run.program(run, state, micro_batches)
        outcome_W, is_sum = collected.outcome, collected.is_sum
        assert outcome_W is not None
        outcome = optree.tree_map(lambda x: x[0], outcome_W)
        if not outcome.ok:
            runs, states = [step.runtime for step in self.steps], unstacked(state, self.world_size)
            self.on_each(
                lambda rank: check_outcome(runs[rank], outcome, states[rank], dict, is_sum=is_sum)
            )
        return next_state(
            run.rules, collected, taken(state), outcome._replace(loss_scale=outcome_W.loss_scale)
        )


def simulate(
    step: TrainStep,
    world_size: int | None = None,
    *,
    mesh: Mesh | None = None,
    by: Literal["vmap", "lockstep"] | None = None,
    compile: BackendName | None = None,
) -> LockstepRanks:
    """The same step on `world_size` ranks, all of them in this process.

    Args:
        step: a step of `make_train_step`, on any number of ranks; it is not changed. A
            step made with `mesh=fzero.comms.AbstractAxis("data", W)` checks the batch
            sizes of W ranks.
        world_size: number of ranks W; None is the size of `mesh`, or the step's own.
        mesh: the mesh of the ranks; None is the step's own, if it has that many ranks.
        by: `"vmap"` runs all ranks at once: fast, to rounding; raises for models that
            `torch.vmap` cannot run. `"lockstep"` runs one rank after the other: any
            model, the bits of as many processes. None tries vmap, and warns when it
            falls back to lockstep.
        compile: captures the step of all ranks with `"inductor"` or `"aot_eager"`; not
            for models that draw random numbers.

    Returns:
        A step on stacked tensors, with `init`, `gather`, `evaluate`, `plan` and
        `specs`. Its metrics are the same on every rank, and are not stacked.
    """
    check_mesh(mesh)
    if not isinstance(step, TrainStep):
        raise ValueError(
            f"simulate: step must be of make_train_step, got {type(step).__name__}; pass that"
        )
    if world_size is None:
        world_size = step.world_size if mesh is None else mesh.size
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(
            f"simulate: world_size must be a positive integer, got {world_size!r}; say how many "
            f"ranks are meant"
        )
    if mesh is None and step.world_size == world_size:
        mesh = step.mesh
    if by not in (None, "vmap", "lockstep"):
        raise ValueError(
            f"simulate: by must be 'vmap', 'lockstep' or None, got {by!r}; pass one of these"
        )
    if compile not in (None, "inductor", "aot_eager"):
        raise ValueError(
            f"simulate: compile must be 'inductor', 'aot_eager' or None, got {compile!r}; pass one "
            f"of these"
        )
    if not parallelism_of(step.spec).is_uniform:
        if by == "vmap" or compile is not None:
            raise ValueError(
                "simulate: a pipeline must run in lockstep, because its stages are different "
                "programs; pass by='lockstep'"
            )
        return LockstepRanks(step.spec, world_size, mesh=mesh)
    if by == "lockstep":
        if compile is not None:
            raise ValueError(
                f"simulate: compile must be None in lockstep, got {compile!r}; pass by='vmap'"
            )
        return LockstepRanks(step.spec, world_size, mesh=mesh)
    try:
        return VmapRanks(step.spec, world_size, compile, mesh=mesh, by=by or "either")
    except ConfigError as error:  # a graph cannot hold this model or configuration
        if by == "vmap":
            raise
        warnings.warn(
            f"simulate: {error}; the ranks run in lockstep, which takes longer", stacklevel=2
        )
        return LockstepRanks(step.spec, world_size, mesh=mesh)


@contextmanager
def _quietly() -> Iterator[None]:
    """Silences torch.vmap's warning that it loops over the ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


@contextmanager
def _functions() -> Iterator[list[str]]:
    """The names of the autograd Functions that are applied inside, without the
    collectives.
    """
    found: list[str] = []
    apply = torch.autograd.Function.__dict__["apply"]

    def spy(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("fzero.comms."):
            found.append(cls.__name__)
        return apply.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(spy)  # type: ignore[assignment]
    try:
        yield found
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


def _twin(spec: StepSpec) -> nn.Module:
    """A copy of the modules, with the same parameters and buffers, and with those
    tensors that other code holds.
    """
    model, held = spec.model, [x for each in spec.held or () if (x := each.tensor()) is not None]
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *held)}
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise ValueError(
            f"simulate: {type(model).__name__} must be a model that deepcopy can copy, one for "
            f"each rank, got {error!r}; give it a __deepcopy__, or keep attributes that cannot be "
            f"copied outside of it"
        ) from error


def _restacked(
    state: TrainState[Tensor], states: Sequence[TrainState[Tensor]]
) -> TrainState[Tensor]:
    """The ranks' states stacked, without a copy of tensors that were updated in the
    memory of `state`.
    """

    def one(old_W: Tensor | FileTensors, *new: Any) -> Any:
        if isinstance(old_W, FileTensors):
            return FileTensors(new)
        is_same = all(
            x.data_ptr() == old.data_ptr() and x.shape == old.shape for x, old in zip(new, old_W)
        )
        return old_W if is_same else torch.stack(new)

    restacked: TrainState[Tensor] = optree.tree_map(one, state, *states)
    return restacked
