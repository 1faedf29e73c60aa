"""Transforms of torch.func, and derivatives by autograd, inside a step: every one in
`loss_fn` and in a forward, by inputs and by parameters, is the plain loop's in every
stage and runner.
"""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

import pytest
import torch
from derivative_ways import OF, TRANSFORMS, Differentiated, Net
from ranks import RankPool
from torch import Tensor, nn

import fzero

Found = tuple[list[float], dict[str, Tensor]]
PLACES = ("loss_fn", "forward")
CASES = list(product(TRANSFORMS, OF, PLACES))
AOT = {"compile": "step", "compile_backend": "aot_eager"}


def made(transform: str, of: str, place: str) -> tuple[nn.Module, Any, list[str]]:
    """A model, its loss function, and its units."""
    torch.manual_seed(0)
    if place == "forward":
        return Differentiated(transform, of), None, ["net.a", "net.b", "net.c"]
    return Net(), lambda model, x: OF[of](model, transform, x), ["a", "b", "c"]


def batches(num_ranks: int = 1) -> list[Tensor]:
    """(num_ranks, 6, 3) for each of three steps."""
    return [
        torch.randn(num_ranks, 6, 3, generator=torch.Generator().manual_seed(seed))
        for seed in range(3)
    ]


def plain(transform: str, of: str, place: str, num_ranks: int = 1) -> Found:
    """A loop whose loss is the mean over the batches of the ranks."""
    model, loss_fn, _ = made(transform, of, place)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.0625), list[float]()
    for x in batches(num_ranks):
        optimizer.zero_grad()
        own = [(model(rows) if loss_fn is None else loss_fn(model, rows)) for rows in x]
        loss = torch.stack(own).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def step_of(transform: str, of: str, place: str, stage: int, **how: Any) -> fzero.TrainStep:
    model, loss_fn, units = made(transform, of, place)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    cfg = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.0625}},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }
    return fzero.make_train_step(model, cfg, loss_fn=loss_fn, units=units, **how)


def trained(case: tuple[str, str, str], stage: int, **how: Any) -> Found:
    """This rank's part of a job, on its own batches."""
    step = step_of(*case, stage, **how)
    state, losses = step.init(), list[float]()
    for x in batches(step.world_size):
        state, metrics = step(state, x[step.rank])
        losses.append(metrics.loss.item())
    return losses, step.gather(state)


def simulated(
    case: tuple[str, str, str], stage: int, num_ranks: int, by: Literal["vmap", "lockstep"]
) -> Found:
    ranks = fzero.simulate(step_of(*case, stage), num_ranks, by=by)
    state, losses = ranks.init(), list[float]()
    for x in batches(num_ranks):
        state, metrics = ranks(state, x)
        losses.append(metrics.loss.reshape(-1)[0].item())
    return losses, ranks.gather(state)


def check(found: Found, expected: Found, *, tolerance: float) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance / 10)
    weights = {name: found[1][name].reshape(x.shape) for name, x in expected[1].items()}
    torch.testing.assert_close(weights, expected[1], rtol=tolerance, atol=tolerance)


def ids(case: Any) -> str:
    return "-".join(case) if isinstance(case, tuple) else str(case)


@pytest.mark.sample(20)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_derivative_on_one_rank_has_the_bits_of_the_plain_loop(case: Any) -> None:
    expected = plain(*case)
    for stage in range(4):
        check(trained(case, stage), expected, tolerance=0.0)


TRACED = "simulate: ranks in lockstep must not wait for each other while PyTorch traces"


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_ranks_in_lockstep_differentiate_each_its_own_batch(case: Any) -> None:
    """They share a process, whose levels of forward mode PyTorch counts. A mean over
    ranks rounds otherwise than one over a plain loop's batches.
    """
    if case[0] == "linearize":
        with pytest.raises(ValueError, match=TRACED):
            simulated(case, 3, 2, "lockstep")
        return
    expected = plain(*case, 3)
    for stage in (0, 3):
        check(simulated(case, stage, 3, "lockstep"), expected, tolerance=2e-5)


OF_AUTOGRAD = (
    "autograd_grad",
    "autograd_twice",
    "autograd_jacobian",
    "autograd_hvp",
    "checkpoint_inside",
    "checkpoint_around",
)
FORWARD_MODE = (
    "jvp",
    "jacfwd",
    "hessian",
    "forward_over_reverse",
    "reverse_over_forward",
    "forward_over_forward",
    "checkpoint_around_jvp",
)
UNDER_VMAP = {
    **dict.fromkeys(product(OF_AUTOGRAD, OF), "requires_grad|does not require grad"),
    **dict.fromkeys(product(FORWARD_MODE, ["params"]), "more than one element"),
    **dict.fromkeys(product(["linearize"], OF), "Batching rule not implemented"),
    ("checkpoint_around_jvp", "inputs"): "escaped from inside a function being vmapped",
}
"""What PyTorch says of a transform that torch.vmap, around all ranks, does not take."""


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_ranks_under_vmap_differentiate_what_pytorch_can_batch(case: Any) -> None:
    """Batched products round otherwise."""
    if refused := UNDER_VMAP.get(case[:2]):
        with pytest.raises(ValueError, match=rf"torch.vmap cannot run this step.*({refused})"):
            simulated(case, 3, 2, "vmap")
        return
    for num_ranks, stage in ((2, 0), (2, 3)):
        check(simulated(case, stage, num_ranks, "vmap"), plain(*case, num_ranks), tolerance=2e-5)


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_one_graph_holds_every_derivative_that_pytorch_can_trace(case: Any) -> None:
    if case[0] == "linearize":  # it traces itself, and reads numbers
        with pytest.raises(RuntimeError, match=r"aten\._local_scalar_dense"):
            trained(case, 3, **AOT)
        return
    if case[0] in FORWARD_MODE and case[1] == "params":
        return  # PyTorch's cache of fake tensors may make a wrong tangent, and says so
    expected = plain(*case)
    for stage in (0, 3):
        check(trained(case, stage, **AOT), expected, tolerance=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("num_ranks", [3, 2, 4])
@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if name != "linearize"])
def test_real_ranks_differentiate_as_the_plain_loop(
    ranks: RankPool, transform: str, num_ranks: int
) -> None:
    assert ranks(num_ranks, _differ_on_ranks, transform) == [[]] * num_ranks


def _differ_on_ranks(transform: str) -> list[str]:
    found, world_size = [], torch.distributed.get_world_size()
    for case in product([transform], OF, PLACES):
        expected = plain(*case, world_size)
        for stage in (2, 3):
            try:  # sums over ranks round
                check(trained(case, stage), expected, tolerance=2e-5)
            except AssertionError as error:
                found.append(f"{ids(case)}, stage {stage}: {error}")
    return found


class Checkpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        def saved(z: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.a, z, use_reentrant=False).sum()  # type: ignore[no-any-return]

        return self.b(torch.func.grad(saved)(x)).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", [0, 3])
def test_hooks_of_a_script_are_refused_by_pytorch_as_without_a_step(stage: int) -> None:
    step = fzero.make_train_step(
        Checkpoints(),
        {
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
        units=["a", "b"],
    )
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        step(step.init(), torch.ones(2, 3))
    assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None
    assert torch.autograd.graph.disable_saved_tensors_hooks.__module__ == "torch.autograd.graph"
