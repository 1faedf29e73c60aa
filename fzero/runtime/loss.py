"""The loss of a batch, the mean over ranks, the gradient norm, and the factor that the gradients still need.

Pure functions of tensors, shared by the eager and the compiled step, so that both do the same arithmetic. Only the `check_*`
functions make the host wait for the device, or raise for a value.

Shape letters: W ranks, F shards, M rows (of ranks and micro-steps), N elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fzero.optim.transforms import is_traced

LossFn = Callable[[nn.Module, Any], Any]


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
        batch: the arguments of the model: a mapping by name, a tuple or list by position, else one argument.
        reduces_by_sum: whether gradients are summed over ranks, not averaged; then the loss may have no weight.
        autocast: the dtype of `torch.autocast` on `device`, None for none.

    Raises:
        ValueError: the loss is no scalar, or depends on no trainable parameter; or the weight is not one number of at least 0.
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
                    f"gradient_allreduce_op: must be 'mean' when {source} gives a sum and its weight, got 'sum'; the "
                    f"gradient of a weighted mean is divided by all weights"
                )
            loss, given = loss
            make: Any = partial(torch.full, ()) if isinstance(given, int | float) else torch.as_tensor
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
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss).__name__)
        raise ValueError(
            f"loss: {source} must be a scalar tensor, or have a scalar as .loss or first item, got {got}; "
            f"pass loss_fn=lambda model, batch: ... that returns a scalar"
        )
    # Under torch.vmap, requires_grad is not reliable.
    if torch.is_grad_enabled() and not (loss.requires_grad or torch._C._are_functorch_transforms_active()):
        raise ValueError(
            f"loss: {source} must depend on a trainable parameter and does not; unfreeze one, or drop no_grad"
        )
    return loss.reshape(()), None if weight is None else weight.reshape(())


def check_weight(weight: Tensor, source: str) -> None:
    """Raises ValueError unless the weight is one number of at least 0. The value is read on the CPU only, outside a graph."""
    is_known = weight.device.type == "cpu" and not is_traced()
    if weight.numel() != 1 or (is_known and not weight >= 0):
        raise ValueError(
            f"loss: {source} must give a weight that is one number, not negative, beside the sum, got "
            f"{weight.tolist() if is_known else tuple(weight.shape)}; give the number of summed items, such as tokens"
        )


@dataclass(frozen=True, slots=True)
class LossRules:
    """The rules by which losses and gradients of all ranks and micro-steps become a mean.

    Args:
        world_size: ranks W.
        predivide: the divisor of gradients before they are summed over the ranks.
        is_mean: whether the gradient is the mean over the ranks, not the sum.
        clip: the largest gradient norm; 0 does not clip.
        is_inf: whether the norm is the largest absolute value, not the 2-norm.
        scales_loss: whether the loss is multiplied by a scale.
    """

    world_size: int
    predivide: float
    is_mean: bool
    clip: float
    is_inf: bool
    scales_loss: bool

    def multiple(self, weight: Tensor | None, scale: Tensor) -> Tensor:
        """The ratio of the collected gradient to the true one (0-d float64)."""
        multiple = torch.full((), self._over(weight) / self.predivide, dtype=torch.float64, device=scale.device)
        multiple = multiple if weight is None else multiple * weight
        return multiple * scale if self.scales_loss else multiple

    def factor(self, norm: Tensor, multiple: Tensor, overflow: Tensor, weight: Tensor | None) -> Tensor | None:
        """The factor that the collected gradients still need; None is 1."""
        if not self.clip and weight is None and not self.scales_loss and self._over(weight) == self.predivide:
            return None
        factor = (self.clip / (norm + 1e-6)).clamp(max=1.0) / multiple if self.clip else 1 / multiple
        return torch.where(overflow, torch.ones_like(factor), factor)  # `first_overflow` reads the unscaled gradients

    def _over(self, weight: Tensor | None) -> int:
        return self.world_size if self.is_mean and weight is None else 1

    def of_shard(self, grad_S: Tensor) -> Tensor:
        """The norm of one flat shard (0-d)."""
        if self.is_inf:
            return grad_S.abs().max()
        wide = torch.promote_types(grad_S.dtype, torch.float32)
        norm: Tensor = torch.linalg.vector_norm(grad_S, dtype=None if wide == grad_S.dtype else wide)
        return norm

    def joined(self, measured: Iterable[Tensor], device: torch.device) -> Tensor:
        """One shard's part of the norm (0-d float64; of a 2-norm the square), from the norms of its flat gradients."""
        numbers = list(measured)
        if not numbers:
            return torch.zeros((), dtype=torch.float64, device=device)
        norms = torch.stack(numbers).double()
        return norms.max() if self.is_inf else norms.square().sum()

    def norm(self, parts_F: Tensor) -> Tensor:
        """The global norm of the collected gradients, from the parts of all shards."""
        return parts_F.max() if self.is_inf else (mean_in_rank_order(parts_F) * len(parts_F)).sqrt()


def loss_row(loss: Tensor, weight: Tensor | None, *numbers: float) -> Tensor:
    """The row that a rank sends the others for one loss (float64): the loss, its weight or -1, and the numbers."""
    if loss.device.type == "cpu":
        return torch.tensor([loss.item(), -1.0 if weight is None else weight.item(), *numbers], dtype=torch.float64)
    # A fill does not wait for the device, as a copy of a number does.
    fill = partial(torch.full, (), dtype=torch.float64, device=loss.device)
    rest = [fill(-1.0) if weight is None else weight.to(loss.device), *map(fill, numbers)]
    return torch.stack([x.double() for x in (loss.detach(), *rest)])


def mean_of(rows_M2: Tensor, *, is_sum: bool) -> tuple[Tensor, Tensor | None]:
    """The mean of losses with their weights, and the sum of the weights if the losses are sums."""
    mean, weight = mean_in_rank_order(rows_M2).unbind()
    return (mean / weight, weight * rows_M2.shape[0]) if is_sum else (mean, None)


def is_agreed(rows_M2: Tensor, *, is_sum: bool) -> Tensor:
    """Whether all losses are sums with weights, or all are means, as `is_sum` says (0-d bool)."""
    return ((rows_M2[:, 1] >= 0) == is_sum).all()


def check_rows(rows_M2: Tensor, *, is_sum: bool) -> None:
    """Raises ValueError when some losses are sums and others means, or all weights are 0."""
    agreed = is_agreed(rows_M2, is_sum=is_sum)
    message = "loss_fn: must give a mean always or a (sum, weight) always, got both; give the same on all ranks"
    if rows_M2.device.type != "cpu":
        torch._assert_async(agreed, message)
    elif not agreed:
        raise ValueError(message)
    elif is_sum and (rows_M2[:, 1] == 0).all():
        raise ValueError(
            "loss_fn: its weights must not all be 0 in a step, and were on every rank; leave out such a batch"
        )


def range_places(sizes: Iterable[tuple[int, bool]]) -> list[int]:
    """The index of the minimum of each range (min, max) in the concatenation of these buffers.

    Args:
        sizes: the elements of each buffer, and whether it is a range.

    >>> range_places([(3, False), (2, True), (2, True)])
    [3, 5]
    """
    places, start = [], 0
    for numel, is_range in sizes:
        places += [start] if is_range else []
        start += numel
    return places


def agreed_buffers(rows_WN: Tensor, ranges: Sequence[int] = ()) -> Tensor:
    """One value (N,) for the module buffers of all ranks: the mean for floating and complex ones, rank 0's for others.

    Args:
        ranges: the indices of (min, max) pairs; of these the least and the largest value of all ranks are taken.
    """
    if not (rows_WN.dtype.is_floating_point or rows_WN.dtype.is_complex):
        return rows_WN[0]
    if ranges:
        mean_N = agreed_buffers(rows_WN)
        places = torch.tensor(ranges, device=rows_WN.device)
        mean_N = mean_N.index_copy(0, places, rows_WN[:, places].amin(0))
        return mean_N.index_copy(0, places + 1, rows_WN[:, places + 1].amax(0))
    # If all ranks have equal values, these must not change, not even in the last bit.
    return torch.where((rows_WN == rows_WN[0]).all(dim=0), rows_WN[0], mean_in_rank_order(rows_WN))


def mean_in_rank_order(rows: Tensor) -> Tensor:
    """The mean of the rows, which are added in order."""
    first, *others = rows.unbind()
    return sum(others, start=first) * (1 / rows.shape[0])
