"""The four verbs that move model state: `shard`, `gather`, `reduce_scatter_grads`,
`optimizer_update`.

Each verb has two forms. The form for a tree takes any tensors. The first three verbs
are pure functions of two pytrees of the same structure: one of tensors, and one with a
`sharding.TensorSpec` for every tensor. A leaf may have any shape. It is flattened and
padded to P elements, and cut into W equal shards. A train step is the composition of
the verbs:

    params_P = gather(params_S, specs, axis)
    grads_P, loss = grad_and_value(loss_fn)(params_P, batch)
    grads_S = reduce_scatter_grads(grads_P, specs, axis)
    params_S, state_S = optimizer_update(transform, params_S, grads_S, state_S)

The verbs obey three laws: gather ∘ shard = id, reduce_scatter_grads = shard ∘ mean, and
the transpose of gather is W · reduce_scatter_grads. So if a loss is computed from
gathered shards, its gradient is the sum of the gradients of all ranks. (A `Replicated`
leaf is not gathered, so its gradient is this rank's own.)

The verbs consist of the primitives of `fzero.comms.primitives`. So they work in
autograd, `torch.func`, `torch.compile` and `make_fx`, and on every axis. An axis is the
group of ranks that share the tensors; each rank passes its own leaves. For ranks that
are simulated in one process, call the verbs inside of `fzero.comms.Stacked.map`.

`make_train_step` sends with the form for a flat buffer of a plan (`start_gather`,
`start_reduce_scatter_grads`, `start_sum_replicas`, `start_join`), in eager, captured,
lockstep and stacked steps. Nothing else sends parameters or gradients. It works on a
mesh of several axes, uses the plan's comm hooks, and returns at once. It sums
gradients. The update multiplies the sum by the factor that makes it a mean, together
with the factor of clipping (`fzero.runtime.finish`).

Shape letters: P padded elements = W·S, S elements of a shard, W ranks; on a mesh of
several axes F·S, F shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor

import fzero.comms as comms
from fzero.comms.collectives import GATHER, OTHER, REDUCE
from fzero.comms.comm_hooks import Sending, State
from fzero.comms.mesh import AxisMesh
from fzero.comms.pending import Pending
from fzero.comms.records import Label
from fzero.optim.owner_calls import run_together
from fzero.optim.transforms import Transform
from fzero.plans.dataflow import CommHooks, along
from fzero.plans.flat_params import FlatParamPlan
from sharding import DEVICE, Partition, Replicated, Sharded, Spec, TensorSpec
from sharding.views import dtype_name, pad, take_shard

if TYPE_CHECKING:
    from fzero.comms.primitives import Axis


def specs_of(tree: Any, spec: Spec | None = None, *, multiple_of: int = 1) -> Any:
    """A `TensorSpec` for every tensor of `tree`, all with the same `spec` (default
    `Replicated()`).

    >>> specs_of({"w": torch.zeros(3, 2)}, Sharded("data"))["w"].local_shape(world_size=4)
    (2,)
    """
    spec = Replicated() if spec is None else spec

    def one(x: Tensor) -> TensorSpec:
        return TensorSpec(
            tuple(x.shape), dtype_name(x.dtype), spec, DEVICE, multiple_of
        )  # Dynamo knows no default values

    return optree.tree_map(one, tree)


def shard(tree: Any, specs: Any, axis: Axis) -> Any:
    """This rank's shards of a full tree. Leaves that are not `Sharded` are returned
    unchanged. Sends nothing.

    Args:
        tree: full tensors, each with the shape of its spec.
        specs: a `TensorSpec` for each tensor.
        axis: the ranks that share the tensors.

    Returns:
        A tree of the same structure. A `Sharded` leaf is a new tensor of S elements.

    Raises:
        ValueError: the shape of a leaf differs from its spec's, or a spec names another
            axis.
    """

    def one(x: Tensor, partition: Partition) -> Tensor:
        x_P, rank = pad(x.reshape(-1), partition), axis.rank
        if isinstance(rank, Tensor):  # a number of stacked ranks
            return x_P.view(axis.size, partition.shard_numel).index_select(0, rank.view(1)).view(-1)
        return take_shard(x_P, partition, rank).clone()

    return _map(tree, specs, axis, full=True, sharded=one, replicated=lambda x, _: x)


def gather(tree: Any, specs: Any, axis: Axis) -> Any:
    """The full tree from the shards of all ranks: the inverse of `shard`.

    *Collective:* every rank of `axis` calls it; sends `(W-1)/W · P` elements for each
    `Sharded` leaf.

    Args:
        tree: for each `Sharded` spec this rank's shard, S elements; other leaves are
            full.
        specs: a `TensorSpec` for each tensor.
        axis: the ranks that share the tensors.

    Returns:
        A tree of the same structure, each tensor with the shape of its spec.

    Raises:
        ValueError: the length of a leaf differs from its spec's shard, or a spec names
            another axis.
    """

    def one(x: Tensor, partition: Partition) -> Tensor:
        return comms.all_gather(x, axis)[: partition.numel]

    return _map(tree, specs, axis, full=False, sharded=one, replicated=lambda x, _: x)


def reduce_scatter_grads(tree: Any, specs: Any, axis: Axis) -> Any:
    """The mean of all ranks' gradients: this rank's shard of it for a `Sharded` spec,
    the full mean for a `Replicated` one.

    `Partial` leaves are returned unreduced. Sums are made in rank order.

    *Collective:* every rank of `axis` calls it; sends `(W-1)/W · P` elements for a
    `Sharded` leaf, and twice that for a `Replicated` one (an all-reduce is a
    reduce-scatter and an all-gather).

    Args:
        tree: this rank's full gradients, each with the shape of its spec.
        specs: a `TensorSpec` for each tensor: how the result is divided.
        axis: the ranks that share the tensors.

    Returns:
        A tree of the same structure. A `Sharded` leaf has S elements.

    Raises:
        ValueError: the shape of a leaf differs from its spec's, or a spec names another
            axis.
    """

    def sharded(x: Tensor, partition: Partition) -> Tensor:
        return comms.reduce_scatter(pad(x.reshape(-1), partition), axis) * (1 / axis.size)

    def replicated(x: Tensor, partition: Partition) -> Tensor:
        return comms.all_gather(sharded(x, partition), axis)[: partition.numel].reshape(x.shape)

    return _map(tree, specs, axis, full=True, sharded=sharded, replicated=replicated)


def optimizer_update(
    transform: Transform, params: Any, grads: Any, state: Any, *, donate: bool = False
) -> tuple[Any, Any]:
    """One update of every tensor: parameters and gradients → new parameters and new
    optimizer state. Sends nothing.

    Args:
        transform: see `fzero.optim.transforms`.
        params, grads: pytrees of tensors with the same structure, such as shards.
        state: the same structure, with the transform's state instead of each tensor.
        donate: whether the result may use the memory of the arguments, which must then
            not be used again; a train step donates its tensors. If False, the transform
            works on copies.

    Returns:
        The new parameters and the new state, with the structure of the old ones.
    """
    leaves, treespec = optree.tree_flatten(params)
    given = (leaves, treespec.flatten_up_to(grads), treespec.flatten_up_to(state))
    param_leaves, grad_leaves, state_leaves = (
        given if donate else optree.tree_map(torch.clone, given)
    )
    new_params, new_states = transform.update_each(grad_leaves, param_leaves, state_leaves)
    return treespec.unflatten(new_params), treespec.unflatten(new_states)


def update_together(
    transforms: Sequence[Transform],
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    states: Sequence[Any],
) -> list[Any]:
    """The updates of several flat tensors, each with its own transform, in place; their
    new states. Owners of whole matrices are called for all together.

    *Collective* for transforms that are not elementwise; each says what it sends.
    """
    given = zip(transforms, grads, params, states, strict=True)
    updated = run_together([transform.start(*of) for transform, *of in given])
    return [state for _, _, state in updated]


# --- the verbs of a flat buffer, with which a step sends ------------------------------------------


def start_gather(
    shard: Tensor,
    buffer: FlatParamPlan,
    mesh: AxisMesh[Any],
    hooks: CommHooks,
    *,
    out: Tensor | None = None,
    label: Label = GATHER,
) -> Pending:
    """Starts to gather a flat buffer's parameters, from this rank's part to all P
    elements.

    *Collective:* every rank along `buffer.flow.gathers_over`; sends `(F-1)/F · P`
    elements. If there is no such axis, every rank holds all parameters: nothing is
    sent, and the result is `shard` itself.

    Args:
        shard: `buffer.flow.param_numel` elements.
        out: the result is written here; None makes a new tensor.
    """
    own = hooks.of_gathers(buffer.dtypes.param, trained=buffer.trainable)
    return mesh.start_all_gather(
        shard, out, along(mesh.axes, buffer.flow.gathers_over), hooks=own, label=label
    )


def start_reduce_scatter_grads(
    full_P: Tensor,
    buffer: FlatParamPlan,
    mesh: AxisMesh[Any],
    hooks: CommHooks,
    *,
    states: Mapping[str, State] = {},
    is_last: bool = True,
    out_S: Tensor | None = None,
    accumulated_S: Tensor | None = None,
    label: Label = REDUCE,
) -> Sending:
    """Starts to sum a flat buffer's gradients over all ranks. The result is this rank's
    shard (S), in stage 0 all of it (P).

    *Collective:* every rank; sends `(F-1)/F · P` elements for a shard, twice that for
    all, and `2(R-1)/R · S` over R replicas.

    Args:
        full_P: this rank's gradient in `buffer.flow.send_dtype`; it may be overwritten.
        states: the states of the comm hooks, by axis.
        is_last: whether this is the last micro-step; in earlier ones shards are not
            summed over the replicate axes.
        out_S, accumulated_S: see `AxisMesh.start_reduce_scatter`.
    """
    how: dict[str, Any] = {"hooks": hooks.reduce, "states": states, "label": label}
    if buffer.flow.reduces_to == "full":
        return mesh.start_all_reduce(full_P, **how)
    return mesh.start_reduce_scatter(
        full_P,
        out_S=out_S,
        sum_replicas="now" if is_last else "later",
        accumulated_S=accumulated_S,
        **how,
    )


def start_sum_replicas(
    shard_S: Tensor,
    mesh: AxisMesh[Any],
    hooks: CommHooks,
    *,
    states: Mapping[str, State] = {},
    label: Label = REDUCE,
) -> Sending:
    """Starts to sum accumulated shards over the replicate axes, in place, after the
    last micro-step (`buffer.flow.sums_late`).

    *Collective:* every rank along these axes; sends `2(R-1)/R · S` elements over R
    replicas.
    """
    return mesh.start_sum_replicas(shard_S, hooks=hooks.reduce, states=states, label=label)


def start_join(
    updated_S: Tensor,
    buffer: FlatParamPlan,
    mesh: AxisMesh[Any],
    *,
    out: Tensor | None = None,
    label: Label = OTHER,
) -> Pending:
    """Starts to gather updated shards. Needed if a rank holds more of the parameters
    than it updates.

    *Collective:* every rank along `buffer.flow.joins_over`; a rank sends as many
    elements as it holds but does not update.

    Args:
        updated_S: `buffer.flow.updated_numel` elements; may be this rank's part of
            `out`.
        out: `buffer.flow.param_numel` elements; None makes a new tensor.
    """
    return mesh.start_all_gather(
        updated_S, out, along(mesh.axes, buffer.flow.joins_over), label=label
    )


def gather_flat(part: Tensor, buffer: FlatParamPlan, mesh: AxisMesh[Any]) -> Tensor:
    """All P elements of a flat buffer's tensor, from this rank's part of it. They are
    sent exactly, without comm hooks.

    *Collective* where a rank has a part only: every rank; sends `(F-1)/F · P` elements.

    Args:
        part: `buffer.flow.updated_numel` or `buffer.flow.param_numel` elements.
    """
    if part.numel() == buffer.flow.updated_numel:
        part = start_join(part, buffer, mesh, label=GATHER).wait()
    return start_gather(part, buffer, mesh, CommHooks()).wait()


def gather_shards(shard: Tensor, mesh: AxisMesh[Any]) -> Tensor:
    """All P elements from the finest shards (S), as a primitive on each axis: any
    transform may differentiate it. *Collective:* every rank along `mesh.axes`.
    """
    for axis in reversed(mesh.axes):
        shard = comms.all_gather(shard, axis)
    return shard


def _map(
    tree: Any,
    specs: Any,
    axis: Axis,
    *,
    full: bool,
    sharded: Callable[[Tensor, Partition], Tensor],
    replicated: Callable[[Tensor, Partition], Tensor],
) -> Any:
    """Applies `sharded` or `replicated` to each leaf, as its spec says; `Partial`
    leaves are returned unchanged.

    Args:
        tree, specs, axis: as in the verbs.
        full: whether the leaves of `tree` are full tensors, or shards where the spec is
            `Sharded`.
        sharded: the function of a `Sharded` leaf.
        replicated: the function of a `Replicated` leaf.

    Raises:
        ValueError: a leaf is no tensor or has another shape than its spec says, or a
            spec names another axis.
    """

    def one(path: tuple[Any, ...], x: Tensor, spec: TensorSpec) -> Tensor:
        name = ".".join(map(str, path)) or "the tensor"
        if not isinstance(x, Tensor):
            raise ValueError(
                f"{name}: must be a tensor in memory, got {x!r}; load a state from files with "
                f"fzero.place(state, step)"
            )
        if not isinstance(spec.spec, Replicated) and spec.spec.axes != (axis.name,):
            raise ValueError(
                f"{name}: its spec {spec.spec!r} must name the axis in use, got {axis.name!r}; "
                f"pass that axis"
            )
        expected = spec.shape if full else spec.local_shape(axis.size)
        if tuple(x.shape) != expected:
            raise ValueError(
                f"{name}: must have the shape {expected} of {spec}, got {tuple(x.shape)}; pass "
                f"{'full tensors' if full else f'shards of {axis.size} ranks'} or make new specs"
            )
        partition = spec.partition(axis.size)
        if isinstance(spec.spec, Sharded):
            out = sharded(x, partition)
            return out if full else out.reshape(spec.shape)
        return replicated(x, partition) if isinstance(spec.spec, Replicated) else x

    return optree.tree_map_with_path(one, tree, specs)
