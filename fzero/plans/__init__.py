"""What is known before a step runs, as values without tensors: units, flat buffers, placements, the mesh, the order
of gathers.

May import: config, comms and below. Begin with `fzero.plans.plan`.
"""

__all__ = ["comm_hooks", "mesh_axes", "orders", "placements", "plan", "unit_scheduler"]
