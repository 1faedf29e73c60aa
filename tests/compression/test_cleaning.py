"""`clean` and `shrunk`: compression made permanent computes what the compressed model
did.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressing import ALL, HEADS, Net, data, net, settings, technique
from torch import Tensor, nn

import fzero
from fzero.compression import clean, compression, compression_of, quantized_inputs, shrunk

SHRINKING = {
    "row_pruning": technique(
        {"dense_ratio": 0.5}, ["up"], [["down"]], method="topk", schedule_offset=0
    ),
    "head_pruning": technique(
        {"dense_ratio": 0.5}, ["out"], [["value"]], num_heads=HEADS, schedule_offset=0
    ),
}


def after(techniques: dict[str, Any], num_steps: int = 3) -> tuple[Any, Any]:
    step = fzero.make_train_step(net(), settings(techniques, 3))
    state = step.init()
    for index in range(num_steps):
        state, _ = step(state, data(index))
    return step, state


def test_cleaned_weights_compute_what_the_compressed_model_does_bit_for_bit() -> None:
    step, state = after(ALL)
    weights = step.gather(state)
    small = clean(weights, compression_of(step), num_updates=3)
    model = net(9)
    model.load_state_dict(small)  # strict: the tensors of techniques are gone
    model.eval()
    ranges = {name: weights[f"{name}.x_min_max"] for name in compression_of(step).inputs}
    for name, bounds in ranges.items():
        model.get_submodule(name).register_buffer("x_min_max", bounds)
    with quantized_inputs(model, compression_of(step)), torch.no_grad():
        assert torch.equal(model(*data(7)), step.evaluate(state, data(7)))
    masked = small["blocks.0.mlp.up.weight"]
    assert int((masked.abs().sum(1) > 0).sum()) <= 6 and int((masked != 0).sum()) <= 29


def test_the_last_bits_are_those_of_the_target() -> None:
    step, state = after(ALL)
    out = clean(step.gather(state), compression_of(step))["blocks.0.out.weight"]
    assert all(len(group.unique()) <= 2**4 for group in out.reshape(4, -1))


def test_a_shrunk_model_has_smaller_matrices_and_the_outputs_of_the_masked_one_to_rounding() -> (
    None
):
    step, state = after(SHRINKING)
    small = clean(step.gather(state), compression_of(step))
    model = shrunk(step.spec.model, small)
    block: Any = model.get_submodule("blocks.0")
    assert (
        block.mlp.up.weight.shape == (6, 8)
        and block.mlp.down.weight.shape == (8, 6)
        and block.mlp.up.bias.shape == (6,)
    )
    assert (
        block.out.weight.shape == (8, 4)
        and block.value.weight.shape == (4, 8)
        and block.value.bias.shape == (4,)
    )
    assert (block.mlp.up.out_features, block.mlp.down.in_features, block.num_heads) == (6, 6, 2)
    with torch.no_grad():
        torch.testing.assert_close(model(*data(7)), step.evaluate(state, data(7)))
    again = shrunk(net(), small)  # a plain model of the same kind
    assert all(
        torch.equal(x, y)
        for x, y in zip(again.state_dict().values(), model.state_dict().values(), strict=True)
    )


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 4, 3, padding=1), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), y)


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_channels_shrink_with_their_norms_and_the_next_convolution(method: str) -> None:
    torch.manual_seed(0)
    pruning = technique(
        {"dense_ratio": 0.5}, ["first"], [["norm", "second"]], method=method, schedule_offset=0
    )
    step = fzero.make_train_step(Images(), settings({"channel_pruning": pruning}))
    state = step.init()
    x, y = torch.randn(6, 3, 5, 5), torch.randint(0, 2, (6,))
    for _ in range(2):
        state, _ = step(state, (x, y))
    model = shrunk(step.spec.model, clean(step.gather(state), compression_of(step))).eval()
    assert model.first.weight.shape == (4, 3, 3, 3) and model.second.weight.shape == (4, 4, 3, 3)  # type: ignore[union-attr]
    assert model.norm.num_features == 4 and model.norm.running_mean.shape == (4,)  # type: ignore[union-attr]
    # A masked channel leaves its norm as a constant, which the next convolution reads, and which a
    # shrunk model does not have.
    masked = Images().eval()
    masked.load_state_dict(
        clean(
            step.gather(state),
            compression(
                settings(
                    {
                        "channel_pruning": pruning
                        | {
                            "different_groups": {
                                "group": {"params": {"dense_ratio": 0.5}, "modules": ["first"]}
                            }
                        }
                    }
                ),
                Images(),
            ),
        )
    )
    kept = masked.first.weight.abs().sum((1, 2, 3)) > 0
    with torch.no_grad():
        masked.second.weight[:, ~kept] = 0
        torch.testing.assert_close(model(x, y), masked(x, y))


def test_a_state_dict_without_the_plans_tensors_is_an_error() -> None:
    plan = compression(settings(ALL), net())
    with pytest.raises(ValueError, match=r"weights must have .*scores', which the plan uses"):
        clean(net().state_dict(), plan)


def test_the_plan_of_a_step_without_compression_leaves_the_weights_as_they_are() -> None:
    plan = compression_of(fzero.make_train_step(net(), settings({})))
    weights = net().state_dict()
    assert not plan and clean(weights, plan) == weights


def test_a_number_of_heads_that_does_not_follow_is_asked_for() -> None:
    model = net()
    model.blocks[0].key = nn.Linear(8, 8)  # type: ignore[union-attr]
    weights = dict(model.state_dict())
    weights["blocks.0.value.weight"], weights["blocks.0.value.bias"] = (
        torch.zeros(4, 8),
        torch.zeros(4),
    )
    weights["blocks.0.key.weight"], weights["blocks.0.key.bias"] = torch.zeros(6, 8), torch.zeros(6)
    with pytest.raises(ValueError, match=r"num_heads: must be given for 'blocks.0'"):
        shrunk(model, weights)
    small = shrunk(model, weights, num_heads={"blocks.0": 3})
    assert small.get_submodule("blocks.0").num_heads == 3 and isinstance(small, Net)
