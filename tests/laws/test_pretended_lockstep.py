"""Ranks in lockstep on the pretended device: their bits, their order of work, and their
random numbers.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from pretended_cuda import PretendedCuda
from test_pretended_cuda import PLACEMENTS, PRECISIONS
from torch import Tensor, nn
from training import Plain, make, vectors

import fzero
from fzero.comms.lockstep import Hub
from fzero.optim.transforms import same_bits

WIDTH, WORLD, NUM_STEPS = 8, 3, 2


class Drops(Plain):
    """Draws random numbers where its input is."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.3), y)


def train(device: str, stage: int, precision: str, zero: dict[str, Any]) -> dict[str, Tensor]:
    """What a training of some steps leaves on all ranks, in host memory, without the
    random states.
    """
    cfg = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 64,
        }
        | zero,
    }
    step = fzero.make_train_step(
        make(lambda: Drops(WIDTH, 3)).to(device), cfg | PRECISIONS[precision]
    )
    ranks = fzero.simulate(step, WORLD, by="lockstep")
    state, found = ranks.init(), dict[str, Tensor]()
    for number in range(NUM_STEPS):
        batch = tuple(x.to(device).view(WORLD, 4, WIDTH) for x in vectors(number, 4 * WORLD, WIDTH))
        state, metrics = ranks(state, batch)
        found |= {f"loss {number}": metrics.loss, f"norm {number}": metrics.grad_norm}
    accessors, leaves, _ = optree.tree_flatten_with_accessor(state._replace(rng={}))
    state_of = {accessor.codify("state"): x for accessor, x in zip(accessors, leaves, strict=True)}
    found |= {name: x for name, x in state_of.items() if isinstance(x, Tensor)}
    return {name: x.cpu() for name, x in (found | ranks.gather(state)).items()}


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "stage, placement",
    [
        (stage, at)
        for at, zero in PLACEMENTS.items()
        for stage in ([3] if "offload_param" in zero else range(4))
    ],
)
def test_ranks_in_lockstep_on_a_device_have_the_bits_of_the_cpu_without_a_race(
    stage: int, precision: str, placement: str
) -> None:
    expected = train("cpu", stage, precision, PLACEMENTS[placement])
    with PretendedCuda():
        found = train("cuda", stage, precision, PLACEMENTS[placement])
    assert [name for name, x in found.items() if not same_bits(x, expected[name])] == []


def test_each_rank_has_its_own_random_numbers_of_the_device() -> None:
    device = torch.device("cuda", 0)
    with PretendedCuda():
        hub = Hub(2, device)

        def draws(rank: int) -> list[float]:
            torch.cuda.manual_seed(rank)
            found = []
            for _ in range(3):
                found.append(torch.rand((), device=device).item())
                hub.send(rank, 1 - rank, None)
                hub.receive(hub.expect(1 - rank, rank))
            return found

        before = torch.cuda.get_rng_state()
        found = hub.run(draws)
        assert torch.equal(before, torch.cuda.get_rng_state()), "those of the process go on"
    for rank in range(2):
        generator = torch.Generator().manual_seed(rank)
        assert found[rank] == [torch.rand((), generator=generator).item() for _ in range(3)]


def test_ranks_launch_their_work_on_the_stream_of_the_caller() -> None:
    device = torch.device("cuda", 0)
    with PretendedCuda():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            assert Hub(2, device).run(lambda _: torch.cuda.current_stream() is side) == [True, True]
        side.synchronize()
