"""`OptimizerBlock`: the base of the optimizers of a configuration, and AdamW, the
default. The others are in `optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import ValidationError
from torch import Tensor

import fzero.optim as optim
from fzero.config.fields import Beta, Block, ConfigError, Rate, problems_of

if TYPE_CHECKING:
    from fzero.optim.fragments import ShardContents
    from fzero.optim.transforms import Transform
    from sharding import FlatLayout
    from sharding.owners import Matrices


class MomentParams(Block):
    """The hyper-parameters of optimizers with two moments; defaults are torch's."""

    lr: Rate = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: Rate = 0.0
    bias_correction: bool = True
    """Whether the moments are corrected for their start at zero, as in the paper."""


class AdamWParams(MomentParams):
    """`optimizer.params` of AdamW; defaults are torch's."""

    weight_decay: Rate = 0.01
    adam_w_mode: bool = True
    """Has no effect, as in DeepSpeed: AdamW always decouples the weight decay."""


def _of_own_name(block: OptimizerBlock, values: dict[str, Any], kind: str) -> Transform:
    made: Transform = getattr(optim, block.type.lower())(**values)
    return made


class UpdateRules(NamedTuple):
    """How an optimizer updates parameters. Some have several rules, by name; each rule
    has flat buffers of its own.
    """

    make: Callable[[Any, dict[str, Any], str], Transform] = _of_own_name
    """The transform of a block, its hyper-parameters and an update rule."""
    of: Callable[[str, tuple[int, ...]], str] = lambda name, shape: ""
    """The update rule of a parameter, by its name and shape."""
    names: tuple[str, ...] = ()
    """The update rules, one of which a transform must get."""
    of_wholes: frozenset[str] = frozenset()
    """The update rules that look at full parameters."""
    matrices: Callable[[Any, FlatLayout, str], Matrices | None] = lambda block, layout, kind: None
    """The matrices of a block, a layout and an update rule that each have one owner."""


class OptimizerBlock(Block):
    """The base of all optimizers: a name, hyper-parameters, and the transform that they
    make.
    """

    is_made_before_trace: ClassVar[bool] = False
    """Whether its transform is made before a trace: it may check the rate or try a
    step, and a trace has no numbers.
    """

    rules: ClassVar[UpdateRules] = UpdateRules()

    type: str
    params: Any

    @property
    def lr(self) -> float:
        return float(self.params.lr)

    def is_elementwise(self, kind: str) -> bool:
        """Whether the update rule `kind` treats each element separately."""
        return kind not in self.rules.of_wholes

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        """The update rule of a parameter."""
        return self.rules.of(name, shape)

    def matrices(self, layout: FlatLayout, kind: str) -> Matrices | None:
        """The matrices of a flat buffer that are computed by one owner each, if any."""
        return self.rules.matrices(self, layout, kind)

    def transform(
        self,
        *,
        lr: float | Tensor | None = None,
        momentum: float | Tensor | None = None,
        contents: ShardContents | None = None,
        kind: str = "",
    ) -> Transform:
        """The transform of a flat buffer, whose parameters have one update rule.

        Args:
            lr: replaces the configured one, unless None. A 0-d tensor may change
                between updates.
            momentum: replaces the first beta, likewise.
            contents: the parameters in the flat tensor, for optimizers that look at
                full parameters; others do not need it.
            kind: the update rule, see `kind_of`.
        """
        values = self.params.model_dump()
        if lr is not None:
            values["lr"] = lr
        if momentum is not None:
            values["betas"] = (momentum, values["betas"][1])
        self._check(kind, contents)
        if not self.is_elementwise(kind):
            values["contents"] = contents
        return self.rules.make(self, values, kind)

    def _check(self, kind: str, contents: ShardContents | None) -> None:
        if self.rules.names and kind not in self.rules.names:
            raise ValueError(
                f"{self.type}: the kind of parameters must be "
                f"{' or '.join(map(repr, self.rules.names))}, got {kind!r}; ask kind_of"
            )
        if contents is None and not self.is_elementwise(kind):
            raise ValueError(
                f"{self.type}: looks at full parameters, so that its transform needs contents, got "
                f"None; pass them"
            )


def _adamw(block: OptimizerBlock, values: dict[str, Any], kind: str) -> Transform:
    return optim.adamw(**{key: value for key, value in values.items() if key != "adam_w_mode"})


class AdamW(OptimizerBlock):
    rules: ClassVar = UpdateRules(_adamw)
    type: Literal["AdamW"] = "AdamW"
    params: AdamWParams = AdamWParams()


def with_overrides(
    optimizer: OptimizerBlock, overrides: Mapping[str, Any], field: str
) -> OptimizerBlock:
    """The optimizer with other hyper-parameters, checked like those of the
    configuration.

    Raises:
        ConfigError: a hyper-parameter that the optimizer does not have, or a wrong
            value; begins with `field`.
    """
    kind = type(optimizer.params)
    try:
        params = kind.model_validate({**optimizer.params.model_dump(), **overrides})
        return type(optimizer).model_validate(
            {"type": optimizer.type, "params": params.model_dump()}
        )
    except ValidationError as error:
        known = ", ".join(kind.model_fields)
        raise ConfigError(
            "\n".join(problems_of(error, field)) + f"; {optimizer.type} has: {known}"
        ) from None
