"""Models whose parameters are divided before an engine exists: `divide`, `gathered`,
`shaped`, `taken_over`.

`fzero.deepspeed.engine.constructors` divides a model while it is made. `initialize`
takes the shards over, one unit at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fzero.comms import collectives
from fzero.comms.axes import RankAxis
from fzero.comms.hangs.failures import store_barrier
from fzero.comms.records import Label
from fzero.config.config import ConfigError
from fzero.deepspeed.engine.absent_values import answer
from fzero.deepspeed.engine.divided import Divided, nothing
from fzero.deepspeed.engine.param_status import mark
from fzero.deepspeed.engine.param_views import PartitionedParameterError, engine_of, without_values
from fzero.model.tensor_uses import CASTS, called, cast_to
from fzero.runtime.step_spec import check_same

_LEAVING = Label("other", "at the end of GatheredParameters")
_NUMBERS = count()
"""The next `ds_id`: the same on all ranks, which divide parameters in one order."""


class Constructor(Protocol):
    """A module's constructor under way, which may use divided parameters."""

    module: nn.Module

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls a function of them."""


CONSTRUCTORS: list[Constructor] = []
"""Those of `fzero.deepspeed.engine.constructors`, innermost last."""


class Rules(NamedTuple):
    """How parameters are divided.

    Attributes:
        axis: the ranks.
        device: where full values are made, and shards stay unless `keep` moves them.
        dtype: the dtype of floating parameters; None keeps theirs.
        keep: moves a shard to where it stays.
    """

    axis: RankAxis
    device: torch.device
    dtype: torch.dtype | None = None
    keep: Callable[[Tensor], Tensor] = lambda shard_S: shard_S

    def __reduce__(self) -> tuple[Any, ...]:
        return nothing, ()


class DividedParameter(nn.Parameter):
    """A parameter that is divided and not gathered now: empty, with DeepSpeed's
    attributes (`ds_shape`, `ds_tensor`, …).
    """

    fzero_divided: Divided
    fzero_rules: Rules
    fzero_cast_of: DividedParameter
    """Of a result of `.half()` and the like: the parameter whose data it may become
    (`module.half()` does that).
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if CONSTRUCTORS:
            return CONSTRUCTORS[-1].call(func, args, kwargs or {})
        name, used = called(func)
        if name in CASTS and not torch.is_grad_enabled():  # module.to(...) or .half()
            to = cast_to(name, args, kwargs)
            if to is not None and to[1].type != "meta":
                return args[0]._cast(to[0])
        if (
            name == "__set__"
            and used == "data"
            and getattr(args[1], "fzero_cast_of", None) is args[0]
        ):
            param: Any = args[0]
            return _hold(param, args[1].fzero_divided, param.fzero_rules)
        return answer(func, args, kwargs or {}, _without_values)

    def as_subclass(self, cls: type) -> Any:  # type: ignore[override]
        raise _without_values("as_subclass")

    def __deepcopy__(self, memo: dict[int, Any]) -> DividedParameter:
        memo[id(self)] = twin = self._twin(self.dtype)
        return twin

    def _cast(self, dtype: torch.dtype) -> DividedParameter:
        """The parameter in a dtype, itself where it has that dtype; `Rules` say where
        its values are, on whatever device.
        """
        if dtype == self.dtype:
            return self
        twin = self._twin(dtype)
        twin.fzero_cast_of = self
        return twin

    def _twin(self, dtype: torch.dtype) -> DividedParameter:
        """Another parameter with the same values, each rank's shard in a dtype."""
        divided, rules = self.fzero_divided, self.fzero_rules
        with torch._C.DisableTorchFunctionSubclass():
            twin = nn.Parameter(torch.empty_like(self, dtype=dtype), self.requires_grad)
        shard_S = rules.keep(divided.shard_S.to(dtype, copy=True))
        _hold(twin, Divided(divided.shape, divided.axis, shard_S, divided.device), rules)
        return twin  # type: ignore[return-value]  # its class is set by _hold

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.fzero_divided.shape)}, dtype={self.dtype})"


def _without_values(use: str) -> PartitionedParameterError:
    return PartitionedParameterError(
        f"parameter: is divided over the ranks (zero.Init) and has no values here, and {use} needs "
        f"them; compute on all ranks inside `with fzero.deepspeed.zero.GatheredParameters(...)`, "
        f"or with the engine that initialize returns"
    )


def is_divided(param: object) -> bool:
    """Whether a parameter is divided and belongs to no engine, also while it is shown
    in full.
    """
    return isinstance(param, nn.Parameter) and param.__dict__.get("fzero_divided") is not None


def check_not_foreign(params: Iterable[Tensor]) -> None:
    """Raises a ConfigError for parameters that the package DeepSpeed has divided: their
    values are in its own objects.
    """
    for param in params:
        if hasattr(param, "ds_param_type"):
            raise ConfigError(
                "model: must not be divided by the package DeepSpeed, and is; make "
                "the model inside fzero.deepspeed.zero.Init, or run the whole script with `fzero "
                "run --as-deepspeed`"
            )


def divide(params: Iterable[nn.Parameter], rules: Rules) -> None:
    """Divides ordinary parameters: rank 0's values count. Others stay as they are:
    those of engines, on `meta`, without elements, and of other classes.

    *Collective:* every rank with the same parameters; sends each in full once, and
    before it the shapes.

    Raises:
        MismatchError: the ranks have parameters of other shapes or dtypes, on all of
            them.
    """
    own = [param for param in params if _is_to_divide(param)]
    if own:
        forms = {f"parameter {index}": f"{tuple(x.shape)} {x.dtype}" for index, x in enumerate(own)}
        check_same(
            rules.axis,
            {"zero.Init": forms},
            fix="make the same modules in the same order on every rank",
        )
    for param in own:
        dtype = rules.dtype if param.is_floating_point() else None
        full = param.data.to(rules.device, dtype)
        divided = Divided.of(full, rules.axis)
        divided.shard_S = rules.keep(divided.shard_S)
        _hold(param, divided, rules)


def show(params: Sequence[nn.Parameter]) -> None:
    """Gives divided parameters their values. *Collective:* every rank, in this order;
    each sends (W-1)/W of them.
    """
    pending = [param.fzero_divided.start_gather() for param in params]  # type: ignore[attr-defined]
    for param, started in zip(params, pending, strict=True):
        divided: Divided = param.fzero_divided  # type: ignore[attr-defined]
        param.__class__ = nn.Parameter  # type: ignore[assignment]
        param.data = divided.full(started)
        _mark(param, is_here=True)


def hide(params: Iterable[nn.Parameter], *, source: int | None) -> None:
    """Divides parameters again that `show` has shown, from the values that they have
    now.

    *Collective* with a source: every rank, in this order; each parameter is sent in
    full.

    Args:
        source: the rank whose values count; None keeps the shards as they were.
    """
    for param in params:
        divided, rules = param.fzero_divided, param.fzero_rules  # type: ignore[attr-defined]
        if source is not None:
            divided = Divided.of(param.data.to(rules.device), divided.axis, source=source)
            divided.shard_S = rules.keep(divided.shard_S)
        _hold(param, divided, rules)


@contextmanager
def gathered(params: Iterable[Tensor], modifier_rank: int | None) -> Iterator[None]:
    """Inside, divided parameters have their values; other tensors are ignored. See
    `GatheredParameters`.

    *Collective:* every rank, with the same parameters in any order.
    """
    given = {id(param): param for param in params if is_divided(param)}
    found: list[Any] = sorted(given.values(), key=lambda param: param.ds_id)
    if not found:
        yield
        return
    axis: RankAxis = found[0].fzero_divided.axis
    check_modifier(modifier_rank, axis)
    store_barrier("zero.GatheredParameters", axis)
    # others are shown by an outer one
    own = [param for param in found if isinstance(param, DividedParameter)]
    show(own)
    before = [fingerprint(param.data) for param in found] if modifier_rank is None else []
    try:
        yield
    except BaseException:
        hide(own, source=None)
        raise
    if modifier_rank is None:
        now = [fingerprint(param.data) for param in found]
        changed = [
            f"of ds_id {param.ds_id}"
            for param, a, b in zip(found, before, now, strict=True)
            if a != b
        ]
        hide(own, source=None)
        refuse_changes(changed, axis)
        return
    check_forms([(param.data, param.fzero_divided.shape) for param in found], axis)
    mine = {id(param) for param in own}
    for param in found:
        if id(param) in mine:
            hide([param], source=modifier_rank)
        else:
            collectives.broadcast(param.data, axis, source=modifier_rank, label=_LEAVING)


def check_modifier(rank: int | None, axis: RankAxis) -> None:
    """Raises unless `modifier_rank` is None or one of the ranks."""
    if rank is not None and rank not in range(axis.size):
        raise ValueError(
            f"GatheredParameters: modifier_rank must be None or a rank from 0 to {axis.size - 1}, "
            f"got {rank!r}; pass the rank whose values all ranks then get"
        )


def check_forms(pairs: Sequence[tuple[Tensor, torch.Size]], axis: RankAxis) -> None:
    """Raises on all ranks if a gathered parameter has got another shape on one, or a
    dtype of its own. *Collective:* every rank.

    Args:
        pairs: each parameter's values now, and its shape.
    """
    forms = [(tuple(now.shape), str(now.dtype)) for now, _ in pairs]
    world = collectives.exchange(forms, axis, label=_LEAVING)
    for rank, theirs in enumerate(world):
        for (shape, dtype), (_, own), (_, first) in zip(theirs, pairs, world[0], strict=True):
            if tuple(shape) != tuple(own):
                raise RuntimeError(
                    f"GatheredParameters: a parameter must keep its shape {tuple(own)}, and has "
                    f"got {tuple(shape)} on rank {rank}; assign a new nn.Parameter to the module "
                    f"in its place"
                )
            if dtype != first:
                raise RuntimeError(
                    f"GatheredParameters: a parameter must have one dtype on all ranks, and is "
                    f"{first} on rank 0 and {dtype} on rank {rank}; write to it with copy_, which "
                    f"keeps its dtype"
                )


def refuse_changes(changed: Sequence[str], axis: RankAxis) -> None:
    """Raises on all ranks if one of them has changed parameters that are equal on all.
    *Collective:* every rank.

    Args:
        changed: the names of those that this rank has changed.
    """
    for rank, of_rank in enumerate(collectives.exchange(list(changed), axis, label=_LEAVING)):
        if of_rank:
            raise RuntimeError(
                f"GatheredParameters: {of_rank[0]!r} must not change while modifier_rank is None, "
                f"and was changed on rank {rank}; pass modifier_rank={rank}, whose values all "
                f"ranks then get"
            )


def fingerprint(value: Tensor) -> tuple[Any, ...]:
    """A checksum that changes when an element changes, or two are exchanged."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = value.detach().contiguous().view(-1).view(kinds[value.element_size()]).to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    return tuple(value.shape), int(bits.sum()), int((bits * places).sum())


@contextmanager
def shaped(model: nn.Module) -> Iterator[list[Any]]:
    """Inside, divided parameters have their shapes and no values; afterwards they are
    divided as before. Yields them.
    """
    found: list[Any] = [
        param for param in model.parameters() if isinstance(param, DividedParameter)
    ]
    for param in found:
        nothing = without_values(param.fzero_divided.shape, param.dtype, param.device)
        param.__class__ = nn.Parameter
        param.data = nothing
    try:
        yield found
    finally:
        hide(filter(is_divided, found), source=None)


@contextmanager
def taken_over(model: nn.Module) -> Iterator[None]:
    """Inside, divided parameters have their shapes and no values, so that a step can be
    planned; its first state gathers them unit by unit. Afterwards they belong to the
    engine; after an error they are divided as before.
    """
    if any(
        is_divided(param) and not isinstance(param, DividedParameter)
        for param in model.parameters()
    ):
        raise RuntimeError(
            "initialize: must not be called inside GatheredParameters; call it after"
        )
    with shaped(model) as found:
        yield
        for param in found:
            del param.__dict__["fzero_divided"], param.__dict__["fzero_rules"]


def _is_to_divide(param: nn.Parameter) -> bool:
    is_plain = type(param) is nn.Parameter and not (is_divided(param) or param.is_meta)
    return is_plain and param.numel() > 0 and engine_of(param) is None


def _hold(param: nn.Parameter, divided: Divided, rules: Rules) -> None:
    """Makes a parameter an empty one with a shard."""
    param.__class__ = nn.Parameter
    param.data = torch.empty(0, dtype=divided.shard_S.dtype, device=divided.device)
    number = param.__dict__.get("ds_id")
    param.__dict__ |= {
        "fzero_divided": divided,
        "fzero_rules": rules,
        "ds_id": next(_NUMBERS) if number is None else number,
    }
    param.__class__ = DividedParameter
    _mark(param, is_here=False)


def _mark(param: nn.Parameter, *, is_here: bool) -> None:
    divided: Divided = param.fzero_divided  # type: ignore[attr-defined]
    mark(param, param.ds_id, tuple(divided.shape), divided.own, is_here=is_here, persists=False)  # type: ignore[attr-defined]
