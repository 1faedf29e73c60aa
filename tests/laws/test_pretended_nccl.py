"""Steps of several ranks on the pretended device, with collectives in the order and with the lifetimes of NCCL."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from pretended_cuda import PretendedCuda
from pretended_nccl import pretended_nccl
from ranks import RankPool
from test_meshes import MESHES, MODES, SQUARE, config_of, given_mesh
from test_pretended_cuda import PLACEMENTS, PRECISIONS, WAITS, leave_out
from torch import Tensor
from training import Plain, make, part, vectors

import fzero
from fzero.optim.transforms import same_bits
from sharding import Mesh

WIDTH, NUM_STEPS = 8, 3
CODED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
PARTS: dict[str, dict[str, Any]] = PLACEMENTS | {"coded": {}, "LoCo": {}}
"""The state's placements, and comm hooks without and with a state."""


def train(device: str, mode: str, mesh: Mesh, precision: str, case: str) -> dict[str, Tensor]:
    """What some steps leave on a rank, in host memory: losses, norms, all tensors of the state, and weights."""
    model = make(lambda: Plain(WIDTH, 3)).to(device)
    keys = PRECISIONS[precision] | {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2, "train_batch_size": 8}
    cfg = config_of(mode, mesh, **keys)
    cfg["zero_optimization"] |= PLACEMENTS.get(case, {}) | {"reduce_bucket_size": 100, "sub_group_size": 64}
    hooks = {}
    if case in ("coded", "LoCo"):
        coded = fzero.comms.compressed(fzero.comms.quantize(8))
        hooks["reduce_hook"] = coded if case == "coded" else fzero.comms.error_feedback(coded)
        hooks |= {"gather_hook": coded} if mode.endswith("3") else {}
    step = fzero.make_train_step(model, cfg, mesh=given_mesh(mode, mesh), **hooks)
    state, found = step.init(), {}
    for number in range(NUM_STEPS):
        batch = part(vectors(number, 8, WIDTH), step.rank, step.world_size)
        state, metrics = step(state, tuple(x.to(device) for x in batch))
        found |= {f"loss {number}": metrics.loss, f"norm {number}": metrics.grad_norm}
    accessors, leaves, _ = optree.tree_flatten_with_accessor(state._replace(rng={}))
    state_of = {accessor.codify("state"): x for accessor, x in zip(accessors, leaves, strict=True)}
    found |= {name: x for name, x in state_of.items() if isinstance(x, Tensor)}
    return {name: x.cpu() for name, x in (found | step.gather(state)).items()}


def differing(*how: Any, without: str | None = None) -> tuple[list[str], list[str]]:
    """On a rank: the names of what differs from a run on the CPU, and the kinds of collectives that ran."""
    expected = train("cpu", *how)
    with pytest.MonkeyPatch.context() as patches, PretendedCuda() as card, pretended_nccl(card) as nccl:
        if without:
            leave_out(without, patches)
        found = train("cuda", *how)
    assert found.keys() == expected.keys()
    return [name for name, x in found.items() if not same_bits(x, expected[name])], sorted(set(nccl.started))


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["2x2", "4x1", "1x4"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", PARTS)
def test_a_step_of_several_ranks_has_no_race_and_the_bits_of_the_cpu(
    ranks: RankPool, mode: str, name: str, precision: str, case: str
) -> None:
    if "parameters" in case or "all" in case:
        mode = mode.replace("0", "3").replace("1", "3").replace("2", "3")
    for wrong, _ in ranks(4, differing, mode, MESHES[name], precision, case):
        assert wrong == []
