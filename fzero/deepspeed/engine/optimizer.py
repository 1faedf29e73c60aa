"""`EngineOptimizer`, `ConfiguredScheduler`: the param groups that a script reads and
writes, and a scheduler for them.

Both hold numbers only. Before an update the engine reads the learning rate and the
other hyper-parameters of each group, which a scheduler of `torch.optim.lr_scheduler`,
the configuration's scheduler or the script has written.

The script's own optimizer, or one of the class that the configuration names, shows the
same groups and the same state. As in DeepSpeed it is `engine.optimizer` itself in stage
0 in fp32, and inside a wrapper elsewhere. Its hooks run at each update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fzero.common.arguments import shown
from fzero.deepspeed.engine.client_optimizers import Groups, Hyper, lr_of
from fzero.deepspeed.engine.deepspeed_optimizers import configured_class
from fzero.deepspeed.engine.live_optimizer import OptimizerState, in_plain_dicts
from fzero.deepspeed.engine.optimizer_state import load_state_dict, state_dict_of
from fzero.optim.lr_schedules import Schedule

if TYPE_CHECKING:
    from fzero.deepspeed.engine.engine import Engine
    from fzero.step import TrainStep


class LossScaler:
    """`optimizer.loss_scaler`: the loss scale to read.

    Attributes:
        dynamic: whether an overflow changes the scale.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self.dynamic = engine, engine.dynamic_loss_scale()
        self.__dict__ |= {**engine.dynamic_loss_scale_args(), "scale_factor": 2.0}

    @property
    def loss_scale(self) -> float:
        return float(self._engine.loss_scale)

    cur_scale = loss_scale

    def backward(self, loss: Any, retain_graph: bool = False) -> NoReturn:
        raise RuntimeError(
            "loss_scaler.backward: must be called through the engine; call engine.backward(loss)"
        )


class _NoParameters(nn.Module):
    """Stands for the module whose hooks gather parameters in DeepSpeed, and which has
    none to remove here.
    """

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())


class ParameterOffload:
    """`optimizer.parameter_offload` in stage 3, whose hooks scripts remove around a
    generation: there are none.

    Inside `GatheredParameters` of all parameters the module runs by itself.
    """

    def __init__(self) -> None:
        self.module = _NoParameters()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any, count: Any = None) -> None:
        """Does nothing."""

    _register_hooks_recursively = _register_deepspeed_module

    def empty_partition_cache(self) -> None:
        """Does nothing: no gathered parameter outlives a forward or a backward."""

    partition_all_parameters = empty_partition_cache


def no_step(optimizer: torch.optim.Optimizer, closure: Any = None) -> NoReturn:
    """`step` of the optimizers of an engine, which makes the update."""
    raise RuntimeError(
        "optimizer.step: must be called through the engine, on all ranks; call engine.step()"
    )


# else torch's schedulers say that it was overridden
no_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


class EngineOptimizer(torch.optim.Optimizer):
    """`engine.optimizer`: hyper-parameters for scripts and schedulers to read and
    write; `engine.step()` makes the update.

    Attributes:
        overflow: whether the last update was skipped because a gradient was not finite.
        client: the script's own optimizer, or one of the class that the configuration
            names. It shows the same groups and state.
        shown: this one, or `client` where DeepSpeed wraps none.
    """

    def __init__(self, groups: Sequence[Hyper], engine: Callable[[], Engine]) -> None:
        # not that of another base
        torch.optim.Optimizer.__init__(self, groups, {})  # type: ignore[arg-type]
        self.defaults = {
            key: value for key, value in self.param_groups[0].items() if key != "params"
        }
        self.overflow = False
        self._state = OptimizerState(engine)
        self.client: Any = None
        self._clients_groups: list[Hyper] = []
        self.shown: torch.optim.Optimizer = self
        self._engine = engine

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The moments by parameter, to read and write; see `OptimizerState`."""
        return self.__dict__.get("_state", {})

    @state.setter
    def state(self, values: Any) -> None:
        if "_state" in self.__dict__:  # else the constructor of torch.optim sets an empty one
            self._state.replace(values)

    def stands_for(self, client: torch.optim.Optimizer) -> None:
        """Lets the script's own optimizer show the engine's state, too."""
        self.client, self._clients_groups = client, client.param_groups
        self.client.state = self._state
        self.client.step = MethodType(no_step, client)
        self.client.zero_grad = self.zero_grad
        client.register_state_dict_post_hook(in_plain_dicts)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, the engine updates: the hooks that a script has registered for `step`
        run before it, and after it.

        Hooks before it see the gradients that parameters show. Hooks after it do not
        run after an overflow.
        """
        hooked = self if self.client is None else self.client
        for before in (
            *_global_optimizer_pre_hooks.values(),
            *hooked._optimizer_step_pre_hooks.values(),
        ):
            if (returned := before(hooked, (hooked,), {})) is not None:
                raise RuntimeError(
                    f"optimizer.register_step_pre_hook: the hook must return None, since "
                    f"engine.step() passes no arguments, got {shown(returned)}; leave the return "
                    f"out"
                )
        yield
        each: Any
        for each in (self, hooked):
            each._opt_called = True  # else torch's schedulers say that it was never stepped
        if not self.overflow:
            for after in (
                *hooked._optimizer_step_post_hooks.values(),
                *_global_optimizer_post_hooks.values(),
            ):
                after(hooked, (hooked,), {})

    def settle(self) -> None:
        """Takes over what the script has done to the state, here or through its own
        optimizer: before a forward or an update.

        *Collective* where parameters of one flat buffer differ in it: every rank.
        """
        client = self.client
        # assigned, or by its load_state_dict
        if client is not None and client.state is not self._state:
            self._state.replace(client.state)
            client.state = self._state
        if client is not None and len(client.param_groups) != len(self.param_groups):
            self.add_param_group({})
        if client is not None and client.param_groups is not self._clients_groups:
            for own, theirs in zip(self.param_groups, client.param_groups, strict=True):
                own.update({key: value for key, value in theirs.items() if key != "params"})
            client.param_groups = self._clients_groups
        self._state.settle()

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss."""
        return float(self._engine().loss_scale)

    cur_scale = loss_scale

    @property
    def loss_scaler(self) -> LossScaler:
        return LossScaler(self._engine())

    @property
    def dynamic_loss_scale(self) -> bool:
        return bool(self._engine().dynamic_loss_scale())

    @property
    def clip_grad(self) -> float:
        return float(self._engine().gradient_clipping())

    @property
    def parameter_offload(self) -> ParameterOffload:
        """In stage 3 only, as in DeepSpeed."""
        if self._engine().zero_optimization_stage() != 3:
            raise AttributeError("optimizer.parameter_offload: needs stage 3; ask hasattr first")
        return ParameterOffload()

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [lr_of(group) for group in self.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last update where DeepSpeed does: in stage 0,
        and before the last backward of an accumulation in stages 1 and 3. Elsewhere it
        has no effect, with a warning if there are any."""
        self._engine().drop_grads(to_none=set_to_none, of="optimizer")

    step = no_step  # type: ignore[assignment]

    def backward(self, loss: Any, retain_graph: bool = False) -> NoReturn:
        raise RuntimeError(
            "optimizer.backward: must be called through the engine; call engine.backward(loss)"
        )

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """The engine's."""
        self._engine().offload_states(*args, **kwargs)

    def reload_states(self, non_blocking: bool = False) -> None:
        """The engine's."""
        self._engine().reload_states(non_blocking)

    def empty_partition_cache(self) -> None:
        """Does nothing, as the engine's."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state and the hyper-parameters, for the same
        configuration and number of ranks.
        """
        engine = self._engine()
        self.settle()
        return state_dict_of(engine.active_step(), engine.state, self.param_groups)

    def load_state_dict(self, state_dict: Any, *others: Any, **kwargs: Any) -> None:
        """Sets this rank's part from a `state_dict()`, or from a list of those of all
        ranks. *Collective:* every rank.

        Raises:
            ValueError: it is of another rank, another number of ranks or another
                configuration.
        """
        engine = self._engine()
        step = engine.active_step()
        engine.close_window()
        engine.state = load_state_dict(step, engine.state, self.param_groups, state_dict)
        engine.show_state()
        self._state.forget()

    def add_param_group(self, param_group: Hyper) -> None:
        if "overflow" in self.__dict__:
            raise RuntimeError(
                "optimizer.add_param_group: groups are sharded over the ranks when the engine is "
                "made; pass all of them to initialize, including frozen parameters that are "
                "trained later"
            )
        super().add_param_group(param_group)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"engine.optimizer: has no {name!r}, for the flat buffers and hooks of DeepSpeed's "
            f"optimizers are not here; fzero.deepspeed.utils.safe_get_full_… reads weights, "
            f"gradients and optimizer state, and engine.step() updates"
        )


class WrappingOptimizer(EngineOptimizer):
    """`engine.optimizer` where DeepSpeed wraps the script's optimizer, or the
    configured one: but in stage 0 in fp32.
    """

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped one."""
        client: torch.optim.Optimizer = self.client
        return client


class ZeroOptimizer(WrappingOptimizer):
    """`engine.optimizer` of stages 1 to 3."""


class ZeroOptimizer12(ZeroOptimizer):
    """`engine.optimizer` of stages 1 and 2."""


class ZeroOptimizer3(ZeroOptimizer):
    """`engine.optimizer` of stage 3."""


def make_optimizer(
    step: TrainStep,
    groups: Groups,
    given: Any,
    config: Mapping[str, Any],
    engine: Callable[[], Engine],
) -> EngineOptimizer:
    """The optimizer of an engine, which shows `initialize` one of the class that
    DeepSpeed's has in this stage.

    Args:
        given: the script's own optimizer; if there is none, the configuration names the
            class.
    """
    cfg, stage = step.spec.cfg, step.plan.row.number
    wraps = stage > 0 or cfg.fp16.enabled or cfg.bf16.enabled
    kinds = (WrappingOptimizer, ZeroOptimizer12, ZeroOptimizer12, ZeroOptimizer3)
    found = (kinds[stage] if wraps else EngineOptimizer)(groups.seen, engine)
    client = given
    if not isinstance(given, torch.optim.Optimizer):
        offloads = cfg.zero_optimization.offload_optimizer is not None
        kind = configured_class(config, offloads=offloads)
        client = kind.__new__(kind)
        # the class's own would add to the groups
        torch.optim.Optimizer.__init__(client, found.param_groups, {})
        client.defaults = found.defaults
    found.stands_for(client)
    if not wraps:
        found.shown = client
    return found


class ConfiguredScheduler:
    """`lr_scheduler` of a configuration: writes the learning rates of its schedule into
    the optimizer's groups.

    Args:
        optimizer: receives the rates in its groups.
        rates: the learning rate of each group at the update after n others.
        momentum: the first beta likewise, where the schedule changes it.
        kind: the schedule's name in the configuration; `isinstance` of DeepSpeed's
            class of that name is true. Empty for one that a script has made.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rates: Sequence[Schedule],
        momentum: Schedule | None,
        *,
        kind: str = "",
    ) -> None:
        self.kind = kind
        self.optimizer, self._rates, self._momentum = optimizer, list(rates), momentum
        self.last_batch_iteration = -1
        self._write()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advances by one update, or to the one after `last_batch_iteration`."""
        last = self.last_batch_iteration
        self.last_batch_iteration = (
            last + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def _write(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate(self.last_batch_iteration + 1)
            if self._momentum is not None and "betas" in group:
                group["betas"] = (self._momentum(self.last_batch_iteration + 1), group["betas"][1])

    def get_lr(self) -> list[float]:
        """The rates of the next update."""
        return [lr_of(group) for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """The rates that the last `step` set."""
        # transformers looks for these words; a script's own schedule has rates at once
        assert self.last_batch_iteration >= 0 or not self.kind, "need to call step() first"
        return self.get_lr()

    def get_mom(self) -> list[Any] | None:
        """The betas or the momentum of each group, where the schedule changes them;
        else None, as in DeepSpeed.
        """
        if self._momentum is None:
            return None
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, int]) -> None:
        self.last_batch_iteration = sd["last_batch_iteration"]
        self._write()
