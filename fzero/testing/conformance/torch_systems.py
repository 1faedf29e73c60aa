"""The adapters of PyTorch's own: DDP, DDP with ZeroRedundancyOptimizer, FSDP2, and
torchtitan's SimpleFSDP.

Each follows its documentation and PyTorch's tutorials; the comments name the page.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from fzero.testing.conformance.training import (
    Batches,
    GeneratorState,
    Norm,
    Setup,
    System,
    Trainer,
    Weights,
    agreed_mean,
    dead_rank_named,
)


class Parts(NamedTuple):
    """What differs between PyTorch's systems."""

    model: nn.Module
    """Its parameters are those of the optimizer."""
    wrapped: nn.Module
    """What the loss calls."""
    optimizer: Any
    accumulating: Callable[[bool], AbstractContextManager[None]]
    """Around the forward and backward of a micro-batch; its argument says whether it is
    the last one.
    """
    autocasts: bool
    """Whether 16 bits are those of `torch.autocast`."""
    write: Callable[[Path, dict[str, Any]], None]
    """Writes model and optimizer, and other things."""
    read: Callable[[Path], dict[str, Any]]
    adds_gradients: bool = False
    """Whether gradients are sums over ranks, not means."""


class TorchTrainer:
    """The loop of PyTorch's tutorials."""

    def __init__(self, setup: Setup, parts: Parts, rank: int) -> None:
        self._setup, self._parts, self._rank = setup, parts, rank
        self._num_updates, self._generator = 0, GeneratorState(rank)
        rates = setup.rates or (lambda n: 1.0)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(parts.optimizer, rates)
        # docs.pytorch.org/docs/stable/notes/amp_examples.html
        self._scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=2.0**setup.scale_power,
            growth_interval=setup.scale_window,
            enabled=setup.precision == "fp16",
        )
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(setup.precision)
        self._dtype = dtype if parts.autocasts else None
        self._grad_norm = float("nan")

    def step(self, batches: Batches, *, update: bool = True) -> float:
        with dead_rank_named():
            return self._step(batches, update=update)

    def _step(self, batches: Batches, *, update: bool) -> float:
        own, setup = batches[self._rank], self._setup
        if not update:
            self._parts.wrapped.eval()
            with torch.no_grad():
                losses = [setup.loss(self._parts.wrapped, batch).item() for batch in own]
            self._parts.wrapped.train()
            return agreed_mean(losses)
        # where gradients are means over ranks: "the gradient will be M times smaller … if the loss
        # is summed", DDP's page
        share = setup.share(batches) * (1 if self._parts.adds_gradients else len(batches))
        for index, batch in enumerate(own):
            autocast = nullcontext() if self._dtype is None else torch.autocast("cpu", self._dtype)
            with self._parts.accumulating(index == len(own) - 1), autocast:
                loss = setup.loss(self._parts.wrapped, batch) * share
                self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.unscale_(self._parts.optimizer)
        params = [p for p in self._parts.model.parameters() if p.grad is not None]
        largest = setup.clip or float("inf")
        # a scaler skips what is not finite
        raises = bool(setup.clip) and not self._scaler.is_enabled()
        norm: Any = nn.utils.clip_grad_norm_(params, largest, error_if_nonfinite=raises)
        # of DTensors: FSDP2's tutorial, "Gradient clipping"
        self._grad_norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
        before = self._scaler.get_scale()
        self._scaler.step(self._parts.optimizer)
        self._scaler.update()
        if self._scaler.get_scale() >= before:  # else the step was skipped
            self._scheduler.step()
            self._num_updates += 1
        self._parts.optimizer.zero_grad()
        return float(loss.item())

    def weights(self) -> Weights:
        named = {
            **dict(self._parts.model.named_parameters()),
            **dict(self._parts.model.named_buffers()),
        }
        return {
            name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
            for name, x in named.items()
        }

    def norm(self) -> Norm:
        return Norm(self._grad_norm, self._scaler.get_scale() or 1.0)

    def save(self, folder: Path) -> None:
        rest = {
            "scaler": self._scaler.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "updates": self._num_updates,
        }
        self._generator.save(folder)
        self._parts.write(folder, rest)
        dist.barrier()

    def load(self, folder: Path) -> int:
        rest = self._parts.read(folder)
        self._scaler.load_state_dict(rest["scaler"])
        self._scheduler.load_state_dict(rest["scheduler"])
        self._generator.load(folder)
        self._num_updates = rest["updates"]
        return self._num_updates


# --- DDP ------------------------------------------------------------------------------------------


def ddp(setup: Setup, rank: int, world_size: int) -> Trainer:
    """DistributedDataParallel."""
    model, wrapped = _wrapped(setup)
    optimizer = setup.make_optimizer(dict(model.named_parameters()))
    return _replicated(setup, model, wrapped, optimizer, rank)


def zero_optimizer(setup: Setup, rank: int, world_size: int) -> Trainer:
    """DDP with ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, wrapped = _wrapped(setup)
    kind = getattr(torch.optim, setup.optimizer)
    groups = setup.grouped(dict(model.named_parameters()))
    optimizer = ZeroRedundancyOptimizer(groups, kind, **dict(setup.options))
    return _replicated(setup, model, wrapped, optimizer, rank)


def _wrapped(setup: Setup) -> tuple[nn.Module, nn.Module]:
    model = setup.model()
    # "find_unused_parameters", DDP's page
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=setup.some_unused)
    return model, wrapped


def _replicated(
    setup: Setup, model: nn.Module, wrapped: Any, optimizer: Any, rank: int
) -> TorchTrainer:
    def accumulating(is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else wrapped.no_sync()  # type: ignore[no-any-return]

    def write(folder: Path, rest: dict[str, Any]) -> None:
        """Rank 0 writes all: "Save and Load Checkpoints", DDP's tutorial."""
        if hasattr(optimizer, "consolidate_state_dict"):  # ZeroRedundancyOptimizer's page
            optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**whole, **rest}, folder / "all.pt")

    def read(folder: Path) -> dict[str, Any]:
        whole: dict[str, Any] = torch.load(folder / "all.pt", weights_only=False)
        model.load_state_dict(whole["model"])
        optimizer.load_state_dict(whole["optimizer"])
        return whole

    parts = Parts(model, wrapped, optimizer, accumulating, True, write, read)
    return TorchTrainer(setup, parts, rank)


# --- FSDP2 ----------------------------------------------------------------------------------------


def fsdp2(setup: Setup, rank: int, world_size: int) -> Trainer:
    """`fully_shard` of each block and of the root, from the blocks up."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = setup.model()
    whole = model.state_dict() if setup.differs_by_rank else None
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(setup.precision)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    how: Any = {"mesh": init_device_mesh("cpu", (world_size,)), "mp_policy": policy}
    for module in (*getattr(model, "blocks", ()), model):
        fully_shard(module, reshard_after_forward=setup.stage == 3, **how)
    if whole is not None:
        _broadcast(model, whole)
    optimizer = setup.make_optimizer(dict(model.named_parameters()))

    @contextmanager
    def accumulating(is_last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(is_last)
        yield

    write, read = _checkpoints(model, optimizer, rank)
    parts = Parts(model, model, optimizer, accumulating, False, write, read)
    return TorchTrainer(setup, parts, rank)


def _checkpoints(model: nn.Module, optimizer: Any, rank: int) -> tuple[Any, Any]:
    """`Parts.write` and `Parts.read` of sharded parameters."""

    def write(folder: Path, rest: dict[str, Any]) -> None:
        """ "Getting Started with Distributed Checkpoint", PyTorch's tutorials."""
        weights, moments = get_state_dict(model, optimizer)
        dcp.save(  # type: ignore[attr-defined]
            {"model": weights, "optimizer": moments}, checkpoint_id=folder
        )
        if rank == 0:
            torch.save(rest, folder / "rest.pt")

    def read(folder: Path) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        rest = torch.load(folder / "rest.pt", weights_only=False)
        dcp.load(  # type: ignore[attr-defined]
            {"model": weights, "optimizer": moments},
            checkpoint_id=folder,
            planner=DefaultLoadPlanner(allow_partial_load=True),
        )
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        return rest  # type: ignore[no-any-return]

    return write, read


def _broadcast(model: nn.Module, whole: dict[str, Any]) -> None:
    """Rank 0's weights for all: "Loading a checkpoint", FSDP2's tutorial."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)


# --- SimpleFSDP -----------------------------------------------------------------------------------


def simple_fsdp(setup: Setup, rank: int, world_size: int) -> Trainer:
    """`data_parallel` of the model, as torchtitan's trainer calls it, in eager mode."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.experiments.graph_trainer.simple_fsdp import (  # type: ignore[import-not-found]
        MixedPrecisionPolicy,
        data_parallel,
    )

    model: Any = setup.model()
    whole = model.state_dict() if setup.differs_by_rank else None
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(setup.precision)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (world_size,))
    mode = "replicate" if setup.stage == 0 else "fully_shard"
    model = data_parallel(model, mesh, mode=mode, mp_policy=policy)
    if whole is not None:
        _broadcast(model, whole)
    optimizer = setup.make_optimizer(dict(model.named_parameters()))

    def accumulating(is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    write, read = _checkpoints(model, optimizer, rank)
    parts = Parts(model, model, optimizer, accumulating, False, write, read, adds_gradients=True)
    return TorchTrainer(setup, parts, rank)


def version_of_torchtitan() -> str:
    return importlib.metadata.version("torchtitan")


def version() -> str:
    return torch.__version__


TORCH_SYSTEMS = (
    System("ddp", ddp, (0,), version, aside="find_unused_parameters where a law says so"),
    System("zero-optimizer", zero_optimizer, (1,), version),
    System("fsdp2", fsdp2, (2, 3), version, aside="stage 2 is reshard_after_forward=False"),
    System(
        "simple-fsdp",
        simple_fsdp,
        (0, 3),
        version_of_torchtitan,
        preload=("torchtitan",),
        aside="that of torchtitan; stage 0 is mode='replicate'",
    ),
)
