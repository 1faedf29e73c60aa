"""Small tools of every room: tables as text, byte units, ranges for profilers, counts of operations, checks of
arguments, files that are safe to read and write.

May import: sharding. Begin with `fzero.common.arguments`.
"""

__all__ = ["arguments", "flags", "flops", "pickles", "profiler_ranges", "safe_files", "text_tables"]
