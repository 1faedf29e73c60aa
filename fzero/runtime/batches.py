"""A rank's batch: `Batches` checks it, cuts it into micro-batches and casts them;
`loss_of_batch` computes the loss of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor, nn

from fzero.model.transforms import LossFn as LossFn
from fzero.optim.transforms import is_traced

if TYPE_CHECKING:
    from fzero.runtime.step_runtime import StepRuntime


@dataclass(frozen=True, slots=True)
class Batches:
    """The batch that a step expects on each rank.

    Args:
        world_size: number of ranks, for messages.
        num_micro_steps: micro-batches in a batch.
        micro_batch: samples of a micro-batch on each rank; None where nothing is
            configured.
        dtype: floating tensors are cast to it.
        change: makes the micro-batch that the loss is computed from; None leaves it as
            it is.
    """

    world_size: int
    num_micro_steps: int
    micro_batch: int | None
    dtype: torch.dtype | None
    change: Callable[[Any], Any] | None = None

    def changed(self, batch: Any) -> Any:
        """The micro-batch, or batch of an evaluation, that the loss is computed from."""
        return batch if self.change is None else self.change(batch)

    def split(self, batch: Any) -> Iterator[Any]:
        """The micro-batches of a step: the next ones of an iterator, or equal parts of
        the leading dimension.
        """
        return map(self.changed, self._split(batch))

    def _split(self, batch: Any) -> Iterator[Any]:
        if isinstance(batch, Iterator):
            for index in range(self.num_micro_steps):
                try:
                    micro_batch = next(batch)
                except StopIteration:
                    raise ValueError(
                        f"batch: the iterator must give {self.num_micro_steps} micro-batches "
                        f"(gradient_accumulation_steps), ended after {index}; drop the last "
                        f"incomplete step"
                    ) from None
                self._check(micro_batch, self.micro_batch)
                yield micro_batch
            return
        if self.micro_batch is not None:
            self._check(batch, self.micro_batch * self.num_micro_steps)
        if self.num_micro_steps == 1:
            yield batch
            return
        leaves, treespec = optree.tree_flatten(plain(batch), none_is_leaf=True)
        for parts in zip(*map(self._parts, leaves), strict=True):
            yield treespec.unflatten(parts)

    def cast(self, batch: Any) -> Any:
        """The batch in the dtype that the configuration asks for."""
        if self.dtype is None:
            return batch
        return map_tensors(lambda x: x.to(self.dtype) if x.is_floating_point() else x, batch)

    def _parts(self, x: Any) -> Sequence[Any]:
        if (
            x is None
            or isinstance(x, bool | int | float | str)
            or (isinstance(x, Tensor) and x.ndim == 0)
        ):
            return [x] * self.num_micro_steps
        if not isinstance(x, Tensor):
            raise ValueError(
                f"batch: a {type(x).__name__} cannot be divided into the {self.num_micro_steps} "
                f"micro-batches (gradient_accumulation_steps); pass tensors in tuples, lists and "
                f"dicts, or an iterator of micro-batches"
            )
        if x.shape[0] % self.num_micro_steps:
            raise ValueError(
                f"batch: the leading dimension of every tensor must be a multiple of the "
                f"{self.num_micro_steps} micro-batches (gradient_accumulation_steps), got shape "
                f"{tuple(x.shape)}; pass an iterator of micro-batches"
            )
        return x.chunk(self.num_micro_steps)

    def _check(self, batch: Any, expected: int | None) -> None:
        """Raises ValueError where all tensors have the same leading dimension, and it
        is not the configured one.
        """
        sizes = {
            x.shape[0] for x in optree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim > 0
        }
        if expected is not None and len(sizes) == 1 and sizes != {expected}:
            raise ValueError(
                f"batch: must hold {expected} samples on each rank (from train_batch_size, "
                f"train_micro_batch_size_per_gpu, gradient_accumulation_steps and "
                f"{self.world_size} ranks), got {sizes.pop()}; change the loader or the "
                f"configuration"
            )


def map_tensors(function: Any, batch: Any) -> Any:
    """The batch with `function(x)` for each tensor x; other leaves are unchanged."""
    return optree.tree_map(
        lambda x: function(x) if isinstance(x, Tensor) else x, plain(batch), none_is_leaf=True
    )


def without_memory(batch: Any, device: torch.device) -> Any:
    """The batch with empty tensors of the same shapes on `device`, for a
    `FakeTensorMode`.
    """
    return map_tensors(
        lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device), batch
    )


def plain(batch: Any) -> Any:
    """A mapping as a dict, because optree does not look into other mappings."""
    return dict(batch) if isinstance(batch, Mapping) else batch


# --- the loss of a micro-batch --------------------------------------------------------------------


def loss_of(
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Any,
    *,
    reduces_by_sum: bool,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
) -> tuple[Tensor, Tensor | None]:
    """The loss of a batch, and its weight where `loss_fn` gives a sum and a weight.

    Args:
        model: called with the batch, or passed to `loss_fn`.
        loss_fn: see `make_train_step`; None takes the model's output.
        batch: the arguments of the model: a mapping by name, a tuple or list by
            position, else one argument.
        reduces_by_sum: whether gradients are summed over ranks, not averaged; then the
            loss may have no weight.
        autocast: the dtype of `torch.autocast` on `device`, None for none.

    Raises:
        ValueError: the loss is no scalar, or depends on no trainable parameter; or the
            weight is not one number of at least 0.
    """
    if autocast is not None:
        with torch.autocast(device, dtype=autocast):
            return loss_of(model, loss_fn, batch, reduces_by_sum=reduces_by_sum)
    weight = None
    if loss_fn is not None:
        loss: Any = loss_fn(model, batch)
        source = "loss_fn"
        if isinstance(loss, tuple) and len(loss) == 2:
            if reduces_by_sum:
                raise ValueError(
                    f"gradient_allreduce_op: must be 'mean' when {source} gives a sum and its "
                    f"weight, got 'sum'; the gradient of a weighted mean is divided by all weights"
                )
            loss, given = loss
            make: Any = (
                partial(torch.full, ()) if isinstance(given, int | float) else torch.as_tensor
            )
            weight = make(given, device=loss.device if isinstance(loss, Tensor) else None).detach()
            check_weight(weight, source)
    else:
        source = f"{type(model).__name__}'s output"
        if isinstance(batch, Mapping):
            output = model(**batch)
        elif isinstance(batch, tuple | list):
            output = model(*batch)
        else:
            output = model(batch)
        loss = output
        if not isinstance(output, Tensor):
            loss = getattr(output, "loss", None)
            if loss is None and isinstance(output, Mapping):
                loss = output.get("loss")
            if loss is None and isinstance(output, tuple | list) and output:
                loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else repr(type(loss).__name__)
        )
        raise ValueError(
            f"loss: {source} must be a scalar tensor, or have a scalar as .loss or first item, got "
            f"{got}; pass loss_fn=lambda model, batch: ... that returns a scalar"
        )
    # Under torch.vmap, requires_grad is not reliable.
    if torch.is_grad_enabled() and not (
        loss.requires_grad or torch._C._are_functorch_transforms_active()
    ):
        raise ValueError(
            f"loss: {source} must depend on a trainable parameter and does not; unfreeze one, or "
            f"drop no_grad"
        )
    return loss.reshape(()), None if weight is None else weight.reshape(())


def check_weight(weight: Tensor, source: str) -> None:
    """Raises ValueError unless the weight is one number of at least 0. The value is
    read on the CPU only, outside a graph and a dry run.
    """
    is_known = weight.device.type == "cpu" and type(weight) is Tensor and not is_traced()
    if weight.numel() != 1 or (is_known and not weight >= 0):
        raise ValueError(
            f"loss: {source} must give a weight that is one number, not negative, beside the sum, "
            f"got {weight.tolist() if is_known else tuple(weight.shape)}; give the number of "
            f"summed items, such as tokens"
        )


def loss_of_batch(run: StepRuntime, batch: Any) -> tuple[Tensor, Tensor | None]:
    """The loss of a batch, and its weight if `loss_fn` returns a sum and a weight."""
    try:
        return loss_of(
            run.spec.model,
            run.loss_fn,
            run.batches.cast(batch),
            reduces_by_sum=not run.rules.loss.is_mean,
            autocast=run.autocast,
            device=run.device.type,
        )
    except RuntimeError as error:
        param_dtype = run.spec.cfg.precision.param_dtype
        if param_dtype is not None and ("dtype" in str(error) or "scalar type" in str(error)):
            error.add_note(
                f"fzero: the parameters are {param_dtype} (step.plan shows every dtype), the batch "
                f"is cast to that with auto_cast in fp16 or bf16, and module buffers with "
                f"data_types.buffer_dtype"
            )
        raise
