"""The laws of reading and writing single full parameters of a sharded state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.comms import AbstractAxis
from fzero.resharding.parameters import (
    full_params,
    optimizer_state_of,
    weight_of,
    with_optimizer_state,
    with_weight,
)
from fzero.simulation import unstacked
from sharding import Mesh

DIVISIONS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, sent in 8 bits": {"stage": 3, "zero_quantized_weights": True},
    "stage 3, gathered in a node": {"stage": 3, "zero_hpz_partition_size": 2},
    "stage 3, sharded in a node": {"stage": 3, "mics_shard_size": 2},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize(
    "axis", [AbstractAxis("data", 4), AbstractAxis.of(Mesh.of(node=2, data=2))], ids=["1D", "2D"]
)
def test_what_is_written_to_a_parameter_is_read_on_every_rank_bit_for_bit(
    division: str, axis: AbstractAxis
) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    cfg = {
        "bf16": {"enabled": True},
        "optimizer": optimizer,
        "zero_optimization": DIVISIONS[division],
    }
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    ranks = fzero.simulate(fzero.make_train_step(model, cfg, mesh=axis), by="lockstep")
    states = unstacked(ranks.init(), axis.size)
    values = {
        name: torch.arange(x.numel()).view(x.shape) / 3 for name, x in model.named_parameters()
    }

    def written_and_read(rank: int) -> None:
        step, state = ranks.steps[rank], states[rank]
        for name, value in values.items():
            state = with_weight(step, state, name, value)
            state = with_optimizer_state(step, state, name, "exp_avg", -value)
        found = full_params(step, state)
        for name, value in values.items():
            assert torch.equal(weight_of(step, state, name), value)
            assert torch.equal(optimizer_state_of(step, state, name, "exp_avg"), -value)
            assert torch.equal(found[name], value.bfloat16())

    ranks.on_each(written_and_read)
