"""Laws of optimizers of whole matrices together with each feature of a step: no bit
depends on where a state lives, on the stage, or on the number of ranks in lockstep.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import RankPool
from test_matrix_steps import FP16, OPTIMIZERS
from test_simulate import for_ranks
from torch import Tensor, nn
from training import Odd, Plain, config, make, part, tokens, vectors

import fzero
from fzero.optim.whole_matrices import MatrixState
from sharding import Placement

Weights = dict[str, Tensor]


def trained(
    name: str,
    world_size: int,
    keys: dict[str, Any],
    *,
    stage: int = 3,
    num_steps: int = 3,
    model: Any = Odd,
    data: Any = tokens,
    zero: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[str, Weights]:
    """The metrics as text and the weights after some steps on ranks in lockstep."""
    step = fzero.make_train_step(
        make(model), config(stage, **zero or {}) | keys, transform=OPTIMIZERS[name](), **options
    )
    simulated = fzero.simulate(step, world_size, by="lockstep")
    state, reported = simulated.init(), []
    for index in range(num_steps):
        state, metrics = simulated(state, for_ranks(data(index), world_size))
        reported.append(repr((metrics.loss, metrics.grad_norm, metrics.overflow)))
    return "\n".join(reported), simulated.gather(state)


def assert_same(found: tuple[str, Weights], expected: tuple[str, Weights]) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][key], value) for key, value in expected[1].items())


class Feature(NamedTuple):
    """Keys of a configuration with which all stages have the bits of stage 0."""

    keys: dict[str, Any]
    num_steps: int = 3


FEATURES = {
    "clipping": Feature({"gradient_clipping": 1e-3}),
    "bf16 with masters": Feature({"bf16": {"enabled": True}}),
    "overflows": Feature(
        {"fp16": FP16["fp16"] | {"initial_scale_power": 14}, "gradient_clipping": 0.1}, 5
    ),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


@pytest.mark.sample(4)
@every_optimizer
@pytest.mark.parametrize("feature", FEATURES)
def test_stages_have_the_bits_of_stage_0_with_each_feature(feature: str, name: str) -> None:
    keys, num_steps = FEATURES[feature]
    expected = trained(name, 2, keys, stage=0, num_steps=num_steps)
    for stage in (1, 2, 3):
        assert_same(trained(name, 2, keys, stage=stage, num_steps=num_steps), expected)
    overflows = [line for line in expected[0].splitlines() if "True" in line]
    assert bool(overflows) == (feature == "overflows") and len(overflows) < num_steps


@every_optimizer
def test_a_skipped_update_leaves_the_bits_of_weights_and_states(name: str) -> None:
    keys = {"fp16": FP16["fp16"] | {"initial_scale_power": 30}}
    step = fzero.make_train_step(
        make(Odd), config(3) | keys, transform=OPTIMIZERS[name](), donate=False
    )
    simulated = fzero.simulate(step, 2, by="lockstep")
    state = simulated.init()
    after, metrics = simulated(state, for_ranks(tokens(0), 2))
    assert bool(metrics.overflow.all())
    for of in ("params", "master", "optimizer"):
        before, now = ({"x": getattr(x, of)} for x in (state, after))
        torch.testing.assert_close(now, before, rtol=0, atol=0)


@every_optimizer
def test_micro_steps_have_the_weights_of_one_step_with_the_batch(name: str) -> None:
    keys = {"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 2}
    model = {"model": Plain, "data": vectors}
    _, expected = trained(name, 2, {}, num_steps=1, **model)
    for stage in (0, 3):
        _, found = trained(name, 2, keys, stage=stage, num_steps=1, **model)
        for key, value in expected.items():
            # Sums in another order; Newton-Schulz steps are in bfloat16, whose last bit is 2^-8 of
            # a step of up to lr = 0.01, and each of five may widen it.
            atol = 3e-4 if "muon" in name else 1e-5
            torch.testing.assert_close(found[key], value, rtol=0, atol=atol)


def _in_files(path: Path) -> dict[str, tuple[dict[str, Any], Any]]:
    files = Placement("nvme", path=str(path / "given"))
    of_files = {"device": "nvme", "nvme_path": str(path)}
    return {
        "host": ({"offload_optimizer": {"device": "cpu"}}, None),
        "files": ({"offload_optimizer": of_files}, None),
        "all in files": ({"offload_optimizer": of_files, "offload_param": of_files}, None),
        "given": ({}, {"optimizer/*/matrices*": files}),
    }


@pytest.mark.sample(3)
@every_optimizer
@pytest.mark.parametrize("where", ["host", "files", "all in files", "given"])
@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_states_off_the_device_have_the_bits_of_the_device(
    where: str, name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    zero, given = _in_files(tmp_path)[where]
    if where == "given" and name == "muon":
        with pytest.raises(fzero.ConfigError, match="must be the first pattern"):
            trained(name, 2, keys, zero=zero, placements=given)
        return
    expected = trained(name, 2, keys)
    assert_same(trained(name, 2, keys, zero=zero, placements=given), expected)


@pytest.mark.parametrize(("world_size", "name"), [(8, "soap"), (8, "muon"), (64, "normuon")])
def test_many_ranks_in_lockstep_have_the_bits_of_stage_0(world_size: int, name: str) -> None:
    few = {"model": Plain, "data": lambda index: vectors(index, size=64), "num_steps": 2}
    expected = trained(name, world_size, {}, stage=0, **few)
    assert_same(trained(name, world_size, {}, **few), expected)


@every_optimizer
def test_ranks_as_a_dimension_are_refused_by_name(name: str) -> None:
    step = fzero.make_train_step(make(Plain), config(3), transform=OPTIMIZERS[name]())
    with pytest.raises(fzero.ConfigError, match=r"must be elementwise.*by='lockstep'"):
        fzero.simulate(step, 2, by="vmap")
    with pytest.warns(UserWarning, match="must be elementwise .* in lockstep"):
        fzero.simulate(step, 2)


class Two(nn.Module):
    """Two matrices, because a graph of more takes long to make."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(torch.tanh(self.up(x))), y)


def _captured(name: str, stage: int) -> list[Weights]:
    """The weights of the eager and of the captured step."""
    found = []
    for options in ({}, {"compile": "step", "compile_backend": "aot_eager"}):
        step = fzero.make_train_step(
            make(Two), config(stage), transform=OPTIMIZERS[name](), **options
        )
        state = step.init()
        for index in range(3):
            batch = vectors(index, width=6)
            state, _ = step(state, part(batch, step.rank, step.world_size))
        found.append(step.gather(state))
    return found


@pytest.mark.covering(1)
@every_optimizer
@pytest.mark.parametrize(("world_size", "stage"), [(2, 3), (1, 0)])
def test_a_captured_step_trains_as_the_eager_one(
    ranks: RankPool, name: str, world_size: int, stage: int
) -> None:
    start = make(Two).state_dict()
    for expected, found in ranks(world_size, _captured, name, stage):
        for key, value in expected.items():
            # A graph has the rate in a tensor, whose product with a step rounds in another way; the
            # steps of Muon in bfloat16 widen that to 2^-8 of a step of 0.01, five times.
            atol = 3e-4 if "muon" in name else 1e-5
            torch.testing.assert_close(found[key], value, rtol=0, atol=atol)
            if value.dim() == 2:
                assert (value - start[key]).abs().max() > 20 * atol


def test_a_checkpoint_with_the_former_name_of_muons_state_is_loaded(tmp_path: Path) -> None:
    muon = config(2, optimizer={"type": "Muon", "params": {"lr": 1e-2}})

    def made(stage: int) -> Any:
        keys = muon | {"zero_optimization": {"stage": stage}}
        return fzero.simulate(fzero.make_train_step(make(Plain), keys), 2, by="lockstep")

    step, batch = made(2), for_ranks(vectors(0), 2)
    state, _ = step(step.init(), batch)
    MatrixState.__name__ = "MuonState"
    try:
        fzero.save(state, tmp_path, step=step)
    finally:
        MatrixState.__name__ = "MatrixState"
    (contents,) = tmp_path.rglob("contents.json")
    assert contents.read_text().count("MuonState") == 5
    state, _ = step(state, batch)
    again = made(3)
    found, _ = again(fzero.load(tmp_path, step=again).state, batch)
    expected, weights = step.gather(state), again.gather(found)
    assert all(torch.equal(weights[key], value) for key, value in expected.items())
