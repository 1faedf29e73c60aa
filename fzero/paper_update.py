"""How long does an update take, and what waits for it? On paper, buffer by buffer (`fzero.step`, `fzero.stream`).

An update reads and writes its tensors once. What is updated where the model is takes their bytes at the rate of memory, and is
joined while the next one is updated, where every rank holds all of it. What lives elsewhere streams through in sub-groups: one is
fetched, the last one is updated, and the one before is put back, each on its lane. State in files is updated by the processor,
while the device has nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fzero.collectives import EVERYONE
from fzero.paper_moves import Book, shard_nbytes
from fzero.plan import BufferPlan
from fzero.stream_buffers import updated_numel, updated_specs
from fzero.timeline import Lane
from sharding import Sharded, TensorSpec
from sharding.dtypes import itemsize

MOST_SUB_GROUPS = 16
"""Of one buffer on paper: of more of them, several are taken for one."""


def update(book: Book) -> None:
    """The norm of the gradients, the updates, and the joins of what every rank holds whole."""
    plan = book.plan
    trained = [buffer for buffer in plan.flat_buffers if buffer.trainable]
    book.label = "update"
    for buffer in trained:
        # What was added up elsewhere comes back; the rest was measured before it left.
        if not book.is_here(buffer.grads) and book.device == "cuda" and plan.stage >= 2 and plan.num_micro_steps > 1:
            book.lanes.wait("norm", book.bring(buffer.grads, _share_nbytes(book, buffer.grads), "norm"))
        book.touch(_share_nbytes(book, buffer.grads), "norm")
    if plan.world_size > 1:
        axis = plan.mesh.names[0] if len(plan.mesh.names) == 1 else EVERYONE
        book.lanes.wait("norm", book.lanes.start("collective", "norm", book.machine.latency, axis=axis))
    book.add("streams", book.streams.on_device if book.device == "cuda" else 0)
    book.write()
    ends = [_here(book, buffer) for buffer in trained if _is_here(book, buffer)]
    away = [buffer for buffer in trained if not _is_here(book, buffer)]
    _stream(book, away)
    ends += [_join(book, buffer) for buffer in away]
    for end in ends:
        book.lanes.wait("join", end)
    book.lanes.settle()
    book.write()


def _is_here(book: Book, buffer: BufferPlan) -> bool:
    return all(book.is_here(spec) for spec in (buffer.params, *updated_specs(buffer, book.plan)))


def _share_nbytes(book: Book, spec: TensorSpec) -> int:
    return spec.local_nbytes(book.plan.mesh)


def _moved(buffer: BufferPlan, specs: list[TensorSpec]) -> int:
    """Bytes that an update reads and writes of each element: the gradient is read, and new parameters are written besides."""
    both = sum(2 * itemsize(spec.dtype) for spec in specs)
    return both - itemsize(buffer.dtypes.grad) + itemsize(buffer.dtypes.param) * buffer.has_master


def _here(book: Book, buffer: BufferPlan) -> float:
    book.touch(
        updated_numel(buffer, book.plan) * _moved(buffer, list(updated_specs(buffer, book.plan))),
        f"update {buffer.key}",
    )
    return _join(book, buffer)


def _join(book: Book, buffer: BufferPlan) -> float:
    in_params = buffer.row.params.axes if isinstance(buffer.row.params, Sharded) else ()
    if not isinstance(buffer.row.optimizer, Sharded):
        return 0.0
    axes = book.plan.axes[len(in_params) :]
    numel = buffer.params.local_shape(book.plan.mesh)[0]
    return book.send("all_gather", numel, axes, buffer.dtypes.param, label="join")


class _Group(NamedTuple):
    """A sub-group, or several taken for one: seconds that it takes to be fetched, updated and put back, and on which lanes."""

    label: str
    fetch: float
    compute: float
    put: float
    lanes: tuple[Lane, Lane]


def _groups(book: Book, buffer: BufferPlan) -> Iterator[_Group]:
    plan, machine = book.plan, book.machine
    specs, numel = list(updated_specs(buffer, plan)), updated_numel(buffer, book.plan)
    in_files = _is_in_files(buffer, specs)
    away = [spec for spec in specs if not book.is_here(spec)]
    back = [spec for spec in away if spec is not specs[1]]  # the gradient stays as it is
    rate = machine.disk if in_files else machine.host
    num = 1 if buffer.updates_whole else max(min(-(-numel // plan.streaming.sub_group_numel), MOST_SUB_GROUPS), 1)
    fetch, put = (numel / num * sum(itemsize(x.dtype) for x in some) / rate for some in (away, back))
    if not book.is_here(buffer.params):
        put += numel / num * itemsize(buffer.dtypes.param) * buffer.has_master / rate
    compute = numel / num * _moved(buffer, specs) / (machine.processor if in_files else machine.memory)
    for _ in range(num):
        yield _Group(buffer.key, fetch, compute, put, ("files", "files") if in_files else ("host", "back"))


def _is_in_files(buffer: BufferPlan, specs: Iterable[TensorSpec]) -> bool:
    return any(spec.placement.kind == "nvme" for spec in (buffer.params, *specs))


def _stream(book: Book, buffers: Sequence[BufferPlan]) -> None:
    """Fetches, updates and puts back, one sub-group after the other."""
    plan, machine, lanes = book.plan, book.machine, book.lanes
    on_processor = [b for b in buffers if book.device == "cuda" and _is_in_files(b, updated_specs(b, plan))]
    for buffer in on_processor:
        if book.is_here(buffer.grads):
            nbytes = updated_numel(buffer, book.plan) * itemsize(buffer.dtypes.grad)
            lanes.wait("update", lanes.start("back", f"put {buffer.key}", nbytes / machine.host))
    groups = [group for buffer in buffers for group in _groups(book, buffer)]
    coming = deque[float]()
    for index, group in enumerate(groups):
        for following in groups[index + len(coming) : index + 1 + plan.streaming.read_ahead]:
            coming.append(lanes.start(following.lanes[0], f"fetch {following.label}", following.fetch))
        lanes.wait("update", coming.popleft())
        lanes.compute(f"update {group.label}", group.compute)
        lanes.start(group.lanes[1], f"put {group.label}", group.put)
    for buffer in on_processor:
        if book.is_here(buffer.params):
            lanes.start("host", f"bring {buffer.key}", shard_nbytes(buffer, plan) / machine.host)
