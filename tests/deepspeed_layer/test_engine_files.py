"""The laws of an engine's checkpoints as scripts for DeepSpeed look for them: names,
frozen parameters, fp32 weights.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Net, assert_close, criterion, data, made, mine, settings
from ranks import RankPool
from torch import Tensor
from training import make

import fzero
import fzero.deepspeed as deepspeed
from fzero.checkpoint import CheckpointError
from fzero.deepspeed.checkpoint import ds_to_universal

KEYS = {"bf16": {"enabled": True, "auto_cast": True}}


def _adapter(stage: int, seed: int = 0, **keys: Any) -> fzero.Engine:
    """Only the head is trained, as with adapters; the blocks are frozen."""
    model = make(Net)
    with torch.no_grad():
        for param in model.head.parameters():
            param.add_(seed)
    model.blocks.requires_grad_(False)
    return fzero.initialize(model=model, config=settings(stage, **keys))[0]


def _step(engine: fzero.Engine, index: int) -> None:
    x, y = mine(engine, data(index))
    engine.backward(criterion(engine(x), y).float())
    engine.step()


def _saves_adapter(
    stage: int, folder: Path, **keys: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = _adapter(stage, **keys)
    _step(engine, 0)
    engine.save_checkpoint(folder, client_state={"n": 1}, exclude_frozen_parameters=True)
    now = engine.module_state_dict()
    _step(engine, 1)
    return now, engine.module_state_dict()


def _loads_adapter(
    stage: int, folder: Path, **keys: Any
) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    engine = _adapter(stage, seed=5, **keys)
    found = engine.load_checkpoint(folder)
    now = engine.module_state_dict()
    _step(engine, 1)
    return found, now, engine.module_state_dict()


@pytest.mark.parametrize(("stage", "keys"), [(2, {}), (3, KEYS)])
def test_a_checkpoint_without_frozen_parameters_continues_with_those_of_the_model(
    ranks: RankPool, tmp_path: Path, stage: int, keys: dict[str, Any]
) -> None:
    saved = ranks(2, _saves_adapter, stage, tmp_path, **keys)
    small = sum(path.stat().st_size for path in tmp_path.rglob("*.distcp"))
    for (now, after), ((path, client), loaded, continued) in zip(
        saved, ranks(2, _loads_adapter, stage, tmp_path, **keys), strict=True
    ):
        assert all(
            torch.equal(now[name], loaded[name]) and torch.equal(after[name], continued[name])
            for name in now
        )
        assert (path, client) == (str(tmp_path / "global_step1" / "latest"), {"n": 1}) and Path(
            path
        ).is_file()
    # other ranks, another stage
    _, now, _ = ranks(3, _loads_adapter, 3 - stage, tmp_path, **keys)[0]
    assert_close(now, saved[0][0], 0.0 if not keys else 1e-2)
    weights = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert set(weights) == {"head.weight", "head.bias"}
    with pytest.raises(CheckpointError, match="was saved without 'blocks"):
        fzero.load(tmp_path / "global_step1", step=fzero.make_train_step(make(Net), settings(0)))
    with pytest.raises(CheckpointError, match="was saved without frozen ones"):
        fzero.deepspeed.export_deepspeed(tmp_path / "global_step1", tmp_path / "out")
    engine = _adapter(2)
    engine.save_checkpoint(tmp_path / "whole")
    assert sum(path.stat().st_size for path in (tmp_path / "whole").rglob("*.distcp")) > small


def _saves(folder: Path) -> dict[str, Tensor]:
    engine = made(3)
    _step(engine, 0)
    engine.save_checkpoint(folder)
    return engine.module_state_dict()


def test_the_files_have_the_names_that_scripts_look_for(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks(2, _saves, tmp_path)[0]
    assert (tmp_path / "latest").read_text() == "global_step1"  # without a newline
    program = [
        sys.executable,
        str(tmp_path / "zero_to_fp32.py"),
        str(tmp_path),
        str(tmp_path / "out"),
    ]
    subprocess.run(
        [*program, "--max_shard_size", "2KB", "--safe_serialization"], check=True, timeout=120
    )
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert (
        names[0].startswith("model-00001-of-0000") and names[-1] == "model.safetensors.index.json"
    )
    from safetensors.torch import load_file

    found = {
        name: x
        for path in (tmp_path / "out").glob("*.safetensors")
        for name, x in load_file(path).items()
    }
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], x) for name, x in expected.items()
    )
    deepspeed.utils.zero_to_fp32.main([str(tmp_path), str(tmp_path / "one"), "-t", "global_step1"])
    one = torch.load(tmp_path / "one" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(one[name], x) for name, x in expected.items())


def _continues(folder: Path) -> tuple[Any, dict[str, Tensor], int]:
    engine = fzero.initialize(
        model=make(Net), config=settings(2, checkpoint={"load_universal": True})
    )[0]
    path, _ = engine.load_checkpoint(folder)
    _step(engine, 1)
    return path, engine.module_state_dict(), engine.global_steps


def test_a_universal_checkpoint_continues_with_the_losses_of_the_other(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks(2, _saves, tmp_path)
    expected = ranks(2, _continues, tmp_path)[0]  # fzero's own are universal
    arguments = ["--input_folder", str(tmp_path), "--output_folder", str(tmp_path / "out")]
    ds_to_universal.main(ds_to_universal.parse_arguments(arguments))
    assert (tmp_path / "out" / "latest_universal").read_text() == "global_step1_universal"
    path, weights, steps = ranks(2, _continues, tmp_path / "out")[0]
    assert (
        path == str(tmp_path / "out" / "global_step1_universal" / "mp_rank_00_model_states.pt")
        and Path(path).is_file()
    )
    assert steps == expected[2] == 2
    assert all(torch.equal(weights[name], x) for name, x in expected[1].items())
