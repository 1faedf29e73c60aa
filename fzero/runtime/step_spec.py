"""`StepSpec`: the arguments of `make_train_step` except the mesh, checked.

`TrainStep(spec, axis)` binds it to one rank of an axis. The axis belongs to a job, to a
simulation, or to ranks that do not run. This module derives everything that depends on
the model and the configuration alone.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from fzero.common.arguments import (
    check_callable,
    check_kind,
    check_loss_fn,
    check_model,
    check_whole,
)
from fzero.comms import collectives
from fzero.comms.axes import ProcessAxis, RankAxis
from fzero.comms.hangs.failures import store_barrier
from fzero.comms.mesh import unfolded
from fzero.comms.process_group import check_backend, join
from fzero.comms.records import Label
from fzero.config.config import ConfigError
from fzero.config.fields import compared
from fzero.model.held_tensors import SharedTensor, find_held
from fzero.model.module_index import ModuleIndex
from fzero.model.tensor_checks import check_tensors
from fzero.model.transforms import AllChanges, ModelTransform, changes_of
from fzero.plans.param_groups import UserTransform
from fzero.plans.plan import Plan
from fzero.plans.plan_spec import PlanSpec
from fzero.runtime.batches import LossFn
from fzero.runtime.update import rate_of
from sharding import Mesh

if TYPE_CHECKING:
    from fzero.optim.lr_schedules import Schedule
    from fzero.plans.staged import StagedPlan


class Parallelism(Protocol):
    """How a model is divided among the ranks of a job (`fzero.parallelism`)."""

    @property
    def is_uniform(self) -> bool:
        """Whether all ranks run the same program, on tensors of the same shapes."""
        ...

    def staged(self, spec: StepSpec, mesh: Mesh, own: Plan, /) -> StagedPlan:
        """The plans of all parts of the model; `own` is the plan of this rank."""
        ...

    def runtime(self, spec: StepSpec, axis: Any, /) -> Any:
        """The `StepRuntime` of this rank. *Collective:* every rank."""
        ...


class MismatchError(ValueError):
    """The ranks of one job were given different models, configurations or
    hyper-parameters.
    """


@dataclass(frozen=True, kw_only=True)
class StepSpec(PlanSpec):
    """The checked arguments of `make_train_step`, and the device of a model on `meta`.

    What follows from them is made once, when it is first asked for.
    """

    loss_fn: LossFn | None = None
    """`loss_fn(model, batch)` returns the scalar loss, or `(sum, weight)`: then the
    loss is Σ sum / Σ weight over all micro-batches and ranks (weight: the number of
    tokens, say). `loss_fn` calls the `model` that it gets. None calls the model with
    the batch (a tensor as `model(batch)`, a tuple or list as `model(*batch)`, a mapping
    as `model(**batch)`) and takes the output if it is a scalar, its `.loss`, or its
    first item."""
    donate: bool = True
    """Whether the step may write into the state that it gets; using that state again
    raises. False works on a copy; state in files cannot be copied."""
    lr_schedule: Schedule | None = None
    """The learning rate as a function of the number of updates so far, instead of the
    configuration's. It must return the same number on all ranks, which is checked. (It
    may depend on metrics, which are the same on all ranks, but not on a rank's own
    loss.)"""
    schedule: Literal["learned", "negotiated"] = "learned"
    """`"learned"` fixes the order of collectives in the first step that runs all
    blocks. `"negotiated"` agrees on it in every step, for models whose units run in a
    data-dependent order; slower, and nothing is prefetched."""
    compile: Literal["step", "block"] | None = None
    """`"step"` captures the whole step as one graph (two with gradient accumulation),
    which updates the state in place; if optimizer state lives in other memory, the
    graph ends before the update, and parameters must be on the device. `"block"`
    compiles the forward of each unit that is one module, once for equal ones, and runs
    the rest eagerly. None compiles nothing. Rank 0 logs how long a capture took;
    another batch shape is captured again. With `"step"` the forward of `evaluate` is a
    graph, too."""
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """`"inductor"` generates code, `"aot_eager"` runs the captured graph operation by
    operation.
    """
    check_params: Literal["first", "always"] = "first"
    """When to compare the values of parameters before and after a forward: in the
    `"first"` forward of each kind (training, evaluation), or `"always"`. A forward must
    not change parameters. The comparison finds changes through `.data`, and reads all
    parameters twice. A change that PyTorch's version counter sees is an error in every
    step."""
    seed: int = 0
    """The seed of initial values on `meta` (equal on all ranks) and of dropout
    (different on each rank).
    """
    meta_device: torch.device | None = None
    """The device for a model on `meta`; None is the accelerator, if there is one."""
    transforms: tuple[ModelTransform, ...] = ()
    """The transforms of the model, in the order of their application
    (`fzero.model.transforms`).
    """
    parallelism: Parallelism | None = None
    """How `model` is divided among the ranks; None leaves it whole
    (`fzero.parallelism.parallelism_of`).
    """
    held: tuple[SharedTensor, ...] | None = None
    """The tensors outside of the model's slots that share memory with its parameters
    and buffers; None looks for them.
    """

    def __post_init__(self) -> None:
        check_model(self.model)
        check_loss_fn(self.loss_fn)
        check_whole("seed", self.seed, 0)
        check_kind("donate", self.donate, bool, "True or False", "pass one of these")
        check_callable(
            "lr_schedule",
            self.lr_schedule,
            "a function of the number of updates so far",
            optional=True,
        )
        _check_choice("schedule", self.schedule, ("learned", "negotiated"))
        _check_choice("compile", self.compile, (None, "step", "block"))
        _check_choice("compile_backend", self.compile_backend, ("inductor", "aot_eager"))
        _check_choice("check_params", self.check_params, ("first", "always"))
        check_tensors(self.model)
        if self.held is None:
            object.__setattr__(self, "held", find_held(self.model))
        _check_schedule(self.lr_schedule)

    def check_placements(self, the_plan: Plan) -> None:
        """Raises a ConfigError where a step does not support the placements of its
        plan.
        """
        name = next(
            (name for name, placement in the_plan.placements.items() if placement.in_file), None
        )
        if name is not None and not self.donate:
            raise ConfigError(
                f"donate: must be True where state is in files, because they hold one generation "
                f"only, got False with {name} on 'nvme'; drop it, or leave the state in memory"
            )

    def check_compiled(self, the_plan: Plan) -> None:
        """Raises where a module compiled by torch.compile has parameters of several
        units that a step gathers.

        Its graph needs all of these parameters at its start. A gather inside the graph
        would be traced, and its effect lost.
        """
        if the_plan.num_shards == 1 or self.compile == "step":
            return
        units = {
            name: unit
            for unit in the_plan.units
            if unit.gathered_numel
            for b in unit.buffers
            for name in b.layout.names
        }
        for name, module in ModuleIndex.of(self.model).modules.items():
            if _is_compiled(module):
                own = module.named_parameters(prefix=name, remove_duplicate=False)
                homes = (units.get(the_plan.aliases.get(key, key)) for key, _ in own)
                spanned = {unit.name: None for unit in homes if unit is not None}
                if len(spanned) > 1:
                    subject = repr(name) if name else "the model"
                    raise ValueError(
                        f"model: must have no module compiled by torch.compile with parameters of "
                        f"several units that stage {the_plan.stage} gathers, got {subject} "
                        f"compiled, with units {', '.join(map(repr, spanned))}; compile the "
                        f"original module (_orig_mod) with compile='block' or 'step', compile each "
                        f"block separately, or name it in units= where it fits on a rank"
                    )

    @property
    def device(self) -> torch.device:
        """The model's device; for a model on `meta`, `meta_device`, or else the accelerator if
        there is one.
        """
        tensors = (*self.model.parameters(), *self.model.buffers())
        devices = {tensor.device for tensor in tensors} - {torch.device("meta")}
        if len(devices) > 1:
            raise ValueError(
                f"model: must be on one device, found {sorted(map(str, devices))}; move it with "
                f"model.to(...)"
            )
        if devices:
            return devices.pop()
        if self.meta_device is not None:
            return self.meta_device
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))

    @cached_property
    def rates(self) -> list[Schedule]:
        """The learning rate of each parameter group, as a function of the number of
        updates so far.
        """
        cfg, optimizers = self.cfg, self.optimizers
        if (self.lr_schedule or cfg.scheduler) is not None and any(
            isinstance(group, UserTransform) and group.is_fixed for group in optimizers
        ):
            raise ConfigError(
                "transform: must be a function of the learning rate where a schedule changes that, "
                "got a Transform; pass lambda lr: ..."
            )
        if cfg.scheduler is not None and self.lr_schedule is None:
            schedulers = cfg.scheduler.for_groups(len(optimizers))
            return [one.rate(group.lr) for one, group in zip(schedulers, optimizers, strict=True)]
        return [rate_of(group.lr, cfg.optimizer.lr, self.lr_schedule) for group in optimizers]

    @cached_property
    def group_names(self) -> list[str]:
        """The name of each parameter group in messages, in the order of `rates`."""
        rest = "all that no other group takes" if self.param_groups else "all parameters"
        patterns = [group["params"] for group in self.param_groups]
        names = [
            repr(match) if isinstance(match, str) else "chosen by a function" for match in patterns
        ]
        return [f"group {index} ({name})" for index, name in enumerate([rest, *names])]

    @cached_property
    def momentum(self) -> Schedule | None:
        """The first beta as a function of the number of updates so far, where the
        scheduler changes it.
        """
        cfg = self.cfg
        momentum = cfg.scheduler.momentum() if cfg.scheduler and not self.lr_schedule else None
        has_betas = hasattr(cfg.optimizer.params, "betas") and not any(
            isinstance(g, UserTransform) for g in self.optimizers
        )
        if momentum is not None and not has_betas:
            warnings.warn(
                f"scheduler.params.cycle_momentum: "
                f"{'a transform' if self.transform else cfg.optimizer.type} has no betas, so only "
                f"the learning rate cycles (as in DeepSpeed); set it to false",
                stacklevel=5,
            )
            return None
        return momentum

    @cached_property
    def changes(self) -> AllChanges:
        """The changes of the transforms to the model; the first use adds their tensors
        to its modules.
        """
        return changes_of(self)

    @cached_property
    def statistics(self) -> set[str]:
        """The names of buffers with running statistics.

        The tensor versions of the first step do not show all of them: a module in
        evaluation mode changes its buffers only later.
        """
        return {
            slot.name
            for slot in ModuleIndex.of(self.model).slots("_buffers")
            if isinstance(slot.module, nn.modules.batchnorm._NormBase)
        }

    @cached_property
    def stored_names(self) -> dict[str, str]:
        """The keys of the model's state dict, each with the name under which its tensor
        is stored.

        The two differ for tied tensors, and where a module's hook renames keys (a
        checkpoint wrapper removes its own prefix).
        """
        names = {
            id(tensor): name
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers())
        }
        tensors = self.model.state_dict(keep_vars=True)
        return {key: names[id(tensor)] for key, tensor in tensors.items() if id(tensor) in names}

    @property
    def fingerprint_of_config(self) -> dict[str, str]:
        """The values of the configuration that must be the same on all ranks, as text,
        by dotted name.
        """
        return compared(self.cfg)

    def fingerprint(self, the_plan: Plan) -> dict[str, dict[str, str]]:
        """The values that must be the same on all ranks, by subject and name."""
        return {
            "configuration": self.fingerprint_of_config,
            "parameters": {
                n: f"{tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
                for n, p in self.model.named_parameters()
            },
            "buffers": {n: f"{tuple(b.shape)} {b.dtype}" for n, b in self.model.named_buffers()},
            "units": {unit.name: str(unit.numel) for unit in the_plan.units},
            "flat buffers": {b.key: ", ".join(b.layout.names) for b in the_plan.flat_buffers},
            "arguments": {
                "mesh": str(unfolded(the_plan.mesh, the_plan.seq_size)),
                "schedule": self.schedule,
                "optimizers": str(self.optimizers),
                "updates": "; ".join(
                    own.outcome for own in self.optimizers if isinstance(own, UserTransform)
                ),
                "compile": f"{self.compile} with {self.compile_backend}",
                "comm hooks": str(the_plan.comm_hooks),
                **self.changes.texts,
                "placements": ", ".join(
                    f"{n} {p.kind}" for n, p in the_plan.placements.items() if p.is_away
                ),
            },
            "torch": {"version": str(torch.__version__)},
        }


def bind(mesh: Mesh | None, device: torch.device) -> ProcessAxis:
    """The ranks of this job, arranged in a mesh. *Collective:* every rank; initialises
    the process group if necessary.
    """
    axis = join(device)
    store_barrier("fzero.make_train_step", axis)
    check_backend(device)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"model: must be on this rank's own device cuda:{torch.cuda.current_device()}, got "
            f"{device}; call torch.cuda.set_device(LOCAL_RANK) before model.cuda()"
        )
    return replace(axis, mesh=mesh)


def check_same(
    axis: RankAxis,
    mine: dict[str, dict[str, str]],
    *,
    fix: str = "start every rank with the same model and configuration",
) -> None:
    """Raises on every rank if `values` (of models, configurations and the like, by
    subject and name) differ between ranks.

    *Collective:* every rank.
    """
    world = collectives.exchange(mine, axis, label=Label("compare"))
    for rank, theirs in enumerate(world):
        for subject, first in world[0].items():
            if list(theirs[subject].items()) != list(first.items()):
                names = [*first, *(name for name in theirs[subject] if name not in first)]
                differing = [name for name in names if theirs[subject].get(name) != first.get(name)]
                name = differing[0] if differing else "the order"
                raise MismatchError(
                    f"{subject}: must be the same on all ranks, but {name!r} is "
                    f"{first.get(name)!r} on rank 0 and {theirs[subject].get(name)!r} on rank "
                    f"{rank}; {fix}"
                )


def _check_choice(field: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        choices = " or ".join(map(repr, known))
        raise ValueError(f"{field}: must be {choices}, got {value!r}; pass one of these")


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was applied to the module or its forward."""
    forwards = (vars(module).get("forward"), type(module).forward)
    is_decorated = any(hasattr(forward, "_torchdynamo_orig_callable") for forward in forwards)
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None or is_decorated


def _check_schedule(schedule: Schedule | None) -> None:
    first = 0.0 if schedule is None else schedule(0)
    if not isinstance(first, int | float) or not 0 <= first < math.inf:
        raise ValueError(
            f"lr_schedule: must give a number that is not negative for every number of updates, "
            f"got {first!r} for 0"
        )
