"""What a step did: traces of collectives and operators, times of modules, rates of a machine.

May import: estimation, resharding, step and below. Begin with `fzero.profiling.profiler`.
"""

__all__ = ["chrome_trace", "comm_trace", "machine", "module_timer", "profiler", "reports"]
