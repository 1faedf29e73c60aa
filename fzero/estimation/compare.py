"""Which stage and which placement? Everything that a rank would hold and send, for all of them beside each other.

    comparison = fzero.estimation.compare_plans(model, "config.json", world_size=64)
    print(comparison)

Each column is a configuration: the given one with another stage, or with state placed elsewhere. Its numbers are those of
`fzero.plan`, from the layouts and specs that a step would use, padding included, and of a step that is followed on paper
(`fzero.estimation.dry_run`): what the peak is made of, and how long the step takes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optree
from rich.console import Group
from rich.table import Table
from torch import Tensor, nn

from fzero.common.text_tables import as_text, scale_of, shown
from fzero.config.config import Config, ConfigError, ConfigWarning
from fzero.config.deepspeed_keys import INSTEAD
from fzero.config.files import changed, read
from fzero.config.unused_keys import is_off
from fzero.config.zero import ZeroOptimization
from fzero.estimation.activation_trace import Traced, trace_activations
from fzero.estimation.dry_run import DryRun, dry_run
from fzero.estimation.ledger import Device
from fzero.plans.machine_model import MachineModel
from fzero.plans.mesh_axes import describe
from fzero.plans.plan import LiveLimitError, Plan, plan
from fzero.runtime.loss import LossFn
from sharding import Mesh, Sharded, TensorSpec
from sharding.dtypes import itemsize

Keys = Mapping[str, Any]  # a configuration as in a file
MEMORIES = {"device": "on the device", "host": "in host memory", "nvme": "in files"}
QUANTITIES = (
    "parameters",
    "gradients",
    "master",
    "optimizer",
    "comm hooks",
    "gathers",
    "reductions",
    "arrivals",
    "kept",
    "streams",
    "activations",
    "sub-groups",
    "gaps",
)

VARIANTS: dict[str, Keys] = {
    **{f"stage {stage}": {"stage": stage, "offload_optimizer": None, "offload_param": None} for stage in range(4)},
    **{
        f"stage {stage}, optimizer on {name}": {"stage": stage, "offload_optimizer": block, "offload_param": None}
        for name, block in (("host", {"device": "cpu"}), ("nvme", {"device": "nvme", "nvme_path": "nvme"}))
        for stage in (1, 2, 3)
    },
    "stage 3, all on host": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "stage 3, all on nvme": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "nvme"},
        "offload_param": {"device": "nvme", "nvme_path": "nvme"},
    },
}
"""What each column sets of `zero_optimization`; None takes a key away."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration, and what a rank holds and sends with it.

    Attributes:
        name: what distinguishes it.
        keys: the configuration, as in a file.
        plan: of `fzero.plan`.
        step: the same, followed on paper.
        memory: bytes on a rank by kind of memory (`device`, `host`, `nvme`) and by what they are: those of
            `Plan.bytes_by_memory`; on the device, at the peak, `gathers`, `reductions`, `arrivals` (sums apart from them),
            `streams`, `activations`, and on the CPU `kept` buffers; in host memory `sub-groups` on their way, and `activations`
            that wait there for the backward.
        note: what was added to the configuration so that it holds, in words.
        tokens: of all ranks in a step; 0 where no batch says.
    """

    name: str
    keys: Keys
    plan: Plan = field(repr=False)
    step: DryRun = field(repr=False)
    memory: dict[str, dict[str, int]]
    note: str = ""
    tokens: int = 0

    def nbytes(self, kind: str) -> int:
        """The most bytes alive on one kind of memory."""
        return sum(self.memory.get(kind, {}).values())

    @property
    def seconds(self) -> float:
        """Of a step; without a batch, of what is sent, streamed and updated alone."""
        return self.step.seconds

    @property
    def padding_nbytes(self) -> int:
        """Of the bytes of model state, those of padding, as the mean of all ranks."""
        return round(sum(_padding(spec, b.layout.numel, self.plan.mesh) for b, spec in _flat(self.plan)))

    @property
    def sent_by_axis(self) -> dict[str, int]:
        """Bytes that a rank sends in a step along each axis."""
        return {axis: sum(sent.values()) for axis, sent in self.plan.sent_nbytes_by_axis.items()}

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
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
            "config": self.keys,
            **({"note": self.note} if self.note else {}),
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Configurations beside each other. `print(comparison)` shows a table.

    Attributes:
        columns: in the order of `VARIANTS`, after the given configuration if it is none of them.
        refused: what is not possible, with the reason.
        num_params: parameters of the model.
        given: the name of the column that is the given configuration.
    """

    columns: tuple[Candidate, ...]
    refused: dict[str, str]
    num_params: int
    given: str = ""

    def __getitem__(self, name: str) -> Candidate:
        return next(column for column in self.columns if column.name == name)

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        mesh = self.columns[0].plan.mesh
        return {
            "parameters": self.num_params,
            "mesh": {name: mesh.axis_size(name) for name in mesh.names},
            "configurations": [column.as_dict() for column in self.columns],
            "refused": self.refused,
        }

    def __rich__(self) -> Group:
        return _report(self)

    def __str__(self) -> str:
        return as_text(self)


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
) -> Comparison:
    """What a rank holds and sends, for all stages and placements of a configuration.

    Args:
        model: any module; on `meta` it holds no weights.
        cfg: what `Config.load` takes; None is bf16 beside an fp32 master, and AdamW.
        world_size: number of ranks W.
        mesh: how they stand along several axes; None is as the configuration says, or one axis.
        batch: one rank's samples of a micro-step, on `meta` too: counts activations (`trace_activations`); None does not.
        loss_fn: see `make_train_step`.
        machine: the rates of one rank, for the seconds of a step.
        device: where the model is; on the CPU, host memory is the device's, and working buffers stay with the process.

    Raises:
        ConfigError: the configuration is wrong in itself, or for the model.
        ValueError: the model does not run on that batch.
    """
    keys = keys_of(cfg)
    given = Config.load(dict(keys))  # tells of keys that are not honoured
    trace = None if batch is None else trace_activations(model, given, batch, loss_fn=loss_fn, device=device)

    def planned(name: str, keys: Keys) -> Candidate:
        found = column(model, name, keys, world_size, mesh, trace=trace, machine=machine, device=device)
        return replace(found, tokens=tokens_of(batch) * world_size * found.plan.num_micro_steps)

    columns, refused = [], {}
    for name, zero in VARIANTS.items():
        try:
            columns.append(planned(name, changed(keys, {"zero_optimization": zero})))
        except ConfigError as error:
            refused[name] = str(error).splitlines()[0]
    same = next((c.name for c in columns if _is_like(c, given)), None)
    if same is None:
        columns.insert(0, planned("as given", keys))
    num_params = sum(param.numel() for param in model.parameters())
    return Comparison(tuple(columns), refused, num_params, same or "as given")


def tokens_of(batch: Any) -> int:
    """Elements of the first tensor of integers, as are the ids of tokens; 0 if there is none."""
    tensors = (x for x in optree.tree_leaves(batch, none_is_leaf=True) if isinstance(x, Tensor))
    return next((x.numel() for x in tensors if not x.is_floating_point()), 0)


def _is_like(other: Candidate, given: Config) -> bool:
    return quietly(other.keys).zero_optimization == given.zero_optimization


def column(
    model: nn.Module,
    name: str,
    keys: Keys,
    world_size: int,
    mesh: Mesh | None = None,
    *,
    trace: Traced | None = None,
    machine: MachineModel | None = None,
    device: Device = "cuda",
) -> Candidate:
    """One configuration, planned. Where stage 3 could not hold its largest unit, `stage3_max_live_parameters` is raised.

    Args:
        trace: of its activations, with the same dtypes and checkpointing, on the same device.
        machine: the rates of one rank.
        device: where the model is.

    Raises:
        ConfigError: it is not possible.
    """
    note = ""
    try:
        found = plan(model, quietly(keys), world_size=world_size, mesh=mesh)
    except LiveLimitError:
        zero = quietly(keys).zero_optimization
        if _names_max_live(keys):
            raise
        whole = plan(model, quietly(changed(keys, {"zero_optimization": {"stage3_max_live_parameters": 1 << 60}})),
                     world_size=world_size, mesh=mesh)  # fmt: skip
        numels = sorted(unit.gathered_numel for unit in whole.units)
        keys = changed(keys, {"zero_optimization": {"stage3_max_live_parameters": sum(numels[-2:])}})
        note = (
            f"stage3_max_live_parameters is {sum(numels[-2:])} here, which holds the two largest units, for "
            f"{zero.stage3_max_live_parameters} hold none"
        )
        found = plan(model, quietly(keys), world_size=world_size, mesh=mesh)
    step = dry_run(found, trace, machine=machine, device=device, title=name)
    return Candidate(name, keys, found, step, memory_of(step), note)


def _names_max_live(keys: Keys) -> bool:
    zero = keys.get("zero_optimization") or {}
    return "stage3_max_live_parameters" in zero or "max_live_parameters" in zero


def memory_of(step: DryRun) -> dict[str, dict[str, int]]:
    """Bytes by kind of memory and by what they are, of which those on the device are at their peak."""
    held = {kind: dict(parts) for kind, parts in step.memory.items()}
    held["device"] = step.at_peak
    of_state = {name: n for name, n in held.get("host", {}).items() if step.device == "cuda"}  # else the device has it
    held["host"] = of_state | {"activations": step.host_inputs, "sub-groups": step.host_pool, "gaps": step.host_gaps}
    return {kind: {name: n for name, n in parts.items() if n} for kind, parts in held.items() if any(parts.values())}


# --- configurations as in a file ---------------------------------------------------------------------------------


def keys_of(cfg: Any) -> Keys:
    """A configuration as in a file, in today's names; None is bf16 beside an fp32 master, and AdamW."""
    if cfg is None:
        return {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    if isinstance(cfg, Config):
        kept: dict[str, Any] = cfg.model_dump(mode="json", exclude_unset=True)
        return kept
    keys = dict(read(cfg)) if isinstance(cfg, str | Path) else dict(cfg)
    zero = keys.get("zero_optimization")
    return keys | {"zero_optimization": _in_todays_names(zero)} if isinstance(zero, Mapping) else keys


def _in_todays_names(zero: Keys) -> Keys:
    """Without older keys, which would stand beside those that a column sets; what `Config` refuses stays for it."""
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
    """The configuration, without warnings that were told once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return Config.load(dict(keys))


# --- padding -----------------------------------------------------------------------------------------------------


def _flat(plan: Plan) -> Iterator[tuple[Any, TensorSpec]]:
    """Every flat tensor of the state, with its flat buffer."""
    for buffer in plan.flat_buffers:
        yield buffer, buffer.params
        if buffer.has_master:
            yield buffer, buffer.master
        if not buffer.trainable:
            continue
        yield buffer, buffer.grads
        for spec in optree.tree_leaves(plan.optimizer[buffer.key]):
            if spec.shape == (buffer.padded_numel,):
                yield buffer, spec


def _padding(spec: TensorSpec, numel: int, mesh: Mesh) -> float:
    shards = 1
    for axis in spec.spec.axes if isinstance(spec.spec, Sharded) else ():
        shards *= mesh.axis_size(axis)
    return (spec.numel - numel) * itemsize(spec.dtype) / shards


# --- the table ---------------------------------------------------------------------------------------------------

TITLES = {
    "optimizer": "optimizer state",
    "gathers": "gather buffers",
    "reductions": "reduce buffers",
    "arrivals": "reduced shards",
    "streams": "streams",
    "kept": "kept buffers",
    "activations": "activations",
    "sub-groups": "on its way",
    "gaps": "pinned, rounded up",
}


def _report(comparison: Comparison) -> Group:
    columns = comparison.columns
    scale, unit = scale_of(max(sum(one.plan.bytes_per_rank.values()) for one in columns))
    title = f"{comparison.num_params:,} parameters on {describe(columns[0].plan.mesh)}: {unit} on a rank, and sent in a step"
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0), box=None, header_style="bold")
    table.add_column("", no_wrap=True)
    for one in columns:
        name = one.name.replace(" optimizer", " opt.").replace(" on ", "\n").replace(", ", "\n")
        table.add_column(name, justify="right", no_wrap=True, min_width=max(map(len, name.split("\n"))))
    _memory_rows(table, columns, scale)
    table.add_row("model state", *(shown(sum(one.plan.bytes_per_rank.values()), scale) for one in columns))
    table.add_row("  padding (mean)", *(shown(one.padding_nbytes, scale) for one in columns))
    for axis in columns[0].plan.mesh.names:
        sent = (one.sent_by_axis.get(axis, 0) for one in columns)
        table.add_row(f"sent along {axis}", *(shown(nbytes, scale) for nbytes in sent))
    if any("activations" in one.memory["device"] for one in columns):
        table.add_row("seconds of a step", *(f"{one.seconds:.3g}" for one in columns))
    if any(one.tokens for one in columns):
        table.add_row("  tokens/s", *(f"{one.tokens / one.seconds:,.0f}" for one in columns))
    notes = [_peak(one) for one in columns if one.name == comparison.given]
    notes += [f"{one.name}: {one.note}" for one in columns if one.note]
    notes += [f"{name} is not possible: {reason}" for name, reason in comparison.refused.items()]
    if not any("activations" in one.memory["device"] for one in columns):
        notes.append("Activations are not counted: give a batch (--batch and --sequence).")
    return Group(table, *(["", *notes] if notes else []))


def _peak(one: Candidate) -> str:
    return f"{one.name}: {one.step.told}."


def _memory_rows(table: Table, columns: Sequence[Candidate], scale: float) -> None:
    for kind, where in MEMORIES.items():
        if not any(one.memory.get(kind) for one in columns):
            continue
        table.add_row(f"[bold]{where}", *(f"[bold]{shown(one.nbytes(kind), scale)}" for one in columns))
        for name in QUANTITIES:
            held = [one.memory.get(kind, {}).get(name, 0) for one in columns]
            if any(held):
                table.add_row(f"  {TITLES.get(name, name)}", *(shown(nbytes, scale) for nbytes in held))
