"""DeepSpeed's formulas for the memory of model states, to compare with `fzero.plan`,
which counts.

A formula takes the numbers of parameters and ranks, and ignores padding, small
parameters, buckets and activations. The names and arguments of `estimate_zero*` are
DeepSpeed's, and so are the numbers: up to 0.8 its stage-2 formula charged the full
gradients to each GPU (`formula="old"`), since then their shards (`"present"`).

Letters: Ψ parameters, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import nn

GiB = 2**30


class MemNeeds(NamedTuple):
    """Bytes in the host memory of a node ("per CPU") and on a GPU."""

    cpu: int
    gpu: int


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
    *,
    formula: Literal["present", "old"] = "present",
) -> MemNeeds:
    """DeepSpeed's estimate for stages 1 and 2.

    Args:
        total_params: Ψ.
        formula: `"old"` is the formula up to 0.8, which DeepSpeed's documentation still
            shows.

    >>> [
    ...     estimate_zero2_model_states_mem_needs(1e9, 8, cpu_offload=False, formula=f).gpu
    ...     for f in ("present", "old")
    ... ]
    [4250000000, 6000000000]
    """
    num_gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        return MemNeeds(
            int(total_params * max(4 * num_gpus, 16) * additional_buffer_factor),
            int(2 * total_params),
        )
    replicated, divided = {"present": (2, 18), "old": (4, 16)}[formula]
    gpu = replicated * total_params + int(divided * total_params / num_gpus)
    return MemNeeds(int(total_params * 4 * num_gpus_per_node * additional_buffer_factor), int(gpu))


class MemNeeds3(NamedTuple):
    """`MemNeeds`, and the bytes of the largest layer: its gathered parameters and full
    gradients.
    """

    cpu: int
    gpu: int
    largest_layer_memory: int


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> MemNeeds3:
    """DeepSpeed's estimate for stage 3; parameters are offloaded only where the
    optimizer is.

    Args:
        total_params: Ψ.
        largest_layer_params: the most that one module has, without its children.
        zero_init: whether the model is made under `deepspeed.zero.Init`.

    >>> estimate_zero3_model_states_mem_needs(1e9, 1e7, 8, 1, cpu_offload=False)
    MemNeeds3(cpu=480000000, gpu=2290000000, largest_layer_memory=40000000)
    """
    largest = int(4 * largest_layer_params)
    full = 4 * num_gpus_per_node
    if not cpu_offload:
        cpu = (largest_layer_params if zero_init else total_params) * full
        gpu = largest + int(18 * total_params / (num_nodes * num_gpus_per_node))
        return MemNeeds3(int(cpu * additional_buffer_factor), gpu, largest)
    moved = (18 if cpu_offload_params else 16) / num_nodes
    cpu = total_params * (moved if zero_init else max(full, moved))
    gpu = largest + (
        0 if cpu_offload_params else int(2 * total_params / (num_nodes * num_gpus_per_node))
    )
    return MemNeeds3(int(cpu * additional_buffer_factor), gpu, largest)


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """(parameters of a model, tied ones once; parameters of its largest module without
    its children).
    """
    total = sum(param.numel() for param in model.parameters())
    return total, max(
        sum(param.numel() for param in m.parameters(recurse=False)) for m in model.modules()
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    formula: Literal["present", "old"] = "present",
    show: Callable[[str], object] = print,
) -> None:
    """Shows the estimates for stage 2 with and without offload, as DeepSpeed prints
    them; `show` gets each line.
    """
    _head(f"{int(total_params / 1e6)}M total params.", num_nodes, num_gpus_per_node, show)
    for offload in (True, False):
        needs = estimate_zero2_model_states_mem_needs(
            total_params,
            num_gpus_per_node,
            num_nodes,
            offload,
            additional_buffer_factor,
            formula=formula,
        )
        show(f"{_cells(needs)} | offload_optimizer={_device(offload).strip()}")


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    formula: Literal["present", "old"] = "present",
    show: Callable[[str], object] = print,
) -> None:
    """The estimates of a model, which may be on `meta`."""
    total, _ = model_to_params(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor, formula=formula, show=show
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    show: Callable[[str], object] = print,
) -> None:
    """Shows the six estimates for stage 3 as DeepSpeed prints them; `show` gets each
    line.
    """
    sizes = (
        f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M "
        f"largest layer params."
    )
    _head(sizes, num_nodes, num_gpus_per_node, show)
    for offload, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            needs = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                offload,
                params,
                zero_init,
                additional_buffer_factor,
            )
            where = (
                f"offload_param={_device(params)}, offload_optimizer={_device(offload)}, "
                f"zero_init={zero_init:d}"
            )
            show(f"{_cells(needs)} | {where}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    show: Callable[[str], object] = print,
) -> None:
    """The estimates of a model, which may be on `meta`."""
    total, largest = model_to_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor, show=show
    )


def _head(
    sizes: str, num_nodes: int, num_gpus_per_node: int, show: Callable[[str], object]
) -> None:
    nodes, gpus = ("s" if count != 1 else "" for count in (num_nodes, num_gpus_per_node))
    show("Estimated memory needed for params, optim states and gradients for a:")
    show(f"HW: Setup with {num_nodes} node{nodes}, {num_gpus_per_node} GPU{gpus} per node.")
    show(f"SW: Model with {sizes}")
    show("  per CPU  |  per GPU |   Options")


def _device(offload: bool) -> str:
    return "cpu " if offload else "none"


def _cells(needs: MemNeeds | MemNeeds3) -> str:
    return f" {needs.cpu / GiB:7.2f}GB | {needs.gpu / GiB:6.2f}GB"
