"""The rules of the primitives: a matrix of transform, runner, axis and primitive, in
which each cell has the right numbers or raises an error that names its reason.

Ranks are the last dimension but one of what the reference takes, so that its tensors
have the batch dimension of a rank's.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.comms import collectives, primitives
from fzero.comms.axes import AbstractAxis, LockstepAxis
from fzero.comms.codecs import quantize
from fzero.comms.compression import compressed, error_feedback
from fzero.comms.lockstep import Hub
from fzero.comms.stacked import Stacked
from fzero.comms.traced import TracedAxis
from sharding import Mesh

Map = Callable[[Tensor], Tensor]
WORLD_SIZES = (1, 2, 3, 4)
PRIMITIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")


def inputs_of(world_size: int, primitive: str) -> tuple[Tensor, Tensor]:
    """For all ranks, numbers whose sums are exact: x (2, W, N) and weights like the
    result (2, W, N').
    """
    shape, weights = {
        "all_gather": ((2, world_size, 3), (2, world_size, 3 * world_size)),
        "reduce_scatter": ((2, world_size, 3 * world_size), (2, world_size, 3)),
        "all_to_all": ((2, world_size, 3 * world_size),) * 2,
        "all_reduce": ((2, world_size, 5),) * 2,  # 5 elements are padded
    }[primitive]
    return tuple(
        torch.arange(2 + seed, 2 + seed + torch.Size(s).numel())
        .remainder(7 + seed)
        .sub(3)
        .view(s)
        .double()
        for seed, s in enumerate((shape, weights))
    )


def reference_of(primitive: str) -> Map:
    """All ranks' results of a primitive, in plain operators."""

    def parts(x: Tensor) -> Tensor:
        return x.unflatten(-1, (x.shape[-2], -1))

    def joined(x: Tensor) -> Tensor:
        return x.flatten(-2)[..., None, :].expand(*x.shape[:-1], -1)

    return {
        "all_gather": joined,
        "reduce_scatter": lambda x: parts(x).sum(-3),
        "all_to_all": lambda x: parts(x).transpose(-3, -2).flatten(-2),
        "all_reduce": lambda x: x.sum(-2, keepdim=True).expand_as(x),
    }[primitive]


# --- transforms -----------------------------------------------------------------------------------


AUTOGRAD = ("autograd", "autograd_twice", "checkpointed")
FORWARD = ("func_jvp", "jvp_of_grad")
SOME = ("value", "loss", "func_grad", "vmap_of_grad")


def loss(f: Map, x: Tensor, c: Tensor) -> Tensor:
    return (f(x) ** 2 * c).sum()


def value(f: Map, x: Tensor, c: Tensor) -> Tensor:
    return f(x)


def flat(f: Map, x: Tensor, c: Tensor) -> Tensor:
    return f(x[0])


def autograd(f: Map, x: Tensor, c: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(loss(f, x, c), x)[0]


def autograd_twice(f: Map, x: Tensor, c: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (once,) = torch.autograd.grad(loss(f, x, c), x, create_graph=True)
    return torch.autograd.grad((once**2).sum(), x)[0]


def checkpointed(f: Map, x: Tensor, c: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(checkpoint(lambda x: loss(f, x, c), x, use_reentrant=False), x)[0]


def func_grad(f: Map, x: Tensor, c: Tensor) -> Tensor:
    return grad(lambda x: loss(f, x, c))(x)


def func_grad_twice(f: Map, x: Tensor, c: Tensor) -> Tensor:
    return grad(lambda x: (func_grad(f, x, c) ** 2).sum())(x)


def func_vjp(f: Map, x: Tensor, c: Tensor) -> Tensor:
    return vjp(f, x)[1](c)[0]


def func_jvp(f: Map, x: Tensor, c: Tensor) -> Tensor:
    return torch.cat(jvp(lambda x: f(x**2), (x,), (x + 1,)), dim=-1)


def jvp_of_grad(f: Map, x: Tensor, c: Tensor) -> Tensor:
    return jvp(lambda x: func_grad(f, x, c), (x,), (x + 1,))[1]


def func_vmap(f: Map, x: Tensor, c: Tensor) -> Tensor:
    return vmap(f)(x)


def vmap_of_grad(f: Map, x: Tensor, c: Tensor) -> Tensor:
    return vmap(lambda x, c: func_grad(f, x, c))(x, c)


def grad_of_vmap(f: Map, x: Tensor, c: Tensor) -> Tensor:
    return grad(lambda x: (vmap(f)(x) ** 2 * c).sum())(x)


def vmap_of_vjp(f: Map, x: Tensor, c: Tensor) -> Tensor:
    """Many cotangents of one result, as in `jacrev`."""
    return vmap(vjp(f, x[0])[1])(c)[0]


class Through(nn.Module):
    def __init__(self, f: Map, like: Tensor) -> None:
        super().__init__()
        self.f, self.weight = f, nn.Parameter(torch.zeros_like(like))

    def forward(self, c: Tensor) -> Tensor:
        return loss(self.f, self.weight, c)


def of_functional_call(module: nn.Module, x: Tensor, c: Tensor) -> Tensor:
    return grad(lambda x: functional_call(module, {"weight": x}, (c,)))(x)


TRANSFORMS = {
    t.__name__: t
    for t in (
        *(
            value,
            flat,
            autograd,
            autograd_twice,
            checkpointed,
            func_grad,
            func_grad_twice,
            func_vjp,
            func_jvp,
        ),
        *(
            jvp_of_grad,
            func_vmap,
            vmap_of_grad,
            grad_of_vmap,
            vmap_of_vjp,
            of_functional_call,
            loss,
        ),
    )
}
"""`loss` is differentiated outside of what its runner runs."""


# --- runners --------------------------------------------------------------------------------------


def traced(mode: str) -> Callable[..., Any]:
    """Traced on other numbers, so that what the graph does not compute is wrong."""

    def run(function: Callable[..., Any], *args: Any) -> Any:
        others = [[x + 1.5 for x in own] for own in args]
        return make_fx(function, tracing_mode=mode)(*others)(*args)

    return run


def compiled(backend: str) -> Callable[..., Any]:
    def run(function: Callable[..., Any], *args: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(function, fullgraph=True, backend=backend)(*args)

    return run


RUNNERS: dict[str, Callable[..., Any]] = {
    "called": lambda function, *args: function(*args),
    "make_fx": traced("real"),
    "make_fx_fake": traced("fake"),
    "eager": compiled("eager"),
    "aot_eager": compiled("aot_eager"),
    "inductor": compiled("inductor"),
}
COMPILERS = ("eager", "aot_eager", "inductor")

REFUSED = {
    **{
        ("stacked", r, t): "use the functorch transforms|requires_grad_"
        for r in RUNNERS
        for t in AUTOGRAD
    },
    **{("process", r, t): "trace_autograd_ops" for r in COMPILERS for t in AUTOGRAD},
    **{("stacked", r, t): "trace_autograd_ops|requires_grad_" for r in COMPILERS for t in AUTOGRAD},
    **{
        ("lockstep", r, t): "LockstepAxis: a co"
        for r in RUNNERS
        if r != "called"
        for t in TRANSFORMS
    },
}
"""What the error says, by axis, runner and transform; all other cells give the numbers.
"""


def cell(
    runner: str, transform: str, axis: Any, around: Any, inputs: list[tuple[Tensor, Tensor]]
) -> Any:
    """The results of all primitives, in one run; or the error.

    Args:
        around: of the function that runs on a rank.
        inputs: (x, c) for each primitive.
    """
    maps: list[Any] = [
        lambda x, name=name: getattr(primitives, name)(x, axis) for name in PRIMITIVES
    ]
    if transform == "of_functional_call":
        maps = [
            Through(f, torch.empty(x.shape[-2:])) for f, (x, _) in zip(maps, inputs, strict=True)
        ]

    def function(xs: list[Tensor], cs: list[Tensor]) -> list[Tensor]:
        return [TRANSFORMS[transform](f, x, c) for f, x, c in zip(maps, xs, cs, strict=True)]

    xs, cs = (
        [pair[i].requires_grad_(transform == "loss" and not i) for pair in inputs] for i in (0, 1)
    )
    try:
        results = RUNNERS[runner](around(function), xs, cs)
        return (
            list(torch.autograd.grad([r.sum() for r in results], xs))
            if transform == "loss"
            else results
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def check(axis: str, runner: str, transform: str, found: list[Any]) -> None:
    """Args: found: for each rank the results of all primitives, or its error."""
    errors = [own for own in found if isinstance(own, str)]
    is_alone = axis == "lockstep" and len(found) == 1  # it sends nothing
    wanted = None if is_alone else REFUSED.get((axis, runner, transform))
    if errors or wanted is not None:
        assert wanted is not None, f"{axis} {runner} {transform}: {errors[0]}"
        assert errors and all(re.search(wanted, error) for error in errors), (
            f"{axis} {runner} {transform}: {errors}"
        )
        return
    for index, name in enumerate(PRIMITIVES):
        x, c = inputs_of(len(found), name)
        f = reference_of(name)
        if transform == "of_functional_call":
            expected = func_grad(f, x, c)
        else:
            expected = autograd(f, x, c) if transform == "loss" else TRANSFORMS[transform](f, x, c)
        assert torch.equal(torch.stack([own[index] for own in found], -2), expected), (
            axis,
            runner,
            transform,
            name,
        )


def on_stacked_ranks(world_size: int, runner: str, transform: str) -> None:
    ranks = Stacked(world_size)
    inputs = [
        tuple(x.movedim(-2, 0).contiguous() for x in inputs_of(world_size, name))
        for name in PRIMITIVES
    ]
    found = cell(runner, transform, ranks.axis(), ranks.map, inputs)  # type: ignore[arg-type]
    check(
        "stacked",
        runner,
        transform,
        [found if isinstance(found, str) else [x[r] for x in found] for r in range(world_size)],
    )


def cells_of_a_rank(axis: Any, cells: list[tuple[str, str]]) -> list[Any]:
    return [
        cell(
            runner,
            transform,
            axis,
            lambda f: f,
            [
                tuple(x[..., axis.rank, :].contiguous() for x in inputs_of(axis.size, name))
                for name in PRIMITIVES  # type: ignore[misc]
            ],
        )
        for runner, transform in cells
    ]


def of_a_process(cells: list[tuple[str, str]], is_traced: bool) -> list[Any]:
    axis = fzero.join()
    return cells_of_a_rank(TracedAxis.of(axis, torch.device("cpu")) if is_traced else axis, cells)


def on_processes(
    ranks: RankPool, world_size: int, cells: list[tuple[str, str]], *, is_traced: bool = False
) -> None:
    of_ranks = ranks(world_size, of_a_process, cells, is_traced)
    for index, (runner, transform) in enumerate(cells):
        check("process", runner, transform, [own[index] for own in of_ranks])


# --- the matrix -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.long), 3, 4])
def test_every_transform_of_a_primitive_is_right_on_real_ranks(
    ranks: RankPool, world_size: int
) -> None:
    on_processes(ranks, world_size, [("called", transform) for transform in TRANSFORMS])


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_transform_of_a_primitive_is_right_on_the_axis_of_a_graph(
    ranks: RankPool, world_size: int
) -> None:
    on_processes(
        ranks, world_size, [("called", transform) for transform in TRANSFORMS], is_traced=True
    )


@pytest.mark.skipif(
    torch.__version__ < "2.12" and torch.version.cuda is not None and not torch.cuda.is_available(),
    reason=(
        "PyTorch 2.11 for CUDA ends a process without a card where a second thread enters "
        "FakeTensorMode"
    ),
)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_transform_of_a_primitive_is_right_or_refused_on_ranks_in_lockstep(
    world_size: int,
) -> None:
    hub = Hub(world_size)
    for runner, transforms in (("called", TRANSFORMS), ("make_fx", ("value", "func_grad"))):
        for transform in transforms:
            of_ranks = hub.run(
                lambda rank, cells=[(runner, transform)]: cells_of_a_rank(
                    LockstepAxis("data", world_size, rank, hub), cells
                )
            )
            check("lockstep", runner, transform, [own[0] for own in of_ranks])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_transform_of_a_primitive_is_right_or_refused_on_stacked_ranks(
    world_size: int,
) -> None:
    for transform in TRANSFORMS:
        on_stacked_ranks(world_size, "called", transform)


@pytest.mark.parametrize("runner", ["make_fx", "make_fx_fake"])
def test_a_capture_holds_the_collectives_of_stacked_ranks(runner: str) -> None:
    for transform in SOME:
        on_stacked_ranks(3, runner, transform)


@pytest.mark.parametrize("runner", ["make_fx", "make_fx_fake"])
def test_a_capture_holds_the_collectives_of_real_ranks(ranks: RankPool, runner: str) -> None:
    on_processes(ranks, 2, [(runner, transform) for transform in SOME])


@pytest.mark.long
@pytest.mark.parametrize("runner", [r for r in RUNNERS if r != "called"])
def test_every_capture_holds_the_collectives_of_stacked_ranks(runner: str) -> None:
    for transform in TRANSFORMS if runner != "inductor" else SOME:
        on_stacked_ranks(2, runner, transform)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("runner", [r for r in RUNNERS if r != "called"])
def test_every_capture_holds_the_collectives_of_real_ranks(
    ranks: RankPool, runner: str, world_size: int
) -> None:
    on_processes(
        ranks,
        world_size,
        [(runner, transform) for transform in (TRANSFORMS if runner != "inductor" else SOME)],
    )


# --- the level of the ranks -----------------------------------------------------------------------


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_other_batch_dimensions_around_and_inside_of_the_ranks_are_no_ranks(primitive: str) -> None:
    ranks, f = Stacked(2), reference_of(primitive)
    axis, (x, _) = ranks.axis(), inputs_of(2, primitive)  # as many ranks as batches

    def of_rank(x: Tensor) -> Tensor:
        return getattr(primitives, primitive)(x, axis)

    assert torch.equal(vmap(ranks.map(of_rank))(x), f(x))
    assert torch.equal(ranks.map(vmap(of_rank))(x.movedim(1, 0)), f(x).movedim(1, 0))
    last = ranks.map(vmap(of_rank, in_dims=-1, out_dims=-1))(x.movedim(0, -1))
    assert torch.equal(last, f(x).movedim(0, -1))
    both = vmap(ranks.map(vmap(of_rank)))(torch.stack([x, 2 * x], 1).movedim(2, 1))
    assert torch.equal(both, torch.stack([f(x), f(2 * x)], 1).movedim(2, 1))


def test_stacked_ranks_inside_of_stacked_ranks_each_know_their_own() -> None:
    nodes, gpus = Stacked(Mesh.of(node=2, data=1)), Stacked(2)
    node, gpu = nodes.axis("node"), gpus.axis()
    x = torch.arange(16.0).view(2, 2, 4)

    def of_gpu(x: Tensor) -> tuple[Tensor, Tensor]:
        return primitives.all_gather(x, node), primitives.reduce_scatter(x, gpu)

    joined, shards = nodes.map(gpus.map(of_gpu))(x)
    assert torch.equal(joined, reference_of("all_gather")(x.transpose(0, 1)).transpose(0, 1))
    assert torch.equal(shards, reference_of("reduce_scatter")(x))


def test_a_tensor_that_is_equal_on_all_stacked_ranks_is_the_summand_of_each() -> None:
    ranks = Stacked(3)
    axis, x = ranks.axis(), torch.arange(6.0)
    assert torch.equal(ranks.map(lambda: primitives.reduce_scatter(x, axis))(), 3 * x.view(3, 2))
    assert torch.equal(
        ranks.map(lambda: primitives.all_gather(x, axis))(), x.repeat(3).expand(3, -1)
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("primitive", PRIMITIVES)
@pytest.mark.parametrize("name", ["node", "data"])
def test_a_primitive_runs_along_one_axis_of_a_mesh(primitive: str, name: str) -> None:
    mesh = Mesh.of(node=3, data=2)
    ranks = Stacked(mesh)
    axis = ranks.axis(name)
    x = torch.arange(6 * 6.0).view(3, 2, 6)
    found = ranks.map(lambda x: getattr(primitives, primitive)(x, axis))(x.flatten(0, 1)).unflatten(
        0, (3, 2)
    )
    f = reference_of(primitive)
    assert torch.equal(found, f(x) if name == "data" else f(x.transpose(0, 1)).transpose(0, 1))


# --- comm hooks -----------------------------------------------------------------------------------

HOOK = compressed(quantize(8, 16))


def coded_results(
    axis: Any,
    gathers: bool,
    x: Tensor,
    c: Tensor,
    runner: str = "called",
    around: Any = lambda f: f,
) -> list[Tensor]:
    """The result of a coded primitive, row by row and in `vmap`, and a gradient."""
    primitive = primitives.all_gather if gathers else primitives.reduce_scatter

    def f(x: Tensor) -> Tensor:
        return primitive(x, axis, hook=HOOK)

    def function(xs: list[Tensor], cs: list[Tensor]) -> list[Tensor]:
        (x,), (c,) = xs, cs
        return [f(x), vmap(f)(x), grad(lambda x: (f(x) * c).sum())(x)]

    return RUNNERS[runner](around(function), [x], [c])  # type: ignore[no-any-return]


def _coded_of_a_rank(gathers: bool, x: Tensor, c: Tensor, runner: str) -> list[Tensor]:
    axis = fzero.join()
    return coded_results(axis, gathers, x[axis.rank], c[axis.rank], runner)


@pytest.mark.parametrize(
    "runner", ["called", "make_fx_fake", pytest.param("aot_eager", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("gathers", [True, False])
def test_a_coded_primitive_gives_the_numbers_of_its_hook_and_the_derivative_of_the_exact_one(
    ranks: RankPool, gathers: bool, runner: str
) -> None:
    world_size, generator = 3, torch.Generator().manual_seed(0)
    x = torch.randn(world_size, 2, 20 if gathers else 60, generator=generator)
    c = torch.randn(world_size, 2, 60 if gathers else 20, generator=generator)
    hub, stacked = Hub(world_size), Stacked(world_size)

    def by_hand(rank: int) -> Tensor:
        axis = LockstepAxis("data", world_size, rank, hub)
        verb = HOOK.gather if gathers else HOOK.reduce_scatter
        return torch.stack([verb(row, axis, None)[0] for row in x[rank]])

    coded = torch.stack(hub.run(by_hand))
    of_stacked = coded_results(stacked.axis(), gathers, x, c, runner, stacked.map)
    for found in (
        of_stacked,
        [torch.stack(y) for y in zip(*ranks(world_size, _coded_of_a_rank, gathers, x, c, runner))],
    ):
        assert torch.equal(found[0], coded) and torch.equal(found[1], coded)
        transpose = reference_of("reduce_scatter" if gathers else "all_gather")
        torch.testing.assert_close(found[2], transpose(c.transpose(0, 1)).transpose(0, 1))


def test_a_primitive_takes_hooks_without_a_state_and_for_itself() -> None:
    axis, x = AbstractAxis("data", 2), torch.ones(4)
    with pytest.raises(
        ValueError, match="all_gather: hook must be without a state, got error_feedback"
    ):
        primitives.all_gather(x, axis, hook=error_feedback(HOOK))
    with pytest.raises(ValueError, match="all_to_all: a comm hook has no all_to_all, got quantize"):
        primitives.all_to_all(x, axis, hook=HOOK)


# --- what is sent, and what cannot run ------------------------------------------------------------


def _records_of_a_rank() -> list[tuple[Any, ...]]:
    found = []
    bound = fzero.join()
    for primitive in (primitives.all_gather, primitives.reduce_scatter, primitives.all_to_all):
        sent: list[fzero.comms.CommRecord] = []
        axis = fzero.comms.ProcessAxis(bound.name, bound.size, bound.rank, observe=sent.append)
        x = torch.ones(2, 12, requires_grad=True)
        y = primitive(x, axis)
        there = primitive.abstract(x, AbstractAxis("data", axis.size))
        back = primitives.PRIMITIVES[primitive.transpose].abstract(
            y, AbstractAxis("data", axis.size)
        )
        y.sum().backward()
        found.append(
            (sent == [there.sent, back.sent], tuple(y.shape) == there.shape, y.dtype == there.dtype)
        )
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_primitive_and_its_transpose_send_what_their_abstract_forms_say(
    ranks: RankPool, world_size: int
) -> None:
    assert all(all(map(all, found)) for found in ranks(world_size, _records_of_a_rank))


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("primitive", primitives.PRIMITIVES)
def test_a_plan_evaluates_shapes_alone_and_its_graph_holds_the_collective(
    primitive: str, backend: Any
) -> None:
    f, axis = primitives.PRIMITIVES[primitive], AbstractAxis("data", 4, backend=backend)
    x = torch.empty(3, 8, dtype=torch.bfloat16, device="meta")
    abstract = f.abstract(x, axis)
    with FakeTensorMode():
        fake = f(torch.empty(3, 8, dtype=torch.bfloat16), axis)
    for found in (f(x, axis), fake):
        assert (tuple(found.shape), found.dtype) == abstract[:2]
    graph = make_fx(grad(lambda x: (f(x, axis) ** 2).sum()), tracing_mode="fake")(
        torch.ones(3, 8)
    ).graph
    assert [node.target.namespace for node in graph.nodes if "c10d" in str(node.target)] == [
        "_c10d_functional"
    ] * 4
    with pytest.raises(
        ValueError,
        match="AbstractAxis: its 4 ranks have no numbers, got a tensor on cpu; pass a fake",
    ):
        f(torch.ones(3, 8), axis)


def test_a_tensor_that_ranks_cannot_divide_is_refused() -> None:
    axis = AbstractAxis("data", 4)
    with pytest.raises(
        ValueError, match=r"reduce_scatter: 4 ranks cannot divide the last dimension of \(2, 6\)"
    ):
        primitives.reduce_scatter(torch.ones(2, 6), axis)
    with pytest.raises(
        ValueError, match="all_gather: the tensor must have a dimension, got a 0-d one"
    ):
        primitives.all_gather(torch.ones(()), axis)


def test_stacked_ranks_have_numbers_inside_of_map_only() -> None:
    ranks = Stacked(2)
    axis = ranks.axis()
    with pytest.raises(ValueError, match="a rank has a number inside of map"):
        primitives.all_gather(torch.ones(2, 2), axis)
    with pytest.raises(ZeroDivisionError):
        ranks.map(lambda x: 1 / 0)(torch.ones(2, 2))
    with pytest.raises(ValueError, match="a rank has a number inside of map"):
        primitives.all_gather(torch.ones(2, 2), axis)


def test_primitives_do_not_import_dynamo() -> None:
    program = "import sys, fzero.comms.stacked; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("start", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"])
def test_a_started_collective_refuses_a_tensor_whose_gradient_it_would_lose(start: str) -> None:
    x = torch.ones(2, 2, requires_grad=True)
    how: dict[str, Any] = {"full_P": None} if start == "all_gather" else {}
    for axis in (fzero.join(), TracedAxis(2, 0, "", is_nccl=False)):
        with pytest.raises(ValueError, match=r"without gradients.*all_gather, reduce_scatter"):
            getattr(collectives, f"start_{start}")(x, axis=axis, **how)


def test_attention_of_all_ranks_is_one_call_of_the_kernel_with_each_ranks_bits() -> None:
    ranks, (q_W, k_W, v_W) = Stacked(3), torch.randn(3, 3, 2, 4, 8, 16).unbind(0)
    attend = functools.partial(functional.scaled_dot_product_attention, is_causal=True)
    calls: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.extend(
                [func.overloadpacket.__name__] * ("attention" in func.overloadpacket.__name__)
            )
            return func(*args, **(kwargs or {}))

    leaves = [x.clone().requires_grad_() for x in (q_W, k_W, v_W)]
    with Count():
        out_W = ranks.map(attend)(*leaves)
        out_W.square().sum().backward()
    assert len(calls) == 2, "a forward and a backward"
    for rank in range(3):
        own = [x[rank].clone().requires_grad_() for x in (q_W, k_W, v_W)]
        out = attend(*own)
        out.square().sum().backward()
        assert torch.equal(out, out_W[rank])
        assert all(torch.equal(x.grad, x_W.grad[rank]) for x, x_W in zip(own, leaves, strict=True))
