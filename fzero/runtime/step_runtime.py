"""`StepRuntime`: the parts of a train step on one rank, made once; shared by the step
and by all functions of its states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import optree
import torch
from torch import Tensor

from fzero.common.arguments import check_callable
from fzero.comms.axes import AbstractAxis, RankAxis, observed
from fzero.comms.mesh import SEQ, RankMesh, seq_axis
from fzero.comms.records import CommRecord, Label
from fzero.config.config import ConfigError
from fzero.config.optimizer_block import OptimizerBlock
from fzero.model.binding import Binding
from fzero.model.model_check import FixedFlags
from fzero.model.transforms import AllChanges, Call, LossFn
from fzero.plans.flat_params import optimizer_specs
from fzero.plans.param_groups import UserTransform
from fzero.plans.plan import Plan
from fzero.runtime.batches import Batches
from fzero.runtime.finish import StepRules
from fzero.runtime.hooks import Observer, observer_of
from fzero.runtime.init_state import StateBuilder
from fzero.runtime.job import Job, Streamed
from fzero.runtime.learned import Learned
from fzero.runtime.step_spec import StepSpec, check_same
from fzero.runtime.update import Updater
from fzero.state import TrainState
from fzero.storage.offload import Offload
from fzero.storage.shard_transfer import BufferPool, ShardTransfer
from fzero.storage.state_memory import DeviceMemory, StateForm, StateMemory, memory_kind
from fzero.verbs import gather_flat, start_gather
from sharding.views import torch_dtype, unflatten

if TYPE_CHECKING:
    from fzero.runtime.programs import Program
    from fzero.storage.file_tensor import StoredTensor


@dataclass(frozen=True)
class StepRuntime:
    """The parts of a train step on one rank.

    Attributes:
        spec: the arguments of `make_train_step`.
        plan: units, flat buffers and their specs.
        ranks: the axis of all ranks; an `AbstractAxis` describes ranks that do not run.
        device: the device of the state; batches must be on it, too.
        scratch: memory for gathered parameters and unreduced gradients.
        offload: makes and checks the state; moves the part of it that lives off the
            device.
        updater: updates flat buffers.
        rules: the rules for the end of a step: loss, norm, clipping and loss scale.
        batches: cuts batches into micro-batches.
        builder: makes first states.
        form: the specs of all tensors of a state.
        learned: the findings of the first calls; shared by the step and the steps made
            from it by `following`.
        changes: what the transforms change in the model.
        stored_names: the keys of the model's state dict, each with the name under which
            its tensor is stored.
        flags: raises if a parameter was frozen or unfrozen; None if the step allows
            this.
        statistics: the names of the module buffers that hold running statistics.
        observer: sees batches and updates.
        job: all ranks of the job. Where it divides the model among them, the rest of
            the runtime is that of this rank's part.
        runs: the program of a step; None where no step runs.
    """

    spec: StepSpec
    plan: Plan
    ranks: RankAxis | AbstractAxis
    bound: RankMesh | None
    device: torch.device
    scratch: BufferPool
    offload: StateMemory
    updater: Updater
    rules: StepRules
    batches: Batches
    builder: StateBuilder
    form: StateForm
    learned: Learned
    changes: AllChanges
    stored_names: dict[str, str]
    flags: FixedFlags | None
    statistics: frozenset[str]
    observer: Observer | None
    job: Job
    runs: Program | None = None

    @classmethod
    def make(cls, spec: StepSpec, ranks: RankAxis | AbstractAxis) -> Self:
        """The runtime of a spec. *Collective:* every rank; compares model and
        configuration.

        Raises:
            MismatchError: on every rank, when ranks differ.
            ConfigError: the configuration does not fit the model.
        """
        changes = spec.changes  # which may add parameters
        trained = changes.trained(spec.model) if spec.trained is None else spec.trained
        planned = spec if trained is spec.trained else replace(spec, trained=trained)
        plan, cfg, device = planned.plan(ranks.size, ranks.mesh), spec.cfg, spec.device
        if not isinstance(ranks, AbstractAxis):
            check_same(ranks, spec.fingerprint(plan))
        spec.check_placements(plan)
        spec.check_compiled(plan)
        offload, scratch = _memory_of(plan, device), BufferPool()
        bound = None if isinstance(ranks, AbstractAxis) else RankMesh.of(ranks, plan)
        keys = [buffer.key for buffer in plan.flat_buffers]
        starts = accumulate((buffer.padded_numel for buffer in plan.flat_buffers), initial=0)
        updater = Updater(
            plan,
            bound,
            shard=plan.shard_of(ranks.rank),
            offload=offload,
            scratch=scratch,
            optimizers=spec.optimizers,
            rates=spec.rates,
            momentum=spec.momentum,
            first_elements=dict(zip(keys, starts, strict=False))
            if cfg.precision.stochastic_rounding
            else None,
        )
        builder = StateBuilder(
            spec, plan, offload=offload, updater=updater, rank=ranks.rank, device=device
        )
        seq = seq_axis(ranks, plan) if bound is None else bound.seq
        num_data_ranks = ranks.size // plan.seq_size
        check_division(changes, plan)
        cast = None if cfg.casts_batch_to is None else torch_dtype(cfg.casts_batch_to)
        # Read from the model now: it must not be read while it is bound to the tensors of a state.
        return cls(
            spec,
            plan,
            ranks,
            bound,
            device,
            scratch,
            offload,
            updater,
            rules=StepRules.of(cfg, ranks.size),
            batches=Batches(
                num_data_ranks,
                plan.num_micro_steps,
                cfg.batch_sizes(num_data_ranks).micro,
                cast,
                changes.batch_fn(seq),
            ),
            builder=builder,
            form=StateForm.of(builder.specs(), plan),
            learned=Learned.nothing(spec),
            changes=changes,
            stored_names=spec.stored_names,
            flags=FixedFlags(spec.model, plan.param_units) if spec.trained is None else None,
            statistics=frozenset(spec.statistics & set(plan.buffers)),
            observer=observer_of(ranks, spec.model, cfg, spec.loss_fn, device),
            # `world` is of ranks that run
            job=WholeModel(ranks if bound is None else bound.world),  # type: ignore[arg-type]
        )

    def following(
        self, rates: Sequence[float], optimizers: Sequence[OptimizerBlock | UserTransform] | None
    ) -> Self:
        """The same parts, with other learning rates and optimizers; see
        `TrainStep.following`.

        Raises:
            ValueError: there is not one rate, or optimizer, for each group, or a rate
                is no finite number.
            ConfigError: the optimizers would change the structure of the state.
        """
        names = self.spec.group_names
        for field, given in (
            ("rates", rates),
            ("optimizers", rates if optimizers is None else optimizers),
        ):
            if not isinstance(given, Sequence) or len(given) != len(names):
                got = (
                    f"{len(given)}: {list(given)!r}" if isinstance(given, Sequence) else repr(given)
                )
                raise ValueError(
                    f"following: {field} must be a list with one for each of the {len(names)} "
                    f"parameter groups ({', '.join(names)}), got {got}; give that of every group "
                    f"in this order"
                )
        updater = self.updater.following(rates, optimizers)
        updater.hyper(0)  # raises if a rate is not valid
        if optimizers is not None:
            placed = optimizer_specs([b for b in self.plan.flat_buffers if b.trainable], optimizers)
            if optree.tree_structure(placed) != optree.tree_structure(dict(self.plan.optimizer)):
                raise ConfigError(
                    "optimizer.params: must not change the structure of the optimizer's state "
                    "during training (a momentum from or to 0), and did; make the step with it "
                    "from the start"
                )
        run = replace(self, updater=updater, builder=replace(self.builder, updater=updater))
        if optimizers is None or self.runs is None:
            return run
        return replace(run, runs=self.runs.following(run))

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        """The same parts, whose collectives are also reported to `observe`; it learns
        an order of collectives of its own.
        """
        check_callable("observe", observe, "a function of a fzero.comms.CommRecord")
        mesh = self.mesh.observed(observe)
        return replace(
            self,
            bound=mesh,
            updater=replace(self.updater, mesh=mesh),
            learned=self.learned.with_own_orders(),
            job=self.job.observed(observe),
            runs=self.program.observed(observe),
        )

    @property
    def program(self) -> Program:
        """Runs the forwards and backwards of a step."""
        assert self.runs is not None, "a runtime without a step"
        return self.runs

    # --- parts that follow from these -------------------------------------------------------------

    @property
    def mesh(self) -> RankMesh:
        """The ranks.

        Raises:
            ValueError: the step is on an `AbstractAxis`, whose ranks do not run.
        """
        if self.bound is None:
            raise ValueError(
                f"mesh: must consist of running ranks to run a step, got {self.ranks}; a step on "
                f"an AbstractAxis has only plan, specs, trace and explain, so leave mesh out under "
                f"torchrun"
            )
        return self.bound

    @property
    def world(self) -> RankAxis:
        """All ranks of the job, also those that hold other parts of the model."""
        _ = self.mesh  # raises on an AbstractAxis
        return self.job.world

    @property
    def rank(self) -> int:
        """This rank's number among the ranks of the plan."""
        return self.ranks.rank

    @cached_property
    def inner_plan(self) -> Plan:
        """`plan.inner`, made once."""
        return self.plan.inner

    @cached_property
    def autocast(self) -> torch.dtype | None:
        """The dtype of `torch.autocast`, if the model runs under it."""
        autocast = self.spec.cfg.precision.autocast
        return None if autocast is None else torch_dtype(autocast)

    @cached_property
    def loss_fn(self) -> LossFn | None:
        """The loss function, with the changes of transforms; see `StepSpec.loss_fn`."""
        return self.changes.loss_fn(self.spec.loss_fn)

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters and module buffers, and of tensors with
        another name in `state_dict`.
        """
        return self.plan.aliases | {
            key: name for key, name in self.stored_names.items() if key != name
        }

    @cached_property
    def binding(self) -> Binding:
        """Binds the model to the tensors of a state."""
        return Binding(self.spec.model, self.plan.aliases, self.spec.held or ())

    # --- forwards ---------------------------------------------------------------------------------

    def compares(self, kind: str) -> bool:
        """Whether a forward's parameters are compared before and after: in the first of
        its kind, or always if configured.
        """
        return kind not in self.learned.compared or self.spec.check_params == "always"

    def call(
        self, num_updates: Callable[[], int], *, micro: Callable[[], int] = lambda: 0, **how: Any
    ) -> Call:
        """The forwards of a step on this rank, for transforms; see `Call`."""
        return Call(
            num_updates=num_updates,
            micro=micro,
            rank=self.rank,
            num_micro=self.plan.num_micro_steps,
            device=self.device,
            aliases=self.plan.aliases,
            seq=None if self.bound is None else self.bound.seq,
            **how,
        )

    # --- states -----------------------------------------------------------------------------------

    def check_state(self, state: TrainState[Tensor]) -> None:
        """Raises ValueError unless every tensor has this step's shape and dtype, and is
        in memory or a file as planned.
        """
        _ = self.mesh  # raises on an AbstractAxis
        self.offload.check(self.form.names, self.form.check(state), self.form.leaves)

    def agree_on_files(self, state: TrainState[Tensor]) -> None:
        """Raises a StoreError on every rank when the files of one have failed.
        *Collective* where there are files.
        """
        self.offload.agree_on(state, self.mesh.world)

    def inner_params(
        self, params: Mapping[str, StoredTensor], transfer: ShardTransfer
    ) -> Mapping[str, StoredTensor]:
        """The flat buffers that `inner_plan` computes with: those of the state; all of
        them gathered, where a step gathers once.

        *Collective* then, along the axes that shard parameters.
        """
        if self.inner_plan is self.plan:
            return params
        gathers = {}
        for b in self.plan.flat_buffers:
            label, shard = Label("gather", b.key, "forward"), transfer.load(b.key, params[b.key])
            gathers[b.key] = start_gather(shard, b, self.mesh, self.plan.comm_hooks, label=label)
        return {key: pending.wait() for key, pending in gathers.items()}

    def weights(self, state: TrainState[Tensor]) -> dict[str, Any]:
        """This rank's part of the weights by flat buffer: the master where there is
        one, else the parameters.
        """
        return {b.key: state.master.get(b.key, state.params[b.key]) for b in self.plan.flat_buffers}

    def full_weights(self, state: TrainState[Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """The full weights by name, one flat buffer after the other. *Collective:*
        every rank.

        The views of a buffer are valid until the next buffer is requested.
        """
        shards = self.offload.transfer(self.scratch).each(list(self.weights(state).items()))
        for buffer, flat in zip(self.plan.flat_buffers, shards, strict=True):
            yield unflatten(gather_flat(flat, buffer, self.mesh), buffer.layout)


def check_division(changes: AllChanges, plan: Plan) -> None:
    """Raises ValueError where ranks share samples, and no transform divides the tokens."""
    if plan.seq_size > 1 and not changes.splits_samples:
        raise ValueError(
            f"mesh: may have the axis {SEQ!r} only with a transform that divides the tokens of "
            f"samples along it, got {plan.seq_size} ranks and none; pass "
            f"transforms=[fzero.sequence.ulysses({SEQ!r})]"
        )


def _memory_of(plan: Plan, device: torch.device) -> StateMemory:
    """The memory of a plan's state, for a model on `device`."""
    if all(memory_kind(placement, device) == "here" for placement in plan.placements.values()):
        return DeviceMemory(plan, device)
    return Offload(plan, device)


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A job in which each rank's plan is that of the whole model, so that a rank's own
    answer is the answer. Sends nothing.

    Attributes:
        world: all ranks of the job.
    """

    world: RankAxis
    is_whole: ClassVar[bool] = True
    names: ClassVar[tuple[str, ...]] = ()

    def stores(self, tensor: str) -> bool:
        return True

    def norm_parts(self, parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
        return parts

    def first_name(self, name: str | None) -> str | None:
        return name

    def first_state(self, plan: Plan, state: TrainState[Tensor]) -> TrainState[Tensor]:
        return state

    def all_tensors(
        self, own: dict[str, Tensor], *, to: Literal["all", "rank0"]
    ) -> dict[str, Tensor]:
        return own

    def streamed(
        self, names: dict[str, str], forms: dict[str, Any], own: Iterator[Mapping[str, Tensor]]
    ) -> Streamed:
        return names, forms, own

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        return replace(self, world=observed(self.world, observe))
