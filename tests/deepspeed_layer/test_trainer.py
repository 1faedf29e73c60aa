"""transformers' Trainer trains the same with fzero below as without, on as many ranks,
and keeps its files and habits.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import subprocess
import sys
import traceback
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

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

VOCABULARY, LENGTH, NUM_SAMPLES = 31, 9, 44
"""No multiple of the batch size: the last update of an epoch has fewer micro-steps."""
Log = list[dict[str, float]]


def samples(seed: int, size: int = NUM_SAMPLES) -> list[dict[str, Tensor]]:
    """Sequences that count upwards, with some tokens that count for no loss, as many as
    chance will have it.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(size):
        start, cut = (
            int(torch.randint(0, high, (), generator=generator))
            for high in (VOCABULARY, LENGTH - 3)
        )
        ids = (start + torch.arange(LENGTH)) % VOCABULARY
        found.append(
            {"input_ids": ids, "labels": torch.where(torch.arange(LENGTH) < cut, -100, ids)}
        )
    return found


def llama(seed: int = 0, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **changes))


@contextmanager
def launched() -> Iterator[None]:
    """The environment of a launcher, in which accelerate looks for the ranks."""
    from accelerate.state import AcceleratorState, GradientState

    before = dict(os.environ)
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
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


def made(
    config: dict[str, Any] | None,
    folder: str,
    *,
    model: Any = None,
    trainer: Any = None,
    size: int = NUM_SAMPLES,
    **changes: Any,
) -> Any:
    """A Trainer: transformers' own without a configuration, fzero's with one."""
    import transformers

    from fzero.integrations import transformers as ours

    settings = {
        "max_steps": 7,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    } | changes
    module = transformers if config is None else ours
    settings = ({} if config is None else {"deepspeed": config}) | settings
    args = module.TrainingArguments(folder, **settings)
    model = llama() if model is None else model
    kind = trainer or module.Trainer
    found = kind(model, args, train_dataset=samples(0, size), eval_dataset=samples(1, 10))
    found.remove_callback(transformers.PrinterCallback)
    return found


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
        assert ours["step"] == plain["step"] and ours["learning_rate"] == pytest.approx(
            plain["learning_rate"], rel=1e-12
        )
        assert ours == pytest.approx(plain, rel=rel)


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **keys}


@pytest.mark.covering(0)
@pytest.mark.parametrize("stage", range(4))
def test_trainer_logs_what_the_plain_trainer_logs(
    ranks: RankPool, tmp_path: Path, stage: int
) -> None:
    """To the rounding of sums over ranks and micro-steps, which seven updates of Adam
    carry on.
    """
    plain = ranks(2, _trains, None, str(tmp_path))[0]
    for found in ranks(2, _trains, zero(stage), str(tmp_path)):
        assert_same(found, plain, 2e-5)


FILE = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
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


def _as_the_file_says(folder: str, config: dict[str, Any] | None) -> Log:
    """The plain trainer with what the file's AdamW and WarmupDecayLR mean: one group,
    and DeepSpeed's rates.
    """
    import transformers

    class Plain(transformers.Trainer):  # type: ignore[misc]
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return [name for name, _ in model.named_parameters()]

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            # DeepSpeed counts from -1 and begins with the rate of 0
            def rate(update: int) -> float:
                index = max(update - 1, 0)
                return (
                    index / 2
                    if index < 2
                    else (num_training_steps - index) / (num_training_steps - 2)
                )

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
            return self.lr_scheduler

    return _trains(config, folder, trainer=Plain if config is None else None)


def test_auto_values_come_from_the_arguments(ranks: RankPool, tmp_path: Path) -> None:
    plain = ranks(2, _as_the_file_says, str(tmp_path), None)[0]
    for found in ranks(2, _as_the_file_says, str(tmp_path), FILE):
        assert_same(found, plain, 2e-5)


def _in_16_bits(folder: str, **changes: Any) -> tuple[Log, str, list[float]]:
    with launched():
        trainer = made(
            zero(2, fp16={"enabled": "auto", "initial_scale_power": 20}), folder, **changes
        )
        trainer.train()
        dtype = str(next(trainer.model.parameters()).dtype)
        return curve(trainer), dtype, [trainer.engine.skipped_steps, trainer.engine.loss_scale]


@pytest.mark.covering(0)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_of_the_arguments_is_that_of_the_engine(
    ranks: RankPool, tmp_path: Path, precision: str
) -> None:
    """In 16 bits losses have some 2**-8 of rounding. A skipped update does not move the
    schedule.
    """
    plain = ranks(2, _trains, None, str(tmp_path))[0]
    for log, dtype, (skipped, scale) in ranks(2, _in_16_bits, str(tmp_path), **{precision: True}):
        assert dtype == {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
        assert (skipped > 0) == (precision == "fp16")
        assert scale == (2.0 ** (20 - (skipped - 1)) if skipped else 1.0)  # hysteresis 2
        made = len(log) - skipped
        rates = [x["learning_rate"] for x in log][skipped:]
        assert rates == pytest.approx([x["learning_rate"] for x in plain][:made], rel=1e-12)
        if not skipped:
            assert [x["loss"] for x in log] == pytest.approx([x["loss"] for x in plain], rel=1e-2)


def _evaluates(config: dict[str, Any] | None, folder: str) -> Any:
    with launched():
        # after which the plain one would not train on two ranks
        before = made(config, folder).evaluate()["eval_loss"]
        trainer = made(config, folder, eval_strategy="steps", eval_steps=3)
        if config is not None:
            assert trainer.evaluate()["eval_loss"] == before
        trainer.train()
        within = [x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x]
        predicted = trainer.predict(samples(1, 10))
        return (
            curve(trainer),
            [before, *within],
            predicted.metrics["test_loss"],
            torch.tensor(predicted.predictions),
        )


@pytest.mark.covering(0)
@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_and_prediction_are_those_of_the_plain_trainer(
    ranks: RankPool, tmp_path: Path, stage: int
) -> None:
    plain = ranks(2, _evaluates, None, str(tmp_path))[0]
    for log, losses, loss, logits in ranks(2, _evaluates, zero(stage), str(tmp_path)):
        assert_same(log, plain[0], 2e-5)
        assert (losses, loss) == (
            pytest.approx(plain[1], rel=2e-5),
            pytest.approx(plain[2], rel=2e-5),
        )
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


@pytest.mark.covering(0)
@pytest.mark.parametrize("stage", range(4))
def test_resumed_training_gives_the_same_bits(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    saved, weights = ranks(2, _saves, str(tmp_path), stage)[0]
    for found, again in ranks(2, _resumes, str(tmp_path), stage, str(tmp_path / "checkpoint-3")):
        assert found == saved  # the first three from the checkpoint's history
        assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_another_number_of_ranks_and_another_stage_resume(ranks: RankPool, tmp_path: Path) -> None:
    """With twice the micro-steps on half the ranks an update has the same samples; sums
    come in another order.
    """
    saved, _ = ranks(2, _saves, str(tmp_path), 3, size=48)[0]
    more = {"size": 48, "gradient_accumulation_steps": 4}
    ((found, _),) = ranks(1, _resumes, str(tmp_path), 1, str(tmp_path / "checkpoint-3"), **more)
    assert_same(found, saved, 2e-5)


@pytest.mark.covering(0)
@pytest.mark.parametrize("tied", [False, True])
def test_save_model_writes_what_from_pretrained_loads(
    ranks: RankPool, tmp_path: Path, tied: bool
) -> None:
    from transformers import AutoModelForCausalLM

    _, weights = ranks(2, _saves, str(tmp_path), 3, model=llama(tie_word_embeddings=tied))[0]
    for folder in ("final", "checkpoint-6"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    for name, value in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict().items()
    ):
        assert torch.equal(value, weights[name]), name


def _finds_best(folder: str) -> Any:
    with launched():
        every = {
            "eval_strategy": "steps",
            "save_strategy": "steps",
            "eval_steps": 2,
            "save_steps": 2,
        }
        trainer = made(
            zero(3), folder, load_best_model_at_end=True, learning_rate=0.3, max_steps=4, **every
        )
        trainer.train()
        losses = [x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x]
        return losses, trainer.state.best_metric, trainer.evaluate()["eval_loss"]


def test_the_best_model_is_there_at_the_end(ranks: RankPool, tmp_path: Path) -> None:
    for losses, best, at_the_end in ranks(2, _finds_best, str(tmp_path)):
        assert best == min(losses) < losses[-1]
        assert at_the_end == pytest.approx(best, rel=1e-6)


def _trains_twice_with_checkpointed_activations(config: dict[str, Any] | None, folder: str) -> Any:
    import transformers

    from fzero.integrations.transformers import Trainer

    class Theirs(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return (loss[0] * 2, *loss[1:]) if isinstance(loss, tuple) else loss * 2

    class Mine(Trainer, Theirs):
        pass

    with launched():
        kind = Theirs if config is None else Mine
        trainer = made(config, folder, trainer=kind, activation_checkpointing=True, max_steps=3)
        trainer.train()
        first = curve(trainer)
        trainer.train()
        return first + curve(trainer)


DAMAGE = {
    "cut": lambda content: content[: len(content) // 2],
    "another class": lambda content: pickle.dumps(Path("x")),
    "other values": lambda content: b"[1]" if content[:1] == b"{" else saved_bytes({"python": 3}),
}


def saved_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _resumes_from_damaged(folder: str) -> list[tuple[str, str, str]]:
    reported = []
    with launched():
        made(zero(2), folder, save_strategy="steps", save_steps=2, max_steps=2).train()
        checkpoint = Path(folder, "checkpoint-2")
        for name in ("trainer_state.json", "scheduler.pt", "rng_state.pth"):
            content = (checkpoint / name).read_bytes()
            for kind, damage in DAMAGE.items():
                (checkpoint / name).write_bytes(damage(content))
                with pytest.raises(ValueError) as caught:
                    made(zero(2), folder, max_steps=4).train(resume_from_checkpoint=str(checkpoint))
                reported.append((name, kind, "".join(traceback.format_exception(caught.value))))
            (checkpoint / name).write_bytes(content)
        made(zero(2), folder, max_steps=4).train(resume_from_checkpoint=str(checkpoint))
    return reported


def test_a_damaged_file_of_a_trainers_checkpoint_is_named(ranks: RankPool, tmp_path: Path) -> None:
    for name, kind, text in ranks(1, _resumes_from_damaged, str(tmp_path))[0]:
        assert f"checkpoint-2/{name} must hold" in text.splitlines()[-1], (name, kind, text)
        assert "weights_only" not in text, (name, kind)


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_a_subclass_that_trains_twice_is_the_plain_one(
    ranks: RankPool, tmp_path: Path, stage: int
) -> None:
    plain = ranks(2, _trains_twice_with_checkpointed_activations, None, str(tmp_path))[0]
    for found in ranks(2, _trains_twice_with_checkpointed_activations, zero(stage), str(tmp_path)):
        assert_same(found, plain, 2e-5)


# --- what is refused ------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        zero(1, train_batch_size=9),
        {},
        "train_batch_size: must be what the arguments say (ranks × per_device_train_batch_size × "
        "gradient_accumulation_steps: 8), got 9; make it 'auto'",
    ),
    (
        zero(1, gradient_clipping=1.0),
        {},
        "gradient_clipping: must be what the arguments say (max_grad_norm: 0.5), got 1.0",
    ),
    (
        zero(1, bf16={"enabled": True}),
        {},
        "bf16.enabled: must be what the arguments say (bf16: False), got True",
    ),
    (
        zero(1, optimizer={"type": "Adam", "params": {"lr": 1, "weight_decay": 0}}),
        {},
        "optimizer.params.lr: must be what",
    ),
    (
        zero(1, optimizer={"type": "Adam", "params": {"lr": 1, "weight_decay": 0}}),
        {},
        "optimizer.params.weight_decay: must",
    ),
    (zero(1), {"torch_compile": True}, "args.torch_compile: must be off"),
    (zero(1), {"bf16_full_eval": True}, "args.bf16_full_eval: must be off"),
    (zero(1), {"auto_find_batch_size": True}, "args.auto_find_batch_size: must be off"),
    (zero(1), {"deepspeed": None}, "args.deepspeed: must be a configuration, got None"),
    (
        zero(1, optimizer={"type": "AdamW"}, scheduler={"type": "WarmupLR"}),
        {"optimizers": True},
        "scheduler: must be given once",
    ),
]


def _refusal(config: dict[str, Any], folder: str, changes: dict[str, Any]) -> str:
    from transformers import get_constant_schedule

    given = changes.pop("optimizers", False)
    with launched(), pytest.raises(ValueError) as caught:
        trainer = made(config, folder, **changes)
        if given:
            optimizer = torch.optim.AdamW(trainer.model.parameters())
            trainer.lr_scheduler = get_constant_schedule(optimizer)
        trainer.train()
    return str(caught.value)


@pytest.mark.parametrize(("config", "changes", "message"), WRONG, ids=range(len(WRONG)))
def test_what_would_be_ignored_is_refused(
    ranks: RankPool, tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    assert message in ranks(1, _refusal, config, str(tmp_path), changes)[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_ranks_without_a_gpu_are_reported_what_joins_them(ranks: RankPool, tmp_path: Path) -> None:
    for says in ranks(2, _refusal, zero(1), str(tmp_path), {"use_cpu": False}):
        assert (
            says.startswith("args.use_cpu: must be True where there is no GPU")
            and "the 2 ranks" in says
        )


def _hidden_size_of_none() -> str:
    from fzero.config.config import ConfigError
    from fzero.deepspeed.integrations.auto import resolved
    from fzero.integrations.transformers import TrainingArguments

    with launched(), pytest.raises(ConfigError) as caught:
        args = TrainingArguments("out", use_cpu=True)
        resolved(
            {"zero_optimization": {"reduce_bucket_size": "auto"}}, args, torch.nn.Linear(2, 2), 1
        )
    return str(caught.value)


def test_sizes_of_auto_need_a_hidden_size(ranks: RankPool) -> None:
    assert (
        "zero_optimization.reduce_bucket_size: 'auto' needs a model whose config has"
        in ranks(1, _hidden_size_of_none)[0]
    )


def _resumes_from_plain(folder: str) -> str:
    with launched(), pytest.raises(ValueError) as caught:
        made(None, folder, save_strategy="steps", save_steps=2, max_steps=2).train()
        made(zero(2), folder).train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return str(caught.value)


def test_a_plain_trainers_checkpoint_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    (reported,) = ranks(1, _resumes_from_plain, str(tmp_path))
    assert "must be a checkpoint of this Trainer" in reported and "from_pretrained(" in reported


@pytest.mark.long
def test_the_example_learns_on_two_ranks(tmp_path: Path) -> None:
    script = [
        str(Path(__file__).parents[2] / "examples" / "trainer.py"),
        "--cpu",
        "--steps",
        "20",
        "--out",
        str(tmp_path),
    ]
    launch = [sys.executable, "-m", "fzero", "--num_procs", "2"]
    reported = subprocess.run([*launch, *script], capture_output=True, text=True, timeout=240)
    assert reported.returncode == 0, reported.stderr
    loss = re.search(r"'eval_loss': '([0-9.]+)'", reported.stdout)
    assert loss is not None and float(loss[1]) < 3.5  # 4.16 by chance
    assert "0 7 14 21 goes on with" in reported.stdout
    assert (tmp_path / "model.safetensors").exists() and (
        tmp_path / "checkpoint-20" / "latest"
    ).exists()


def test_fzero_needs_no_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = sys.modules['accelerate'] = None; import "
        "fzero, fzero.deepspeed"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
