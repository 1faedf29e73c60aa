"""The laws of an engine as an `nn.Module`, and of its parameters in stage 3, as
libraries for DeepSpeed use them.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engines import WIDTH, Net, assert_close, criterion, data, made, mine
from ranks import RankPool
from torch import Tensor, nn
from training import make

import fzero
from fzero.deepspeed import zero
from fzero.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus


class Wrapped(nn.Module):
    """A script's module around an engine."""

    def __init__(self, engine: fzero.Engine) -> None:
        super().__init__()
        self.inner = engine

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def _as_module(stage: int) -> dict[str, Any]:
    engine = made(stage)
    assert isinstance(engine, nn.Module) and isinstance(engine, fzero.Engine)
    names = [name for name, _ in make(Net).named_parameters()]
    assert [name for name, _ in engine.named_parameters()] == [f"module.{name}" for name in names]
    assert all(
        own is param
        for own, param in zip(engine.parameters(), engine.module.parameters(), strict=True)
    )
    assert list(engine.state_dict()) == [f"module.{name}" for name in engine.module.state_dict()]
    assert dict(engine.named_children()) == {"module": engine.module}
    calls: list[str] = []
    hooks = [engine.register_forward_pre_hook(lambda module, args: calls.append("before"))]
    hooks.append(engine.register_forward_hook(lambda module, args, out: calls.append("after")))
    outer = Wrapped(engine).eval()
    assert not (engine.training or engine.module.training)
    outer.train().to(torch.float32).to("cpu").float()
    assert engine.training and engine.module.training and engine.to("cpu") is engine
    engine.module.to("cpu")
    with pytest.raises(
        RuntimeError, match=r"engine.to: must keep the device and dtypes of its state"
    ):
        outer.half()
    x, y = mine(engine, data(0))
    criterion(outer(x), y).backward()
    engine.step()
    assert calls == ["before", "after"]
    for hook in hooks:
        hook.remove()
    weights = engine.module_state_dict()
    engine.load_state_dict({f"module.{name}": torch.zeros_like(x) for name, x in weights.items()})
    assert all(not x.any() for x in engine.module_state_dict().values())
    missing, unexpected = engine.load_state_dict(
        {"module.head.bias": weights["head.bias"], "other": 1}, strict=False
    )
    assert "module.head.weight" in missing and unexpected == ["module.other"]
    assert next(iter(outer.state_dict())) == f"inner.module.{names[0]}"
    return weights


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_is_a_module(ranks: RankPool, stage: int) -> None:
    first, second = ranks(2, _as_module, stage)
    assert_close(first, second, 0.0)


# --- stage 3 --------------------------------------------------------------------------------------


def maybe_zero_3(param: Any) -> Tensor:
    """The idiom of PEFT and FastChat."""
    from fzero.deepspeed import zero

    if hasattr(param, "ds_id"):
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with zero.GatheredParameters([param]):
            assert param.ds_status == ZeroParamStatus.AVAILABLE
            copied: Tensor = param.data.detach().cpu().clone()
            return copied
    return param.detach().cpu().clone()


def _divided() -> Any:
    engine = made(3)
    before = {name: param.ds_shape for name, param in engine.module.named_parameters()}
    assert all(param.shape == (0,) and not param.numel() for param in engine.parameters())
    assert all(x.shape == (0,) for x in engine.state_dict().values())
    assert [p.ds_id for p in engine.parameters()] == list(range(len(before)))
    x, y = mine(engine, data(0))
    shapes = []
    hook = engine.module.head.register_forward_pre_hook(
        lambda module, args: shapes.append(module.weight.shape)
    )
    engine.backward(criterion(engine(x), y))
    engine.step()
    hook.remove()
    assert shapes == [(3, WIDTH)]
    whole = {name: maybe_zero_3(param) for name, param in engine.module.named_parameters()}
    pieces = {name: param.ds_tensor.clone() for name, param in engine.module.named_parameters()}
    return before, whole, pieces, engine.module_state_dict()


def test_parameters_of_stage_3_are_empty_outside_a_gather(ranks: RankPool) -> None:
    (shapes, whole, first, weights), (_, other, second, _) = ranks(2, _divided)
    expected = make(Net)
    for name, param in expected.named_parameters():
        assert shapes[name] == param.shape
        assert torch.equal(whole[name], weights[name]) and torch.equal(other[name], weights[name])
        assert torch.equal(torch.cat([first[name], second[name]]), weights[name].flatten())


class Asks(torch.autograd.Function):
    """A fused loss that asks whether its weight is there, as TRL's do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        assert weight.ds_status == ZeroParamStatus.AVAILABLE
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        assert weight.ds_status == ZeroParamStatus.AVAILABLE and weight.shape == (3, WIDTH)
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


class Fused(Net):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {**super().forward(x), "logits": Asks.apply(x, self.head.weight)}


def _fuses() -> bool:
    engine = made(3, model=Fused)
    x, y = mine(engine, data(0))
    engine.backward(criterion(engine(x), y))
    engine.step()
    return hasattr(torch.Tensor, "ds_status")


def test_a_fused_loss_finds_its_weight_available(ranks: RankPool) -> None:
    assert ranks(2, _fuses) == [False, False]


def _refuses() -> list[str]:
    engine = made(3)
    param = engine.module.head.weight
    reported = []
    for use in (
        lambda: param.clone(),
        lambda: param.cpu(),
        lambda: param.half(),
        lambda: param.to(torch.float16),
    ):
        with pytest.raises(
            RuntimeError, match="is sharded over the ranks and has no values here"
        ) as caught:
            use()
        reported.append(str(caught.value))
    assert param.to("cpu") is param and param.to(torch.float32) is param
    return reported


def test_computing_with_an_empty_parameter_is_refused(ranks: RankPool) -> None:
    for reported in ranks(2, _refuses):
        assert all("GatheredParameters" in text for text in reported)


def test_parameters_of_other_modules_keep_their_shapes() -> None:
    engine = made(3)
    other = make(Net)
    assert all(not hasattr(param, "ds_id") and param.numel() for param in other.parameters())
    engine.destroy()
    assert not any(hasattr(param, "ds_id") for param in engine.module.parameters())


# --- other tools that take the module -------------------------------------------------------------


def plain_tools(engine: Any, x: Tensor) -> dict[str, Any]:
    """Ways in which a script gives the engine's module to PyTorch's compilers."""
    module = engine.module
    return {
        "compile": lambda: torch.compile(module, backend="eager")(x),
        "compile of the engine": lambda: torch.compile(engine, backend="eager")(x),
        "compile of a part": lambda: module.last(torch.compile(module.first, backend="eager")(x)),
        "fx": lambda: torch.fx.symbolic_trace(module)(x),
        "export": lambda: torch.export.export(module, (x,)).module()(x),
        "trace": lambda: torch.jit.trace(module, x)(x),
        "script": lambda: torch.jit.script(module)(x),
    }


REFUSED = {
    "trace": "engine.module: must not be traced",
    "script": "Two: must not be scripted while an engine holds it",
}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x))
        return out


def _compiles(stage: int) -> None:
    engine, x = made(stage, model=Two), torch.randn(2, WIDTH)
    expected = engine(x).detach()
    refused = REFUSED | ({"export": "has no values here"} if stage == 3 else {})
    for name, use in plain_tools(engine, x).items():
        if name in refused:
            with pytest.raises((RuntimeError, AttributeError), match=refused[name]):
                use()
        else:
            torch.testing.assert_close(use(), expected, msg=name)
    with engine.gathered():
        for name, use in plain_tools(engine, x).items():
            if name != "script":
                torch.testing.assert_close(use(), expected, msg=name)
    with pytest.raises(AttributeError):
        _ = engine.module.forward.no_such_name
    before = {name: param.clone() for name, param in engine.module_state_dict().items()}
    compiled = torch.compile(engine.module, backend="eager")
    engine.backward(compiled(x).square().mean())
    engine.step()
    plain = Two()
    plain.load_state_dict(before)
    plain(x).square().mean().backward()
    moved = engine.module_state_dict()
    assert all(not torch.equal(moved[name], before[name]) for name in before)
    assert all(
        bool(((moved[name] - before[name]).sign() == -param.grad.sign()).all())
        for name, param in plain.named_parameters()
        if param.grad is not None
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_compilers_of_pytorch_get_the_engines_forward_or_are_refused_by_name(
    ranks: RankPool, stage: int
) -> None:
    ranks(1, _compiles, stage)


def test_parameters_that_are_gathered_twice_stay_gathered() -> None:
    engine = made(3)
    x, _ = mine(engine, data(0))
    with engine.gathered():
        alone = engine.module(x)["logits"]
        with engine.gathered(["head.bias"]) as inner:
            assert {*inner} == {"head.bias"} and torch.equal(engine.module(x)["logits"], alone)
    assert engine.open_window is None  # no forward of the engine


def test_an_engine_whose_state_was_away_when_it_should_gather_trains_on() -> None:
    engine = made(1)
    engine.offload_states()
    with (
        pytest.raises(RuntimeError, match="since offload_states; call reload_states first"),
        engine.gathered(),
    ):
        pass
    engine.reload_states()
    x, y = mine(engine, data(0))
    engine.backward(criterion(engine(x), y))
    engine.step()
    assert engine.was_step_applied()


def _loads() -> None:
    engine = made(3)
    weights = engine.module_state_dict()
    zeros = {name: torch.zeros_like(x) for name, x in weights.items()}
    with pytest.raises(RuntimeError, match=r"call engine\.load_module_state_dict"):
        engine.module.load_state_dict(zeros)
    part, of_part = engine.module.get_submodule("head"), {"weight": zeros["head.weight"]}
    with pytest.raises(RuntimeError, match=r"engine\.module\.head\.load_state_dict: parameters"):
        part.load_state_dict(of_part, strict=False)
    with zero.GatheredParameters(engine.parameters(), modifier_rank=0):
        copy.deepcopy(part).load_state_dict(of_part, strict=False)
        engine.module.load_state_dict(zeros)
    assert all(not x.any() for x in engine.module_state_dict().values())
    engine.destroy()
    assert all("load_state_dict" not in vars(each) for each in engine.module.modules())


def test_a_state_dict_that_the_module_itself_cannot_load_is_refused_by_name(
    ranks: RankPool,
) -> None:
    ranks(2, _loads)
