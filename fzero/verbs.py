"""The four verbs that move model state: `shard`, `gather`, `reduce_scatter_grads`, `optimizer_update`.

The first three are pure functions of a pytree of tensors and a pytree of the same structure with a `sharding.TensorSpec` for
every tensor. A leaf may have any shape: it is flattened and padded to P elements, and its shards are the W equal parts of
that. A train step is the composition of the verbs:

    params_P = gather(params_S, specs, axis)
    grads_P, loss = grad_and_value(loss_fn)(params_P, batch)
    grads_S = reduce_scatter_grads(grads_P, specs, axis)
    params_S, state_S = optimizer_update(transform, params_S, grads_S, state_S)

The verbs obey three laws: gather ∘ shard = id, reduce_scatter_grads = shard ∘ mean, and the transpose of gather is
W · reduce_scatter_grads. So the gradient of a loss of gathered shards is the sum over ranks of their gradients. (A `Replicated`
leaf is gathered already, and its gradient is this rank's own.)

They are made of the primitives of `fzero.comms.primitives`. So they work in autograd, `torch.func`, `torch.compile` and
`make_fx`, and on every axis: an axis is the group of ranks that share the tensors, and a leaf is this rank's. For ranks that are
simulated in one process, call the verbs inside of `fzero.comms.Stacked.each`.

Shape letters: P padded elements = W·S, S elements of a shard, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.comms import primitives
from fzero.comms.primitives import Axis
from fzero.optim.transforms import Transform
from sharding import DEVICE, Partition, Replicated, Sharded, Spec, TensorSpec
from sharding.views import dtype_name, pad, take_shard


def specs_of(tree: Any, spec: Spec | None = None, *, multiple_of: int = 1) -> Any:
    """A `TensorSpec` for every tensor of `tree`, all with the same `spec` (default `Replicated()`).

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
    """This rank's shards of a full tree. Leaves that are not `Sharded` are returned unchanged. Sends nothing.

    Args:
        tree: full tensors, each with the shape of its spec.
        specs: a `TensorSpec` for each tensor.
        axis: the ranks that share the tensors.

    Returns:
        A tree of the same structure. A `Sharded` leaf is a new tensor of S elements.

    Raises:
        ValueError: the shape of a leaf differs from its spec's, or a spec names another axis.
    """

    def one(x: Tensor, partition: Partition) -> Tensor:
        x_P, rank = pad(x.reshape(-1), partition), axis.rank
        if isinstance(rank, Tensor):  # of stacked ranks
            return x_P.view(axis.size, partition.shard_numel).index_select(0, rank.view(1)).view(-1)
        return take_shard(x_P, partition, rank).clone()

    return _map(tree, specs, axis, full=True, sharded=one, replicated=lambda x, _: x)


def gather(tree: Any, specs: Any, axis: Axis) -> Any:
    """The full tree from the shards of all ranks: the inverse of `shard`.

    *Collective:* every rank of `axis` calls it; sends `(W-1)/W · P` elements for each `Sharded` leaf.

    Args:
        tree: for each `Sharded` spec this rank's shard, S elements; other leaves are full.
        specs: a `TensorSpec` for each tensor.
        axis: the ranks that share the tensors.

    Returns:
        A tree of the same structure, each tensor with the shape of its spec.

    Raises:
        ValueError: a leaf has not the length of its spec's shard, or a spec names another axis.
    """

    def one(x: Tensor, partition: Partition) -> Tensor:
        return primitives.all_gather(x, axis)[: partition.numel]

    return _map(tree, specs, axis, full=False, sharded=one, replicated=lambda x, _: x)


def reduce_scatter_grads(tree: Any, specs: Any, axis: Axis) -> Any:
    """The mean over all ranks of their full gradients: this rank's shard of it, or the full mean for a `Replicated` spec.

    `Partial` leaves are returned unreduced. Sums are made in rank order.

    *Collective:* every rank of `axis` calls it; sends `(W-1)/W · P` elements for a `Sharded` leaf, and twice that for a
    `Replicated` one (an all-reduce is a reduce-scatter and an all-gather).

    Args:
        tree: this rank's full gradients, each with the shape of its spec.
        specs: a `TensorSpec` for each tensor: how the result is divided.
        axis: the ranks that share the tensors.

    Returns:
        A tree of the same structure. A `Sharded` leaf has S elements.

    Raises:
        ValueError: the shape of a leaf differs from its spec's, or a spec names another axis.
    """

    def sharded(x: Tensor, partition: Partition) -> Tensor:
        return primitives.reduce_scatter(pad(x.reshape(-1), partition), axis) * (1 / axis.size)

    def replicated(x: Tensor, partition: Partition) -> Tensor:
        return primitives.all_gather(sharded(x, partition), axis)[: partition.numel].reshape(x.shape)

    return _map(tree, specs, axis, full=True, sharded=sharded, replicated=replicated)


def optimizer_update(transform: Transform, params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
    """One update of every tensor: parameters and gradients → new parameters and new optimizer state. Sends nothing.

    It works on copies, so its arguments keep their values. (A train step passes its own tensors, which the transform
    overwrites.)

    Args:
        transform: see `fzero.optim.transforms`.
        params, grads: pytrees of tensors with the same structure, such as shards.
        state: the same structure, with the transform's state in place of each tensor.

    Returns:
        The new parameters and the new state, structured as the old ones.
    """
    leaves, treespec = optree.tree_flatten(params)
    grad_leaves = treespec.flatten_up_to(grads)
    state_leaves = treespec.flatten_up_to(state)
    updated = [
        transform.update(grad.clone(), param.clone(), optree.tree_map(torch.clone, old))
        for param, grad, old in zip(leaves, grad_leaves, state_leaves, strict=True)
    ]
    return (
        treespec.unflatten([param for _, param, _ in updated]),
        treespec.unflatten([new for _, _, new in updated]),
    )


def _map(
    tree: Any,
    specs: Any,
    axis: Axis,
    *,
    full: bool,
    sharded: Callable[[Tensor, Partition], Tensor],
    replicated: Callable[[Tensor, Partition], Tensor],
) -> Any:
    """Applies `sharded` or `replicated` to each leaf, as its spec says; `Partial` leaves are returned unchanged.

    Args:
        tree, specs, axis: as in the verbs.
        full: whether the leaves of `tree` are full tensors, or shards where the spec is `Sharded`.
        sharded: the function of a `Sharded` leaf.
        replicated: the function of a `Replicated` leaf.

    Raises:
        ValueError: a leaf is no tensor or has another shape than its spec says, or a spec names another axis.
    """

    def one(path: tuple[Any, ...], x: Tensor, spec: TensorSpec) -> Tensor:
        name = ".".join(map(str, path)) or "the tensor"
        if not isinstance(x, Tensor):
            raise ValueError(
                f"{name}: must be a tensor in memory, got {x!r}; load a state from files with fzero.place(state, step)"
            )
        if not isinstance(spec.spec, Replicated) and spec.spec.axes != (axis.name,):
            raise ValueError(
                f"{name}: its spec {spec.spec!r} must name the axis in use, got {axis.name!r}; pass that axis"
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
