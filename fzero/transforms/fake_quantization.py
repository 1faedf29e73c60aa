"""`quantization_aware`: training with the rounding of a quantized model, whose gradient
goes straight through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fzero.common.arguments import check_whole
from fzero.compression.inputs import quantizing
from fzero.compression.techniques import Quantize, QuantizeInput
from fzero.model.transforms import Call, Changes, TransformedStep, Wrap
from fzero.plans.units import blocks_of
from fzero.transforms.matching import Patterns, is_input_first, patterns_of, shape_of, weights_of


@dataclass(frozen=True)
class QuantizationAware:
    """The transform of `quantization_aware`."""

    patterns: tuple[str, ...]
    weight_bits: int | None
    activation_bits: int | None
    per: Literal["channel", "tensor"]
    offset: int

    def __call__(self, spec: TransformedStep) -> Changes:
        """See `ModelTransform`. It adds nothing."""
        found = weights_of(spec.model, "quantization_aware", self.patterns)
        users = {id(module) for modules in found.values() for module in modules}
        inputs = [name for name, module in spec.model.named_modules() if id(module) in users]
        if self.activation_bits is not None and spec.compile == "block":
            blocks = blocks_of(spec.model, spec.units)
            inside = next(
                (name for name in inputs if any(f"{name}.".startswith(f"{b}.") for b in blocks)),
                None,
            )
            if inside is not None:
                raise ValueError(
                    f"quantization_aware: activation_bits must be None with compile='block' for "
                    f"modules inside blocks, got {self.activation_bits} for {inside!r}; pass "
                    f"compile='step', leave compile out, or quantize weights only"
                )
        views = {}
        if (bits := self.weight_bits) is not None:
            for name, (module, *_) in found.items():
                if self.per == "channel" and is_input_first(module):
                    raise ValueError(
                        f"quantization_aware: per must be 'tensor' for {name!r}, whose rows are "
                        f"inputs ({type(module).__name__}), got 'channel'; pass per='tensor'"
                    )
                groups = shape_of(module)[0] if self.per == "channel" else 1
                views[name] = (Quantize(bits, bits, offset=self.offset, num_groups=groups),)
        of_inputs = dict.fromkeys(
            inputs, QuantizeInput(self.activation_bits or 0, symmetric=True, offset=self.offset)
        )

        def forwards(call: Call) -> Mapping[str, Wrap]:
            return quantizing(of_inputs, call.num_updates())

        forwards_or_none = None if self.activation_bits is None else forwards
        return Changes(
            name="quantization_aware", text=str(self), views=views, forwards=forwards_or_none
        )


def quantization_aware(
    pattern: Patterns,
    *,
    weight_bits: int | None = 8,
    activation_bits: int | None = 8,
    per: Literal["channel", "tensor"] = "channel",
    offset: int = 0,
) -> QuantizationAware:
    """Rounds weights and inputs of modules to few bits in each forward, as a quantized
    model would; gradients pass through.

    Ranges are symmetric, from the largest absolute value: of each output's row or of
    the weight, and of each token of an input.

    Args:
        pattern: names of modules with a `weight`, with `*` for any part.
        weight_bits, activation_bits: 1 to 16; None leaves weights or inputs as they
            are.
        per: whether each output channel of a weight has a range, or the whole weight
            one.
        offset: the number of updates before it begins.
    """
    for key, bits in (("weight_bits", weight_bits), ("activation_bits", activation_bits)):
        if bits is not None and not (type(bits) is int and 1 <= bits <= 16):
            raise ValueError(
                f"quantization_aware: {key} must be 1 to 16, or None for none, got {bits!r}; pass "
                f"8, say"
            )
    if weight_bits is None and activation_bits is None:
        raise ValueError(
            "quantization_aware: weight_bits or activation_bits must be a number, got None and "
            "None; pass 8"
        )
    if per not in ("channel", "tensor"):
        raise ValueError(
            f"quantization_aware: per must be 'channel' or 'tensor', got {per!r}; pass one of these"
        )
    check_whole("quantization_aware: offset", offset, 0)
    return QuantizationAware(
        patterns_of("quantization_aware", pattern), weight_bits, activation_bits, per, offset
    )
