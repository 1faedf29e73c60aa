"""`zero.TiledLinear`, the files of checkpoints of DeepSpeed, held to the real package;
and weights in 8 bits.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import assert_close, quiet, settings
from ranks import RankPool
from torch import nn

import fzero
import fzero.deepspeed as deepspeed
from fzero.deepspeed.runtime.zero import tiling
from fzero.deepspeed.utils import zero_to_fp32

REAL = pytest.mark.long
"""For tests that import the real package, which takes some seconds."""


# --- tiles ----------------------------------------------------------------------------------------

SHAPES = [(8, 8, 2, 2), (7, 5, 3, 2), (5, 9, 1, 4), (6, 4, 6, 1), (3, 3, 1, 1)]


class WithBias(nn.Linear):
    """Returns (output, bias), as Megatron's layers do."""

    def forward(self, input: Any) -> Any:
        return nn.functional.linear(input, self.weight), self.bias


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_tiles_of_a_layer_compute_what_it_computes(
    shape: tuple[int, int, int, int], bias: bool
) -> None:
    torch.manual_seed(1)
    linear, x = nn.Linear(*shape[:2], bias=bias), torch.randn(3, 4, shape[0])
    how: dict[str, Any] = {
        "bias": bias,
        "in_splits": shape[2],
        "out_splits": shape[3],
        "init_linear": linear,
    }
    tiled = deepspeed.zero.TiledLinear(*shape[:2], **how)
    torch.testing.assert_close(tiled(x), linear(x))
    parts = deepspeed.zero.TiledLinear(*shape[:2], combine_out_splits=False, **how)(x)
    assert len(parts) == shape[3] and torch.equal(torch.cat(parts, -1), tiled(x))
    if shape[2] > 1:
        inputs = tiling.split_tensor_along_last_dim(
            x, [b - a for a, b in zip(tiled.in_parts, tiled.in_parts[1:])]
        )
        split = deepspeed.zero.TiledLinear(*shape[:2], input_is_already_split=True, **how)
        assert torch.equal(split(inputs), tiled(x))


@REAL
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["TiledLinear", "TiledLinearReturnBias"])
def test_tiles_have_deepspeeds_parameters_numbers_and_gradients(
    name: str, shape: tuple[int, int, int, int]
) -> None:
    with quiet():
        theirs = importlib.import_module("deepspeed.runtime.zero.tiling")
    linear = WithBias if name.endswith("Bias") else nn.Linear
    made = []
    for module in (theirs, tiling):
        torch.manual_seed(2)
        layer = getattr(module, name)(shape[0], shape[1], True, *shape[2:], linear_cls=linear)
        found = layer(torch.linspace(-1, 1, 3 * shape[0]).reshape(3, shape[0]))
        found = found if isinstance(found, tuple) else (found,)
        sum(x.square().sum() for x in found).backward()
        made.append((layer, found))
    (real, expected), (ours, found) = made
    assert [*dict(ours.named_parameters())] == [*dict(real.named_parameters())] and len(
        found
    ) == len(expected)
    for a, b in [
        *zip(found, expected, strict=True),
        *zip(ours.parameters(), real.parameters(), strict=True),
    ]:
        assert torch.equal(a, b) and (a.grad is None or torch.equal(a.grad, b.grad))


def test_wrong_numbers_of_tiles_are_named() -> None:
    with pytest.raises(
        RuntimeError, match=r"in_splits: must be between 1 and in_features, 4, got 5"
    ):
        deepspeed.zero.TiledLinear(4, 4, in_splits=5)
    with pytest.raises(RuntimeError, match=r"out_splits: must be between 1"):
        deepspeed.zero.TiledLinear(4, 4, out_splits=0)


@pytest.mark.parametrize("stage", [0, 3])
def test_tiles_train_as_in_a_plain_loop(stage: int) -> None:
    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(
            deepspeed.zero.TiledLinear(6, 8, in_splits=2, out_splits=3), nn.Tanh(), nn.Linear(8, 2)
        )

    x, plain = torch.linspace(-1, 1, 24).reshape(4, 6), model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    engine = fzero.initialize(model=model(), config=settings(stage, gradient_clipping=0))[0]
    for _ in range(3):
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
        engine.backward(engine(x).square().mean())
        engine.step()
    assert_close(engine.module_state_dict(), plain.state_dict())
    linear = nn.Linear(6, 8)
    engine.module[0].copy_params_from(linear)
    torch.testing.assert_close(
        engine.module_state_dict()["0.linears.1.0.weight"], linear.weight[3:6, :3]
    )


# --- files ----------------------------------------------------------------------------------------

FILES = {
    "stage 2": [
        "mp_rank_00_model_states.pt",
        *(f"zero_pp_rank_{i}_mp_rank_00_optim_states.pt" for i in (0, 2, 10, 1)),
    ],
    "stage 3": [
        f"zero_pp_rank_{i}_mp_rank_00_{kind}_states.pt"
        for i in (10, 9, 0)
        for kind in ("model", "optim")
    ],
    "bf16": [
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ],
    "none": ["latest", "x.pt"],
    "no folder": [],
}
CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("get_optim_files", ()), ("get_model_state_files", ()), ("get_checkpoint_files", ("*.pt",)),
    ("get_checkpoint_files", ("*.x",)),
    ("get_model_state_file", (0,)), ("get_model_state_file", (2,)), ("get_model_state_file", (3,)),
]  # fmt: skip


@REAL
@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=str)
def test_files_of_a_checkpoint_are_found_as_deepspeed_finds_them(
    name: str, arguments: tuple[Any, ...], case: str, tmp_path: Path
) -> None:
    with quiet():
        theirs = importlib.import_module("deepspeed.utils.zero_to_fp32")
    folder = tmp_path / "checkpoint 10"
    if case != "no folder":
        folder.mkdir()
    for file in FILES[case]:
        (folder / file).touch()
    outcomes = []
    for module in (theirs, zero_to_fp32):
        try:
            outcomes.append(getattr(module, name)(str(folder), *arguments))
        except Exception as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]


MODEL_FILES = {
    (1, ()): "mp_rank_00_model_states.pt",
    (1, ("*", "7")): "mp_rank_*_model_states.pt",
    (3, ()): "zero_pp_rank_0_mp_rank_00_model_states.pt",
    (3, ("*", "7")): "zero_pp_rank_7_mp_rank_*_model_states.pt",
    (3, ("03",)): "zero_pp_rank_0_mp_rank_03_model_states.pt",
}
"""By stage and the placeholders for the numbers of the model-parallel and the
data-parallel rank.
"""


def test_an_engine_names_the_files_of_deepspeeds_checkpoints(tmp_path: Path) -> None:
    for (stage, placeholders), name in MODEL_FILES.items():
        engine = fzero.initialize(model=nn.Linear(2, 2), config=settings(stage))[0]
        assert engine._get_ckpt_name("./dir", "tag", *placeholders) == f"./dir/tag/{name}"
        assert (
            engine._get_zero_ckpt_name(Path("/dir"), 5)
            == "/dir/5/zero_pp_rank_0_mp_rank_00_optim_states.pt"
        )
        assert engine.quantizer is None
        engine.sparse_tensor_module_names.add("x")
    assert (
        fzero.initialize(model=nn.Linear(2, 2), config=settings(1))[0].sparse_tensor_module_names
        == set()
    )
    engine = fzero.initialize(model=nn.Linear(2, 2), config=settings(1, bf16={"enabled": True}))[0]
    assert (
        engine._get_zero_ckpt_name("dir", "tag")
        == "dir/tag/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    engine.save_checkpoint(tmp_path / "own", tag="first")
    written = fzero.deepspeed.export_deepspeed(tmp_path / "own" / "first", tmp_path / "theirs")
    assert Path(engine._get_ckpt_name(tmp_path / "theirs", written.name)).is_file()


@REAL
def test_the_names_of_files_are_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet():
        real = importlib.import_module("deepspeed.runtime.engine")
    monkeypatch.setattr(real.dist, "get_rank", lambda group=None: 0)
    engine = object.__new__(real.DeepSpeedEngine)
    nn.Module.__init__(engine)
    engine.checkpoint_mp_rank, engine.optimizer = 0, SimpleNamespace(dp_process_group=None)
    for stage in (1, 3):
        for is_bf16 in (False, True):
            engine.zero_optimization_partition_weights = lambda stage=stage: stage == 3
            engine.bfloat16_enabled = lambda is_bf16=is_bf16: is_bf16
            ours = fzero.initialize(
                model=nn.Linear(2, 2), config=settings(stage, bf16={"enabled": is_bf16})
            )[0]
            for of_stage, placeholders in MODEL_FILES:
                if of_stage == stage:
                    arguments = ("./dir", "tag", *placeholders)
                    assert ours._get_ckpt_name(*arguments) == engine._get_ckpt_name(*arguments)
            assert ours._get_zero_ckpt_name("dir", "tag") == engine._get_zero_ckpt_name(
                "dir", "tag"
            )


# --- frozen weights in 8 bits ---------------------------------------------------------------------


class Frozen8Bits(nn.Module):
    """A frozen weight in an 8-bit float between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        values = torch.linspace(-2, 2, 64).reshape(8, 8)
        self.kept = nn.Parameter(values.to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x) @ self.kept.float())


def _trained_8_bits(stage: int) -> dict[str, Any]:
    torch.manual_seed(4)
    engine = fzero.initialize(model=Frozen8Bits(), config=settings(stage, gradient_clipping=0))[0]
    for _ in range(2):
        engine.backward(engine(torch.linspace(-1, 1, 16).reshape(2, 8)).square().mean())
        engine.step()
    weights: dict[str, Any] = engine.module_state_dict()
    return {name: value.float() for name, value in weights.items()}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_weights_in_8_bits_are_sent_and_kept(ranks: RankPool, stage: int) -> None:
    torch.manual_seed(4)
    plain = Frozen8Bits()
    optimizer = torch.optim.AdamW(
        [p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1
    )
    for _ in range(2):
        optimizer.zero_grad()
        plain(torch.linspace(-1, 1, 16).reshape(2, 8)).square().mean().backward()
        optimizer.step()
    for found in ranks(2, _trained_8_bits, stage):
        assert_close(found, {name: value.float() for name, value in plain.state_dict().items()})
