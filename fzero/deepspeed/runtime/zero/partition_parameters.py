"""`Init`, `GatheredParameters`, and functions of DeepSpeed that fzero does not need."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from fzero.comms import collectives
from fzero.comms.records import Label
from fzero.config.config import ConfigWarning
from fzero.deepspeed.accelerator import get_accelerator as get_accelerator
from fzero.deepspeed.engine.constructors import constructing
from fzero.deepspeed.engine.divided_params import (
    check_forms,
    check_modifier,
    check_not_foreign,
    divide,
    fingerprint,
    gathered,
    refuse_changes,
)
from fzero.deepspeed.engine.division_rules import check_all_ranks, rules_of
from fzero.deepspeed.engine.param_status import ZeroParamStatus as ZeroParamStatus
from fzero.deepspeed.engine.param_views import engine_of
from fzero.model.errors import not_trained
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
    """The function itself: `Init` changes no function of torch. transformers replaces
    this name while it makes a model.
    """
    return fn


def is_zero_param(parameter: object) -> bool:
    """Whether an engine of stage 3 has the parameter, or `Init` has divided it."""
    return hasattr(parameter, "ds_id")


def shutdown_init_context() -> None:
    """Does nothing: `initialize` may be called inside `Init`."""


def restore_init_context() -> None:
    """Does nothing, as `shutdown_init_context`."""


class Init(AbstractContextManager["Init"]):
    """Inside, every rank keeps its shards of the parameters of the models that are
    made, and at most one module's in full.

        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Model()
        engine, *_ = deepspeed.initialize(model=model, config=config) # takes the shards
        over, one unit at a time

    Rank 0's values count. Outside of `GatheredParameters` a parameter is empty, and has
    `ds_shape`, `ds_numel`, `ds_tensor` and so on. A constructor may use its children's
    parameters, and so may `module.apply` inside. Buffers stay whole. Inside another one
    it changes nothing.

    *Collective:* every rank makes the same modules in the same order; each parameter is
    sent once. Joins the job's process group if necessary.

    Args:
        module: divides this model, instead of those made inside.
        data_parallel_group, zero_param_parallel_group, sequence_data_parallel_group:
            None, or the group of all ranks.
        remote_device: where shards are until `initialize`: "none" (the device), "cpu",
            or "nvme", files without names in the configuration's `nvme_path`. None
            takes the configuration's `offload_param`.
        pin_memory: whether shards in host memory are pinned, if there is a GPU.
        config_dict_or_path, config: a mapping in DeepSpeed's schema, or a path; read
            are the dtype and `offload_param`.
        enabled: False does nothing.
        dtype: of floating parameters. None takes the configuration's (fp32 where it
            says none); without one they keep theirs.
        mpu: must have no model parallelism.
        zero_quantized_weights, zero_quantized_nontrainable_weights: have no effect on
            shards, with a warning.
        mem_efficient_linear, param_swapper, tensor_overrides: ignored; functions and
            tensors are PyTorch's own.

    Raises:
        ConfigError: a value is not supported.
    """

    _active: Init | None = None

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | None = None,
        config: Mapping[str, Any] | str | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        self.enabled = enabled
        if not enabled:
            return
        groups = (data_parallel_group, zero_param_parallel_group, sequence_data_parallel_group)
        check_all_ranks(groups, mpu)
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            quantized = (
                "zero.Init: shards are not quantized; set "
                "zero_optimization.zero_quantized_weights for gathers"
            )
            warnings.warn(quantized, ConfigWarning, stacklevel=2)
        source = config if config_dict_or_path is None else config_dict_or_path
        self.rules = rules_of(source, dtype=dtype, remote_device=remote_device, pins=pin_memory)
        if module is not None:
            check_not_foreign(module.parameters())
            divide(module.parameters(), self.rules)

    def __enter__(self) -> Init:
        self._inside: AbstractContextManager[None] = nullcontext()
        if self.enabled and Init._active is None:
            Init._active, self._inside = self, constructing(self.rules)
        self._inside.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if Init._active is self:
            Init._active = None
        self._inside.__exit__(*error)


class GatheredParameters(AbstractContextManager[None]):
    """Inside, the parameters are full: copies, in every stage, and before there is an
    engine those that `Init` has divided.

    *Collective:* every rank, with the same parameters, to enter and to leave.

    Args:
        params: one or several, of modules that engines train, of which several may be
            mixed (then on every rank in one order of the engines), or that `Init` has
            divided; others are not changed.
        modifier_rank: the rank whose values are written to the state and its masters on
            exit. None writes nothing, and raises on all ranks when one of them has
            changed a value.
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
    check_not_foreign(given)
    of_engines: dict[Any, list[Tensor]] = {}
    for param in given:
        if (engine := engine_of(param)) is not None:
            of_engines.setdefault(engine, []).append(param)
    with ExitStack() as inside:
        for engine, own in of_engines.items():
            inside.enter_context(_gathered_of(engine, own, modifier_rank))
        inside.enter_context(gathered(given, modifier_rank))
        yield


@contextmanager
def _gathered_of(engine: Any, given: Sequence[Tensor], modifier_rank: int | None) -> Iterator[None]:
    """Inside, parameters of one engine are full."""
    axis = engine.train_step.runtime.mesh.world
    check_modifier(modifier_rank, axis)
    engine.active_step()
    names = sorted({engine.live.name_of(param) for param in given})
    live = engine.live
    of_outer = {name: live.own[name].data for name in names if name in live.shown}
    whole = of_outer | full_params(
        engine.train_step, engine.state, [name for name in names if name not in of_outer]
    )
    before = {name: fingerprint(value) for name, value in whole.items()}
    with (
        engine.showing(whole),
        engine.held_module.alone(engine.train_step.plan.row.shards("params") and not live.is_away),
    ):
        yield
        values = {name: live.own[name].data for name in names}
        if engine.is_gathered and (
            lost := [name for name in names if live.own[name].grad is not None]
        ):
            # the parameter is empty from here on, without a gradient
            raise not_trained(lost[0])
    if modifier_rank is not None:
        check_forms([(value, whole[name].shape) for name, value in values.items()], axis)
        for name, value in values.items():
            label = Label("other", name)
            agreed = collectives.broadcast(
                value.contiguous(), axis, source=modifier_rank, label=label
            )
            engine.state = with_weight(engine.train_step, engine.state, name, agreed)
            if name in of_outer:
                of_outer[name].copy_(agreed)
        return
    changed = [name for name, value in values.items() if fingerprint(value) != before[name]]
    refuse_changes(_beyond_rounding(engine, values, changed), axis)


def _beyond_rounding(
    engine: Any, values: Mapping[str, Tensor], changed: Sequence[str]
) -> list[str]:
    """The names of changed parameters that differ by more than the rounding of a sum
    that was undone: w + d - d.

    PEFT's `unmerge_adapter` leaves that. It is dropped, with a warning, as the
    parameters are those of the state again.

    *Collective:* every rank; those that any rank has changed are gathered again.
    """
    axis = engine.train_step.runtime.mesh.world
    every = collectives.exchange(
        list(changed), axis, label=Label("other", "at the end of GatheredParameters")
    )
    names, beyond = sorted(set().union(*every)), []
    for name in names:
        own, now = full_params(engine.train_step, engine.state, [name])[name], values[name]
        if name in changed and not _is_rounding(own, now):
            beyond.append(name)
    if set(changed) - {*beyond}:
        warnings.warn(
            f"GatheredParameters: {min(set(changed) - {*beyond})!r} has changed by no more than "
            f"the rounding of an adapter that was merged and unmerged; the values before are kept",
            stacklevel=2,
        )
    return beyond


def _is_rounding(own: Tensor, now: Tensor) -> bool:
    """Whether each element differs by at most 2 units in the last place of the largest
    element.

    Sum and difference are rounded by half a unit each, of a number up to twice the
    largest if the added one is no larger.
    """
    if (own.shape, own.dtype) != (now.shape, now.dtype) or not own.is_floating_point():
        return False
    largest = own.abs().max().double()
    return bool(
        ((own.double() - now.double()).abs() <= 2 * torch.finfo(own.dtype).eps * largest).all()
    )


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: a parameter is gathered at any use inside the forward of the
    engine's module.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"register_external_parameter: needs a module and a parameter, got "
            f"{type(module).__name__} and {type(parameter).__name__}"
        )


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing, as `register_external_parameter`."""
