"""Laws: ranks, micro-batches and tokens are averaged as one process would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fzero.testing.conformance.laws import (
    DDP,
    TORCH,
    ZERO,
    Lab,
    NotApplicable,
    Plain,
    check_bits,
    check_moved,
    check_near,
    law,
    random_rows,
)
from fzero.testing.conformance.models import Net
from fzero.testing.conformance.training import Batches, Setup

SGD = Setup(Net, options=(("lr", 0.1), ("momentum", 0.9)))
ADAMW = Setup(Net, optimizer="AdamW", options=(("lr", 0.01), ("eps", 1e-3), ("weight_decay", 0.1)))
"""With an eps by which rounding is not amplified."""


@law("ZeRO powers data parallelism: the global batch is divided among the ranks", ZERO)
def one_process(lab: Lab) -> None:
    trainer = lab.check_plain(SGD)
    torch.manual_seed(0)
    before = {name: p.detach() for name, p in Net().named_parameters()}
    check_moved(before, trainer.weights())


@law("optimizer states are those of Adam, partitioned (§5.1)", ZERO)
def adamw(lab: Lab) -> None:
    lab.check_plain(ADAMW, 5)


@law("all stages train the same: they divide states, gradients and parameters", ZERO)
def stages_agree(lab: Lab) -> None:
    if len(lab.system.stages) == 1:
        raise NotApplicable("it has one stage")
    own = lab.trained(ADAMW, range(3)).weights()
    first = lab.trained(ADAMW, range(3), lab.make(ADAMW, stage=lab.system.stages[0])).weights()
    check_near(own, first, f"those of stage {lab.system.stages[0]}")


@law(
    "the training batch is micro-batch × accumulation steps × ranks",
    "deepspeed.ai/docs/config-json",
)
def accumulation(lab: Lab) -> None:
    several = lab.trained(replace(SGD, micro_steps=3), range(3)).weights()
    plain = Plain(SGD)
    for index in range(3):
        own = lab.batches(index, micro_steps=3)
        plain.step([[torch.cat([batch for batches in own for batch in batches])]])
    check_near(several, plain.weights(), "those of one large batch")


@law("a gradient is collected once per update: the next one starts at zero", DDP)
def gradients_start_at_zero(lab: Lab) -> None:
    still = replace(SGD, options=(("lr", 0.1),), micro_steps=2)
    lab.check_plain(still, 4)


def num_tokens(batch: tuple[Tensor, Tensor]) -> Tensor:
    return batch[1].sum()


def loss_of_tokens(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x_BF, mask_B = batch
    y: Tensor = model(x_BF)
    errors_B = (y - x_BF[:, : y.shape[1]].flip(1)).square().mean(1)
    return (errors_B * mask_B).sum()


TOKENS = replace(SGD, loss=loss_of_tokens, count=num_tokens)
COUNTS = "Accelerate, huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"


def masked(lab: Lab, index: int, counts: list[list[int]]) -> Batches:
    """Micro-batches in which `counts[rank][micro]` rows count."""

    def one(rank: int, micro: int, num: int) -> Any:
        return random_rows(index, rank, micro), (torch.arange(4) < num).float()

    return [
        [one(rank, micro, num) for micro, num in enumerate(counts[min(rank, 1)])]
        for rank in range(lab.world_size)
    ]


def check_tokens(lab: Lab, setup: Setup, counts: list[list[int]]) -> None:
    trainer, plain = lab.make(setup), Plain(setup)
    for index in range(3):
        batches = masked(lab, index, counts)
        trainer.step(batches)
        plain.step(batches)
    check_near(trainer.weights(), plain.weights(), "those of a mean over all tokens")


@law("the loss is a sum over all tokens of the update, divided by their number", COUNTS)
def unequal_tokens(lab: Lab) -> None:
    check_tokens(lab, TOKENS, [[4], [1]])


@law("the same over micro-steps: no mean of means", COUNTS)
def unequal_tokens_of_micro_steps(lab: Lab) -> None:
    check_tokens(lab, replace(TOKENS, micro_steps=2), [[4, 1], [2, 3]])


@law("a rank without tokens takes part with a gradient of zero", COUNTS)
def a_rank_without_tokens(lab: Lab) -> None:
    check_tokens(lab, TOKENS, [[3], [0]])


@law("it does not matter which rank has which rows", ZERO)
def division_of_the_batch(lab: Lab) -> None:
    trainer = lab.make(SGD)
    for index in range(3):
        trainer.step(lab.batches(index)[::-1])
    check_near(trainer.weights(), lab.trained(SGD, range(3)).weights(), "those of rows in order")


@law("the module is replicated: parameters are equal on all ranks after each update", DDP)
def weights_equal_on_all_ranks(lab: Lab) -> None:
    own = lab.trained(ADAMW, range(3)).weights()
    torch.save(dict(own), lab.folder / f"{lab.rank}.pt")
    for other in lab.others():
        check_bits(own, torch.load(lab.folder / f"{other}.pt"), f"those of rank {other}")


@law(
    "the state of rank 0 is broadcast to all ranks when training begins", DDP, needs_processes=True
)
def first_weights_are_those_of_rank_0(lab: Lab) -> None:
    lab.check_plain(replace(SGD, differs_by_rank=True), 2)


@law("the same program on the same data gives the same bits", f"Reproducibility, {TORCH}")
def the_same_run_gives_the_same_bits(lab: Lab) -> None:
    first, second = (lab.trained(ADAMW, range(3)).weights() for _ in range(2))
    check_bits(first, second, "those of the first run")
