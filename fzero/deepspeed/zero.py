"""`deepspeed.zero`: `GatheredParameters`, and functions of DeepSpeed that fzero does not need."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from fzero.comms import collectives
from fzero.comms.records import Label
from fzero.config.config import ConfigWarning
from fzero.engine.param_views import engine_of
from fzero.resharding.parameters import full_params, with_weight


class Init:
    """Has no effect on models made inside: they are in this process's memory in full, until `initialize` shards them.

    A model that does not fit can be made on `meta`, and filled unit by unit by `fzero.make_train_step` (docs/deepspeed.md).
    """

    def __init__(self, module: nn.Module | None = None, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        if enabled:
            warnings.warn(
                "zero.Init: the full model is made in this process's memory, and sharded by initialize; docs/deepspeed.md says "
                "how to make one that does not fit",
                ConfigWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class GatheredParameters:
    """Inside, the parameters are full: copies, in every stage.

    *Collective:* every rank, with the same parameters, to enter and to leave.

    Args:
        params: one or several, of a module that an engine trains; others are not changed.
        modifier_rank: the rank whose values are written to the state and its masters on exit. None writes nothing, and
            raises on all ranks when one of them has changed a value.
        enabled: False does nothing.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        self._engine = next(filter(None, map(engine_of, given)), None) if enabled else None
        self._modifier = modifier_rank
        self._names: list[str] = []
        if self._engine is not None:
            named = map(self._engine.live.name_of, given)
            self._names = sorted({name for name in named if name is not None})

    def __enter__(self) -> None:
        engine = self._engine
        if engine is None:
            return
        engine.active_step()
        self._outer = engine.is_gathered
        self._whole = full_params(engine.train_step, engine.state, self._names)
        self._before = {name: _fingerprint(value) for name, value in self._whole.items()}
        for name, value in self._whole.items():
            engine.live.show(name, value)
        engine.is_gathered = self._outer or (engine.train_step.plan.stage == 3 and not engine.live.is_away)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        engine = self._engine
        if engine is None:
            return
        engine.is_gathered = self._outer
        values = {name: engine.live.own[name].data for name in self._names}
        engine.show_state()
        if kind is not None:
            return
        axis = engine.train_step.runtime.mesh.world
        if self._modifier is not None:
            for name, value in values.items():
                told = collectives.broadcast(
                    value.contiguous(), axis, source=self._modifier, label=Label("other", name)
                )
                engine.state = with_weight(engine.train_step, engine.state, name, told)
            return
        changed = [name for name, value in values.items() if _fingerprint(value) != self._before[name]]
        world = collectives.exchange(changed, axis, label=Label("other"))
        for rank, names in enumerate(world):
            if names:
                raise RuntimeError(
                    f"GatheredParameters: {names[0]!r} must not change while modifier_rank is None, and was changed on rank "
                    f"{rank}; pass modifier_rank={rank}, whose values all ranks then get"
                )


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: a parameter is gathered at any use inside the forward of the engine's module."""
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"register_external_parameter: needs a module and a parameter, got {type(module).__name__} and "
            f"{type(parameter).__name__}"
        )


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing, as `register_external_parameter`."""


def _fingerprint(value: Tensor) -> tuple[Any, ...]:
    """A checksum that changes when an element changes, or two are exchanged."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = value.detach().contiguous().view(-1).view(kinds[value.element_size()]).to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    return tuple(value.shape), int(bits.sum()), int((bits * places).sum())
