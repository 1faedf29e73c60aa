"""`agree`: all ranks raise together when the state files of one rank have failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fzero.comms import collectives
from fzero.comms.axes import RankAxis
from fzero.comms.records import Label
from fzero.storage.file_tensor import StoreError, handles_of

if TYPE_CHECKING:
    from fzero.storage.state_files import StateFiles


def agree(files: StateFiles | None, world: RankAxis, *, error: BaseException | None = None) -> None:
    """Raises on every rank if one rank's files have failed; after that no rank's files
    can be used.

    *Collective:* every rank of a job with state in files; sends a few bytes.

    Args:
        error: an error on this rank that did not come from its files.

    Raises:
        StoreError, MemoryError: this rank's own error, or a StoreError that names the
            rank which failed.
    """
    cause = error or (files.cause if files is not None else None)
    messages = collectives.exchange(
        None if cause is None else str(cause) or repr(cause), world, label=Label("files")
    )
    if files is not None:
        files.update = None  # it has ended, and all ranks know how
    failed = [rank for rank, message in enumerate(messages) if message is not None]
    if not failed:
        return
    if cause is None:
        cause = StoreError(
            f"rank {failed[0]}: its state{' in files' * (files is not None)} cannot be used any "
            f"more, and so no rank's can: "
            f"{messages[failed[0]]}"
        )
    if files is not None:
        files.fail_by_message(cause)
    try:
        raise cause
    finally:
        del cause, error  # their tracebacks refer to this frame


def files_of(tree: Any) -> StateFiles | None:
    """The files of a state, or None; raises a StoreError if they have failed."""
    handles = handles_of(tree)
    for handle in handles:
        handle.check()
    return handles[0].files if handles else None
