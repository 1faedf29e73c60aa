"""Draws the pictures of docs/concepts from values of fzero:
`python docs/code/pictures.py [NAME …]`.

No number is typed in: specs, plans, schedules, the verbs on stacked ranks and simulated
steps give all of them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from einops import rearrange
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from gpt import GPT, SIZES, Size  # noqa: E402
from text import random_batch, read_text  # noqa: E402

import fzero  # noqa: E402
from fzero.plans.unit_orders import Event  # noqa: E402
from fzero.plans.unit_rules import UnitRules  # noqa: E402
from fzero.plans.unit_scheduler import UnitScheduler  # noqa: E402
from sharding import Mesh, Partial, Sharded, TensorSpec  # noqa: E402

OUT = Path(__file__).parents[1] / "concepts"
RANKS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52")
QUANTITIES = {
    "parameters": "#4c72b0",
    "gradients": "#dd8452",
    "master": "#8172b3",
    "optimizer": "#55a868",
}
GB = 1e9
# 1.5B parameters, as GPT-2 XL
LARGE = Size(context=1024, width=1600, depth=48, num_heads=25, num_trigrams=16384)
BF16 = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}


def on_meta(size: Size) -> GPT:
    with torch.device("meta"):
        return GPT(size)


def zero(stage: int, **keys: object) -> dict:
    """A block `zero_optimization`; stage 3 shards even the small parameters."""
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **keys}}


def bare(axes: Axes) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def stack(
    axes: Axes,
    columns: dict[str, dict[str, float]],
    *,
    unit: str,
    colors: dict[str, str] = QUANTITIES,
) -> None:
    """A bar for each column, made of its parts, with the sum above."""
    names, most = list(columns), max(sum(parts.values()) for parts in columns.values())
    below = [0.0] * len(names)
    for part, color in colors.items():
        heights = [columns[name].get(part, 0.0) for name in names]
        axes.bar(
            names,
            heights,
            bottom=below,
            color=color,
            label=part if any(heights) else None,
            width=0.7,
        )
        below = [b + h for b, h in zip(below, heights, strict=True)]
    for place, height in enumerate(below):
        axes.text(place, height + most * 0.015, f"{height:.3g}", ha="center", fontsize=8)
    bare(axes).set_ylabel(unit)


# --- state ----------------------------------------------------------------------------------------


def draw_state() -> Figure:
    """The part of each flat buffer that each of four ranks holds, by stage."""
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for stage, axes in enumerate(panels.flat):
        mesh = Mesh.of(data=4)
        plan = fzero.plan(on_meta(SIZES["small"]), BF16 | zero(stage), mesh=mesh)
        rows: dict[str, list[TensorSpec]] = {}
        for buffer in plan.flat_buffers:
            for leaf in plan.leaves(buffer):
                if leaf.is_long:
                    name = leaf.short if leaf.quantity == "optimizer" else leaf.quantity
                    rows.setdefault(name, []).append(leaf.spec)
        for place, specs in enumerate(rows.values()):
            left = 0
            for spec in specs:
                for rank in range(4):
                    for start, stop in held(spec, rank, mesh):
                        bottom = place + 0.1 + 0.2 * rank
                        summand = isinstance(spec.spec, Partial)
                        axes.barh(
                            bottom,
                            stop - start,
                            left=left + start,
                            height=0.18,
                            align="edge",
                            color=RANKS[rank],
                            alpha=0.35 if summand else 1,
                            linewidth=0,
                        )
                left += spec.numel
                axes.axvline(left, color="white", linewidth=1)
        axes.set_yticks([place + 0.5 for place in range(len(rows))], list(rows))
        axes.set_title(f"stage {stage}", loc="left", fontsize=10)
        axes.set(xlim=(0, left), ylim=(len(rows), 0))
        bare(axes)
    for axes in panels[1]:
        axes.set_xlabel("elements of all flat buffers, unit after unit")
    marks = [
        panels[0, 0].barh(-1, 0, color=color, label=f"rank {rank}")
        for rank, color in enumerate(RANKS)
    ]
    marks.append(panels[0, 0].barh(-1, 0, color="0.5", alpha=0.35, label="a summand (Partial)"))
    figure.legend(handles=marks, loc="outside lower center", ncols=5, frameon=False)
    return figure


def held(spec: TensorSpec, rank: int, mesh: Mesh) -> Iterator[tuple[int, int]]:
    if isinstance(spec.spec, Sharded):
        start, stop = spec.partition(mesh).bounds(mesh.shard_of(rank, spec.spec))
        yield start, min(stop, spec.numel)
    else:
        yield 0, spec.numel


# --- stages ---------------------------------------------------------------------------------------


def draw_stages() -> Figure:
    """Bytes of a rank by stage and number of ranks."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    model = on_meta(LARGE)
    for axes, world_size in zip(figure.subplots(1, 3, sharey=True), (2, 8, 64), strict=True):
        columns = {}
        for stage in range(4):
            held = fzero.plan(model, BF16 | zero(stage), world_size=world_size).bytes_per_rank
            columns[f"stage {stage}"] = {part: nbytes / GB for part, nbytes in held.items()}
        stack(axes, columns, unit="GB of model state on a rank")
        axes.set_title(f"{world_size} ranks", loc="left", fontsize=10)
        axes.label_outer()
    axes.legend(frameon=False)
    return figure


# --- verbs ----------------------------------------------------------------------------------------


def draw_verbs() -> Figure:
    """The numbers that four stacked ranks hold before and after each verb."""
    ranks = fzero.comms.Stacked(4)
    axis = ranks.axis()
    full = torch.arange(8.0)
    sharded = fzero.specs_of(full, Sharded("data"))
    full_W = full.expand(4, -1)
    shards_W = ranks.map(lambda x: fzero.shard(x, sharded, axis))(full_W)
    again_W = ranks.map(lambda x: fzero.gather(x, sharded, axis))(shards_W)
    grads_W = torch.arange(32.0).view(4, 8) % 7
    means_W = ranks.map(lambda x: fzero.reduce_scatter_grads(x, sharded, axis))(grads_W)
    panels = [
        ("the full tensor", full_W, ""),
        ("its shards", shards_W, "shard"),
        ("the full tensor", again_W, "gather"),
        ("each rank's gradients", grads_W, ""),
        ("shards of their mean", means_W, "reduce_scatter\n_grads"),
    ]
    figure = Figure(figsize=(11, 3), layout="constrained")
    all_axes = figure.subplots(1, 5, width_ratios=[8, 4, 8, 8, 4])
    for axes, (title, numbers, verb) in zip(all_axes, panels, strict=True):
        for rank, row in enumerate(numbers.tolist()):
            for place, number in enumerate(row):
                axes.add_patch(_cell(place, rank))
                axes.text(
                    place + 0.5, rank + 0.5, f"{number:g}", ha="center", va="center", fontsize=7
                )
        axes.set(xlim=(-0.1, numbers.shape[1] + 0.1), ylim=(4.1, -0.1), xticks=[])
        axes.set_yticks(
            [0.5, 1.5, 2.5, 3.5],
            [f"rank {rank}" for rank in range(4)] if axes is all_axes[0] else [],
        )
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title("\n".join([f"{verb} →" if verb else "", title]), fontsize=8, loc="left")
    return figure


def _cell(place: int, rank: int) -> object:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (place, rank + 0.08), 1, 0.84, facecolor=RANKS[rank], alpha=0.35, edgecolor="white"
    )


# --- step -----------------------------------------------------------------------------------------


def draw_units() -> Figure:
    """When each unit of a model is gathered, used, reduced and released, as the unit
    scheduler orders it.
    """
    plan = fzero.plan(
        on_meta(SIZES["medium"]), {"optimizer": {"type": "AdamW"}} | zero(3), world_size=4
    )
    record = second_step(plan.unit_rules)
    names = list(plan.unit_rules.units)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = bare(figure.subplots())
    started: dict[tuple[str, str], int] = {}
    for time, event in enumerate(record):
        row = (
            names.index(event.unit.partition("/")[0])
            if event.unit.partition("/")[0] in names
            else 0
        )
        if event.kind == "boundary":
            axes.axvline(time, color="0.3", linewidth=1)
            axes.text(time, -0.9, " backward", fontsize=8)
        if event.kind in ("gather", "wait_gather", "reduce"):
            started[event.kind, event.unit] = time
        if event.kind == "wait_gather":
            begun = started.pop(("gather", event.unit))
            axes.barh(row, time - begun, left=begun, color="#4c72b0", alpha=0.35)
        if event.kind == "release" and ("wait_gather", event.unit) in started:
            begun = started.pop(("wait_gather", event.unit))
            axes.barh(row, time - begun, left=begun, color="#4c72b0")
        if event.kind == "end_reduce":
            (kind, unit), begun = next(
                ((key, at) for key, at in started.items() if key[0] == "reduce")
            )
            axes.barh(names.index(unit), time - begun, left=begun, color="#dd8452", height=0.4)
            del started[kind, unit]
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="events of one rank, in order", ylim=(len(names) - 0.4, -1.2))
    marks = [
        axes.barh(-5, 0, color=c, alpha=a, label=text)
        for c, a, text in [
            ("#4c72b0", 0.35, "gather under way"),
            ("#4c72b0", 1, "in use"),
            ("#dd8452", 1, "reduction under way"),
        ]
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False)
    return figure


def second_step(rules: UnitRules) -> list[Event]:
    """The events of a step that follows the order which a first step learned."""
    scheduler, visits = UnitScheduler(rules, is_alone=True), list(rules.units)
    orders: dict[str, Sequence[Event] | None] = {"forward": None, "backward": None}
    for _ in range(2):
        scheduler.begin(orders["forward"])
        record = [*scheduler.begin_forward(is_first=True)]
        for unit in visits:
            record += [*scheduler.enter(unit), Event("use", unit)]
        record += scheduler.boundary()
        orders["forward"], _ = scheduler.recorded(("forward", "train"), differ=False)
        scheduler.begin(orders["backward"])
        scheduler.begin_backward(is_last=True, visits=Counter(visits))
        for unit in reversed(visits):
            record += [*scheduler.need(unit), Event("use", unit)]
            for grad in rules.units[unit].grads:
                record += scheduler.collect(unit, grad.key)
            record += scheduler.end_visit(unit)
        record += scheduler.end_backward()
        orders["backward"], _ = scheduler.recorded((1,), differ=False)
        record += scheduler.finish()
    return record


# --- meshes ---------------------------------------------------------------------------------------


def draw_meshes() -> Figure:
    """Bytes held, and bytes sent inside a node and between nodes."""
    model, nodes = on_meta(LARGE), Mesh.of(node=2, data=4)
    plans = {
        "one axis of 8": fzero.plan(model, BF16 | zero(3), world_size=8),
        "hybrid sharding": fzero.plan(model, BF16 | zero(3), mesh=nodes),
        "hpZ": fzero.plan(model, BF16 | zero(3, zero_hpz_partition_size=4), world_size=8),
    }
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    holds, sends = figure.subplots(1, 2)
    stack(
        holds,
        {
            name: {part: n / GB for part, n in plan.bytes_per_rank.items()}
            for name, plan in plans.items()
        },
        unit="GB of model state on a rank",
    )
    links = {"data": "along data", "node": "along node (between machines)"}
    sent = {}
    for name, plan in plans.items():
        by_axis = {
            axis: sum(parts.values()) / GB for axis, parts in plan.sent_nbytes_by_axis.items()
        }
        sent[name] = {links[axis]: nbytes for axis, nbytes in by_axis.items() if axis in links}
    # On one axis the same bytes cross every link of the ring, those between machines, too.
    stack(
        sends,
        sent,
        unit="GB that a rank sends in a step",
        colors={links["data"]: "#64b5cd", links["node"]: "#c44e52"},
    )
    holds.set_ylim(0, 7.5)
    sends.set_ylim(0, 10)
    for axes in (holds, sends):
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    return figure


# --- precision ------------------------------------------------------------------------------------


def draw_precision() -> Figure:
    """Bytes per parameter by configuration."""
    configurations = {
        "fp32": {},
        "bf16 or fp16": {"bf16": {"enabled": True}},
        "bf16, gradients\nin fp32": {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        "bf16 without\na master": {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}
        },
    }
    model = on_meta(LARGE)
    numel = sum(param.numel() for param in model.parameters())
    columns = {}
    for name, keys in configurations.items():
        held = fzero.plan(
            model, {"optimizer": {"type": "AdamW"}} | keys | zero(0), world_size=1
        ).bytes_per_rank
        columns[name] = {part: nbytes / numel for part, nbytes in held.items()}
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    stack(axes, columns, unit="bytes per parameter, before sharding")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


# --- placements -----------------------------------------------------------------------------------


def draw_placements() -> Figure:
    """Bytes of a rank by memory, for six configurations of eight ranks."""
    files = {"device": "nvme", "nvme_path": "/local"}
    configurations = {
        "stage 2": zero(2), "stage 3": zero(3),
        "optimizer:\nhost": zero(3, offload_optimizer={"device": "cpu"}),
        "optimizer:\nfiles": zero(3, offload_optimizer=files),
        "all: host": zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
        "all: files": zero(3, offload_optimizer=files, offload_param=files | {"max_in_cpu": 0}),
    }  # fmt: skip
    model, kinds = on_meta(LARGE), {"device": "#4c72b0", "host": "#ccb974", "nvme": "#8c8c8c"}
    columns = {}
    for name, keys in configurations.items():
        memory = fzero.plan(model, BF16 | keys, world_size=8).bytes_by_memory
        columns[name] = {kind: sum(parts.values()) / GB for kind, parts in memory.items()}
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    stack(axes, columns, unit="GB of model state on a rank", colors=kinds)
    axes.legend(frameon=False)
    return figure


# --- simulation -----------------------------------------------------------------------------------


def draw_simulation() -> Figure:
    """The losses of 1 to 64 simulated ranks that share one global batch, and their
    distance from one rank's.
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes, apart = figure.subplots(1, 2)
    losses = {world_size: simulated_losses(world_size) for world_size in (1, 4, 16, 64)}
    for (world_size, curve), color, width in zip(losses.items(), RANKS, (8, 5, 3, 1), strict=True):
        axes.plot(curve, label=f"{world_size} ranks", linewidth=width, color=color)
        if world_size > 1:
            gaps = [1e7 * (a - b) for a, b in zip(curve, losses[1], strict=True)]
            apart.plot(gaps, "o", label=f"{world_size} ranks", color=color, markersize=1 + width)
    bare(axes).set(xlabel="step", ylabel="loss (nats per byte)")
    bare(apart).set(xlabel="step", ylabel="difference to the loss of one rank, 1e-7 nats")
    axes.legend(frameon=False)
    apart.legend(frameon=False)
    return figure


def simulated_losses(world_size: int, num_steps: int = 30) -> list[float]:
    torch.manual_seed(0)
    step = fzero.make_train_step(
        GPT(SIZES["tiny"]), {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}} | zero(3)
    )
    ranks = fzero.simulate(step, world_size)
    state, (text, _) = ranks.init(), read_text()
    losses = []
    for index in range(num_steps):
        tokens = random_batch(
            text, context=SIZES["tiny"].context, batch_size=64, seed=0, step=index, rank=0
        )
        batch: tuple[Tensor, ...] = tuple(
            rearrange(x, "(w b) t -> w b t", w=world_size) for x in tokens
        )
        state, metrics = ranks(state, batch)
        losses.append(metrics.loss.flatten()[0].item())
    return losses


# --- capture --------------------------------------------------------------------------------------


def draw_capture() -> Figure:
    """The captured step of stage 3: when it computes, when it communicates, which bytes
    are live.
    """
    mesh = fzero.comms.AbstractAxis("data", 8)
    step = fzero.make_train_step(
        on_meta(SIZES["medium"]), {"optimizer": {"type": "AdamW"}} | zero(3), mesh=mesh
    )
    tokens = torch.empty((4, SIZES["medium"].context), dtype=torch.int64, device="meta")
    machine = fzero.graph.MachineModel(flops=4e12, memory=1e12, network=8e9, latency=1e-5)
    figure: Figure = step.explain((tokens, tokens), machine=machine).draw()
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "state": draw_state,
    "stages": draw_stages,
    "verbs": draw_verbs,
    "units": draw_units,
    "meshes": draw_meshes,
    "precision": draw_precision,
    "placements": draw_placements,
    "simulation": draw_simulation,
    "capture": draw_capture,
}


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]().savefig(OUT / f"{name}.png", dpi=100)
        print(f"drawn to {OUT / name}.png")


if __name__ == "__main__":
    main()
