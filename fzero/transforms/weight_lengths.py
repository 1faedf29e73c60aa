"""`weight_norm`: a weight as length times direction, g · v / ‖v‖ (Salimans and Kingma 2016), where g is trained beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from fzero.model.transforms import Changes, Tensors, TransformedStep
from fzero.transforms.matching import Patterns, add_param, is_input_first, patterns_of, weight_of, weights_of
from fzero.transforms.views import FunctionView


def lengths(weight: Tensor, outputs: int = 0) -> Tensor:
    """The norm of each output's row, with the dimensions of the weight; `outputs` is that of its outputs."""
    others = tuple(dim for dim in range(weight.dim()) if dim != outputs)
    return weight.square().sum(dim=others, keepdim=True).sqrt()


def normed(v: Tensor, g: Tensor, outputs: int = 0) -> Tensor:
    """Rows of the lengths `g` in the directions of `v`."""
    return v * (g / lengths(v, outputs))


@dataclass(frozen=True)
class WeightNorm:
    """The transform of `weight_norm`."""

    patterns: tuple[str, ...]

    def __call__(self, spec: TransformedStep) -> Changes:
        """See `ModelTransform`. It adds `weight_g` to each module; the weight itself is v."""
        found = weights_of(spec.model, "weight_norm", self.patterns)
        of = {f"{name}_g": name for name in found}
        outputs = {name: int(is_input_first(module)) for name, (module, *_) in found.items()}
        for name, (module, *_) in found.items():
            if not weight_of(module).is_floating_point():
                raise ValueError(
                    f"weight_norm: needs a weight with a gradient, got {name!r} in bits; apply it to others"
                )
            add_param(module, "weight_g", lengths(weight_of(module).detach(), outputs[name]), field="weight_norm")

        def first(weights: Tensors) -> dict[str, Tensor]:
            return {g: lengths(weights[name], outputs[name]) for g, name in of.items() if name in weights}

        views = {name: (FunctionView(partial(normed, outputs=outputs[name]), (g,)),) for g, name in of.items()}
        return Changes(name="weight_norm", text=str(self), views=views, added=frozenset(of), first_params=first)


def weight_norm(pattern: Patterns) -> WeightNorm:
    """Trains length and direction of each output's row apart: modules see g · v / ‖v‖. g begins as ‖v‖, which changes nothing.

    Args:
        pattern: names of modules with a `weight`, with `*` for any part.
    """
    return WeightNorm(patterns_of("weight_norm", pattern))
