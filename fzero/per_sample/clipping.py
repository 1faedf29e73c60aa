"""`clip`: the gradient of each sample is clipped to a norm before they are added up, as
DP-SGD needs it.

    g = Σ_b min(1, C / ‖g_b‖) g_b

A step with this transform makes one forward and two backwards. The first backward
measures the norms ‖g_b‖ layer by layer (`fzero.per_sample.ledger`) and makes no
gradients of parameters. The second is that of Σ_b w_b ℓ_b with the weights
w_b = min(1, C / ‖g_b‖) as constants, whose gradient is g: an ordinary backward, reduced
as ever (Li et al. 2021, arXiv:2110.05679). In stage 3 each gathers the units again.

Shape letters: B samples of a rank's micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import optree
import torch
from torch import Tensor, nn

from fzero.common.arguments import check_callable
from fzero.config.config import ConfigError
from fzero.model.transforms import Call, Changes, LossFn, TransformedStep, Wrap
from fzero.per_sample.leaves import Leaf, check_unchanged, leaves_of
from fzero.per_sample.ledger import Ledger

NAME = "per_sample.clip"


@dataclass(frozen=True)
class Clip:
    """The transform of `clip`."""

    max_norm: float
    broadcast: tuple[str, ...]
    observe: Callable[[Tensor], object] | None = field(default=None, repr=False)

    def __call__(self, spec: TransformedStep) -> Changes:
        """See `ModelTransform`."""
        if spec.cfg.gradient_clipping:
            raise ConfigError(
                f"gradient_clipping: must be 0 with {NAME}, or the mean of clipped gradients is "
                f"clipped again, got {spec.cfg.gradient_clipping}; set it to 0"
            )
        return _Clipping(self, spec.model).changes


def clip(
    max_norm: float,
    *,
    broadcast: Sequence[str] = (),
    observe: Callable[[Tensor], object] | None = None,
) -> Clip:
    """Clips the gradient of each sample, in all stages; a transform for
    `make_train_step(…, transforms=[fzero.per_sample.clip(1.0)])`.

    `loss_fn` must return the loss of each sample, shape (B,), and the tensors of a
    batch have a first dimension of samples. The step's gradient is the sum of the
    clipped gradients of all ranks' samples over their number; its loss is the mean.

    The model must treat each sample by itself, with the samples first in inputs and
    outputs of all layers with parameters. Linear, Embedding, Conv1d, Conv2d, LayerNorm,
    RMSNorm and GroupNorm have formulas: beside the graph they keep as much memory as
    the largest parameter (or 2²⁰ elements). Any other module with parameters of its own
    runs again for each sample, and keeps B gradients of its parameters.

    Args:
        max_norm: C, the largest norm of a sample's gradient over all trained
            parameters; inf clips nothing.
        broadcast: the names of modules whose input all samples share, such as an
            embedding of positions. Their output gets a dimension of samples.
        observe: called with the norms (B,) of each micro-batch, on every rank.

    Raises:
        ValueError: from the step: samples depend on each other (BatchNorm), the loss is
            not one number for each sample, or a layer has another first dimension.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
        raise ValueError(
            f"{NAME}: max_norm must be a positive number, got {max_norm!r}; inf clips nothing"
        )
    if isinstance(broadcast, str) or not all(isinstance(name, str) for name in broadcast):
        raise ValueError(
            f"{NAME}: broadcast must be a list of names of modules, got {broadcast!r}; pass "
            f"['position'], say"
        )
    if observe is not None:
        check_callable("observe", observe, "a function of the norms of a micro-batch")
    return Clip(float(max_norm), tuple(broadcast), observe)


class _Clipping:
    """The changes of one model."""

    def __init__(self, given: Clip, model: nn.Module) -> None:
        self._given, self._model = given, model
        self._ledger: Ledger | None = None
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        self._leaves = leaves_of(model, trained.__contains__, NAME)
        named = dict(model.named_modules(remove_duplicate=False))
        if unknown := next((name for name in given.broadcast if name not in named), None):
            raise ValueError(
                f"{NAME}: broadcast must name modules of the model, got {unknown!r}; names look "
                f"like {', '.join([name for name in named if name][:4])}"
            )

    @property
    def changes(self) -> Changes:
        return Changes(
            name=NAME,
            text=repr(self._given),
            forwards=self._forwards,
            loss=self._loss,
            not_in_graph=(
                f"{NAME}: must be of an eager step, because the samples' norms are read in a "
                f"backward inside its loss, got compile='step'; leave compile out"
            ),
        )

    def _forwards(self, call: Call) -> Mapping[str, Wrap]:
        for leaf in self._leaves:
            check_unchanged(leaf, NAME)
        return {leaf.name: partial(self._tapped, leaf) for leaf in self._leaves}

    def _tapped(self, leaf: Leaf, name: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        @wraps(forward)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            ledger = self._ledger
            if ledger is None or not torch.is_grad_enabled() or ledger.is_inside:
                return forward(*args, **kwargs)
            is_shared = name in self._given.broadcast
            return ledger.tap(leaf, forward, args, kwargs, is_shared=is_shared, call=NAME)

        return tapped

    def _loss(self, given: LossFn | None) -> LossFn:
        if given is None:
            raise ValueError(
                f"{NAME}: needs a loss_fn that returns the loss of each sample, got None; pass "
                f"loss_fn=lambda model, batch: a tensor of shape (samples,)"
            )

        def clipped(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
            num, device = _samples_of(batch)
            measures = torch.is_grad_enabled()
            self._ledger = ledger = Ledger.of(num, device) if measures else None
            losses_B = given(model, batch)
            if not isinstance(losses_B, Tensor) or tuple(losses_B.shape) != (num,):
                got = (
                    f"shape {tuple(losses_B.shape)}"
                    if isinstance(losses_B, Tensor)
                    else type(losses_B).__name__
                )
                raise ValueError(
                    f"{NAME}: loss_fn must return the loss of each of {num} samples, shape "
                    f"({num},), got {got}; do not take their mean (reduction='none')"
                )
            total = losses_B.sum()
            if ledger is None:
                return total, num
            norms_B = ledger.measure(losses_B)
            if self._given.observe is not None:
                self._given.observe(norms_B)
            weights_B = (self._given.max_norm / (norms_B + 1e-6)).clamp(max=1.0)
            weighted = (weights_B.to(losses_B.dtype) * losses_B).sum()
            # the value is that of the losses, the gradient that of the weighted ones
            return weighted + (total - weighted).detach(), num

        return clipped


def _samples_of(batch: Any) -> tuple[int, torch.device]:
    """The number of samples of a micro-batch, and its device."""
    leaves = [x for x in optree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
    if not leaves:
        raise ValueError(
            f"{NAME}: a batch must have a tensor with a first dimension of samples, got "
            f"{type(batch).__name__} without one; pass the samples as a tensor"
        )
    return len(leaves[0]), leaves[0].device
