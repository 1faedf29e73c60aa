"""Ordinary models are ordinary: what PyTorch lets a model do, a train step lets it do,
in every stage alike.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import optree
import pytest
import torch
from hypothesis import given, strategies as st
from profiles import examples
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training import (
    GLOBAL_BATCH,
    VOCABULARY,
    Block,
    Odd,
    Plain,
    config,
    make,
    part,
    tokens,
    train,
    train_plainly,
    vectors,
)  # fmt: skip
from zoo.oddities import Fit, ForwardMode, Hooks, Hyper, gru

import fzero
from fzero.comms import collectives
from sharding.testing import models
from sharding.toy_models import ToyModel, ToyRecipe, make_toy_model

Curve = list[tuple[float, float]]
Weights = dict[str, Tensor]
LossFn = Callable[[nn.Module, Any], Tensor]
WIDTH, NUM_STEPS = 16, 3
# With an eps far above rounding, a gradient that differs in its last bits moves a weight by as
# little: Adam divides by the root of the second moment, and with the usual 1e-8 a gradient near
# zero is noise that becomes a whole step.
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}}


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-3, fused=True)


# --- models, each with a peculiarity --------------------------------------------------------------


def sequences(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, GLOBAL_BATCH, 5, WIDTH, generator=generator)
    return x, y


def lstm() -> nn.Module:
    return Fit(
        nn.Linear(WIDTH, WIDTH),
        nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True),
    )


class Attention(nn.Module):
    """`nn.MultiheadAttention` reads the weights of its child `out_proj` and never calls
    it.
    """

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
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.outlet = nn.Linear(WIDTH, WIDTH)
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
    """Buffers of every sort: reassigned, with a graph, part of the batch, integer, not
    persistent, None, untouched.
    """

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
    """Segments of two units each, run again in the backward; the tied ends are inside
    one of them and outside.
    """

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


class Containers(nn.Module):
    """Parameters in a list and in a dict, used through views: slices, transposed,
    expanded, complex.
    """

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(3))
        self.dict = nn.ParameterDict(
            {"z": torch.randn(WIDTH), "a": torch.randn(2), "pairs": torch.randn(9, 2)}
        )

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
        self.quantised = nn.Parameter(
            torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False
        )
        self.down, self.up = (
            nn.Parameter(torch.randn(2, WIDTH) / 4),
            nn.Parameter(torch.randn(WIDTH, 2) / 4),
        )

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
        shapes: dict[str, tuple[int, ...]] = {
            "scalar": (),
            "empty": (0, 3),
            "frozen": (5,),
            "unused": (40,),
        }
        self.parts = nn.ModuleList(
            nn.ParameterDict({name: torch.ones(shape)}) for name, shape in shapes.items()
        )
        self.parts[0].update(
            {"void": torch.zeros(0), "still": nn.Parameter(torch.zeros(0), requires_grad=False)}
        )
        self.parts[2].requires_grad_(False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scalar, empty, frozen = (
            self.parts[0]["scalar"],
            self.parts[1]["empty"],
            self.parts[2]["frozen"],
        )
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
    """Returns what it is asked to: its loss alone, first in a tuple, or under a key."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(self.linear(x), y)
        return {
            "alone": loss,
            "tuple": (loss, x),
            "key": {"x": x, "loss": loss},
            "vector": loss[None],
        }[self.how]


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
    """Operators of its own, in-place activations, and a parent that uses its children's
    weights itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.linspace(0.5, 1, WIDTH) for _ in range(2))
        self.children_ = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for weight, child in zip(self.weights, self.children_):
            x = F.linear(
                Cubed.apply(x, weight), child.weight @ self.children_[0].weight, child.bias
            ).relu_()
        return F.mse_loss(x, y)


class Holds(nn.Module):
    """Holds parameters of each block, and aliases of them, while others run, and uses
    them after all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        held = []
        for block in self.blocks:
            held.append((block.norm.weight, block.up.bias.data, block.down.weight.detach()[0]))
            x = block(x)
        for weight, bias, row in reversed(held):
            x = x * weight + bias[:WIDTH] + row[:WIDTH]
        return F.mse_loss(x, y)


# --- losses ---------------------------------------------------------------------------------------


def by_keyword(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def with_penalty(model: nn.Module, batch: Any) -> Tensor:
    """The sum over `parameters()` has a tied parameter once, the sum over all names has
    it twice.
    """
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
        per_rank: each rank computes something of its own over its batch, and so must
            the plain loop.
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
    "hooks of modules": Case(Hooks),
    "torch.func": Case(ForwardMode),
    "held parameters": Case(Holds),
    "penalty": Case(TiedEnds, loss_fn=with_penalty),
    "against itself": Case(TiedEnds, loss_fn=against_itself),
    "one unit against itself": Case(attention, sequences, loss_fn=against_itself),
    "gradient penalty": Case(Plain, loss_fn=with_gradient_penalty),
    "round robin": Case(Odd, tokens, zero={"round_robin_gradients": True}),
    "no prefetch": Case(Odd, tokens, zero={"stage3_prefetch_bucket_size": 0}),
    "small parameters whole": Case(Odd, tokens, zero={"stage3_param_persistence_threshold": 60}),
    # torch.nn.utils rounds the norm to bfloat16
    "mixed dtypes": Case(Mixed, clip=0.0, dtype=None, per_rank=True),
    "autocast": Case(Odd, tokens, loss_fn=in_autocast, dtype=None, per_rank=True),
}


def _made(case: Case, model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: model() if case.dtype is None else model().to(case.dtype)


def _cast(case: Case, batch: Any) -> Any:
    return optree.tree_map(
        lambda x: x.to(case.dtype) if case.dtype and x.is_floating_point() else x, batch
    )


def _train_case(name: str) -> list[tuple[Curve, Weights]]:
    case = CASES[name]
    loss_fn = None if case.loss_fn is by_keyword else case.loss_fn  # the step finds the loss itself
    cfgs = [config(stage, clip=case.clip, optimizer=ADAMW, **case.zero) for stage in range(4)]
    data = lambda step: _cast(case, case.data(step))  # noqa: E731
    return [
        train(
            _made(case, case.model),
            data,
            cfg,
            num_steps=NUM_STEPS,
            loss_fn=loss_fn,
            units=case.units,
        )
        for cfg in cfgs
    ]


# A third of a bfloat16 gradient is rounded, so that a plain loop can play two ranks, and not three,
# to the bit.
ON_THREE_RANKS = (
    "tied ends",
    "two names",
    "buffers",
    "checkpointed",
    "edges, each a unit",
    "penalty",
    "round robin",
)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("world_size", "name"),
    [(2, name) for name in CASES]
    + [(1, name) for name in CASES]
    + [(3, name) for name in ON_THREE_RANKS],
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
        _made(case, case.plain or case.model),
        lambda step: _cast(case, case.data(step)),
        adamw,
        num_steps=NUM_STEPS,
        clip=case.clip,
        loss_of=case.loss_fn,
        num_parts=world_size if case.per_rank else 1,
    )
    assert list(first_weights) == list(plain_weights)
    # Metrics are fp32. Weights are fp64 (most of them), and sums add in another order.
    torch.testing.assert_close(
        torch.tensor(first_curve), torch.tensor(plain_curve), rtol=1e-6, atol=1e-6
    )
    atol = 2e-6 if case.dtype is None else 1e-9
    for key, weight in first_weights.items():
        torch.testing.assert_close(
            weight.double(), plain_weights[key].double(), rtol=0, atol=atol, msg=key
        )


@pytest.mark.parametrize("how", ["alone", "tuple", "key", "vector"])
def test_the_loss_is_found_in_what_the_model_returns(how: str) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        out = model(*batch)
        return (
            out
            if how == "alone"
            else out[None if how == "vector" else "loss" if how == "key" else 0].reshape(())
        )

    maker = lambda: Returns(how)  # noqa: E731
    curve, _ = train(maker, vectors, config(3), num_steps=2)
    plain, _ = train_plainly(maker, vectors, adamw, num_steps=2, loss_of=loss_of)
    assert curve[0] == pytest.approx(plain[0], rel=1e-6)  # fp32


def _weigh_everything(model: nn.Module, batch: Any) -> Tensor:
    storages: list[StorageWeakRef] = []
    penalty = torch.zeros(())
    for param in model.parameters():
        storages = [storage for storage in storages if not storage.expired()]
        if all(storage.cdata != param.untyped_storage()._cdata for storage in storages):
            storages.append(StorageWeakRef(param.untyped_storage()))
        # The unit at hand, the one before while it is replaced, and one that gloo's own thread lets
        # go of late.
        assert len(storages) <= 3
        penalty = penalty + param.square().sum()
    return model(*batch) + penalty


def _train_weighing_everything() -> int:
    return len(train(Plain, vectors, config(3), num_steps=3, loss_fn=_weigh_everything)[0])


def test_going_through_all_parameters_holds_one_unit_at_a_time(ranks: RankPool) -> None:
    assert ranks(2, _train_weighing_everything) == [3, 3]


# --- the user's module is left alone --------------------------------------------------------------


class Peculiar(TwoNames):
    """Every sort of thing that binding touches: ties, buffers, recurrent weights,
    hooks, modes, dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.frozen_norm = nn.BatchNorm1d(WIDTH).eval()
        self.fails = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.frozen_norm(self.recurrent(self.dropout(x)[:, None])[0][:, 0])
        loss = super().forward(x, y)
        if self.fails:
            raise RuntimeError("the model fails here")
        return loss


def _everything(model: nn.Module) -> dict[str, Any]:
    """All that a module has, by identity; tensors with their values."""
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            found[f"{prefix}.{key}"] = (
                type(value),
                str(list(value)) if isinstance(value, dict) else str(value),
            )
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            grad = None if tensor is None else tensor.grad
            found[f"{prefix}.{key}"] = (
                id(tensor),
                None if tensor is None else tensor.tolist(),
                grad,
            )
        if isinstance(module, nn.RNNBase):
            found[f"{prefix}.flat"] = [id(weight) for weight in module._flat_weights]
    return found


def _process_rng() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]


@pytest.mark.parametrize("stage", range(4))
def test_the_users_module_and_random_state_are_left_as_they_were(stage: int) -> None:
    model = make(Peculiar)
    before, rng = _everything(model), _process_rng()
    step = fzero.make_train_step(model, config(stage))
    state = step.init()
    for index in range(2):
        state, _ = step(state, vectors(index))
        assert _everything(model) == before and _process_rng() == rng
    step.evaluate(state, vectors(2))
    step.gather(state)
    assert _everything(model) == before and _process_rng() == rng
    assert len(list(model.parameters())) == len(
        [n for b in step.plan.flat_buffers for n in b.layout.names]
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_an_exception_in_the_forward_leaves_the_module_the_random_state_and_the_state_good(
    stage: int,
) -> None:
    model = make(Peculiar)
    step = fzero.make_train_step(model, config(stage))
    state, _ = step(step.init(), vectors(0))
    before, rng, values = _everything(model), _process_rng(), _values(state)
    model.fails = True
    for action in (step, step.evaluate):
        with pytest.raises(RuntimeError, match="the model fails here"):
            action(state, vectors(1))
    with pytest.raises(FloatingPointError, match="the state was not updated"):
        model.fails = False
        step(state, (vectors(1)[0], vectors(1)[1] * torch.inf))
    assert _everything(model) == before and _process_rng() == rng
    _assert_equal(_values(state)._replace(grads={}), values._replace(grads={}))
    again, _ = step(state, vectors(1))
    _, other_state = _step_twice(stage)
    _assert_equal(_values(again), _values(other_state))


def _values(state: fzero.TrainState) -> fzero.TrainState:
    return optree.tree_map(torch.clone, state)


def _assert_equal(one: Any, other: Any) -> None:
    tensors, tree = optree.tree_flatten(one)
    others, other_tree = optree.tree_flatten(other)
    assert tree == other_tree
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def _step_twice(stage: int) -> tuple[fzero.TrainStep, fzero.TrainState]:
    step = fzero.make_train_step(make(Peculiar), config(stage))
    state = step.init()
    for index in range(2):
        state, _ = step(state, vectors(index))
    return step, state


def test_the_batch_is_not_written() -> None:
    step = fzero.make_train_step(make(Buffers), config(0))
    state = step.init()
    for index in range(3):
        batch = vectors(index)
        state, _ = step(state, batch)
        state.buffers["seen"].zero_()
        _assert_equal(batch, vectors(index))
    assert not any(tensor.requires_grad for tensor in optree.tree_leaves(state))


@pytest.mark.parametrize("stage", [0, 3])
def test_the_model_may_move_to_meta_after_init(stage: int) -> None:
    curves = []
    for moves in (False, True):
        model = make(Odd)
        step = fzero.make_train_step(model, config(stage))
        state = step.init()
        if moves:
            model.to("meta")
            assert all(param.is_meta for param in model.parameters())
        curve = []
        for index in range(3):
            state, metrics = step(state, tokens(index))
            curve.append((metrics.loss.item(), step.evaluate(state, tokens(9)).item()))
        curves.append((curve, step.gather(state)))
    assert curves[0][0] == curves[1][0]
    _assert_equal(curves[0][1], curves[1][1])


class Decorated(nn.Linear):
    @torch.compile
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_compiled_module_is_refused_where_it_spans_units_that_are_gathered() -> None:
    inside, itself, decorated, pair = (make(Plain) for _ in range(4))
    inside.blocks[1] = torch.compile(inside.blocks[1])  # type: ignore[assignment]
    itself.blocks[1].compile()
    decorated.blocks[1] = Decorated(16, 16)
    for model in (inside, itself, decorated):  # a unit each
        fzero.make_train_step(model, config(3), mesh=fzero.comms.AbstractAxis("data", 2))
    pair.blocks.compile()
    for model, name in ((torch.compile(make(Plain)), "the model"), (pair, "'blocks'")):
        for stage, size in ((0, 2), (2, 2), (3, 1)):
            fzero.make_train_step(model, config(stage), mesh=fzero.comms.AbstractAxis("data", size))  # type: ignore[arg-type]
        with pytest.raises(
            ValueError,
            match=rf"model: must have no module compiled .* got {name} compiled, .*units=",
        ):
            fzero.make_train_step(model, config(3), mesh=fzero.comms.AbstractAxis("data", 2))  # type: ignore[arg-type]


class CompiledParts(Plain):
    """Compiles its blocks, and a method that calls all of them."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")
        self.all_blocks = torch.compile(self.in_blocks, backend="aot_eager")

    def in_blocks(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.all_blocks(self.in_blocks(x)), y)


class PlainParts(CompiledParts):
    def __init__(self) -> None:
        Plain.__init__(self)
        self.all_blocks = self.in_blocks


def _train_parts() -> list[tuple[Curve, Weights]]:
    return [train(cls, vectors, config(3), num_steps=2) for cls in (CompiledParts, PlainParts)]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_code_that_the_model_compiles_itself_may_enter_units(ranks: RankPool) -> None:
    """A gather that torch.compile traces would be part of its graph, and look like a
    change of the parameters.
    """
    for (curve, weights), (plain_curve, plain_weights) in ranks(2, _train_parts):
        assert curve == plain_curve
        assert all(torch.equal(weights[key], plain_weights[key]) for key in plain_weights)


def test_a_hook_on_a_parameter_is_refused() -> None:
    for attach in (nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook):
        model = make(Plain)
        attach(model.blocks[1].scale, lambda x: None)
        with pytest.raises(ValueError, match=r"'blocks.1.scale': has a gradient hook"):
            fzero.make_train_step(model, config(0))


class Overwrites(nn.Module):
    """Changes in place what the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.blocks[0](x)
        squared = hidden.square()
        hidden += 1
        return F.mse_loss(self.blocks[1](squared), y)


def _said(model: type[nn.Module], stages: tuple[int, ...] = (0, 1, 2, 3)) -> list[str]:
    """What a step of each stage raises."""
    said = []
    for stage in stages:
        step = fzero.make_train_step(make(model), config(stage))
        try:
            step(step.init(), part(vectors(0), step.rank, step.world_size))
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
        else:
            said.append("nothing")
    return said


def test_changing_what_the_backward_needs_raises_in_every_stage_like_plain_autograd(
    ranks: RankPool,
) -> None:
    with pytest.raises(RuntimeError, match="inplace operation"):
        make(Overwrites)(*vectors(0)).backward()
    for world_size in (1, 2):  # the ranks raise alike, and their group is used again
        for said in ranks(world_size, _said, Overwrites):
            assert all("in place" in text or "inplace" in text for text in said), said


# --- the state is a value -------------------------------------------------------------------------


def _tries_a_step_twice(stage: int) -> None:
    step = fzero.make_train_step(make(Peculiar), config(stage), donate=False)
    batch = [part(vectors(index), step.rank, step.world_size) for index in range(2)]
    start = step.init()
    kept = _values(start)
    once, _ = step(start, batch[0])
    _assert_equal(start, kept)
    assert not {t.data_ptr() for t in optree.tree_leaves(start) if t.numel()} & {
        t.data_ptr() for t in optree.tree_leaves(once) if t.numel()
    }
    other, _ = step(start, batch[1])
    again, _ = step(start, batch[0])
    _assert_equal(again, once)
    assert any(not torch.equal(once.params[key], other.params[key]) for key in once.params)
    step.evaluate(once, batch[1])
    _assert_equal(again, once)


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 2])
def test_without_donation_a_state_stays_good_and_gives_the_same_bits_again(
    ranks: RankPool, world_size: int, stage: int
) -> None:
    ranks(world_size, _tries_a_step_twice, stage)


class Noisy(nn.Module):
    """Dropout alone decides the loss; what it kept is left in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.register_buffer("kept", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = self.dropout(torch.ones(WIDTH))
        self.kept += mask
        return F.mse_loss(self.linear(x * mask), y)


def _noise(stage: int, seed: int) -> tuple[list[float], Tensor, list[int]]:
    step = fzero.make_train_step(make(Noisy), config(stage), seed=seed)
    state, losses = step.init(), []
    same = vectors(0)
    for _ in range(3):
        state, metrics = step(state, same)
        losses.append(metrics.loss.item())
    return losses, state.buffers["kept"], state.rng["cpu"].tolist()


def test_dropout_differs_from_rank_to_rank_and_step_to_step_and_is_reproducible(
    ranks: RankPool,
) -> None:
    results = {stage: ranks(2, _noise, stage, 0) for stage in (0, 3)}
    assert results[0][0][2] != results[0][1][2], "each rank has its own random state"
    assert len(set(results[0][0][0])) == 3
    # The mean over two ranks of what was kept: with one mask for both it were 0, 2, 4 or 6, with
    # two also 1, 3 and 5.
    assert (results[0][0][1] % 2 == 1).any()
    torch.manual_seed(123)
    for repeated in (results[3], ranks(2, _noise, 0, 0)):
        for (losses, kept, rng), (first_losses, first_kept, first_rng) in zip(
            repeated, results[0], strict=True
        ):
            assert (losses, rng) == (first_losses, first_rng)
            assert torch.equal(kept, first_kept)
    assert ranks(2, _noise, 0, 1)[0][0] != results[0][0][0]


class Modes(nn.Module):
    """Behaves otherwise in evaluation mode, in every way that a module may."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.5, batch_first=True)
        self.norm, self.linear = nn.BatchNorm1d(5), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.tensor(0))
        self.norm.eval()  # frozen statistics

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm(self.attention(x))
        return F.mse_loss(self.linear(x) + (100 if self.training else 0), y)


def _evaluates(stage: int) -> tuple[float, Weights]:
    model = make(Modes)
    step = fzero.make_train_step(model, config(stage))
    state, _ = step(step.init(), part(sequences(0), step.rank, step.world_size))
    kept, modes = _values(state), [module.training for module in model.modules()]
    first = step.evaluate(state, part(sequences(1), step.rank, step.world_size))
    second = step.evaluate(state, part(sequences(1), step.rank, step.world_size))
    assert first.item() == second.item() and not first.requires_grad
    _assert_equal(state, kept)
    assert modes == [module.training for module in model.modules()] and len(set(modes)) == 2
    return first.item(), step.gather(state)


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluation_is_the_mean_loss_in_evaluation_mode_and_changes_nothing(
    ranks: RankPool, world_size: int, stage: int
) -> None:
    on_ranks = ranks(world_size, _evaluates, stage)
    plain = make(Modes, seed=1)
    plain.load_state_dict(on_ranks[0][1])
    with torch.no_grad():
        expected = plain.eval()(*sequences(1)).item()
    for loss, _ in on_ranks:
        assert loss == pytest.approx(expected, rel=1e-6)  # fp32


def _norm_statistics(stage: int, schedule: str) -> Weights:
    step = fzero.make_train_step(make(TwoNames), config(stage), schedule=schedule)
    state = step.init()
    for index in range(3):
        state, _ = step(state, part(vectors(index), step.rank, step.world_size))
    return state.buffers


@pytest.mark.parametrize("schedule", ["learned", "negotiated"])
def test_buffers_that_the_forward_changes_are_equal_on_all_ranks(
    ranks: RankPool, schedule: str
) -> None:
    # The kernel of BatchNorm does not tell that it wrote: a step that trusted version counters
    # would not notice.
    one, other = ranks(2, _norm_statistics, 0, schedule)
    _assert_equal(one, other)
    assert one["norm.num_batches_tracked"] == 6  # called under both its names
    assert one["norm.running_mean"].abs().min() > 0


def _late_statistics() -> Weights:
    model = make(TwoNames)
    step = fzero.make_train_step(model, config(0))
    model.norm.eval()
    state = step.init()
    for index in range(3):
        state, _ = step(state, part(vectors(index), step.rank, step.world_size))
        model.norm.train()
    return state.buffers


def test_statistics_that_rest_in_the_first_step_are_averaged_later(ranks: RankPool) -> None:
    one, other = ranks(2, _late_statistics)
    _assert_equal(one, other)
    assert one["norm.num_batches_tracked"] == 4  # two steps, under both its names


class Counts(nn.Module):
    """Has a buffer that moves when the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor, y: Tensor, amount: float) -> Tensor:
        if amount:
            self.count += amount
        return F.mse_loss(self.linear(x), y)


def _counts() -> list[list[float]]:
    step = fzero.make_train_step(make(Counts), config(0))
    state, seen = step.init(), []
    for index in range(4):
        x, y = part(vectors(index), step.rank, step.world_size)
        if index == 2:
            with pytest.raises(FloatingPointError):
                step(state, (x * float("nan"), y, 8.0))
            seen.append(state.buffers["count"].tolist())
        # On rank 0 alone it moves for the first time in the second step.
        state, _ = step(state, (x, y, 4.0 if step.rank == 0 and index == 1 else 0.0))
        seen.append(state.buffers["count"].tolist())
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_buffer_that_first_moves_late_and_on_one_rank_is_averaged_and_an_error_leaves_it(
    ranks: RankPool, world_size: int
) -> None:
    mean = 4.0 / world_size
    for seen in ranks(world_size, _counts):
        assert seen == [[0, 0], [mean, mean], [mean, mean], [mean, mean], [mean, mean]]


def test_float64_is_not_rounded_anywhere_in_the_state() -> None:
    model = make(Odd).double()
    step = fzero.make_train_step(model, config(3))
    gathered = step.gather(step.init())
    assert {tensor.dtype for tensor in gathered.values()} == {torch.float64}
    _assert_equal(gathered, dict(model.state_dict()))


# --- first values ---------------------------------------------------------------------------------


class Resettable(nn.Module):
    """On `meta` all of it can be initialised: each module has a `reset_parameters`;
    ends are tied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(5))
        self.norm = nn.BatchNorm1d(7)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.recurrent(self.norm(hidden))[0]
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Lives(TorchDispatchMode):
    """When each storage of floating numbers was born and had died, counted in
    operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        # by address: birth and elements
        self.alive: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self.ended: list[tuple[int, int, int]] = []  # birth, end and elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now += 1
        for address in [address for address, (ref, *_) in self.alive.items() if ref.expired()]:
            _, birth, numel = self.alive.pop(address)
            self.ended.append((birth, self.now, numel))
        out = func(*args, **(kwargs or {}))
        for tensor in optree.tree_leaves(out):
            if (
                isinstance(tensor, Tensor)
                and tensor.is_floating_point()
                and not tensor.is_meta
                and tensor.numel()
            ):
                storage = tensor.untyped_storage()
                numel = storage.nbytes() // tensor.element_size()
                self.alive.setdefault(
                    storage.data_ptr(), (StorageWeakRef(storage), self.now, numel)
                )
        return out

    def peak_beside(self, kept: set[int]) -> int:
        """The most elements alive at once in storages other than those at the addresses
        `kept`.
        """
        lives = [
            (birth, self.now + 1, numel)
            for at, (_, birth, numel) in self.alive.items()
            if at not in kept
        ]
        lives += self.ended
        return max(
            sum(n for birth, end, n in lives if birth <= now < end) for now in range(self.now + 1)
        )


def _init_on_meta(stage: int, seed: int = 0) -> Weights:
    with torch.device("meta"):
        model = Resettable()
    rng = _process_rng()
    step = fzero.make_train_step(model, config(stage), seed=seed)
    state = step.init()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert _process_rng() == rng
    return step.gather(state)


def _peak_of_init_on_meta() -> tuple[int, int, int]:
    with torch.device("meta"):
        model = Resettable()
    step = fzero.make_train_step(model, config(3))
    broadcast = collectives.broadcast
    # Gloo's own thread lets go of a tensor some time after its broadcast; what is filled is equal
    # on all ranks anyway.
    collectives.broadcast = lambda x, axis, **options: x
    gc.disable()  # what only the garbage collector would free must count as alive
    try:
        with Lives() as lives:
            state = step.init()
    finally:
        collectives.broadcast = broadcast
        gc.enable()
    peak = lives.peak_beside(
        {tensor.untyped_storage().data_ptr() for tensor in optree.tree_leaves(state)}
    )
    largest = max(sum(buffer.padded_numel for buffer in unit.buffers) for unit in step.plan.units)
    return peak, largest, sum(unit.numel for unit in step.plan.units)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_on_meta_is_filled_alike_on_any_number_of_ranks(
    ranks: RankPool, stage: int
) -> None:
    weights = _init_on_meta(stage)
    for world_size in (2, 3):
        for found in ranks(world_size, _init_on_meta, stage):
            _assert_equal(found, weights)
    other = _init_on_meta(stage, seed=1)
    assert not torch.equal(other["head.weight"], weights["head.weight"])
    first, second = (weights[f"blocks.{index}.up.weight"] for index in range(2))
    assert not torch.equal(first, second), "modules have seeds of their own"
    # nn.Embedding draws from N(0, 1), 464 values
    assert (weights["embed.weight"].std() - 1).abs() < 0.2
    assert torch.equal(weights["norm.running_var"], torch.ones(7)) and torch.equal(
        weights["head.weight"], weights["embed.weight"]
    )
    model = make(Resettable, seed=5)
    model.load_state_dict(weights, strict=True)


def test_a_model_on_meta_is_never_whole_on_a_rank(ranks: RankPool) -> None:
    for peak, largest, whole in ranks(2, _peak_of_init_on_meta):
        # Beside the state itself: one unit, once as it was filled and once as a flat buffer, and
        # this rank's half of it.
        assert largest < peak <= 2.5 * largest < whole / 2


def test_an_init_fn_fills_the_modules_on_meta() -> None:
    def fill(module: nn.Module) -> None:
        for key, param in module.named_parameters(recurse=False):
            param.fill_(len(key))
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()

    with torch.device("meta"):
        model = Resettable()
    step = fzero.make_train_step(model, config(3))
    weights = step.gather(step.init(init_fn=fill))
    for key, weight in weights.items():
        if key in dict(model.named_parameters()):
            assert (weight == len(key.rpartition(".")[2])).all()


class Bare(nn.Module):
    """Has a parameter and no `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Forgets(Bare):
    """Its `reset_parameters` leaves one parameter out."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (Bare, r"module 'body.1' \(Bare\) is on meta and has no reset_parameters; pass init_fn="),
        (
            Forgets,
            r"module 'body.1' \(Forgets\) leaves 'body.1.shift' without values; pass an init_fn=",
        ),
    ],
)
def test_a_module_on_meta_that_nothing_fills_is_named(inner: type[nn.Module], message: str) -> None:
    with torch.device("meta"):
        model = Fit(nn.Linear(3, 3), inner())
    with pytest.raises(ValueError, match=message):
        fzero.make_train_step(model, config(3)).init()


def _init_from_weights(stage: int, on_meta: bool) -> tuple[Weights, Weights]:
    given = dict(make(Resettable, seed=7).state_dict())
    if on_meta:
        with torch.device("meta"):
            model = Resettable()
    else:
        model = make(Resettable, seed=8)
    step = fzero.make_train_step(model, config(stage))
    state = step.init(given)
    found = step.gather(state)
    # may not write into what was given
    state, _ = step(state, part(tokens(0), step.rank, step.world_size))
    _assert_equal(given, dict(make(Resettable, seed=7).state_dict()))
    return found, given


@pytest.mark.covering(1)
@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_init_takes_given_weights(ranks: RankPool, world_size: int, on_meta: bool) -> None:
    for found, given_ in ranks(world_size, _init_from_weights, 3, on_meta):
        assert list(found) == list(given_)
        _assert_equal(found, given_)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"norm.weight": torch.ones(8)},
            r"'norm.weight' must have the model's shape \(7,\), got \(8,\)",
        ),
        (
            {"norm.wait": torch.ones(7)},
            r"'norm.wait' is not a parameter or buffer of Resettable \(1 such names\)",
        ),
        ({"norm.weight": None}, r"'norm.weight' is missing"),
    ],
)
def test_given_weights_that_do_not_fit_are_named(
    change: dict[str, Tensor | None], message: str
) -> None:
    weights = {**make(Resettable).state_dict(), **change}
    step = fzero.make_train_step(make(Resettable), config(0))
    with pytest.raises(ValueError, match=message):
        step.init({name: tensor for name, tensor in weights.items() if tensor is not None})


@pytest.mark.parametrize("maker", [Wrapped, Resettable, TwoNames])
def test_init_takes_what_gather_gives(maker: Callable[[], nn.Module]) -> None:
    step = fzero.make_train_step(make(maker), config(3))
    state = step.init()
    other = fzero.make_train_step(make(maker, seed=1), config(1)).init(step.gather(state))
    # alone, shards are whole
    _assert_equal({**other.params, **other.buffers}, {**state.params, **state.buffers})


def _start_unlike_others() -> tuple[Weights, Weights]:
    rank = fzero.join().rank
    model = make(Resettable, seed=rank)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(rank)
    step = fzero.make_train_step(model, config(3))
    return dict(model.state_dict()), step.gather(step.init())


def test_ranks_that_start_apart_get_rank_0s_weights_and_buffers(ranks: RankPool) -> None:
    results = ranks(3, _start_unlike_others)
    first, _ = results[0]
    assert not torch.equal(results[1][0]["head.bias"], first["head.bias"])
    for _, found in results:
        _assert_equal(found, first)


# --- random models --------------------------------------------------------------------------------

NUM_FEATURE_SAMPLES = 6


def _toy_data(features: int) -> Callable[[int], tuple[Tensor, ...]]:
    def data(step: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(step)
        return (
            torch.randn(NUM_FEATURE_SAMPLES, features, generator=generator, dtype=torch.float64),
        )

    return data


def _toy(recipe: ToyRecipe) -> Callable[[], nn.Module]:
    return lambda: make_toy_model(recipe).double()


def _train_toy(
    recipe: ToyRecipe, stages: tuple[int, ...], threshold: int
) -> list[tuple[Curve, Weights]]:
    data = _toy_data(recipe.features)
    cfgs = [
        config(stage, optimizer=ADAMW, stage3_param_persistence_threshold=threshold)
        for stage in stages
    ]
    return [train(_toy(recipe), data, cfg, num_steps=2) for cfg in cfgs]


def _assert_toys_train_alike(recipe: ToyRecipe, results: list[tuple[Curve, Weights]]) -> None:
    plain_curve, plain_weights = train_plainly(
        _toy(recipe), _toy_data(recipe.features), adamw, num_steps=2
    )
    first_curve, first_weights = results[0]
    for curve, weights in results:
        assert curve == first_curve
        assert list(weights) == list(plain_weights)
        assert all(torch.equal(weights[name], first_weights[name]) for name in weights)
    # Metrics are fp32; weights are fp64, and sums add in another order.
    torch.testing.assert_close(
        torch.tensor(first_curve), torch.tensor(plain_curve), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(first_weights, plain_weights, rtol=0, atol=1e-9)


@examples(25)
@given(model=models(), threshold=st.sampled_from([0, 5, 10**6]))
def test_any_model_trains_alike_in_all_stages_and_like_the_plain_loop(
    model: ToyModel, threshold: int
) -> None:
    _assert_toys_train_alike(model.recipe, _train_toy(model.recipe, (0, 1, 2, 3), threshold))


@pytest.mark.property
@pytest.mark.parametrize("world_size", [2, 3])
def test_any_model_trains_alike_on_several_ranks(ranks: RankPool, world_size: int) -> None:
    @examples(8)
    @given(model=models(), threshold=st.sampled_from([0, 5, 10**6]))
    def trains_alike(model: ToyModel, threshold: int) -> None:
        on_ranks = ranks(world_size, _train_toy, model.recipe, (0, 1, 2, 3), threshold)
        _assert_toys_train_alike(
            model.recipe, [result for results in on_ranks for result in results]
        )

    trains_alike()


def _train_as_made(recipe: ToyRecipe, threshold: int) -> list[tuple[Curve, Weights]]:
    def data(step: int) -> tuple[Tensor, ...]:
        return (_toy_data(recipe.features)(step)[0].float(),)

    cfgs = [
        config(stage, optimizer=ADAMW, stage3_param_persistence_threshold=threshold)
        for stage in range(4)
    ]
    return [train(lambda: make_toy_model(recipe), data, cfg, num_steps=2) for cfg in cfgs]


@pytest.mark.covering(0)
@pytest.mark.property
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_model_in_its_own_dtypes_gives_the_same_bits_in_all_stages(
    ranks: RankPool, world_size: int
) -> None:
    """Not like the plain loop: in fp32 Adam turns the rounding of a gradient of nearly
    0 into a step of `lr`.
    """

    @examples(8)
    @given(model=models(), threshold=st.sampled_from([0, 5, 10**6]))
    def same_bits(model: ToyModel, threshold: int) -> None:
        for results in ranks(world_size, _train_as_made, model.recipe, threshold):
            curve, weights = results[0]
            for other_curve, others in results[1:]:
                assert other_curve == curve
                assert all(torch.equal(others[name], weights[name]) for name in weights)

    same_bits()


def test_a_penalty_over_parameters_counts_a_tie_once_also_after_the_module_went_to_meta() -> None:
    def penalty(model: nn.Module, batch: Tensor) -> Tensor:
        return sum(param.square().sum() for param in model.parameters())  # type: ignore[return-value]

    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    step = fzero.make_train_step(model, config(3), loss_fn=penalty)
    state = step.init()
    expected = model[0].weight.detach().square().sum()
    model.to("meta")
    _, metrics = step(state, torch.zeros(1, 3))
    torch.testing.assert_close(metrics.loss, expected)


def test_a_state_dict_is_taken_as_far_as_it_goes_by_a_module_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    given = {name: torch.full(tensor.shape, 7.0) for name, tensor in model.state_dict().items()}
    del given["1.num_batches_tracked"]
    step = fzero.make_train_step(model, config(2), loss_fn=lambda model, x: model(x).sum())
    full = step.gather(step.init(given))
    assert full.pop("1.num_batches_tracked") == 0
    assert all(bool((tensor == 7).all()) for tensor in full.values())


@pytest.mark.parametrize(
    ("call", "field"), [(lambda step: step.gather(step.init(), to="rank1"), "to")]
)
def test_a_word_that_is_not_a_choice_is_reported(call: Any, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: must be"):
        call(fzero.make_train_step(nn.Linear(2, 2), config(1)))
    with pytest.raises(ValueError, match="schedule: must be"):
        fzero.make_train_step(nn.Linear(2, 2), config(1), schedule="learnt")  # type: ignore[arg-type]
