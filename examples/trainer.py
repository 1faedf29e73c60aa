"""transformers' Trainer with ZeRO-3 on two processes: a small Llama learns to continue
arithmetic progressions.

    fzero --num_procs 2 examples/trainer.py --out /tmp/llama
        or: torchrun --nproc-per-node 2 examples/trainer.py
    fzero --num_procs 1 examples/trainer.py --out /tmp/llama --steps 80 --resume
        resumes on one process

Such a script changes only in its import of Trainer and TrainingArguments, and
`deepspeed=` sets the stage:

    - from transformers import Trainer, TrainingArguments
    + from fzero.integrations.transformers import Trainer, TrainingArguments

docs/trainer.md lists the differences. Needs transformers and accelerate.
"""

import argparse
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fzero.integrations.transformers import Trainer, TrainingArguments

ZERO = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}


def progressions(seed: int, size: int) -> list[dict[str, list[int]]]:
    """Sequences such as 3 10 17 24 … modulo 64."""
    chance = random.Random(seed)
    starts_and_steps = [(chance.randrange(64), chance.randrange(1, 8)) for _ in range(size)]
    rows = [
        [(start + step * index) % 64 for index in range(12)] for start, step in starts_and_steps
    ]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", default="out/trainer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--resume", action="store_true", help="resume from the last checkpoint in --out"
    )
    parser.add_argument("--cpu", action="store_true", help="even if there is a GPU")
    options = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    on_cpu = options.cpu or not torch.cuda.is_available()
    args = TrainingArguments(
        options.out,
        deepspeed=ZERO,
        use_cpu=on_cpu,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model, args, train_dataset=progressions(0, 2048), eval_dataset=progressions(1, 64)
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()

    if trainer.is_world_process_zero():
        loaded = LlamaForCausalLM.from_pretrained(options.out)
        seven = loaded.generate(torch.tensor([[0, 7, 14, 21]]), max_new_tokens=4, do_sample=False)[
            0
        ].tolist()
        print(f"0 7 14 21 goes on with {' '.join(map(str, seven[4:]))}", flush=True)


if __name__ == "__main__":
    main()
