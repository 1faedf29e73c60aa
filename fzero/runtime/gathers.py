"""`Gathers`: the gathered flat buffers of a forward-backward. A buffer is under way,
live, or recorded in saved views.

Autograd must not keep a gathered buffer alive until the backward. So a saved tensor
that is a view of one is replaced by a `SavedView` (buffer, offset, size, stride). The
backward gathers the buffer again and makes the view from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.multiprocessing.reductions import StorageWeakRef

from fzero.comms.mesh import RankMesh
from fzero.comms.pending import Pending, ended
from fzero.comms.records import Phase, label_of
from fzero.model.own_params import address
from fzero.plans.dataflow import along
from fzero.plans.plan import FlatParamPlan, Plan, UnitPlan
from fzero.runtime.param_views import ParamViews
from fzero.storage.shard_transfer import ShardTransfer
from fzero.verbs import start_gather
from sharding.views import unflatten

if TYPE_CHECKING:
    from fzero.model.transforms import Tensors
    from fzero.storage.file_tensor import StoredTensor


class SavedView(NamedTuple):
    """A saved tensor, described as a view of a gathered flat buffer, so that it can be
    made again.
    """

    unit: UnitPlan
    key: str
    """The key of the flat buffer. For the value of a view, the parameter's name."""
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class LeakedView(NamedTuple):
    """A gathered buffer of which the model still holds a view when its unit is
    released. It keeps no memory.

    Attributes:
        key: the key of the flat buffer.
        counter: a tensor without memory that shares the buffer's version counter.
        version: when the unit was released.
        memory: a weak reference to the buffer's memory.
    """

    key: str
    counter: Tensor
    version: int
    memory: StorageWeakRef

    @property
    def is_held(self) -> bool:
        return not self.memory.expired()  # type: ignore[no-untyped-call]


class _Gather(NamedTuple):
    """The gather of one flat buffer under way, and the shard that it reads; None if a
    single rank holds the whole buffer.
    """

    buffer: FlatParamPlan
    pending: Pending
    shard: Tensor | None = None


class Gathers:
    """The gathered flat buffers of one rank.

    Args:
        plan: the units.
        mesh: the ranks.
        params: this rank's flat buffers by key, wherever they live.
        transfer: loads shards that live in other memory.
        seen: the values of parameters that have views.
        was_changed: makes the error for a parameter that the model has changed.

    Attributes:
        device: the model's.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: RankMesh,
        params: Mapping[str, StoredTensor],
        transfer: ShardTransfer,
        seen: ParamViews,
        was_changed: Callable[[str], ValueError],
    ) -> None:
        self._plan, self._mesh, self._params, self._transfer, self._was_changed = (
            plan, mesh, params, transfer, was_changed,
        )  # fmt: skip
        self._seen, self.device = seen, transfer.device
        self._replicated_keys = [b.key for b in plan.flat_buffers if not b.flow.gathers_over]
        # By axes: whether one rank along them holds a whole buffer.
        self._is_whole = {
            over: math.prod(axis.size for axis in along(mesh.axes, over)) == 1
            for over in {b.flow.gathers_over for b in plan.flat_buffers}
        }
        self._under_way: dict[str, list[_Gather]] = {}
        self._gathered: dict[str, dict[str, Tensor]] = {}  # unit → key → gathered buffer (P)
        self._by_storage: dict[int, tuple[UnitPlan, str, torch.dtype]] = {}
        self.leaked: list[LeakedView] = []
        self._versions = {
            key: flat._version for key, flat in params.items() if isinstance(flat, Tensor)
        }

    # --- gathers ----------------------------------------------------------------------------------

    def start(self, unit: UnitPlan, phase: Phase) -> None:
        """Starts the gathers of a unit. *Collective* in stage 3."""
        started: list[_Gather] = []
        self._under_way[unit.name] = started
        hooks, transfer = self._plan.comm_hooks, self._transfer
        for buffer in unit.buffers:
            if not buffer.flow.gathers_over:
                continue
            label, home = label_of("gather", buffer.key, phase), self._params[buffer.key]
            if not self._is_whole[buffer.flow.gathers_over]:
                shard = transfer.load(buffer.key, home)
                full = transfer.scratch.take(buffer.padded_numel, shard.dtype, transfer.device)
                pending = start_gather(shard, buffer, self._mesh, hooks, out=full, label=label)
                started.append(_Gather(buffer, pending, shard))
            elif isinstance(home, Tensor) and home.device == transfer.device:
                started.append(_Gather(buffer, ended(home, label)))
            else:
                transfer.prefetch(buffer.key, home)
                started.append(
                    _Gather(buffer, Pending(label, (), partial(transfer.load, buffer.key, home)))
                )

    def _end(self, unit: str) -> dict[str, Tensor]:
        """Waits for the gathers of a unit, and returns the memory of shards that were
        copies.
        """
        flats: dict[str, Tensor] = {}
        gathers = self._under_way.pop(unit)
        while gathers:  # emptied, so that no reference here keeps the shard's memory
            buffer, pending, shard = gathers.pop(0)
            flats[buffer.key] = pending.wait()
            del pending
            if shard is not None:
                self._give_back(shard, buffer.key)
        return flats

    def prefetch_shards(self, unit: UnitPlan) -> None:
        """Starts to load the shards of a unit that is gathered later."""
        for buffer in unit.buffers:
            if buffer.flow.gathers_over:
                self._transfer.prefetch(buffer.key, self._params[buffer.key])

    def wait(self, unit: UnitPlan) -> None:
        """Waits for the gathers of a unit, and makes it live."""
        flats = self._gathered[unit.name] = self._end(unit.name)
        for key, flat in flats.items():
            self._versions[key] = flat._version
            if flat.numel():  # an empty buffer has no address of its own
                self._by_storage[flat.untyped_storage().data_ptr()] = (unit, key, flat.dtype)

    def drop(self, unit: str) -> None:
        """Waits for the gathers of a unit and drops their results."""
        for key, flat in self._end(unit).items():
            self._give_back(flat, key)

    def abandon(self) -> list[Pending]:
        """Forgets everything after an error; returns the gathers that were under way."""
        pending = [gather.pending for gathers in self._under_way.values() for gather in gathers]
        for held in (self._gathered, self._by_storage, self._under_way):
            held.clear()  # type: ignore[attr-defined]
        return pending

    # --- live buffers -----------------------------------------------------------------------------

    def full_flats(self, unit: UnitPlan) -> Iterator[Any]:
        """The full flat buffers (P) of a unit in use, gathered or held by every rank."""
        live, params = self._gathered.get(unit.name, {}), self._params
        return (live.get(buffer.key, params[buffer.key]) for buffer in unit.buffers)

    def views(self, unit: UnitPlan) -> dict[str, Tensor]:
        """The parameters of a unit in use by name, as they were gathered."""
        pairs = zip(unit.buffers, self.full_flats(unit), strict=True)
        return {name: view for b, flat in pairs for name, view in unflatten(flat, b.layout).items()}

    def seen(self, unit: UnitPlan) -> dict[str, Tensor]:
        """The values in place of parameters of a unit in use, by name. A saved view of
        one is made again, too.
        """
        values = self._seen.of(unit, lambda: self.views(unit))
        if values and unit.name in self._gathered:
            for name, value in values.items():
                if value.numel():
                    self._by_storage[address(value)] = (unit, name, value.dtype)
        return values

    def pulled(
        self, grads: dict[str, Tensor], need: Callable[[str], None]
    ) -> Iterator[tuple[Tensors, Tensors]]:
        """The gradients of parameters and of those that their views train, in parts,
        each with the masks of some.

        Args:
            grads: the gradients of what modules saw, by parameter; is changed.
            need: gathers a unit again.
        """

        def again(names: Iterable[str]) -> dict[str, Tensor]:
            need(unit)
            flats: dict[str, Any] = {**self._params, **self._gathered.get(unit, {})}
            owners = ((own, self._plan.param_units[own][1]) for own in names)
            return {
                own: flats[b.key][slice(*b.layout.bounds(own))].view(b.layout.shape(own))
                for own, b in owners
            }

        masks: dict[str, Tensor] = {}
        for name in [name for name in grads if name in self._seen.is_on]:
            unit = self._plan.param_units[name][0].name
            found = self._seen.pulled(name, grads[name], again)
            grads[name], mask = found.pop(name)
            if mask is not None:
                masks[name] = mask
            yield from (({other: part.whole}, {}) for other, part in found.items())
        yield grads, masks

    def release(self, unit: str) -> None:
        """Returns the memory of a live unit, unless an error has ended the
        forward-backward.
        """
        if unit in self._gathered and self._seen.is_on:
            for value in self._seen.forget(unit).values():
                self._by_storage.pop(address(value), None)
        for key, flat in self._gathered.pop(unit, {}).items():
            storage = flat.untyped_storage()
            self._by_storage.pop(storage.data_ptr(), None)
            if flat._version != self._versions[key]:
                raise self._was_changed(f"of {key!r}")
            # `flat` and `storage`
            is_seen = torch._C._storage_Use_Count(storage._cdata) > 2  # type: ignore[attr-defined]
            del storage  # with which the memory could not be given back
            if is_seen:
                # not given back as well: the reference may end at any time, where a thread has just
                # loaded the shard
                self._watch(flat, key)
            else:
                self._give_back(flat, key)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the memory of parameters, also of released units."""
        at = address(tensor)
        if at <= 0 or not tensor.numel():
            return False
        mine = (
            address(flat)
            for flat in self._params.values()
            if isinstance(flat, Tensor) and flat.numel()
        )
        released = (each.memory.cdata for each in self.leaked)
        return at in self._by_storage or at in mine or tensor.untyped_storage()._cdata in released

    def _watch(self, flat: Tensor, key: str) -> None:
        """Records a buffer of which there are views; a change to one of them would be
        lost.
        """
        # a transform of torch.func refuses the second line
        with temporarily_clear_interpreter_stack():
            twin = flat.detach()
            twin.data = flat.new_empty(0)  # keeps the version counter
        memory = StorageWeakRef(flat.untyped_storage())  # type: ignore[no-untyped-call]
        self.leaked.append(LeakedView(key, twin, twin._version, memory))

    def check_unmodified(self) -> None:
        """Raises ValueError if a forward changed a parameter in place: one that this
        rank holds in full, or one of a released unit."""
        for key, counter, version, _ in self.leaked:
            if counter._version != version:
                raise self._was_changed(f"of {key!r}")
        params, versions = self._params, self._versions
        for key in self._replicated_keys:
            flat: Any = params[key]
            if flat._version != versions[key]:
                raise self._was_changed(f"of {key!r}")

    def _give_back(self, flat: Tensor, key: str) -> None:
        if flat is not self._params[key]:
            self._transfer.scratch.give(flat)

    def as_saved(self, tensor: Tensor) -> SavedView | tuple[Tensor, int]:
        """The value that autograd saves for a tensor: a `SavedView` for a view of a
        gathered buffer, else the tensor and its version."""
        if tensor.layout == torch.strided:
            unit, key, dtype = self._by_storage.get(address(tensor), (None, "", None))
            if unit is not None and dtype == tensor.dtype:
                return SavedView(
                    unit, key, int(tensor.storage_offset()), tensor.size(), tensor.stride()
                )
        return tensor.detach(), tensor._version

    def from_saved(self, saved: SavedView | tuple[Tensor, int]) -> Tensor:
        """The tensor that was saved; the unit of a view must be live."""
        if isinstance(saved, SavedView):
            flat = self._gathered[saved.unit.name].get(saved.key)
            base = self.seen(saved.unit)[saved.key] if flat is None else flat
            return base.as_strided(saved.size, saved.stride, saved.offset)
        tensor, version = saved
        # autograd does not check this itself where saved tensors have hooks
        if tensor._version != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that the backward needs was changed in "
                f"place after it was saved (version {version}, now {tensor._version}); make the "
                f"change out of place, or on a clone"
            )
        return tensor
