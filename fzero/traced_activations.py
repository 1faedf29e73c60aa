"""How much memory do the activations of one micro-step need, and how much is computed? Counted on tensors without memory.

The model runs forward and backward in a `FakeTensorMode`, bound to parameters of the dtypes that the configuration gives them,
with or without checkpointing. Every storage that an operator makes counts from then on until nobody holds it: activations, what
a kernel returns besides, and the gradient of a parameter until it would be written into its flat buffer. Parameters do not
count, and nor does what a kernel needs inside. Operators are those of the CPU, where attention without a mask is fused as it is
on CUDA.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fzero.batches import without_memory
from fzero.binding import bound, replaced_forwards
from fzero.checkpointing import choose_modules
from fzero.config import Config
from fzero.flop_counts import flops_of_call
from fzero.measure import LossFn, loss_of
from fzero.plan import Plan, blocks_of, plan
from sharding.views import torch_dtype

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Traced:
    """What one micro-step on one rank needs: the most bytes alive, and floating point operations."""

    nbytes: int
    flops: int


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operators make inside, and their floating point operations.

    `FlopCounterMode` would keep what checkpointed modules make when they run again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = self.flops = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """These were there before."""
        for x in tensors:
            self._seen[x.untyped_storage()] = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += flops_of_call(func, args, kwargs or {}, out)
        for x in optree.tree_leaves(out, none_is_leaf=True):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage not in self._seen:
                    self._seen[storage] = nbytes = storage.nbytes()
                    weakref.finalize(storage, self._drop, nbytes)
                    self.now += nbytes
                    self.most = max(self.most, self.now)
        return out

    def _drop(self, nbytes: int) -> None:
        self.now -= nbytes


def trace_activations(
    model: nn.Module, cfg: Config | Any, batch: Any, *, loss_fn: LossFn | None = None, checkpoint: bool | None = None
) -> Traced:
    """Activations and FLOPs of one forward and backward.

    Args:
        model: any module that runs on fake tensors: no branches on data.
        cfg: for the dtypes, and for `activation_checkpointing.every`.
        batch: one rank's samples of a micro-step; tensors may be on `meta`.
        loss_fn: see `make_train_step`.
        checkpoint: whether every unit is checkpointed; None is as the configuration says.

    Raises:
        ValueError: the model cannot run on this batch.
    """
    from torch._subclasses import FakeTensorMode

    cfg = Config.load(cfg)
    # Dtypes are the same in every stage, and a number of samples does not matter here.
    alone = cfg.model_copy(
        update={
            "zero_optimization": cfg.zero_optimization.model_copy(update={"stage": 0, "offload_optimizer": None}),
            **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")),
        }
    )
    every = cfg.activation_checkpointing.every if checkpoint is None else 1 if checkpoint else None
    alive = Alive()
    autocast = torch_dtype(cfg.precision.autocast) if cfg.precision.autocast else None
    with FakeTensorMode(allow_non_fake_inputs=True):
        layout = plan(model, alone)
        params, buffers = dict(_params(model, layout)), _buffers(model, layout)
        fake_batch = _cast(without_memory(batch, CPU), cfg.casts_batch_to)
        tensors = (x for x in optree.tree_leaves(fake_batch) if isinstance(x, Tensor))
        alive.ignore(iter([*params.values(), *buffers.values(), *tensors]))
        with bound(model, layout.aliases, params.__getitem__, buffers), _checkpointed(model, every), alive:
            loss, _ = loss_of(model, loss_fn, fake_batch, reduces_by_sum=False, autocast=autocast, device="cpu")
            loss.backward()  # type: ignore[no-untyped-call]
    return Traced(alive.most, alive.flops)


def _params(model: nn.Module, layout: Plan) -> Iterator[tuple[str, Tensor]]:
    """Fake parameters that let go of their gradients, by name."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for buffer in layout.flat_buffers:
        for name in buffer.layout.names:
            param = torch.empty(own[name].shape, dtype=torch_dtype(buffer.dtypes.param))
            if buffer.trainable:
                param.requires_grad_()
                param.register_post_accumulate_grad_hook(_without_grad)  # type: ignore[no-untyped-call]
            yield name, param


def _without_grad(param: Tensor) -> None:
    param.grad = None


def _buffers(model: nn.Module, layout: Plan) -> dict[str, Tensor]:
    own = dict(model.named_buffers(remove_duplicate=False))
    return {name: torch.empty(own[name].shape, dtype=torch_dtype(spec.dtype)) for name, spec in layout.buffers.items()}


def _cast(batch: Any, dtype: str | None) -> Any:
    if dtype is None:
        return batch
    return optree.tree_map(
        lambda x: x.to(torch_dtype(dtype)) if isinstance(x, Tensor) and x.is_floating_point() else x, batch
    )


@contextmanager
def _checkpointed(model: nn.Module, every: int | None) -> Iterator[None]:
    names = choose_modules(model, every, blocks=blocks_of(model), field="activation_checkpointing.every")

    def wrapped(name: str, module: nn.Module) -> Callable[..., Any]:
        return partial(checkpoint, module.forward, use_reentrant=False)

    with replaced_forwards(model, names, wrapped) if names else nullcontext():
        yield


class Activations:
    """Those of one model and batch, with and without checkpointing, each traced once."""

    def __init__(self, model: nn.Module, cfg: Config | Any, batch: Any) -> None:
        self._trace = cache(lambda checkpoint: trace_activations(model, cfg, batch, checkpoint=checkpoint))

    def of(self, *, checkpoints: bool) -> Traced:
        """With every unit checkpointed, or none."""
        return self._trace(checkpoints)
