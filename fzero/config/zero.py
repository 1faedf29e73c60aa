"""The blocks `zero_optimization` and `activation_checkpointing`: what is divided among
the ranks, and what is recomputed.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from fzero.config.fields import Beta, Block, Count, Elements, number, off_at
from fzero.config.offload import OffloadOptimizer, OffloadParam, if_somewhere
from fzero.config.stages import STAGES, Stage, StageSpecs


def _stage(value: object) -> object:
    if isinstance(value, str) and value in STAGES:
        return value
    given = int(value) if isinstance(value, str) and value.isdigit() else number(value)
    if given not in [*STAGES]:  # a list may be compared with anything
        own = ", ".join(repr(name) for name in STAGES if isinstance(name, str))
        raise ValueError(f"must be 0, 1, 2 or 3, or fzero's own {own}")
    return given


def _number_of_ranks(value: object) -> object:
    """None for a number below 1, with which DeepSpeed switches MiCS off."""
    given = number(value)
    return None if isinstance(given, int) and given < 1 else given


class LoCo(Block):
    """DeepSpeed key `zero_optimization.zeropp_loco_param`: error feedback on quantized
    gradients (Xie et al. 2024).
    """

    err_beta: Beta = 0.8
    """The decay of the old error: its weight beside the new one."""
    reset_T: Count = 1024
    """The error is reset after so many reductions."""


class ZeroOptimization(Block):
    """DeepSpeed key `zero_optimization`. Sizes count elements."""

    stage: Annotated[Stage, BeforeValidator(_stage)] = 0
    """0, 1, 2 or 3: which of optimizer state (1), gradients (2) and parameters (3) are
    divided among the ranks. fzero's own "3 once" divides parameters between steps: a
    step gathers them once, and reduces gradients once, for all micro-steps."""
    reduce_bucket_size: Count | None = None
    """Most elements of full gradients that wait for their reduction, besides those of
    one unit and never more than two units. No reduction waits in stage 0 on two ranks,
    whose full gradients belong to the state and are summed in place. Also, modules
    outside repeated blocks are joined into one unit up to this size. None is 500000000.
    With `compile="step"` a number also joins reductions of flat buffers up to this size
    (in stages 2 and 3 up to two units at most). None joins none, which overlaps best:
    500000000 would join all reductions of a small model."""
    allgather_bucket_size: Elements | None = None
    """With `compile="step"`: updated shards (stages 1 and 2) are gathered together up
    to this size. In stage 3 the flat buffers of a unit are, and small units used one
    after the other, up to the size of the second largest unit, so that two live units
    hold no more elements than before. None and 0 gather buffer by buffer, as the eager
    step always does."""
    round_robin_gradients: bool = False
    """Order of the parameters inside a flat buffer: round robin over the ranks, instead
    of as declared.
    """
    stage3_param_persistence_threshold: Elements = Field(
        100_000, alias="param_persistence_threshold"
    )
    """Parameters with fewer elements are not sharded in stage 3: every rank holds them
    in full.
    """
    stage3_prefetch_bucket_size: Elements | None = Field(None, alias="prefetch_bucket_size")
    """0: a unit is gathered when it is needed. None: the next unit is prefetched, so
    that two are live. A number: the same; with `compile="step"` more units are
    prefetched as long as all prefetched ones together have at most this many elements.
    """
    stage3_max_live_parameters: Elements = Field(1_000_000_000, alias="max_live_parameters")
    """Most live gathered elements: no unit is prefetched, and none is kept, where that
    would exceed it. The unit in use is gathered however large it is, so 0 is one unit
    at a time."""
    stage3_max_reuse_distance: Elements | None = Field(None, alias="max_reuse_distance")
    """With `compile="step"`: a unit is kept until its next use when the units used
    meanwhile have at most this many elements. DeepSpeed's default of 1000000000 keeps
    all units of most models from the forward to the backward. None is 0: a unit is
    released after its use and gathered again, as the eager step always does."""
    mics_shard_size: Annotated[Count | None, BeforeValidator(_number_of_ranks)] = None
    """MiCS: the number of ranks over which the stage shards, neighbours in rank order;
    it must divide the number of all ranks. Every such node holds the same state, and
    gradients are reduced within it first: the mesh `(node, data)` with so many ranks
    along `data`. None, 0 or a negative number is all ranks. It has no effect in
    stage 0."""
    zero_hpz_partition_size: Annotated[Count | None, off_at(0, 1)] = None
    """hpZ of ZeRO++, for stage 3: the number of ranks over which parameters are
    sharded, as in `mics_shard_size`; gradients, master and optimizer state are sharded
    over all ranks. All gathers of a step are within such a node; the updated parameters
    are gathered between nodes once. None, 0 or 1 shards the parameters over all ranks
    as well."""
    zero_quantized_weights: bool = False
    """qwZ of ZeRO++, for stage 3: the forward, the backward and evaluation gather
    parameters in 8 bits, with a scale for every
    256. The state, and the result of `step.gather`, have the parameters' own precision.
    """
    zero_quantized_nontrainable_weights: bool = False
    """The same for frozen parameters alone. They are stored unquantized; DeepSpeed
    stores them quantized, which saves memory."""
    zero_quantized_gradients: bool = False
    """qgZ of ZeRO++: gradients are sent in 4 bits, with a scale for every 256, once
    along each axis of the mesh, and added up in fp32; here in every stage, in DeepSpeed
    in stage 3. Sums are sent unquantized."""
    zeropp_loco_param: LoCo | None = None
    """LoCo: the error of each reduction in 4 bits is added to the gradients of the next
    one. None is without.
    """
    offload_optimizer: Annotated[OffloadOptimizer | None, AfterValidator(if_somewhere)] = None
    """Where masters and optimizer state live, in any stage, and the shards of gradients
    in stages 2 and 3; None is on the device. (`cpu_offload: true` is the older form of
    `device: cpu`.)"""
    offload_param: Annotated[OffloadParam | None, AfterValidator(if_somewhere)] = None
    """Where the shards of parameters live in stage 3; small parameters are on the
    device in full. None is on the device. (`cpu_offload_param: true` is the older form
    of `device: cpu`.)"""
    ignore_unused_parameters: bool = True
    """False makes it an error on all ranks, with the names, that a trained parameter
    got no gradient on some rank in any micro-step before an update; true gives it a
    gradient of zero. (DeepSpeed looks only where the optimizer is offloaded in stages 1
    and 2.)"""
    sub_group_size: Annotated[Count | None, off_at(0)] = None
    """Elements of a flat buffer that are updated at a time where its state lives off
    the device, rounded up to a multiple of 2048 (32768 with checksums). None or 0
    is 1048576. DeepSpeed's default of 1000000000 updates every flat buffer in one
    piece; Lamb, Adafactor and Muon always do."""

    @property
    def row(self) -> StageSpecs:
        """The specs of the stage."""
        return STAGES[self.stage]

    @property
    def quantizes(self) -> bool:
        """Whether parameters or gradients are sent in few bits."""
        weights = self.zero_quantized_weights or self.zero_quantized_nontrainable_weights
        return weights or self.zero_quantized_gradients


class ActivationCheckpointing(Block):
    """DeepSpeed key `activation_checkpointing`. As in DeepSpeed, the block alone
    (without `every`) checkpoints nothing.
    """

    every: Count | None = None
    """fzero's own key: every n-th unit that is one module keeps only its inputs for the
    backward, which runs it again; 1 is every unit. None checkpoints the units that
    `make_train_step(checkpoint=...)` names."""
    cpu_checkpointing: bool = False
    """Kept inputs wait in host memory; no effect when nothing is checkpointed, or on
    the CPU.
    """
