"""What the tests of training share: a model of ordinary peculiarities, its data, and
the plain loop that is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from devices import here
from torch import Tensor, nn

import fzero

Batch = tuple[Tensor, Tensor]
VOCABULARY, GLOBAL_BATCH = 29, 12
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Odd(nn.Module):
    """A language model with odd sizes, tied weights, and frozen, unused, zero-sized and
    0-d parameters.
    """

    def __init__(self, width: int = 17, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.blocks[1].up.bias.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden)) * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Scaled(nn.Linear):
    """A linear map of a scaled input, so that the backward needs the weight also where
    the input needs no gradient.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x * self.scale))


class Plain(nn.Module):
    """Equal blocks and nothing else, so that bytes and elements are easy to count."""

    def __init__(self, width: int = 16, num_blocks: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(width) for _ in range(num_blocks))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


def make(model: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return here(model())


def tokens(step: int, size: int = GLOBAL_BATCH) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return here(
        tuple(torch.randint(0, VOCABULARY, (size, 7), generator=generator) for _ in range(2))
    )  # type: ignore[return-value]


def vectors(step: int, size: int = GLOBAL_BATCH, width: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return here(tuple(torch.randn(size, width, generator=generator) for _ in range(2)))  # type: ignore[return-value]


def part(batch: Any, rank: int, world_size: int) -> Any:
    """This rank's rows of a global batch."""
    if isinstance(batch, Mapping):
        return {key: part(value, rank, world_size) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(part(value, rank, world_size) for value in batch)
    return batch.chunk(world_size)[rank]


def config(
    stage: int, *, clip: float = 1.0, optimizer: Mapping[str, Any] = ADAMW, **zero: Any
) -> dict[str, Any]:
    return {
        "optimizer": optimizer,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }


def train(
    model: Callable[[], nn.Module],
    data: Callable[[int], Any],
    cfg: Mapping[str, Any],
    *,
    num_steps: int = 10,
    **options: Any,
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Trains with fzero; (loss, gradient norm) of each step, and the state dict at the
    end.
    """
    step = fzero.make_train_step(make(model), cfg, **options)
    state = step.init()
    curve = []
    for index in range(num_steps):
        state, metrics = step(state, part(data(index), step.rank, step.world_size))
        curve.append((metrics.loss.item(), metrics.grad_norm.item()))
    return curve, step.gather(state)


def train_plainly(
    model: Callable[[], nn.Module],
    data: Callable[[int], Any],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    num_steps: int = 10,
    clip: float = 1.0,
    loss_of: Callable[[nn.Module, Any], Tensor] | None = None,
    num_parts: int = 1,
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """The oracle: one process, the global batch, torch.optim.

    With `num_parts` it plays so many ranks, one after the other: each part of the batch
    meets the same buffers, and their losses, gradients and floating buffers are
    averaged. What a model computes over a batch needs that.
    """
    module = make(model)
    params = [p for p in module.parameters() if p.requires_grad]
    optimizer = make_optimizer(params)
    curve = []
    for index in range(num_steps):
        optimizer.zero_grad()
        before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        losses, after = [], []
        for rank in range(num_parts):
            _assign(module, before)
            batch = part(data(index), rank, num_parts)
            losses.append(loss_of(module, batch) if loss_of else module(*batch))
            (losses[-1] / num_parts).backward()
            after.append({name: buffer.detach().clone() for name, buffer in module.named_buffers()})
        loss = torch.stack(losses).mean()
        _assign(module, {name: _mean([buffers[name] for buffers in after]) for name in before})
        # a parameter without a gradient has a zero one: which ones have none may depend on data
        for param in params:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        norm = nn.utils.get_total_norm([param.grad.double() for param in params])
        nn.utils.clip_grad_norm_(params, clip if clip else float("inf"))
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve, weights_of(module)


class Mixed(NamedTuple):
    """The arithmetic of training in 16 bits, as the plain loop does it: who adds up
    what, in which dtype.
    """

    param: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype
    master: torch.dtype = torch.float32
    optimizer: torch.dtype = torch.float32
    scale: float = 1.0


def train_in_16_bits(
    model: Callable[[], nn.Module],
    data: Callable[[int], Any],
    mixed: Mixed,
    *,
    num_steps: int,
    num_ranks: int,
    num_micro_steps: int = 1,
    reduces_each: bool,
    clip: float = 0.0,
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """The oracle of mixed precision: one process that plays the ranks and micro-steps
    one after the other, with AdamW.

    Args:
        reduces_each: whether gradients are added up over the ranks in each micro-step
            (stages 2 and 3), or over the micro-steps first.
    """
    if num_ranks == 1:  # nothing is sent
        mixed, reduces_each = mixed._replace(reduce=mixed.grad), False
    module = make(model)
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    masters = {n: p.detach().to(mixed.master) for n, p in module.named_parameters()}
    module.to(mixed.param)
    moments = {n: masters[n].new_zeros(2, *masters[n].shape, dtype=mixed.optimizer) for n in names}
    share, curve = 1 / (num_ranks * num_micro_steps), []
    for index in range(num_steps):
        with torch.no_grad():
            for name, param in module.named_parameters():
                param.copy_(masters[name])
        losses, grads = [], {}
        for micro in range(num_micro_steps):
            for rank in range(num_ranks):
                batch = part(part(data(index), rank, num_ranks), micro, num_micro_steps)
                batch = tuple(x.to(mixed.param) if x.is_floating_point() else x for x in batch)
                module.zero_grad()
                loss = module(*batch)
                losses.append(loss.item())
                (loss.float() * mixed.scale).backward()
                for name, param in module.named_parameters():
                    grads[name, micro, rank] = (
                        torch.zeros_like(param) if param.grad is None else param.grad.clone()
                    )
        collected = {
            n: _add_up(grads, n, mixed, share, num_ranks, num_micro_steps, reduces_each)
            for n in names
        }
        norm = sum(g.float().norm().double() ** 2 for g in collected.values()) ** 0.5 / mixed.scale
        factor = (
            (clip / (norm + 1e-6)).clamp(max=1.0) / mixed.scale
            if clip
            else norm.new_tensor(1 / mixed.scale)
        )
        for name, grad in collected.items():
            grad = grad.float() * factor.float()
            param, (m, v) = masters[name].float(), moments[name].float()
            torch._fused_adamw_(
                [param],
                [grad],
                [m],
                [v],
                [],
                [here(torch.tensor(index + 1.0))],
                lr=1e-2,
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.1,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
            masters[name] = param.to(mixed.master)
            moments[name] = torch.stack([m, v]).to(mixed.optimizer)
        curve.append((sum(losses) / len(losses), norm.item()))
    return curve, {name: master.float().cpu() for name, master in masters.items()}


def _add_up(
    grads: Mapping[Any, Tensor],
    name: str,
    mixed: Mixed,
    share: float,
    num_ranks: int,
    num_steps: int,
    each: bool,
) -> Tensor:
    def over_ranks(parts: list[Tensor]) -> Tensor:
        total = parts[0].clone()
        for part_ in parts[1:]:
            total += part_
        return total

    def shared(dtype: torch.dtype, micro: int, rank: int) -> Tensor:
        grad = grads[name, micro, rank]
        return (grad.to(torch.promote_types(dtype, grad.dtype)) * share).to(dtype)

    if each or num_steps == 1:
        total = torch.zeros_like(grads[name, 0, 0], dtype=mixed.grad)
        for micro in range(num_steps):
            summed = over_ranks([shared(mixed.reduce, micro, rank) for rank in range(num_ranks)])
            total = summed.to(mixed.grad) if micro == 0 else total.add_(summed)
        return total
    by_rank = []
    for rank in range(num_ranks):
        total = shared(mixed.grad, 0, rank)
        for micro in range(1, num_steps):
            grad = grads[name, micro, rank]
            total = torch.add(total.float(), grad.float(), alpha=share).to(mixed.grad)
        by_rank.append(total.to(mixed.reduce))
    return over_ranks(by_rank).to(mixed.grad)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of its state dict in host memory, where `gather` puts one."""
    return {name: x.detach().cpu().clone() for name, x in module.state_dict().items()}


def _assign(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


def _mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(0) if tensors[0].is_floating_point() else tensors[0]


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True)
