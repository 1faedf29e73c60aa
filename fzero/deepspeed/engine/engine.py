"""`Engine`: trains as DeepSpeed's engine does, for scripts that are written for it.

    engine, optimizer, loader, scheduler = fzero.initialize(model=model, config="ds_config.json", training_data=dataset)
    for x, y in loader:
        loss = criterion(engine(x), y)
        engine.backward(loss)  # or loss.backward()
        engine.step()

It holds a `TrainState`, and between two updates an `AccumulationWindow`; the
computation is in pure functions elsewhere, mostly the parts of `TrainStep`. A request
that is not supported raises an error with a fix.

Every rank makes the same calls in the same order. Between two calls no collective is
under way: after an exception there on all ranks, the script may go on with the next
forward. After an exception on one rank alone the job must end, because the others wait.
After an exception inside `forward` or `backward` the gradients collected since the last
update are lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, Self, TypeVar

import torch
from rich.console import RenderableType
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from fzero.config.config import Config
from fzero.data.loader import CurriculumLoader
from fzero.deepspeed.engine.accumulation import Accumulation
from fzero.deepspeed.engine.call_errors import NO_FORWARD, CallError, check_loss
from fzero.deepspeed.engine.checkpoints import EngineFiles
from fzero.deepspeed.engine.client_optimizers import Hyper
from fzero.deepspeed.engine.config_keys import EngineKeys
from fzero.deepspeed.engine.data_efficiency import DataSchedules
from fzero.deepspeed.engine.dataloader import ResumableLoader
from fzero.deepspeed.engine.direct_backward import DirectBackward
from fzero.deepspeed.engine.facade import Tools
from fzero.deepspeed.engine.generation import Generator
from fzero.deepspeed.engine.held import show_part
from fzero.deepspeed.engine.layouts import Layouts
from fzero.deepspeed.engine.live_buffers import LiveBuffers
from fzero.deepspeed.engine.live_grads import LiveGrads, shows
from fzero.deepspeed.engine.log import EngineLog
from fzero.deepspeed.engine.module import GATHERS_16_BIT, HeldModule
from fzero.deepspeed.engine.optimizer import EngineOptimizer
from fzero.deepspeed.engine.outside_grads import OutsideGrads
from fzero.deepspeed.engine.param_status import available
from fzero.deepspeed.engine.param_views import ENGINES, LiveParams
from fzero.deepspeed.engine.progress import Progress
from fzero.deepspeed.engine.settings import DEEPSPEEDS_OWN, Settings
from fzero.deepspeed.engine.step_log import CommsLog
from fzero.model.binding import beneath_transforms, records_gradients
from fzero.model.errors import not_trained
from fzero.model.own_params import untraced
from fzero.pipeline.module import PipelineError
from fzero.runtime.autograd_nodes import Visits, visits_of, works_of
from fzero.runtime.eager import ForwardBackward
from fzero.runtime.finish import Outcome
from fzero.runtime.phases import check_window, collect, going_back, passing, scaled_loss
from fzero.state import Metrics, TrainState
from fzero.step import AccumulationWindow, TrainStep, end
from fzero.storage.shard_transfer import read_later

T = TypeVar("T")
RUNS = {True: "train", False: "eval"}
"""The names of the orders of collectives of a forward of the whole module, by its
training mode.
"""


class Engine(nn.Module):
    """Made by `fzero.initialize`. An `nn.Module` with the child `module`; attributes
    that it lacks are looked up there.

    Attributes:
        module: the script's model. Its parameters are views of the state, or
            `PartitionedParameter`s where they are sharded (`param_views`); calling it
            calls the engine.
        train_step, state: the step, and the state that it trains. The state is in host
            memory after `offload_states`.
        live_optimizer: the param groups and the optimizer's state as scripts see them;
            None for an engine that does not train.
        lr_scheduler: stepped after each update that was not skipped, or None.
        training_dataloader: of `training_data`, or None.
        accumulation, progress, held_module, engine_log, engine_settings, engine_tools,
        data_schedules, engine_generator, engine_files: the parts of the engine, whose
            public names it has as well.
    """

    lr_scheduler: Any
    # of the parts, for the type checker
    cfg: Config
    device: torch.device
    dp_world_size: int
    micro_steps: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    metrics: Metrics | None
    hyper: list[Hyper]
    comms_log: CommsLog | None
    live: LiveParams
    grads: LiveGrads
    outside_grads: OutsideGrads
    live_buffers: LiveBuffers
    layouts: Layouts
    is_gathered: bool
    active_step: Callable[[], TrainStep]
    log_line: Callable[[RenderableType], None]

    def __init__(
        self,
        train_step: TrainStep,
        state: TrainState[Tensor],
        *,
        keys: EngineKeys,
        optimizer: EngineOptimizer | None,
        training_dataloader: ResumableLoader | CurriculumLoader | None = None,
        config: Mapping[str, Any] | None = None,
        held: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        # both: nn.Module's own look-up is slower
        self._modules["module"] = self.__dict__["module"] = train_step.spec.model
        self.train_step, self.state, self.keys = train_step, state, keys
        self.live_optimizer, self.lr_scheduler = optimizer, None
        self.training_dataloader, self.config = training_dataloader, dict(config or {})
        self.open_window: AccumulationWindow | None = None
        self.has_lost = self.grads_are_reduced = False
        self._lacks_loss = self._has_warned = self._runs_parts = False
        self._direct = DirectBackward(
            self._collects_directly,
            self._passes_directly,
            scales=train_step.runtime.rules.loss.scales_loss,
        )
        self.engine_settings, self.progress = Settings(self), Progress(self)
        micro_batch = self.cfg.batch_sizes(self.dp_world_size).micro
        self.accumulation = Accumulation(
            self, steps=train_step.plan.num_micro_steps, micro_batch=micro_batch
        )
        self.engine_log = EngineLog(self)
        self.train_step = self.engine_log.observed(train_step)
        self.engine_tools, self.data_schedules = Tools(self), DataSchedules(self)
        self.held_module = HeldModule(self, held)
        self.held_module.begin()
        self.engine_generator, self.engine_files = Generator(self), EngineFiles(self)

    # --- as a module ------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """The training mode of the module. `eval()` of a hybrid engine prints where the
        time since the last one went.
        """
        self.engine_generator.note_mode(trains=mode)
        return super().train(mode)

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

    # --- a step -----------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's outputs. *Collective* in stage 3."""
        self._check_is_whole()
        if self.is_gathered:
            return self.module(*inputs, **kwargs)
        if self.module.training:
            kwargs |= self.data_schedules.data_arguments()
        return self.run_forward(self.module, inputs, kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Adds the gradients of a loss to those since the last update. Returns the loss
        divided by the accumulation steps.

        *Collective:* every rank.

        Args:
            loss: a scalar, computed from any forwards since the last update; the loss
                scale is applied here.
            retain_graph: whether another backward of the same graph will follow.
            scale_wrt_gas: False does not divide by `gradient_accumulation_steps()`.
        """
        self._check_is_whole()
        self._direct.settle()
        parts = self.accumulation.steps if scale_wrt_gas else 1
        self._check_loss("backward", loss)
        window = self._window_for("backward", loss)
        step, passing = self.active_step(), self._others_passing(loss, retain_graph=retain_graph)
        with torch.enable_grad():  # the caller may run the backward inside no_grad
            scalar = loss.reshape(())
            scaled = scaled_loss(step.runtime, window, scalar)
            visits = visits_of(scaled, window.forward_backward)
            with (
                self._collects(
                    visits, scalar, retain_graph=retain_graph, num_parts=parts, passing=passing
                ),
                self.outside_grads.expected(window.forward_backward, scaled),
            ):
                torch.autograd.backward(scaled, retain_graph=retain_graph)
        return loss.detach() / parts

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for `engine.scale(loss).backward()`; where
        there is none (not fp16) the loss itself.

        It counts for the next backward that the script starts.
        """
        self._check_loss("scale", loss)
        window = self._window_for("scale", loss)
        self._direct.scaled(loss.reshape(()))
        return scaled_loss(self.active_step().runtime, window, loss)

    def _check_is_whole(self) -> None:
        """Raises in a pipeline: a rank has one stage only, and `train_batch` updates."""
        if self.train_step.runtime.spec.is_part:
            raise PipelineError("Only train_batch() is accessible in pipeline mode.")

    def _window_for(self, where: str, loss: Tensor) -> AccumulationWindow:
        """The window of a loss. It begins here if the script has only called parts of
        the module by themselves.
        """
        if self.open_window is None:
            self.active_step()
            if not self.outside_grads.are_in(loss):
                raise CallError(f"engine.{where}: {NO_FORWARD}")
            self._opened(self._no_grad_names())
        assert self.open_window is not None
        return self.open_window

    def _check_loss(self, where: str, loss: Any) -> None:
        if self.live_optimizer is None:
            raise CallError(
                f"engine.{where}: this engine has no optimizer; give initialize one, or the "
                f"configuration"
            )
        check_loss(where, loss)

    @contextmanager
    def _collects(
        self,
        visits: Visits,
        loss: Tensor | None,
        *,
        retain_graph: bool,
        num_parts: int | None = None,
        passing: AbstractContextManager[None] | None = None,
    ) -> Iterator[None]:
        """Inside, autograd runs a backward, whose gradients are added to those since
        the last update.

        Args:
            loss: without the loss scale; None if not known.
            num_parts: the number of micro-steps over which the loss is a mean; None is
                that of an accumulation.
            passing: through other engines.
        """
        step, window = self.active_step(), self.open_window
        assert window is not None
        self.grads.take()  # gradients that the script has set to None are zero now
        self.grads_are_reduced = self.accumulation.is_syncing and self.accumulation.ends
        # the ranks compare the numbers of the update in its last backward
        if self.grads_are_reduced:
            step = self.progress.following()
        self._lacks_loss |= loss is None
        shown = torch.zeros((), device=self.device) if loss is None else loss
        going = going_back(
            step.runtime,
            window,
            visits,
            shown,
            num_parts=num_parts or self.accumulation.steps,
            is_last=self.grads_are_reduced,
            retain_graph=retain_graph,
        )
        with (
            _available(step),
            self._guarded(),
            self.engine_log.watch.of("backward", self.global_steps),
            passing or nullcontext(),
        ):
            with going as after:
                yield
            self.open_window = after[0]
            self.grads.show(step, after[0], are_reduced=self.grads_are_reduced)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Counts a micro-step. At the end of an accumulation, updates: clips, skips an
        overflow, steps the scheduler.

        *Collective* at the end of an accumulation: every rank.

        Raises:
            FloatingPointError: a gradient is not finite, and overflows are not skipped
                (DeepSpeed would go on with NaN); the state is unchanged, and the next
                accumulation begins.
        """
        self._check_is_whole()
        self._direct.settle()
        if not self.accumulation.is_syncing:
            raise CallError(
                "engine.step: must not be called inside no_sync, whose gradients are not reduced; "
                "call it after"
            )
        self.progress.is_applied, updates = False, self.accumulation.ends
        if updates:
            before = self.global_steps
            with self.engine_log.watch.of("update", before):
                self._update(lr_kwargs or {})
            self.engine_log.report(before)
        self.micro_steps += 1
        self.tput_timer.stop(global_step=updates)

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        step, window, optimizer = self.active_step(), self.open_window, self.live_optimizer
        if self.has_lost:
            raise RuntimeError(
                "engine.step: an error dropped the gradients of earlier micro-steps; call "
                "engine.zero_grad() to go on without them"
            )
        if optimizer is None or window is None or not window.loss_stats:
            self.live.check()  # for a loss of parts that the script called by themselves
            raise RuntimeError(
                "engine.step: must follow a backward since the last update; call "
                "engine.backward(loss) first"
            )
        if not self.grads_are_reduced and not step.plan.row.shards("grads"):
            raise RuntimeError(
                "engine.step: the last backward must reduce gradients, and was inside no_sync or "
                "before the boundary; call set_gradient_accumulation_boundary(True) before it"
            )
        with optimizer.stepping():
            self._make_update(window, optimizer)
        self.progress.step_scheduler(lr_kwargs)

    def _make_update(self, window: AccumulationWindow, optimizer: EngineOptimizer) -> None:
        without = self.grads.take()
        self.live.check()
        optimizer.settle()
        step = self.progress.following()
        step.runtime.learned.hyper.edits = self.grads.edits.take() | optimizer.state.edits.take()
        overflow = list[Callable[[], int]]()

        def sees(outcome: Outcome) -> None:
            # Read when the device has been given the update, so that it does not idle while the
            # host waits.
            overflow.append(read_later(outcome.overflow) if self.cfg.skips_overflow else int)

        try:
            with optimizer.state.keeping(without):
                window.forward_backward.forwards.no_grad_names |= without
                check_window(window)
                collected = collect(step.runtime, window)
                self.state, self.metrics = end(step.runtime, collected, sees=sees)
        except FloatingPointError:  # the step has ended without an update
            self.open_window, self.micro_steps = None, self.micro_steps + 1
            self.held_module.show_buffers()
            raise
        if self._lacks_loss:
            self.metrics = self.metrics._replace(
                loss=torch.full_like(self.metrics.loss, float("nan"))
            )
        self.train_step, self.open_window = step, None
        self.progress.has_updated(overflow=overflow[0], num_micro_steps=len(window.loss_stats))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients collected since the last update; after an update there
        are none. Forwards stay.
        """
        self._direct.settle()
        self.has_lost = False
        self.drop_grads(to_none=set_to_none, of="engine")

    def drop_grads(self, *, to_none: bool, of: Literal["engine", "optimizer"]) -> None:
        """Drops gradients for `zero_grad` of an object; in the cases in which
        DeepSpeed's drops none, warns once.
        """
        stage, window = self.train_step.plan.row.number, self.open_window
        if self.grads.given or window is None or not window.loss_stats:
            self.grads.drop(to_none=to_none)
            return
        drops = of == "engine" or not stage or (stage == 3 and not self.grads_are_reduced)
        if stage and of != ("optimizer" if drops else "") and not self._has_warned:
            self._has_warned = True
            says = "drops the gradients" if drops else "has no effect on the gradients"
            warnings.warn(
                f"{of}.zero_grad: {says} since the last update in stage {stage}, where DeepSpeed's "
                f"has no effect; leave it out: the engine begins with zeros after each update",
                stacklevel=3,
            )
        if drops:
            self.open_window, self._lacks_loss = window._replace(loss_stats=()), False

    def run_part(
        self, name: str, function: Callable[..., T], inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> T:
        """Runs a submodule that the script calls."""
        self._runs_parts = True
        return self.run_forward(function, inputs, kwargs, part=name)

    @property
    def repeated(self) -> ForwardBackward | None:
        """What a checkpoint of the script runs such a submodule again for; or None."""
        if not self._runs_parts or self.held_module.is_inside or self.open_window is None:
            return None
        work = self.open_window.forward_backward
        return (
            work
            if work.status == "running" and work.forwards.of_node.run not in RUNS.values()
            else None
        )

    def run_forward(
        self,
        function: Callable[..., T],
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        part: str | None = None,
    ) -> T:
        """Runs a forward of the module, through its own `__call__` or inside it; or of
        a submodule, a `part`.
        """
        if torch.compiler.is_dynamo_compiling():
            return untraced(Engine.run_forward)(self, function, inputs, kwargs, part=part)  # type: ignore[no-any-return]
        self._direct.settle()
        self.live.check_modules()
        step, run = self.active_step(), RUNS[self.module.training]
        dtype = step.runtime.autocast
        if part is None:
            inputs, kwargs = step.runtime.batches.cast((inputs, kwargs))
        else:
            dtype, run = None, f"{run} {part!r}"

        def call() -> T:
            casts = nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)
            self.held_module.is_inside = True
            try:
                with _available(step), casts:
                    return function(*inputs, **kwargs)
            finally:
                self.held_module.is_inside = False

        is_func = torch._C._are_functorch_transforms_active()
        run = f"{run} func" if is_func else run
        trains = records_gradients() and self.live_optimizer is not None
        if step.runtime.observer and trains and part is None:
            step.runtime.observer.sees((inputs, kwargs), is_call=True)
        with self.engine_log.watch.of("forward", self.global_steps, trains=trains):
            if not trains:
                return self._inspect(step, call, run=f"{run} alone", keeps=not is_func)
            with beneath_transforms(call) as within, self._guarded():
                no_grad_names = self._no_grad_names()
                window = self._opened(no_grad_names)
                outputs = self.train_step.forward(
                    window, within, run=run, no_grad_names=no_grad_names
                )
                self.held_module.show_buffers()
            self._direct.watch(window.forward_backward, outputs)
            return outputs

    def _no_grad_names(self) -> frozenset[str]:
        """Begins to train on a micro-batch; returns the parameters that require no
        gradients now.
        """
        self.tput_timer.start()
        assert self.live_optimizer is not None
        self.live_optimizer.settle()
        return self.layouts.follow_flags()

    def _opened(self, no_grad_names: frozenset[str]) -> AccumulationWindow:
        """The window since the last update, which begins here if there is none."""
        if self.open_window is None:
            step, self._lacks_loss = self.train_step, False
            self.open_window = window = step.begin(
                self.state, measures_early=not shows(step, are_reduced=True)
            )
            window.forward_backward.forwards.no_grad_names = no_grad_names
            step.runtime.learned.leaves_out_params |= bool(no_grad_names)
            self._direct.watch(window.forward_backward, ())
            self.held_module.show_buffers()
        return self.open_window

    def takes_outside(self, name: str, grad: Tensor | None) -> bool:
        """Takes the gradient of a parameter that a loss uses outside of the forwards;
        returns whether `.grad` is not for it.

        A script's own backward may begin here. One of another engine drops it, as it
        drops those of this engine's forwards.
        """
        runtime = self.train_step.runtime
        if (
            self.live_optimizer is None
            or self.is_gathered
            or runtime.spec.is_part
            or runtime.changes.views
        ):
            # the forward computes with other values
            if name in self.grads.given or runtime.changes.views:
                raise not_trained(name)
            return False
        if self.open_window is None or self.open_window.forward_backward.status == "idle":
            if any(engine.is_collecting for engine in ENGINES if engine is not self):
                return True
            with torch.enable_grad():  # autograd runs without
                window = self._opened(self._no_grad_names())
            self._direct.begin(window.forward_backward)
        assert self.open_window is not None
        self.outside_grads.add(self.open_window.forward_backward, name, grad)
        return True

    @property
    def is_collecting(self) -> bool:
        """Whether `backward` runs."""
        return (
            self.open_window is not None
            and self.open_window.forward_backward.status == "running"
            and not self._direct.is_open
        )

    @contextmanager
    def _collects_directly(
        self, visits: Visits, loss: Tensor | None, *, retain_graph: bool
    ) -> Iterator[None]:
        """`_collects` for a backward that the script has started."""
        with self._collects(visits, loss, retain_graph=retain_graph):
            assert self.open_window is not None
            self.outside_grads.expect(self.open_window.forward_backward)
            yield

    @contextmanager
    def _passes_directly(self, retain_graph: bool) -> Iterator[None]:
        """Inside, a gradient by activations passes."""
        step, window = self.active_step(), self._opened(frozenset())
        through = passing(step.runtime, window, retain_graph=retain_graph)
        with _available(step), self._guarded(), through:
            yield

    def _inspect(self, step: TrainStep, call: Callable[[], T], *, run: str, keeps: bool) -> T:
        """Runs a forward without gradients; what it writes into module buffers is kept,
        as by a module alone.
        """
        shown = self.live_buffers
        state, statistics = self.state._replace(buffers=shown.now), step.runtime.statistics
        if not keeps:
            return step.inspect(state, call, run=run)
        kept = partial(shown.kept, call, statistics if self.module.training else ())
        outputs, changed = step.inspect(state, kept, run=run)
        if changed:
            shown.now.update(changed)
            self.held_module.show_buffers()
        return outputs

    @contextmanager
    def _others_passing(self, loss: Tensor, *, retain_graph: bool) -> Iterator[None]:
        """Inside, a backward may run through forwards of other engines, whose gradients
        do not change.
        """
        others = {
            id(engine.open_window.forward_backward): engine
            for engine in ENGINES
            if engine is not self and engine.open_window is not None
        }
        with ExitStack() as stack:
            for work in works_of(loss) if others else ():
                if (engine := others.get(id(work))) is None:
                    continue
                stack.enter_context(engine._guarded())
                stack.enter_context(
                    engine.train_step.backward_through(
                        engine.open_window, loss, retain_graph=retain_graph
                    )
                )
            yield

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Drops the accumulation window after an error inside."""
        try:
            yield
        except BaseException:
            self.has_lost |= self.open_window is not None and bool(self.open_window.loss_stats)
            self.open_window = None
            self.grads.take()
            self.held_module.show_buffers()
            raise


def _available(step: TrainStep) -> AbstractContextManager[None]:
    return available() if step.plan.row.shards("params") else nullcontext()


show_part(Engine, "accumulation", Accumulation, but=("ends", "samples"))
show_part(Engine, "progress", Progress, but=("following", "has_updated", "step_scheduler"))
show_part(
    Engine,
    "held_module",
    HeldModule,
    also=GATHERS_16_BIT,
    but=("alone", "begin", "replace", "show_buffers"),
)
show_part(Engine, "engine_log", EngineLog, but=("observed", "report"))
show_part(Engine, "engine_settings", Settings, also=DEEPSPEEDS_OWN)
show_part(Engine, "engine_tools", Tools)
show_part(Engine, "data_schedules", DataSchedules, but=("efficiency", "layer_drop"))
show_part(Engine, "engine_generator", Generator)
show_part(Engine, "engine_files", EngineFiles)
