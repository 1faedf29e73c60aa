"""What a run is told: the DeepSpeed JSON people already have, read into checked, frozen values.

Every key is one of four: honoured here; accepted because it has nothing to do here, with the reason (`Config.notes`);
known to DeepSpeed and not honoured yet (an error that says so, or a warning where training is right without it, unless
its value switches it off); unknown (an error with the nearest name). Nothing is ignored in silence.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, Union

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from torch import Tensor

from fzero import lr_schedules, matrix_transforms, torch_optimizers, transforms
from fzero.config_conflicts import conflicts
from fzero.config_files import ConfigError as ConfigError  # users know it from here
from fzero.config_files import read
from fzero.config_sieve import SAYS_NOT_YET, Note, set_aside, unknown_key
from fzero.loss_scaling import LossScaling
from fzero.lr_schedules import Schedule
from fzero.pieces import Pieces
from fzero.precision import Precision
from fzero.transforms import Transform


class ConfigWarning(UserWarning):
    """A key that fzero does not honour yet, where training is right without it."""


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _stage(value: object) -> object:
    number = int(value) if isinstance(value, str) and value.isdigit() else _number(value)
    if number not in (0, 1, 2, 3):
        raise ValueError("must be 0, 1, 2 or 3")
    return number


def _positive(value: int) -> int:
    if value < 1:
        raise ValueError("must be at least 1")
    return value


Count = Annotated[int, BeforeValidator(_number), AfterValidator(_positive)]
"""A positive integer; an integral float such as 5e8 is one."""
Elements = Annotated[int, BeforeValidator(_number), Field(ge=0)]
"""A number of elements, 0 included."""
Number = Annotated[float, BeforeValidator(_number)]
Rate = Annotated[Number, Field(ge=0)]
Beta = Annotated[Number, Field(ge=0, lt=1)]


class Block(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out_auto(cls, data: Any) -> Any:
        """`"auto"` is for a program that fills the file in; a key that does not exist stays, to be refused."""
        if not isinstance(data, Mapping):
            return data
        known = {*cls.model_fields, *(field.alias for field in cls.model_fields.values())}
        return {key: value for key, value in data.items() if value != "auto" or key not in known}


class AdamWParams(Block):
    """`optimizer.params` of AdamW; defaults are torch's."""

    lr: Rate = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: Rate = 0.01


class AdamParams(AdamWParams):
    """`optimizer.params` of Adam."""

    weight_decay: Rate = 0.0
    adam_w_mode: bool = True
    """True (DeepSpeed's default) decouples the weight decay, as AdamW does."""


class SGDParams(Block):
    """`optimizer.params` of SGD; defaults are torch's."""

    lr: Rate = 1e-3
    momentum: Rate = 0.0
    dampening: Number = 0.0
    weight_decay: Rate = 0.0
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov(self) -> Self:
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError(
                f"nesterov needs momentum > 0 and dampening = 0, got {self.momentum} and {self.dampening}; change these"
            )
        return self


class AdagradParams(Block):
    """`optimizer.params` of Adagrad; defaults are torch's."""

    lr: Rate = 1e-2
    lr_decay: Rate = 0.0
    weight_decay: Rate = 0.0
    initial_accumulator_value: Rate = 0.0
    eps: Rate = 1e-10


class LionParams(Block):
    """`optimizer.params` of Lion; defaults are DeepSpeed's."""

    lr: Rate = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: Rate = 0.0


class LambParams(Block):
    """`optimizer.params` of Lamb; defaults are DeepSpeed's."""

    lr: Rate = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: Rate = 0.0
    max_coeff: Rate = 10.0
    """The largest trust ratio."""
    min_coeff: Rate = 0.01
    """The least trust ratio."""
    bias_correction: bool = True
    """Whether the moments are corrected as in Adam and in the paper."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_coeff > self.max_coeff:
            raise ValueError(
                f"min_coeff must be at most max_coeff, got {self.min_coeff} > {self.max_coeff}; exchange them"
            )
        return self


class AdafactorParams(Block):
    """`optimizer.params` of Adafactor; names and defaults are torch's."""

    lr: Rate = 1e-2
    beta2_decay: Annotated[Number, Field(le=0)] = -0.8
    eps: tuple[Rate | None, Rate] = (None, 1e-3)
    """The least second moment's root (None is the dtype's precision), and the least size of a parameter that counts."""
    d: Annotated[Number, Field(ge=1)] = 1.0
    """Directions with a larger root mean square are made so small."""
    weight_decay: Rate = 0.0


class MuonParams(Block):
    """`optimizer.params` of Muon; names and defaults are DeepSpeed's. A schedule moves all three rates in proportion."""

    lr: Rate = 0.02
    muon_lr: Rate | None = None
    """Of the matrices; None is lr."""
    momentum: Beta = 0.95
    weight_decay: Rate = 0.0
    """Decoupled, of all parameters."""
    ns_steps: Count = 5
    ns_method: Literal["standard"] = "standard"
    """Newton-Schulz as in torch.optim.Muon; DeepSpeed's default \"gram\" reaches the same by other roundings."""
    nesterov: bool = True
    adam_lr: Rate | None = None
    """Of all other parameters; None is lr. 3e-4 when neither is given."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Rate = 1e-10

    @model_validator(mode="before")
    @classmethod
    def _adams_own(cls, data: Any) -> Any:
        is_given = isinstance(data, Mapping) and any(data.get(key, "auto") != "auto" for key in ("lr", "adam_lr"))
        return {**data, "adam_lr": 3e-4} if isinstance(data, Mapping) and not is_given else data

    @model_validator(mode="after")
    def _in_proportion(self) -> Self:
        if self.lr == 0 and (self.muon_lr or self.adam_lr):
            raise ValueError(
                f"lr must not be 0 beside muon_lr or adam_lr, got {self.muon_lr} and {self.adam_lr}; give the lr that a "
                f"schedule starts from"
            )
        return self


class OptimizerBlock(Block):
    """What every optimizer is: hyper-parameters, and the transform that they make."""

    type: str
    params: Any

    @property
    def lr(self) -> float:
        """The configured learning rate."""
        return float(self.params.lr)

    def is_elementwise(self, kind: str) -> bool:
        """Whether the transform of parameters of this kind treats each element by itself."""
        return True

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        """Which of the optimizer's ways a parameter goes; parameters of different kinds are in different flat buffers."""
        return ""

    def transform(
        self,
        *,
        lr: float | Tensor | None = None,
        momentum: float | Tensor | None = None,
        pieces: Pieces | None = None,
        kind: str = "",
    ) -> Transform:
        """The transform of a flat buffer with parameters of one kind.

        Args:
            lr: in place of the configured one; None keeps that. A 0-d tensor may change between updates.
            momentum: in place of the first beta, likewise.
            pieces: what the flat tensor holds, for optimizers that look at whole parameters; others do not need it.
            kind: of `kind_of`.
        """
        values = self.params.model_dump()
        if lr is not None:
            values["lr"] = lr
        if momentum is not None:
            values["betas"] = (momentum, values["betas"][1])
        return self._make(values, pieces, kind)

    def _make(self, values: dict[str, Any], pieces: Pieces | None, kind: str) -> Transform:
        raise NotImplementedError

    def _needed(self, pieces: Pieces | None) -> Pieces:
        if pieces is None:
            raise ValueError(
                f"{self.type}: looks at whole parameters, so that its transform needs pieces, got None; pass them"
            )
        return pieces


class AdamW(OptimizerBlock):
    type: Literal["AdamW"] = "AdamW"
    params: AdamWParams = AdamWParams()

    def _make(self, values: dict[str, Any], pieces: Pieces | None, kind: str) -> Transform:
        return transforms.adamw(**values)


class Adam(OptimizerBlock):
    type: Literal["Adam"] = "Adam"
    params: AdamParams = AdamParams()

    def _make(self, values: dict[str, Any], pieces: Pieces | None, kind: str) -> Transform:
        return (transforms.adamw if values.pop("adam_w_mode") else transforms.adam)(**values)


class SGD(OptimizerBlock):
    type: Literal["SGD"] = "SGD"
    params: SGDParams = SGDParams()

    def _make(self, values: dict[str, Any], pieces: Pieces | None, kind: str) -> Transform:
        return transforms.sgd(**values)


class Adagrad(OptimizerBlock):
    type: Literal["Adagrad"] = "Adagrad"
    params: AdagradParams = AdagradParams()

    def _make(self, values: dict[str, Any], pieces: Pieces | None, kind: str) -> Transform:
        return transforms.adagrad(**values)


class Lion(OptimizerBlock):
    type: Literal["Lion"] = "Lion"
    params: LionParams = LionParams()

    def _make(self, values: dict[str, Any], pieces: Pieces | None, kind: str) -> Transform:
        return transforms.lion(**values)


class Lamb(OptimizerBlock):
    type: Literal["Lamb"] = "Lamb"
    params: LambParams = LambParams()

    def is_elementwise(self, kind: str) -> bool:
        return False

    def _make(self, values: dict[str, Any], pieces: Pieces | None, kind: str) -> Transform:
        return matrix_transforms.lamb(**values, pieces=self._needed(pieces))


class Adafactor(OptimizerBlock):
    type: Literal["Adafactor"] = "Adafactor"
    params: AdafactorParams = AdafactorParams()

    def is_elementwise(self, kind: str) -> bool:
        return False

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        return "matrix" if len(shape) >= 2 else "vector"

    def _make(self, values: dict[str, Any], pieces: Pieces | None, kind: str) -> Transform:
        return matrix_transforms.adafactor(**values, pieces=self._needed(pieces))


class Muon(OptimizerBlock):
    type: Literal["Muon"] = "Muon"
    params: MuonParams = MuonParams()

    def is_elementwise(self, kind: str) -> bool:
        return kind == "adam"

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        """Matrices but for embeddings and the output layer go Muon's way, as in DeepSpeed."""
        return "muon" if len(shape) >= 2 and not any(x in name.lower() for x in ("embed", "lm_head")) else "adam"

    def _make(self, values: dict[str, Any], pieces: Pieces | None, kind: str) -> Transform:
        if kind not in ("muon", "adam"):
            raise ValueError(f"Muon: the kind of parameters must be 'muon' or 'adam', got {kind!r}; ask kind_of")
        own_lr, now = values[f"{kind}_lr"], values["lr"]
        lr = now if own_lr is None else own_lr * (now / self.params.lr if self.params.lr else 1.0)
        if kind == "adam":
            return transforms.adamw(lr, **{key: values[key] for key in ("betas", "eps", "weight_decay")})
        given = {key: values[key] for key in ("momentum", "weight_decay", "ns_steps", "nesterov")}
        return matrix_transforms.muon(lr, **given, pieces=self._needed(pieces))


class TorchOptimizer(OptimizerBlock):
    """Any other `type` is a class of `torch.optim`, with its parameters; refused with the reason where it is not elementwise."""

    @model_validator(mode="after")
    def _works_on_shards(self) -> Self:
        torch_optimizers.torch_optimizer(self.type, **self.params.model_dump())
        return self

    def _make(self, values: dict[str, Any], pieces: Pieces | None, kind: str) -> Transform:
        return torch_optimizers.torch_transform(torch_optimizers.find(self.type), values)


OPTIMIZERS: dict[str, type[OptimizerBlock]] = {
    cls.__name__: cls for cls in (Adam, AdamW, SGD, Adagrad, Lion, Lamb, Adafactor, Muon)
}


def _torch_block(name: str, cls: type) -> type[TorchOptimizer]:
    """The block of a class of `torch.optim`, made of its signature; how it runs through memory is not a parameter here."""
    fields: dict[str, Any] = {}
    for field, parameter in inspect.signature(cls).parameters.items():
        if field not in ("params", "foreach", "fused", "capturable", "differentiable"):
            default = parameter.default
            kind: Any = Number if isinstance(default, int | float) else Any
            kind = {"lr": Rate, "betas": tuple[Beta, Beta]}.get(field, bool if isinstance(default, bool) else kind)
            fields[field] = (kind, default)
    params: Any = create_model(f"{name}Params", __base__=Block, __doc__=f"`optimizer.params` of {name}.", **fields)
    literal: Any = Literal[name]
    return create_model(name, __base__=TorchOptimizer, type=(literal, name), params=(params, params()))


TORCH_OPTIMIZERS: dict[str, type[TorchOptimizer]] = {
    name: _torch_block(name, cls) for name, cls in torch_optimizers.classes().items() if name not in OPTIMIZERS
}
_BY_LOWER_NAME = {name.lower(): name for name in (*OPTIMIZERS, *TORCH_OPTIMIZERS)}


def with_overrides(optimizer: Optimizer, overrides: Mapping[str, Any], field: str) -> Optimizer:
    """The optimizer with other hyper-parameters, checked like those of the configuration.

    Raises:
        ConfigError: a hyper-parameter that the optimizer does not have, or a wrong value; begins with `field`.
    """
    kind = type(optimizer.params)
    try:
        params = kind.model_validate({**optimizer.params.model_dump(), **overrides})
        changed: Optimizer = type(optimizer).model_validate({"type": optimizer.type, "params": params.model_dump()})
        return changed
    except ValidationError as error:
        problems = [f"{'.'.join([field, *map(str, e['loc'])])}: {e['msg']}, got {e['input']!r}" for e in error.errors()]
        known = ", ".join(kind.model_fields)
        raise ConfigError("\n".join(problems) + f"; {optimizer.type} has: {known}") from None


def _optimizer_name(data: Any) -> Any:
    """The optimizer's name as it is spelled here: DeepSpeed does not look at case."""
    if not isinstance(data, Mapping):
        return data
    given = data.get("type", "AdamW")
    name = _BY_LOWER_NAME.get(str(given).lower())
    if name is None:
        usable = {lower: name for lower, name in _BY_LOWER_NAME.items() if name in OPTIMIZERS or _works(name)}
        nearest = difflib.get_close_matches(str(given).lower(), usable, n=1, cutoff=0.0)[0]
        known = f"{', '.join(OPTIMIZERS)} and elementwise classes of torch.optim"
        raise ValueError(f"no optimizer is named {given!r}; did you mean {usable[nearest]!r}? (known: {known})")
    return {**data, "type": name}


def _works(name: str) -> bool:
    try:
        torch_optimizers.torch_optimizer(name)
    except ValueError:
        return False
    return True


def _own_keys(source: Mapping[str, Any]) -> frozenset[str]:
    """The dotted names of the hyper-parameters of the optimizer that is named, which it honours though others do not."""
    block = source.get("optimizer")
    name = _BY_LOWER_NAME.get(str(block.get("type", "AdamW")).lower()) if isinstance(block, Mapping) else None
    if name is None:
        return frozenset()
    params = {**OPTIMIZERS, **TORCH_OPTIMIZERS}[name].model_fields["params"].annotation
    assert params is not None
    return frozenset(f"optimizer.params.{key}" for key in params.model_fields)


if TYPE_CHECKING:
    AnyTorchOptimizer = TorchOptimizer
else:
    AnyTorchOptimizer = Union[tuple(TORCH_OPTIMIZERS.values())]  # noqa: UP007 - a union of a computed length

Optimizer = Annotated[
    Adam | AdamW | SGD | Adagrad | Lion | Lamb | Adafactor | Muon | AnyTorchOptimizer,
    Field(discriminator="type"),
    BeforeValidator(_optimizer_name),
]


class WarmupLRParams(Block):
    """`scheduler.params` of WarmupLR."""

    warmup_min_lr: Rate = 0.0
    warmup_max_lr: Rate | None = None
    """None is the optimizer's lr."""
    warmup_num_steps: Count = 1000
    """Updates until the full rate; 1 counts as 2."""
    warmup_type: Literal["log", "linear"] = "log"
    last_batch_iteration: Literal[-1] = -1
    """A schedule is a function of the state's step: it starts where the state is."""


class WarmupDecayLRParams(WarmupLRParams):
    """`scheduler.params` of WarmupDecayLR."""

    warmup_max_lr: Rate = 1e-3
    total_num_steps: Count


class WarmupCosineLRParams(Block):
    """`scheduler.params` of WarmupCosineLR; ratios are of the optimizer's lr."""

    total_num_steps: Count
    warmup_min_ratio: Rate = 0.0
    warmup_num_steps: Count = 1000
    cos_min_ratio: Rate = 1e-4
    warmup_type: Literal["log", "linear"] = "log"
    last_batch_iteration: Literal[-1] = -1


class LRRangeTestParams(Block):
    """`scheduler.params` of LRRangeTest."""

    lr_range_test_min_lr: Rate = 1e-3
    lr_range_test_step_size: Count = 2000
    lr_range_test_step_rate: Rate = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: Literal[-1] = -1


class OneCycleParams(Block):
    """`scheduler.params` of OneCycle. Unlike DeepSpeed's it leaves the second beta of Adam alone (there it becomes 0.99)."""

    cycle_min_lr: Rate
    cycle_max_lr: Rate
    decay_lr_rate: Rate = 0.0
    cycle_first_step_size: Count = 2000
    cycle_second_step_size: Elements | None = None
    cycle_first_stair_count: Elements = 0
    cycle_second_stair_count: Elements | None = None
    decay_step_size: Elements = 0
    cycle_momentum: bool = True
    """Adam and AdamW: the first beta goes from `cycle_max_mom` to `cycle_min_mom` and back."""
    cycle_min_mom: Beta = 0.8
    cycle_max_mom: Beta = 0.9
    decay_mom_rate: Rate = 0.0
    last_batch_iteration: Literal[-1] = -1


class Scheduler(Block):
    """What every scheduler is: each has a `rate(lr)`, and some move the momentum, by the number of updates."""

    def momentum(self) -> Schedule | None:
        return None


class WarmupLR(Scheduler):
    type: Literal["WarmupLR"]
    params: WarmupLRParams = WarmupLRParams()

    def rate(self, lr: float) -> Schedule:
        p = self.params
        return lr_schedules.warmup_lr(
            lr if p.warmup_max_lr is None else p.warmup_max_lr,
            min_lr=p.warmup_min_lr, warmup_num_steps=p.warmup_num_steps, warmup_type=p.warmup_type,
        )  # fmt: skip


class WarmupDecayLR(Scheduler):
    type: Literal["WarmupDecayLR"]
    params: WarmupDecayLRParams

    def rate(self, lr: float) -> Schedule:
        p = self.params
        return lr_schedules.warmup_decay_lr(
            p.warmup_max_lr, total_num_steps=p.total_num_steps,
            min_lr=p.warmup_min_lr, warmup_num_steps=p.warmup_num_steps, warmup_type=p.warmup_type,
        )  # fmt: skip


class WarmupCosineLR(Scheduler):
    type: Literal["WarmupCosineLR"]
    params: WarmupCosineLRParams

    def rate(self, lr: float) -> Schedule:
        return lr_schedules.warmup_cosine_lr(lr, **self.params.model_dump(exclude={"last_batch_iteration"}))


class LRRangeTest(Scheduler):
    type: Literal["LRRangeTest"]
    params: LRRangeTestParams = LRRangeTestParams()

    def rate(self, lr: float) -> Schedule:
        p = self.params
        return lr_schedules.lr_range_test(
            p.lr_range_test_min_lr, step_size=p.lr_range_test_step_size,
            step_rate=p.lr_range_test_step_rate, staircase=p.lr_range_test_staircase,
        )  # fmt: skip


class OneCycle(Scheduler):
    type: Literal["OneCycle"]
    params: OneCycleParams

    def rate(self, lr: float) -> Schedule:
        p = self.params
        return self._cycle(p.cycle_min_lr, p.cycle_max_lr, p.decay_lr_rate)

    def momentum(self) -> Schedule | None:
        p = self.params
        return (
            self._cycle(p.cycle_min_mom, p.cycle_max_mom, p.decay_mom_rate, inverse=True) if p.cycle_momentum else None
        )

    def _cycle(self, low: float, high: float, decay_rate: float, *, inverse: bool = False) -> Schedule:
        p = self.params
        return lr_schedules.one_cycle(
            low, high, first_step_size=p.cycle_first_step_size, second_step_size=p.cycle_second_step_size,
            first_stair_count=p.cycle_first_stair_count, second_stair_count=p.cycle_second_stair_count,
            decay_step_size=p.decay_step_size, decay_rate=decay_rate, inverse=inverse,
        )  # fmt: skip


class TorchScheduler(Scheduler):
    """Any other `type` is a class of `torch.optim.lr_scheduler`, stepped once after every update."""

    type: str
    params: dict[str, Any] = {}

    @model_validator(mode="after")
    def _exists(self) -> Self:
        known = [*SCHEDULERS, *lr_schedules.torch_classes()]
        if self.type not in known:
            nearest = difflib.get_close_matches(self.type, known, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"no scheduler is named {self.type!r}; did you mean {nearest!r}? (known: {', '.join(SCHEDULERS)} and the "
                f"classes of torch.optim.lr_scheduler)"
            )
        self.rate(1.0)
        return self

    def rate(self, lr: float) -> Schedule:
        return lr_schedules.torch_schedule(self.type, lr, **self.params)


SCHEDULERS: dict[str, type[Scheduler]] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


def _scheduler_tag(data: Any) -> str:
    given = data.get("type") if isinstance(data, Mapping) else getattr(data, "type", None)
    return given if isinstance(given, str) and given in SCHEDULERS else "torch"


AnyScheduler = Annotated[
    Annotated[WarmupLR, Tag("WarmupLR")]
    | Annotated[WarmupDecayLR, Tag("WarmupDecayLR")]
    | Annotated[WarmupCosineLR, Tag("WarmupCosineLR")]
    | Annotated[LRRangeTest, Tag("LRRangeTest")]
    | Annotated[OneCycle, Tag("OneCycle")]
    | Annotated[TorchScheduler, Tag("torch")],
    Discriminator(_scheduler_tag),
]


class ZeroOptimization(Block):
    """DeepSpeed key `zero_optimization`. Sizes count elements."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_stage)] = 0
    """Which of optimizer state (1), gradients (2) and parameters (3) are divided among the ranks."""
    reduce_bucket_size: Count = 500_000_000
    """Most elements of full gradients that wait for their reduction, besides those of one unit and never more than two
    units. Also, modules outside repeated blocks are joined into one unit up to this size."""
    round_robin_gradients: bool = False
    """Order of the parameters inside a flat buffer: dealt out to the ranks in turn, instead of as declared."""
    stage3_param_persistence_threshold: Elements = Field(100_000, alias="param_persistence_threshold")
    """Parameters with fewer elements stay whole on every rank in stage 3."""
    stage3_prefetch_bucket_size: Elements = Field(50_000_000, alias="prefetch_bucket_size")
    """0: a unit is gathered when it is needed. Otherwise the next unit's gather starts one unit early."""
    stage3_max_live_parameters: Count = Field(1_000_000_000, alias="max_live_parameters")
    """No gather starts early when it would bring more gathered elements than this to life."""


def _dtype(value: object) -> object:
    return {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}.get(str(value).lower(), value)


Dtype = Annotated[Literal["float32", "float16", "bfloat16"], BeforeValidator(_dtype)]
"""A dtype by torch's name or DeepSpeed's (`fp32`, `fp16`, `bf16`)."""


def _exponent(value: object) -> object:
    if not isinstance(_number(value), int):
        raise ValueError("must be a whole number")
    return _number(value)


class FP16(Block):
    """DeepSpeed key `fp16`: parameters in fp16 beside an fp32 master, and a scaled loss."""

    enabled: bool = False
    """Whether parameters, gradients and what is sent are fp16."""
    auto_cast: bool = False
    """Whether the floating tensors of a batch are cast to fp16 too."""
    loss_scale: Rate = 0.0
    """What the loss is multiplied by; 0 is dynamic."""
    initial_scale_power: Annotated[int, BeforeValidator(_exponent), Field(ge=0, le=126)] = 16
    """Dynamic: the first scale is two to this power."""
    loss_scale_window: Count = 1000
    """Dynamic: steps without overflow until the scale doubles."""
    hysteresis: Count = 2
    """Dynamic: overflows until the scale halves."""
    consecutive_hysteresis: bool = False
    """Dynamic: whether a step without overflow gives the hysteresis back."""
    min_loss_scale: Rate = 1.0
    """Dynamic: an overflow that would take the scale below is an error."""
    fp16_master_weights_and_grads: bool = False
    """Whether the fp16 parameters are the master; the optimizer state stays fp32."""

    def loss_scaling(self) -> LossScaling:
        return LossScaling(
            initial=self.loss_scale or 2.0**self.initial_scale_power, dynamic=self.loss_scale == 0,
            window=self.loss_scale_window, hysteresis=self.hysteresis, consecutive=self.consecutive_hysteresis,
            minimum=self.min_loss_scale,
        )  # fmt: skip


class BF16(Block):
    """DeepSpeed key `bf16` (or `bfloat16`): parameters in bf16 beside an fp32 master."""

    enabled: bool = False
    """Whether parameters, gradients and what is sent are bf16."""
    auto_cast: bool = False
    """Whether the floating tensors of a batch are cast to bf16 too. fzero's own key."""
    check_grad_overflow: bool = True
    """Whether a step whose gradient is not finite is skipped; false makes it an error."""
    bf16_master_weights_and_grads: bool = False
    """Whether the bf16 parameters are the master."""
    bf16_optimizer_states: bool = False
    """Whether the optimizer state is bf16 as well; only where the parameters are the master."""
    stochastic_rounding: bool = False
    """Whether a bf16 master, and its optimizer state, are rounded up or down at random, which keeps small updates on
    average. fzero's own key."""

    @model_validator(mode="after")
    def _needs_a_bf16_master(self) -> Self:
        for key in ("bf16_optimizer_states", "stochastic_rounding"):
            if getattr(self, key) and not self.bf16_master_weights_and_grads:
                raise ValueError(f"{key} needs bf16_master_weights_and_grads, got false; set it to true as well")
        return self


class TorchAutocast(Block):
    """DeepSpeed key `torch_autocast`: the forward runs under `torch.autocast`."""

    enabled: bool = False
    """Whether operations choose their precision by torch's lists."""
    dtype: Dtype = "bfloat16"
    """The lower precision; with fp16 the loss is scaled by the rules of `fp16`."""
    lower_precision_safe_modules: tuple[str, ...] = (
        "torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"
    )  # fmt: skip
    """Classes of modules whose own parameters are kept, sent and gathered in the lower precision, beside a master."""

    @model_validator(mode="after")
    def _is_lower(self) -> Self:
        if self.enabled and self.dtype == "float32":
            raise ValueError("dtype: must be 'bfloat16' or 'float16', got 'float32'; or set enabled to false")
        return self


class DataTypes(Block):
    """DeepSpeed key `data_types`, with the dtypes that it does not name. A value overrides what `fp16` or `bf16` say."""

    param_dtype: Dtype | None = None
    """Of all floating parameters; null is what `fp16` and `bf16` say, or each parameter's own."""
    grad_accum_dtype: Dtype | None = None
    """In which gradients are kept and added up over micro-steps; null is that of the parameters."""
    reduce_dtype: Dtype | None = None
    """In which gradients are sent; null is `communication_data_type`, or that of the parameters. fzero's own key."""
    master_dtype: Dtype | None = None
    """Of what the optimizer updates; null is fp32 where parameters are cast, else their own. fzero's own key."""
    optimizer_dtype: Dtype | None = None
    """Of the optimizer's state; null is that of the master. fzero's own key."""
    buffer_dtype: Dtype | None = None
    """Of the module's floating buffers; null leaves them alone."""


class ActivationCheckpointing(Block):
    """DeepSpeed key `activation_checkpointing`. There the block alone checkpoints nothing, and so it is without `every`."""

    every: Count | None = None
    """fzero's own key: every n-th unit that is one module keeps only its inputs for the backward, and runs again in it; 1
    is every unit. None checkpoints what `make_train_step(checkpoint=...)` names."""
    cpu_checkpointing: bool = False
    """The inputs that are kept wait in host memory; no effect when nothing is checkpointed, or on the CPU."""
    partition_activations: bool = False
    """Refused: there is no model-parallel axis to divide kept inputs over."""
    contiguous_memory_optimization: bool = False
    """Refused: it needs `partition_activations`."""

    @field_validator("partition_activations")
    @classmethod
    def _no_partitions(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "must be false: it divides the kept inputs over model-parallel ranks, and there is no model-parallel axis; "
                "set cpu_checkpointing instead to keep them in host memory"
            )
        return value

    @field_validator("contiguous_memory_optimization")
    @classmethod
    def _no_contiguous_buffers(cls, value: bool) -> bool:
        if value:
            raise ValueError("must be false: it needs partition_activations, which is refused; leave it out")
        return value


class BatchSizes(NamedTuple):
    """Samples per step of all ranks and per micro-step of one, None when no batch size is named; micro-steps per step."""

    train: int | None
    micro: int | None
    num_micro_steps: int


class Config(Block):
    """The whole configuration; read one with `Config.load`."""

    train_batch_size: Count | None = None
    """Samples per optimizer step, all ranks together."""
    train_micro_batch_size_per_gpu: Count | None = None
    """Samples per rank and micro-step."""
    gradient_accumulation_steps: Count | None = None
    """Micro-steps in one step, whose gradients are averaged before the one update; None is inferred, or 1."""
    optimizer: Optimizer = AdamW()
    """An optimizer by name with its hyper-parameters; upper and lower case do not matter."""
    scheduler: AnyScheduler | None = None
    """How the learning rate follows from the number of updates: DeepSpeed's schedules, or a class of
    `torch.optim.lr_scheduler`, with its parameters. None keeps the optimizer's lr."""
    gradient_clipping: Rate = 1.0
    """Largest global 2-norm of the gradient; 0 switches clipping off. The default is DeepSpeed 0.19's."""
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    """Whether gradients are averaged over the ranks or added up; `sum` not in stage 3, as in DeepSpeed."""
    gradient_norm_type: Literal[2, "inf"] = 2
    """Which norm of the gradient is clipped and reported: 2, or the largest absolute value. fzero's own key."""
    prescale_gradients: bool = False
    """True divides gradients by the ranks before they are added up, whatever `gradient_predivide_factor` says."""
    gradient_predivide_factor: Annotated[Number, Field(gt=0)] | None = None
    """What gradients are divided by before they are added up over the ranks, and the rest afterwards; null is the number
    of ranks, which cannot overflow (DeepSpeed's default is 1)."""
    communication_data_type: Dtype | None = None
    """In which dtype gradients are sent; null is that of the parameters."""
    data_types: DataTypes = DataTypes()
    """The dtypes one by one."""
    fp16: FP16 = FP16()
    """Mixed precision with fp16 and a scaled loss."""
    bf16: BF16 = Field(BF16(), alias="bfloat16")
    """Mixed precision with bf16."""
    torch_autocast: TorchAutocast = TorchAutocast()
    """Mixed precision by `torch.autocast`."""
    zero_optimization: ZeroOptimization = ZeroOptimization()
    """What is divided among the ranks, and how."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    """Which units keep only their inputs for the backward."""
    _notes: tuple[Note, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _no_sum_in_stage_3(self) -> Self:
        if self.gradient_allreduce_op == "sum" and self.zero_optimization.stage == 3:
            raise ValueError(
                "gradient_allreduce_op: must be 'mean' in stage 3, got 'sum'; multiply the loss by the ranks"
            )
        return self

    @model_validator(mode="after")
    def _one_precision(self) -> Self:
        enabled = [name for name in ("fp16", "bf16", "torch_autocast") if getattr(self, name).enabled]
        if len(enabled) > 1:
            raise ValueError(f"{enabled[0]}.enabled: excludes {enabled[1]}.enabled, got true for both; switch one off")
        given = self.data_types.param_dtype
        for name, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
            if name in enabled and given not in (None, dtype):
                raise ValueError(
                    f"data_types.param_dtype: must be {dtype!r} when {name} is enabled, got {given!r}; leave it out"
                )
        if None is not self.communication_data_type != self.data_types.reduce_dtype is not None:
            raise ValueError(
                f"data_types.reduce_dtype: is the same as communication_data_type, got {self.data_types.reduce_dtype!r} "
                f"beside {self.communication_data_type!r}; remove one of them"
            )
        return self

    @property
    def precision(self) -> Precision:
        """The dtypes that all of the keys together ask for."""
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
            chosen |= {
                "autocast": self.torch_autocast.dtype,
                "safe_modules": self.torch_autocast.lower_precision_safe_modules,
            }
        if self.communication_data_type:
            chosen["reduce_dtype"] = self.communication_data_type
        chosen |= self.data_types.model_dump(exclude_none=True)
        return Precision(**chosen)

    @property
    def casts_batch_to(self) -> str | None:
        """The dtype that the floating tensors of a batch are cast to (`auto_cast`)."""
        if self.fp16.enabled and self.fp16.auto_cast:
            return "float16"
        return "bfloat16" if self.bf16.enabled and self.bf16.auto_cast else None

    @property
    def scales_loss(self) -> bool:
        """Whether gradients may be those of a scaled loss."""
        return self.fp16.enabled or (self.torch_autocast.enabled and self.torch_autocast.dtype == "float16")

    @property
    def skips_overflow(self) -> bool:
        """Whether a step with a gradient that is not finite is skipped, and not an error."""
        return self.scales_loss or (self.bf16.enabled and self.bf16.check_grad_overflow)

    def loss_scaling(self) -> LossScaling:
        """The rules by which the loss is scaled; a constant 1 where it is not."""
        return self.fp16.loss_scaling() if self.scales_loss else LossScaling()

    def __eq__(self, other: object) -> bool:
        """Whether the values are the same, however they were spelt."""
        return self.__dict__ == other.__dict__ if isinstance(other, Config) else NotImplemented

    @property
    def notes(self) -> tuple[Note, ...]:
        """The keys that were read and change nothing, each with the reason."""
        return self._notes

    @property
    def conflicts(self) -> tuple[Note, ...]:
        """The keys that were given and are useless beside the others, or contradict them, each with the reason."""
        return conflicts(self, self._notes)

    @classmethod
    def load(cls, source: Mapping[str, Any] | str | Path | Config) -> Config:
        """Reads a mapping, the path of a JSON or Hjson file, or a urlsafe-base64 string of JSON.

        A value `"auto"` counts as left out: it is for a program that fills the file in. Warns (`ConfigWarning`) of each
        key that is not honoured yet where training is right without it.

        Raises:
            ConfigError: one line for every field that is wrong.

        >>> Config.load({"zero_optimization": {"stage": "2"}}).zero_optimization.stage
        2
        >>> Config.load({"optimizer": {"type": "AdanW"}})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        fzero.config_files.ConfigError: optimizer: no optimizer is named 'AdanW'; did you mean 'AdamW'? (known: Adam, ...)
        """
        if isinstance(source, Config):
            return source
        if isinstance(source, str | Path):
            source = read(source)
        if not isinstance(source, Mapping):
            raise ConfigError(
                f"Config.load: needs a mapping or the path of a JSON file, got {type(source).__name__}; pass one of these"
            )
        kept, notes, problems = set_aside(source, honoured=_own_keys(source))
        cfg, wrong = None, list(problems)
        try:
            cfg = cls.model_validate(kept)
        except ValidationError as error:
            wrong += map(_explain, error.errors())
        if cfg is None or wrong:
            raise ConfigError("\n".join(wrong)) from None
        for note in notes:
            if note.kind == "not yet":
                warnings.warn(f"{note.key}: {SAYS_NOT_YET}; {note.reason}", ConfigWarning, stacklevel=2)
        cfg._notes = notes
        return cfg

    def batch_sizes(self, world_size: int) -> BatchSizes:
        """The batch sizes on `world_size` ranks, the missing ones inferred: train = micro × accumulation × ranks.

        Raises:
            ConfigError: they do not fit each other and the world size.

        >>> Config.load({"train_batch_size": 24, "gradient_accumulation_steps": 3}).batch_sizes(world_size=4)
        BatchSizes(train=24, micro=2, num_micro_steps=3)
        """
        train, micro, steps = (
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
        )
        if train is None and micro is None:
            if steps not in (None, 1):
                raise ConfigError(
                    f"gradient_accumulation_steps: needs train_batch_size or train_micro_batch_size_per_gpu beside it, got "
                    f"{steps} alone; give one of the two"
                )
            return BatchSizes(None, None, 1)
        if steps is None:
            steps = train // (micro * world_size) if train and micro else 1
        if micro is None:
            assert train is not None
            micro = train // (steps * world_size)
        product = micro * steps * world_size
        if train not in (None, product) or not product:
            raise ConfigError(
                f"train_batch_size: must equal train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks, got "
                f"{train} for {micro} × {steps} × {world_size}; change one of them, or leave one out to have it inferred"
            )
        return BatchSizes(product, micro, steps)


def _explain(detail: ErrorDetails) -> str:
    """One line for one wrong field."""
    block: type[BaseModel] = Config
    location: list[str] = []
    for index, part in enumerate(map(str, detail["loc"])):
        if index == 1 and location[0] in ("optimizer", "scheduler"):  # the member of the union, not a key
            block = {**OPTIMIZERS, **TORCH_OPTIMIZERS, **SCHEDULERS}.get(part, TorchScheduler)
            continue
        location.append(part)
        if index == len(detail["loc"]) - 1:
            break
        found = [f.annotation for name, f in block.model_fields.items() if part in (name, f.alias)]
        annotation = found[0] if found else None
        block = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else block
    field = ".".join(location) or "config"
    if detail["type"] != "extra_forbidden":
        message = " ".join(
            detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be").split("\n")
        )
        given = "" if isinstance(detail["input"], Mapping) else f", got {detail['input']!r}"
        return f"{field}: {message}{given}" if location else message  # of the whole: the message names the keys
    key = location[-1]
    if key in block.model_fields:
        return f"{field}: stands beside {block.model_fields[key].alias!r}, which is the same; remove one of them"
    return unknown_key(field, tuple(block.model_fields))
