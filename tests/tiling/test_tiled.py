"""A function in tiles, against the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fzero

WIDTH = 6
Function = Callable[[Tensor], Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(4 * WIDTH, WIDTH),
    )
    return nn.Sequential(*layers).double()


NET, X = mlp(), drawn(2, 8, WIDTH)
TILED = fzero.tiled(NET, 4)
PARAMS = {f"net.{name}": param.detach() for name, param in NET.named_parameters()}


class Holder(nn.Module):
    """A model whose `functional_call` gives NET other parameters."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.net, self.functions = NET, [function]

    def forward(self, x: Tensor) -> Tensor:
        return self.functions[0](x).sin().sum()


def of_params(function: Function) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    model = Holder(function)
    return lambda params, x: functional_call(model, params, (x,))


def inputs() -> list[Tensor]:
    return [X.clone().requires_grad_(), *NET.parameters()]


def mixed(grads: Any) -> Tensor:
    leaves = torch.utils._pytree.tree_leaves(grads)
    return torch.stack([x.sin().sum() for x in leaves]).sum()


def second(function: Function) -> Any:
    given = inputs()
    grads = torch.autograd.grad(function(given[0]).sin().sum(), given, create_graph=True)
    return grads, torch.autograd.grad(mixed(grads), given, materialize_grads=True)


def pair(x: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda each: torch.stack([each, 2 * each]), x)


def grads_of(function: Function, given: list[Tensor]) -> Any:
    return torch.autograd.grad(function(given[0]).sin().sum(), given)


def compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


both = (0, 1)
TRANSFORMED: dict[str, Callable[[Function], Any]] = {
    "autograd": lambda f: grads_of(f, inputs()),
    "second derivatives": second,
    "grad": lambda f: torch.func.grad(of_params(f), both)(PARAMS, X),
    "grad of grad": lambda f: torch.func.grad(
        lambda p, x: mixed(torch.func.grad(of_params(f), both)(p, x)), both
    )(PARAMS, X),
    "vmap": lambda f: torch.vmap(f)(pair(X)),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(of_params(f), both), (None, 0))(
        PARAMS, pair(X)
    ),
    "vmap of grad of models": lambda f: torch.vmap(torch.func.grad(of_params(f), both))(
        pair(PARAMS), pair(X)
    ),
    "grad of vmap": lambda f: torch.func.grad(
        lambda p, x: torch.vmap(of_params(f), (None, 0))(p, x).sum(), both
    )(PARAMS, pair(X)),
    "autograd of vmap": lambda f: grads_of(lambda x: torch.vmap(f)(pair(x)), inputs()),
    "make_fx of grad": lambda f: make_fx(torch.func.grad(of_params(f), both))(PARAMS, X)(
        PARAMS, X.cos()
    ),
    "make_fx of autograd": lambda f: make_fx(lambda x: grads_of(f, [x, *NET.parameters()]))(
        inputs()[0]
    )(inputs()[0].cos()),
    "checkpoint": lambda f: grads_of(
        lambda x: checkpoint(lambda y: f(y).cos(), x, use_reentrant=False), inputs()
    ),
    "grad of compile": lambda f: grads_of(compiled(lambda x: f(x)), inputs()),
    "compile of grad": lambda f: compiled(torch.func.grad(of_params(f), 1))(PARAMS, X),
    "no_grad": lambda f: torch.no_grad()(f)(X),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_every_transformation_gives_what_it_gives_of_the_function(name: str) -> None:
    torch.testing.assert_close(TRANSFORMED[name](TILED), TRANSFORMED[name](NET))


def test_a_transformation_may_be_the_first_that_calls_it() -> None:
    for name in ("grad", "vmap of grad", "make_fx of grad", "compile of grad"):
        found = TRANSFORMED[name](fzero.tiled(NET, 4))
        torch.testing.assert_close(found, TRANSFORMED[name](NET))


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([-3, -2, 0, 1]), st.integers(0, 99))
def test_any_shape_in_any_tiles_is_as_whole(shards: int, size: int, dim: int, seed: int) -> None:
    shape = [3, 2, WIDTH]
    shape[dim] = shards * size
    x = drawn(*shape, seed=seed).requires_grad_()
    given = [x, *NET.parameters()]
    torch.testing.assert_close(grads_of(fzero.tiled(NET, shards, dim), given), grads_of(NET, given))


def test_arguments_closures_and_values_made_outside_get_their_gradients() -> None:
    weight, shift, scale = (
        drawn(*shape, seed=seed).requires_grad_()
        for seed, shape in enumerate([(WIDTH, WIDTH), (WIDTH,), (WIDTH,)])
    )
    x = X.clone().requires_grad_()

    def of(wrap: Callable[[Any], Any]) -> Any:
        twice = 2 * scale  # not a leaf
        function = wrap(lambda t, w, *, by: F.linear(t, w).tanh() * twice + by)
        return torch.autograd.grad(
            function(x, weight, by=shift).sin().sum(), [x, weight, shift, scale]
        )

    torch.testing.assert_close(of(lambda f: fzero.tiled(f, 4)), of(lambda f: f))


def test_tensors_whose_gradients_are_one_tensor_are_summed_apart() -> None:
    x, a, b = (torch.randn(shape, requires_grad=True) for shape in ((2, 12, 4), (4,), (4,)))

    def fn(x: Tensor) -> Tensor:
        return (x * (a + b)).sin()  # autograd gives a and b the same tensor

    expected = torch.autograd.grad(fn(x).sum(), [x, a, b])
    found = torch.autograd.grad(fzero.tiled(fn, 4)(x).sum(), [x, a, b])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)  # sums of tiles, in fp32


def test_a_frozen_parameter_gets_no_gradient() -> None:
    net = mlp()
    net[0].requires_grad_(False)
    fzero.tiled(net, 4)(X).sum().backward()
    assert net[0].weight.grad is None and net[3].weight.grad is not None


class Experts(nn.Module):
    """Which expert a token gets depends on its values: tiles use different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[..., 0].round().long() % 3
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            if (places := chosen == index).any():
                out[places] = expert(x[places])
        return out


def test_tiles_may_use_different_parameters() -> None:
    torch.manual_seed(0)
    net, x = Experts().double(), X.clone().requires_grad_()
    given = [x, *net.parameters()]
    torch.testing.assert_close(grads_of(fzero.tiled(net, 8), given), grads_of(net, given))


def test_dropout_draws_the_same_numbers_in_the_backward() -> None:
    net, x = mlp(0.5), X.clone().requires_grad_()
    given = [x, *net.parameters()]

    def of(function: Function) -> Any:
        torch.manual_seed(1)
        return function(x), grads_of(function, given), torch.rand(1)

    fzero.tiled(net, 4)(x)
    tiles = fzero.tiled(net, 4)
    tiles(x)
    by_hand = of(lambda t: torch.cat([net(part) for part in t.chunk(4, 1)], 1))
    torch.testing.assert_close(of(tiles), by_hand)


class Alive(TorchDispatchMode):
    """The most elements that an operator makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.most = max(self.most, out.numel())
        return out


def test_nothing_inside_is_as_large_as_it_would_be_whole() -> None:
    x = drawn(1, 512, WIDTH).requires_grad_()
    with Alive() as alive:
        fzero.tiled(NET, 16)(x).sum().backward()
    assert alive.most == x.numel() < 512 * 4 * WIDTH


def test_gradients_add_up_in_fp32_under_half_precision() -> None:
    net, x = mlp().bfloat16(), drawn(1, 4096, WIDTH).bfloat16()
    exact = mlp()
    exact.load_state_dict(net.state_dict())
    grads_exact = torch.autograd.grad(exact(x.double()).sum(), exact[3].bias)
    fzero.tiled(net, 256)(x).sum().backward()
    found = net[3].bias.grad
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), grads_exact[0])  # 4096 is a number of bf16
    in_half = sum((torch.full((WIDTH,), 16.0) for _ in range(256)), torch.zeros(WIDTH))
    assert in_half[0] == 4096
    naive = torch.zeros(WIDTH, dtype=torch.bfloat16)
    for _ in range(4096):
        naive += 1
    assert naive[0] < 4096, "such a sum stops at 256"


def test_autocast_is_that_of_the_forward() -> None:
    net, x = mlp().float(), X.float().requires_grad_()
    given = [x, *net.parameters()]

    def of(function: Function) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = function(x)
        return out, *torch.autograd.grad(out.float().sin().sum(), given)

    found, expected = of(fzero.tiled(net, 4)), of(net)
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)  # smaller products in bf16
    torch.testing.assert_close(found[0], expected[0])


# --- bad input ------------------------------------------------------------------------------------


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum()


def hidden(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = Hidden.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x.cumsum(1),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: x.roll(1, 1),
        lambda x: F.layer_norm(x, x.shape[1:]),
    ],
    ids=["mean", "sum", "attention", "shift", "norm"],
)
def test_a_function_that_mixes_tokens_is_refused(fn: Function) -> None:
    with pytest.raises(ValueError, match=r"^tiled: .* along dimension 1 from that token alone"):
        fzero.tiled(fn, 4)(X)
    fzero.tiled(fn, 2, dim=0)(X)


def test_the_check_of_tokens_is_made_once() -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(x.shape[1])
        return x.sin()

    tiles = fzero.tiled(function, 4)
    tiles(X)
    assert calls == [8, 4, 2, 2, 2, 2]
    tiles(X)
    assert calls[6:] == [2, 2, 2, 2]


def test_a_tensor_that_only_an_autograd_function_reads_is_refused_or_an_argument() -> None:
    weight, x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True), X.clone()
    with pytest.raises(ValueError, match=r"got one of shape \(\) that only an autograd.Function"):
        fzero.tiled(lambda t: hidden(t, weight), 4)(x)
    found = torch.autograd.grad(fzero.tiled(hidden, 4)(x, weight).sin().sum(), weight)
    torch.testing.assert_close(found, torch.autograd.grad((x * weight).sin().sum(), weight))


def test_other_tensors_in_the_backward_are_refused() -> None:
    weights = [drawn(WIDTH, seed=seed).requires_grad_() for seed in range(2)]
    out = fzero.tiled(lambda x: x * weights[0], 4)(X)
    weights.reverse()
    with pytest.raises(ValueError, match="must read the same tensors in the backward as in the"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fzero.tiled(NET, 3)(X), "shards must divide the 8 tokens, got 3; pass 2, or pad"),
        (lambda: fzero.tiled(NET, 0), "shards: must be a whole number, at least 1, got 0"),
        (lambda: fzero.tiled(None, 2), "fn"),  # type: ignore[arg-type]
        (lambda: fzero.tiled(NET, 2, dim=3)(X), "a tensor with dimension 3, got 3 dimensions"),
        (lambda: fzero.tiled(NET, 2)(None), "the first argument must be a tensor"),  # type: ignore[arg-type]
        (lambda: fzero.tiled(lambda x: (x, x), 2)(X), "must return one tensor .* got a tuple"),
        (lambda: fzero.tiled(lambda x: x[:, :1], 2)(X), r"as many tokens .* got \(2, 1, 6\)"),
    ],
    ids=range(7),
)
def test_bad_input_is_an_error_that_names_the_rule(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^tiled.*{message}"):
        call()
