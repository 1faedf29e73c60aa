"""`compression`: from the block `compression_training` and a model to a frozen plan,
parameter → techniques, from when.

`CompressionPlan.params` are views, which steps apply between the gather of a parameter
and the module. They are pure: of the gathered tensors and n, the number of updates so
far. Nothing in the model is replaced; names and ties stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from fzero.compression.added import first_value, registered
from fzero.compression.inputs import quantizing
from fzero.config.config import ConfigError
from fzero.model.transforms import Changes, Number, Tensors, TransformedStep

if TYPE_CHECKING:
    from fzero.compression.techniques import Mask, QuantizeInput, Technique

__all__ = ["CompressionPlan", "Extra", "Shrink", "compression_of", "is_added", "plan_of"]


ADDED = frozenset(
    {
        *("sparse_mask_scores", "row_mask_scores", "head_pruning_scores", "channel_mask_scores"),
        *("sparse_pruning_mask", "row_pruning_mask", "channel_pruning_mask", "x_min_max"),
    }
)
"""The names, in their modules, of the tensors that techniques add."""


def is_added(name: str) -> bool:
    """Whether a tensor's name is one that techniques give; a run without compression
    leaves such a tensor in a checkpoint.
    """
    return name.rpartition(".")[2] in ADDED


@dataclass(frozen=True, slots=True)
class Extra:
    """A tensor that a technique adds to a module: trained scores (a parameter), or a
    mask or a range (buffers).

    Attributes:
        module, key: where it is registered; its full name is `name`.
        of: the weight that it belongs to; for a range, the module.
        mask: the mask that it is the source of; None for a range.
    """

    module: str
    key: str
    shape: tuple[int, ...]
    kind: Literal["scores", "mask", "range"]
    of: str
    mask: Mask | None = None

    @property
    def mask_of(self) -> Mask:
        """The mask computed from this tensor."""
        assert self.mask is not None
        return self.mask

    @property
    def name(self) -> str:
        """The full name."""
        return f"{self.module}.{self.key}" if self.module else self.key


@dataclass(frozen=True, slots=True)
class Shrink:
    """A dimension that `clean` cuts where a mask is 0.

    Attributes:
        mask: the mask of the pruned module's weight.
        cut: the tensors that lose elements, each with the dimension.
    """

    mask: Mask
    cut: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class CompressionPlan:
    """The compression of each parameter of a model and of each module's input; `print`
    it. It holds no tensors.

    It is a transform of its model (`fzero.model.transforms`), which also adds scores,
    masks and ranges to the modules.

    Attributes:
        params: the techniques of each compressed parameter, in the order in which they
            apply.
        inputs: the quantization of the inputs of modules, by the module's name.
        extras: the tensors that the techniques add to modules.
        shrinks: the dimensions that `clean` cuts.
        aliases: the second names of tied parameters that are compressed or cut, and of
            added tensors, each with the first.
        seed: the seed of stochastic rounding and of the first scores.
    """

    params: Mapping[str, tuple[Technique, ...]] = field(default_factory=dict)
    inputs: Mapping[str, QuantizeInput] = field(default_factory=dict)
    extras: tuple[Extra, ...] = ()
    shrinks: tuple[Shrink, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def __bool__(self) -> bool:
        """Whether it compresses anything."""
        return bool(self.params or self.inputs)

    def __call__(self, spec: TransformedStep) -> Changes:
        """See `ModelTransform`. It adds the tensors of `extras` to the modules, unless
        they are there.
        """
        if spec.compile == "block" and self.inputs:
            raise ConfigError(
                "compression_training.activation_quantization: must be off with compile='block', "
                "whose blocks would be compiled in every step, got it on; pass compile='step', or "
                "leave compile out"
            )
        registered(self, spec.model)
        return Changes(
            name="compression",
            text=str(self or "no compression"),
            views=self.params,
            forwards=(lambda call: quantizing(self.inputs, call.num_updates()))
            if self.inputs
            else None,
            added=frozenset(extra.name for extra in self.extras),
            first_value=self.first_extra,
            first_buffers=self.first_masks,
            made_buffers=frozenset(x.name for x in self.extras if x.kind == "mask"),
            ranges=self.ranges,
        )

    # --- pure functions ---------------------------------------------------------------------------

    def seen(self, name: str, value: Tensor, n: Number, tensors: Tensors) -> Tensor:
        """The value that a module gets for a parameter in a forward after n updates.

        Args:
            value: the parameter, gathered whole.
            n: an int, or a 0-d int64 tensor on its device.
            tensors: masks and scores by full name.
        """
        for technique in self.params.get(name, ()):
            value = technique.value(value, tensors, n)
        return value

    def needs(self, names: Iterable[str]) -> set[str]:
        """The masks and scores that the techniques of these parameters read."""
        return {key for name in names for x in self.params.get(name, ()) for key in x.reads}

    @property
    def ranges(self) -> frozenset[str]:
        """The module buffers that hold (min, max): ranks agree on the least and the
        largest of theirs.
        """
        return frozenset(extra.name for extra in self.extras if extra.kind == "range")

    # --- first values -----------------------------------------------------------------------------

    def first_masks(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The masks (`l1`) of those weights that are in `values`, by the name of the
        mask.
        """
        found = {}
        for extra in self.extras:
            if extra.kind == "mask" and extra.of in values:
                found[extra.name] = extra.mask_of.first(values[extra.of])
        return found

    def first_extra(self, name: str, like: Tensor) -> Tensor | None:
        """The first value of an added tensor, by the seed and its name, on the CPU;
        None for any other tensor.

        Args:
            like: has its dtype.
        """
        extra = next((extra for extra in self.extras if extra.name == name), None)
        if extra is None:
            return None
        return first_value(extra, self.seed, like.dtype)

    # --- text -------------------------------------------------------------------------------------

    def __str__(self) -> str:
        rows = [
            [name, str(technique)]
            for name, techniques in self.params.items()
            for technique in techniques
        ]
        rows += [[f"input of {name or '(root)'}", str(of)] for name, of in self.inputs.items()]
        rows += [
            [f"cut of {x.mask.source}", ", ".join(f"{n} dim {dim}" for n, dim in x.cut)]
            for x in self.shrinks
        ]
        width = max((len(what) for what, _ in rows), default=0)
        return "\n".join(f"{what:{width}}  {how}" for what, how in rows) or "no compression"


def compression_of(step: Any) -> CompressionPlan:
    """The plan among the transforms of a `TrainStep`; one that compresses nothing if
    there is none.
    """
    return next(
        (one for one in step.spec.transforms if isinstance(one, CompressionPlan)), CompressionPlan()
    )


def plan_of(model: nn.Module) -> CompressionPlan | None:
    """The plan that `fzero.compression.prepare` has noted in a model; None if there is
    none.
    """
    plan = vars(model).get("compression_plan")
    return plan if isinstance(plan, CompressionPlan) else None
