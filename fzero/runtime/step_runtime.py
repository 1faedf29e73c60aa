"""`StepRuntime`: the parts of a train step on one rank, made once; shared by the step and by all functions of its states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

import optree
import torch
from torch import Tensor

from fzero.common.arguments import check_kind
from fzero.comms.axes import AbstractAxis, Bound
from fzero.comms.mesh import RankMesh
from fzero.comms.records import CommRecord
from fzero.optim.loss_scale import LossScale, LossScaling
from fzero.plans.plan import Plan
from fzero.runtime.activation_checkpointing import Checkpointing
from fzero.runtime.batches import Batches
from fzero.runtime.file_agreement import agree
from fzero.runtime.init_state import StateBuilder
from fzero.runtime.loss import LossRules
from fzero.runtime.metrics import StepMetrics
from fzero.runtime.offload import Offload
from fzero.runtime.step_spec import StepSpec, check_same
from fzero.runtime.update import Updater
from fzero.state import TrainState, is_donated
from fzero.storage.file_tensor import handles_of
from fzero.storage.shard_io import BufferPool
from sharding import TensorSpec
from sharding.views import torch_dtype, unflatten


@dataclass(frozen=True)
class StepRuntime:
    """The parts of a train step on one rank.

    Attributes:
        recipe: the arguments of `make_train_step`.
        plan: units, flat buffers and their specs.
        ranks: the axis of all ranks; an `AbstractAxis` describes ranks that do not run.
        scratch: memory for gathered parameters and unreduced gradients.
        offload: moves state that lives off the device.
        updater: updates flat buffers.
        checkpointing: the modules that run again in the backward.
        stored_names: the keys of the model's state dict, each with the name under which its tensor is stored.
    """

    recipe: StepSpec
    plan: Plan
    ranks: Bound | AbstractAxis
    bound: RankMesh | None
    scratch: BufferPool
    offload: Offload
    updater: Updater
    checkpointing: Checkpointing
    stored_names: dict[str, str]

    @classmethod
    def make(cls, recipe: StepSpec, ranks: Bound | AbstractAxis) -> Self:
        """The runtime of a recipe. *Collective:* every rank; compares model and configuration.

        Raises:
            MismatchError: on every rank, when ranks differ.
            ConfigError: the configuration does not fit the model.
        """
        plan, cfg = recipe.plan(ranks.size, ranks.mesh), recipe.cfg
        if not isinstance(ranks, AbstractAxis):
            check_same(ranks, recipe.fingerprint(plan))
        recipe.check_placements(plan)
        recipe.check_compiled(plan)
        offload, scratch = Offload(plan, recipe.device), BufferPool()
        bound = None if isinstance(ranks, AbstractAxis) else RankMesh.of(ranks, plan)
        keys = [buffer.key for buffer in plan.flat_buffers]
        starts = accumulate((buffer.padded_numel for buffer in plan.flat_buffers), initial=0)
        updater = Updater(
            plan, bound, shard=plan.shard_of(ranks.rank), offload=offload, scratch=scratch,
            optimizers=recipe.optimizers, rates=recipe.rates, momentum=recipe.momentum,
            skips_overflow=cfg.skips_overflow, scales_loss=cfg.scales_loss,
            places=dict(zip(keys, starts, strict=False)) if cfg.precision.stochastic_rounding else None,
        )  # fmt: skip
        # Read from the model now: it must not be read while it is bound to the tensors of a state.
        return cls(
            recipe, plan, ranks, bound, scratch, offload, updater,
            checkpointing=recipe.checkpointing, stored_names=recipe.stored_names,
        )  # fmt: skip

    def with_updater(self, updater: Updater) -> Self:
        """The same parts, with another updater."""
        return replace(self, updater=updater)

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        """The same parts, whose collectives are also reported to `observe`."""
        mesh = self.mesh.observed(observe)
        return replace(self, bound=mesh, updater=replace(self.updater, mesh=mesh))

    # --- parts that follow from these ------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.recipe.device

    @property
    def mesh(self) -> RankMesh:
        """The ranks.

        Raises:
            ValueError: the step is on an `AbstractAxis`, whose ranks do not run.
        """
        if self.bound is None:
            raise ValueError(
                f"mesh: must consist of running ranks to run a step, got {self.ranks}; a step on an AbstractAxis has only "
                f"plan, specs, trace and explain, so leave mesh out under torchrun"
            )
        return self.bound

    @cached_property
    def rules(self) -> LossRules:
        """The rules of loss, norm and clipping."""
        return self.recipe.measures(self.ranks.size)

    @cached_property
    def scaling(self) -> LossScaling:
        """The rules of the loss scale."""
        return self.recipe.cfg.loss_scaling()

    @cached_property
    def batches(self) -> Batches:
        """Cuts batches into micro-batches."""
        cfg, size = self.recipe.cfg, self.ranks.size
        dtype = None if cfg.casts_batch_to is None else torch_dtype(cfg.casts_batch_to)
        return Batches(size, self.plan.num_micro_steps, cfg.batch_sizes(size).micro, dtype)

    @cached_property
    def autocast(self) -> torch.dtype | None:
        """The dtype of `torch.autocast`, if the model runs under it."""
        autocast = self.recipe.cfg.precision.autocast
        return None if autocast is None else torch_dtype(autocast)

    @cached_property
    def metrics(self) -> StepMetrics:
        """The metrics of a step."""
        return StepMetrics(
            self.plan, self.mesh, offload=self.offload, scratch=self.scratch, measure=self.rules,
            scaling=self.scaling, skips_overflow=self.recipe.cfg.skips_overflow, model=self.recipe.model,
        )  # fmt: skip

    @cached_property
    def builder(self) -> StateBuilder:
        """Makes initial states."""
        return StateBuilder(
            self.recipe, self.plan, offload=self.offload, updater=self.updater, rank=self.ranks.rank, device=self.device
        )

    @cached_property
    def aliases(self) -> dict[str, str]:
        """The other names of tied parameters and module buffers, and of tensors that `state_dict` names otherwise."""
        return self.plan.aliases | {key: name for key, name in self.stored_names.items() if key != name}

    # --- states ----------------------------------------------------------------------------------------------------

    @cached_property
    def specs(self) -> TrainState[TensorSpec]:
        """The spec of every tensor of a state, in the state's own structure."""
        flat_buffers = self.plan.flat_buffers
        return TrainState(
            step=TensorSpec((), "int64"),
            params={b.key: b.params for b in flat_buffers},
            master={b.key: b.master for b in flat_buffers if b.has_master},
            grads={b.key: b.grads for b in flat_buffers if b.trainable},
            optimizer=dict(self.plan.optimizer),
            buffers=dict(self.plan.buffers),
            loss_scale=LossScale(TensorSpec((), "float32"), TensorSpec((), "int64"), TensorSpec((), "int64")),
            rng={kind: TensorSpec(tuple(x.shape), "uint8") for kind, x in self.builder.rng(0).items()},
            hook_states=self.plan.hook_states,
        )

    @cached_property
    def _expected(self) -> tuple[Any, list[str], list[tuple[tuple[int, ...], torch.dtype]], list[TensorSpec]]:
        """The structure of a state, and per tensor its path, its (shape, dtype), and its spec."""
        accessors, specs, treespec = optree.tree_flatten_with_accessor(self.specs)
        shapes = [(s.local_shape(self.plan.mesh), torch_dtype(s.dtype)) for s in specs]
        return treespec, [accessor.codify("state") for accessor in accessors], shapes, specs

    def check_state(self, state: TrainState[Tensor]) -> None:
        """Raises ValueError unless every tensor has this step's shape and dtype, and is in memory or a file as planned."""
        _ = self.mesh  # raises on an AbstractAxis
        self.check_shapes(state)
        _, names, _, specs = self._expected
        self.offload.check(names, optree.tree_leaves(state), specs)

    def check_shapes(
        self,
        state: TrainState[Tensor],
        *,
        fix: str = "make it with this step's init(), or give its weights to init(params)",
    ) -> None:
        """Raises ValueError unless every tensor has this step's shape and dtype: another step may shard it differently."""
        check_kind(
            "state", state, TrainState, "a TrainState", "pass that of init() or of the last step (load(...).state)"
        )
        treespec, names, shapes, _ = self._expected
        leaves, found = optree.tree_flatten(state)
        if found != treespec:
            theirs = [accessor.codify("state") for accessor in optree.tree_accessors(state)]
            differing = min({*theirs} ^ {*names}, default="another structure")
            raise ValueError(
                f"state: must be one of this step's, got one {'without' if differing in names else 'with'} {differing}; "
                f"{fix}"
            )
        for name, leaf, (shape, dtype) in zip(names, leaves, shapes, strict=True):
            if leaf.shape != shape or leaf.dtype != dtype:
                check_not_donated(state)
                raise ValueError(
                    f"{name}: must be {dtype} of shape {shape} in this step (stage "
                    f"{self.plan.stage}, {self.plan.world_size} ranks), got {leaf.dtype} of shape {tuple(leaf.shape)}; {fix}"
                )

    def agree_on_files(self, state: TrainState[Tensor]) -> None:
        """Raises a StoreError on every rank when the files of one have failed. *Collective* where there are files."""
        if self.offload.has_files:
            agree(next(handle.files for handle in handles_of(state)), self.mesh.world)

    def weights(self, state: TrainState[Tensor]) -> dict[str, Any]:
        """This rank's part of the weights by flat buffer: the master where there is one, else the parameters."""
        return {b.key: state.master.get(b.key, state.params[b.key]) for b in self.plan.flat_buffers}

    def full_weights(self, state: TrainState[Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """The full weights by name, one flat buffer after the other. *Collective:* every rank.

        The views are valid until the next is asked for.
        """
        shards = self.offload.transfer(self.scratch).each(list(self.weights(state).items()))
        for buffer, flat in zip(self.plan.flat_buffers, shards, strict=True):
            if flat.numel() != buffer.padded_numel:
                spec = buffer.row.optimizer if buffer.key in state.master else buffer.row.params
                flat = self.mesh.all_gather(flat, self.mesh.axes_of(spec))
            yield unflatten(flat, buffer.layout)


def check_not_donated(state: TrainState[Tensor]) -> None:
    """Raises if a step took the state: the StoreError of its files if these failed, else a ValueError with the fix."""
    if is_donated(state):
        for handle in handles_of(state):
            handle.check()
        raise ValueError(
            "state: must not be used again once a step took it (donate=True), because that step wrote the next state into its "
            "memory; go on with the state that the step returned (from a checkpoint, if its update raised), or make the step "
            "with donate=False"
        )
