"""Transforms beside others: each of them trains, sees and sends what it does alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest
import torch
from compressing import data, net
from test_weight_views import bounded
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import fzero
from fzero.transforms import (
    Changes,
    FunctionView,
    ModelTransform,
    lora,
    merged,
    packed,
    weight_norm,
)


def settings(stage: int = 0, num_ranks: int = 1) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    return {
        "zero_optimization": zero,
        "optimizer": sgd,
        "train_micro_batch_size_per_gpu": 16 // num_ranks,
    }


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight


@pytest.mark.parametrize("order", [0, 1])
def test_what_a_transform_of_ones_own_adds_stays_trained_beside_adapters(order: int) -> None:
    """In either order, and where the transforms are called once more for a model (a
    simulation does).
    """
    transforms: list[ModelTransform] = [lora("*.up", 2), bounded]
    model = net()
    for _ in range(2):
        step = fzero.make_train_step(model, settings(), transforms=transforms[:: 1 - 2 * order])
        before = step.gather(step.init())
        found = step.gather(step(step.init(), data(0))[0])
        moved = {name for name, x in found.items() if not torch.equal(x, before[name])}
        assert moved == {
            f"blocks.{i}.{name}" for i in range(2) for name in ("mlp.up.lora_B", "out.size")
        }


def test_several_adapters_train_what_each_of_them_names() -> None:
    step = fzero.make_train_step(
        net(),
        settings(),
        transforms=[lora("*.up", 2, trains="head.*"), lora("*.out", 2, trains="blocks.0.out.bias")],
    )
    trained = {
        n for b in step.plan.flat_buffers if b.trainable for n in b.layout.names if "lora" not in n
    }
    assert trained == {"head.weight", "head.bias", "blocks.0.out.bias"}


@pytest.mark.parametrize("name", ["head.weight", "foot.weight"])
def test_a_view_of_no_parameter_or_of_a_second_name_is_an_error(name: str) -> None:
    def other(spec: Any) -> Changes:
        return Changes(name="other", views={name: (FunctionView(torch.tanh),)})

    with pytest.raises(
        ValueError, match=f"by the first of their names, got '{name}' from 'other'; .* table.weight"
    ):
        fzero.make_train_step(Tied(), settings(), transforms=[other])


@pytest.mark.covering(1)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_nontrainable_weights"])
def test_quantized_gathers_leave_packed_bytes_as_they_are(key: str, bits: Any) -> None:
    """Two numbers in a byte are no number that a codec may round. The scales are equal,
    so that their block keeps them.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    with torch.no_grad():
        model[0].weight[:, 0] = 1.0  # the largest of each row
        model[0].weight[:, 1:].clamp_(-0.5, 0.5)
    cfg = settings(3, num_ranks=2)
    cfg["zero_optimization"][key] = True
    seen: list[Tensor] = []

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        seen.append(net[0].weight.detach().clone())
        return net(x).sum()

    step = fzero.make_train_step(model, cfg, loss_fn=loss, transforms=[packed("0", bits=bits)])
    ranks = fzero.simulate(step, 2, by="lockstep")
    state = ranks.init()
    ranks.evaluate(state, torch.ones(2, 8, 16))
    torch.testing.assert_close(
        seen[0], merged(step, ranks.gather(state))["0.weight"], rtol=1e-6, atol=0
    )


def test_a_weight_with_its_input_first_has_a_length_for_each_output() -> None:
    torch.manual_seed(0)
    model, linear = nn.Sequential(Conv1D(6, 4)), nn.Linear(4, 6)
    linear.weight.data, linear.bias.data = (
        model[0].weight.detach().t().clone(),
        model[0].bias.detach().clone(),
    )
    found = []
    for each in (model, nn.Sequential(linear)):
        step = fzero.make_train_step(
            each,
            settings(),
            loss_fn=lambda net, x: net(x).square().mean(),
            transforms=[weight_norm("*")],
        )
        state, _ = step(step.init(), torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))
        found.append(merged(step, step.gather(state))["0.weight"])
    torch.testing.assert_close(found[0], found[1].t(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("how", [{"bits": 4, "group": 16}, {"bits": 8, "group": 8}])
def test_a_weight_is_packed_in_one_way(how: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(16, 4))
    for _ in range(2):
        fzero.make_train_step(model, settings(), transforms=[packed("*", group=16)])
    with pytest.raises(
        ValueError, match=f"must be packed once, got bits={how['bits']}, group={how['group']}"
    ):
        fzero.make_train_step(model, settings(), transforms=[packed("*", **how)])


class Moving(nn.Module):
    """A layer with a buffer that its forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.c = nn.Parameter(torch.ones(3)), torch.nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.c.add_(0.25)
        return (self.weight * x).sum()


@dataclass(frozen=True)
class ReadsABuffer:
    """W · (1 + c)."""

    offset: int = 0
    reads: tuple[str, ...] = ("c",)
    trains: tuple[str, ...] = ()
    needs_input: bool = True

    def shared(self, x: Tensor, tensors: Any) -> Any:
        return {}

    def value(self, x: Tensor, tensors: Any, n: Any) -> Tensor:
        return x * (1 + tensors["c"])

    def pulled(self, grad: Any, x: Any, tensors: Any, n: Any) -> Any:
        return fzero.transforms.pulled_by_autograd(self, grad, x, tensors, n)


@pytest.mark.parametrize("compile", [None, "step"])
def test_a_view_of_a_buffer_that_a_forward_moves_is_refused(compile: Any) -> None:
    """Runners would read it before and after the forwards of a window."""
    step = fzero.make_train_step(
        Moving(),
        {"zero_optimization": {"stage": 1}},
        compile=compile,
        compile_backend="aot_eager",
        transforms=[
            lambda spec: fzero.transforms.Changes(
                name="scaled", views={"weight": (ReadsABuffer(),)}
            )
        ],
    )
    with pytest.raises(
        ValueError, match="'c': must not change in a forward where a view of a transform reads it"
    ):
        step(step.init(), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("transform", "rule"),
    [
        (lambda spec: None, "must return fzero.transforms.Changes, got a NoneType"),
        (
            lambda spec: fzero.transforms.Changes(name="x", added=frozenset({"gone"})),
            "got 'gone' from 'x'",
        ),
        (
            lambda spec: fzero.transforms.Changes(name="x", views={"c": ()}),
            "views must be of parameters",
        ),
    ],
)
def test_what_a_transform_returns_is_checked(transform: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        fzero.make_train_step(Moving(), {}, transforms=[transform])
    with pytest.raises(ValueError, match="must be a list"):
        fzero.make_train_step(Moving(), {}, transforms=transform)


def test_transforms_of_one_name_are_told_apart() -> None:
    same = [
        lambda spec, text=text: fzero.transforms.Changes(name="two words", text=text)
        for text in "ab"
    ]
    step = fzero.make_train_step(Moving(), {}, transforms=same)
    assert step.runtime.changes.texts == {"two words": "a", "two words 2": "b"}


def _twice(block: nn.Sequential, x: Tensor) -> Tensor:
    return nn.Sequential.forward(block, nn.Sequential.forward(block, x))


class KeepsACopy(nn.Module):
    """Computes with a copy of its blocks, made in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
        self.blocks[1].forward = MethodType(_twice, self.blocks[1])

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "old"):
            self.old = [copy.deepcopy(self.blocks)]
        with torch.no_grad():
            y = self.old[0](x)
        return (self.blocks(x + y) - y).square().mean()


@pytest.mark.parametrize(
    "how", [{"compile": "block", "compile_backend": "aot_eager"}, {"checkpoint": 1}], ids=str
)
def test_a_copy_that_a_forward_makes_of_its_blocks_has_their_old_parameters(
    how: dict[str, Any],
) -> None:
    def losses(**how: Any) -> list[float]:
        torch.manual_seed(0)
        cfg = {
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3},
        }
        step = fzero.make_train_step(KeepsACopy(), cfg, **how)
        state, found = step.init(), list[float]()
        for _ in range(4):
            state, metrics = step(state, torch.ones(4, 8))
            found.append(float(metrics.loss))
        return found

    assert losses(**how) == pytest.approx(losses(), rel=1e-6)
