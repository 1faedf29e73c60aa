"""The sizes in which memory for file transfers is allocated, in bytes."""

import mmap

PAGE = mmap.PAGESIZE
CHUNK = 1 << 16
"""Memory for full tensors is a multiple of so many bytes: the granularity of file
transfers, also with checksums.
"""
