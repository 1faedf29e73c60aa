"""The laws of bad input: whoever can know tells every rank, by name and value, and
nobody hangs.

And of models whose units run on some ranks only: the order of collectives does not
depend on data, or is reported.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import optree
import pytest
import torch
from ranks import TIMEOUT, RankError, RankPool
from schedules import recorded
from torch import Tensor, nn
from training import GLOBAL_BATCH, Plain, adamw, config, make, part, train, train_plainly, vectors

import fzero
from fzero import CollectiveError, ConfigError, ScheduleError
from fzero.comms import collectives, primitives
from fzero.comms.pending import abandon
from fzero.plans.schedule_check import check_schedules
from fzero.plans.unit_orders import Event
from fzero.runtime import MismatchError
from fzero.runtime.sequencer import Sequencer
from sharding import Mesh


def errors_of(
    ranks: RankPool,
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
) -> list[Exception | None]:
    """What each rank raised; none may be a timeout, which a rank that waits in vain
    meets, and PyTorch names with its milliseconds.
    """
    with pytest.raises(RankError) as caught:
        ranks(world_size, function, *args)
    waited = f"{TIMEOUT.total_seconds() * 1000:.0f}ms"
    assert waited not in str(caught.value), f"a rank waited for a timeout:\n{caught.value}"
    return caught.value.errors


def assert_all_raise(errors: list[Exception | None], kind: type[Exception], message: str) -> None:
    for error in errors:
        with pytest.raises(kind, match=message):
            raise error or AssertionError("this rank raised nothing")


# --- before the first step ------------------------------------------------------------------------


def _make_step(cfg: Any, *per_rank: Any, **options: Any) -> None:
    """A step of the model in `per_rank` that belongs to this rank, or of `Plain`."""
    rank = fzero.join().rank
    model = per_rank[rank]() if per_rank else Plain()
    fzero.make_train_step(model, cfg[rank] if isinstance(cfg, list) else cfg, **options)


@pytest.mark.parametrize("stage", [0, 3])
def test_batch_sizes_that_do_not_fit_the_world_size_are_reported_on_every_rank(
    ranks: RankPool, stage: int
) -> None:
    errors = errors_of(ranks, 3, _make_step, {**config(stage), "train_batch_size": 8})
    assert_all_raise(
        errors, ConfigError, "train_batch_size: must equal .*, got 8 for 2 × 1 × 3; change one"
    )
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}
    errors = errors_of(ranks, 2, _make_step, {**config(stage), **sizes})
    assert_all_raise(errors, ConfigError, "train_batch_size: must equal .*, got 8 for 8 × ")


def narrow() -> nn.Module:
    return Plain(width=8)


def short() -> nn.Module:
    return Plain(num_blocks=4)


def frozen() -> nn.Module:
    model = Plain()
    model.blocks[2].scale.requires_grad_(False)
    return model


def in_half() -> nn.Module:
    model = Plain()
    model.blocks[1].half()
    return model


def with_buffer() -> nn.Module:
    model = Plain()
    model.register_buffer("table", torch.zeros(3))
    return model


class Pair(nn.Module):
    """Two layers, declared in one order or the other."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        for name in names:
            self.register_module(name, nn.Linear(4, 4, bias=False))


def a_then_b() -> nn.Module:
    return Pair(("a", "b"))


def b_then_a() -> nn.Module:
    return Pair(("b", "a"))


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (
            (Plain, narrow),
            r"parameters: .* 'blocks.0.weight' is '\(16, 16\) .*' on rank 0 and '\(8, 8\) .*' on "
            r"rank 1",
        ),
        (
            (Plain, short),
            r"parameters: .* 'blocks.4.weight' is '\(16, 16\).*' on rank 0 and None on rank 1",
        ),
        (
            (short, Plain),
            r"parameters: .* 'blocks.4.weight' is None on rank 0 and '\(16, 16\).*' on rank 1",
        ),
        (
            (Plain, Plain, frozen),
            r"'blocks.2.scale' is .*=True' on rank 0 and .*requires_grad=False' on rank 2",
        ),
        (
            (in_half, Plain),
            r"'blocks.1.weight' is .*torch.float16 .* on rank 0 and .*torch.float32 .* on rank 1",
        ),
        (
            (Plain, with_buffer),
            r"buffers: .* 'table' is None on rank 0 and '\(3,\) torch.float32' on rank 1",
        ),
        ((a_then_b, b_then_a), r"parameters: must be the same on all ranks, but 'the order' is"),
    ],
    ids=["width", "fewer", "more", "frozen", "dtype", "buffer", "order"],
)
def test_ranks_with_different_models_are_reported_the_first_difference_everywhere(
    ranks: RankPool, models: Any, message: str
) -> None:
    assert_all_raise(
        errors_of(ranks, len(models), _make_step, config(1), *models), MismatchError, message
    )


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (config(1), config(2), "'zero_optimization.stage' is '1' on rank 0 and '2' on rank 1"),
        (
            config(1),
            config(1, clip=0.5),
            "'gradient_clipping' is '1.0' on rank 0 and '0.5' on rank 1",
        ),
        (
            config(3),
            config(3, optimizer={"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}),
            "'optimizer.params.lr' is '0.01' on rank 0 and '0.001' on rank 1",
        ),
        (
            config(0),
            config(0, optimizer={"type": "SGD"}),
            "'optimizer.type' is 'AdamW' on rank 0 and 'SGD' on rank 1",
        ),
    ],
)
def test_ranks_with_different_configurations_are_reported_the_first_difference_everywhere(
    ranks: RankPool, one: Any, other: Any, message: str
) -> None:
    assert_all_raise(
        errors_of(ranks, 2, _make_step, [one, other]), MismatchError, f"configuration: .*{message}"
    )


def _make_step_with_arguments_of_this_rank(arguments: list[dict[str, Any]]) -> None:
    _make_step(config(3), **arguments[fzero.join().rank])


def test_ranks_with_different_units_or_schedules_are_reported_everywhere(ranks: RankPool) -> None:
    units: list[dict[str, Any]] = [{"units": ["blocks"]}, {"units": None}]
    errors = errors_of(ranks, 2, _make_step_with_arguments_of_this_rank, units)
    assert_all_raise(
        errors, MismatchError, "units: .* 'blocks' is '1360' on rank 0 and None on rank 1"
    )
    schedules = [{"schedule": "learned"}, {"schedule": "negotiated"}]
    errors = errors_of(ranks, 2, _make_step_with_arguments_of_this_rank, schedules)
    assert_all_raise(
        errors, MismatchError, "'schedule' is 'learned' on rank 0 and 'negotiated' on rank 1"
    )


def _make_step_on_mesh(mesh: Mesh) -> int:
    return fzero.make_train_step(Plain(), config(3), mesh=mesh).world_size


@pytest.mark.parametrize("mesh", [Mesh.of(data=3), Mesh.of(node=2, data=2), Mesh.of(data=1)])
def test_a_mesh_that_does_not_fit_the_job_is_reported_with_its_axes(
    ranks: RankPool, mesh: Mesh
) -> None:
    errors = errors_of(ranks, 2, _make_step_on_mesh, mesh)
    assert_all_raise(
        errors,
        ValueError,
        r"mesh: its axes must hold all 2 ranks of the job, got .* in Mesh\(axes=",
    )


@pytest.mark.parametrize("mesh", [(2, 2), 4, "data", Mesh.of(world=2, data=2)], ids=str)
def test_what_is_no_mesh_or_has_an_axis_that_means_all_ranks_is_reported(mesh: Any) -> None:
    words = (
        "no axis may be named 'world'"
        if isinstance(mesh, Mesh)
        else "must be a mesh of named axes, .* got"
    )
    step = fzero.make_train_step(Plain(), config(3), mesh=fzero.comms.AbstractAxis("data", 4))
    for make_on in (
        lambda: fzero.make_train_step(Plain(), config(3), mesh=mesh),
        lambda: fzero.make_train_step(
            Plain(), config(3), mesh=fzero.comms.AbstractAxis("data", 4, mesh=mesh)
        ),
        lambda: fzero.plan(Plain(), config(3), mesh=mesh),
        lambda: fzero.simulate(step, 4, mesh=mesh),
    ):
        with pytest.raises(ValueError, match=f"mesh: {words}"):
            make_on()
    if not isinstance(mesh, Mesh):
        with pytest.raises(
            ValueError, match=r"AbstractAxis\.of: mesh must be a sharding.Mesh, got"
        ):
            fzero.comms.AbstractAxis.of(mesh)


OTHER_PARALLELISMS = {
    "tensor": "tensor parallelism",
    "tp": "tensor parallelism",
    "model_parallel": "tensor parallelism",
    "context": "context or sequence parallelism",
    "cp": "context or sequence parallelism",
    "sp": "context or sequence parallelism",
    "sequence_parallel": "context or sequence parallelism",
    "SP": "context or sequence parallelism",
    "expert": "expert parallelism",
    "experts": "expert parallelism",
    "ep": "expert parallelism",
    "pp": "a pipeline",
    "stage": "a pipeline",
}


@pytest.mark.parametrize("name", OTHER_PARALLELISMS)
def test_an_axis_that_means_another_parallelism_elsewhere_is_refused_with_what_it_means_here(
    name: str,
) -> None:
    mesh = Mesh(((name, 2), ("data", 2)))
    with pytest.raises(
        ValueError,
        match=f"got '{name}' in .*, which elsewhere means {OTHER_PARALLELISMS[name]}; name it",
    ):
        fzero.plan(Plain(), config(3), mesh=mesh)
    fzero.plan(Plain(), config(3), mesh=Mesh(((name, 1), ("data", 4))))  # one rank is no copy


@pytest.mark.parametrize(
    "name", ["node", "pod", "rack", "replica", "dp_replicate", "hosts", "zone", "outer", "n"]
)
def test_an_axis_with_any_other_name_holds_copies(name: str) -> None:
    assert fzero.plan(Plain(), config(3), mesh=Mesh(((name, 2), ("data", 2)))).replicate_axes == (
        name,
    )


def test_a_mesh_that_fits_is_taken(ranks: RankPool) -> None:
    assert ranks(2, _make_step_on_mesh, Mesh.of(data=2)) == [2, 2]
    assert ranks(2, _make_step_on_mesh, Mesh.of(node=1, data=2)) == [2, 2]
    assert ranks(2, _make_step_on_mesh, Mesh.of(node=2, data=1)) == [2, 2]


class Equal(nn.Linear):
    """Its modules are equal by value, so PyTorch finds the first one only."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and self.in_features == other.in_features

    def __hash__(self) -> int:
        return hash(self.in_features)


def test_equal_modules_that_are_one_are_tied() -> None:
    one = Equal(4, 4)
    plan = fzero.plan(nn.Sequential(one, nn.Tanh(), one), config(1))
    assert sum(unit.numel for unit in plan.units) == 20


# --- a step ---------------------------------------------------------------------------------------


def _step(per_rank: list[Any], cfg: Mapping[str, Any], loss_fn: Any = None) -> None:
    """Two steps, the second one with this rank's entry of `per_rank` as its batch."""
    step = fzero.make_train_step(make(Plain), cfg, loss_fn=loss_fn)
    state, _ = step(step.init(), part(vectors(0), step.rank, step.world_size))
    step(state, per_rank[step.rank])


@pytest.mark.parametrize("stage", [1, 3])
def test_a_batch_of_another_size_is_reported_where_it_is_and_ends_the_other_ranks(
    ranks: RankPool, stage: int
) -> None:
    cfg = {**config(stage), "train_batch_size": GLOBAL_BATCH}
    good, bad = vectors(1, 6), vectors(1, 5)
    message = r"batch: must hold 6 samples on each rank .* and 2 ranks\), got 5"
    assert_all_raise(errors_of(ranks, 2, _step, [bad, bad], cfg), ValueError, message)
    errors = errors_of(ranks, 2, _step, [good, bad], cfg)
    assert_all_raise(errors[1:], ValueError, message)
    assert_all_raise(errors[:1], CollectiveError, "most often another rank died, left the job")


def failing_loss(model: nn.Module, batch: Any) -> Tensor:
    if batch is None:
        raise KeyError("the user's own error")
    return model(*batch)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_error_of_the_users_on_one_rank_ends_the_others(ranks: RankPool, stage: int) -> None:
    errors = errors_of(
        ranks, 3, _step, [vectors(1, 4), None, vectors(1, 4)], config(stage), failing_loss
    )
    assert_all_raise(errors[1:2], KeyError, "the user's own error")
    assert_all_raise([errors[0], errors[2]], CollectiveError, "look for the first error")


UNRELATED = (
    r"backward: the loss must depend on a trainable parameter of the model, through a "
    r"forward of this step, and does not"
)
INSIDE = r"backward: must not be called inside the forward or loss_fn, .* return the loss"


def _elsewhere(model: nn.Module, batch: Any) -> Tensor:
    """A loss that has a gradient, and nothing to do with the model that made an output
    beside it.
    """
    model(*batch)
    return nn.Parameter(torch.ones(3)).square().sum()


def _goes_backward(model: nn.Module, batch: Any) -> Tensor:
    """A loss whose gradients have come twice when the step has called backward, too."""
    loss: Tensor = model(*batch)
    loss.backward(retain_graph=True)
    return loss


def _with_bad_losses(stage: int) -> list[tuple[str, str]]:
    """On a real rank: what a step, its parts and an engine say of such losses, each
    between two good ones.
    """
    current: list[Any] = [lambda model, batch: model(*batch)]
    step = fzero.make_train_step(
        make(Plain), config(stage), loss_fn=lambda model, batch: current[-1](model, batch)
    )
    batch = part(vectors(0), step.rank, step.world_size)
    state, _ = step(step.init(), batch)
    before, found = step.gather(state), []

    def run(model: nn.Module, batch: Any, loss_fn: Any) -> None:
        window = step.begin(state)
        loss = step.forward(window, lambda: loss_fn(model, batch))
        step.update(step.backward(window, loss))

    for bad in (_elsewhere, _goes_backward):
        current.append(bad)
        for attempt in (lambda: step(state, batch), lambda: run(step.spec.model, batch, bad)):  # noqa: B023
            with pytest.raises((ValueError, RuntimeError), match="backward: ") as caught:
                attempt()
            found.append((bad.__name__, str(caught.value)))
        current.pop()
    assert all(map(torch.equal, step.gather(state).values(), before.values()))
    assert int(step(state, batch)[0].step) == 2
    engine, *_ = fzero.initialize(model=make(Plain), config=config(stage))
    weights = {
        name: weight.clone() for name, weight in engine.train_step.gather(engine.state).items()
    }
    with pytest.raises(ValueError, match="backward: ") as caught:
        engine.backward(_elsewhere(engine, batch))
    found.append(("_elsewhere", str(caught.value)))
    with pytest.raises(RuntimeError, match="must follow a backward since the last update"):
        engine.step()
    assert all(map(torch.equal, engine.train_step.gather(engine.state).values(), weights.values()))
    engine.backward(engine(*batch))
    engine.step()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_that_has_nothing_to_do_with_the_model_and_one_that_went_backward_already_are_refused(
    ranks: RankPool, stage: int
) -> None:
    for found in (_with_bad_losses(stage), *ranks(2, _with_bad_losses, stage)):
        for name, reported in found[:4]:
            assert re.match(UNRELATED if name == "_elsewhere" else INSIDE, reported), reported
        ((_, unrelated),) = found[4:]
        assert re.match(UNRELATED, unrelated)


def test_a_graph_of_a_step_refuses_such_losses_too() -> None:
    for bad, reported in ((_elsewhere, UNRELATED), (_goes_backward, INSIDE)):
        step = fzero.make_train_step(make(Plain), config(0), loss_fn=bad)
        with pytest.raises((ValueError, RuntimeError), match=reported):
            fzero.simulate(step, 1, by="vmap" if bad is _elsewhere else "lockstep")(
                fzero.simulation.stacked([step.init()]), tuple(x[None] for x in vectors(0))
            )


# --- numbers that are not finite ------------------------------------------------------------------


class Rooted(nn.Module):
    """Batch norm, dropout and a root: a state of every kind, and an infinite gradient
    of a finite loss at x = 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 16)
        )
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor, poison: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(self.layers(x), y)
        return loss + (self.gain * poison).abs().sqrt().sum() * 0.01


def poisoned(step: int, value: float) -> tuple[Tensor, ...]:
    """A batch whose last rows, those of the last rank, hold `value`. 1 is harmless."""
    return *vectors(step), torch.ones(GLOBAL_BATCH).index_fill(
        0, torch.tensor([GLOBAL_BATCH - 1]), value
    )


def _survives(stage: int, bad_at: int, value: float) -> tuple[str, bool, bool]:
    """Three good steps, and a bad one before the one numbered `bad_at`, whose error is
    caught.

    The error, whether the state stayed, and whether the end is that of a run that never
    met the bad batch.
    """
    ends, message, stayed = [], "", False
    for meets_it in (True, False):
        step = fzero.make_train_step(make(Rooted), config(stage))
        state = step.init()
        for index in range(3):
            if meets_it and index == bad_at:
                kept = optree.tree_map(torch.clone, state)
                with pytest.raises(FloatingPointError) as caught:
                    step(state, part(poisoned(99, value), step.rank, step.world_size))
                message = str(caught.value)
                same = optree.tree_map(
                    torch.equal, state._replace(grads={}), kept._replace(grads={})
                )
                stayed = all(optree.tree_leaves(same))
            state, _ = step(state, part(poisoned(index, 1.0), step.rank, step.world_size))
        ends.append(state)
    return message, stayed, all(optree.tree_leaves(optree.tree_map(torch.equal, *ends)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("bad_at", [0, 1])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("value", "reported"),
    [
        (float("nan"), r"loss is not finite on ranks \[1\] \(losses \[\d.*, nan\]"),
        (float("inf"), r"loss is not finite on ranks \[1\] \(losses \[\d.*, inf\]"),
        (
            0.0,
            r"loss is \d.*, its gradient is not finite \(losses \[\d.*, \d.*\], gradient norm "
            r"(nan|inf), first parameter '\w+'\)",
        ),
    ],
    ids=["nan", "inf", "gradient"],
)
def test_what_is_not_finite_on_one_rank_is_reported_on_every_rank_and_the_step_never_happened(
    ranks: RankPool, stage: int, bad_at: int, value: float, reported: str
) -> None:
    import re

    for message, stayed, ended_alike in ranks(2, _survives, stage, bad_at, value):
        assert re.match(rf"step {bad_at}: {reported}", message), message
        assert stayed, "the state changed"
        assert ended_alike


def _raises_elsewhere(stage: int) -> None:
    """Rank 0 raises in the forward and the others in the backward; all go on."""

    def loss_of(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y, raises = batch
        x = model.blocks[0](x)
        if raises and step.rank == 0:
            raise ZeroDivisionError
        if raises:
            x.register_hook(lambda grad: 1 / 0)
        return torch.nn.functional.mse_loss(x, y)

    step = fzero.make_train_step(make(Plain), config(stage), loss_fn=loss_of)
    state = step.init()
    for index in range(6):
        x, y = part(vectors(index), step.rank, step.world_size)
        if index == 1:
            with pytest.raises(ZeroDivisionError):
                step(state, (x, y, True))
        state, _ = step(state, (x, y, False))


def test_ranks_that_raise_at_different_places_and_go_on_are_reported(ranks: RankPool) -> None:
    errors = errors_of(ranks, 3, _raises_elsewhere, 0)
    assert_all_raise(
        errors, CollectiveError, "the ranks are in different steps|the collective failed"
    )
    assert any("the ranks are in different steps" in str(error) for error in errors)


def _leaves_a_late_start() -> None:
    """Rank 0 raises when a gather waits for its turn to be started."""
    axis = fzero.join()
    if axis.rank == 0:
        collectives._STARTER.submit(time.sleep, 1)
        abandon([collectives.start_all_gather(torch.full((4,), -1.0), torch.empty(8), axis)])
    raise ZeroDivisionError("as planned")


def _gathers() -> list[float]:
    axis = fzero.join()
    gathered: list[float] = primitives.all_gather(torch.full((4,), float(axis.rank)), axis).tolist()
    return gathered


def test_what_a_job_did_not_start_any_more_does_not_reach_the_group_that_is_joined_next(
    ranks: RankPool,
) -> None:
    assert_all_raise(errors_of(ranks, 2, _leaves_a_late_start), ZeroDivisionError, "as planned")
    assert ranks(2, _gathers) == [[0.0] * 4 + [1.0] * 4] * 2


# --- units that run on some ranks only ------------------------------------------------------------


class Routed(nn.Module):
    """Blocks of which a batch names those to run, as the bits of its first number, and
    whether backwards.

    So each rank runs what its own rows name.
    """

    def __init__(self, width: int = 16, num_blocks: int = 4, tail: bool = True) -> None:
        super().__init__()
        self.inlet = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks))
        self.outlet = nn.Linear(width, width) if tail else nn.Identity()

    def forward(self, x: Tensor, y: Tensor, route: Tensor) -> Tensor:
        bits, backwards = int(route[0, 0]), bool(route[0, 1])
        chosen = [block for index, block in enumerate(self.blocks) if bits >> index & 1]
        x = self.inlet(x)
        for block in reversed(chosen) if backwards else chosen:
            x = x + torch.tanh(block(x))
        return nn.functional.mse_loss(self.outlet(x), y)


class Tailless(Routed):
    """No unit after the blocks, so that the last one that runs is another one on each
    rank.
    """

    def __init__(self) -> None:
        super().__init__(tail=False)


ALL = 0b1111


def routed(step: int, bits: list[int], backwards: bool = False) -> tuple[Tensor, ...]:
    """Every rank's share of rows names its own of these bits."""
    rows = torch.tensor([[of_rank, backwards] for of_rank in bits])
    return *vectors(step), rows.repeat_interleave(GLOBAL_BATCH // len(bits), dim=0)


def skips(step: int, world_size: int) -> tuple[Tensor, ...]:
    """In the first step every block runs on a rank and no rank runs them all; then each
    does as chance will.
    """
    if step == 0:
        return routed(step, [0b0101, 0b1010, 0b0011][:world_size])
    return routed(
        step,
        torch.randint(
            0, ALL + 1, (world_size,), generator=torch.Generator().manual_seed(step)
        ).tolist(),
    )


def skips_on_2(step: int) -> Any:
    return skips(step, 2)


def skips_on_3(step: int) -> Any:
    return skips(step, 3)


def all_then_skips_on_2(step: int) -> Any:
    return routed(0, [ALL, ALL]) if step == 0 else skips(step, 2)


def assert_trains_like_the_oracle(
    found: list[Any], model: type[nn.Module], data: Any, num_steps: int
) -> None:
    """The oracle plays all ranks in one process: mean gradients, with zeros where a
    rank skipped.
    """
    curve, weights = train_plainly(model, data, adamw, num_steps=num_steps, num_parts=len(found))
    for found_curve, found_weights in found:
        assert found_curve == found[0][0]
        # Rounding only; Adam may turn a last-bit difference of a gradient near zero into a part of
        # lr = 1e-2.
        torch.testing.assert_close(
            torch.tensor(found_curve), torch.tensor(curve), rtol=2e-6, atol=2e-6
        )
        torch.testing.assert_close(found_weights, weights, rtol=0, atol=1e-5)


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", ["learned", "negotiated"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("world_size", "data"),
    [(2, skips_on_2), (3, skips_on_3), (2, all_then_skips_on_2)],
    ids=["2", "3", "2, all first"],
)
def test_a_unit_that_some_ranks_skip_trains_with_zero_gradients_there(
    ranks: RankPool, world_size: int, data: Any, stage: int, schedule: str
) -> None:
    found = ranks(world_size, _train, Routed, data, config(stage), 8, schedule)
    assert_trains_like_the_oracle(found, Routed, data, 8)


def _train(model: Any, data: Any, cfg: Any, num_steps: int, schedule: Any, **options: Any) -> Any:
    return train(model, data, cfg, num_steps=num_steps, schedule=schedule, **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", ["learned", "negotiated"])
@pytest.mark.parametrize(("world_size", "data"), [(2, skips_on_2), (3, skips_on_3)])
def test_the_events_of_ranks_that_skip_units_pass_the_checker(
    ranks: RankPool, world_size: int, data: Any, schedule: str
) -> None:
    """What each rank executes on tensors, in the steps that negotiate and in those that
    follow.
    """
    rules = fzero.plan(make(Routed), config(3), world_size=world_size).unit_rules
    steps_by_rank = ranks(world_size, _executed, data, schedule)
    for step, executed in enumerate(zip(*steps_by_rank, strict=True)):
        assert check_schedules(executed, rules) <= rules.most_gathered(alike=False), step
    assert any(steps != steps_by_rank[0] for steps in steps_by_rank), "ranks use different units"


def _executed(data: Any, schedule: Any) -> list[list[Event]]:
    with recorded(Sequencer) as records:
        train(Routed, data, config(3), num_steps=5, schedule=schedule)
    return list(records.values())


def turns_around(step: int) -> Any:
    """From the third step on the blocks run backwards, on rank 1 only."""
    x, y, route = routed(step, [ALL, ALL])
    route[GLOBAL_BATCH // 2 :, 1] = step >= 2
    return x, y, route


def skips_all_at_first(step: int) -> Any:
    """Block 2 runs nowhere in the first step."""
    return routed(step, [0b1011, 0b1011] if step == 0 else [ALL, 0b1011])


def ends_elsewhere(step: int) -> Any:
    """Block 2 ends the first forward of the one rank that runs it, which then needs no
    second gather.
    """
    return routed(step, [0b0111, 0b1011] if step == 0 else [ALL, ALL])


CHANGES = pytest.mark.parametrize(
    ("model", "data"),
    [(Routed, turns_around), (Routed, skips_all_at_first), (Tailless, ends_elsewhere)],
    ids=["order", "new", "last"],
)


@pytest.mark.long
def test_a_rank_that_alone_needs_another_order_is_named_and_no_rank_hangs(ranks: RankPool) -> None:
    # The rank waits 20 s for the others to need another order, too.
    errors = errors_of(ranks, 2, _train, Routed, turns_around, config(3), 4, "learned")
    reported = [error for error in errors if isinstance(error, ScheduleError)]
    assert reported and all(isinstance(error, ScheduleError | CollectiveError) for error in errors)
    message = r"rank \d needs to gather blocks\.[0-3] where .* pass schedule='negotiated'"
    assert_all_raise(reported, ScheduleError, message)


@pytest.mark.parametrize(
    ("model", "data"), [(Routed, skips_all_at_first), (Tailless, ends_elsewhere)]
)
def test_a_block_that_no_rank_runs_at_first_trains_with_the_learned_order(
    ranks: RankPool, model: Any, data: Any
) -> None:
    assert_trains_like_the_oracle(
        ranks(2, _train, model, data, config(3), 4, "learned"), model, data, 4
    )


@pytest.mark.sample(2)
@CHANGES
@pytest.mark.parametrize(("stage", "schedule"), [(3, "negotiated"), (2, "learned")])
def test_a_negotiated_schedule_or_a_stage_without_gathers_trains_in_any_order(
    ranks: RankPool, model: Any, data: Any, stage: int, schedule: str
) -> None:
    found = ranks(2, _train, model, data, config(stage), 4, schedule)
    assert_trains_like_the_oracle(found, model, data, 4)


def _evaluate(stage: int) -> list[float]:
    step = fzero.make_train_step(make(Routed), config(stage))
    state = step.init()
    return [
        step.evaluate(state, part(skips(index, 2), step.rank, step.world_size)).item()
        for index in range(4)
    ]


@pytest.mark.parametrize("stage", [2, 3])
def test_evaluation_may_skip_units_as_well(ranks: RankPool, stage: int) -> None:
    module = make(Routed)
    expected = [
        sum(module(*part(skips(index, 2), rank, 2)).item() for rank in range(2)) / 2
        for index in range(4)
    ]
    for losses in ranks(2, _evaluate, stage):
        # batches are cut and added in the same order
        assert losses == pytest.approx(expected, rel=2e-6)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class MoEBlock(nn.Module):
    """Each row goes to the expert that the router likes best; an expert without rows
    does not run.
    """

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = x.clone()
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class MoE(nn.Module):
    def __init__(self, width: int = 16, num_blocks: int = 3, num_experts: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MoEBlock(width, num_experts) for _ in range(num_blocks))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_mixture_of_experts_inside_blocks_trains_by_default(
    ranks: RankPool, world_size: int, stage: int
) -> None:
    # 12 rows on 8 experts: on each of the ranks other experts have no rows, in every step
    found = ranks(world_size, _train, MoE, vectors, config(stage), 6, "learned")
    assert_trains_like_the_oracle(found, MoE, vectors, 6)


def test_experts_as_units_of_their_own_train_with_a_negotiated_schedule(ranks: RankPool) -> None:
    found = ranks(2, _train, MoE, vectors, config(3), 4, "negotiated", units=["blocks.*.experts.*"])
    assert_trains_like_the_oracle(found, MoE, vectors, 4)


class Branches(nn.Module):
    """torch.cond whose branches read modules, or clones of their weights."""

    def __init__(self, clones: bool) -> None:
        super().__init__()
        self.one, self.other, self.clones = nn.Linear(16, 16), nn.Linear(16, 16), clones

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = self.one.weight.clone(), self.other.weight.clone()
        branches = (
            (lambda x: x @ one, lambda x: torch.tanh(x @ other))
            if self.clones
            else (self.one, self.other)
        )
        return nn.functional.mse_loss(torch.cond(x.sum() > 0, *branches, (x,)), y)


@pytest.mark.parametrize("stage", [0, 3])
def test_branches_of_torch_cond_take_clones_of_parameters_and_name_what_else_they_read(
    stage: int,
) -> None:
    losses, plain = (
        train(lambda: Branches(True), vectors, config(stage), num_steps=3)[0],
        make(lambda: Branches(True)),
    )
    assert losses[0][0] == pytest.approx(plain(*vectors(0)).item())
    with pytest.raises(
        ValueError, match=r"functions given to torch.cond, .* must not read parameters or modules"
    ):
        train(lambda: Branches(False), vectors, config(stage), num_steps=1)
