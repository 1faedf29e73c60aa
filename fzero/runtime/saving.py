"""`saving`: what autograd saves of gathered buffers while a forward runs.

Outside of the transforms of torch.func, hooks on saved tensors replace a view of a
gathered buffer by a `SavedView`. `torch.func.grad`, `vjp`, `jacrev` and `hessian` allow
no hooks: they refuse to begin where there are some. So these hooks step aside while
such a transform runs, and autograd saves the views themselves. Hooks of others
(checkpoints, `save_on_cpu`) stay, and PyTorch refuses them as it does without a step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C import _autograd
from torch.autograd.graph import disable_saved_tensors_hooks

from fzero.model.own_params import untraced
from fzero.runtime.gathers import Gathers

if TYPE_CHECKING:
    from fzero.runtime.eager import ForwardBackward


class _Saving(NamedTuple):
    """One `saving` of a thread, and its hooks."""

    thread: int
    pack: Any
    unpack: Any

    @property
    def is_on_top(self) -> bool:
        """Whether its hooks are the innermost."""
        top: Any = _autograd._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] is self.pack


_OPEN: list[_Saving] = []
"""All present `saving`s, the innermost last. Ranks in lockstep are threads."""


@contextmanager
def saving(work: ForwardBackward) -> Iterator[None]:
    """Inside, views of gathered buffers are saved as `SavedView`s."""
    pack, unpack = untraced(Gathers.as_saved), untraced(type(work).unpack)
    mine = _Saving(threading.get_ident(), partial(pack, work.gathers), partial(unpack, work))
    if not _OPEN:
        torch.autograd.graph.disable_saved_tensors_hooks = _disable
    _OPEN.append(mine)
    _autograd._push_saved_tensors_default_hooks(mine.pack, mine.unpack)
    try:
        yield
    finally:
        _autograd._pop_saved_tensors_default_hooks()
        _OPEN[:] = [other for other in _OPEN if other is not mine]
        if not _OPEN:
            torch.autograd.graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks


@contextmanager
def _disable(message: str) -> Iterator[None]:
    """As PyTorch's `disable_saved_tensors_hooks`, by which a transform of torch.func
    begins, but the hooks of a step do not count.
    """
    mine = [each for each in _OPEN if each.thread == threading.get_ident() and each.is_on_top]
    for _ in mine:
        _autograd._pop_saved_tensors_default_hooks()
    try:
        with disable_saved_tensors_hooks(message):
            yield
    finally:
        for each in mine:
            _autograd._push_saved_tensors_default_hooks(each.pack, each.unpack)
