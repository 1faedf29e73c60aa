"""`LiveParams`: a module's parameters while an engine trains it, which are views of the
state and own no memory.

A parameter that this rank holds in full (stages 0 to 2, and persistent ones in stage 3)
is a view of the state's flat buffer, and is read like any other. A sharded one has
dtype and device, but no elements, as in DeepSpeed: its shape is `ds_shape`,
`state_dict()` has an empty tensor for it (`absent_values`), and computing with either
raises an error with a fix. The parameter objects do not change, so a script's own
references to them (in an optimizer, in a list) are still valid.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fzero.deepspeed.engine.absent_values import answer
from fzero.deepspeed.engine.param_status import mark, unmark
from fzero.model.errors import not_trained
from fzero.model.module_index import ModuleIndex
from fzero.model.own_params import is_bound, with_present
from fzero.model.tensor_uses import ALLOWED, SHAPES, called, is_plain
from fzero.plans.plan import Plan
from sharding import Sharded
from sharding.views import unflatten


class PartitionedParameterError(RuntimeError):
    """A parameter's values were used where this rank does not have them."""


class PartitionedParameter(nn.Parameter):
    """A parameter that is sharded over the ranks: dtype and device, but no elements."""

    fzero_name: str
    fzero_plain: nn.Parameter
    """A plain one of the full shape: for torch.compile, which inspects parameters that
    a call replaces, and for plans.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (name, used), kwargs = called(func), kwargs or {}
        given = (*args, *kwargs.values())
        if any(map(is_bound, given)):
            if used in SHAPES:
                args = tuple(getattr(x, "fzero_plain", x) for x in args)
            elif (used not in ALLOWED or used == "detach") and not is_plain(name, used):
                return with_present(func, args, kwargs)
        found = (x.fzero_name for x in given if isinstance(x, PartitionedParameter))
        return answer(func, args, kwargs, partial(_without_values, next(found, "")))

    def as_subclass(self, cls: type) -> Any:  # type: ignore[override]
        raise _without_values(self.fzero_name, "as_subclass")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}({self.fzero_name!r}, "
            f"shape={tuple(self.fzero_plain.shape)}, dtype={self.dtype})"
        )


def _without_values(name: str, use: str) -> PartitionedParameterError:
    return PartitionedParameterError(
        f"parameter {name!r}: is sharded over the ranks and has no values here, and {use} needs "
        f"them; call its module on all ranks, compute inside the engine's forward, or inside `with "
        f"fzero.deepspeed.zero.GatheredParameters(...)`; engine.module_state_dict() returns all "
        f"weights, engine.gathered() too, for torch.func.functional_call, and "
        f"engine.save_16bit_model writes them"
    )


def without_values(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of a shape with the memory of one element, which is no number where it
    can be.
    """
    one = torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
    return one.expand(tuple(shape))


class LiveParams:
    """The parameters of a module, as views of those of a state.

    Attributes:
        own: the module's parameters by their first names.
        shown: the names of those that have other values than the state's at present
            (`gathered`, `GatheredParameters`).
    """

    def __init__(self, model: nn.Module, plan: Plan, rank: int) -> None:
        self.model, self.plan, self._rank = model, plan, rank
        self._slots: list[tuple[nn.Module, str, str]] = []
        self.own: dict[str, nn.Parameter] = {}
        self.shown: set[str] = set()
        for full, module, key, kind in ModuleIndex.of(model).slots("_parameters"):
            if (param := getattr(module, kind)[key]) is not None:
                name = plan.aliases.get(full, full)
                if name not in self.own:  # on `meta` it cannot hold values
                    new = nn.Parameter(torch.empty(0), param.requires_grad)
                    self.own[name] = new if param.is_meta else param
                module._parameters[key] = self.own[name]
                self._slots.append((module, key, name))
        self._names = {id(param): name for name, param in self.own.items()}
        self._indices = {name: index for index, name in enumerate(self.own)}
        self._own: dict[str, Tensor | None] = {}  # this rank's elements, 1-d; None in files
        self.follow(plan)
        for param in self.own.values():
            param.grad = None
        # values of `show`: address, dtype, version
        self._given: dict[str, tuple[int, torch.dtype, int]] = {}
        self._modules = list(model.modules())
        self._children = self._look_at_modules()

    def _look_at_modules(self) -> list[int]:
        """The children of every module, and how many parameters it has: a new one is in
        none of `_slots`.
        """
        children = chain.from_iterable(map(dict.values, map(attrgetter("_modules"), self._modules)))
        return [*map(id, children), *map(len, map(attrgetter("_parameters"), self._modules))]

    def check_modules(self) -> None:
        """Raises where a script has replaced, moved, added or removed parameters, or
        modules with parameters.
        """
        if self._look_at_modules() == self._children:
            return
        now = {
            n: x for n, x in self.model.named_parameters(remove_duplicate=False) if x is not None
        }
        for name in {**now, **self.own}:
            if now.get(name) is not self.own.get(self.plan.aliases.get(name, name)):
                raise ValueError(
                    f"parameter {name!r}: must be the one that was passed to initialize, and it or "
                    f"its module was replaced, moved, added or removed since; its new parameters "
                    f"would not be trained (in DeepSpeed, too); change the model before "
                    f"initialize, or initialize another engine with the changed model"
                )
        self._modules = list(self.model.modules())
        self._children = self._look_at_modules()

    def follow(self, plan: Plan) -> None:
        """Switches to states of another plan of the same model."""
        self.plan = plan
        self._masters = {n for b in plan.flat_buffers if b.has_master for n in b.layout.names}
        self._sharded = {
            n for b in plan.flat_buffers if b.flow.gathers_over for n in b.layout.names
        }

    def follow_flags(self) -> None:
        """Passes the present `requires_grad` flags on to the parameters that
        torch.compile sees.
        """
        for param in self.own.values():
            if isinstance(param, PartitionedParameter):
                param.fzero_plain.requires_grad_(param.requires_grad)

    def look_at(self, params: Mapping[str, Tensor], device: torch.device) -> None:
        """Makes the parameters views of the flat buffers of a state."""
        for buffer in self.plan.flat_buffers:
            flat, layout = params[buffer.key], buffer.layout
            if not buffer.flow.gathers_over:
                for name, view in unflatten(flat.detach(), layout).items():
                    self._own[name] = view.flatten()
                    self.show(name, view)
                continue
            assert isinstance(buffer.params.spec, Sharded)
            shard = self.plan.mesh.shard_of(self._rank, buffer.params.spec)
            start, stop = buffer.params.partition(self.plan.mesh).bounds(shard)
            for name, shape in zip(layout.names, layout.shapes, strict=True):
                first, end = (min(max(place, start), stop) - start for place in layout.bounds(name))
                self._own[name] = flat.detach()[first:end] if isinstance(flat, Tensor) else None
                self.hide(name, shape, flat.dtype, device)

    def show(self, name: str, value: Tensor) -> None:
        """Sets a parameter's values."""
        param = self.own[name]
        if isinstance(param, PartitionedParameter):
            param.__class__ = param.__dict__.pop("fzero_class", nn.Parameter)
        param.data = value
        self._given[name] = _identity(param)
        self._mark(name, tuple(value.shape), is_here=True)

    def hide(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Removes a parameter's values; its dtype and device are kept."""
        param = self.own[name]
        if isinstance(param, PartitionedParameter):
            param.__class__ = param.__dict__.pop("fzero_class", nn.Parameter)
        self._given.pop(name, None)
        is_empty = not math.prod(shape)
        param.data = torch.empty(shape if is_empty else (0,), dtype=dtype, device=device)
        param.grad = None
        if not is_empty:
            nothing = without_values(shape, dtype, device)
            plain = nn.Parameter(nothing, requires_grad=param.requires_grad)
            param.__dict__ |= {"fzero_name": name, "fzero_plain": plain, "fzero_class": type(param)}
            param.__class__ = PartitionedParameter
        self._mark(name, shape, is_here=is_empty)

    @contextmanager
    def shaped(self) -> Iterator[None]:
        """Inside, sharded parameters have their full shapes, without values: to plan
        another step.
        """
        away = [param for param in self.own.values() if isinstance(param, PartitionedParameter)]
        for param in away:
            param.__class__ = nn.Parameter  # type: ignore[assignment]
            param.data = param.fzero_plain.data
        try:
            yield
        finally:
            for param in away:
                param.data = param.new_empty(0)
                param.__class__ = PartitionedParameter

    def _mark(self, name: str, shape: tuple[int, ...], *, is_here: bool) -> None:
        """Sets the attributes of DeepSpeed's stage 3."""
        if self.plan.row.shards("params"):
            persists = name not in self._sharded
            mark(
                self.own[name],
                self._indices[name],
                shape,
                self._own[name],
                is_here=is_here,
                persists=persists,
            )

    def close(self) -> None:
        """Removes the attributes of DeepSpeed's stage 3."""
        for param in self.own.values():
            unmark(param)

    def check(self) -> None:
        """Raises where a script has changed its module in a way that the state does not
        see and that would be lost.

        Values are checked only where there is a master, which would overwrite them in
        the update; writes through `param.data` are not detected.
        """
        self.check_modules()
        for module, key, name in self._slots:
            if module._parameters.get(key) is not self.own[name]:
                raise ValueError(
                    f"parameter {name!r}: must be the one that was passed to initialize, and was "
                    f"replaced by another, which is not trained; write to it inside "
                    f"GatheredParameters(..., modifier_rank=0), or change the model before "
                    f"initialize"
                )
        for name, param in self.own.items():
            if param.grad is not None:
                raise not_trained(name)
            if (given := self._given.get(name)) is None:
                continue
            now = _identity(param)
            if now[:2] != given[:2]:
                raise ValueError(
                    f"parameter {name!r}: must remain a view of the state, and got other memory "
                    f"(module.half(), .to(...), param.data = ...), which is not trained; leave "
                    f"that out, and write values inside GatheredParameters(..., modifier_rank=0)"
                )
            if now != given and name in self._masters:
                raise ValueError(
                    f"parameter {name!r}: must not be written to directly, and was; the update "
                    f"would overwrite its {param.dtype} values from the unchanged master; write "
                    f"inside GatheredParameters(..., modifier_rank=0), or with "
                    f"safe_set_full_fp32_param"
                )

    def name_of(self, param: Tensor) -> str | None:
        """The name of one of these parameters."""
        return self._names.get(id(param))

    @property
    def is_replaced(self) -> bool:
        """Whether some parameters are replaced by other tensors at present
        (`torch.func.functional_call` does that).
        """
        return any(
            module._parameters.get(key) is not self.own[name] for module, key, name in self._slots
        )

    @property
    def is_away(self) -> bool:
        return any(isinstance(param, PartitionedParameter) for param in self.own.values())


def _identity(param: Tensor) -> tuple[int, torch.dtype, int]:
    return param.data_ptr(), param.dtype, param._version


ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()
"""The engines alive, to find the one that a parameter belongs to."""


def engine_of(param: Tensor) -> Any:
    """The engine that trains a parameter, or None."""
    return next((engine for engine in ENGINES if engine.live.name_of(param) is not None), None)
