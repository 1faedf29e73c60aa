"""Compressed steps: equal to a plain loop, in all stages, runners and placements, and
on real ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressing import ALL, Net, data, net, plain_loss, settings, technique, trained
from ranks import RankPool
from torch import nn

import fzero
from fzero.compression import compression, compression_of
from fzero.compression.added import registered

STOCHASTIC = {
    "weight_quantization": technique(
        {"start_bits": 4, "target_bits": 3},
        ["mlp"],
        rounding="stochastic",
        quantization_type="asymmetric",
    )
}
MASKS = {
    "sparse_pruning": technique({"dense_ratio": 0.5}, ["value"], method="l1", schedule_offset=1),
    "row_pruning": technique({"dense_ratio": 0.5}, ["up"], method="l1", schedule_offset=0),
}


EACH = [
    pytest.param(ALL, id="all"),
    pytest.param(STOCHASTIC, id="stochastic", marks=pytest.mark.long),
    pytest.param(MASKS, id="masks", marks=pytest.mark.long),
]


def lockstep(
    techniques: dict[str, Any], stage: int, *, num_micro: int = 1, by: str = "lockstep"
) -> tuple[list[float], Any]:
    keys = {
        "gradient_clipping": 0,
        "train_micro_batch_size_per_gpu": 8 // num_micro,
        "gradient_accumulation_steps": num_micro,
    }
    step = fzero.make_train_step(net(), settings(techniques, stage, **keys))
    ranks = fzero.simulate(step, 2, by=by)
    state, losses = ranks.init(), []
    for index in range(4):
        state, metrics = ranks(state, tuple(torch.stack([x[:8], x[8:]]) for x in data(index)))
        losses.append(float(metrics.loss))
    return losses, state


@pytest.mark.parametrize("stage", [0, 3])
def test_a_compressed_step_is_the_plain_loop_with_the_formulas(stage: int) -> None:
    losses, weights = trained(ALL, stage)
    model = net()
    registered(compression(settings(ALL), model), model)
    scores = {name: param for name, param in model.named_parameters() if "scores" in name}
    optimizer, bounds, expected = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(2), []
    for n in range(4):
        loss = plain_loss(model, scores, n, bounds, *data(n))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-6)
    for (
        name,
        param,
    ) in model.named_parameters():
        # products of masks and sums of scores' gradients round in another order
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weights["head.x_min_max"], bounds)


@pytest.mark.parametrize("techniques", EACH)
def test_all_stages_have_the_same_bits(techniques: dict[str, Any]) -> None:
    losses = [lockstep(techniques, stage)[0] for stage in range(4)]
    assert losses[0] == losses[1] == losses[2] == losses[3]


@pytest.mark.long
def test_with_accumulation_the_pairs_of_stages_have_the_same_bits_and_all_are_equal_to_rounding() -> (
    None
):
    losses = [lockstep(ALL, stage, num_micro=2)[0] for stage in range(4)]
    assert losses[0] == losses[1] and losses[2] == losses[3]
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)


def test_ranks_stacked_are_the_ranks_in_lockstep_to_rounding() -> None:
    assert lockstep(ALL, 3, by="vmap")[0] == pytest.approx(lockstep(ALL, 3)[0], rel=1e-5)


@pytest.mark.parametrize("techniques", EACH)
def test_a_captured_step_is_the_eager_one_and_no_offset_captures_it_again(
    techniques: dict[str, Any],
) -> None:
    step = fzero.make_train_step(
        net(),
        settings(techniques, 3, gradient_clipping=0),
        compile="step",
        compile_backend="aot_eager",
    )
    state, losses = step.init(), []
    for index in range(4):
        state, metrics = step(state, data(index))
        losses.append(float(metrics.loss))
    assert losses == pytest.approx(trained(techniques, 3)[0], rel=1e-6)
    assert step.program is not None and len(step.program.compiled.graphs) == 1


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.long), 3])
def test_recomputed_blocks_see_the_same_values(stage: int) -> None:
    losses, weights = trained(ALL, stage, checkpoint=1)
    expected, others = trained(ALL, stage)
    assert losses == expected and all(torch.equal(weights[name], others[name]) for name in others)


def test_real_ranks_have_the_bits_of_those_in_lockstep(ranks: RankPool) -> None:
    (losses, weights), (others, _) = ranks(2, trained, ALL, 3)
    expected, state = lockstep(ALL, 3)
    assert losses == others == expected
    assert torch.equal(weights["head.x_min_max"], state.buffers["head.x_min_max"][0])


def test_ranks_take_the_least_and_the_largest_of_their_ranges(ranks: RankPool) -> None:
    static = {
        "activation_quantization": technique(
            {"bits": 8}, ["blocks.0.value"], range_calibration="static", schedule_offset=0
        )
    }
    x = data(0)[0]
    for _, weights in ranks(2, trained, static, 2, num_steps=1):
        torch.testing.assert_close(
            weights["blocks.0.value.x_min_max"], torch.stack([x.min(), x.max()])
        )


@pytest.mark.long
def test_compiled_blocks_see_compressed_weights_and_no_quantized_inputs() -> None:
    techniques = {
        name: ALL[name] for name in ("weight_quantization", "row_pruning", "head_pruning")
    }
    how: dict[str, Any] = {"compile": "block", "compile_backend": "aot_eager"}
    losses, _ = trained(techniques, 3, **how)
    assert losses == pytest.approx(trained(techniques, 3)[0], rel=1e-6)
    with pytest.raises(
        fzero.ConfigError, match=r"activation_quantization: must be off with compile='block'"
    ):
        trained(ALL, 3, **how)


def test_evaluation_sees_what_training_sees() -> None:
    step = fzero.make_train_step(net(), settings(ALL, 3))
    state = step.init()
    for index in range(3):
        state, _ = step(state, data(index))
    loss = step.evaluate(state, data(3))  # before the step: its range does not move
    plain = fzero.make_train_step(net(), settings({}, 3))
    weights = {
        k: v for k, v in step.gather(state).items() if k in dict(plain.spec.model.state_dict())
    }
    assert loss != plain.evaluate(plain.init(weights), data(3))
    assert loss == step.evaluate(state, data(3))


def test_a_frozen_weight_trains_its_scores() -> None:
    sparse = {
        "sparse_pruning": technique({"dense_ratio": 0.5}, ["up"], method="topk", schedule_offset=0)
    }
    model = net()
    model.requires_grad_(False)
    model.head.requires_grad_()
    step = fzero.make_train_step(model, settings(sparse, 3))
    state = step.init()
    before = step.gather(state)
    state, _ = step(state, data())
    after = step.gather(state)
    name = "blocks.0.mlp.up"
    assert torch.equal(before[f"{name}.weight"], after[f"{name}.weight"])
    assert not torch.equal(
        before[f"{name}.sparse_mask_scores"], after[f"{name}.sparse_mask_scores"]
    )


def test_a_tied_weight_is_compressed_once_for_both_users() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.embed(x)), x)

    torch.manual_seed(0)
    model = Tied()
    both = {
        "weight_quantization": technique(
            {"target_bits": 2}, ["embed|head"], quantize_weight_in_forward=True
        )
    }
    step = fzero.make_train_step(model, settings(both))
    weight = compression(settings(both), model).seen(
        "embed.weight", model.embed.weight.detach(), 0, {}
    )
    assert all(len(row.unique()) <= 3 for row in weight)  # ternary, one group for each row
    x = torch.arange(8)
    _, metrics = step(step.init(), x)
    logits = nn.functional.linear(nn.functional.embedding(x, weight), weight)
    assert float(metrics.loss) == pytest.approx(
        float(nn.functional.cross_entropy(logits, x)), rel=1e-6
    )
    assert compression_of(step).aliases == {"head.weight": "embed.weight"}


def test_a_checkpoint_is_read_by_a_run_without_compression_and_continues_one_with_it(
    tmp_path: Any,
) -> None:
    step = fzero.make_train_step(
        net(), settings(ALL | MASKS | {"row_pruning": ALL["row_pruning"]}, 3)
    )
    state, _ = step(step.init(), data())
    fzero.save(state, tmp_path, step=step)
    plain = fzero.make_train_step(net(1), settings({}, 1))
    loaded = fzero.load(tmp_path, step=plain).state
    weights, gathered = step.gather(state), plain.gather(loaded)
    assert gathered.keys() == dict(net().named_parameters()).keys()
    assert all(torch.equal(gathered[name], weights[name]) for name in gathered)
    again = fzero.load(tmp_path, step=step).state
    assert all(
        torch.equal(x, y)
        for x, y in zip(step.gather(again).values(), weights.values(), strict=True)
    )


def test_masks_are_made_from_the_weights_that_a_state_begins_with(tmp_path: Any) -> None:
    weights = dict(net(5).state_dict())
    torch.save(weights, tmp_path / "weights.pt")
    step = fzero.make_train_step(net(), settings(MASKS, 3))
    given = step.init(weights)
    loaded = fzero.load_weights(tmp_path / "weights.pt", step=step)
    mask = step.gather(given)["blocks.1.value.sparse_pruning_mask"]
    size = weights["blocks.1.value.weight"].abs()
    assert int(mask.sum()) == 32 and size[mask].min() >= size[~mask].max()
    assert torch.equal(step.gather(loaded)["blocks.1.value.sparse_pruning_mask"], mask)
    assert torch.equal(
        step.gather(step.init(step.gather(given)))["blocks.1.value.sparse_pruning_mask"], mask
    )


def test_weights_without_scores_begin_a_compressed_run_by_init_and_files_of_them_say_so(
    tmp_path: Any,
) -> None:
    weights = dict(net(5).state_dict())
    torch.save(weights, tmp_path / "weights.pt")
    step = fzero.make_train_step(net(), settings({"row_pruning": ALL["row_pruning"]}, 3))
    found, first = step.gather(step.init(weights)), step.gather(step.init())
    name = "blocks.0.mlp.up"
    assert torch.equal(found[f"{name}.weight"], weights[f"{name}.weight"])
    assert torch.equal(found[f"{name}.row_mask_scores"], first[f"{name}.row_mask_scores"])
    with pytest.raises(
        ValueError,
        match=r"row_mask_scores' must be among .* pass weights without scores to step.init",
    ):
        fzero.load_weights(tmp_path / "weights.pt", step=step)


def test_a_model_on_meta_gets_the_scores_of_its_seed_and_the_masks_of_its_first_weights() -> None:
    techniques = {"row_pruning": ALL["row_pruning"], "sparse_pruning": MASKS["sparse_pruning"]}
    with torch.device("meta"):
        model = Net()
    step = fzero.make_train_step(model, settings(techniques, 3))
    weights = step.gather(step.init())
    scores = fzero.make_train_step(net(), settings(techniques)).spec.model.get_parameter(
        "blocks.0.mlp.up.row_mask_scores"
    )
    assert torch.equal(weights["blocks.0.mlp.up.row_mask_scores"], scores.detach())
    mask, size = (
        weights["blocks.1.value.sparse_pruning_mask"],
        weights["blocks.1.value.weight"].abs(),
    )
    assert int(mask.sum()) == 32 and size[mask].min() >= size[~mask].max()
