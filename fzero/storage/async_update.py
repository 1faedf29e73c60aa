"""`AsyncUpdates`: the flat buffers whose update runs in a thread of its own, and its
start.

Only buffers whose new parameters nobody gathers at the end of the step: in stage 3 each
rank updates its shard, and a single rank has no others. (Elsewhere the parameters of
all ranks are all-gathered after the update, and before the next forward. The thread
makes no collective, whose order would differ between ranks.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

import optree
import torch
from torch import Tensor

from fzero.config.config import ConfigError
from fzero.plans.plan import Plan
from fzero.state import TrainState
from fzero.storage.offload_leaves import Leaves
from fzero.storage.promised import PromisedTensor, RunningUpdate, is_lent, taken_over
from fzero.storage.shard_transfer import read_later

if TYPE_CHECKING:
    from fzero.storage.state_files import StateFiles
    from fzero.storage.state_memory import Update

StreamUpdates = Callable[[Sequence["Update"], Callable[[str], object]], None]
"""Updates buffers, and calls a function with the key of each when it is written."""


@final
class AsyncUpdates:
    """The flat buffers of a plan that may be updated under the next forward.

    Args:
        leaves: the tensors of each flat buffer, by its key.
        at_once: the keys of buffers that are never updated later.
        device: the model's.

    Attributes:
        keys: the keys of these buffers.

    Raises:
        ConfigError: the model is not on the CPU.
    """

    def __init__(
        self, plan: Plan, leaves: Mapping[str, Leaves], at_once: set[str], device: torch.device
    ) -> None:
        if plan.streaming.async_update and device.type != "cpu":
            raise ConfigError(
                f"zero_optimization.offload_optimizer.async_update: must be false where the model "
                f"is not on the CPU, as yet, got true with a model on {device}; leave it out"
            )
        self._leaves = leaves
        self.keys = {
            b.key
            for b in plan.flat_buffers
            if plan.streaming.async_update
            and b.trainable
            and b.key not in at_once
            and not b.flow.joins_over
            and (plan.world_size == 1 or b.flow.param_numel < b.padded_numel)
            and any(leaves[b.key].specs[n].placement.is_away for n in leaves[b.key].names)
        }
        self._last: RunningUpdate | None = None

    def divided(
        self, state: TrainState[Any], updates: Sequence[Update]
    ) -> tuple[list[Update], list[Update]]:
        """The updates to make at once, and those that may run later, in the order in
        which the last forward asked for their buffers.

        An update runs at once if others refer to memory that it writes.
        """
        now: list[Update] = []
        later: list[Update] = []
        for update in updates:
            key = update.buffer.key
            is_own = update.param is state.params[key] and update.grad is state.grads[key]
            may_wait = key in self.keys and is_own and not any(map(is_lent, _tensors(update)))
            (later if may_wait else now).append(update)
        asked_for = self._last.asked_for if self._last is not None else []
        places = {key: place for place, key in enumerate(asked_for)}
        later.sort(key=lambda update: places.get(update.buffer.key, len(places)))
        return now, later

    def begin(
        self,
        state: TrainState[Any],
        updates: Sequence[Update],
        files: StateFiles | None,
        stream: StreamUpdates,
    ) -> TrainState[Any]:
        """Starts a thread that makes these updates. Returns the state after them, whose
        tensors are promises, and whose handles of files wait.
        """
        updates = [_taken_over(update) for update in updates]

        def run(ended: Callable[[str], None]) -> None:
            if files is not None and (cause := files.cause) is not None:
                raise cause
            stream(updates, ended)

        names = {u.buffer.key: (u.buffer.key, *self._leaves[u.buffer.key].specs) for u in updates}
        self._last = running = RunningUpdate(
            run,
            names,
            about=read_later(state.step.clone()),
            failed=files.fail if files is not None else lambda _: None,
        )
        parts: dict[str, Any] = {
            quantity: dict(getattr(state, quantity))
            for quantity in ("params", "grads", "master", "optimizer")
        }
        for update in updates:
            key = update.buffer.key
            promise = partial(_promised, name=key, update=running)
            parts["params"][key] = promise(update.param)
            parts["grads"][key] = promise(update.grad, has_contents=False)
            parts["optimizer"][key] = optree.tree_map(promise, update.state)
            if key in parts["master"]:
                parts["master"][key] = promise(update.master)
        if files is not None:
            files.update = running
        return state._replace(**parts)


def _tensors(update: Update) -> list[Tensor]:
    """The tensors in memory that an update reads and writes, each once."""
    found = [update.grad, update.master, update.param, *optree.tree_leaves(update.state)]
    return list({id(x): x for x in found if isinstance(x, Tensor)}.values())


def _taken_over(update: Update) -> Update:
    """The update with other tensors of the same memory; the old ones are empty."""
    made = {id(x): taken_over(x) for x in _tensors(update)}

    def one(x: Any) -> Any:
        return made.get(id(x), x)

    return update._replace(
        grad=one(update.grad),
        master=one(update.master),
        param=one(update.param),
        state=optree.tree_map(one, update.state),
    )


def _promised(x: Any, name: str, update: RunningUpdate, *, has_contents: bool = True) -> Any:
    if not isinstance(x, Tensor):  # a handle, which is renewed
        return x
    return PromisedTensor(x, name, update, has_contents=has_contents)
