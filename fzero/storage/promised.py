"""`PromisedTensor` and `RunningUpdate`: a state that is still being written by an update
in a thread of its own, while the next forward runs (`async_update`).

The tensors of such a state are promises. A `PromisedTensor` is a leaf without memory of
its own. Every function that is called with it (of PyTorch, NumPy, pickle, a collective)
waits until the update has written that flat buffer, and gets the tensor itself. Reading
its form (shape, dtype, device) does not wait. Handles of files
(`fzero.storage.file_tensor`) wait where they are read. So a state in memory or in files
is a value as ever, and nobody reads one that is half written.

Only the state may refer to memory that such a thread writes: `is_lent` finds views and
arrays that others hold, and such a buffer is updated at once. The tensors of the old
state become empty (`taken_over`), so that they are not read by mistake either.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self, final

import optree
import torch
from torch import Tensor

from fzero.storage.file_tensor import StoreError, bare, handles_of

_ATTRIBUTES = "shape dtype device layout ndim itemsize nbytes is_cpu is_cuda is_meta"
_METHODS = """size dim numel nelement element_size stride storage_offset is_contiguous ndimension
    __len__ is_floating_point is_complex is_signed get_device"""

_RUNNING: weakref.WeakSet[RunningUpdate] = weakref.WeakSet()


@final
class RunningUpdate:
    """The update of some flat buffers, in a thread of its own.

    Args:
        run: updates all buffers. It is called with a function, which it calls with the
            name of each buffer whose tensors have all been written.
        tensors: the names of the tensors of each buffer, by the buffer's name, in the
            order of the update.
        about: returns the number of updates before this one.
        failed: is called with the error if `run` raises one.

    Attributes:
        asked_for: the buffers in the order in which they were first waited for.
    """

    def __init__(
        self,
        run: Callable[[Callable[[str], None]], None],
        tensors: Mapping[str, tuple[str, ...]],
        *,
        about: Callable[[], int],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._written = {buffer: threading.Event() for buffer in tensors}
        self._buffer_of = {name: buffer for buffer, names in tensors.items() for name in names}
        self._error: StoreError | None = None
        self.asked_for: list[str] = []
        # Not the bound method: the thread must not keep `run`, and with it the tensors.
        self._thread = threading.Thread(
            target=self._work, args=([run], about, failed), name="fzero-update"
        )
        _RUNNING.add(self)
        self._thread.start()

    def _work(
        self,
        run: list[Callable[[Callable[[str], None]], None]],
        about: Callable[[], int],
        failed: Callable[[BaseException], None],
    ) -> None:
        try:
            run.pop()(lambda buffer: self._written[buffer].set())
        except BaseException as error:
            unfinished = next((x for x, written in self._written.items() if not written.is_set()))
            self._error = StoreError(
                f"the update of {unfinished!r} after {about()} updates failed: {bare(error)}; the "
                f"state is part old and part new, so go on from a checkpoint"
            )
            failed(self._error)
        finally:
            for written in self._written.values():
                written.set()

    def is_running(self, name: str) -> bool:
        """Whether a tensor may still be written."""
        buffer = self._buffer_of.get(name)
        return buffer is not None and not self._written[buffer].is_set()

    def wait(self, name: str) -> None:
        """Waits until a tensor has been written, or the update has failed."""
        buffer = self._buffer_of.get(name)
        if buffer is not None and not self._written[buffer].is_set():
            if buffer not in self.asked_for:
                self.asked_for.append(buffer)
            self._written[buffer].wait()

    def rest(self) -> StoreError | None:
        """Waits for the end of the update. Returns its error, to be raised."""
        if threading.current_thread() is not self._thread:
            self._thread.join()
        return self.error

    @property
    def error(self) -> StoreError | None:
        """The error so far, to be raised."""
        return None if self._error is None else bare(self._error)


@final
class PromisedTensor(Tensor):
    """A tensor that a `RunningUpdate` still writes. Whoever uses it waits.

    Raises, wherever it is used:
        StoreError: the update has failed.
    """

    _tensor: Tensor
    _name: str
    _update: RunningUpdate
    _has_contents: bool
    _first_version: int | None

    @staticmethod
    def __new__(
        cls, tensor: Tensor, name: str, update: RunningUpdate, *, has_contents: bool = True
    ) -> Self:
        """A promise of `tensor`.

        Args:
            name: its name in the update.
            has_contents: whether the tensor has values between two steps. Those of a
                gradient are left over: it may be written also after a failure.
        """
        promise: Self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        # Who takes its address in C++ gets an error, not an address of nothing.
        torch._C._set_throw_on_mutable_data_ptr(promise)
        promise._tensor, promise._name = tensor, name
        promise._update, promise._has_contents = update, has_contents
        promise._first_version = None
        return promise

    @property
    def is_running(self) -> bool:
        """Whether the update may still write it."""
        return self._update.is_running(self._name)

    def arrive(self) -> Tensor:
        """Waits, and returns the tensor."""
        self._update.wait(self._name)
        if self._has_contents and (error := self._update.error) is not None:
            raise error
        if self._first_version is None:
            self._first_version = self._tensor._version
        return self._tensor

    def rest(self) -> StoreError | None:
        """Waits for the end of the whole update. Returns its error, to be raised."""
        return self._update.rest()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _OF_FORM:
            # an update in place does not change it
            return func(*(x._tensor if type(x) is cls else x for x in args), **(kwargs or {}))
        if func == _VERSION:
            return args[0]._num_changes()
        return func(*arrived(args), **arrived(kwargs or {}))

    def _num_changes(self) -> int:
        """How often the tensor was changed after the update, which changes it, too."""
        if self.is_running:
            return 0
        version: int = self._tensor._version
        if self._first_version is None:
            self._first_version = version
        return version - self._first_version

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*arrived(args), **arrived(kwargs or {}))


_VERSION = Tensor._version.__get__  # type: ignore[attr-defined]
_OF_FORM = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()),
    *(getattr(Tensor, name) for name in _METHODS.split()),
}
"""The functions that read no element."""


def arrived(tree: Any) -> Any:
    """The tree with the tensors themselves instead of promises. Waits for all of them.

    Raises:
        StoreError: an update has failed.
    """
    return optree.tree_map(
        lambda x: x.arrive() if type(x) is PromisedTensor else x, tree, none_is_leaf=True
    )


def promises_of(tree: Any) -> list[PromisedTensor]:
    """The promises among the leaves."""
    return [x for x in optree.tree_leaves(tree) if type(x) is PromisedTensor]


def error_of(tree: Any) -> StoreError | None:
    """Waits for the updates that make the promises in a tree, or write its files.
    Returns the first error, to be raised.
    """
    in_files = [x.files.update for x in handles_of(tree) if x.files.update is not None]
    updates = [*(promise.rest for promise in promises_of(tree)), *(x.rest for x in in_files)]
    return next(filter(None, (rest() for rest in updates)), None)


def or_zeros(x: Tensor) -> Tensor:
    """The tensor, or zeros if its update has failed: all ranks raise later, together
    (`fzero.storage.file_agreement.agree`).
    """
    try:
        _ = x.arrive() if type(x) is PromisedTensor else x
    except StoreError:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x


def memory_of(x: Tensor) -> int:
    """The identity of a tensor's memory. Does not wait."""
    tensor = x._tensor if type(x) is PromisedTensor else x
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def is_lent(x: Tensor) -> bool:
    """Whether others than `x` may refer to its memory: a view, a NumPy array, another
    process.
    """
    pairs = zip(_references(x), _references(torch.empty(1)), strict=True)
    is_own = all(found <= alone for found, alone in pairs)
    return not (is_own and x.untyped_storage().resizable()) or x.is_shared()  # type: ignore[no-untyped-call]


def _references(x: Tensor) -> tuple[int, int]:
    """The numbers of tensors with the memory of `x`, and of names for its storage."""
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)  # type: ignore[attr-defined]


def taken_over(x: Tensor) -> Tensor:
    """The memory of a tensor as another tensor; `x` becomes empty, and keeps it alive."""
    tensor = x.detach()
    x.resize_(0)
    return tensor


def _rest_all() -> None:
    for update in list(_RUNNING):
        update.rest()


# A copy of the process would lack the threads, and wait for ever.
os.register_at_fork(before=_rest_all)
