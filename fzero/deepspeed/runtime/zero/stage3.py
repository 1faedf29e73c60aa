"""DeepSpeed's rule of thumb for the bytes of model states in stage 3. `print(engine.train_step.plan)` tells the exact ones."""

from __future__ import annotations

from torch import nn


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes on the host of a node, on one GPU, and of the largest layer.

    >>> estimate_zero3_model_states_mem_needs(10**9, 10**7, num_gpus_per_node=8, cpu_offload=False)
    (480000000, 2290000000, 40000000)
    """
    num_gpus, largest = num_gpus_per_node * num_nodes, 4 * largest_layer_params
    if not cpu_offload:
        cpu = 4 * (largest_layer_params if zero_init else total_params) * num_gpus_per_node
        return int(cpu * additional_buffer_factor), largest + 18 * total_params // num_gpus, largest
    per_param = (18 if cpu_offload_params else 16) / num_nodes
    if not zero_init:
        per_param = max(4 * num_gpus_per_node, per_param)
    gpu = largest if cpu_offload_params else largest + 2 * total_params // num_gpus
    return int(total_params * per_param * additional_buffer_factor), gpu, largest


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates of all choices."""
    print(
        f"SW: {total_params / 1e6:.0f}M params, largest layer {largest_layer_params / 1e6:.0f}M, on {num_nodes} nodes with "
        f"{num_gpus_per_node} GPUs each"
    )
    print("  per CPU  |  per GPU |   Options")
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes, optimizer, params, zero_init,
                additional_buffer_factor,
            )  # fmt: skip
            told = f"offload_param={'cpu' if params else 'none'}, offload_optimizer={'cpu' if optimizer else 'none'}"
            print(f" {cpu / 2**30:7.2f}GB | {gpu / 2**30:6.2f}GB | {told}, zero_init={int(zero_init)}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of all choices for a model."""
    total = sum(param.numel() for param in model.parameters())
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )
