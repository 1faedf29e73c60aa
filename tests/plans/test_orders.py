"""The laws of an order of parameters within flat buffers: it decides who holds what,
and no bit of training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor
from training import Odd, config, make, part, tokens

import fzero
from fzero.runtime.step_spec import MismatchError
from fzero.testing import check_order
from sharding import Order, declaration, round_robin


def small() -> Odd:
    return Odd(width=5, num_blocks=2)


NAMES = tuple(dict(small().named_parameters()))


def middle_out(length: int) -> Order:
    """The last half backwards, then the first."""
    return Order((*reversed(range(length // 2, length)), *range(length // 2)))


ORDERS: dict[str, Any] = {
    "as declared": None,
    "round robin": round_robin,
    "of the user": middle_out,
    "of names": tuple(sorted(NAMES, key=lambda name: name[::-1])),
}


def _train(
    ranks_of: Any, order: str, stage: int, folder: str, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps, a checkpoint that a step of the declared order reads, and two more in
    the first order, after `reshard`.
    """

    def make_step(order: Any) -> Any:
        return ranks_of(
            fzero.make_train_step(make(small), config(stage, clip=0.0), order=order, **options)
        )

    step, reported = make_step(ORDERS[order]), []
    state = step.init()
    other = make_step(None)
    for index in range(4):
        batch = tokens(index, 12)
        if isinstance(step, fzero.TrainStep):
            batch = part(batch, step.rank, step.world_size)
        else:
            batch = tuple(x.unflatten(0, (step.world_size, -1)) for x in batch)
        state, metrics = step(state, batch)
        reported.append(metrics.loss.flatten()[0].item())
        if index == 1:
            fzero.save(state, folder, step=step)
            state = fzero.load(folder, step=other).state
            if isinstance(step, fzero.TrainStep):
                state = fzero.reshard(state, other, step)
            else:
                state = fzero.load(folder, step=step).state
    return reported, step.gather(state)


def _on_ranks(folder: str) -> dict[tuple[str, int], Any]:
    return {
        (order, stage): _train(lambda step: step, order, stage, f"{folder}/{order}/{stage}")
        for order, stage in [
            ("as declared", 0),
            ("of names", 1),
            ("of the user", 2),
            ("of names", 3),
        ]
    }


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(x, expected[1][name]) for name, x in found[1].items())


def test_every_order_gives_the_bits_of_the_declared_one_in_all_stages(
    ranks: RankPool, tmp_path: Path
) -> None:
    for results in ranks(2, _on_ranks, str(tmp_path)):
        for result in results.values():
            assert_same(result, results["as declared", 0])


def test_simulated_ranks_take_every_order(tmp_path: Path) -> None:
    def three(step: fzero.TrainStep) -> Any:
        return fzero.simulate(step, 3, by="lockstep")

    plain = _train(three, "as declared", 1, str(tmp_path / "plain"))
    for order, stage in (("of the user", 1), ("of names", 3)):
        assert_same(_train(three, order, stage, str(tmp_path / order)), plain)


@pytest.mark.long
def test_one_graph_takes_an_order(tmp_path: Path) -> None:
    options: dict[str, Any] = {"compile": "step", "compile_backend": "aot_eager"}
    found = _train(lambda step: step, "of names", 3, str(tmp_path / "graph"), **options)
    expected = _train(lambda step: step, "as declared", 3, str(tmp_path / "plain"))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_an_order_is_that_of_the_names_in_every_flat_buffer() -> None:
    for name, order in ORDERS.items():
        plans = {
            given: fzero.plan(small(), config(3), world_size=2, order=given)
            for given in (None, order)
        }
        for declared, buffer in zip(
            plans[None].flat_buffers, plans[order].flat_buffers, strict=True
        ):
            assert declared.key == buffer.key
            names = declared.layout.names
            if isinstance(order, tuple):
                assert buffer.layout.names == tuple(n for n in order if n in names)
            else:
                by_place = {"as declared": declaration, "of the user": middle_out}
                of = by_place[name](len(names)) if name in by_place else round_robin(len(names), 2)
                assert buffer.layout.names == of.apply(names)


def test_an_order_stands_in_place_of_the_configuration_s() -> None:
    cfg = config(2, round_robin_gradients=True)
    layouts = [
        [b.layout for b in fzero.plan(small(), cfg, world_size=2, order=o).flat_buffers]
        for o in (None, round_robin)
    ]
    assert layouts[0] == layouts[1]
    plain = fzero.plan(small(), config(2), world_size=2)
    assert [
        b.layout for b in fzero.plan(small(), cfg, world_size=2, order=declaration).flat_buffers
    ] == [b.layout for b in plain.flat_buffers]


def test_what_check_order_lets_pass_a_step_takes() -> None:
    check_order(middle_out, max_examples=10)
    assert fzero.make_train_step(make(small), config(1), order=middle_out).plan.units


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (
            "round robin",
            "order: must be a function of two numbers or a tuple of the names of all parameters",
        ),
        (3, "order: must be a function of two numbers or a tuple of the names"),
        ({"w": 1}, "order: must be a function of two numbers or a tuple of the names"),
        ((1, 0), "order: must be a function of two numbers or a tuple of the names"),
        (NAMES[1:], f"order: must name every parameter once, and '{NAMES[0]}' is missing"),
        ((*NAMES, NAMES[0]), f"order: must name every parameter once, got '{NAMES[0]}' twice"),
        ((*NAMES, "nobody"), "order: 'nobody' is no parameter of the model"),
        (
            (*NAMES, "head.weight"),
            "order: must have tied parameters under their first names, got 'head.weight'; pass "
            "'embed",
        ),
        (lambda length: round_robin(length + 1, 2), "order: must give a sharding.Order of"),
        (lambda length: tuple(range(length)), "order: must give a sharding.Order of"),
    ],
)
def test_what_is_no_order_is_reported_when_the_step_is_made(order: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fzero.make_train_step(make(small), config(2), order=order)


def _differ() -> str:
    rank = torch.distributed.get_rank()
    try:
        fzero.make_train_step(make(small), config(2), order=(round_robin, middle_out)[rank])
    except MismatchError as error:
        return str(error)
    return ""


def test_an_order_that_differs_between_ranks_is_reported_on_all(ranks: RankPool) -> None:
    assert all(
        reported.startswith("flat buffers: must be the same on all ranks")
        for reported in ranks(2, _differ)
    )
