"""All ranks of a job in one process: what would so many ranks compute and send?

A simulated state has the structure of a rank's, and every tensor a leading dimension of ranks; so has a batch.

- *In lockstep* every rank is a step of its own with a copy of the model (its tensors shared), and they run in turn. Any
  model works, and the bits are those of as many processes.

Shape letters: W ranks (the leading dimension), P padded elements of a flat buffer = W·S, S elements of a shard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, TypeVar

import optree
import torch
from torch import Tensor, nn

from fzero.batches import map_tensors
from fzero.collectives import CollectiveError, Lockstep, Sent
from fzero.initialise import InitFn
from fzero.lockstep import Hub, StuckError
from fzero.plan import Plan
from fzero.recipe import Recipe
from fzero.state import Metrics, TrainState
from fzero.step import TrainStep
from sharding import Mesh, TensorSpec

T = TypeVar("T")


def stacked(trees: Sequence[Any]) -> Any:
    """One tree of stacked tensors from the ranks' trees, in rank order."""
    return optree.tree_map(lambda *xs: torch.stack(xs), *trees)


def unstacked(tree: Any, world_size: int) -> list[Any]:
    """The ranks' trees from a tree of stacked tensors. They share its memory; what is no tensor is every rank's."""
    for x in optree.tree_leaves(tree):
        if isinstance(x, Tensor) and (not x.ndim or x.shape[0] != world_size):
            raise ValueError(
                f"simulate: every tensor must have a leading dimension of {world_size} ranks, got shape {tuple(x.shape)}; "
                f"give each rank its part, for example rearrange(x, '(rank b) ... -> rank b ...', rank={world_size})"
            )
    return [map_tensors(lambda x, rank=rank: x[rank].data, tree) for rank in range(world_size)]


class LockstepRanks:
    """A train step whose ranks run in turn in this process; made by `simulate`.

    Attributes:
        steps: of each rank.
        plan, specs: of every rank.
    """

    def __init__(
        self,
        recipe: Recipe,
        world_size: int,
        observe: Callable[[int, Sent], None] | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        if recipe.device.type != "cpu":
            raise ValueError(f"simulate: ranks in lockstep must be on the CPU, got a model on {recipe.device}; move it")
        self._hub, self.world_size = Hub(world_size), world_size

        def make(rank: int) -> TrainStep:
            own = replace(recipe, model=_twin(recipe.model), compile=None)
            watch = None if observe is None else lambda sent: observe(rank, sent)
            return TrainStep(own, Lockstep("data", world_size, rank, self._hub, watch, mesh))

        self.steps = self._hub.run(make)

    @property
    def plan(self) -> Plan:
        return self.steps[0].plan

    @property
    def specs(self) -> TrainState[TensorSpec]:
        return self.steps[0].specs

    def init(self, params: Mapping[str, Tensor] | None = None, *, init_fn: InitFn | None = None) -> TrainState[Tensor]:
        """A new state of all ranks; arguments as for `TrainStep.init`."""
        state: TrainState[Tensor] = stacked(self._run(lambda rank: self.steps[rank].init(params, init_fn=init_fn)))
        return state

    def __call__(self, state: TrainState[Tensor], batch: Any) -> tuple[TrainState[Tensor], Metrics]:
        """One step of all ranks.

        Args:
            state: stacked; donated, unless the step was made with `donate=False`.
            batch: of all ranks, each tensor with a leading dimension of ranks; or an iterator of micro-batches like that.
        """
        states, batches = unstacked(state, self.world_size), self._batches(batch)
        results = self._run(lambda rank: self.steps[rank](states[rank], batches[rank]))
        return _restacked(state, [new for new, _ in results]), results[0][1]

    def evaluate(self, state: TrainState[Tensor], batch: Any) -> Tensor:
        """The mean loss over ranks, as `TrainStep.evaluate`."""
        states, batches = unstacked(state, self.world_size), self._batches(batch)
        return self._run(lambda rank: self.steps[rank].evaluate(states[rank], batches[rank]))[0]

    def gather(self, state: TrainState[Tensor]) -> dict[str, Tensor]:
        """The full state dict, as `TrainStep.gather`."""
        states = unstacked(state, self.world_size)
        return self._run(lambda rank: self.steps[rank].gather(states[rank], to="rank0"))[0]

    def first_overflow(self, state: TrainState[Tensor]) -> str | None:
        """The first parameter whose gradient is not finite, as `TrainStep.first_overflow`."""
        states = unstacked(state, self.world_size)
        return self._run(lambda rank: self.steps[rank].first_overflow(states[rank]))[0]

    def _batches(self, batch: Any) -> list[Any]:
        if not isinstance(batch, Iterator):
            return unstacked(batch, self.world_size)
        by_step = [unstacked(b, self.world_size) for b in islice(batch, self.plan.num_micro_steps)]
        return [iter(of_rank) for of_rank in zip(*by_step)] or [iter(()) for _ in self.steps]

    def _run(self, function: Callable[[int], T]) -> list[T]:
        try:
            return self._hub.run(function)
        except StuckError as error:
            raise CollectiveError(f"simulate: {error}") from error


def simulate(
    step: TrainStep,
    world_size: int | None = None,
    *,
    mesh: Mesh | None = None,
    by: Literal["lockstep"] = "lockstep",
) -> LockstepRanks:
    """The same step on `world_size` ranks, all of them in this process.

    Args:
        step: of `make_train_step`; its own ranks do not matter. Made with `mesh=fzero.Fake("data", W)` it checks batch sizes
            for as many. It is not changed.
        world_size: number of ranks W; None takes those of `mesh`, or the step's own.
        mesh: how they stand along several axes; None takes the step's own where it has as many ranks.
        by: `"lockstep"` runs the ranks in turn: any model, the bits of as many processes.

    Returns:
        A step on stacked tensors, with `init`, `gather`, `evaluate`, `plan` and `specs`. Its metrics are those of every
        rank.
    """
    if world_size is None:
        world_size = step.world_size if mesh is None else mesh.size
    if world_size < 1:
        raise ValueError(f"simulate: world_size must be positive, got {world_size}; say how many ranks are meant")
    if mesh is None and step.world_size == world_size:
        mesh = step.plan.mesh
    return LockstepRanks(step.recipe, world_size, mesh=mesh)


def _twin(model: nn.Module) -> nn.Module:
    """A copy of the modules, with the same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise ValueError(
            f"simulate: {type(model).__name__} must be one that can be copied, for every rank has its own, got {error!r}; "
            f"give it a __deepcopy__, or keep what cannot be copied outside of it"
        ) from error


def _restacked(state: TrainState[Tensor], states: Sequence[TrainState[Tensor]]) -> TrainState[Tensor]:
    """The ranks' states stacked, without a copy of what was written in the memory of `state`."""

    def one(old_W: Tensor, *new: Tensor) -> Tensor:
        is_same = all(x.data_ptr() == old.data_ptr() and x.shape == old.shape for x, old in zip(new, old_W))
        return old_W if is_same else torch.stack(new)

    restacked: TrainState[Tensor] = optree.tree_map(one, state, *states)
    return restacked
