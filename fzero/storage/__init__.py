"""Files of state, pinned and paged memory, and the streams between them and a device.

May import: plans and below. Begin with `fzero.storage.file_store`.
"""

__all__ = [
    "buffer_sizes",
    "direct_io",
    "file_store",
    "file_tensor",
    "host_memory",
    "movers",
    "ownership",
    "shard_io",
    "stream",
]
