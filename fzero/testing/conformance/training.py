"""What a law says of a training, and the six calls of an adapter.

A law is a global program: it makes the batches of all ranks, and each process takes its
own. So the same law runs on processes and on simulated ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

Batches = Sequence[Sequence[Any]]
"""Micro-batches of one update, `batches[rank][micro_step]`."""
Weights = Mapping[str, Tensor]


class Refused(Exception):
    """An adapter's system does not offer what a law asks for; the message says what."""


class Norm(NamedTuple):
    """What a system reports of its last step."""

    grad_norm: float | None
    """Global norm of the mean gradient, before clipping, without the loss scale; None if
    it reports none.
    """
    loss_scale: float = 1.0
    """The factor of the next loss."""


def mse(model: nn.Module, x_BF: Tensor) -> Tensor:
    """Mean squared error between the outputs and the first inputs, reversed."""
    y: Tensor = model(x_BF)
    return (y.float() - x_BF[:, : y.shape[1]].float().flip(1)).square().mean()


@dataclass(frozen=True, slots=True)
class Setup:
    """A training, in words that every system has.

    Attributes:
        model: makes the module, which takes (rows, features); modules in `blocks` are
            the units.
        loss: of a model and a micro-batch: a mean over rows; or a sum, if there is
            `count`.
        count: the number of terms (tokens) in the loss of a micro-batch. Gradients are
            those of all ranks' and micro-steps' sums over all their counts.
        optimizer, options: a class of torch.optim by name, and its arguments.
        groups: parameter groups with options of their own; `params` is a piece of the
            names of their parameters.
        rates: the factor of the learning rate of update n, from 0.
        clip: the largest global norm of the gradient; 0 does not clip.
        precision: of forward and backward; weights and moments are fp32.
        scale_power, scale_window: fp16: log₂ of the first loss scale; updates without
            an overflow after which it doubles. It is halved after each overflow.
        some_unused: whether some rank may leave parameters out of its forward.
        differs_by_rank: whether the first weights differ; those of rank 0 count.
        stage: the ZeRO stage.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor] = mse
    count: Callable[[Any], Tensor] | None = None
    optimizer: Literal["SGD", "AdamW"] = "SGD"
    options: tuple[tuple[str, Any], ...] = (("lr", 0.1),)
    groups: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    rates: Callable[[int], float] | None = None
    clip: float = 0.0
    micro_steps: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    scale_power: int = 8
    scale_window: int = 1000
    some_unused: bool = False
    differs_by_rank: bool = False
    stage: int = 0

    def grouped(self, named: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
        """The parameters as groups of torch.optim, frozen ones too, as
        `model.parameters()` has them; the first has all that no other takes.
        """
        pieces = [piece for piece, _ in self.groups]
        rest = [p for name, p in named.items() if not any(piece in name for piece in pieces)]
        groups: list[dict[str, Any]] = [{"params": rest}]
        for piece, options in self.groups:
            taken = [p for name, p in named.items() if piece in name]
            groups.append({"params": taken, **dict(options)})
        return groups

    def make_optimizer(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """torch's own optimizer of these parameters."""
        kind: type[torch.optim.Optimizer] = getattr(torch.optim, self.optimizer)
        return kind(self.grouped(named), **dict(self.options))

    def share(self, batches: Batches) -> float:
        """The factor of each micro-batch's loss in the loss of the global batch."""
        if self.count is None:
            return 1 / sum(len(own) for own in batches)
        return 1 / sum(float(self.count(batch)) for own in batches for batch in own)


class Trainer(Protocol):
    """A model in training: five of the six calls. All ranks make each of them."""

    def step(self, batches: Batches, *, update: bool = True) -> float:
        """One update on the batches of all ranks, of which this process takes its own.

        With `update=False` it is an evaluation: without gradients, in evaluation mode,
        and nothing changes. Returns the mean of the losses then; else any number.
        """
        ...

    def weights(self) -> Weights:
        """A copy of the full weights in fp32 and of this rank's buffers, by the model's
        own names.
        """
        ...

    def norm(self) -> Norm:
        """What the system reports of the last step."""
        ...

    def save(self, folder: Path) -> None:
        """Writes all that training needs to go on."""
        ...

    def load(self, folder: Path) -> int:
        """Goes on from there; returns the number of updates that were made."""
        ...


@dataclass(frozen=True, slots=True)
class System:
    """A column of the table.

    Attributes:
        name: of the column.
        make: the sixth call, for a training on (rank, number of ranks); a function at
            the top of a module, which ranks import.
        stages: those that it has; a law is tried in each.
        version: of what is tested.
        preload: modules that it needs, imported before the ranks are copied.
        in_one_process: whether the ranks are simulated in one process.
        aside: how the adapter uses the system, where its documentation offers a choice.
    """

    name: str
    make: Callable[[Setup, int, int], Trainer]
    stages: tuple[int, ...]
    version: Callable[[], str]
    preload: tuple[str, ...] = ()
    in_one_process: bool = False
    aside: str = ""

    def is_here(self) -> bool:
        """Whether the modules that it needs are installed."""
        return all(find_spec(module) is not None for module in self.preload)


class _Joined(nn.Module):
    """A complex tensor from its real and its imaginary part."""

    def forward(self, real: Tensor, imag: Tensor) -> Tensor:
        return torch.complex(real, imag)

    def right_inverse(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        return whole.real.contiguous(), whole.imag.contiguous()


def in_real_parts(model: nn.Module) -> nn.Module:
    """The model, in which complex parameters are joined from real ones, as the error of a
    system recommends that trains real ones only (`torch.nn.utils.parametrize`).
    """
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            if param.is_complex():
                parametrize.register_parametrization(module, name, _Joined(), unsafe=True)
    return model


def joined(weights: Weights) -> Weights:
    """The weights of a model by the names that it had before `in_real_parts`."""
    found = {name: x for name, x in weights.items() if "parametrizations." not in name}
    for name in weights.keys() - found.keys():
        if name.endswith(".original0"):
            imag = weights[name.removesuffix("0") + "1"]
            plain = name.replace("parametrizations.", "").removesuffix(".original0")
            found[plain] = torch.complex(weights[name], imag)
    return found


class GeneratorState:
    """The process' random state, which scripts save beside a checkpoint
    (`torch.get_rng_state`).
    """

    def __init__(self, rank: int) -> None:
        self._name = f"generator_{rank}.pt"

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(torch.get_rng_state(), folder / self._name)

    def load(self, folder: Path) -> None:
        """Restores it, if this rank saved one."""
        if (folder / self._name).exists():
            torch.set_rng_state(torch.load(folder / self._name))


@contextmanager
def dead_rank_named() -> Iterator[None]:
    """After a lost connection, the error that names the rank: "a host-side synchronization
    that can … report ranks which did not respond" (`torch.distributed.monitored_barrier`).
    """
    try:
        yield
    except RuntimeError as error:
        if "gloo" in str(error):
            torch.distributed.monitored_barrier(timeout=timedelta(seconds=5))
        raise


def agreed_mean(losses: Sequence[float]) -> float:
    """The mean over all ranks of these, as many on each. *Collective:* every rank."""
    total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return (total[0] / total[1]).item()
