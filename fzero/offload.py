"""What does a step do about tensors of its state that live off the device?

`Offload` is what a plan's placements come to on one rank's device. It makes the tensors of a flat buffer where they shall live,
updates them there, and moves them elsewhere; each as one stream over sub-groups (`fzero.stream`), whose tensors come from where
they are: files, host memory, or where the update runs. Where the model is on the CPU, host memory is the device's, and nothing
moves. A buffer with a tensor in a file is updated on the CPU, others on the device.

If one rank's files fail, no rank may go on: before updated parameters are joined, every rank tells whether its files are whole
(`agree`), and where one's are not, all of them raise, and none of their states can be used any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from fzero import collectives
from fzero.collectives import Bound
from fzero.file_store import FileSpec, StoreError
from fzero.file_tensors import FilePlan, Files, FileTensor, handles_of, renewed
from fzero.movers import ByName, DeviceMover, Resident
from fzero.placements import CHECKED_GRAIN
from fzero.plan import BufferPlan, Plan
from fzero.sent import Label
from fzero.state import TrainState
from fzero.stream import Mover, Streamed, SubGroup, cut, init_streamed, stream_update, update_streamed
from fzero.transforms import Transform
from sharding.specs import Placement, TensorSpec
from sharding.views import torch_dtype

Leaf = Tensor | FileTensor


class Leaves(NamedTuple):
    """What a rank updates of a flat buffer: the master, or its share of the parameters, and the state's long tensors."""

    names: tuple[str, ...]
    placements: tuple[Placement | None, ...]
    """None of parameters, which are no copy of their own."""
    dtypes: tuple[str, ...]
    numel: int


class Update(NamedTuple):
    """One flat buffer to be updated."""

    buffer: BufferPlan
    grad: Tensor
    """This rank's (S)."""
    master: Leaf
    """What is updated: a shard of the parameters if there is no master."""
    state: Any
    transform_at: Callable[[int, int], Transform]
    """Of elements [start, stop)."""


class Offload:
    """What the placements of a plan come to where the model is on `device`."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device, self._streaming = device, plan.streaming
        self._leaves = {b.key: _leaves_of(plan, b) for b in plan.flat_buffers if b.trainable}
        self._files: FilePlan = {
            name: (placement.path, FileSpec(leaves.numel, dtype))
            for leaves in self._leaves.values()
            for name, placement, dtype in zip(leaves.names, leaves.placements, leaves.dtypes, strict=True)
            if placement is not None and placement.path is not None
        }
        in_files = [sum(name in self._files for name in leaves.names) for leaves in self._leaves.values()]
        self._most = max(in_files, default=0)
        self._ahead = plan.streaming.ahead(self._most)
        longest = max((leaves.numel for leaves in self._leaves.values()), default=0)
        numel = plan.streaming.sub_group_numel
        self.sub_group_numel = min(numel, max(-(-longest // CHECKED_GRAIN), 1) * CHECKED_GRAIN)  # room for the longest

    @property
    def has_files(self) -> bool:
        """Whether something lives in files."""
        return bool(self._files)

    def kind(self, placement: Placement | None) -> Literal["here", "host", "nvme"]:
        """Where a tensor is, as this device sees it."""
        if placement is None or placement.kind == "device":
            return "here"
        return "here" if placement.kind == "host" and self.device.type == "cpu" else placement.kind

    def is_away(self, buffer: BufferPlan) -> bool:
        """Whether a part of what is updated of this buffer lives elsewhere."""
        return any(self.kind(placement) != "here" for placement in self._leaves[buffer.key].placements)

    def runs_on(self, buffer: BufferPlan) -> torch.device:
        """Where the buffer is updated."""
        in_files = any(name in self._files for name in self._leaves[buffer.key].names)
        return torch.device("cpu") if in_files else self.device

    # --- making, updating, moving --------------------------------------------------------------------------------

    def make_files(self, everyone: Bound) -> Files | None:
        """The files of a new state, for this rank; None if nothing lives in files.

        *Collective* where something does: every rank.

        Raises:
            StoreError, MemoryError: told on every rank, when those of one cannot be made.
        """
        if not self._files:
            return None
        files, error = None, None
        try:
            how = {"sub_group_numel": self.sub_group_numel, "most": self._most}
            files = Files(self._files, self._streaming, rank=everyone.rank, **how)
        except Exception as raised:
            error = raised
        try:
            agree(files, everyone, error=error)
        except Exception:
            if files is not None:
                files.close()
            raise
        return files

    def is_served_by(self, files: Files | None) -> bool:
        """Whether a state with these files (None: without any) has all that this plan wants in files there, and no more."""
        return self._files == ({} if files is None else files.plan)

    def init(self, buffer: BufferPlan, files: Files | None, values_S: Tensor, transform: Transform) -> tuple[Leaf, Any]:
        """What is updated of a buffer and the optimizer's state, where they live; a share of the parameters stays itself.

        Args:
            values_S: what the master begins with, on the device.
        """
        if not self.is_away(buffer):
            return values_S, transform.init(values_S)
        leaves = self._leaves[buffer.key]
        tensors = self._empty(leaves, files, values_S)
        state = transform.init(values_S.new_empty(0, device=self.runs_on(buffer)))
        streamed = Streamed(leaves.names, leaves.numel, lambda start, stop: transform, lambda a, b: values_S, state)
        if files is None or files.cause is None:
            mover = self._mover([(buffer, tensors)], files)
            self._stream(
                files,
                lambda: init_streamed(
                    [streamed],
                    lambda _, a, b: values_S[a:b],
                    mover,
                    sub_group_numel=self.sub_group_numel,
                    **self._ahead,
                ),
            )
        return tensors[leaves.names[0]], _with_long(state, leaves, tensors)

    def check(self, names: Sequence[str], leaves: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
        """Raises unless each tensor of a state is in a file or not as its spec says, and those in files are good.

        Raises:
            ValueError: one is not.
            StoreError: the state is stale, or its files are broken.
        """
        for name, leaf, spec in zip(names, leaves, specs, strict=True):
            in_file = isinstance(leaf, FileTensor)
            if in_file != (spec.placement.kind == "nvme"):
                raise ValueError(
                    f"{name}: must live on {spec.placement.kind!r} in this step, got {leaf!r}; bring the state there with "
                    f"fzero.place(state, step)"
                    if in_file
                    else f"{name}: must live in a file in this step, got a tensor in memory; bring the state there with "
                    f"fzero.place(state, step)"
                )
            if in_file:
                leaf.check()

    def step(
        self, state: TrainState[Any], updates: Sequence[Update], everyone: Bound, skip: Tensor | None
    ) -> TrainState[Any]:
        """The state after these updates, as one stream; where files are updated, with handles of the next generation.

        *Collective* where there are files: every rank. An overflow (`skip`) writes no file.

        Raises:
            StoreError: on every rank, when files of one failed; the state cannot be used any more.
        """
        files = files_of((state.master, state.optimizer))
        if files is not None and skip is not None and bool(skip):
            return state
        self._update(updates, files)
        if files is None:
            return state
        agree(files, everyone)
        files.generation += 1
        return state._replace(master=renewed(state.master), optimizer=renewed(state.optimizer))

    def _update(self, updates: Sequence[Update], files: Files | None) -> None:
        """Updates buffers where their tensors live. Errors are kept for `agree` where there are files."""
        streamed, tensors = [], []
        for update in updates:
            leaves, device = self._leaves[update.buffer.key], self.runs_on(update.buffer)
            found = dict(zip(leaves.names, (update.master, *_long(update.state, leaves)), strict=True))
            tensors.append((update.buffer, found))
            streamed.append(
                Streamed(
                    leaves.names, leaves.numel, update.transform_at,
                    lambda start, stop, grad=update.grad, device=device: grad[start:stop].to(device),  # type: ignore[misc]
                    update.state,
                )
            )  # fmt: skip
        mover = self._mover(tensors, files)
        self._stream(
            files,
            lambda: update_streamed(streamed, mover, sub_group_numel=self.sub_group_numel, **self._ahead),
        )

    def move(self, buffer: BufferPlan, files: Files | None, master: Leaf, state: Any) -> tuple[Leaf, Any]:
        """Tensors of a buffer, wherever they live, brought to where this plan says; those that are there stay themselves."""
        leaves = self._leaves[buffer.key]
        found = dict(zip(leaves.names, (master, *_long(state, leaves)), strict=True))
        made = {}
        for name, placement in zip(leaves.names, leaves.placements, strict=True):
            made[name] = self._moved(found[name], name, placement, files)
        counters = self.runs_on(buffer)
        state = optree.tree_map(lambda x: x.to(counters) if isinstance(x, Tensor) and x.ndim == 0 else x, state)
        return made[leaves.names[0]], _with_long(state, leaves, made)

    def _moved(self, x: Leaf, name: str, placement: Placement | None, files: Files | None) -> Leaf:
        kind = self.kind(placement)
        if placement is None or (isinstance(x, FileTensor) and x.files is files):
            return x
        if kind != "nvme":
            value = x[:] if isinstance(x, FileTensor) else x
            if kind == "here":
                return value.to(self.device)
            return _host(value, pinned=placement.pinned)
        assert files is not None

        def copy(group: SubGroup, tensors: list[Tensor]) -> None:
            tensors[0].copy_(x[group.start : group.stop])

        groups = cut((name,), files.plan[name][1].numel, self.sub_group_numel)
        self._stream(files, lambda: stream_update(copy, files.mover(name), groups, **self._ahead))
        return files.handle(name)

    def _stream(self, files: Files | None, run: Callable[[], None]) -> None:
        """Runs a stream. Where files are part of it, an error breaks them and waits for `agree`; else it is raised."""
        try:
            run()
        except Exception as error:
            if files is None:
                raise
            files.fail(error)

    def _empty(self, leaves: Leaves, files: Files | None, values_S: Tensor) -> dict[str, Leaf]:
        tensors: dict[str, Leaf] = {}
        for name, placement, dtype in zip(leaves.names, leaves.placements, leaves.dtypes, strict=True):
            kind = self.kind(placement)
            if kind == "nvme":
                assert files is not None
                tensors[name] = files.handle(name)
            elif name == leaves.names[0] and kind == "here":
                tensors[name] = values_S
            else:
                like = torch.empty(
                    leaves.numel, dtype=torch_dtype(dtype), device=self.device if kind == "here" else "cpu"
                )
                tensors[name] = _host(like, pinned=bool(placement and placement.pinned)) if kind == "host" else like
        return tensors

    def _mover(self, tensors: Sequence[tuple[BufferPlan, Mapping[str, Leaf]]], files: Files | None) -> Mover:
        """What brings each tensor to where its buffer is updated."""
        device_mover = DeviceMover(
            {n: x for _, of in tensors for n, x in of.items() if isinstance(x, Tensor)}, self.device
        )
        residents = {
            device: Resident(device_mover.tensors, device) for device in {self.runs_on(buffer) for buffer, _ in tensors}
        }
        mover_of: dict[str, Mover] = {}
        for buffer, of_buffer in tensors:
            device = self.runs_on(buffer)
            for name, x in of_buffer.items():
                if isinstance(x, FileTensor):
                    mover_of[name] = x.files.mover(name)
                else:
                    streams = x.device != device and device.type == "cuda"
                    mover_of[name] = device_mover if streams else residents[device]
        return ByName(mover_of)


def agree(files: Files | None, everyone: Bound, *, error: Exception | None = None) -> None:
    """Raises on every rank, when the files of one have failed; nobody's can be used then.

    *Collective:* every rank of a job with state in files; sends a few bytes.

    Args:
        error: what failed here besides these files.

    Raises:
        StoreError, MemoryError: what failed on this rank, or that something did on another.
    """
    cause = error or (files.cause if files is not None else None)
    told = collectives.exchange(None if cause is None else str(cause), everyone, label=Label("files"))
    failed = [rank for rank, message in enumerate(told) if message is not None]
    if not failed:
        return
    if cause is None:
        cause = StoreError(
            f"rank {failed[0]}: its state in files cannot be used any more, and so no rank's can: {told[failed[0]]}"
        )
    if files is not None:
        files.fail(cause)
    raise cause


def files_of(tree: Any) -> Files | None:
    """The files of a state, after a look whether they are good; None if there are none."""
    handles = handles_of(tree)
    for handle in handles:
        handle.check()
    return handles[0].files if handles else None


# --- helpers -----------------------------------------------------------------------------------------------------


def _leaves_of(plan: Plan, buffer: BufferPlan) -> Leaves:
    accessors, specs, _ = optree.tree_flatten_with_accessor(plan.optimizer[buffer.key])
    numel = buffer.master.local_shape(plan.mesh)[0]
    names, placements, dtypes = [buffer.key], [buffer.placement if buffer.has_master else None], [buffer.dtypes.master]
    for accessor, spec in zip(accessors, specs, strict=True):
        if spec.shape == (buffer.padded_numel,):
            names.append(f"{buffer.key}/{accessor.codify('state')}")
            placements.append(spec.placement)
            dtypes.append(spec.dtype)
    return Leaves(tuple(names), tuple(placements), tuple(dtypes), numel)


def _is_long(accessor: Any, leaves: Leaves) -> bool:
    return f"{leaves.names[0]}/{accessor.codify('state')}" in leaves.names


def _long(state: Any, leaves: Leaves) -> list[Leaf]:
    """The tensors of a state that are as long as the parameter."""
    accessors, tensors, _ = optree.tree_flatten_with_accessor(state)
    return [x for accessor, x in zip(accessors, tensors, strict=True) if _is_long(accessor, leaves)]


def _with_long(state: Any, leaves: Leaves, tensors: Mapping[str, Leaf]) -> Any:
    """The state with these in place of its long tensors."""
    accessors, found, treespec = optree.tree_flatten_with_accessor(state)
    names = [f"{leaves.names[0]}/{accessor.codify('state')}" for accessor in accessors]
    return treespec.unflatten([tensors.get(name, x) for name, x in zip(names, found, strict=True)])


def _host(x: Tensor, *, pinned: bool) -> Tensor:
    """A copy in host memory."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned and torch.cuda.is_available()).copy_(x)
