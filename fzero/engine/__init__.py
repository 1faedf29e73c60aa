"""The stateful facade for DeepSpeed's scripts: `initialize`, and the engine that it returns.

May import: checkpoint, profiling and below. Begin with `fzero.engine.initialize`.
"""
