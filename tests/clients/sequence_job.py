"""A program of two ranks that share sequences, as accelerate and transformers' Trainer
run it with DeepSpeed.

    fzero run --as-deepspeed --num_procs 2 sequence_job.py accelerate|trainer|sft STAGE FILE

Rank 0 writes the losses to FILE.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCABULARY, LENGTH, SAMPLES, RATE, STEPS = 29, 7, 4, 0.3, 4


def llama() -> nn.Module:
    torch.manual_seed(0)
    config: Any = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(2 * SAMPLES):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[: 1 + number % 3] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def settings(stage: int) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }


def shared() -> Any:
    how = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    return ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=how)


def by_accelerate(stage: int) -> list[float]:
    plugin = DeepSpeedPlugin(hf_ds_config=settings(stage))
    accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=shared())
    own = llama()
    model, optimizer, loader = accelerator.prepare(
        own, torch.optim.SGD(own.parameters(), lr=RATE), DataLoader(rows(), batch_size=SAMPLES)
    )
    from deepspeed.utils import groups

    group, losses = groups._get_sequence_parallel_group(), []
    gather = torch.distributed.nn.functional.all_gather
    for batch in loader:
        labels = batch["shift_labels"]
        optimizer.zero_grad()
        loss = own.loss_function(  # type: ignore[operator]
            logits=model(**batch).logits,
            labels=None,
            shift_labels=labels,
            vocab_size=VOCABULARY,
        )
        each, counts = gather(loss, group=group), gather((labels != -100).sum(), group=group)
        total = sum(x * n for x, n in zip(each, counts, strict=True) if n > 0) / sum(counts)
        accelerator.backward(total)
        optimizer.step()
        losses.append(total.item())
    return losses


class Sft(transformers.Trainer):
    """The calls of TRL's SFTTrainer, which is not installed: no cache, the loss of the
    Trainer, and the accuracy of tokens from shifted labels.
    """

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs["use_cache"] = False
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        with torch.no_grad():
            labels = inputs["shift_labels"]
            kept = labels != -100
            right = ((outputs.logits.argmax(-1) == labels) & kept).sum()
            assert labels.shape == outputs.logits.shape[:2] and right <= kept.sum()
        return (loss, outputs) if return_outputs else loss


def by_trainer(stage: int, kind: type[transformers.Trainer] = transformers.Trainer) -> list[float]:
    args = transformers.TrainingArguments(
        output_dir=str(Path(sys.argv[3]).parent),
        per_device_train_batch_size=SAMPLES,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        deepspeed=settings(stage),
        parallelism_config=shared(),
        report_to=[],
    )
    trainer = kind(
        model=llama(),
        args=args,
        train_dataset=rows(),
        data_collator=transformers.default_data_collator,
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    run: Any = {
        "accelerate": by_accelerate,
        "trainer": by_trainer,
        "sft": partial(by_trainer, kind=Sft),
    }[sys.argv[1]]
    found = run(int(sys.argv[2]))
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[3]).write_text(json.dumps(found))
