"""`plan_reshard`: the elements to move between ranks when the stage, the number of
ranks, the mesh or the layout changes.

1. A state holds flat tensors: parameters, master and optimizer state, each with the
  layout of its flat buffer.
2. Every flat tensor is divided into W *fine shards*, the smallest that a mesh can have:
   each rank has its own, and may hold others, too. Ranks are in the order of the fine
   shards (`Plan.ranks`), so that those that a rank holds are adjacent: its own, those
   of all ranks, or those of the ranks with the same shard.
3. A new tensor is filled from the old ones that hold the same quantity of the same
   parameters: a *flow*. Its moves are those of `sharding.plan_transfer` between fine
   shards. They are computed on demand, each process its own.
4. A process copies elements that it holds. Each element that it lacks is sent once, by
   the rank whose own fine shard has it: so the sending is spread evenly over all ranks
   that hold the same.

The plan is a value and holds integers and names only; `fzero.reshard` runs it. Shape
letters: P padded = W·S, S elements of a fine shard, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from fzero.common.collector import collector_paused
from fzero.plans.mesh_axes import describe
from fzero.plans.plan import Plan
from fzero.plans.staged import StagedPlan
from fzero.resharding.tensors import (
    BufferTensors,
    FlatTensor,
    Sources,
    buffers_of,
    has_entries,
    hook_states_of,
    of_plan,
    quantity_for,
)
from sharding import FlatLayout, Move, TensorSpec, moves_between, moves_from, moves_to
from sharding.dtypes import itemsize
from sharding.transfer import in_one_order, merged
from sharding.views import torch_dtype

MOST_GEOMETRIES = 16
"""How many lists of moves a plan remembers. Adjacent units have few different ones."""


@dataclass(frozen=True, slots=True)
class JobRank:
    """A process's rank in the old job and in the new one; None where it has none."""

    old: int | None
    new: int | None


@dataclass(frozen=True, slots=True)
class Flow:
    """The moves from one flat tensor of the old state, `source`, to one of the new,
    `target`.

    Attributes:
        master: of new parameters whose master has smaller shards; a rank casts the
            parameters of its master shard itself.
        stages: the stages of the old pipeline, which holds the source, and of the new
            one; 0 without pipelines.
    """

    source: FlatTensor
    target: FlatTensor
    master: FlatTensor | None = None
    stages: tuple[int, int] = (0, 0)

    @property
    def dtype(self) -> str:
        """The dtype in which the elements are sent: the narrower of the two."""
        return min(self.source.dtype, self.target.dtype, key=itemsize)

    @property
    def geometry(self) -> tuple[Any, ...]:
        """All that its moves depend on. Where both tensors have one order, that is no
        name: equal blocks have equal ones.
        """
        old, new = self.source.layout, self.target.layout
        layouts = (old.partition, new.partition) if in_one_order(old, new) else (old, new)
        made = None if self.master is None else self.master.num_shards
        return self.stages, *layouts, self.source.num_shards, self.target.num_shards, made

    def takes(self, holder: int, fine_shard: int) -> bool:
        """Whether a new rank that holds a fine shard gets it from the old ones."""
        return self.master is None or holder not in self.master.holders(fine_shard)

    def taken(self, holder: int) -> Iterator[range]:
        """The fine shards that a new rank gets from the old ones, adjacent ones as one
        range.
        """
        held = self.target.holders(holder)
        made = range(held.stop, held.stop) if self.master is None else self.master.holders(holder)
        yield from (
            taken for taken in (range(held.start, made.start), range(made.stop, held.stop)) if taken
        )


@dataclass(frozen=True, slots=True)
class ReshardRound:
    """The flows that run together: those of one unit, or those of the module buffers
    and random states.
    """

    name: str
    flows: tuple[Flow, ...]


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The moves from a state of one step to a state of another. `print(plan)` shows the
    bytes that each process sends.

    Attributes:
        title: the old and the new job.
        job_ranks: the ranks of every process.
        numbers: each 0-d tensor of the new optimizer state, with its sources.
        anew: the parameters whose optimizer state begins anew: frozen in the old step,
            and trained in the new one.
        senders, receivers: by pipeline stage, the process of each old fine shard and of
            each new one.
    """

    title: str
    job_ranks: tuple[JobRank, ...]
    rounds: tuple[ReshardRound, ...] = field(repr=False)
    numbers: dict[str, Sources] = field(repr=False)
    anew: frozenset[str] = field(repr=False)
    senders: tuple[tuple[int, ...], ...] = field(repr=False)
    receivers: tuple[tuple[int, ...], ...] = field(repr=False)
    _sends: tuple[dict[int, int], ...] = field(init=False, repr=False, compare=False)
    _receives: tuple[dict[int, int], ...] = field(init=False, repr=False, compare=False)
    _lacking: dict[tuple[tuple[int, int], range, range], tuple[int, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """A cache: the new ranks of one range whose processes have no old rank in another
    range.
    """
    _latest: dict[tuple[Any, ...], tuple[Move, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """A cache of the moves of processes, by geometry: the tensors of a flat buffer, and
    of equal blocks, have the same.
    """

    def __post_init__(self) -> None:
        for stages, attribute in ((self.senders, "_sends"), (self.receivers, "_receives")):
            found = tuple(
                {process: fine_shard for fine_shard, process in enumerate(stage)}
                for stage in stages
            )
            object.__setattr__(self, attribute, found)

    def _fine_shards(self, flow: Flow, process: int) -> tuple[int | None, int | None]:
        """The fine shards of the old stage and of the new one that a process holds."""
        old, new = flow.stages
        return self._sends[old].get(process), self._receives[new].get(process)

    def moves(self, flow: Flow, process: int | None = None) -> Iterator[Move]:
        """The moves of a flow between all processes, or those of one. Starts and stops
        count elements of the tensors they hold.

        Moves from a process to itself are copies and come first. Any two processes see
        their moves in the same order. For one process moves take time in proportion to
        its own copies and messages.
        """
        if process is None:
            copies = chain.from_iterable(
                self._copies(flow, own) for own in range(len(self.job_ranks))
            )
            return merged(chain(copies, self._sent(flow)))
        alike = process, *flow.geometry
        if alike not in self._latest:
            if len(self._latest) == MOST_GEOMETRIES:
                self._latest.clear()
            self._latest[alike] = tuple(
                merged(chain(self._copies(flow, process), self._sent_by_or_to(flow, process)))
            )
        return iter(self._latest[alike])

    def _copies(self, flow: Flow, process: int) -> Iterator[Move]:
        """The elements that a process both has and needs."""
        sent, received = self._fine_shards(flow, process)
        if sent is None or received is None:
            return
        held = flow.source.holders(sent)
        for fine_shards in flow.taken(received):
            place = flow.target.start(fine_shards.start)
            for move in moves_between(flow.source.layout, flow.target.layout, held, fine_shards):
                yield Move(
                    process, move.source_start, move.source_stop, process, place + move.target_start
                )

    def _sent(self, flow: Flow) -> Iterator[Move]:
        """The moves between processes, sorted by new fine shards and then by receiving
        ranks.
        """
        old, new = flow.source.layout, flow.target.layout
        for move in moves_to(old, new, range(new.world_size)):
            yield from (self._sending(flow, move, target) for target in self._reached(flow, move))

    def _sent_by_or_to(self, flow: Flow, process: int) -> Iterator[Move]:
        """The same for one process, which sends from its own fine shard, and receives
        the elements that it lacks.
        """
        old, new = flow.source.layout, flow.target.layout
        sent, received = self._fine_shards(flow, process)
        found: list[tuple[Move, int]] = []
        if sent is not None:
            found += [
                (m, target) for m in moves_from(old, new, sent) for target in self._reached(flow, m)
            ]
        if received is not None:
            held = range(0) if sent is None else flow.source.holders(sent)
            for fine_shards in flow.taken(received):
                found += [
                    (move, received) for move in moves_to(old, new, fine_shards, without=held)
                ]
        found.sort(key=lambda pair: (pair[0].target_rank, pair[0].target_start, pair[1]))
        return (self._sending(flow, move, target) for move, target in found)

    def _reached(self, flow: Flow, move: Move) -> Iterator[int]:
        """The new ranks that receive a move between two fine shards, because their
        processes lack its elements.
        """
        sources, targets = (
            flow.source.holders(move.source_rank),
            flow.target.holders(move.target_rank),
        )
        old, new = flow.stages
        key = flow.stages, sources, targets
        if key not in self._lacking:
            senders, receivers = self._sends[old], self.receivers[new]
            self._lacking[key] = tuple(
                target for target in targets if senders.get(receivers[target], -1) not in sources
            )
        return (target for target in self._lacking[key] if flow.takes(target, move.target_rank))

    def _sending(self, flow: Flow, move: Move, target: int) -> Move:
        """A move between fine shards, to one of the ranks that hold the new one."""
        source_start = flow.source.start(move.source_rank) + move.source_start
        target_start = flow.target.start(move.target_rank) + move.target_start
        old, new = flow.stages
        sender, receiver = self.senders[old][move.source_rank], self.receivers[new][target]
        return Move(sender, source_start, source_start + move.numel, receiver, target_start)

    @property
    def sent_nbytes(self) -> tuple[int, ...]:
        """The bytes that each process sends to others."""
        return tuple(sent for sent, _, _ in self._traffic())

    def _traffic(self) -> list[list[int]]:
        """The bytes that each process sends, receives, and copies locally."""
        traffic = [[0, 0, 0] for _ in self.job_ranks]
        for flow in (flow for round_ in self.rounds for flow in round_.flows):
            for move in self.moves(flow):
                if move.source_rank == move.target_rank:
                    traffic[move.target_rank][2] += move.numel * itemsize(flow.target.dtype)
                else:
                    traffic[move.source_rank][0] += move.numel * itemsize(flow.dtype)
                    traffic[move.target_rank][1] += move.numel * itemsize(flow.dtype)
        return traffic

    def __str__(self) -> str:
        rows = [
            f"{process:>7}  {_word(place.old):>8}  {_word(place.new):>8}"
            + "".join(f"  {n:>15,}" for n in nbytes)
            for process, (place, nbytes) in enumerate(
                zip(self.job_ranks, self._traffic(), strict=True)
            )
        ]
        head = f"process  old rank  new rank  {'bytes sent':>15}  {'received':>15}  {'copied':>15}"
        return "\n".join([self.title, head, *rows])


@collector_paused()
def plan_reshard(
    old: Plan | StagedPlan,
    new: Plan | StagedPlan,
    *,
    job_ranks: Sequence[JobRank] | None = None,
    rng: Mapping[str, TensorSpec] | None = None,
) -> ReshardPlan:
    """The plan that turns a state of `old` into one of `new`. Sends nothing, reads no
    tensor.

    Stage, mesh, world size, units, order, parameter groups, comm hooks, dtypes and
    frozen parameters may differ, but no master or optimizer state may become narrower.
    A master comes from the old master, or from the old parameters if there is none. A
    parameter that is frozen in one of the two steps keeps its values only; its
    optimizer state is new, or is dropped. The number of pipeline stages may differ too.
    The lowest stage that holds a tied layer sends it.

    Args:
        old, new: plans of one model, from `step.plan` or `fzero.plan`; of a pipeline
            from `staged_plan(step)`.
        job_ranks: the ranks of each process; None: rank r of both jobs is the same
            process.
        rng: the specs of each rank's random state, `step.specs.rng`; a new rank gets
            that of the same old rank.

    Raises:
        ValueError: the models differ in a name or a shape; the optimizers keep
            different tensors; a tensor would become narrower; or a rank of either job
            has no process, or several.

    >>> from fzero.plans.plan_spec import plan
    >>> model = torch.nn.Linear(8, 8)
    >>> plans = [
    ...     plan(model, {"zero_optimization": {"stage": stage}}, world_size=2) for stage in (0, 1)
    ... ]
    >>> plan_reshard(*plans).sent_nbytes  # every rank has all that it needs
    (0, 0)
    >>> print(plan_reshard(*reversed(plans)))
    ZeRO stage 1 on 2 ranks -> stage 0 on 2 ranks
    process  old rank  new rank       bytes sent         received           copied
          0         0         0              512               64              800
          1         1         1               64              512              352
    """
    for which, given in (("old", old), ("new", new)):
        if not isinstance(given, Plan | StagedPlan):
            raise ValueError(
                f"plan_reshard: {which} must be a plan, got {type(given).__name__}; pass "
                f"{which}.plan of a step, or the result of fzero.plan"
            )
    before, after = StagedPlan.of(old), StagedPlan.of(new)
    _check_same("parameter", _shapes_of(before), _shapes_of(after))
    _check_same("module buffer", _buffer_shapes(before), _buffer_shapes(after))
    if job_ranks is None:
        numbers = range(max(before.world_size, after.world_size))
        sizes = before.world_size, after.world_size
        job_ranks = [
            JobRank(*(rank if rank < size else None for size in sizes)) for rank in numbers
        ]
    _check_present("old", [ranks.old for ranks in job_ranks], before.world_size)
    _check_present("new", [ranks.new for ranks in job_ranks], after.world_size)
    counted: dict[str, Sources] = {}
    began: set[str] = set()
    rounds = []
    old_stages = _old_stages(before)
    for stage, plan in enumerate(after.stages):
        for unit in plan.units:
            flows = [
                flow
                for b in unit.buffers
                for flow in _flows_of(BufferTensors(plan, b), old_stages, stage, counted, began)
            ]
            rounds.append(ReshardRound(unit.name, tuple(flows)))
        rest = list(_own_flows(before, plan, stage, rng or {}))
        rounds.append(ReshardRound("module buffers and random states", tuple(rest)))
    senders = {ranks.old: process for process, ranks in enumerate(job_ranks)}
    receivers = {ranks.new: process for process, ranks in enumerate(job_ranks)}
    return ReshardPlan(
        f"ZeRO stage {before.stages[0].stage} on {describe(before.mesh)} -> stage "
        f"{after.stages[0].stage} on {describe(after.mesh)}",
        tuple(job_ranks),
        tuple(rounds),
        counted,
        frozenset(began),
        tuple(
            tuple(senders[rank] for rank in before.ranks(stage))
            for stage in range(len(before.stages))
        ),
        tuple(
            tuple(receivers[rank] for rank in after.ranks(stage))
            for stage in range(len(after.stages))
        ),
    )


# --- flows ----------------------------------------------------------------------------------------


_OldStages = dict[str, tuple[int, BufferTensors]]
"""By parameter, the old flat buffer that holds it, and its stage."""


def _old_stages(old: StagedPlan) -> _OldStages:
    found: _OldStages = {}
    for stage, plan in enumerate(old.stages):
        for tensors in of_plan(plan):
            for name in tensors.buffer.layout.names:
                # copies of tied layers are equal: the lowest stage sends them
                found.setdefault(name, (stage, tensors))
    return found


def _flows_of(
    target: BufferTensors,
    old_stages: _OldStages,
    stage: int,
    counted: dict[str, Sources],
    began: set[str],
) -> Iterator[Flow]:
    """The flows to a new flat buffer. Enters its 0-d numbers in `counted`, and
    parameters with new optimizer state in `began`.
    """
    names_of: dict[tuple[int, str], list[str]] = {}
    for name in target.buffer.layout.names:
        old_stage, source = old_stages[name]
        names_of.setdefault((old_stage, source.buffer.key), []).append(name)
    known: list[BufferTensors] = []
    anew: list[str] = []
    for names in names_of.values():
        old_stage, source = old_stages[names[0]]
        _check_same_kind(source, target, names)
        yield from _flows_between(source, target, names, (old_stage, stage))
        if source.buffer.trainable:
            known.append(source)
        elif target.buffer.trainable:
            anew += names
    began.update(anew)
    for path, name in target.numbers.items():
        counted[name] = Sources(tuple(source.numbers[path] for source in known), tuple(anew))


def _own_flows(
    old: StagedPlan, plan: Plan, stage: int, rng: Mapping[str, TensorSpec]
) -> Iterator[Flow]:
    """The flows to the module buffers, random states and states of comm hooks of a new
    stage.
    """
    # Ranks with one place in "data" have one random state on all stages. The old stage of the same
    # number may be this process.
    found = dict[str, Flow]()
    for old_stage in sorted(range(len(old.stages)), key=lambda old_stage: old_stage != stage):
        source = old.stages[old_stage]
        wanted, own = buffers_of(plan), {f"state.rng[{kind!r}]": spec for kind, spec in rng.items()}
        for name, tensor in buffers_of(source).items():
            if name in wanted:
                found.setdefault(name, Flow(tensor, wanted[name], stages=(old_stage, stage)))
        for name, spec in (own | kept_hook_states(source, plan)).items():
            found.setdefault(
                name, replace(_own(name, spec, source, plan), stages=(old_stage, stage))
            )
    yield from found.values()


def _flows_between(
    source: BufferTensors, target: BufferTensors, shared: Sequence[str], stages: tuple[int, int]
) -> Iterator[Flow]:
    """The flows from one flat buffer to another, for the parameters that both hold."""
    for quantity, tensor in target.tensors.items():
        if quantity not in ("params", "master") and not source.buffer.trainable:
            continue  # new optimizer state
        master = (
            target.tensors["master"] if quantity == "params" and target.buffer.has_master else None
        )
        if master is not None and master.num_shards == tensor.num_shards:
            continue  # cast from the rank's own master
        wanted = quantity_for(
            quantity, source.buffer.dtypes.param, target.buffer, has_master=source.buffer.has_master
        )
        if has_entries(tensor, shared):  # then the old one has them too, in the same shapes
            yield Flow(source.tensors[wanted], tensor, master, stages)


def kept_hook_states(old: Plan, new: Plan) -> dict[str, TensorSpec]:
    """The specs of the comm hooks' states that can be continued, by name in the full
    state. Others start anew.
    """
    before = hook_states_of(old)
    return {
        name: spec
        for name, (spec, text) in hook_states_of(new).items()
        if before.get(name, ("", ""))[1] == text
    }


def _own(name: str, spec: TensorSpec, old: Plan, new: Plan) -> Flow:
    """The flow of a tensor that each rank has for itself: a flat tensor, one fine shard
    per rank. A rank in both jobs keeps its own."""

    def tensor(plan: Plan) -> FlatTensor:
        names = tuple(f"rank {rank}" for rank in plan.ranks)
        layout = FlatLayout(names, (spec.shape,) * plan.world_size, plan.world_size)
        return FlatTensor(name, layout, spec.dtype, plan.world_size)

    return Flow(tensor(old), tensor(new))


# --- checks ---------------------------------------------------------------------------------------


def _shapes_of(job: StagedPlan) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for plan in job.stages:
        for buffer in plan.flat_buffers:
            shapes.update(zip(buffer.layout.names, buffer.layout.shapes, strict=True))
    return shapes


def _buffer_shapes(job: StagedPlan) -> dict[str, tuple[int, ...]]:
    return {name: spec.shape for plan in job.stages for name, spec in plan.buffers.items()}


def _check_same(
    what: str, old: Mapping[str, tuple[int, ...]], new: Mapping[str, tuple[int, ...]]
) -> None:
    if old == new:
        return
    differing = [
        name for name in (*old, *(n for n in new if n not in old)) if old.get(name) != new.get(name)
    ]
    name = differing[0]
    raise ValueError(
        f"plan_reshard: both steps must be of one model, and {what} {name!r} has shape "
        f"{old.get(name, 'none')} in the old one and {new.get(name, 'none')} in the new "
        f"({len(differing)} such names: {', '.join(differing[:4])}); make both steps from the same "
        f"model"
    )


def _check_same_kind(old: BufferTensors, new: BufferTensors, shared: Sequence[str]) -> None:
    """Raises unless the old buffer has all the state that the new one needs for the
    parameters that both hold.
    """
    source, target = old.buffer, new.buffer
    if not (source.trainable and target.trainable):
        return  # only weights move
    name = shared[0]
    kinds = old.kind, new.kind
    kept = old.dtypes(shared), new.dtypes(shared)
    if kinds[0] != kinds[1] or kept[0].keys() != kept[1].keys():
        theirs = [
            f"{kind}({', '.join(path[1:] for path in paths)})"
            for kind, paths in zip(kinds, kept, strict=True)
        ]
        raise ValueError(
            f"plan_reshard: the optimizer of parameter {name!r} must keep the same tensors in both "
            f"steps, and keeps {theirs[0]} in the old and {theirs[1]} in the new; start the new "
            f"step from the weights, init(old.gather(state))"
        )
    dtypes = {"master": (source.dtypes.master, target.dtypes.master)}
    dtypes |= {f"state{path}": (kept[0][path], dtype) for path, dtype in kept[1].items()}
    for what, (before, after) in dtypes.items():
        if before != after and torch.promote_types(
            torch_dtype(before), torch_dtype(after)
        ) != torch_dtype(after):
            raise ValueError(
                f"plan_reshard: {what} of parameter {name!r} must not become narrower, and is "
                f"{before} in the old step and {after} in the new; give the new step the same "
                f"master and optimizer dtypes"
            )


def _check_present(job: str, ranks: Sequence[int | None], world_size: int) -> None:
    if sorted(rank for rank in ranks if rank is not None) != list(range(world_size)):
        raise ValueError(
            f"reshard: each of the {world_size} ranks of the {job} job must be one process, and "
            f"the processes are ranks {list(ranks)}; call it once on every process, outside of the "
            f"{job} job with a step on Fake('data', {world_size})"
        )


def _word(rank: int | None) -> str:
    return "-" if rank is None else str(rank)
