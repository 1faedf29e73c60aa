"""The laws of a comm hook (`fzero.comms.comm_hooks`), so that its gather and
reduce-scatter can replace the exact ones.

Both run on all ranks of a job in lockstep (`fzero.comms.lockstep`), several rounds in
sequence, each with the state of the previous round. From the laws of each it follows
that the two are adjoint, up to the declared error.
Shape letters: W ranks, S elements of a shard, P = W·S.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from hypothesis import strategies as st
from torch import Tensor

from fzero.comms.axes import CollectiveError, LockstepAxis
from fzero.comms.collectives import REDUCE
from fzero.comms.comm_hooks import CommHook
from fzero.comms.lockstep import Hub, StuckError
from fzero.comms.pending import Pending
from fzero.comms.records import CommRecord
from fzero.optim.transforms import leaf_names, same_bits
from fzero.testing.laws import Laws
from sharding.views import torch_dtype

# elements of other tensors before and after the argument of a collective, in the same memory
GUARD = 4
LARGE = 512
"""From this number of elements in a shard on, a hook must not send more than the exact
collectives: overhead such as a code book, a scale or a header is small then."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of a gather and a reduce-scatter of random whole numbers, which are
    distinct within a round.
    """

    world_size: int
    shard_numel: int
    dtype: str
    num_rounds: int
    seed: int

    @property
    def shards(self) -> Tensor:
        """The shards that each rank gathers in each round (num_rounds, W, S)."""
        return self._numbers(self.seed).view(self.num_rounds, self.world_size, self.shard_numel)

    @property
    def fulls(self) -> Tensor:
        """The summands of each rank in each round (num_rounds, W, P)."""
        by_rank = [self._numbers(self.seed + 1 + rank) for rank in range(self.world_size)]
        return torch.stack(by_rank, dim=1)

    def _numbers(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        numel = self.world_size * self.shard_numel
        rounds = [torch.randperm(numel, generator=generator) + 1 for _ in range(self.num_rounds)]
        sign = 1 - 2 * torch.randint(0, 2, (self.num_rounds, numel), generator=generator)
        return (torch.stack(rounds) * sign).to(torch_dtype(self.dtype))


def rounds(min_numel: int = 0, max_numel: int = 9) -> st.SearchStrategy[Rounds]:
    """Rounds on 1 to 4 ranks, including empty shards and odd numbers of elements."""
    return st.builds(
        Rounds,
        world_size=st.integers(1, 4),
        shard_numel=st.integers(min_numel, max_numel),
        dtype=st.sampled_from(["float32", "float64"]),
        num_rounds=st.integers(1, 3),
        seed=st.integers(0, 999),
    )


class _Given(NamedTuple):
    """A tensor with the memory around it."""

    x: Tensor
    memory: Tensor
    before: Tensor

    @classmethod
    def of(cls, values: Tensor) -> _Given:
        memory = torch.full((values.numel() + 2 * GUARD,), 7.0, dtype=values.dtype)
        memory[GUARD : GUARD + values.numel()] = values
        return cls(memory[GUARD : GUARD + values.numel()], memory, memory.clone())

    @property
    def is_unchanged(self) -> bool:
        return torch.equal(self.memory, self.before)


class _Round(NamedTuple):
    """The results of a round on one rank."""

    full: Any
    gather_state: Any
    sum: Any
    reduce_state: Any
    # whether the arguments of gather and of reduce_scatter are unchanged
    is_unchanged: tuple[bool, bool]


class _Run(NamedTuple):
    """The results of the rounds, by rank and round."""

    # the initial states of gather and of reduce_scatter, by rank
    first_states: list[tuple[Any, Any]]
    rounds: list[list[_Round]]
    sent: list[list[CommRecord]]
    sent_nbytes: list[int]
    num_left: int

    def each(self) -> Iterator[tuple[int, int, _Round]]:
        """(rank, index, round) of every round."""
        return (
            (rank, index, one)
            for rank, rounds in enumerate(self.rounds)
            for index, one in enumerate(rounds)
        )

    def beside(self, other: _Run) -> Iterator[tuple[int, _Round, _Round]]:
        """(rank, round, the same round of another run)."""
        return ((rank, one, other.rounds[rank][index]) for rank, index, one in self.each())


class Declared(NamedTuple):
    """A comm hook with its allowed error."""

    hook: CommHook
    max_error: float


def _run(declared: Declared, example: Rounds, *, is_late: bool = False) -> _Run:
    hook, sent_nbytes = declared.hook, [0] * example.world_size

    def count(source: int, value: Any) -> None:
        if isinstance(value, Tensor):
            sent_nbytes[source] += value.numel() * value.element_size()

    hub = Hub(example.world_size, sees=count)
    sent: list[list[CommRecord]] = [[] for _ in range(example.world_size)]
    shards, fulls = example.shards, example.fulls
    first: list[tuple[Any, Any]] = [(None, None)] * example.world_size

    def on_rank(rank: int) -> list[_Round]:
        axis = LockstepAxis("data", example.world_size, rank, hub, sent[rank].append)
        of_gather, of_reduce = hook.init(shards[0, rank].clone()), hook.init(fulls[0, rank].clone())
        first[rank] = _copy((of_gather, of_reduce))
        found = []
        for index in range(example.num_rounds):
            shard, full = _Given.of(shards[index, rank]), _Given.of(fulls[index, rank])
            gathered, of_gather = hook.gather(shard.x, axis, of_gather)
            added, of_reduce = _reduce(hook, full.x, axis, of_reduce, is_late=is_late)
            full_P, gather_state, sum_S, reduce_state = _copy(
                (gathered, of_gather, added, of_reduce)
            )
            is_unchanged = shard.is_unchanged, full.is_unchanged
            found.append(_Round(full_P, gather_state, sum_S, reduce_state, is_unchanged))
        return found

    by_rank = hub.run(on_rank)
    return _Run(first, by_rank, sent, sent_nbytes, hub.num_left)


def _reduce(
    hook: CommHook, full_P: Tensor, axis: LockstepAxis, state: Any, *, is_late: bool
) -> tuple[Tensor, Any]:
    """A reduction as in a step: immediate, or of values that an earlier collective is
    still writing.
    """
    if not is_late:
        return hook.reduce_scatter(full_P, axis, state)
    written = torch.full_like(full_P, torch.nan)
    after = Pending(REDUCE, (), lambda: written.copy_(full_P))
    out_S = full_P.new_empty(full_P.numel() // axis.size)
    return hook.start_reduce_scatter(written, axis, state, out_S=out_S, after=after).wait()


def _copy(tree: Any) -> Any:
    return optree.tree_map(
        lambda x: x.clone() if isinstance(x, Tensor) else x, tree, none_is_leaf=True
    )


COLLECTIVE_LAWS = Laws[Declared, Rounds](rounds())


@COLLECTIVE_LAWS.law(
    "shards of any number of elements must be taken, none and odd numbers too, and nothing raised",
    "The error above is your function's; a codec copies bytes "
    "(x.clone(memory_format=torch.contiguous_format)) before it views them as a wider dtype, for "
    "they may have any strides, and are none of an empty shard",
)
def _raises(declared: Declared, example: Rounds) -> str | None:
    for is_late in (False, True):
        with suppress(StuckError, CollectiveError):  # another law tests these errors
            _run(declared, example, is_late=is_late)
    return None


@COLLECTIVE_LAWS.law(
    "no rank may wait for what nobody sends, and what is sent must be received",
    "Let every rank call the same collectives in the same order, whatever its data",
)
def _does_not_end(declared: Declared, example: Rounds) -> str | None:
    try:
        run = _run(declared, example)
    except (StuckError, CollectiveError) as error:
        cause = error if isinstance(error, StuckError) else error.__cause__
        if isinstance(cause, StuckError):
            return str(cause)
        raise
    return f"{run.num_left} messages are never received" if run.num_left else None


@COLLECTIVE_LAWS.law(
    "tensors that it is given must stay as they are", "Write to a copy, or to a new tensor"
)
def _writes(declared: Declared, example: Rounds) -> str | None:
    for rank, _, round_ in _run(declared, example).each():
        for name, is_unchanged in zip(
            ("gather", "reduce_scatter"), round_.is_unchanged, strict=True
        ):
            if not is_unchanged:
                return f"{name} writes to what it is given on rank {rank}, or around it"
    return None


@COLLECTIVE_LAWS.law(
    "gather makes P elements of S and reduce_scatter S of P, in the dtype that it was given",
    "Cut off what you padded, and cast back",
)
def _has_another_form(declared: Declared, example: Rounds) -> str | None:
    dtype, numel = torch_dtype(example.dtype), example.shard_numel
    for rank, _, round_ in _run(declared, example).each():
        forms = (
            ("gather", round_.full, numel * example.world_size),
            ("reduce_scatter", round_.sum, numel),
        )
        for name, found, expected in forms:
            form = (tuple(found.shape), found.dtype) if isinstance(found, Tensor) else found
            if form != ((expected,), dtype):
                return (
                    f"{name} gives {form} on rank {rank}, where ({expected},) and {dtype} is meant"
                )
    return None


@COLLECTIVE_LAWS.law(
    "every rank must gather the same full tensor, bit for bit",
    "Treat this rank's own shard as those of others: pass it through the same code",
)
def _ranks_disagree(declared: Declared, example: Rounds) -> str | None:
    run = _run(declared, example)
    for rank, index, round_ in run.each():
        first = run.rounds[0][index]
        if not same_bits(first.full, round_.full):
            return f"rank 0 gathers {first.full.tolist()} and rank {rank} {round_.full.tolist()}"
    return None


@COLLECTIVE_LAWS.law(
    "gather must join the shards of all ranks in rank order, each element to max_error of the "
    "largest",
    "Put shard r at [r·S, (r+1)·S), or declare the error",
)
def _gathers_otherwise(declared: Declared, example: Rounds) -> str | None:
    for index, round_ in enumerate(_run(declared, example).rounds[0]):
        expected = example.shards[index].reshape(-1)
        if fault := _is_far(round_.full, expected, declared.max_error * _largest(expected)):
            return f"gather {fault}"
    return None


@COLLECTIVE_LAWS.law(
    "reduce_scatter must give this rank's shard of the sum over ranks, to max_error of the ranks' "
    "largest elements",
    "Add up, do not average; or declare the error",
)
def _adds_otherwise(declared: Declared, example: Rounds) -> str | None:
    for rank, index, round_ in _run(declared, example).each():
        parts = example.fulls[index]
        expected = parts.sum(0).view(example.world_size, example.shard_numel)[rank]
        if fault := _is_far(round_.sum, expected, declared.max_error * sum(map(_largest, parts))):
            return f"reduce_scatter on rank {rank} {fault}"
    return None


@COLLECTIVE_LAWS.law(
    "the first round must deliver exactly the result of lossy",
    "Let lossy be the values that every rank decodes from the bytes sent",
)
def _loses_otherwise(declared: Declared, example: Rounds) -> str | None:
    """Only the first round: a state may change what is sent afterwards."""
    lossy, run = declared.hook.lossy, _run(declared, example)
    for rank, rounds in enumerate(run.rounds):
        expected = torch.cat([lossy(shard_S) for shard_S in example.shards[0]])
        if fault := _is_far(rounds[0].full, expected, 0.0):
            return f"gather {fault}"
        parts = [
            lossy(full_P.view(example.world_size, example.shard_numel))[rank]
            for full_P in example.fulls[0]
        ]
        rounding = 2.0**-20 * sum(map(_largest, parts))
        if fault := _is_far(rounds[0].sum, torch.stack(parts).double().sum(0), rounding):
            return f"reduce_scatter on rank {rank} {fault}"
    return None


@COLLECTIVE_LAWS.law(
    "the state must keep its structure, shapes and dtypes",
    "Let init make every tensor that will be there",
)
def _state_changes_form(declared: Declared, example: Rounds) -> str | None:
    run = _run(declared, example)
    for rank, _, round_ in run.each():
        states = (round_.gather_state, round_.reduce_state)
        for name, first, state in zip(
            ("gather", "reduce_scatter"), run.first_states[rank], states, strict=True
        ):
            if _form(state) != _form(first):
                return f"on rank {rank} init gives {_form(first)} and {name} {_form(state)}"
    return None


def _form(state: Any) -> list[tuple[str, Any]]:
    leaves = optree.tree_leaves(state)
    kinds = [
        (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in leaves
    ]
    return list(zip(leaf_names(state), kinds, strict=True))


@COLLECTIVE_LAWS.law(
    "equal inputs and states must give equal bits",
    "Remember nothing but the state; keep the state of a random generator in it",
)
def _differs_again(declared: Declared, example: Rounds) -> str | None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = _run(declared, example)
        torch.manual_seed(1)  # so that a random number that is drawn shows
        second = _run(declared, example)
    for rank, one, other in first.beside(second):
        for x, y in zip(optree.tree_leaves(one), optree.tree_leaves(other), strict=True):
            if isinstance(x, Tensor) and not same_bits(x, y):
                return f"two runs give {x.tolist()} and {y.tolist()} on rank {rank}"
    return None


@COLLECTIVE_LAWS.law(
    "it must report to axis.observe all that it sends, and send no more than the exact collectives",
    "Send through fzero.comms.collectives, which reports; send fewer bits",
    rounds() | rounds(LARGE, LARGE + 9),
)
def _sends_more(declared: Declared, example: Rounds) -> str | None:
    run = _run(declared, example)
    itemsize = torch_dtype(example.dtype).itemsize
    exact = 2 * (example.world_size - 1) * example.shard_numel * itemsize * example.num_rounds
    for rank, (sent, nbytes) in enumerate(zip(run.sent, run.sent_nbytes, strict=True)):
        recorded = sum(one.nbytes for one in sent)
        if recorded != nbytes:
            return f"rank {rank} sends {nbytes} bytes and reports {recorded} to axis.observe"
        if nbytes > exact and example.shard_numel >= LARGE:
            return f"rank {rank} sends {nbytes} bytes, the exact collectives {exact}"
    return None


@COLLECTIVE_LAWS.law(
    "each function must send nbytes to every other rank",
    "Let nbytes be the bytes of one encoded shard",
)
def _plans_otherwise(declared: Declared, example: Rounds) -> str | None:
    itemsize, numel = torch_dtype(example.dtype).itemsize, example.shard_numel
    planned = (
        2 * (example.world_size - 1) * declared.hook.nbytes(numel, itemsize) * example.num_rounds
    )
    sent = {sum(one.nbytes for one in of_rank) for of_rank in _run(declared, example).sent}
    return (
        f"ranks send {sorted(sent)} bytes and nbytes returns {planned}"
        if numel and sent != {planned}
        else None
    )


@COLLECTIVE_LAWS.law(
    "start_reduce_scatter must read its summand when `after` has ended",
    "Wait for `after` before you read, or pass it on",
)
def _reads_early(declared: Declared, example: Rounds) -> str | None:
    at_once, late = _run(declared, example), _run(declared, example, is_late=True)
    for rank, one, other in at_once.beside(late):
        if not same_bits(one.sum, other.sum):
            return (
                f"reduce_scatter on rank {rank} gives {other.sum.tolist()} for {one.sum.tolist()}"
            )
    return None


def _is_far(found: Tensor, expected: Tensor, bound: float) -> str | None:
    if torch.equal(found, expected):
        return None
    gap = _largest(found.double() - expected.double())
    if gap <= bound:  # false where the gap is NaN
        return None
    return (
        f"gives {found.tolist()} for {expected.tolist()}: {gap:g} apart, where {bound:g} is "
        f"declared"
    )


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
