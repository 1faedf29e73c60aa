"""`deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr`: batches
by tokens, and rates that follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from fzero.config.config import ConfigError
from fzero.data.index_files import read_rows
from fzero.data.token_batches import batches_by_tokens, scaled_rate
from fzero.deepspeed.engine.data_efficiency import efficiency_of
from fzero.deepspeed.engine.engine import Engine
from fzero.deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import (
    DistributedDataAnalyzer,
)
from fzero.deepspeed.utils.logging import logger

__all__ = [
    "VariableBatchSizeLR",
    "batch_by_seqlens",
    "dataloader_for_variable_batch_size",
    "get_dataloader_and_lr_scheduler_for_variable_batch_size",
    "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
    "lr_scheduler_for_variable_batch_size",
    "scale_lr",
]

MicroBatch = tuple[int, list[int]]


def batch_by_seqlens(
    seqlens: Sequence[int],
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: Any = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[MicroBatch], list[int], list[int]]:
    """(number of the batch, samples) of each micro-batch, then samples and longest
    sequence of each batch.

    See `fzero.data.batches_by_tokens`; `effective_batch_size` is its `num_parts`.
    """
    batches = batches_by_tokens(
        seqlens,
        max_tokens,
        num_parts=effective_batch_size,
        min_size=min_batch_size,
        max_size=max_batch_size,
        order=sequence_picking_order,
        same_size=required_microbatches_of_same_size,
        samples=sequence_ids_per_mb,
        seed=seed,
    )
    if verbose:
        for number, batch in enumerate(batches):
            logger.info(
                "batch %d: %d samples in %d micro-batches",
                number,
                batch.num_samples,
                len(batch.parts),
            )
    parts = [(number, list(part)) for number, batch in enumerate(batches) for part in batch.parts]
    return parts, [batch.num_samples for batch in batches], [batch.longest for batch in batches]


def scale_lr(
    base_batch_size: int, batch_size: int, base_lr: float = 1, method: str | None = "linear"
) -> float:
    """The learning rate of a batch of `batch_size` samples, from that of
    `base_batch_size`.
    """
    return scaled_rate(base_batch_size, batch_size, base_lr, method)


def dataloader_for_variable_batch_size(
    dataset: Dataset[Any],
    microbatch_ids: Sequence[MicroBatch],
    batch_max_seqlens: Sequence[int],
    dataloader_rank: int = 0,
    dataloader_batch_size: int = 1,
    dataloader_num_replicas: int = 1,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_num_workers: int = 2,
    dataloader_pin_memory: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
) -> tuple[DataLoader[Any], dict[str, Any]]:
    """A loader of `dataloader_batch_size` micro-batches at a time on one rank, and its
    arguments.

    Args:
        sample_padding_fn: `function(sample, length)` pads a sample to the longest of
            its batch, where that is required.
    """
    if required_microbatches_of_same_seqlen and sample_padding_fn is None:
        raise ConfigError(
            "sample_padding_fn: is required where all samples of a batch must have one length; "
            "give it"
        )

    def collate(parts: list[MicroBatch]) -> Any:
        samples = []
        for number, indices in parts:
            own = [dataset[index] for index in indices]
            if required_microbatches_of_same_seqlen and sample_padding_fn is not None:
                own = [sample_padding_fn(sample, batch_max_seqlens[number]) for sample in own]
            samples += own
        return dataloader_collate_fn(samples) if dataloader_collate_fn else samples

    # The items are micro-batches, which ranks take in turns; the samples are loaded where a worker
    # collates.
    sampler: Any = DistributedSampler(
        microbatch_ids,  # type: ignore[arg-type]
        num_replicas=dataloader_num_replicas,
        rank=dataloader_rank,
        shuffle=False,
    )
    loader: DataLoader[Any] = DataLoader(
        microbatch_ids,  # type: ignore[arg-type]
        batch_size=dataloader_batch_size,
        sampler=sampler,
        num_workers=dataloader_num_workers,
        collate_fn=collate,
        pin_memory=dataloader_pin_memory,
    )
    given = {
        "dataset": microbatch_ids,
        "batch_size": dataloader_batch_size,
        "pin_memory": dataloader_pin_memory,
        "data_sampler": sampler,
        "collate_fn": collate,
        "num_local_io_workers": dataloader_num_workers,
    }
    return loader, given


class VariableBatchSizeLR:
    """Scales the rates of a scheduler, or those of an optimizer, by the samples of the
    next batch.

    Args:
        lr_scheduler: is stepped before the rates are scaled; None for constant rates.
        optimizer: whose param groups are written.
        base_batch_size: the samples for which the rates are meant.
        batch_sizes: the samples of each batch, over and over.
        lr_scaling_method: "linear", "sqrt" or "none".
    """

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: Any = None,
        lr_scaling_method: str | None = "linear",
        last_epoch: int = -1,
        verbose: bool = False,
        *,
        optimizer: Any = None,
    ) -> None:
        self.base_lr_scheduler, self.optimizer = lr_scheduler, optimizer or lr_scheduler.optimizer
        self.base_batch_size, self.batch_sizes, self.dataloader = (
            base_batch_size,
            list(batch_sizes),
            dataloader,
        )
        self.lr_scaling_method, self.verbose, self.last_epoch = lr_scaling_method, verbose, 0
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._scale()

    def _scale(self) -> None:
        size = self.batch_sizes[self.last_epoch % len(self.batch_sizes)]
        for group, rate in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = scaled_rate(self.base_batch_size, size, rate, self.lr_scaling_method)
        if self.verbose:
            logger.info("batch %d: %d samples, lr %s", self.last_epoch, size, self.get_lr())

    def step(self, epoch: int | None = None) -> None:
        """Sets the rates of the next batch."""
        for group, rate in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = rate
        if self.base_lr_scheduler is not None:
            self.base_lr_scheduler.step()
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._scale()

    def get_last_lr(self) -> list[float]:
        """The rates before they are scaled."""
        return list(self.base_lrs)

    def get_lr(self) -> list[float]:
        """The rates of the next batch."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        base = self.base_lr_scheduler
        inner = base.state_dict() if base is not None else None
        return {
            "base_lr_scheduler": inner,
            "base_lrs": self.base_lrs,
            "last_epoch": self.last_epoch,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self.base_lr_scheduler is not None:
            self.base_lr_scheduler.load_state_dict(state_dict["base_lr_scheduler"])
        self.base_lrs, self.last_epoch = list(state_dict["base_lrs"]), state_dict["last_epoch"]
        self._scale()


def lr_scheduler_for_variable_batch_size(
    base_batch_size: int,
    batch_sizes: Sequence[int],
    dataloader: Any,
    lr_scheduler_or_optimizer: Any,
    lr_scaling_method: str | None = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """The scheduler of scaled rates, of a scheduler or of constant rates."""
    is_optimizer = hasattr(lr_scheduler_or_optimizer, "param_groups")
    scheduler, optimizer = (
        (None, lr_scheduler_or_optimizer) if is_optimizer else (lr_scheduler_or_optimizer, None)
    )
    how: dict[str, Any] = {
        "lr_scaling_method": lr_scaling_method,
        "verbose": verbose,
        "optimizer": optimizer,
    }
    return VariableBatchSizeLR(scheduler, base_batch_size, batch_sizes, dataloader, **how)


def get_dataloader_and_lr_scheduler_for_variable_batch_size(
    dataset: Dataset[Any],
    dataset_seqlens: Sequence[int],
    max_tokens: int,
    effective_batch_size: int,
    dataset_filter_ids: Sequence[int] | None = None,
    lr_scaling_method: str | None = "linear",
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    dataloader_batch_size: int = 1,
    dataloader_rank: int = 0,
    dataloader_num_replicas: int = 1,
    dataloader_num_workers: int = 0,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_pin_memory: bool = False,
    lr_scheduler_or_optimizer: Any = None,
    required_microbatches_of_same_size: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[DataLoader[Any], VariableBatchSizeLR | None, dict[str, Any]]:
    """The loader of one rank, the scheduler of scaled rates (None without one to
    scale), and the loader's arguments.
    """
    parts, sizes, longest = batch_by_seqlens(
        dataset_seqlens,
        max_tokens,
        dataset_filter_ids,
        min_batch_size,
        max_batch_size,
        sequence_picking_order,
        effective_batch_size,
        required_microbatches_of_same_size,
        verbose,
        seed,
    )
    loader, given = dataloader_for_variable_batch_size(
        dataset,
        parts,
        longest,
        dataloader_rank,
        dataloader_batch_size,
        dataloader_num_replicas,
        dataloader_collate_fn,
        dataloader_num_workers,
        dataloader_pin_memory,
        required_microbatches_of_same_seqlen,
        sample_padding_fn,
    )
    if lr_scheduler_or_optimizer is None:
        return loader, None, given
    scheduler = lr_scheduler_for_variable_batch_size(
        effective_batch_size, sizes, loader, lr_scheduler_or_optimizer, lr_scaling_method, verbose
    )
    return loader, scheduler, given


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Dataset[Any],
    engine: Engine,
    dataset_seqlens: Sequence[int] | None = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    batch_seqlens_fn: Callable[[Any], Any] | None = None,
) -> tuple[DataLoader[Any], VariableBatchSizeLR | None, dict[str, Any]]:
    """The same for an engine, with its block `dynamic_batching`; set
    `engine.lr_scheduler` to the scheduler.

    *Collective* without `dataset_seqlens` where the analyzer's files are missing: every
    rank.

    Args:
        dataset_seqlens: tokens of each sample; None reads the metric `seqlen` in
            `metrics_path`, or measures it with `batch_seqlens_fn`.
    """
    efficiency = efficiency_of(engine.cfg)
    block = efficiency.data_sampling.dynamic_batching
    if not (efficiency.samples and block.enabled) or block.max_tokens is None:
        raise ConfigError(
            "dynamic_batching: must be enabled, and the blocks data_sampling and data_efficiency "
            "around it, got one that is not; enable them"
        )
    if dataset_seqlens is None:
        path = Path(block.metrics_path) / "seqlen" / "seqlen_sample_to_metric"
        if not path.with_suffix(".idx").exists():
            if batch_seqlens_fn is None:
                raise ConfigError(
                    f"batch_seqlens_fn: is required where {path}.idx does not exist; pass it, or "
                    f"the lengths"
                )
            DistributedDataAnalyzer(
                dataset,
                engine.world_size,
                worker_id=engine.global_rank,
                batch_size=1024,
                metric_names=["seqlen"],
                metric_functions=[batch_seqlens_fn],
                metric_types=["single_value_per_sample"],
                save_path=block.metrics_path,
                collate_fn=dataloader_collate_fn,
            ).run_map_reduce()
        dataset_seqlens = np.asarray(read_rows(path).values, np.int64).tolist()
    return get_dataloader_and_lr_scheduler_for_variable_batch_size(
        dataset,
        dataset_seqlens,
        block.max_tokens,
        engine.train_batch_size(),
        dataset_filter_ids,
        block.lr_scaling_method,
        block.min_batch_size,
        block.max_batch_size,
        block.sequence_picking_order,
        dataloader_batch_size=engine.train_micro_batch_size_per_gpu(),
        dataloader_rank=engine.global_rank,
        dataloader_num_replicas=engine.world_size,
        dataloader_num_workers=efficiency.data_sampling.num_workers,
        dataloader_collate_fn=dataloader_collate_fn,
        dataloader_pin_memory=efficiency.data_sampling.pin_memory,
        lr_scheduler_or_optimizer=engine.lr_scheduler or engine.optimizer,
        sample_padding_fn=sample_padding_fn,
        verbose=block.verbose,
        seed=efficiency.seed,
    )
