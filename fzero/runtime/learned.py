"""`Learned`: the findings of the first calls of a step. They are the same for every
state, and hold none of its tensors.

A model may keep tensors from the first step: parameters as its forward got them, and
views of gathered memory. In a plain loop these follow the parameter. So `hold` makes
them `SharedTensor` from the second step on: while the model is bound, operators receive
the present values instead.

`UpdateNumbersCheck` is one of them: whether all ranks update with the same
hyper-parameters, by a checksum that travels with the loss.

`ScheduleCache` is another. A `UnitScheduler` is a function of its requests: the same
requests give the same events. Steps make the same requests, so the cache keeps the
answers in a tree. A node is a request, and its parent is the request before it. If the
requests of a step are in the tree, a `CachedScheduler` only walks it. Otherwise a
scheduler is made, which first gets all requests of the step so far. After `negotiate`
and `leave_order` the events depend on other ranks, too, so nothing after these is
remembered.
"""

from __future__ import annotations

import gc
import warnings
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Self, TypeAlias
from weakref import ref

from torch import Tensor

from fzero.model.held_tensors import SharedTensor, has_storage
from fzero.model.model_check import ModelCheck
from fzero.model.tensor_checks import ModuleGradsUnused, sharing_buffers
from fzero.plans.flat_params import FlatParamPlan
from fzero.plans.unit_orders import Event, Orders, Run
from fzero.plans.unit_scheduler import UnitScheduler
from fzero.runtime.gathers import LeakedView
from fzero.runtime.step_spec import StepSpec
from fzero.runtime.update import UpdateNumbers, Updater
from fzero.state import TrainState
from fzero.storage.promised import memory_of

if TYPE_CHECKING:
    from fzero.runtime.step_runtime import StepRuntime
    from fzero.storage.file_tensor import StoredTensor

EDITS = "gradients and optimizer state that the script has changed"
"""The subject of an error about `UpdateNumbersCheck.edits`."""


@dataclass(slots=True)
class UpdateNumbersCheck:
    """The hyper-parameters whose checksum this rank has sent, and those whose checksum
    it will send.

    Attributes:
        groups: the names of the parameter groups.
        optimizers: the optimizer of each group that the step was made with.
        now: the hyper-parameters of the next update, as known in the last backward;
            None if the host would have to wait for the device.
        last: the hyper-parameters of the last update.
        edits: what a script has written into copies of the state since the last update,
            as text by name; the ranks compare it.
        late_edits: the same of the last update, which the backward before it could not
            send.
        is_late: whether `last` differs from the hyper-parameters whose checksum the
            backward before that update sent.
        scale: the loss scale; None where the host would have to wait for the device.
    """

    groups: Sequence[str]
    optimizers: tuple[str, ...]
    now: UpdateNumbers | None = None
    last: UpdateNumbers | None = None
    is_late: bool = False
    edits: dict[str, str] = field(default_factory=dict)
    late_edits: dict[str, str] = field(default_factory=dict)
    scale: float | None = None

    def checksum(
        self,
        updater: Updater,
        state: TrainState[Tensor],
        hyper: UpdateNumbers | None = None,
        *,
        num_parts: int = 1,
    ) -> int:
        """A checksum of the numbers that this rank computes on its own.

        These are the hyper-parameters of the next update, if the host knows the number
        of updates so far. If the checksum before the last update did not include that
        update's hyper-parameters, they are added.
        """
        is_known = state.step.device.type == "cpu"
        self.now = updater.hyper(int(state.step)) if hyper is None and is_known else hyper
        scale = state.loss_scale.scale
        self.scale = float(scale) if hyper is None and scale.device.type == "cpu" else None
        sent = (
            self.now,
            self.last if self.is_late else None,
            num_parts,
            self.scale,
            self.edits,
            self.late_edits,
        )
        return zlib.crc32(repr(sent).encode())

    def used(self, hyper: UpdateNumbers) -> None:
        """Remembers the hyper-parameters that an update uses."""
        self.last, self.is_late = hyper, hyper != self.now
        self.late_edits, self.edits = self.edits, {}

    def named(self, num_parts: int = 1) -> dict[str, dict[str, str]]:
        """The numbers behind the last checksum, as text by subject and name."""

        def text(hyper: UpdateNumbers | None) -> dict[str, dict[str, str]]:
            if hyper is None:
                return {}
            return hyper._replace(optimizers=hyper.optimizers or self.optimizers).named(self.groups)

        late = {
            f"{subject}, used in the last update": values
            for subject, values in text(self.last).items()
        }
        loss = {"divided by": str(num_parts), "multiplied by": str(self.scale)}
        return text(self.now) | {"loss": loss, EDITS: self.late_edits | self.edits} | late


# --- the answers of a unit scheduler --------------------------------------------------------------

Answering: TypeAlias = Callable[..., tuple[Event, ...] | None]
"""A method of `UnitScheduler` that answers with events; None is no events."""


Request: TypeAlias = tuple[Answering, *tuple[Hashable, ...]]
"""The method and its arguments."""


MOST_ANSWERS = 1 << 15
"""The most answers that are kept, about 300 bytes each. Steps whose requests never
repeat would fill the memory.
"""


@dataclass(slots=True, eq=False)
class _Answer:
    """The answer to a request; the root of the tree has none."""

    request: Request | None
    before: _Answer | None
    events: tuple[Event, ...] = ()
    following: dict[Request, _Answer] = field(default_factory=dict)


@dataclass(slots=True)
class ScheduleCache:
    """The answers so far of the schedulers of one plan."""

    root: _Answer = field(default_factory=lambda: _Answer(None, None))
    num_answers: int = 0


class CachedScheduler:
    """A `UnitScheduler` for one accumulation window, which answers from the cache where
    it can.

    Args:
        make: makes a new scheduler for the same rules.
        cache: the cache of the plan.
    """

    def __init__(self, make: Callable[[], UnitScheduler], cache: ScheduleCache) -> None:
        self._make, self._cache = make, cache
        # the node of the last request; None once no answer is kept
        self._node: _Answer | None = cache.root
        self._scheduler: UnitScheduler | None = None

    @property
    def scheduler(self) -> UnitScheduler:
        """The scheduler itself, after all requests so far."""
        if self._scheduler is None:
            self._scheduler, requests, node = self._make(), list[Request](), self._node
            while node is not None and node.request is not None:
                requests.append(node.request)
                node = node.before
            for method, *arguments in reversed(requests):
                method(self._scheduler, *arguments)
        return self._scheduler

    def answer(self, request: Request) -> tuple[Event, ...]:
        """The events that answer a request."""
        found = self._node.following.get(request) if self._node is not None else None
        if found is None or self._scheduler is not None:
            return self._computed(request)
        self._node = found
        return found.events

    def _computed(self, request: Request) -> tuple[Event, ...]:
        node, cache, scheduler = self._node, self._cache, self.scheduler
        self._node = None  # stays, if the scheduler raises
        method, *arguments = request
        events = method(scheduler, *arguments) or ()
        if node is None or any(event.kind in ("negotiate", "leave_order") for event in events):
            return events
        found = node.following.get(request)
        if found is None and cache.num_answers < MOST_ANSWERS:
            found = node.following[request] = _Answer(request, node, events)
            cache.num_answers += 1
        self._node = found
        return events


# --- all findings ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Learned:
    """The findings of a step so far, on one rank.

    Attributes:
        orders: the orders of collectives, by run; None where every step negotiates
            them.
        schedule_cache: the answers of the unit scheduler.
        hyper: the hyper-parameters that this rank has compared with the others.
        model_check: the model's modules and values as the step knows them, for a check at
            each use of a state.
        num_passes: the number of forwards, backwards and graphs so far; the ranks
            compare it.
        moving_buffers: the names of module buffers that steps change, once the ranks
            have agreed on them.
        compared: the kinds of forwards whose parameters have been compared.
        module_grads: checks in the first step that the module's own parameters got no
            gradients.
        leaves: the parameters as the first forward got them, by name, until the next
            step.
        leaked: the gathered buffers of which the model held views in the last step.
        sharing: the names of buffers that share memory, which a step must not change.
        leaves_out_params: whether any forward has excluded trained parameters from its
            gradients (`no_grad_names`).
    """

    orders: Orders | None
    hyper: UpdateNumbersCheck
    model_check: ModelCheck
    num_passes: int = 0
    moving_buffers: frozenset[str] | None = None
    compared: set[str] = field(default_factory=set)
    module_grads: ModuleGradsUnused | None = None
    leaves: list[tuple[str, ref[Tensor]]] = field(default_factory=list)
    leaked: list[LeakedView] = field(default_factory=list)
    sharing: frozenset[str] = frozenset()
    leaves_out_params: bool = False
    schedule_cache: ScheduleCache = field(default_factory=ScheduleCache)

    @classmethod
    def nothing(cls, spec: StepSpec) -> Self:
        """Before the first call of a step."""
        orders = Orders() if spec.schedule == "learned" else None
        hyper = UpdateNumbersCheck(spec.group_names, tuple(map(repr, spec.optimizers)))
        return cls(orders, hyper, ModelCheck(spec.model), sharing=sharing_buffers(spec.model))

    @property
    def schedule(self) -> tuple[Event, ...] | None:
        """The events of a micro-step in order, once it is learned."""
        if self.orders is None:
            return None
        runs: list[list[Run]] = [
            [("forward", "train")],
            [("backward",), ("backward", 0, "train", 0)],
        ]
        known = self.orders.learned
        halves = [next((known[run] for run in kinds if run in known), None) for kinds in runs]
        return None if None in halves else tuple(chain(*filter(None, halves)))

    def with_own_orders(self) -> Self:
        """A copy that learns its own orders from now on."""
        return replace(self, orders=None if self.orders is None else self.orders.copy())

    def negotiating(self) -> Self:
        """The same, without orders: every run is negotiated, and none is learned."""
        return replace(self, orders=None)


# --- tensors that a model keeps from the first step -----------------------------------------------


def hold(run: StepRuntime, params: Mapping[str, StoredTensor]) -> None:
    """Finds what the model has kept since the last step. Warns of views of gathered
    memory that are kept later.

    Views of the state's own flat buffers, `params`, follow it automatically.
    """
    learned, own = run.learned, dict(run.spec.model.named_parameters(remove_duplicate=False))
    homes = {memory_of(flat) for flat in params.values() if isinstance(flat, Tensor)}
    kept = {
        each.memory.cdata: each.key
        for each in learned.leaked
        if each.is_held and each.memory.cdata not in homes
    }
    if learned.leaves:
        found = [
            SharedTensor(leaf, ref(own[name]), name, False)
            for name, leaf in learned.leaves
            if leaf() is not None
        ]
        for x in gc.get_objects() if kept else ():
            if (
                type(x) is Tensor
                and has_storage(x)
                and (key := kept.get(x.untyped_storage()._cdata))
            ):
                found += _view_of(x, run.plan.flats[key][1], own)
        run.binding.hold(found)
        learned.leaves = []
    elif kept:
        warnings.warn(
            f"parameters of {min(kept.values())!r}: a tensor that a forward of an earlier step "
            f"made without a copy (weight.data, weight.detach()) is still held, and keeps the "
            f"values of that step, because stage 3 gathers others; if the model computes with it, "
            f"make it anew in each forward; if not, hold a clone, which takes less memory",
            stacklevel=4,
        )


def _view_of(x: Tensor, buffer: FlatParamPlan, own: Mapping[str, Tensor]) -> Iterator[SharedTensor]:
    """The `SharedTensor` of a view of a gathered flat buffer: with the parameter that
    has all of its elements.
    """
    first = int(x.storage_offset())
    last = first + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    for name in buffer.layout.names:
        start, stop = buffer.layout.bounds(name)
        if start <= first and last < stop and x.dtype == own[name].dtype:
            yield SharedTensor(
                ref(x),
                ref(own[name]),
                name,
                False,
                (*x.shape,),
                x.stride(),
                first - start,
                x.requires_grad,
            )
