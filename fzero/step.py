"""`make_train_step`: from a model and a configuration to one function, (state, batch) →
(state, metrics).

A step is the composition of the verbs, unit by unit (`fzero.runtime.eager` runs the
first three lines as the model goes):

    params_P = gather(params_S)
    loss, grads_P = value_and_grad(model)(params_P, batch)
    grads_S = reduce_scatter_grads(grads_P)
    params_S, optimizer = optimizer_update(params_S, grads_S, optimizer)

Shape letters: P padded elements of a flat buffer = F·S, S elements of a shard, F shards
(on one axis as many as ranks), W ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from fzero import curvature, graph, parallelism
from fzero.common.arguments import check_callable
from fzero.common.profiler_ranges import profiler_range
from fzero.comms.axes import AbstractAxis, ProcessAxis, RankAxis
from fzero.comms.records import CommRecord
from fzero.config.config import Config
from fzero.config.optimizer_block import OptimizerBlock
from fzero.model.changes import unchanged_if_raised
from fzero.model.own_params import untraced
from fzero.plans.hook_choice import GivenHook
from fzero.plans.mesh_axes import check_mesh
from fzero.plans.orders import GivenOrder
from fzero.plans.param_groups import OwnTransform, ParamGroup, UserTransform
from fzero.plans.plan_spec import starts_after
from fzero.plans.unit_orders import EventOrder
from fzero.runtime import inspection, phases
from fzero.runtime.batches import LossFn
from fzero.runtime.finish import Collected, Outcome, next_state
from fzero.runtime.init_state import InitFn
from fzero.runtime.outcome import explain
from fzero.runtime.phases import AccumulationWindow, Eager
from fzero.runtime.step_runtime import StepRuntime
from fzero.runtime.step_spec import StepSpec, bind
from fzero.runtime.weights import first_state, state_dict, with_weights
from fzero.state import Metrics, TrainState
from fzero.transforms.configured import of_step
from sharding import Mesh

__all__ = ["AccumulationWindow", "TrainStep", "make_train_step"]

if TYPE_CHECKING:
    from fzero.curvature.vectors import Vector
    from fzero.graph.captured import Captured
    from fzero.graph.program import GraphProgram
    from fzero.model.transforms import Choice, ModelTransform
    from fzero.optim.lr_schedules import Schedule
    from fzero.parallelism import Explained
    from fzero.plans.machine_model import MachineModel
    from fzero.plans.placements import GivenPlacements

T = TypeVar("T")
AnyStep = TypeVar("AnyStep", bound="TrainStep")
State = TrainState[Tensor]


def make_train_step(
    model: nn.Module,
    cfg: Config | Mapping[str, Any] | str,
    *,
    loss_fn: LossFn | None = None,
    mesh: Mesh | ProcessAxis | AbstractAxis | None = None,
    units: Sequence[str] | None = None,
    param_groups: Sequence[ParamGroup] = (),
    transform: OwnTransform | None = None,
    transforms: Sequence[ModelTransform] = (),
    gather_hook: GivenHook = None,
    reduce_hook: GivenHook = None,
    placements: GivenPlacements = None,
    order: GivenOrder = None,
    donate: bool = True,
    lr_schedule: Schedule | None = None,
    schedule: Literal["learned", "negotiated"] = "learned",
    checkpoint: Choice | None = None,
    compile: Literal["step", "block"] | None = None,
    compile_backend: Literal["inductor", "aot_eager"] = "inductor",
    check_params: Literal["first", "always"] = "first",
    seed: int = 0,
    after: TrainStep | Mapping[str, int] | None = None,
    pipeline: Any = None,
) -> TrainStep:
    """A training step of `model` with ZeRO stage `cfg.zero_optimization.stage`.

    *Collective:* every rank of the job. It initializes the process group that torchrun
    describes, unless one exists already. It compares model and configuration of all
    ranks.

    Args:
        model: any module. Steps use its structure. Only `init` reads its weights, and
            nothing writes them, so `model.to("meta")` after `init` may free them. A
            model on `meta` is initialized unit by unit. Transforms, and the
            configuration's `compression_training`, may add tensors to its modules.
        cfg: a `Config`, a mapping in DeepSpeed's schema, or the path of a JSON file.
        loss_fn: `loss_fn(model, batch)` returns the loss, or `(sum, weight)`; None
            takes the model's own output.
        mesh: the ranks: a `sharding.Mesh`, or the axis that `fzero.join` returns. The
            stage shards the state over the mesh axis `"data"`; ranks along other axes
            hold replicas (`Mesh.of(node=2, data=4)`: hybrid sharding). None is one
            axis, or the mesh that `mics_shard_size` or `zero_hpz_partition_size` ask
            for. A `fzero.comms.AbstractAxis` stands for ranks that do not exist:
            `plan`, `specs`, `trace` and `explain` describe a job of its size.
        transforms: changes of the model, in the order of their application
            (`fzero.transforms`, docs/concepts/transforms.md).
        checkpoint: the modules for activation checkpointing. Such a module keeps only
            its inputs, and runs again in the backward. A number n picks every n-th unit
            that is one module (a repeated block, or one named in `units`): 1 picks all
            of them, 2 the first, the third and so on. A function of a module's name and
            the module picks the outermost modules for which it is true. Each should be
            no larger than a unit, because all parameters that it uses are gathered
            while its backward runs. None is `activation_checkpointing.every`. The
            numbers stay the same, bit for bit (with generated code: to rounding). With
            `compile="step"` the model must call each module itself, not its `forward`.
        after: the step whose training this one continues after parameters were frozen
            or unfrozen, or `fzero.checkpoint.starts(folder)` of its checkpoint. A flat
            buffer has one counter of updates. So parameters whose optimizer states
            begin at different updates get different flat buffers.
        pipeline: the order of a pipeline, or a `fzero.pipeline.Pipeline`
            (docs/pipelines.md). `mesh` must have an axis `"pipe"`, and `model` must be
            a `PipelineModule` or an `nn.Sequential`. A micro-batch is (inputs, labels),
            and the loss is `loss_fn(outputs, labels)`.

    The other arguments are fields of two records, which document them: of
    `fzero.plans.PlanSpec` (units, param_groups, transform, gather_hook, reduce_hook,
    placements, order) and of `fzero.runtime.StepSpec` (loss_fn, donate, lr_schedule,
    schedule, compile, compile_backend, check_params, seed).

    Raises:
        ConfigError: the configuration is wrong or does not fit the world size.
        MismatchError: on every rank, when ranks differ.
        ValueError: the model has no parameters, or a parameter has a hook, or a module
            is compiled by torch.compile, or a name in `units` or the function
            `checkpoint` matches nothing, or `checkpoint` is no positive integer, or the
            step cannot be compiled.
    """
    if not isinstance(mesh, ProcessAxis | AbstractAxis):
        check_mesh(mesh)
    cfg = Config.load(cfg)
    cfg.warn_of_no_effect(model)
    spec = StepSpec(
        model=model,
        cfg=cfg,
        loss_fn=loss_fn,
        units=units,
        param_groups=param_groups,
        transform=transform,
        gather_hook=gather_hook,
        reduce_hook=reduce_hook,
        placements=placements,
        order=order,
        donate=donate,
        lr_schedule=lr_schedule,
        schedule=schedule,
        compile=compile,
        compile_backend=compile_backend,
        check_params=check_params,
        seed=seed,
        starts={} if after is None else starts_after(after, model),
        transforms=of_step(
            cfg, model, transforms, checkpoint=checkpoint, compile=compile, seed=seed
        ),
        parallelism=parallelism.chosen(pipeline, mesh),
    )
    axis = mesh if isinstance(mesh, ProcessAxis | AbstractAxis) else bind(mesh, spec.device)
    with unchanged_if_raised(model):  # transforms add to it, and a later part may raise
        return TrainStep(spec, axis)


class TrainStep:
    """`step(state, batch)` → `(state, metrics)`; made by `make_train_step`.

    It holds no tensors except scratch memory. The first step learns the order of
    collectives and which module buffers change; both are the same for every state.

    Attributes:
        runtime: its parts on this rank, such as mesh, rules, offload, updater, and the
            findings of the first calls.
        spec: the arguments of `make_train_step`.
        plan: units, flat buffers, their bytes, and the traffic of a step;
            `print(step.plan)`.
        specs: a `TrainState` with a `sharding.TensorSpec` for every tensor of the
            state.
        rank, world_size: this process' rank, and the number of ranks.
        mesh: the mesh of all ranks. (In a pipeline `plan` is that of this rank's stage,
            and `plan.mesh` a part of this mesh.)
        device: the device of the state; batches must be on it, too.
    """

    def __init__(self, spec: StepSpec, axis: RankAxis | AbstractAxis) -> None:
        self.runtime = run = _with_program(parallelism.parallelism_of(spec).runtime(spec, axis))
        self.spec, self.plan, self.specs, self.device = spec, run.plan, run.form.specs, run.device
        self.rank, self.world_size, self.mesh = axis.rank, axis.size, axis.mesh or run.plan.mesh

    @property
    def data_rank(self) -> int:
        """The number of this rank among those of its stage of a pipeline; without one,
        `rank`.
        """
        return self.runtime.ranks.rank

    @property
    def data_world_size(self) -> int:
        """The number of ranks that hold a state; without a pipeline, `world_size`."""
        return self.runtime.ranks.size

    @property
    def program(self) -> GraphProgram | None:
        """The graphs of the step, with `compile="step"`."""
        runs = self.runtime.program
        return cast("GraphProgram", runs) if runs.is_graph else None

    @property
    def schedule(self) -> EventOrder | None:
        """The events of a micro-step in order, once it is learned (as a rule, after the
        first step).
        """
        learned = self.runtime.learned.schedule
        return None if learned is None else EventOrder(learned)

    @property
    def has_agreed(self) -> bool:
        """Whether the ranks have made all agreements of a first step. (A step in one
        graph needs none.)
        """
        return self.program is not None or self.runtime.learned.moving_buffers is not None

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """One optimizer step on this rank's `batch`.

        *Collective:* every rank, with batches of the same size. Sends
        `plan.sent_per_step`, and a few numbers.

        Args:
            state: the state from `init` or the previous step; it is donated (see
                `make_train_step`).
            batch: this rank's samples. With `gradient_accumulation_steps` it is cut
                into that many micro-batches along the leading dimension of its tensors;
                or it is an iterator, from which the step takes that many micro-batches.

        Raises:
            ValueError: the batch has another size than configured, the loss is no
                scalar, or a parameter was frozen or unfrozen.
            FloatingPointError: the loss or the gradient is not finite (on every rank;
                the state was not updated). On CUDA a device-side assertion ends the
                process instead, so that no step waits for the device.
            ScheduleError: on this rank, but not on all ranks, the units ran in another
                order than the learned one.
            CollectiveError: another rank died or did not call.
        """
        if torch.compiler.is_dynamo_compiling():
            return untraced(TrainStep.__call__)(self, state, batch)  # type: ignore[no-any-return]
        run = self.runtime
        state, micro_batches = phases.check(run, state, batch)
        # forwards and backwards: eager, or in one graph
        collected = run.program(run, state, micro_batches)
        return end(run, collected)

    def begin(self, state: State, *, measures_early: bool = False) -> AccumulationWindow:
        """Starts an accumulation window, which takes the state. Then call `forward` and
        `backward`, once or often, and `update`.

            window = step.begin(state)
            outputs = step.forward(window, lambda: model(x))
            window = step.backward(window, criterion(outputs, y))
            state, metrics = step.update(window)

        Between the last two lines you may change or replace those gradients of
        `window.state` that are in memory.

        Args:
            measures_early: whether the norm of each gradient is measured when it is
                collected, while it is in the cache, as `step(state, batch)` does. Then
                change gradients only in ways that PyTorch's version counter sees: in
                place, but not through `.data`, a collective, NumPy or DLPack.
        """
        return phases.begin(self.runtime, state, measures_early=measures_early)

    def forward(
        self,
        window: AccumulationWindow,
        function: Callable[[], T],
        *,
        run: str = "train",
        no_grad_names: frozenset[str] = frozenset(),
    ) -> T:
        """Calls `function`, which may call the model, and returns its result, whose
        tensors have autograd's graph.

        It uses the process' random state. Autograd keeps no gathered parameter alive,
        and no collective is under way afterwards.

        *Collective:* every rank, in the same order as the other parts of a step; in
        stage 3 each sends `(W-1)/W` of the parameters. An error ends the window on this
        rank, and the other ranks wait for it.

        Args:
            window: the window from `begin` or from the last `backward`.
            function: it must use the model's parameters through the model.
            run: a name for forwards that use the units in the same order. An order is
                learned for each name.
            no_grad_names: the names of trained parameters that get no gradient from
                this forward. A flat buffer is not updated if all its parameters are listed
                in `no_grad_names` in all forwards of a window.
        """
        check_callable("forward", function, "a function without arguments that calls the model")
        return phases.forward(self.runtime, window, function, kind=run, no_grad_names=no_grad_names)

    def backward(
        self,
        window: AccumulationWindow,
        loss: Tensor,
        *,
        weight: Tensor | None = None,
        num_parts: int = 1,
        is_last: bool = True,
        retain_graph: bool = False,
    ) -> AccumulationWindow:
        """Adds the gradients of a loss, which comes from one or several forwards of
        this window, to the gradients of the state.

        *Collective:* every rank; see `Plan.sent_per_step`. An error ends the window, as
        in `forward`.

        Args:
            window: the window from `begin` or from the last `backward`; it must not be
                used again.
            loss: a scalar; it is multiplied by the loss scale here.
            weight: the weight of a loss that is a sum; then all losses of the window
                must be sums.
            num_parts: the number of micro-steps over which the loss is a mean; the
                gradients are divided by it.
            is_last: whether this is the last backward before the update: gradients kept
                in full are reduced now. A further backward reduces its own gradients,
                and adds them.
            retain_graph: whether the graph is kept, for another backward.
        """
        return phases.backward(
            self.runtime,
            window,
            loss,
            weight=weight,
            num_parts=num_parts,
            is_last=is_last,
            retain_graph=retain_graph,
        )

    def backward_through(
        self, window: AccumulationWindow, loss: Tensor, *, retain_graph: bool = False
    ) -> AbstractContextManager[None]:
        """A context in which a backward of another step may run through forwards of
        this one (a generator's loss, through its discriminator). It adds no gradients
        to the parameters of this step. Arguments: see `backward`.

        *Collective* in stage 3: every rank; each sends `(W-1)/W` of the parameters.
        """
        return phases.backward_through(self.runtime, window, loss, retain_graph=retain_graph)

    def update(self, window: AccumulationWindow) -> tuple[State, Metrics]:
        """Ends a window: clips its gradients, skips an overflow, and updates. Raises
        the errors of `__call__`.

        *Collective:* every rank; all-gathers a few numbers, and the updated parameters
        that every rank holds in full.
        """
        phases.check_window(window)
        return end(self.runtime, phases.collect(self.runtime, window))

    def init(
        self, params: Mapping[str, Tensor] | None = None, *, init_fn: InitFn | None = None
    ) -> State:
        """This rank's part of a new state.

        *Collective:* every rank. All ranks get rank 0's values: each flat buffer is
        broadcast once.

        Args:
            params: a full state dict; None takes the model's present weights. Weights
                on `meta` are initialized.
            init_fn: `init_fn(module)` fills the parameters of a module on `meta`; None
                calls `reset_parameters`.
        """
        return first_state(self.runtime, params, init_fn)

    def gather(self, state: State, *, to: Literal["all", "rank0"] = "all") -> dict[str, Tensor]:
        """The full state dict: the model's own names, floating tensors in fp32 (those
        of fp64 in fp64), on the CPU.

        The weights are the masters, if there are any. `to="rank0"` returns it on rank 0
        alone, and `{}` on the others.

        *Collective:* every rank; in stage 3, and with masters, each sends `(W-1)/W` of
        the parameters, unit by unit.
        """
        return state_dict(self.runtime, state, to=to)

    def weights(self, state: State) -> dict[str, Tensor]:
        """This rank's part of the weights by flat buffer: the master where there is
        one, else the parameters.

        These are the state's own tensors. Average them into a tree of the same
        structure, for example, and pass it to `with_weights`. Sends nothing.
        """
        self.runtime.check_state(state)
        return self.runtime.weights(state)

    def with_weights(self, state: State, weights: Mapping[str, Tensor]) -> State:
        """The state with other weights (masters and parameters), for `evaluate`,
        `gather`, `save` and `save_16bit_model`.

            ema = optree.tree_map(lambda mean, weight: torch.lerp(mean, weight, 0.01), ema, step.weights(state))
            loss = step.evaluate(step.with_weights(state, ema), batch)

        (`state._replace(master=…)` alone does not change the parameters that the model
        computes with.) The new state shares tensors with the old one and with
        `weights`, so a donating step that takes one of the states makes both invalid.
        `weights` holds flat buffers as in `step.weights`, in any floating dtype. Flat
        buffers that it lacks keep their weights.

        *Collective* if a rank holds full parameters but only a shard of the weights:
        every rank; each sends `(W-1)/W` of them.
        """
        return with_weights(self.runtime, state, weights)

    def evaluate(self, state: State, batch: Any) -> Tensor:
        """The mean loss over ranks, in evaluation mode, without gradients; the state is
        unchanged.

        The model computes with `state.params`; `with_weights` makes a state with other
        weights.

        *Collective:* every rank; in stage 3 each sends `(W-1)/W` of the parameters.
        """
        return inspection.evaluate(self.runtime, state, batch)

    def inspect(self, state: State, function: Callable[[], T], *, run: str = "inspect") -> T:
        """Calls `function`, which may call the model, and returns its result; no
        gradients are collected, and the state is unchanged. Arguments: see `forward`.

        Use it for evaluation, and for gradients of inputs by autograd or torch.func;
        these keep gathered parameters in memory.

        *Collective* in stage 3: every rank; each sends `(W-1)/W` of the parameters.
        """
        return inspection.inspect(self.runtime, state, function, run)

    def hvp(self, state: State, batch: Any, vector: Vector) -> dict[str, Tensor]:
        """The product of the Hessian of the loss with a vector (docs/concepts/curvature.md).

        Vectors are flat buffers, as `fzero.curvature.space(step)` makes them.

        *Collective:* every rank; sends what a gradient does, and the vector in full.
        """
        return curvature.products.hvp(self.runtime, state, batch, vector)

    def gnvp(
        self,
        state: State,
        batch: Any,
        vector: Vector,
        *,
        outputs: Callable[[Any, Any], Tensor],
        loss: Callable[[Tensor, Any], Any],
    ) -> dict[str, Tensor]:
        """As `hvp`, with the Gauss–Newton matrix of the loss
        `loss(outputs(model, batch), batch)`.
        """
        return curvature.products.gnvp(
            self.runtime, state, batch, vector, outputs=outputs, loss=loss
        )

    def first_overflow(self, state: State) -> str | None:
        """The name of the first parameter, in order of declaration, whose gradient is
        not finite; None if all are finite.

        Pass the state that a step with `metrics.overflow` returned. The call reads the
        gradients, so on CUDA it waits for the device.

        *Collective:* every rank; sends one number.
        """
        return inspection.first_overflow(self.runtime, state)

    def following(
        self,
        rates: Sequence[float],
        optimizers: Sequence[OptimizerBlock | UserTransform] | None = None,
    ) -> Self:
        """The same step with other learning rates and other hyper-parameters of
        optimizers. It takes the same states.

        Args:
            rates: the learning rate of each parameter group, instead of every schedule;
                the same on all ranks. Group 0 holds the parameters that no group of
                `param_groups` takes (it may be empty), group i is
                `param_groups[i - 1]`.
            optimizers: the optimizer of each parameter group, with the same state
                structure; None keeps those of this step.
        """
        return _twin(self, self.runtime.following(rates, optimizers))

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        """The same step, which also reports its collectives to `observe`. It shares the
        model and the captured graphs.

        It learns an order of collectives of its own. Each rank may call it or not.
        """
        return _twin(self, self.runtime.observed(observe))

    def trace(self, batch: Any) -> list[Captured]:
        """The aten graphs that a step on this batch runs with `compile="step"`, in
        order, captured but not yet scheduled.

        It works for every step, with any `compile`, and on one rank alone. It computes,
        allocates, sends and changes nothing: state and batch are tensors without memory
        (`FakeTensorMode`), and tensors of `batch` may be on `meta`.
        """
        return graph.explain.trace(self, batch)

    def explain(self, batch: Any = None, *, machine: MachineModel | None = None) -> Explained:
        """The schedule of a step: compute and collectives over time, and below them the
        gathered bytes.

        With a `batch` it is the schedule of the graph that `compile="step"` makes,
        captured without tensors (see `trace`). An eager step enters and leaves its
        units at the same places. Inductor fuses compute, and keeps the collectives and
        their order. Without a batch it is the schedule of the largest graph that ran. A
        pipeline's schedule shows its stages.

        `print` it for a table, `draw()` for a picture. Times come from a simple model
        of a machine; they are not measured.
        """
        return parallelism.explain(self, batch, machine=machine)


def end(
    run: StepRuntime, collected: Collected, *, sees: Callable[[Outcome], object] | None = None
) -> tuple[State, Metrics]:
    """The end of a step of any program: the state after the update, and the metrics.
    *Collective:* every rank.

    Args:
        sees: gets the outcome before the device is given the update. It may begin to
            copy a number to the host then, which need not wait for the update.

    Raises:
        FloatingPointError: see `finish_step`.
    """
    with profiler_range("update"):
        try:
            finished = phases.finish_step(run, collected)
            if sees is not None:
                sees(finished.outcome)
            state = phases.update(run, collected, finished)
            return next_state(run.rules, collected, state, finished.outcome)
        except (RuntimeError, MemoryError) as error:
            explain(error, run.plan)
            raise


def _with_program(run: StepRuntime) -> StepRuntime:
    """The runtime with the program that its spec asks for, unless it has one."""
    if run.runs is not None:
        return run
    if run.spec.compile == "step":
        program = graph.program.GraphProgram.make(run, run.spec.compile_backend)
        return replace(run, runs=program)
    return replace(run, runs=Eager())


def _twin(step: AnyStep, runtime: StepRuntime) -> AnyStep:
    """The same step with another runtime."""
    twin = copy.copy(step)
    twin.runtime = runtime
    return twin
