"""Files of state, pinned and paged memory, and the streams between them and a device.

May import: plans and below. Begin with `fzero.storage.file_store`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.storage.file_store import StoreError as StoreError
    from fzero.storage.file_tensor import FileTensor as FileTensor
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "file_store": "StoreError",
            "file_tensor": "FileTensor",
        },
    )
