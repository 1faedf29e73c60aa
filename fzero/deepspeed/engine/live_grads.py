"""`LiveGrads`: `.grad` of a module's parameters, between a backward and the update.

As in DeepSpeed, parameters show gradients where a rank holds full ones: in stage 0, and
in stage 1 until the last backward of an accumulation has reduced them. They are views
of the state's gradients, multiplied by the loss scale, if there is one, and divided by
the number of ranks as long as they are not added up. A script may write into them,
replace them, or set them to None; `zero_grad` of a module or of an optimizer does the
last. A parameter whose gradient is None in the update is not updated, as in
torch.optim.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fzero.deepspeed.engine.param_views import LiveParams
from fzero.deepspeed.engine.replica_edits import ReplicaEdits
from fzero.model.errors import not_trained
from fzero.step import AccumulationWindow, TrainStep
from sharding.views import unflatten


class LiveGrads:
    """The gradients that parameters show.

    Attributes:
        given: by name, those that they show now.
        edits: what the script has done to gradients of which each rank holds a copy.
    """

    def __init__(self, live: LiveParams) -> None:
        self._live = live
        self.given: dict[str, Tensor] = {}
        self.edits = ReplicaEdits()
        self._versions: dict[str, int] = {}  # by name, if ranks hold copies

    def show(self, step: TrainStep, window: AccumulationWindow, *, are_reduced: bool) -> None:
        """Shows the gradients of a window, where this rank holds them in full.

        Args:
            are_reduced: whether the last backward has reduced them.
        """
        if not shows(step, are_reduced=are_reduced):
            return
        no_grad_names, own = window.forward_backward.forwards.no_grad_names, self._live.own
        for name, view in _views(step, window):
            param = own[name]
            if param.requires_grad and name not in no_grad_names:
                if param.grad is not None:  # of a loss outside the forward
                    raise not_trained(name)
                param.grad_dtype = view.dtype
                param.grad = self.given[name] = view
                if are_reduced and step.world_size > 1:
                    self._versions[name] = view._version

    @property
    def are_dropped(self) -> bool:
        """Whether the script has set all of them to None."""
        own = self._live.own
        return bool(self.given) and all(own[name].grad is None for name in self.given)

    def take(self) -> frozenset[str]:
        """Takes over what the script has done to the gradients, and hides them; returns
        the names of those that are None now.

        Raises:
            ValueError: one was replaced by a tensor of another layout.
        """
        given, self.given, dropped = self.given, {}, set()
        versions, self._versions = self._versions, {}
        for name, view in given.items():
            param = self._live.own[name]
            now, param.grad = param.grad, None
            param.grad_dtype = param.dtype
            is_changed = name in versions and (now is not view or view._version != versions[name])
            if now is None:
                view.zero_()
                dropped.add(name)
            elif now is not view:
                view.copy_(now.to_dense() if now.is_sparse else now)
            if is_changed:
                self.edits.note(f"{name}.grad", "None" if now is None else view)
        return frozenset(dropped)

    def drop(self, *, to_none: bool) -> None:
        """Sets the gradients to None, or to zero."""
        for name, view in self.given.items():
            if to_none:
                self._live.own[name].grad = None
            else:
                grad = self._live.own[name].grad
                (view if grad is None else grad).zero_()


def shows(step: TrainStep, *, are_reduced: bool) -> bool:
    """Whether parameters show gradients at this point of an accumulation: a rank holds
    them in full, as means times the loss scale."""
    loss = step.runtime.rules.loss
    is_mean = not loss.is_mean or loss.predivide == loss.world_size
    row = step.plan.row
    is_full = not row.shards("params") and not row.shards("grads")
    return is_mean and is_full and not (are_reduced and row.shards("optimizer"))


def _views(step: TrainStep, window: AccumulationWindow) -> Iterator[tuple[str, Tensor]]:
    for buffer in step.plan.flat_buffers:
        if buffer.trainable:
            home = window.state.grads[buffer.key]
            if isinstance(home, Tensor) and home.device == step.device:
                yield from unflatten(home.detach(), buffer.layout).items()
