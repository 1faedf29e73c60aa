"""Forwards and backwards of any PyTorch model, its parameters gathered and its gradients reduced unit by unit.

No graph is captured. The model runs as it is, `bound` to tensors that this file hands out:

1. The first access to a parameter of a unit *enters* the unit: its flat buffers are gathered (stage 3) and cut into
   parameters by one split. Entering another unit drops them; the next unit's gather has started by then.
2. Autograd must not keep a gathered buffer alive until the backward. So a tensor that it saves and that is a view of
   one is saved as a recipe (buffer, offset, size, stride), and unpacking the recipe enters the unit again.
3. Each parameter is the output of a `_Leaf`, whose backward writes the gradient into the unit's flat gradient at once,
   and all leaves of a unit hang on one `_Root`, whose backward runs when the last gradient of the unit has come: the
   unit is complete and its reduce-scatter starts. What is in flight is bounded (`Plan.max_reducing`), so that stage 2
   never holds all full gradients.

The collectives follow the `Event`s of `fzero.plans.unit_scheduler`. All stages run this same code: the specs decide whether a
gather moves anything and whether a full gradient is dropped, so that all stages do the same arithmetic.

Shape letters: P padded elements of a flat buffer = F·S, S elements of a shard, F shards (on one axis as many as ranks).
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks

from fzero.common.profiler_ranges import is_recording, profiler_range
from fzero.comms import collectives
from fzero.comms.comm_hooks import Sending
from fzero.comms.mesh import RankMesh, States
from fzero.comms.pending import Pending, abandon, settle
from fzero.comms.records import Label, Phase
from fzero.plans.plan import FlatParamPlan, Plan, UnitPlan
from fzero.plans.unit_scheduler import TURN, Event, Orders, Run, ScheduleError, early, is_whole
from fzero.runtime.module_binding import beneath_modes
from fzero.runtime.own_params import address, bits_of, flag_changed, has_hook, late, partial_grad, was_changed
from fzero.storage.file_tensor import part_of
from fzero.storage.shard_io import Leaf, ShardTransfer
from sharding import Replicated, Sharded
from sharding.views import torch_dtype, unflatten


class _SavedView(NamedTuple):
    """How to view a tensor again that autograd saved, once its flat buffer is gathered."""

    unit: UnitPlan
    key: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Root(torch.autograd.Function):
    """One stay in a unit; its backward runs when every gradient of that stay has been written."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, work: ForwardBackward, unit: str) -> Tensor:
        ctx.work, ctx.unit, ctx.index = work, unit, len(work._stays) - 1
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        ctx.work._stay_ended(ctx.unit)
        return ctx.work._anchor.detach(), None, None


class _Leaf(torch.autograd.Function):
    """A parameter for the model: a view of a flat buffer, whose gradient goes straight into a flat gradient.

    Without a name the gradient is dropped, and the leaf is there so that the graph tells which pass it is of.
    """

    @staticmethod
    def forward(ctx: Any, root: Tensor, view: Tensor, work: ForwardBackward, name: str) -> Tensor:
        ctx.work, ctx.name = work, name
        return view

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.name:
            ctx.work._write_grad(ctx.name, grads[0])
        return ctx.work._anchor.detach(), None, None, None


AnyLeaf = TypeVar("AnyLeaf", Tensor, Leaf)
# To the model a parameter is a leaf: `module.tied = parameter` asks whether its grad_fn is true.
_Leaf._backward_cls.__bool__ = lambda node: False  # type: ignore[attr-defined]
_root: Callable[..., Tensor] = _Root.apply  # type: ignore[assignment]
_leaf: Callable[..., Tensor] = _Leaf.apply  # type: ignore[assignment]


@dataclass(slots=True)
class _Grads:
    """The flat gradient of one unit while it fills: its buffers (P each), and which parameters have been written."""

    flats: dict[str, Tensor] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)


class _Given(NamedTuple):
    """A parameter as the model was given it, in a forward that is looked after."""

    unit: str
    name: str
    leaf: Tensor
    view: Tensor
    address: int
    bits: Tensor
    requires_grad: bool

    @property
    def is_changed(self) -> bool:
        """Whether it has other values, or the model has given it other memory."""
        same = self.leaf.data_ptr() == self.address and torch.equal(bits_of(self.view), self.bits)
        return not same


@dataclass(frozen=True, slots=True)
class _OfOneStay:
    """A hook on a parameter as the model got it in one of several stays in its unit: it must not be differentiated by."""

    work: ForwardBackward
    name: str

    def __call__(self, grad: Tensor) -> None:
        """Raises ValueError inside the forward, where the gradient is one that the model has asked for."""
        if self.work._in_forward:
            raise partial_grad(self.name)


class _Gather(NamedTuple):
    """The gather of one flat buffer under way, with the shard that it reads, where it reads one."""

    buffer: FlatParamPlan
    pending: Pending
    shard: Tensor | None = None


class _Reduction(NamedTuple):
    """A unit's reduce-scatters under way, with the full gradients that they read."""

    numel: int
    reads: _Grads
    started: list[tuple[FlatParamPlan, Sending, bool]]


class ForwardBackward:
    """Forwards and backwards between two updates on one rank: what is gathered, what has come, which collective is next.

    The two halves: run the model, `bound` to `fetch`, inside `forward(...)`; then `backward(loss, row)`, with the model
    bound again. Any number of forwards may come before a backward and any number of backwards after them. Between the
    halves nothing is on its way and one unit stays gathered; a forward that no backward follows leaves nothing behind.
    After an error in a half the pass is over, and so it is after `close`: then a graph that it made is refused.

    Args:
        plan: the units and their specs.
        mesh: the ranks.
        params: this rank's flat buffers by key, wherever they live.
        grads: where the mean gradients go, by key: whole (P) in stages 0 and 1, this rank's shards (S) otherwise. None
            is forwards only.
        orders: the events to follow, by what runs; what is not there is negotiated, and learned. None negotiates all.
        stage: what brings shards from where they live, and takes those of gradients there.
        hooks: what the comm hooks of reductions remember, by flat buffer and axis; what they do afterwards stands in their place.

    Attributes:
        is_over: whether it was closed, or an error ended it.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: RankMesh,
        params: Mapping[str, Leaf],
        grads: Mapping[str, Leaf] | None,
        orders: Orders | None,
        stage: ShardTransfer,
        *,
        hook_states: Mapping[str, States] = {},
    ) -> None:
        self.hook_states = dict(hook_states)
        self.plan, self.mesh, self.params = plan, mesh, params
        self.stage, self.scratch, self._device = stage, stage.scratch, stage.device
        self.trains, self.grads = grads is not None, grads or {}
        self.executed: list[Event] = []
        self.schedule: Sequence[Event] | None = None  # of what runs, after what has run
        self._orders, self._begun = orders, 0
        self._run: Run = ()
        self._since = 0  # where the events of the first forward since the last backward begin
        self._is_open, self.is_over, self._is_passed = False, False, False
        self._stays: list[Counter[str]] = []  # of each forward: how often it entered each unit
        self._names: list[str] = []  # of each forward
        self._num_forwards, self._num_backwards = 0, 0  # since the last backward; since the last forward, others' too
        self._is_kept = False  # whether a graph may be gone through again
        self.is_first, self.is_last = True, True
        self._units = {unit.name: unit for unit in plan.units}
        self._whole = [b for b in plan.flat_buffers if isinstance(b.row.params, Replicated)]
        self._homes = {name: (unit, b) for unit in plan.units for b in unit.buffers for name in b.layout.names}
        # On the parameters' device, so that autograd runs every `_Root` and `_Leaf` on one thread.
        self._anchor = torch.empty(0, device=self._device, requires_grad=True)
        self._stills: list[frozenset[str]] = []  # of each forward: the parameters that get no gradient in it
        self._num_modes = 0  # dispatch modes around what runs, which are the caller's
        self._in_forward, self._runs_again = True, False
        self._present: str | None = None
        self._leaves: dict[str, Tensor] = {}
        self._recorded: set[str] = set()  # units whose present stay autograd knows
        self._gathering: dict[str, list[_Gather]] = {}
        self._live: dict[str, dict[str, Tensor]] = {}  # unit → key → gathered buffer (P)
        self._by_storage: dict[int, tuple[UnitPlan, str, torch.dtype]] = {}
        self._versions = {key: flat._version for key, flat in params.items() if isinstance(flat, Tensor)}
        self._entered: set[str] = set()
        self._open_stays: Counter[str] = Counter()
        self._ready: set[str] = set()
        self._filling: defaultdict[str, _Grads] = defaultdict(_Grads)
        self._in_flight: deque[_Reduction] = deque()
        self._rows: Pending | None = None
        self._share = 1.0  # by which gradients are multiplied before they are added up
        self._held: set[str] = set()  # keys of whole gradients that hold something, to which the next is added
        self._reduced: set[str] = set()  # keys of gradients that have been reduced in this backward, or for good
        self._is_done = False  # whether a backward was the last one
        self._has_come = False  # whether this backward has brought a gradient
        self._given: list[_Given] | None = None  # None where changes through `.data` are not looked for
        self._stayed: dict[str, list[tuple[str, ref[Tensor]]]] = {}  # by unit: what its first stay in this forward gave
        self._stay: AbstractContextManager[object] | None = None  # the range of the unit that the forward is in

    # --- the two halves ----------------------------------------------------------------------------------------

    @contextmanager
    def forward(
        self, run: str, *, saves: bool = True, still: frozenset[str] = frozenset(), compares: bool = False
    ) -> Iterator[None]:
        """Inside, the model runs, `bound` to `fetch`. *Collective* in stage 3: takes part in what only other ranks need.

        Args:
            run: names its order of collectives.
            saves: whether autograd saves recipes of gathered buffers. False keeps alive what it saves (for transforms of
                torch.func, which allow no hooks).
            still: trained parameters that require no gradients in this forward.
            compares: whether parameters are compared with what they were given as, which finds changes that PyTorch does
                not count (through `.data`).

        Raises:
            ValueError: the forward has changed a parameter.
        """
        with self._running(("forward", run)):  # which gathers the same, whatever requires gradients
            self._release_all_but("")
            self._in_forward = True
            self._stays.append(Counter())
            self._stills.append(still)
            self._names.append(run)
            self._since = self._since if self._num_forwards else self._begun
            self._num_forwards, self._num_backwards = self._num_forwards + 1, 0
            self._given = [] if compares else None
            self._stayed.clear()
            with self.saving() if saves else nullcontext():
                try:
                    yield
                except RuntimeError as error:
                    if f" of {_Leaf.__name__}" in str(error):  # what autograd says of a change in place
                        raise self._was_changed("of the model") from error
                    if _CHANGES_FLAG in str(error):
                        raise flag_changed(None) from error
                    if _HOOKS_SAVED in str(error):
                        raise ValueError(TRANSFORMED) from error
                    raise
            self._end_stay()
            self._check_whole()
            self._compare(None)
            self._advance_to(TURN)
            self._drop_gathers()
            self._in_forward = False

    def backward(
        self,
        loss: Tensor,
        row: Tensor,
        *,
        share: float = 1.0,
        is_first: bool = True,
        is_last: bool = True,
        keeps: bool = False,
        check: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Adds the gradients of a loss to what `grads` holds. *Collective:* every rank; in stage 3 gathers again.

        Args:
            loss: of one or more of the forwards, a scalar.
            row: a few numbers that every rank tells the others while the backward runs.
            share: factor of the gradients.
            is_first: whether `grads` holds nothing yet.
            is_last: before the last one, gradients that stay whole are not reduced.
            keeps: whether the graph stays, to be gone through again.
            check: looks at the rows before anything else is sent, where the order of the rest may differ between ranks.

        Returns:
            Every rank's row, in rank order.

        Raises:
            ValueError: the loss does not depend on a trained parameter through a forward of this pass.
        """
        if not loss.requires_grad:
            raise ValueError(UNRELATED)
        run = self._expect(loss)
        with self._running(run):
            self._has_come = False
            self._share, self.is_first = share, is_first
            self.is_last = is_last or (self._is_done and not is_first)
            if is_first or not self._is_done:
                self._reduced.clear()
            self._held = set() if is_first else {b.key for b in self.plan.flat_buffers if b.trainable}
            self._is_kept |= keeps
            self._num_forwards, self._num_backwards = 0, self._num_backwards + 1
            self._rows = collectives.start_stack(row, self.mesh.world, label=Label("loss_stats", phase="turn"))
            told = None
            if check is not None:
                told, self._rows = self._rows.wait(), None
                check(told)
            torch.autograd.backward(loss, retain_graph=keeps)
            if not self._has_come:  # an update would decay what it has nothing to say about
                raise ValueError(UNRELATED)
            self._finish()
            self._is_done = self.is_last
            if self._rows is not None:
                told, self._rows = self._rows.wait(), None
        assert told is not None
        return told

    @contextmanager
    def passing(self, loss: Tensor, *, keeps: bool = False) -> Iterator[None]:
        """Inside, a backward of another pass goes through forwards of this one; what was collected here stays as it is.

        *Collective* in stage 3: gathers again.
        """
        found = self._reached(loss)
        with self._running((*self._named("through", found), *self._stills_in(found))):
            self._is_passed, self._is_kept = True, self._is_kept or keeps
            self._num_backwards += 1  # what the forward left gathered is not there the next time
            try:
                yield
            finally:
                self._is_passed = False
            self._leaves.clear()
            self._take_part()
            self._let_go()

    @contextmanager
    def _running(self, run: Run) -> Iterator[None]:
        """Follows the order of what runs, or learns it; after an error the pass is over."""
        if self.is_over:
            raise RuntimeError(_OVER)
        settle()
        known = None if self._orders is None else self._orders.learned.get(run)
        self._run, self._begun, self._is_open = run, len(self.executed), True
        self._num_modes = _len_torch_dispatch_stack()
        self.schedule = None if known is None else (*self.executed, *known)
        try:
            yield
        except BaseException:
            self._abandon()
            raise
        self._is_open = False
        if self._orders is not None and known is None:
            events = early(self.executed[self._begun :], partial(may_start_early, self.plan))
            units = [unit.name for unit in self.plan.units if unit.gathered_numel]
            begun = self._begun if run[0] != "forward" else len(self.executed)
            since = self._since if run[0] != "forward" else self._begun
            forward, backward = self.executed[since:begun], self.executed[begun:]
            if self._orders.learn(run, events, is_whole=is_whole(forward, backward, units, differ=self._orders.differ)):
                self._warn()

    def _abandon(self) -> None:
        """Lets go of what is gathered, of what is collected and of collectives under way."""
        self._end_stay()
        gathers = [gather.pending for started in self._gathering.values() for gather in started]
        reductions = [sending.pending for reduction in self._in_flight for _, sending, _ in reduction.started]
        abandon(gathers + reductions + ([self._rows] if self._rows else []))
        for held in (self._leaves, self._live, self._filling, self._by_storage, self._gathering, self._in_flight):
            held.clear()  # type: ignore[attr-defined]
        self.close()

    def close(self) -> None:
        """Lets go of what is gathered; a graph that was made here is refused from now on."""
        self._is_open, self.is_over = False, True
        self._release_all_but("")
        self.stage.abandon()

    def _expect(self, loss: Tensor) -> Run:
        """Counts the stays that a backward of the loss will end, and names its order of collectives.

        In the usual case they are those of the last forward; else the graph tells.
        """
        last = len(self._stays) - 1
        found = {last: self._stays[last]} if self._num_forwards == 1 and not self._is_kept else self._reached(loss)
        self._open_stays = sum(found.values(), Counter())
        return (*self._named("backward", found), *self._stills_in(found))

    def _named(self, kind: str, forwards: Iterable[int]) -> Run:
        """Names what goes back through some forwards."""
        last = len(self._stays) - 1
        of_each: Iterable[tuple[str | int, ...]] = ((self._names[index], last - index) for index in sorted(forwards))
        return (kind, self._num_backwards, *chain.from_iterable(of_each))

    def _stills_in(self, forwards: Iterable[int]) -> list[frozenset[str]]:
        """What each of some forwards holds still; nothing where none does."""
        found = [self._stills[index] for index in sorted(forwards) if index >= 0]
        return found if any(found) else []

    @property
    def still(self) -> frozenset[str]:
        """The parameters that got no gradient in any forward, because they required none."""
        return frozenset.intersection(*self._stills) if self._stills else frozenset()

    @property
    def still_buffers(self) -> frozenset[str]:
        """The keys of the trained flat buffers that hold nothing else, so that an update leaves them as they are."""
        still = self.still
        buffers = self.plan.flat_buffers if still else ()
        return frozenset(b.key for b in buffers if b.trainable and still.issuperset(b.layout.names))

    def _reached(self, loss: Tensor) -> dict[int, Counter[str]]:
        """The stays of each forward of which the loss is."""
        found: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for node in _roots_of(loss):
            if node.work is self:
                found[node.index][node.unit] += 1
        return found

    def _check_runs(self) -> None:
        """Raises where autograd comes at a moment of its own, when other ranks do not take part."""
        if not self._is_open:
            raise RuntimeError(_OVER if self.is_over else _BETWEEN)

    # --- parameters --------------------------------------------------------------------------------------------

    def fetch(self, name: str) -> Tensor:
        """The parameter `name` as the model sees it. *Collective* in stage 3 when this enters a unit."""
        if name not in self._homes:
            raise late("parameter", name)
        unit = self._homes[name][0].name
        if unit != self._present:
            self._enter(unit)
        elif not self._in_forward:
            with beneath_modes(self._num_modes):
                self._gathered(self._units[unit])  # as `_unpack` does: the next gather may start now
        if self._in_forward and not self._runs_again and unit not in self._recorded and torch.is_grad_enabled():
            self._recorded.add(unit)
            self._stays[-1][unit] += 1
        return self._leaves[name]

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside, a part of the model runs again for its backward: what it is given here gets no gradient."""
        before, self._runs_again = self._runs_again, True
        try:
            yield
        finally:
            self._runs_again = before

    def _enter(self, unit_name: str) -> None:
        """Makes `unit_name` the present unit and its parameters the leaves."""
        unit = self._units[unit_name]
        self._end_stay()
        if self._given is not None and self._present is not None:
            self._compare(self._units[self._present])
        if self._in_forward and is_recording():
            self._stay = profiler_range("unit", unit_name)
            self._stay.__enter__()
        self._entered.add(unit_name)
        # Also inside the model's own no_grad, inference mode, torch.func transform or dispatch mode (selective activation
        # checkpointing): what is entered there may be used outside it later.
        with (
            torch.inference_mode(False), torch.enable_grad(), temporarily_clear_interpreter_stack(),
            beneath_modes(self._num_modes),
        ):  # fmt: skip
            flats = self._gathered(unit)
            self._present = unit_name
            self._recorded.discard(unit_name)
            root = _root(self._anchor, self, unit_name) if self.trains else None
            # A backward through a gathered unit has to gather it again, so its graph must tell which pass it is of.
            still = self._stills[-1] if self.trains else frozenset()
            is_marked = bool(still) and unit.gathered_numel > 0 and still.issuperset(_trained_in(unit))
            for buffer in unit.buffers:
                flat: Any = flats.get(buffer.key, self.params[buffer.key])
                views = own = unflatten(flat, buffer.layout)
                if buffer.trainable and root is not None:
                    views = {
                        name: _leaf(root, view, self, "" if name in still else name)
                        if name not in still or is_marked
                        else view
                        for name, view in views.items()
                    }
                if self._given is not None and self._in_forward:
                    self._given += [
                        _Given(unit_name, n, views[n], view, view.data_ptr(), bits_of(view), views[n].requires_grad)
                        for n, view in own.items()
                    ]
                for name, view in views.items():
                    view._is_param, view.fzero_name = True, name  # type: ignore[attr-defined]  # isinstance(view, nn.Parameter)
                self._leaves.update(views)
            if root is not None and self._in_forward:
                self._refuse_parts(unit)

    def _refuse_parts(self, unit: UnitPlan) -> None:
        """From the second stay in a unit on, no gradient by one of its parameters is taken inside the forward."""
        leaves = {name: leaf for name in _trained_in(unit) if (leaf := self._leaves[name]).requires_grad}
        if self._stays[-1][unit.name]:
            held = (
                (name, earlier()) for name, earlier in self._stayed.pop(unit.name, ())
            )  # by the model, of the first stay
            still_there = ((name, leaf) for name, leaf in held if leaf is not None)
            for name, leaf in (*leaves.items(), *still_there):
                leaf.register_hook(_OfOneStay(self, name))  # type: ignore[no-untyped-call]
        else:
            self._stayed[unit.name] = [(name, ref(leaf)) for name, leaf in leaves.items()]

    def _end_stay(self) -> None:
        """Ends the range of the unit that the forward was in."""
        stay, self._stay = self._stay, None
        if stay is not None:
            stay.__exit__(None, None, None)

    def _release_all_but(self, unit: str) -> None:
        if self._present != unit:
            self._leaves.clear()
            self._present = None
        for name in [name for name in self._live if name != unit]:
            for key, flat in self._live.pop(name).items():
                self._by_storage.pop(address(flat), None)
                self._check_unchanged(key, flat)
                self._give_back(flat, key)

    def _check_unchanged(self, key: str, flat: Tensor) -> None:
        if flat._version != self._versions[key]:
            raise self._was_changed(f"of {key!r}")

    def _check_whole(self) -> None:
        """Raises where a parameter that this rank holds whole was changed in place."""
        for buffer in self._whole:
            flat: Any = self.params[buffer.key]
            self._check_unchanged(buffer.key, flat)

    def _compare(self, unit: UnitPlan | None) -> None:
        """Raises where a parameter of a unit that the forward leaves was changed; None is all, at the end of the forward."""
        if not self._given:
            return
        name = "" if unit is None else unit.name
        for given in self._given:
            if given.leaf.requires_grad is not given.requires_grad:
                raise flag_changed(given.name)
            if any(not isinstance(hook, _OfOneStay) for hook in (given.leaf._backward_hooks or {}).values()):
                raise has_hook(given.name)
        if unit is None or unit.gathered_numel:
            if any(given.is_changed for given in self._given if unit is None or given.unit == name):
                raise self._was_changed("of the model")
            self._given = None if unit is None else [given for given in self._given if given.unit != name]

    def _was_changed(self, where: str) -> ValueError:
        """What is raised where a forward has changed a parameter."""
        names = [given.name for given in self._given or () if given.is_changed]
        self._given = None
        return was_changed(names[0] if names else None, where)

    def _give_back(self, flat: Tensor, key: str) -> None:
        if flat is not self.params[key] and flat is not self.grads.get(key):
            self.scratch.give(flat)

    def _gathered(self, unit: UnitPlan) -> dict[str, Tensor]:
        """The unit's gathered buffers, alive; the others are released, and the next gather is started."""
        self._release_all_but(unit.name)
        if unit.gathered_numel and unit.name not in self._live:
            if unit.name not in self._gathering:
                self._advance_to(Event("gather", unit.name))
            flats = self._end_gathers(unit.name)
            self._live[unit.name] = flats
            self._versions |= {key: flat._version for key, flat in flats.items()}
            for key, flat in flats.items():
                if flat.numel():  # what is empty is everywhere and nowhere
                    self._by_storage[address(flat)] = (unit, key, flat.dtype)
        if self.schedule is not None and not self._gathering and len(self.executed) < len(self.schedule):
            event = self.schedule[len(self.executed)]
            if event.kind == "gather" and may_start_early(self.plan, unit.name, event.unit):
                self._issue(event)
        return self._live.get(unit.name, {})

    # --- tensors that autograd saves ---------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Saves views of gathered buffers as recipes, inside this context."""
        if not any(unit.gathered_numel for unit in self.plan.units):
            yield
            return
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int] | _SavedView:
        if tensor.layout == torch.strided:
            unit, key, dtype = self._by_storage.get(address(tensor), (None, "", None))
            if unit is not None and dtype == tensor.dtype:
                return _SavedView(unit, key, int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride())
        return tensor.detach(), tensor._version

    def _unpack(self, packed: tuple[Tensor, int] | _SavedView) -> Tensor:
        if isinstance(packed, _SavedView):
            self._check_runs()
            with beneath_modes(self._num_modes):
                flat = self._gathered(packed.unit)[packed.key]
            return flat.as_strided(packed.size, packed.stride, packed.offset)
        tensor, version = packed
        if tensor._version != version:  # autograd leaves this check to whoever hooks its saved tensors
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that the backward needs was changed in place after it was saved "
                f"(version {version}, now {tensor._version}); make the change out of place, or on a clone"
            )
        return tensor

    # --- gradients ---------------------------------------------------------------------------------------------

    def _write_grad(self, name: str, grad: Tensor) -> None:
        self._check_runs()
        if self._in_forward:
            raise RuntimeError(INSIDE)
        if self._is_passed:
            return
        self._has_come = True
        unit, buffer = self._homes[name]
        grad = grad.to_dense() if grad.layout != torch.strided else grad
        filling = self._filling[unit.name]
        start, stop = buffer.layout.bounds(name)
        target = self._flat_grad(filling, buffer)[start:stop].view(grad.shape)
        grad = grad.to(torch.promote_types(target.dtype, grad.dtype))  # so that the product is rounded once
        if name in filling.written:  # in fp32, for the kernel rounds its factor to the tensors' dtype
            wide = torch.promote_types(target.dtype, torch.float32)
            torch.add(target.to(wide), grad.to(wide), alpha=self._share, out=target)
        elif self._share == 1:
            target.copy_(grad)
        else:  # the share of the mean: dividing here costs no pass over memory of its own
            torch.mul(grad, self._share, out=target)
        filling.written.add(name)

    def _flat_grad(self, filling: _Grads, buffer: FlatParamPlan) -> Tensor:
        """Where the unreduced gradient is collected (P).

        Where it will stay, if all of it stays on this rank and either is sent as it is kept or waits for more micro-steps; where
        it stays elsewhere, it is brought from there.
        """
        if buffer.key not in filling.flats:
            store = self.grads[buffer.key]
            stays = self._is_whole(buffer) and buffer.key not in self._reduced
            reduce_dtype = self._reduce_dtype(buffer)
            stays &= store.dtype == reduce_dtype or not (self.is_first and self.is_last)
            is_held = stays and buffer.key in self._held
            if is_held or (stays and self._is_here(buffer)):
                filling.flats[buffer.key] = self.stage.bring(f"{buffer.key}/grads", store)
            else:
                dtype = store.dtype if stays else reduce_dtype
                filling.flats[buffer.key] = self.scratch.take(buffer.padded_numel, dtype, self._device)
            if is_held:
                filling.written.update(buffer.layout.names)
        return filling.flats[buffer.key]

    def _is_here(self, buffer: FlatParamPlan) -> bool:
        """Whether the gradient is kept where it is made."""
        store = self.grads[buffer.key]
        return isinstance(store, Tensor) and store.device == self._device

    def _stay_ended(self, unit: str) -> None:
        if self._is_passed:
            return
        self._open_stays[unit] -= 1
        if self._open_stays[unit] <= 0:
            self._ready.add(unit)
            self._reduce_ready(unit)

    def _reduce_ready(self, unit: str) -> None:
        if self.schedule is None:
            self._advance_to(Event("reduce", unit))
            return
        while len(self.executed) < len(self.schedule):
            event = self.schedule[len(self.executed)]
            if event.kind != "reduce" or not (event.unit in self._ready or event.unit not in self._entered):
                return
            self._issue(event)

    # --- the order of collectives ------------------------------------------------------------------------------

    def _advance_to(self, wanted: Event) -> None:
        """Issues the events that come before `wanted`, and `wanted` itself."""
        if self.schedule is None:
            self._negotiate(wanted)
            return
        for event in self.schedule[len(self.executed) :]:
            if event.kind == "turn" and wanted.kind == "gather" and self._in_forward:
                break
            if event.kind == "reduce" and event != wanted and event.unit in self._entered - self._ready:
                break
            self._issue(event)
            if event == wanted:
                return
        if self._orders is not None and self._all_depart():
            if not (wanted.kind == "gather" and wanted.unit in self._gathering):
                self._negotiate(wanted)
            return
        raise ScheduleError(
            f"rank {self.mesh.world.rank} needs to {wanted} where the schedule of collectives has no place for it: the model "
            f"runs its units in another order than in the first step (a branch on data, a router, layer drop); pass "
            f"schedule='negotiated', or name a module that holds the whole branch in units="
        )

    def _all_depart(self) -> bool:
        """Whether all ranks need what the schedule has no place for; then it is negotiated from here on.

        They have come to different places of it: a rank stops before the reduction of a unit that it uses.
        """
        world, schedule = self.mesh.world, self.schedule
        places = collectives.aside(len(self.executed), world, seconds=PATIENCE)
        if places is None or schedule is None or self._orders is None:
            return False
        for event in schedule[len(self.executed) : max(places)]:
            self._issue(event)
        self.schedule = None
        if self._orders.give_up(self._run):
            self._warn()
        return True

    def _warn(self) -> None:
        """Logs on rank 0, once for what runs, that its order is negotiated."""
        if self.mesh.world.rank == 0 and self.mesh.world.size > 1:
            warnings.warn(
                f"the {self._run[0]} runs its units in an order that differs from step to step (layer drop, a branch), so all "
                f"ranks negotiate it from now on, which is slower; name a module that holds the whole branch in units=, or "
                f"pass schedule='negotiated' to do so from the start",
                stacklevel=2,
            )

    def _negotiate(self, wanted: Event | None) -> None:
        """Agrees with all ranks on each next event until `wanted` has been served; None takes part to the end."""
        if self.mesh.world.size == 1:
            if wanted is not None:
                self._issue(wanted)
            return
        names = [unit.name for unit in self.plan.units]
        while True:
            code = (
                [-1, -1]
                if wanted is None
                else [_KINDS.index(wanted.kind), names.index(wanted.unit) if wanted.unit else -1]
            )
            row = torch.tensor(code, device=self._device)
            rows = collectives.stack(row, self.mesh.world, label=Label("negotiate", phase=self._phase)).tolist()
            served = _serve(rows, in_forward=self._in_forward)
            if served is None:
                return
            if self._in_forward and self._orders is not None:
                self._orders.differ |= any(row != served for row in rows)
            event = Event(_KINDS[served[0]], names[served[1]] if served[1] >= 0 else "")
            self._issue(event)  # a gradient that this rank has not finished is sent as it is, and the rest later
            if event == wanted:
                return

    @property
    def _phase(self) -> Phase:
        return "forward" if self._in_forward else "backward"

    def _issue(self, event: Event) -> None:
        self.executed.append(event)
        if event.kind == "turn":
            return
        unit = self._units[event.unit]
        with profiler_range(_verb(event, unit), event.unit):
            if event.kind == "gather":
                self._start_gather(unit)
            else:
                self._start_reduce(unit)

    def _start_gather(self, unit: UnitPlan) -> None:
        # A gather that nobody here waited for served other ranks only: its result is dropped.
        self._drop_gathers()
        self._gathering[unit.name] = [
            self._gather(buffer) for buffer in unit.buffers if isinstance(buffer.row.params, Sharded)
        ]
        if self.mesh.num_shards > 1:  # else there is nothing to gather, and what is asked for next comes by itself
            self._read_ahead()

    def _gather(self, buffer: FlatParamPlan) -> _Gather:
        axes, label = self.mesh.axes_of(buffer.row.params), Label("gather", buffer.key, self._phase)
        if math.prod(axis.size for axis in axes) == 1:
            self.stage.ahead(buffer.key, self.params[buffer.key])
            return _Gather(buffer, Pending(label, (), lambda: self.stage.bring(buffer.key, self.params[buffer.key])))
        shard = self.stage.bring(buffer.key, self.params[buffer.key])
        full = self.scratch.take(buffer.padded_numel, shard.dtype, self._device)
        comm_hooks = self.plan.comm_hooks
        hooks = comm_hooks.gather if buffer.trainable else comm_hooks.frozen
        return _Gather(buffer, self.mesh.start_all_gather(shard, full, axes, hooks=hooks, label=label), shard)

    def _end_gathers(self, unit: str) -> dict[str, Tensor]:
        """Waits for the gathers of a unit, and gives back the shards that were copies."""
        flats: dict[str, Tensor] = {}
        gathers = self._gathering.pop(unit)
        while gathers:  # emptied, so that nothing here holds the shard that is given back
            buffer, pending, shard = gathers.pop(0)
            flats[buffer.key] = pending.wait()
            del pending
            if shard is not None:
                self._give_back(shard, buffer.key)
        return flats

    def _read_ahead(self) -> None:
        """Starts to bring the shards of the unit that is gathered next."""
        if self.schedule is not None and self.plan.prefetch != 0:
            rest = self.schedule[len(self.executed) :]
            following = next((event.unit for event in rest if event.kind == "gather"), None)
            for buffer in self._units[following].buffers if following else ():
                if isinstance(buffer.row.params, Sharded):
                    self.stage.ahead(buffer.key, self.params[buffer.key])

    def _drop_gathers(self) -> None:
        for unit in list(self._gathering):
            for key, flat in self._end_gathers(unit).items():
                self._give_back(flat, key)

    def _start_reduce(self, unit: UnitPlan) -> None:
        numel = sum(buffer.padded_numel for buffer in unit.buffers if buffer.trainable)
        while self._in_flight and sum(r.numel for r in self._in_flight) + numel > self.plan.max_reducing:
            self._end_reduce()
        while any(b.key in self.hook_states and b in unit.buffers for r in self._in_flight for b, _, _ in r.started):
            self._end_reduce()  # what its comm hook remembers is what the next one needs
        self._ready.discard(unit.name)
        filling = self._filling.pop(unit.name, _Grads())
        started = []
        for buffer in unit.buffers:
            if buffer.trainable:
                flat_P = self._flat_grad(filling, buffer)
                _zero_gaps(flat_P, buffer, filling.written)
                if not self.is_last and self._is_whole(buffer):
                    self._held.add(buffer.key)
                    if not self._is_here(buffer):
                        self.stage.put(f"{buffer.key}/grads", self.grads[buffer.key], flat_P, adds=False)
                        self._give_back(filling.flats.pop(buffer.key), buffer.key)
                    continue
                started.append((buffer, self._reduce(flat_P, buffer), self._adds(buffer)))
                self._reduced.add(buffer.key)
        if started:
            self._in_flight.append(_Reduction(numel, filling, started))
        if not all(self._is_here(buffer) for buffer, _, _ in started):
            # What is kept elsewhere leaves as soon as it has been added up: while the next unit's backward runs.
            while len(self._in_flight) > (self.mesh.world.size > 1):
                self._end_reduce()

    def _reduce(self, flat_P: Tensor, buffer: FlatParamPlan) -> Sending:
        """Starts to add up what every rank wrote: to the whole (P) in stage 0, to this rank's shard (S) otherwise."""
        hooks, states = self.plan.comm_hooks.reduce, self.hook_states.get(buffer.key, {})
        label = Label("reduce", buffer.key, self._phase)
        flat_P = flat_P.to(self._reduce_dtype(buffer))
        if isinstance(buffer.row.grads, Replicated):
            return self.mesh.start_all_reduce(flat_P, hooks=hooks, states=states, label=label)
        own_S, is_held = self._own(buffer), self._is_held(buffer)
        is_new = is_held or self._adds(buffer) or flat_P.dtype != own_S.dtype or not self._is_here(buffer)
        held: Any = own_S
        if is_held and not self._is_here(buffer):
            held = self.stage.bring(f"{buffer.key}/grads", own_S)
        return self.mesh.start_reduce_scatter(
            flat_P, out_S=None if is_new else held, sum_replicas="now" if self.is_last else "later",
            held_S=held if is_held else None, hooks=hooks, states=states, label=label,
        )  # fmt: skip

    def _reduce_dtype(self, buffer: FlatParamPlan) -> torch.dtype:
        """The dtype in which gradients are sent; where nobody else is, that in which they are kept."""
        return torch_dtype(buffer.dtypes.reduce if self.mesh.world.size > 1 else buffer.dtypes.grad)

    def _adds(self, buffer: FlatParamPlan) -> bool:
        """Whether a reduction is added to one that came before, in this micro-step or an earlier one."""
        if buffer.key in self._reduced:
            return True
        return not (self.is_first or self._is_whole(buffer) or self._is_held(buffer))

    def _is_held(self, buffer: FlatParamPlan) -> bool:
        """Whether the shard of earlier micro-steps joins this reduction, before it crosses the replicate axes once for all."""
        is_kept = bool(self.mesh.replicate_axes) and not (self.is_first or self._is_whole(buffer))
        return is_kept and self.is_last and buffer.key not in self._reduced

    def _is_whole(self, buffer: FlatParamPlan) -> bool:
        """Whether all of the gradient stays on this rank."""
        return self.grads[buffer.key].numel() == buffer.padded_numel

    def _end_reduce(self) -> None:
        """Waits for the oldest reduction."""
        _, reads, started = self._in_flight.popleft()
        while started:  # emptied, so that nothing here holds the gradients that are given back
            buffer, sending, is_late = started.pop(0)
            mean, states = sending.wait()
            if buffer.key in self.hook_states:
                self.hook_states[buffer.key] = states
            kept = self.grads[buffer.key] if mean.numel() == buffer.padded_numel else self._own(buffer)
            measures = self.is_last and kept.numel() == buffer.shard_numel
            self.stage.put(f"{buffer.key}/grads", kept, mean, adds=is_late, measures=measures)
        del sending, mean, kept
        for key, flat_P in reads.flats.items():
            self._give_back(flat_P, key)

    def _own(self, buffer: FlatParamPlan) -> Leaf:
        """This rank's shard (S) of the mean gradient."""
        return own_shard(self.grads[buffer.key], buffer, self.mesh.shard)

    def _finish(self) -> None:
        """Ends the backward: reduces what is left, and takes part in what only other ranks needed."""
        self._leaves.clear()
        self._check_whole()
        executed, self._ready = self.executed[self._begun :], self._ready | self._entered
        if self.schedule is None:
            for unit in reversed(self.plan.units):
                event = Event("reduce", unit.name)
                if self.trains and unit.trainable and (unit.name in self._filling or event not in executed):
                    self._negotiate(event)
        self._take_part()
        if self._filling:
            raise ScheduleError(
                f"gradients of unit {next(iter(self._filling))!r} came after its reduction, which they did not do in the "
                f"first step; pass schedule='negotiated'"
            )
        while self._in_flight:
            self._end_reduce()
        self._ready.clear()
        self._let_go()

    def _take_part(self) -> None:
        """Starts what is left of the schedule, or serves the wishes of other ranks until none has one."""
        if self.schedule is None:
            self._negotiate(None)
        else:
            for event in self.schedule[len(self.executed) :]:
                self._issue(event)

    def _let_go(self) -> None:
        """Releases all that a backward gathered."""
        self._drop_gathers()
        self._release_all_but("")
        self.stage.abandon()


def passes_of(loss: Tensor) -> list[ForwardBackward]:
    """The passes whose forwards a loss is of, in the order of its graph, which is that of all ranks."""
    return list({id(node.work): node.work for node in _roots_of(loss)}.values())


def _roots_of(loss: Tensor) -> Iterator[Any]:
    """The nodes of a graph at which forwards entered units."""
    seen: set[Any] = {None}
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            if isinstance(getattr(node, "work", None), ForwardBackward) and hasattr(node, "unit"):
                yield node
            nodes += [following for following, _ in node.next_functions]


UNRELATED = (
    "backward: the loss must depend on a trainable parameter of the model, through a forward of this step, and does not; make "
    "it of what the model returned (where a batch has nothing to learn from, of 0.0 * that)"
)
INSIDE = (
    "backward: must not be called inside the forward or loss_fn, for the step calls it for what these return, and was; return "
    "the loss, and take a gradient of activations with torch.autograd.grad(loss, activations)"
)
TRANSFORMED = (
    "model: must not call torch.func.grad, vjp, jacrev or hessian in the forward of a step that gathers parameters (stage 3), "
    "for PyTorch allows them no hooks on saved tensors, and one was called; use torch.autograd.grad(..., create_graph=True), or "
    "stages 0 to 2"
)
_OVER = (
    "backward: the forward that this loss is of belongs to a step that is over (it was updated, or an error ended it), so that "
    "its gradients would be of other parameters; run the forward again"
)
_BETWEEN = (
    "backward: must be that of the engine or step, for it sends and gathers on all ranks at once, and autograd was called by "
    "itself; call engine.backward(loss) in place of loss.backward(), and make a gradient of inputs (torch.autograd.grad) with "
    "torch.func, or in stages 0 to 2"
)

PATIENCE = 20.0
"""Seconds that a rank whose order departs from the schedule waits for the others to do so, too."""

_CHANGES_FLAG = "you can only change requires_grad flags of leaf"
_HOOKS_SAVED = "don't yet support saved tensor hooks"
"""What PyTorch says in errors that get another text here."""

_KINDS: tuple[Literal["gather", "reduce", "turn"], ...] = ("gather", "reduce", "turn")


def _verb(event: Event, unit: UnitPlan) -> str:
    """What a trace calls it."""
    if event.kind == "gather":
        return "gather"
    return "all_reduce" if isinstance(unit.buffers[0].row.grads, Replicated) else "reduce_scatter"


def _serve(rows: list[list[int]], *, in_forward: bool) -> list[int] | None:
    """Whose wish is served: that of the unit declared first, in the backward last; None at the end.

    So when the ranks run different units, the order is most often one in which a rank could run them all. A unit's
    gather comes before its reduction, and the turn when all want it.
    """
    wishes = [row for row in rows if row[0] >= 0]
    return min(wishes, key=lambda row: (row[0], row[1]) if in_forward else (-row[1], row[0]), default=None)


def _trained_in(unit: UnitPlan) -> Iterator[str]:
    return (name for buffer in unit.buffers if buffer.trainable for name in buffer.layout.names)


def _zero_gaps(flat_P: Tensor, buffer: FlatParamPlan, written: set[str]) -> None:
    """Zeros the padding and the gradients of parameters that got none."""
    for name in buffer.layout.names:
        if name not in written:
            start, stop = buffer.layout.bounds(name)
            flat_P[start:stop].zero_()
    flat_P[buffer.layout.numel :].zero_()


def own_shard(flat: AnyLeaf, buffer: FlatParamPlan, shard: int) -> AnyLeaf:
    """This rank's shard (S) of a flat buffer that it holds whole (P), or holds just that shard of, or that one and neighbours."""
    numel = buffer.shard_numel
    if flat.numel() == numel:
        return flat
    start = shard % (flat.numel() // numel) * numel
    own: Any = part_of(flat, start, start + numel)
    return own  # type: ignore[no-any-return]


def may_start_early(plan: Plan, present: str, following: str) -> bool:
    """Whether `following` may be gathered while `present` is in use."""
    units = {unit.name: unit for unit in plan.units}
    both = units[present], units[following]
    # Where a shard is all of its buffer, what came from a file is what the model computes with.
    staged = sum(b.param_placement.kind == "nvme" for unit in both for b in unit.buffers) if plan.num_shards == 1 else 0
    has_room = plan.streaming.num_staged is None or staged <= plan.streaming.num_staged
    return plan.prefetch != 0 and has_room and sum(unit.gathered_numel for unit in both) <= plan.max_live
