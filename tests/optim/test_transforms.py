"""The laws of transforms: the trajectories of torch.optim, the laws of `fzero.testing`,
donation, and one fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import optree
import pytest
import torch
from profiles import examples
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fzero
from fzero import Transform
from fzero.optim.transforms import mixed_precision
from fzero.testing import check_transform

NUM_STEPS = 20

SGDS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1},
    "weight decay": {"lr": 0.1, "weight_decay": 0.2},
    "momentum": {"lr": 0.05, "momentum": 0.9},
    "momentum and weight decay": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "lr 0": {"lr": 0.0, "momentum": 0.9},
}
ADAMS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 1e-3},
    "weight decay": {"lr": 1e-2, "weight_decay": 0.3},
    "betas": {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.0},
    "no memory": {"lr": 1e-2, "betas": (0.0, 0.0)},
    "large eps": {"lr": 0.1, "eps": 0.5, "weight_decay": 0.1},
}
ADAGRADS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 1e-2},
    "weight decay": {"lr": 0.1, "weight_decay": 0.3},
    "decay": {"lr": 0.1, "lr_decay": 0.5, "initial_accumulator_value": 0.25, "eps": 1e-3},
}
LIONS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 1e-3},
    "weight decay": {"lr": 1e-2, "weight_decay": 0.3, "betas": (0.8, 0.95)},
}
TRANSFORMS: dict[str, Transform] = {
    **{f"adagrad, {name}": fzero.optim.adagrad(**values) for name, values in ADAGRADS.items()},
    **{f"lion, {name}": fzero.optim.lion(**values) for name, values in LIONS.items()},
    **{f"sgd, {name}": fzero.sgd(**values) for name, values in SGDS.items()},
    **{f"adam, {name}": fzero.optim.adam(**values) for name, values in ADAMS.items()},
    **{f"adamw, {name}": fzero.adamw(**values) for name, values in ADAMS.items()},
    "scale": fzero.optim.scale(0.3),
    "empty chain": fzero.chain(),
    "chain": fzero.chain(fzero.optim.scale(0.3), fzero.sgd(0.1, momentum=0.9)),
    "chain of chains": fzero.chain(
        fzero.chain(fzero.optim.scale(2.0)), fzero.chain(fzero.optim.scale(0.5), fzero.adamw(1e-2))
    ),
}
every_transform = pytest.mark.parametrize("name", TRANSFORMS)


def make_param(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1))


def make_grads(numel: int, num_steps: int = NUM_STEPS) -> Tensor:
    """A gradient for each step; their magnitudes differ widely."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num_steps, numel, generator=generator) * torch.logspace(-4, 2, numel)


def run(transform: Transform, param: Tensor, grads: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """The parameter after each step, and the last state; works on copies."""
    param = param.clone()
    state, trajectory = transform.init(param), []
    for grad in grads:
        _, param, state = transform.update(grad.clone(), param, state)
        trajectory.append(param.clone())
    return trajectory, state


def run_torch(
    make: Callable[..., torch.optim.Optimizer], values: Any, param: Tensor, grads: Any
) -> list[Tensor]:
    param = torch.nn.Parameter(param.clone())
    optimizer, trajectory = make([param], **values), []
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        trajectory.append(param.detach().clone())
    return trajectory


# --- the trajectories of torch.optim --------------------------------------------------------------


FORMULAS = [name for name in TRANSFORMS if name.startswith(("adam", "adagrad"))]


# of the many small operations under vmap
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", FORMULAS)
def test_the_formula_in_a_graph_has_the_trajectory_of_the_fused_kernel_to_rounding(
    name: str,
) -> None:
    """Under `torch.vmap`, as in a graph, a fused kernel cannot run."""
    transform, param, grads = TRANSFORMS[name], make_param(100), make_grads(100)
    expected, _ = run(transform, param, grads)
    param, state = param.clone()[None], optree.tree_map(lambda x: x[None], transform.init(param))
    for grad, wanted in zip(grads, expected, strict=True):
        _, param, state = torch.vmap(transform.update)(grad.clone()[None], param, state)
        torch.testing.assert_close(param[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
@pytest.mark.parametrize("values", ADAMS.values(), ids=ADAMS)
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_and_adamw_are_the_fused_ones_of_torch_bit_for_bit(
    name: str, values: Any, numel: int
) -> None:
    param, grads = make_param(numel), make_grads(numel)
    make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    ours, state = run(getattr(fzero.optim, name)(**values), param, grads)
    theirs = run_torch(make, {"fused": True, **values}, param, grads)
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert state.step == NUM_STEPS
    assert not numel or not torch.equal(ours[0], param)


@pytest.mark.parametrize("values", ADAMS.values(), ids=ADAMS)
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_and_adamw_are_the_unfused_ones_of_torch_to_rounding(name: str, values: Any) -> None:
    param, grads = make_param(64), make_grads(64)
    make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    theirs = run_torch(make, {"foreach": False, **values}, param, grads)
    ours, _ = run(getattr(fzero.optim, name)(**values), param, grads)
    # The plain loop of torch.optim divides and takes roots in another order than the fused kernel:
    # a few last bits.
    torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
@pytest.mark.parametrize("values", SGDS.values(), ids=SGDS)
def test_sgd_is_the_one_of_torch(values: Any, numel: int) -> None:
    param, grads = make_param(numel), make_grads(numel)
    ours, state = run(fzero.sgd(**values), param, grads)
    theirs = run_torch(torch.optim.SGD, {"foreach": False, **values}, param, grads)
    assert state.step == NUM_STEPS
    if not values.get("dampening"):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    else:
        # torch adds (1 - dampening) * gradient to the momentum with one rounding, and fzero rounds
        # twice; each of 20 steps may differ by a last bit of the largest summand (momentum up to
        # about 1e3, times lr).
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=20 * 0.1 * 1e3 * 2**-24)


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
@pytest.mark.parametrize("values", ADAGRADS.values(), ids=ADAGRADS)
def test_adagrad_is_the_fused_one_of_torch_bit_for_bit(values: Any, numel: int) -> None:
    param, grads = make_param(numel), make_grads(numel)
    ours, state = run(fzero.optim.adagrad(**values), param, grads)
    theirs = run_torch(torch.optim.Adagrad, {"fused": True, **values}, param, grads)
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert state.step == NUM_STEPS


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
@pytest.mark.parametrize("values", LIONS.values(), ids=LIONS)
def test_lion_is_algorithm_2_of_its_paper(values: Any, numel: int) -> None:
    """The algorithm of Chen et al., arXiv:2302.06675, as printed there, in fp64."""
    param, grads = make_param(numel).double(), make_grads(numel).double()
    ours, _ = run(fzero.optim.lion(**values), param, grads)
    beta_1, beta_2 = values.get("betas", (0.9, 0.99))
    theta, m = param.clone(), torch.zeros_like(param)
    for g, mine in zip(grads, ours, strict=True):
        c = beta_1 * m + (1 - beta_1) * g
        theta = theta - values["lr"] * (c.sign() + values.get("weight_decay", 0.0) * theta)
        m = beta_2 * m + (1 - beta_2) * g
        torch.testing.assert_close(mine, theta, rtol=1e-12, atol=1e-12)


def test_the_first_gradient_is_not_dampened() -> None:
    trajectory, _ = run(
        fzero.sgd(1.0, momentum=0.5, dampening=0.5), torch.zeros(1), torch.ones(2, 1)
    )
    assert [param.item() for param in trajectory] == [-1.0, -2.0]  # directions 1 and 0.5·1 + 0.5·1


# --- the laws of every transform ------------------------------------------------------------------


@every_transform
def test_every_transform_keeps_the_laws(name: str) -> None:
    check_transform(
        TRANSFORMS[name], name=name, compile="step", max_examples=examples(5).max_examples
    )


@pytest.mark.parametrize(
    "make", [fzero.optim.adagrad, fzero.optim.adam, fzero.adamw, fzero.optim.lion, fzero.sgd]
)
def test_every_optimizer_keeps_them_as_a_function_of_the_learning_rate(
    make: Callable[[Any], Transform],
) -> None:
    check_transform(
        make, name=make.__name__, compile="step", max_examples=examples(10).max_examples
    )


# --- chains ---------------------------------------------------------------------------------------


def test_a_chain_is_its_links_one_after_the_other() -> None:
    first, second = fzero.optim.scale(0.3), fzero.adamw(1e-2)
    chained, state = run(fzero.chain(first, second), make_param(50), make_grads(50))
    alone, alone_state = run(second, make_param(50), make_grads(50) * 0.3)
    assert all(torch.equal(x, y) for x, y in zip(chained, alone, strict=True))
    assert len(state) == 2 and torch.equal(state[1].exp_avg, alone_state.exp_avg)


def test_chains_are_associative() -> None:
    a, b, c = fzero.optim.scale(0.3), fzero.optim.scale(0.7), fzero.sgd(0.1, momentum=0.9)
    flat, left, right = (
        run(transform, make_param(50), make_grads(50))[0][-1]
        for transform in (
            fzero.chain(a, b, c),
            fzero.chain(fzero.chain(a, b), c),
            fzero.chain(a, fzero.chain(b, c)),
        )
    )
    assert torch.equal(flat, left) and torch.equal(flat, right)


def test_two_optimizers_in_a_chain_update_one_after_the_other() -> None:
    """The second one reads the parameter that the first one wrote."""
    both = fzero.chain(fzero.sgd(1.0), fzero.sgd(1.0))
    _, param, _ = both.update(torch.tensor([4.0]), torch.tensor([10.0]), both.init(torch.zeros(1)))
    assert param == 2.0


def test_the_empty_chain_changes_nothing() -> None:
    grad, param = torch.tensor([4.0]), torch.tensor([10.0])
    assert fzero.chain().update(grad, param, ()) == (grad, param, ())
    assert (grad.item(), param.item()) == (4.0, 10.0)


def test_a_chain_with_a_state_of_another_length_is_refused() -> None:
    chained = fzero.chain(fzero.optim.scale(2.0), fzero.sgd(1.0))
    with pytest.raises(ValueError, match="shorter"):
        chained.update(torch.ones(1), torch.ones(1), chained.init(torch.ones(1))[:1])


# --- donation and speed ---------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Records operators that use a tensor of at least N elements, and the memory that
    they allocate for such tensors.
    """

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.operators: list[str] = []
        self.made: set[int] = set()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given_tensors = self._large((args, kwargs))
        result = operator(*args, **(kwargs or {}))
        if given_tensors or self._large(result):
            self.operators.append(str(operator))
        self.made |= self._large(result) - given_tensors
        return result

    def _large(self, tree: Any) -> set[int]:
        found = [
            x for x in optree.tree_leaves(tree) if isinstance(x, Tensor) and x.numel() >= self.numel
        ]
        return {x.untyped_storage().data_ptr() for x in found}


def _watched(transform: Transform, numel: int = 1000) -> tuple[Watch, list[int], list[int]]:
    """The third update: its operators, and the memory of its tensors before and after."""
    param, state = make_param(numel), transform.init(torch.zeros(numel))
    grads = make_grads(numel)
    for grad in grads[:2]:
        _, param, state = transform.update(grad.clone(), param, state)
    grad = grads[2].clone()
    before = [x.data_ptr() for x in optree.tree_leaves((param, state))]
    with Watch(numel) as watch:
        _, param, state = transform.update(grad, param, state)
    return watch, before, [x.data_ptr() for x in optree.tree_leaves((param, state))]


@every_transform
def test_an_update_works_in_place_and_makes_no_tensor_of_the_parameters_size(name: str) -> None:
    watch, before, after = _watched(TRANSFORMS[name])
    assert after == before
    assert not watch.made, f"new memory was made by one of {watch.operators}"


LAID_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": lambda x: torch.stack((x, x), -1).view(*x.shape[:-1], -1)[..., ::2],
    "transposed": lambda x: x.T.contiguous().T,
    "part of rows": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
}


@every_transform
def test_elements_are_updated_where_the_strides_say_they_are(name: str) -> None:
    # A kernel that ignores strides pairs wrong elements, and writes outside of the tensor.
    transform, grads = TRANSFORMS[name], [grad.view(3, 5) for grad in make_grads(15)[:3]]
    for of_param, of_grad in product(LAID_OUT.values(), repeat=2):
        param = make_param(15).view(3, 5)
        other = of_param(param.clone())
        state, its_state = transform.init(param), transform.init(other)
        for grad in grads:
            _, other, its_state = transform.update(of_grad(grad.clone()), other, its_state)
            _, param, state = transform.update(grad.clone(), param, state)
        assert all(
            map(
                torch.equal,
                optree.tree_leaves((param, state)),
                optree.tree_leaves((other, its_state)),
            )
        )


@pytest.mark.parametrize("name", ["adamw, defaults", "adam, defaults", "adagrad, defaults"])
def test_a_gradient_may_be_one_number_for_all_elements_and_a_parameter_may_not(name: str) -> None:
    transform, params = TRANSFORMS[name], [torch.zeros(1000), torch.zeros(1000)]
    for param, grad in zip(params, (torch.ones(1000), torch.ones(1).expand(1000)), strict=True):
        transform.update(grad, param, transform.init(param))
    assert torch.equal(*params)
    # memory for one element; the bare kernel would write a thousand there
    param = torch.zeros(1).expand(1000)
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        transform.update(torch.ones(1000), param, transform.init(param))


@pytest.mark.parametrize("factor", [None, torch.tensor(0.5)])
@every_transform
def test_several_buffers_in_one_call_are_updated_like_each_by_itself(
    name: str, factor: Tensor | None
) -> None:
    transform = mixed_precision(TRANSFORMS[name], state_dtype="float32", factor=factor)
    both: list[tuple[list[Tensor], list[Any]]] = []
    for is_one_call in (True, False):
        params = [make_param(numel) for numel in (1000, 0, 7)]
        states = [transform.init(param) for param in params]
        for index in range(3):
            grads = [make_grads(param.numel())[index].clone() for param in params]
            if is_one_call:
                _, states = transform.update_each(grads, params, states)
            else:
                states = [
                    transform.update(*of)[2] for of in zip(grads, params, states, strict=True)
                ]
        both.append((params, states))
    ours, theirs = map(optree.tree_leaves, both)
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    assert name in ("scale", "empty chain", "sgd, lr 0") or not torch.equal(
        both[0][0][0], make_param(1000)
    )


def test_a_transform_with_another_update_does_not_update_several_by_the_old_one() -> None:
    inner, x = fzero.adamw(1e-2), torch.ones(8)
    clamped = inner._replace(update=lambda grad, param, state: (grad, param.fill_(0.5), state))
    for transform in (clamped, mixed_precision(clamped, state_dtype="float32")):
        param = x.clone()
        transform.update_each([x], [param], [transform.init(param)])
        assert torch.equal(param, x / 2)


@pytest.mark.parametrize(
    ("name", "kernel"), [("adam", "aten._fused_adam_"), ("adamw", "aten._fused_adamw_")]
)
def test_adam_and_adamw_are_one_pass_of_one_fused_kernel(name: str, kernel: str) -> None:
    transform = getattr(fzero.optim, name)(1e-2, weight_decay=0.1)
    watch, _, _ = _watched(transform)
    assert [operator.rpartition(".")[0] for operator in watch.operators] == [kernel]


def test_the_watch_sees_operators_and_new_memory() -> None:
    x = torch.ones(10)
    with Watch(10) as watch:
        x.mul_(2)
        assert not watch.made
        y = x + 1
        torch.ones(9)
    assert watch.operators == ["aten.mul_.Tensor", "aten.add.Tensor"] and watch.made == {
        y.data_ptr()
    }


# --- bad values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (fzero.sgd, {"lr": -0.1}, "sgd: lr must be at least 0, got -0.1"),
        (fzero.sgd, {"lr": 0.1, "momentum": -1.0}, "sgd: momentum must be at least 0, got -1.0"),
        (
            fzero.sgd,
            {"lr": 0.1, "weight_decay": -1.0},
            "sgd: weight_decay must be at least 0, got -1.0",
        ),
        (
            fzero.sgd,
            {"lr": 0.1, "nesterov": True},
            r"sgd: nesterov needs momentum > 0 .* got 0.0 and 0.0",
        ),
        (
            fzero.sgd,
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "nesterov": True},
            r"sgd: nesterov needs .* dampening = 0, got 0.9 and 0.1",
        ),
        (fzero.optim.adam, {"lr": -1}, "adam: lr must be at least 0, got -1"),
        (fzero.adamw, {"lr": float("nan")}, "adamw: lr must be at least 0, got nan"),
        (fzero.adamw, {"lr": 0.1, "eps": -1e-8}, "adamw: eps must be at least 0, got -1e-08"),
        (
            fzero.adamw,
            {"lr": 0.1, "weight_decay": -0.1},
            "adamw: weight_decay must be at least 0, got -0.1",
        ),
        (
            fzero.adamw,
            {"lr": 0.1, "betas": (0.9, 1.0)},
            r"adamw: each of betas must be in \[0, 1\), got \(0.9, 1.0\)",
        ),
        (
            fzero.optim.adam,
            {"lr": 0.1, "betas": (-0.1, 0.9)},
            r"adam: each of betas must be in \[0, 1\), got \(-0.1, 0.9\)",
        ),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(
    make: Any, values: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**values)
