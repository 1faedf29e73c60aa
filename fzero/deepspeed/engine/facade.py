"""`Tools`: what an engine offers beside training, under DeepSpeed's names: loaders,
timers, monitors, groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from fzero.common.arguments import shown
from fzero.comms.process_group import is_joined, world_group
from fzero.deepspeed.engine.dataloader import ResumableLoader
from fzero.deepspeed.engine.monitor import MonitorMaster
from fzero.deepspeed.engine.own_files import TorchCheckpointEngine
from fzero.deepspeed.engine.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer
from fzero.deepspeed.topology import PipelineParallelGrid, grid_of
from fzero.pipeline.module import PipelineModule

if TYPE_CHECKING:
    from fzero.deepspeed.engine.engine import Engine


class Tools:
    """The part of an engine that serves the script around the training.

    Attributes:
        monitor: writes a script's own events where the configuration enables monitors,
            on rank 0.
        timers: a script's own timers, which measure where `wall_clock_breakdown` is
            set.
        tput_timer: samples per second.
    """

    monitor: MonitorMaster
    timers: SynchronizedWallClockTimer
    tput_timer: ThroughputTimer
    client_optimizer: Any = None
    """The optimizer that the script gave to `initialize`, or None."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.monitor = MonitorMaster(engine.engine_log.writers)
        self.timers = (
            SynchronizedWallClockTimer(engine.log_line)
            if engine.keys.wall_clock_breakdown
            else NoopTimer()
        )
        self.tput_timer = ThroughputTimer(batch_size=engine.accumulation.samples())

    @property
    def mpu(self) -> PipelineParallelGrid | None:
        """The places of all ranks of a pipeline; None where all are data-parallel."""
        module = self.engine.module
        if not isinstance(module, PipelineModule):
            return None
        return grid_of(
            module, rank=self.engine.train_step.rank if module.stage_id is None else None
        )

    def get_wall_clock_timers(self) -> Any:
        """The timers by name."""
        return self.timers.get_timers()

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Iterable[Any]:
        """A loader of this rank's batches: shuffled where `route` is "train", in order
        for "predict" and "eval".

        Args:
            dataset: with a length and indices, or one that iterates and gives each rank
                its own samples.
            batch_size: samples per rank; None is `train_micro_batch_size_per_gpu()`.
            data_sampler: the sampler of indices; replaces the one that divides the
                dataset among the ranks.
            num_local_io_workers: worker processes; None is none.
        """
        size = self.engine.train_micro_batch_size_per_gpu() if batch_size is None else batch_size
        rank, world_size, drops = (
            self.engine.train_step.data_rank,
            self.engine.dp_world_size,
            self.engine.dataloader_drop_last(),
        )
        pins = pin_memory and self.engine.device.type == "cuda"
        how: dict[str, Any] = {
            "collate_fn": collate_fn,
            "num_workers": num_local_io_workers or 0,
            "pin_memory": pins,
        }
        if data_sampler is None and route == "train" and self.is_map_style_dataset(dataset):
            return ResumableLoader(
                dataset, batch_size=size, rank=rank, world_size=world_size, drop_last=drops, **how
            )
        if data_sampler is None and self.is_map_style_dataset(dataset):
            data_sampler = DistributedSampler(dataset, world_size, rank, shuffle=False)
        loader: Any = DataLoader(
            dataset, batch_size=size, sampler=data_sampler, drop_last=drops, **how
        )
        loader.data_sampler = loader.sampler  # DeepSpeed's name
        return loader  # type: ignore[no-any-return]

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        return isinstance(obj, IterableDataset)

    def empty_partition_cache(self) -> None:
        """Does nothing: no gathered parameter outlives a forward or a backward."""

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Does nothing: `backward` has reduced the gradients; `step` raises where it
        has not.
        """

    def get_compile_time(self) -> float:
        """0: what `torch.compile` takes is part of the first forwards."""
        return 0.0

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called, or the configuration did it."""
        return self.engine.train_step.spec.compile is not None

    @property
    def optimizer(self) -> Any:
        """Param groups to read and write, in stage 0 in fp32 the script's own; None for
        an engine that does not train.
        """
        return None if self.engine.live_optimizer is None else self.engine.live_optimizer.shown

    @property
    def basic_optimizer(self) -> Any:
        """The optimizer inside `engine.optimizer`; that itself in stage 0 in fp32."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    @property
    def checkpoint_engine(self) -> TorchCheckpointEngine:
        """Writes and reads files of the script's own."""
        return TorchCheckpointEngine()

    @checkpoint_engine.setter
    def checkpoint_engine(self, value: Any) -> None:
        raise AttributeError(
            f"engine.checkpoint_engine: must not be replaced, got {shown(value)}: save_checkpoint "
            f"writes fzero's own files; use fzero.start_save to write them in the background"
        )

    @property
    def data_parallel_group(self) -> Any:
        """The process group of all ranks; None without one."""
        return world_group()

    seq_data_parallel_group = data_parallel_group

    @property
    def dist_backend(self) -> str:
        """ "nccl" or "gloo"."""
        return "gloo" if is_joined(without="nccl") or self.engine.device.type != "cuda" else "nccl"
