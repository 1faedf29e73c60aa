"""`HoldsModule`: a script's module under an engine. Its parameters show the state, and
calling it calls the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Self, TypeVar

import optree
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from fzero.common.arguments import check_kind
from fzero.data.token_dropping import dropping_of
from fzero.deepspeed.engine.accessors import Accessors
from fzero.deepspeed.engine.layouts import Layouts
from fzero.deepspeed.engine.live_buffers import LiveBuffers
from fzero.deepspeed.engine.live_grads import LiveGrads
from fzero.deepspeed.engine.outside_grads import OutsideGrads
from fzero.deepspeed.engine.param_views import ENGINES, LiveParams
from fzero.deepspeed.engine.parts import hold_parts, release_parts
from fzero.resharding.parameters import full_params, with_weight
from fzero.state import TrainState
from fzero.step import AccumulationWindow, TrainStep
from fzero.transforms.configured import with_blocks, with_dropping

T = TypeVar("T")


class _Forward:
    """Replaces a module's `forward` while an engine holds the module. A copy of the
    module gets the original one.
    """

    def __init__(self, engine: HoldsModule, module: nn.Module) -> None:
        self.engine, self.module, self.original = engine, module, module.forward
        functools.update_wrapper(self, self.original)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        engine = self.engine
        if engine._is_inside or engine.is_gathered or engine.live.is_replaced:
            return self.original(*inputs, **kwargs)
        return engine._run(self.original, inputs, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles: the method of the copy's class, or the module's own
        original function.
        """
        if "forward" in self.engine._own_forward:
            return _same, (self.original,)
        return getattr, (self.module, "forward")


def _same(x: T) -> T:
    return x


class HoldsModule(Accessors):
    """The part of `Engine` that handles the module and the memory of the state."""

    module: nn.Module
    live: LiveParams
    grads: LiveGrads
    outside_grads: OutsideGrads
    live_buffers: LiveBuffers
    open_window: AccumulationWindow | None
    _run: Callable[..., Any]
    """The forward of `Engine`."""
    _takes_outside: Callable[[str, Tensor | None], bool]
    layouts: Layouts
    _is_inside = is_gathered = _is_away = False

    def _hold(self, module: nn.Module, held: frozenset[str]) -> None:
        """Makes every call of the module a call of the engine, also from the module's
        own methods (`generate`, `loss`).
        """
        # both: nn.Module's own look-up is slower
        self._modules["module"] = self.__dict__["module"] = module
        # from here on the module's parameters are views of the state
        self.train_step.runtime.learned.origin.close()
        self.live = LiveParams(module, self.train_step.plan, self.train_step.data_rank)
        self.grads = LiveGrads(self.live)
        self.outside_grads = OutsideGrads(self.live, self._takes_outside)
        self.layouts = Layouts(self, held)
        self.live_buffers = LiveBuffers(module, self.train_step.plan)
        self._own_forward = {k: v for k, v in module.__dict__.items() if k == "forward"}
        module.__dict__["forward"] = _Forward(self, module)
        if self.train_step.plan.row.shards("params") and self.train_step.spec.compile is None:
            hold_parts(self, module)
        self.show_state()
        self.outside_grads.watch()
        ENGINES.add(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """For `to`, `half`, `cuda` and the like, also of a module that holds the
        engine: nothing may change.
        """
        for dtype in {param.dtype for param in self.live.own.values()}:
            probe = torch.empty(0, dtype=dtype, device=self.device)
            if (now := fn(probe)).dtype != dtype or now.device != self.device:
                raise RuntimeError(
                    f"engine.to: must keep the device and dtypes of its state, and would make "
                    f"{dtype} on {self.device} {now.dtype} on {now.device}; move the model before "
                    f"initialize, set bf16 or fp16 in the configuration, or move the state with "
                    f"offload_states"
                )
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As `load_module_state_dict`, from the names of `state_dict()`, which begin
        with `module.`. *Collective:* every rank.
        """
        named = {key.removeprefix("module."): value for key, value in state_dict.items()}
        known = self.train_step.runtime.stored_names.keys()
        self.load_module_state_dict(named, strict=strict)
        missing, unexpected = sorted(known - named.keys()), sorted(named.keys() - known)
        return _IncompatibleKeys(
            [f"module.{key}" for key in missing], [f"module.{key}" for key in unexpected]
        )

    def __getattr__(self, name: str) -> Any:
        if "module" not in self.__dict__:
            raise AttributeError(name)
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            raise AttributeError(
                f"engine: has no attribute {name!r}, nor has its module ({error}); "
                f"docs/deepspeed.md lists its attributes"
            ) from None

    @property
    def has_values(self) -> bool:
        """Whether a submodule that the script calls runs by itself, on the values that
        its parameters have.
        """
        return (
            self.is_gathered
            or bool(self.live.shown)
            or not self.live.is_away
            or self.live.is_replaced
        )

    def run_part(
        self, name: str, function: Callable[..., T], inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> T:
        """Of `Engine`."""
        raise NotImplementedError

    @contextmanager
    def gathered(self, names: Sequence[str] | None = None) -> Iterator[dict[str, Tensor]]:
        """Copies of full parameters by name, in every stage, for
        `torch.func.functional_call(engine.module, them, x)`.

        Inside, with all names, the module runs with these values and independently of
        the engine: each rank may call it any number of times
        (`engine.module.generate`), and no gradients are collected. Changes to the
        values are dropped.

        *Collective* in stage 3: every rank.
        """
        before, self.is_gathered = self.is_gathered, names is None
        found = full_params(self.active_step(), self.state, names)
        try:
            with self.showing({name: found[name] for name in self.live.own.keys() & found.keys()}):
                yield found
        finally:
            self.is_gathered = before

    @contextmanager
    def showing(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the module's parameters have these values by name; afterwards those
        of the state, or of an outer call.
        """
        outer = {name: self.live.own[name].data for name in self.live.shown}
        for name, value in values.items():
            self.live.show(name, value)
        self.live.shown |= values.keys()
        try:
            yield
        finally:
            self.live.shown = {*outer}
            self.show_state()
            for name, value in outer.items():
                self.live.show(name, value)

    def compile(
        self,
        backend: Literal["inductor", "aot_eager"] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Compiles the repeated blocks of the module from now on. *Collective:* every
        rank.
        """
        if compile_kwargs or any(others.values()):
            raise ValueError(
                f"engine.compile: takes a backend and no other arguments, got "
                f"{compile_kwargs or others}; leave them out"
            )
        release_parts(self.module)  # compiled code would run through them
        self._remake(
            compile="block",
            compile_backend=backend,
            transforms=with_blocks(self.train_step.spec.transforms),
        )

    def random_ltd_initialize(self) -> None:
        """Drops tokens from here on in the layers that `convert_to_random_ltd` has
        noted in the module, which calls it.

        *Collective:* every rank.
        """
        self._remake(
            transforms=with_dropping(self.train_step.spec.transforms, dropping_of(self.module))
        )

    def _remake(self, **changes: Any) -> None:
        """Goes on with a step of a changed spec, which has the same states.
        *Collective:* every rank.
        """
        self.train_step = self.layouts.step_of(replace(self.train_step.spec, **changes))
        if self.comms_log is not None:
            self.train_step = self.train_step.observed(self.comms_log)

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Any = None,
        **others: Any,
    ) -> None:
        """Replaces the weights of the model and its masters, but not the optimizer
        state. *Collective:* every rank.

        Args:
            checkpoint: a full state dict, the same on all ranks, or a mapping that has
                one as `"module"`.
            strict: whether it must have exactly the names of the model.
            custom_load_fn, others: must be None, because the state is loaded and not a
                module.
        """
        if custom_load_fn is not None or any(others.values()):
            raise ValueError(
                "load_module_state_dict: custom_load_fn and other arguments must be None, because "
                "the state is loaded and not a module; make a state dict of your own, and pass that"
            )
        check_kind(
            "load_module_state_dict",
            checkpoint,
            Mapping,
            "given a state dict",
            "pass module.state_dict()",
        )
        step = self.active_step()
        inner = checkpoint.get("module")
        values: Mapping[str, Tensor] = inner if isinstance(inner, Mapping) else checkpoint
        differing = sorted({*values} ^ {*step.runtime.stored_names})
        if strict and differing:
            raise ValueError(
                f"load_module_state_dict: names must be those of the model, got "
                f"{'no' if differing[0] not in values else 'a'} {differing[0]!r} ({len(differing)} "
                f"differ); pass strict=False to load the names in common"
            )
        params = {name for buffer in step.plan.flat_buffers for name in buffer.layout.names}
        for key, name in step.runtime.stored_names.items():
            if key in values and name in params:
                self.state = with_weight(step, self.state, name, values[key])
            elif key in values:
                self.live_buffers.now[name].copy_(values[key])
        self.show_state()

    def offload_states(
        self,
        include: Sequence[Any] | None = None,
        device: str | torch.device = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves all state to host memory until `reload_states`, to free device memory;
        `include` is ignored.
        """
        if device not in ("cpu", torch.device("cpu")):
            raise ValueError(
                f"engine.offload_states: device must be 'cpu', got {device!r}; leave it out"
            )
        self._move(torch.device("cpu"))
        self._is_away = True

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves the state back to the device after `offload_states`."""
        self._move(self.train_step.device)
        self._is_away = False

    def destroy(self) -> None:
        """Releases the state, and restores the module with the weights that this rank
        holds in full; a second call is none.
        """
        self.close_window()
        release_parts(self.module)
        self.module.__dict__.pop("forward", None)
        self.module.__dict__.update(self._own_forward)
        self.live.close()
        self.outside_grads.close()
        self.__dict__.pop("state", None)
        self._is_away, self._monitors = True, []

    # --- the memory of the state ------------------------------------------------------------------

    def take_over(self, step: TrainStep, state: TrainState[Tensor]) -> None:
        """Continues with a state, and with the step to which it belongs."""
        if step is not self.train_step:
            self.train_step = step if self.comms_log is None else step.observed(self.comms_log)
            self.live.follow(step.plan)
            self.layouts.forget()
        self.state = state
        self.show_state()
        if self.live_optimizer is not None:
            self.live_optimizer.state.forget()

    def active_step(self) -> TrainStep:
        """The step, once the module buffers that the script has assigned are in the
        state.
        """
        if self._is_away:
            raise RuntimeError(
                "engine: its state is offloaded or destroyed (offload_states, destroy); call "
                "reload_states first"
            )
        self.live_buffers.take()
        return self.train_step

    def _move(self, device: torch.device) -> None:
        """Moves the flat buffers of the state to a device, unless the model is on the
        CPU.
        """
        if self.device.type != "cpu":
            state = self.state
            parts = {
                name: getattr(state, name) for name in ("params", "master", "grads", "optimizer")
            }
            moved = optree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, parts)
            self.state = state._replace(**moved)
            self.show_state()

    def show_state(self) -> None:
        """Makes the module's parameters views of the state, and shows its buffers, or
        the window's.
        """
        self.live.look_at(self.state.params, self.train_step.device)
        self._show_buffers()

    def close_window(self) -> None:
        """Drops the gradients and forwards since the last update; the state keeps what
        they wrote into module buffers.
        """
        window, self.open_window = self.open_window, None
        self.grads.take()
        if window is not None:
            window.work.close()
            self.state = self.state._replace(buffers=window.buffers)
            self._show_buffers()

    def _show_buffers(self) -> None:
        window = self.open_window
        if window is None:
            self.live_buffers.show(self.state.buffers)
        else:
            self.live_buffers.show(window.buffers, window.before)
