"""Parameter groups, and the optimizer of each: the configuration's, or a user's
transform.

The entries of `param_groups` are groups 1, 2, … A parameter is in the first group that
selects it. Group 0 holds the rest, and has the configuration's optimizer (or
`transform=`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

import fzero.optim as optim
from fzero.common.arguments import refuse, shown
from fzero.common.random_states import seed
from fzero.config.config import Config, ConfigError
from fzero.config.optimizer_block import OptimizerBlock, with_overrides
from fzero.optim.fragments import ByContents
from fzero.optim.transforms import Transform

if TYPE_CHECKING:
    from fzero.optim.fragments import ShardContents
    from sharding import FlatLayout
    from sharding.owners import Matrices

ParamGroup = Mapping[str, Any]
"""Hyper-parameters that differ from the configuration's, or a `"transform"` (see
`OwnTransform`) with or without an `"lr"`. The key `"params"` selects the parameters: a
regular expression that is searched for in a name, or a function of name and parameter.
"""

OwnTransform = Transform | Callable[[Any], Transform]
"""A user's transform, or a function of the learning rate that makes one. It must be
elementwise, because it works on shards; or made by `fzero.optim.matrix_transform`.

The learning rate is a number, or a 0-d tensor if the whole step is compiled."""


@dataclass(frozen=True, slots=True)
class UserTransform:
    """A user's transform instead of an optimizer of the configuration.

    Attributes:
        field: the argument that it was given in, for error messages.
        make: the transform, or the function of the learning rate that makes it.
        lr: the learning rate where no schedule sets another.
    """

    field: str
    make: OwnTransform
    lr: float
    is_made_before_trace: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.make, Transform) and not callable(self.make):
            raise ConfigError(
                f"{self.field}: must be a Transform or a function of the learning rate that makes "
                f"one, got {self.make!r}; see fzero.optim.transforms"
            )

    def check(self) -> None:
        """Raises a ConfigError unless it makes an elementwise transform."""
        if isinstance(self.make, ByContents):
            try:
                self.make.check(self.field)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            return
        try:
            made = self.transform()
        except TypeError as error:  # a class of torch.optim, say, which takes parameters first
            raise ConfigError(
                f"{self.field}: must make a Transform of a learning rate, got {shown(self.make)}, "
                f"which raises {error}; pass lambda lr: fzero.optim.torch_optimizer(cls, lr=lr) "
                f"for a class of torch.optim, or see fzero.optim.transforms"
            ) from error
        if not isinstance(made, Transform):
            raise ConfigError(
                f"{self.field}: must make a Transform of a learning rate, got {made!r}; return "
                f"one, see fzero.optim.transforms"
            )
        try:
            optim.check_elementwise(made, name=self.field)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def __repr__(self) -> str:
        return f"UserTransform({self.field!r}, lr={self.lr})"  # the same on all ranks

    @property
    def outcome(self) -> str:
        """The result of three updates of fixed numbers as text, rounded to three
        digits. Ranks compare their transforms by it.
        """
        param, grads = optim.elementwise.trial_tensors(
            torch.float32, optim.elementwise.Trial(numel=32, num_updates=3)
        )
        transform = self.transform()
        state = transform.init(param)
        with torch.random.fork_rng(devices=[]):
            seed(0, torch.device("cpu"))
            for grad in grads:
                _, param, state = transform.update(grad, param, state)
        return f"{self.field} at lr={self.lr}: {', '.join(f'{x:.2e}' for x in param[::8].tolist())}"

    @property
    def is_fixed(self) -> bool:
        """Whether it was given as a transform, which ignores the learning rate of the
        step.
        """
        return isinstance(self.make, Transform)

    def is_elementwise(self, kind: str) -> bool:
        """Whether it updates shards without regard to parameters."""
        return self.make.is_elementwise(kind) if isinstance(self.make, ByContents) else True

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        """The update rule of a parameter."""
        return self.make.kind_of(name, shape) if isinstance(self.make, ByContents) else ""

    def matrices(self, layout: FlatLayout, kind: str) -> Matrices | None:
        """As for `OptimizerBlock.matrices`."""
        return self.make.matrices(layout, kind) if isinstance(self.make, ByContents) else None

    def transform(
        self,
        *,
        lr: float | Tensor | None = None,
        contents: ShardContents | None = None,
        kind: str = "",
        **_: Any,
    ) -> Transform:
        """The transform at a learning rate. The other arguments of
        `OptimizerBlock.transform` have no effect.
        """
        if isinstance(self.make, ByContents):
            return self.make(self.lr if lr is None else lr, contents, kind)
        return (
            self.make
            if isinstance(self.make, Transform)
            else self.make(self.lr if lr is None else lr)
        )


def optimizers_of(
    cfg: Config, param_groups: Sequence[ParamGroup] = (), transform: OwnTransform | None = None
) -> list[OptimizerBlock | UserTransform]:
    """The optimizer of each group. Group 0 holds the parameters that match no group;
    its optimizer is `transform`, or the configuration's.

    Raises:
        ConfigError: a group without `"params"`, or with a hyper-parameter that the
            optimizer does not have.
    """
    lr = cfg.optimizer.lr
    first = cfg.optimizer if transform is None else UserTransform("transform", transform, lr)
    optimizers: list[OptimizerBlock | UserTransform] = [first]
    for index, group in enumerate(param_groups):
        if not isinstance(group.get("params"), str) and not callable(group.get("params")):
            raise ConfigError(
                f"param_groups[{index}].params: must be a regular expression or a function of name "
                f"and parameter, got {group.get('params')!r}; say which parameters the group holds"
            )
        overrides = {key: value for key, value in group.items() if key != "params"}
        field = f"param_groups[{index}]"
        own = overrides.pop("transform", transform)
        if own is None:
            optimizers.append(with_overrides(cfg.optimizer, overrides, field))
            continue
        optimizers.append(UserTransform(f"{field}.transform", own, overrides.pop("lr", lr)))
        if overrides:
            raise ConfigError(
                f"{field}.{min(overrides)}: a group of a transform has 'params', 'transform' and "
                f"'lr' only, got {overrides[min(overrides)]!r}; make the transform with it"
            )
    return optimizers


def check_groups(param_groups: object) -> None:
    """Raises a ValueError unless `param_groups` is a sequence of mappings."""
    fix = 'pass [{"params": r"norm|bias", "weight_decay": 0.0}], say'
    if isinstance(param_groups, str | Mapping) or not isinstance(param_groups, Sequence):
        refuse("param_groups", "a list of mappings", param_groups, fix)
    for index, group in enumerate(param_groups):
        if not isinstance(group, Mapping):
            refuse(f"param_groups[{index}]", "a mapping", group, fix)


def check_params(
    owners: Mapping[str, nn.Parameter], trained: Collection[str], param_groups: Sequence[ParamGroup]
) -> None:
    """Raises for a trained parameter that is complex, and for a group whose `"params"`
    select none.
    """
    for name, param in owners.items():
        if name in trained and param.is_complex():
            raise ValueError(
                f"parameter {name!r}: must be real to be trained, got {param.dtype}; register its "
                f"real and imaginary parts and join them in the forward with torch.complex"
            )
    for index, group in enumerate(param_groups):
        try:
            taken = any(group_of(name, param, [group]) for name, param in owners.items())
        except re.error as error:
            raise ConfigError(
                f"param_groups[{index}].params: must be a regular expression, got "
                f"{group['params']!r}: {error}; mend it"
            ) from None
        if not taken:
            names = ", ".join(list(owners)[:4])
            raise ConfigError(
                f"param_groups[{index}].params: must select a parameter of the model and selects "
                f"none, got {group['params']!r}; names look like {names}"
            )


def group_of(name: str, param: nn.Parameter, param_groups: Sequence[ParamGroup]) -> int:
    """The number of the first group that selects the parameter, counted from 1; 0 where
    none does.
    """
    for index, group in enumerate(param_groups, 1):
        match = group["params"]
        if re.search(match, name) if isinstance(match, str) else match(name, param):
            return index
    return 0
