"""A law of drawn models: each trains as in a plain loop in every runner, also if it is
edited between two steps, or is refused.

A model is a chain of parts, each with a peculiarity of ordinary code. It trains on one
rank, on two or three processes, or on as many simulated ranks. `DRAWS` and `ZOO_SEED`
set how many are drawn, and from which seed. `python tests/laws/test_drawn_models.py`
prints what became of each.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import pytest
import torch
from ranks import RankError, RankPool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fzero

SEED, DRAWS = int(os.environ.get("ZOO_SEED", "0")), int(os.environ.get("DRAWS", "12"))
WIDTH, ROWS, LENGTH, STEPS = 8, 4, 3, 4
LR = 2.0**-5
"""A power of two: an update in a graph has the bits of the eager one."""


# --- parts: (rows, length, width) → the same shape ------------------------------------------------


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Checkpointed(Residual):
    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return x + out


class Reentrant(Checkpointed):
    use_reentrant = True


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x)[0]
        return out


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return out


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return out


class Adapter(nn.Module):
    """A frozen layer with a trained product of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(F.dropout(self.down(x), 0.25, self.training))
        return out


class Counting(nn.Module):
    """Buffers that a forward replaces, writes and averages."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
            with torch.no_grad():
                self.mean = 0.5 * self.mean + 0.5 * x.mean((0, 1))
        out: Tensor = self.linear(x - self.mean)
        return out


class OwnParameters(nn.Module):
    """Parameters in lists and dictionaries, one of no dimension, one that nothing
    reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(WIDTH)) for _ in range(2))
        self.shifts = nn.ParameterDict({"a.b".replace(".", "_"): nn.Parameter(torch.zeros(WIDTH))})
        self.gain, self.unused = nn.Parameter(torch.tensor(1.25)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scales[0] * self.scales[1] + self.shifts["a_b"]) * self.gain


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        return grad * weight * weight, (2 * grad * x * weight).sum((0, 1))


class ByFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Square.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


class Experts(nn.Module):
    """Two experts, of which the data choose."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum(
            (weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts)),
            start=torch.zeros_like(x),
        )


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.func.vmap(
            lambda row: torch.einsum("lw,vw->lv", row, self.linear.weight)
        )(x)
        return out + self.linear.bias


class Twice(nn.Module):
    """One module under two names, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(torch.relu(self.one(x)))
        return out


class TiedTransposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.register_forward_hook(lambda _module, _args, out: out * 0.5)
        self.linear.register_forward_pre_hook(lambda _module, args: (args[0] + 0.25,))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
    ),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "rms": lambda: nn.RMSNorm(WIDTH),
    "batch norm": Norm,
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)),
    "conv": Conv,
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "attention": lambda: Attention(0.0),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "parametrized": parametrized,
    "adapter": Adapter,
    "counting": Counting,
    "own parameters": OwnParameters,
    "function": ByFunction,
    "experts": Experts,
    "mapped": Mapped,
    "twice": Twice,
    "tied": TiedTransposed,
    "hooked": Hooked,
    "residual": lambda: Residual(nn.Linear(WIDTH, WIDTH)),
    "checkpointed": lambda: Checkpointed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
    "reentrant": lambda: Reentrant(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
}


class Chain(nn.Module):
    """A stem, parts, and a head, which may be tied to the stem."""

    def __init__(self, names: tuple[str, ...], *, is_tied: bool, repeats: int) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(PARTS[name]() for name in names)) for _ in range(repeats)
        )
        self.head = nn.Linear(WIDTH, WIDTH)
        if is_tied:
            self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


# --- the loop: losses, edits ----------------------------------------------------------------------


def squares(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def with_weights(model: nn.Module, batch: Any) -> Tensor:
    """A penalty on the model's own weights."""
    penalty = sum(
        param.square().sum() for name, param in model.named_parameters() if "head" in name
    )
    return squares(model, batch) + 2.0**-7 * penalty


def with_slope(model: nn.Module, batch: Any) -> Tensor:
    """A penalty on the gradient by the input."""
    x = batch[0].detach().requires_grad_()
    loss = F.mse_loss(model(x), batch[1])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


LOSSES = {"squares": squares, "with weights": with_weights, "with slope": with_slope}


def fill_buffers(model: Any) -> None:
    for buffer in model.buffers():
        buffer.fill_(1)


def reset_head(model: Any) -> None:
    with torch.no_grad():
        model.head.bias.fill_(0.5)


def new_head(model: Any) -> None:
    torch.manual_seed(7)
    model.head = nn.Linear(WIDTH, WIDTH)


def add_hook(model: Any) -> None:
    model.head.register_forward_hook(lambda _module, _args, out: out * 2)


def freeze(model: Any) -> None:
    model.stem.weight.requires_grad_(False)


def evaluate(model: Any) -> None:
    model.eval()


def change_activation(model: Any) -> None:
    model.head.forward = lambda x: torch.tanh(F.linear(x, model.head.weight, model.head.bias))


EDITS: dict[str, Callable[[Any], None]] = {
    "none": lambda model: None,
    "fill buffers": fill_buffers,
    "reset head": reset_head,
    "new head": new_head,
    "add hook": add_hook,
    "freeze": freeze,
    "evaluate": evaluate,
    "change activation": change_activation,
}


class Draw(NamedTuple):
    parts: tuple[str, ...]
    is_tied: bool
    repeats: int
    loss: str
    edit: str
    stage: int
    num_micro_steps: int
    api: str
    runner: str
    world_size: int
    ranks: Literal["real", "lockstep"]

    @classmethod
    def of(cls, seed: int) -> Draw:
        """A choice of everything."""
        choose = random.Random(seed)
        draw = cls(
            tuple(choose.sample(sorted(PARTS), choose.randint(1, 3))),
            is_tied=choose.random() < 0.4,
            repeats=choose.randint(1, 3),
            loss=choose.choices(sorted(LOSSES), [6, 2, 2])[0],
            edit=choose.choices([*EDITS], [8, *([1] * (len(EDITS) - 1))])[0],
            stage=choose.randrange(4),
            num_micro_steps=choose.randint(1, 2),
            api=choose.choice(["step", "step", "engine"]),
            runner=choose.choice(["eager", "block", "step", "step"]),
            world_size=choose.choice([1, 2, 2, 3]),
            ranks="real",
        )
        # simulated ranks have no engine, graphs or edits
        if draw.world_size > 1 and choose.random() < 0.4:
            draw = draw._replace(ranks="lockstep", api="step", runner="eager", edit="none")
        return draw

    def model(self) -> Chain:
        torch.manual_seed(len(self.parts))
        return Chain(self.parts, is_tied=self.is_tied, repeats=self.repeats)


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1 + rank)
    return [
        (
            torch.randn(ROWS, LENGTH, WIDTH, generator=generator),
            torch.randn(ROWS, LENGTH, WIDTH, generator=generator),
        )
        for _ in range(STEPS)
    ]


class Result(NamedTuple):
    """What a rank found: losses, weights and buffers; and the random state that it
    began with.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    rng: Tensor
    warned: tuple[str, ...] = ()


def plainly(draw: Draw, rngs: list[Tensor]) -> Result:
    """The oracle: a model for each rank, one after the other; means of gradients and
    buffers. An edit comes before step 3.
    """
    models, losses, rngs = [draw.model() for _ in rngs], list[float](), list(rngs)
    sgds = [
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR) for model in models
    ]
    for index in range(STEPS):
        loss_sum = 0.0
        for rank, model in enumerate(models):
            torch.set_rng_state(rngs[rank])
            if index == 2:
                EDITS[draw.edit](model)
                sgds[rank] = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR)
            for x, y in zip(
                *(t.chunk(draw.num_micro_steps) for t in batches(rank)[index]), strict=True
            ):
                loss = LOSSES[draw.loss](model, (x, y))
                (loss / draw.num_micro_steps).backward()
                loss_sum += loss.item() / draw.num_micro_steps / len(models)
            rngs[rank] = torch.get_rng_state()
        losses.append(loss_sum)
        for params in zip(*(model.parameters() for model in models), strict=True):
            if any(p.grad is not None for p in params):
                mean = torch.stack(
                    [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in params]
                ).mean(0)
                for p in params:
                    p.grad = mean.clone()
        with torch.no_grad():
            for buffers in zip(*(model.buffers() for model in models), strict=True):
                exact = not buffers[0].is_floating_point()
                agreed = buffers[0].clone() if exact else torch.stack([*buffers]).mean(0)
                for buffer in buffers:
                    buffer.copy_(agreed)
        for sgd in sgds:
            sgd.step()
            sgd.zero_grad()
    return Result(
        losses, {name: x.detach().clone() for name, x in models[0].state_dict().items()}, rngs[0]
    )


def config(draw: Draw) -> dict[str, Any]:
    return {
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": ROWS // draw.num_micro_steps,
        "gradient_accumulation_steps": draw.num_micro_steps,
        "zero_optimization": {"stage": draw.stage, "stage3_param_persistence_threshold": 0},
    }


def by_step(draw: Draw) -> Result:
    model = draw.model()
    how: dict[str, Any] = (
        {} if draw.runner == "eager" else {"compile": draw.runner, "compile_backend": "aot_eager"}
    )
    step = fzero.make_train_step(model, config(draw), loss_fn=LOSSES[draw.loss], **how)
    state, losses = step.init(), list[float]()
    rng = state.rng["cpu"].clone()
    for index, batch in enumerate(batches(step.rank)):
        if index == 2:
            EDITS[draw.edit](model)
        state, metrics = step(state, batch)
        losses.append(metrics.loss.item())
    return Result(losses, step.gather(state), rng)


def by_engine(draw: Draw) -> Result:
    model, losses = draw.model(), list[float]()
    engine = fzero.initialize(model=model, config=config(draw))[0]
    torch.manual_seed(3)
    rng = torch.get_rng_state()  # a script's own
    for index, batch in enumerate(batches(engine.global_rank)):
        if index == 2:
            EDITS[draw.edit](engine.module)
        loss_sum = 0.0
        for x, y in zip(*(t.chunk(draw.num_micro_steps) for t in batch), strict=True):
            loss = LOSSES[draw.loss](engine, (x, y))
            engine.backward(loss)
            engine.step()
            loss_sum += loss.item() / draw.num_micro_steps
        losses.append(loss_sum)
    return Result(losses, engine.module_state_dict(), rng)


def in_lockstep(draw: Draw) -> list[Result]:
    mesh = fzero.comms.AbstractAxis("data", draw.world_size)
    step = fzero.make_train_step(draw.model(), config(draw), loss_fn=LOSSES[draw.loss], mesh=mesh)
    ranks, losses = fzero.simulate(step, draw.world_size, by="lockstep"), list[float]()
    state = ranks.init()
    rngs = [one.rng["cpu"].clone() for one in fzero.simulation.unstacked(state, draw.world_size)]
    for batch in zip(*(batches(rank) for rank in range(draw.world_size)), strict=True):
        state, metrics = ranks(
            state, tuple(torch.stack(parts) for parts in zip(*batch, strict=True))
        )
        losses.append(metrics.loss.item())
    return [Result(losses, ranks.gather(state), rng) for rng in rngs]


def on_rank(draw: Draw) -> Result:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = by_engine(draw) if draw.api == "engine" else by_step(draw)
    said = [one for one in warned if "fzero" in str(one.filename) or "forward" in str(one.message)]
    return found._replace(warned=tuple(str(one.message).splitlines()[0] for one in said))


def run(draw: Draw, ranks: RankPool) -> list[Result]:
    """The results of all ranks. Raises the error of the first rank that raises one of
    its own.
    """
    if draw.world_size == 1:
        return [on_rank(draw)]
    if draw.ranks == "lockstep":
        return in_lockstep(draw)
    try:
        return ranks(draw.world_size, on_rank, draw)
    except RankError as error:
        own = [
            e for e in error.errors if e is not None and not isinstance(e, fzero.CollectiveError)
        ]
        raise (own or [error])[0] from None


def verdict(draw: Draw, ranks: RankPool) -> str:
    """`alike`, the refusal, or what is wrong."""
    try:
        found = run(draw, ranks)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        try:
            plainly(draw, [torch.get_rng_state()] * draw.world_size)
        except Exception as plain:
            if str(plain) == str(error):
                return f"as the plain loop: {text}"
        is_own = type(error).__module__.startswith("fzero") or "; " in text
        return f"refused: {text}" if is_own else f"WRONG, a foreign error: {text}"
    expected = plainly(draw, [one.rng for one in found])
    losses = [sum(each) / len(found) for each in zip(*(one.losses for one in found), strict=True)]
    drift = max(
        (abs(a - b) / max(abs(b), 1e-9) for a, b in zip(losses, expected.losses, strict=True)),
        default=0.0,
    )
    first, wanted = found[0].weights, expected.weights
    named = {name for name in wanted if name in first}
    far = [
        n
        for n in named
        if not torch.allclose(first[n].double(), wanted[n].double(), rtol=2e-4, atol=2e-5)
    ]
    apart = [n for n in named for one in found if not torch.equal(one.weights[n], first[n])]
    if drift < 1e-4 and not far and not apart and named == set(wanted):
        return "alike"
    warned = [line for one in found for line in one.warned]
    if warned and draw.edit != "none":
        return f"warned: {warned[0]}"
    missing = sorted(set(wanted) - named)
    return (
        f"WRONG, losses differ by {drift:.1e}, weights {far[:3]}, apart {apart[:3]}, missing "
        f"{missing[:3]}, {warned[:2]}"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(DRAWS))
def test_a_drawn_model_trains_as_in_a_plain_loop_or_is_refused(
    number: int, ranks: RankPool
) -> None:
    draw = Draw.of(1000 * SEED + number)
    found = verdict(draw, ranks)
    assert not found.startswith("WRONG"), f"{draw}: {found}"


PLAIN = {"gru", "lstm", "hooked"}
"""Parts that compile="block" runs as they are."""


@pytest.mark.parametrize("num_micro_steps", [1, 2])
@pytest.mark.parametrize("part", ["conv", *sorted({*PARTS} - {"conv"})])
@pytest.mark.sample(6)
def test_a_second_derivative_of_a_compiled_block_is_refused_by_name(
    part: str, num_micro_steps: int, ranks: RankPool
) -> None:
    draw = Draw(
        (part,), False, 2, "with slope", "none", 0, num_micro_steps, "step", "block", 1, "real"
    )
    found = verdict(draw, ranks)
    expected = (
        "alike" if part in PLAIN else "refused: ValueError: model: a gradient with create_graph"
    )
    assert found.startswith(expected), found


def main() -> None:
    pool = RankPool()
    for number in range(DRAWS):
        draw = Draw.of(1000 * SEED + number)
        print(number, verdict(draw, pool), "|", draw, flush=True)
    pool.close()


if __name__ == "__main__":
    from test_drawn_models import main as begin  # ranks import what they run from there

    begin()
