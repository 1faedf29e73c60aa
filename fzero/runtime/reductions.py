"""`Reductions`: writes gradients of a backward into their unit's flat gradient, and
reduces it when it is complete.

A unit's flat gradient (P) is collected in the state's own memory if this rank keeps all
of it, and in scratch memory otherwise. The unit scheduler decides when a flat gradient
begins, and when its reduction starts and ends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fzero.comms.comm_hooks import Sending
from fzero.comms.mesh import RankMesh, States
from fzero.comms.pending import Pending
from fzero.comms.records import Phase, label_of
from fzero.plans.dataflow import GradHome, Holds, carried
from fzero.plans.leaves import stream_name
from fzero.plans.plan import FlatParamPlan, Plan, UnitPlan
from fzero.storage.shard_transfer import ShardTransfer, own_shard
from fzero.verbs import start_reduce_scatter_grads
from sharding.views import torch_dtype, unflatten

if TYPE_CHECKING:
    from fzero.storage.file_tensor import StoredTensor


@dataclass(slots=True)
class _Filling:
    """The flat gradients of a unit that are being written: the buffers (P each), where
    they are collected, their parts by parameter (if cut), and the names written so far.
    """

    flats: dict[str, Tensor] = field(default_factory=dict)
    homes: dict[str, GradHome] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)


class _Reduction(NamedTuple):
    """A unit's reduce-scatters under way, with the full gradients that they read."""

    reads: _Filling
    started: list[tuple[FlatParamPlan, Sending, bool]]


class Reductions:
    """The gradients of one rank between two updates.

    Args:
        plan: the units.
        mesh: the ranks.
        grads: receive the mean gradients, by key: full (P) in stages 0 and 1, this
            rank's shards (S) otherwise.
        transfer: loads and writes gradients that live in other memory.
        hook_states: the states of the comm hooks, by flat buffer and axis.
        norms: measures the results of reductions.

    Attributes:
        hook_states: the states of the comm hooks after the reductions so far.
        begun: the keys of the flat gradients that are being collected.
        has_come: whether the present backward has produced any gradient.
        only_adds: whether the present backward only adds to full gradients that hold a
            sum and live on the device, and no unit is gathered. Then the unit scheduler
            has nothing to decide.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: RankMesh,
        grads: Mapping[str, StoredTensor],
        transfer: ShardTransfer,
        hook_states: Mapping[str, States],
        norms: GradNorms | None,
    ) -> None:
        self._plan, self._mesh, self._grads, self._transfer = plan, mesh, grads, transfer
        self.norms = norms
        self.hook_states, self.has_come = dict(hook_states), False
        self._grad_scale = 1.0  # factor of gradients before they are summed
        self._is_last, self.only_adds = False, False
        self.begun: set[str] = set()
        self._filling: defaultdict[str, _Filling] = defaultdict(_Filling)  # per unit
        self._paddings: dict[tuple[int, torch.dtype], Tensor] = {}
        # shards of the state's own gradients, which are cut once
        self._parts: dict[str, Tensor] = {}
        self._trained = [b for b in plan.flat_buffers if b.trainable]
        self._holds: dict[str, Holds] = {b.key: "nothing" for b in self._trained}
        self._gathers = any(unit.gathered_numel for unit in plan.units)
        self._here: frozenset[str] = frozenset()  # the gradients that live on the device
        # the tensors to which the results of reductions go
        self._results: dict[str, StoredTensor] = {}
        self._in_flight: deque[_Reduction] = deque()

    def begin(self, *, grad_scale: float, is_first: bool, is_last: bool) -> bool:
        """Called when a backward begins; returns whether it counts as the last one
        before the update.

        Args:
            grad_scale: factor of the gradients.
            is_first: whether `grads` holds nothing yet.
            is_last: whether this is the last backward before the update; only then are
                full gradients reduced.
        """
        self.has_come, self._grad_scale = False, grad_scale
        was_last, self._is_last = (
            self._is_last and not is_first,
            is_last or (self._is_last and not is_first),
        )
        for key, holds in self._holds.items():
            self._holds[key] = carried(holds, is_first=is_first, was_last=was_last)
        grads, device, shard = self._grads, self._transfer.device, self._mesh.shard
        # Now, because the script may replace gradients between two backwards.
        self._here = frozenset(
            key for key, home in grads.items() if isinstance(home, Tensor) and home.device == device
        )
        self._results = {
            b.key: grads[b.key]
            if b.flow.reduces_to == "full"
            else own_shard(grads[b.key], b, shard)
            for b in self._trained
        }
        sums = (
            b.flow.home("sum", is_last=False, is_here=b.key in self._here) for b in self._trained
        )
        may_add = not (self._gathers or is_first or self._is_last)
        self.only_adds = may_add and all(home.fills == "home" for home in sums)
        return self._is_last

    def abandon(self) -> list[Pending]:
        """Forgets everything after an error; returns the reductions that were under
        way.
        """
        pending = [
            sending.pending for reduction in self._in_flight for _, sending, _ in reduction.started
        ]
        self.begun.clear()
        self._filling.clear()
        self._in_flight.clear()
        return pending

    # --- collecting -------------------------------------------------------------------------------

    def add(
        self,
        unit: str,
        buffer: FlatParamPlan,
        grads: Mapping[str, Tensor],
        masks: Mapping[str, Tensor],
    ) -> None:
        """Adds gradients of parameters of one flat buffer, by name, to its flat
        gradient.

        Args:
            masks: the gradients that have one are multiplied by it (bools or numbers,
                broadcasts).
        """
        self.has_come, filling = True, self._filling[unit]
        flat_P, written = filling.flats[buffer.key], filling.written
        if masks.keys().isdisjoint(grads) and self._are_all(buffer, flat_P, grads, written):
            dense = [
                grad if grad.dim() == 1 else grad.view(-1)
                for grad in map(grads.__getitem__, buffer.layout.names)
            ]
            padding = self._padding(buffer, flat_P)
            torch.cat([*dense, padding] if padding is not None else dense, out=flat_P)
            written.update(grads)
            return
        parts = self._parts if flat_P is self._grads[buffer.key] else filling.parts
        if buffer.layout.names[0] not in parts:
            parts |= cut(flat_P, buffer)
        for name, grad in grads.items():
            self._write(parts[name], grad, masks.get(name), adds=name in written)
        written.update(grads)

    def add_to_sums(self, grads: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
        """As `add`, in a backward that only adds, for gradients of any flat buffers."""
        self.has_come, parts = True, self._parts
        for name, grad in grads.items():
            if name not in parts and (buffer := self._plan.param_units[name][1]).trainable:
                home: Any = self._grads[buffer.key]
                parts |= cut(home, buffer)
            if name in parts:
                self._write(parts[name], grad, masks.get(name), adds=True)

    def _write(self, target: Tensor, grad: Tensor, mask: Tensor | None, *, adds: bool) -> None:
        """Writes a gradient times its factor and mask to its part of a flat gradient,
        or adds it.
        """
        grad = grad if grad.layout == torch.strided else grad.to_dense()
        if mask is not None and grad.dtype == target.dtype and not adds:
            if mask.dtype == torch.bool and mask.shape == grad.shape:
                # A product in memory of its own would be written and read once more.
                # bytes are converted many times faster than bools
                target.copy_(mask.view(torch.uint8)).mul_(grad)
            else:
                torch.mul(grad, mask.to(grad.dtype), out=target)
            if self._grad_scale != 1:
                target.mul_(self._grad_scale)
            return
        if mask is not None:
            grad = grad * mask.to(grad.dtype)
        if grad.dtype != target.dtype:
            # so that the product is rounded once
            grad = grad.to(torch.promote_types(target.dtype, grad.dtype))
        if adds and target.dtype == grad.dtype == torch.float32:
            target.add_(grad, alpha=self._grad_scale)
        elif adds:
            # in fp32, as a kernel rounds its factor to the tensors' dtype; a CPU copies pieces in
            # its cache
            wide, size = (
                torch.promote_types(target.dtype, torch.float32),
                1 << (16 if target.is_cpu else 62),
            )
            for own, x in zip(
                torch.split(target.view(-1), size), torch.split(grad.reshape(-1), size), strict=True
            ):
                torch.add(own.to(wide), x.to(wide), alpha=self._grad_scale, out=own)
        elif self._grad_scale == 1:
            target.copy_(grad)
        else:  # scaling during the copy costs no extra read of the memory
            torch.mul(grad, self._grad_scale, out=target)

    def _are_all(
        self, buffer: FlatParamPlan, flat_P: Tensor, grads: Mapping[str, Tensor], written: set[str]
    ) -> bool:
        """Whether these are all gradients of a flat buffer, and one call can write
        them, without a cast or a factor.
        """
        names = buffer.layout.names
        if (
            self._grad_scale != 1
            or len(grads) < len(names)
            or torch.is_grad_enabled()
            or not written.isdisjoint(names)
        ):
            return False
        return all(
            x.layout == torch.strided and x.dtype == flat_P.dtype and x.is_contiguous()
            for x in grads.values()
        )

    def _padding(self, buffer: FlatParamPlan, flat_P: Tensor) -> Tensor | None:
        """The zeros at the end of a flat gradient, if there are any."""
        numel = flat_P.numel() - buffer.layout.numel
        if numel and (numel, flat_P.dtype) not in self._paddings:
            self._paddings[numel, flat_P.dtype] = flat_P.new_zeros(numel)
        return self._paddings[numel, flat_P.dtype] if numel else None

    def collect(self, unit: str, buffer: FlatParamPlan) -> None:
        """Begins the buffer in which an unreduced gradient of a unit is collected (P).

        See `GradHome`: the buffer is the state's own tensor, a copy of it if it lives
        in other memory, or scratch memory.
        """
        filling, key = self._filling[unit], buffer.key
        home = buffer.flow.home(self._holds[key], is_last=self._is_last, is_here=key in self._here)
        if home.fills == "scratch":
            dtype = torch_dtype(home.dtype)
            flat_P = self._transfer.scratch.take(buffer.padded_numel, dtype, self._transfer.device)
        else:
            flat_P = self._transfer.load(stream_name("grads", key), self._grads[key])
        filling.flats[key], filling.homes[key] = flat_P, home
        self.begun.add(key)
        if home.adds_to_sum:
            filling.written.update(buffer.layout.names)

    # --- reducing ---------------------------------------------------------------------------------

    def start(self, unit: UnitPlan, phase: Phase) -> None:
        """Starts the reductions of a unit, with zeros for gradients that were not
        written. *Collective:* every rank.
        """
        filling = self._filling.pop(unit.name, None) or _Filling()
        self.begun.difference_update(filling.flats)
        filling.parts.clear()  # views, with which the memory could not be given back
        started = []
        for buffer in unit.buffers:
            if buffer.trainable:
                flat_P = filling.flats[buffer.key]
                if not filling.written.issuperset(buffer.layout.names):
                    zero_gaps(flat_P, buffer, filling.written)
                home = filling.homes[buffer.key]
                self._holds[buffer.key] = home.leaves
                if not home.reduces:
                    if home.fills != "home":
                        self._transfer.write_back(
                            stream_name("grads", buffer.key),
                            self._grads[buffer.key],
                            flat_P,
                            adds=False,
                        )
                        self._give_back(filling.flats.pop(buffer.key), buffer.key)
                    continue
                if home.adds_late and isinstance(self._grads[buffer.key], Tensor):
                    self._transfer.prefetch(
                        stream_name("grads", buffer.key), self._results[buffer.key]
                    )
                started.append((buffer, self._reduce(flat_P, buffer, home, phase), home.adds_late))
        if started:
            self._in_flight.append(_Reduction(filling, started))

    def _reduce(
        self, flat_P: Tensor, buffer: FlatParamPlan, home: GradHome, phase: Phase
    ) -> Sending:
        """Starts to reduce a gradient over all ranks; the result is all of it (P) in
        stage 0, else this rank's shard (S).
        """
        send_dtype = torch_dtype(buffer.flow.send_dtype)
        flat_P = flat_P if flat_P.dtype == send_dtype else flat_P.to(send_dtype)
        reduced, states = (
            (flat_P, buffer, self._mesh, self._plan.comm_hooks),
            self.hook_states.get(buffer.key, {}),
        )
        label = label_of("reduce", buffer.key, phase)
        if buffer.flow.reduces_to == "full":
            return start_reduce_scatter_grads(
                *reduced, states=states, is_last=self._is_last, label=label
            )
        held: Any = self._results[buffer.key]
        if home.adds_held and buffer.key not in self._here:
            held = self._transfer.load(stream_name("grads", buffer.key), held)
        return start_reduce_scatter_grads(
            *reduced, states=states, is_last=self._is_last, label=label,
            out_S=held if home.is_in_place else None, accumulated_S=held if home.adds_held else None,
        )  # fmt: skip

    def end_oldest(self) -> None:
        """Waits for the oldest reduction, and writes its result to the memory where the
        gradient lives.
        """
        reads, started = self._in_flight.popleft()
        while started:  # emptied, so that no reference here keeps the full gradients' memory
            buffer, sending, is_late = started.pop(0)
            mean = sending.pending.wait()
            if buffer.key in self.hook_states:
                self.hook_states[buffer.key] = sending.state()
            kept = self._results[buffer.key]
            written = self._transfer.write_back(
                stream_name("grads", buffer.key), kept, mean, adds=is_late
            )
            if self.norms is not None and kept.numel() == buffer.shard_numel:
                home, device = self._grads[buffer.key], self._transfer.device
                self.norms.reduced(buffer.key, home, written, device, is_final=self._is_last)
            del written
        del sending, mean, kept
        for key, flat_P in reads.flats.items():
            self._give_back(flat_P, key)

    def _give_back(self, flat: Tensor, key: str) -> None:
        if flat is not self._grads[key]:
            self._transfer.scratch.give(flat)


def cut(flat_P: Tensor, buffer: FlatParamPlan) -> dict[str, Tensor]:
    """The parts of a flat gradient, by parameter; zeros the padding."""
    flat_P[buffer.layout.numel :].zero_()
    return unflatten(flat_P, buffer.layout)


def zero_gaps(flat_P: Tensor, buffer: FlatParamPlan, written: set[str]) -> None:
    """Zeros the padding, and the gradients of parameters that were not written."""
    for name, part in cut(flat_P, buffer).items():
        if name not in written:
            part.zero_()


@dataclass(slots=True)
class GradNorms:
    """The norms of reduced gradients, by flat buffer, measured when a reduction ends:
    then its result is in the caches.

    Attributes:
        measure: `LossRules.of_shard`.
        in_memory: whether gradients in memory are measured, too; allowed only where
            PyTorch counts every change to them.
    """

    measure: Callable[[Tensor], Tensor]
    in_memory: bool
    _found: dict[str, tuple[Tensor, StoredTensor, int]] = field(default_factory=dict)

    def reduced(
        self, key: str, home: StoredTensor, result: Tensor, device: torch.device, *, is_final: bool
    ) -> None:
        """A reduction has ended.

        Args:
            home: the gradient in the state.
            result: this rank's shard of it, in memory (S).
            device: of the number.
            is_final: whether no other reduction follows.
        """
        self._found.pop(key, None)
        if is_final and result.numel() and (self.in_memory or not isinstance(home, Tensor)):
            number = self.measure(result if result.dtype == home.dtype else result.to(home.dtype))
            # only reductions change a file
            version = home._version if isinstance(home, Tensor) else 0
            number = number if number.device == device else number.to(device)
            self._found[key] = number, home, version

    def of(self, key: str, home: StoredTensor) -> Tensor | None:
        """The norm of a gradient, if it was measured and, as far as PyTorch counts, has
        not changed since.
        """
        number, measured, version = self._found.get(key, (None, None, 0))
        is_same = measured is home and (not isinstance(home, Tensor) or home._version == version)
        return number if is_same else None
