"""`make_train_step`: a model and a configuration become one function from state and batch to state and metrics.

A step is the composition of the verbs, unit by unit (`fzero.runtime.eager` runs the first three lines as the model goes):

    params_P = gather(params_S)
    loss, grads_P = value_and_grad(model)(params_P, batch)
    grads_S = reduce_scatter_grads(grads_P)
    params_S, optimizer = optimizer_update(params_S, grads_S, optimizer)

Shape letters: P padded elements of a flat buffer = F·S, S elements of a shard, F shards (on one axis as many as ranks), W ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

import optree
import torch
from torch import Tensor, nn

from fzero.common.arguments import check_callable, check_kind, check_no_inference, check_trains, shown
from fzero.common.profiler_ranges import profiler_range
from fzero.comms import collectives
from fzero.comms.axes import AbstractAxis, Bound, ProcessAxis
from fzero.comms.failures import meet
from fzero.comms.records import CommRecord, Label
from fzero.config.config import Config, ConfigError
from fzero.config.optimizers import Optimizer
from fzero.optim.lr_schedules import Schedule
from fzero.plans.comm_hooks import GivenHook
from fzero.plans.flat_params import optimizer_specs
from fzero.plans.mesh_axes import check_mesh
from fzero.plans.orders import GivenOrder
from fzero.plans.param_groups import OwnTransform, ParamGroup, UserTransform
from fzero.plans.placements import GivenPlacements
from fzero.plans.plan import Plan, starts_of
from fzero.plans.unit_orders import Event, Orders
from fzero.runtime.activation_checkpointing import Choice
from fzero.runtime.eager import ForwardBackward
from fzero.runtime.finish import finish
from fzero.runtime.hooks import observer_of
from fzero.runtime.hyper_check import HyperCheck
from fzero.runtime.init_state import InitFn
from fzero.runtime.loss import LossFn, check_rows, loss_of, loss_row, mean_of
from fzero.runtime.metrics import assert_alike, check_alike, check_passes, mark_of
from fzero.runtime.module_binding import bound, is_bound, random_state
from fzero.runtime.module_buffers import make_equal, moved
from fzero.runtime.own_params import Origin, OwnGrads
from fzero.runtime.step_runtime import StepRuntime, check_not_donated
from fzero.runtime.step_spec import StepSpec, bind
from fzero.runtime.trainability import FixedFlags
from fzero.runtime.weights import state_dict, with_weights
from fzero.state import Metrics, TrainState
from sharding import Mesh, TensorSpec

__all__ = ["AccumulationWindow", "TrainStep", "make_train_step"]

if TYPE_CHECKING:
    from torch.fx import Graph

    from fzero.graph.blocks import CompiledBlocks
    from fzero.graph.captured import Captured
    from fzero.graph.program import GraphProgram
    from fzero.graph.timeline import Timeline
    from fzero.plans.machine_model import MachineModel


T = TypeVar("T")


def make_train_step(
    model: nn.Module,
    cfg: Config | Mapping[str, Any] | str,
    *,
    loss_fn: LossFn | None = None,
    mesh: Mesh | ProcessAxis | AbstractAxis | None = None,
    units: Sequence[str] | None = None,
    param_groups: Sequence[ParamGroup] = (),
    transform: OwnTransform | None = None,
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
) -> TrainStep:
    """A training step of `model` with ZeRO stage `cfg.zero_optimization.stage`.

    *Collective:* every rank of the job. Initializes the process group that torchrun describes, unless one exists already;
    compares model and configuration of all ranks.

    Args:
        model: any module. Every step uses its structure; only `init` reads its weights, and nothing writes them:
            `model.to("meta")` after `init` frees them. A model on `meta` is initialized unit by unit.
        cfg: a `Config`, a mapping in DeepSpeed's schema, or the path of a JSON file.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss, or `(sum, weight)` for a mean over the weights of all
            micro-batches and ranks (tokens, say); it calls `model` like the module. None calls the model with the batch
            (a tensor as `model(batch)`, a tuple or list as `model(*batch)`, a mapping as `model(**batch)`) and takes the
            output if it is a scalar, its `.loss`, or its first item.
        mesh: the ranks: a `sharding.Mesh`, or a bound axis. The stage shards the state over the mesh axis `"data"`; ranks
            along other axes hold replicas (`Mesh.of(node=2, data=4)`: hybrid sharding). None is one axis, or the mesh that
            `mics_shard_size` or `zero_hpz_partition_size` ask for. A `fzero.comms.AbstractAxis` stands for ranks that do not
            exist: `plan`, `specs`, `trace` and `explain` describe a job of its size.
        units: names of the modules that are gathered and released together, `*` is a wildcard; None finds them.
        param_groups: parameters with hyper-parameters of their own, `{"params": r"norm|bias", "weight_decay": 0.0}`; the
            first match counts. `"params"` may be a function of name and parameter. The learning-rate schedule scales a
            group's `lr` by the same factor as the configuration's.
        transform: replaces the configuration's optimizer: a `Transform` of your own (elementwise, which is checked), or
            a function of the learning rate that makes one; see `fzero.optim.transforms`.
        gather_hook: the `CommHook`, without a state, that sends the parameters which stage 3 gathers in the forward, the
            backward and `evaluate`: `fzero.comms.compressed(fzero.comms.quantize(8))`, say. None is the configuration's, or
            exact.
        reduce_hook: the `CommHook` that sends gradients along all axes of the mesh, or hooks by axis; with hooks, gradients
            are summed along one axis after the other. Their states are in `state.hook_states`. Sums are sent exactly.
        placements: where masters and optimizer tensors live, in place of the configuration's offload: by pattern,
            `{"optimizer/*/exp_avg": Placement("nvme", path="/fast")}`, or a function of quantity, flat buffer and leaf
            (`fzero.plans.placements`). The state then streams through each update, with the same bits on the CPU.
        order: the order of the parameters within each flat buffer, in place of `round_robin_gradients`: a function from the
            number of parameters and of ranks to a `sharding.Order` (`sharding.round_robin`; `fzero.testing.check_order`
            checks your own), or a list of all parameters' names in the order wanted. None is the configuration's, else the
            order of declaration. It decides which rank holds which part, and changes no number of the model.
        donate: the step may write into the state it is given, which raises when it is used again. False works on a copy;
            state in files cannot be copied.
        lr_schedule: the learning rate as a function of the number of updates so far, in place of the configuration's. It must
            return the same on all ranks, which is checked: metrics are the same on all ranks, a rank's own loss is not.
        schedule: `"learned"` fixes the order of collectives in the first step that runs all blocks. `"negotiated"` agrees on
            it in every step, for models whose units run in a data-dependent order; slower, and nothing is prefetched.
        checkpoint: activation checkpointing: the modules that keep only their inputs for the backward, and run again in
            it. n picks every n-th unit that is one module (a repeated block, or one named in `units`): 1 all of them, 2 the
            first, the third and so on. A function of a module's name and the module picks the outermost modules for which
            it is true; each should be no larger than a unit, because all parameters it uses are gathered while its backward
            runs. None is `activation_checkpointing.every`. The numbers do not change, bit for bit (with generated code: to
            rounding). With `compile="step"` each must be called as a module.
        compile: `"step"` captures the whole step as one graph (two with gradient accumulation), which updates the state in
            place; where optimizer state lives in other memory, the graph ends before the update, and parameters must be on
            the device. `"block"` compiles the forward of each unit that is one module, once for equal ones, and runs the rest
            eagerly. None compiles nothing. Rank 0 logs how long a capture took; another batch shape is captured again.
            `evaluate` is not compiled with `"step"`.
        compile_backend: `"inductor"` generates code, `"aot_eager"` runs the captured graph operation by operation.
        check_params: when the values of parameters are compared before and after a forward, which must not change them: in the
            `"first"` forward of each kind (training, evaluation), or `"always"`. The comparison finds changes through `.data`,
            and reads all parameters twice. A change that PyTorch counts is an error in every step.
        seed: of initial values on `meta` (equal on all ranks) and of dropout (different on each).
        after: the step whose training this one continues after parameters were frozen or unfrozen, or
            `fzero.checkpoint.starts(folder)` of its checkpoint. Parameters whose optimizer state begins at another update than
            that of others get flat buffers of their own, because a flat buffer counts its updates once.

    Raises:
        ConfigError: the configuration is wrong or does not fit the world size.
        MismatchError: on every rank, when ranks differ.
        ValueError: the model has no parameters, or a parameter has a hook, or a module is compiled by torch.compile, or a name
            in `units` or the function `checkpoint` matches nothing, or `checkpoint` is no positive integer, or the step cannot
            be compiled.
    """
    if not isinstance(mesh, ProcessAxis | AbstractAxis):
        check_mesh(mesh)
    cfg = Config.load(cfg)
    cfg.warn_of_hooks()
    recipe = StepSpec(
        model=model, cfg=cfg, loss_fn=loss_fn, units=units, param_groups=param_groups, transform=transform,
        gather_hook=gather_hook, reduce_hook=reduce_hook, placements=placements, order=order, donate=donate,
        lr_schedule=lr_schedule, schedule=schedule, checkpoint=checkpoint, compile=compile, compile_backend=compile_backend,
        check_params=check_params, seed=seed, starts={} if after is None else starts_after(after, model),
    )  # fmt: skip
    return TrainStep(recipe, mesh if isinstance(mesh, ProcessAxis | AbstractAxis) else bind(mesh, recipe.device))


def starts_after(after: TrainStep | Mapping[str, int], model: nn.Module) -> dict[str, int]:
    """The update at which each parameter's optimizer state begins, in training that continues a step or a checkpoint."""
    if not isinstance(after, TrainStep | Mapping):
        raise ValueError(
            f"make_train_step: after must be a step of make_train_step, or fzero.checkpoint.starts(folder) of a checkpoint, got "
            f"{type(after).__name__}; pass the one whose state is loaded or resharded"
        )
    known = starts_of(after.plan) if isinstance(after, TrainStep) else after
    new = 1 + max(known.values(), default=-1)
    return {name: known.get(name, new) for name, _ in model.named_parameters()}


class AccumulationWindow(NamedTuple):
    """The forwards and backwards since the last update; their gradients are in `state.grads`."""

    state: TrainState[Tensor]
    work: ForwardBackward
    buffers: dict[str, Tensor]
    """Copies of the module buffers, in which forwards write."""
    before: dict[str, tuple[Tensor, int]]
    """The same buffers with their versions when the window began."""
    loss_stats: tuple[Tensor, ...] = ()
    """Per backward, every rank's (loss, weight or -1, number of module buffers that changed for the first time, number of
    forwards and backwards so far, checksum of hyper-parameters), shape (W, 5)."""
    is_sum: bool = False
    """Whether losses are sums."""


class TrainStep:
    """`step(state, batch)` → `(state, metrics)`; made by `make_train_step`.

    Holds no tensors but scratch memory. The first step learns the order of collectives and which module buffers change;
    both are the same for every state.

    Attributes:
        recipe: the arguments of `make_train_step`.
        runtime: its parts on this rank: mesh, rules of the loss, offload, updater.
        plan: units, flat buffers, bytes and what is sent; `print(step.plan)`.
        specs: a `TrainState` with a `sharding.TensorSpec` for every tensor of the state.
        rank, world_size: of this process.
        device: where the state is, and the batch must be.
    """

    def __init__(self, recipe: StepSpec, axis: Bound | AbstractAxis) -> None:
        self.runtime = StepRuntime.make(recipe, axis)
        self.recipe, self.plan, self.rank, self.world_size = recipe, self.runtime.plan, axis.rank, axis.size
        self.device = recipe.device
        self._holds_still = False  # whether a forward ever held trained parameters still
        self._orders = Orders() if recipe.schedule == "learned" else None
        self._num_passes = 0
        self._check = HyperCheck(recipe.group_names, tuple(map(repr, recipe.optimizers)))
        self._moving_buffers: frozenset[str] | None = None  # names of module buffers that a step changes
        self._compared: set[str] = set()  # kinds of forwards whose parameters have been compared
        self.origin = Origin(recipe.model)
        self._own_grads: OwnGrads | None = None  # looked for in the first step
        self._statistics = recipe.statistics & set(self.plan.buffers)
        self._flags = FixedFlags(recipe.model, _trained(self.plan)) if recipe.trained is None else None
        self.program: GraphProgram | None = None
        self._blocks: CompiledBlocks | None = None
        if recipe.compile == "step":
            from fzero.graph.program import GraphProgram  # importing Dynamo takes longer than all of fzero

            self.program = GraphProgram.make(self.runtime, recipe.compile_backend)
        elif recipe.compile == "block":
            from fzero.graph.blocks import CompiledBlocks

            self._blocks = CompiledBlocks(recipe.blocks_to_compile, recipe.compile_backend)
        self.observer = observer_of(axis, recipe.model, recipe.cfg, recipe.loss_fn, self.device)

    @property
    def schedule(self) -> tuple[Event, ...] | None:
        """The events of a micro-step in order, once it is learned (as a rule, after the first step)."""
        learned = self._orders.learned if self._orders else {}
        halves = [learned.get(run) for run in (("forward", "train"), ("backward", 0, "train", 0))]
        return None if None in halves else tuple(chain(*filter(None, halves)))

    @property
    def specs(self) -> TrainState[TensorSpec]:
        """The spec and placement of every tensor of the state, in the state's own structure."""
        return self.runtime.specs

    # --- state ---------------------------------------------------------------------------------------------------

    def init(self, params: Mapping[str, Tensor] | None = None, *, init_fn: InitFn | None = None) -> TrainState[Tensor]:
        """This rank's part of a new state.

        *Collective:* every rank. Rank 0's values are used: each flat buffer is broadcast once.

        Args:
            params: a full state dict; None takes the model's present weights. Weights on `meta` are initialized.
            init_fn: `init_fn(module)` fills the parameters of a module on `meta`; None calls `reset_parameters`.

        Raises:
            ValueError: a name or shape does not fit, or nothing initializes a module on `meta`.
        """
        check_no_inference("init")
        check_callable("init_fn", init_fn, "a function of a module that fills it", optional=True)
        if params is not None:
            _check_values(params)
            params = {self.runtime.stored_names.get(key, key): tensor for key, tensor in params.items()}
        meet("TrainStep.init", self.runtime.mesh.world)
        self.origin.look(given=params is not None)
        return self.runtime.builder.make(self.runtime.mesh, params, init_fn)

    def gather(self, state: TrainState[Tensor], *, to: Literal["all", "rank0"] = "all") -> dict[str, Tensor]:
        """The full state dict: the model's own names, floating tensors in fp32 (or fp64, if they are), on the CPU.

        The weights are the masters' where there are masters.

        *Collective:* every rank; in stage 3, and in stages 1 and 2 with masters, each sends `(W-1)/W` of the parameters. One
        unit is gathered at a time.

        Args:
            to: `"all"` returns it on every rank, `"rank0"` on rank 0 alone and `{}` on the others.

        Raises:
            StoreError: on every rank, when files of one failed; the state cannot be used any more.
        """
        if to not in ("all", "rank0"):
            raise ValueError(f"to: must be 'all' or 'rank0', got {to!r}; pass one of these")
        self.runtime.check_state(state)
        meet("TrainStep.gather", self.runtime.mesh.world)
        return state_dict(self.runtime, state, keep=to == "all" or self.rank == 0)

    def weights(self, state: TrainState[Tensor]) -> dict[str, Tensor]:
        """This rank's part of the weights by flat buffer: the master where there is one, else the parameters.

        The state's own tensors, to be averaged into a tree of the same structure, say, for `with_weights`. Sends nothing.
        """
        self.runtime.check_state(state)
        return self.runtime.weights(state)

    def with_weights(self, state: TrainState[Tensor], weights: Mapping[str, Tensor]) -> TrainState[Tensor]:
        """The state with other weights, for `evaluate`, `gather`, `save` and `save_16bit_model`: masters and parameters both.

            ema = optree.tree_map(lambda mean, weight: torch.lerp(mean, weight, 0.01), ema, step.weights(state))
            loss = step.evaluate(step.with_weights(state, ema), batch)

        (`state._replace(master=…)` alone does not change the parameters that the model computes with.) The new state shares all
        other tensors with the old one, so a step that takes one of them ends both. Weights of the right dtype and device are
        not copied, so a donating step overwrites them.

        *Collective* where a rank holds a shard of the weights and full parameters: every rank; sends `(W-1)/W` of them.

        Args:
            state: of this step. It is not changed.
            weights: by flat buffer as in `weights`, in any floating dtype; other flat buffers keep their weights.

        Raises:
            ValueError: a name or a shape is not that of the state's weights, or the weights live in files.
        """
        self.runtime.check_state(state)
        return with_weights(self.runtime, state, weights)

    def _check_flags(self) -> None:
        """Raises if a parameter was frozen or unfrozen since the step was made: the plan does not follow."""
        if self._flags is not None:
            self._flags.check()

    # --- the step ------------------------------------------------------------------------------------------------

    def __call__(self, state: TrainState[Tensor], batch: Any) -> tuple[TrainState[Tensor], Metrics]:
        """One optimizer step on this rank's `batch`.

        *Collective:* every rank, with batches of the same size. Sends `plan.sent_per_step`, and a few numbers.

        Args:
            state: of `init` or the previous step; donated (see `make_train_step`).
            batch: this rank's samples. With `gradient_accumulation_steps` it is cut into that many micro-batches along the
                leading dimension of its tensors; or it is an iterator of micro-batches, and the next ones are taken.

        Raises:
            ValueError: the batch has another size than configured, or the loss is not a scalar, or a parameter was frozen or
                unfrozen since the step was made.
            FloatingPointError: the loss or the gradient is not finite (on every rank; the state was not updated). On CUDA
                a device-side assertion ends the process instead, so that no step waits for the device.
            ScheduleError: on this rank alone the units ran in an order that does not fit the learned one.
            CollectiveError: another rank died or did not call.
        """
        if self.observer:
            self.observer.sees(batch)
        if is_bound(self.recipe.model):
            raise RuntimeError(
                "step: must not be called inside a forward of its own model, got a call inside; call it after the forward, or "
                "compute there with the model itself"
            )
        self.runtime.check_state(state)
        self._check_flags()
        # Before random_state: the user's iterator must not draw from the state's generators.
        micro_batches = list(self.runtime.batches.split(batch))
        if not self.recipe.donate:
            state = optree.tree_map(torch.clone, state)
        window = self._begin(state)
        if self.program is not None:
            self._num_passes += 1
            new = self.program(self.runtime, self._check, state, window.buffers, micro_batches, number=self._num_passes)
            if self.observer:
                self.observer.has_updated()
            return new
        with random_state(state.rng, self.device) as rng:
            for index, micro_batch in enumerate(micro_batches):
                loss, weight = self.forward(window, partial(self._loss, micro_batch))
                is_last = index == self.plan.num_micro_steps - 1
                # A mean is divided here; a sum when all weights are known, in the update.
                parts = self.plan.num_micro_steps if weight is None else 1
                window = self.backward(window, loss, weight=weight, num_parts=parts, is_last=is_last)
        return self.update(window, rng)

    # --- its parts, for loops with code of their own between them ------------------------------------------------

    def begin(self, state: TrainState[Tensor], *, measures_early: bool = False) -> AccumulationWindow:
        """Starts an accumulation window; the state is donated to it.

        A step is `forward` and `backward`, once or several times, then `update`:

            window = step.begin(state)
            outputs = step.forward(window, lambda: model(x))
            window = step.backward(window, criterion(outputs, y))
            state, metrics = step.update(window)

        You may change or replace gradients of `window.state` that are in memory between the last two lines.

        Args:
            measures_early: whether each gradient is measured for the norm when it is collected, while it is in the cache, as
                `step(state, batch)` does. Then change gradients only in ways that PyTorch counts: in place, but not through
                `.data`, a collective, NumPy or DLPack.

        Raises:
            ValueError: the state is not one of this step, or a parameter was frozen or unfrozen since it was made.
            StoreError: the state is stale, or its files failed.
        """
        self.runtime.check_state(state)
        self._check_flags()
        return self._begin(state, measures_early=measures_early)

    def _begin(self, state: TrainState[Tensor], *, measures_early: bool = True) -> AccumulationWindow:
        check_trains("step")
        collectives.next_step(self.runtime.mesh.world)
        if self.observer:
            self.observer.begins()
        self.origin.leave()
        if not self.has_agreed:
            self._own_grads = OwnGrads(self.recipe.model)
        # Forwards write in copies, so that the given state stays valid if this step raises.
        buffers = {name: tensor.clone() for name, tensor in state.buffers.items()}
        before = {name: (tensor, tensor._version) for name, tensor in buffers.items()}
        transfer = self.runtime.offload.transfer(
            self.runtime.scratch, self.runtime.rules.of_shard, in_memory=measures_early
        )
        work = ForwardBackward(
            self.plan,
            self.runtime.mesh,
            state.params,
            state.grads,
            self._orders,
            transfer,
            hook_states=state.hook_states,
        )
        return AccumulationWindow(state, work, buffers, before)

    def forward(
        self,
        window: AccumulationWindow,
        function: Callable[[], T],
        *,
        run: str = "train",
        still: frozenset[str] = frozenset(),
    ) -> T:
        """Calls `function`, which may call the model, and returns its result; tensors in it carry the graph.

        Uses the process' random state. Autograd keeps no gathered parameter; no collective is under way afterwards.

        *Collective:* every rank, in the same order as the other parts of a step; in stage 3 each sends `(W-1)/W` of the
        parameters. An error ends the window on this rank, and the other ranks wait for it.

        Args:
            window: of `begin`, or the last `backward`.
            function: it must use the model's parameters through the model.
            run: a name for forwards that use the units in the same order; each name learns its order.
            still: the names of trained parameters that get no gradient from this forward. A flat buffer is not updated if all
                its parameters are still in all forwards of a window.
        """
        check_callable("forward", function, "a function without arguments that calls the model")
        self._num_passes += 1  # ranks compare it, to find one that has raised
        work, self._holds_still = window.work, self._holds_still or bool(still)
        with (
            profiler_range("forward"),
            self._bound_to(window),
            work.forward(run, still=still, compares=self._compares(run)),
        ):
            result = function()
        self._compared.add(run)
        return result

    def _compares(self, run: str) -> bool:
        """Whether a forward's parameters are compared before and after: in the first of its kind, or always if configured."""
        return run not in self._compared or self.recipe.check_params == "always"

    def backward(
        self,
        window: AccumulationWindow,
        loss: Tensor,
        *,
        weight: Tensor | None = None,
        num_parts: int = 1,
        is_last: bool = True,
        keeps: bool = False,
    ) -> AccumulationWindow:
        """Adds the gradients of a loss, of one or several forwards of this window, to those of the state.

        *Collective:* every rank; see `Plan.sent_per_step`. An error ends the window, as in `forward`.

        Args:
            window: of `begin`, or the last `backward`, which must not be used again.
            loss: a scalar; it is multiplied by the loss scale here.
            weight: of a loss that is a sum; then all losses of the window are sums.
            num_parts: the gradients are divided by it: the number of micro-steps over which the loss is a mean.
            is_last: whether this is the last backward before the update: gradients kept in full are reduced now. A backward
                after it reduces its own gradients, and adds them.
            keeps: whether the graph is kept, for another backward.
        """
        if not isinstance(loss, Tensor) or loss.dim():
            given = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
            raise ValueError(f"backward: loss must be a 0-d tensor, got {given}; take its mean or sum")
        self._num_passes += 1
        work, scale = window.work, window.state.loss_scale.scale
        newly_moved = moved(window.buffers, window.before) - (self._moving_buffers or set())
        scaled = loss
        if self.recipe.cfg.scales_loss:
            scaled = loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale
        if is_last and self.runtime.offload.has_files:
            self.runtime.offload.read_ahead(window.state, work.still_buffers)
        checksum = self._check.checksum(self.runtime.updater, window.state, num_parts=num_parts)
        with profiler_range("backward"), self._bound_to(window):
            stats_W5 = work.backward(
                scaled, loss_row(loss, weight, len(newly_moved), self._num_passes + mark_of(work.still), checksum),
                grad_scale=1 / (self.runtime.rules.predivide * num_parts), is_first=not window.loss_stats, is_last=is_last,
                keeps=keeps,
                check=(lambda rows: check_passes(rows[:, 3])) if self._holds_still else None,
            )  # fmt: skip
        check_alike(stats_W5[:, 3:], self.runtime.mesh.world, partial(self._check.named, num_parts))
        if self._own_grads is not None:
            self._own_grads.check()
        return window._replace(loss_stats=(*window.loss_stats, stats_W5), is_sum=weight is not None)

    @contextmanager
    def passing(self, window: AccumulationWindow, loss: Tensor, *, keeps: bool = False) -> Iterator[None]:
        """Inside, a backward of another step may run through forwards of this one (a generator's loss, through its
        discriminator); it adds no gradients to the parameters of this step.

        *Collective* in stage 3: every rank; each sends `(W-1)/W` of the parameters.

        Args:
            window, keeps: as for `backward`.
            loss: the loss of the other step's backward.
        """
        with self._bound_to(window), window.work.passing(loss, keeps=keeps):
            yield

    def update(
        self, window: AccumulationWindow, rng: dict[str, Tensor] | None = None
    ) -> tuple[TrainState[Tensor], Metrics]:
        """Clips, skips an overflow, and updates with the gradients of a window, which ends here.

        *Collective:* every rank; gathers updated parameters that every rank holds in full, and a few numbers.

        Args:
            window: with at least one backward.
            rng: the random state of the next state; None is the one of the state.

        Raises:
            FloatingPointError: see `__call__`.
        """
        check_kind(
            "update",
            window,
            AccumulationWindow,
            "given the AccumulationWindow of the last backward",
            "pass what step.backward(...) returned",
        )
        check_not_donated(window.state)
        if window.work.is_over:
            raise RuntimeError(
                "update: must be of a window that no error has ended, and an error did, so that gradients are missing; begin "
                "another window with the same state"
            )
        if not window.loss_stats:
            raise ValueError(
                "update: needs a backward since the last one, and there was none; call backward(loss) first"
            )
        with profiler_range("update"):
            state, buffers = window.state, window.buffers
            window.work.close()
            if self.runtime.offload.passes_use_files:
                self.runtime.agree_on_files(state)
            stats_AW5 = torch.stack(window.loss_stats)
            if self.device.type != "cpu":
                assert_alike(stats_AW5)
            changed, moving = moved(buffers, window.before), self._moving_buffers
            if moving is None:  # kernels such as BatchNorm's change a buffer without its version
                changed |= self._statistics | {n for n in buffers if not torch.equal(buffers[n], state.buffers[n])}
            # On CUDA the host would wait for the device to read whether any rank has a newly moved buffer.
            has_news = bool(stats_AW5[..., 2].any()) if self.device.type == "cpu" else self.recipe.schedule != "learned"
            self._moving_buffers = make_equal(buffers, changed, moving, self.runtime.mesh.world, has_news=has_news)
            self._own_grads = None
            hook_states: dict[str, Any] = window.work.hook_states
            rng = state.rng if rng is None else rng
            work = window.work
            new = finish(
                self.runtime, self._check, state, stats_AW5[..., :2], buffers, rng, hook_states, is_sum=window.is_sum,
                transfer=work.transfer, still=work.still_buffers,
            )  # fmt: skip
        if self.observer:
            self.observer.has_updated()
        return new

    def following(self, rates: Sequence[float], optimizers: Sequence[Optimizer | UserTransform] | None = None) -> Self:
        """The same step with other learning rates, and optimizers with other hyper-parameters.

        It shares with this step all that was learned, and takes the same states.

        Args:
            rates: of each parameter group, in place of every schedule. Group 0 holds the parameters that no group of
                `param_groups` takes (it may be empty), group i is `param_groups[i - 1]`. The same on all ranks.
            optimizers: of each parameter group, with the same state structure; None keeps those of this step.

        Raises:
            ValueError: there is not one rate, or optimizer, for each group, or a rate is no finite number.
        """
        names = self.recipe.group_names
        for field, given in (("rates", rates), ("optimizers", rates if optimizers is None else optimizers)):
            if not isinstance(given, Sequence) or len(given) != len(names):
                got = f"{len(given)}: {list(given)!r}" if isinstance(given, Sequence) else repr(given)
                raise ValueError(
                    f"following: {field} must be a list with one for each of the {len(names)} parameter groups "
                    f"({', '.join(names)}), got {got}; give that of every group in this order"
                )
        twin = copy.copy(self)
        twin.runtime = self.runtime.with_updater(self.runtime.updater.following(rates, optimizers))
        twin.runtime.updater.hyper(0)  # raises for what is no rate
        if optimizers is not None:
            placed = optimizer_specs([b for b in self.plan.flat_buffers if b.trainable], optimizers)
            if optree.tree_structure(placed) != optree.tree_structure(dict(self.plan.optimizer)):
                raise ConfigError(
                    "optimizer.params: must not change the structure of the optimizer's state during training (a momentum from "
                    "or to 0), and did; make the step with it from the start"
                )
        return twin

    @contextmanager
    def _bound_to(self, window: AccumulationWindow) -> Iterator[None]:
        """Inside, the model computes with the tensors of a window."""
        with (
            bound(self.recipe.model, self.plan.aliases, window.work.fetch, window.buffers),
            self._blocks.applied(self.recipe.model) if self._blocks else nullcontext(),
            self.runtime.checkpointing.applied(
                self.recipe.model, device=self.device, recomputing=window.work.recomputing, aliases=self.plan.aliases,
                moving=self._moving_buffers,
            ),
        ):  # fmt: skip
            yield

    def evaluate(self, state: TrainState[Tensor], batch: Any) -> Tensor:
        """The mean loss over ranks, in evaluation mode, without gradients; the state is unchanged.

        The model computes with `state.params`; `with_weights` makes a state of other weights.

        *Collective:* every rank; in stage 3 each sends `(W-1)/W` of the parameters.
        """
        self.runtime.check_state(state)
        meet("TrainStep.evaluate", self.runtime.mesh.world)
        modes = [(module, module.training) for module in self.recipe.model.modules()]

        def loss_of_batch() -> tuple[Tensor, Tensor | None]:
            self.recipe.model.eval()  # here, because the model's own eval() may read its tensors
            return self._loss(batch)

        try:
            with torch.no_grad(), random_state(state.rng, self.device):
                loss, weight = self._inspect(state, loss_of_batch, "evaluate")
        finally:
            for module, mode in modes:
                module.training = mode
        row = loss_row(loss, weight, self._num_passes)
        stats_W3 = collectives.stack(row, self.runtime.mesh.world, label=Label("loss_stats", phase="boundary"))
        check_passes(stats_W3[:, 2])
        check_rows(stats_W3[:, :2], is_sum=weight is not None)
        return mean_of(stats_W3[:, :2], is_sum=weight is not None)[0].float()

    def inspect(self, state: TrainState[Tensor], function: Callable[[], T], *, run: str = "inspect") -> T:
        """Calls `function`, which may call the model, and returns its result; no gradients are collected, and the state is
        unchanged.

        For evaluation, and for gradients with respect to inputs, by autograd or torch.func: these keep alive the gathered
        parameters that they need.

        *Collective* in stage 3: every rank; each sends `(W-1)/W` of the parameters.

        Args:
            function, run: as for `forward`.

        Raises:
            ValueError: the state is not one of this step.
            StoreError: the state is stale, or its files failed, now (on every rank) or before.
        """
        check_callable("inspect", function, "a function without arguments that calls the model")
        self.runtime.check_state(state)
        if self.plan.stage == 3:
            meet("TrainStep.inspect", self.runtime.mesh.world)
        return self._inspect(state, function, run)

    def _inspect(self, state: TrainState[Tensor], function: Callable[[], T], run: str) -> T:
        self._num_passes += 1
        work = ForwardBackward(
            self.plan,
            self.runtime.mesh,
            state.params,
            None,
            self._orders,
            self.runtime.offload.transfer(self.runtime.scratch),
        )
        buffers = {name: tensor.clone() for name, tensor in state.buffers.items()}
        with (
            bound(self.recipe.model, self.plan.aliases, work.fetch, buffers),
            self._blocks.applied(self.recipe.model) if self._blocks else nullcontext(),
            work.forward(run, saves=False, compares=self._compares(run)),
        ):
            result = function()
        self._compared.add(run)
        work.close()
        if self.runtime.offload.passes_use_files:
            self.runtime.agree_on_files(state)
        return result

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """The loss of a batch, and its weight if `loss_fn` returns a sum and a weight."""
        run = self.runtime
        try:
            return loss_of(
                self.recipe.model, self.recipe.loss_fn, run.batches.cast(batch),
                reduces_by_sum=not run.rules.is_mean, autocast=run.autocast, device=self.device.type,
            )  # fmt: skip
        except RuntimeError as error:
            param_dtype = self.recipe.cfg.precision.param_dtype
            if param_dtype is not None and ("dtype" in str(error) or "scalar type" in str(error)):
                error.add_note(
                    f"fzero: the parameters are {param_dtype} (step.plan shows every dtype), the batch is cast to that "
                    f"with auto_cast in fp16 or bf16, and module buffers with data_types.buffer_dtype"
                )
            raise

    def trace(self, batch: Any) -> list[Captured]:
        """The aten graphs that a step on this batch runs with `compile="step"`, in order, captured but not yet scheduled.

        Works in every step, whatever its `compile` is, and on one rank alone. It computes, allocates, sends and changes
        nothing: state and batch are tensors without memory (`FakeTensorMode`).

        Args:
            batch: this rank's samples, as for a step; tensors may be on `meta`. Takes the next micro-batches of an iterator.

        Raises:
            ConfigError, CompileError, ValueError: the step cannot be captured, or the batch is not what was configured.
        """
        from fzero.graph.program import GraphProgram

        micro_batches = list(self.runtime.batches.split(batch))
        program = self.program
        if program is None or program.until == "gradients":  # in a dry run all state is on the device
            program = GraphProgram.make(self.runtime, "aot_eager", until="update")
        return program.trace(self.runtime, micro_batches)

    def explain(self, batch: Any = None, *, machine: MachineModel | None = None) -> Timeline:
        """The schedule of a step: compute and collectives over time, and the gathered bytes under them.

        With a `batch`, the schedule of the graph that `compile="step"` makes, captured without tensors (see `trace`). It
        works before the first step, too, and on one rank alone. An eager step enters and leaves its units at the same places;
        Inductor fuses compute, and keeps the collectives and their order. Without a batch, for `compile="step"` and after the
        first step, the schedule of the largest graph that ran.

        `print` it for a table, `draw()` for a picture. Times come from a simple model of a machine; they are not measured.

        Raises:
            ValueError: no batch is given, and no graph has run; and what `trace` raises.
        """
        from fzero.graph.explain import explain

        return explain(self, batch, machine=machine)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that have run, with `compile="step"`."""
        return () if self.program is None else tuple(self.program.compiled.backend.graphs)

    @property
    def graph_axes(self) -> Any:
        """The axes of the mesh, as the nodes of the graphs name them."""
        return None if self.program is None else self.program.compiled.axes

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        """The same step, which also reports its collectives to `observe`; it shares the model and what is captured.

        It learns its order of collectives by itself. Each rank may call it or not.
        """
        check_callable("observe", observe, "a function of a fzero.comms.CommRecord")
        twin = copy.copy(self)
        twin.runtime = self.runtime.observed(observe)
        twin._orders = None if self._orders is None else self._orders.copy()
        twin.program = None if self.program is None else self.program.observed(observe)
        return twin

    @property
    def has_agreed(self) -> bool:
        """Whether the ranks have agreed on everything that a first step agrees on; a step in one graph agrees on nothing."""
        return self.program is not None or self._moving_buffers is not None

    def first_overflow(self, state: TrainState[Tensor]) -> str | None:
        """The name of the first parameter, in order of declaration, whose gradient is not finite; None if all are finite.

        For the state that a step with `metrics.overflow` returned. Reads the gradients, so on CUDA it waits for the device.

        *Collective:* every rank; sends one number.
        """
        self.runtime.check_state(state)
        return self.runtime.metrics.first_overflow(state)


# --- helpers -----------------------------------------------------------------------------------------------------


def _trained(plan: Plan) -> dict[str, bool]:
    """Whether each parameter is trained."""
    return {name: buffer.trainable for buffer in plan.flat_buffers for name in buffer.layout.names}


def _check_values(params: object) -> None:
    """Raises unless it is a state dict."""
    check_kind("params", params, Mapping, "a state dict", "pass model.state_dict()")
    assert isinstance(params, Mapping)
    for name, value in params.items():
        check_kind(
            f"params[{name!r}]", value, Tensor, "a tensor", "pass model.state_dict(), or torch.from_numpy(array)"
        )
