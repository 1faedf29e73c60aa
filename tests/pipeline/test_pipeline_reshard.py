"""A state moves from one number of stages to another, bit for bit, and training goes
on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from test_pipelines import ONCE, Case, Result, assert_same, data, layers, simulated, tied_layers

import fzero
from fzero.comms import CommRecord
from fzero.comms.axes import ProcessAxis
from fzero.comms.process_group import job
from fzero.resharding import plan_reshard, reshard_all, staged_plan

OTHERS = [
    (2, 2, "gpipe"),
    (1, 2, "1f1b"),
    (4, 2, "zero_bubble"),
    (2, 2, "interleaved:2"),
    (0, 2, "1f1b"),
]
"""Stages (0: without a pipeline), data ranks and orders."""


def lockstep(case: Case) -> Any:
    return fzero.simulate(case.step(), by="lockstep")


def trained(ranks: Any, state: Any, batches: Any) -> tuple[Any, Result]:
    curve = []
    for batch in batches:
        state, metrics = ranks(state, batch)
        curve.append(tuple(float(number) for number in metrics))
    return state, (curve, ranks.gather(state))


def assert_equal(states: Any, others: Any) -> None:
    """All but gradients, which a step collects anew."""
    for before, after in zip(states, others, strict=True):
        tensors = (optree.tree_leaves(state._replace(grads={})) for state in (before, after))
        assert all(torch.equal(x, y) for x, y in zip(*tensors, strict=True))


@pytest.mark.parametrize(
    ("stages", "num_data", "order"),
    [
        OTHERS[2],
        *(pytest.param(*other, marks=pytest.mark.long) for other in (*OTHERS[:2], *OTHERS[3:])),
    ],
)
def test_training_goes_on_with_the_same_bits_on_another_number_of_stages(
    stages: int, num_data: int, order: str
) -> None:
    case = Case(
        2,
        "1f1b",
        num_steps=5,
        p=0.5 * bool(stages),
        keys={"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}},
    )
    batches = data(5, 4, 2)
    first, other = (
        lockstep(case),
        lockstep(case._replace(stages=stages, order=order, num_data=num_data)),
    )
    state, _ = trained(first, first.init(), batches[:2])
    made = fzero.reshard(state, first, other)
    kept = fzero.reshard(made, other, first)
    assert_equal(state, kept)  # there and back again
    _, wanted = trained(first, state, batches[2:])
    assert_same(trained(other, made, batches[2:])[1], wanted)


@pytest.mark.long
@pytest.mark.parametrize("made", [layers, tied_layers])
def test_data_ranks_may_change_with_the_stages_and_every_tensor_is_kept(made: Any) -> None:
    case = Case(2, made=made, num_data=1, num_steps=2)
    first = lockstep(case)
    state, (_, weights) = trained(first, first.init(), data(2, 4, 1))
    ranks, now = first, state
    for stages, num_data in ((1, 4), (4, 1), (3, 2), (2, 1)):
        new = lockstep(case._replace(stages=stages, num_data=num_data))
        now = fzero.reshard(now, ranks, new)
        ranks = new
        found = ranks.gather(now)
        assert found.keys() == weights.keys() and all(
            torch.equal(found[name], weights[name]) for name in weights
        )
        for own in now:
            copies = [
                x
                for other in now
                for key, x in other.params.items()
                if key in own.params and key.startswith("tied")
            ]
            assert all(torch.equal(copies[0], copy) for copy in copies)
    assert_equal(state, now)


@pytest.mark.long
@pytest.mark.parametrize("made", [layers, tied_layers])
def test_stages_of_zero_may_change_with_the_stages_of_the_pipeline(
    made: Any, tmp_path: Any
) -> None:
    """And a checkpoint of stage 3 loads into stage 1, and the other way round."""
    case = Case(2, made=made, num_steps=4)
    sizes = (2, 3), (4, 1), (3, 3)
    cases = [
        case._replace(stages=n, keys={"zero_optimization": ONCE | {"stage": zero}})
        for n, zero in sizes
    ]
    batches = data(4, 4, 2)
    first = lockstep(cases[0])
    state, _ = trained(first, first.init(), batches[:1])
    fzero.save(state, tmp_path, step=first)
    loss = first.evaluate(state, batches[1])
    before, now, weights = first, state, first.gather(state)
    for other in cases[1:]:
        ranks = lockstep(other)
        for moved in (fzero.reshard(now, before, ranks), fzero.load(tmp_path, step=ranks).state):
            found = ranks.gather(moved)
            assert all(torch.equal(found[name], x) for name, x in weights.items())
            assert ranks.evaluate(moved, batches[1]) == loss
        before, now = ranks, moved
    results = [trained(*pair, batches[1:])[1] for pair in ((first, state), (before, now))]
    if made is layers:
        assert_same(*results)
    else:
        assert [loss for loss, *_ in results[0][0]] == pytest.approx(
            [loss for loss, *_ in results[1][0]], rel=1e-5
        )


def resharded(stages: int, order: str, case: Case) -> tuple[list[Any], int, tuple[int, ...]]:
    """On a real rank of four: two steps on 2 × 2 ranks, a move, two more steps; and
    what the move sent.
    """
    torch.set_num_threads(1)
    sent: list[CommRecord] = []
    first, second = (
        case.step(case.mesh),
        case._replace(stages=stages, order=order, num_data=4 // stages),
    )
    new = second.step(replace(job(), name="data", mesh=second.mesh, observe=sent.append))
    state, curve = first.init(), []
    batches = data(4, 4, 4)
    for step, given in ((first, batches[:2]), (new, batches[2:])):
        if step is new:
            sent.clear()
            state = fzero.reshard(state, first, new)
            sent = [record for record in sent if record.label.purpose == "reshard"]
        for batch in given:
            own = tuple(x.flatten(0, 1).chunk(step.data_world_size)[step.data_rank] for x in batch)
            state, metrics = step(state, own)
            curve.append(tuple(float(number) for number in metrics))
    return (
        curve,
        sum(record.nbytes for record in sent),
        plan_reshard(staged_plan(first), staged_plan(new), rng=new.specs.rng).sent_nbytes,
    )


def in_lockstep(stages: int, order: str, case: Case) -> list[Any]:
    """The same in one process."""
    first, new = (
        lockstep(case),
        lockstep(case._replace(stages=stages, order=order, num_data=4 // stages)),
    )
    state, curve, batches = first.init(), [], data(4, 4, 4)
    for ranks, given in ((first, batches[:2]), (new, batches[2:])):
        state = state if ranks is first else fzero.reshard(state, first, new)
        num = ranks.plan.world_size
        state, (more, _) = trained(
            ranks, state, [tuple(x.reshape(num, -1, x.shape[-1]) for x in b) for b in given]
        )
        curve += more
    return curve


@pytest.mark.parametrize(
    ("stages", "order"), [(4, "1f1b"), pytest.param(1, "gpipe", marks=pytest.mark.long)]
)
def test_processes_move_their_states_and_send_what_was_planned(
    stages: int, order: str, ranks: RankPool
) -> None:
    case = Case(2, "1f1b", keys={"train_batch_size": 32})
    wanted = in_lockstep(stages, order, case)
    for rank, (curve, sent, planned) in enumerate(ranks(4, resharded, stages, order, case)):
        assert curve == wanted
        assert sent == planned[rank]
        assert sum(planned) > 0


def grown(case: Case) -> list[float]:
    """On a real rank of four, of which two are in the old job."""
    torch.set_num_threads(1)
    rank = job().rank
    group = dist.new_group([0, 1])
    old_axis: Any = fzero.comms.AbstractAxis.of(case.mesh)
    if rank < 2:
        old_axis = ProcessAxis("data", 2, rank, group, mesh=case.mesh)
    new_case = case._replace(stages=4, order="gpipe")
    old, new = case.step(old_axis), new_case.step(new_case.mesh)
    batches = [tuple(x[0] for x in batch) for batch in data(3, 4, 1)]
    state, losses = None, list[float]()
    if rank < 2:
        state, metrics = old(old.init(), batches[0])
        losses.append(metrics.loss.item())
    moved = fzero.reshard(state, old, new)
    assert moved is not None
    for batch in batches[1:]:
        moved, metrics = new(moved, batch)
        losses.append(metrics.loss.item())
    return losses


@pytest.mark.long
def test_a_pipeline_may_grow_onto_processes_that_were_not_in_the_old_one(ranks: RankPool) -> None:
    case = Case(2, num_data=1)
    wanted = [loss for loss, *_ in simulated(case)[0]]
    for rank, losses in enumerate(ranks(4, grown, case)):
        assert losses == (wanted if rank < 2 else wanted[1:])


def frozen_on_one_rank() -> str:
    """On a real rank of two: a parameter of stage 1 is frozen after the layers were
    built, which rank 0 cannot know.
    """
    case = Case(2, num_data=1)
    model = case.model()
    if model.stage_id == 1:
        dict(model.named_parameters())["6.head.bias"].requires_grad_(False)
    step = fzero.make_train_step(model, case.config(), mesh=case.mesh)
    with pytest.raises(ValueError) as caught:
        fzero.reshard(step.init(), step, step)
    return str(caught.value)


@pytest.mark.long
def test_layers_that_only_their_own_rank_has_changed_are_refused_on_all_ranks(
    ranks: RankPool,
) -> None:
    for text in ranks(2, frozen_on_one_rank):
        assert (
            "must be the same two steps on every process" in text and "where they are made" in text
        )


@pytest.mark.parametrize("stages", [2, 3])
def test_a_stage_is_held_by_the_ranks_with_its_coordinate(stages: int) -> None:
    plan = staged_plan(Case(stages, num_data=2).step())
    assert [plan.ranks(stage) for stage in range(stages)] == [
        (2 * stage, 2 * stage + 1) for stage in range(stages)
    ]


@pytest.mark.long
def test_states_of_abstract_ranks_move() -> None:
    case = Case(2, num_data=1)
    ranks = lockstep(case)
    state = ranks.init()
    old, new = case.step(), case._replace(stages=4).step()
    made = reshard_all(state, old, new)
    assert_equal(made, fzero.reshard(state, ranks, lockstep(case._replace(stages=4))))
    assert str(plan_reshard(staged_plan(old), staged_plan(new))).startswith(
        "ZeRO stage 1 on 2 ranks, pipe 2 × data 1 -> stage 1 on 4 ranks, pipe 4 × data 1"
    )
