"""`Updater`: updates this rank's shard of each flat buffer, and all-gathers the
parameters that every rank holds in full.

The transform of a flat buffer is that of its parameter group, with the learning rate
and momentum of this update and the buffer's dtypes (`mixed_precision`). Adjacent
buffers with equal transforms are updated in one call. Buffers that live off the device
are streamed through their update (`fzero.storage.offload`). A captured step has the
same update in its graph, with the numbers in tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsFloat, cast

import torch
from torch import Tensor

import fzero.optim as optim
from fzero.common.profiler_ranges import profiler_range
from fzero.comms.mesh import AxisMesh, RankMesh
from fzero.comms.pending import Pending
from fzero.config.config import ConfigError
from fzero.config.optimizer_block import OptimizerBlock
from fzero.optim.rounding import salts_of, stochastic
from fzero.optim.transforms import NUM_SALTS, Transform, mixed_precision, skip_if
from fzero.plans.param_groups import UserTransform
from fzero.plans.plan import FlatParamPlan, Plan
from fzero.runtime.contents import NO_RANKS, contents_of
from fzero.state import TrainState
from fzero.storage.shard_transfer import BufferPool, updated_part
from fzero.storage.state_memory import StateMemory, Update
from fzero.verbs import optimizer_update, update_together
from sharding.views import torch_dtype

if TYPE_CHECKING:
    from fzero.optim.lr_schedules import Schedule

MOST_TOGETHER = 1 << 24
"""The most elements of several flat buffers that one call updates; their all-gather
overlaps with the next call.
"""


class UpdateNumbers(NamedTuple):
    """The numbers of one update that every rank computes on its own. They must be the
    same on all ranks.

    A graph reads them from tensors (`Updater.traced`), so that a change causes no new
    capture.
    """

    num_updates: Any
    """The number of updates before this one; in a graph its `salts_of`."""
    rates: tuple[Any, ...]
    """The learning rate of each parameter group."""
    momentum: Any
    """The first beta, where a schedule changes it."""
    optimizers: tuple[str, ...]
    """The optimizer of each parameter group, if those of the step have been replaced.
    """

    def named(self, groups: Sequence[str]) -> dict[str, dict[str, str]]:
        """The numbers as text, by subject and name, to be compared with those of other
        ranks.
        """
        return {
            "number of updates so far": {"state.step": str(self.num_updates)},
            f"learning rate after {self.num_updates} updates": dict(
                zip(groups, map(str, self.rates), strict=True)
            ),
            "momentum": {"betas": str(self.momentum)},
            "hyper-parameters": dict(zip(groups, self.optimizers, strict=True)),
        }


@dataclass(frozen=True, slots=True)
class Updater:
    """The updates of a step, on one rank.

    Attributes:
        mesh: the ranks; None for an `AbstractAxis`, which updates nothing.
        shard: the index of this rank's shard in the finest division.
        optimizers, rates: the optimizer and the learning rate of each parameter group;
            a rate is a function of the number of updates so far.
        momentum: the first beta as a function of the number of updates so far, if a
            schedule changes it.
        first_elements: if rounding is stochastic: the index of each flat buffer's first element
            among all elements.
    """

    plan: Plan
    mesh: RankMesh | None
    shard: int
    offload: StateMemory
    scratch: BufferPool
    optimizers: Sequence[OptimizerBlock | UserTransform]
    rates: Sequence[Schedule]
    momentum: Schedule | None
    first_elements: dict[str, int] | None
    _changed: tuple[str, ...] = ()
    """The optimizers, if those of the step have been replaced."""
    _made: dict[tuple[int, str], tuple[Any, Transform]] = field(default_factory=dict)
    """The last transforms, with their learning rate and momentum."""
    kinds: dict[str, Hashable] = field(init=False, repr=False, compare=False)
    """By flat buffer; those of one kind have equal transforms. One that is not
    elementwise, or rounds at random, has its own kind."""

    def __post_init__(self) -> None:
        kinds: dict[str, Hashable] = {}
        for b in self.plan.flat_buffers:
            is_plain = (
                self.first_elements is None
                and b.trainable
                and self.optimizers[b.group].is_elementwise(b.rule)
            )
            kinds[b.key] = (b.group, b.rule, b.dtypes) if is_plain else b.key
        object.__setattr__(self, "kinds", kinds)

    def following(
        self, rates: Sequence[float], optimizers: Sequence[OptimizerBlock | UserTransform] | None
    ) -> Self:
        """The same updater with other learning rates, and other optimizers unless these
        are None.
        """
        twin = replace(self, rates=list(map(optim.lr_schedules.constant, rates)), momentum=None)
        if optimizers is None:
            return twin
        return replace(
            twin, optimizers=list(optimizers), _made={}, _changed=tuple(map(repr, optimizers))
        )

    def hyper(self, num_updates: int) -> UpdateNumbers:
        """The numbers of the update after `num_updates` others.

        Raises:
            ValueError: a learning rate is no finite number.
        """
        rates = [rate(num_updates) for rate in self.rates]
        if not all(
            isinstance(rate, (int, float, SupportsFloat)) and math.isfinite(rate) for rate in rates
        ):
            raise ValueError(
                f"learning rate: must be a finite number for every parameter group and update, got "
                f"{rates} after {num_updates} updates; change the schedule (lr_schedule), or the "
                f"values written into param_groups"
            )
        momentum = None if self.momentum is None else float(self.momentum(num_updates))
        return UpdateNumbers(num_updates, tuple(map(float, rates)), momentum, self._changed)

    def update(
        self,
        state: TrainState[Tensor],
        factor: Tensor | None,
        skip: Tensor | None,
        *,
        hyper: UpdateNumbers,
        skipped: Collection[str] = (),
    ) -> TrainState[Tensor]:
        """Updates this rank's shard of each flat buffer and, where every rank holds all
        of it, all-gathers the shards.

        Args:
            factor: the factor of the gradients; None is 1.
            skip: whether the update is skipped; None never skips.
            skipped: the keys of flat buffers that do not change; their masters and
                optimizer states do not change, either.
        """
        mesh = self.mesh
        assert mesh is not None, NO_RANKS

        @cache  # one copy per device: the host waits for each
        def numbers_on(device: torch.device) -> tuple[Tensor | None, Tensor | None]:
            return None if skip is None else skip.to(device), None if factor is None else factor.to(
                device
            )

        here: list[Update] = []
        away: list[Update] = []
        for buffer in self.plan.flat_buffers:
            key = buffer.key
            if not buffer.trainable or key in skipped:
                continue
            param, grad, is_away = state.params[key], state.grads[key], self.offload.is_away(buffer)
            grad = updated_part(grad, buffer, mesh.shard)
            param = (
                param
                if is_away and self.offload.joins(buffer)
                else updated_part(param, buffer, mesh.shard)
            )
            numbers = numbers_on(self.offload.runs_on(buffer) if is_away else self.offload.device)
            out = param if buffer.has_master else None
            at = partial(self._transform_at, buffer, hyper, *numbers, out)
            update = Update(
                buffer, grad, state.master.get(key, param), state.optimizer[key], at, param, mesh
            )
            (away if is_away else here).append(update)
        params, optimizer, pending = state.params, dict(state.optimizer), list[Pending]()
        if wholes := [x for x in here if not x.buffer.elementwise]:
            transforms = [x.transform_at(0, x.grad.numel()) for x in wholes]
            given = ([getattr(x, of) for x in wholes] for of in ("grad", "master", "state"))
            news = update_together(transforms, *given)
            optimizer |= {x.buffer.key: new for x, new in zip(wholes, news, strict=True)}
            pending += _start_joins(wholes, params)
        for alike in self._alike([x for x in here if x.buffer.elementwise]):
            transform = alike[0].transform_at(0, alike[0].grad.numel())
            grads, masters, states = zip(*((x.grad, x.master, x.state) for x in alike), strict=True)
            _, news = optimizer_update(transform, masters, grads, states, donate=True)
            optimizer |= {x.buffer.key: new for x, new in zip(alike, news, strict=True)}
            pending += _start_joins(alike, params)
        state = state._replace(optimizer=optimizer)
        if away:
            state = self.offload.step(state, away, mesh, skip, scratch=self.scratch)
            pending += _start_joins(away, params)
        for joined in pending:
            joined.wait()
        return state

    def _alike(self, updates: Sequence[Update]) -> Iterator[list[Update]]:
        """Adjacent buffers that one call may update, up to `MOST_TOGETHER` elements:
        elementwise, with equal transforms, and without a master."""

        def kind_of(update: Update) -> Hashable:
            buffer = update.buffer
            return buffer.key if buffer.has_master else self.kinds[buffer.key]

        for _, neighbours in groupby(updates, kind_of):
            alike, numel = list[Update](), 0
            for update in neighbours:
                if alike and numel + update.grad.numel() > MOST_TOGETHER:
                    yield alike
                    alike, numel = [], 0
                alike.append(update)
                numel += update.grad.numel()
            yield alike

    def _transform_at(
        self,
        buffer: FlatParamPlan,
        hyper: UpdateNumbers,
        skip: Tensor | None,
        factor: Tensor | None,
        out: Any,
        start: int,
        stop: int,
        part: Tensor | None = None,
    ) -> Transform:
        """The transform of elements [start, stop) of this rank's part of a flat buffer.

        It also writes the new parameters into `part`, default `out[start:stop]`.
        """
        own = self.shard * buffer.shard_numel if buffer.flow.updates == "shard" else 0
        if part is None and isinstance(out, Tensor):
            part = out[start:stop]
        return self.transform_of(
            buffer, hyper, start=own + start, skip=skip, factor=factor, out=part
        )

    def transform_of(
        self,
        buffer: FlatParamPlan,
        hyper: UpdateNumbers | None = None,
        mesh: AxisMesh[Any] | None = None,
        *,
        start: int | Tensor = 0,
        skip: Tensor | None = None,
        **how: Any,
    ) -> Transform:
        """The transform of this rank's part of a flat buffer.

        Args:
            hyper: the numbers of an update; None takes those of the first one.
            mesh: the axes for the collectives of a transform that is not elementwise;
                None is the updater's.
            start: the index in the flat buffer of the first element that is updated.
            skip: whether the update is skipped.
            how: as for `mixed_precision`.
        """
        optimizer, rule = self.optimizers[buffer.group], (buffer.group, buffer.rule)
        hyper = self.hyper(0) if hyper is None else hyper
        lr, momentum = hyper.rates[buffer.group], hyper.momentum
        made: Any = self._made.get(rule, ((None, None),))
        if _are_same(made[0], (lr, momentum)):
            transform = made[1]
        elif optimizer.is_elementwise(buffer.rule):
            transform = optimizer.transform(lr=lr, momentum=momentum, kind=buffer.rule)
            self._made[rule] = (lr, momentum), transform
        else:
            contents = contents_of(self.plan, buffer, self.shard, mesh or self.mesh)
            transform = optimizer.transform(
                lr=lr, momentum=momentum, contents=contents, kind=buffer.rule
            )
            how["tile"] = None
        if skip is not None:
            transform = skip_if(skip, transform)
        if self.first_elements is not None:
            how["rounding"] = stochastic(hyper.num_updates, self.first_elements[buffer.key] + start)
        return mixed_precision(transform, state_dtype=buffer.dtypes.optimizer, **how)

    # --- in a graph -------------------------------------------------------------------------------

    def traced(self, device: torch.device) -> tuple[Self, UpdateNumbers]:
        """The updater of a graph, and the tensors (not yet written) from which the
        graph reads the numbers of an update.
        """
        masters = [torch_dtype(buffer.dtypes.master) for buffer in self.plan.flat_buffers]
        dtype = torch.float64 if torch.float64 in masters else torch.float32
        hyper = UpdateNumbers(
            torch.zeros(NUM_SALTS, dtype=torch.int64, device=device),
            tuple(torch.zeros((), dtype=dtype, device=device) for _ in self.rates),
            torch.full((), 0.9, dtype=dtype, device=device) if self.momentum else None,
            (),
        )
        twin = replace(self, _made={})
        for buffer in self.plan.flat_buffers:
            if buffer.trainable and self.optimizers[buffer.group].is_made_before_trace:
                twin.transform_of(buffer, hyper)
        return twin, hyper

    def for_single_use(self) -> Self:
        """A twin for one update in a graph. fzero's own optimizers compute other rates
        from its tensors, which no other update may use."""
        return replace(self, _made=dict(self._made))

    def write(self, traced: UpdateNumbers, hyper: UpdateNumbers) -> None:
        """Writes the numbers of an update where the graph reads them."""
        for lr, rate in zip(traced.rates, hyper.rates, strict=True):
            lr.fill_(rate)
        if hyper.momentum is not None:
            traced.momentum.fill_(hyper.momentum)
        if self.first_elements is not None:
            for place, salt in zip(traced.num_updates, salts_of(hyper.num_updates, NUM_SALTS)):
                place.fill_(salt)  # a copy would wait for the device


def rate_of(lr: float, base: float, schedule: Schedule | None) -> Schedule:
    """The learning rate of a parameter group: `schedule` times `lr` / `base` (the
    group's lr divided by the configuration's).
    """
    if schedule is None:
        return lambda n: lr
    if lr == base:
        return schedule
    if base == 0:
        raise ConfigError(
            f"optimizer.params.lr: must not be 0 when a parameter group has another lr ({lr}) and "
            f"a schedule changes both, got 0; the group's lr is scaled by the ratio, so give the "
            f"lr that the schedule starts from"
        )
    return lambda n: schedule(n) * (lr / base)


def _are_same(made: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    """Whether two pairs hold the same tensors, or equal numbers."""
    return all(
        x is y or (not isinstance(x, Tensor) and not isinstance(y, Tensor) and x == y)
        for x, y in zip(made, now)
    )


def _start_joins(updates: Sequence[Update], params: Mapping[str, Tensor]) -> list[Pending]:
    """Starts the all-gathers of parameters that every rank holds in full; each rank has
    updated one shard of them.
    """
    started = []
    for update in updates:
        # parameters in files are not gathered here
        key, shard_S = update.buffer.key, cast(Tensor, update.param)
        if shard_S is not params[key]:
            with profiler_range("all_gather", key):
                started.append(update.join(shard_S, out=params[key]))
    return started
