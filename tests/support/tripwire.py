"""`look`: ends the process if the memory of a small freed block was written to. glibc
aborts there, with "malloc(): ...".

A block that this thread has freed lies in a list of its size, and holds the address of
the next one. `look` takes blocks out of every list and gives them back. It costs 1 to 2
ms, and sees blocks of at most 1,032 bytes that this thread has freed.
"""

import ctypes

_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes, _libc.free.argtypes = (
    ctypes.c_void_p,
    [ctypes.c_size_t],
    [ctypes.c_void_p],
)
MOST_IN_A_LIST = 7


def look() -> None:
    for size in range(24, 1033, 16):
        for block in [_libc.malloc(size) for _ in range(MOST_IN_A_LIST + 1)]:
            _libc.free(block)
