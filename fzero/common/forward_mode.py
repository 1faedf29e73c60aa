"""`LEVEL`: PyTorch's level of forward mode, as ranks in one process share it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(slots=True)
class SharedLevel:
    """PyTorch's level of forward mode, of which a process has one. Ranks that run in
    lockstep in one process share it: the last one to leave ends it.

    Inside, attention runs PyTorch's math kernel, the only one with forward mode.
    """

    _num_inside: int = 0
    _open: ExitStack = field(default_factory=ExitStack)
    _lock: Any = field(default_factory=threading.Lock)

    @contextmanager
    def inside(self, call: str) -> Iterator[None]:
        """A context in which tensors may have tangents.

        Args:
            call: who asks, for errors.

        Raises:
            RuntimeError: the caller's own code is inside a level already.
        """
        with self._lock:
            if not self._num_inside and self.is_open:
                raise RuntimeError(
                    f"{call}: must not be called inside torch.autograd.forward_ad.dual_level or "
                    f"torch.func.jvp, because PyTorch has one level of forward mode, got a call "
                    f"inside; call it outside"
                )
            if not self._num_inside:
                self._open.enter_context(sdpa_kernel(SDPBackend.MATH))
                self._open.enter_context(forward_ad.dual_level())
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    self._open.close()

    @property
    def is_shared(self) -> bool:
        """Whether a tangent of now is one of `inside`, so that a rank may wait."""
        return self._num_inside > 0

    @property
    def is_open(self) -> bool:
        """Whether tensors may have tangents now."""
        return forward_ad._current_level >= 0


LEVEL = SharedLevel()
