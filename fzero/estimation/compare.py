"""`compare_plans`: the bytes that a rank would hold and send, for every stage and
placement side by side.

Each column is a configuration: the given one with another stage or other placements.
Its numbers come from `fzero.plan`, which uses the layouts and specs of a real step,
padding included, and from a dry run (`fzero.estimation.dry_run`), which gives the
composition of the peak and the duration of the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import optree
from rich.console import Group
from rich.table import Table
from torch import Tensor, nn

from fzero.common.text_tables import as_text, scale_of, shown
from fzero.comms.mesh import unfolded
from fzero.compression import compression
from fzero.config.config import Config, ConfigError, ConfigWarning
from fzero.config.deepspeed_keys import INSTEAD
from fzero.config.files import changed, read
from fzero.config.unused_keys import is_off
from fzero.config.zero import ZeroOptimization
from fzero.estimation.activation_trace import ActivationTrace, trace_activations
from fzero.estimation.dry_run import DryRun, dry_run
from fzero.estimation.generation import Answers, Generating, cache_nbytes
from fzero.estimation.ledger import Device
from fzero.model.transforms import AllChanges, ModelTransform
from fzero.plans.machine_model import MachineModel
from fzero.plans.mesh_axes import describe, seq_size_of
from fzero.plans.plan import Plan
from fzero.plans.plan_spec import plan
from fzero.runtime.batches import LossFn
from fzero.runtime.step_runtime import StepRuntime, check_division
from fzero.runtime.step_spec import StepSpec
from sharding import Mesh
from sharding.dtypes import itemsize

Keys = Mapping[str, Any]  # a configuration as in a file
MEMORIES = {"device": "on the device", "host": "in host memory", "nvme": "in files"}
QUANTITIES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "master": "master",
    "optimizer": "optimizer state",
    "comm hooks": "comm hooks",
    "gathers": "gather buffers",
    "views": "values of views",
    "reductions": "reduce buffers",
    "arrivals": "reduced shards",
    "kept": "kept buffers",
    "streams": "streams",
    "activations": "activations",
    "sub-groups": "in transfer",
    "gaps": "pinned, rounded up",
}
"""The names of quantities in the table."""


SMALL_BUCKET = 1 << 22
"""The `reduce_bucket_size` that is tried where memory is short: elements of full
gradients that await their reduction.
"""


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices in which planned configurations differ.

    >>> print(Choices(2, "host", checkpoints=True))
    stage 2, optimizer state on host, activation checkpointing
    """

    stage: int
    optimizer: str = "device"
    params: str = "device"
    checkpoints: bool = False
    small: bool = False
    # where the inputs of checkpointed modules are kept; no effect without checkpointing
    inputs: str = "device"
    # the head and perceptrons tile by tile: `Candidate.tiles`, which no key asks for
    tiles: bool = False

    @classmethod
    def of(cls, cfg: Config) -> Self:
        """The choices of a configuration."""
        zero, checkpointing = cfg.zero_optimization, cfg.activation_checkpointing
        optimizer, params = (
            "device" if block is None else {"cpu": "host"}.get(block.device, block.device)
            for block in (zero.offload_optimizer, zero.offload_param)
        )
        return cls(
            zero.row.number,
            optimizer,
            params,
            checkpoints=checkpointing.every is not None,
            small=zero.reduce_bucket_size == SMALL_BUCKET,
            inputs="host" if checkpointing.cpu_checkpointing else "device",
        )

    def placed(self, nvme_path: str | None = "nvme") -> dict[str, Any]:
        """The keys of `zero_optimization` for the stage and both placements; None
        removes a key.
        """
        blocks = {
            "device": None,
            "host": {"device": "cpu"},
            "nvme": {"device": "nvme", "nvme_path": nvme_path},
        }
        return {
            "stage": self.stage,
            "offload_optimizer": blocks[self.optimizer],
            "offload_param": blocks[self.params],
        }

    def keys(self, nvme_path: str | None, every: int | None = None) -> Keys:
        """The configuration keys of these choices; the device is the default. `every`
        n-th unit is checkpointed, None: all.
        """
        zero = self.placed(nvme_path)
        if self.small:
            zero |= {"reduce_bucket_size": SMALL_BUCKET} | (
                {"stage3_prefetch_bucket_size": 0} if self.stage == 3 else {}
            )
        if not self.checkpoints:
            return {"zero_optimization": zero}
        block = {"every": every or 1} | (
            {"cpu_checkpointing": True} if self.inputs == "host" else {}
        )
        return {"zero_optimization": zero, "activation_checkpointing": block}

    def __str__(self) -> str:
        parts = [
            f"stage {self.stage}",
            f"optimizer state on {self.optimizer}" * (self.optimizer != "device"),
            f"parameters on {self.params}" * (self.params != "device"),
            "activation checkpointing" * self.checkpoints,
            "checkpointed inputs in host memory" * (self.checkpoints and self.inputs == "host"),
            "tiles" * self.tiles,
            "a small bucket" * self.small,
        ]
        return ", ".join(filter(None, parts))


VARIANTS: dict[str, Keys] = {
    **{f"stage {stage}": Choices(stage).placed() for stage in range(4)},
    **{
        f"stage {n}, optimizer on {kind}": Choices(n, kind).placed()
        for kind in ("host", "nvme")
        for n in (1, 2, 3)
    },
    **{f"stage 3, all on {kind}": Choices(3, kind, kind).placed() for kind in ("host", "nvme")},
}
"""The keys of `zero_optimization` that each column sets."""


@dataclass(frozen=True)
class Candidate:
    """One configuration, and what a rank holds and sends with it.

    Attributes:
        name: the stage and placements that distinguish it; for a rung of the ladder of
            `fit`, its change from the rung before.
        keys: the configuration, as in a file.
        choices: its choices.
        plan: the result of `fzero.plan`.
        step: the dry run of this plan.
        memory: bytes on a rank by kind of memory (`device`, `host`, `nvme`) and by
            purpose: those of `Plan.bytes_by_memory`; on the device, at the peak,
            `gathers`, `reductions`, `arrivals` (receive buffers of reductions),
            `streams`, `activations`, and on the CPU `kept` (pooled) buffers; in host
            memory (on the CPU the device's) `sub-groups` in transfer, and `activations`
            kept there for the backward.
        tokens: the number of tokens of all ranks in a step; 0 without a batch of
            tokens.
        generating: the bytes between two steps while a rank generates, if they are
            asked for.
        tiles: the transforms that the planner has added
            (`fzero.tiling.proposed_tiles`).
    """

    name: str
    keys: Keys
    choices: Choices
    plan: Plan = field(repr=False)
    step: DryRun = field(repr=False)
    memory: dict[str, dict[str, int]]
    tokens: int = 0
    generating: Generating | None = None
    tiles: tuple[ModelTransform, ...] = ()

    @property
    def activations(self) -> int:
        """Bytes of activations at the peak; 0 if they are not counted."""
        return self.memory["device"].get("activations", 0)

    def nbytes(self, kind: str) -> int:
        """The peak bytes in one kind of memory; on the device, all that are counted."""
        return sum(self.memory.get(kind, {}).values())

    @property
    def seconds(self) -> float:
        """The duration of a step; without a batch, of its communication, streams and
        updates alone.
        """
        return self.step.seconds

    @cached_property  # printing asks for it several times
    def state_nbytes(self) -> int:
        """Bytes of model state in all memories, padding included."""
        return sum(self.plan.bytes_per_rank.values())

    @cached_property
    def padding_nbytes(self) -> int:
        """Bytes of padding in the model state, as the mean of all ranks."""
        longs = (
            (b, leaf.spec)
            for b in self.plan.flat_buffers
            for leaf in self.plan.leaves(b)
            if leaf.is_long
        )
        return round(
            sum(
                (spec.numel - b.layout.numel)
                * itemsize(spec.dtype)
                / spec.num_shards(self.plan.mesh)
                for b, spec in longs
            )
        )

    @cached_property
    def sent_by_axis(self) -> dict[str, int]:
        """Bytes that a rank sends in a step along each axis."""
        return {axis: sum(sent.values()) for axis, sent in self.plan.sent_nbytes_by_axis.items()}

    def as_dict(self) -> dict[str, Any]:
        """The numbers as JSON types."""
        return {
            "name": self.name,
            "stage": self.plan.stage,
            "bytes": self.memory,
            "total": {kind: self.nbytes(kind) for kind in MEMORIES},
            "padding": self.padding_nbytes,
            "sent": self.sent_by_axis,
            "seconds": self.seconds,
            "peak": self.step.peak.label,
            **({"tokens_per_second": self.tokens / self.seconds} if self.tokens else {}),
            **({"generating": self.generating.as_dict()} if self.generating else {}),
            "config": self.keys,
            **({"transforms": [str(one) for one in self.tiles]} if self.tiles else {}),
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Configurations side by side. `print(comparison)` shows a table.

    Attributes:
        columns: in the order of `VARIANTS`; the given configuration is first if it is
            none of them.
        refused: the impossible variants, each with the reason.
        num_params: parameters of the model.
        given: the name of the column of the given configuration.
    """

    columns: tuple[Candidate, ...]
    refused: dict[str, str]
    num_params: int
    given: str = ""

    def __getitem__(self, name: str) -> Candidate:
        return next(column for column in self.columns if column.name == name)

    def as_dict(self) -> dict[str, Any]:
        """The numbers as JSON types."""
        plan = self.columns[0].plan
        mesh = unfolded(plan.mesh, plan.seq_size)
        return {
            "parameters": self.num_params,
            "mesh": {name: mesh.axis_size(name) for name in mesh.names},
            "configurations": [column.as_dict() for column in self.columns],
            "refused": self.refused,
        }

    def __rich__(self) -> Group:
        columns = self.columns
        has_batch = any("activations" in one.memory["device"] for one in columns)
        scale, unit = scale_of(max(one.state_nbytes for one in columns))
        title = (
            f"{self.num_params:,} parameters on "
            f"{describe(unfolded(columns[0].plan.mesh, columns[0].plan.seq_size))}: {unit} on "
            f"a rank, and sent in a step"
        )
        table = Table(
            title=title, title_justify="left", padding=(0, 1, 0, 0), box=None, header_style="bold"
        )
        table.add_column("", no_wrap=True)
        for one in columns:
            name = one.name.replace(" optimizer", " opt.").replace(" on ", "\n").replace(", ", "\n")
            table.add_column(
                name, justify="right", no_wrap=True, min_width=max(map(len, name.split("\n")))
            )
        for kind, where in MEMORIES.items():
            if any(one.memory.get(kind) for one in columns):
                table.add_row(
                    f"[bold]{where}",
                    *(f"[bold]{shown(one.nbytes(kind), scale)}" for one in columns),
                )
            for quantity, words in QUANTITIES.items():
                held = [one.memory.get(kind, {}).get(quantity, 0) for one in columns]
                if any(held):
                    table.add_row(f"  {words}", *(shown(nbytes, scale) for nbytes in held))
        table.add_row("model state", *(shown(one.state_nbytes, scale) for one in columns))
        table.add_row("  padding (mean)", *(shown(one.padding_nbytes, scale) for one in columns))
        for axis in {axis: None for one in columns for axis in one.sent_by_axis}:
            sent = (one.sent_by_axis.get(axis, 0) for one in columns)
            table.add_row(f"sent along {axis}", *(shown(nbytes, scale) for nbytes in sent))
        if has_batch:
            table.add_row("seconds of a step", *(f"{one.seconds:.3g}" for one in columns))
        if any(one.tokens for one in columns):
            table.add_row("  tokens/s", *(f"{one.tokens / one.seconds:,.0f}" for one in columns))
        if columns[0].generating is not None:
            _generating_rows(
                table, [one.generating for one in columns if one.generating is not None], scale
            )
        notes = [
            f"{one.name}: {one.step.description}." for one in columns if one.name == self.given
        ]
        notes += [f"{name} is not possible: {reason}" for name, reason in self.refused.items()]
        if not has_batch:
            notes.append("Activations are not counted: pass a batch (--batch and --sequence).")
        return Group(table, *(["", *notes] if notes else []))

    def __str__(self) -> str:
        return as_text(self)


def _generating_rows(table: Table, found: Sequence[Generating], scale: float) -> None:
    rows = {
        "[bold]generating, gathered once": [f"[bold]{shown(one.by_copy, scale)}" for one in found]
    }
    rows["  model state"] = [shown(one.state, scale) for one in found]
    rows["  gathered copy"] = [shown(one.copy, scale) for one in found]
    rows["  keys and values"] = [shown(one.cache, scale) for one in found]
    rows["  by unit, in all"] = [shown(one.by_unit, scale) for one in found]
    for name, cells in rows.items():
        table.add_row(name, *cells)


def compare_plans(
    model: nn.Module,
    cfg: Any = None,
    *,
    world_size: int = 1,
    mesh: Mesh | None = None,
    batch: Any = None,
    loss_fn: LossFn | None = None,
    machine: MachineModel | None = None,
    device: Device = "cuda",
    answers: Answers | None = None,
    transforms: Sequence[ModelTransform] = (),
) -> Comparison:
    """Compares the bytes that a rank holds and sends, for all stages and placements of
    a configuration.

    Args:
        model: any module; on `meta` it holds no weights.
        cfg: any argument of `Config.load`; None is bf16 with an fp32 master, and AdamW.
        world_size: number of ranks W.
        mesh: the mesh of these ranks; None is the configuration's, or one axis.
        batch: one rank's samples of a micro-step, possibly on `meta`; with it,
            activations are counted (`trace_activations`), and what they send. Where the
            mesh has the axis "seq", whole sequences, as a step gets them.
        loss_fn: see `make_train_step`.
        machine: the rates of one rank, for the seconds of a step.
        device: where the model is; on the CPU, host memory is the device's memory, and
            working buffers stay in a pool.
        answers: what a rank generates at once between two steps; with it, that is
            counted (`Candidate.generating`).
        transforms: see `make_train_step`; the model gets the tensors that they add.

    Raises:
        ConfigError: the configuration is invalid, in itself or for the model.
        ValueError: the model does not run on that batch, or has no cache of keys and
            values.
    """
    keys = keys_of(cfg)
    given = Config.load(dict(keys))  # warns of keys that are not honoured
    changes, seq_size = changes_of(model, given, transforms, loss_fn), seq_size_of(mesh)
    how: dict[str, Any] = {"loss_fn": loss_fn, "device": device, "changes": changes}
    trace = (
        None if batch is None else trace_activations(model, given, batch, seq_size=seq_size, **how)
    )
    cache = None if answers is None else cache_nbytes(model, given, answers)

    def planned(name: str, keys: Keys) -> Candidate:
        how: dict[str, Any] = {
            "trace": trace,
            "machine": machine,
            "device": device,
            "cache": cache,
            "changes": changes,
        }
        made = column(model, name, keys, world_size, mesh, **how)
        num_batches = world_size // seq_size * made.plan.num_micro_steps
        return replace(made, tokens=tokens_of(batch) * num_batches)

    columns, refused = [], {}
    for name, zero in VARIANTS.items():
        try:
            columns.append(planned(name, changed(keys, {"zero_optimization": zero})))
        except ConfigError as error:
            refused[name] = str(error).splitlines()[0]
    same = next(
        (c.name for c in columns if quietly(c.keys).zero_optimization == given.zero_optimization),
        None,
    )
    if same is None:
        columns.insert(0, planned("as given", keys))
    num_params = sum(param.numel() for param in model.parameters())
    return Comparison(tuple(columns), refused, num_params, same or "as given")


def changes_of(
    model: nn.Module, cfg: Config, transforms: Sequence[ModelTransform], loss_fn: LossFn | None
) -> AllChanges:
    """The changes that transforms make to a model that is planned."""
    if not transforms:
        return AllChanges()
    return StepSpec(model=model, cfg=cfg, loss_fn=loss_fn, transforms=tuple(transforms)).changes


def tokens_of(batch: Any) -> int:
    """Elements of the first integer tensor, such as token ids; 0 if there is none."""
    tensors = (x for x in optree.tree_leaves(batch, none_is_leaf=True) if isinstance(x, Tensor))
    return next((x.numel() for x in tensors if not x.is_floating_point()), 0)


def length_of(batch: Any) -> int:
    """The tokens of a sequence: the second dimension of the first integer tensor; 0 if
    it has none.
    """
    tensors = (x for x in optree.tree_leaves(batch, none_is_leaf=True) if isinstance(x, Tensor))
    tokens = next((x for x in tensors if not x.is_floating_point()), None)
    return tokens.shape[1] if tokens is not None and tokens.dim() == 2 else 0


def samples_of(batch: Any) -> int | None:
    """The length of the first tensor: the samples of a micro-batch; None if there is no
    tensor with a dimension.
    """
    tensors = (x for x in optree.tree_leaves(batch, none_is_leaf=True) if isinstance(x, Tensor))
    return next((len(x) for x in tensors if x.dim()), None)


def column(
    model: nn.Module,
    name: str,
    keys: Keys,
    world_size: int,
    mesh: Mesh | None = None,
    *,
    trace: ActivationTrace | None = None,
    machine: MachineModel | None = None,
    device: Device = "cuda",
    cache: int | None = None,
    changes: AllChanges | None = None,
) -> Candidate:
    """Plans one configuration.

    Args:
        trace: the trace of the activations, with the same dtypes, checkpointing and
            device.
        cache: the bytes of keys and values while a rank generates; None does not count
            generation.
        changes: the changes of transforms, besides those that the configuration asks
            for.

    Raises:
        ConfigError: the configuration is not possible.
    """

    cfg, trained = quietly(keys), None if changes is None else changes.trained(model)
    planned = plan(model, cfg, world_size=world_size, mesh=mesh, trained=trained)
    check_division(changes or AllChanges(), planned)
    planned = planned if trace is None else replace(planned, activation_sends=trace.sends)
    views, sizes = ({}, {}) if changes is None else (changes.views, changes.sizes)
    seen = {*views, *(compression(cfg, model).params if cfg.compresses else ())}
    step = dry_run(
        planned, trace, machine=machine, device=device, title=name, viewed=seen, sizes=sizes
    )
    generating = None if cache is None else Generating.after(planned, step, cache)
    memory = memory_of(step)
    return Candidate(name, keys, Choices.of(cfg), planned, step, memory, generating=generating)


class Planned(Protocol):
    """A train step."""

    @property
    def runtime(self) -> StepRuntime: ...
    @property
    def plan(self) -> Plan: ...


def plan_for(step: Planned, batch: Any) -> Plan:
    """The plan of a step for a batch: `sent_per_step` counts the collectives of its
    activations, too. Runs and sends nothing.

        print(fzero.estimation.plan_for(step, batch).sent_per_step)

    Args:
        step: of `make_train_step`, without a pipeline.
        batch: this rank's samples of one micro-step; tensors may be on `meta`.

    Raises:
        ValueError: the model does not run on that batch.
    """
    spec, plan = step.runtime.spec, step.plan
    how: dict[str, Any] = {"loss_fn": spec.loss_fn, "changes": step.runtime.changes}
    trace = trace_activations(spec.model, spec.cfg, batch, seq_size=plan.seq_size, **how)
    return replace(plan, activation_sends=trace.sends)


def memory_of(step: DryRun) -> dict[str, dict[str, int]]:
    """Bytes by kind of memory and by purpose; on the device, those at the peak."""
    held = {kind: dict(parts) for kind, parts in step.memory.items()}
    held["device"] = step.at_peak
    if step.device == "cpu":  # host memory is the device's, and its state is counted there
        held["device"], held["host"] = held["device"] | {"sub-groups": step.host_pool}, {}
    else:
        held["host"] = held.get("host", {}) | {
            "activations": step.host_inputs,
            "sub-groups": step.host_pool,
            "gaps": step.host_gaps,
        }
    return {
        kind: {name: n for name, n in parts.items() if n}
        for kind, parts in held.items()
        if any(parts.values())
    }


# --- configurations as in a file ------------------------------------------------------------------


def keys_of(cfg: Any) -> Keys:
    """A configuration as in a file, in current names; None is bf16 with an fp32 master,
    and AdamW.
    """
    if cfg is None:
        return {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    if isinstance(cfg, Config):
        dumped: dict[str, Any] = cfg.model_dump(mode="json", exclude_unset=True)
        return dumped
    keys = dict(read(cfg)) if isinstance(cfg, str | Path) else dict(cfg)
    zero = keys.get("zero_optimization")
    return (
        keys | {"zero_optimization": _in_current_names(zero)} if isinstance(zero, Mapping) else keys
    )


def _in_current_names(zero: Keys) -> Keys:
    """Renames older keys, which would conflict with those that a column sets; keys that
    `Config` refuses are left to it.
    """
    spellings = {field.alias: name for name, field in ZeroOptimization.model_fields.items()}
    made = {}
    for key, value in zero.items():
        name = f"zero_optimization.{key}"
        today = spellings.get(key) or INSTEAD.get(name, name).removeprefix("zero_optimization.")
        if today == key or today in zero:
            made[key] = value
        elif name not in INSTEAD:
            made[today] = value
        elif value is True:
            made[today] = {"device": "cpu"}
        elif not is_off(name, value):
            made[key] = value
    return made


def quietly(keys: Keys) -> Config:
    """The configuration, without the warnings that were issued before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return Config.load(dict(keys))
