"""What a captured step refuses, because its graph would not repeat it; and what is like
it and trains as in a plain loop.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import config, make

import fzero

WIDTH = 4
AOT: dict[str, Any] = {"compile": "step", "compile_backend": "aot_eager"}


class Toy(nn.Module):
    """A linear layer, and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.odd(x)).square().mean()

    def odd(self, x: Tensor) -> Tensor:
        return x


class SetsData(Toy):
    def odd(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data.clamp(-0.1, 0.1)
        return x


class SetsDataOfAnActivation(Toy):
    def odd(self, x: Tensor) -> Tensor:
        y = 2 * x
        y.data = 3 * x
        return y


class Unfreezes(Toy):
    def odd(self, x: Tensor) -> Tensor:
        self.frozen.weight.requires_grad_(True)
        return self.frozen(x)


class HooksAParameter(Toy):
    def odd(self, x: Tensor) -> Tensor:
        self.linear.weight.register_hook(lambda grad: 2 * grad)
        return x


class BufferOfAParameter(Toy):
    def odd(self, x: Tensor) -> Tensor:
        self.mean = self.linear.bias.data
        return x + self.mean


class BuffersOfOneMemory(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(2, WIDTH))
        self.register_buffer("row", self.rows[0])

    def odd(self, x: Tensor) -> Tensor:
        self.rows.add_(0.5)
        return x + self.row


class OwnGenerator(Toy):
    def odd(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(3))


class SeedsItsGenerator(Toy):
    def odd(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.generator.manual_seed(3))


class AsksForType(Toy):
    def odd(self, x: Tensor) -> Tensor:
        return 2 * x if type(self.linear.weight) is nn.Parameter else x


class AsksForClass(Toy):
    def odd(self, x: Tensor) -> Tensor:
        return 2 * x if x.__class__ == torch.Tensor else x


class KeepsData(Toy):
    def odd(self, x: Tensor) -> Tensor:
        if not hasattr(self, "first"):
            self.register_buffer("first", x.mean(0), persistent=False)
        return x + self.first


class Tagged(Tensor):
    """A tensor of a class of its own."""


class BufferOfAClass(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH).as_subclass(Tagged))

    def odd(self, x: Tensor) -> Tensor:
        return x * (1 if isinstance(self.mean, Tagged) else 2)


class MakesAChildWithATensor(Toy):
    def odd(self, x: Tensor) -> Tensor:
        if not hasattr(self, "more"):
            more = nn.Identity()
            more.scale = torch.full((1,), 0.5)
            self.more = more
        return x * self.more.scale


REFUSED: dict[type[Toy], str] = {
    BufferOfAClass: (
        "'mean' is a Tagged, and tensors of all ranks, or in one graph, have no methods"
    ),
    SetsData: "'linear.weight': must not be changed in place by the forward",
    SetsDataOfAnActivation: "sets the .data of a tensor",
    Unfreezes: "'frozen.weight': must keep requires_grad in the forward",
    HooksAParameter: "'linear.weight': must get no gradient hook in the forward",
    BufferOfAParameter: "'mean': must not share memory with a parameter",
    BuffersOfOneMemory: "must have memory of its own where a forward changes it",
    OwnGenerator: "draws from a generator that the forward makes or seeds",
    SeedsItsGenerator: "draws from a generator that the forward makes or seeds",
    AsksForType: "compares the type of a tensor",
    AsksForClass: "compares the type of a tensor",
    KeepsData: "keeps data in the buffer 'first'",
    MakesAChildWithATensor: "makes the module 'more' with tensors in it",
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_graph_would_not_repeat_is_refused_and_leaves_the_module_as_it_was(
    kind: type[Toy], stage: int
) -> None:
    model = make(kind)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    step = fzero.make_train_step(model, config(stage), **AOT)
    with pytest.raises((ValueError, fzero.CompileError), match=REFUSED[kind]) as raised:
        step(step.init(), torch.ones(2, WIDTH))
    assert "fzero" in type(raised.value).__module__
    for name, module in model.named_modules():
        assert dict(vars(module)) == before[name]
    assert all(type(param) is nn.Parameter for param in model.parameters())


class KeepsAWeight(Toy):
    def odd(self, x: Tensor) -> Tensor:
        if not hasattr(self, "old"):
            self.old = self.linear.weight.detach()
        return nn.functional.linear(x, self.old)


def test_a_weight_that_a_forward_has_kept_is_refused_in_the_next_capture() -> None:
    # In a plain loop it has the values of each update; kept from a graph it has those of its step.
    step = fzero.make_train_step(make(KeepsAWeight), config(3), **AOT)
    state, _ = step(step.init(), torch.ones(2, WIDTH))
    with pytest.raises(
        fzero.CompileError, match="keeps the parameter that 'old' was in an earlier step"
    ):
        step(state, torch.ones(2, WIDTH))


class SetsAWeightEachTime(Toy):
    def odd(self, x: Tensor) -> Tensor:
        self.old = self.linear.weight.detach()
        return nn.functional.linear(x, self.old)


class TogglesFlags(Toy):
    def odd(self, x: Tensor) -> Tensor:
        self.linear.requires_grad_(False)
        x = x + self.linear(x)
        self.linear.requires_grad_(True)
        return x


class GoesOnWithItsGenerator(Toy):
    def odd(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.generator)


class KeepsATable(Toy):
    def odd(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer(
                "table", torch.arange(4.0) * torch.tensor([1.0, 2.0, 3.0, 4.0]), persistent=False
            )
        return x + self.table


class ReplacesAChild(Toy):
    """Its first forward replaces a child, and notes that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.has_replaced = nn.Tanh(), False

    def odd(self, x: Tensor) -> Tensor:
        if not self.has_replaced:
            self.act, self.has_replaced = nn.Sigmoid(), True
        return self.act(x) + self.linear(x)


class AddsAChild(Toy):
    def odd(self, x: Tensor) -> Tensor:
        if hasattr(self, "more"):
            return self.more(x) + self.linear(x)
        self.more = nn.Tanh()
        return x + self.linear(x)


class DropsAChild(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.less = nn.Tanh()

    def odd(self, x: Tensor) -> Tensor:
        if not hasattr(self, "less"):
            return x + self.linear(x)
        less = self.less
        del self.less
        return less(x) + self.linear(x)


class AsksElsewhere(Toy):
    """What does not run in a step may ask for types."""

    def is_plain(self) -> bool:
        return type(self.linear.weight) is nn.Parameter


@pytest.mark.parametrize(
    "kind",
    [
        TogglesFlags,
        GoesOnWithItsGenerator,
        KeepsATable,
        AsksElsewhere,
        SetsAWeightEachTime,
        ReplacesAChild,
        AddsAChild,
        DropsAChild,
    ],
    ids=lambda kind: kind.__name__,
)
def test_what_a_graph_repeats_trains_as_in_a_plain_loop(kind: type[Toy]) -> None:
    cfg = config(3, clip=0.0, optimizer={"type": "SGD", "params": {"lr": 0.125}})
    step, plain, losses = fzero.make_train_step(make(kind), cfg, **AOT), make(kind), []
    optimizer, state = (
        torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.125),
        step.init(),
    )
    for number in range(3):
        x = torch.full((2, WIDTH), float(number))
        state, metrics = step(state, x)
        losses.append(metrics.loss.item())
        optimizer.zero_grad()
        loss = plain(x)
        loss.backward()
        optimizer.step()
        assert losses[-1] == loss.item()
    assert torch.equal(step.gather(state)["linear.weight"], plain.linear.weight)
