"""The law of equal blocks: hooks and other state outside a block's code count under
`compile=` as they do in a plain loop.

Equal blocks share compiled code, and torch.compile guards no hooks. So each row of
`KINDS` changes one of three equal blocks.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations, parametrize
from training import part, train_plainly, vectors

import fzero

WIDTH, NUM_STEPS, RATE = 16, 2, 0.5


class Inner(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("absent", None)
        self.factor, self.table, self.active = 1.0, torch.ones(WIDTH), True

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = super().forward(x) * self.factor * self.table + self.shift
        return y * (scale if self.training and self.active else 0.5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.activation = Inner(), nn.LayerNorm(WIDTH), torch.tanh

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + self.activation(self.inner(self.norm(x), scale=scale))


class Blocks(nn.Module):
    def __init__(self, change: Callable[[Block], object]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, WIDTH)
        change(self.blocks[1])  # type: ignore[arg-type]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.9)
        return nn.functional.mse_loss(self.head(x), y)


# --- what is changed ------------------------------------------------------------------------------


def scaled_first(_: nn.Module, given: Any, *__: Any) -> Any:
    return (given[0] * 2, *given[1:])


def scaled_output(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output * 2


def scaled_keyword(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, {**kwargs, "scale": 0.3}


def scaled_with_keyword(_: nn.Module, __: Any, kwargs: Any, output: Tensor) -> Tensor:
    return output * kwargs["scale"]


HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda m: m.register_forward_hook(scaled_output),
    "forward with keywords": lambda m: m.register_forward_hook(
        scaled_with_keyword, with_kwargs=True
    ),
    "forward always called": lambda m: m.register_forward_hook(scaled_output, always_call=True),
    "two forward, one prepended": lambda m: [
        m.register_forward_hook(lambda m, a, o: o + 1),
        m.register_forward_hook(scaled_output, prepend=True),
    ],
    "forward pre": lambda m: m.register_forward_pre_hook(scaled_first),
    "forward pre with keywords": lambda m: m.register_forward_pre_hook(
        scaled_keyword, with_kwargs=True
    ),
    "full backward": lambda m: m.register_full_backward_hook(
        lambda m, grads, _: (grads[0] * 0.1, *grads[1:])
    ),
    "full backward pre": lambda m: m.register_full_backward_pre_hook(
        lambda m, grads: (grads[0] * 3,)
    ),
    "forward that hooks its tensor": lambda m: m.register_forward_hook(
        lambda m, a, o: o.register_hook(lambda grad: grad * 3) and None
    ),
}


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def own_forward(module: nn.Module) -> None:
    """A forward of the object, which calls that of its class: a closure over the
    module.
    """
    before, factor = module.forward, 1.5

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return before(*args, **kwargs) * factor  # type: ignore[no-any-return]

    module.forward = forward  # type: ignore[method-assign]


def own_method(module: nn.Module) -> None:
    def forward(self: Inner, x: Tensor, scale: float = 1.0) -> Tensor:
        return Inner.forward(self, x, scale) * 1.5

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


class Tripled(Inner):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale) * 3


STATE: dict[str, Callable[[Block], object]] = {
    "a number": lambda b: setattr(b.inner, "factor", 2.5),
    "a flag": lambda b: setattr(b.inner, "active", False),
    "a tensor": lambda b: setattr(b.inner, "table", torch.arange(WIDTH) / WIDTH),
    "a buffer": lambda b: b.inner.shift.copy_(torch.arange(WIDTH)),  # type: ignore[operator]
    "a buffer that was None": lambda b: setattr(b.inner, "absent", torch.ones(1)),
    "a function": lambda b: setattr(b, "activation", torch.sigmoid),
    "a closure": lambda b: setattr(
        b, "activation", (lambda factor: lambda x: torch.tanh(x) * factor)(3.0)
    ),
    "a partial": lambda b: setattr(b, "activation", partial(torch.clamp, min=0.1)),
    "the mode of a module": lambda b: b.inner.eval(),
    "a frozen parameter": lambda b: b.inner.weight.requires_grad_(False),
    "a module of another class": lambda b: setattr(b, "norm", nn.Identity()),
    "the class of a module": lambda b: setattr(b.inner, "__class__", Tripled),
    "a forward of the object, inside": lambda b: own_forward(b.inner),
    "a forward of the object": own_forward,
    "a method of the object, inside": lambda b: own_method(b.inner),
    "a parametrization": lambda b: parametrize.register_parametrization(
        b.inner, "weight", Doubled()
    ),
    "weight norm": lambda b: parametrizations.weight_norm(b.inner),
    "old weight norm": lambda b: torch.nn.utils.weight_norm(b.inner),
    "an eps": lambda b: setattr(b.norm, "eps", 0.5),
}

KINDS: dict[str, Callable[[Block], object]] = {
    **{f"{name} on the block": hook for name, hook in HOOKS.items()},
    **{f"{name} inside": (lambda b, hook=hook: hook(b.inner)) for name, hook in HOOKS.items()},
    **STATE,
}

GLOBAL: dict[str, Callable[[], Any]] = {
    "forward": lambda: modules.register_module_forward_hook(
        lambda m, a, o: o * 1.1 if isinstance(m, Block) else None
    ),
    "forward pre": lambda: modules.register_module_forward_pre_hook(
        lambda m, a: (a[0] * 1.1, *a[1:]) if isinstance(m, Inner | Block) else None
    ),
    "full backward": lambda: modules.register_module_full_backward_hook(
        lambda m, grads, _: (
            (grads[0] * 0.7,) if isinstance(m, nn.LayerNorm) and grads[0] is not None else None
        )
    ),
    "full backward pre": lambda: modules.register_module_full_backward_pre_hook(
        lambda m, grads: (grads[0] * 1.3,) if isinstance(m, Block) else None
    ),
}
"""Hooks of all modules; each acts on some."""


# --- the law --------------------------------------------------------------------------------------


def plain(change: Callable[[Block], object]) -> list[tuple[float, float]]:
    curve, _ = train_plainly(
        lambda: Blocks(change),
        vectors,
        lambda params: torch.optim.SGD(params, lr=RATE),
        num_steps=NUM_STEPS,
        clip=1e9,
    )
    return curve


def curve(
    change: Callable[[Block], object], stage: int, **options: Any
) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    cfg = {
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "compile: 'block' compiles no block")
        step = fzero.make_train_step(Blocks(change), cfg, **options)
        state, found = step.init(), list[tuple[float, float]]()
        for index in range(NUM_STEPS):
            state, metrics = step(state, part(vectors(index), step.rank, step.world_size))
            found.append((metrics.loss.item(), metrics.grad_norm.item()))
    return found


RUNNERS: dict[str, dict[str, Any]] = {
    "eager": {},
    "block": {"compile": "block", "compile_backend": "aot_eager"},
    "step": {"compile": "step", "compile_backend": "aot_eager"},
}


def wrong(names: list[str], runner: str, stages: tuple[int, ...]) -> dict[str, str]:
    """The kinds that train otherwise than the plain loop; the sums of a batch in parts
    are rounded otherwise (1e-5).
    """
    found = {}
    for name in names:
        expected = plain(KINDS[name])
        for stage in stages:
            torch._dynamo.reset()
            try:
                got = curve(KINDS[name], stage, **RUNNERS[runner])
            except Exception as error:  # all kinds are reported together
                found[f"{name}, stage {stage}"] = f"{type(error).__name__}: {str(error)[:300]}"
                continue
            if not torch.allclose(torch.tensor(got), torch.tensor(expected), rtol=1e-5, atol=1e-6):
                found[f"{name}, stage {stage}"] = f"{got}, and plainly {expected}"
    return found


@pytest.mark.parametrize(("runner", "stride"), [("eager", 1), ("block", 3)])
def test_hooks_and_state_of_one_of_equal_blocks_count_as_in_a_plain_loop(
    runner: str, stride: int
) -> None:
    """In compiled blocks, which take seconds for each kind, every third one: the test
    below has them all.
    """
    assert not wrong(list(KINDS)[::stride], runner, (3,))


@pytest.mark.long
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_hooks_and_state_of_one_of_equal_blocks_count_in_all_stages(
    ranks: RankPool, num_ranks: int, runner: str
) -> None:
    for found in ranks(num_ranks, wrong, list(KINDS), runner, (0, 1, 2, 3)):
        assert not found


@contextmanager
def hooked(name: str) -> Iterator[None]:
    handle = GLOBAL[name]()
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.covering(1)
@pytest.mark.parametrize("runner", ["eager", "block"])
@pytest.mark.parametrize("name", GLOBAL)
def test_hooks_of_all_modules_run_once(name: str, runner: str) -> None:
    with hooked(name):
        expected, got = plain(lambda _: None), curve(lambda _: None, 3, **RUNNERS[runner])
    assert torch.allclose(torch.tensor(got), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_a_hook_that_comes_and_goes_between_steps_counts_while_it_is_there() -> None:
    """Compiled code of the steps before and after is not used in between, and nothing
    is left of it.
    """

    def curve_of(options: dict[str, Any]) -> list[float]:
        torch.manual_seed(0)
        model = Blocks(lambda _: None)
        step = fzero.make_train_step(
            model,
            {
                "optimizer": {"type": "SGD", "params": {"lr": RATE}},
                "zero_optimization": {"stage": 3},
            },
            **options,
        )
        state, losses = step.init(), []
        for index in range(6):
            handles = []
            if index % 2:
                handles += [model.blocks[1].inner.register_forward_hook(scaled_output)]  # type: ignore[union-attr]
            if index % 3:
                handles += [model.blocks[2].register_forward_hook(scaled_output)]
            state, metrics = step(state, vectors(index))
            losses.append(metrics.loss.item())
            for handle in handles:
                handle.remove()
        return losses

    with pytest.warns(UserWarning, match="compiles no block with hooks on modules inside it"):
        got = curve_of(RUNNERS["block"])
    assert got == pytest.approx(curve_of({}), rel=1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("within", [False, True])
def test_torch_compile_around_a_step_runs_the_step_as_it_is(runner: str, within: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    cfg = {"optimizer": {"type": "SGD", "params": {"lr": RATE}}, "gradient_clipping": 0.0}
    step = fzero.make_train_step(Blocks(lambda _: None), cfg, **RUNNERS[runner])
    call: Any = (lambda state, batch: step(state, batch)) if within else step
    compiled = torch.compile(call, backend="aot_eager")
    state, found = step.init(), list[float]()
    for index in range(NUM_STEPS):
        state, metrics = compiled(state, vectors(index))
        found.append(metrics.loss.item())
    assert found == pytest.approx([loss for loss, _ in plain(lambda _: None)], rel=1e-5)


class Renorming(nn.Module):
    """A block whose lookup writes into its table, which torch.compile cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.zeros(len(x), dtype=torch.int64))


def test_a_block_that_torch_compile_cannot_compile_is_named() -> None:
    model = nn.Sequential(Renorming(), Renorming())
    step = fzero.make_train_step(
        model,
        {},
        loss_fn=lambda model, x: model(x).square().mean(),
        compile="block",
        compile_backend="aot_eager",
    )
    with pytest.raises(
        fzero.CompileError,
        match=(
            r"unit '0': torch.compile cannot compile its forward: (?s:.*)Leave "
            r"compile='block' out"
        ),
    ):
        step(step.init(), torch.ones(2, 4))
