"""The picture of an order: stages × time, with every forward and backward, and the
bytes that each stage stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fzero.common.optional import package
from fzero.common.text_tables import scale_of
from fzero.pipeline.orders import short
from fzero.pipeline.timeline import PipelineTimeline, stored_over_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {
    "forward": "#5b7fa6",
    "backward": "#c98b5b",
    "backward_input": "#c98b5b",
    "backward_weight": "#7fb08a",
}
WORDS = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I: B of the input",
    "backward_weight": "W: B of the weights",
}
REDUCES = "0.75"
MOST_LABELS = 400
"""Beyond so many events their names are left out."""


def draw_timeline(
    timeline: PipelineTimeline, title: str = "", *, after: Sequence[float] = ()
) -> Figure:
    """Stages by time, a bar for each event and its micro-batch; gaps are the bubble.
    Needs matplotlib (extra `pictures`).

    Of an interleaved order, later chunks are darker. A curve in each lane is what the
    stage stores, from none to the most of all.

    Args:
        timeline: the timeline of one step.
        title: "" writes the order, its seconds and its bubble.
        after: by stage, the seconds in which it reduces gradients after its last
            backward.
    """
    needed_by = "the picture of a pipeline"
    figures = package("matplotlib", needed_by=needed_by, module="matplotlib.figure")
    Patch = package("matplotlib", needed_by=needed_by, module="matplotlib.patches").Patch
    order, lanes = timeline.order, range(timeline.order.stages)
    figure: Figure = figures.Figure(figsize=(11, 1.4 + 0.55 * order.stages), layout="constrained")
    axes = figure.subplots()
    has_labels = sum(map(len, timeline.spans)) <= MOST_LABELS
    ends = [spans[-1].stop if spans else 0.0 for spans in timeline.spans]
    after = after or [0.0] * order.stages
    seconds = max(map(sum, zip(ends, after, strict=True)))
    second, unit_of_time = (1e3, "ms") if seconds < 1 else (1.0, "s")
    for stage in lanes:
        chunks = order.chunks_of(stage)
        for event, start, stop in timeline.spans[stage]:
            shade = 1 - 0.55 * (len(chunks) - 1 - chunks.index(event.chunk)) / len(chunks)
            bar: dict[str, Any] = {
                "color": COLORS[event.kind],
                "alpha": shade,
                "edgecolor": "white",
                "linewidth": 0.5,
            }
            axes.barh(stage, (stop - start) * second, left=start * second, height=0.8, **bar)
            if has_labels:
                where: dict[str, Any] = {
                    "ha": "center",
                    "va": "center",
                    "fontsize": 6,
                    "color": "white",
                }
                axes.text((start + stop) / 2 * second, stage, short(event)[1:], **where)
        if any(after):
            axes.barh(
                stage, after[stage] * second, left=ends[stage] * second, height=0.8, color=REDUCES
            )
    _draw_stored(axes, timeline, lanes, second)
    scale, unit = scale_of(max(timeline.stored, default=0) or 1)
    ticks = [f"stage {stage}\n{timeline.stored[stage] / scale:.3g} {unit}" for stage in lanes]
    axes.set_yticks(list(lanes), ticks, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=unit_of_time, xlim=(0, seconds * second))
    axes.spines[["top", "right"]].set_visible(False)
    took = f"{seconds * second:.3g} {unit_of_time}"
    text = (
        f"{order.name}, {order.micro_batches} micro-batches: {took}, bubble {timeline.bubble:.1%}"
    )
    axes.set_title(title or text, loc="left", fontsize=10, fontweight="bold")
    kinds = dict.fromkeys(span.event.kind for spans in timeline.spans for span in spans)
    patches = [Patch(color=COLORS[kind], label=WORDS[kind]) for kind in kinds]
    patches += [Patch(color=REDUCES, label="reduce of gradients")] if any(after) else []
    figure.legend(handles=patches, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _draw_stored(
    axes: Any, timeline: PipelineTimeline, lanes: Sequence[int], second: float
) -> None:
    most = max(timeline.stored, default=0)
    for stage in lanes if most else ():
        times, stored = zip(*stored_over_time(timeline, stage), strict=True)
        heights = [stage + 0.4 - 0.8 * nbytes / most for nbytes in stored]
        axes.plot(
            [time * second for time in times],
            heights,
            drawstyle="steps-post",
            color="black",
            linewidth=0.8,
        )
