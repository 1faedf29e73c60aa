"""Checks that an optimizer, an order of parameters, a comm hook, a transformation of the
model or an entire training system keeps the laws that training relies on.

For your own tests: hypothesis tries random layouts, world sizes and numbers. A broken
law is reported with the smallest example found and the fix.

    def test_my_optimizer_works_in_every_stage() -> None:
        check_transform(lambda lr: my_optimizer(lr, beta=0.9), compile="step")

Laws are tried in order (`fzero.testing.transform_laws`, `fzero.testing.order_laws`,
`fzero.testing.collective_laws`), and the first broken one raises. `TrainingMachine`
tries entire jobs: it trains, overflows, and changes stage, ranks and layout in any
order, and compares with a plain process. Needs the extra `fzero[testing]`.

    class MyMachine(TrainingMachine):
        transform = staticmethod(lambda lr: my_optimizer(lr, beta=0.9))

    TestMyOptimizer = MyMachine.TestCase

Strategies for tests of your own: `models`, `batches`, `meshes`, `configurations`, and
`histories` of a job, which `play` does. `fzero.testing.conformance` tries whole systems,
also others than fzero. docs/kit.md says what each check can show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import sharding.testing  # noqa: F401 - first of all: it names the extra where hypothesis is not installed
from fzero.common.arguments import check_callable, check_kind, check_whole
from fzero.comms.comm_hooks import CommHook
from fzero.optim.elementwise import LONG_RUN
from fzero.optim.transforms import Transform
from fzero.plans.orders import OrderFunction, in_two_numbers
from fzero.plans.param_groups import OwnTransform
from fzero.testing.collective_laws import COLLECTIVE_LAWS, Declared
from fzero.testing.histories import histories, play
from fzero.testing.laws import try_law
from fzero.testing.matrix_laws import check_matrix_transform
from fzero.testing.model_transform_laws import check_model_transform
from fzero.testing.order_laws import ORDER_LAWS
from fzero.testing.reference_trainer import Job
from fzero.testing.training_machine import TrainingMachine, configurations
from fzero.testing.transform_laws import CAPTURE_LAWS, RATE_LAWS, TRANSFORM_LAWS
from sharding.testing import batches, meshes, models

__all__ = [
    "Job",
    "TrainingMachine",
    "batches",
    "check_hook",
    "check_matrix_transform",
    "check_model_transform",
    "check_order",
    "check_transform",
    "configurations",
    "histories",
    "meshes",
    "models",
    "play",
]


def check_transform(
    transform: OwnTransform,
    *,
    name: str = "transform",
    compile: Literal["step", "block"] | None = None,
    lr: float = 0.1,
    max_examples: int = 25,
    num_updates: int = LONG_RUN,
) -> None:
    """Raises if a transform breaks a law that every ZeRO stage, precision and placement
    relies on, in the cases that it tries.

    A check runs the transform; it proves nothing about other cases. For each law it
    tries `max_examples` drawn examples (up to 4 updates of some hundred elements on up
    to 5 ranks, in fp32 and fp64, from the first update on or from around the 500th,
    1000th, 2048th or 10,000th by the state's own count), a run of `num_updates` updates
    and, where the number of elements may matter, 131,072 elements. So it detects an
    update that differs every k steps (Shampoo, SOAP, Sophia) if k is at most
    `num_updates`, or divides one of these counts and the state has the count as a 0-d
    tensor. It does not detect dependence on rare values, on more elements or later
    steps than these, or on a device other than the CPU.

    Args:
        transform: a `Transform`, or a function of the learning rate that makes one.
        name: its name in messages.
        compile: as in `make_train_step`. A step that is compiled as one graph requires
            more: the transform must not read the values of tensors, and must accept its
            learning rate as a tensor.
        lr: the learning rate for such a function.
        max_examples: the number of drawn examples of each law.
        num_updates: of the longest run; at least twice the period of anything that your
            transform does periodically.

    Raises:
        AssertionError: a law is broken; the message has the law, the smallest example
            found, and the fix.
        ValueError: `transform` is neither, or `num_updates` is less than 1.

    >>> from fzero import adamw
    >>> check_transform(adamw, max_examples=2)
    >>> clipped = Transform(
    ...     lambda param: (), lambda g, p, s: (g, p - g / (1 + g.norm()), s), lambda spec: ()
    ... )
    >>> check_transform(clipped)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    AssertionError: transform: the update of a shard must be the shard of the update, bit for bit. Found that ...
    """
    if not isinstance(transform, Transform) and not callable(transform):
        raise ValueError(
            f"{name}: must be a Transform or a function of the learning rate that makes one, got "
            f"{transform!r}; see fzero.Transform"
        )
    check_whole("max_examples", max_examples, 1)
    if compile not in (None, "step", "block"):
        raise ValueError(
            f"compile: must be None or 'step' or 'block', got {compile!r}; pass one of these"
        )
    check_whole("num_updates", num_updates, 1)
    make: Callable[[], Transform] = (
        (lambda: transform) if isinstance(transform, Transform) else lambda: transform(lr)
    )
    for law in (*TRANSFORM_LAWS, *(CAPTURE_LAWS if compile == "step" else ())):
        try_law(law, make, name, max_examples, num_updates)
    if compile == "step" and not isinstance(transform, Transform):
        for of_rate in RATE_LAWS:
            try_law(of_rate, transform, name, max_examples, num_updates)


def check_order(order: OrderFunction, *, name: str = "order", max_examples: int = 100) -> None:
    """Raises unless a function gives orders that a flat buffer may follow on every
    rank, as `order=` of `make_train_step`.

    Args:
        order: a function (number of parameters, number of ranks) -> `Order`, or one
            that takes the number of parameters alone. A second argument with a default
            keeps that default, unless its name is `world_size`.
        name: its name in messages.
        max_examples: the number of pairs tried for each law.

    Raises:
        AssertionError: a law is broken; the message has the law, the smallest example
            found, and the fix.

    >>> from sharding import declaration, round_robin
    >>> check_order(round_robin)
    >>> check_order(declaration)
    >>> check_order(lambda length, world_size: round_robin(max(length, 1), world_size))
    Traceback (most recent call last):
    ...
    AssertionError: order: it must be a permutation of the parameters. Found that it orders 1 of 0 parameters. Smallest \
example: OrderExample(length=0, world_size=1). Name every index from 0 to length - 1 once
    """
    check_callable("order", order, "a function of the number of parameters, and of ranks")
    check_whole("max_examples", max_examples, 1)
    for law in ORDER_LAWS:
        try_law(law, in_two_numbers(order), name, max_examples)


def check_hook(
    hook: CommHook, *, max_error: float = 0.0, name: str = "collective", max_examples: int = 25
) -> None:
    """Raises unless a comm hook's gather and reduce-scatter can replace the exact ones.

    Both run on 1 to 4 ranks of this process, several rounds one after the other. A
    deadlock is reported as an error.

    Args:
        hook: as those of `fzero.comms.comm_hooks`.
        max_error: the allowed error of an element in any round, as a fraction: for
            `gather`, of the largest element; for `reduce_scatter`, of the sum of every
            rank's largest.
        name: its name in messages.
        max_examples: the number of examples of each law.

    Raises:
        AssertionError: a law is broken; the message has the law, the smallest example
            found, and the fix.

    >>> from fzero.comms import completed, compressed, exact, quantize
    >>> check_hook(exact(), max_examples=2)
    >>> check_hook(compressed(quantize(8)), max_error=1 / 127, max_examples=2)
    >>> def averaged(full_P, axis, state, *, after=None, **_):
    ...     if after is not None:
    ...         after.wait()
    ...     return completed(exact().reduce_scatter(full_P, axis, state)[0] / axis.size, state)
    >>> check_hook(exact()._replace(start_reduce_scatter=averaged))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    AssertionError: collective: reduce_scatter must give this rank's shard of the sum over ranks, ... Add up, do not average; ...
    """
    check_kind(
        "hook",
        hook,
        CommHook,
        "a fzero.comms.CommHook",
        "pass fzero.comms.compressed(codec), say, for a codec",
    )
    check_whole("max_examples", max_examples, 1)
    for law in COLLECTIVE_LAWS:
        try_law(law, Declared(hook, max_error), name, max_examples)
