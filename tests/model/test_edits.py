"""What a script changes in its model between two calls of a step: it is right, an
error, or a warning, never lost in silence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import fzero
from fzero.runtime.module_buffers import agreed_buffers

X = torch.linspace(-1, 1, 16).view(4, 4)


class Model(nn.Module):
    """Blocks, a head, a buffer and a module without parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head, self.act = nn.Linear(4, 4), nn.Tanh()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.act(block(x))
        return (self.head(x) * self.scale).square().mean()


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def remove(model: Any) -> None:
    del model.blocks[2]


STRUCTURE: dict[str, Callable[[Any], Any]] = {
    "a new head": lambda model: setattr(model, "head", nn.Linear(4, 4)),
    "reversed blocks": lambda model: setattr(
        model, "blocks", nn.ModuleList(list(model.blocks)[::-1])
    ),
    "a new parameter": lambda model: setattr(model.blocks[0], "bias", nn.Parameter(torch.ones(4))),
    "a tie": lambda model: setattr(model.blocks[1], "weight", model.blocks[0].weight),
    "removed": remove,
    "one more parameter": lambda model: setattr(model.head, "more", nn.Parameter(torch.ones(4))),
    "one more module": lambda model: setattr(model, "more", nn.Linear(4, 4)),
    "one more buffer": lambda model: model.register_buffer("more", torch.ones(4)),
}
ACCEPTED: dict[str, Callable[[Any], Any]] = {
    "another activation": lambda model: setattr(model, "act", nn.ReLU()),
    "another container": lambda model: setattr(model, "blocks", nn.ModuleList(list(model.blocks))),
    "a hook": lambda model: model.head.register_forward_hook(lambda module, args, out: out * 2),
    "an own forward": lambda model: setattr(model.blocks[0], "forward", lambda x: x * 1.5),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "fill": lambda model: model.scale.fill_(0.5),
    "load": lambda model: model.load_state_dict(
        {name: x + 1 for name, x in model.state_dict().items()}
    ),
    "other memory": lambda model: setattr(model.head.weight, "data", torch.ones(4, 4)),
}


def losses(
    model: Model, stage: int, change: Callable[[Any], Any], num_before: int, runner: str
) -> list[float]:
    how: Any = (
        {"compile": runner, "compile_backend": "aot_eager"} if runner in ("step", "block") else {}
    )
    how |= {"units": ["blocks.*"]} if runner == "block" else {}
    step: Any = fzero.make_train_step(model, config(stage), **how)
    step = fzero.simulate(step, 2, by=runner) if runner in ("lockstep", "vmap") else step  # type: ignore[arg-type]
    x, found = torch.stack([X, X]) if runner in ("lockstep", "vmap") else X, []
    state = step.init()
    for index in range(3):
        if index == num_before:
            change(model)
        state, metrics = step(state, x)
        found.append(metrics.loss.item())
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("runner", ["eager", "block", "step", "lockstep", "vmap"])
@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("change", STRUCTURE)
def test_another_structure_of_a_model_is_an_error(
    change: str, num_before: int, runner: str
) -> None:
    for stage in (0, 3):
        with pytest.raises(
            ValueError, match=r"must not change after the step is made|must keep its values"
        ):
            losses(Model(), stage, STRUCTURE[change], num_before, runner)


def _errors(stage: int, num_before: int) -> dict[str, str]:
    """What each change raises; any error of the later ones on fewer ranks ends in
    another.
    """
    found = {}
    for name, change in STRUCTURE.items():
        with pytest.raises(ValueError) as raised:
            losses(Model(), stage, change, num_before, "eager")
        found[name] = str(raised.value)
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("stage", [0, 3])
def test_another_structure_is_the_same_error_on_every_rank(
    ranks: RankPool, stage: int, num_before: int
) -> None:
    # In stage 3 most ranks hold no part of the parameter that was replaced.
    first, *others = ranks(3, _errors, stage, num_before)
    assert others == [first] * 2


def _goes_on(stage: int) -> list[float]:
    model, found = Model(), []
    step = fzero.make_train_step(model, config(stage))
    state = step.init()
    for index in range(3):
        state, metrics = step(state, X)
        found.append(metrics.loss.item())
        model.load_state_dict(step.gather(state), assign=index == 1)
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_with_the_states_own_values_may_replace_others(
    ranks: RankPool, stage: int
) -> None:
    expected = losses(Model(), 0, lambda model: None, 0, "eager")
    for found in ranks(2, _goes_on, stage):
        torch.testing.assert_close(found, expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("runner", ["eager", "block", "step"])
@pytest.mark.parametrize("change", ACCEPTED)
def test_a_change_that_no_state_holds_trains_as_the_plain_loop(change: str, runner: str) -> None:
    plain = Model()
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for index in range(3):
        if index == 1:
            ACCEPTED[change](plain)
        loss = plain(X)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for stage in (0, 3):
        torch.testing.assert_close(losses(Model(), stage, ACCEPTED[change], 1, runner), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("runner", ["eager", "step", "lockstep"])
@pytest.mark.parametrize("change", WRITES)
def test_a_write_into_the_model_after_the_first_step_warns_once(change: str, runner: str) -> None:
    for stage in (0, 3):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            losses(Model(), stage, WRITES[change], 1, runner)
        assert ["was written to after the step" in str(x.message) for x in found].count(True) == 1


def test_the_states_own_values_may_be_written_into_the_model() -> None:
    model = Model()
    step = fzero.make_train_step(model, config(0))
    state, _ = step(step.init(), X)
    model.load_state_dict(step.gather(state))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(state, X)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
)
def test_inexact_buffers_are_averaged(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 2.0]], dtype=dtype)
    torch.testing.assert_close(
        agreed_buffers(rows), torch.tensor([2.0, 2.0], dtype=dtype), rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_exact_buffers_are_those_of_rank_0(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1, 0], [0, 0]]).to(dtype)
    assert torch.equal(agreed_buffers(rows), rows[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("change", STRUCTURE)
def test_another_structure_of_an_engines_model_is_an_error(change: str, num_before: int) -> None:
    import fzero.deepspeed as deepspeed

    for stage in range(4):
        engine = deepspeed.initialize(model=Model(), config=config(stage))[0]
        with pytest.raises(
            ValueError, match=r"must be the one that was passed to initialize|must be there when"
        ):
            for index in range(2):
                if index == num_before:
                    STRUCTURE[change](engine.module)
                engine.backward(engine(X))
                engine.step()
