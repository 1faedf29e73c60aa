"""Checkpoints of other libraries: who knows their files registers a reader, which
`load_weights` asks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fzero.checkpoint.loading import Source

Reader = Callable[[Path], "Source | None"]
"""Opens a checkpoint under the keys of fzero's own (`master.` and `model.` before
names); None for a path of another kind.
"""

_READERS: list[Reader] = []


def read_also(reader: Reader) -> None:
    """Registers a reader."""
    _READERS.append(reader)


def foreign(path: Path) -> Source | None:
    """A checkpoint of another library; None where no reader knows it."""
    return next((source for reader in _READERS if (source := reader(path)) is not None), None)
