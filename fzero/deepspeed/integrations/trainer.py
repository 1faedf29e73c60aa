"""transformers' `Trainer` on top of fzero; only the import of a script changes.

    from fzero.integrations.transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", deepspeed="ds_config.json", bf16=True)
    Trainer(model, args, train_dataset=data).train()

`deepspeed` is a configuration in DeepSpeed's schema, whose `"auto"` values are filled
in (`auto`); the deepspeed package is not used. The loop, its callbacks, data,
evaluation and files are transformers' own. Replaced are: the model, by an
`fzero.Engine`; `backward` and `optimizer.step`, by the engine's; and the checkpoint,
which the engine writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import accelerate as accelerate  # the Trainer needs it later
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"fzero.integrations.transformers: needs transformers and accelerate, and {error.name} is "
        f"not installed; pip install 'fzero[trainer]'",
        name=error.name,
    ) from None

from transformers.trainer import TRAINER_STATE_NAME

from fzero.common.pickles import load_tensors
from fzero.comms.rendezvous import launched
from fzero.config.fields import ConfigError
from fzero.config.files import read as read_config
from fzero.deepspeed.engine.engine import Engine
from fzero.deepspeed.engine.initialize import initialize
from fzero.deepspeed.engine.optimizer import ConfiguredScheduler, EngineOptimizer
from fzero.deepspeed.integrations.auto import resolved

_SCHEDULER = "scheduler.pt"
"""Trainer's own name."""


@dataclass
class TrainingArguments(transformers.TrainingArguments):  # type: ignore[misc]
    """transformers' own, except that `deepspeed` is fzero's configuration: a mapping, a
    path, JSON, or a base64 string.
    """

    deepspeed: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Configuration in DeepSpeed's schema: a file, JSON, or base64."},
    )

    def __post_init__(self) -> None:
        given, self.deepspeed = self.deepspeed, None  # else transformers would set up DeepSpeed
        super().__post_init__()
        self.deepspeed = given

    @property
    def place_model_on_device(self) -> bool:
        """False: the engine moves the model."""
        return False


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """transformers' own, with an fzero engine instead of the model.

    To combine it with another subclass of `transformers.Trainer`, name it first:
    `class Mine(Trainer, Theirs)`.

    *Collective:* every rank makes the same calls, as with transformers' own.

    Attributes:
        engine: the engine; None before the first `train`, when each rank evaluates the
            plain model.

    Raises:
        ConfigError: the arguments request an unsupported feature, or contradict the
            configuration.
    """

    engine: Engine | None = None
    optimizer: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool

    # --- before training --------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        _check(self.args)
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ConfigError(
                "Trainer: accelerate must set up neither DeepSpeed nor FSDP, got one in its "
                "environment; start with torchrun or fzero, or run `accelerate config` for plain "
                "data parallelism"
            )
        self.accelerator.backward = self._backward

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # the engine knows when gradients are reduced
        kwargs["gradient_accumulation_plugin"].sync_each_batch = True
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return arguments | {"mixed_precision": "no", "deepspeed_plugin": None}

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        if self.engine is None or self.engine.module is not self.model:
            self._make_engine(max_steps)
        elif isinstance(self.lr_scheduler, ConfiguredScheduler):
            self.lr_scheduler.load_state_dict({"last_batch_iteration": -1})
        engine = self.engine
        assert engine is not None
        self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = engine
        self.accelerator._models.append(engine)  # else evaluation would prepare the module again
        # for accelerator.optimizer_step_was_skipped
        self.accelerator._optimizers.append(engine.optimizer)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return engine, train_dataloader

    def _make_engine(self, num_updates: int) -> None:
        """Makes the engine with the configuration's optimizer and scheduler, or else
        with those of the arguments.
        """
        config = resolved(_mapping(self.args.deepspeed), self.args, self.model, num_updates)
        given = {"optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}
        for name, block in (("optimizer", "optimizer"), ("lr_scheduler", "scheduler")):
            if given[name] is not None and block in config:
                raise ConfigError(
                    f"{block}: must be given once, got one in `optimizers` and one in the "
                    f"configuration; leave one out"
                )
        if "optimizer" not in config:
            self.create_optimizer()
        engine, _, _, self.lr_scheduler = initialize(
            model=self.model,
            optimizer=self.optimizer,
            config=config,
            lr_scheduler=self.lr_scheduler,
        )
        engine.lr_scheduler = None  # Trainer steps it
        if self.optimizer is not None:
            self.optimizer._opt_called = True  # else its scheduler would warn
        self.engine, self.optimizer = engine, Updating(engine)
        if isinstance(self.lr_scheduler, ConfiguredScheduler):
            self.lr_scheduler.optimizer = self.optimizer

    # --- a step -----------------------------------------------------------------------------------

    def _backward(self, loss: Tensor) -> None:
        """Replaces `Accelerator.backward`; the Trainer has divided the loss already."""
        assert self.engine is not None
        self.engine.set_gradient_accumulation_boundary(self.accelerator.sync_gradients)
        self.engine.backward(loss, scale_wrt_gas=False)

    def _clip_grad_norm(self, model: Any) -> None:
        """Does nothing: the update clips."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """None: the norm is not known before the update."""

    def _get_learning_rate(self) -> float:
        assert self.engine is not None
        return float(self.engine.get_lr()[0])

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        if self.control.should_log and self.engine is not None:
            grad_norm = self.engine.get_global_grad_norm()
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    # --- files ------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the files of `from_pretrained`, in the model's dtype. *Collective:*
        every rank.

        Rank 0 holds the full weights during the call.
        """
        if self.engine is None:
            super().save_model(output_dir, _internal_call)
            return
        full = self.engine.consolidated_16bit_state_dict()
        self._save(output_dir or self.args.output_dir, state_dict=full)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None and self.lr_scheduler is not None
        self.engine.save_checkpoint(output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Checks that the checkpoint exists; the engine loads it once it is made."""
        if not (Path(resume_from_checkpoint) / "latest").exists():
            raise ValueError(
                f"resume_from_checkpoint: must be a checkpoint of this Trainer, got "
                f"{resume_from_checkpoint}, which has no file 'latest'; to use only its weights, "
                f"start with from_pretrained({str(resume_from_checkpoint)!r})"
            )
        path = Path(resume_from_checkpoint) / TRAINER_STATE_NAME
        with _reading(path, "the Trainer's state", "take another checkpoint"):
            transformers.TrainerState.load_from_json(str(path))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Continues the random states of this rank, if the checkpoint has them."""
        if checkpoint is not None:
            name = (
                "rng_state.pth"
                if self.args.world_size == 1
                else f"rng_state_{self.args.process_index}.pth"
            )
            fix = "remove it, to go on with other random numbers, or take another checkpoint"
            with _reading(Path(checkpoint) / name, "this rank's random states", fix):
                super()._load_rng_state(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.engine is not None and self.lr_scheduler is not None
        self.engine.load_checkpoint(checkpoint)
        path = Path(checkpoint) / _SCHEDULER
        with _reading(path, "the scheduler's state", "take another checkpoint"):
            self.lr_scheduler.load_state_dict(load_tensors(path))

    def _load_best_model(self) -> None:
        assert self.engine is not None
        self.engine.load_checkpoint(self.state.best_model_checkpoint, load_module_only=True)


class Updating(EngineOptimizer):
    """`Trainer.optimizer`: the engine's optimizer, whose `step` makes the engine's
    update.
    """

    def __init__(self, engine: Engine) -> None:
        assert engine.live_optimizer is not None
        super().__init__(engine.live_optimizer.param_groups, lambda: engine)
        self.stands_for(engine.live_optimizer.client)
        engine.live_optimizer = self

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._engine().step()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was skipped; accelerate reads it."""
        return self.overflow


@contextmanager
def _reading(path: Path, what: str, fix: str) -> Iterator[None]:
    """Inside, a file of a checkpoint is read; whatever fails is an error that names the
    file.

    torch's own text is left out where it advises `weights_only=False`, with which a
    file may run code.
    """
    try:
        yield
    except Exception as error:
        why = type(error).__name__ if "weights_only" in str(error) else str(error) or repr(error)
        raise ValueError(
            f"resume_from_checkpoint: {path} must hold {what}, and cannot be read ({why}); {fix}"
        ) from None


def _mapping(source: Any) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return dict(json.loads(source))
    return read_config(source)


def _check(args: Any) -> None:
    """Raises for arguments that would be ignored, or would change the training."""
    if not isinstance(args, TrainingArguments):
        raise ConfigError(
            f"args: must be a fzero.integrations.transformers.TrainingArguments, got "
            f"{type(args).__module__}.{type(args).__name__}; import both from there"
        )
    if args.deepspeed is None:
        raise ConfigError(
            "args.deepspeed: must be a configuration, got None; give at least "
            "{'zero_optimization': {'stage': 2}}"
        )
    rules = {
        "fsdp": "the configuration says what is sharded; leave it out",
        "torch_compile": "it would compile around the engine; leave it out",
        "auto_find_batch_size": "the batch size is part of the configuration; find it by hand",
        "fp16_full_eval": "evaluation is in the precision of training; use fp16=True",
        "bf16_full_eval": "evaluation is in the precision of training; use bf16=True",
        "save_on_each_node": "rank 0 has the weights; save to a folder that all nodes share",
    }
    for name, why in rules.items():
        if value := getattr(args, name, None):
            raise ConfigError(f"args.{name}: must be off, got {value}: {why}")
    if args.save_only_model and args.load_best_model_at_end:
        raise ConfigError(
            "args.save_only_model: must be False with load_best_model_at_end, got True: the best "
            "model is loaded from a full checkpoint; leave one out"
        )
    me = launched()
    if (
        me is not None
        and me.world_size != args.world_size
        and not (torch.cuda.is_available() or args.use_cpu)
    ):
        raise ConfigError(
            f"args.use_cpu: must be True where there is no GPU, got False: without it accelerate "
            f"does not join the {me.world_size} ranks that {me.by} has started, and each would "
            f"train alone; pass use_cpu=True"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"args.n_gpu: must be one GPU for each process, got {args.n_gpu}; start with `torchrun "
            f"--nproc-per-node={args.n_gpu}`"
        )
