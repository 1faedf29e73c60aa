"""`weight_norm`: a weight as length times direction, g · v / ‖v‖ (Salimans and Kingma
2016), where g is trained beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from fzero.model.transforms import Changes, Tensors, TransformedStep
from fzero.transforms.matching import (
    Patterns,
    add_param,
    is_input_first,
    patterns_of,
    weight_of,
    weights_of,
)
from fzero.transforms.views import FunctionView


def lengths(weight: Tensor, outputs: int = 0) -> Tensor:
    """The norm of each output's row, with the dimensions of the weight; `outputs` is
    that of its outputs.
    """
    return _squares(weight, outputs).sqrt()


def normed(v: Tensor, g: Tensor, outputs: int = 0) -> Tensor:
    """Rows of the lengths `g` in the directions of `v`. A row of zeros has none, and
    stays one.
    """
    squares = _squares(v, outputs)
    return v * (g / squares.masked_fill(squares == 0, 1).sqrt())


def _squares(weight: Tensor, outputs: int) -> Tensor:
    others = tuple(dim for dim in range(weight.dim()) if dim != outputs)
    return weight.square().sum(dim=others, keepdim=True)


def first_lengths(name: str, module: nn.Module, weight: Tensor, outputs: int) -> Tensor:
    """The lengths of a weight's rows.

    Raises:
        ValueError: a row other than that of an embedding's padding is all zeros, and so
            would never be trained.
    """
    found = lengths(weight, outputs)
    empty = [] if weight.is_meta else (found == 0).flatten().nonzero().flatten().tolist()
    if wrong := [row for row in empty if row != getattr(module, "padding_idx", None)]:
        raise ValueError(
            f"weight_norm: each output's row must have a direction, got zeros in row {wrong[0]} of "
            f"{name!r} ({len(wrong)} such rows); leave this module out, or give it another first "
            f"value"
        )
    return found


@dataclass(frozen=True)
class WeightNorm:
    """The transform of `weight_norm`."""

    patterns: tuple[str, ...]

    def __call__(self, spec: TransformedStep) -> Changes:
        """See `ModelTransform`. It adds `weight_g` to each module; the weight itself is
        v.
        """
        found = weights_of(spec.model, "weight_norm", self.patterns)
        of = {f"{name}_g": name for name in found}
        outputs = {name: int(is_input_first(module)) for name, (module, *_) in found.items()}
        for name, (module, *_) in found.items():
            if not weight_of(module).is_floating_point():
                raise ValueError(
                    f"weight_norm: needs a weight with a gradient, got {name!r} in bits; apply it "
                    f"to others"
                )
            if outputs[name] and getattr(module, "groups", 1) > 1:
                raise ValueError(
                    f"weight_norm: a transposed convolution must have groups=1, got "
                    f"{module.groups} for {name!r}, whose outputs are in two dimensions; leave it "
                    f"out"
                )
            g = first_lengths(name, module, weight_of(module).detach(), outputs[name])
            add_param(module, "weight_g", g, field="weight_norm")

        def first(weights: Tensors) -> dict[str, Tensor]:
            return {
                g: first_lengths(name, found[name][0], weights[name], outputs[name])
                for g, name in of.items()
                if name in weights
            }

        views = {
            name: (FunctionView(partial(normed, outputs=outputs[name]), (g,)),)
            for g, name in of.items()
        }
        return Changes(
            name="weight_norm", text=str(self), views=views, added=frozenset(of), first_params=first
        )


def weight_norm(pattern: Patterns) -> WeightNorm:
    """Trains length and direction of each output's row apart: modules see g · v / ‖v‖.
    g begins as ‖v‖, which changes nothing.

    Args:
        pattern: names of modules with a `weight`, with `*` for any part.
    """
    return WeightNorm(patterns_of("weight_norm", pattern))
