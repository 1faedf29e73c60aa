"""`Offload`: the tensors of a rank's state that live off the device, in host memory or
in files.

It allocates the tensors of a flat buffer in the memory that the plan places them in,
updates them, and moves them to another memory. Each of these operations is one stream
of sub-groups (`fzero.storage.stream`). A stream reads every tensor where it lives: in a
file, in host memory, or on the device of the update. A forward or backward uses a
`MovingTransfer` (`fzero.storage.shard_io`) to load shards of parameters and to write
shards of gradients. If the model is on the CPU, host memory is device memory, and
nothing moves. A buffer whose master and optimizer state live elsewhere is updated on
the CPU (`buffer_sizes.updates_on_host`).

If one rank's files fail, no rank may go on: before updated parameters are all-gathered,
every rank reports whether its files are good (`agree`). If one rank's files are not
good, all ranks raise, and no rank's state can be used any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

import optree
import torch
from torch import Tensor

import fzero.storage as storage
from fzero.comms.axes import RankAxis
from fzero.comms.mesh import RankMesh
from fzero.optim.transforms import Transform
from fzero.plans.plan import FlatParamPlan, Plan
from fzero.state import QUANTITIES, TrainState
from fzero.storage.async_update import AsyncUpdates
from fzero.storage.buffer_sizes import staged_from_files, updates_on_host
from fzero.storage.file_agreement import agree
from fzero.storage.file_tensor import FileSpec, FileTensor, StoredTensor, handles_of, renewed
from fzero.storage.offload_leaves import Leaves, leaves_of, long_tensors, tensors_of, with_long
from fzero.storage.offload_unsharded import update_unsharded
from fzero.storage.promised import error_of
from fzero.storage.shard_io import MovingTransfer
from fzero.storage.shard_transfer import BufferPool
from fzero.storage.state_memory import DeviceMemory, MemoryKind, Parts, memory_kind
from sharding.specs import Placement, TensorSpec
from sharding.views import torch_dtype

if TYPE_CHECKING:
    from fzero.storage.state_files import FilePlan, StateFiles
    from fzero.storage.state_memory import Update
    from fzero.storage.stream import Mover, Streamed, SubGroup


@final
class Offload:
    """The `StateMemory` of a state of which a part is not on the device of its model."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device, self._here = device, DeviceMemory(plan, device)
        self._streaming = plan.streaming
        self._leaves = {b.key: leaves_of(plan, b) for b in plan.flat_buffers}
        self._files: FilePlan = {
            name: (spec.placement.path, FileSpec(spec.numel, spec.dtype))
            for leaves in self._leaves.values()
            for name, spec in leaves.specs.items()
            if spec.placement.path is not None
        }
        self.has_files = bool(self._files)
        used = (name for leaves in self._leaves.values() for name in (leaves.param, leaves.grad))
        self._away = {
            key
            for key, leaves in self._leaves.items()
            if not all(self._is_here(leaves, name) for name in leaves.specs)
        }
        trained = [b for b in plan.flat_buffers if b.trainable]
        self._wholes = {b.key for b in trained if not b.elementwise or self.joins(b)}
        self._async = AsyncUpdates(plan, self._leaves, self._wholes, device)
        self.passes_use_files = bool(self._async.keys) or any(name in self._files for name in used)
        self._on_host = {b.key for b in trained if updates_on_host(b, plan)}
        cut_ = [self._leaves[b.key] for b in trained if b.key not in self._wholes]
        most = max((sum(n in self._files for n in (*of.names, of.grad)) for of in cut_), default=0)
        extra = max(
            (of.param != of.updated and of.param in self._files for of in cut_), default=False
        )
        self._room = {"most": most, "extra": extra}
        self._ahead: dict[str, Any] = dict(plan.streaming.ahead(most))
        alive, spare = 1 + sum(self._ahead.values()), plan.streaming.num_pooled(most, extra)
        spare -= alive * (most + extra)
        early = max((sum(name in self._files for name in of.names) for of in cut_), default=0)
        self._num_early = alive + spare // max(early, 1) if plan.streaming.read_ahead else 0
        longest = max((of.numel for of in self._leaves.values()), default=0)
        self.sub_group_numel = plan.streaming.sub_group(
            longest, (spec.dtype for _, spec in self._files.values())
        )
        self._staged_nbytes = staged_from_files(plan)

    def transfer(self, scratch: BufferPool) -> MovingTransfer:
        return MovingTransfer(self.device, scratch, self._streaming.num_staged)

    def read_ahead(self, state: TrainState[Any], skipped: Collection[str] = ()) -> None:
        files, rest = next((handle.files for handle in handles_of(state)), None), self._num_early
        if files is None or files.cause is not None:  # perhaps only this rank knows of the failure
            return
        for key, leaves in self._leaves.items():
            is_cut = leaves.grad and key not in self._wholes and key not in skipped
            names = [name for name in leaves.names if name in self._files and is_cut]
            for group in (
                storage.stream.cut(names, leaves.numel, self.sub_group_numel)[:rest]
                if names
                else ()
            ):
                for name in names:
                    files.prefetch(name, group.start, group.stop)
                rest -= 1

    def _is_here(self, leaves: Leaves, name: str) -> bool:
        return self._is_at("here", leaves, name)

    def _is_at(self, kind: MemoryKind, leaves: Leaves, name: str) -> bool:
        return memory_kind(leaves.specs[name].placement, self.device) == kind

    def is_away(self, buffer: FlatParamPlan) -> bool:
        return buffer.key in self._away or buffer.key in self._async.keys

    def joins(self, buffer: FlatParamPlan) -> bool:
        leaves = self._leaves[buffer.key]
        return buffer.joins_shards and not self._is_here(leaves, leaves.param)

    def runs_on(self, buffer: FlatParamPlan) -> torch.device:
        return self._device_of(self._runs_at(buffer))

    def _runs_at(self, buffer: FlatParamPlan) -> MemoryKind:
        return (
            memory_kind(Placement("host"), self.device) if buffer.key in self._on_host else "here"
        )

    def _device_of(self, kind: MemoryKind) -> torch.device:
        return self.device if kind == "here" else torch.device("cpu")

    # --- making, updating, moving -----------------------------------------------------------------

    def make_files(self, world: RankAxis) -> StateFiles | None:
        if not self._files:
            return None
        files, error = None, None
        try:
            files = storage.state_files.StateFiles(
                self._files,
                self._streaming,
                sub_group_numel=self.sub_group_numel,
                **self._room,
                staged_nbytes=self._staged_nbytes,
                rank=world.global_rank(world.rank),
            )
        except Exception as raised:
            error = raised
        try:
            agree(files, world, error=error)
        except Exception:
            if files is not None:
                files.close()
            raise
        return files

    def is_served_by(self, files: StateFiles | None) -> bool:
        if files is None:
            return not self._files
        return self._files == files.plan and self._has_room(files)

    def _has_room(self, files: StateFiles) -> bool:
        return files.has_room(
            self._streaming,
            sub_group_numel=self.sub_group_numel,
            **self._room,
        )

    def init(
        self,
        buffer: FlatParamPlan,
        files: StateFiles | None,
        param: Tensor,
        values_S: Tensor,
        make: Callable[[], Transform],
    ) -> Parts:
        if not buffer.trainable or buffer.key not in self._away or buffer.key in self._wholes:
            return self.move(buffer, files, self._here.init_here(buffer, param, values_S, make))
        leaves = self._leaves[buffer.key]
        made = self._empty(leaves, files)
        found = {leaves.updated: values_S, **made}
        state = make().init(values_S.new_empty(0, device=self.runs_on(buffer)))
        self._init_streamed(buffer, files, found, values_S, state, make())
        parts = {
            "params": made.get(leaves.param, param),
            "optimizer": with_long(state, leaves, found),
        }
        parts["grads"] = made[leaves.grad] if leaves.grad in made else self._here.zero_grads(buffer)
        return parts | ({"master": found[leaves.updated]} if buffer.has_master else {})

    def _init_streamed(
        self,
        buffer: FlatParamPlan,
        files: StateFiles | None,
        found: Mapping[str, StoredTensor],
        values_S: Tensor,
        state: Any,
        transform: Transform,
    ) -> None:
        """Writes the first values to where they live. Errors are kept for `agree` if
        there are files.
        """
        if files is not None and files.cause is not None:
            return
        streamed = _streamed(self._leaves[buffer.key], lambda *_: transform, found, state)
        mover = self._mover([(buffer, found)])
        _run_stream(
            files,
            lambda: storage.stream.init_streamed(
                [streamed],
                lambda _, a, b: values_S[a:b],
                mover,
                sub_group_numel=self.sub_group_numel,
                **self._ahead,
            ),
        )

    def check(
        self, names: Sequence[str], leaves: Sequence[Any], specs: Sequence[TensorSpec]
    ) -> None:
        check = self._here.check_places if self._files else self._here.check
        check(names, leaves, specs)
        files = (
            next((leaf.files for leaf in leaves if isinstance(leaf, FileTensor)), None)
            if self._files
            else None
        )
        if files is not None and not self._has_room(files):
            raise ValueError(
                "state: its files must have this step's checksums and at least the buffers that it "
                "needs, but were made by a step with other streaming (sub_group_size, "
                "buffer_count, checksums, pipeline_read, pipeline_write); move the state there "
                "with fzero.place(state, step)"
            )

    def agree_on(self, tree: Any, world: RankAxis) -> None:
        if self.has_files or self._async.keys:
            handles = handles_of(tree)
            agree(handles[0].files if handles else None, world, error=error_of(tree))

    def step(
        self,
        state: TrainState[Any],
        updates: Sequence[Update],
        mesh: RankMesh,
        skip: Tensor | None,
        *,
        scratch: BufferPool,
    ) -> TrainState[Any]:
        """The state after these updates. If files are updated, it has handles of their
        next generation.

        All elementwise updates are one stream. Two kinds of buffers are updated before
        it, one at a time: buffers whose optimizer needs full parameters, and buffers
        whose updated shards are all-gathered into memory off the device.

        *Collective* where there are files, or such buffers: every rank. An overflow
        (`skip`) writes no file.

        Raises:
            StoreError: on every rank, if files of one rank failed; the state cannot be
                used any more.
        """
        handles = handles_of(state)
        for handle in handles:
            handle.check_age()
        # `agree` reports a failure that only this rank knows of
        files = handles[0].files if handles else None
        if files is not None and skip is not None and bool(skip):
            files.rest()  # waits for the sub-groups that were read ahead
            agree(files, mesh.world)
            return state
        try:
            wholes = [update for update in updates if update.buffer.key in self._wholes]
            update_unsharded(
                wholes,
                self._leaves,
                MovingTransfer(self.device, scratch),
                mesh.shard,
                joins=self.joins,
            )
        except BaseException as error:
            if files is not None:
                files.fail_by_message(error)
            raise
        rest = [update for update in updates if update.buffer.key not in self._wholes]
        now, later = self._async.divided(state, rest)
        self._update(now, files)
        if files is not None and (now or wholes or not later):
            agree(files, mesh.world)
        if later:
            state = self._async.begin(state, later, files, self._stream)
        if files is None:
            return state
        files.generation += 1
        return state._replace(**{name: renewed(getattr(state, name)) for name in QUANTITIES})

    def _update(self, updates: Sequence[Update], files: StateFiles | None) -> None:
        """Updates elementwise buffers in one stream. Errors are kept for `agree` if
        there are files.
        """
        if files is None or files.cause is None:
            _run_stream(files, partial(self._stream, updates))

    def _stream(
        self, updates: Sequence[Update], ended: Callable[[str], object] = lambda _: None
    ) -> None:
        """The one stream; `ended` is called with the key of each buffer that is written."""
        streamed, tensors = [], []
        for update in updates:
            tensors.append((update.buffer, tensors_of(update, self._leaves[update.buffer.key])))
            streamed.append(
                _streamed(
                    self._leaves[update.buffer.key],
                    update.transform_at,
                    tensors[-1][1],
                    update.state,
                )
            )
        storage.stream.update_streamed(
            streamed,
            self._mover(tensors),
            sub_group_numel=self.sub_group_numel,
            ended=ended,
            **self._ahead,
        )

    def init_here(
        self, buffer: FlatParamPlan, param: Tensor, values_S: Tensor, make: Callable[[], Transform]
    ) -> Parts:
        return self._here.init_here(buffer, param, values_S, make)

    def move(self, buffer: FlatParamPlan, files: StateFiles | None, parts: Parts) -> Parts:
        leaves = self._leaves[buffer.key]
        moved = {"params": self._moved(parts["params"], leaves.param, leaves, files)}
        if buffer.has_master:
            moved["master"] = self._moved(parts["master"], leaves.updated, leaves, files)
        if not buffer.trainable:
            return moved
        moved["grads"] = self._moved(parts["grads"], leaves.grad, leaves, files)
        state = parts["optimizer"]
        longs = dict(zip(leaves.longs, long_tensors(state, leaves), strict=True))
        made = {name: self._moved(x, name, leaves, files) for name, x in longs.items()}
        tensors, treespec = optree.tree_flatten(state)
        short = [
            x if name else x.to(self.runs_on(buffer))
            for name, x in zip(leaves.of_state, tensors, strict=True)
        ]
        return moved | {"optimizer": with_long(treespec.unflatten(short), leaves, made)}

    def _moved(
        self, x: StoredTensor, name: str, leaves: Leaves, files: StateFiles | None
    ) -> StoredTensor:
        if isinstance(x, FileTensor) and x.files is files:
            return x
        placement = leaves.specs[name].placement
        kind = memory_kind(placement, self.device)
        if kind != "nvme":
            value = x[:] if isinstance(x, FileTensor) else x
            if kind == "here":
                return value.to(self.device)
            may_pin = self._may_pin(leaves, name)
            if x is value and placement.holds(value, may_pin=may_pin):
                return x
            there: Tensor = placement.put(value, may_pin=may_pin)
            return there
        assert files is not None

        def copy(group: SubGroup, tensors: list[Tensor]) -> None:
            tensors[0].copy_(x[group.start : group.stop])

        groups = storage.stream.cut(
            (name,), files.plan[name][1].numel, self.sub_group_numel, made=(name,)
        )
        if files.cause is None:
            _run_stream(
                files,
                lambda: storage.stream.stream_update(
                    copy, files.mover(name), groups, **self._ahead
                ),
            )
        return files.handle(name)

    def _empty(self, leaves: Leaves, files: StateFiles | None) -> dict[str, StoredTensor]:
        """New tensors of a buffer that is partly off the device: all tensors off the
        device, and the optimizer state and gradient on it."""
        tensors: dict[str, StoredTensor] = {}
        if all(self._is_here(leaves, name) for name in leaves.specs):
            return tensors
        for name, spec in leaves.specs.items():
            kind = memory_kind(spec.placement, self.device)
            if kind == "nvme":
                assert files is not None
                tensors[name] = files.handle(name)
            elif kind == "host" or name in (*leaves.longs, leaves.grad):
                device = self.device if kind == "here" else torch.device("cpu")
                like = torch.empty(spec.numel, dtype=torch_dtype(spec.dtype), device=device)
                is_away = kind == "host"
                tensors[name] = (
                    spec.placement.put(like, may_pin=self._may_pin(leaves, name))
                    if is_away
                    else like
                )
        return tensors

    def _may_pin(self, leaves: Leaves, name: str) -> bool:
        """Whether a step copies a tensor. Only such a one is pinned: PyTorch takes up
        to twice the bytes for pinned memory.
        """
        crosses = name in (leaves.param, leaves.grad) or leaves.updated not in self._on_host
        return crosses and torch.cuda.is_available()

    def _mover(self, tensors: Sequence[tuple[FlatParamPlan, Mapping[str, StoredTensor]]]) -> Mover:
        """The mover of each tensor to the device on which its buffer is updated."""
        mover_of: dict[str, Mover] = {}
        there: dict[str, Tensor] = {}
        to: dict[MemoryKind, dict[str, Tensor]] = {"here": {}, "host": {}}
        for buffer, of_buffer in tensors:
            kind, leaves = self._runs_at(buffer), self._leaves[buffer.key]
            for name, x in of_buffer.items():
                if isinstance(x, FileTensor):
                    mover_of[name] = x.files.mover(name)
                else:
                    (there if self._is_at(kind, leaves, name) else to[kind])[name] = x
        mover_of |= dict.fromkeys(there, storage.movers.Resident(there))
        for kind, moved in to.items():
            if moved:
                mover_of |= dict.fromkeys(
                    moved, storage.movers.DeviceMover(moved, self._device_of(kind))
                )
        return storage.movers.ByName(mover_of)


def _streamed(
    leaves: Leaves,
    transform_at: Callable[..., Transform],
    tensors: Mapping[str, StoredTensor],
    state: Any,
) -> Streamed:
    out = leaves.param if leaves.param != leaves.updated and leaves.param in tensors else None
    return storage.stream.Streamed(
        leaves.names, leaves.numel, transform_at, None, state, out=out, grad=leaves.grad
    )


def _run_stream(files: StateFiles | None, run: Callable[[], None]) -> None:
    """Runs a stream. If the stream uses files, an error marks them as failed, for
    `agree`. Otherwise it is raised here.
    """
    try:
        run()
    except Exception as error:
        if files is None:
            raise
        files.fail(error)
