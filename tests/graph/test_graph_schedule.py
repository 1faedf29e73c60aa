"""Laws of a step's graph under the passes: the numbers stay, and the order costs what
was asked.
"""

from __future__ import annotations

import cProfile
import gc
import hashlib
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphs import GROUP, Traced, run_ranks, trace_step
from hypothesis import given, strategies as st
from profiles import examples
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from fzero.graph import tracing
from fzero.graph.analysis import Reduction, analyse
from fzero.graph.backends import make_runner
from fzero.graph.buckets import bucket_updates
from fzero.graph.liveness import liveness
from fzero.graph.nodes import WAIT, flops_of, is_collective, is_mutation, storages
from fzero.graph.remat import BACKWARD, rematerialise_in_place
from fzero.graph.reuse import plan_live_ranges
from fzero.graph.schedule import PassOptions, run_passes
from fzero.graph.timeline import joined, make_timeline
from fzero.plans.machine_model import MachineModel

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
MANY = 10**9
ONE_AT_A_TIME = PassOptions(prefetch=0)


def name_of(node: Node) -> str:
    return str(node.target).split(".")[1]


def collectives(graph: Graph) -> list[str]:
    """The sequence of collectives, with the elements of each."""
    return [
        f"{name_of(node)} {node.meta['val'].numel()}"
        for node in graph.nodes
        if is_collective(node) or node.target is WAIT
    ]


def gathers_by_unit(graph: Graph) -> Counter[str]:
    return Counter(gather.unit for gather in analyse(graph).gathers)


def gradients(graph: Graph) -> list[Reduction]:
    return [r for r in analyse(graph).reductions if r.numel > 1 and not r.needs_other]


def places(graph: Graph) -> dict[Node, int]:
    return {node: place for place, node in enumerate(graph.nodes)}


def assert_same_numbers(traced: Traced, graph: Graph) -> None:
    before, after = run_ranks(traced.graph, traced.args), run_ranks(graph, traced.args)
    for rank, (expected, got) in enumerate(zip(before, after)):
        for index, (one, other) in enumerate(
            zip(*map(torch.utils._pytree.tree_leaves, (expected, got)))
        ):
            assert torch.equal(one, other), f"rank {rank}, result {index}"
    written = [torch.equal(arg, new) for arg, new in zip(traced.args[0], after[0][1:])]
    assert not all(written[1:]), "the step must change its state, or the comparison says nothing"


# --- numbers --------------------------------------------------------------------------------------

steps = st.builds(
    trace_step,
    st.lists(st.sampled_from([4, 8, 16]), min_size=1, max_size=3).map(tuple),
    world_size=st.sampled_from([1, 2, 3]),
    stage=st.sampled_from([0, 2, 3, 3]),
    tied=st.booleans(),
    clip=st.booleans(),
    by_exchange=st.booleans(),
    persist_below=st.sampled_from([0, 60]),
)
costs = st.sampled_from([0, 100, 200, 400, MANY])
pass_options = st.builds(
    PassOptions,
    prefetch=costs,
    ahead=st.sampled_from([1, 2, 5, None]),
    max_live=costs,
    max_reuse_distance=costs,
    max_reducing=costs | st.none(),
    gather_bucket=costs,
    reduce_bucket=costs,
    writes=st.sampled_from(["early", "last"]),
)
units = st.dictionaries(st.sampled_from([f"flats_{i}" for i in range(1, 6)]), st.sampled_from("ab"))


@pytest.mark.long
@examples(40, derandomize=True)
@given(traced=steps, options=pass_options, units=units)
def test_no_option_changes_a_number(
    traced: Traced, options: PassOptions, units: dict[str, str]
) -> None:
    before = [node.format_node() for node in traced.graph.nodes]
    graph = run_passes(traced.graph, options, units=units)
    assert_same_numbers(traced, graph)
    assert [node.format_node() for node in traced.graph.nodes] == before, (
        "the graph that was given is left alone"
    )


def test_passes_on_a_scheduled_graph_change_nothing_more() -> None:
    traced = trace_step((8, 16, 8))
    once = run_passes(traced.graph, PassOptions())
    twice = run_passes(once, PassOptions())
    assert collectives(twice) == collectives(once)
    assert_same_numbers(traced, twice)


def test_every_trace_has_the_same_order_of_collectives() -> None:
    digests = set()
    for _ in range(2):
        graph = run_passes(trace_step.__wrapped__((8, 4, 8)).graph, PassOptions(reduce_bucket=200))
        digests.add(hashlib.sha256("\n".join(collectives(graph)).encode()).hexdigest())
    assert len(digests) == 1


def test_random_operators_keep_their_order_and_their_number() -> None:
    def step(flat: Tensor, x: Tensor) -> Tensor:
        for _ in range(3):
            weight = c10d.wait_tensor(c10d.all_gather_into_tensor(flat, 2, "0")).view(4, 4)
            x = F.dropout(x @ weight, 0.5)
        return x.sum()

    graph = trace(step, torch.ones(8), torch.ones(2, 4)).graph
    seeded = [node.name for node in graph.nodes if is_random(node)]
    after = [node.name for node in run_passes(graph, PassOptions()).nodes if is_random(node)]
    assert len(seeded) == 3 and after == seeded


def is_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


# --- gathers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_blocks_are_gathered_twice_and_the_last_unit_once(num_blocks: int) -> None:
    traced = trace_step((8,) * num_blocks, tied=False)
    assert set(gathers_by_unit(traced.graph).values()) == {1}
    counts = gathers_by_unit(run_passes(traced.graph, PassOptions()))
    embedding, *blocks, head = (f"flats_{index + 1}" for index in range(num_blocks + 2))
    # an embedding's backward needs no weights
    assert counts == {embedding: 1, **dict.fromkeys(blocks, 2), head: 1}


def test_a_unit_used_in_separate_places_is_gathered_for_each() -> None:
    counts = gathers_by_unit(run_passes(trace_step((8,) * 3, tied=True).graph, PassOptions()))
    assert set(counts.values()) == {2}


@given(
    hiddens=st.lists(st.sampled_from([4, 8, 16]), min_size=1, max_size=4).map(tuple),
    tied=st.booleans(),
)
@examples(15, derandomize=True)
def test_at_most_two_units_are_gathered_with_prefetch_and_one_without(
    hiddens: tuple[int, ...], tied: bool
) -> None:
    traced = trace_step(hiddens, tied=tied)
    largest, second, *_ = sorted(traced.unit_numels, reverse=True)
    prefetched = liveness(run_passes(traced.graph, PassOptions())).peak_gathered_numel
    assert largest < prefetched <= largest + second
    assert liveness(run_passes(traced.graph, ONE_AT_A_TIME)).peak_gathered_numel == largest
    assert liveness(traced.graph).peak_gathered_numel == sum(traced.unit_numels)


def test_each_gather_starts_as_soon_as_the_unit_before_has_arrived() -> None:
    """Between a gather's start and its wait stands all compute of the unit before it."""
    graph = run_passes(trace_step((8,) * 4).graph, PassOptions())
    order = [
        node for node in graph.nodes if flops_of(node) or node.target is WAIT or is_collective(node)
    ]
    where = {node: place for place, node in enumerate(order)}
    gathers = sorted(analyse(graph).gathers, key=lambda gather: where[gather.issue[-1]])
    for before, gather in pairwise(gathers):
        assert where[before.issue[-1]] < where[gather.issue[-1]]
    for before, gather in pairwise(gathers[1:]):
        between = order[where[before.settle[0]] + 1 : where[gather.issue[-1]]]
        assert not any(flops_of(node) for node in between), (
            "nothing is computed before the next gather has started"
        )
        assert not any(node.target is WAIT for node in between)


def test_a_gather_that_has_no_room_yet_starts_when_the_unit_before_leaves() -> None:
    """The update of the unit before then runs beside it, and what the backward does
    without weights.
    """
    traced = trace_step((8,) * 4)
    graph = run_passes(traced.graph, PassOptions(max_live=max(traced.unit_numels), max_reducing=0))
    where = places(graph)
    beside = [where[g.settle[0]] - where[g.issue[-1]] - 1 for g in analyse(graph).gathers]
    assert all(beside[1:]) and max(beside) > 20


def test_without_prefetch_a_gather_starts_right_before_its_wait() -> None:
    graph = run_passes(trace_step((8,) * 3).graph, ONE_AT_A_TIME)
    for gather in analyse(graph).gathers:
        assert gather.issue[-1].next is gather.settle[0]


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_as_many_units_are_gathered_ahead_as_asked(ahead: int) -> None:
    traced = trace_step((8,) * 6)
    graph = run_passes(traced.graph, PassOptions(ahead=ahead))
    assert liveness(graph).peak_gathered_numel == (ahead + 1) * max(traced.unit_numels)


def test_prefetch_bounds_what_is_gathered_ahead_beyond_the_next_unit() -> None:
    traced = trace_step((8,) * 6)
    block = max(traced.unit_numels)
    graph = run_passes(traced.graph, PassOptions(ahead=6, prefetch=2 * block))
    assert liveness(graph).peak_gathered_numel == 3 * block


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_live", [1, 2, 3, 4])
@pytest.mark.parametrize("reuse", [0, MANY])
def test_max_live_is_obeyed_whatever_else_is_asked(num_live: int, reuse: int) -> None:
    traced = trace_step((8,) * 6)
    max_live = num_live * max(traced.unit_numels)
    options = PassOptions(max_live=max_live, max_reuse_distance=reuse, ahead=6)
    graph = run_passes(traced.graph, options)
    assert liveness(graph).peak_gathered_numel <= max_live
    assert_same_numbers(traced, graph)


def test_more_room_means_fewer_gathers() -> None:
    traced = trace_step((8,) * 6)
    block = max(traced.unit_numels)
    options = [PassOptions(max_live=room * block, max_reuse_distance=MANY) for room in (1, 3, 5, 7)]
    counts = [len(analyse(run_passes(traced.graph, option)).gathers) for option in options]
    assert counts == sorted(counts, reverse=True) and counts[0] == 14 and counts[-1] == 7


def test_a_large_reuse_distance_gathers_every_unit_once() -> None:
    traced = trace_step((8,) * 4)
    assert set(
        gathers_by_unit(run_passes(traced.graph, PassOptions(max_reuse_distance=MANY))).values()
    ) == {1}


def test_units_within_the_reuse_distance_are_kept() -> None:
    traced = trace_step((8,) * 4, tied=False)
    head, block = traced.unit_numels[-1], traced.unit_numels[1]
    counts = gathers_by_unit(
        run_passes(traced.graph, PassOptions(max_reuse_distance=head + 2 * block))
    )
    assert counts == {
        "flats_1": 1,
        "flats_2": 2,
        "flats_3": 2,
        "flats_4": 1,
        "flats_5": 1,
        "flats_6": 1,
    }


def test_small_units_that_every_rank_keeps_are_never_gathered() -> None:
    traced = trace_step((8, 16), persist_below=60)
    graph = run_passes(traced.graph, PassOptions())
    assert set(gathers_by_unit(graph)) == {"flats_2", "flats_3"}


def test_buffers_of_one_unit_are_gathered_together() -> None:
    traced = trace_step((8,) * 3)
    graph = run_passes(
        traced.graph, PassOptions(), units={"flats_2": "first two", "flats_3": "first two"}
    )
    order = [
        node
        for node in graph.nodes
        if is_collective(node) and name_of(node) == "all_gather_into_tensor"
    ]
    sources = [str(node.args[0]) for node in order]
    assert sources[:4] == ["flats_1", "flats_2", "flats_3", "flats_4"]
    for index in [i for i, source in enumerate(sources) if source == "flats_2"]:
        assert order[index].next is order[index + 1] and sources[index + 1] == "flats_3"
    assert_same_numbers(traced, graph)


def test_what_nobody_uses_is_not_gathered() -> None:
    def step(used: Tensor, unused: Tensor) -> Tensor:
        both = [
            c10d.wait_tensor(c10d.all_gather_into_tensor(flat, 2, "0")).view(2, -1)
            for flat in (used, unused)
        ]
        return (both[0] * 2).sum()

    graph = run_passes(trace(step, torch.ones(4), torch.ones(4)).graph, PassOptions())
    assert [gather.unit for gather in analyse(graph).gathers] == ["used_1"]


def test_a_gather_of_broadcasts_or_of_an_exchange_is_one_too() -> None:
    def step(flat: Tensor, x: Tensor) -> Tensor:
        joined = torch.cat(
            [c10d.wait_tensor(c10d.broadcast(flat, rank, "0")) for rank in range(2)]
        ).view(4, 4)
        sent = flat.repeat(2)
        exchanged = c10d.wait_tensor(c10d.all_to_all_single(sent, [8, 8], [8, 8], "0")).view(4, 4)
        return x @ joined @ exchanged

    graph = trace(step, torch.ones(8), torch.ones(2, 4)).graph
    gathers = analyse(graph).gathers
    assert [(len([n for n in g.issue if is_collective(n)]), g.numel) for g in gathers] == [
        (2, 16),
        (1, 16),
    ]
    assert not analyse(graph).reductions


def test_a_gather_of_what_the_step_made_is_a_reduction_like_any_other() -> None:
    """The updated shards of stages 1 and 2 are gathered at the end, and not before the
    update.
    """
    analysis = analyse(trace_step((8, 8), stage=2).graph)
    assert not analysis.gathers
    assert Counter(name_of(reduction.start) for reduction in analysis.reductions) == {
        "reduce_scatter_tensor": 3,
        "all_gather_into_tensor": 3,
        "all_reduce": 1,
    }


# --- how long a unit stays ------------------------------------------------------------------------


@examples(300, derandomize=True)
@given(
    accesses=st.lists(
        st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), max_size=25
    ),
    numels=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    max_live=st.integers(0, 30),
    reuse=st.integers(0, 60),
)
def test_stays_cover_each_use_once_and_obey_both_bounds(
    accesses: list[list[int]], numels: list[int], max_live: int, reuse: int
) -> None:
    stays = plan_live_ranges(
        list(enumerate(accesses)), numels, max_live=max_live, max_reuse_distance=reuse
    )
    assert stays == sorted(stays, key=lambda stay: (stay.first, stay.unit))
    for position, units in enumerate(accesses):
        for unit in units:
            assert sum(s.unit == unit and s.first <= position <= s.last for s in stays) == 1
        live = sum(numels[stay.unit] for stay in stays if stay.first <= position <= stay.last)
        assert live <= max(max_live, sum(numels[unit] for unit in units))
    for stay in stays:
        uses = [position for position, units in enumerate(accesses) if stay.unit in units]
        assert stay.first in uses and stay.last in uses
    if max_live >= sum(numels) and reuse >= 25 * 3 * 9:
        assert len(stays) == len({unit for units in accesses for unit in units})


# --- reductions and the update --------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("by_exchange", [False, True])
def test_a_reduction_starts_when_its_gradient_is_ready(stage: int, by_exchange: bool) -> None:
    """No matrix product stands between the last node that a gradient is made of and its
    reduction.
    """
    graph = run_passes(
        trace_step((8,) * 4, stage=stage, by_exchange=by_exchange).graph, PassOptions()
    )
    where = places(graph)
    grads = [reduction.start for reduction in gradients(graph)]
    assert len(grads) == 5
    for start in grads:
        made_of = max(where[node] for node in compute_behind(start))
        between = [node for node in graph.nodes if made_of < where[node] < where[start]]
        assert not any(flops_of(node) for node in between), start.name


def compute_behind(start: Node) -> set[Node]:
    """What a reduction's input is made of, without views and joins."""
    found, todo = set(), list(start.all_input_nodes)
    while todo:
        node = todo.pop()
        if flops_of(node) or "backward" in node.name or node.target is aten.sum.dim_IntList:
            found.add(node)
        else:
            todo += node.all_input_nodes
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("max_reducing", [0, 100, 200, 500])
@pytest.mark.parametrize("clip", [False, True])
def test_reductions_under_way_stay_within_their_bound(max_reducing: int, clip: bool) -> None:
    traced = trace_step((8, 16, 8, 8), stage=2, clip=clip)
    graph = run_passes(traced.graph, PassOptions(max_reducing=max_reducing))
    under_way: dict[Node, int] = {}
    reductions = {r.start: r for r in analyse(graph).reductions}
    seen = 0
    for node in graph.nodes:
        if node in reductions:
            assert (
                sum(under_way.values()) <= max(0, max_reducing - reductions[node].numel)
                or not under_way
            )
            under_way[node] = reductions[node].numel
            seen = max(seen, len(under_way))
        elif node.target is WAIT:
            under_way.pop(node.all_input_nodes[0], None)
    assert seen == 1 if max_reducing == 0 else seen > 1 or max_reducing < 150


def test_full_gradients_die_with_their_reduction() -> None:
    """With a bound of one reduction, at most two units' full gradients are alive, where
    all were.
    """
    traced = trace_step((64,) * 8, width=16, stage=2, tied=False)
    unit = max(traced.unit_numels) * 4

    def peak_of_joined(graph: Graph) -> int:
        joined = {node for r in gradients(graph) for node in r.start.all_input_nodes}
        where, alive, peak = places(graph), 0, 0
        ends = {
            node: max(where[user] for s in node.users for user in s.users if user.target is WAIT)
            for node in joined
        }
        for node in graph.nodes:
            alive += node in joined
            peak = max(peak, alive)
            alive -= sum(end == where[node] for end in ends.values())
        return peak

    graph = run_passes(traced.graph, PassOptions(max_reducing=0))
    assert peak_of_joined(traced.graph) == 10 and peak_of_joined(graph) == 2
    assert liveness(traced.graph).peak - liveness(graph).peak > 5 * unit


def test_an_update_runs_early_unless_clipping_needs_every_gradient() -> None:
    def first_write(clip: bool, writes: str) -> tuple[int, int]:
        graph = run_passes(
            trace_step((8,) * 6, clip=clip).graph,
            PassOptions(max_reducing=0, writes=writes),  # type: ignore[arg-type]
        )
        order = [node for node in graph.nodes if flops_of(node) or is_mutation(node)]
        writes_to_params = [
            i for i, node in enumerate(order) if str(node.args[0]).startswith("flats")
        ]
        return min(writes_to_params), max(i for i, node in enumerate(order) if flops_of(node))

    write, last_product = first_write(clip=False, writes="early")
    assert write < last_product
    for clip, writes in ((True, "early"), (False, "last")):
        write, last_product = first_write(clip, writes)
        assert write > last_product


def test_last_writes_come_after_everything_else() -> None:
    graph = run_passes(trace_step((8,) * 3).graph, PassOptions(writes="last"))
    kinds = [is_mutation(node) for node in graph.nodes if node.op == "call_function"]
    assert kinds == sorted(kinds) and any(kinds)


def test_nothing_is_written_before_an_assertion_that_stood_before_it() -> None:
    def step(state: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        grad = c10d.wait_tensor(c10d.all_to_all_single(state * 2, [2, 2], [2, 2], "0"))
        loss = (x @ weight @ grad).sum()  # so that the new state is known before the assertion
        torch._assert_async(torch.isfinite(loss))
        state.copy_(state - grad)
        return loss

    graph = trace(step, *[torch.ones(4, 4)] * 3).graph
    order = [node.name for node in run_passes(graph, PassOptions()).nodes]
    (check,) = [name for name in order if "assert" in name]
    (write,) = [name for name in order if name.startswith("copy_")]
    assert order.index(check) < order.index(write)


def test_state_that_is_read_again_is_overwritten_after_that() -> None:
    def step(state: Tensor, x: Tensor) -> Tensor:
        new = c10d.wait_tensor(c10d.all_reduce(x, "sum", "0")) * 2
        y = torch.mm(x, x)
        late = torch.mm(y, state)
        state.copy_(new)
        return late + torch.mm(state, x)

    args = [torch.arange(4.0).view(2, 2), torch.eye(2) + 1]
    graph = run_passes(trace(step, *args).graph, PassOptions(max_reducing=0))
    got = run_ranks(graph, [args])
    state, x = args
    assert torch.equal(got[0][0], x @ x @ state + 2 * x @ x) and torch.equal(got[0][1], 2 * x)


def test_an_all_reduce_inside_the_model_keeps_its_place() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        hidden = c10d.wait_tensor(c10d.all_reduce(x @ weight, "sum", "0")).relu()
        return c10d.wait_tensor(c10d.all_reduce((hidden @ weight).relu() @ weight.t(), "sum", "0"))

    graph = trace(step, torch.ones(4, 4), torch.ones(4, 4)).graph
    names = [name_of(node) for node in graph.nodes if node.op == "call_function"]
    after = run_passes(graph, PassOptions())
    assert [name_of(node) for node in after.nodes if node.op == "call_function"] == names


# --- buckets --------------------------------------------------------------------------------------


@pytest.mark.covering(0)
@pytest.mark.parametrize("by_exchange", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_reductions_are_joined_up_to_their_bucket_and_not_beyond(
    stage: int, by_exchange: bool
) -> None:
    traced = trace_step((8,) * 6, stage=stage, by_exchange=by_exchange, tied=False)
    block = max(traced.unit_numels)
    sizes = {}
    for bucket in (0, block, 2 * block, MANY):
        graph = run_passes(traced.graph, PassOptions(reduce_bucket=bucket))
        assert_same_numbers(traced, graph)
        sizes[bucket] = [reduction.numel for reduction in gradients(graph)]
        assert max(sizes[bucket]) <= max(bucket, block)
        assert sum(sizes[bucket]) == sum(traced.unit_numels)
    assert [len(found) for found in sizes.values()] == [8, 8, 4, 1]


@pytest.mark.covering(0)
@pytest.mark.parametrize("by_exchange", [False, True])
@pytest.mark.parametrize("hiddens", [(4, 4, 4, 64), (4, 4, 4, 16, 64), (8, 8, 8)])
def test_units_are_joined_up_to_their_bucket_while_two_are_no_larger_than_the_two_largest(
    hiddens: tuple[int, ...], by_exchange: bool
) -> None:
    traced = trace_step(hiddens, tied=False, by_exchange=by_exchange)
    largest, second, *_ = sorted(traced.unit_numels, reverse=True)
    small = traced.unit_numels[1]
    for bucket in (0, 2 * small - 1, 2 * small, MANY):
        graph = run_passes(traced.graph, PassOptions(gather_bucket=bucket))
        assert_same_numbers(traced, graph)
        joined = [gather for gather in analyse(graph).gathers if len(gather.sources) > 1]
        assert bool(joined) == (2 * small <= min(bucket, second))
        assert all(gather.numel <= min(bucket, second) for gather in joined)
        assert liveness(graph).peak_gathered_numel <= largest + second


@pytest.mark.parametrize("stage", [2, 3])
def test_updated_shards_that_are_gathered_are_joined_up_to_their_bucket(stage: int) -> None:
    """In stage 3 those of the units that every rank keeps whole."""
    traced = trace_step((4,) * 5, stage=stage, tied=False, clip=True, persist_below=60)
    kept = sorted(numel for numel in traced.unit_numels if stage == 2 or numel < 60)
    for bucket in (0, 2 * kept[-1], MANY):
        graph = run_passes(traced.graph, PassOptions(gather_bucket=bucket))
        assert_same_numbers(traced, graph)
        updates = [
            r
            for r in analyse(graph).reductions
            if r.needs_other and name_of(r.start).startswith("all_gather")
        ]
        assert sum(update.numel for update in updates) == sum(kept)
        assert max(update.numel for update in updates) <= max(bucket, kept[-1])
        assert len(updates) == {0: len(kept), MANY: 1}.get(bucket, len(updates)) <= len(kept)


def test_updated_shards_that_something_else_reads_too_are_gathered_by_themselves() -> None:
    def step(shards_3S: Tensor, full_3P: Tensor) -> Tensor:
        for shard_S, full_P in zip(shards_3S, full_3P, strict=True):
            updated_P = c10d.wait_tensor(c10d.all_gather_into_tensor(shard_S * 2, 2, GROUP))
            full_P.copy_(updated_P)
        return updated_P.sum()

    graph = trace(step, torch.ones(3, 2), torch.zeros(3, 4)).graph
    bucket_updates(graph, analyse(graph), MANY)
    first_two, last = (name_of(node) for node in graph.nodes if is_collective(node))
    assert (first_two, last) == ("all_gather_into_tensor_coalesced", "all_gather_into_tensor")


def test_of_a_checkpointed_module_the_backward_reads_what_it_makes_again_up_to_its_last_node() -> (
    None
):
    graph = trace(lambda x: (y := x.tanh()).exp() * y, torch.ones(4)).graph
    (tanh,) = graph.find_nodes(op="call_function", target=aten.tanh.default)
    tanh.meta["custom"] = {"region": "block@0"}
    for node in list(graph.nodes):
        if node.op == "call_function" and node is not tanh:
            node.meta["custom"] = BACKWARD
    rematerialise_in_place(graph, ["block"])
    assert not tanh.users


# --- memory ---------------------------------------------------------------------------------------


def test_liveness_counts_memory_and_not_views() -> None:
    def step(x: Tensor) -> Tensor:
        doubled = x * 2  # 64 bytes
        rows = doubled.view(4, 4).t()
        exp = rows.exp()  # 64 more; `doubled` ends
        return exp.sum() + 1  # 4, and 4

    live = liveness(trace(step, torch.ones(16)).graph)
    by_name = dict(zip(live.nodes, live.live))
    assert by_name == {
        "x_1": 0,
        "mul": 64,
        "view": 64,
        "t": 64,
        "exp": 128,
        "sum_1": 68,
        "add": 8,
        "output": 4,
    }
    assert (live.peak, live.arguments) == (128, 64)


def test_what_a_reduction_reads_lives_until_its_wait() -> None:
    def step(x: Tensor) -> Tensor:
        start = c10d.reduce_scatter_tensor(x * 2, "sum", 2, "0")
        other = x + 1
        return c10d.wait_tensor(start).sum() + other.sum()

    live = liveness(trace(step, torch.ones(16)).graph)
    by_name = dict(zip(live.nodes, live.live))
    assert (
        by_name["add"] == by_name["wait_tensor"] == 64 + 32 + 64 and by_name["sum_1"] == 32 + 64 + 4
    )


def test_two_gathers_of_a_unit_are_separate_memory() -> None:
    graph = run_passes(trace_step((8,) * 2).graph, PassOptions())
    roots = storages(graph)
    gathers = analyse(graph).gathers
    assert len({roots[gather.settle[0]] for gather in gathers}) == len(gathers)


# --- what is refused ------------------------------------------------------------------------------


def test_a_change_of_a_gathered_parameter_is_refused_by_name() -> None:
    def step(flat: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_gather_into_tensor(flat, 2, "0")).add_(1)

    graph = trace(step, torch.ones(4)).graph
    with pytest.raises(
        ValueError,
        match="add_: a step's graph must not change the result of a collective in place, got",
    ):
        run_passes(graph, PassOptions())


def test_a_collective_without_a_wait_is_refused_by_name() -> None:
    graph = trace(lambda x: c10d.all_reduce(x * 2, "sum", "0") + 1, torch.ones(4)).graph
    with pytest.raises(
        ValueError, match="all_reduce: a collective must have one wait_tensor, got 0"
    ):
        run_passes(graph, PassOptions())


@pytest.mark.parametrize("wrong", [{"max_live": -1}, {"prefetch": -1}, {"writes": "never"}])
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"PassOptions: {next(iter(wrong))} must be"):
        PassOptions(**wrong)


# --- cost -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_cost_of_a_pass_is_linear_in_the_number_of_units(stage: int) -> None:
    """Counts calls of functions: four times the blocks may cost a little more than four
    times as many.
    """

    def calls(num_blocks: int) -> int:
        graph = trace_step((8,) * num_blocks, stage=stage).graph
        profile = cProfile.Profile()
        profile.enable()
        scheduled = run_passes(graph, PassOptions(gather_bucket=100, reduce_bucket=200))
        liveness(scheduled)
        make_timeline(scheduled)
        profile.disable()
        return sum(entry.callcount for entry in profile.getstats())

    few, many = calls(6), calls(24)
    assert many < 4.5 * few, f"{few} calls for 6 blocks, {many} for 24"


def test_the_garbage_collector_stays_out_and_is_left_as_it_was() -> None:
    """It would walk all that the process holds, again and again while the nodes of a
    large graph are made.
    """
    graph, begun = trace_step((8,) * 24).graph, []

    def count(phase: str, info: dict[str, int]) -> None:
        begun.append(phase)

    gc.callbacks.append(count)
    try:
        run_passes(graph, PassOptions(gather_bucket=100, reduce_bucket=200))
        assert begun.count("start") <= 1, "one may begin as soon as it is on again"
        [[] for _ in range(10_000)]
        assert begun.count("start") > 1, "10,000 new objects are more than it waits for"
    finally:
        gc.callbacks.remove(count)
    assert gc.isenabled()
    gc.disable()
    try:
        run_passes(graph, PassOptions())
        assert not gc.isenabled()
    finally:
        gc.enable()


# --- time -----------------------------------------------------------------------------------------


def test_prefetch_hides_gathers_behind_compute() -> None:
    traced = trace_step((64,) * 4, width=32)
    machine = MachineModel(flops=1e9, memory=1e10, network=5e8, latency=0)
    captured, one, ahead = (
        make_timeline(graph, machine)
        for graph in (
            traced.graph,
            run_passes(traced.graph, ONE_AT_A_TIME),
            run_passes(traced.graph, PassOptions()),
        )
    )
    assert ahead.waiting < one.waiting and ahead.seconds < one.seconds
    assert ahead.hidden > 0.5 > captured.hidden
    busy = [t.seconds - t.waiting for t in (one, ahead)]
    assert busy[0] == pytest.approx(busy[1], rel=0.2)
    assert ahead.liveness.peak_gathered < captured.liveness.peak_gathered


def test_a_timeline_has_no_overlap_within_a_lane_and_waits_end_with_their_collective() -> None:
    timeline = make_timeline(
        run_passes(trace_step((8, 16)).graph, PassOptions()), MachineModel(latency=1e-6)
    )
    for lane in (("compute", "wait"), ("collective",)):
        spans = [span for span in timeline.spans if span.lane in lane]
        assert all(before.end <= after.begin + 1e-15 for before, after in pairwise(spans))
    ends = {span.end for span in timeline.spans if span.lane == "collective"}
    waits = [span.end for span in timeline.spans if span.lane == "wait"]
    assert waits and all(end in ends for end in waits)


def test_a_timeline_reports_what_each_collective_sends() -> None:
    """A gather and a reduce-scatter send (W-1)/W · P elements, an all-reduce twice
    that.
    """
    traced = trace_step((8,), world_size=3, tied=True)
    timeline = make_timeline(traced.graph)
    sent = {span.label: span.nbytes for span in timeline.spans if span.lane == "collective"}
    embedding, block = traced.unit_numels
    assert (
        sent["gather flats_1"] == 4 * embedding * 2 // 3
        and sent["gather flats_2"] == 4 * block * 2 // 3
    )
    reduced = [span.nbytes for span in timeline.spans if span.label == "reduce_scatter"]
    assert sorted(reduced) == sorted([4 * embedding * 2 // 3, 4 * block * 2 // 3])
    assert "gather flats_2" in str(timeline) and "alive at the most" in str(timeline)


def test_a_timeline_draws_two_lanes_and_what_is_gathered() -> None:
    timeline = make_timeline(run_passes(trace_step((8, 16)).graph, PassOptions()), title="stage 3")
    lanes, memory = timeline.draw().axes
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["compute", "collectives"]
    assert lanes.get_title(loc="left") == "stage 3" and memory.get_ylabel() == "kB alive"
    assert len(timeline.draw(*[timeline] * 3).axes) == 8
    bars = sum(bar.get_width() for bar in lanes.patches) / 1e3  # of the wait and compute lane too
    assert bars == pytest.approx(timeline.seconds + timeline.communicating)
    areas = [area.get_paths()[0].vertices[:, 1].max() * 1e3 for area in memory.collections]
    live = timeline.liveness
    assert max(areas) == pytest.approx(live.arguments + live.peak)
    assert areas[0] == pytest.approx(live.arguments)


def test_timelines_one_after_the_other_keep_their_spans_and_bytes() -> None:
    timeline = make_timeline(run_passes(trace_step((8, 16)).graph, PassOptions()))
    twice = joined([timeline, timeline])
    assert twice.seconds == pytest.approx(2 * timeline.seconds) and twice.sent == 2 * timeline.sent
    assert len(twice.times) == len(twice.liveness.live) == 2 * len(timeline.times)
    assert twice.liveness.peak == timeline.liveness.peak
    assert str(twice).count("gather flats_1") == 1, "the table adds up"


def test_an_all_reduce_sends_twice_what_the_other_ranks_hold_where_the_graph_reports_how_many_there_are() -> (
    None
):
    timeline = make_timeline(trace_step((8,), world_size=3).graph)
    # of the loss
    (nbytes,) = (span.nbytes for span in timeline.spans if span.label == "all_reduce")
    assert nbytes == 2 * 4 * 2 // 3


# --- through torch.compile ------------------------------------------------------------------------


@pytest.fixture
def fake_group() -> Iterator[None]:
    """A group of two ranks, of which the other does nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()


def compiled_step() -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """A step of six linear units, written as a user would, and its arguments."""
    group, x = dist.group.WORLD.group_name, torch.linspace(-1, 1, 12).view(3, 4)

    def loss_fn(flats: list[Tensor], x: Tensor) -> Tensor:
        for flat in flats:
            x = torch.tanh(x @ flat.view(4, 4))
        return x.square().sum()

    def step(flats: list[Tensor], x: Tensor) -> Tensor:
        full = [c10d.wait_tensor(c10d.all_gather_into_tensor(flat, 2, group)) for flat in flats]
        grads, loss = torch.func.grad_and_value(loss_fn)(full, x)
        for flat, grad in zip(flats, grads):
            shard = c10d.wait_tensor(c10d.reduce_scatter_tensor(grad.contiguous(), "avg", 2, group))
            flat.sub_(0.1 * shard)
        return loss

    return step, ([torch.linspace(0, 1, 8) + i for i in range(6)], x)


def letters(graph: Graph) -> str:
    """Gather +, reduce -, wait w, matrix product ., write c."""
    kinds = {
        "all_gather_into_tensor": "+",
        "reduce_scatter_tensor": "-",
        "wait_tensor": "w",
        "copy_": "c",
    }
    return "".join(
        "." if flops_of(n) else kinds.get(name_of(n), "")
        for n in graph.nodes
        if n.op == "call_function" and n.target is not operator.getitem
    )


def test_the_schedule_runs_as_it_is(fake_group: None) -> None:
    traced = tracing.trace(*compiled_step(), nn.Module())
    _, graph = make_runner("aot_eager", traced.module, PassOptions(max_reducing=0))
    assert letters(graph) == "+w+.w+.w+.w+.w+.w+..-..wc-w+..wc-w+..wc-w+..wc-w..wc-wc"
    assert liveness(graph).peak_gathered_numel == 32


def test_what_is_written_into_the_state_is_read_there() -> None:
    """So its first copy is freed; what the graph returns is no part of the state."""

    def step(first: Tensor, second: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        new, returned = x @ x, x @ x.t()
        first.copy_(new)
        second.copy_(returned)
        return new @ returned, returned.view(-1)

    graph = run_passes(trace(step, *(torch.ones(2, 2) for _ in range(3))).graph, PassOptions())
    wrote, kept = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert list(wrote.args[1].users) == [wrote] and len(wrote.users) == 1 and not kept.users
    first, second, x = torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor([[1.0, 2], [3, 4]])
    product, returned = GraphModule(nn.Module(), graph)(first, second, x)
    assert torch.equal(first, x @ x) and torch.equal(second.view(-1), returned)
    assert torch.equal(product, (x @ x) @ (x @ x.t()))
    assert returned.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def without_compiler(
    monkeypatch: pytest.MonkeyPatch, num_bits: int = 0, *, has_cache: bool = False
) -> AbstractContextManager[None]:
    """Inside, Inductor writes its code for vectors of so many bits (0: none).
    Compiling it would take long.
    """
    from torch._inductor import config as inductor, cpu_vec_isa
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: None)
    # No compiler is asked what it can do.
    monkeypatch.setattr(
        cpu_vec_isa, "valid_vec_isa_list", lambda: [cpu_vec_isa.VecAVX2()] * (num_bits == 256)
    )
    return inductor.patch(  # type: ignore[no-any-return]
        {
            "cpp.simdlen": num_bits,
            "cpp.vec_isa_ok": True,
            "force_disable_caches": not has_cache,
        }
    )


def written(module: nn.Module, monkeypatch: pytest.MonkeyPatch, num_bits: int) -> tuple[Graph, str]:
    """The graph, and the code that Inductor writes."""
    from torch._inductor.utils import run_and_get_code

    with without_compiler(monkeypatch, num_bits):
        (_, graph), (code, *_) = run_and_get_code(make_runner, "inductor", module, PassOptions())
    return graph, code


def test_inductor_keeps_the_order_that_was_pinned(
    fake_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of the calls that it writes."""
    graph, code = written(
        tracing.trace(*compiled_step(), nn.Module()).module, monkeypatch, num_bits=0
    )
    assert order_in(code) == letters(graph).replace("c", "") and order_in(code).count("+") == 10
    assert liveness(graph).peak_gathered_numel == 32


@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=pytest.mark.long) for n in (0, 2)), 3])
def test_the_graph_shown_has_the_collectives_that_inductor_writes(
    stage: int, fake_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the captured graph as scheduled; Inductor schedules one that it has
    rewritten, where a wait may have moved.
    """
    graph, code = written(
        trace_step((6, 8), stage=stage, tied=False, clip=True).module, monkeypatch, num_bits=0
    )
    shown, order = letters(graph), order_in(code)
    assert {letter: shown.count(letter) for letter in "+-w"} == {
        letter: order.count(letter) for letter in "+-w"
    }
    assert shown.count("w") >= 5


def test_another_run_finds_the_code_that_inductor_wrote(
    fake_group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """tests/graph/test_compiled.py compares its numbers, too, which takes long."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    graphs = []
    for hits in (0, 1):
        counters.clear()
        module = tracing.trace(*compiled_step(), nn.Module()).module
        with without_compiler(monkeypatch, has_cache=True):
            _, graph = make_runner("inductor", module, PassOptions())
        assert counters["inductor"]["fxgraph_cache_hit"] == hits
        graphs.append(str(graph))
    assert graphs[0] == graphs[1]


def order_in(code: str) -> str:
    """The letters of what Inductor wrote, without writes."""
    calls = {
        "= torch.ops._c10d_functional.all_gather_into_tensor.default(": "+",
        "= torch.ops._c10d_functional.reduce_scatter_tensor.default(": "-",
        "torch.ops._c10d_functional.wait_tensor.default(": "w",
        "extern_kernels.": ".",
    }
    lines = [line.partition("#")[0] for line in code[code.index("def call(") :].splitlines()]
    return "".join(letter for line in lines for call, letter in calls.items() if call in line)


def test_inductor_runs_what_it_wrote(fake_group: None) -> None:
    """A step of matrix products and writes into its arguments, which has no kernel of
    its own.
    """

    def step(first: Tensor, second: Tensor) -> Tensor:
        product = first @ second
        first.copy_(second @ product)
        return product @ first

    def run_by(backend: Literal["inductor", "aot_eager"]) -> list[Tensor]:
        given = torch.arange(16.0).view(4, 4), torch.eye(4).roll(1, 0)
        traced = tracing.trace(step, given, nn.Module())
        run, _ = make_runner(backend, traced.module, PassOptions())
        return [traced.call(run, list(given)), *given]

    for found, expected in zip(run_by("inductor"), run_by("aot_eager"), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.long
def test_inductor_compiles_the_kernels_of_a_step(fake_group: None) -> None:
    step, args = compiled_step()
    traced = tracing.trace(step, args, nn.Module())
    run, _ = make_runner("inductor", traced.module, PassOptions())
    traced.call(run, optree.tree_leaves(args))


def channels_last() -> Tensor:
    return torch.linspace(-1, 1, 8 * 18 * 18).view(1, 18, 18, 8).permute(0, 3, 1, 2)


def summed_between_tiles(x: Tensor) -> Tensor:
    """A sum over the innermost of three loops; the outermost (18) is in vectors, too,
    of which the last is not full.
    """
    gelu = 0.5 * x * (torch.erf(x * 0.7071067811865476) + 1)
    columns = F.pad(gelu.permute(3, 2, 1, 0), (0, 0, 0, 10), value=0.5)
    return F.pad(gelu, (0, 0, 0, 0, 0, 10), value=0.5) @ columns


def test_inductor_stores_the_last_tile_of_a_reduction_no_wider_than_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = tracing.trace(summed_between_tiles, (channels_last(),), nn.Module()).module
    _, code = written(module, monkeypatch, num_bits=256)
    stores = re.findall(
        r"acc0_vec\.store\(out_ptr0 \+ static_cast<int64_t>\(x0 \+ 18L\*x1\)(.*)\);", code
    )
    assert stores == ["", ", static_cast<int64_t>(2L)"]  # 18 are two vectors of 8, and two


@pytest.mark.long
def test_a_sum_between_tiles_that_inductor_compiles_is_right(fake_group: None) -> None:
    x = channels_last()
    traced = tracing.trace(summed_between_tiles, (x,), nn.Module())
    run, _ = make_runner("inductor", traced.module, PassOptions())
    torch.testing.assert_close(traced.call(run, [x]), summed_between_tiles(x))


def trace(step: Callable[..., Any], *args: Tensor) -> Any:
    with FakeTensorMode() as mode:
        return make_fx(step)(*[mode.from_tensor(arg) for arg in args])
