"""The blocks `curriculum_learning`, `data_efficiency` and `progressive_layer_drop`, as
frozen values; see docs/data.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fzero.config.fields import PER_RANK, Block, Count, Elements, FolderOrFile, Number, Rate
from fzero.data.schedules import Discrete, Root

if TYPE_CHECKING:
    from fzero.data.schedules import Discrete, Root

_NEEDS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}
"""The keys of `schedule_config` by the type of the schedule."""


class ScheduleConfig(Block):
    """The numbers of a schedule; which are needed depends on `schedule_type`."""

    total_curriculum_step: Count | None = None
    """fixed_linear, fixed_root: the step at which the largest difficulty is reached."""
    difficulty_step: Count | None = None
    """fixed_linear, fixed_root: difficulties are multiples of it."""
    root_degree: Annotated[Number, Field(gt=0)] | None = None
    """fixed_root: 2 is a square root."""
    difficulty: tuple[Elements, ...] | None = None
    """fixed_discrete: the difficulties."""
    max_step: tuple[Elements, ...] | None = None
    """fixed_discrete: the last step of each difficulty but the last."""


class Difficulty(Block):
    """A difficulty as a function of the step's number, which is counted from 1."""

    min_difficulty: Elements | None = None
    """The first difficulty, rounded down to a multiple of `difficulty_step`; required.
    """
    max_difficulty: Elements | None = None
    """The last difficulty; required."""
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = None
    """How it rises; required. custom: a function that
    `set_custom_curriculum_learning_schedule` sets.
    """
    schedule_config: ScheduleConfig = ScheduleConfig()
    """The schedule's numbers: `total_curriculum_step`, `difficulty_step` and
    `root_degree`, or `difficulty` and `max_step`.
    """

    def schedule(self) -> Root | Discrete | None:
        """The schedule; None where the script sets a function.

        Raises:
            ValueError: a key that it needs is missing, or the numbers do not fit each
                other.
        """
        for key in ("min_difficulty", "max_difficulty", "schedule_type"):
            if getattr(self, key) is None:
                raise ValueError(f"{key}: is required where a curriculum is enabled; give a value")
        kind, numbers = self.schedule_type or "custom", self.schedule_config
        for key in _NEEDS[kind]:
            if getattr(numbers, key) is None:
                raise ValueError(
                    f"schedule_config.{key}: is required for schedule_type {kind!r}; give a value"
                )
        if kind == "custom":
            return None
        if (
            numbers.difficulty is not None
            and numbers.max_step is not None
            and kind == "fixed_discrete"
        ):
            return Discrete(numbers.difficulty, numbers.max_step)
        least, most = self.min_difficulty or 0, self.max_difficulty or 0
        if least > most:
            raise ValueError(
                f"min_difficulty: must be at most max_difficulty, {most}, got {least}; lower it"
            )
        return Root(
            least, most, numbers.total_curriculum_step or 1,
            numbers.difficulty_step or 1, numbers.root_degree or 1 if kind == "fixed_root" else 1,
        )  # fmt: skip

    def warnings(self) -> list[str]:
        """A line where the first difficulty is not the smallest one, as in DeepSpeed."""
        schedule = self.schedule()
        if isinstance(schedule, Root) and (rest := schedule.minimum % schedule.multiple):
            return [
                f"min_difficulty: is {schedule.minimum}, no multiple of difficulty_step "
                f"{schedule.multiple}, so that the first difficulty is {schedule.minimum - rest}, "
                f"as in DeepSpeed; give a multiple"
            ]
        return []


def _check_schedule(block: Difficulty, name: str = "") -> None:
    try:
        block.schedule()
    except ValueError as error:
        raise ValueError(f"{name}{error}") from None


class CurriculumLearning(Difficulty):
    """DeepSpeed key `curriculum_learning`: the engine passes `curriculum_seqlen=` to
    each forward in training mode, and the model truncates its sequences.
    `fzero.data.truncated` cuts a batch before a step."""

    enabled: bool | None = None
    """Whether a curriculum is used; required."""
    curriculum_type: Literal["seqlen"] = "seqlen"
    """The difficulty is a sequence length."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.enabled is None:
            raise ValueError("enabled: is required; give true or false")
        if self.enabled:
            _check_schedule(self)
        return self


class CurriculumMetric(Difficulty):
    """One metric of a curriculum: a sample is taken if its value is not above the
    difficulty.
    """

    index_to_sample_path: FolderOrFile | None = None
    """The analyzer's file of samples in ascending order of the metric, without suffix;
    not for single_cluster.
    """
    index_to_metric_path: FolderOrFile | None = None
    """The analyzer's file of the values, without suffix; for difficulties by value."""
    difficulty_type: Literal["value", "percentile"] = "value"
    """Whether a difficulty is a value, or a share of the samples, of which
    `max_difficulty` is all.
    """
    clustering_type: Literal["schedule_based", "single_cluster"] = "schedule_based"
    """single_cluster takes all samples at once; its difficulty is for
    `set_data_post_process_func` only.
    """

    def check(self, name: str) -> None:
        """Raises a ValueError that names the metric."""
        _check_schedule(self, f"{name}.")
        needed = ["index_to_sample_path"] if self.clustering_type == "schedule_based" else []
        needed += ["index_to_metric_path"] if needed and self.difficulty_type == "value" else []
        for key in needed:
            if getattr(self, key) is None:
                raise ValueError(
                    f"{name}.{key}: is required for clustering_type 'schedule_based'; give the "
                    f"analyzer's file"
                )
        if self.difficulty_type == "percentile" and not self.max_difficulty:
            raise ValueError(
                f"{name}.max_difficulty: must be at least 1 for percentiles, got 0; 100 is usual"
            )


class SampledCurriculum(Block):
    """Samples by difficulty."""

    enabled: bool = False
    """Whether samples are chosen by metrics."""
    curriculum_metrics: Mapping[str, CurriculumMetric] = {}
    """The metrics by name; a sample is taken if all of them allow it."""

    def __hash__(self) -> int:
        return hash((self.enabled, tuple(self.curriculum_metrics.items())))

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.enabled and not self.curriculum_metrics:
            raise ValueError(
                "curriculum_metrics: must name a metric where the curriculum is enabled, got none; "
                "give one"
            )
        for name, metric in self.curriculum_metrics.items() if self.enabled else ():
            metric.check(f"curriculum_metrics.{name}")
        return self


class DynamicBatching(Block):
    """Batches of as many samples as their tokens allow
    (`fzero.data.batches_by_tokens`).
    """

    enabled: bool = False
    """Whether the script's call for variable batches is allowed."""
    metrics_path: FolderOrFile = ""
    """The analyzer's folder, with the metric `seqlen`."""
    lr_scaling_method: Literal["linear", "sqrt", "none"] = "linear"
    """How the learning rate follows the number of samples of a batch."""
    min_batch_size: Count = 1
    """The fewest samples of a micro-batch."""
    max_batch_size: Count | None = None
    """The most samples of a micro-batch; None has no limit."""
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = "dataloader"
    """The order of the samples that fill batches."""
    max_tokens: Count | None = None
    """The most tokens of a micro-batch; required."""
    verbose: Annotated[bool, PER_RANK] = False
    """Whether rank 0 prints every batch."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.enabled and self.max_tokens is None:
            raise ValueError(
                "max_tokens: is required where dynamic batching is enabled; give a number of tokens"
            )
        return self


class DataSampling(Block):
    """How samples are chosen."""

    enabled: bool = False
    """Whether the loader of `training_data` draws samples by this block."""
    num_epochs: Count = 1000
    """The number of epochs in the loader."""
    num_workers: Elements = 0
    """Processes that load samples."""
    pin_memory: bool = False
    """Whether batches are in pinned memory."""
    curriculum_learning: SampledCurriculum = SampledCurriculum()
    """Samples by difficulty."""
    dynamic_batching: DynamicBatching = DynamicBatching()
    """Batches by tokens."""


class LTDScheduleConfig(Block):
    """The numbers of the schedule of kept tokens."""

    require_steps: Count
    """The step at which all tokens are kept."""
    seq_per_step: Count
    """Numbers of kept tokens are multiples of it."""


class LTDSchedule(Block):
    """The number of kept tokens as a function of the number of updates so far."""

    min_value: Count
    """The first number of kept tokens."""
    max_value: Count
    """The last one: the length of sequences."""
    schedule_type: Literal["fixed_linear"] = "fixed_linear"
    """DeepSpeed has this one only."""
    schedule_config: LTDScheduleConfig
    """`require_steps` and `seq_per_step`."""

    def schedule(self) -> Root:
        """r(n): the number of kept tokens after n updates."""
        numbers = self.schedule_config
        if self.min_value > self.max_value:
            raise ValueError(
                f"min_value: must be at most max_value, {self.max_value}, got {self.min_value}; "
                f"lower it"
            )
        return Root(self.min_value, self.max_value, numbers.require_steps, numbers.seq_per_step)


class LayerTokenRates(Block):
    """A learning rate by layer tokens, which DeepSpeed does not have either."""

    enabled: bool = False
    """Must be false."""
    total_layer_tokens: Elements | None = None
    """Has no effect; `warmup_type` and `warmup_layer_tokens` likewise."""
    warmup_type: str | None = None
    """Has no effect."""
    warmup_layer_tokens: Elements | None = None
    """Has no effect."""

    @model_validator(mode="after")
    def _is_off(self) -> Self:
        if self.enabled:
            raise ValueError(
                "layer_token_lr_schedule.enabled: must be false, got true, for which DeepSpeed "
                "raises NotImplementedError; set it to false"
            )
        return self


class RandomLTDBlock(Block):
    """Random layer-token dropping: in training the chosen layers see a random choice of
    the tokens.
    """

    enabled: bool = False
    """Whether tokens are dropped after `convert_to_random_ltd`, or in a model that
    `fzero.data.RandomLTD` has marked.
    """
    total_layer_num: Count | None = None
    """The number of layers of the model; for the count of layer tokens."""
    random_ltd_layer_num: Elements | None = None
    """The number of layers in `random_ltd_layer_id`."""
    random_ltd_layer_id: tuple[Elements, ...] = ()
    """The positions of the layers among the modules of their class, from 0."""
    model_mask_name: str | None = None
    """The name of the layer's argument that is the attention mask; None if there is
    none.
    """
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = "batch_seq_dim"
    """The first two dimensions of the hidden states."""
    layer_token_lr_schedule: LayerTokenRates = LayerTokenRates()
    """Must be disabled."""
    random_ltd_schedule: LTDSchedule | None = None
    """The number of kept tokens; required."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not self.enabled:
            return self
        if self.random_ltd_schedule is None:
            raise ValueError(
                "random_ltd_schedule: is required where random_ltd is enabled; give min_value, "
                "max_value and so on"
            )
        try:
            self.random_ltd_schedule.schedule()
        except ValueError as error:
            raise ValueError(f"random_ltd_schedule: {error}") from None
        if len({*self.random_ltd_layer_id}) != len(self.random_ltd_layer_id):
            raise ValueError(
                f"random_ltd_layer_id: must name each layer once, got "
                f"{list(self.random_ltd_layer_id)}"
            )
        if self.random_ltd_layer_num not in (None, len(self.random_ltd_layer_id)):
            raise ValueError(
                f"random_ltd_layer_num: must be the number of layers in random_ltd_layer_id, "
                f"{len(self.random_ltd_layer_id)}, got {self.random_ltd_layer_num}; leave it out"
            )
        return self


class DataRouting(Block):
    """Which tokens pass through which layers."""

    enabled: bool = False
    """Whether the block counts."""
    random_ltd: RandomLTDBlock = RandomLTDBlock()
    """Random layer-token dropping."""


class DataEfficiency(Block):
    """DeepSpeed key `data_efficiency`: which samples, and which of their tokens, a step
    computes with. An inner block counts if all blocks around it are enabled, too;
    DeepSpeed ignores these."""

    enabled: bool = False
    """Whether the block counts."""
    seed: Elements = 1234
    """The seed of all random choices of the block."""
    data_sampling: DataSampling = DataSampling()
    """How samples are chosen."""
    data_routing: DataRouting = DataRouting()
    """Which tokens pass through which layers."""

    @property
    def samples(self) -> bool:
        """Whether the loader draws samples by the block."""
        return self.enabled and self.data_sampling.enabled

    @property
    def samples_by_difficulty(self) -> bool:
        return self.samples and self.data_sampling.curriculum_learning.enabled

    @property
    def drops_tokens(self) -> bool:
        """Whether random layer-token dropping is on."""
        return self.enabled and self.data_routing.enabled and self.data_routing.random_ltd.enabled

    def ineffective(self) -> list[str]:
        """A line for each block that is enabled inside a disabled one."""
        sampling, routing = self.data_sampling, self.data_routing
        outer = "data_efficiency"
        flags: tuple[tuple[str, bool, bool], ...] = (
            ("data_sampling", sampling.enabled, self.enabled),
            (
                "data_sampling.curriculum_learning",
                sampling.curriculum_learning.enabled,
                self.samples,
            ),
            ("data_sampling.dynamic_batching", sampling.dynamic_batching.enabled, self.samples),
            ("data_routing", routing.enabled, self.enabled),
            (
                "data_routing.random_ltd",
                routing.random_ltd.enabled,
                self.enabled and routing.enabled,
            ),
        )
        return [
            f"{outer}.{name}.enabled: has no effect, because a block around it is not enabled "
            f"(DeepSpeed looks at the inner one alone); enable that, too, or leave this out"
            for name, is_on, counts in flags
            if is_on and not counts
        ]


class ProgressiveLayerDrop(Block):
    """DeepSpeed key `progressive_layer_drop`: a step passes
    `progressive_layer_drop=True` and `pld_theta=` to each forward in training mode, and
    the model drops layers (`fzero.data.kept_layers`)."""

    enabled: bool = False
    """Whether the engine passes them."""
    theta: Annotated[Rate, Field(le=1)] = 1.0
    """The limit of θ; the last layer is then kept with this probability."""
    gamma: Rate = 0.001
    """How fast θ falls."""


def data_warnings(
    efficiency: DataEfficiency | None, curriculum: CurriculumLearning | None
) -> list[str]:
    """Lines for keys without effect, and for difficulties that do not begin where they
    say.
    """
    efficiency = efficiency or DataEfficiency()
    lines = efficiency.ineffective()
    if curriculum is not None and curriculum.enabled:
        lines += [f"curriculum_learning.{line}" for line in curriculum.warnings()]
    if efficiency.samples_by_difficulty:
        where = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"
        metrics: Mapping[str, Any] = efficiency.data_sampling.curriculum_learning.curriculum_metrics
        lines += [
            f"{where}.{name}.{line}"
            for name, metric in metrics.items()
            for line in metric.warnings()
        ]
    block = efficiency.data_routing.random_ltd.random_ltd_schedule
    if (
        efficiency.drops_tokens
        and block is not None
        and (rest := block.min_value % (schedule := block.schedule()).multiple)
    ):
        lines.append(
            f"data_efficiency.data_routing.random_ltd.random_ltd_schedule.min_value: is "
            f"{block.min_value}, no multiple of seq_per_step {schedule.multiple}, so that "
            f"{block.min_value - rest} tokens are kept at first, as in DeepSpeed; give a multiple"
        )
    return lines
