"""`Profile`, and its tables; the tables of wall clock, memory, waits and collectives
that an engine prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group
from rich.table import Table

from fzero.common.text_tables import as_text, print_report

if TYPE_CHECKING:
    from fzero.comms.records import CommRecord
    from fzero.profiling.comm_trace import CommRow


@dataclass(frozen=True, slots=True)
class ModuleProfile:
    """One module with its submodules; seconds and operations of one forward and
    backward, summed over its calls.

    Attributes:
        name: its full name; "" is the model.
        kind: its class.
        depth: the number of called modules that contain it; 0 is the model.
        num_params: tied ones once.
        forward_flops, backward_flops: floating point operations of matrix products,
            convolutions and attention.
        forward, backward: seconds.
        again_flops: the operations of forwards recomputed in the backward (activation
            checkpointing).
    """

    name: str
    kind: str
    depth: int
    num_params: int
    forward_flops: int
    backward_flops: int
    forward: float
    backward: float
    again_flops: int = 0

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the forward: two operations each."""
        return self.forward_flops // 2

    @property
    def flops(self) -> int:
        """Operations of forward and backward without recomputation: a property of the
        model alone.
        """
        return self.forward_flops + self.backward_flops

    @property
    def rate(self) -> float:
        """Operations per second in forward and backward."""
        seconds = self.forward + self.backward
        return self.flops / seconds if seconds else 0.0


def fastest(counted: ModuleProfile, *runs: ModuleProfile) -> ModuleProfile:
    """The operations of one run, and the least seconds of others."""
    return replace(
        counted, forward=min(r.forward for r in runs), backward=min(r.backward for r in runs)
    )


@dataclass(frozen=True, slots=True)
class Profile:
    """A model, module by module. `print(profile)` shows a tree.

    Attributes:
        modules: the called modules, parents before children; the first is the model.
        forward, backward: seconds of one undisturbed forward and backward.
        update: seconds of the optimizer's update.
        ceiling: floating point operations per second of a matrix product on this
            device.
        waited: seconds of these three in which the host waited for collectives, by
            purpose.
    """

    modules: tuple[ModuleProfile, ...] = field(repr=False)
    forward: float
    backward: float
    update: float
    ceiling: float
    waited: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> ModuleProfile:
        return next(module for module in self.modules if module.name == name)

    @property
    def model(self) -> ModuleProfile:
        """The profile of the full model."""
        return self.modules[0]

    @property
    def seconds(self) -> float:
        """Seconds of forward, backward and update."""
        return self.forward + self.backward + self.update

    def show(self, *, output_file: str | None = None, **how: Any) -> None:
        """Prints the report or writes it to a file, as the block `flops_profiler`
        requests; `how` as for `report`.
        """
        shown = self.report(**how)
        if output_file is None:
            print_report(shown)
        else:
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text(as_text(shown) + "\n")

    @property
    def rate(self) -> float:
        """Operations of the model per second of the step; recomputed forwards do not
        count.
        """
        return self.model.flops / self.seconds

    @property
    def utilisation(self) -> float:
        """The fraction of the ceiling that the step reaches (model FLOP/s utilisation)."""
        return self.rate / self.ceiling

    def report(
        self, *, module_depth: int = -1, top_modules: int = 1, detailed: bool = True
    ) -> Group:
        """The report that `print` shows.

        Args:
            module_depth: the depth of the deepest modules shown; -1 shows all.
            top_modules: how many of the largest modules are named per depth.
            detailed: whether to show the tree.
        """
        deepest = max(module.depth for module in self.modules) if module_depth < 0 else module_depth
        tree = ("", _tree(self, deepest)) if detailed else ()
        return Group(_totals(self), "", _largest(self, deepest, top_modules), *tree)

    def as_dict(self) -> dict[str, Any]:
        """The numbers as JSON types."""
        rows = [
            {name: getattr(m, name) for name in (*m.__slots__, "macs", "rate")}
            for m in self.modules
        ]
        totals = {
            name: getattr(self, name)
            for name in ("forward", "backward", "update", "ceiling", "utilisation")
        }
        return totals | {"waited": dict(self.waited), "modules": rows}

    def __rich__(self) -> Group:
        return self.report()

    def __str__(self) -> str:
        return as_text(self)


def _totals(profile: Profile) -> Table:
    table = Table(
        title=f"profile of {profile.model.kind}", title_justify="left", box=None, show_header=False
    )
    table.add_column("")
    table.add_column("", justify="right")
    model = profile.model
    rows = {
        "parameters": short(model.num_params),
        "MACs of the forward": short(model.macs),
        "FLOPs of the forward": short(model.forward_flops),
        "FLOPs of the backward": short(model.backward_flops),
        **(
            {"FLOPs of forwards that ran again": short(model.again_flops)}
            if model.again_flops
            else {}
        ),
        "forward": milliseconds(profile.forward),
        "backward": milliseconds(profile.backward),
        "update": milliseconds(profile.update),
        **{f"wait: {name}": milliseconds(seconds) for name, seconds in profile.waited.items()},
        "FLOP/s of the forward": short(model.forward_flops / profile.forward),
        "FLOP/s of forward and backward": short(model.flops / (profile.forward + profile.backward)),
        "FLOP/s of the step": short(profile.rate),
        "FLOP/s of a matrix product here": short(profile.ceiling),
        "utilisation of that (MFU)": f"{profile.utilisation:.1%}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _largest(profile: Profile, deepest: int, count: int) -> Table:
    table = Table(title="the largest of each depth", title_justify="left", box=None)
    for name in ("depth", "by parameters", "by MACs", "by forward time", "by backward time"):
        table.add_column(name)
    quantities = {
        "num_params": short,
        "macs": short,
        "forward": milliseconds,
        "backward": milliseconds,
    }
    for depth in range(1, deepest + 1):
        modules = [module for module in profile.modules if module.depth == depth]
        cells = []
        for name, show in quantities.items():
            by_class: Counter[str] = Counter()
            for module in modules:
                by_class[module.kind] += getattr(module, name)
            cells.append(
                ", ".join(f"{kind} {show(value)}" for kind, value in by_class.most_common(count))
            )
        if modules:
            table.add_row(str(depth), *cells)
    return table


def _tree(profile: Profile, deepest: int) -> Table:
    columns = (
        "module",
        "parameters",
        "MACs",
        "FLOPs fwd",
        "FLOPs bwd",
        "fwd",
        "bwd",
        "of fwd",
        "FLOP/s",
    )
    table = _table("module by module", *columns)
    total, around = profile.model.forward, [""]
    for module in profile.modules:
        around[module.depth + 1 :] = []
        own = module.name.removeprefix(f"{around[-1]}.") or "model"
        around.append(module.name)
        if module.depth <= deepest:
            table.add_row(f"{'  ' * module.depth}{own} ({module.kind})", *_cells(module, total))
    return table


def _cells(module: ModuleProfile, total: float) -> list[str]:
    return [
        short(module.num_params),
        short(module.macs),
        short(module.forward_flops),
        short(module.backward_flops),
        milliseconds(module.forward),
        milliseconds(module.backward),
        f"{module.forward / total:.0%}" if total else "",
        short(module.rate),
    ]


def short(number: float) -> str:
    """A number in three digits and a letter.

    >>> short(0), short(1234567), short(6.7e9), short(2e12)
    ('0', '1.23 M', '6.7 G', '2 T')
    """
    scales = {1e15: " P", 1e12: " T", 1e9: " G", 1e6: " M", 1e3: " K"}
    scale = next((scale for scale in scales if number >= scale), 1)
    return f"{number / scale:.3g}{scales.get(scale, '')}"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, in three digits or more.

    >>> milliseconds(0.0012345), milliseconds(1.2345)
    ('1.23 ms', '1,234 ms')
    """
    number = seconds * 1e3
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.3g} ms"


# --- tables that an engine prints -----------------------------------------------------------------


def wall_clock_table(seconds: Mapping[str, float], *, step: int | None = None) -> Table:
    """`wall_clock_breakdown`: the seconds of the parts of a step, and their fractions
    of the sum.

    >>> from fzero.common.text_tables import as_text
    >>> print(
    ...     as_text(wall_clock_table({"forward": 0.1, "backward": 0.3}))
    ... )  # doctest: +NORMALIZE_WHITESPACE
    wall clock
      part      ms    share
      forward   100   25%
      backward  300   75%
      all       400   100%
    """
    table = _table(
        "wall clock" if step is None else f"wall clock of step {step}", "part", "ms", "share"
    )
    total = sum(seconds.values())
    for name, value in {**seconds, "all": total}.items():
        table.add_row(name, f"{value * 1e3:.4g}", f"{value / total:.0%}" if total else "")
    return table


def _table(title: str, words: str, *numbers: str) -> Table:
    """A table with a column of words, then columns of numbers."""
    table = Table(title=title, title_justify="left", box=None)
    table.add_column(words, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


class MemoryRow(NamedTuple):
    """Bytes after a part of a step: of the process in host memory, of tensors on a GPU,
    and the GPU's peak in the part.
    """

    part: str
    host: int
    device: int | None
    most: int | None


def memory_table(rows: Iterable[MemoryRow], *, step: int) -> Table:
    """`memory_breakdown`: the memory of a rank after each part of a step."""
    table = _table(f"memory of step {step}, GB", "after", "on the device", "the most", "host")
    for row in rows:
        table.add_row(
            row.part,
            *("" if n is None else f"{n / 1e9:.3f}" for n in (row.device, row.most, row.host)),
        )
    return table


def waits_table(waited: Sequence[Mapping[str, float]]) -> Table:
    """`comms_logger`: the milliseconds that hosts waited for collectives, by purpose;
    the extremes of several ranks.

    >>> from fzero.common.text_tables import as_text
    >>> print(
    ...     as_text(waits_table([{"gather": 0.1}, {"gather": 0.3, "norm": 0.05}]))
    ... )  # doctest: +NORMALIZE_WHITESPACE
    waited for, ms
      what    rank 0  least  most
      gather     100    100   300
      norm         0      0    50
    """
    table = _table(
        "waited for, ms", "what", *(("rank 0", "least", "most") if len(waited) > 1 else ("",))
    )
    for name in dict.fromkeys(name for of_rank in waited for name in of_rank):
        times = [1e3 * of_rank.get(name, 0.0) for of_rank in waited]
        shown = (times[0], min(times), max(times)) if len(times) > 1 else (times[0],)
        table.add_row(name, *(f"{ms:.4g}" for ms in shown))
    return table


def comms_table(
    sent: Iterable[CommRecord | CommRow] | Mapping[tuple[str, str, int], int],
    *,
    only: Iterable[str] = (),
) -> Table:
    """`comms_logger`: the bytes that a rank sent, by collective, axis and message size.

    Args:
        sent: the rows of `fzero.profiling.trace_comm`, or the records that the
            `observe` of an axis received; or the number of calls by (collective, axis,
            bytes).
        only: the collectives that are shown (`prof_ops`); none shows all.
    """
    wanted = set(only)
    if not isinstance(sent, Mapping):
        sent = Counter((row.collective, row.axis, row.nbytes) for row in sent)
    counts = {key: calls for key, calls in sent.items() if not wanted or key[0] in wanted}
    table = Table("collective", "along", title="sent by this rank", title_justify="left", box=None)
    for name in ("message, bytes", "calls", "bytes"):
        table.add_column(name, justify="right")
    for (collective, axis, nbytes), calls in sorted(counts.items()):
        table.add_row(collective, axis, f"{nbytes:,}", f"{calls:,}", f"{calls * nbytes:,}")
    nbytes = sum(nbytes * calls for (*_, nbytes), calls in counts.items())
    table.add_row("all", "", "", f"{sum(counts.values()):,}", f"{nbytes:,}")
    return table
