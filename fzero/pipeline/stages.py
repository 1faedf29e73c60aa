"""`Stages`: the `Job` of a pipeline, which answers for the ranks of its other stages,
with which a stage begins and ends a step.

Everything of ZeRO happens inside a stage, along the mesh axis "data". The stages
together agree on the micro-batches at the start of a step; and at its end on the loss,
on the norm and on overflow. So all of them make the same decision.

Shape letters: A micro-steps, W ranks along "data", F shards, B flat buffers, p stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from fzero.comms import collectives
from fzero.comms.axes import RankAxis, observed
from fzero.comms.records import CommRecord, Label
from fzero.pipeline.messages import Links
from fzero.plans.plan import FlatParamPlan, Plan
from fzero.runtime.step_runtime import StepRuntime
from fzero.runtime.step_spec import MismatchError, check_same
from fzero.state import TrainState
from fzero.storage.shard_transfer import own_shard

State = TrainState[Tensor]


@dataclass(frozen=True, slots=True)
class Tie:
    """The stages that hold a copy of a tied layer.

    Attributes:
        unit: its name, `tied_modules.<key>`.
        keys: its flat buffers.
        holders: the stages, from the lowest.
    """

    unit: str
    keys: tuple[str, ...]
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Stages:
    """One rank among the stages of its pipeline.

    Attributes:
        world: all ranks of the job.
        links: the ranks with the same place in the other axes, one for each stage.
        members: each rank with its stage, in words.
        buffers: the flat buffers that have a part in the norm: (stage, place among its
            stage's), in the order of the layers; a tied one is named for its lowest
            stage.
        most: the most such buffers of one stage.
        ties: the tied layers of this stage.
        names: the names of all parameters and buffers of the model in the order of the
            layers.
        device: the device of this rank.
    """

    world: RankAxis
    links: Links
    members: tuple[str, ...]
    buffers: tuple[tuple[int, int], ...]
    most: int
    ties: tuple[Tie, ...]
    names: tuple[str, ...]
    device: torch.device

    @property
    def axis(self) -> RankAxis:
        """The ranks of all stages, for collectives."""
        return self.links.up

    @property
    def stage(self) -> int:
        return self.axis.rank

    @property
    def num_stages(self) -> int:
        return self.axis.size

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def is_whole(self) -> bool:
        return self.num_stages == 1

    def observed(self, observe: Callable[[CommRecord], None]) -> Self:
        """The same stages, whose collectives are also reported to `observe`."""
        return replace(
            self, world=observed(self.world, observe), links=self.links.observed(observe)
        )

    # --- at the start of a step -------------------------------------------------------------------

    def first_state(self, plan: Plan, state: State) -> State:
        """The first state with equal copies of tied layers. *Collective* of the stages."""
        self.make_ties_equal(plan, state)
        return state

    def agreed(self, state: State, batch: Any, split: Callable[[Any], list[Any]]) -> list[Any]:
        """This rank's micro-batches, once all ranks have theirs. *Collective:* every
        rank of the job; sends three numbers.

        Raises:
            ValueError: on every rank, where one has no batch, fewer micro-batches than
                the others, or no (inputs, labels).
        """
        collectives.next_step(self.world)
        error: Exception | None = None
        found: list[Any] = []
        if self.is_first or self.is_last:
            try:
                found = split(batch)
                for one in found:
                    _check_pair(one)
            except Exception as raised:  # all ranks must learn of it, whatever it is
                error = raised
        count = len(found) if self.is_first or self.is_last else -1
        values = [float(error is not None), float(state.step), count]
        row = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = collectives.stack(
            row, self.world, label=Label("agree", "on the batches of all stages")
        )
        if rows[:, 0].any():
            texts = collectives.exchange(
                None if error is None else str(error), self.world, label=Label("agree")
            )
            if error is not None:
                raise error
            rank = next(rank for rank, text in enumerate(texts) if text is not None)
            raise ValueError(
                f"{self.members[rank]} has no batch for this step, so no stage runs it: "
                f"{texts[rank]}"
            )
        if (rows[:, 1] != rows[0, 1]).any():
            raise MismatchError(
                f"state: must be of the same step on all stages, got steps "
                f"{[int(n) for n in rows[:, 1]]} by rank; load the same checkpoint on all ranks"
            )
        counts = {int(number) for number in rows[:, 2] if number >= 0}
        if len(counts) > 1:
            raise ValueError(
                f"batch: must have as many micro-batches on all ranks of the first and the last "
                f"stage, got {[int(n) for n in rows[:, 2]]} by rank (-1: reads none); give all "
                f"ranks iterators of one length"
            )
        return found or [None] * counts.pop()

    # --- at the end -------------------------------------------------------------------------------

    def loss_stats(self, run: StepRuntime, stats_AW: Tensor) -> Tensor:
        """The last stage's rows of the losses, on all stages. *Collective* of the
        stages.

        Raises:
            MismatchError: the stages have other hyper-parameters.
        """
        by_stage = collectives.stack(
            stats_AW, self.axis, label=Label("loss_stats", phase="boundary")
        )
        if not (by_stage[..., 3] == by_stage[0, 0, 0, 3]).all():
            check_same(
                self.axis,
                run.learned.hyper.named(),
                fix="compute it from what is the same on all ranks",
            )
            raise MismatchError(
                "hyper-parameters: must be the same on all stages, and differ; compute them alike"
            )
        return by_stage[-1]

    def norm_parts(self, parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """The contributions of all stages' flat buffers to the norm, in the order of
        the layers. *Collective* of the stages.

        Args:
            parts: those of this stage's, for this rank's shard.
        """
        padded = torch.zeros(self.most, dtype=torch.float64, device=device)
        if parts:
            padded[: len(parts)] = torch.stack(list(parts))
        by_stage = collectives.stack(
            padded, self.axis, label=Label("norm", "of all stages", "update")
        )
        return [by_stage[stage, place] for stage, place in self.buffers]

    def first_name(self, name: str | None) -> str | None:
        """The first of all stages' parameters, in the order of the layers. *Collective*
        of the stages.
        """
        found = [
            one
            for one in collectives.exchange(name, self.axis, label=Label("overflow"))
            if one is not None
        ]
        return min(found, key=self.names.index, default=None)

    def sum_ties(self, plan: Plan, grads: Mapping[str, Any], shard: int) -> None:
        """Adds the gradients of tied layers over the stages that hold a copy, in the
        order of the stages.

        *Collective* of these stages: each sends its part of the gradient to every
        other.
        """
        buffers = {b.key: b for b in plan.flat_buffers}
        for key in (key for tie in self.ties for key in tie.keys if buffers[key].trainable):
            holders = next(tie.holders for tie in self.ties if key in tie.keys)
            own = _kept(grads[key], buffers[key], shard)
            parts = self._exchanged(
                own, holders, Label("stages", f"gradient of tied {key}", "backward")
            )
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            own.copy_(total)

    def make_ties_equal(self, plan: Plan, state: State) -> None:
        """Gives every copy of a tied layer the values of the lowest stage that holds
        one. *Collective* of these stages.
        """
        for tie in self.ties:
            for key in tie.keys:
                for kind in (state.params, state.master):
                    if key in kind:
                        home = kind[key]
                        home.copy_(
                            self._exchanged(home, tie.holders, Label("init", f"tied {key}"))[0]
                        )

    def _exchanged(self, x: Tensor, holders: Sequence[int], label: Label) -> list[Tensor]:
        """The tensors of these stages, in order."""
        x = x.contiguous()
        found = {stage: x if stage == self.stage else torch.empty_like(x) for stage in holders}
        others = [stage for stage in holders if stage != self.stage]
        pending = [
            collectives.start_receive(found[stage], stage, self.links.of(stage), label=label)
            for stage in others
        ]
        pending += [
            collectives.start_send(x, stage, self.links.to(stage), label=label) for stage in others
        ]
        for one in pending:
            one.end()
        return list(found.values())

    # --- the whole model --------------------------------------------------------------------------

    def all_tensors(
        self, own: Mapping[str, Tensor], *, to: Literal["all", "rank0"]
    ) -> dict[str, Tensor]:
        """The tensors of all stages by name, in the order of the layers. *Collective*
        of the stages, which send all of theirs.

        Args:
            to: the ranks that want them; others get `{}`. "rank0" is the first stage.
        """
        keep = to == "all" or self.is_first
        forms = {
            name: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in own.items()
        }
        found: dict[str, Tensor] = {}
        sent: set[str] = set()  # copies of tied layers are equal: the lowest stage sends them
        for stage, theirs in enumerate(
            collectives.exchange(forms, self.axis, label=Label("gather"))
        ):
            for name, (shape, dtype) in theirs.items():
                if name in sent:
                    continue
                sent.add(name)
                x = (
                    own[name].contiguous()
                    if stage == self.stage
                    else torch.empty(shape, dtype=getattr(torch, dtype))
                )
                collectives.broadcast(x, self.axis, source=stage, label=Label("gather", name))
                if keep:
                    found[name] = x
        return dict(sorted(found.items(), key=lambda item: self.names.index(item[0])))

    def streamed(
        self, names: dict[str, str], forms: dict[str, Any], own: Iterator[Mapping[str, Tensor]]
    ) -> tuple[dict[str, str], dict[str, Any], Iterator[Mapping[str, Tensor]]]:
        """The keys, forms and tensors of all stages; the tensors one flat buffer of
        each stage at a time, on the first stage.

        *Collective* of the stages, also each step of the iterator: each sends its
        tensors to the others.

        Args:
            names: the keys of this stage's state dict, each with the name of its
                tensor.
            forms: the forms of these tensors, as plain values.
            own: these tensors, those of one flat buffer after the other.
        """
        every = collectives.exchange((names, forms), self.axis, label=Label("gather"))
        all_names = {key: name for theirs, _ in reversed(every) for key, name in theirs.items()}
        place = {name: index for index, name in enumerate(self.names)}
        ordered = dict(sorted(all_names.items(), key=lambda item: place[item[0]]))
        all_forms = {name: form for _, theirs in reversed(every) for name, form in theirs.items()}
        return ordered, all_forms, self._each(own, set(names.values()))

    def _each(
        self, own: Iterator[Mapping[str, Tensor]], stored: set[str]
    ) -> Iterator[Mapping[str, Tensor]]:
        copies = tuple(f"{tie.unit}." for tie in self.ties if tie.holders[0] != self.stage)
        while True:
            tensors = next(own, None)
            if not any(collectives.exchange(tensors is not None, self.axis, label=Label("gather"))):
                return
            items = (tensors or {}).items()
            kept = {name: x for name, x in items if name in stored and not name.startswith(copies)}
            yield self.all_tensors(kept, to="rank0")

    def stores(self, tensor: str) -> bool:
        """Whether this stage stores a tensor of the state in checkpoints.

        The lowest stage that holds a tied layer stores it, and the first stage the
        tensors of each rank along "data".
        """
        if tensor.startswith(("state.rng", "state.hook_states")):
            return self.is_first
        copies = [tie.unit for tie in self.ties if tie.holders[0] != self.stage]
        return not any(f"{unit}{end}" in tensor for unit in copies for end in "./")


def _kept(grad: Any, buffer: FlatParamPlan, shard: int) -> Tensor:
    """The part of a gradient that this rank has reduced."""
    part = grad if buffer.flow.reduces_to == "full" else own_shard(grad, buffer, shard)
    assert isinstance(part, Tensor), "tied layers are in memory"
    return part


def _check_pair(batch: Any) -> None:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        got = f"{len(batch)} items" if isinstance(batch, tuple | list) else type(batch).__name__
        raise ValueError(
            f"batch: a micro-batch of a pipeline must be (inputs, labels), got {got}; several "
            f"inputs are one tuple: ((x, mask), labels)"
        )


def order_of(keys: Sequence[Sequence[tuple[int, str]]]) -> Iterator[tuple[int, int]]:
    """The flat buffers of all stages, as (stage, place), in the order of the layers; a
    copy of a tied one is left out.

    Args:
        keys: the keys of each stage, its flat buffers as (number of the first layer
            that uses it, key).

    >>> list(
    ...     order_of(
    ...         [[(0, "tied/float32"), (1, "1/float32")], [(2, "2/float32"), (0, "tied/float32")]]
    ...     )
    ... )
    [(0, 0), (0, 1), (1, 0)]
    """
    homes: dict[str, tuple[int, int, int]] = {}
    for stage, own in enumerate(keys):
        for place, (layer, key) in enumerate(own):
            homes.setdefault(key, (layer, stage, place))
    return ((stage, place) for _, stage, place in sorted(homes.values()))
