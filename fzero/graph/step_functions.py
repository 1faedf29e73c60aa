"""`StepFunctions`: what the graphs of a train step compute, as functions of tensors:
forward, backward, collectives, update.

    params_P = gather(params_S)                               # stage 3
    loss, grads = value_and_grad(model)(params_P, batch)      # the graph contains the backward
    grads_S = reduce_scatter(grads)                           # sums in rank order, as in the eager step
    params_S, optimizer = update(params_S, grads_S, optimizer)

Values that change from step to step (rates, loss scale, counters) are tensors, so that
a change causes no new capture.

Shape letters: P padded elements of a flat buffer = F·S, S elements of a shard, F shards
(on one axis as many as ranks), W ranks, A micro-steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.comms import collectives
from fzero.comms.axes import LockstepAxis
from fzero.comms.collectives import labelled
from fzero.comms.comm_hooks import Sending
from fzero.comms.mesh import AxisMesh, OneRank, stacked_mesh, traced_mesh
from fzero.comms.records import Label
from fzero.comms.stacked import Stacked
from fzero.comms.traced import TracedAxis
from fzero.graph.model_in_graph import ModelInGraph
from fzero.graph.repeats import Repeats
from fzero.optim.loss_scale import LossScale
from fzero.optim.transforms import Transform
from fzero.plans.plan import FlatParamPlan
from fzero.runtime.finish import Outcome, finish, norm_parts
from fzero.runtime.module_buffers import agreed_buffers, range_starts
from fzero.runtime.step_runtime import StepRuntime
from fzero.state import TrainState
from fzero.verbs import (
    optimizer_update,
    start_join,
    start_reduce_scatter_grads,
    start_sum_replicas,
    update_together,
)
from sharding.views import torch_dtype

State = TrainState[Tensor]


class StepFunctions:
    """The functions of a step on one rank; with `stacked`, on all ranks at once.

    They write into the tensors of the state that they are given. A batch is one
    micro-batch. `step_info` (3,) are the number of this pass, a checksum, and the number
    of the micro-batch. Rows are (loss, weight or -1, the first two).

    Args:
        run: the parts of the step on this rank.
        transforms: a function called in each update. Its result gives the transform of
            a flat buffer from element `start` on, given the mesh, `start`, `skip`,
            `factor` and `out`.
        stacked: the ranks, where the functions run all of them.
    """

    def __init__(
        self,
        run: StepRuntime,
        transforms: Callable[[], Callable[..., Transform]],
        stacked: Stacked | None,
    ) -> None:
        plan, axis = run.plan, run.ranks
        assert not isinstance(axis, LockstepAxis), (
            "a graph of ranks in lockstep is made for an AbstractAxis"
        )
        self._device = run.device
        self._ranks: OneRank | Stacked = stacked or OneRank(plan.shard_of(run.rank))
        self._graph: AxisMesh[Any] = (
            traced_mesh(axis, plan, run.device) if stacked is None else stacked_mesh(stacked, plan)
        )
        self.axes = _by_group(self._graph)
        self._rules, self._num_micro_steps = run.rules, plan.num_micro_steps
        self._comm_hooks, self._trained = (
            plan.comm_hooks,
            tuple(flat for flat in plan.flat_buffers if flat.trainable),
        )
        self._transforms, self._kinds, self._ranges = (
            transforms,
            run.updater.kinds,
            run.changes.ranges,
        )
        self.model = ModelInGraph(run, self._graph, self._ranks)

    @property
    def num_ranks(self) -> int:
        num_ranks: int = self._graph.world.size
        return num_ranks

    def full_step(self, state: State, batch: Any, step_info: Tensor) -> tuple[Outcome, bool]:
        """A step of one micro-batch: its outcome, and whether losses are sums."""
        row, gradients, is_sum = self.model.value_and_grad(state, batch, step_info)

        def finish(state: State, row: Tensor, gradients: dict[str, Tensor]) -> Outcome:
            return self._updated(
                state, self._stack_rows(row)[None], self._reduced(gradients, state, is_sum), is_sum
            )

        return self._ranks.map(finish)(state, row, gradients), is_sum

    def gradients(self, state: State, batch: Any, step_info: Tensor) -> tuple[Tensor, bool]:
        """The step without the update; returns the rows of all ranks (W, 4), and
        whether losses are sums.
        """
        row, gradients, is_sum = self.model.value_and_grad(state, batch, step_info)
        rows = self._stack_rows(row)
        self._reduced(gradients, state, is_sum)
        self._agree(state.buffers)
        return rows, is_sum

    def micro_step(self, state: State, batch: Any, step_info: Tensor) -> tuple[Tensor, bool]:
        """Adds the gradients of one micro-batch to `grads`; reduces first those that a
        rank does not collect in full.
        """
        row, gradients, is_sum = self.model.value_and_grad(state, batch, step_info)

        def add(state: State, row: Tensor, gradients: dict[str, Tensor]) -> Tensor:
            scale = self._grad_scale(is_sum)
            for flat, grad in self._flattened(gradients):
                kept = state.grads[flat.key]
                if flat.flow.home("sum", is_last=False).adds_to_sum:
                    wide = torch.promote_types(
                        torch.promote_types(kept.dtype, grad.dtype), torch.float32
                    )
                    kept.copy_(kept.to(wide).add(grad.to(wide), alpha=scale))
                else:
                    kept.add_(self._reduce(_scaled(grad, scale, flat), flat, state))
            return self._stack_rows(row)

        return self._ranks.map(add)(state, row, gradients), is_sum

    def gathered(self, state: State) -> dict[str, Tensor]:
        """The flat buffers that a step gathers once, in full (P)."""
        return {
            flat.key: full
            for flat, full in self.model.gathered(state.params)
            if flat.flow.gathers_over
        }

    def evaluate(self, state: State, batch: Any) -> tuple[Tensor, Tensor | None]:
        """The loss of one batch, and its weight if it is a sum; writes the module
        buffers.
        """
        return self.model.loss(state, batch)

    def sums(self, state: State) -> None:
        """The sums over ranks that remain after the last micro-step, in a step without
        the update.
        """
        self._summed_up(state)
        self._agree(state.buffers)

    def update(self, state: State, rows_A: Tensor, is_sum: bool) -> Outcome:
        """The end of a step after its last micro-step; `rows_A` are those of all
        micro-steps (A, W, 4).
        """

        def finish(state: State, rows_A: Tensor) -> Outcome:
            return self._updated(state, rows_A, self._summed_up(state), is_sum)

        return self._ranks.map(finish)(state, rows_A)

    # --- parts of these, on one rank --------------------------------------------------------------

    def _reduced(
        self, gradients: dict[str, Tensor], state: State, is_sum: bool
    ) -> dict[str, Tensor]:
        """The sums over ranks of the only micro-step's gradients; also written to
        `grads`.
        """
        reduced = {}
        for flat, grad_P in self._flattened(gradients):
            grad = self._reduce(_scaled(grad_P, self._grad_scale(is_sum), flat), flat, state)
            grad = self._sum_late(grad, flat, state) if flat.flow.sums_late else grad
            reduced[flat.key] = self._keep(state, flat, grad)
        return reduced

    def _summed_up(self, state: State) -> dict[str, Tensor]:
        """The sums over ranks of the gradients that micro-steps collected in `grads`;
        also written there.
        """
        reduced = {}
        for flat in self._trained:
            grad, home = state.grads[flat.key], flat.flow.home("sum", is_last=True)
            if home.adds_to_sum:
                grad = self._keep(state, flat, self._reduce(grad, flat, state))
            elif home.adds_held:
                grad = self._keep(state, flat, self._sum_late(grad, flat, state))
            else:
                grad = grad.clone()  # the update may write into its gradient
            reduced[flat.key] = grad
        return reduced

    def _updated(
        self, state: State, rows_A: Tensor, reduced: dict[str, Tensor], is_sum: bool
    ) -> Outcome:
        """The outcome and the update, from the sums over ranks `reduced` and the rows
        (A, W, 4).
        """
        parts = self._norm_parts(reduced)
        outcome, skip, factor = finish(self._rules, rows_A, parts, state.loss_scale, is_sum=is_sum)
        assert skip is not None
        transform_of, repeats = self._transforms(), Repeats()
        wholes = [flat for flat in self._trained if not flat.elementwise]
        self._update_wholes(wholes, state, reduced, skip, factor, transform_of)
        for flat in (flat for flat in self._trained if flat.elementwise):
            self._update_flat(flat, state, reduced[flat.key], skip, factor, transform_of, repeats)
        self._agree(state.buffers)
        return outcome._replace(loss_scale=LossScale(*(x.clone() for x in outcome.loss_scale)))

    def _stack_rows(self, row: Tensor) -> Tensor:
        """The rows of all ranks, in rank order (W, 4)."""
        return collectives.stack(row, self._graph.world, label=Label("loss_stats"))

    def _grad_scale(self, is_sum: bool) -> float:
        """The factor on a micro-step's gradients."""
        return 1 / (self._rules.loss.predivide * (1 if is_sum else self._num_micro_steps))

    def _flattened(self, grads: dict[str, Tensor]) -> Iterator[tuple[FlatParamPlan, Tensor]]:
        """The flat gradients (P)."""
        for flat in self._trained:
            grads_N = [grads[name].reshape(-1) for name in flat.layout.names]
            yield flat, torch.cat([*grads_N, grads_N[0].new_zeros(flat.layout.partition.padding)])

    def _reduce(self, grad_P: Tensor, flat: FlatParamPlan, state: State) -> Tensor:
        """The sum over ranks: (P) in stage 0, else this rank's shard (S). If it
        `sums_late`, over the shard axes only.
        """
        grad_P, states = (
            grad_P.to(torch_dtype(flat.flow.send_dtype)),
            state.hook_states.get(flat.key, {}),
        )
        label, is_last = Label("reduce", flat.key), not flat.flow.sums_late
        how: dict[str, Any] = {"states": states, "label": label, "is_last": is_last}
        with labelled(label):
            return _end(
                start_reduce_scatter_grads(grad_P, flat, self._graph, self._comm_hooks, **how),
                states,
            )

    def _sum_late(self, grad_S: Tensor, flat: FlatParamPlan, state: State) -> Tensor:
        """The sum over the replicate axes of the shards that micro-steps have added up."""
        states = state.hook_states.get(flat.key, {})
        grad_S, label = grad_S.to(torch_dtype(flat.flow.send_dtype)), Label("reduce", flat.key)
        with labelled(label):
            return _end(
                start_sum_replicas(
                    grad_S, self._graph, self._comm_hooks, states=states, label=label
                ),
                states,
            )

    def _keep(self, state: State, flat: FlatParamPlan, reduced: Tensor) -> Tensor:
        """Writes a reduced gradient to `state.grads`; returns it in the dtype in which
        it is kept.
        """
        reduced, kept = reduced.to(torch_dtype(flat.flow.keep_dtype)), state.grads[flat.key]
        if flat.flow.reduced_numel == flat.flow.grad_numel:
            kept.copy_(reduced)
        else:
            self._ranks.write_shard(kept, reduced)
        return reduced

    def _update_flat(
        self,
        flat: FlatParamPlan,
        state: State,
        grad: Tensor,
        skip: Tensor,
        factor: Tensor | None,
        transform_of: Callable[..., Transform],
        repeats: Repeats,
    ) -> None:
        updated, kept, out, start = self._part(flat, state)

        def update(
            grad: Tensor, kept: Tensor, optimizer: Any, start: int, *numbers: Tensor | None
        ) -> None:
            skip, factor, out = numbers
            transform = transform_of(
                flat, mesh=self._graph, start=start, skip=skip, factor=factor, out=out
            )

            def write(*_: Tensor) -> None:
                optimizer_update(transform, kept, grad, optimizer, donate=True)

            written = [grad, kept, *optree.tree_leaves(optimizer), *([] if out is None else [out])]
            repeats(write, written, kind=self._kinds[flat.key])

        self._ranks.rank_by_rank(
            update, grad, kept, state.optimizer[flat.key], start, skip, factor, out
        )
        self._join(flat, state, updated)

    def _update_wholes(
        self,
        flats: Sequence[FlatParamPlan],
        state: State,
        reduced: Mapping[str, Tensor],
        skip: Tensor,
        factor: Tensor | None,
        transform_of: Callable[..., Transform],
    ) -> None:
        """Updates together the flat buffers whose elements depend on each other."""
        parts = [self._part(flat, state) for flat in flats]
        transforms = [
            transform_of(flat, mesh=self._graph, start=start, skip=skip, factor=factor, out=out)
            for flat, (_, _, out, start) in zip(flats, parts, strict=True)
        ]
        grads = [reduced[flat.key] for flat in flats]
        kept, optimizers = (
            [kept for _, kept, _, _ in parts],
            [state.optimizer[flat.key] for flat in flats],
        )
        update_together(transforms, grads, kept, optimizers)
        for flat, (updated, *_) in zip(flats, parts, strict=True):
            self._join(flat, state, updated)

    def _part(self, flat: FlatParamPlan, state: State) -> tuple[Tensor, Tensor, Tensor | None, Any]:
        """This rank's part of the parameters, the tensor that is updated, where the new
        parameters are written besides, and the first element of the part.
        """
        param = state.params[flat.key]
        updated = (
            self._ranks.shard_of(param, flat.shard_numel).clone() if flat.flow.joins_over else param
        )
        kept, out = (state.master[flat.key], updated) if flat.has_master else (updated, None)
        start = self._ranks.shard_start(flat.shard_numel) if flat.flow.updates == "shard" else 0
        return updated, kept, out, start

    def _join(self, flat: FlatParamPlan, state: State, updated: Tensor) -> None:
        """Gathers the updated parts where every rank holds all parameters."""
        if flat.flow.joins_over:
            label = Label("all_gather_params", flat.key)
            joined = start_join(updated, flat, self._graph, label=label).wait()
            state.params[flat.key].copy_(joined)

    def _norm_parts(self, reduced: dict[str, Tensor]) -> Tensor:
        own = (
            self._ranks.shard_of(reduced[flat.key], flat.shard_numel)
            for flat in self._trained
            if flat.shard_numel
        )
        stack = partial(self._graph.stack, label=Label("norm"))
        measured = map(self._rules.loss.of_shard, own)
        return norm_parts(self._rules.loss, measured, stack=stack, device=self._device)

    def _agree(self, buffers: dict[str, Tensor]) -> None:
        """Makes module buffers equal on all ranks, by the rule of the eager step. It
        also sends those that did not change.
        """
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, tensor in buffers.items():
            if self._graph.world.size > 1 and tensor.numel():
                by_dtype.setdefault(tensor.dtype, []).append(name)
        for names in by_dtype.values():
            flat = torch.cat([buffers[name].reshape(-1) for name in names])
            rows = collectives.stack(flat, self._graph.world, label=Label("buffers"))
            places = range_starts([(buffers[name].numel(), name in self._ranges) for name in names])
            values = torch.split(
                agreed_buffers(rows, places), [buffers[name].numel() for name in names]
            )
            for name, value in zip(names, values):
                buffers[name].copy_(value.view(buffers[name].shape))


def _scaled(grad: Tensor, scale: float, flat: FlatParamPlan) -> Tensor:
    """The scaled gradient in the dtype in which it is sent, rounded once."""
    dtype = torch_dtype(flat.flow.send_dtype)
    grad = grad.to(torch.promote_types(dtype, grad.dtype))
    return (grad if scale == 1 else grad * scale).to(dtype)


def _by_group(mesh: AxisMesh[Any]) -> dict[str, TracedAxis]:
    """The axes of one rank, by the names of their groups in a graph."""
    axes = [
        axis
        for axis in (mesh.world, *mesh.axes, *mesh.replicate_axes, mesh.seq)
        if isinstance(axis, TracedAxis)
    ]
    return {axis.group_name: axis for axis in axes if axis.size > 1}


def _end(sending: Sending, states: Mapping[str, Any]) -> Tensor:
    """The result of a reduction; overwrites the states of comm hooks that have changed."""
    result, after = sending.wait()
    for kept, now in zip(optree.tree_leaves(states), optree.tree_leaves(after), strict=True):
        if now is not kept:
            kept.copy_(now)
    return result
