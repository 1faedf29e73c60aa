"""The checks for users: what is right passes, and what is broken on purpose is caught
for the right reason.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fzero
from fzero import Transform
from fzero.comms import collectives
from fzero.comms.comm_hooks import CommHook, completed
from fzero.testing import check_hook, check_order, check_transform
from fzero.testing.collective_laws import COLLECTIVE_LAWS
from fzero.testing.order_laws import ORDER_LAWS
from fzero.testing.transform_laws import CAPTURE_LAWS, RATE_LAWS, TRANSFORM_LAWS, Updates
from sharding import FlatLayout, Order, TensorSpec, declaration, round_robin

pytestmark = pytest.mark.property

Update = tuple[Tensor, Tensor, "Momentum"]


class Momentum(NamedTuple):
    """A count and a running direction."""

    step: Any
    mean: Any


def right(
    lr: Any = 0.1,
    *,
    init: Callable[[Tensor], Any] | None = None,
    update: Callable[[Tensor, Tensor, Any], Any] | None = None,
    specs: Callable[[TensorSpec], Any] | None = None,
    update_skip_if: Callable[[Tensor, Tensor, Tensor, Any], Any] | None = None,
    several: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Any]], Any] | None = None,
) -> Transform:
    """A transform that is right, but for what is given."""

    def own_update(grad: Tensor, param: Tensor, state: Momentum) -> Update:
        state.mean.mul_(0.5).add_(grad)
        param.sub_(state.mean * lr)
        return grad, param, Momentum(state.step.add_(1), state.mean)

    def own_init(param: Tensor) -> Momentum:
        return Momentum(torch.zeros(()), torch.zeros_like(param))

    one = update or own_update
    return Transform(
        init or own_init,
        one,
        specs or own_specs,
        update_skip_if,
        None if several is None else (one, several),
    )


def own_specs(spec: TensorSpec) -> Momentum:
    return Momentum(TensorSpec((), "float32", placement=spec.placement), spec)


UPDATE = right().update


# --- transforms that are broken on purpose --------------------------------------------------------


def forgetting_padding(spec: TensorSpec) -> Momentum:
    return Momentum(
        own_specs(spec).step, TensorSpec(spec.shape, spec.dtype, spec.spec, spec.placement)
    )


def forgetting_placement(spec: TensorSpec) -> Momentum:
    return Momentum(TensorSpec((), "float32"), spec)


def forgetting_a_leaf(spec: TensorSpec) -> tuple[TensorSpec]:
    return (spec,)


def counting_in_python(param: Tensor) -> Momentum:
    return Momentum(0, torch.zeros_like(param))


def needing_an_element(grad: Tensor, param: Tensor, state: Momentum) -> Update:
    grad.max()
    return UPDATE(grad, param, state)


def widening(grad: Tensor, param: Tensor, state: Momentum) -> Update:
    grad, param, state = UPDATE(grad, param, state)
    return grad, param, Momentum(state.step.double(), state.mean)


def sharing(param: Tensor) -> Momentum:
    return Momentum(torch.zeros(()), param)


def sharing_later(grad: Tensor, param: Tensor, state: Momentum) -> Update:
    return grad, param.sub_(grad), Momentum(state.step.add_(1), param)


def trespassing(grad: Tensor, param: Tensor, state: Momentum) -> Update:
    whole = torch.empty(0, dtype=param.dtype).set_(param.untyped_storage())
    if param.numel():
        whole.mul_(0.9)
    return UPDATE(grad, param, state)


def zeroing_init(param: Tensor) -> Momentum:
    return Momentum(torch.zeros(()), param.zero_().clone())


def noisy(grad: Tensor, param: Tensor, state: Momentum) -> Update:
    return UPDATE(grad.add_(torch.randn_like(grad)), param, state)


def counting_outside() -> Transform:
    count = 0

    def update(grad: Tensor, param: Tensor, state: Momentum) -> Update:
        nonlocal count
        count += 1
        return UPDATE(grad / count, param, state)

    return right(update=update)


def keeping_what_init_resets() -> Transform:
    kept: list[Tensor] = []

    def init(param: Tensor) -> Momentum:
        kept.clear()
        return Momentum(torch.zeros(()), torch.zeros_like(param))

    def update(grad: Tensor, param: Tensor, state: Momentum) -> Update:
        kept.append(grad.sum())
        return UPDATE(grad * len(kept), param, state)

    return right(init=init, update=update)


def keeping_by_address() -> Transform:
    counts: dict[int, int] = {}

    def init(param: Tensor) -> Momentum:
        counts[param.data_ptr()] = 0
        return Momentum(torch.zeros(()), torch.zeros_like(param))

    def update(grad: Tensor, param: Tensor, state: Momentum) -> Update:
        counts[param.data_ptr()] = counts.get(param.data_ptr(), 0) + 1
        return UPDATE(grad * counts[param.data_ptr()], param, state)

    return right(init=init, update=update)


def clipping(grad: Tensor, param: Tensor, state: Momentum) -> Update:
    return UPDATE(grad / (1 + grad.norm()), param, state)


def smoothing(grad: Tensor, param: Tensor, state: Momentum) -> Update:
    return UPDATE((grad + grad.roll(1)) / 2, param, state)


def remembering_the_norm(grad: Tensor, param: Tensor, state: Momentum) -> Update:
    _, param, state = UPDATE(grad, param, state)
    return grad, param, Momentum(state.step + grad.norm().float(), state.mean)


def counting_what_is_skipped(skip: Tensor, grad: Tensor, param: Tensor, state: Momentum) -> Update:
    _, new, after = UPDATE(
        grad.clone(), param.clone(), Momentum(state.step.clone(), state.mean.clone())
    )
    param.copy_(torch.where(skip, param, new))
    state.mean.copy_(torch.where(skip, state.mean, after.mean))
    return grad, param, Momentum(state.step.add_(1), state.mean)


def always_skipping(skip: Tensor, grad: Tensor, param: Tensor, state: Momentum) -> Update:
    return grad, param, state


def fp32_as_16_bits(grad: Tensor, param: Tensor, state: Momentum) -> Update:
    """Goes another way after a tile of 32 elements, of which a shard knows nothing."""
    if param.numel() == 32 and param.dtype == torch.float32 and param.storage_offset() % 64:
        grad.mul_(2)
    return UPDATE(grad, param, state)


Tensors, States = Sequence[Tensor], Sequence[Momentum]


def each(grads: Tensors, params: Tensors, states: States) -> list[Momentum]:
    return [UPDATE(*of)[2] for of in zip(grads, params, states, strict=True)]


def leaving_out_the_last(grads: Tensors, params: Tensors, states: States) -> list[Momentum]:
    return [*each(grads[:-1], params[:-1], states[:-1]), states[-1]]


def giving_no_state_of_the_empty(grads: Tensors, params: Tensors, states: States) -> list[Momentum]:
    return [state for state in each(grads, params, states) if state.mean.numel()]


def not_counting_the_empty(grads: Tensors, params: Tensors, states: States) -> list[Momentum]:
    return [
        UPDATE(*of)[2] if of[0].numel() else of[2] for of in zip(grads, params, states, strict=True)
    ]


def counting_by_the_first(grads: Tensors, params: Tensors, states: States) -> list[Momentum]:
    news = each(grads, params, states)
    return [Momentum(news[0].step.clone(), new.mean) for new in news]


def making_new_parameters(grads: Tensors, params: Tensors, states: States) -> list[Momentum]:
    return each(grads, [param.clone() for param in params], states)


def clipping_together(grads: Tensors, params: Tensors, states: States) -> list[Momentum]:
    norm = torch.cat(list(grads)).norm()
    return each([grad / (1 + norm) for grad in grads], params, states)


def running_over(grads: Tensors, params: Tensors, states: States) -> list[Momentum]:
    news, first = each(grads, params, states), params[0]
    whole = torch.empty(0, dtype=first.dtype).set_(first.untyped_storage())
    whole[first.storage_offset() + first.numel() :].mul_(0.9)
    return news


def branching(grad: Tensor, param: Tensor, state: Momentum) -> Update:
    if state.step > 0:
        grad.mul_(0.5)
    return UPDATE(grad, param, state)


def freezing(lr: Any) -> Transform:
    return right(float(lr))


def writing(lr: Any) -> Transform:
    def update(grad: Tensor, param: Tensor, state: Momentum) -> Update:
        if isinstance(lr, Tensor):
            lr.mul_(0.9)
        return UPDATE(grad, param, state)

    return right(update=update)


(RATE_LAW,) = RATE_LAWS
ALL_LAWS = (*TRANSFORM_LAWS, *CAPTURE_LAWS, RATE_LAW)
PLACE, EMPTY, KINDS, ALIASES, WRITES, EQUAL, ALL, SHARDS, SKIPS, WIDE, SEVERAL, READS = (
    law.sentence for law in ALL_LAWS[:-1]
)
BROKEN: dict[str, tuple[Any, str, str]] = {
    "padding": (
        right(specs=forgetting_padding),
        PLACE,
        "init makes state.mean with shape and dtype",
    ),
    "placement": (right(specs=forgetting_placement), PLACE, "specs puts state.step on .*'device'"),
    "a leaf": (right(specs=forgetting_a_leaf), PLACE, "and specs describes"),
    "a number": (right(init=counting_in_python), PLACE, "state.step is a int"),
    "no elements": (right(update=needing_an_element), EMPTY, "it raises RuntimeError: max"),
    "dtype": (right(update=widening), KINDS, "state.step is .*float32.* before an update"),
    "shared": (
        right(init=sharing),
        ALIASES,
        "the parameter and state.mean share memory after init",
    ),
    "shared later": (
        right(update=sharing_later),
        ALIASES,
        "the parameter and state.mean share memory after update 1",
    ),
    "trespass": (
        right(update=trespassing),
        WRITES,
        "an update writes to the memory around the parameter",
    ),
    "init writes": (right(init=zeroing_init), WRITES, "init writes to the parameter"),
    "noise": (right(update=noisy), EQUAL, "differ in|draws random numbers"),
    "a count outside": (counting_outside(), EQUAL, "made twice, differ in state.mean"),
    "reset by init": (keeping_what_init_resets(), ALL, "another flat buffer come between"),
    "kept by address": (keeping_by_address(), ALL, "when a copy of the state goes on"),
    "norm": (right(update=clipping), SHARDS, "differ from the whole in the parameter"),
    "neighbours": (right(update=smoothing), SHARDS, "differ from the whole in the parameter"),
    "norm in the state": (
        right(update=remembering_the_norm),
        SHARDS,
        "differ from the whole in state.step",
    ),
    "counts the skipped": (
        right(update_skip_if=counting_what_is_skipped),
        SKIPS,
        "a skipped update changes state.step",
    ),
    "skips all": (
        right(update_skip_if=always_skipping),
        SKIPS,
        "after skipped updates the parameter is another",
    ),
    "tiles": (right(update=fp32_as_16_bits), WIDE, "in tiles of 32 elements"),
    "the last": (
        right(several=leaving_out_the_last),
        SEVERAL,
        "buffer 0 of 1, .* differs in state.step",
    ),
    "no state": (
        right(several=giving_no_state_of_the_empty),
        SEVERAL,
        "one call for 1 buffers gives 0 states",
    ),
    "uncounted": (
        right(several=not_counting_the_empty),
        SEVERAL,
        "buffer 0 of 1, .* differs in state.step",
    ),
    "one count": (
        right(several=counting_by_the_first),
        SEVERAL,
        "buffer 1 of 2, .* differs in state.step",
    ),
    "new parameters": (right(several=making_new_parameters), SEVERAL, "differs in the parameter"),
    "one norm": (right(several=clipping_together), SEVERAL, "differs in the parameter"),
    "over the end": (
        right(several=running_over),
        SEVERAL,
        "buffer 1 of 2, .* differs in the parameter",
    ),
    "a branch": (
        right(update=branching),
        READS,
        "the host reads a value by aten._local_scalar_dense",
    ),
    "rate as a constant": (freezing, RATE_LAW.sentence, "does not change the parameter"),
    "writes to the rate": (writing, RATE_LAW.sentence, "an update writes to the learning rate"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_transform_is_caught_for_the_right_reason(name: str) -> None:
    transform, sentence, found = BROKEN[name]
    with pytest.raises(AssertionError, match=found) as raised:
        check_transform(transform, name=name, compile="step")
    reported = str(raised.value)
    assert reported.startswith(f"{name}: {sentence}. Found that ")
    law = next(law for law in ALL_LAWS if law.sentence == sentence)
    assert ". Smallest example: " in reported and reported.endswith(law.fix)


@pytest.mark.parametrize(
    "given_transform",
    [right(), right, right(several=each)],
    ids=["itself", "of the learning rate", "of several buffers"],
)
def test_a_transform_that_is_right_passes(given_transform: Any) -> None:
    check_transform(given_transform, compile="step")


@pytest.mark.parametrize("name", ["rate as a constant", "writes to the rate", "a branch"])
def test_what_only_a_captured_step_asks_is_not_asked_of_others(name: str) -> None:
    check_transform(BROKEN[name][0], compile="block")


def clipping_when(rare: Callable[[Tensor, Momentum], Tensor | bool]) -> Transform:
    """Divides by the norm of all that it sees, where `rare` is true."""

    def update(grad: Tensor, param: Tensor, state: Momentum) -> Update:
        norm = torch.where(torch.as_tensor(rare(grad, state)), 1 + grad.norm(), 1.0)
        return UPDATE(grad / norm, param, state)

    return right(update=update)


RARE: dict[str, tuple[Any, str]] = {
    **{
        f"every {k}th update": (lambda grad, state, k=k: state.step % k == k - 1, "after update")
        for k in (5, 10, 100, 128)
    },
    **{
        f"every {k}th update": (lambda grad, state, k=k: state.step % k == 0, "after update")
        for k in (250, 1000, 5000)
    },
    "after 9,000 updates": (lambda grad, state: state.step > 9_000, "after update"),
    "from 4096 elements on": (
        lambda grad, state: grad.numel() >= 4096,
        "in the parameter after update 1",
    ),
    "from 65,536 elements on": (
        lambda grad, state: grad.numel() >= 65_536,
        "in the parameter after update 1",
    ),
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("rare", RARE)
def test_what_an_update_does_seldom_is_found_by_the_kit_and_when_a_step_is_made(rare: str) -> None:
    transform, reported = clipping_when(RARE[rare][0]), RARE[rare][1]
    with pytest.raises(AssertionError, match=f"{SHARDS}.*{reported}"):
        check_transform(transform, max_examples=15)
    with pytest.raises(fzero.ConfigError, match=f"transform: must be elementwise, .*{reported}"):
        fzero.plan(torch.nn.Linear(2, 2), {}, transform=transform)


def test_a_longer_run_finds_what_is_seldomer() -> None:
    transform = clipping_when(lambda grad, state: state.step == 299)
    check_transform(transform, max_examples=1)
    with pytest.raises(AssertionError, match=r"after update 300\. Example: Updates"):
        check_transform(transform, max_examples=1, num_updates=300)
    with pytest.raises(ValueError, match="num_updates: must be a whole number, at least 1, got 0"):
        check_transform(transform, num_updates=0)


def test_what_is_counted_outside_the_state_is_found_however_late_it_shows() -> None:
    count = 0

    def update(grad: Tensor, param: Tensor, state: Momentum) -> Update:
        nonlocal count
        count += 1
        return UPDATE(grad * (2 if count % 100 == 0 else 1), param, state)

    with pytest.raises(AssertionError, match=f"{EQUAL}|{ALL}"):
        check_transform(right(update=update), max_examples=1)


def test_every_law_of_transforms_is_broken_by_one() -> None:
    assert {sentence for _, sentence, _ in BROKEN.values()} == {law.sentence for law in ALL_LAWS}


def test_the_smallest_example_is_small_and_can_be_made_again() -> None:
    """Two shards of 32 elements each must hold something for a norm to show."""
    with pytest.raises(AssertionError, match=r"Smallest example: Updates\(") as raised:
        check_transform(right(update=clipping))
    reported = (
        str(raised.value).partition("Smallest example: ")[2].partition(". Let each element")[0]
    )
    example = eval(reported, {"Updates": Updates, "FlatLayout": FlatLayout})
    assert 32 < example.layout.numel < 64 and (example.layout.world_size, example.num_updates) == (
        2,
        1,
    )


def test_a_check_leaves_the_random_numbers_of_the_program_alone() -> None:
    torch_state, state = torch.get_rng_state(), random.getstate()
    check_transform(fzero.sgd, max_examples=3)
    check_order(round_robin, max_examples=3)
    assert torch.equal(torch.get_rng_state(), torch_state) and random.getstate() == state


def test_what_is_no_transform_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"mine: must be a Transform or a function of the learning rate .* got 3; see",
    ):
        check_transform(3, name="mine")  # type: ignore[arg-type]


# --- orders ---------------------------------------------------------------------------------------


class Stubborn(Order):
    """Its inverse is itself."""

    def inverse(self) -> Order:
        return self


def dropping_the_last(length: int, world_size: int) -> Order:
    return round_robin(max(length - 1, 0), world_size)


def needing_two(length: int, world_size: int) -> Order:
    return Order((1, 0, *range(2, length)))


def not_undone(length: int, world_size: int) -> Order:
    return Stubborn(round_robin(length, world_size).indices)


def shuffled(length: int, world_size: int) -> Order:
    return Order(tuple(random.sample(range(length), length)))


def by_rank(length: int, world_size: int) -> Order:
    rank = int(os.environ.get("RANK", 0))
    return Order(tuple((index + rank) % length for index in range(length)))


def by_even_share(length: int, world_size: int) -> Order:
    return Order(
        tuple(
            index
            for first in range(world_size)
            for index in range(first * (length // world_size), length)
        )
    )


PERMUTATION, UNDONE, ALIKE, RANKS = (law.sentence for law in ORDER_LAWS)
BROKEN_ORDERS = [
    (dropping_the_last, PERMUTATION, r"orders 0 of 1 parameters\. .*length=1, world_size=1"),
    (needing_two, PERMUTATION, r"orders 2 of 0 parameters\. .*length=0, world_size=1"),
    (
        by_even_share,
        PERMUTATION,
        r"raises ValueError: Order: indices must .*length=1, world_size=2",
    ),
    (not_undone, UNDONE, r"the inverse gives .*length=4, world_size=3"),
    (shuffled, ALIKE, "two calls give"),
    (by_rank, RANKS, r"rank 0 has \(0, 1\) and rank 1 has \(1, 0\)\. .*length=2, world_size=2"),
]


@pytest.mark.parametrize(
    ("order", "sentence", "found"), BROKEN_ORDERS, ids=[case[0].__name__ for case in BROKEN_ORDERS]
)
def test_a_broken_order_is_caught_for_the_right_reason(
    order: Any, sentence: str, found: str
) -> None:
    with pytest.raises(AssertionError, match=found) as raised:
        check_order(order, name=order.__name__)
    assert str(raised.value).startswith(f"{order.__name__}: {sentence}. Found that ")


@pytest.mark.parametrize(
    "order",
    [
        round_robin,
        declaration,
        lambda length, world_size=1: round_robin(length, world_size),
        lambda length, *, world_size: round_robin(length, world_size),
        lambda length, num_lists=2: round_robin(length, num_lists),
        lambda *numbers: round_robin(*numbers),
    ],
    ids=["round robin", "declaration", "a default", "by name", "a default of its own", "any"],
)
def test_the_orders_here_pass(order: Any) -> None:
    check_order(order)


# --- collectives ----------------------------------------------------------------------------------


EXACT = fzero.comms.exact()
OF_8_BITS = fzero.comms.compressed(fzero.comms.quantize(8))


def gather_by(function: Callable[..., tuple[Tensor, Any]], hook: CommHook = EXACT) -> CommHook:
    """A comm hook with another gather, which sends at once: (shard_S, axis, state) ->
    (full_P, state).
    """
    return hook._replace(start_gather=lambda *given, **_: completed(*function(*given)))


def reduce_by(function: Callable[..., tuple[Tensor, Any]]) -> CommHook:
    """The exact comm hook with another reduction."""
    return EXACT._replace(start_reduce_scatter=lambda *given, **_: completed(*function(*given)))


def gathering(change: Callable[[Tensor, Tensor, Any], Tensor]) -> CommHook:
    """The exact comm hook, with the gathered tensor as `change(full_P, shard_S, axis)`
    makes it.
    """

    def gather(shard_S: Tensor, axis: Any, state: Any) -> tuple[Tensor, Any]:
        return change(EXACT.gather(shard_S, axis, None)[0], shard_S, axis), state

    return gather_by(gather)


def reducing(change: Callable[[Tensor, Tensor, Any], Tensor]) -> CommHook:
    """The exact comm hook, with the sum as `change(sum_S, full_P, axis)` makes it."""

    def reduce_scatter(full_P: Tensor, axis: Any, state: Any) -> tuple[Tensor, Any]:
        return change(EXACT.reduce_scatter(full_P, axis, None)[0], full_P, axis), state

    return reduce_by(reduce_scatter)


def parts(full_P: Tensor, axis: Any) -> Tensor:
    return full_P.view(axis.size, full_P.numel() // axis.size)


def without_own_part(full_P: Tensor, shard_S: Tensor, axis: Any) -> Tensor:
    parts(full_P, axis)[axis.rank] = 0
    return full_P


def mutating(full_P: Tensor, shard_S: Tensor, axis: Any) -> Tensor:
    shard_S.neg_()
    return full_P


def without_tail(full_P: Tensor, shard_S: Tensor, axis: Any) -> Tensor:
    full_P[-1:] = 0
    return full_P


def silent(shard_S: Tensor, axis: Any, state: Any) -> tuple[Tensor, Any]:
    return EXACT.gather(shard_S, replace(axis, observe=None), state)


def waiting_for_rank_0(shard_S: Tensor, axis: Any, state: Any) -> tuple[Tensor, Any]:
    """Rank 0 sends nothing."""
    if axis.rank == 0:
        return torch.cat([shard_S] * axis.size), state
    return EXACT.gather(shard_S, axis, state)


def sending_to_nobody(shard_S: Tensor, axis: Any, state: Any) -> tuple[Tensor, Any]:
    axis.hub.send(axis.rank, (axis.rank + 1) % axis.size, shard_S.clone())
    return EXACT.gather(shard_S, axis, state)


def sending_all(full_P: Tensor, axis: Any, state: Any) -> tuple[Tensor, Any]:
    """Every rank is sent everything, of which it adds up its part."""
    rows = collectives.stack(full_P, axis)
    return parts(rows.sum(0), axis)[axis.rank], state


def drawing(shard_S: Tensor, axis: Any, state: Any) -> tuple[Tensor, Any]:
    """Draws what it will round by, from torch's own generator."""
    return EXACT.gather(shard_S, axis, None)[0], state + torch.rand_like(state)


def growing(shard_S: Tensor, axis: Any, state: Any) -> tuple[Tensor, Any]:
    return EXACT.gather(shard_S, axis, None)[0], (*(state or ()), shard_S.clone())


def keeping_its_own(shard_S: Tensor, axis: Any, state: Any) -> tuple[Tensor, Any]:
    """Sends 8 bits of each element, and leaves its own shard as it is."""
    full_P, state = OF_8_BITS.gather(shard_S, axis, state)
    parts(full_P, axis)[axis.rank] = shard_S
    return full_P, state


def with_bytes(decode: Callable[[Tensor, int, torch.dtype], Tensor]) -> CommHook:
    """Sends float32 as bytes, which `decode` reads."""

    def encode(x: Tensor) -> Tensor:
        wide = x.float()
        return wide.contiguous().view(torch.uint8) if x.numel() else wide.to(torch.uint8)

    exactly = fzero.comms.codecs.Codec(
        "bytes", lambda n: 4 * n, encode, decode, lambda x: torch.zeros_like(x).double()
    )
    return fzero.comms.compressed(exactly)


RAISES, ENDS, GIVEN, FORM, SAME, JOINS, ADDS, LOSES, STATE, AGAIN, SENDS, PLANS, LATE = (
    law.sentence for law in COLLECTIVE_LAWS
)
BROKEN_COLLECTIVES: dict[str, tuple[CommHook, float, str, str]] = {
    "wrong order": (
        gathering(lambda full, _, axis: parts(full, axis).flip(0).reshape(-1)),
        0,
        JOINS,
        "gather gives",
    ),
    "no own part": (gathering(without_own_part), 0, SAME, "rank 0 gathers"),
    "own part exact": (gather_by(keeping_its_own, OF_8_BITS), 1 / 127, SAME, "rank 0 gathers"),
    "averages": (
        reducing(lambda total, _, axis: total / axis.size),
        0,
        ADDS,
        "reduce_scatter on rank",
    ),
    "adds a part": (
        reducing(lambda total, full, axis: parts(full, axis)[0] + total),
        0,
        ADDS,
        "reduce_scatter on",
    ),
    "sends to itself": (
        gather_by(lambda x, axis, _: (torch.cat([x] * axis.size), None)),
        0,
        SAME,
        "rank",
    ),
    "no tail": (gathering(without_tail), 0, JOINS, "gather gives"),
    "cuts the tail": (
        gathering(lambda full, shard, axis: full[:-1]),
        0,
        FORM,
        r"gather gives \(\(",
    ),
    "another dtype": (reducing(lambda total, *_: total.half()), 0, FORM, "torch.float16"),
    "reads strided bytes": (
        with_bytes(
            lambda codes, numel, dtype: codes.T.view(torch.float32).T[..., :numel].to(dtype)
        ),
        0,
        RAISES,
        "it raises RuntimeError: self",
    ),
    "reads no empty bytes": (
        with_bytes(lambda codes, numel, dtype: codes.view(torch.float32)[..., :numel].to(dtype)),
        0,
        RAISES,
        "it raises RuntimeError: self",
    ),
    "never sends": (
        gather_by(waiting_for_rank_0),
        0,
        ENDS,
        "rank 1 waits for rank 0, which has ended",
    ),
    "sends to nobody": (gather_by(sending_to_nobody), 0, ENDS, "never received|waits"),
    "mutates": (gathering(mutating), 0, GIVEN, "gather writes to what it is given on rank"),
    "more than declared": (OF_8_BITS, 1e-4, JOINS, "is declared"),
    "loses more than it tells": (
        OF_8_BITS._replace(lossy=lambda x: x),
        1 / 127,
        LOSES,
        "gather gives",
    ),
    "state grows": (gather_by(growing), 0, STATE, r"init gives \[\] and gather"),
    "noise in the state": (
        gather_by(drawing)._replace(init=torch.zeros_like),
        0,
        AGAIN,
        "two runs give",
    ),
    "sends all": (reduce_by(sending_all), 0, SENDS, "bytes, the exact collectives"),
    "another plan": (EXACT._replace(nbytes=lambda numel, itemsize: 1), 0, PLANS, "nbytes returns"),
    "at once": (reducing(lambda total, *_: total), 0, LATE, r"gives \[nan"),
    "silent": (gather_by(silent), 0, SENDS, "to axis.observe"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BROKEN_COLLECTIVES)
def test_a_broken_collective_is_caught_for_the_right_reason(name: str) -> None:
    hook, max_error, sentence, found = BROKEN_COLLECTIVES[name]
    with pytest.raises(AssertionError, match=found) as raised:
        check_hook(hook, max_error=max_error, name=name)
    assert str(raised.value).startswith(f"{name}: {sentence}. Found that ")


RIGHT = {
    "exact": (EXACT, 0.0),
    "8 bits": (OF_8_BITS, 1 / 127),
    "bfloat16": (fzero.comms.compressed(fzero.comms.cast("bfloat16")), 2.0**-8),
    "feedback": (fzero.comms.error_feedback(OF_8_BITS), 2 / 127),  # what two rounds lose
    "LoCo": (
        fzero.comms.reset_every(fzero.comms.error_feedback(OF_8_BITS, decay=0.8), every=2),
        2 / 127,
    ),
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", RIGHT)
def test_the_collectives_here_pass(name: str) -> None:
    hook, max_error = RIGHT[name]
    check_hook(hook, max_error=max_error)


def test_every_law_of_collectives_is_broken_by_one() -> None:
    assert {sentence for *_, sentence, _ in BROKEN_COLLECTIVES.values()} == {
        law.sentence for law in COLLECTIVE_LAWS
    }


# --- the package ----------------------------------------------------------------------------------


def test_importing_fzero_does_not_import_hypothesis() -> None:
    program = "import sys, fzero; print('hypothesis' in sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed == "False\n"


def test_a_spec_that_is_replaced_passes() -> None:
    """The way that the message recommends."""
    check_transform(
        right(specs=lambda spec: Momentum(replace(own_specs(spec).step), replace(spec)))
    )
