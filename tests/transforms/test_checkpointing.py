"""The laws of activation checkpointing: the same numbers and collectives, and only
inputs are kept for the backward.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import optree
import pytest
import torch
from ranks import RankPool
from test_models import MODELS, text
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint as torch_checkpoint,
    create_selective_checkpoint_contexts,
)
from training import Block, Odd, Plain, adamw, config, make, part, tokens, train_plainly, vectors

import fzero
from fzero.config.config import Config, ConfigError
from fzero.plans.units import blocks_of
from fzero.transforms.checkpointing import Moves, choose_modules, host_moves

WIDTH = 16


@dataclass
class Output:
    hidden: Tensor
    extras: tuple[Tensor, int]


class Peculiar(nn.Module):
    """A block with dropout, moving buffers, and arguments and results of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH)
        # its buffers enter its output
        self.down = nn.utils.parametrizations.spectral_norm(nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.num_runs = 0

    def forward(
        self,
        pair: tuple[Tensor, str],
        seen: list[Tensor],
        *,
        mask: Tensor,
        scale: Tensor,
        options: dict[str, Any],
    ) -> Output:
        self.num_runs += 1
        self.calls.add_(1)
        hidden, kind = pair
        seen.append(hidden)
        out = self.down(self.dropout(torch.relu(self.norm(self.up(hidden)))))
        out = hidden + options["sign"] * scale * mask * out / self.calls.clone() / len(seen)
        return Output(out if kind == "odd" else out.tanh(), (hidden.sum(), len(seen)))


class Nested(nn.Module):
    """Blocks that are called twice, with a parameter of another unit as an argument,
    and not always with a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, WIDTH))
        self.blocks = nn.ModuleList(Peculiar() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask, seen, extra = (x > -1).float(), [], x.new_zeros(())
        options: dict[str, Any] = {"sign": -1.0, "names": ["a", None]}
        for index in (0, 0, 1, 2, 1):
            with torch.set_grad_enabled(index != 2 or not self.training):
                out = self.blocks[index](
                    (x, "odd" if index % 2 else "even"),
                    seen,
                    mask=mask,
                    scale=self.scale,
                    options=options,
                )
            x, extra = (out.hidden if index != 2 else x + out.hidden), extra + out.extras[0]
        assert len(seen) == 5
        return nn.functional.mse_loss(self.head(x), y) + 1e-3 * extra


class Recurrent(nn.Module):
    """Blocks that the runner gives their weights in a list, with tuples as results, and
    a buffer with a graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))
        self.gates = nn.ModuleList(Gate() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, state = x[:, None].expand(-1, 5, -1), None
        for block, gate in zip(self.blocks, self.gates, strict=True):
            out, state = block(hidden, state)
            hidden = gate(gate(hidden + out))
        return nn.functional.mse_loss(hidden[:, -1], y)


class Gate(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("last", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = x * torch.sigmoid(super().forward(x)) * self.last
        self.last = torch.tanh(out.mean((0, 1)))
        return out


Run = tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


def _run(
    model: Callable[[], nn.Module], data: Callable[[int], Any], cfg: dict[str, Any], **options: Any
) -> Run:
    """Losses with gradient norms, this rank's gradients, its module buffers and random
    state, and the weights.
    """
    step = fzero.make_train_step(make(model), cfg, **options)
    state, curve = step.init(), []
    for index in range(3):
        state, metrics = step(state, part(data(index), step.rank, step.world_size))
        curve.append((metrics.loss.item(), metrics.grad_norm.item()))
    return curve, dict(state.grads), {**state.buffers, **state.rng}, step.gather(state)


def _assert_same_bits(found: Run, expected: Run) -> None:
    assert found[0] == expected[0]
    for mine, others in zip(found[1:], expected[1:], strict=True):
        assert mine.keys() == others.keys() and mine
        assert all(torch.equal(mine[key], others[key]) for key in mine)


def _with_and_without(
    model: Callable[[], nn.Module],
    data: Callable[[int], Any],
    more: dict[str, Any],
    options: dict[str, Any],
) -> list[tuple[Run, Run]]:
    cfgs = [config(stage) | more for stage in range(4)]
    plain = {key: value for key, value in options.items() if key != "checkpoint"}
    return [(_run(model, data, cfg, **options), _run(model, data, cfg, **plain)) for cfg in cfgs]


MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every unit": ({}, {"checkpoint": 1}),
    "every second unit": ({}, {"checkpoint": 2}),
    "accumulation": ({"gradient_accumulation_steps": 2, "train_batch_size": 12}, {"checkpoint": 1}),
    "negotiated": ({}, {"checkpoint": 1, "schedule": "negotiated"}),
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize(
    ("model", "data"), [(Odd, tokens), (Nested, vectors), (Recurrent, vectors)]
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_checkpointing_changes_no_bit(
    ranks: RankPool, world_size: int, model: Any, data: Any, more: str
) -> None:
    for on_rank in ranks(world_size, _with_and_without, model, data, *MORE[more]):
        for found, expected in on_rank:
            _assert_same_bits(found, expected)


def _transformer(name: str, use_cache: bool, own: bool) -> nn.Module:
    model: Any = MODELS[name]()
    model.config.use_cache = use_cache
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    if own:
        model.gradient_checkpointing_enable()
    return model


def _train_transformer(name: str, use_cache: bool, own: bool) -> list[tuple[Run, Run]]:
    maker = functools.partial(_transformer, name, use_cache, own)
    return _with_and_without(maker, text, {}, {"checkpoint": 1})[::3]


@pytest.mark.covering(0)
@pytest.mark.parametrize(("use_cache", "own"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpointing_changes_no_bit_of_a_transformer(
    ranks: RankPool, world_size: int, name: str, use_cache: bool, own: bool
) -> None:
    for on_rank in ranks(world_size, _train_transformer, name, use_cache, own):
        for found, expected in on_rank:
            _assert_same_bits(found, expected)


def test_a_cache_that_holds_something_is_refused() -> None:
    # Of two blocks only the second: the first one has put its keys and values into the cache.
    model = _transformer("llama", True, False)
    step = fzero.make_train_step(
        model, config(3), checkpoint=lambda name, _: name.endswith("layers.1")
    )
    with pytest.raises(
        ValueError, match=r"model.layers.1.*an empty DynamicCache or none.*got 7.*use_cache=False"
    ):
        step(step.init(), text(0))
    assert not [module for module in model.modules() if "forward" in module.__dict__]


# --- what runs again ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "runs"),
    [
        (None, [2, 2, 1]),
        (1, [4, 4, 1]),  # the third block runs without gradient
        (2, [4, 2, 1]),
        (3, [4, 2, 1]),
        (lambda name, module: name == "blocks.1", [2, 4, 1]),
        (lambda name, module: isinstance(module, Peculiar | nn.Linear), [4, 4, 1]),  # the outermost
        (lambda name, module: name.startswith("blocks"), [4, 4, 1]),  # a ModuleList is never called
    ],
)
def test_what_is_checkpointed_runs_twice_and_nothing_else(checkpoint: Any, runs: list[int]) -> None:
    model: Any = make(Nested)
    step = fzero.make_train_step(model, config(3), checkpoint=checkpoint)
    state, _ = step(step.init(), vectors(0))
    assert [block.num_runs for block in model.blocks] == runs
    assert [state.buffers[f"blocks.{index}.calls"].item() for index in range(3)] == [2, 2, 1]
    step.evaluate(state, vectors(0))
    assert [block.num_runs for block in model.blocks] == [
        n + m for n, m in zip(runs, (2, 2, 1), strict=True)
    ]


def test_the_configuration_says_every_how_many_units_where_the_argument_does_not() -> None:
    for more, checkpoint, runs in [
        ({"every": 2}, None, [4, 2, 1]),
        ({"every": 2}, 1, [4, 4, 1]),
        ({}, None, [2, 2, 1]),
    ]:
        model: Any = make(Nested)
        cfg = config(2) | {"activation_checkpointing": {"cpu_checkpointing": True, **more}}
        step = fzero.make_train_step(model, cfg, checkpoint=checkpoint)
        step(step.init(), vectors(0))
        assert [block.num_runs for block in model.blocks] == runs


class Counting(Block):
    """Multiplies by the number of its runs, which a buffer counts."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return super().forward(x) * self.count.clone()


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


@pytest.mark.parametrize("fails_at", [0, 2, 3])
def test_nothing_stays_on_the_model_also_after_an_error(fails_at: int) -> None:
    model: Any = make(Fails)
    first, num_runs = model.blocks[0], 0

    def own(x: Tensor) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        if num_runs == fails_at:
            raise ArithmeticError("on purpose")
        return Block.forward(first, x)

    first.forward = own  # as the hooks of other libraries do
    found = [dict(module.__dict__) for module in model.modules()]
    step = fzero.make_train_step(model, config(3), checkpoint=1)
    state = step.init()
    if fails_at == 3:
        state, _ = step(state, vectors(0))
    if fails_at:
        with pytest.raises(ArithmeticError):  # the second run is in the backward
            step(state, vectors(1))
    else:
        step(state, vectors(1))
    for module, before in zip(model.modules(), found, strict=True):
        assert module.__dict__.keys() == before.keys()
        assert all(module.__dict__[key] is before[key] for key in before if key != "training")


class Penalised(Fails):
    """A gradient penalty: blocks run again inside the forward, and again in the
    backward.
    """

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        hidden = self.blocks[2](self.blocks[1](self.blocks[0](x)))
        (slope,) = torch.autograd.grad(hidden.square().sum(), x, create_graph=True)
        return nn.functional.mse_loss(hidden, y) + 1e-3 * slope.square().sum()


class Transformed(Fails):
    """A transform of torch.func around a block, which stages 0 to 2 allow."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        slope = torch.func.grad(lambda z: self.blocks[1](z).sum())(x)
        return nn.functional.mse_loss(self.blocks[0](x) * slope, y)


@pytest.mark.parametrize(("model", "stages"), [(Penalised, range(4)), (Transformed, range(3))])
def test_gradients_inside_the_forward_are_the_same(model: Any, stages: range) -> None:
    for stage in stages:
        found, expected = (
            _run(model, vectors, config(stage), checkpoint=checkpoint) for checkpoint in (1, None)
        )
        _assert_same_bits(found, expected)


def test_a_unit_that_runs_again_inside_the_forward_is_reduced_as_early_as_otherwise() -> None:
    schedules = []
    for checkpoint in (1, None):
        step = fzero.make_train_step(make(Penalised), config(3), checkpoint=checkpoint)
        step(step.init(), vectors(0))
        schedules.append(step.schedule)
    assert schedules[0] == schedules[1]


def test_a_buffer_that_moves_for_the_first_time_in_a_later_step_is_refused_where_it_would_run_again() -> (
    None
):
    model: Any = make(Nested)
    for block in model.blocks:
        block.forward = functools.partial(_late, block)
    step = fzero.make_train_step(model, config(0), checkpoint=1)
    state, _ = step(step.init(), vectors(0))
    model.is_late = True
    for block in model.blocks:
        block.is_late = True
    with pytest.raises(
        ValueError, match=r"buffer 'blocks.1.calls': must change in the first forward or never"
    ):
        step(state, vectors(1))


def _late(block: Any, pair: tuple[Tensor, str], seen: list[Tensor], **options: Any) -> Output:
    seen.append(pair[0])
    if getattr(block, "is_late", False):
        block.calls.add_(1)
    return Output(
        torch.tanh(block.up(pair[0])[:, :WIDTH]) * (1 + block.calls.clone()), (pair[0].sum(), 1)
    )


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


@pytest.mark.parametrize("stage", [0, 3])
def test_an_input_that_is_changed_in_place_is_refused(stage: int) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), InPlace(WIDTH), InPlace(WIDTH))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    _run(model, vectors, config(stage), loss_fn=loss_fn)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation|changed in place after it was saved"
    ):
        _run(
            model,
            vectors,
            config(stage),
            loss_fn=loss_fn,
            checkpoint=lambda name, module: isinstance(module, InPlace),
        )


# --- collectives ----------------------------------------------------------------------------------


def _sent(
    model: Any, data: Any, checkpoint: int | None, schedule: Any
) -> tuple[Any, Counter[Any], list[Any]]:
    """The schedule, and what was sent in the first step and in the third."""
    log: list[fzero.comms.CommRecord] = []
    axis = replace(fzero.join(), observe=log.append)
    step = fzero.make_train_step(
        make(model), config(3), mesh=axis, checkpoint=checkpoint, schedule=schedule
    )
    state, seen = step.init(), []
    for index in range(3):
        log.clear()
        state, _ = step(state, part(data(index), step.rank, step.world_size))
        seen.append(Counter((sent.label, sent.num_elements) for sent in log))
    gathers = Counter(str(label) for label, _ in seen[2].elements() if label.purpose == "gather")
    return step.schedule, gathers, [seen[0], seen[2]]


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", ["learned", "negotiated"])
@pytest.mark.parametrize(("model", "data"), [(Plain, vectors), (Odd, tokens)])
@pytest.mark.parametrize("checkpoint", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_collectives_are_issued(
    ranks: RankPool, world_size: int, checkpoint: int, model: Any, data: Any, schedule: str
) -> None:
    found = ranks(world_size, _sent, model, data, checkpoint, schedule)
    expected = ranks(world_size, _sent, model, data, None, schedule)
    assert found == expected
    for _, gathers, _ in found:
        if model is Plain:  # the last unit of the forward is the first of the backward
            assert gathers == {f"gather blocks.{i}/float32": 2 if i < 4 else 1 for i in range(5)}


# --- reentrant checkpoints ------------------------------------------------------------------------


class Reentrant(nn.Module):
    """Reentrant checkpoints, whose backwards run inside the backward of the step, share
    units with each other.
    """

    def __init__(self, of: Literal["scale", "blocks", "nested"]) -> None:
        super().__init__()
        self.inlet, self.outlet, self.of = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), of
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.scale * self.inlet(x) if self.of == "scale" else self.inlet(x)
        for _ in range(2 if self.of == "blocks" else 1):
            for block in self.blocks:
                x = torch_checkpoint(self.inside, block, x, use_reentrant=True)
        return nn.functional.mse_loss(self.outlet(x), y)

    def inside(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.of == "nested":
            return self.scale * torch_checkpoint(block, x, use_reentrant=True)
        return self.scale * block(x) if self.of == "scale" else block(x)


def _negotiations(
    of: Any, stage: int
) -> tuple[list[int], list[tuple[float, float]], dict[str, Tensor]]:
    """The number of negotiations in each of six steps, without a warning; (loss, norm)
    of each; and the weights.
    """
    log: list[fzero.comms.CommRecord] = []
    step = fzero.make_train_step(
        make(lambda: Reentrant(of)), config(stage), mesh=replace(fzero.join(), observe=log.append)
    )
    state, counts, curve = step.init(), list[int](), list[tuple[float, float]]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in range(6):
            log.clear()
            state, metrics = step(state, part(vectors(index), step.rank, step.world_size))
            counts.append(sum(sent.label.purpose == "negotiate" for sent in log))
            curve.append((metrics.loss.item(), metrics.grad_norm.item()))
    return counts, curve, step.gather(state)


@pytest.mark.sample(2)
@pytest.mark.parametrize("of", ["scale", "blocks", "nested"])
def test_the_order_of_reentrant_checkpoints_is_learned_once_and_all_stages_give_the_same_bits(
    ranks: RankPool, of: str
) -> None:
    """Each inner backward completes the gradients of its units: a unit that several
    share is reduced once for each.
    """
    expected = train_plainly(lambda: Reentrant(of), vectors, adamw, num_steps=6)  # type: ignore[arg-type]
    first = ranks(3, _negotiations, of, 0)[0][1:]
    torch.testing.assert_close(first, expected, rtol=2e-6, atol=1e-5)
    for stage in (1, 2, 3):
        for counts, curve, weights in ranks(3, _negotiations, of, stage):
            assert counts[0] and not any(counts[1:])
            assert curve == first[0] and all(
                torch.equal(weights[name], first[1][name]) for name in weights
            )


# --- bytes kept for the backward ------------------------------------------------------------------


class Made(TorchDispatchMode):
    """Knows the storages that were made inside, and counts the bytes of those alive."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            t.untyped_storage().data_ptr()
            for t in optree.tree_leaves((args, kwargs or {}))
            if isinstance(t, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in optree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in inputs:
                storage = tensor.untyped_storage()
                self._known[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self, but: Callable[[int], bool] = lambda address: False) -> int:
        return sum(
            nbytes
            for address, (ref, nbytes) in self._known.items()
            if not ref.expired() and not but(address)
        )


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


NUM_BLOCKS, NUM_ROWS = 6, 20


def _kept(stage: int, *, but: Callable[[int], bool] = lambda address: False, **options: Any) -> int:
    """The bytes that a forward leaves alive, less those at addresses of which `but` is
    true.
    """
    kept: list[int] = []

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with Made() as made:
            loss = model(batch[0]).square().mean()
        kept.append(made.alive(but))
        return loss

    cfg = config(stage) | options.pop("more", {})
    step = fzero.make_train_step(make(Stack), cfg, loss_fn=loss_fn, **options)
    step(step.init(), vectors(0, NUM_ROWS, WIDTH))
    return kept[0]


# A block keeps its input, two statistics of its norm for each row, and the inputs of `up`, of gelu
# and of `down`. The first block's input is the batch, which was there before; the loss keeps the
# last block's output, and is 4 bytes.
OF_A_BLOCK = 4 * NUM_ROWS * (WIDTH + 2 + WIDTH + 3 * WIDTH + 3 * WIDTH)
OF_AN_INPUT = 4 * NUM_ROWS * WIDTH


@pytest.mark.parametrize("stage", [0, 3])
def test_only_the_inputs_of_checkpointed_units_are_kept_for_the_backward(stage: int) -> None:
    assert _kept(stage) == NUM_BLOCKS * OF_A_BLOCK + 4
    assert _kept(stage, checkpoint=1) == NUM_BLOCKS * OF_AN_INPUT + 4
    assert _kept(stage, checkpoint=2) == NUM_BLOCKS // 2 * (OF_AN_INPUT + OF_A_BLOCK) + 4
    assert (
        _kept(stage, more={"activation_checkpointing": {"every": 1}})
        == NUM_BLOCKS * OF_AN_INPUT + 4
    )
    assert _kept(stage, more={"activation_checkpointing": {}}) == NUM_BLOCKS * OF_A_BLOCK + 4


# --- inputs in host memory ------------------------------------------------------------------------


class Host:
    """Stands for host memory: copies, which it knows by their addresses."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.num_back = 0

    def away(self, x: Tensor) -> Tensor:
        self.kept.append(x.clone())
        return self.kept[-1]

    def back(self, x: Tensor) -> Tensor:
        self.num_back += 1
        return x.clone()

    def holds(self, address: int) -> bool:
        return any(tensor.untyped_storage().data_ptr() == address for tensor in self.kept)


CPU_CHECKPOINTING = {"activation_checkpointing": {"cpu_checkpointing": True}}


@contextmanager
def _host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    host = Host()
    monkeypatch.setattr(
        "fzero.transforms.checkpointing.host_moves", lambda device: Moves(host.away, host.back)
    )
    yield host


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("model", "data"), [(Odd, tokens), (Nested, vectors), (Penalised, vectors)]
)
def test_inputs_in_host_memory_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, model: Any, data: Any, stage: int
) -> None:
    expected = _run(model, data, config(stage))
    with _host(monkeypatch) as host:
        found = _run(model, data, config(stage) | CPU_CHECKPOINTING, checkpoint=1)
    assert host.num_back >= len(host.kept) > 0
    assert all(tensor.requires_grad for tensor in host.kept)
    _assert_same_bits(found, expected)


def test_inputs_in_host_memory_are_kept_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with _host(monkeypatch) as host:
        kept = _kept(3, but=host.holds, checkpoint=1, more=CPU_CHECKPOINTING)
    # The first input, which is the batch, needs no gradient and stays; the loss keeps the last
    # output.
    assert len(host.kept) == NUM_BLOCKS - 1
    assert kept == OF_AN_INPUT + 4


def test_on_the_cpu_inputs_stay_and_without_checkpointing_nothing_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert host_moves(torch.device("cpu")) is None
    with _host(monkeypatch) as host:
        _run(Odd, tokens, config(3) | CPU_CHECKPOINTING)
    assert not host.kept


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [0, -1, True, False, 1.0, "every"])
def test_a_wrong_choice_is_refused(checkpoint: Any) -> None:
    with pytest.raises(
        ValueError, match=r"checkpoint: must be a positive integer .* got .*; pass 1 for every unit"
    ):
        fzero.make_train_step(make(Plain), config(3), checkpoint=checkpoint)


def test_a_function_that_matches_nothing_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"checkpoint: its function must be true of a module of Plain and is true of none",
    ):
        fzero.make_train_step(
            make(Plain), config(3), checkpoint=lambda name, module: name == "blocks.9"
        )


@pytest.mark.parametrize(
    ("field", "options"),
    [("checkpoint", {"checkpoint": 1}), ("activation_checkpointing.every", {})],
)
def test_a_model_without_blocks_is_refused(field: str, options: dict[str, Any]) -> None:
    cfg = config(3) | {"activation_checkpointing": {"every": 1}}
    with pytest.raises(
        ValueError, match=rf"{field}: needs units that are one module, got 1 .* no repeated blocks"
    ):
        fzero.make_train_step(nn.Sequential(nn.Linear(4, 4)), cfg, **options)


def test_modules_named_as_units_are_checkpointed() -> None:
    assert choose_modules(make(Odd), 1, blocks=["embed", "blocks", "norm"]) == ("embed", "norm")
    step = fzero.make_train_step(make(Odd), config(3), units=["blocks.*"], checkpoint=2)
    assert step.spec.changes.recomputed == ("blocks.0", "blocks.2")


def _differs(rank_dependent: bool) -> str:
    rank = fzero.join().rank
    try:
        fzero.make_train_step(make(Plain), config(3), checkpoint=1 + rank * rank_dependent)
    except fzero.runtime.MismatchError as error:
        return str(error)
    return ""


def test_ranks_must_checkpoint_the_same(ranks: RankPool) -> None:
    assert ranks(2, _differs, False) == ["", ""]
    for message in ranks(2, _differs, True):
        assert (
            "'checkpoint' is 'blocks.0, blocks.1, blocks.2, blocks.3, blocks.4' on rank 0"
            in message
        )


def test_the_rest_of_deepspeeds_block_is_read() -> None:
    block = {
        "partition_activations": False,
        "contiguous_memory_optimization": False,
        "cpu_checkpointing": True,
        "synchronize_checkpoint_boundary": True,
        "profile": True,
        "number_checkpoints": 4,
    }
    cfg = Config.load({"activation_checkpointing": block})
    assert (
        cfg.activation_checkpointing.every is None
        and cfg.activation_checkpointing.cpu_checkpointing
    )
    assert {note.key.rpartition(".")[2] for note in cfg.notes if note.kind == "accepted"} == {
        "synchronize_checkpoint_boundary", "profile", "number_checkpoints",
    }  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"activation_checkpointing.every: must be at least 1, got 0"
    ):
        Config.load({"activation_checkpointing": {"every": 0}})


class Selective(Plain):
    """Keeps the products of its blocks, and computes the rest again."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        contexts = functools.partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
        )
        for block in self.blocks:
            x = torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return nn.functional.mse_loss(x, y)


def test_selective_checkpointing_of_the_models_own_changes_no_bit_in_any_stage() -> None:
    losses = []
    for model, stage in ((Plain, 3), (Selective, 2), (Selective, 3)):
        simulated = fzero.simulate(
            fzero.make_train_step(make(model), config(stage)), 2, by="lockstep"
        )
        state, batch = simulated.init(), tuple(torch.stack(x.chunk(2)) for x in vectors(0))
        for _ in range(2):
            state, metrics = simulated(state, batch)
        losses.append(metrics.loss)
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_members_of_a_list_that_are_sequentials_are_units_and_checkpointed() -> None:
    def stack(*members: nn.Module) -> nn.Module:
        return nn.Sequential(*members)

    def layer() -> nn.Module:
        return stack(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))

    listed = nn.ModuleList([layer(), layer(), stack(nn.Linear(4, 4))])
    assert [unit.name for unit in fzero.plan(listed, config(3), world_size=2).units] == [
        "0",
        "1",
        "2",
    ]
    assert choose_modules(listed, 1, blocks=blocks_of(listed)) == ("0", "1", "2")
    assert blocks_of(stack(layer(), layer())) == ["0", "1"]
    # Neither a list that is never called, nor parts of a model that are not alike.
    assert blocks_of(nn.ModuleList([nn.ModuleList([layer(), layer()])])) == ["0.0", "0.1"]
    assert blocks_of(stack(stack(nn.Embedding(4, 4)), stack(nn.Linear(4, 4), nn.Linear(4, 4)))) == [
        "1.0",
        "1.1",
    ]


def test_members_of_a_dict_with_a_sibling_of_their_class_are_units_and_checkpointed() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    experts = nn.ModuleDict(
        {"gate": nn.Linear(4, 2), "math": layer(), "code": layer(), "one": nn.Sequential(layer())}
    )
    model = nn.ModuleDict(
        {"experts": experts, "norms": nn.ModuleDict({name: nn.LayerNorm(4) for name in "ab"})}
    )
    found = ["experts.math", "experts.code", "experts.one"]
    assert blocks_of(model) == found
    units = [unit.name for unit in fzero.plan(model, config(3), world_size=2).units]
    assert units == ["experts.gate", *found, "norms.a..norms.b"]
    assert choose_modules(model, 1, blocks=blocks_of(model)) == tuple(found)
    # A GPT-2 keeps all that it has in one dict.
    stem, blocks = (
        {name: nn.Embedding(9, 4) for name in ("wte", "wpe")},
        nn.ModuleList([layer(), layer()]),
    )
    assert blocks_of(nn.ModuleDict({**stem, "h": blocks, "ln_f": nn.LayerNorm(4)})) == [
        "h.0",
        "h.1",
    ]
    sides = nn.ModuleDict(
        {name: nn.Sequential(layer(), layer()) for name in ("encoder", "decoder")}
    )
    assert blocks_of(sides) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
