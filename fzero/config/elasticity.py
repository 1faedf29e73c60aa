"""DeepSpeed's block `elasticity`: the batch as a function of the number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from fzero.config.elastic_sizes import elastic_batch, elastic_batch_of_nodes
from fzero.config.fields import Block, Count, Number, only

if TYPE_CHECKING:
    from fzero.config.elastic_sizes import ElasticBatch


class Elasticity(Block):
    """DeepSpeed key `elasticity`: a global batch that many numbers of ranks can train,
    with as many micro-steps as each needs.
    """

    enabled: bool = False
    """Whether this block and the number of ranks determine the batch sizes."""
    max_train_batch_size: Count | None = None
    """Most samples of a step, all ranks together; required where `enabled`."""
    micro_batch_sizes: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """Numbers of samples that a rank has memory for; required where `enabled`. The
    largest that fits the batch is taken.
    """
    min_gpus: Count = 1
    """Smaller numbers of ranks are not counted when the batch is chosen."""
    max_gpus: Count = 10_000
    """Larger numbers of ranks are not counted when the batch is chosen."""
    num_gpus_per_node: Count = 1
    """With version 0.2: the ranks of a node; a job has full nodes."""
    model_parallel_size: Count = 1
    """With version 0.2: the ranks that hold one copy of the model together, for
    `compute_elastic_config`. Training needs 1: there is no model-parallel axis."""
    prefer_larger_batch: bool = True
    """If several batches can be trained by equally many numbers of ranks: true chooses
    the largest, false the smallest.
    """
    ignore_non_elastic_batch_info: bool = False
    """Whether batch sizes given beside this block are ignored instead of an error."""
    version: Annotated[Number, only(lambda value: value in (0.1, 0.2), "must be 0.1 or 0.2")] = 0.2
    """0.1: the batch is the same on all numbers of ranks that can train it, and others
    are an error. 0.2 counts nodes, and chooses a separate batch for a number of ranks
    that cannot train the common one."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.enabled:
            for name in ("max_train_batch_size", "micro_batch_sizes"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is required where elasticity is enabled, got none")
        if self.max_gpus < self.min_gpus:
            raise ValueError(
                f"min_gpus must not be greater than max_gpus, got {self.min_gpus} and "
                f"{self.max_gpus}"
            )
        if self.enabled and self.model_parallel_size > 1:
            if self.version == 0.1:
                raise ValueError(
                    f"model_parallel_size must be 1 in version 0.1, got "
                    f"{self.model_parallel_size}; set version to 0.2"
                )
            if self.num_gpus_per_node % self.model_parallel_size:
                raise ValueError(
                    f"num_gpus_per_node must be a multiple of model_parallel_size, "
                    f"{self.model_parallel_size}, got {self.num_gpus_per_node}; change one of them"
                )
        return self

    def batch_on(self, world_size: int) -> ElasticBatch:
        """The batch that `world_size` ranks train.

        Raises:
            ValueError: no batch fits, none for this number of ranks, or the block asks
                for model parallelism.
        """
        if self.model_parallel_size > 1:
            raise ValueError(
                f"elasticity.model_parallel_size: must be 1 in training, got "
                f"{self.model_parallel_size}: there is no model-parallel axis; set it to 1 "
                f"(compute_elastic_config takes others)"
            )
        return self.batch_of_gpus(world_size)

    def batch_of_gpus(self, num_gpus: int) -> ElasticBatch:
        """The batch for `num_gpus`, of which `model_parallel_size` make one
        data-parallel rank.

        Raises:
            ValueError: no batch fits, or none for this number.
        """
        sizes, most, is_larger = (
            self.micro_batch_sizes,
            self.max_train_batch_size,
            self.prefer_larger_batch,
        )
        assert sizes is not None and most is not None
        limits = {"min_ranks": self.min_gpus, "max_ranks": self.max_gpus, "most": most}
        if self.version == 0.1:
            return elastic_batch(sizes, prefer_larger=is_larger, **limits)
        limits |= {"world_size": num_gpus, "ranks_per_node": self.num_gpus_per_node}
        limits |= {"model_parallel_size": self.model_parallel_size}
        return elastic_batch_of_nodes(sizes, prefer_larger=is_larger, **limits)
