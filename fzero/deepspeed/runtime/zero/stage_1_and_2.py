"""DeepSpeed's rule of thumb for the bytes of model states in stage 2. `print(engine.train_step.plan)` tells the exact ones."""

from __future__ import annotations

from torch import nn


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes on the host of a node and on one GPU.

    >>> estimate_zero2_model_states_mem_needs(10**9, num_gpus_per_node=8, cpu_offload=False)
    (48000000000, 4250000000)
    """
    num_gpus = num_gpus_per_node * num_nodes
    if cpu_offload:
        return int(total_params * max(4 * num_gpus, 16) * additional_buffer_factor), 2 * total_params
    gpu = 2 * total_params + 18 * total_params // num_gpus
    return int(total_params * 4 * num_gpus_per_node * additional_buffer_factor), gpu


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of all choices."""
    print(f"SW: {total_params / 1e6:.0f}M params on {num_nodes} nodes with {num_gpus_per_node} GPUs each")
    print("  per CPU  |  per GPU |   Options")
    for offload in (True, False):
        cpu, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        print(f" {cpu / 2**30:7.2f}GB | {gpu / 2**30:6.2f}GB | offload_optimizer={'cpu' if offload else 'none'}")


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of all choices for a model."""
    total = sum(param.numel() for param in model.parameters())
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)
