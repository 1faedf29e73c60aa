"""Laws of what makes a step's graph fast: products where they are joined, exchanges
without oneself, numbers computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from graphs import GROUP, trace_step
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

import fzero
from fzero.comms.traced import TracedAxis
from fzero.graph.backends import realize_numbers
from fzero.graph.exchange import send_to_others
from fzero.graph.nodes import WAIT, flops_of, numel_of
from fzero.graph.schedule import PassOptions, copy_of, run_passes
from fzero.graph.weight_grads import join_products

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
EXCHANGE = c10d.all_to_all_single.default
JOIN = torch.ops.fzero.join_gradients.default

PIECES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, y: (x @ y).reshape(-1),
    "turned twice": lambda x, y: (x @ y).t().t().reshape(-1),
    "turned": lambda x, y: (x @ y).t().reshape(-1),
    "turned, cut and turned": lambda x, y: (x @ y).t().reshape(-1, 1).t().reshape(-1),
    "of turned matrices": lambda x, y: (y.t() @ x.t()).view(-1),
    "part of a product": lambda x, y: (x @ y)[1:].reshape(-1),
    "bias": lambda x, y: x.sum(0),
    "turned bias": lambda x, y: x.exp().t().reshape(-1),
    "zeros": lambda x, y: x.new_zeros(3),
    "ones": lambda x, y: x.new_ones(3),
    "full": lambda x, y: torch.full((3,), 2, dtype=x.dtype),
    "zero": lambda x, y: torch.full((3,), 0, dtype=x.dtype),
    "joined": lambda x, y: torch.cat([(x @ y).reshape(-1), x[0]]),
    "nothing": lambda x, y: x.new_zeros(0),
}


@given(st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=5), st.booleans())
def test_joined_products_are_the_same_bits(names: list[str], is_wide: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 5), torch.randn(5, 3)
    if is_wide:
        x, y = x.double(), y.double()

    def join(x: Tensor, y: Tensor) -> Tensor:
        return 2 * torch.cat([PIECES[name](x, y) for name in names])

    module = make_fx(join)(x, y)
    join_products(module.graph)
    module.graph.lint()
    assert torch.equal(Interpreter(module, graph=module.graph).run(x, y), join(x, y))
    whole = {"product", "turned twice", "of turned matrices"}
    num_joined = sum(node.target is JOIN for node in module.graph.nodes)
    num_inner = names.count("joined")
    assert num_joined == (num_inner or any(name in whole for name in names))


def test_gradients_of_weights_are_made_where_they_are_sent_from() -> None:
    """Every unit's with one operator, that stands in the backward of its own unit; no
    product is made twice.
    """
    traced = trace_step((8,) * 4)
    graph = run_passes(traced.graph, PassOptions())
    joined = [node for node in graph.nodes if node.target is JOIN]
    assert len(joined) == 4
    assert sum(map(flops_of, graph.nodes)) == sum(map(flops_of, traced.graph.nodes))
    products = [node for node in graph.nodes if flops_of(node)]
    between = [products.index(later) - products.index(joined[0]) for later in joined]
    assert between == [0, 3, 6, 9], (
        "two products give the gradients of a unit's inputs, and one operator the weights'"
    )


def test_numbers_are_computed_once_and_not_for_every_element() -> None:
    def update(param: Tensor, step: Tensor, lr: Tensor) -> Tensor:
        return param - lr / (1 - 0.9**step) * param.sqrt() * step

    args = torch.rand(7), torch.tensor(3.0), torch.tensor(0.1)
    module = make_fx(update)(*args)
    expected = module(*args)

    def reads_a_formula(graph: Graph) -> list[Node]:
        numbers = [
            n
            for n in graph.nodes
            if n.op == "call_function" and n.target is not aten.as_strided.default
        ]
        return [
            n for n in numbers if numel_of(n) == 1 and any(numel_of(user) > 1 for user in n.users)
        ]

    assert len(reads_a_formula(module.graph)) == 1
    realize_numbers(module.graph)
    assert not reads_a_formula(module.graph)
    assert torch.equal(Interpreter(module, graph=module.graph).run(*args), expected)


def exchanging(graph: Graph, args: list[Tensor]) -> Generator[Any, Tensor, Any]:
    """Runs the graph of one rank: yields what each exchange is given, and is sent what
    it returns.
    """
    env: dict[Node, Any] = {}
    given_ = iter(args)
    for node in graph.nodes:
        positional, named = map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "placeholder":
            env[node] = next(given_)
        elif node.op == "output":
            return positional[0]
        elif node.target is EXCHANGE:
            env[node] = yield positional
        else:
            env[node] = positional[0] if node.target is WAIT else node.target(*positional, **named)


@given(st.integers(2, 4), st.data())
def test_an_exchange_sends_nothing_to_its_own_rank_and_gives_the_same(
    size: int, data: st.DataObject
) -> None:
    """A gather and a sum in rank order, by exchanges, on ranks that are simulated."""
    numel = data.draw(st.integers(1, 5), label="numel")

    def step(shard: Tensor, full: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        numels = [numel] * size
        gathered = c10d.wait_tensor(
            c10d.all_to_all_single(shard.repeat(size), numels, numels, GROUP)
        )
        parts = c10d.wait_tensor(c10d.all_to_all_single(full, numels, numels, GROUP))
        total, *others = torch.split(parts, numel)
        for other in others:
            total = total + other
        whole = c10d.wait_tensor(c10d.all_reduce(full, "sum", GROUP)) if size == 2 else full
        return gathered * 2, total, whole

    args = [[torch.randn(numel), torch.randn(size * numel)] for _ in range(size)]
    with FakeTensorMode() as mode:
        graph = make_fx(step)(*(mode.from_tensor(x) for x in args[0])).graph
    graphs = [copy_of(graph) for _ in range(size)]
    for rank, own in enumerate(graphs):
        send_to_others(own, [TracedAxis(size, rank, GROUP, is_nccl=False)])
        exchanges = [node for node in own.nodes if node.target is EXCHANGE]
        num_sums = int(size == 2)
        assert len(exchanges) == 2 + num_sums and all(node.args[2][rank] == 0 for node in exchanges)
        sent = [numel_of(node.all_input_nodes[0]) for node in exchanges]
        assert sent == [(size - 1) * numel] * 2 + [size * numel] * num_sums
    shards, fulls = zip(*args)
    ranks = [exchanging(own, of_rank) for own, of_rank in zip(graphs, args)]
    calls = [next(rank) for rank in ranks]
    for _ in range(2 + (size == 2)):
        rows = [sent.split(list(numels)) for sent, _, numels, _ in calls]
        arrived = [torch.cat([row[rank] for row in rows]) for rank in range(size)]
        calls = []
        for rank, received in zip(ranks, arrived):
            try:
                calls.append(rank.send(received))
            except StopIteration as end:
                calls.append(end.value)
    for rank, (gathered, total, whole) in enumerate(calls):
        assert torch.equal(whole, fulls[0] + fulls[1] if size == 2 else fulls[rank])
        assert torch.equal(gathered, 2 * torch.cat(shards))
        expected = fulls[0][rank * numel : (rank + 1) * numel]
        for full in fulls[1:]:
            expected = expected + full[rank * numel : (rank + 1) * numel]
        assert torch.equal(total, expected)


class _Joins(nn.Module):
    """Joins products itself, in the forward and, by a parameter that it cuts, in the
    backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
        self.flat = nn.Parameter(torch.ones(72))

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.flat.split([36, 36])
        h = torch.tanh(x @ one.view(6, 6)) @ other.view(6, 6)
        return (
            torch.cat([block(h).flatten() for block in self.blocks])
            .view(3, -1)
            .square()
            .sum(1)
            .mean()
        )


@pytest.mark.covering(0)
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_a_model_that_joins_products_itself_is_put_in_order(stage: int) -> None:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    step = fzero.make_train_step(
        _Joins(),
        {"zero_optimization": zero},
        mesh=fzero.comms.AbstractAxis("data", 2, backend="gloo"),
    )
    (captured,) = step.trace(torch.ones(4, 6))
    captured.scheduled().graph.lint()


@pytest.mark.covering(0)
@pytest.mark.parametrize("stage", [0, 1])
def test_collected_gradients_are_reduced_and_not_gathered(stage: int) -> None:
    cfg = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
    }
    step = fzero.make_train_step(
        _Joins(), cfg, mesh=fzero.comms.AbstractAxis("data", 2, backend="gloo")
    )
    timeline = step.explain(torch.ones(4, 6))
    assert timeline.liveness.peak_gathered == 0
    sent = sum(span.nbytes for span in timeline.spans if span.lane == "collective")
    planned = 4 * sum(step.plan.sent_per_step.values())
    assert planned <= sent <= planned + 2000, "besides, numbers are sent"
