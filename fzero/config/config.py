"""The configuration of a run: DeepSpeed's JSON, read into checked, frozen values.

Every key is one of four: honoured here; accepted because it has nothing to do here,
with the reason (`Config.notes`); known to DeepSpeed and not honoured yet (an error, or
a warning where training is correct without it, unless its value switches it off);
unknown (an error with the nearest name). No key is ignored silently.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from fzero.comms.rendezvous import launched
from fzero.config.conflicts import conflicts
from fzero.config.data_efficiency import data_warnings
from fzero.config.elasticity import Elasticity
from fzero.config.fields import (
    LOWER,
    PER_RANK,
    Block,
    ConfigError as ConfigError,
    Count,
    Dtype,
    Number,
    Rate,
    block_of,
    later,
    message_of,
    names_in,
)
from fzero.config.files import read
from fzero.config.model_warnings import unused_sparse_attention
from fzero.config.offload import AIO
from fzero.config.optimizer_block import AdamW, OptimizerBlock
from fzero.config.optimizers import OPTIMIZERS, TORCH_OPTIMIZERS, own_keys
from fzero.config.precision import BF16, FP16, DataTypes, TorchAutocast
from fzero.config.schedulers import SCHEDULERS, TorchScheduler
from fzero.config.unused_keys import SAYS_NOT_YET, split_keys, unknown_key
from fzero.config.zero import ActivationCheckpointing, ZeroOptimization
from fzero.optim.loss_scale import LossScaling
from fzero.optim.precision import Precision

if TYPE_CHECKING:
    from torch import nn

    from fzero.config.compression import CompressionTraining
    from fzero.config.data_efficiency import (
        CurriculumLearning,
        DataEfficiency,
        ProgressiveLayerDrop,
    )
    from fzero.config.schedulers import AnyScheduler
    from fzero.config.sparse_attention import SparseAttention
    from fzero.config.unused_keys import Note

    AnyOptimizer = OptimizerBlock
else:
    AnyOptimizer = later("optimizers", "Optimizer")
    AnyScheduler = later("schedulers", "AnyScheduler")
    CompressionTraining = later("compression", "CompressionTraining")
    CurriculumLearning = later("data_efficiency", "CurriculumLearning")
    DataEfficiency = later("data_efficiency", "DataEfficiency")
    ProgressiveLayerDrop = later("data_efficiency", "ProgressiveLayerDrop")
    SparseAttention = later("sparse_attention", "SparseAttention")


class ConfigWarning(UserWarning):
    """The warning for a key that fzero does not honour yet, where training is correct
    without it.
    """


def _is_first_rank() -> bool:
    """Whether this process warns: every rank reads the same configuration, so one of
    them does.
    """
    try:
        job = launched()
    except ValueError:  # joining the job raises it with more words
        return True
    return job is None or job.rank == 0


if not _is_first_rank():
    warnings.filterwarnings("ignore", category=ConfigWarning)


class BatchSizes(NamedTuple):
    """Samples per step on all ranks, samples per micro-step on one (None when no batch
    size is given); micro-steps per step.
    """

    train: int | None
    micro: int | None
    num_micro_steps: int


class Config(Block):
    """The configuration of a run; read one with `Config.load`."""

    train_batch_size: Count | None = None
    """Samples per optimizer step, all ranks together."""
    train_micro_batch_size_per_gpu: Count | None = None
    """Samples per rank and micro-step."""
    gradient_accumulation_steps: Count | None = None
    """Micro-steps in one step, whose gradients are averaged before the one update; None
    is inferred, or 1. Without a batch size beside it, any batch that it divides is
    taken."""
    optimizer: AnyOptimizer = AdamW()
    """An optimizer by name with its hyper-parameters; upper and lower case do not
    matter.
    """
    scheduler: AnyScheduler | None = None
    """The learning rate by the number of updates: one of DeepSpeed's schedules, or a
    class of `torch.optim.lr_scheduler`, with its parameters. None keeps the optimizer's
    lr."""
    gradient_clipping: Rate = 1.0
    """Largest global 2-norm of the gradient; 0 switches clipping off. The default is
    DeepSpeed 0.19's.
    """
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], LOWER] = "mean"
    """Whether gradients are averaged over the ranks or added up; stage 3 refuses `sum`,
    as in DeepSpeed.
    """
    gradient_norm_type: Literal[2, "inf"] = 2
    """The norm of the gradient that is clipped and reported: 2, or the largest absolute
    value. fzero's own key.
    """
    prescale_gradients: bool = False
    """True divides gradients by the number of ranks before they are added up, whatever
    `gradient_predivide_factor` is.
    """
    gradient_predivide_factor: Annotated[Number, Field(gt=0)] | None = None
    """The divisor of gradients before they are added up over the ranks; the sums are
    divided by the rest. Null is the number of ranks, which cannot overflow (DeepSpeed's
    default is 1)."""
    communication_data_type: Dtype | None = None
    """The dtype in which gradients are sent; null is that of the parameters."""
    data_types: DataTypes = DataTypes()
    """The dtypes, one by one."""
    fp16: FP16 = FP16()
    """Mixed precision with fp16 and a scaled loss."""
    bf16: BF16 = Field(BF16(), alias="bfloat16")
    """Mixed precision with bf16."""
    torch_autocast: TorchAutocast = TorchAutocast()
    """Mixed precision by `torch.autocast`."""
    zero_optimization: ZeroOptimization = ZeroOptimization()
    """The ZeRO stage, sizes of buckets, and offloading."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    """The units that keep only their inputs for the backward."""
    aio: Annotated[AIO, PER_RANK] = AIO()
    """How the files of `offload_optimizer` and `offload_param` are read and written."""
    elasticity: Elasticity = Elasticity()
    """The batch as a function of the number of ranks."""
    sparse_attention: SparseAttention | None = None
    """The layout of block-sparse attention, for the model's code to ask for; None is
    none.
    """
    compression_training: CompressionTraining | None = None
    """Quantization, pruning and layer reduction; None is none."""
    curriculum_learning: CurriculumLearning | None = None
    """Sequences that grow longer; None is none."""
    data_efficiency: DataEfficiency | None = None
    """Samples by difficulty, batches by tokens, random layer-token dropping; None is
    none of them.
    """
    progressive_layer_drop: ProgressiveLayerDrop | None = None
    """Layers that are left out at random; None leaves out none."""
    _notes: tuple[Note, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _elasticity_is_alone(self) -> Self:
        if self.elasticity.enabled and not self.elasticity.ignore_non_elastic_batch_info:
            for name in (
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
                "gradient_accumulation_steps",
            ):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}: follows from elasticity, which is enabled, got "
                        f"{getattr(self, name)} beside it; remove one of them, or set "
                        f"elasticity.ignore_non_elastic_batch_info to have it ignored"
                    )
        return self

    @model_validator(mode="after")
    def _stage_fits(self) -> Self:
        zero = self.zero_optimization
        if self.gradient_allreduce_op == "sum" and zero.row.shards("params"):
            raise ValueError(
                "gradient_allreduce_op: must be 'mean' in stage 3, got 'sum'; multiply the loss by "
                "the ranks"
            )
        if zero.mics_shard_size is not None and zero.zero_hpz_partition_size is not None:
            raise ValueError(
                f"zero_optimization.mics_shard_size: excludes "
                f"zero_optimization.zero_hpz_partition_size, got {zero.mics_shard_size} beside "
                f"{zero.zero_hpz_partition_size}; remove one of them"
            )
        if zero.offload_param is not None and not zero.row.shards("params"):
            raise ValueError(
                f"zero_optimization.offload_param: needs zero_optimization.stage 3, which divides "
                f"parameters, got stage {zero.stage}; leave it out, or set the stage to 3"
            )
        return self

    @model_validator(mode="after")
    def _dtypes_fit(self) -> Self:
        if self.scales_loss and self.fp16.loss_scale == 0 and self.fp16.min_loss_scale == 0:
            raise ValueError(
                "fp16.min_loss_scale: must be above 0 where the scale is dynamic, or it falls to "
                "0, got 0; 1 is the default"
            )
        enabled = [
            name for name in ("fp16", "bf16", "torch_autocast") if getattr(self, name).enabled
        ]
        if "fp16" in enabled and len(enabled) > 1:
            raise ValueError(
                f"fp16.enabled: excludes {enabled[1]}.enabled, got true for both; switch one off"
            )
        if enabled == ["bf16", "torch_autocast"] and self.torch_autocast.dtype != "bfloat16":
            raise ValueError(
                f"torch_autocast.dtype: must be 'bfloat16' beside bf16, whose parameters have that "
                f"dtype, got {self.torch_autocast.dtype!r}; change it, or switch bf16 off"
            )
        given = self.data_types.param_dtype
        for name, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
            if name in enabled and given not in (None, dtype):
                raise ValueError(
                    f"data_types.param_dtype: must be {dtype!r} when {name} is enabled, got "
                    f"{given!r}; leave it out"
                )
        if None is not self.communication_data_type != self.data_types.reduce_dtype is not None:
            raise ValueError(
                f"data_types.reduce_dtype: is the same as communication_data_type, got "
                f"{self.data_types.reduce_dtype!r} beside {self.communication_data_type!r}; remove "
                f"one of them"
            )
        return self

    @property
    def precision(self) -> Precision:
        """The dtypes that all keys together set."""
        chosen: dict[str, Any] = {}
        if self.fp16.enabled:
            chosen["param_dtype"] = "float16"
            if self.fp16.fp16_master_weights_and_grads:
                chosen |= {"master_dtype": "float16", "optimizer_dtype": "float32"}
        if self.bf16.enabled:
            chosen["param_dtype"] = "bfloat16"
            if self.bf16.bf16_master_weights_and_grads:
                state = "bfloat16" if self.bf16.bf16_optimizer_states else "float32"
                chosen |= {"master_dtype": "bfloat16", "optimizer_dtype": state}
                chosen["stochastic_rounding"] = self.bf16.stochastic_rounding
        if self.torch_autocast.enabled:
            chosen["autocast"] = self.torch_autocast.dtype
            chosen["safe_modules"] = self.torch_autocast.lower_precision_safe_modules
        if self.communication_data_type:
            chosen["reduce_dtype"] = self.communication_data_type
        chosen |= self.data_types.model_dump(exclude_none=True, exclude={"keep_in_fp32_modules"})
        return Precision(**chosen)

    @property
    def compresses(self) -> bool:
        """Whether a technique of `compression_training` is on."""
        return self.compression_training is not None and self.compression_training.compresses

    @property
    def drops_tokens(self) -> bool:
        """Whether random layer-token dropping is on."""
        return self.data_efficiency is not None and self.data_efficiency.drops_tokens

    @property
    def samples(self) -> bool:
        """Whether the engine's loader draws samples by the block `data_efficiency`."""
        return self.data_efficiency is not None and self.data_efficiency.samples

    @property
    def drops_layers(self) -> bool:
        """Whether progressive layer drop is on."""
        return self.progressive_layer_drop is not None and self.progressive_layer_drop.enabled

    @property
    def casts_batch_to(self) -> str | None:
        """The dtype to which the floating tensors of a batch are cast (`auto_cast`);
        None casts none.
        """
        if self.fp16.enabled and self.fp16.auto_cast:
            return "float16"
        return "bfloat16" if self.bf16.enabled and self.bf16.auto_cast else None

    @property
    def scales_loss(self) -> bool:
        return self.fp16.enabled or (
            self.torch_autocast.enabled and self.torch_autocast.dtype == "float16"
        )

    @property
    def skips_overflow(self) -> bool:
        """Whether a step with a gradient that is not finite is skipped instead of an
        error.
        """
        return self.scales_loss or (self.bf16.enabled and self.bf16.check_grad_overflow)

    def loss_scaling(self) -> LossScaling:
        """The rules of the loss scale; a constant 1 where the loss is not scaled."""
        return self.fp16.loss_scaling() if self.scales_loss else LossScaling()

    def __eq__(self, other: object) -> bool:
        """Whether all values are the same; the spelling of the keys does not matter."""
        return self.__dict__ == other.__dict__ if isinstance(other, Config) else NotImplemented

    @property
    def notes(self) -> tuple[Note, ...]:
        """The keys that were read and have no effect, each with the reason."""
        return self._notes

    @property
    def conflicts(self) -> tuple[Note, ...]:
        """The given keys that have no effect beside the others, or contradict them,
        each with the reason.
        """
        return conflicts(self, self._notes)

    def warn_of_no_effect(self, model: nn.Module) -> None:
        """Warns (`ConfigWarning`) of `conflicts` about quantized communication, of
        sparse attention that a model has not, and of blocks of data efficiency inside
        disabled ones."""
        if self.data_efficiency is not None or self.curriculum_learning is not None:
            for text in data_warnings(self.data_efficiency, self.curriculum_learning):
                warnings.warn(text, ConfigWarning, stacklevel=3)
        quantizes = [
            name
            for name in self.zero_optimization.model_fields_set
            if name.startswith(("zero_quant", "zeropp"))
        ]
        for note in self.conflicts if quantizes else ():
            if "zero_quantized" in note.key or "zeropp_loco_param" in note.key:
                text = f"{note.key}: has no effect, for {note.reason}; leave it out"
                warnings.warn(text, ConfigWarning, stacklevel=3)
        if self.sparse_attention is not None:
            for text in unused_sparse_attention(self.sparse_attention, model):
                warnings.warn(text, ConfigWarning, stacklevel=3)

    @classmethod
    def load(cls, source: Mapping[str, Any] | str | PathLike[str] | Config) -> Config:
        """Reads a mapping, the path of a JSON or Hjson file, or a urlsafe-base64 string
        of JSON.

        A value `"auto"` counts as left out: it is for a program that fills the file in.
        Warns (`ConfigWarning`) of each key that is not honoured yet where training is
        correct without it.

        Raises:
            ConfigError: one line for every field that is wrong.

        >>> Config.load({"zero_optimization": {"stage": "2"}}).zero_optimization.stage
        2
        >>> Config.load({"optimizer": {"type": "AdanW"}})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        fzero.config.fields.ConfigError: optimizer: no optimizer is named 'AdanW'; did you mean 'AdamW'? (known: Adam, ...)
        """
        if isinstance(source, Config):
            return source
        if isinstance(source, str | PathLike):
            source = read(source)
        if not isinstance(source, Mapping):
            raise ConfigError(
                f"Config.load: needs a mapping or the path of a JSON file, got "
                f"{type(source).__name__}; pass one of these"
            )
        honoured = frozenset[str]()
        if "optimizer" in source:
            honoured = own_keys(source)
        kept, notes, problems = split_keys(source, honoured=honoured)
        cfg, wrong = None, list(problems)
        try:
            cfg = cls.model_validate(kept)
        except ValidationError as error:
            wrong += map(_explain, error.errors())
        if cfg is None or wrong:
            raise ConfigError("\n".join(wrong)) from None
        for note in notes:
            if note.kind == "not yet":
                warnings.warn(
                    f"{note.key}: {SAYS_NOT_YET}; {note.reason}", ConfigWarning, stacklevel=2
                )
        cfg._notes = notes
        return cfg

    def batch_sizes(self, world_size: int) -> BatchSizes:
        """The batch sizes on `world_size` ranks, the missing ones inferred: train =
        micro × accumulation × ranks.

        Where `elasticity` is enabled, it sets them.

        Raises:
            ConfigError: they do not fit each other and the world size.

        >>> Config.load({"train_batch_size": 24, "gradient_accumulation_steps": 3}).batch_sizes(
        ...     world_size=4
        ... )
        BatchSizes(train=24, micro=2, num_micro_steps=3)
        """
        if self.elasticity.enabled:
            try:
                batch = self.elasticity.batch_on(world_size)
                return BatchSizes(batch.batch_size, *batch.steps_on(world_size))
            except ValueError as error:
                raise ConfigError(str(error)) from None
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if train is None and micro is None:
            return BatchSizes(None, None, steps or 1)
        if steps is None:
            steps = train // (micro * world_size) if train and micro else 1
        if micro is None:
            assert train is not None
            micro = train // (steps * world_size)
        product = micro * steps * world_size
        if train not in (None, product) or not product:
            raise ConfigError(
                f"train_batch_size: must equal train_micro_batch_size_per_gpu × "
                f"gradient_accumulation_steps × ranks, got {train} for {micro} × {steps} × "
                f"{world_size}; change one of them, or leave one out to have it inferred"
            )
        return BatchSizes(product, micro, steps)


def _explain(detail: ErrorDetails) -> str:
    """The line of the error message for one wrong field."""
    block: type[BaseModel] = Config
    location: list[str] = []
    for index, part in enumerate(map(str, detail["loc"])):
        # the member of the union, not a key
        if index == 1 and location[0] in ("optimizer", "scheduler"):
            block = {**OPTIMIZERS, **TORCH_OPTIMIZERS, **SCHEDULERS}.get(part, TorchScheduler)
            continue
        location.append(part)
        if index == len(detail["loc"]) - 1:
            break
        found = [f.annotation for name, f in block.model_fields.items() if part in (name, f.alias)]
        block = (block_of(found[0]) if found else None) or block
    field = ".".join(location) or "config"
    if detail["type"] != "extra_forbidden":
        message = message_of(detail)
        given = "" if isinstance(detail["input"], Mapping) else f", got {detail['input']!r}"
        # a check of several keys: its message names them
        return f"{field}: {message}{given}" if location else message
    key = location[-1]
    if key in block.model_fields:
        return (
            f"{field}: stands beside {block.model_fields[key].alias!r}, which is the same; "
            f"remove one of them"
        )
    return unknown_key(field, tuple(block.model_fields), tuple(names_in(Config)))
