"""`fit`: the fastest configuration that fits into memory, and the ladder of changes
with the savings and cost of each.

`fit` plans all combinations of stage, placement, checkpointing, tiles and bucket size
that the configuration allows. It chooses the one that fits and is fastest in a dry run
(`fzero.estimation.dry_run`) at the rates of a `fzero.graph.MachineModel`; without a
batch, only updates compute. Between equally fast ones it chooses the one with the
fewest bytes on the device; a small bucket, which overlaps less, is the last resort.

The *ladder* leads from the given configuration to the one that needs the least device
memory, one change at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from torch import nn

from fzero.common.arguments import check_kind
from fzero.common.collector import collector_paused
from fzero.common.text_tables import as_text, scale_of, shown
from fzero.config.config import ConfigError
from fzero.estimation.compare import Candidate, Keys, keys_of, quietly, samples_of
from fzero.estimation.fit_search import Limits, Search
from fzero.estimation.generation import Answers, Generating, cache_nbytes
from fzero.estimation.ledger import Device
from fzero.estimation.pipelines import PipelinePlan, best_pipelines
from fzero.model.transforms import ModelTransform
from fzero.plans.machine_model import MachineModel
from fzero.runtime.batches import LossFn
from sharding import Mesh

Progress = Callable[[int, int], None]
"""A function that gets the number of configurations planned so far, and of all."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The fastest configuration that fits. `print(found)` shows the ladder and the
    configuration.

    Attributes:
        limits: the memory of a rank.
        best: the fastest configuration that fits; None if none does.
        ladder: one change after the other.
        notes: what the search did not try or count.
        machine: the rates of one rank that its seconds are for.
        num_samples: the number of samples of the planned micro-batch; None without a
            batch.
        pipelines: the same configuration in pipelines of any number of stages, with as
            many samples in a step: those that fit, fastest first. Only with a batch,
            and ZeRO stage 0 or 1 in the configuration.
        given: the transforms of all configurations.
    """

    limits: Limits
    best: Candidate | None
    ladder: tuple[Candidate, ...]
    notes: tuple[str, ...]
    machine: MachineModel
    num_samples: int | None
    pipelines: tuple[PipelinePlan, ...] = ()
    given: tuple[ModelTransform, ...] = ()

    @property
    def transforms(self) -> tuple[ModelTransform, ...]:
        """The transforms that belong to `config`, for `make_train_step(…, transforms=…)`:
        those given, and tiles (`fzero.tiling`), if it needs them.
        """
        return () if self.best is None else (*self.given, *self.best.tiles)

    @property
    def config(self) -> Keys:
        """The configuration that fits, as in a file, with the micro-batch and the
        number of micro-steps that were planned.

        Raises:
            ConfigError: none fits.
        """
        if self.best is None:
            least = min(self.ladder, key=lambda rung: rung.nbytes("device"))
            raise ConfigError(
                f"fit: nothing fits into {self.limits.device / 1e9:.3g} GB; {least.name!r} needs "
                f"the least device memory, {least.nbytes('device') / 1e9:.3g} GB, "
                f"{least.nbytes('host') / 1e9:.3g} GB of host memory and "
                f"{least.nbytes('nvme') / 1e9:.3g} GB of files; take more ranks, a smaller "
                f"model or batch, or allow files"
            )
        keys, best = dict(self.best.keys), self.best.plan
        # else it chooses the sizes
        if self.num_samples is None or (keys.get("elasticity") or {}).get("enabled"):
            return keys
        sizes = (
            self.num_samples,
            best.num_micro_steps,
            self.num_samples * best.num_micro_steps * best.world_size // best.seq_size,
        )
        names = (
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "train_batch_size",
        )
        return keys | dict(zip(names, sizes, strict=True))

    def save(self, path: str | Path) -> None:
        """Writes the configuration as JSON."""
        Path(path).write_text(json.dumps(self.config, indent=2) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """The numbers as JSON types."""

        def as_json(rung: Candidate) -> dict[str, Any]:
            more = {
                "change": rung.name,
                "activations": rung.activations,
                "device": rung.nbytes("device"),
                "fits": self.limits.hold(rung),
            }
            return more | rung.as_dict()

        best = None if self.best is None else as_json(self.best)
        found = {
            "best": best,
            "ladder": [as_json(rung) for rung in self.ladder],
            "notes": list(self.notes),
        }
        found["machine"] = asdict(self.machine)
        return found | {"pipelines": [one.as_dict() for one in self.pipelines]}

    def __rich__(self) -> Group:
        scale, unit = scale_of(max(rung.nbytes("device") for rung in self.ladder))
        limit = shown(self.limits.device, scale)
        table = Table(
            title=f"What fits into {limit} {unit} of a device, per rank",
            title_justify="left",
            box=None,
        )
        for name in ("", "step of the ladder: each adds to those above"):
            table.add_column(name, no_wrap=True)
        for name in (
            f"device, {unit}",
            "saves",
            f"host, {unit}",
            f"files, {unit}",
            f"sent, {unit}",
            "costs, s",
        ):
            table.add_column(name, justify="right", no_wrap=True)
        _rung_rows(table, self, scale)
        best, pipes = self.best, _pipeline_lines(self.pipelines, scale, unit)
        assumed = (
            "assumed, pass --rates of `fzero env --json`"
            if self.machine == MachineModel()
            else "as given"
        )
        pipes.append(f"Seconds are for ranks of these rates ({assumed}): {self.machine}.")
        if best is None:
            return Group(table, "", "Nothing fits.", *pipes, *self.notes)
        where = f"{shown(best.nbytes('device'), scale)} {unit} of the device"
        of_what = "for a step" if best.activations else "besides what it computes"
        fastest = f"Fastest that fits: {best.choices}; {where}, {best.seconds:.3g} s {of_what}."
        if best.tiles:
            given = ", ".join(map(str, self.transforms))
            pipes.append(escape(f"Tiles: pass transforms=[{given}] to the step."))
        generating = best.generating
        note = [] if generating is None else [self._generation(generating, scale, unit)]
        return Group(table, "", fastest, f"{best.step.description}.", *pipes, *self.notes, *note)

    def _generation(self, found: Generating, scale: float, unit: str) -> str:
        by = "copy" if found.by_copy <= self.limits.device else "unit"
        other = (
            ""
            if by == "copy"
            else f" (gathered once it would take {shown(found.by_copy, scale)} {unit})"
        )
        nbytes = found.by_copy if by == "copy" else found.by_unit
        return (
            f'Generating with by="{by}" takes {shown(nbytes, scale)} {unit} of the device{other}.'
        )

    def __str__(self) -> str:
        return as_text(self)


@collector_paused()  # a search makes many objects, and few cycles of them
def fit(
    model: nn.Module,
    cfg: Any = None,
    *,
    world_size: int = 1,
    device_nbytes: float,
    host_nbytes: float = math.inf,
    disk_nbytes: float = math.inf,
    nvme_path: str | None = None,
    machine: MachineModel | None = None,
    batch: Any = None,
    loss_fn: LossFn | None = None,
    device: Device = "cuda",
    answers: Answers | None = None,
    progress: Progress | None = None,
    mesh: Mesh | None = None,
    transforms: Sequence[ModelTransform] = (),
) -> Fit:
    """The fastest configuration that fits into a rank's memory, and the ladder to the
    smallest.

    Args:
        model: any module; on `meta` it holds no weights.
        cfg: the initial configuration, any argument of `Config.load`; None is bf16 with
            an fp32 master, and AdamW. Stages below its own are not tried.
        world_size: number of ranks W.
        device_nbytes, host_nbytes, disk_nbytes: the memory of one rank; leave room for
            uncounted allocations. On the CPU host memory is the device's.
        nvme_path: a folder for files; None tries no files, unless the configuration has
            a folder.
        machine: the rates.
        batch: one rank's samples of a micro-step, possibly on `meta`; with it,
            activations are counted, by tracing the step.
        loss_fn: see `make_train_step`.
        device: where the model is; see `compare_plans`.
        answers: what a rank generates at once between two steps, which must fit, too:
            by copy or by unit.
        progress: is called before each configuration with its number, from 0, and the
            number of all, and at the end.
        mesh: the mesh of these ranks; with the axis "seq", `batch` has whole sequences.
        transforms: those of all configurations; see `make_train_step`.

    Raises:
        ConfigError: the configuration is invalid, in itself or for the model.
        ValueError: the model does not run on that batch.
    """
    keys = keys_of(cfg)
    cache = None if answers is None else cache_nbytes(model, quietly(keys), answers)
    where: Any = nvme_path, batch, device, loss_fn, cache, mesh, transforms
    search = Search(model, keys, world_size, machine or MachineModel(), *where)
    search.rung("as it is", search.start)  # raises if it is not possible
    for name, value in (("device", device_nbytes), ("host", host_nbytes), ("disk", disk_nbytes)):
        check_kind(
            f"{name}_nbytes", value, int | float, "a number of bytes", "pass 80e9 for 80 GB, say"
        )
    if device == "cpu" and host_nbytes != math.inf:
        raise ConfigError(
            f'fit: host_nbytes must be left out with device="cpu", where host memory is the '
            f"device's, got {host_nbytes:.3g}; pass all of it as device_nbytes"
        )
    limits = Limits(device_nbytes, host_nbytes, disk_nbytes)
    choices, report = list(search.choices()), progress or (lambda done, total: None)
    tried: list[Candidate] = []
    for done, choice in enumerate(choices):
        report(done, len(choices))
        tried += filter(None, [search.rung("", choice)])
    holding = (rung for rung in tried if limits.hold(rung))
    best = min(
        holding,
        key=lambda rung: (rung.seconds, rung.choices.small, rung.nbytes("device")),
        default=None,
    )
    ladder = tuple(search.ladder())
    if best is not None:
        best = replace(
            best,
            name=next((rung.name for rung in ladder if rung.choices == best.choices), "in between"),
        )
    pipelines: tuple[PipelinePlan, ...] = ()
    if (
        search.activations is not None
        and world_size > 1
        and search.start.stage <= 1
        and not (transforms or mesh)
    ):
        pipelines = best_pipelines(
            model,
            search.keys,
            batch,
            world_size=world_size,
            device_nbytes=device_nbytes,
            machine=machine,
            loss_fn=loss_fn,
            device=device,
            activations=search.activations,
        )
    report(len(choices), len(choices))
    num_samples = samples_of(batch)
    notes, given = tuple(search.notes()), tuple(transforms)
    return Fit(limits, best, ladder, notes, search.machine, num_samples, pipelines, given)


MOST_PIPELINES = 3
"""How many pipelines are shown."""


def _pipeline_lines(pipelines: tuple[PipelinePlan, ...], scale: float, unit: str) -> list[str]:
    """The fastest pipelines that fit, in words."""
    if not pipelines:
        return []
    lines = [
        f"  {one.order.stages} stages × {one.layers.data} data ranks: {shown(one.nbytes, scale)} "
        f"{unit}, {one.seconds:.3g} s without the update, bubble {one.bubble:.0%} of "
        f"{one.order.micro_batches} micro-batches{', activation checkpointing' * one.checkpoints}"
        for one in pipelines[:MOST_PIPELINES]
    ]
    return [
        "",
        "As a pipeline, with as many samples in a step (fzero plan --pipe shows its stages):",
        *lines,
    ]


def _rung_rows(table: Table, found: Fit, scale: float) -> None:
    def add(rung: Candidate, sign: str, name: str, before: Candidate | None) -> None:
        saves = shown(before.nbytes("device") - rung.nbytes("device"), scale) if before else ""
        costs = f"{rung.seconds - before.seconds:+.3g}" if before else f"{rung.seconds:.3g}"
        sent = sum(rung.sent_by_axis.values())
        numbers = (
            shown(number, scale) for number in (rung.nbytes("host"), rung.nbytes("nvme"), sent)
        )
        table.add_row(sign, name, shown(rung.nbytes("device"), scale), saves, *numbers, costs)

    best = found.best
    for before, rung in zip((None, *found.ladder), found.ladder, strict=False):
        is_best = best is not None and rung.choices == best.choices
        add(rung, "→" if is_best else "fits" if found.limits.hold(rung) else "", rung.name, before)
    if best is not None and all(rung.choices != best.choices for rung in found.ladder):
        table.add_row()
        add(best, "→", f"beside the ladder: {best.choices}", None)
