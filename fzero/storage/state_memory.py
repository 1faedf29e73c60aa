"""`StateForm` and `StateMemory`: the tensors of a rank's state, and the memory in which
each of them lives.

A `StateMemory` makes, updates, moves and checks the flat buffers of a state, each in
the memory of its placement. `DeviceMemory` has all of them on the device of the model;
`fzero.storage.offload.Offload` is for state of which a part lives elsewhere. If the
model is on the CPU, host memory is device memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import optree
from torch import Tensor

if TYPE_CHECKING:
    pass
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self, final

import torch

from fzero.common.arguments import refuse
from fzero.comms.axes import RankAxis
from fzero.comms.mesh import RankMesh
from fzero.comms.pending import Pending
from fzero.comms.records import label_of
from fzero.optim.transforms import Transform
from fzero.plans.plan import FlatParamPlan, Plan
from fzero.state import QUANTITIES, TrainState
from fzero.storage.file_tensor import handles_of
from fzero.storage.promised import arrived, promises_of
from fzero.storage.shard_transfer import BufferPool, Resident, ShardTransfer, to_device
from fzero.verbs import start_join
from sharding import TensorSpec
from sharding.specs import Placement
from sharding.views import torch_dtype

if TYPE_CHECKING:
    from fzero.storage.file_tensor import StoredTensor
    from fzero.storage.state_files import StateFiles

MemoryKind = Literal["here", "host", "nvme"]
"""Memory as the device sees it: its own memory, host memory if that is different, or a
file.
"""

Parts = dict[str, Any]
"""One flat buffer's part of a state: `params`, `grads`, `master` and `optimizer`, where
it has them.
"""

_OF_BUFFERS = tuple(f"state.{quantity}" for quantity in QUANTITIES)


@dataclass(frozen=True, slots=True)
class StateForm:
    """The tensors of a rank's state.

    Attributes:
        specs: the spec of every tensor, in the structure of the state.
        names: the paths of the tensors.
        leaves: the specs in the order of `names`.
        shapes: their shapes and dtypes on one rank.
        job: the job in words, for messages.
    """

    specs: TrainState[TensorSpec]
    names: list[str]
    leaves: list[TensorSpec]
    shapes: list[tuple[tuple[int, ...], torch.dtype]]
    treespec: Any
    job: str

    @classmethod
    def of(cls, specs: TrainState[TensorSpec], plan: Plan) -> Self:
        accessors, leaves, treespec = optree.tree_flatten_with_accessor(specs)
        shapes = [(spec.local_shape(plan.mesh), torch_dtype(spec.dtype)) for spec in leaves]
        names = [accessor.codify("state") for accessor in accessors]
        return cls(
            specs, names, leaves, shapes, treespec, f"stage {plan.stage}, {plan.world_size} ranks"
        )

    def check(
        self,
        state: TrainState[Tensor],
        *,
        fix: str = "make it with this step's init(), or give its weights to init(params)",
    ) -> list[Any]:
        """The tensors of a state.

        Raises:
            ValueError: a tensor has another shape or dtype than in this step. (Another
                step may shard it differently.)
        """
        if not isinstance(state, TrainState):
            refuse(
                "state",
                "a TrainState",
                state,
                "pass that of init() or of the last step (load(...).state)",
            )
        flat: tuple[list[Any], Any] = optree.tree_flatten(state)  # type: ignore[arg-type]
        leaves, found = flat
        if found != self.treespec:
            theirs = [accessor.codify("state") for accessor in optree.tree_accessors(state)]
            differing = min({*theirs} ^ {*self.names}, default="another structure")
            raise ValueError(
                f"state: must be one of this step's, got one "
                f"{'without' if differing in self.names else 'with'} {differing}; {fix}"
            )
        if [(leaf.shape, leaf.dtype) for leaf in leaves] == self.shapes:
            return leaves
        for name, leaf, (shape, dtype) in zip(self.names, leaves, self.shapes, strict=True):
            if leaf.shape != shape or leaf.dtype != dtype:
                check_not_donated(state)
                raise ValueError(
                    f"{name}: must be {dtype} of shape {shape} in this step ({self.job}), got "
                    f"{leaf.dtype} of shape {tuple(leaf.shape)}; {fix}"
                )
        return leaves


def taken(state: TrainState[Tensor]) -> TrainState[Tensor]:
    """The same tensors for a step that writes into them; from now on `state` is
    donated.

    An empty counter marks a donated state. A copy that shares the counter is marked,
    too: it shares the memory that the step overwrites.
    """
    own = (arrived(state) if promises_of(state) else state)._replace(step=state.step.clone())
    state.step.resize_(0)
    return own


def is_donated(state: TrainState[Tensor]) -> bool:
    """Whether a step has taken this state. Its tensors then belong to the next state."""
    return not state.step.numel()


def check_not_donated(state: TrainState[Tensor]) -> None:
    """Raises if a step took the state: the StoreError of its files if these failed,
    else a ValueError with the fix.
    """
    if is_donated(state):
        for handle in handles_of(state):
            handle.check()
        raise ValueError(
            "state: must not be used again once a step took it (donate=True), because that step "
            "wrote the next state into its memory; go on with the state that the step returned "
            "(from a checkpoint, if its update raised), or make the step with donate=False"
        )


class Update(NamedTuple):
    """One flat buffer to be updated."""

    buffer: FlatParamPlan
    grad: StoredTensor
    """This rank's gradient (S)."""
    master: StoredTensor
    """The tensor to update: a shard of the parameters if there is no master."""
    state: Any
    transform_at: Callable[..., Transform]
    """The transform of elements [start, stop). Third argument: where the new parameters
    are written, if they live elsewhere.
    """
    param: StoredTensor
    """This rank's shard of the model's parameters. If updated shards are all-gathered
    off the device (`joins`), the rank's whole part."""
    mesh: RankMesh

    def join(self, updated_S: Tensor, *, out: Tensor) -> Pending:
        """Starts to all-gather updated shards; see `fzero.verbs.start_join`."""
        label = label_of("all_gather_params", self.buffer.key, "update")
        return start_join(updated_S, self.buffer, self.mesh, out=out, label=label)


class StateMemory(Protocol):
    """Creates, updates, moves and checks the flat buffers of a plan, whose model is on
    `device`.

    Attributes:
        device: the device of the model.
        has_files: whether any tensor lives in a file.
        passes_use_files: whether a forward or backward reads or writes files.
    """

    device: torch.device
    has_files: bool
    passes_use_files: bool

    def transfer(self, scratch: BufferPool) -> ShardTransfer:
        """The transfer of one forward-backward: loads shards of parameters and writes
        gradients.
        """
        ...

    def read_ahead(self, state: TrainState[Any], skipped: Collection[str] = ()) -> None:
        """During the backward, starts to read the next update's first sub-groups
        (without gradients), as many as the buffers hold.

        Errors are kept for `agree_on`.

        Args:
            skipped: the keys of flat buffers that the update leaves as they are.
        """
        ...

    def is_away(self, buffer: FlatParamPlan) -> bool:
        """Whether a tensor that an update of this buffer reads or writes lives off the
        device.
        """
        ...

    def joins(self, buffer: FlatParamPlan) -> bool:
        """Whether updated parameters are all-gathered into a shard that lives off the
        device.
        """
        ...

    def runs_on(self, buffer: FlatParamPlan) -> torch.device:
        """The device on which the buffer is updated."""
        ...

    def make_files(self, world: RankAxis) -> StateFiles | None:
        """The files of a new state, for this rank; None if no tensor lives in a file.

        *Collective* if a tensor lives in a file: every rank.

        Raises:
            StoreError, MemoryError: on every rank, if one rank's files cannot be made.
        """
        ...

    def is_served_by(self, files: StateFiles | None) -> bool:
        """Whether these files hold exactly the tensors that this plan places in files,
        and have enough buffers; None stands for no files."""
        ...

    def agree_on(self, tree: Any, world: RankAxis) -> None:
        """Raises a StoreError on every rank if the files of one rank have failed, to
        which the handles in `tree` refer.

        *Collective* where there are files.
        """
        ...

    def init(
        self,
        buffer: FlatParamPlan,
        files: StateFiles | None,
        param: Tensor,
        values_S: Tensor,
        make: Callable[[], Transform],
    ) -> Parts:
        """A new state's part of one flat buffer, each tensor in the memory of its
        placement; gradients are zeros.

        Args:
            param: the parameters that the model computes with, on the device.
            values_S: on the device: this rank's shard of the parameters to update, or
                the master (also that of a frozen buffer).
            make: makes the transform of a trained buffer.
        """
        ...

    def init_here(
        self, buffer: FlatParamPlan, param: Tensor, values_S: Tensor, make: Callable[[], Transform]
    ) -> Parts:
        """Like `init`, but with all tensors on the device, whatever their placements."""
        ...

    def move(self, buffer: FlatParamPlan, files: StateFiles | None, parts: Parts) -> Parts:
        """A state's part of one flat buffer, moved to this plan's placements. Tensors
        that are there already are returned unchanged."""
        ...

    def step(
        self,
        state: TrainState[Any],
        updates: Sequence[Update],
        mesh: RankMesh,
        skip: Tensor | None,
        *,
        scratch: BufferPool,
    ) -> TrainState[Any]:
        """The state after the updates of those buffers that live off the device."""
        ...

    def check(
        self, names: Sequence[str], leaves: Sequence[Any], specs: Sequence[TensorSpec]
    ) -> None:
        """Raises unless each tensor of a state lives where its spec says, and its files
        are good.

        Raises:
            ValueError: a tensor lives elsewhere, or the files' buffers do not fit this
                step's streams.
            StoreError: the state is stale, or its files are broken.
        """
        ...


@final
class DeviceMemory:
    """The `StateMemory` of a state that is all on the device of its model."""

    has_files = False
    passes_use_files = False

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device = device
        self._shapes = {(b.padded_numel,) for b in plan.flat_buffers}
        self._grads = {
            b.key: (b.grads.local_shape(plan.mesh), b.grads.dtype)
            for b in plan.flat_buffers
            if b.trainable
        }

    def transfer(self, scratch: BufferPool) -> ShardTransfer:
        return Resident(self.device, scratch)

    def read_ahead(self, state: TrainState[Any], skipped: Collection[str] = ()) -> None:
        pass

    def is_away(self, buffer: FlatParamPlan) -> bool:
        return False

    def joins(self, buffer: FlatParamPlan) -> bool:
        return False

    def runs_on(self, buffer: FlatParamPlan) -> torch.device:
        return self.device

    def make_files(self, world: RankAxis) -> StateFiles | None:
        return None

    def is_served_by(self, files: StateFiles | None) -> bool:
        return files is None

    def agree_on(self, tree: Any, world: RankAxis) -> None:
        pass

    def init(
        self,
        buffer: FlatParamPlan,
        files: StateFiles | None,
        param: Tensor,
        values_S: Tensor,
        make: Callable[[], Transform],
    ) -> Parts:
        return self.init_here(buffer, param, values_S, make)

    def init_here(
        self, buffer: FlatParamPlan, param: Tensor, values_S: Tensor, make: Callable[[], Transform]
    ) -> Parts:
        parts: Parts = {"params": param} | ({"master": values_S} if buffer.has_master else {})
        if not buffer.trainable:
            return parts
        return parts | {"grads": self.zero_grads(buffer), "optimizer": make().init(values_S)}

    def zero_grads(self, buffer: FlatParamPlan) -> Tensor:
        """The first gradients of a buffer."""
        shape, dtype = self._grads[buffer.key]
        return torch.zeros(shape, dtype=torch_dtype(dtype), device=self.device)

    def move(self, buffer: FlatParamPlan, files: StateFiles | None, parts: Parts) -> Parts:
        there = {
            quantity: part
            for quantity, part in parts.items()
            if quantity != "master" or buffer.has_master
        }
        moved: Any = optree.tree_map(lambda x: to_device(x, self.device), there)  # type: ignore[arg-type]
        return moved  # type: ignore[no-any-return]

    def step(
        self,
        state: TrainState[Any],
        updates: Sequence[Update],
        mesh: RankMesh,
        skip: Tensor | None,
        *,
        scratch: BufferPool,
    ) -> TrainState[Any]:
        raise AssertionError("all buffers are on the device")

    def check(
        self, names: Sequence[str], leaves: Sequence[Any], specs: Sequence[TensorSpec]
    ) -> None:
        if not (
            self.device.type == "cpu"
            and all(type(leaf) is Tensor and leaf.is_cpu for leaf in leaves)
        ):
            self.check_places(names, leaves, specs)

    def check_places(
        self, names: Sequence[str], leaves: Sequence[Any], specs: Sequence[TensorSpec]
    ) -> None:
        """`check`, tensor by tensor, also for a state that is partly off the device."""
        for name, leaf, spec in zip(names, leaves, specs, strict=True):
            in_file = not isinstance(leaf, Tensor)
            if in_file != spec.placement.in_file:
                raise ValueError(
                    f"{name}: must live on {spec.placement.kind!r} in this step, got {leaf!r}; "
                    f"move the state there with fzero.place(state, step)"
                    if in_file
                    else f"{name}: must live in a file in this step, got a tensor in memory; "
                    f"move the state there with "
                    f"fzero.place(state, step)"
                )
            if in_file:
                leaf.check()
            elif name.startswith(_OF_BUFFERS) and spec.shape in self._shapes:
                expected = (
                    self.device
                    if memory_kind(spec.placement, self.device) == "here"
                    else torch.device("cpu")
                )
                if leaf.device.type != expected.type:
                    raise ValueError(
                        f"{name}: must be on {expected} in this step, got a tensor on "
                        f"{leaf.device}; move the state there with fzero.place(state, step)"
                    )


def memory_kind(placement: Placement, device: torch.device) -> MemoryKind:
    """The memory of a tensor with this placement, as a device sees it."""
    if placement.is_here(device.type):
        return "here"
    return "nvme" if placement.in_file else "host"
