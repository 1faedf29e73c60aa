"""Ordinary models are ordinary: what PyTorch lets a model do, a train step lets it do, in every stage alike."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RankError, RankPool
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from training import (
    GLOBAL_BATCH, VOCABULARY, Block, Odd, Plain, config, make, part, tokens, train, train_plainly, vectors,
)  # fmt: skip

import fzero
from fzero import initialise
from sharding.testing import models
from sharding.toy_models import ToyModel, ToyRecipe, make_toy_model

Curve = list[tuple[float, float]]
Weights = dict[str, Tensor]
LossFn = Callable[[nn.Module, Any], Tensor]
WIDTH, NUM_STEPS = 16, 3
# With an eps far above rounding, a gradient that differs in its last bits moves a weight by as little: Adam divides by
# the root of the second moment, and with the usual 1e-8 a gradient near zero is noise that becomes a whole step.
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}}


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-3, fused=True)


# --- models, each with a peculiarity -----------------------------------------------------------------------------


class Fit(nn.Module):
    """The mean squared error of a body that maps vectors, or sequences of them, to the like."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.body(x)
        return F.mse_loss(out[0] if isinstance(out, tuple) else out, y)


def sequences(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, GLOBAL_BATCH, 5, WIDTH, generator=generator)
    return x, y


def lstm() -> nn.Module:
    return Fit(nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True))


def gru() -> nn.Module:
    return Fit(nn.Linear(WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True))


class Attention(nn.Module):
    """`nn.MultiheadAttention` reads the weights of its child `out_proj` and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.second = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, x, x, need_weights=False)[0]
        return x + self.second(x, x, x)[0]


def attention() -> nn.Module:
    return Fit(Attention())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
    return Fit(nn.TransformerEncoder(layer, 2))


class TiedEnds(nn.Module):
    """The first and the last map share a weight, with two units between them."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.outlet.weight = self.inlet.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.outlet(x), y)


class TwoNames(nn.Module):
    """Modules under two names each, called under both."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = Block(WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.outlet = self.inlet
        self.norm = nn.BatchNorm1d(WIDTH)
        self.same_norm = self.norm

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(self.inlet(x))
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.outlet(self.same_norm(x)), y)


class Buffers(nn.Module):
    """Buffers of every sort: reassigned, with a graph, part of the batch, integer, not persistent, None, untouched."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("factor", torch.tensor(1.0))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros(2, WIDTH), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0)
        self.register_buffer("edge", torch.full((2,), -torch.inf))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(self.linear(x))
        self.count += 1
        self.factor = self.factor + 0.5
        self.average = 0.9 * self.average + 0.1 * hidden.square().mean(0)
        self.seen = x[:2]
        return F.mse_loss(hidden * self.factor * self.mask + self.edge.exp().sum() + self.count, y)


class Checkpointed(nn.Module):
    """Segments of two units each, run again in the backward; the tied ends are inside one of them and outside."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.outlet.weight = self.inlet.weight

    def segment(self, x: Tensor, start: int) -> Tensor:
        for block in self.blocks[start : start + 2]:
            x = block(x)
        return x + self.outlet(x) if start else x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inlet(x)
        for start in (0, 2):
            x = checkpoint(self.segment, x, start, use_reentrant=self.reentrant)
        return F.mse_loss(self.outlet(x), y)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class Wrapped(nn.Module):
    """Blocks in checkpoint wrappers, which hide themselves from the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(checkpoint_wrapper(Block(WIDTH)) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def parametrized() -> nn.Module:
    spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return Fit(spectral, nn.Tanh(), parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))


class Lookup(nn.Module):
    sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=self.sparse)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(inputs)).flatten(0, 1), targets.flatten())


class SparseLookup(Lookup):
    sparse = True


class Hyper(nn.Module):
    """Calls a child with weights of its own making, and then with the child's."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.made = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights = {"weight": 2 * self.maker.weight, "bias": self.maker.bias + 1}
        made = torch.func.functional_call(self.made, weights, (x,))
        return F.mse_loss(self.made(made) + self.maker(x), y)


class Containers(nn.Module):
    """Parameters in a list and in a dict, used through views: slices, transposed, expanded, complex."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(3))
        self.dict = nn.ParameterDict({"z": torch.randn(WIDTH), "a": torch.randn(2), "pairs": torch.randn(9, 2)})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second, third = self.list
        x = torch.tanh(x @ first.t()) @ torch.cat([second[: WIDTH // 2], third[::2]])
        x = x * self.dict["z"] * self.dict["a"][:1].expand(WIDTH)
        pairs = torch.view_as_complex(self.dict["pairs"])
        return F.mse_loss(torch.fft.irfft(torch.fft.rfft(x) * pairs, n=WIDTH), y)


class Adapted(nn.Linear):
    """A frozen map, in int8, with a trainable one of rank 2 beside it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.quantised = nn.Parameter(torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        frozen = super().forward(x) + F.linear(x, self.quantised.to(x.dtype) / 9)
        return torch.tanh(frozen + x @ self.down.t() @ self.up.t())


def adapted() -> nn.Module:
    return Fit(*(Adapted() for _ in range(3)))


def one_trainable() -> nn.Module:
    model = Fit(*(Block(WIDTH) for _ in range(4)))
    model.requires_grad_(False)
    model.body[1].up.bias.requires_grad_(True)
    return model


class OneHuge(nn.Module):
    """One parameter has a hundred times the elements of all others together."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, 4)
        self.table = nn.Parameter(torch.randn(2000, 4) / 40)
        self.outlet = nn.Linear(2000, WIDTH, bias=False)
        self.outlet.weight.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.outlet(torch.tanh(F.linear(self.inlet(x), self.table))), y)


class Edges(nn.Module):
    """Units of nothing but a 0-d, a zero-sized, a frozen or an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        shapes: dict[str, tuple[int, ...]] = {"scalar": (), "empty": (0, 3), "frozen": (5,), "unused": (40,)}
        self.parts = nn.ModuleList(nn.ParameterDict({name: torch.ones(shape)}) for name, shape in shapes.items())
        self.parts[2].requires_grad_(False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scalar, empty, frozen = self.parts[0]["scalar"], self.parts[1]["empty"], self.parts[2]["frozen"]
        return F.mse_loss(self.linear(x) * scalar + empty.sum() + frozen.sum(), y)


@dataclass
class Output:
    prediction: Tensor
    loss: Tensor


class Keywords(nn.Module):
    """Takes keywords only, calls one block three times, and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *, inputs: Tensor, targets: Tensor) -> Output:
        for _ in range(3):
            inputs = self.block(inputs)
        prediction = self.head(inputs)
        return Output(prediction, F.mse_loss(prediction, targets))


def keywords(step: int) -> dict[str, Tensor]:
    inputs, targets = vectors(step)
    return {"inputs": inputs, "targets": targets}


class Returns(nn.Module):
    """Returns what it is told to: its loss alone, first in a tuple, or under a key."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(self.linear(x), y)
        return {"alone": loss, "tuple": (loss, x), "key": {"x": x, "loss": loss}, "vector": loss[None]}[self.how]


class Mixed(nn.Module):
    """A float32, a bfloat16 and a float16 map."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.brain = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16()
        self.half_ = nn.Linear(WIDTH, WIDTH).half()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.half_(self.brain(self.single(x).bfloat16()).half()).float(), y)


class Cubed(torch.autograd.Function):
    """An operator of the user's own, which saves a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] * weight**3, (grads[0] * x * 3 * weight**2).sum(0)


class Custom(nn.Module):
    """Operators of its own, in-place activations, and a parent that uses its children's weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.linspace(0.5, 1, WIDTH) for _ in range(2))
        self.children_ = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for weight, child in zip(self.weights, self.children_):
            x = F.linear(Cubed.apply(x, weight), child.weight @ self.children_[0].weight, child.bias).relu_()
        return F.mse_loss(x, y)


class Hooked(nn.Module):
    """Hooks of modules, on the way forward and back."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * module.up.weight[0, 0],))
        self.blocks[1].register_forward_hook(lambda module, args, out: out + module.norm.bias)
        self.blocks[2].register_full_backward_hook(lambda module, grads, outs: (0.5 * grads[0],))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


# --- losses ------------------------------------------------------------------------------------------------------


def by_keyword(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def with_penalty(model: nn.Module, batch: Any) -> Tensor:
    """The sum over `parameters()` has a tied parameter once, the sum over all names has it twice."""
    every = model.named_parameters(remove_duplicate=False)
    return (
        model(*batch)
        + 1e-2 * sum(param.square().sum() for param in model.parameters())
        + 1e-2 * sum(param.abs().sum() for name, param in every if "weight" in name)
    )


def against_itself(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Runs the model without gradients, in inference mode, and with them."""
    x, y = batch
    with torch.no_grad():
        there = model(x, y)
    with torch.inference_mode():
        assert model(x, y).item() == there.item()
    return model(x + 0.1, y) + 0.5 * model(x, y) + there


def with_gradient_penalty(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Differentiates through a gradient."""
    x, y = batch[0].clone().requires_grad_(), batch[1]
    loss = model(x, y)
    (slope,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
    return loss + slope.square().sum(-1).mean()


def in_autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(*batch).float()


class Case(NamedTuple):
    """A model, its data and loss, and how to judge it.

    Args:
        plain: the model for the plain loop, where that needs another.
        clip: largest norm of the gradient; 0 does not clip.
        dtype: None leaves it as it is.
        per_rank: each rank computes something of its own over its batch, and so must the plain loop.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int], Any] = vectors
    loss_fn: LossFn | None = None
    plain: Callable[[], nn.Module] | None = None
    units: tuple[str, ...] | None = None
    zero: Mapping[str, Any] = {}
    clip: float = 1.0
    dtype: torch.dtype | None = torch.float64
    per_rank: bool = False


CASES = {
    "lstm": Case(lstm, sequences),
    "gru": Case(gru, sequences),
    "attention": Case(attention, sequences),
    "attention cut by name": Case(attention, sequences, units=("*.first.out_proj", "*.second")),
    "encoder": Case(encoder, sequences),
    "encoder cut by name": Case(encoder, sequences, units=("*.linear1", "*.self_attn", "*.norm2")),
    "tied ends": Case(TiedEnds),
    "tied ends in one unit": Case(TiedEnds, units=("blocks",)),
    "two names": Case(TwoNames, per_rank=True),
    "buffers": Case(Buffers, per_rank=True),
    "checkpointed": Case(Checkpointed),
    "checkpointed, reentrant": Case(CheckpointedReentrant),
    "checkpoint wrappers": Case(Wrapped),
    "parametrizations": Case(parametrized),
    "sparse gradients": Case(SparseLookup, tokens, plain=Lookup),
    "functional call": Case(Hyper),
    "containers and views": Case(Containers),
    "adapters": Case(adapted),
    "one trainable": Case(one_trainable),
    "one huge": Case(OneHuge),
    "edges": Case(Edges),
    "edges, each a unit": Case(Edges, units=("parts.*", "linear")),
    "keywords and a dataclass": Case(Keywords, keywords, loss_fn=by_keyword),
    "custom operators": Case(Custom),
    "hooks of modules": Case(Hooked),
    "penalty": Case(TiedEnds, loss_fn=with_penalty),
    "against itself": Case(TiedEnds, loss_fn=against_itself),
    "one unit against itself": Case(attention, sequences, loss_fn=against_itself),
    "gradient penalty": Case(Plain, loss_fn=with_gradient_penalty),
    "round robin": Case(Odd, tokens, zero={"round_robin_gradients": True}),
    "no prefetch": Case(Odd, tokens, zero={"stage3_prefetch_bucket_size": 0}),
    "small parameters whole": Case(Odd, tokens, zero={"stage3_param_persistence_threshold": 60}),
    "mixed dtypes": Case(Mixed, clip=0.0, dtype=None, per_rank=True),  # torch.nn.utils rounds the norm to bfloat16
    "autocast": Case(Odd, tokens, loss_fn=in_autocast, dtype=None, per_rank=True),
}


def _made(case: Case, model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: model() if case.dtype is None else model().to(case.dtype)


def _cast(case: Case, batch: Any) -> Any:
    return optree.tree_map(lambda x: x.to(case.dtype) if case.dtype and x.is_floating_point() else x, batch)


def _train_case(name: str) -> list[tuple[Curve, Weights]]:
    case = CASES[name]
    loss_fn = None if case.loss_fn is by_keyword else case.loss_fn  # the step finds the loss itself
    cfgs = [config(stage, clip=case.clip, optimizer=ADAMW, **case.zero) for stage in range(4)]
    data = lambda step: _cast(case, case.data(step))  # noqa: E731
    return [
        train(_made(case, case.model), data, cfg, num_steps=NUM_STEPS, loss_fn=loss_fn, units=case.units)
        for cfg in cfgs
    ]


# A third of a bfloat16 gradient is rounded, so that a plain loop can play two ranks, and not three, to the bit.
ON_THREE_RANKS = ("tied ends", "two names", "buffers", "checkpointed", "edges, each a unit", "penalty", "round robin")


@pytest.mark.parametrize(
    ("world_size", "name"),
    [(1, name) for name in CASES] + [(2, name) for name in CASES] + [(3, name) for name in ON_THREE_RANKS],
)
def test_an_ordinary_model_trains_alike_in_all_stages_and_like_the_plain_loop(
    ranks: RankPool, world_size: int, name: str
) -> None:
    on_ranks = ranks(world_size, _train_case, name)
    first_curve, first_weights = on_ranks[0][0]
    for curve, weights in (result for results in on_ranks for result in results):
        assert curve == first_curve
        assert all(torch.equal(weights[key], first_weights[key]) for key in first_weights)
    case = CASES[name]
    plain_curve, plain_weights = train_plainly(
        _made(case, case.plain or case.model), lambda step: _cast(case, case.data(step)), adamw, num_steps=NUM_STEPS,
        clip=case.clip, loss_of=case.loss_fn, num_parts=world_size if case.per_rank else 1,
    )  # fmt: skip
    assert list(first_weights) == list(plain_weights)
    # Metrics are fp32. Weights are fp64 (most of them), and sums add in another order.
    torch.testing.assert_close(torch.tensor(first_curve), torch.tensor(plain_curve), rtol=1e-6, atol=1e-6)
    atol = 2e-6 if case.dtype is None else 1e-9
    for key, weight in first_weights.items():
        torch.testing.assert_close(weight.double(), plain_weights[key].double(), rtol=0, atol=atol, msg=key)
