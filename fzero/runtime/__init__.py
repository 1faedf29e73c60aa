"""The eager step: a module bound to the state, forward and backward unit by unit, metrics, the update, offload, first
states.

May import: state, verbs, storage and below. Begin with `fzero.runtime.eager`.
"""

__all__ = [
    "activation_checkpointing",
    "batches",
    "eager",
    "hooks",
    "init_state",
    "loss",
    "metrics",
    "module_binding",
    "module_buffers",
    "offload",
    "own_params",
    "step_spec",
    "trainability",
    "update",
]
