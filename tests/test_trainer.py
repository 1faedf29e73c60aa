"""transformers' Trainer trains the same with fzero below as without, on as many ranks, and keeps its files and habits."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch import Tensor

pytest.importorskip("accelerate", reason="`make env` installs it")
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

VOCABULARY, LENGTH, NUM_SAMPLES = 31, 9, 44
"""No multiple of the batch size: the last update of an epoch has fewer micro-steps."""
Log = list[dict[str, float]]


def samples(seed: int, size: int = NUM_SAMPLES) -> list[dict[str, Tensor]]:
    """Sequences that count upwards, with some tokens that count for no loss, as many as chance will have it."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(size):
        start, cut = (int(torch.randint(0, high, (), generator=generator)) for high in (VOCABULARY, LENGTH - 3))
        ids = (start + torch.arange(LENGTH)) % VOCABULARY
        found.append({"input_ids": ids, "labels": torch.where(torch.arange(LENGTH) < cut, -100, ids)})
    return found


def llama(seed: int = 0, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **changes))


@contextmanager
def launched() -> Iterator[None]:
    """The environment of a launcher, in which accelerate looks for the ranks."""
    from accelerate.state import AcceleratorState, GradientState

    before = dict(os.environ)
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        for key in os.environ.keys() - before.keys():
            del os.environ[key]
        os.environ.update(before)


def made(config: dict[str, Any] | None, folder: str, *, model: Any = None, trainer: Any = None, **changes: Any) -> Any:
    """A Trainer: transformers' own without a configuration, fzero's with one."""
    import transformers

    from fzero.integrations import transformers as ours

    settings = {
        "max_steps": 7, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "weight_decay": 0.1, "warmup_steps": 2, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5, "logging_steps": 1,
        "save_strategy": "no", "use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 3,
    } | changes  # fmt: skip
    module = transformers if config is None else ours
    given = {} if config is None else {"deepspeed": config}
    args = module.TrainingArguments(folder, **settings, **given)
    kind = trainer or module.Trainer
    model = llama() if model is None else model
    return kind(model, args, train_dataset=samples(0), eval_dataset=samples(1, 10))


def curve(trainer: Any) -> Log:
    """What it has logged of updates."""
    return [
        {k: x[k] for k in ("loss", "grad_norm", "learning_rate", "step")}
        for x in trainer.state.log_history
        if "loss" in x
    ]


def _trains(config: dict[str, Any] | None, folder: str, **changes: Any) -> Log:
    with launched():
        trainer = made(config, folder, **changes)
        trainer.train()
        return curve(trainer)


def assert_same(found: Log, expected: Log, rel: float) -> None:
    assert len(found) == len(expected) > 0
    for ours, plain in zip(found, expected):
        assert ours["step"] == plain["step"] and ours["learning_rate"] == plain["learning_rate"]
        assert ours == pytest.approx(plain, rel=rel)


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **keys}


@pytest.mark.parametrize("stage", range(4))
def test_trainer_logs_what_the_plain_trainer_logs(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    """To the rounding of sums over ranks and micro-steps, which seven updates of Adam carry on."""
    plain = ranks(2, _trains, None, str(tmp_path))[0]
    for found in ranks(2, _trains, zero(stage), str(tmp_path)):
        assert_same(found, plain, 2e-5)


FILE = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def _one_group(folder: str, config: dict[str, Any] | None, **changes: Any) -> Log:
    """The plain trainer with what a configuration's AdamW and WarmupDecayLR mean: one group, and a linear decay."""
    if config is None:
        from transformers import Trainer as Plain

        class OneGroup(Plain):  # type: ignore[misc]
            def get_decay_parameter_names(self, model: Any) -> list[str]:
                return [name for name, _ in model.named_parameters()]

        changes |= {"trainer": OneGroup}
    return _trains(config, folder, lr_scheduler_type="linear", **changes)


def test_auto_values_come_from_the_arguments(ranks: RankPool, tmp_path: Path) -> None:
    plain = ranks(2, _one_group, str(tmp_path), None)[0]
    for found in ranks(2, _one_group, str(tmp_path), FILE):
        assert_same(found, plain, 2e-5)


def _in_16_bits(folder: str, **changes: Any) -> tuple[Log, str, list[float]]:
    with launched():
        trainer = made(zero(2, fp16={"enabled": "auto", "initial_scale_power": 20}), folder, **changes)
        trainer.train()
        dtype = str(next(trainer.model.parameters()).dtype)
        return curve(trainer), dtype, [trainer.engine.skipped_steps, trainer.engine.loss_scale]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_of_the_arguments_is_that_of_the_engine(ranks: RankPool, tmp_path: Path, precision: str) -> None:
    plain = ranks(2, _trains, None, str(tmp_path))[0]
    for log, dtype, (skipped, scale) in ranks(2, _in_16_bits, str(tmp_path), **{precision: True}):
        print(precision, log, plain, dtype, skipped, scale)


def _evaluates(config: dict[str, Any] | None, folder: str) -> Any:
    with launched():
        trainer = made(config, folder, eval_strategy="steps", eval_steps=3)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        within = [x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x]
        predicted = trainer.predict(samples(1, 10))
        return curve(trainer), [before, *within], predicted.metrics["test_loss"], torch.tensor(predicted.predictions)


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_and_prediction_are_those_of_the_plain_trainer(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    plain = ranks(2, _evaluates, None, str(tmp_path))[0]
    for log, losses, loss, logits in ranks(2, _evaluates, zero(stage), str(tmp_path)):
        assert_same(log, plain[0], 2e-5)
        assert (losses, loss) == (pytest.approx(plain[1], rel=2e-5), pytest.approx(plain[2], rel=2e-5))
        assert logits.shape == (10, LENGTH, VOCABULARY)
        torch.testing.assert_close(logits, plain[3], rtol=1e-3, atol=1e-4)


def _saves(folder: str, stage: int, **changes: Any) -> Any:
    with launched():
        trainer = made(zero(stage), folder, save_strategy="steps", save_steps=3, **changes)
        trainer.train()
        trainer.save_model(f"{folder}/final")
        return curve(trainer), trainer.engine.module_state_dict()


def _resumes(folder: str, stage: int, checkpoint: Any = True, **changes: Any) -> Any:
    with launched():
        trainer = made(zero(stage), folder, model=llama(9), **changes)
        trainer.train(resume_from_checkpoint=checkpoint)
        return curve(trainer), trainer.engine.module_state_dict()


@pytest.mark.parametrize("stage", range(4))
def test_resumed_training_gives_the_same_bits(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    saved, weights = ranks(2, _saves, str(tmp_path), stage)[0]
    for found, again in ranks(2, _resumes, str(tmp_path), stage, str(tmp_path / "checkpoint-3")):
        assert found == saved[3:]
        assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_another_number_of_ranks_and_another_stage_resume(ranks: RankPool, tmp_path: Path) -> None:
    """With twice the micro-steps on half the ranks an update has as many samples, and other ones."""
    saved, _ = ranks(2, _saves, str(tmp_path), 3)[0]
    plain = ranks(1, _resumes, str(tmp_path), 1, str(tmp_path / "checkpoint-3"), gradient_accumulation_steps=4)
    print(saved, plain[0][0])


@pytest.mark.parametrize("tied", [False, True])
def test_save_model_writes_what_from_pretrained_loads(ranks: RankPool, tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    _, weights = ranks(2, _saves, str(tmp_path), 3, model=llama(tie_word_embeddings=tied))[0]
    for folder in ("final", "checkpoint-6"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict().items():
        assert torch.equal(value, weights[name]), name
