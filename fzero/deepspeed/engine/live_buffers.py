"""`LiveBuffers`: a module's buffers while an engine trains it, which are the tensors of
the state.

Between the first forward of an accumulation and its update, forwards write into copies
(`AccumulationWindow.buffers`), so that a step that fails leaves the state as it was.
The module then shows those copies. So a script reads what the forwards have written,
and what it writes itself, at any time, is there in the next forward and in the next
state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import torch
from torch import Tensor, nn

from fzero.model.module_index import ModuleIndex
from fzero.plans.plan import Plan

T = TypeVar("T")


class LiveBuffers:
    """The buffers of a module, as those of a state or of a window.

    Attributes:
        now: the tensors that the module shows, by name: the state's, or the window's. A
            buffer that the script assigns replaces its tensor here.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        slots = [
            slot
            for slot in ModuleIndex.of(model).slots("_buffers")
            if slot.owner[slot.key] is not None
        ]
        self._slots = [(x.module, x.key, plan.aliases.get(x.name, x.name)) for x in slots]
        self.now: dict[str, Tensor] = {}
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._seen: list[tuple[str, Tensor, int]] = []

    def show(
        self, buffers: dict[str, Tensor], before: dict[str, tuple[Tensor, int]] | None = None
    ) -> None:
        """Shows tensors, into which the script may write, and which it may replace.

        Args:
            buffers: the state's or the window's.
            before: of a window; entries of buffers that the script writes are renewed,
                because all ranks write the same, and only those that a forward has
                changed are averaged over the ranks.
        """
        self.now, self._before = buffers, {} if before is None else before
        for module, key, name in self._slots:
            module._buffers[key] = buffers[name]
        self._seen = [(name, buffers[name], buffers[name]._version) for name in self._before]

    def take(self) -> None:
        """Takes over the buffers that the script has assigned since `show`.

        Raises:
            ValueError: one has another shape, dtype or device, or was removed.
        """
        for module, key, name in self._slots:
            given, own = module._buffers.get(key), self.now[name]
            if given is not own:
                _check(name, given, own)
                assert given is not None
                self.now[name] = given.detach().clone() if given.requires_grad else given
        for name, seen, version in self._seen:
            # no forward had changed it
            if self._before[name][0] is seen and self._before[name][1] == version:
                self._before[name] = self.now[name], self.now[name]._version
        self.show(self.now, self._before)

    def write(self, name: str, value: Tensor) -> None:
        """Overwrites a buffer.

        Raises:
            ValueError: the value has another shape.
        """
        own = self.now[name]
        # as in torch: batch norms of its early versions have counts of shape (1,)
        if value.shape != own.shape and not (own.dim() == 0 and value.shape == (1,)):
            raise ValueError(
                f"buffer {name!r}: must be given a value of its own shape {tuple(own.shape)}, got "
                f"{tuple(value.shape)}"
            )
        own.copy_(value.view(own.shape))

    def kept(
        self, function: Callable[[], T], statistics: Collection[str]
    ) -> tuple[T, dict[str, Tensor]]:
        """Calls a function in which the module runs on copies of the buffers; returns
        its result, and the copies that it changed.

        Args:
            statistics: the names of buffers that change without a new version
                (BatchNorm's on a device).
        """
        before = {name: (x, x._version) for name, x in self._present()}
        result = function()

        def is_changed(name: str, x: Tensor) -> bool:
            seen, version = before[name]
            return name in statistics or x is not seen or x._version != version

        return result, {name: x for name, x in self._present() if is_changed(name, x)}

    def _present(self) -> list[tuple[str, Tensor]]:
        found = ((name, module._buffers.get(key)) for module, key, name in self._slots)
        return [(name, x) for name, x in found if x is not None]


def _check(name: str, given: Tensor | None, own: Tensor) -> None:
    """Raises ValueError unless a tensor may replace a buffer."""
    wanted = f"shape {tuple(own.shape)} and {own.dtype} on {own.device}"
    if not isinstance(given, Tensor):
        raise ValueError(
            f"buffer {name!r}: must remain in the module that was passed to initialize, with "
            f"{wanted}, and was removed; write into it, or change the model before initialize"
        )
    if (given.shape, given.dtype, given.device) != (
        own.shape,
        own.dtype,
        own.device,
    ) or given.layout != torch.strided:
        raise ValueError(
            f"buffer {name!r}: must keep {wanted}, and got shape {tuple(given.shape)} and "
            f"{given.dtype} on {given.device}; assign one of that form, or change the model before "
            f"initialize"
        )
