"""The compiled step on models that nobody here wrote: its numbers are the eager step's,
over many steps, in all dtypes.

Two laws. With SGD and a learning rate that is a power of two the arithmetic is the
same, and so are the bits. With AdamW the graph has a formula where the eager step has a
fused kernel, and what its other roundings may do is measured (`_nudged`).
"""

from __future__ import annotations

import importlib
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from graphs import captures
from ranks import RankPool
from test_compiled import AOT, SGD, _differences
from test_models import LAYERS, MODELS, NUM_CLASSES, OF_TEXT, WIDTHS, images, text, tiny
from test_ordinary import CASES
from test_rank_death import BAD_STEP, Job, assert_ends_with_collective_error
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import VOCABULARY, Odd, Plain, config, make, part, tokens, train, vectors

import fzero
from fzero.optim.adam_kernels import AdamState

EXAMPLES = Path(__file__).parents[2] / "examples"


# --- models ---------------------------------------------------------------------------------------


def without_kernel(make_model: Callable[[], Any]) -> Callable[[], nn.Module]:
    """The model with attention written out. With PyTorch's kernel it makes a mask where
    it finds that it is traced, and none elsewhere, and another kernel runs."""

    def made() -> nn.Module:
        model = make_model()
        model.config._attn_implementation = "eager"
        return model  # type: ignore[no-any-return]

    return made


CLASSES = "single_label_classification"
"""Else the model finds it out in its first forward and keeps it, and is captured again
for that.
"""


def gpt() -> nn.Module:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    from gpt import GPT, SIZES  # type: ignore[import-not-found]

    return GPT(SIZES["tiny"])  # type: ignore[no-any-return]


TRIED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "llama": (without_kernel(MODELS["llama"]), text),
    "bert": (MODELS["bert"], text),
    "t5": (MODELS["t5"], text),
    "vit": (
        tiny(
            "ViTForImageClassification", hidden_size=16, intermediate_size=24, image_size=16,
            patch_size=8, num_labels=NUM_CLASSES, problem_type=CLASSES, **LAYERS,
        ),
        images,
    ),
    "gpt": (gpt, tokens),
    "gpt2": (MODELS["gpt2"], text),  # ties its embeddings
}  # fmt: skip


# Held out: used nowhere else in these tests.

SMALL: dict[str, Any] = OF_TEXT | LAYERS | WIDTHS


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(self.lstm(self.embed(x))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


class Normed(nn.Module):
    """Batch statistics and dropout, of a half: PyTorch's own kernel rounds other
    factors than 2 to 16 bits, a graph not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 24), nn.GELU(), nn.BatchNorm1d(24), nn.Dropout(0.5), nn.Linear(24, 16)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


HELD_OUT: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "gpt_neox": (tiny("GPTNeoXForCausalLM", **SMALL), text),
    "mistral": (tiny("MistralForCausalLM", **SMALL, num_key_value_heads=1, sliding_window=4), text),
    "mixtral": (
        without_kernel(
            tiny(
                "MixtralForCausalLM", **SMALL, num_key_value_heads=1, num_local_experts=4,
                num_experts_per_tok=2,
            )
        ),
        text,
    ),
    "convnext": (
        tiny(
            "ConvNextForImageClassification", hidden_sizes=[8, 12], depths=[1, 1], num_stages=2,
            patch_size=2, image_size=16, num_labels=NUM_CLASSES, problem_type=CLASSES,
        ),
        images,
    ),
    "recurrent": (Recurrent, tokens),
    "normed": (Normed, vectors),
}  # fmt: skip


# --- one graph, the same bits ---------------------------------------------------------------------


def _one_graph(name: str, stage: int) -> tuple[tuple[float, float], int]:
    with captures() as graphs:
        return _differences(*TRIED[name], config(stage, optimizer=SGD)), len(graphs)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("name", "stage"), [("gpt2", 3), *product(["llama", "bert", "t5", "vit", "gpt"], range(4))]
)
def test_a_model_is_one_graph_and_gives_the_eager_step_s_bits(
    ranks: RankPool, name: str, stage: int
) -> None:
    assert ranks(2, _one_graph, name, stage) == [((0.0, 0.0), 1)] * 2


# --- agreement over many steps --------------------------------------------------------------------

NUM_STEPS, SEEDS = 20, (1, 2, 3)
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True, "auto_cast": True}, "data_types": {"buffer_dtype": "bf16"}},
    "fp16": {
        "fp16": {
            "enabled": True,
            "auto_cast": True,
            "initial_scale_power": 6,
            "loss_scale_window": 6,
        },
        "data_types": {"buffer_dtype": "fp16"},
    },
    "pure bf16": {
        "bf16": {"enabled": True, "auto_cast": True, "bf16_master_weights_and_grads": True},
        "data_types": {"buffer_dtype": "bf16"},
    },
}
# All pairs of stage and dtype, and all models whose arithmetic is the same: PyTorch's kernel of an
# LSTM cannot be traced.
CASES_OF_SGD = [
    (name, stage, dtype)
    for stage in (3, 2, 1, 0)
    for dtype, name in zip(
        DTYPES, islice(cycle(["gpt_neox", "normed", "mixtral", "convnext", "mistral"]), stage, None)
    )
]
CASES_OF_ADAMW = [
    ("gpt_neox", 0, "fp32"),
    ("mistral", 1, "bf16"),
    ("mixtral", 2, "fp16"),
    ("convnext", 3, "pure bf16"),
    ("recurrent", 3, "fp32"),
    ("normed", 2, "bf16"),
    ("gpt_neox", 3, "fp16"),
    ("mistral", 0, "pure bf16"),
]
UNIT = 2.0**-24
"""The relative error of one rounding in fp32, in which every update is computed."""


def _nudge(x: Tensor, seed: int, num_units: int = 4) -> Tensor:
    """Some units more or less in every element: which, tells a hash of its bits, so
    that all ranks and stages do alike.
    """
    up = (x.view(torch.int32).long() * 2654435761 + seed * 40503 >> 13) & 1
    return x * (1 + num_units * UNIT * (2 * up - 1).to(x.dtype))


def _nudged(seed: int) -> Callable[[Any], fzero.Transform]:
    """AdamW with larger errors of rounding than its formula in a graph makes.

    That makes the parameter and each moment from the old one and the gradient with at
    most three roundings, and the step from these with six. Four units of both moments,
    the gradient and the parameter, at once and in each step, are more.
    """

    def made(lr: Any) -> fzero.Transform:
        own = fzero.adamw(lr, weight_decay=0.1)

        def update(grad: Tensor, param: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
            grad, param, (step, first, second) = own.update(_nudge(grad, seed), param, state)
            return (
                grad,
                _nudge(param, seed),
                AdamState(step, _nudge(first, seed), _nudge(second, seed)),
            )

        return fzero.Transform(own.init, update, own.specs)

    return made


def _trained(model: Any, data: Any, cfg: Any, **options: Any) -> dict[str, Tensor]:
    """The weights after many steps, and the losses and norms on the way."""
    curve, weights = train(model, data, cfg, num_steps=NUM_STEPS, **options)
    losses, norms = torch.tensor(curve, dtype=torch.float64).T
    return {"losses": losses, "norms": norms, **weights}


class _EveryResultNudged(TorchDispatchMode):
    """Inside, every fp32 tensor that an operator makes is nudged by its last bit,
    forward and backward.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        makes = not any(out.alias_info for out in func._schema.returns) and "empty" not in str(func)
        nudges = lambda x: makes and isinstance(x, Tensor) and x.dtype == torch.float32  # noqa: E731
        return optree.tree_map(
            lambda x: _nudge(x, self.seed, 2) if nudges(x) else x, result, none_is_leaf=True
        )


def _further_than_nudges(
    model: Any, data: Any, cfg: Any, compiled: dict[str, Any], *, everywhere: bool = False
) -> tuple[dict[str, tuple[float, float]], float]:
    """Which tensors are further from the eager step's than twice what nudges make of
    these; and the largest such ratio.

    Where an error goes in 20 steps depends on its sign, so that one pattern of signs
    may go further than a few others.

    Args:
        everywhere: whether the result of every operator is nudged, in place of those of
            the update.
    """
    eager = _trained(model, data, cfg)

    def distances(found: dict[str, Tensor]) -> dict[str, float]:
        return {
            name: (found[name].double() - x.double()).norm().item() for name, x in eager.items()
        }

    nudged = []
    for seed in SEEDS:
        with _EveryResultNudged(seed) if everywhere else nullcontext():
            options = {} if everywhere else {"transform": _nudged(seed)}
            nudged.append(distances(_trained(model, data, cfg, **options)))
    found = distances(_trained(model, data, cfg, **compiled))
    most = {name: max(each[name] for each in nudged) for name in found}
    ratios = [found[name] / most[name] for name in found if most[name]]
    return {name: (found[name], most[name]) for name in found if found[name] > 2 * most[name]}, max(
        ratios
    )


def _of_adamw(name: str, stage: int, dtype: str) -> tuple[dict[str, tuple[float, float]], float]:
    return _further_than_nudges(
        *HELD_OUT[name], config(stage, optimizer=ADAMW) | DTYPES[dtype], AOT
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "stage", "dtype"), CASES_OF_ADAMW)
def test_adamw_goes_no_further_from_the_eager_step_than_roundings_take_it(
    ranks: RankPool, name: str, stage: int, dtype: str
) -> None:
    for further, ratio in ranks(2, _of_adamw, name, stage, dtype):
        assert not further, ratio


def _of_sgd(name: str, stage: int, dtype: str) -> tuple[float, float]:
    return _differences(*HELD_OUT[name], config(stage, optimizer=SGD) | DTYPES[dtype], NUM_STEPS)


@pytest.mark.covering(0)
@pytest.mark.parametrize(("name", "stage", "dtype"), CASES_OF_SGD)
def test_sgd_gives_the_eager_step_s_bits_over_many_steps(
    ranks: RankPool, name: str, stage: int, dtype: str
) -> None:
    assert ranks(2, _of_sgd, name, stage, dtype) == [(0.0, 0.0)] * 2


def _by_block(name: str, stage: int, dtype: str) -> tuple[float, float]:
    cfg = config(stage, optimizer=ADAMW) | DTYPES[dtype]
    return _differences(
        *HELD_OUT[name], cfg, NUM_STEPS, compile="block", compile_backend="aot_eager"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "stage", "dtype"),
    [
        ("gpt_neox", 3, "fp32"),
        ("mistral", 2, "bf16"),
        ("gpt_neox", 1, "fp16"),
        ("mistral", 0, "pure bf16"),
    ],
)
def test_compiled_blocks_give_the_eager_step_s_bits_with_any_optimizer(
    ranks: RankPool, name: str, stage: int, dtype: str
) -> None:
    assert ranks(2, _by_block, name, stage, dtype) == [(0.0, 0.0)] * 2


def _llama_with_inductor() -> tuple[dict[str, tuple[float, float]], float]:
    cfg = config(3, optimizer=ADAMW)
    return _further_than_nudges(MODELS["llama"], text, cfg, {"compile": "step"}, everywhere=True)


@pytest.mark.nightly
def test_generated_code_for_a_llama_goes_no_further_than_roundings_take_it(ranks: RankPool) -> None:
    # Generated code adds in other orders and rounds elsewhere, in the forward and the backward,
    # too.
    for further, ratio in ranks(2, _llama_with_inductor):
        assert not further, ratio


# --- what cannot be captured ----------------------------------------------------------------------


class Fits(nn.Module):
    """A linear map of what `before` makes of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.num_calls, self.kept = 0, torch.zeros(())

    def before(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.linear(self.before(x)), y)


class Branches(Fits):
    def before(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


class Prints(Fits):
    def before(self, x: Tensor) -> Tensor:
        print(x.mean())
        return x


class Loops(Fits):
    def before(self, x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = x / 2
        return x


class Random(Fits):
    def before(self, x: Tensor) -> Tensor:
        return x * random.random()


class Mismatched(Fits):
    def before(self, x: Tensor) -> Tensor:
        return x @ x


def branching_loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(*batch)
    return loss * 0 if loss > 1e6 else loss


def _told(make_model: Callable[[], nn.Module], recwarn: Any, capfd: Any, **options: Any) -> str:
    """What a compiled step reports; it is short, and nothing else is reported."""
    step = fzero.make_train_step(make(make_model), config(0), **options, **AOT)
    state = step.init()
    recwarn.clear()
    with pytest.raises(fzero.CompileError) as raised:
        step(state, vectors(0))
    message = str(raised.value)
    assert len(message.splitlines()) <= 5 and len(message) < 1200 and "compile='block'" in message
    assert not recwarn.list and capfd.readouterr() == ("", "")
    return message


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (Branches, "return x + 1 if x.sum() > 0 else x"),
        (Prints, "print(x.mean())"),
        (Loops, "while x.norm() > 1:"),
        (Mismatched, "return x @ x"),
    ],
)
def test_an_obstacle_in_the_model_is_reported_by_file_and_line(
    model: type[nn.Module], line: str, recwarn: Any, capfd: Any
) -> None:
    message = _told(model, recwarn, capfd)
    assert re.match(re.escape(__file__) + r", line \d+: ", message) and line in message


def test_random_numbers_that_a_graph_would_hold_are_refused(recwarn: Any, capfd: Any) -> None:
    assert re.match(r"Random\n.* draws numbers from Python's random", _told(Random, recwarn, capfd))


def test_an_obstacle_in_the_loss_is_reported_by_file_and_line(recwarn: Any, capfd: Any) -> None:
    message = _told(Fits, recwarn, capfd, loss_fn=branching_loss)
    assert message.startswith(__file__) and "return loss * 0 if loss > 1e6 else loss" in message


PACKAGE = """
import torch

class Checked(torch.nn.Linear):
    def forward(self, x):
        if torch.isnan(x).any():
            raise ValueError("not a number")
        return super().forward(x)
"""


def test_an_obstacle_in_a_package_is_reported_with_the_line_of_the_model_that_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: Any, capfd: Any
) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "checked_layers.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    checked_layers = importlib.import_module("checked_layers")

    class Checking(Fits):
        def __init__(self) -> None:
            super().__init__()
            self.linear = checked_layers.Checked(16, 16)

    first, second, *_ = _told(Checking, recwarn, capfd).splitlines()
    assert "checked_layers.py, line 6: 'if torch.isnan(x).any():'" in first
    assert (
        second.startswith(f"called from {__file__}, line ")
        and "self.linear(self.before(x))" in second
    )


class Keeps(Fits):
    def before(self, x: Tensor) -> Tensor:
        self.kept = self.linear(x).mean()
        return x


def test_an_obstacle_without_a_line_names_the_model(recwarn: Any, capfd: Any) -> None:
    message = _told(Keeps, recwarn, capfd)
    assert message.startswith("Keeps\n") and "store its .detach()" in message


# --- what is captured anew ------------------------------------------------------------------------


def _num_captured(model: Callable[[], nn.Module], batches: list[Any], **keys: Any) -> list[int]:
    """How often a step had been captured, after each batch; its numbers are the eager
    step's.
    """
    steps = [
        fzero.make_train_step(make(model), config(2, optimizer=SGD) | keys, **o) for o in ({}, AOT)
    ]
    eager, compiled = (step.init() for step in steps)
    found = []
    for batch in batches:
        eager, expected = steps[0](eager, batch)
        compiled, metrics = steps[1](compiled, batch)
        torch.testing.assert_close(tuple(metrics), tuple(expected), rtol=0, atol=0, equal_nan=True)
        assert steps[1].program is not None
        found.append(len(steps[1].program.compiled.graphs))
    return found


def test_steps_and_overflows_are_never_captured_anew() -> None:
    batches = [vectors(index) for index in range(20)]
    assert _num_captured(Fits, batches) == [1] * 20
    fp16 = {
        "enabled": True,
        "auto_cast": True,
        "initial_scale_power": 16,
        "loss_scale_window": 2,
        "hysteresis": 1,
    }
    schedule = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 0.125, "warmup_num_steps": 4, "warmup_type": "linear"},
    }
    steep = [(x * 64, y * 64) for x, y in batches]
    assert _num_captured(Fits, steep, fp16=fp16, scheduler=schedule) == [1] * 20


@pytest.mark.long
def test_each_smaller_batch_is_captured_once() -> None:
    sizes = [12, 7, 12, 5, 7, 3, 5, 12, 3]
    assert _num_captured(Fits, [vectors(i, size=n) for i, n in enumerate(sizes)]) == [
        1,
        2,
        2,
        3,
        3,
        4,
        4,
        4,
        4,
    ]
    step = fzero.make_train_step(Fits(), config(2) | {"train_micro_batch_size_per_gpu": 12}, **AOT)
    with pytest.raises(ValueError, match="batch: must hold 12 samples on each rank"):
        step(step.init(), vectors(0, size=7))


def test_another_dtype_of_the_batch_is_captured_once() -> None:
    class Casts(Fits):
        def before(self, x: Tensor) -> Tensor:
            return x.float()

    batches = [
        (x.to([torch.float32, torch.float64][i % 2]), y)
        for i, (x, y) in enumerate(map(vectors, range(4)))
    ]
    assert _num_captured(Casts, batches) == [1, 2, 2, 2]


def test_another_mode_of_the_model_is_captured_once_and_counts() -> None:
    models = [make(Normed) for _ in range(2)]
    steps = [
        fzero.make_train_step(model, config(0, optimizer=SGD), **o)
        for model, o in zip(models, ({}, AOT))
    ]
    states = [step.init() for step in steps]
    for index, training in enumerate([True, False, False, True, False]):
        losses = []
        for i in range(2):
            models[i].train(training)
            states[i], metrics = steps[i](states[i], vectors(index))
            losses.append(metrics.loss)
        assert torch.equal(*losses)
    assert steps[1].program is not None and len(steps[1].program.compiled.graphs) == 2


class Counts(Fits):
    def before(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x * self.num_calls


@pytest.mark.long
def test_what_changes_in_every_step_is_reported_in_the_end(capfd: Any) -> None:
    with pytest.raises(fzero.CompileError) as raised:
        _num_captured(Counts, [vectors(index) for index in range(12)])
    message = str(raised.value)
    assert "Counts: captured 8 times" in message and "model.num_calls == " in message
    assert len(message.splitlines()) <= 5 and len(message) < 1000
    with pytest.raises(
        fzero.CompileError, match=r"leaf 0 of the batch is .*\n.*pad batches to a few shapes"
    ):
        _num_captured(Fits, [vectors(0, size=n) for n in range(2, 14)])
    assert "stack trace" not in capfd.readouterr().err


# --- what is unusual ------------------------------------------------------------------------------


def _unusual(name: str, stage: int) -> tuple[float, float]:
    case = CASES[name]
    cast = lambda index: optree.tree_map(lambda x: x.to(case.dtype or x.dtype), case.data(index))  # noqa: E731
    maker = lambda: case.model().to(case.dtype) if case.dtype else case.model()  # noqa: E731
    return _differences(
        maker, cast, config(stage, optimizer=SGD, clip=case.clip), units=case.units, **AOT
    )


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("name", "world_size", "stage"),
    [
        pytest.param("lstm", 2, 3, marks=pytest.mark.long),
        ("gru", 1, 0),
        pytest.param("two names", 2, 3, marks=pytest.mark.long),  # modules under two names
        ("buffers", 2, 2),  # of every sort, 0-d float64 among them
        pytest.param(
            "edges, each a unit", 4, 3, marks=pytest.mark.long
        ),  # units smaller than the number of ranks, zero-sized and 0-d
        ("tied ends", 2, 1),
        ("mixed dtypes", 2, 0),
    ],
)
def test_an_unusual_model_gives_the_eager_step_s_bits(
    ranks: RankPool, name: str, world_size: int, stage: int
) -> None:
    assert ranks(world_size, _unusual, name, stage) == [(0.0, 0.0)] * world_size


def _odd_in_groups(stage: int) -> tuple[float, float]:
    groups = [{"params": r"norm|bias", "weight_decay": 0.0}, {"params": r"^blocks\.1", "lr": 0.25}]
    return _differences(
        make_odd,
        named_tokens,
        config(stage, optimizer=SGD),
        param_groups=groups,
        loss_fn=weighted,
        **AOT,
    )


def make_odd() -> nn.Module:
    return Odd(width=5, num_blocks=2)


def named_tokens(index: int) -> dict[str, Tensor]:
    return dict(zip(("tokens", "targets"), tokens(index)))


def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    num_tokens = torch.tensor(batch["targets"].numel())
    return model(**batch) * num_tokens, num_tokens


@pytest.mark.long
def test_groups_ties_frozen_and_empty_parameters_with_a_weighted_loss_on_four_ranks(
    ranks: RankPool,
) -> None:
    assert ranks(4, _odd_in_groups, 3) == [(0.0, 0.0)] * 4


@pytest.mark.long
def test_a_recurrent_module_keeps_its_own_weights_and_may_lose_them() -> None:
    model = make(Recurrent)
    step = fzero.make_train_step(model, config(0), **AOT)
    state, _ = step(step.init(), tokens(0))
    assert all(
        own is weight
        for own, weight in zip(model.lstm._flat_weights, model.lstm.parameters(), strict=True)
    )
    model.to("meta")
    _, metrics = step(state, tokens(1))
    assert metrics.loss.isfinite()


# --- a rank that dies -----------------------------------------------------------------------------


def run_rank(scenario: str, stage: int, victim: int) -> None:
    """What one rank of a job runs: a step whose graph kills the victim."""
    torch.set_num_threads(1)

    num_runs = {"forward": 0, "backward": 0}

    @torch.library.custom_op("fzero_tests::strike", mutates_args=())
    def strike(x: Tensor, way: str) -> Tensor:
        num_runs[way] += 1
        if num_runs[way] > BAD_STEP and way == scenario and step.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return x.clone()

    strike.register_fake(lambda x, way: torch.empty_like(x))
    strike.register_autograd(lambda ctx, grad: (strike(grad, "backward"), None))

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        for number, block in enumerate(model.blocks):
            x = strike(block(x), "forward") if number == 2 else block(x)
        return nn.functional.mse_loss(x, y)

    step = fzero.make_train_step(make(Plain), config(stage), loss_fn=loss_of, **AOT)
    state = step.init()
    for index in range(4):
        state, _ = step(state, part(vectors(index), step.rank, step.world_size))


@pytest.mark.long
@pytest.mark.parametrize(("scenario", "stage"), [("forward", 3), ("backward", 1)])
def test_when_a_rank_is_killed_in_a_compiled_step_the_other_ends_by_itself_and_says_why(
    scenario: str, stage: int
) -> None:
    with Job(2, scenario, stage, victim=1, file=__file__) as job:
        assert job.end_of(1, timeout=120).code == -signal.SIGKILL
        assert_ends_with_collective_error(
            job, 0, 1, "its process (has ended|was killed by SIGKILL)"
        )


if __name__ == "__main__":
    run_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))


# --- generation -----------------------------------------------------------------------------------


def _generated(how: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of a GPT-2 before its step is made, after two steps, and with the
    weights of the state.
    """
    torch.manual_seed(0)
    model = MODELS["gpt2"]()
    names, prompt = set(vars(model)), text(0)["input_ids"][:2, :4]

    def generate() -> Tensor:
        with torch.no_grad():
            return model.eval().generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)  # type: ignore[operator]

    before = generate()
    step = fzero.make_train_step(
        model.train(), config(3, optimizer={"type": "SGD", "params": {"lr": 2.0}}), **how
    )
    state = step.init()
    for index in range(2):
        state, _ = step(state, text(index))
    assert set(vars(model)) == names, "the model holds nothing of the capture"
    after = generate()
    with fzero.generating(step, state):
        return before, after, generate()


@pytest.mark.long
def test_a_model_generates_as_before_when_its_step_is_a_graph() -> None:
    before, after, trained = _generated(AOT)
    assert torch.equal(before, after)
    assert torch.equal(trained, _generated({})[2])
    assert not torch.equal(trained, before), "two steps have changed what it says"
