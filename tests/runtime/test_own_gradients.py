"""A gradient by the model's own parameters, asked for inside a step, is the plain
loop's, however the code gets at them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.runtime import visits

AOT = {"compile": "step", "compile_backend": "aot_eager"}


class Net(nn.Module):
    """Uses a unit twice, and a weight in two modules; its output is the loss."""

    penalizes = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 1),
        )
        self.c.weight = self.a.weight

    def loss(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.b, torch.tanh(self.a(x)), use_reentrant=False)
        return self.head(torch.tanh(self.c(torch.tanh(hidden))) + self.b(x)).square().mean()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return penalty(self.loss(x), list(self.parameters())) if self.penalizes else self.loss(x)


class Penalized(Net):
    penalizes = True


def penalty(loss: Tensor, params: Sequence[Tensor]) -> Tensor:
    grads = torch.autograd.grad(loss, params, create_graph=True)
    return loss + 0.1 * torch.stack([grad.square().sum() for grad in grads]).sum()


def after(model: Any, x: Tensor) -> Tensor:
    return penalty(model(x), list(model.parameters()))


def before(model: Any, x: Tensor) -> Tensor:
    params = list(model.parameters())
    return penalty(model(x), params)


def by_name(model: Any, x: Tensor) -> Tensor:
    loss = model(x)
    return penalty(loss, [model.get_parameter(name) for name, _ in model.named_parameters()])


def attributes(model: Any, x: Tensor) -> Tensor:
    loss = model(x)
    return penalty(loss, [model.a.weight, model.b.weight, model.head.bias])


def state_dict(model: Any, x: Tensor) -> Tensor:
    tensors = model.state_dict(keep_vars=True)
    return penalty(model(x), [tensors["a.weight"], tensors["b.bias"]])


def called(model: Any, x: Tensor) -> Tensor:
    params = dict(model.named_parameters())
    return penalty(functional_call(model, params, (x,)), list(params.values()))


def inner_step(model: Any, x: Tensor) -> Tensor:
    params = dict(model.named_parameters())
    grads = torch.autograd.grad(
        functional_call(model, params, (x,)), list(params.values()), create_graph=True
    )
    stepped = {
        name: param - 0.1 * grad for (name, param), grad in zip(params.items(), grads, strict=True)
    }
    return functional_call(model, stepped, (x,))  # type: ignore[no-any-return]


def first_order(model: Any, x: Tensor) -> Tensor:
    grads = torch.autograd.grad(model(x), list(model.parameters()))
    return model(x) * (1 + 0.01 * torch.stack([grad.square().sum() for grad in grads]).sum())  # type: ignore[no-any-return]


def curvature(model: Any, x: Tensor) -> Tensor:
    params, loss = list(model.parameters()), model(x)
    grads = torch.autograd.grad(loss, params, create_graph=True)
    products = torch.autograd.grad(
        grads, params, [torch.ones_like(grad) for grad in grads], create_graph=True
    )
    return loss + 0.001 * torch.stack([each.square().sum() for each in products]).sum()  # type: ignore[no-any-return]


def itself(model: Any, x: Tensor) -> Tensor:
    return model(x)  # type: ignore[no-any-return]


WAYS: list[tuple[type[Net], Callable[[Any, Tensor], Tensor]]] = [
    *(
        (Net, way)
        for way in (
            after,
            before,
            by_name,
            attributes,
            state_dict,
            called,
            inner_step,
            first_order,
            curvature,
        )
    ),
    (Penalized, itself),
]


def batches() -> list[Tensor]:
    return [torch.randn(12, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def made(kind: type[Net]) -> Net:
    torch.manual_seed(0)
    return kind()


def plain(
    kind: type[Net], way: Callable[[Any, Tensor], Tensor]
) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = made(kind), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)
    for x in batches():
        optimizer.zero_grad()
        loss = way(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def trained(
    kind: type[Net],
    way: Callable[[Any, Tensor], Tensor],
    stage: int,
    num_ranks: int = 1,
    **how: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """On equal batches per rank, whose mean gradient is that of one."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    sgd = {"type": "SGD", "params": {"lr": 0.0625}}
    step: Any = fzero.make_train_step(
        made(kind),
        {"optimizer": sgd, "gradient_clipping": 0.0, "zero_optimization": zero},
        loss_fn=way,
        units=["a", "b", "head"],
        **how,
    )
    gather = step.gather
    if num_ranks > 1:
        step = fzero.simulate(step, num_ranks, by="lockstep")
        gather = step.gather
    state, losses = step.init(), list[float]()
    for x in batches():
        state, metrics = step(state, x if num_ranks == 1 else torch.stack([x] * num_ranks))
        losses.append(metrics.loss.reshape(-1)[0].item())
    return losses, gather(state)


@pytest.mark.parametrize(("kind", "way"), WAYS, ids=lambda each: each.__name__)
def test_a_gradient_by_own_parameters_is_the_plain_loops_in_every_stage(
    kind: type[Net], way: Any
) -> None:
    expected = plain(kind, way)
    for stage in range(4):
        for num_ranks in (1, 2):
            assert_same(trained(kind, way, stage, num_ranks), expected, tolerance=0.0)


@pytest.mark.parametrize("way", [before, inner_step])
def test_large_parameters_have_nodes_of_their_own_and_the_same_gradients(
    way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visits, "SMALL", 4)
    for stage in (0, 3):
        assert_same(trained(Net, way, stage, 2), plain(Net, way), tolerance=0.0)


@pytest.mark.parametrize("stage", [0, 3])
def test_pytorchs_hint_to_allow_unused_parameters_trains_the_same_objective(stage: int) -> None:
    def hinted(model: Any, x: Tensor) -> Tensor:
        loss = model(x)
        grads = torch.autograd.grad(
            loss, list(model.parameters()), create_graph=True, allow_unused=True
        )
        return (
            loss
            + 0.1 * torch.stack([grad.square().sum() for grad in grads if grad is not None]).sum()
        )  # type: ignore[no-any-return]

    for how in ({}, AOT):
        assert_same(
            trained(Net, hinted, stage, **how), plain(Net, after), tolerance=1e-6 if how else 0.0
        )


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_by_own_parameters_inside_the_forward_is_refused(stage: int) -> None:
    def backward(model: Any, x: Tensor) -> Tensor:
        loss = model(x)
        torch.autograd.backward(loss, inputs=list(model.parameters()), retain_graph=True)
        return loss  # type: ignore[no-any-return]

    with pytest.raises(
        RuntimeError, match="backward: must not be called inside the forward or loss_fn"
    ):
        trained(Net, backward, stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_so_it_is_in_a_later_step_which_compares_no_values(stage: int) -> None:
    """Autograd runs the nodes whose outputs the parameters are, and these know that the
    forward is not over.
    """
    calls = itertools.count()

    def backward_in_step_3(model: Any, x: Tensor) -> Tensor:
        loss = model(x)
        if next(calls) == 2:
            torch.autograd.backward(loss, inputs=list(model.parameters()), retain_graph=True)
        return loss  # type: ignore[no-any-return]

    with pytest.raises(
        RuntimeError, match="backward: must not be called inside the forward or loss_fn"
    ):
        trained(Net, backward_in_step_3, stage)
    assert next(calls) == 3


def test_a_retained_gradient_of_a_parameter_is_no_backward_inside_the_forward() -> None:
    """Also in the second micro-step, which shares its parameters with the first."""

    def retaining(model: Any, x: Tensor) -> Tensor:
        loss = model(x)
        for param in model.parameters():
            param.retain_grad()
        return loss  # type: ignore[no-any-return]

    assert_same(
        trained(Net, retaining, 2), trained(Net, lambda model, x: model(x), 2), tolerance=0.0
    )
    cfg = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.0625}},
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 6,
    }
    step = fzero.make_train_step(made(Net), cfg, loss_fn=retaining)
    state = step.init()
    for x in batches()[:3]:
        state, _ = step(state, x)


def test_ranks_that_run_at_once_refuse_a_gradient_by_own_parameters() -> None:
    """Under torch.vmap tensors have no graph."""
    step = fzero.make_train_step(
        made(Net), {"optimizer": {"type": "SGD", "params": {"lr": 0.0625}}}, loss_fn=after
    )
    ranks = fzero.simulate(step, 2, by="vmap")
    with pytest.raises(ValueError, match=r"torch.vmap cannot run this step.* by='lockstep'"):
        ranks(ranks.init(), torch.stack(batches()[:2]))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "way"), WAYS, ids=lambda each: each.__name__)
def test_a_gradient_by_own_parameters_is_the_plain_loops_in_one_graph(
    kind: type[Net], way: Any
) -> None:
    """A graph adds the parts of a gradient in the order of its operators."""
    for stage in (0, 3):
        assert_same(trained(kind, way, stage, **AOT), plain(kind, way), tolerance=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [after, curvature])
def test_a_second_derivative_of_compiled_blocks_is_refused_with_the_fix(way: Any) -> None:
    for stage in (0, 3):
        with pytest.raises(
            ValueError,
            match=r"must not go through code that torch.compile has compiled.* compile='step'",
        ):
            trained(Net, way, stage, compile="block", compile_backend="aot_eager")


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_ranks", [3, 2, 4])
def test_a_gradient_by_own_parameters_is_the_plain_loops_on_real_ranks(
    ranks: RankPool, num_ranks: int
) -> None:
    assert ranks(num_ranks, _differ_on_ranks) == [[]] * num_ranks


def _differ_on_ranks() -> list[str]:
    found = []
    for kind, way in WAYS:
        expected = plain(kind, way)
        for stage in range(4):
            try:  # means over three ranks round
                assert_same(trained(kind, way, stage), expected, tolerance=1e-6)
            except AssertionError as error:
                found.append(f"{way.__name__}, stage {stage}: {error}")
    return found


def assert_same(
    found: tuple[list[float], dict[str, Tensor]],
    expected: tuple[list[float], dict[str, Tensor]],
    *,
    tolerance: float,
) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    weights = {name: found[1][name].reshape(x.shape) for name, x in expected[1].items()}
    torch.testing.assert_close(weights, expected[1], rtol=tolerance, atol=tolerance)
