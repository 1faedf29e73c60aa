"""The laws of freezing and unfreezing in mid-training: as a plain loop with
torch.optim, in every stage, or an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
from engines import Net, assert_close, criterion, data, mine, settings
from ranks import RankError, RankPool
from torch import Tensor, nn
from training import ADAMW, Odd, Plain, adamw, config, make, tokens, vectors

import fzero
import fzero.deepspeed as deepspeed
from fzero.optim.transforms import step_spec

Phases = Sequence[tuple[str, ...]]
"""What is frozen in each phase: parts of names."""
NUM_STEPS = 3
NARROW: dict[str, Any] = {"bf16": {"enabled": True}}


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part_ in name for part_ in parts))


# --- steps ----------------------------------------------------------------------------------------

PHASES: Phases = [("blocks.2", "norm.bias"), ("blocks.0.up", "unused"), ()]


class Trained(NamedTuple):
    ranks: fzero.simulate.LockstepRanks  # type: ignore[name-defined]
    step: fzero.TrainStep
    state: Any


def phase(
    number: int,
    before: Trained | None,
    *,
    stage: int,
    model: nn.Module,
    keys: dict[str, Any],
    **options: Any,
) -> Trained:
    """The steps of one phase on two ranks, after those of the one before."""
    freeze(model, PHASES[number])
    after = None if before is None else before.step
    step = fzero.make_train_step(model, config(stage) | keys, after=after, **options)
    ranks = fzero.simulate(step, 2, by="lockstep")
    state = ranks.init() if before is None else fzero.reshard(before.state, before.ranks, ranks)
    for index in range(number * NUM_STEPS, (number + 1) * NUM_STEPS):
        state, _ = ranks(state, tuple(torch.stack(x.chunk(2)) for x in tokens(index)))
    return Trained(ranks, step, state)


def in_phases(stage: int, keys: dict[str, Any] | None = None, **options: Any) -> dict[str, Tensor]:
    model, trained = make(Odd), None
    for number in range(len(PHASES)):
        trained = phase(number, trained, stage=stage, model=model, keys=keys or {}, **options)
    assert trained is not None
    weights: dict[str, Tensor] = trained.ranks.gather(trained.state)
    return weights


def test_with_masters_all_stages_give_the_same_bits() -> None:
    first, *others = (in_phases(stage, NARROW) for stage in range(4))
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
    exact = in_phases(0)
    assert all(
        float((first[name] - exact[name]).abs().max()) < 0.05
        for name in exact
        if exact[name].numel()
    )


@pytest.mark.parametrize("compiled", [None, "step"])
@pytest.mark.parametrize("flag", [True, False])
def test_a_flag_that_changed_since_the_step_was_made_is_an_error_that_names_it(
    compiled: Any, flag: bool
) -> None:
    model = make(Plain)
    freeze(model, [] if not flag else ["blocks.1"])
    step = fzero.make_train_step(model, config(1), compile=compiled, compile_backend="aot_eager")
    state = step.init()
    freeze(model, ["blocks.1"] if not flag else [])
    word = "was unfrozen" if flag else "was frozen"
    message = (
        rf"'blocks.1.weight', 'blocks.1.scale' {word}; .*after=step\); state = "
        rf"fzero.reshard\(state, step, new\)"
    )
    with pytest.raises(ValueError, match=message):
        step(state, vectors(0))
    with pytest.raises(ValueError, match=message):
        step.begin(state)
    freeze(model, [] if not flag else ["blocks.1"])
    model.to("meta")
    step.begin(state)


def test_what_begins_anew_is_not_counted_with_what_goes_on() -> None:
    model = make(Odd)
    before = phase(0, None, stage=1, model=model, keys={})
    freeze(model, PHASES[1])
    new = fzero.simulate(fzero.make_train_step(model, config(1)), 2, by="lockstep")
    with pytest.raises(
        ValueError, match=r"'blocks.0.norm.bias' begins anew; make the new step with after="
    ):
        fzero.reshard(before.state, before.ranks, new)
    with pytest.raises(
        ValueError,
        match=r"after must be a step of make_train_step, or fzero.checkpoint.starts.*got int",
    ):
        fzero.make_train_step(model, config(1), after=3)  # type: ignore[arg-type]


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "loaded"), [(0, 3), (3, 1)])
def test_a_checkpoint_of_other_frozen_parameters_loads_as_reshard_does_and_warns(
    saved: int, loaded: int, tmp_path: Path
) -> None:
    model = make(Odd)
    before = phase(0, None, stage=saved, model=model, keys=NARROW)
    fzero.save(before.state, tmp_path, step=before.ranks)
    freeze(model, PHASES[1])
    starts = fzero.checkpoint.starts(tmp_path)
    steps = [
        fzero.make_train_step(model, config(loaded) | NARROW, after=after)
        for after in (before.step, starts)
    ]
    assert repr(steps[0].plan.flat_buffers) == repr(steps[1].plan.flat_buffers)
    ranks = fzero.simulate(steps[1], 2, by="lockstep")
    with pytest.warns(
        UserWarning,
        match=(
            r"optimizer state of .*'blocks.2.norm.weight' and \d more begins anew.*that of "
            r"'unused'"
        ),
    ):
        found = fzero.load(tmp_path, step=ranks).state
    moved = fzero.reshard(before.state, before.ranks, ranks)
    for name, x, y in zip(
        optree.tree_paths(found), optree.tree_leaves(found), optree.tree_leaves(moved), strict=True
    ):
        torch.testing.assert_close(
            x, y, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


class Anchored(NamedTuple):
    step: Any
    anchor: Any


def anchored(lr: float) -> fzero.Transform:
    """Pulls parameters to where they began."""

    def init(param: Tensor) -> Anchored:
        return Anchored(torch.zeros(()), param.clone())

    def update(grad: Tensor, param: Tensor, state: Anchored) -> tuple[Tensor, Tensor, Anchored]:
        param.sub_(lr * (grad + param - state.anchor))
        return grad, param, Anchored(state.step + 1, state.anchor)

    return fzero.Transform(init, update, lambda spec: Anchored(step_spec(spec), spec))


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("where", ["memory", "files"])
def test_a_transform_that_begins_from_the_weights_begins_from_those_of_its_own_time(
    stage: int, where: str, tmp_path: Path
) -> None:
    model = make(Plain)
    at = (
        {"placements": {"optimizer/*": fzero.Placement("nvme", path=str(tmp_path / "x"))}}
        if where == "files"
        else {}
    )
    freeze(model, ["blocks.1"])
    steps = [fzero.make_train_step(model, config(stage) | NARROW, transform=anchored(0.1))]
    freeze(model, [])
    steps.append(
        fzero.make_train_step(
            model, config(stage) | NARROW, transform=anchored(0.1), after=steps[0], **at
        )
    )
    old, new = (fzero.simulate(step, 2, by="lockstep") for step in steps)
    state = fzero.reshard(old.init(), old, new)
    for of_rank in fzero.simulation.unstacked(state, 2):
        for key, kept in of_rank.optimizer.items():
            assert torch.equal(kept.anchor[:], of_rank.master[key])


# --- engines --------------------------------------------------------------------------------------

OFTEN: Phases = [("blocks.0", "head.bias"), ("blocks.2", "blocks.1.norm"), (), ("blocks.1",), ()]
"""What is frozen keeps its moments until it is unfrozen."""


def some(model: nn.Module) -> list[nn.Parameter]:
    return [
        p for name, p in model.named_parameters() if "blocks.1" in name or name == "head.weight"
    ]


def everything(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


Held = Callable[[nn.Module], list[nn.Parameter]]


def often(held: Held, phases: Phases = OFTEN) -> tuple[list[float], dict[str, Tensor]]:
    """The oracle: one optimizer, which passes over what has no gradient."""
    module, norms = make(Net), []
    optimizer = adamw(held(module))
    for index in range(NUM_STEPS * len(phases)):
        freeze(module, phases[index // NUM_STEPS])
        x, y = data(index)
        criterion(module(x), y).backward()
        params = [p for p in held(module) if p.grad is not None]
        norms.append(float(nn.utils.clip_grad_norm_(params, 1.0)))
        optimizer.step()
        module.zero_grad()
    return norms, {name: x.clone() for name, x in module.state_dict().items()}


def engine_of(stage: int, held: Held, **keys: Any) -> fzero.Engine:
    model, cfg = make(Net), settings(stage, **keys)
    if held is everything:
        return fzero.initialize(model=model, config=cfg)[0]
    cfg.pop("optimizer")
    return fzero.initialize(model=model, config=cfg, optimizer=adamw(held(model)))[0]


def steps_of(engine: fzero.Engine, start: int, stop: int, phases: Phases = OFTEN) -> list[float]:
    norms = []
    for index in range(start, stop):
        freeze(engine.module, phases[index // NUM_STEPS])
        x, y = mine(engine, data(index))
        engine.backward(criterion(engine(x), y))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms  # type: ignore[return-value]


def trained_often(
    stage: int, held: Held, keys: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(stage, held, **keys)
    norms = steps_of(engine, 0, NUM_STEPS * len(OFTEN))
    return norms, engine.module_state_dict()


@pytest.mark.covering(1)
@pytest.mark.parametrize("held", [everything, some])
@pytest.mark.parametrize("stage", range(4))
def test_an_engine_freezes_and_unfreezes_as_a_plain_loop(
    ranks: RankPool, stage: int, held: Held
) -> None:
    norms, weights = often(held)
    for found_norms, found in ranks(2, trained_often, stage, held, {}):
        assert found_norms == pytest.approx(norms, rel=1e-4)
        assert_close(found, weights)


@pytest.mark.parametrize("stage", [1, 3])
def test_so_it_does_with_checkpointed_modules_and_state_in_files(
    stage: int, tmp_path: Path
) -> None:
    zero = settings(stage)["zero_optimization"] | {
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}
    }
    keys = {"zero_optimization": zero, "activation_checkpointing": {"every": 1}}
    norms, weights = often(everything)
    found_norms, found = trained_often(stage, everything, keys)
    assert found_norms == pytest.approx(norms, rel=1e-4)
    assert_close(found, weights)


def narrow_often(stage: int) -> dict[str, Tensor]:
    engine = engine_of(stage, everything, **NARROW)
    for index in range(NUM_STEPS * len(OFTEN)):
        freeze(engine.module, OFTEN[index // NUM_STEPS])
        x, y = mine(engine, data(index))
        before = {
            name: deepspeed.utils.safe_get_full_fp32_param(p)
            for name, p in engine.module.named_parameters()
        }
        engine.backward(criterion(engine(x.bfloat16()), y).float())
        engine.step()
        for name, param in engine.module.named_parameters():
            is_same = torch.equal(deepspeed.utils.safe_get_full_fp32_param(param), before[name])
            assert is_same != param.requires_grad, name
    return engine.module_state_dict()


@pytest.mark.long
def test_with_masters_an_engine_leaves_those_of_frozen_parameters_as_they_are(
    ranks: RankPool,
) -> None:
    first, *others = (ranks(2, narrow_often, stage)[0] for stage in range(4))
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def saved_and_loaded(folder: str, stages: tuple[int, int]) -> tuple[Any, ...]:
    """An engine that goes on, and one that loads what it saved with moments of what is
    frozen, counted apart.
    """
    first, second = engine_of(stages[0], everything), engine_of(stages[1], everything)
    steps_of(first, 0, 8)
    first.save_checkpoint(folder)
    freeze(second.module, OFTEN[2])
    second.load_checkpoint(folder)
    return tuple(
        (steps_of(engine, 8, 15), engine.module_state_dict()) for engine in (first, second)
    )


@pytest.mark.parametrize("stages", [(2, 2), (3, 1)])
def test_a_loaded_engine_goes_on_with_the_moments_of_what_is_frozen(
    ranks: RankPool, stages: tuple[int, int], tmp_path: Path
) -> None:
    for first, second in ranks(2, saved_and_loaded, str(tmp_path), stages):
        assert first[0] == pytest.approx(second[0], rel=1e-6)
        assert_close(second[1], first[1], 1e-6)


def adversaries(stage: int) -> dict[str, Tensor]:
    """A judge of which a part is frozen for good, and the rest while another learns
    from it.
    """
    judge = fzero.initialize(model=make(Net), config=settings(stage))[0]
    freeze(judge.module, ["blocks.0", "head.bias"])
    for index in range(6):
        x, y = mine(judge, data(index))
        judge.backward(criterion(judge(x), y))
        judge.step()
        freeze(judge.module, [""])
        noise = x.clone().requires_grad_()
        assert criterion(judge(noise), y).requires_grad == bool(noise.requires_grad)
        freeze(judge.module, ["blocks.0", "head.bias"])
    return judge.module_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_frozen_for_another_forward_alone_trains_on(ranks: RankPool, stage: int) -> None:
    expected_ = often(everything, [("blocks.0", "head.bias")] * 2)[1]
    for found in ranks(2, adversaries, stage):
        assert_close(found, expected_)


def accumulated(stage: int) -> dict[str, Tensor]:
    """A flag that is cleared after the first of two micro-steps: its gradient counts."""
    engine = fzero.initialize(
        model=make(Net),
        config=settings(
            stage, gradient_accumulation_steps=2, train_batch_size=24, gradient_clipping=0.0
        ),
    )[0]
    for index in range(6):
        freeze(engine.module, ["blocks.1"] if index % 2 else [])
        x, y = mine(engine, data(index))
        engine.backward(criterion(engine(x), y))
        engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", [1, 2])
def test_the_gradients_of_the_micro_steps_in_which_a_parameter_was_not_frozen_count(
    ranks: RankPool, stage: int
) -> None:
    module = make(Net)
    optimizer = adamw(everything(module))
    for index in range(6):
        freeze(module, ["blocks.1"] if index % 2 else [])
        x, y = data(index)
        (criterion(module(x), y) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    for found in ranks(2, accumulated, stage):
        assert_close(found, module.state_dict())


def test_what_would_divide_collected_gradients_anew_is_an_error() -> None:
    engine = fzero.initialize(
        model=make(Net), config=settings(1, gradient_accumulation_steps=2, train_batch_size=24)
    )[0]
    x, y = data(0)
    freeze(engine.module, ["blocks.1"])
    engine.backward(criterion(engine(x), y))
    engine.step()
    freeze(engine.module, ["blocks.1.norm"])
    with pytest.raises(
        RuntimeError,
        match=r"engine.step\(\) and the next forward where flat buffers .*'blocks.1.norm.weight'",
    ):
        engine(x)
    engine.zero_grad()
    engine.backward(criterion(engine(x), y))


def differs(stage: int) -> None:
    engine = fzero.initialize(model=make(Net), config=settings(stage))[0]
    for index in range(3):
        x, y = mine(engine, data(index))
        engine.backward(criterion(engine(x), y))
        engine.step()
        freeze(engine.module, ["blocks.1"] if engine.global_rank == 1 else [])


@pytest.mark.covering(0)
@pytest.mark.parametrize("stage", [1, 3])
def test_flags_that_differ_between_ranks_end_the_job(ranks: RankPool, stage: int) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, differs, stage)
    first, second = caught.value.errors
    assert isinstance(first, fzero.CollectiveError) and isinstance(second, fzero.CollectiveError)
    assert "requires_grad: must be the same on all ranks" in str(second)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_an_optimizer_of_some_parameters_keeps_nothing_of_the_others() -> None:
    engine = engine_of(1, some)
    trained = {
        name
        for buffer in engine.train_step.plan.flat_buffers
        if buffer.trainable
        for name in buffer.layout.names
    }
    assert trained == {
        n for n, _ in engine.module.named_parameters() if "blocks.1" in n or n == "head.weight"
    }
    groups: Any = [{"params": [engine.module.head.bias]}]
    with quiet(), pytest.raises(RuntimeError, match="add_param_group"):
        engine.optimizer.add_param_group(groups[0])  # type: ignore[union-attr]
    assert ADAMW["type"] == "AdamW"
