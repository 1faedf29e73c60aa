"""`replay`: a step that runs twice from one state, and raises where its results differ,
over time or between ranks that hold the same values.

A step is a pure function, so a difference is a fault: of memory, a processor or a link,
or of a kernel that gives other bits at each run.
"""

from __future__ import annotations

import copy
import socket
import warnings
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice, zip_longest
from typing import Any, Literal, NamedTuple, NoReturn

import optree
import torch
from torch import Tensor

from fzero.common.arguments import check_kind
from fzero.comms import collectives
from fzero.comms.records import Label
from fzero.digests.digest import Digest
from fzero.digests.watching import Watched, WatchedStep, watched_step
from fzero.resharding.place import copied
from fzero.state import Metrics, TrainState
from fzero.step import TrainStep

State = TrainState[Tensor]
Cause = Literal["fault", "nondeterministic", "ranks"]
_COMPARE = Label("compare")


class ReplayError(RuntimeError):
    """A step gave two results.

    Attributes:
        cause: "fault" if one of three runs differs from the other two;
            "nondeterministic" if all differ; "ranks" if the runs of a rank agree, and
            ranks that hold the same values do not.
        step: the number of updates before the step.
        ranks: the ranks on which it differs first.
        hosts: their hosts.
        phase: "given state", "gather", "forward", "backward", "reduction" or "update".
        unit: the unit, "" for none.
        tensor: the first tensor that differs.
        where: its first element that differs, or a range of elements; "" if unknown.
    """

    def __init__(self, message: str, found: _Found, cause: Cause, step: int) -> None:
        super().__init__(message)
        self.cause, self.step = cause, step
        self.ranks, self.hosts = found.ranks, found.hosts
        self.phase, self.unit, self.tensor = found.place
        self.where = found.where


class _Found(NamedTuple):
    """A first difference."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    place: tuple[str, str, str]
    where: str

    def __str__(self) -> str:
        phase, unit, tensor = self.place
        names = " and ".join(
            f"{rank} (host {host})" for rank, host in zip(self.ranks, self.hosts, strict=True)
        )
        of = f" of unit {unit!r}" if unit else ""
        ranks = "rank" if len(self.ranks) == 1 else "ranks"
        where = f", first at {self.where}" if self.where else ""
        return f"the {phase}{of} on {ranks} {names}: {tensor!r} differs{where}"


def replay(step: TrainStep, state: State, batch: Any, *, every: int = 1) -> tuple[State, Metrics]:
    """The step, twice from one state; raises where the two runs, or ranks that hold the
    same values, differ.

        for batch in loader:
            state, metrics = fzero.replay(step, state, batch, every=100)

    It compares digests (`fzero.digests.Digest`) of the given state, of every parameter
    when it is read, of the outputs of every unit, of the gradients of its inputs and
    parameters, of reduced gradients, and of the new state and the metrics. Values that
    ranks share (full parameters, replicated shards, metrics) are compared between the
    ranks, too. A step in graphs (`compile=`) has no values inside of a forward or
    backward to compare.

    A replayed step takes the time of two steps (the first one, of three) and needs
    memory, or room on the disk, for a second state. The given state stays valid, also
    after an error. (Another call, with `every`, donates it as the step does.)

    *Collective:* every rank, as `step(state, batch)`; sends a checksum of each value
    that ranks share.

    Args:
        step: of `make_train_step`.
        state: of that step, wherever its tensors live.
        batch: as for the step; each run gets a copy of its tensors.
        every: only the steps whose number of updates is a multiple of it are replayed;
            the others run once.

    Raises:
        FloatingPointError: both runs raise it, as `step(state, batch)` does.
        ReplayError: on every rank. After a difference over time a third run tells a
            fault that happened once from a kernel that is not deterministic.
        ValueError: the step is no `TrainStep`, or `every` is less than 1.
        StoreError, MemoryError: on every rank: files for the second state cannot be made.
    """
    rule = "a step of make_train_step; fzero.simulate and engines hold one"
    check_kind("replay", step, TrainStep, rule, "pass that")
    if not isinstance(every, int) or every < 1:
        raise ValueError(
            f"replay: every must be a whole number of steps of at least 1, got {every!r}"
        )
    step.runtime.check_state(state)
    number = int(state.step)
    if number % every:
        return step(state, batch)
    return _Replay(step, state, batch, number).run()


class _Replay:
    """One call of `replay`."""

    def __init__(self, step: TrainStep, state: State, batch: Any, number: int) -> None:
        self.step, self.state, self.number = step, state, number
        self.draws = isinstance(batch, Iterator)
        num_micro = step.runtime.batches.num_micro_steps
        self.batch = [*islice(batch, num_micro)] if self.draws else batch
        self.world = step.runtime.world

    def run(self) -> tuple[State, Metrics]:
        if not self.step.has_agreed:
            self._again()  # a first step learns the order of units, and may use them in another
        first, (result, second) = self._again().seen, self._again()
        index = _differs_at(first, second)
        mine = None if index is None else (index, *_place(index, first, second))
        shared = {" ".join(x.place): (x.shard, x.digest.number()) for x in _unique(second)}
        host = socket.gethostname()
        everyone = self._told((host, mine, shared))
        hosts = [host for host, _, _ in everyone]
        over_time = [(rank, found) for rank, (_, found, _) in enumerate(everyone) if found]
        if over_time:
            self._raise_over_time(over_time, hosts, index, first, second)
        self._check_ranks([shared for _, _, shared in everyone], hosts, second)
        if isinstance(result, FloatingPointError):  # in both runs
            raise result
        return result

    def _again(self) -> WatchedStep:
        batch = _copies(self.batch)
        state = copied(self.state, self.step)
        return watched_step(self.step, state, iter(batch) if self.draws else batch)

    def _told(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        return collectives.exchange(value, self.world, label=_COMPARE)

    def _raise_over_time(
        self,
        found: list[tuple[int, Any]],
        hosts: list[str],
        index: int | None,
        first: list[Watched],
        second: list[Watched],
    ) -> None:
        """Raises for the earliest difference between the two runs."""
        earliest = min(at for _, (at, *_) in found)
        third = self._again().seen
        runs = None
        if index is not None and index == earliest:
            agrees = [_same(third, other, index) for other in (first, second)]
            runs = ("second", "first")[agrees.index(True)] if any(agrees) else "all"
        kinds = self._told(runs)
        ranks = tuple(rank for rank, (at, *_) in found if at == earliest)
        (_, phase, unit, tensor, where) = next(each for _, each in found if each[0] == earliest)
        of_ranks = tuple(hosts[rank] for rank in ranks)
        what = _Found(ranks, of_ranks, (phase, unit, tensor), where)
        odd = [kinds[rank] for rank in ranks]
        if "all" in odd:
            names = self._kernels_named()
            raise ReplayError(
                f"replay: step {self.number} gives another result at each run: {what}; a kernel in "
                f"it is not deterministic{names}; use one that is "
                f"(torch.use_deterministic_algorithms(True)), or a random number that does not "
                f"come from PyTorch's generators is drawn in it",
                what,
                "nondeterministic",
                self.number,
            )
        raise ReplayError(
            f"replay: step {self.number} gave two results: {what}; it differs in the {odd[0]} of "
            f"three runs only, as after a fault of memory, a processor or a link; the given state "
            f"is unchanged: repeat the step, or save it and leave the host",
            what,
            "fault",
            self.number,
        )

    def _kernels_named(self) -> str:
        """The kernels without a deterministic implementation that a run meets."""
        was, warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._again()
        finally:
            torch.use_deterministic_algorithms(was, warn_only=warns)
        names = {
            str(each.message).split(" does not have")[0]
            for each in caught
            if "does not have a deterministic" in str(each.message)
        }
        every = sorted({name for of_rank in self._told(sorted(names)) for name in of_rank})
        return f" ({', '.join(every)})" if every else ""

    def _check_ranks(
        self, shared: list[dict[str, Any]], hosts: list[str], second: list[Watched]
    ) -> None:
        """Raises if ranks that hold the same values differ."""
        names = dict.fromkeys(name for of_rank in shared for name in of_rank)
        for name in names:
            held = [of_rank.get(name) for of_rank in shared]
            if odd := _odd(held):
                self._raise_for_ranks(name, held, odd, hosts, second)

    def _raise_for_ranks(
        self,
        name: str,
        held: list[tuple[int, int] | None],
        odd: list[int],
        hosts: list[str],
        second: list[Watched],
    ) -> NoReturn:
        mine = next((x for x in _unique(second) if " ".join(x.place) == name), None)
        plain = None if mine is None else (mine.place, mine.digest.plain())
        values = self._told(plain)
        (place, one), shard = values[odd[0]], _shard_of(held[odd[0]])
        other = next(
            digest
            for own, (_, digest) in zip(
                held, (each or (None, None) for each in values), strict=True
            )
            if own != held[odd[0]] and _shard_of(own) == shard
        )
        where = Digest.of_plain(one).first_difference(Digest.of_plain(other))
        what = _Found(tuple(odd), tuple(hosts[rank] for rank in odd), tuple(place), where)
        which = "unlike most" if len(odd) * 2 < len(held) else "and one of them is wrong"
        raise ReplayError(
            f"replay: in step {self.number} ranks that hold the same values differ: {what}, "
            f"{which}, although each rank gives the same result twice; a fault before this step, "
            f"or code that differs by rank, makes this; load the last checkpoint, or take the "
            f"values of a rank that is right",
            what,
            "ranks",
            self.number,
        )


def _copied(x: Any) -> Any:
    """A copy of a tensor; of another mapping than a dict, or of a dataclass, one with
    copies.
    """
    if isinstance(x, Tensor):
        return x.clone()
    if isinstance(x, MutableMapping):
        twin: Any = copy.copy(x)
        twin.update({key: _copies(value) for key, value in x.items()})
        return twin
    if is_dataclass(x) and not isinstance(x, type):
        twin = copy.copy(x)
        for field in fields(x):
            object.__setattr__(twin, field.name, _copies(getattr(x, field.name)))
        return twin
    return x


def _copies(tree: Any) -> Any:
    return optree.tree_map(_copied, tree, none_is_leaf=True)


def _differs_at(first: Sequence[Watched], second: Sequence[Watched]) -> int | None:
    pairs = enumerate(zip_longest(first, second))
    return next((i for i, _ in pairs if not _same(first, second, i)), None)


def _same(first: Sequence[Watched], second: Sequence[Watched], index: int) -> bool:
    if index >= len(first) or index >= len(second):
        return False
    a, b = first[index], second[index]
    return a.place == b.place and a.digest.same_as(b.digest)


def _place(
    index: int, first: Sequence[Watched], second: Sequence[Watched]
) -> tuple[str, str, str, str]:
    longer = first if index < len(first) else second
    entry, where = longer[index], ""
    if index < len(second) and first[index : index + 1]:
        where = first[index].digest.first_difference(second[index].digest)
    return *entry.place, where


def _shard_of(held: tuple[int, int] | None) -> int | None:
    return None if held is None else held[0]


def _unique(watched: Sequence[Watched]) -> Iterator[Watched]:
    """What ranks share; of several with one name, the first."""
    names = set()
    for x in watched:
        if x.shard is not None and x.place not in names:
            names.add(x.place)
            yield x


def _odd(held: Sequence[tuple[int, int] | None]) -> list[int]:
    """The ranks whose checksum is not that of most ranks with the same shard; all of
    them if no checksum has more than half.
    """
    for shard in sorted({own[0] for own in held if own is not None}):
        ranks = [rank for rank, own in enumerate(held) if own is not None and own[0] == shard]
        counts = Counter(held[rank] for rank in ranks)
        if len(counts) > 1:
            (most, count), *_ = counts.most_common(1)
            is_clear = count * 2 > len(ranks)
            return [rank for rank in ranks if not is_clear or held[rank] != most]
    return []
