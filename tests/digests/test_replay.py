"""`fzero.replay` finds what was changed in one run, and names rank, unit and tensor.

Faults are made on real ranks: one bit of one element is flipped in one of the runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import optree
import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import fzero
from fzero.comms.pending import Pending
from fzero.digests import replaying, watching
from fzero.digests.digest import digest
from fzero.runtime import gathers, reductions

WIDTH, NUM_BLOCKS = 8, 3
UNITS = ("first", "h.0", "h.1", "h.2", "last")
NUM_FAULTS = 20
KINDS = ("weights", "moments", "activation", "gradient", "reduction", "gather")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.narrow(self.wide(x).relu())
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.h = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.h:
            x = self.drop(block(x))
        out: Tensor = self.last(x)
        return out


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def made(stage: int, **keys: Any) -> tuple[fzero.TrainStep, Any, Any]:
    torch.manual_seed(0)
    model = Net()
    cfg = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
    }
    step = fzero.make_train_step(model, cfg, loss_fn=loss_of, units=UNITS, **keys)
    torch.manual_seed(1 + step.rank)
    return step, step.init(), (torch.randn(4, 4), torch.randn(4, 2))


# --- faults ---------------------------------------------------------------------------------------


def flipped(x: Tensor, random: random.Random) -> Tensor:
    """The tensor with one flipped bit, in place."""
    flat = x.detach().view(-1).view(torch.uint8)
    flat[random.randrange(len(flat))] ^= 1 << random.randrange(8)
    return x


class Nth:
    """A call's number, of all calls in the runs since it was made."""

    def __init__(self, hit: int) -> None:
        self.calls, self.hit = 0, hit

    def __call__(self) -> bool:
        self.calls += 1
        return self.calls - 1 == self.hit


@contextmanager
def fault(
    kind: str, step: fzero.TrainStep, unit: str, run: int, draw: random.Random
) -> Iterator[None]:
    """Inside, run `run` of two has a fault of this kind in a unit."""
    module, flips = step.spec.model.get_submodule(unit), Nth(run)
    buffer = next(u for u in step.plan.units if u.name == unit).buffers[0]
    with ExitStack() as stack:
        if kind == "weights":
            in_state(stack, step, lambda state: state.params[buffer.key], flips, draw)
        elif kind == "moments":
            after_update(stack, buffer.key, flips, draw)
        elif kind == "activation":
            part = module.wide if isinstance(module, Block) else module

            def out(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
                return flipped(out.clone(), draw) if flips() else None

            stack.callback(part.register_forward_hook(out, prepend=True).remove)
        elif kind == "gradient":

            def reads(module: nn.Module, args: Any) -> None:
                if flips():
                    edge = get_gradient_edge(next(iter(module.parameters())))
                    at = edge.output_nr

                    def came(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                        return *grads[:at], flipped(grads[at].clone(), draw), *grads[at + 1 :]

                    edge.node.register_prehook(came)

            stack.callback(module.register_forward_pre_hook(reads).remove)
        else:
            where, name = {
                "reduction": (reductions, "start_reduce_scatter_grads"),
                "gather": (gathers, "start_gather"),
            }[kind]
            collective(stack, where, name, buffer.key, flips, draw)
        yield


def in_state(
    stack: ExitStack,
    step: fzero.TrainStep,
    leaf: Callable[[Any], Tensor],
    flips: Nth,
    draw: random.Random,
) -> None:
    plain = replaying.watched_step

    def watched(step: Any, state: Any, batch: Any) -> Any:
        if flips():
            flipped(leaf(state), draw)
        return plain(step, state, batch)

    stack.enter_context(patch.object(replaying, "watched_step", watched))


def after_update(stack: ExitStack, key: str, flips: Nth, draw: random.Random) -> None:
    plain = watching.end

    def end(*args: Any) -> Any:
        state, metrics = plain(*args)
        if flips():
            flipped(optree.tree_leaves(state.optimizer[key])[0], draw)
        return state, metrics

    stack.enter_context(patch.object(watching, "end", end))


def collective(
    stack: ExitStack, where: Any, name: str, key: str, flips: Nth, draw: random.Random
) -> None:
    plain = getattr(where, name)

    def start(x: Tensor, buffer: Any, *args: Any, **kwargs: Any) -> Any:
        sending = plain(x, buffer, *args, **kwargs)
        pending = getattr(sending, "pending", sending)
        if buffer.key == key and flips():
            result = flipped(pending.wait(), draw)
            pending = Pending(pending.label, [], None, result)
            return sending._replace(pending=pending) if hasattr(sending, "pending") else pending
        return sending

    stack.enter_context(patch.object(where, name, start))


PHASES = {
    "weights": "given state",
    "moments": "update",
    "activation": "forward",
    "gradient": "backward",
    "reduction": "reduction",
    "gather": "gather",
}


class Tried(NamedTuple):
    """The faults of one rank: how many were found, and what was said wrongly."""

    num_found: int
    num_without_effect: int
    wrong: list[str]


def _finds(stage: int, seeds: list[int]) -> Tried:
    step, state, batch = made(stage)
    state, _ = fzero.replay(step, state, batch)
    num_found = num_without_effect = 0
    wrong = []
    clean = optree.tree_leaves(fzero.replay(step, state, batch))
    for seed in seeds:
        draw = random.Random(seed)
        kind, unit = draw.choice(KINDS[: 6 if stage == 3 else 5]), draw.choice(UNITS)
        at, rank = draw.randrange(2), draw.randrange(step.world_size)
        before = [x.clone() for x in optree.tree_leaves(state)]
        with fault(kind, step, unit, at, draw) if rank == step.rank else ExitStack():
            try:
                result = optree.tree_leaves(fzero.replay(step, state, batch))
            except fzero.ReplayError as error:
                num_found += 1
                if (error.cause, error.ranks, error.unit) != ("fault", (rank,), unit):
                    wrong.append(f"{seed}: {kind} in {unit} on {rank}: {error}")
                elif error.phase != PHASES[kind] and kind != "gather":
                    wrong.append(f"{seed}: {kind} in {unit}: {error}")
                elif kind != "activation" and "element" not in error.where:
                    wrong.append(f"{seed}: no element: {error}")
            else:  # behind a ReLU, in padding, or in a weight that a backward does not read
                num_without_effect += 1
                if not all(map(torch.equal, result, clean)):
                    wrong.append(f"{seed}: {kind} in {unit} on {rank} was not found")
        assert all(map(torch.equal, optree.tree_leaves(state), before))
    fzero.replay(step, state, batch)
    return Tried(num_found, num_without_effect, wrong)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_flipped_bit_is_found_and_named(ranks: RankPool, stage: int) -> None:
    seeds = [*range(stage * NUM_FAULTS, (stage + 1) * NUM_FAULTS)]
    for tried in ranks(2, _finds, stage, seeds):
        assert not tried.wrong
        assert tried.num_found >= 0.75 * NUM_FAULTS, tried
