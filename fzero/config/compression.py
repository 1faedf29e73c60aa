"""The block `compression_training`: quantization, pruning and layer reduction, as
frozen values.

A technique has `shared_parameters` and groups. A group names modules by regular
expressions (`re.search`) and has parameters of its own. `fzero.compression.compression`
makes a plan for a model from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from fzero.config.fields import LOWER, Block, Count, Elements, Number

Ratio = Annotated[Number, Field(gt=0, le=1)]
"""The share that is kept, above 0 and at most 1."""
Bits = Annotated[Count, Field(le=16)]
Symmetry = Annotated[Literal["symmetric", "asymmetric"], LOWER]


def _lists(value: Any) -> Any:
    """Related modules with one text instead of a list."""
    if isinstance(value, list | tuple):
        return [[item] if isinstance(item, str) else item for item in value]
    return value


Related = Annotated[tuple[tuple[str, ...], ...] | None, BeforeValidator(_lists)]


class LayerReduction(Block):
    """A student with fewer layers, which begins with layers of a teacher
    (`fzero.compression.start_of_student`).
    """

    enabled: bool = False
    """Whether the student begins with the teacher's layers."""
    keep_number_layer: Elements | None = None
    """The number of layers that are kept: as many as `teacher_layer` has."""
    module_name_prefix: str = ""
    """The name of the list of layers, such as `bert.encoder.layer`."""
    teacher_layer: tuple[Elements, ...] = ()
    """The teacher's layer for each layer of the student."""
    other_module_name: tuple[str, ...] = ()
    """Modules that are copied whole."""

    @model_validator(mode="after")
    def _counts(self) -> Self:
        if self.enabled and not (self.teacher_layer or self.other_module_name):
            raise ValueError(
                "teacher_layer: must name the teacher's layers where layer reduction is enabled, "
                "got none; give their numbers"
            )
        if self.enabled and self.keep_number_layer not in (None, len(self.teacher_layer)):
            raise ValueError(
                f"keep_number_layer: must be the number of layers in teacher_layer, "
                f"{len(self.teacher_layer)}, got {self.keep_number_layer}; leave it out"
            )
        return self


class MixedQuantization(Block):
    """A weighted mean of a weight and its quantized value."""

    enabled: bool = False
    """Whether the two are mixed."""
    quantize_change_ratio: Annotated[Number, Field(gt=0, le=1)] = 0.001
    """By how much the share of the weight falls in each update; it begins at 1 and
    again at each loss of a bit.
    """


class WeightQuantizationShared(Block):
    """Settings shared by all groups of weight quantization."""

    enabled: bool = False
    """Whether weights are quantized."""
    schedule_offset: Elements = 0
    """The number of updates before the first forward with quantized weights."""
    quantize_groups: Count = 1
    """The number of equal pieces of a weight, each with a scale of its own. An
    embedding has one for each row.
    """
    quantization_type: Symmetry = "symmetric"
    """Whether the values lie around 0, or between the least and the largest weight."""
    rounding: Annotated[Literal["nearest", "stochastic"], LOWER] = "nearest"
    """Stochastic rounding adds a number from [-½, ½), drawn by the seed, the update and
    the element's place.
    """
    quantize_weight_in_forward: bool = False
    """True has `target_bits` from the offset on. False begins with `start_bits`, and
    loses one at each period.
    """
    fp16_mixed_quantize: MixedQuantization = MixedQuantization()
    """Mixes weights with their quantized values; for falling bits."""


class WeightQuantizationParams(Block):
    """The bits of one group of weights."""

    start_bits: Bits | None = None
    """The bits at the offset; none are those of `target_bits`. Without effect where
    weights are quantized in the forward.
    """
    target_bits: Bits
    """The bits at the end."""
    quantization_period: Count = 1
    """The updates until the first loss of a bit; then the period doubles."""

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.start_bits is not None and self.start_bits < self.target_bits:
            raise ValueError(
                f"start_bits: must be at least target_bits, {self.target_bits}, got "
                f"{self.start_bits}; raise it"
            )
        return self


class ActivationQuantizationShared(Block):
    """Settings shared by all groups of activation quantization."""

    enabled: bool = False
    """Whether the inputs of modules are quantized."""
    quantization_type: Symmetry = "symmetric"
    """Whether the values lie around 0, or between the least and the largest input."""
    range_calibration: Annotated[Literal["dynamic", "static"], LOWER] = "dynamic"
    """Dynamic ranges are those of each token (of each image); a static one is a running
    mean, held in a module buffer.
    """
    schedule_offset: Elements = 1000
    """The number of updates before the first forward with quantized inputs."""


class ActivationQuantizationParams(Block):
    """The bits of one group of activations."""

    bits: Literal[4, 8]
    """4 or 8."""


class PruningShared(Block):
    """Settings shared by all groups of row and of channel pruning."""

    enabled: bool = False
    """Whether weights are pruned."""
    method: Annotated[Literal["l1", "topk"], LOWER] = "l1"
    """`l1` keeps the largest weights of the first state. `topk` keeps those with the
    largest scores, which are trained.
    """
    schedule_offset: Elements = 1000
    """The number of updates before the first forward with pruned weights."""


class SparsePruningShared(PruningShared):
    """Settings shared by all groups of sparse pruning."""

    @model_validator(mode="before")
    @classmethod
    def _refuses_snip(cls, data: Any) -> Any:
        if (
            isinstance(data, Mapping)
            and str(data.get("method")).lower() == "snip_momentum"
            and data.get("enabled")
        ):
            raise ValueError(
                "method: must be 'l1' or 'topk', got 'snip_momentum', which is the package "
                "neural_compressor's: it changes the model by hooks in a way of its own; use "
                "'topk', which trains scores"
            )
        return (
            {**data, "method": "l1"}
            if isinstance(data, Mapping) and not data.get("enabled")
            else data
        )


class HeadPruningShared(Block):
    """Settings shared by all groups of head pruning."""

    enabled: bool = False
    """Whether heads are pruned."""
    method: Annotated[Literal["topk"], LOWER] = "topk"
    """Scores of heads are trained; those with the largest are kept."""
    schedule_offset: Elements = 1000
    """The number of updates before the first forward with pruned heads."""
    num_heads: Count | None = None
    """The number of heads; required where head pruning is enabled."""

    @model_validator(mode="after")
    def _has_heads(self) -> Self:
        if self.enabled and self.num_heads is None:
            raise ValueError(
                "num_heads: is required where head pruning is enabled; give the model's number of "
                "heads"
            )
        return self


class PruningParams(Block):
    """The part of its modules that a group keeps."""

    dense_ratio: Ratio
    """The share that is kept: ⌈ratio · count⌉ of the elements, rows, heads or channels.
    """


class Group(Block):
    """Modules that a technique applies to."""

    modules: tuple[str, ...] = ("*",)
    """Regular expressions of module names (`re.search`); `"*"` is every Linear and
    Conv2d.
    """
    related_modules: Related = None
    """For each expression, those of the modules whose matching dimension shrinks with
    it; null shrinks nothing.
    """

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if not self.modules:
            raise ValueError(
                "modules: must have an expression, or the group compresses nothing, got none; '*' "
                "is all"
            )
        if self.related_modules and len(self.related_modules) != len(self.modules):
            raise ValueError(
                f"related_modules: must have one list for each of the {len(self.modules)} "
                f"expressions in modules, got {len(self.related_modules)}; add or remove lists"
            )
        return self


class WeightGroup(Group):
    """Modules whose weights are quantized alike."""

    params: WeightQuantizationParams
    """Their bits."""


class ActivationGroup(Group):
    """Modules whose inputs are quantized alike."""

    params: ActivationQuantizationParams
    """Their bits."""


class PruningGroup(Group):
    """Modules that are pruned alike."""

    params: PruningParams
    """The part that is kept."""


class _Technique(Block):
    """One technique."""

    shared_parameters: Any = None
    different_groups: Any = None

    @model_validator(mode="before")
    @classmethod
    def _is_off(cls, data: Any) -> Any:
        """The groups of a technique that is off are not read: DeepSpeed's files have
        incomplete ones.
        """
        shared = data.get("shared_parameters") if isinstance(data, Mapping) else None
        is_on = isinstance(shared, Mapping) and str(shared.get("enabled", False)).lower() in (
            "true",
            "1",
        )
        return data if is_on or not isinstance(data, Mapping) else {**data, "different_groups": {}}

    @model_validator(mode="after")
    def _has_groups(self) -> Self:
        if self.enabled and not self.different_groups:
            raise ValueError(
                "different_groups: must have a group where the technique is enabled, got none; add "
                "one with its params and modules, or set shared_parameters.enabled to false"
            )
        return self

    def __hash__(self) -> int:
        return hash((self.shared_parameters, tuple(self.different_groups.items())))

    @property
    def enabled(self) -> bool:
        """Whether the technique applies."""
        return bool(self.shared_parameters.enabled)


class WeightQuantization(_Technique):
    """Weights with few bits."""

    shared_parameters: WeightQuantizationShared = WeightQuantizationShared()
    """Settings shared by all groups."""
    different_groups: dict[str, WeightGroup] = Field(default_factory=dict)
    """Groups by any name."""

    @model_validator(mode="after")
    def _types_fit(self) -> Self:
        shared = self.shared_parameters
        for name, group in self.different_groups.items():
            if (
                shared.enabled
                and group.params.target_bits < 3
                and shared.quantization_type == "asymmetric"
            ):
                raise ValueError(
                    f"different_groups.{name}.params.target_bits: must be at least 3 where "
                    f"quantization_type is 'asymmetric', got {group.params.target_bits}; 1 and 2 "
                    f"bits are symmetric"
                )
        return self


class ActivationQuantization(_Technique):
    """Inputs of modules with few bits."""

    shared_parameters: ActivationQuantizationShared = ActivationQuantizationShared()
    """Settings shared by all groups."""
    different_groups: dict[str, ActivationGroup] = Field(default_factory=dict)
    """Groups by any name."""


class SparsePruning(_Technique):
    """Elements of weights that are 0."""

    shared_parameters: SparsePruningShared = SparsePruningShared()
    """Settings shared by all groups."""
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict)
    """Groups by any name."""


class RowPruning(_Technique):
    """Rows of weights, and elements of biases, that are 0."""

    shared_parameters: PruningShared = PruningShared()
    """Settings shared by all groups."""
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict)
    """Groups by any name."""


class HeadPruning(_Technique):
    """Heads of attention that are 0: columns of its output matrix."""

    shared_parameters: HeadPruningShared = HeadPruningShared()
    """Settings shared by all groups."""
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict)
    """Groups by any name."""


class ChannelPruning(_Technique):
    """Output channels of convolutions that are 0."""

    shared_parameters: PruningShared = PruningShared()
    """Settings shared by all groups."""
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict)
    """Groups by any name."""


class CompressionTraining(Block):
    """How a model is compressed while it trains; see docs/compression.md."""

    layer_reduction: LayerReduction = LayerReduction()
    """A student with fewer layers."""
    weight_quantization: WeightQuantization = WeightQuantization()
    """Weights with few bits."""
    activation_quantization: ActivationQuantization = ActivationQuantization()
    """Inputs of modules with few bits."""
    sparse_pruning: SparsePruning = SparsePruning()
    """Elements of weights that are 0."""
    row_pruning: RowPruning = RowPruning()
    """Rows of weights that are 0."""
    head_pruning: HeadPruning = HeadPruning()
    """Heads of attention that are 0."""
    channel_pruning: ChannelPruning = ChannelPruning()
    """Output channels of convolutions that are 0."""

    @property
    def compresses(self) -> bool:
        """Whether a technique is on, other than layer reduction, which makes the first
        weights.
        """
        techniques = (getattr(self, name) for name in type(self).model_fields)
        return any(x.enabled for x in techniques if isinstance(x, _Technique))
