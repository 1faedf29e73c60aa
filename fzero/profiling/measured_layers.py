"""`measure_layers`: the measured cost of each layer of a pipeline, by which it is cut
into stages.

    costs = measure_layers(model, (inputs, labels), device="cuda")
    model = PipelineModule(layers, num_stages=4, loss_fn=loss_fn, partition_method=costs)

Each layer runs forward and backward alone, on the outputs of the layer before it.
`fzero.estimation.estimate_layers` predicts the same without running anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fzero.comms.collectives import exchange
from fzero.comms.process_group import job
from fzero.pipeline.module import PipelineModule
from fzero.pipeline.partition import LayerCost


def measure_layers(
    model: PipelineModule,
    batch: tuple[Any, Any],
    *,
    repeats: int = 3,
    device: torch.device | str = "cpu",
    nbytes_per_param: float = 16.0,
) -> tuple[LayerCost, ...]:
    """The seconds and bytes of each layer for one micro-batch, measured on this
    process.

    *Collective:* every rank of the job; all get what rank 0 measured, so that they cut
    alike.

    Args:
        model: its layers are all built on `device`; the loss, if it has one, counts in
            the last layer.
        batch: inputs and labels of a micro-batch, with values.
        repeats: the fastest of so many runs counts.
        device: where the layers run.
        nbytes_per_param: of parameters, gradients and optimizer state, for each element
            (16: 16 bits with an fp32 master and Adam; less where ZeRO divides them).

    Returns:
        A `partition_method` of the module.
    """
    whole = model.build(0, model.num_layer_specs).to(device)
    inputs, labels = (
        optree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, part)
        for part in batch
    )
    costs = list[LayerCost]()
    for index, layer in whole.calls(0, model.num_layer_specs):
        call = layer
        if index == model.num_layer_specs - 1 and model.loss_fn is not None:
            call = _with_loss(layer, model.loss_fn, labels)
        runs = [_run(call, inputs, whole) for _ in range(repeats)]
        _, _, stored, outputs = runs[0]
        # a tied layer with a forward of its own
        module = layer.args[0] if isinstance(layer, partial) else layer
        numel = sum(p.numel() for p in module.parameters()) if isinstance(module, nn.Module) else 0
        costs.append(
            LayerCost(
                min(forward for forward, *_ in runs),
                min(backward for _, backward, *_ in runs),
                round(numel * nbytes_per_param),
                stored,
                sum(x.nbytes for x in _tensors(outputs)),
            )
        )
        inputs = outputs
    return tuple(LayerCost(*row) for row in exchange([astuple(cost) for cost in costs], job())[0])


def _with_loss(
    layer: Callable[[Any], Any], loss_fn: Callable[..., Any], labels: Any
) -> Callable[[Any], Any]:
    return lambda x: loss_fn(layer(x), labels)


def _run(
    call: Callable[[Any], Any], inputs: Any, whole: nn.Module
) -> tuple[float, float, int, Any]:
    """Seconds of a forward and of a backward, bytes stored between them, and the
    outputs.
    """
    known = {x.untyped_storage()._cdata for x in (*whole.parameters(), *whole.buffers())}
    stored = dict[int, int]()

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage()._cdata not in known:
            stored[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    fresh = optree.tree_map(_leaf, inputs)
    start = _now(fresh)
    with saved_tensors_hooks(pack, lambda x: x):
        outputs = call(fresh)
    middle = _now(outputs)
    roots = [x for x in _tensors(outputs) if x.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
    stop = _now(outputs)
    whole.zero_grad(set_to_none=True)
    made = optree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, outputs)
    return middle - start, stop - middle, sum(stored.values()), made


def _leaf(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.detach().requires_grad_(x.is_floating_point())


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(tree, none_is_leaf=True) if isinstance(x, Tensor)]


def _now(tree: Any) -> float:
    """The time, when the device has done what it was given."""
    if any(x.is_cuda for x in _tensors(tree)):
        torch.cuda.synchronize()
    return time.perf_counter()
