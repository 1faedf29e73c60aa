"""transformers' `Trainer` on top of fzero (`fzero.deepspeed.integrations.trainer`)."""

from fzero.deepspeed.integrations.trainer import Trainer, TrainingArguments

__all__ = ["Trainer", "TrainingArguments"]
