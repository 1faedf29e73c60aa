"""The blocks `curriculum_learning`, `progressive_layer_drop` and `data_efficiency`
through the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from torch.utils.data import Dataset
from training import make

import fzero
import fzero.deepspeed as deepspeed
from fzero.config.config import ConfigError
from fzero.data import Metric, fixed_linear, kept_layers, theta, truncated, write_metric

LENGTH, VOCABULARY, SAMPLES = 12, 11, 24
ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}
SEQLEN = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 2,
    "max_difficulty": 12,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 2},
}


class Net(nn.Module):
    """A model for DeepSpeed's curricula: it truncates itself, and drops layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, VOCABULARY)
        self.seen: list[tuple[int | None, float | None]] = []

    def forward(
        self,
        tokens: Tensor,
        *,
        curriculum_seqlen: int | None = None,
        progressive_layer_drop: bool = False,
        pld_theta: float | None = None,
        n: int = 0,
    ) -> Tensor:
        self.seen.append((curriculum_seqlen, pld_theta))
        tokens = tokens[:, :curriculum_seqlen]
        hidden = self.embed(tokens)
        kept = (
            kept_layers(3, n, 3, pld_theta)
            if progressive_layer_drop and pld_theta is not None
            else (True,) * 3
        )
        for block, is_kept in zip(self.blocks, kept, strict=True):
            hidden = hidden + torch.tanh(block(hidden)) if is_kept else hidden
        return nn.functional.cross_entropy(
            self.head(hidden).flatten(0, 1), tokens.roll(-1, 1).flatten()
        )


def tokens(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)


def engine_of(stage: int = 0, **keys: Any) -> Any:
    keys = {
        "zero_optimization": {"stage": stage},
        "optimizer": ADAM,
        "train_micro_batch_size_per_gpu": 4,
        **keys,
    }
    return fzero.initialize(model=make(Net), config=keys)[0]


def trained(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for index in range(first, last):
        loss = engine(tokens(index))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_a_curriculum_passes_the_length_of_the_next_step_to_forwards_in_training_mode() -> None:
    engine = engine_of(curriculum_learning=SEQLEN)
    assert (
        engine.curriculum_enabled_legacy()
        and engine.curriculum_scheduler_legacy.get_current_difficulty() == 2
    )
    losses = trained(engine, 0, 7)
    schedule = fixed_linear(2, 12, steps=5, multiple=2)
    assert (
        [length for length, _ in engine.module.seen]
        == [schedule(n + 1) for n in range(7)]
        == [4, 6, 8, 10, 12, 12, 12]
    )
    engine.eval()
    engine(tokens(0))
    assert engine.module.seen[-1] == (None, None)

    # The same as a pure transform of batches, before a step.
    step = fzero.make_train_step(
        make(Net), {"optimizer": ADAM}, loss_fn=lambda model, batch: model(batch)
    )
    state = step.init()
    for index, loss in enumerate(losses):
        state, metrics = step(state, truncated(tokens(index), schedule(int(state.step) + 1)))
        assert metrics.loss.item() == loss


def test_a_resumed_engine_continues_curriculum_and_theta(tmp_path: Path) -> None:
    keys = {
        "curriculum_learning": SEQLEN,
        "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.3},
    }
    engine = engine_of(**keys)
    trained(engine, 0, 3)
    engine.save_checkpoint(tmp_path)
    resumed = engine_of(**keys)
    resumed.load_checkpoint(tmp_path)
    assert resumed.curriculum_scheduler_legacy.get_current_difficulty() == 8
    assert resumed.get_pld_theta() == engine.get_pld_theta() == theta(2, limit=0.5, gamma=0.3)
    assert trained(engine, 3, 6) == trained(resumed, 3, 6)
    assert engine.module.seen[3:] == resumed.module.seen


def test_a_custom_schedule_is_set_by_the_script() -> None:
    engine = engine_of(curriculum_learning={**SEQLEN, "schedule_type": "custom"})
    with pytest.raises(ConfigError, match="needs a function for schedule_type 'custom'"):
        engine(tokens(0))
    engine.set_custom_curriculum_learning_schedule(lambda step: 3 * step)
    trained(engine, 0, 6)
    # it stays at the largest one
    assert [length for length, _ in engine.module.seen] == [3, 6, 9, 12, 12, 12]
    with pytest.raises(ConfigError, match="needs the loader of training_data"):
        engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 3})


def test_theta_is_one_in_the_first_two_updates_and_the_model_gets_it() -> None:
    engine = engine_of(progressive_layer_drop={"enabled": True, "theta": 0.5, "gamma": 0.1})
    assert engine.pld_enabled() and engine.pld_params() == {"theta": 0.5, "gamma": 0.1}
    after = []
    for index in range(4):
        trained(engine, index, index + 1)
        after.append(engine.get_pld_theta())
    assert after == [theta(i, limit=0.5, gamma=0.1) for i in range(4)]
    assert [value for _, value in engine.module.seen] == [1.0, *after[:3]] and after[0] == 1.0


@pytest.mark.parametrize("compile", [None, "block"])
def test_a_step_passes_the_theta_of_an_engine(compile: Any) -> None:
    keys = {"optimizer": ADAM, "train_micro_batch_size_per_gpu": 4}
    drop = {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.1}}
    model = make(Net)
    step = fzero.make_train_step(
        model, {**keys, **drop}, compile=compile, compile_backend="aot_eager", units=["blocks.*"]
    )
    state, losses = step.init(), []
    for index in range(4):
        state, metrics = step(state, (tokens(index),))
        losses.append(metrics.loss.item())
    step.evaluate(state, (tokens(0),))
    engine = engine_of(**drop)
    assert losses == (
        trained(engine, 0, 4) if compile is None else pytest.approx(trained(engine, 0, 4))
    )
    assert [value for _, value in model.seen] == [*(value for _, value in engine.module.seen), None]


def test_a_model_that_takes_no_theta_raises() -> None:
    keys = {
        "optimizer": ADAM,
        "progressive_layer_drop": {"enabled": True},
        "train_micro_batch_size_per_gpu": 2,
    }
    with pytest.raises(
        fzero.ConfigError,
        match="needs a model whose forward takes progressive_layer_drop and pld_theta",
    ):
        fzero.make_train_step(make(lambda: nn.Linear(3, 3)), keys)
    keys = {
        "optimizer": ADAM,
        "progressive_layer_drop": {"enabled": True},
        "train_micro_batch_size_per_gpu": 2,
    }
    engine, *_ = fzero.initialize(model=make(lambda: nn.Linear(3, 3)), config=keys)
    with pytest.raises(TypeError, match="progressive_layer_drop"):
        engine(torch.ones(2, 3))


def _dropped(stage: int) -> list[float]:
    engine = engine_of(stage)
    rank = engine.global_rank
    losses = []
    for n in range(4):
        loss = engine(
            tokens(n)[2 * rank : 2 * rank + 2], progressive_layer_drop=True, pld_theta=0.2, n=n
        )
        engine.backward(loss)
        engine.step()
        losses.append(engine.metrics.loss.item())
    return losses


def test_layers_dropped_alike_on_all_ranks_train_in_every_stage(ranks: RankPool) -> None:
    found = [ranks(2, _dropped, stage) for stage in (0, 3)]
    assert found[0][0] == found[0][1] == found[1][0] == found[1][1]
    assert len({kept_layers(3, n, 3, 0.2) for n in range(4)}) > 1


# --- the sampler ----------------------------------------------------------------------------------


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((LENGTH,), index % VOCABULARY), index


def lengths() -> np.ndarray:
    return np.array([2 + index % 5 for index in range(SAMPLES)])


def efficiency(folder: Path, **sampling: Any) -> dict[str, Any]:
    base = folder / "seqlen" / "seqlen"
    if not base.with_name("seqlen_index_to_metric.idx").exists():
        write_metric(folder, "seqlen", Metric.of(lengths()))
    metric = {
        "index_to_sample_path": f"{base}_index_to_sample",
        "index_to_metric_path": f"{base}_index_to_metric",
        "difficulty_type": "value",
        "min_difficulty": 2,
        "max_difficulty": 6,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 1},
        **sampling,
    }
    curriculum = {
        "enabled": True,
        "data_cluster_path": "unused",
        "curriculum_metrics": {"seqlen": metric},
    }
    block = {"enabled": True, "num_epochs": 3, "curriculum_learning": curriculum}
    return {"data_efficiency": {"enabled": True, "data_sampling": block}, "train_batch_size": 4}


def _engine(folder: Path, micro: int, **sampling: Any) -> Any:
    keys = {
        "optimizer": ADAM,
        "train_micro_batch_size_per_gpu": micro,
        **efficiency(folder, **sampling),
    }
    engine, _, loader, _ = deepspeed.initialize(
        model=make(Net), config=keys, training_data=Samples()
    )
    assert engine.training_dataloader is loader
    return engine


def _drawn(engine: Any, updates: int) -> list[list[int]]:
    """The samples of each update on this rank."""
    found = []
    batches = iter(engine.training_dataloader)
    for _ in range(updates):
        of_update: list[int] = []
        for _ in range(engine.gradient_accumulation_steps()):
            x, index = next(batches)
            of_update += index.tolist()
            engine.backward(engine(x))
            engine.step()
        found.append(of_update)
    return found


def test_the_block_data_efficiency_draws_samples_by_difficulty(tmp_path: Path) -> None:
    engine = _engine(tmp_path, 2)
    assert (
        engine.data_efficiency_enabled()
        and engine.data_sampling_enabled()
        and engine.curriculum_learning_enabled()
    )
    assert len(engine.training_dataloader) == 36
    for step, drawn in enumerate(_drawn(engine, 8), 1):
        assert max(lengths()[drawn]) <= min(2 + step, 6)
    engine.set_data_post_process_func(
        lambda batch, state: (*batch, state["current_difficulties"]["seqlen"])
    )
    assert next(iter(engine.training_dataloader))[2] == 6
    engine.set_data_post_process_func(None)
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 3})
    assert max(lengths()[np.concatenate(_drawn(engine, 3))]) <= 3
    with pytest.raises(ConfigError, match="must be one of the metrics seqlen"):
        engine.set_custom_curriculum_learning_schedule({"rarity": lambda step: 3})


def _first(folder: Path, micro: int, updates: int, saved: str, load: bool) -> list[list[int]]:
    engine = _engine(folder, micro)
    if load:
        engine.load_checkpoint(folder / saved)
    drawn = _drawn(engine, updates)
    if not load:
        engine.save_checkpoint(folder / saved)
    return drawn


def test_a_job_resumed_on_other_ranks_draws_the_samples_of_the_unbroken_run(
    tmp_path: Path, ranks: RankPool
) -> None:
    (unbroken,) = ranks(1, _first, tmp_path, 4, 9, "whole", False)  # one rank writes the files
    of_two = ranks(2, _first, tmp_path, 1, 4, "ck", False)
    (rest,) = ranks(1, _first, tmp_path, 2, 5, "ck", True)
    assert [one + two for one, two in zip(*of_two, strict=True)] + rest == unbroken


def test_missing_files_are_errors_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must exist, and one does not"):
        _engine(tmp_path, 2, index_to_sample_path=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="index_to_metric_path: is required"):
        _engine(tmp_path, 2, index_to_metric_path=None)
