"""`HeldModule`: a script's module under an engine. Its parameters show the state, and
calling it calls the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import optree
import torch
from torch import Tensor

from fzero.common.arguments import check_kind
from fzero.data.token_dropping import dropping_of
from fzero.deepspeed.engine.call_errors import CallError
from fzero.deepspeed.engine.layouts import Layouts
from fzero.deepspeed.engine.live_buffers import LiveBuffers
from fzero.deepspeed.engine.live_grads import LiveGrads
from fzero.deepspeed.engine.outside_grads import OutsideGrads
from fzero.deepspeed.engine.param_views import ENGINES, LiveParams, PartitionedParameterError
from fzero.deepspeed.engine.parts import Original, ReplacedMethod, hold_parts
from fzero.model.own_params import untraced
from fzero.resharding.parameters import full_params, with_weight
from fzero.state import TrainState
from fzero.step import TrainStep
from fzero.transforms.configured import with_blocks, with_dropping

if TYPE_CHECKING:
    from fzero.deepspeed.engine.engine import Engine

GATHERS_16_BIT = ("_consolidated_16bit_state_dict", "_zero3_consolidated_16bit_state_dict")
"""Names of DeepSpeed's engine that scripts use in spite of their first letter."""

OFFLOADED = (
    "engine: must have its state on the device, and it is in host memory since offload_states; "
    "call reload_states first"
)
DESTROYED = (
    "engine: must not be used after destroy, which has released its state, and was; make another "
    "with initialize (and load a checkpoint into it)"
)


class HeldModule:
    """The part of an engine that handles its module and the memory of the state.

    Args:
        engine: its module and step are there already.
        held: the names of the parameters that the optimizer holds.

    Attributes:
        is_inside: whether a forward of the engine runs.
        is_gathered: whether the module runs by itself, on full parameters.
    """

    live: LiveParams
    grads: LiveGrads
    outside_grads: OutsideGrads
    live_buffers: LiveBuffers
    layouts: Layouts
    is_gathered: bool

    def __init__(self, engine: Engine, held: frozenset[str]) -> None:
        self.engine, module, step = engine, engine.module, engine.train_step
        self.is_inside = self.is_gathered = False
        self._refusal = ""  # why the engine cannot be used now
        # from here on the module's parameters are views of the state
        step.runtime.learned.model_check.close()
        self.live = LiveParams(module, step.plan, step.data_rank)
        self.grads = LiveGrads(self.live)
        self.outside_grads = OutsideGrads(self.live, engine.takes_outside)
        self.layouts = Layouts(engine, held)
        self.live_buffers = LiveBuffers(module, step.plan)
        self._replaced: list[ReplacedMethod] = []
        self._parts: list[ReplacedMethod] = []

    def begin(self) -> None:
        """Makes every call of the module a call of the engine, also from the module's
        own methods (`generate`, `loss`).
        """
        engine = self.engine
        self.replace("forward", self._forward)
        if engine.train_step.plan.row.shards("params"):
            for name, part in engine.module.named_modules():
                if any(True for _ in part.parameters()):
                    called = ".".join(filter(None, ("engine.module", name)))
                    load = partial(self._load_state_dict, called)
                    self._replaced.append(ReplacedMethod(part, "load_state_dict", load))
            if engine.train_step.spec.compile is None:
                self._parts = [*hold_parts(engine)]
        self.show_state()
        self.outside_grads.watch()
        ENGINES.add(engine)

    def replace(self, name: str, instead: Callable[..., Any]) -> ReplacedMethod:
        """Replaces a method of the module until `destroy`."""
        self._replaced.append(ReplacedMethod(self.engine.module, name, instead))
        return self._replaced[-1]

    def _forward(self, original: Original, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_inside or self.is_gathered:
            return original(*inputs, **kwargs)
        if torch.compiler.is_dynamo_compiling():  # the script's own torch.compile(engine.module)
            return untraced(HeldModule._forward)(self, original, inputs, kwargs)
        if self.live.is_replaced:
            return original(*inputs, **kwargs)
        if torch._C._is_tracing():
            raise RuntimeError(
                "engine.module: must not be traced (torch.jit.trace, an export to ONNX) as a call "
                "of the engine, because a trace holds the tensors that it has seen; trace it on "
                "all ranks inside `with engine.gathered():`"
            )
        return self.engine.run_forward(original, inputs, kwargs)

    def _load_state_dict(
        self, called: str, original: Original, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return original(*inputs, **kwargs)
        except RuntimeError as error:
            if self.has_values or "size mismatch" not in str(error):
                raise
            raise PartitionedParameterError(
                f"{called}.load_state_dict: parameters that are sharded over the ranks have no "
                "values here, so weights of their full shapes cannot be copied into them; call "
                "engine.load_module_state_dict(...) on all ranks, or load inside `with "
                "fzero.deepspeed.zero.GatheredParameters(engine.parameters(), modifier_rank=0):`"
            ) from error

    def _release_parts(self) -> None:
        while self._parts:
            self._parts.pop().undo()

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
        found = full_params(self.active_step(), self.engine.state, names)
        values = {name: found[name] for name in self.live.own.keys() & found.keys()}
        with self.alone(names is None), self.showing(values):
            yield found

    @contextmanager
    def alone(self, is_alone: bool = True) -> Iterator[None]:
        """Inside, the module runs by itself, as it does in an outer one."""
        before, self.is_gathered = self.is_gathered, self.is_gathered or is_alone
        try:
            yield
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
        self._release_parts()  # compiled code would run through them
        self._remake(
            compile="block",
            compile_backend=backend,
            transforms=with_blocks(self.engine.train_step.spec.transforms),
        )

    def random_ltd_initialize(self) -> None:
        """Drops tokens from here on in the layers that `convert_to_random_ltd` has
        noted in the module, which calls it.

        *Collective:* every rank.
        """
        engine = self.engine
        self._remake(
            transforms=with_dropping(engine.train_step.spec.transforms, dropping_of(engine.module))
        )

    def _remake(self, **changes: Any) -> None:
        """Goes on with a step of a changed spec, which has the same states.
        *Collective:* every rank.
        """
        engine = self.engine
        step = self.layouts.step_of(replace(engine.train_step.spec, **changes))
        engine.train_step = engine.engine_log.observed(step)

    def module_state_dict(
        self,
        destination: dict[str, Tensor] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """The full weights, on every rank's CPU. *Collective:* every rank.

        Args:
            destination: a dict to which the weights are added.
            prefix: the prefix of their names.
            keep_vars: must be False, because the weights are copies.
            exclude_frozen_parameters: whether to omit frozen parameters.
        """
        if keep_vars:
            raise ValueError(
                "module_state_dict: keep_vars must be False, got True: gathered weights are "
                "copies; leave it out"
            )
        frozen = self._frozen if exclude_frozen_parameters else set()
        found = {} if destination is None else destination
        for name, x in self.active_step().gather(self.engine.state).items():
            if name not in frozen:
                found[f"{prefix}{name}"] = x
        return found

    @property
    def _frozen(self) -> set[str]:
        params = self.engine.train_step.spec.model.named_parameters(remove_duplicate=False)
        return {name for name, param in params if not param.requires_grad}

    def consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """The full weights in the model's dtypes, on rank 0; None on the others.
        *Collective:* every rank.
        """
        step = self.active_step()
        full = step.gather(self.engine.state, to="rank0")
        frozen = self._frozen if exclude_frozen_parameters else set()
        like = {
            name: x.dtype for name, x in step.spec.model.named_parameters(remove_duplicate=False)
        }
        found = {
            name: x.to(like.get(name, x.dtype)) for name, x in full.items() if name not in frozen
        }
        return found if step.rank == 0 else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict = (
        consolidated_16bit_state_dict
    )

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
                self.engine.state = with_weight(step, self.engine.state, name, values[key])
            elif key in values:
                self.live_buffers.write(name, values[key])
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
        self._refusal = OFFLOADED

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves the state back to the device after `offload_states`."""
        self._move(self.engine.train_step.device)
        self._refusal = ""

    def destroy(self) -> None:
        """Releases the state, and restores the module with the weights that this rank
        holds in full; a second call is none.
        """
        self.close_window()
        self._release_parts()
        while self._replaced:
            self._replaced.pop().undo()
        self.live.close()
        self.outside_grads.close()
        self.engine.__dict__.pop("state", None)
        self._refusal, self.engine.engine_log.writers = DESTROYED, []

    # --- the memory of the state ------------------------------------------------------------------

    def take_over(self, step: TrainStep, state: TrainState[Tensor]) -> None:
        """Continues with a state, and with the step to which it belongs."""
        if step is not self.engine.train_step:
            self.engine.train_step = self.engine.engine_log.observed(step)
            self.live.follow(step.plan)
            self.layouts.forget()
        self.engine.state = state
        self.show_state()
        if self.engine.live_optimizer is not None:
            self.engine.live_optimizer.state.forget()

    def active_step(self) -> TrainStep:
        """The step, once the module buffers that the script has assigned are in the
        state.
        """
        if self._refusal:
            raise CallError(self._refusal)
        self.live_buffers.take()
        return self.engine.train_step

    def _move(self, device: torch.device) -> None:
        """Moves the flat buffers of the state to a device, unless the model is on the
        CPU.
        """
        if self._refusal == DESTROYED:
            raise CallError(DESTROYED)
        if self.engine.device.type != "cpu":
            state = self.engine.state
            parts = {
                name: getattr(state, name) for name in ("params", "master", "grads", "optimizer")
            }
            moved = optree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, parts)
            self.engine.state = state._replace(**moved)
            self.show_state()

    def show_state(self) -> None:
        """Makes the module's parameters views of the state, and shows its buffers, or
        the window's.
        """
        self.live.look_at(self.engine.state.params, self.engine.train_step.device)
        self.show_buffers()

    def close_window(self) -> None:
        """Drops the gradients and forwards since the last update; the state keeps what
        they wrote into module buffers.
        """
        window, self.engine.open_window, self.engine.has_lost = self.engine.open_window, None, False
        self.grads.take()
        if window is not None:
            window.forward_backward.close()
            self.engine.state = self.engine.state._replace(buffers=window.buffers)
            self.show_buffers()

    def show_buffers(self) -> None:
        """Shows the buffers of the state, or of the window."""
        window = self.engine.open_window
        if window is None:
            self.live_buffers.show(self.engine.state.buffers)
        else:
            self.live_buffers.show(window.buffers, window.before)
