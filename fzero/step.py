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
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

import optree
import torch
from torch import Tensor, nn

from fzero.common.arguments import check_callable, check_kind, check_no_inference, check_trains, shown
from fzero.common.profiler_ranges import profiler_range
from fzero.comms import collectives
from fzero.comms.axes import AbstractAxis, Bound, LockstepAxis, ProcessAxis
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
from fzero.plans.unit_scheduler import Event, Orders
from fzero.runtime.activation_checkpointing import Choice
from fzero.runtime.batches import without_memory
from fzero.runtime.eager import ForwardBackward
from fzero.runtime.hooks import observer_of
from fzero.runtime.init_state import InitFn
from fzero.runtime.loss import LossFn, check_rows, loss_of, loss_row, mean_of
from fzero.runtime.metrics import assert_alike, check_alike, check_passes, mark_of
from fzero.runtime.module_binding import bound, is_bound, random_state
from fzero.runtime.module_buffers import make_equal, moved
from fzero.runtime.own_params import Origin, OwnGrads
from fzero.runtime.step_runtime import StepRuntime, check_not_donated
from fzero.runtime.step_spec import StepSpec, bind
from fzero.runtime.trainability import FixedFlags
from fzero.runtime.update import Hyper, TracedHyperparams
from fzero.state import Metrics, TrainState, taken
from fzero.storage.file_tensor import FileTensor
from fzero.storage.shard_io import ShardTransfer
from sharding import Mesh, TensorSpec
from sharding.views import torch_dtype

__all__ = ["AccumulationWindow", "TrainStep", "make_train_step"]

if TYPE_CHECKING:
    from torch.fx import Graph

    from fzero.comms.stacked import Stacked
    from fzero.graph.blocks import CompiledBlocks
    from fzero.graph.capture import CompiledStep
    from fzero.graph.captured import Captured
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

    *Collective:* every rank of the job. Joins the process group that torchrun describes, if there is one and nobody
    joined it; compares model and configuration of all ranks.

    Args:
        model: any module. Its structure is used at every step, its weights by `init` only, and they are never written:
            `model.to("meta")` after `init` frees them. A model on `meta` is initialised unit by unit.
        cfg: a `Config`, a mapping in DeepSpeed's schema, or the path of a JSON file.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss, or `(sum, weight)` for a mean over the weights of all
            micro-batches and ranks (tokens, say); `model` is called like the module. None calls the model with the batch
            (a tensor as `model(batch)`, a tuple or list as `model(*batch)`, a mapping as `model(**batch)`) and takes the
            output if it is a scalar, its `.loss`, or its first item.
        mesh: the ranks: a `sharding.Mesh`, whose axis `"data"` the state is sharded over, as the stage says, while ranks
            along its other axes hold the same (`Mesh.of(node=2, data=4)`: hybrid sharding); or a bound axis. None is one
            axis, or what `mics_shard_size` or `zero_hpz_partition_size` mean. On a `fzero.comms.AbstractAxis`
            (`AbstractAxis.of` a mesh) no rank is there: `plan`, `specs`, `trace` and `explain` describe a job of so many ranks.
        units: names of the modules that are gathered and released together, `*` is a wildcard; None finds them.
        param_groups: parameters with hyper-parameters of their own, `{"params": r"norm|bias", "weight_decay": 0.0}`; the
            first that matches counts. `"params"` may be a function of name and parameter. A group's `lr` scales the
            schedule: what a schedule makes of the configuration's lr it makes of the group's.
        transform: in place of the configuration's optimizer: a `Transform` of your own (elementwise, which is checked), or
            a function of the learning rate that makes one; `fzero.optim.transforms` says how one is made.
        gather_hook: how the parameters that stage 3 gathers travel in the forward, the backward and `evaluate`
            (`fzero.comms.compressed(fzero.comms.quantize(8))`, say): a `CommHook` without a state. None is the
            configuration's, or exact.
        reduce_hook: how gradients travel: a `CommHook` for all axes of the mesh, or hooks by axis, through which they are
            added up along one axis after the other. Its state is in `state.hook_states`. Sums travel as they are.
        placements: where masters and tensors of the optimizer's state live, in place of what the configuration says: by
            pattern, `{"optimizer/*/exp_avg": Placement("nvme", path="/fast")}`, or a function of quantity, flat buffer and
            leaf (`fzero.plans.placements`). The state then streams through each update, with the same bits on the CPU.
        order: of the parameters within each flat buffer, in place of `round_robin_gradients`: a function of how many there are
            and how many ranks share them, which gives a `sharding.Order` (`sharding.round_robin`;
            `fzero.testing.check_order` tries one of yours), or the names of all parameters, of which a buffer's
            follow each other as they do there. None is as the configuration says: as declared. It decides who holds which
            part, and no number of the model.
        donate: the step may write into the state it is given, which raises when it is used again. False works on a copy, which
            there is none of state in files.
        lr_schedule: the learning rate as a function of the number of updates so far, in place of the configuration's. All ranks
            must get the same from it, which is checked: metrics are the same on all, a rank's own loss is not.
        schedule: `"learned"` fixes the order of collectives in the first step that runs all blocks. `"negotiated"` agrees
            on it in every step: for models whose units run in an order that depends on data. Slower, nothing starts early.
        checkpoint: activation checkpointing: the modules that keep only their inputs for the backward, and run again in
            it. n is every n-th unit that is one module (a repeated block, or one named in `units`): 1 all of them, 2 the
            first, the third and so on. Or a function of a module's name and the module, of which the outermost modules it
            is true of count; what it picks should be no larger than a unit, for all that it uses is gathered while its
            backward runs. None does as `activation_checkpointing.every` says. The numbers stay the same, bit for bit (with
            generated code: to rounding). With `compile="step"` each must be called as a module.
        compile: `"step"` captures the whole step as one graph (two with gradient accumulation), which updates the state in
            place; of a step whose state lives in other memory, which parameters must not, all but the update. `"block"`
            compiles the forward of each unit that is one module, once for equal ones, and runs the rest as it is. None
            compiles nothing. A captured step tells how long that took, on rank 0; batches of another shape are captured
            once more. `evaluate` is not compiled with `"step"`.
        compile_backend: `"inductor"` generates code, `"aot_eager"` runs the captured graph operation by operation.
        check_params: when the values of parameters are compared before and after a forward, which must not change them: in the
            `"first"` of each kind (training, evaluation), or `"always"`. It finds what goes through `.data`, and reads all
            parameters twice. A change that PyTorch counts is an error in every step.
        seed: of initial values on `meta` (equal on all ranks) and of dropout (different on each).
        after: the step whose training this one continues, or `fzero.checkpoint.starts(folder)` of its checkpoint, where
            parameters were frozen or unfrozen since. Parameters whose optimizer state begins now, or began later than that of
            others, get flat buffers of their own, because the updates of a flat buffer are counted once.

    Raises:
        ConfigError: the configuration is wrong or does not fit the world size.
        MismatchError: told on every rank, when ranks differ.
        ValueError: the model has no parameters, or a parameter has a hook, or a module is compiled by torch.compile, or a name
            in `units` or the function `checkpoint` matches nothing, or `checkpoint` is no positive integer, or the step cannot
            be compiled as asked.
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
    """When the optimizer state of each parameter begins in training that goes on from a step or a checkpoint."""
    if not isinstance(after, TrainStep | Mapping):
        raise ValueError(
            f"make_train_step: after must be a step of make_train_step, or fzero.checkpoint.starts(folder) of a checkpoint, got "
            f"{type(after).__name__}; pass the one whose state is loaded or resharded"
        )
    known = starts_of(after.plan) if isinstance(after, TrainStep) else after
    new = 1 + max(known.values(), default=-1)
    return {name: known.get(name, new) for name, _ in model.named_parameters()}


class AccumulationWindow(NamedTuple):
    """What forwards and backwards since the last update have come to; the gradients are in `state.grads`."""

    state: TrainState[Tensor]
    work: ForwardBackward
    buffers: dict[str, Tensor]
    """The module's buffers, as forwards change them."""
    before: dict[str, tuple[Tensor, int]]
    """The buffers at first, with their versions."""
    told: tuple[Tensor, ...] = ()
    """Of each backward what every rank told (W, 5): its loss, its weight or -1, whether a buffer moved that never did, the
    number of its pass, and a checksum of its hyper-parameters."""
    is_sum: bool = False
    """Whether losses are sums."""


@dataclass(slots=True)
class _Said:
    """The hyper-parameters that this rank has told the others of, as a checksum, and those that it has not."""

    now: Hyper | None = None
    """Of the update to come, as the last backward knew them; None where the host would have to wait for the device."""
    last: Hyper | None = None
    """Of the last update."""
    is_late: bool = False
    """Whether these are others than the backward before it knew."""


class TrainStep:
    """`step(state, batch)` → `(state, metrics)`; made by `make_train_step`.

    Keeps no tensors but scratch memory. What it learns in the first step (the order of collectives, which module
    buffers change) is the same for every state.

    Attributes:
        recipe: what it was made from.
        plan: units, flat buffers, bytes and what is sent; `print(step.plan)`.
        specs: a `TrainState` with a `sharding.TensorSpec` for every tensor of the state.
        rank, world_size: this process' place.
        device: where the state is, and the batch must be.
    """

    def __init__(self, recipe: StepSpec, axis: Bound | AbstractAxis) -> None:
        self.runtime = StepRuntime.make(recipe, axis)
        self.recipe, self.plan, self.rank, self.world_size = recipe, self.runtime.plan, axis.rank, axis.size
        self.device = recipe.device
        self._holds_still = False  # whether a forward ever held trained parameters still
        self._orders = (
            Orders() if recipe.schedule == "learned" else None
        )  # of the collectives of forwards and backwards
        self._num_passes, self._said = 0, _Said()
        self._moving_buffers: frozenset[str] | None = None  # names of module buffers that a step changes
        self._compared: set[str] = set()  # kinds of forwards whose parameters have been compared
        self.origin = Origin(recipe.model)
        self._own_grads: OwnGrads | None = None  # of the module, in the first step
        self._statistics = recipe.statistics & set(self.plan.buffers)
        self._flags = FixedFlags(recipe.model, _trained(self.plan)) if recipe.trained is None else None
        self._compiled: CompiledStep | None = None
        self._blocks: CompiledBlocks | None = None
        # Where the updated state lives off the device, the graph of a step ends with the gradients.
        is_away = any(map(self.runtime.offload.is_away, self.plan.flat_buffers))
        self._until: Literal["gradients", "update"] = "gradients" if is_away else "update"
        if recipe.compile == "step":
            self._compiled, self._hyperparams = self.one_graph(recipe.compile_backend, until=self._until)
        elif recipe.compile == "block":
            from fzero.graph.blocks import CompiledBlocks

            self._blocks = CompiledBlocks(recipe.blocks_to_compile, recipe.compile_backend)
        self.observer = observer_of(axis, recipe.model, recipe.cfg, recipe.loss_fn, self.device)

    @property
    def schedule(self) -> tuple[Event, ...] | None:
        """The events of a micro-step in order, once it is learned: as a rule, after the first step."""
        learned = self._orders.learned if self._orders else {}
        halves = [learned.get(run) for run in (("forward", "train"), ("backward", 0, "train", 0))]
        return None if None in halves else tuple(chain(*filter(None, halves)))

    def one_graph(
        self,
        backend: Literal["inductor", "aot_eager"] | None,
        stacked: Stacked | None = None,
        *,
        until: Literal["gradients", "update"] = "update",
    ) -> tuple[CompiledStep, TracedHyperparams]:
        """The step as one graph, or what comes before its update; and what it reads about the update."""
        from fzero.graph.capture import CompiledStep  # importing Dynamo takes longer than all of fzero
        from fzero.graph.step_inputs import Rules

        if self.runtime.checkpointing.names and self.runtime.checkpointing.moves is not None:
            raise ConfigError(
                "activation_checkpointing.cpu_checkpointing: must be false where the whole step is one graph, got true; leave "
                "it out, or pass compile='block'"
            )
        hyperparams = self.runtime.updater.hyperparams(self.device)
        transforms = self.runtime.updater.transforms_by(hyperparams) if until == "update" else {}
        rules = Rules(
            self.runtime.rules,
            self.runtime.scaling,
            self.recipe.cfg.skips_overflow,
            transforms,
            self.runtime.updater.places,
            hyperparams.salts,
        )
        axis = self.runtime.ranks
        if isinstance(axis, LockstepAxis):
            axis = AbstractAxis(axis.name, axis.size, axis.rank, "gloo", axis.mesh)  # of what is never run
        compiled = CompiledStep(
            self.recipe.model, self.plan, axis, self.device, rules,
            loss_fn=self.recipe.loss_fn, autocast=self.runtime.autocast, backend=backend,
            checkpoint=self.runtime.checkpointing.names, stacked=stacked,
        )  # fmt: skip
        return compiled, hyperparams

    @property
    def specs(self) -> TrainState[TensorSpec]:
        """The spec and placement of every tensor of the state, in the state's own structure."""
        return self.runtime.specs

    # --- state ---------------------------------------------------------------------------------------------------

    def init(self, params: Mapping[str, Tensor] | None = None, *, init_fn: InitFn | None = None) -> TrainState[Tensor]:
        """A new state, this rank's part.

        *Collective:* every rank. Rank 0's values are used: each flat buffer is broadcast once.

        Args:
            params: a full state dict; None takes the model's present weights. Weights on `meta` are initialised.
            init_fn: `init_fn(module)` fills the parameters of a module on `meta`; None calls `reset_parameters`.

        Raises:
            ValueError: a name or shape that does not fit, or a module on `meta` that nothing initialises.
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

        Where there is a master copy, the weights are the master's.

        Raises:
            StoreError: on every rank, when files of one failed; the state cannot be used any more.

        *Collective:* every rank; in stage 3, and in stage 1 and 2 where there is a master copy, each sends `(W-1)/W` of the
        parameters. One unit is gathered at a time.

        Args:
            to: `"all"` gives it to every rank, `"rank0"` to rank 0 alone and `{}` to the others.
        """
        if to not in ("all", "rank0"):
            raise ValueError(f"to: must be 'all' or 'rank0', got {to!r}; pass one of these")
        self.runtime.check_state(state)
        meet("TrainStep.gather", self.runtime.mesh.world)
        full: dict[str, Tensor] = {}
        keep = to == "all" or self.rank == 0
        for views in self.runtime.full_weights(state):
            if keep:
                full |= {name: _portable(view) for name, view in views.items()}
        self.runtime.agree_on_files(state)
        if not keep:
            return {}
        full |= {name: _portable(tensor) for name, tensor in state.buffers.items()}
        return {key: full[name] for key, name in self.runtime.stored_names.items()}

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

        (`state._replace(master=…)` alone changes nothing that the model computes with, where there are masters.) All else is the
        state's own, so both end when a step takes one of them. Weights that have the right dtype and place are not copied: give
        a step that donates only what you need no more.

        *Collective* where a rank holds a shard of the weights and whole parameters: every rank; sends `(W-1)/W` of them.

        Args:
            state: of this step. It is left as it is.
            weights: by flat buffer as `weights` has them, in any floating dtype; buffers that are left out keep theirs.

        Raises:
            ValueError: a name or a shape is not that of the state's weights, or what would change lives in files.
        """
        own = self.weights(state)
        for key, weight in weights.items():
            if key not in own or not isinstance(weight, Tensor) or weight.shape != own[key].shape:
                got = f"{tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
                wanted = f"a tensor of shape {tuple(own[key].shape)}" if key in own else f"one of {', '.join(own)}"
                raise ValueError(
                    f"with_weights: {key!r} must be {wanted} in this step, got {got}; give the flat buffers of "
                    f"step.weights(state) (step.init(params) takes a state dict)"
                )
        master, params = dict(state.master), dict(state.params)
        for buffer in self.plan.flat_buffers:
            if buffer.key not in weights:
                continue
            key, weight, home = buffer.key, weights[buffer.key].detach(), params[buffer.key]
            if isinstance(home, FileTensor) or isinstance(own[key], FileTensor):
                raise ValueError(
                    f"with_weights: {key!r} must be in memory to have other weights, and is in a file; bring the state into "
                    f"memory with fzero.place and a step without offload, and evaluate with that"
                )
            if key in master:
                master[key] = weight.to(own[key].device, own[key].dtype)
            narrow = weight.to(self.device, torch_dtype(buffer.dtypes.param))
            if narrow.numel() != home.numel():
                axes = self.runtime.mesh.axes_of(buffer.row.optimizer)
                narrow = self.runtime.builder.cut(self.runtime.mesh.all_gather(narrow, axes), buffer.params)
            params[key] = narrow.to(home.device)
        return state._replace(master=master, params=params)

    def _check_flags(self) -> None:
        """Raises where a parameter was frozen or unfrozen since the step was made, which the plan does not follow."""
        if self._flags is not None:
            self._flags.check()

    # --- the step ------------------------------------------------------------------------------------------------

    def __call__(self, state: TrainState[Tensor], batch: Any) -> tuple[TrainState[Tensor], Metrics]:
        """One optimizer step on this rank's `batch`.

        *Collective:* every rank, with batches of the same size. Sends what `plan.sent_per_step` says, and some numbers.

        Args:
            state: of `init` or the step before; donated (see `make_train_step`).
            batch: this rank's samples. With `gradient_accumulation_steps` it is cut into so many micro-batches along the
                leading dimension of its tensors; or it is an iterator of micro-batches, of which the next ones are taken.

        Raises:
            ValueError: the batch has another size than configured, or the loss is not a scalar, or a parameter was frozen or
                unfrozen since the step was made.
            FloatingPointError: the loss or the gradient is not finite (on every rank; the state was not updated). On CUDA
                a device-side assertion ends the process instead, so that no step waits for the device.
            ScheduleError: on this rank alone the units ran in an order that the learned one does not serve.
            CollectiveError: another rank died or did not come.
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
        # At once: an iterator of the user's must not meet the state's random generators.
        micro_batches = list(self.runtime.batches.split(batch))
        if not self.recipe.donate:
            state = optree.tree_map(torch.clone, state)
        window = self._begin(state)
        if self._compiled is not None:
            call = self._call_compiled if self._until == "update" else self._call_and_update
            return call(self._compiled, state, window.buffers, micro_batches)
        with random_state(state.rng, self.device) as rng:
            for index, micro_batch in enumerate(micro_batches):
                loss, weight = self.forward(window, partial(self._loss, micro_batch))
                is_last = index == self.plan.num_micro_steps - 1
                # A mean of means is known to be one before the backward; a sum is divided when all weights are known.
                parts = self.plan.num_micro_steps if weight is None else 1
                window = self.backward(window, loss, weight=weight, num_parts=parts, is_last=is_last)
        return self.update(window, rng)

    # --- its parts, between which there may be code of the user's ------------------------------------------------

    def begin(self, state: TrainState[Tensor], *, measures_early: bool = False) -> AccumulationWindow:
        """Starts to collect the gradients of a step; the state is donated to what follows.

        A step is `forward` and `backward`, once or several times, and `update`:

            window = step.begin(state)
            outputs = step.forward(window, lambda: model(x))
            window = step.backward(window, criterion(outputs, y))
            state, metrics = step.update(window)

        The gradients in memory of `window.state` may be changed, or replaced, between the last two.

        Args:
            measures_early: whether what a gradient adds to the norm is measured as it comes, while the processor's caches have
                it, as `step(state, batch)` does. Then gradients may be changed only in ways that PyTorch counts: in place, but
                not through `.data`, a collective, NumPy or DLPack.

        Raises:
            ValueError: the state is not one of this step, or a parameter was frozen or unfrozen since it was made.
            StoreError: it is stale, or files of it failed.
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
        # Buffers change in a copy, so that the state given stays good when this step raises.
        buffers = {name: tensor.clone() for name, tensor in state.buffers.items()}
        before = {name: (tensor, tensor._version) for name, tensor in buffers.items()}
        stage = self.runtime.offload.stage(self.runtime.scratch, self.runtime.rules.of_shard, in_memory=measures_early)
        work = ForwardBackward(
            self.plan, self.runtime.mesh, state.params, state.grads, self._orders, stage, hook_states=state.hook_states
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
        """What `function` returns, which may call the model; tensors in it carry the graph.

        On the random state of the process. Autograd keeps no gathered parameter; nothing is on its way afterwards.

        *Collective:* every rank, in the same order with the other parts of a step; in stage 3 each sends `(W-1)/W` of the
        parameters. After an error the round is over on this rank, and others wait for it.

        Args:
            window: of `begin`, or the last `backward`.
            function: it must use the model's parameters through the model.
            run: a name for what always uses the units in the same order, which is learned for each name.
            still: the names of trained parameters that get no gradient of this forward. A flat buffer whose parameters are all
                still in all forwards of a round is not updated.
        """
        check_callable("forward", function, "a function without arguments that calls the model")
        self._num_passes += 1  # ranks of which one has raised are told apart by it
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
        """Whether a forward's parameters are compared before and after: in the first of its kind, or as is asked for."""
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
        """Adds the gradients of a loss, of one or several forwards of this round, to those of the state.

        *Collective:* every rank; see `Plan.sent_per_step`. An error is told as for `forward`.

        Args:
            window: of `begin`, or the last `backward`, which must not be used again.
            loss: a scalar; it is multiplied by the loss scale here.
            weight: of a loss that is a sum; then those of all are.
            num_parts: what the gradients are divided by: micro-steps of which the loss is a mean.
            is_last: whether nothing more is expected before the update: gradients that stay whole are reduced now. What comes
                all the same is reduced for itself, and added.
            keeps: whether the graph stays, for a further backward.
        """
        if not isinstance(loss, Tensor) or loss.dim():
            given = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
            raise ValueError(f"backward: loss must be a 0-d tensor, got {given}; take its mean or sum")
        self._num_passes += 1
        work, scale = window.work, window.state.loss_scale.scale
        news = moved(window.buffers, window.before) - (self._moving_buffers or set())
        scaled = loss
        if self.recipe.cfg.scales_loss:
            scaled = loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale
        if is_last and self.runtime.offload.has_files:
            self.runtime.offload.read_ahead(window.state, work.still_buffers)
        checksum = self._say(window.state, num_parts=num_parts)
        with profiler_range("backward"), self._bound_to(window):
            told = work.backward(
                scaled, loss_row(loss, weight, len(news), self._num_passes + mark_of(work.still), checksum),
                grad_scale=1 / (self.runtime.rules.predivide * num_parts), is_first=not window.told, is_last=is_last, keeps=keeps,
                check=(lambda rows: check_passes(rows[:, 3])) if self._holds_still else None,
            )  # fmt: skip
        check_alike(told[:, 3:], self.runtime.mesh.world, partial(self._named_hyper, num_parts))
        if self._own_grads is not None:
            self._own_grads.check()
        return window._replace(told=(*window.told, told), is_sum=weight is not None)

    def _say(self, state: TrainState[Tensor], hyper: Hyper | None = None, *, num_parts: int = 1) -> int:
        """A checksum of what this rank works out by itself: the numbers of the update to come, where the host knows how many
        there were, and of the last one what the checksum before it was not of."""
        said, is_known = self._said, state.step.device.type == "cpu"
        said.now = self.runtime.updater.hyper(int(state.step)) if hyper is None and is_known else hyper
        return zlib.crc32(repr((said.now, said.last if said.is_late else None, num_parts)).encode())

    def _named_hyper(self, num_parts: int = 1) -> dict[str, dict[str, str]]:
        """What the last checksum is of, as text."""
        names, made_with = self.recipe.group_names, tuple(map(repr, self.recipe.optimizers))

        def named(hyper: Hyper | None) -> dict[str, dict[str, str]]:
            return {} if hyper is None else hyper._replace(optimizers=hyper.optimizers or made_with).named(names)

        found = named(self._said.now) | {"loss": {"divided by": str(num_parts)}}
        late = named(self._said.last)
        return found | {f"{subject}, used in the last update": values for subject, values in late.items()}

    @contextmanager
    def passing(self, window: AccumulationWindow, loss: Tensor, *, keeps: bool = False) -> Iterator[None]:
        """Inside, `backward` of another step's round may go through forwards of this one (a generator's loss, through its
        discriminator); parameters of this step get no gradients of it.

        *Collective* in stage 3: every rank; each sends `(W-1)/W` of the parameters.

        Args:
            window, keeps: as for `backward`.
            loss: the one that goes backward inside.
        """
        with self._bound_to(window), window.work.passing(loss, keeps=keeps):
            yield

    def update(
        self, window: AccumulationWindow, rng: dict[str, Tensor] | None = None
    ) -> tuple[TrainState[Tensor], Metrics]:
        """Clips, skips an overflow, and updates with the gradients of a round, which is over then.

        *Collective:* every rank; sends what was updated where every rank holds all of it, and some numbers.

        Args:
            window: with at least one backward.
            rng: the random state to go on with; None is the one of the state.

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
                "update: must be of a round that no error has ended, and one did, so that its gradients are not all there; begin "
                "another round with the same state"
            )
        if not window.told:
            raise ValueError(
                "update: needs a backward since the last one, and there was none; call backward(loss) first"
            )
        with profiler_range("update"):
            state, buffers = window.state, window.buffers
            window.work.close()
            if self.runtime.offload.passes_use_files:
                self.runtime.agree_on_files(state)
            told_AW5 = torch.stack(window.told)
            if self.device.type != "cpu":
                assert_alike(told_AW5)
            changed, moving = moved(buffers, window.before), self._moving_buffers
            if moving is None:  # kernels such as BatchNorm's change a buffer and not its version
                changed |= self._statistics | {n for n in buffers if not torch.equal(buffers[n], state.buffers[n])}
            # Whether a rank has news would have to be read on a CUDA device, for which the host would wait.
            has_news = bool(told_AW5[..., 2].any()) if self.device.type == "cpu" else self.recipe.schedule != "learned"
            self._moving_buffers = make_equal(buffers, changed, moving, self.runtime.mesh.world, has_news=has_news)
            self._own_grads = None
            hook_states: dict[str, Any] = window.work.hook_states
            rng = state.rng if rng is None else rng
            work = window.work
            return self._updated(
                state, told_AW5[..., :2], buffers, rng, hook_states, is_sum=window.is_sum, stage=work.transfer,
                still=work.still_buffers,
            )  # fmt: skip

    def _updated(
        self, state: TrainState[Tensor], losses: Tensor, buffers: dict[str, Tensor], rng: dict[str, Tensor],
        hook_states: dict[str, dict[str, Any]], *, is_sum: bool, stage: ShardTransfer, still: Collection[str] = (),
    ) -> tuple[TrainState[Tensor], Metrics]:  # fmt: skip
        """The state after the update with the gradients that it holds; `losses` and `stage` as in `StepMetrics.metrics`,
        `still` as in `Updater.update`."""
        hyper = self.runtime.updater.hyper(int(state.step))
        self._said.last, self._said.is_late = hyper, hyper != self._said.now
        metrics, factor = self.runtime.metrics.metrics(losses, state, is_sum=is_sum, rate=hyper.rates[0], stage=stage)
        state = taken(state)  # before the first write: what an error leaves is no state to go on with
        state = self.runtime.updater.update(state, factor, metrics.overflow, hyper=hyper, still=still)
        loss_scale = state.loss_scale
        if self.recipe.cfg.skips_overflow:
            loss_scale = self.runtime.scaling.update(loss_scale, metrics.overflow)
        if self.observer:
            self.observer.has_updated()
        return self.runtime.updater.next_state(state, metrics, loss_scale, buffers, rng, hook_states), metrics

    def following(self, rates: Sequence[float], optimizers: Sequence[Optimizer | UserTransform] | None = None) -> Self:
        """The same step, whose updates use other learning rates, and optimizers with other hyper-parameters.

        Shares all that was learned with this one, and the states are the same.

        Args:
            rates: of each parameter group, in place of every schedule. Group 0 is all that no group of `param_groups` takes,
                also where that is nothing, and group i is `param_groups[i - 1]`; all ranks must give the same.
            optimizers: of each parameter group, with the state that they had; None keeps those of this step.

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
                    "optimizer.params: must not change what an optimizer remembers during training (a momentum from or to 0), "
                    "and did; make the step with it from the start"
                )
        return twin

    @contextmanager
    def _bound_to(self, window: AccumulationWindow) -> Iterator[None]:
        """Inside, the model computes with the tensors of a round."""
        with (
            bound(self.recipe.model, self.plan.aliases, window.work.fetch, window.buffers),
            self._blocks.applied(self.recipe.model) if self._blocks else nullcontext(),
            self.runtime.checkpointing.applied(
                self.recipe.model, device=self.device, recomputing=window.work.recomputing, aliases=self.plan.aliases,
                moving=self._moving_buffers,
            ),
        ):  # fmt: skip
            yield

    def _call_compiled(
        self, compiled: CompiledStep, state: TrainState[Tensor], buffers: dict[str, Tensor], micro_batches: list[Any]
    ) -> tuple[TrainState[Tensor], Metrics]:
        """The step as a graph: writes its numbers where the graph reads them, and raises what the graph found."""
        hyper = self.runtime.updater.hyper(int(state.step))
        self.runtime.updater.turn(self._hyperparams, hyper)
        (outcome, is_sum), rng, hook_states = self._run_graph(compiled, state, buffers, micro_batches, hyper)
        self.runtime.metrics.check_outcome(outcome, state, self._named_hyper, is_sum=is_sum)
        metrics = Metrics(
            outcome.loss,
            outcome.norm,
            self._hyperparams.lr[0].float(),
            outcome.overflow,
            state.loss_scale.scale.clone(),
        )
        if self.observer:
            self.observer.has_updated()
        return self.runtime.updater.next_state(
            taken(state), metrics, outcome.loss_scale, buffers, rng, hook_states
        ), metrics

    def _call_and_update(
        self, compiled: CompiledStep, state: TrainState[Tensor], buffers: dict[str, Tensor], micro_batches: list[Any]
    ) -> tuple[TrainState[Tensor], Metrics]:
        """The step as a graph up to its gradients, which go to where they live, and the update as without a graph."""
        stage = self.runtime.offload.stage(self.runtime.scratch, self.runtime.rules.of_shard, in_memory=True)
        if self.runtime.offload.has_files:
            self.runtime.offload.read_ahead(state)
        grads = {
            key: x
            if isinstance(x, Tensor) and x.device == self.device
            else self.runtime.scratch.take(x.numel(), x.dtype, self.device)
            for key, x in state.grads.items()
        }
        collecting = state._replace(grads=grads)
        (told_AW4, is_sum), rng, hook_states = self._run_graph(compiled.collect, collecting, buffers, micro_batches)
        for key, home in state.grads.items():
            grad = grads.pop(key)
            if grad is not home:
                stage.put(f"{key}/grads", home, grad, adds=False, measures=True)
                self.runtime.scratch.give(grad)
        del grad
        stage.settle()
        self.runtime.agree_on_files(state)
        check_alike(told_AW4[..., 2:].flatten(0, 1), self.runtime.mesh.world, self._named_hyper)
        with profiler_range("update"):
            return self._updated(state, told_AW4[..., :2], buffers, rng, hook_states, is_sum=is_sum, stage=stage)

    def _run_graph(
        self, graph: Callable[..., T], state: TrainState[Tensor], buffers: dict[str, Tensor], micro_batches: list[Any],
        hyper: Hyper | None = None,
    ) -> tuple[T, dict[str, Tensor], dict[str, dict[str, Any]]]:  # fmt: skip
        """What a graph gives; and the random state and what the comm hooks remember after it."""
        self._num_passes += 1
        batches = [self.runtime.batches.cast(batch) for batch in micro_batches]
        hook_states = optree.tree_map(torch.clone, state.hook_states)
        with random_state(state.rng, self.device) as rng, profiler_range("step", "in one graph"):
            numbers = torch.full((2,), float(self._num_passes), dtype=torch.float64, device=self.device)
            numbers[1:].fill_(self._say(state, hyper))  # fills do not wait for the device
            told = graph(state, buffers, hook_states, batches, numbers)
        return told, rng, hook_states

    def evaluate(self, state: TrainState[Tensor], batch: Any) -> Tensor:
        """The mean loss over ranks, in evaluation mode, without gradients; the state is unchanged.

        The model computes with `state.params`; `with_weights` makes a state of other weights.

        *Collective:* every rank; in stage 3 each sends `(W-1)/W` of the parameters.
        """
        self.runtime.check_state(state)
        meet("TrainStep.evaluate", self.runtime.mesh.world)
        modes = [(module, module.training) for module in self.recipe.model.modules()]

        def loss_of_batch() -> tuple[Tensor, Tensor | None]:
            self.recipe.model.eval()  # where the model's own code, if it has any for this, meets the state's tensors
            return self._loss(batch)

        try:
            with torch.no_grad(), random_state(state.rng, self.device):
                loss, weight = self._inspect(state, loss_of_batch, "evaluate")
        finally:
            for module, mode in modes:
                module.training = mode
        row = loss_row(loss, weight, self._num_passes)
        told = collectives.stack(row, self.runtime.mesh.world, label=Label("loss_stats", phase="turn"))
        check_passes(told[:, 2])
        check_rows(told[:, :2], is_sum=weight is not None)
        return mean_of(told[:, :2], is_sum=weight is not None)[0].float()

    def inspect(self, state: TrainState[Tensor], function: Callable[[], T], *, run: str = "inspect") -> T:
        """What `function` returns, which may call the model; its parameters get no gradients, and the state is unchanged.

        For evaluation, and for gradients of inputs, by autograd or transforms of torch.func: these keep alive the gathered
        parameters that they need.

        *Collective* in stage 3: every rank; each sends `(W-1)/W` of the parameters.

        Args:
            function, run: as for `forward`.

        Raises:
            ValueError: the state is not one of this step.
            StoreError: it is stale, or files failed, now (on every rank) or before.
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
            self.runtime.offload.stage(self.runtime.scratch),
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
        """The loss of a batch, and its weight where `loss_fn` gives a sum and a weight."""
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
        """The aten graphs that a step on this batch runs with `compile="step"`, in order, captured and not yet scheduled.

        Works in every step, whatever its `compile` is, and on one rank alone. Runs, allocates and sends nothing, and
        changes nothing: state and batch are tensors without memory (`FakeTensorMode`).

        Args:
            batch: this rank's samples, as for a step; tensors may be on `meta`. An iterator loses its next micro-batches.

        Raises:
            ConfigError, CompileError, ValueError: the step cannot be captured, or the batch is not what was configured.
        """
        from torch._subclasses import FakeTensorMode

        micro_batches = list(self.runtime.batches.split(batch))
        compiled = self._compiled
        if compiled is None or self._until == "gradients":  # on paper all state is on the device
            compiled = self.one_graph("aot_eager")[0]
        with FakeTensorMode(allow_non_fake_inputs=True):
            state = optree.tree_map(
                lambda spec: torch.empty(
                    spec.local_shape(self.plan.mesh), dtype=torch_dtype(spec.dtype), device=self.device
                ),
                self.specs,
            )
            return compiled.trace(
                state, [self.runtime.batches.cast(without_memory(x, self.device)) for x in micro_batches]
            )

    def explain(self, batch: Any = None, *, machine: MachineModel | None = None) -> Timeline:
        """The schedule of a step: compute and collectives over time, and the gathered bytes under them.

        With a `batch`, the schedule of the graph that `compile="step"` makes, captured without tensors (see `trace`). It
        works in every step, also before the first one, and on one rank alone. An eager step enters and leaves its units at
        the same places; Inductor fuses compute, and keeps the collectives and their order. Without a batch, for
        `compile="step"` and after the first step, the schedule of the largest graph that ran.

        `print` it for a table, `draw()` gives a picture. Times are those of a simple model of a machine, not measured.

        Raises:
            ValueError: no batch is given, and no graph has run; and what `trace` raises.
        """
        from fzero.graph.explain import explain  # which needs the analysis of graphs

        return explain(self, batch, machine=machine)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that have run, with `compile="step"`."""
        return () if self._compiled is None else tuple(self._compiled.backend.graphs)

    @property
    def graph_axes(self) -> Any:
        """The axes of the mesh, as the nodes of the graphs name them."""
        return None if self._compiled is None else self._compiled.axes

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        """The same step, which tells `observe`, too, what its collectives send; what it learns it learns for itself.

        Shares what is captured, and the model. Each rank may call it or not.
        """
        check_callable("observe", observe, "a function of a fzero.comms.CommRecord")
        twin = copy.copy(self)
        twin.runtime = self.runtime.observed(observe)
        twin._orders = None if self._orders is None else self._orders.copy()
        twin._compiled = None if self._compiled is None else self._compiled.observed(observe)
        return twin

    @property
    def has_agreed(self) -> bool:
        """Whether the ranks need not agree on anything any more: they have run a step, or there is one graph."""
        return self._compiled is not None or self._moving_buffers is not None

    def first_overflow(self, state: TrainState[Tensor]) -> str | None:
        """The name of the first parameter, as declared, whose collected gradient is not finite; None if all are finite.

        For the state that a step with `metrics.overflow` gave. Reads the gradients, so on CUDA it waits for the device.

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


def _portable(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor.dtype
    copy = tensor.detach().to("cpu", dtype)
    return copy.clone() if copy.data_ptr() == tensor.data_ptr() or copy._base is not None else copy
