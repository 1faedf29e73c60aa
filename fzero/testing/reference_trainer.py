"""`ReferenceTrainer`: one process with plain PyTorch, which computes the ranks of a job
one after the other.

It is the oracle of `fzero.testing.TrainingMachine`. It has no flat buffers, shards or
units: only a module, its weights by name, and an optimizer of one tensor. It shares
with a job the promised order of summation: micro-step by micro-step, and over the ranks
in rank order, each in the dtype in which it is sent.

Shape letters: A micro-steps, W ranks, B samples of a micro-step on one rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fzero.optim.loss_scale import LossScaling
from fzero.optim.transforms import Transform, leaf_names

Numbers = dict[str, Tensor]  # tensors by name
LANES = 32
"""Zeros appended to a tensor for an update, as in a flat buffer, because a kernel may
round the last few elements of a tensor differently."""
Precision = Literal["float32", "bfloat16", "float16"]
COMPUTE: dict[Precision, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Job:
    """The arguments of a step, besides the model and its optimizer.

    >>> Job(stage=3, world_size=2).config["zero_optimization"]["stage"]
    3
    """

    stage: int = 0
    world_size: int = 1
    precision: Precision = "float32"
    num_micro_steps: int = 1
    micro_batch: int = 1
    clip: float = 0.0
    units: tuple[str, ...] | None = None
    threshold: int = 0
    """Parameters with fewer elements are kept in full in stage 3."""
    order: Literal["declaration", "round robin"] = "declaration"
    memory: Literal["donated", "kept"] = "donated"
    """Whether a step may write into its argument state."""
    placement: Literal["device", "host", "nvme", "parameters too"] = "device"
    """The placement of masters and optimizer state."""
    initial_scale_power: int = 8
    """The exponent of the initial loss scale in fp16. The next three are options of the
    loss scale, too.
    """
    window: int = 2
    hysteresis: int = 1
    consecutive: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The configuration for fzero, without the optimizer."""
        bf16 = {"enabled": True, "auto_cast": True}
        fp16 = bf16 | {
            "initial_scale_power": self.initial_scale_power,
            "loss_scale_window": self.window,
            "hysteresis": self.hysteresis,
            "consecutive_hysteresis": self.consecutive,
        }
        by_precision: dict[str, dict[str, Any]] = {
            "bfloat16": {"bf16": bf16},
            "float16": {"fp16": fp16},
        }
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.num_micro_steps,
            "gradient_clipping": self.clip,
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": self.threshold,
                "round_robin_gradients": self.order == "round robin",
            },
            **by_precision.get(self.precision, {}),
        }

    @property
    def scaling(self) -> LossScaling:
        """The rules of the loss scale."""
        power = self.initial_scale_power
        is_fp16 = self.precision == "float16"
        return (
            LossScaling(2.0**power, True, self.window, self.hysteresis, self.consecutive)
            if is_fp16
            else LossScaling()
        )

    @property
    def num_samples(self) -> int:
        """Samples of one rank in one step."""
        return self.micro_batch * self.num_micro_steps


class ReferenceOptimizer(NamedTuple):
    """An optimizer of one tensor: `init(param)` returns its state,
    `update(grad, param, state)` the new parameter and state.
    """

    init: Callable[[Tensor], Numbers]
    update: Callable[[Tensor, Tensor, Numbers], tuple[Tensor, Numbers]]


def optimizer_of_torch(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], names: Mapping[str, str]
) -> ReferenceOptimizer:
    """A class of torch.optim, made anew for every update.

    Args:
        make: makes it of its parameters.
        names: torch's name of each tensor of fzero's state, by fzero's name.
    """

    def init(param: Tensor) -> Numbers:
        return {
            name: torch.zeros(()) if name == "state.step" else torch.zeros_like(param)
            for name in names
        }

    def update(grad: Tensor, param: Tensor, state: Numbers) -> tuple[Tensor, Numbers]:
        param = param.clone().requires_grad_()
        optimizer = make([param])
        optimizer.state[param].update(
            {theirs: state[ours].clone() for ours, theirs in names.items()}
        )
        param.grad = grad
        optimizer.step()
        return param.detach(), {
            ours: optimizer.state[param][theirs] for ours, theirs in names.items()
        }

    return ReferenceOptimizer(init, update)


def optimizer_of_transform(make: Callable[[], Transform]) -> ReferenceOptimizer:
    """A transform, applied to each full parameter separately."""

    def init(param: Tensor) -> Numbers:
        state = make().init(param.clone())
        return dict(zip(leaf_names(state), optree.tree_leaves(state), strict=True))

    def update(grad: Tensor, param: Tensor, state: Numbers) -> tuple[Tensor, Numbers]:
        transform = make()
        structure = optree.tree_structure(transform.init(param.clone()))
        tree = structure.unflatten([x.clone() for x in state.values()])
        _, param, tree = transform.update(grad.clone(), param.clone(), tree)
        return param, dict(zip(state, optree.tree_leaves(tree), strict=True))

    return ReferenceOptimizer(init, update)


class ReferenceLossScale:
    """DeepSpeed's dynamic loss scale, with its two counters of steps.

    >>> scale = ReferenceLossScale(LossScaling(4.0, dynamic=True, window=3, hysteresis=2))
    >>> for overflow in (True, True):
    ...     scale.step(overflow)
    >>> scale.scale, scale.left
    (2.0, 1)
    """

    def __init__(self, rules: LossScaling) -> None:
        self.rules, self.scale, self.left = rules, rules.initial, rules.hysteresis
        self.now, self.last_overflow = 0, -1

    @property
    def num_good(self) -> int:
        """Steps since the last overflow."""
        return self.now - self.last_overflow - 1

    @property
    def is_exhausted(self) -> bool:
        """Whether training cannot go on after an overflow."""
        return self.rules.dynamic and self._would_shrink and self.scale <= self.rules.minimum

    @property
    def _would_shrink(self) -> bool:
        return self.rules.hysteresis == 1 or self.left == 1

    def step(self, overflow: bool) -> None:
        """Advances by one step."""
        if not self.rules.dynamic:
            return
        if overflow:
            if self._would_shrink:
                self.scale = max(self.scale / 2, self.rules.minimum)
            else:
                self.left -= 1
            self.last_overflow = self.now
        else:
            grows = self.num_good > 0 and self.num_good % self.rules.window == 0
            if self.rules.consecutive or grows:
                self.left = self.rules.hysteresis
            if grows:
                self.scale *= 2
        self.now += 1


class ReferenceOutcome(NamedTuple):
    """The results of a step of the plain model."""

    loss: float  # the mean over ranks and micro-steps
    norm: float  # the norm of the mean gradient
    scale: float  # the factor of the loss
    end: Literal["update", "skip", "error"]
    rounding: float
    """The allowed difference of a job's numbers, as a fraction of the gradient's norm;
    0 requires equal bits.
    """


class ReferenceTrainer:
    """A model in training, in one process.

    Attributes:
        weights: by name, without aliases: for a trained parameter the tensor that the
            optimizer updates, for a frozen one the tensor that the model computes with.
        state: the optimizer's, by parameter: flat tensors with zeros appended, and 0-d
            ones.
        num_updates: the number of updates so far.
        trained: the names of parameters that are not frozen.
        compares: "bits" requires equal bits where the arithmetic is the same; "numbers"
            allows rounding everywhere.
    """

    def __init__(
        self,
        model: nn.Module,
        job: Job,
        optimizer: ReferenceOptimizer,
        compares: Literal["bits", "numbers"] = "bits",
    ) -> None:
        self.optimizer, self.compares, self._module = optimizer, compares, copy.deepcopy(model)
        self._own_dtypes = {name: param.dtype for name, param in self._module.named_parameters()}
        self.weights = {
            name: param.detach().clone() for name, param in self._module.named_parameters()
        }
        self._adds_parts = len(self.weights) < sum(
            1 for _ in self._module.named_parameters(remove_duplicate=False)
        )
        self.trained = [
            name for name, param in self._module.named_parameters() if param.requires_grad
        ]
        self.compute_in(job.precision)
        self.begin(job.scaling)

    def compute_in(self, precision: Precision) -> None:
        """Switches the model to these dtypes. Trained weights are kept in fp32, or in
        fp64 if they are so.
        """
        self._dtype = COMPUTE[precision]
        for name, param in self._module.named_parameters():
            param.data = self.weights[name].to(self._dtype or self._own_dtypes[name], copy=True)
            if not param.requires_grad:
                self.weights[name] = param.data.clone()

    def begin(self, scaling: LossScaling) -> None:
        """Starts training from the present weights."""
        self.state = {
            name: self.optimizer.init(_lengthened(self.weights[name])) for name in self.trained
        }
        self.num_updates, self.loss_scale = 0, ReferenceLossScale(scaling)

    def step(self, job: Job, batch_W: Any) -> ReferenceOutcome:
        """One step on the batches of all ranks, stacked (W, A·B, …)."""
        self._load()
        losses, grads = [], {}
        for micro in range(job.num_micro_steps):
            for rank in range(job.world_size):
                self._module.zero_grad()
                loss = self._loss(job, batch_W, rank, micro)
                losses.append(loss.item())
                wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
                torch.autograd.backward(wide * self.loss_scale.scale)
                for name, param in self._module.named_parameters():
                    grads[name, micro, rank] = (
                        torch.zeros_like(param) if param.grad is None else param.grad.clone()
                    )
        mean, scale = sum(losses) / len(losses), self.loss_scale.scale
        collected = {name: _added_up(grads, name, job) for name in self.trained}
        norm = math.sqrt(sum(_norm(grad) ** 2 for grad in collected.values())) / scale
        rounding = self.rounding(clips=bool(job.clip) and job.clip < 1.001 * norm + 1e-6)
        if not math.isfinite(norm + mean):
            if job.precision == "float32" or self.loss_scale.is_exhausted:
                return ReferenceOutcome(mean, norm, scale, "error", rounding)
            self.loss_scale.step(True)
            return ReferenceOutcome(mean, norm, scale, "skip", rounding)
        factor = (min(1.0, job.clip / (norm + 1e-6)) if job.clip else 1.0) / scale
        for name, grad in collected.items():
            self._update(name, grad.to(self.weights[name].dtype) * factor)
        self.num_updates += 1
        self.loss_scale.step(False)
        return ReferenceOutcome(mean, norm, scale, "update", rounding)

    def take(self, weights: Numbers, state: Mapping[str, Numbers]) -> None:
        """Continues with these numbers."""
        self.weights |= {
            name: weight.to(self.weights[name].dtype).clone() for name, weight in weights.items()
        }
        for name, numbers in state.items():
            old = self.state[name]
            self.state[name] = {
                k: _lengthened(numbers[k]) if x.ndim else numbers[k].clone() for k, x in old.items()
            }

    def evaluate(self, job: Job, batch_W: Any) -> float:
        """The mean loss over ranks, of full batches."""
        self._load()
        self._module.eval()
        whole = [self._loss(job, batch_W, rank).item() for rank in range(job.world_size)]
        self._module.train()
        return sum(whole) / len(whole)

    def rounding(self, *, clips: bool = False) -> float:
        """The allowed difference of a job's numbers, as a fraction of the gradient's
        norm.

        A norm is a sum in an order that depends on the layout. For a tied parameter,
        the parts of the gradient are summed here before the division, and in a job
        after it.
        """
        if self.compares == "numbers" or self._adds_parts:
            return {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}.get(
                self._dtype or torch.float32, 2.0**-18
            )
        return 2.0**-18 if clips else 0.0

    def _load(self) -> None:
        with torch.no_grad():
            for name, param in self._module.named_parameters():
                param.copy_(self.weights[name])

    def _loss(self, job: Job, batch_W: Any, rank: int, micro: int | None = None) -> Tensor:
        def one(x_W: Tensor) -> Tensor:
            x = x_W[rank] if micro is None else x_W[rank].chunk(job.num_micro_steps)[micro]
            return x.to(self._dtype) if self._dtype and x.is_floating_point() else x

        batch = optree.tree_map(one, batch_W)
        if isinstance(batch, Mapping):
            loss: Tensor = self._module(**batch)
        else:
            loss = self._module(*batch) if isinstance(batch, tuple) else self._module(batch)
        return loss

    def _update(self, name: str, grad: Tensor) -> None:
        weight = self.weights[name]
        new, self.state[name] = self.optimizer.update(
            _lengthened(grad), _lengthened(weight), self.state[name]
        )
        self.weights[name] = new[: weight.numel()].view(weight.shape)


def _lengthened(x: Tensor) -> Tensor:
    """The elements of `x` with zeros appended."""
    flat = x.new_zeros(x.numel() + LANES)
    flat[: x.numel()] = x.reshape(-1)
    return flat[: -(-x.numel() // LANES) * LANES]


def _norm(grad: Tensor) -> float:
    return float(
        torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
    )


def _added_up(grads: Mapping[tuple[str, int, int], Tensor], name: str, job: Job) -> Tensor:
    """The mean gradient of a parameter over micro-steps and ranks.

    Stages 2 and 3 add up over the ranks in each micro-step, the others over the
    micro-steps first.
    """
    num_ranks, num_micro_steps = job.world_size, job.num_micro_steps
    share = 1 / (num_ranks * num_micro_steps)
    if job.stage >= 2 and num_ranks > 1:
        return _total(
            [
                _total([grads[name, micro, rank] * share for rank in range(num_ranks)])
                for micro in range(num_micro_steps)
            ]
        )
    by_rank = []
    for rank in range(num_ranks):
        total = grads[name, 0, rank] * share
        wide = torch.promote_types(total.dtype, torch.float32)
        for micro in range(1, num_micro_steps):
            total = torch.add(total.to(wide), grads[name, micro, rank].to(wide), alpha=share).to(
                total.dtype
            )
        by_rank.append(total)
    return _total(by_rank)


def _total(parts: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, parts)
