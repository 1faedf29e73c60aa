"""A module's buffers under an engine are those of a plain loop, whatever the script
does with them, and when.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import fzero

D = 6


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", torch.ones(2), persistent=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lower, self.norm, self.upper, self.table = (
            nn.Linear(D, D),
            nn.BatchNorm1d(D),
            nn.Linear(D, D),
            Table(),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.table.calls += 1
        x = self.norm(torch.tanh(self.lower(x))) * self.table.scale[0] * self.table.cache[0]
        return nn.functional.mse_loss(self.upper(x), y)


def batch(index: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * index + rank)
    return torch.randn(4, D, generator=generator), torch.randn(4, D, generator=generator)


def _load(module: Any, *, assign: bool) -> None:
    values = {"table.scale": torch.full((3,), 0.5), "norm.running_mean": torch.ones(D)}
    module.load_state_dict(values, strict=False, assign=assign)


def _without_gradients(module: Any) -> None:
    with torch.no_grad():
        module(*batch(77, 0))


HOW: dict[str, Callable[[Any], object]] = {
    "fill_": lambda m: m.table.scale.fill_(0.5),
    "through .data": lambda m: m.table.scale.data.fill_(0.5),
    "index": lambda m: m.table.scale.__setitem__(0, 0.25),
    "mul_ by what forwards wrote": lambda m: m.table.scale.mul_(m.table.calls.float() / 7),
    "assign": lambda m: setattr(m.table, "scale", torch.full((3,), 0.5)),
    "assign what is not saved": lambda m: setattr(m.table, "cache", torch.full((2,), 0.5)),
    "register again": lambda m: m.table.register_buffer("scale", torch.full((3,), 0.5)),
    "assign a counter": lambda m: setattr(m.table, "calls", torch.tensor(100)),
    "zero a counter": lambda m: m.table.calls.zero_(),
    "reset_running_stats": lambda m: m.norm.reset_running_stats(),
    "assign a statistic": lambda m: setattr(m.norm, "running_mean", torch.full((D,), 0.5)),
    "load_state_dict": lambda m: _load(m, assign=False),
    "load_state_dict, assign": lambda m: _load(m, assign=True),
    "a forward without gradients": _without_gradients,
}
WHEN = ("between two updates", "after a forward", "after a backward", "between micro-steps")
Found = tuple[list[float], dict[str, Tensor]] | str


def _script(
    use: Callable[[], object], when: str, forward: Any, backward: Any, step: Any
) -> list[Any]:
    """Three updates of two micro-steps each, and one use of the buffers; returns the
    losses.
    """
    losses = []
    for index in range(6):
        if index == 2 and when == "between two updates":
            use()
        loss = forward(index)
        if index == 3 and when == "after a forward":
            use()
        backward(loss)
        losses.append(loss)
        if index == 3 and when == "after a backward":
            use()
        step(index)
        if index == 2 and when == "between micro-steps":
            use()
    return losses


def _plain(how: str, when: str, world_size: int) -> Found:
    """One module per rank; gradients, and at an update buffers, are averaged."""
    torch.manual_seed(0)
    first = Net()
    modules = [first, *(copy.deepcopy(first) for _ in range(world_size - 1))]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.2) for module in modules]

    def update(index: int) -> None:
        if index % 2 == 0:
            return
        for params in zip(*(module.parameters() for module in modules), strict=True):
            mean = torch.stack([param.grad for param in params]).mean(0)
            for param in params:
                param.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for buffers in zip(*(module.buffers() for module in modules), strict=True):
                is_float = buffers[0].is_floating_point()
                agreed = torch.stack(buffers).mean(0) if is_float else buffers[0].clone()
                for buffer in buffers:
                    buffer.copy_(agreed)

    def on_each(index: int) -> list[Tensor]:
        return [module(*batch(index, rank)) for rank, module in enumerate(modules)]

    def back(losses: list[Tensor]) -> None:
        for loss in losses:
            (loss / 2).backward()

    try:
        losses = _script(
            lambda: [HOW[how](module) for module in modules], when, on_each, back, update
        )
    except RuntimeError as error:
        return str(error)
    means = [float(torch.stack([x.detach() for x in each]).mean()) for each in losses]
    return means, {name: x.clone() for name, x in first.state_dict().items()}


def _engine(how: str, when: str, stage: int) -> Found:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine: Any = fzero.initialize(model=Net(), config=config)[0]
    axis = engine.train_step.runtime.mesh.world
    try:
        found = _script(
            lambda: HOW[how](engine.module),
            when,
            lambda i: engine(*batch(i, axis.rank)),
            engine.backward,
            lambda _: engine.step(),
        )
    except RuntimeError as error:
        return str(error)
    losses = [x.item() for x in found]
    if axis.size > 1:
        every = fzero.comms.collectives.exchange(
            losses, axis, label=fzero.comms.records.Label("other")
        )
        losses = [sum(each) / axis.size for each in zip(*every, strict=True)]
    return losses, engine.module_state_dict()


def _table(how: str, stages: tuple[int, ...]) -> dict[tuple[str, int], Found]:
    return {(when, stage): _engine(how, when, stage) for when in WHEN for stage in stages}


def _check(how: str, found: dict[tuple[str, int], Found], world_size: int) -> None:
    for (when, stage), of_engine in found.items():
        plain = _plain(how, when, world_size)
        if isinstance(plain, str):  # autograd refuses a write into what its backward needs
            assert "modified by an inplace operation" in plain
            assert isinstance(of_engine, str) and "in place" in of_engine.replace(
                "inplace", "in place"
            ), (when, stage)
            continue
        assert not isinstance(of_engine, str), (when, stage, of_engine)
        # means of two losses, and of buffers over the ranks, are rounded
        torch.testing.assert_close(
            of_engine, plain, rtol=1e-5, atol=1e-5, msg=f"{when}, stage {stage}".__add__
        )


@pytest.mark.sample(7)
@pytest.mark.parametrize("how", HOW)
def test_a_buffer_that_a_script_writes_or_assigns_is_the_one_of_a_plain_loop(how: str) -> None:
    _check(how, _table(how, (0, 1, 2, 3)), 1)


@pytest.mark.sample(5)
@pytest.mark.parametrize("how", HOW)
def test_so_it_is_on_two_ranks(ranks: RankPool, how: str) -> None:
    _check(how, ranks(2, _table, how, (0, 3))[0], 2)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "value",
    [torch.ones(4), torch.ones(3, dtype=torch.double), None],
    ids=["shape", "dtype", "none"],
)
@pytest.mark.parametrize("call", ["forward", "save_checkpoint", "module_state_dict"])
def test_a_buffer_of_another_form_is_refused_by_name(
    value: Tensor | None, call: str, tmp_path: Any
) -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.2}}}
    engine: Any = fzero.initialize(model=Net(), config=config)[0]
    arguments = {"forward": batch(0, 0), "save_checkpoint": (tmp_path,), "module_state_dict": ()}[
        call
    ]
    engine.module.table.scale = value
    with pytest.raises(ValueError, match=r"buffer 'table\.scale': must (keep|remain)"):
        getattr(engine, call)(*arguments)


class Routed(nn.Module):
    _keep_in_fp32_modules_strict = ("gate.*bias",)
    _keep_in_fp32_modules = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.gate = nn.Linear(D, D), nn.Linear(D, D)
        self.gate.register_buffer("score_bias", torch.linspace(7, 7.01, 4).bfloat16())
        self.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("setting", "precision", "wide"),
    [
        ("auto", "bf16", {"gate.score_bias"}),
        ("auto", "fp16", {"gate.score_bias", "scale"}),
        ("auto", None, set()),
        ([], "bf16", set()),
        (["sc*e"], "bf16", {"scale", "gate.score_bias"}),  # found anywhere in a name
        (["^scale"], "bf16", {"scale"}),
    ],
)
def test_named_buffers_stay_in_fp32_beside_parameters_of_16_bits(
    setting: Any, precision: str | None, wide: set[str]
) -> None:
    keys: dict[str, Any] = {} if precision is None else {precision: {"enabled": True}}
    keys |= {"train_batch_size": 1, "data_types": {"keep_in_fp32_modules": setting}}
    model = Routed()
    values = {name: x.float() for name, x in model.named_buffers()}
    engine = fzero.initialize(model=model, config={**keys, "optimizer": {"type": "AdamW"}})[0]
    found = dict(engine.module.named_buffers())
    assert {name for name, x in found.items() if x.dtype == torch.float32} == wide
    assert all(torch.equal(x.float(), values[name]) for name, x in found.items())


def test_buffers_that_stay_in_fp32_exclude_one_dtype_for_all() -> None:
    both = {"keep_in_fp32_modules": ["scale"], "buffer_dtype": "bfloat16"}
    with pytest.raises(fzero.ConfigError, match="keep_in_fp32_modules excludes buffer_dtype"):
        fzero.Config.load({"data_types": both})


def test_a_loaded_buffer_must_have_its_own_shape() -> None:
    engine: Any = fzero.initialize(model=Net(), config={"optimizer": {"type": "SGD"}})[0]
    wrong = {"norm.running_mean": torch.ones(1)}
    with pytest.raises(
        ValueError, match=r"buffer 'norm.running_mean': must be given a value of its own shape"
    ):
        engine.load_module_state_dict(wrong, strict=False)
    engine.load_module_state_dict({"table.calls": torch.tensor([3])}, strict=False)
    assert engine.module.table.calls.shape == () and engine.module.table.calls == 3


def test_statistics_of_forwards_without_gradients_are_saved(tmp_path: Any) -> None:
    """`torch.optim.swa_utils.update_bn` recomputes them."""
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.2}}}
    torch.manual_seed(0)
    plain = Net()
    engine: Any = fzero.initialize(model=copy.deepcopy(plain), config=config)[0]
    for module in (plain, engine):
        with torch.no_grad():
            for index in range(3):
                module(*batch(index, 0))
    engine.save_checkpoint(tmp_path)
    other: Any = fzero.initialize(model=Net(), config=config)[0]
    other.load_checkpoint(tmp_path)
    for name, buffer in plain.named_buffers():
        if name != "table.cache":
            assert torch.equal(other.module.get_buffer(name), buffer), name


DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int32,
    torch.bool,
)


class EveryDtype(nn.Module):
    """Buffers that each rank changes by what it sees, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        for dtype in DTYPES:
            self.register_buffer(f"of_{str(dtype)[6:]}", torch.ones(3, dtype=dtype))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for dtype in DTYPES:
            buffer = self.get_buffer(f"of_{str(dtype)[6:]}")
            seen = x.detach()[0, :3].double()
            if dtype.is_complex:
                seen = torch.complex(seen, x.detach()[1, :3].double())
            buffer.copy_(buffer + 8 * seen if dtype != torch.bool else seen > 0)
        return nn.functional.mse_loss(self.linear(x), y)


def _every_dtype(stage: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The buffers after each of two steps, of an engine; and after two steps of the
    step API.
    """
    cfg = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    torch.manual_seed(0)
    engine, seen = fzero.initialize(model=EveryDtype(), config=cfg)[0], []
    step = fzero.make_train_step(EveryDtype(), cfg)
    state = step.init()
    for index in range(2):
        engine.backward(engine(*batch(index, step.rank)))
        engine.step()
        seen.append({name: buffer.clone() for name, buffer in engine.module.named_buffers()})
        state, _ = step(state, batch(index, step.rank))
    return seen, dict(state.buffers)


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_buffers_of_every_dtype_that_ranks_change_differently_are_averaged_or_rank_0s(
    ranks: RankPool, world_size: int, stage: int
) -> None:
    found = ranks(world_size, _every_dtype, stage)
    plain = [EveryDtype() for _ in range(world_size)]
    for index in range(2):
        for rank, module in enumerate(plain):
            module(*batch(index, rank))
        for name, first in plain[0].named_buffers():
            inexact = first.is_floating_point() or first.is_complex()
            rows = torch.stack([module.get_buffer(name) for module in plain])
            wide = torch.complex128 if rows.is_complex() else torch.float64
            agreed = rows.to(wide).mean(0).to(first.dtype) if inexact else first.clone()
            for module in plain:
                module.get_buffer(name).copy_(agreed)
            for of_engine, of_step in found:
                torch.testing.assert_close(
                    of_engine[index][name], agreed, msg=f"{name}: {{}}".format
                )
                assert index == 0 or torch.equal(of_step[name], of_engine[1][name]), name
