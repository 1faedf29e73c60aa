"""The stateful facade for DeepSpeed's scripts: `initialize`, and the engine that it returns.

May import: checkpoint, profiling and below. Begin with `fzero.engine.initialize`.
"""

__all__ = [
    "accessors",
    "checkpoints",
    "client_optimizers",
    "config_keys",
    "dataloader",
    "engine",
    "facade",
    "initialize",
    "module",
    "monitor",
    "optimizer",
    "optimizer_state",
    "param_status",
    "param_views",
    "settings",
    "settings_table",
    "step_log",
    "timers",
]
