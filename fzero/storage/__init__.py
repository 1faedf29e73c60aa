"""The state of one rank in memory: on the device, in host memory, in files; and the
streams between them.

May import: state, verbs, plans and below. Begin with `fzero.storage.file_store`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.storage import movers as movers, state_files as state_files, stream as stream
    from fzero.storage.file_tensor import FileTensor as FileTensor, StoreError as StoreError
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "file_tensor": "FileTensor StoreError",
            "": "movers state_files stream",
        },
    )
