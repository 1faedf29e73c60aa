"""The optimizers of a configuration: their names, their hyper-parameters, and the
transforms that they make.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union

from pydantic import BeforeValidator, ConfigDict, Field, create_model, model_validator

import fzero.optim as optim
from fzero.config.fields import Beta, Block, Count, Number, Rate
from fzero.config.optimizer_block import (
    AdamW as AdamW,
    MomentParams,
    OptimizerBlock as OptimizerBlock,
    UpdateRules,
)
from fzero.optim.torch_classes import classes, find
from sharding.owners import Matrices, matrices_of

if TYPE_CHECKING:
    from fzero.optim.transforms import Transform
    from sharding import FlatLayout


class AdamParams(MomentParams):
    """`optimizer.params` of Adam."""

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
                f"nesterov needs momentum > 0 and dampening = 0, got {self.momentum} and "
                f"{self.dampening}; change these"
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


class LambParams(MomentParams):
    """`optimizer.params` of Lamb; defaults are DeepSpeed's."""

    max_coeff: Rate = 10.0
    """The largest trust ratio."""
    min_coeff: Rate = 0.01
    """The smallest trust ratio."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_coeff > self.max_coeff:
            raise ValueError(
                f"min_coeff must be at most max_coeff, got {self.min_coeff} > {self.max_coeff}; "
                f"exchange them"
            )
        return self


class AdafactorParams(Block):
    """`optimizer.params` of Adafactor; names and defaults are torch's."""

    lr: Rate = 1e-2
    beta2_decay: Annotated[Number, Field(le=0)] = -0.8
    eps: tuple[Rate | None, Rate] = (None, 1e-3)
    """Lower bounds of the second moment's root (None is the dtype's precision) and of
    the parameter's root mean square.
    """
    d: Annotated[Number, Field(ge=1)] = 1.0
    """Directions with a larger root mean square are scaled down to this one."""
    weight_decay: Rate = 0.0


class MuonParams(Block):
    """`optimizer.params` of Muon; names and defaults are DeepSpeed's. A schedule moves
    all three rates in proportion.
    """

    lr: Rate = 0.02
    muon_lr: Rate | None = None
    """The rate of the matrices; None is lr."""
    momentum: Beta = 0.95
    weight_decay: Rate = 0.0
    """Decoupled weight decay of all parameters."""
    ns_steps: Count = 5
    ns_method: Literal["standard", "gram"] = "standard"
    """The Newton-Schulz steps: on the matrix in bf16, as torch.optim.Muon; or on its
    product with itself in fp16 (fp32 on the CPU), which is less work for long matrices.
    DeepSpeed's default is \"gram\"; the two differ in rounding only."""
    nesterov: bool = True
    adam_lr: Rate | None = None
    """The rate of all other parameters; None is lr. 3e-4 when neither is given."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Rate = 1e-10

    @model_validator(mode="before")
    @classmethod
    def _default_adam_lr(cls, data: Any) -> Any:
        is_given = isinstance(data, Mapping) and any(
            data.get(key, "auto") != "auto" for key in ("lr", "adam_lr")
        )
        return {**data, "adam_lr": 3e-4} if isinstance(data, Mapping) and not is_given else data

    @model_validator(mode="after")
    def _in_proportion(self) -> Self:
        if self.lr == 0 and (self.muon_lr or self.adam_lr):
            raise ValueError(
                f"lr must not be 0 beside muon_lr or adam_lr, got {self.muon_lr} and "
                f"{self.adam_lr}; give the lr that a schedule starts from"
            )
        return self


def _adam(block: OptimizerBlock, values: dict[str, Any], kind: str) -> Transform:
    return (optim.adamw if values.pop("adam_w_mode") else optim.adam)(**values)


class Adam(OptimizerBlock):
    rules: ClassVar = UpdateRules(_adam)
    type: Literal["Adam"] = "Adam"
    params: AdamParams = AdamParams()


class SGD(OptimizerBlock):
    type: Literal["SGD"] = "SGD"
    params: SGDParams = SGDParams()


class Adagrad(OptimizerBlock):
    type: Literal["Adagrad"] = "Adagrad"
    params: AdagradParams = AdagradParams()


class Lion(OptimizerBlock):
    type: Literal["Lion"] = "Lion"
    params: LionParams = LionParams()


class Lamb(OptimizerBlock):
    rules: ClassVar = UpdateRules(of_wholes=frozenset({""}))
    type: Literal["Lamb"] = "Lamb"
    params: LambParams = LambParams()


def _rule_of_adafactor(name: str, shape: tuple[int, ...]) -> str:
    return "matrix" if len(shape) >= 2 else "vector"


class Adafactor(OptimizerBlock):
    rules: ClassVar = UpdateRules(
        of=_rule_of_adafactor, of_wholes=frozenset({"", "matrix", "vector"})
    )
    type: Literal["Adafactor"] = "Adafactor"
    params: AdafactorParams = AdafactorParams()


def _rule_of_muon(name: str, shape: tuple[int, ...]) -> str:
    """Muon for matrices without embeddings and the output layer, Adam for the rest, as
    in DeepSpeed.
    """
    is_other = any(x in name.lower() for x in ("embed", "lm_head"))
    return "muon" if len(shape) >= 2 and not is_other else "adam"


def _muon(block: Muon, values: dict[str, Any], kind: str) -> Transform:
    own_lr, now, configured = values[f"{kind}_lr"], values["lr"], block.params.lr
    lr = now if own_lr is None else own_lr * (now / configured if configured else 1.0)
    if kind == "adam":
        return optim.adamw(lr, **{key: values[key] for key in ("betas", "eps", "weight_decay")})
    taken = ("momentum", "weight_decay", "ns_steps", "ns_method", "nesterov", "contents")
    return optim.muon(lr, **{key: values[key] for key in taken})


def _matrices_of_muon(block: Muon, layout: FlatLayout, kind: str) -> Matrices | None:
    dtype = "bfloat16" if block.params.ns_method == "standard" else "float32"
    return Matrices(matrices_of(layout), (dtype,), dtype) if kind == "muon" else None


class Muon(OptimizerBlock):
    rules: ClassVar = UpdateRules(
        _muon, _rule_of_muon, ("muon", "adam"), frozenset({"muon"}), _matrices_of_muon
    )
    type: Literal["Muon"] = "Muon"
    params: MuonParams = MuonParams()


# Pydantic reads docstrings of fields from the source, which a model made at run time does not have.
_NO_SOURCE = ConfigDict(use_attribute_docstrings=False)


class _TorchParams(Block):
    model_config = _NO_SOURCE


def _torch(block: OptimizerBlock, values: dict[str, Any], kind: str) -> Transform:
    return optim.torch_optim.torch_transform(find(block.type), values)


class TorchOptimizer(OptimizerBlock):
    """Any other `type` is a class of `torch.optim`, with its parameters; refused with
    the reason where it is not elementwise.
    """

    model_config = _NO_SOURCE
    is_made_before_trace: ClassVar[bool] = True
    rules: ClassVar = UpdateRules(_torch)

    @model_validator(mode="after")
    def _works_on_shards(self) -> Self:
        optim.torch_optimizer(self.type, **self.params.model_dump())
        return self


OPTIMIZERS: dict[str, type[OptimizerBlock]] = {
    cls.__name__: cls for cls in (Adam, AdamW, SGD, Adagrad, Lion, Lamb, Adafactor, Muon)
}


def _torch_block(name: str, cls: type) -> type[TorchOptimizer]:
    """The block of a class of `torch.optim`, made from its signature without the
    parameters that select a kernel.
    """
    fields: dict[str, Any] = {}
    for field, parameter in inspect.signature(cls).parameters.items():
        if field not in ("params", "foreach", "fused", "capturable", "differentiable"):
            default = parameter.default
            kind: Any = Number if isinstance(default, int | float) else Any
            kind = {"lr": Rate, "betas": tuple[Beta, Beta]}.get(
                field, bool if isinstance(default, bool) else kind
            )
            fields[field] = (kind, default)
    about = f"`optimizer.params` of {name}."
    params: Any = create_model(f"{name}Params", __base__=_TorchParams, __doc__=about, **fields)
    literal: Any = Literal[name]
    return create_model(
        name, __base__=TorchOptimizer, type=(literal, name), params=(params, params())
    )


TORCH_OPTIMIZERS: dict[str, type[TorchOptimizer]] = {
    name: _torch_block(name, cls) for name, cls in classes().items() if name not in OPTIMIZERS
}
_BY_LOWER_NAME = {name.lower(): name for name in (*OPTIMIZERS, *TORCH_OPTIMIZERS)}


def _optimizer_name(data: Any) -> Any:
    """The block with the optimizer's name in the spelling used here: DeepSpeed ignores
    case.
    """
    if not isinstance(data, Mapping):
        return data
    given = data.get("type", "AdamW")
    name = _BY_LOWER_NAME.get(str(given).lower())
    if name is None and str(given).lower() in NOT_YET_OPTIMIZERS:
        raise ValueError(
            f"fzero knows DeepSpeed's {given!r} and does not honour it yet; use 'AdamW', 'Lamb' or "
            f"'Muon'"
        )
    if name is None:
        usable = {
            lower: name
            for lower, name in _BY_LOWER_NAME.items()
            if name in OPTIMIZERS or _works(name)
        }
        nearest = difflib.get_close_matches(str(given).lower(), usable, n=1, cutoff=0.0)[0]
        known = f"{', '.join(OPTIMIZERS)} and elementwise classes of torch.optim"
        raise ValueError(
            f"no optimizer is named {given!r}; did you mean {usable[nearest]!r}? (known: {known})"
        )
    return {**data, "type": name}


NOT_YET_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb", "muadam", "muadamw", "musgd")


def _works(name: str) -> bool:
    """Whether a class of torch.optim works on shards."""
    try:
        optim.torch_optimizer(name)
    except ValueError:
        return False
    return True


def own_keys(source: Mapping[str, Any]) -> frozenset[str]:
    """The dotted names of the hyper-parameters of the named optimizer, some of which no
    other optimizer honours.
    """
    block = source.get("optimizer")
    name = (
        _BY_LOWER_NAME.get(str(block.get("type", "AdamW")).lower())
        if isinstance(block, Mapping)
        else None
    )
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
