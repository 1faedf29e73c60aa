"""`GatheredParameters`, `Init`, and functions of DeepSpeed that fzero does not need."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from fzero.comms import collectives
from fzero.comms.records import Label
from fzero.config.config import ConfigWarning
from fzero.deepspeed.accelerator import get_accelerator as get_accelerator
from fzero.engine.param_status import ZeroParamStatus as ZeroParamStatus
from fzero.engine.param_views import engine_of
from fzero.resharding.parameters import full_params, with_weight

_orig_torch_tensor, _orig_torch_empty, _orig_torch_zeros = torch.tensor, torch.empty, torch.zeros
_orig_torch_ones, _orig_torch_full, _orig_torch_arange = torch.ones, torch.full, torch.arange
_orig_torch_eye, _orig_torch_randn = torch.eye, torch.randn


class ZeroParamType(Enum):
    """Where a parameter is, in DeepSpeed's words."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype, target_device: Any = None
) -> Callable[..., Tensor]:
    """The function itself: `Init` changes no constructor. transformers replaces this name while it makes a model."""
    return fn


def is_zero_param(parameter: object) -> bool:
    """Whether an engine shards the parameter in stage 3."""
    return hasattr(parameter, "ds_id")


def shutdown_init_context() -> None:
    """Does nothing: `Init` changes no constructor."""


def restore_init_context() -> None:
    """Does nothing, as `shutdown_init_context`."""


class Init(AbstractContextManager["Init"]):
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

    def __exit__(self, *error: object) -> None:
        pass


class GatheredParameters(AbstractContextManager[None]):
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
        self._given = ([params] if isinstance(params, Tensor) else list(params)) if enabled else []
        self._modifier_rank = modifier_rank

    def __enter__(self) -> None:
        self._inside = _gathered(self._given, self._modifier_rank)  # a new one for each `with`
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)


@contextmanager
def _gathered(given: Sequence[Tensor], modifier_rank: int | None) -> Iterator[None]:
    engine = next(filter(None, map(engine_of, given)), None)
    if engine is None:
        yield
        return
    engine.active_step()
    names = sorted({name for name in map(engine.live.name_of, given) if name is not None})
    outer, whole = engine.is_gathered, full_params(engine.train_step, engine.state, names)
    before = {name: _fingerprint(value) for name, value in whole.items()}
    for name, value in whole.items():
        engine.live.show(name, value)
    engine.is_gathered = outer or (engine.train_step.plan.stage == 3 and not engine.live.is_away)
    try:
        yield
    finally:
        engine.is_gathered = outer
        values = {name: engine.live.own[name].data for name in names}
        engine.show_state()
    axis = engine.train_step.runtime.mesh.world
    if modifier_rank is not None:
        for name, value in values.items():
            label = Label("other", name)
            agreed = collectives.broadcast(value.contiguous(), axis, source=modifier_rank, label=label)
            engine.state = with_weight(engine.train_step, engine.state, name, agreed)
        return
    changed = [name for name, value in values.items() if _fingerprint(value) != before[name]]
    for rank, of_rank in enumerate(collectives.exchange(changed, axis, label=Label("other"))):
        if of_rank:
            raise RuntimeError(
                f"GatheredParameters: {of_rank[0]!r} must not change while modifier_rank is None, and was changed on rank "
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
