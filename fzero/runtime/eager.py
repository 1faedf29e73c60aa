"""Forwards and backwards of any PyTorch model. Parameters are gathered and gradients
are reduced unit by unit.

No graph is captured. The model runs as it is, bound to the tensors that
`ForwardBackward.fetch` returns:

1. The first access to a parameter of a unit *enters* the unit: its flat buffers are
   gathered (stage 3, `Gathers`) and cut into parameters by one split. Entering another
   unit releases them; by then the gather of the next unit has started.
2. Autograd must not keep a gathered buffer alive until the backward, so a view of one
   is saved as a `SavedView`. Unpacking it gathers the unit again.
3. Each parameter is the output of a node of autograd (`autograd_nodes`), whose backward
   writes its gradient into the flat one of the unit (`Reductions`). The backward of
   `UnitRoot` is the last of a unit; then the unit's reduce-scatter starts.

`UnitScheduler` decides when each of these happens, and a `Sequencer` executes it. All
stages run this same code and do the same arithmetic: the specs decide whether a gather
moves anything and whether a full gradient is dropped.

Shape letters: P padded elements of a flat buffer = F·S, S elements of a shard, F shards
(on one axis as many as ranks).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from fzero.common.profiler_ranges import OpenRange
from fzero.comms import collectives
from fzero.comms.mesh import RankMesh, States
from fzero.comms.pending import Pending, abandon, settle
from fzero.comms.records import Label
from fzero.model.binding import beneath_model, beneath_modes
from fzero.model.errors import BETWEEN, INSIDE, OVER, UNRELATED, late
from fzero.model.own_params import untraced
from fzero.plans.plan import Plan, UnitPlan
from fzero.plans.unit_orders import Event, Run
from fzero.plans.unit_scheduler import UnitScheduler
from fzero.runtime.autograd_nodes import Visits, visits_in
from fzero.runtime.gathers import Gathers, SavedView
from fzero.runtime.learned import Learned
from fzero.runtime.outcome import explain
from fzero.runtime.param_views import ParamViews
from fzero.runtime.reductions import GradNorms, Reductions
from fzero.runtime.saving import saving
from fzero.runtime.sequencer import Sequencer
from fzero.runtime.visits import Forwards, GivenParams, Visit, sum_of
from fzero.storage.shard_transfer import ShardTransfer

if TYPE_CHECKING:
    from fzero.storage.file_tensor import StoredTensor


class ForwardBackward:
    """Forwards and backwards between two updates on one rank.

    There are two halves. First run the model, bound to `fetch`, inside `forward(...)`.
    Then bind it again and call `backward(...)`. Any number of backwards may follow any
    number of forwards. Between the halves no collective is under way, and one unit is
    still gathered. A forward without a backward leaves nothing behind. After an error,
    or after `close`, the object cannot be used again, and a backward through its graphs
    raises.

    Args:
        plan, mesh: the units and their specs, and the ranks.
        params: this rank's flat buffers by key, wherever they live.
        grads: receive the mean gradients, by key: full (P) in stages 0 and 1, else
            shards (S). None allows forwards only.
        learned: the events to follow, by run. A run without events is negotiated, and
            its events are learned.
        transfer: loads shards from other memory, and writes shards of gradients there.
        hook_states: the states of the reductions' comm hooks, by flat buffer and axis.
        norms: measures the results of reductions.
        seen: the values that modules get instead of some parameters.

    Attributes:
        forwards, given: the forwards so far, and the parameters that the model got.
        gathers, reductions: the gathered units, and the gradients.
        gathers_nothing: whether every rank holds all parameters.
        runs_again: see `recomputing`.
        anchor: the input of every `UnitRoot`, on the device of the parameters, so that
            autograd runs all nodes on one thread.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: RankMesh,
        params: Mapping[str, StoredTensor],
        grads: Mapping[str, StoredTensor] | None,
        learned: Learned,
        transfer: ShardTransfer,
        *,
        hook_states: Mapping[str, States] = {},
        norms: GradNorms | None = None,
        seen: ParamViews,
    ) -> None:
        self.plan, self.mesh, self.params, self.grads, self.transfer = (
            plan,
            mesh,
            params,
            grads,
            transfer,
        )
        self.anchor = torch.empty(0, device=transfer.device, requires_grad=True)
        self.gathers_nothing = not any(unit.gathered_numel for unit in plan.units)
        self.forwards, self._seen = Forwards(gathers=not self.gathers_nothing), seen
        self.given = GivenParams(seen.relayed)
        self.gathers = Gathers(plan, mesh, params, transfer, seen, self.given.was_changed)
        self.reductions = Reductions(plan, mesh, grads or {}, transfer, hook_states, norms)
        self._events = Sequencer(plan, mesh, learned, self.gathers, self.reductions)
        self.status: Literal["idle", "running", "passed", "over"] = "idle"
        # the dispatch modes that the caller has active around a half
        self._num_modes, self.runs_again = 0, False
        self._present: Visit | None = None  # the visit that runs now, or None
        self._loss_stats: Pending | None = None
        self._range = OpenRange()  # in a trace, that of the unit being visited

    # --- the two halves ---------------------------------------------------------------------------

    @contextmanager
    def forward(
        self,
        run: str,
        *,
        saves: bool = True,
        no_grad_names: frozenset[str] = frozenset(),
        compares: bool = False,
    ) -> Iterator[None]:
        """Run the bound model inside this context. *Collective* in stage 3, also for
        units that only other ranks use.

        Args:
            run: the key of its order of collectives.
            saves: whether views of gathered buffers are saved as `SavedView`s. False
                saves them as tensors, which keeps the buffers alive (for transforms of
                torch.func, which allow no hooks).
            no_grad_names: trained parameters that require no gradients in this forward.
            compares: whether values of parameters are compared before and after, to
                find changes through `.data`.

        Raises:
            ValueError: the forward has changed a parameter.
        """
        # a forward gathers the same units with `no_grad_names` and without
        with self._running(("forward", run)):
            self._leave("")
            self._events.request(
                UnitScheduler.begin_forward, self.forwards.begin(run, no_grad_names)
            )
            self.given.begin(
                self.forwards.last, compares=compares, shares=not (compares or no_grad_names)
            )
            try:
                with saving(self) if saves and not self.gathers_nothing else nullcontext():
                    yield
            except RuntimeError as error:
                self.given.name(error)
                raise
            self._range.close()
            self.gathers.check_unmodified()
            self.given.end()
            self._events.request(UnitScheduler.boundary)

    @contextmanager
    def backward(
        self,
        visits: Visits,
        row: Tensor,
        *,
        grad_scale: float = 1.0,
        is_first: bool = True,
        is_last: bool = True,
        retain_graph: bool = False,
        check: Callable[[Tensor], None] | None = None,
        needs_grads: bool = True,
    ) -> Iterator[list[Tensor]]:
        """Inside, a backward of autograd adds its gradients to `grads`. *Collective:*
        every rank; in stage 3 gathers again.

        Args:
            visits: see `autograd_nodes.visits_of`.
            row: a few numbers that ranks exchange while the backward runs.
            grad_scale: factor of the gradients.
            is_first: whether `grads` holds nothing yet.
            is_last: whether this is the last backward before the update; only then are
                full gradients reduced.
            retain_graph: whether the graph is retained for another backward.
            check: checks the rows before any other collective, if the order of
                collectives may differ between ranks.
            needs_grads: whether it is an error if no trained parameter gets a gradient.
                (A pipeline stage may have none.)

        Yields:
            A list that receives, at the end, every rank's row in rank order.

        Raises:
            ValueError: the loss does not depend on a trained parameter through one of
                the forwards.
        """
        found: list[Tensor] = []
        is_last = self.reductions.begin(grad_scale=grad_scale, is_first=is_first, is_last=is_last)
        with self._running(
            () if self.reductions.only_adds else self.forwards.run_of("backward", visits)
        ):
            if not self.reductions.only_adds:
                self._events.request(
                    UnitScheduler.begin_backward, is_last, frozenset(sum_of(visits).items())
                )
            self.forwards.go_back(retain_graph=retain_graph)
            label = Label("loss_stats", phase="boundary")
            self._loss_stats = collectives.start_stack(row, self.mesh.world, label=label)
            if check is not None:
                found[:], self._loss_stats = [self._loss_stats.wait()], None
                check(found[0])
            try:
                yield found
            except RuntimeError as error:
                self.given.name(error)
                raise
            # an update without gradients would apply weight decay
            if needs_grads and not self.reductions.has_come:
                raise ValueError(UNRELATED)
            self._leave("")
            self.gathers.check_unmodified()
            if not self.reductions.only_adds:
                self._events.request(UnitScheduler.end_backward)
                self._let_go(UnitScheduler.finish)
            if self._loss_stats is not None:
                found[:], self._loss_stats = [self._loss_stats.wait()], None

    @contextmanager
    def backward_through(self, loss: Tensor, *, retain_graph: bool = False) -> Iterator[None]:
        """Inside, a backward of another step may run through forwards of this one;
        gradients here do not change.

        *Collective* in stage 3: gathers again.
        """
        with self._running(self.forwards.run_of("through", visits_in(loss, self))):
            self.status = "passed"
            self.forwards.go_through(retain_graph=retain_graph)
            try:
                yield
            finally:
                self.status = "running"
            self._events.request(UnitScheduler.take_part)
            self._let_go(UnitScheduler.finish)

    @contextmanager
    def _running(self, run: Run) -> Iterator[None]:
        """Follows the order of a run, or learns it; () has no events. After an error
        this object cannot be used again.
        """
        if self.status == "over":
            raise RuntimeError(OVER)
        settle()
        self._num_modes = _len_torch_dispatch_stack()
        if run:
            self._events.begin(run)
        self.status = "running"
        try:
            # On CUDA nodes would run in another thread otherwise.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        except BaseException as error:
            explain(error, self.plan)
            self._abandon()
            raise
        self.status = "idle"
        if run:
            self._events.end()

    def _abandon(self) -> None:
        """Drops gathered buffers, collected gradients and the collectives under way."""
        self._range.close()
        abandon(
            [*self.gathers.abandon(), *self.reductions.abandon(), *filter(None, [self._loss_stats])]
        )
        self.close()

    def close(self) -> None:
        """Releases the gathered buffers; from now on a backward through a graph made
        here raises.
        """
        self.status = "over"
        self.given.share(False)
        self.forwards.close()
        self._let_go(UnitScheduler.release)
        if self._seen.is_on:
            self._seen.close()

    def _let_go(self, method: Callable[[UnitScheduler], tuple[Event, ...]]) -> None:
        """Releases the gathered buffers; after a backward, first waits for its
        reductions (`finish`).
        """
        self._leave("")
        self._events.request(method)
        self.transfer.abandon()

    def _check_runs(self) -> None:
        """Outside the two halves, begins a backward of all ranks (`Forwards.begins`),
        or raises: collectives need all ranks.
        """
        if self.status == "idle":
            self.forwards.begins()
        if self.status not in ("running", "passed"):
            raise RuntimeError(OVER if self.status == "over" else BETWEEN)

    # --- parameters -------------------------------------------------------------------------------

    def fetch(self, name: str) -> Tensor:
        """The parameter `name` as the model sees it. *Collective* in stage 3 when this
        enters a unit.
        """
        present, is_open = self._present, self.given.is_open
        if (
            present is None
            or name not in present.leaves
            or not (is_open or present.forward is self.forwards.of_node)
        ):
            if name not in self.plan.param_units:
                raise late("parameter", name)
            unit = self.plan.param_units[name][0]
            enter = (
                untraced(ForwardBackward._enter) if unit.gathered_numel else ForwardBackward._enter
            )
            present = enter(self, unit)
        elif self._events.phase != "forward":
            self._need(present.unit)  # the next gather may start now, as in `unpack`
        is_new = not present.is_recorded and not self.runs_again
        if is_new and self._events.phase == "forward" and torch.is_grad_enabled():
            present.is_recorded = True
            self.forwards.last.visits[present.unit] = 1  # its visits share a node
        return present.leaves[name]

    def _enter(self, unit: UnitPlan) -> Visit:
        """Makes `unit` the present unit."""
        if self._events.phase == "forward":
            self._range.open("unit", unit.name)
        forward = self.forwards.last if self.given.is_open else self.forwards.of_node
        visit = forward.kept.get(unit.name)
        if visit is None or not self.gathers_nothing:
            # the model may use the leaves outside of its modes later
            with beneath_model(self._num_modes):
                if self._present is not None and self.given.compared:
                    self.given.check(self._present.plan)
                self._leave(unit.name)
                self._events.request(UnitScheduler.enter, unit.name)
                if visit is None:
                    work, flats = (
                        None if self.grads is None else self,
                        self.gathers.full_flats(unit),
                    )
                    seen = self.gathers.seen(unit) if self._seen.is_on else {}
                    visit = self.given.visit(unit, flats, forward, work, seen=seen)
        self._present = visit
        return visit

    def _need(self, unit: str) -> None:
        """Gathers a unit that the backward needs, unless it is gathered already."""
        self._leave(unit)
        with beneath_modes(self._num_modes):
            self._events.request(UnitScheduler.need, unit)

    def _leave(self, unit: str) -> None:
        """Drops the parameters of the present unit, so that its memory can be released;
        does nothing if it is `unit`.
        """
        if self._present is not None and self._present.unit != unit:
            if not self._present.is_kept:
                self._present.leaves.clear()
            self._present = None

    # --- autograd ---------------------------------------------------------------------------------

    def unpack(self, saved: SavedView | tuple[Tensor, int]) -> Tensor:
        """The tensor that `saving` has saved. *Collective* in stage 3, for a view."""
        if isinstance(saved, SavedView):
            self._check_runs()
            self._need(saved.unit.name)
        return self.gathers.from_saved(saved)

    def add_grads(self, unit: str, names: Sequence[str], grads: Sequence[Tensor | None]) -> None:
        """Takes gradients of a unit's parameters from autograd. A gradient may be None;
        a gradient without a name is dropped.
        """
        self._check_runs()
        if self._events.phase == "forward":
            raise RuntimeError(INSIDE)
        if self.status == "passed":
            return
        given = {
            name: grad for name, grad in zip(names, grads, strict=True) if name and grad is not None
        }
        for pulled, masks in (
            self.gathers.pulled(given, self._need) if self._seen.is_on else [(given, {})]
        ):
            if self.reductions.only_adds:
                self.reductions.add_to_sums(pulled, masks)
                self.forwards.used.update(pulled)
                continue
            by_buffer: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
            for name, grad in pulled.items():
                by_buffer[self.plan.param_units[name][1].key][name] = grad
            for key, own in by_buffer.items():
                owner, buffer = self.plan.flats[key]
                if buffer.trainable:
                    if key not in self.reductions.begun:
                        self._events.request(UnitScheduler.collect, owner, key)
                    self.reductions.add(owner, buffer, own, masks)
                    self.forwards.used.update(own)

    def end_visit(self, unit: str, names: Sequence[str], grads: Sequence[Tensor | None]) -> None:
        """Called when autograd has all gradients of one visit of a unit, with those
        that are not written yet.
        """
        self.add_grads(unit, names, grads)
        if self.status != "passed" and not self.reductions.only_adds:
            self._events.request(UnitScheduler.end_visit, unit)


@contextmanager
def recomputing(work: ForwardBackward) -> Iterator[None]:
    """Inside, part of the model runs again for its backward; fetched parameters get no
    gradient, and no visit counts.
    """
    before, work.runs_again = work.runs_again, True
    try:
        yield
    finally:
        work.runs_again = before


def expect(work: ForwardBackward, units: Iterable[str]) -> None:
    """In a backward: `end_visit` comes once more for each of these units, for gradients
    from outside of the forwards.
    """
    if not work.reductions.only_adds:
        work._events.request(UnitScheduler.expect, tuple(units))
