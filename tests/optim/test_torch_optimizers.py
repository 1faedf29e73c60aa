"""The laws of torch.optim's classes as transforms: on full buffers they equal the
class, on shards too, or are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import pytest
import torch
from profiles import examples
from ranks import RankPool
from torch import Tensor
from torch.optim import Optimizer
from training import Plain, config, train, train_plainly, vectors

import fzero
from fzero.optim.torch_classes import classes
from fzero.optim.torch_optim import TorchState
from fzero.optim.transforms import Transform
from fzero.testing import check_transform

NUM_STEPS = 6
REFUSED = {"LBFGS", "SparseAdam", "Adafactor", "Muon"}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in classes() if name not in REFUSED),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "maximize": True}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("ASGD", {"t0": 2.0, "lambd": 0.1}),
    ("Rprop", {"lr": 0.5, "etas": (0.4, 1.5)}),
]
every_case = pytest.mark.parametrize(
    ("name", "params"), CASES, ids=[f"{n} {list(p)}" for n, p in CASES]
)


class Counting(Optimizer):
    """Keeps a Python number, like older optimizers, and makes its state in the first
    step.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state |= {"count": 0, "rate": 1.0, "first": param.grad.clone()}
                state["count"] += 1
                state["rate"] *= 0.5
                param.data.sub_(
                    group["lr"] / state["count"] * (state["rate"] * param.grad + state["first"])
                )


class InItsGroup(Counting):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for param in group["params"]:
                param.data.sub_(param.grad / group["seen"])


class InItself(Counting):
    seen = 0

    def step(self, closure: Any = None) -> None:
        self.seen += 1
        for param in self.param_groups[0]["params"]:
            param.data.sub_(param.grad / self.seen)


class Noisy(Counting):
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.data.sub_(torch.randn_like(param))


class ByItsNorm(Counting):
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.data.sub_(param.grad / param.grad.norm())


class WithNorms(Counting):
    """Its update of the parameter is elementwise, that of its state is not."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["norm"] = param.grad.norm()
            param.data.sub_(param.grad)


class InPairs(Counting):
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["pairs"] = param.grad.view(-1, 2)


class Growing(Counting):
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state[f"grad {len(state)}"] = param.grad.clone()


class Closing(Counting):
    def step(self, closure: Any) -> None:
        closure()


def make_param(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1))


def make_grads(numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(NUM_STEPS, numel, generator=generator) * torch.logspace(-4, 2, numel)


def run(
    transform: Transform, param: Tensor, grads: Sequence[Tensor], state: Any = None
) -> tuple[list[Tensor], Any]:
    """The parameter after each step, and the last state; works on copies."""
    param = param.clone()
    state, trajectory = transform.init(param) if state is None else state, []
    for grad in grads:
        _, param, state = transform.update(grad.clone(), param, state)
        trajectory.append(param.clone())
    return trajectory, state


def run_torch(
    cls: type[Optimizer], params: Any, param: Tensor, grads: Sequence[Tensor]
) -> list[Tensor]:
    make: Any = cls
    owned = torch.nn.Parameter(param.clone())
    optimizer, trajectory = make([owned], **params), []
    for grad in grads:
        owned.grad = grad.clone()
        optimizer.step()
        trajectory.append(owned.detach().clone())
    return trajectory


# --- the class itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
@every_case
def test_it_is_the_class_of_torch_bit_for_bit(name: str, params: Any, numel: int) -> None:
    param, grads = make_param(numel), make_grads(numel)
    ours, state = run(fzero.optim.torch_optimizer(name, **params), param, grads)
    theirs = run_torch(classes()[name], params, param, grads)
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert state.step == NUM_STEPS
    assert not numel or not torch.equal(ours[0], param)


def test_it_works_in_place() -> None:
    transform, param, grad = (
        fzero.optim.torch_optimizer("Adamax"),
        make_param(64),
        make_grads(64)[0],
    )
    _, after_one, state = transform.update(grad, param, transform.init(param))
    memory = [x.data_ptr() for x in optree.tree_leaves((param, state))]
    _, after_two, state = transform.update(grad, after_one, state)
    assert [x.data_ptr() for x in optree.tree_leaves((after_two, state))] == memory


@pytest.mark.parametrize("num_before", [0, 1, 3])
@every_case
def test_another_transform_continues_with_the_state(
    name: str, params: Any, num_before: int
) -> None:
    """As after a checkpoint: the state holds everything, also before the first update."""
    param, grads = make_param(64), make_grads(64)
    straight, straight_state = run(fzero.optim.torch_optimizer(name, **params), param, grads)
    transform = fzero.optim.torch_optimizer(name, **params)
    before, state = run(transform, param, grads[:num_before])
    stored = optree.tree_map(torch.clone, state)
    after, last = run(
        fzero.optim.torch_optimizer(name, **params),
        [param, *before][-1],
        grads[num_before:],
        stored,
    )
    assert torch.equal(after[-1], straight[-1])
    assert (
        optree.tree_structure(last)
        == optree.tree_structure(stored)
        == optree.tree_structure(straight_state)
    )
    assert all(map(torch.equal, optree.tree_leaves(last), optree.tree_leaves(straight_state)))


def test_python_numbers_are_part_of_the_state() -> None:
    param, grads = make_param(64), make_grads(64)
    ours, state = run(fzero.optim.torch_optimizer(Counting, lr=0.5), param, grads)
    theirs = run_torch(Counting, {"lr": 0.5}, param, grads)
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert (
        state.numbers["count"].item() == NUM_STEPS
        and state.numbers["rate"].item() == 0.5**NUM_STEPS
    )
    assert torch.equal(state.tensors["first"], grads[0])


@every_case
def test_every_class_keeps_the_laws_of_transforms(name: str, params: Any) -> None:
    check_transform(
        fzero.optim.torch_optimizer(name, **params),
        name=name,
        max_examples=examples(5).max_examples,
    )


ELEMENTWISE: dict[str, Transform] = {
    "sgd": fzero.sgd(0.1, momentum=0.9),
    "adam": fzero.optim.adam(0.1),
    "adamw": fzero.adamw(0.1),
    "adagrad": fzero.optim.adagrad(0.1),
    "lion": fzero.optim.lion(0.1),
    "chain": fzero.chain(fzero.optim.scale(0.5), fzero.adamw(0.1)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_transforms_here_are_found_elementwise(name: str) -> None:
    fzero.optim.check_elementwise(ELEMENTWISE[name])


def test_a_transform_of_your_own_is_refused_by_its_name_where_it_is_not_elementwise() -> None:
    def clip(grad: Tensor, param: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        return grad / grad.norm().clamp(min=1.0), param, state

    clipped = fzero.chain(Transform(lambda param: (), clip, lambda spec: ()), fzero.sgd(0.1))
    with pytest.raises(
        ValueError, match=r"^clipped: must be elementwise, .* use a transform that takes `contents`"
    ):
        fzero.optim.check_elementwise(clipped, name="clipped")


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_class", "params", "message"),
    [
        ("LBFGS", {}, "LBFGS: needs a closure"),
        (Closing, {}, "Closing: needs a closure"),
        (
            "SparseAdam",
            {},
            "SparseAdam: must step with the dense gradient .* does not support dense gradients",
        ),
        ("adafactor", {}, "Adafactor: must be elementwise, .* use fzero.optim.adafactor"),
        (
            "Muon",
            {},
            "Muon: does not take a flat tensor .* only supports 2D .* use fzero.optim.muon",
        ),
        (ByItsNorm, {}, "ByItsNorm: must be elementwise"),
        (WithNorms, {}, "WithNorms: must be elementwise"),
        (Noisy, {}, "Noisy: must be elementwise"),
        (InItsGroup, {}, "InItsGroup: must keep everything in its `state`"),
        (InItself, {}, "InItself: must keep everything in its `state`"),
        (InPairs, {}, r"InPairs: its state may hold .* 'pairs' is a tensor of shape \(64, 2\)"),
        (Growing, {}, "Growing: its state must have the same names and shapes after every step"),
        ("adagard", {}, "torch.optim has no 'adagard'; did you mean 'Adagrad'?"),
        ("Adam", {"foo": 1}, "Adam: does not take .* unexpected keyword argument 'foo'"),
        ("Adam", {"lr": -1.0}, "Adam: does not take .* Invalid learning rate: -1.0"),
        (int, {}, "needs a class of optimizers or its name, got <class 'int'>"),
    ],
)
def test_optimizers_that_cannot_work_on_shards_are_refused_with_the_reason(
    given_class: Any, params: Any, message: str
) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        fzero.optim.torch_optimizer(given_class, **params)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_class_of_torch_works_or_is_refused_here() -> None:
    """A class that a new version of torch adds must be tested here."""

    def works(name: str) -> bool:
        try:
            fzero.optim.torch_optimizer(name)
        except ValueError:
            return False
        return True

    assert {name for name in classes() if not works(name)} == REFUSED


def test_before_the_first_update_the_state_is_zeros_and_says_so() -> None:
    state: TorchState[Tensor] = fzero.optim.torch_optimizer("Rprop", lr=0.5).init(make_param(3))
    assert state.step == 0 and not any(x.any() for x in optree.tree_leaves(state))


# --- training -------------------------------------------------------------------------------------


def _train_all_stages(name: str) -> list[Any]:
    cfgs = [config(stage, optimizer={"type": name, "params": {"lr": 1e-2}}) for stage in range(4)]
    return [train(Plain, vectors, cfg, num_steps=4) for cfg in cfgs]


@pytest.mark.parametrize("name", ["Adamax", "NAdam", "Rprop"])
def test_training_is_alike_in_all_stages_and_like_the_plain_loop(
    ranks: RankPool, name: str
) -> None:
    make: Any = classes()[name]
    plain_curve, plain_weights = train_plainly(
        Plain, vectors, lambda params: make(params, lr=1e-2), num_steps=4
    )
    on_ranks = ranks(2, _train_all_stages, name)
    first_curve, first_weights = on_ranks[0][0]
    for curve, weights in (result for results in on_ranks for result in results):
        assert curve == first_curve
        assert all(torch.equal(weights[key], first_weights[key]) for key in weights)
    # Rounding errors only, as in test_stages; these optimizers divide small gradients by their
    # size.
    torch.testing.assert_close(
        torch.tensor(first_curve), torch.tensor(plain_curve), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(first_weights, plain_weights, rtol=0, atol=2e-5)
