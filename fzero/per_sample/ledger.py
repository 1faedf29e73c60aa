"""`Ledger`: the squared norms of the gradients of the samples of one forward.

Each leaf's output passes a `Tap`, a node of autograd that is the identity. When the
gradient of the output reaches it, the leaf's gradients of the samples are made or
their norms computed, and dropped. A gradient by `probe`, an input of every tap, makes
autograd run all of them, and no gradient of a parameter.

A parameter that is used several times (tied, or in a module that is called again) has
one gradient, the sum over its uses: its uses wait for each other, and their dot
products are added as well.

Shape letters: B samples.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from fzero.per_sample.factors import Use, dot
from fzero.per_sample.leaves import Leaf, is_differentiable


class Tap(torch.autograd.Function):
    """The identity of some outputs; `sees` gets their gradients, and the tensors that
    are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, probe: Tensor, sees: Callable[..., None], num_outputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sees, ctx.num_kept = sees, len(tensors) - num_outputs
        ctx.save_for_backward(*tensors[num_outputs:])
        return tuple(x.view_as(x) for x in tensors[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.sees(ctx.saved_tensors, grads)
        return None, None, None, *grads, *[None] * ctx.num_kept


@dataclass(slots=True)
class Ledger:
    """The squared norms of one forward.

    Attributes:
        num_samples: B.
        probe: an input of every tap.
        squares: the sums so far (B,), float64.
        phase: a forward counts the uses of parameters; a measuring backward adds up;
            afterwards taps do nothing.
        is_inside: whether a leaf runs, whose parts are not tapped.
    """

    num_samples: int
    probe: Tensor
    squares: Tensor
    phase: Literal["forward", "measuring", "over"] = "forward"
    is_inside: bool = False
    _num_uses: Counter[str] = field(default_factory=Counter)
    _waiting: defaultdict[str, list[Use]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, num_samples: int, device: torch.device) -> Ledger:
        squares = torch.zeros(num_samples, dtype=torch.float64, device=device)
        return cls(num_samples, torch.zeros((), device=device, requires_grad=True), squares)

    def measure(self, losses_B: Tensor) -> Tensor:
        """The norms of the gradients of the losses (B,), by a backward that keeps the
        graph.
        """
        self.phase = "measuring"
        torch.autograd.grad(losses_B.sum(), self.probe, retain_graph=True, allow_unused=True)
        for uses in self._waiting.values():  # of forwards that the losses do not depend on
            self._add(uses)
        self.phase = "over"
        self._waiting.clear()
        return self.squares.sqrt().to(torch.promote_types(losses_B.dtype, torch.float32))

    def tap(
        self,
        leaf: Leaf,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_shared: bool,
        call: str,
    ) -> Any:
        """Calls a leaf's forward, and taps its outputs.

        Args:
            is_shared: whether all samples share the input; then the output gets a
                dimension of samples.
            call: who asks, for errors.
        """
        self.is_inside = True
        try:
            out = forward(*args, **kwargs)
        finally:
            self.is_inside = False
        parts, treespec = optree.tree_flatten(out)
        if is_shared:
            parts = [self._for_each(x) for x in parts]
        tapped = [index for index, x in enumerate(parts) if is_differentiable(x)]
        if not tapped:
            return out
        if self.phase == "forward":
            self._num_uses.update(leaf.params.values())
            for x in (parts[index] for index in tapped):
                self.check(leaf, x, call)
            if leaf.formula is not None and not is_shared:
                self.check(leaf, args[0], call)
        given, given_spec = optree.tree_flatten((args, kwargs), none_is_leaf=True)
        places = [index for index, x in enumerate(given) if isinstance(x, Tensor)]
        every = leaf.module.named_parameters(remove_duplicate=False)
        own = dict(every) if leaf.formula is None else {}
        params = [own[key].detach() for key in leaf.params] if own else []
        rest = [None if isinstance(x, Tensor) else x for x in given]

        def sees(kept: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
            if self.phase != "measuring":
                return
            filled = list(rest)
            for index, x in zip(places, kept, strict=False):
                filled[index] = x
            with torch.autocast(grads[0].device.type, enabled=False):
                self.is_inside = True
                try:
                    of_call = optree.tree_unflatten(given_spec, filled)
                    for name, use in leaf.uses(forward, of_call, kept[len(places) :], grads):
                        self._collect(name, use)
                finally:
                    self.is_inside = False

        kept = [given[index].detach() for index in places]
        kept = [self._for_each(x) for x in kept] if is_shared else kept
        outputs = Tap.apply(  # type: ignore[no-untyped-call]
            self.probe, sees, len(tapped), *(parts[i] for i in tapped), *kept, *params
        )
        for index, x in zip(tapped, outputs, strict=True):
            parts[index] = x
        return optree.tree_unflatten(treespec, parts)

    def _for_each(self, x: Any) -> Any:
        """A tensor that all samples share, with a dimension of samples."""
        return x.expand(self.num_samples, *x.shape) if isinstance(x, Tensor) else x

    def check(self, leaf: Leaf, x: Any, call: str) -> None:
        """Raises ValueError unless the first dimension of a tensor is that of samples."""
        if not isinstance(x, Tensor) or not x.dim() or len(x) != self.num_samples:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{call}: inputs and outputs of {leaf.name!r} must have a first dimension of "
                f"{self.num_samples} samples, got {got}; name it in broadcast= if all samples "
                f"share its input (positions), or keep the samples first"
            )

    def _collect(self, name: str, use: Use) -> None:
        if self._num_uses[name] == 1:
            self.squares += dot(use, use).to(self.squares.device)
            return
        waiting = self._waiting[name]
        waiting.append(use)
        if len(waiting) == self._num_uses[name]:
            self._add(self._waiting.pop(name))

    def _add(self, uses: list[Use]) -> None:
        for index, use in enumerate(uses):
            self.squares += dot(use, use)
            for other in uses[:index]:
                self.squares += 2 * dot(use, other)
