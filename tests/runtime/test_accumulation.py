"""The laws of accumulation: micro-batches in one step give what one big batch gives, in
every stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from training import Odd, Plain, adamw, config, make, part, tokens, train_plainly, vectors

import fzero
from fzero.runtime.eager import ForwardBackward
from fzero.runtime.finish import LossRules
from fzero.runtime.visits import Forwards

NUM_STEPS = 4
STEPS = {"train_batch_size": 12}


def _train(
    stage: int,
    num_micro_steps: int,
    model: Any = Plain,
    data: Any = vectors,
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    cfg = config(stage) | STEPS | {"gradient_accumulation_steps": num_micro_steps}
    step = fzero.make_train_step(make(model), cfg)
    state, curve = step.init(), []
    for index in range(NUM_STEPS):
        state, metrics = step(state, part(data(index), step.rank, step.world_size))
        curve.append((metrics.loss.item(), metrics.grad_norm.item()))
    return curve, step.gather(state)


def assert_close(ours: Any, theirs: Any) -> None:
    # fp32: the sums over rows are made in another order; Adam then divides small gradients by their
    # own size.
    assert ours[0] == [pytest.approx(pair, rel=1e-5) for pair in theirs[0]]
    for name, weight in theirs[1].items():
        torch.testing.assert_close(ours[1][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.covering(0)
@pytest.mark.parametrize(("model", "data"), [(Plain, vectors), (Odd, tokens)])
@pytest.mark.parametrize("world_size", [2, 3, 1])
def test_micro_batches_give_one_big_batch_to_rounding_and_stages_that_add_alike_the_same_bits(
    ranks: RankPool, world_size: int, model: Any, data: Any
) -> None:
    expected = train_plainly(model, data, adamw, num_steps=NUM_STEPS)
    for stage in range(4):
        for result in ranks(world_size, _train, stage, 2, model, data):
            assert_close(result, expected)
            # stages 0 and 1 add up micro-steps, then ranks; stages 2 and 3 the other way round
            if stage in (0, 2):
                first = result
            assert result[0] == first[0], "losses and norms differ between stages"
            assert all(torch.equal(result[1][name], first[1][name]) for name in first[1])


@pytest.mark.parametrize("stage", [0, 2])
def test_a_gradient_of_16_bits_is_added_with_one_rounding_however_large_it_is(stage: int) -> None:
    torch.manual_seed(0)
    model, rows = nn.Linear(301, 300, bias=False), torch.randn(8, 301).bfloat16()
    cfg = config(stage) | {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
    }
    step = fzero.make_train_step(model, cfg, loss_fn=lambda model, x: model(x).square().mean())
    weight = model.weight.detach().bfloat16().requires_grad_()
    expected = torch.zeros(weight.numel())
    for half in rows.chunk(2):
        (grad,) = torch.autograd.grad(nn.functional.linear(half, weight).square().mean(), weight)
        expected = (expected + grad.reshape(-1).float() / 2).bfloat16().float()
    state, _ = step(step.init(), rows)
    (collected,) = state.grads.values()
    assert torch.equal(collected[: weight.numel()].float(), expected)


# --- losses with a weight -------------------------------------------------------------------------


def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The sum over the rows whose first number is positive, and how many these are:
    uneven between micro-batches.
    """
    x, y = batch
    hidden = x
    for block in model.blocks:
        hidden = block(hidden)
    chosen = (x[:, 0] > 0).to(x.dtype)
    return ((hidden - y).square().mean(dim=1) * chosen).sum(), chosen.sum()


def _measured(stage: int, num_micro_steps: int) -> list[tuple[float, int]]:
    """The norm, and how many shards the update measured for it: of gradients as they
    are, doubled before the update, and doubled so that PyTorch does not see it."""
    model, found = make(Plain), []
    step = fzero.make_train_step(
        model, config(stage) | STEPS | {"gradient_accumulation_steps": num_micro_steps}
    )
    batch = part(vectors(0), step.rank, step.world_size)
    for change in (None, lambda grad: grad.mul_(2), lambda grad: grad.data.mul_(2)):
        window = step.begin(step.init(), measures_early=len(found) < 2)
        for index in range(num_micro_steps):
            loss = step.forward(
                window, lambda index=index: model(*part(batch, index, num_micro_steps))
            )
            is_last = index == num_micro_steps - 1
            window = step.backward(window, loss, num_parts=num_micro_steps, is_last=is_last)
        for grad in window.state.grads.values() if change is not None else ():
            change(grad)
        with mock.patch.object(
            LossRules, "of_shard", autospec=True, side_effect=LossRules.of_shard
        ) as measured:
            _, metrics = step.update(window)
        found.append((metrics.grad_norm.item(), measured.call_count))
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_micro_steps", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_the_norm_is_measured_as_gradients_come_and_again_of_those_that_somebody_changes(
    ranks: RankPool, stage: int, world_size: int, num_micro_steps: int
) -> None:
    for (norm, num_again), (doubled, num_changed), unseen in ranks(
        world_size, _measured, stage, num_micro_steps
    ):
        assert doubled == unseen[0] == 2 * norm  # exact: two is a power of two
        # else each rank adds up all shards in the order of the ranks
        is_cut = stage > 0 or world_size == 1
        assert (num_again == 0) == is_cut and num_changed == unseen[1] > 0


# --- what is sent and held ------------------------------------------------------------------------


def _sent(stage: int, num_micro_steps: int) -> tuple[dict[str, int], dict[str, int]]:
    log: list[fzero.comms.CommRecord] = []
    axis = replace(fzero.join(), observe=log.append)
    cfg = config(stage) | STEPS | {"gradient_accumulation_steps": num_micro_steps}
    step = fzero.make_train_step(make(Plain), cfg, mesh=axis)
    state = step.init()
    for index in range(2):
        log.clear()
        state, _ = step(state, part(vectors(index), step.rank, step.world_size))
    sent: dict[str, int] = {}
    for record in log:
        sent[record.label.purpose] = sent.get(record.label.purpose, 0) + record.num_elements
    return sent, step.plan.sent_per_step


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
def test_gradients_are_reduced_once_in_stages_0_and_1_and_in_each_micro_step_otherwise(
    ranks: RankPool, stage: int
) -> None:
    (once, _), *_ = ranks(2, _sent, stage, 1)
    for sent, planned in ranks(2, _sent, stage, 3):
        times = 3 if stage >= 2 else 1
        assert sent["reduce"] == times * once["reduce"]
        assert (
            sent["reduce"]
            == planned["all_reduce of gradients"] + planned["reduce_scatter of gradients"]
        )
        assert sent.get("gather", 0) == 3 * once.get("gather", 0)
        assert (
            sent.get("gather", 0)
            == planned["all_gather in the forward"] + planned["all_gather in the backward"]
        )
        assert (
            sent.get("all_gather_params", 0)
            == once.get("all_gather_params", 0)
            == planned["all_gather of updated parameters"]
        )


# --- bad input ------------------------------------------------------------------------------------


def _one_step(batch: Any, loss_fn: Any = None) -> None:
    step = fzero.make_train_step(
        make(Plain), config(0) | STEPS | {"gradient_accumulation_steps": 3}, loss_fn=loss_fn
    )
    step(step.init(), batch)


def _ends_early() -> Iterator[Any]:
    yield vectors(0, 4)


def test_batches_that_do_not_split_are_reported() -> None:
    with pytest.raises(ValueError, match=r"batch: must hold 12 samples on each rank .*, got 9"):
        _one_step(vectors(0, 9))
    with pytest.raises(ValueError, match=r"iterator must give 3 micro-batches .*, ended after 1"):
        _one_step(_ends_early())
    with pytest.raises(
        ValueError, match=r"multiple of the 3 micro-batches .*, got shape \(13, 16\)"
    ):
        _one_step((vectors(0, 12)[0], vectors(0, 13)[1]))


def test_what_cannot_be_divided_is_reported_and_what_is_no_tensor_is_given_to_all() -> None:
    class Unknown:
        pass

    x, y = vectors(0)
    with pytest.raises(
        ValueError, match="batch: a Unknown cannot be divided into the 3 micro-batches"
    ):
        _one_step((x, y, Unknown()))
    seen: list[Any] = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        seen.append((batch["x"].shape[0], batch["name"], batch["nothing"]))
        return model(batch["x"], batch["y"])

    _one_step({"x": x, "y": y, "name": "a", "nothing": None}, loss_fn)
    assert seen == [(4, "a", None)] * 3


def test_a_bad_weight_is_reported() -> None:
    def sometimes(model: nn.Module, batch: Any) -> Any:
        total, weight = weighted(model, batch)
        return (total, weight) if batch[0][0, 0] > 0 else total

    x, y = vectors(0)
    x[:, 0] = torch.arange(12) - 5.5
    with pytest.raises(ValueError, match="must give a mean always or a"):
        _one_step((x, y), sometimes)
    with pytest.raises(
        ValueError, match="a weight that is one number, not negative, beside the sum, got -1"
    ):
        _one_step(vectors(0), lambda model, batch: (weighted(model, batch)[0], -1))
    with pytest.raises(ValueError, match="its weights must not all be 0 in a step"):
        _one_step(vectors(0), lambda model, batch: (weighted(model, batch)[0], 0))


def test_a_graph_is_read_only_where_a_backward_may_belong_to_several_forwards() -> None:
    forwards = Forwards()
    forwards.begin("train", frozenset())
    forwards.last.visits["a"] += 1
    assert forwards.last_alone == {0: {"a": 1}}
    forwards.begin("train", frozenset())
    assert forwards.last_alone is None  # of which of the two?
    forwards.go_back(retain_graph=True)
    forwards.begin("train", frozenset())
    assert forwards.last_alone is None  # of this one, or of the graph that is kept?


class Large(nn.Module):
    """Blocks with a parameter of a node of its own each. `log` has the gradients of
    activations, and those of parameters that the backward has handed over, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(257, 257) for _ in range(3))
        self.log: list[str] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.cat([x, y], dim=1).repeat(1, 9)[:, :257]
        for name, block in self.blocks.named_children():
            h = torch.tanh(block(h))
            h.register_hook(lambda grad, name=name: self.log.append(f"activation {name}"))  # type: ignore[no-untyped-call]
        return h.square().mean()


@pytest.mark.parametrize("stage", range(4))
def test_a_gradient_is_taken_as_soon_as_it_is_there_also_where_forwards_share_parameters(
    stage: int,
) -> None:
    """Otherwise all full gradients live at the end of a backward, and no reduction runs
    beside it.
    """
    model = make(Large)
    cfg = config(stage) | {"train_batch_size": 12, "gradient_accumulation_steps": 3}
    step = fzero.make_train_step(model, cfg)
    state, take = step.init(), ForwardBackward.add_grads

    def taken(work: ForwardBackward, unit: str, *grads: Any) -> None:
        model.log.append(unit)
        take(work, unit, *grads)

    with mock.patch.object(ForwardBackward, "add_grads", taken):
        for index in range(3):
            model.log.clear()
            state, _ = step(state, vectors(index))
            size = len(model.log) // 3
            assert model.log == 3 * model.log[:size], (
                "all backwards take gradients in the same order"
            )
            assert model.log.index("activation 0") > model.log.index("blocks.1")


class Normed(Plain):
    """Its buffers are averaged in each update, before the norm."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.norm(x), y)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tells", [True, False], ids=["is_last", "no is_last"])
@pytest.mark.parametrize("model", [Plain, Normed])
@pytest.mark.parametrize("stage", range(4))
def test_ranks_with_other_numbers_of_backwards_are_reported(
    stage: int, model: Any, tells: bool
) -> None:
    """Rank 1 makes one backward more, in the second update. The last backward may be
    called so, or not.
    """
    simulated = fzero.simulate(fzero.make_train_step(make(model), config(stage)), 2, by="lockstep")
    states = simulated.states_of(simulated.init())

    def updates(rank: int) -> None:
        step, state = simulated.steps[rank], states[rank]
        for index in range(4):
            num = 3 if (rank, index) == (1, 1) else 2
            window = step.begin(state)
            for k in range(num):
                x, y = vectors(k)
                loss = step.forward(window, lambda: step.spec.model(x, y))  # noqa: B023
                window = step.backward(window, loss, num_parts=2, is_last=k == num - 1 or not tells)
            state, _ = step.update(window)

    message = "every rank must call backward and step equally often, and one call was "
    message += (
        "the last backward before an update on rank 0, a backward before the last on rank 1"
        if tells
        else "an update"
    )
    if not tells and stage == 3:  # rank 1 gathers, and rank 0 does not
        message = "the collective failed"
    with pytest.raises(fzero.CollectiveError, match=message):
        simulated.on_each(updates)
