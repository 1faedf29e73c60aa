"""`ReplicaEdits`: what a script has written into state of which every rank holds a
copy, so that ranks can compare it.

Gradients and moments in stage 0 are copies, and a rank that changes its own leaves the
others without a word. PyTorch counts the changes of a tensor, so that a step without
one costs nothing. A checksum of each changed tensor is sent with the numbers that ranks
compare in the next backward.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import ref

from torch import Tensor

from fzero.model.own_params import bits_of


class _Shown(NamedTuple):
    """A tensor that a script may write into: the copy's own tensor, its number of
    changes, and the script's view of it.
    """

    tensor: Tensor
    version: int
    held: ref[Tensor]


class ReplicaEdits:
    """The changes since the last update, and the tensors that a script may change.

    Attributes:
        found: the checksum of each changed tensor as text, by what a script calls it.
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._shown: dict[str, _Shown] = {}

    def show(self, name: str, tensor: Tensor, held: Tensor) -> None:
        """A script gets `held`, which shares the memory of `tensor`."""
        known = self._shown.get(name)
        version = tensor._version if known is None else known.version
        self._shown[name] = _Shown(tensor, version, ref(held))

    def note(self, name: str, value: Tensor | str) -> None:
        """A script has set a value."""
        self.found[name] = (
            value
            if isinstance(value, str)
            else f"values of checksum {bits_of(value).item() % 2**32:08x}"
        )

    def look(self) -> None:
        """Finds the shown tensors that a script has changed."""
        for name, (tensor, version, held) in self._shown.items():
            if tensor._version != version:
                self.note(name, tensor)
                self._shown[name] = _Shown(tensor, tensor._version, held)

    def take(self) -> dict[str, str]:
        """The changes, which are compared from here on."""
        found, self.found = self.found, {}
        return found

    def updated(self) -> None:
        """An update has changed all tensors. Those that the script no longer holds are
        forgotten.
        """
        self._shown = {
            name: _Shown(tensor, tensor._version, held)
            for name, (tensor, _, held) in self._shown.items()
            if held() is not None
        }
