"""`CommTrace`: the collectives of a step, each with its bytes, axis, unit and phase.

    print(fzero.profiling.trace_comm(step, state, batch))    # runs a step on a copy of the state, and records what it sends
    print(fzero.profiling.plan_comm(step, batch))            # the same from the step's graph, for ranks that need not exist

`trace_comm` observes the axes of a step: of processes, or of ranks in lockstep. A
compiled step reports the collectives of its graph. Both give the same rows, with the
exceptions that `CommTrace` lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.console import Group
from rich.table import Table
from torch import Tensor

from fzero.common.notebooks import as_html
from fzero.common.text_tables import as_text, scale_of
from fzero.common.timelines import Event, Timeline, draw_timelines
from fzero.comms.axes import AbstractAxis
from fzero.comms.mesh import unfolded
from fzero.comms.records import PURPOSES, CommRecord, Phase, Purpose
from fzero.plans.mesh_axes import describe
from fzero.plans.plan import Plan
from fzero.resharding.place import copied
from fzero.simulation import LockstepRanks, VmapRanks
from fzero.state import TrainState
from fzero.step import TrainStep

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class CommRow(NamedTuple):
    """One flat buffer in one collective of a step.

    Attributes:
        number: its index in the step, from 0.
        collective: as called; a graph on gloo calls `all_to_all` where shards are
            exchanged.
        axis: the axis of the mesh; "world" is all ranks of a mesh with several axes.
        unit: the unit of the flat buffer; "" if it belongs to no unit.
        buffer: the key of the flat buffer.
        purpose: see `fzero.comms.Label`.
        phase: when it starts: in the forward, at the forward/backward boundary
            (`boundary`), in the backward or in the update.
        num_elements: that this rank sends to all others together, before a comm hook
            encodes them.
        nbytes: bytes sent, after the encoding.
        is_joined: whether one call sends this and neighbouring rows (buckets of a
            compiled step).
    """

    number: int
    collective: str
    axis: str
    unit: str
    buffer: str
    purpose: Purpose
    phase: Phase
    num_elements: int
    nbytes: int
    is_joined: bool = False


@dataclass(frozen=True, slots=True)
class CommTrace:
    """The collectives that one rank takes part in during a step. `print(comm)` shows a
    table, `comm.save("comm.png")` a picture.

    The rows of flat buffers (`gather`, `reduce`, `all_gather_params`) and of the `norm`
    have the same purpose, axis, unit and bytes in real processes, ranks in lockstep, a
    compiled step and a plan. Differences:

    - the order, and the collective that a graph calls;
    - `gather` of a unit of several flat buffers: in the backward, a graph gathers the
      ones that it reads (and those joined with them), an eager step all of them;
    - `loss_stats`: a rank sends the others five numbers in an eager step, four in a
      graph;
    - `buffers`: a graph makes all module buffers equal over the ranks, an eager step
      the changed ones;
    - `negotiate`: only in eager steps with that schedule;
    - `files`: with state in files, the ranks of an eager step report whether theirs are
      intact; a graph has no files.

    Attributes:
        rows: in the order in which the collectives start.
        title: the title of the table and the picture.
    """

    rows: tuple[CommRow, ...] = field(repr=False)
    title: str = "one step"

    @classmethod
    def of(cls, sent: Iterable[CommRecord], plan: Plan, title: str) -> CommTrace:
        """The trace of these records, without those that send nothing."""
        units = {buffer.key: unit.name for unit in plan.units for buffer in unit.buffers}

        def row(number: int, record: CommRecord) -> CommRow:
            label, size = record.label, (record.num_elements, record.nbytes)
            where = record.collective, record.axis, units.get(label.buffer, "")
            return CommRow(
                number, *where, label.buffer, label.purpose, label.phase, *size, record.is_joined
            )

        nonempty = [record for record in sent if record.num_elements]
        return cls(tuple(map(row, range(len(nonempty)), nonempty)), title)

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return sum(row.nbytes for row in self.rows)

    @property
    def num_elements(self) -> int:
        """All elements."""
        return sum(row.num_elements for row in self.rows)

    def by_unit(self) -> dict[str, int]:
        """Bytes by unit; "" for buffers of no unit."""
        return self._by("unit")

    def by_axis(self) -> dict[str, int]:
        """Bytes by axis."""
        return self._by("axis")

    def by_collective(self) -> dict[str, int]:
        """Bytes by collective."""
        return self._by("collective")

    def by_purpose(self) -> dict[str, int]:
        """Bytes by purpose."""
        return self._by("purpose")

    def _by(self, field: Literal["unit", "axis", "collective", "purpose"]) -> dict[str, int]:
        nbytes: Counter[str] = Counter()
        for row in self.rows:
            nbytes[getattr(row, field)] += row.nbytes
        return dict(nbytes)

    def __rich__(self) -> Group:
        table = Table(
            "",
            "when",
            "what for",
            "unit",
            "collective",
            "axis",
            title=self.title,
            title_justify="left",
        )
        for column in ("elements", "bytes"):
            table.add_column(column, justify="right")
        for row in self.rows:
            name = f"{row.collective} (joined)" if row.is_joined else row.collective
            what = str(row.number), row.phase, PURPOSES[row.purpose], row.unit, name, row.axis
            table.add_row(*what, f"{row.num_elements:,}", f"{row.nbytes:,}")
        table.add_section()
        for axis, nbytes in self.by_axis().items():
            num_elements = sum(row.num_elements for row in self.rows if row.axis == axis)
            table.add_row("", "", "all of it", "", "", axis, f"{num_elements:,}", f"{nbytes:,}")
        return Group(table)

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self, self.draw)

    def draw(self) -> Figure:
        """A picture: one lane per axis, one bar per row, in order; its height is its
        bytes. Needs matplotlib.
        """
        most = max((row.nbytes for row in self.rows), default=0) or 1
        scale, unit = scale_of(most)

        def event(row: CommRow) -> Event:
            kind = row.purpose if row.purpose in _COLORS else "numbers"
            return Event(row.axis, kind, row.number, row.number + 1, row.unit, row.nbytes / most)

        runs = groupby(self.rows, key=lambda row: row.phase)
        timeline = Timeline(
            end=len(self.rows),
            lanes={axis: axis for axis in self.by_axis() or ["data"]},
            events=list(map(event, self.rows)),
            colors=_COLORS,
            phases=[(phase, next(run).number) for phase, run in runs],
            title=self.title,
            time=f"the {len(self.rows)} collectives, in order; a full bar is {most / scale:.3g} {unit}",
        )
        return draw_timelines([timeline], needed_by="trace_comm(…).draw()")

    def save(self, path: str | Path) -> None:
        """Writes the picture, in the format of the file's extension; creates the
        folder.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.draw().savefig(path, dpi=120)


def trace_comm(step: TrainStep | LockstepRanks, state: TrainState[Tensor], batch: Any) -> CommTrace:
    """Runs a step on a copy of the state, and returns a trace of what it sends.

    State and step do not change. A state in files is copied to files beside them, which
    are removed afterwards. A step that has not run before runs twice, because in the
    first run the ranks agree on the order of the collectives; the second is traced. The
    model runs as in a step: its Python attributes (counters, say) change.

    *Collective:* every rank, like a step; each gets its own trace. If only some ranks
    call it, all raise `CollectiveError`: when the next step detects it, or after the
    timeout of `fzero.join(timeout=…)`.
    For ranks in lockstep, the trace is rank 0's. With `simulate(by="vmap")`, whose
    ranks send nothing, it is planned for a real rank of as many (`plan_comm`).

    Args:
        step: of `make_train_step`, compiled or not, or of `simulate`.
        state, batch: as for a step; an iterator advances by the micro-batches of a
            step.

    Raises:
        ValueError: the step's axis is an `AbstractAxis`, which needs `plan_comm`; and
            as a step does.
        StoreError, MemoryError: there is no room for the copy of a state in files; the
            given state is unchanged.
    """
    if not isinstance(step, TrainStep | LockstepRanks):
        rule = "must be of make_train_step or of simulate"
        raise ValueError(
            f"trace_comm: step {rule}, got {type(step).__name__}; pass the result of one"
        )
    if isinstance(step, VmapRanks) and not step.is_in_lockstep:
        step.check_state(state)
        return plan_comm(step.one_rank(), step.batches_of(batch)[0])
    if isinstance(step, TrainStep) and isinstance(step.runtime.ranks, AbstractAxis):
        raise ValueError(
            f"trace_comm: the step must be of ranks that exist, got one on {step.runtime.ranks}; "
            f"use plan_comm(step, batch), or trace_comm(fzero.simulate(step), state, batch)"
        )
    log: list[CommRecord] = []
    twin = step.observed(log.append)
    # An iterator yields its micro-batches only once, and the step may run twice.
    taken = list(islice(batch, step.plan.num_micro_steps)) if isinstance(batch, Iterator) else None
    for _ in range(1 if step.has_agreed else 2):
        log.clear()
        twin(copied(state, step), batch if taken is None else iter(taken))
    return CommTrace.of(log, step.plan, _title(step.plan))


def plan_comm(step: TrainStep, batch: Any) -> CommTrace:
    """The trace of a step on this batch with `compile="step"`, from its scheduled
    graphs; runs and sends nothing.

    Args:
        step: of `make_train_step`, on any axis, including `AbstractAxis`.
        batch: one rank's samples; tensors may be on `meta`. An iterator advances by the
            micro-batches of a step.

    Raises:
        ConfigError, CompileError, ValueError: as `TrainStep.trace` does.
    """
    if not isinstance(step, TrainStep):
        raise ValueError(
            f"plan_comm: step must be of make_train_step, got {type(step).__name__}; pass the step "
            f"that was simulated, or use trace_comm(step, state, batch)"
        )
    sent = [record for captured in step.trace(batch) for record in captured.scheduled().sent()]
    return CommTrace.of(sent, step.plan, _title(step.plan))


def _title(plan: Plan) -> str:
    return f"what a rank sends in a step: ZeRO stage {plan.stage} on {describe(unfolded(plan.mesh, plan.seq_size))}"


_COLORS = {
    "gather": "tab:blue",
    "reduce": "tab:orange",
    "all_gather_params": "tab:green",
    "owners": "tab:olive",
    "buffers": "tab:purple",
    "numbers": "0.45",  # collectives of a few numbers
}
