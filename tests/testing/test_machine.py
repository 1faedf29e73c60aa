"""Training in any order of whatever may be done to it, beside a plain process; and that
what is broken on purpose is found.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import optree
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from profiles import examples
from torch import Tensor, nn

import fzero
from fzero.comms import collectives
from fzero.optim.loss_scale import LossScale, LossScaling
from fzero.optim.transforms import Transform
from fzero.runtime import finish, phases, reductions, update as updater
from fzero.runtime.update import Updater
from fzero.step import TrainStep
from fzero.testing import Job, TrainingMachine, training_machine
from fzero.testing.training_machine import NUM_RULES, jobs
from sharding.testing import models

pytestmark = pytest.mark.property

TestTraining = TrainingMachine.TestCase
TestTraining.settings = examples(20, parent=TestTraining.settings)


def run(machine: type[TrainingMachine], max_examples: int = 50) -> None:
    """As a test would, but the same every time, and without a search for the smallest
    run.
    """
    phases = (Phase.generate,)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=NUM_RULES,
            phases=phases,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )


class InBits(TrainingMachine):
    """Sums over so few elements have one order, whatever the processor."""

    compares = "bits"

    def models(self) -> st.SearchStrategy[nn.Module]:
        return models(max_width=3)


TestTrainingInBits = pytest.mark.nightly(InBits.TestCase)

# --- fzero, broken on purpose ---------------------------------------------------------------------


def skipping_an_update_on_rank_1() -> Any:
    update = Updater.update

    def broken(self: Updater, state: Any, *args: Any, **kwargs: Any) -> Any:
        if self.mesh.world.rank != 1:
            return update(self, state, *args, **kwargs)
        own = state._replace(params=optree.tree_map(torch.clone, state.params))
        return update(self, own, *args, **kwargs)._replace(params=state.params)

    return patch.object(Updater, "update", broken)


def leaking_padding() -> Any:
    zero = reductions.zero_gaps

    def broken(flat_P: Tensor, buffer: Any, written: Any) -> None:
        zero(flat_P, buffer, written)
        flat_P[buffer.layout.numel :].fill_(1e-6)

    return patch.object(reductions, "zero_gaps", broken)


def _resharding(change: Callable[[Any, Any, Any], Any]) -> Any:
    def broken(state: Any, old: Any, new: Any) -> Any:
        return change(fzero.reshard(state, old, new), old, new)

    return patch.object(training_machine, "reshard", broken)


def losing_momentum() -> Any:
    def change(state: Any, old: Any, new: Any) -> Any:
        return state._replace(
            optimizer=optree.tree_map(lambda x: x if x.ndim == 1 else x * 0, state.optimizer)
        )

    return _resharding(change)


def misplacing_a_weight() -> Any:
    def change(state: Any, old: Any, new: Any) -> Any:
        if old.world_size == new.world_size:
            return state
        for x in (*state.params.values(), *state.master.values()):
            x[:, :2] = x[:, :2].flip(1)
        return state

    return _resharding(change)


def moving_without_the_last_update() -> Any:
    """What comes back from elsewhere is what went there."""
    kept: list[Any] = []

    def broken(state: Any, step: Any) -> Any:
        before, now = training_machine.copied(state), fzero.place(state, step)
        if any(p.kind != "device" for p in step.plan.placements.values()):
            kept[:] = [before.optimizer]
        elif kept and optree.tree_structure(kept[0]) == optree.tree_structure(now.optimizer):
            same = [
                x.shape == y.shape
                for x, y in zip(*map(optree.tree_leaves, (kept[0], now.optimizer)), strict=True)
            ]
            now = now._replace(optimizer=kept.pop()) if all(same) else now
        return now

    return patch.object(training_machine, "place", broken)


def loading_without_momentum() -> Any:
    def broken(folder: Any, step: Any) -> Any:
        loaded = fzero.load(folder, step=step)
        optimizer = optree.tree_map(lambda x: x if x.ndim == 1 else x * 0, loaded.state.optimizer)
        return loaded._replace(state=loaded.state._replace(optimizer=optimizer))

    return patch.object(training_machine, "load", broken)


def forgetting_the_count() -> Any:
    return _resharding(lambda state, old, new: state._replace(step=state.step * 0))


def keeping_the_scale() -> Any:
    def broken(self: LossScaling, state: LossScale[Tensor], overflow: Tensor) -> LossScale[Tensor]:
        return LossScale(
            state.scale,
            state.hysteresis,
            torch.where(overflow, state.num_good * 0, state.num_good + 1),
        )

    return patch.object(LossScaling, "update", broken)


def missing_rank_1() -> Any:
    start = collectives.start_reduce_scatter

    def broken(full_P: Tensor, axis: Any, **kwargs: Any) -> Any:
        if axis.size > 1 and axis.rank == 1:
            full_P.zero_()
        return start(full_P, axis, **kwargs)

    return patch.object(collectives, "start_reduce_scatter", broken)


def overflowing_alone() -> Any:
    """A rank skips the update when its own loss is not finite."""
    finish_step = phases.finish_step

    def broken(run: Any, collected: Any) -> Any:
        found = finish_step(run, collected)
        own = ~collected.loss_stats[:, run.mesh.world.rank, 0].isfinite().all()
        return found._replace(outcome=found.outcome._replace(overflow=own), skip=own)

    return patch.object(phases, "finish_step", broken)


def clipping_by_the_norm_of_one_rank() -> Any:
    return patch.object(finish.LossRules, "norm", lambda self, parts_W: parts_W[0].sqrt())


def leaving_a_trace_of_a_skipped_update() -> Any:
    def broken(skip: Tensor, transform: Transform) -> Transform:
        def update(grad: Tensor, param: Tensor, state: Any) -> Any:
            before = param.clone()
            _, param, state = transform.update(grad.nan_to_num(0, 0, 0), param, state)
            return grad, param.copy_(torch.where(skip, before, param)), state

        return transform._replace(update=update, update_skip_if=None)

    return patch.object(updater, "skip_if", broken)


def dropping_the_last_micro_step() -> Any:
    split = fzero.runtime.batches.Batches.split  # type: ignore[attr-defined]

    def broken(self: Any, batch: Any) -> Any:
        parts = list(split(self, batch))
        return iter([*parts[:-1], parts[0]])

    return patch.object(fzero.runtime.batches.Batches, "split", broken)  # type: ignore[attr-defined]


def writing_into_what_is_kept() -> Any:
    def broken(self: TrainStep, recipe: Any, axis: Any) -> None:
        first(self, replace(recipe, donate=True), axis)

    first = TrainStep.__init__
    return patch.object(TrainStep, "__init__", broken)


def counting_what_is_skipped() -> Any:
    next_ = finish.next_state

    def broken(*args: Any) -> Any:
        state, metrics = next_(*args)
        return state._replace(step=state.step + metrics.overflow), metrics

    return patch("fzero.step.next_state", broken)


NUMBERS, AGREE, PADDING = "the numbers are those", "all ranks agree", "padding is zero"
COUNTS, ENDS, METRICS = (
    "an overflow makes no update, and the loss scale",
    "a step ends as",
    "metrics are those",
)
MOVED = "a state that moves stays as it was"
SKIPPED, KEPT = "a skipped step changes nothing", "a step that donates nothing"
BROKEN: dict[Callable[[], Any], str] = {
    skipping_an_update_on_rank_1: f"{AGREE}|{NUMBERS}",
    leaking_padding: PADDING,
    losing_momentum: NUMBERS,
    loading_without_momentum: f"{NUMBERS}|{METRICS}",
    misplacing_a_weight: f"{NUMBERS}|{PADDING}|{METRICS}",
    moving_without_the_last_update: f"{MOVED}|{NUMBERS}",
    forgetting_the_count: COUNTS,
    keeping_the_scale: COUNTS,
    missing_rank_1: f"{NUMBERS}|{METRICS}",
    overflowing_alone: f"{NUMBERS}|{AGREE}|{ENDS}|{SKIPPED}",
    clipping_by_the_norm_of_one_rank: f"{METRICS}|{NUMBERS}",
    leaving_a_trace_of_a_skipped_update: SKIPPED,
    dropping_the_last_micro_step: f"{METRICS}|{NUMBERS}|{ENDS}",
    writing_into_what_is_kept: KEPT,
    counting_what_is_skipped: f"{SKIPPED}|{COUNTS}",
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_what_is_broken_is_found_within_the_default_number_of_runs(
    broken: Callable[[], Any],
) -> None:
    with broken(), pytest.raises(AssertionError, match=f"^({BROKEN[broken]})"):
        run(TrainingMachine)


# --- machines of users ----------------------------------------------------------------------------


@pytest.mark.long
def test_a_machine_takes_a_transform_and_holds_it_to_the_same_on_whole_parameters() -> None:
    class OfSigns(TrainingMachine):
        transform = staticmethod(lambda lr: fzero.optim.lion(lr))
        lr = 1e-3
        compares = "bits"

        def models(self) -> st.SearchStrategy[nn.Module]:
            return models(max_width=2)

    run(OfSigns, 10)


def test_a_transform_that_looks_at_its_neighbours_is_found() -> None:
    def sgd_of_differences(lr: float) -> Transform:
        def update(grad: Tensor, param: Tensor, state: Any) -> Any:
            return grad, param.sub_(lr * (grad - grad.roll(1))), state

        return fzero.sgd(lr)._replace(update=update)

    class OfDifferences(TrainingMachine):
        transform = staticmethod(sgd_of_differences)

    with (
        patch("fzero.optim.check_elementwise"),
        pytest.raises(AssertionError, match=f"{NUMBERS}|{PADDING}"),
    ):
        run(OfDifferences)


class Convolution(nn.Module):
    """Uses one module twice, and takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.inner(self.inner(x).tanh()), y)


@pytest.mark.long
def test_a_machine_takes_models_and_batches_of_ones_own() -> None:
    class OfConvolutions(TrainingMachine):
        def models(self) -> st.SearchStrategy[nn.Module]:
            return st.builds(Convolution)

        def jobs(self) -> st.SearchStrategy[Job]:
            # parts of a gradient overflow otherwise
            return jobs.filter(lambda job: job.precision != "float16")

        def make_batch(self, num_samples: int, seed: int) -> Any:
            x = torch.randn(2, num_samples, 2, 4, generator=torch.Generator().manual_seed(seed))
            return x[0], x[1]

    run(OfConvolutions, 10)


@pytest.mark.long
def test_a_further_capability_is_a_further_rule() -> None:
    class Storing(TrainingMachine):
        @rule(world_size=st.integers(1, 4))
        def store_and_restore(self, world_size: int) -> None:
            leaves, structure = optree.tree_flatten(self.state)
            memory, job = io.BytesIO(), self.job
            torch.save(leaves, memory)
            self.change_world_size(world_size, then=[])
            self.job, self.step = job, self.step_of(job)
            self.state = structure.unflatten(torch.load(io.BytesIO(memory.getvalue())))

    run(Storing, 10)


def test_a_subclass_keeps_short_runs_and_the_examples_of_the_profile() -> None:
    class Mine(TrainingMachine):
        def jobs(self) -> st.SearchStrategy[Job]:
            return st.builds(Job)

    assert Mine.TestCase.settings.stateful_step_count == NUM_RULES
    assert Mine.TestCase.settings.max_examples == settings().max_examples


def test_the_nightly_profile_tries_ten_times_the_examples() -> None:
    assert (
        settings.get_profile("nightly").max_examples
        == 10 * settings.get_profile("fzero").max_examples
    )
