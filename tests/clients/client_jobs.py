"""What the clients of DeepSpeed train in the tests: a program of two ranks that runs
with fzero's alias or the real package.

    torchrun --nproc-per-node 2 client_jobs.py FOLDER CASE:STAGE...

Each case trains a tiny model, saves in the middle, and trains the second half again
from what it saved. Rank 0 writes the losses and what the case found out to
FOLDER/found.json. There is no network: model, tokenizer and data are made here.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, set_seed
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainingArguments,
)

STEPS, HALF, LENGTH = 4, 2, 12
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(61))]
Found = dict[str, Any]


def config(stage: int) -> dict[str, Any]:
    return {
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def save_model(folder: Path) -> None:
    sizes = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, pad_token_id=0, eos_token_id=1)).save_pretrained(
        folder
    )


def text(index: int, length: int = LENGTH) -> str:
    """A line that can be learned: every word is the one before plus a constant."""
    return " ".join(
        WORDS[3 + (7 * index + place * (1 + index % 3)) % 61] for place in range(length)
    )


def tokens(index: int) -> torch.Tensor:
    return torch.tensor([WORDS.index(word) for word in text(index).split()])


class Lines(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        line = tokens(index)
        return {"input_ids": line, "labels": line, "attention_mask": torch.ones_like(line)}


def arguments(cls: Any, folder: Path, stage: int, **more: Any) -> Any:
    return cls(
        output_dir=str(folder),
        deepspeed=config(stage),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_steps=HALF,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        report_to="none",
        seed=1,
        disable_tqdm=True,
        gradient_accumulation_steps=2,
        dataloader_pin_memory=False,
        **{"bf16": False, "gradient_checkpointing": False, **more},
    )


def run_trainer(make: Callable[[], Any], folder: Path) -> Found:
    """A trainer's losses, and those of its second half after a resume in a new one."""
    trainer = make()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    trainer.save_model(str(folder / "saved"))
    clear(trainer)
    again = make()
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}"))
    resumed = [entry["loss"] for entry in again.state.log_history if "loss" in entry][
        -(STEPS - HALF) :
    ]
    clear(again)
    return {"losses": losses, "norms": [float(x) for x in norms], "resumed": resumed}


def clear(trainer: Any) -> None:
    engine = getattr(trainer, "deepspeed", None) or getattr(trainer, "model_wrapped", None)
    if hasattr(engine, "destroy"):
        engine.destroy()
    trainer.accelerator.free_memory()
    reset()


def reset() -> None:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    gc.collect()


def of_trainer(folder: Path, model: Path, stage: int) -> Found:
    def make() -> Trainer:
        args = arguments(TrainingArguments, folder, stage)
        return Trainer(AutoModelForCausalLM.from_pretrained(model), args, train_dataset=Lines())

    found = run_trainer(make, folder)
    saved = AutoModelForCausalLM.from_pretrained(folder / "saved")
    return found | {"saved": float(sum(p.double().abs().sum() for p in saved.parameters()))}


def _dataset(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def of_sft(folder: Path, model: Path, stage: int, *, lora: bool = False) -> Found:
    from trl import SFTConfig, SFTTrainer

    def make() -> Any:
        args = arguments(SFTConfig, folder, stage, max_length=LENGTH, dataset_num_proc=None)
        rows = _dataset([{"text": text(index)} for index in range(64)])
        own = AutoModelForCausalLM.from_pretrained(model)
        return SFTTrainer(
            own,
            args,
            train_dataset=rows,
            processing_class=tokenizer(),
            peft_config=_lora() if lora else None,
        )

    found = run_trainer(make, folder)
    return found | {"adapters": adapters(model, folder / "saved")} if lora else found


def of_sft_lora(folder: Path, model: Path, stage: int) -> Found:
    return of_sft(folder, model, stage, lora=True)


def adapters(model: Path, folder: Path) -> float:
    """How far the adapters in a folder move the logits of the model."""
    from peft import PeftModel

    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    x = tokens(3)[None]
    with torch.no_grad():
        before = plain(x).logits.clone()
        return float(
            (PeftModel.from_pretrained(plain, folder).eval()(x).logits - before)
            .abs()
            .double()
            .mean()
        )


def of_dpo(folder: Path, model: Path, stage: int) -> Found:
    from trl import DPOConfig, DPOTrainer

    def make() -> Any:
        args = arguments(DPOConfig, folder, stage, max_length=2 * LENGTH, dataset_num_proc=None)
        rows = [
            {"prompt": text(i, 4), "chosen": " " + text(i + 1, 5), "rejected": " " + text(i + 2, 5)}
            for i in range(64)
        ]
        own, ref = (AutoModelForCausalLM.from_pretrained(model) for _ in range(2))
        return DPOTrainer(
            own, ref, args, train_dataset=_dataset(rows), processing_class=tokenizer()
        )

    return run_trainer(make, folder)


def _reward(completions: list[str], **others: Any) -> list[float]:
    return [
        sum(word.endswith(("1", "2", "3")) for word in completion.split()) / 5
        for completion in completions
    ]


def of_grpo(folder: Path, model: Path, stage: int) -> Found:
    from trl import GRPOConfig, GRPOTrainer

    def make() -> Any:
        how = {"num_generations": 2, "max_completion_length": 5, "beta": 0.04, "num_iterations": 1}
        args = arguments(GRPOConfig, folder, stage, **how)
        rows = _dataset([{"prompt": text(index, 4)} for index in range(64)])
        own = AutoModelForCausalLM.from_pretrained(model)
        return GRPOTrainer(own, _reward, args, train_dataset=rows, processing_class=tokenizer())

    return run_trainer(make, folder)


def _accelerated(folder: Path, model: Path, stage: int, *, lora: bool) -> Found:
    """A loop by hand with accelerate."""

    rates = []

    def run(start: int, load: bool) -> tuple[list[float], Any, Any]:
        set_seed(1)
        keys = config(stage) | {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
        }
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=keys))
        own = AutoModelForCausalLM.from_pretrained(model)
        if lora:
            from peft import get_peft_model

            own = get_peft_model(own, _lora())
        optimizer = torch.optim.AdamW([p for p in own.parameters() if p.requires_grad], lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        loader = torch.utils.data.DataLoader(Lines(), batch_size=2, shuffle=False)
        own, optimizer, loader, schedule = accelerator.prepare(own, optimizer, loader, schedule)
        if load:
            accelerator.load_state(str(folder / "state"))
        losses = []
        for step, batch in enumerate(loader):
            if step < start:
                continue
            if step == STEPS:
                break
            loss = own(**batch).loss
            accelerator.backward(loss)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if step == HALF - 1 and not load:
                accelerator.save_state(str(folder / "state"))
        return losses, own, accelerator

    losses, own, accelerator = run(0, False)
    weights = accelerator.get_state_dict(own)
    inner = accelerator.unwrap_model(own)
    inner.save_pretrained(
        folder / "saved",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=weights,
    )
    accelerator.wait_for_everyone()
    own.destroy()
    reset()
    resumed, own, _ = run(HALF, True)
    own.destroy()
    reset()
    found = {"losses": losses, "resumed": resumed, "rates": rates[:STEPS]}
    return found | {"adapters": adapters(model, folder / "saved")} if lora else found


def of_accelerate(folder: Path, model: Path, stage: int) -> Found:
    found = _accelerated(folder, model, stage, lora=False)
    return found | ({"step": _own(model, stage, found["rates"])} if is_alias() else {})


def _own(model: Path, stage: int, rates: list[float]) -> list[float]:
    """The losses of `fzero.make_train_step` on the batches that accelerate's loader
    gives each rank.
    """
    import fzero

    keys = {"zero_optimization": config(stage)["zero_optimization"], "gradient_clipping": 1.0}
    keys["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
    own = AutoModelForCausalLM.from_pretrained(model)
    step = fzero.make_train_step(own, keys, lr_schedule=lambda n: rates[min(n, STEPS - 1)])
    state, losses = step.init(), []
    for number in range(STEPS):
        first = 2 * (2 * number + step.rank)
        batch = torch.utils.data.default_collate([Lines()[first], Lines()[first + 1]])
        state, metrics = step(state, batch)
        losses.append(metrics.loss.item())
    return losses


def is_alias() -> bool:
    import deepspeed

    return "fzero" in deepspeed.initialize.__module__


def of_peft(folder: Path, model: Path, stage: int) -> Found:
    return _accelerated(folder, model, stage, lora=True)


CASES = {
    name.removeprefix("of_"): case
    for name, case in list(globals().items())
    if name.startswith("of_")
}


def main(folder: Path, asked: list[str]) -> None:
    PartialState._prepare_backend = lambda self, *args, **kwargs: (
        "gloo",
        DistributedType.MULTI_CPU,
    )  # there is no CUDA
    import deepspeed

    if not is_alias():
        # or every run would compile it
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    rank = deepspeed.comm.get_rank()
    if rank == 0:
        save_model(folder / "model")
    deepspeed.comm.barrier()
    results: Found = {
        "version": deepspeed.__version__,
        "of": deepspeed.initialize.__module__.partition(".")[0],
    }
    for case in asked:
        name, stage = case.split(":")
        began = time.perf_counter()
        try:
            results[case] = CASES[name](folder / f"{name}{stage}", folder / "model", int(stage))
        except Exception:
            results[case] = {"error": traceback.format_exc()}
            print(f"{case} failed on rank {rank}\n{results[case]['error']}", flush=True)
            (folder / f"failed{rank}.json").write_text(json.dumps(results))
            if not os.environ.get("GOES_ON"):
                raise
            reset()
        results[case]["seconds"] = time.perf_counter() - began
        if rank == 0:
            print(case, json.dumps(results[case]), flush=True)
            (folder / "found.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    main(Path(sys.argv[1]), sys.argv[2:])
