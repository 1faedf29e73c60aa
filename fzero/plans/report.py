"""The printed form of a plan: a table of units, and lines about dtypes, memory and
traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from fzero.comms.mesh import is_several, unfolded
from fzero.config.stages import Stage
from fzero.plans.flat_params import UnitPlan
from fzero.plans.mesh_axes import describe
from fzero.plans.traffic import totals
from sharding import Mesh, TensorSpec

ByAxis = Mapping[str, Mapping[str, int]]
"""Elements or bytes that a rank sends, by axis and collective."""


def unit_table(
    units: Sequence[UnitPlan], mesh: Mesh, seq_size: int, *, stage: Stage, is_counted: bool
) -> Table:
    """One line for each flat buffer; see `Plan`. `is_counted`: whether the plan counts
    collectives of activations.
    """
    ranks = describe(unfolded(mesh, seq_size))
    table = Table(title=f"ZeRO stage {stage} on {ranks}", title_justify="left")
    if seq_size > 1:
        table.caption_justify = "left"
        table.caption = f"{seq_size} neighbouring ranks share the tokens of a sample" + (
            "; fzero.estimation.plan_for(step, batch) counts their all-to-alls" * (not is_counted)
        )
    table.add_column("unit")
    table.add_column("flat buffer")
    for column in ("parameters", "elements", "padding", "on a rank"):
        table.add_column(column, justify="right")
    for unit in units:
        for index, buffer in enumerate(unit.buffers):
            layout, kind = buffer.layout, buffer.key.removeprefix(unit.name + "/").split("/")[1:]
            numbers = (
                len(layout.names),
                layout.numel,
                layout.partition.padding,
                buffer.params.local_shape(mesh)[0],
            )
            title = "" if index else unit.name
            table.add_row(
                title,
                " ".join([buffer.dtypes.param, *kind]),
                *(f"{number:,}" for number in numbers),
            )
    return table


def dtype_line(units: Sequence[UnitPlan], module_buffers: Mapping[str, TensorSpec]) -> str:
    """The dtypes of all parameters and of the module's buffers."""
    dtypes = dict.fromkeys(
        str(b.dtypes)
        if b.trainable
        else f"frozen {b.dtypes.param}" + f", own values {b.dtypes.master}" * b.has_master
        for unit in units
        for b in unit.buffers
    )
    buffers = ", ".join(dict.fromkeys(spec.dtype for spec in module_buffers.values()))
    return f"dtypes: {'; '.join(dtypes)}" + (f"; module buffers {buffers}" if buffers else "")


def memory_lines(
    bytes_per_rank: Mapping[str, int], bytes_by_memory: Mapping[str, Mapping[str, int]]
) -> Iterator[str]:
    """The bytes that a rank holds, and those that live off the device."""
    yield (
        f"a rank holds: "
        f"{_sizes({name: nbytes for name, nbytes in bytes_per_rank.items() if nbytes})}"
    )
    for kind, parts in bytes_by_memory.items():
        if kind != "device":
            yield f"of these {_MEMORIES[kind]}: {_sizes(parts)}"


def traffic_lines(sent: ByAxis, mesh: Mesh) -> Iterator[str]:
    """The elements that a rank sends in a step, one line for each axis where there are
    several.
    """
    lines = (
        {f" along {axis}": of_axis for axis, of_axis in sent.items()}
        if is_several(mesh) or len(sent) > 1
        else {"": totals(sent)}
    )
    for along, of_axis in lines.items():
        numels = ", ".join(f"{numel:,} in {name}" for name, numel in of_axis.items() if numel)
        yield f"elements that a rank sends{along} in a step: {numels or 'none'}"


def hook_lines(hooks: object, sent_nbytes: ByAxis, exact_nbytes: ByAxis) -> Iterator[str]:
    """The comm hooks, and the bytes that a rank sends in a step with and without them."""
    sent, exact = (sum(totals(by_axis).values()) for by_axis in (sent_nbytes, exact_nbytes))
    yield f"comm hooks: {hooks}"
    yield f"bytes that a rank sends in a step: {sent:,}, without comm hooks {exact:,}"


_MEMORIES = {
    "host": "in host memory (where the model is on the CPU, the same memory)",
    "nvme": "in files",
}


def _sizes(nbytes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_human(size)}" for name, size in nbytes.items())


def _human(nbytes: float) -> str:
    """Bytes in the largest decimal unit that does not exceed them.

    >>> _human(999), _human(1000), _human(2.5e9)
    ('999 B', '1 kB', '2.50 GB')
    """
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.2f} GB"
