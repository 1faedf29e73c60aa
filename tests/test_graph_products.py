"""Laws of what makes a step's graph fast: products where they are joined, and numbers that are computed once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from graphs import trace_step
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fzero.graph_analysis import flops_of, numel_of
from fzero.graph_backends import realize_numbers
from fzero.graph_products import join_products
from fzero.graph_schedule import PassOptions, run_passes

aten = torch.ops.aten
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
    assert sum(node.target is JOIN for node in module.graph.nodes) == any(name in whole for name in names)


def test_gradients_of_weights_are_made_where_they_are_sent_from() -> None:
    """Every unit's with one operator, that stands in the backward of its own unit; no product is made twice."""
    traced = trace_step((8,) * 4)
    graph = run_passes(traced.graph, PassOptions())
    joined = [node for node in graph.nodes if node.target is JOIN]
    assert len(joined) == 4
    assert sum(map(flops_of, graph.nodes)) == sum(map(flops_of, traced.graph.nodes))
    products = [node for node in graph.nodes if flops_of(node)]
    between = [products.index(later) - products.index(joined[0]) for later in joined]
    assert between == [0, 3, 6, 9], "two products give the gradients of a unit's inputs, and one operator the weights'"


def test_numbers_are_computed_once_and_not_for_every_element() -> None:
    def update(param: Tensor, step: Tensor, lr: Tensor) -> Tensor:
        return param - lr / (1 - 0.9**step) * param.sqrt() * step

    args = torch.rand(7), torch.tensor(3.0), torch.tensor(0.1)
    module = make_fx(update)(*args)
    expected = module(*args)

    def reads_a_formula(graph: Graph) -> list[Node]:
        numbers = [n for n in graph.nodes if n.op == "call_function" and n.target is not aten.as_strided.default]
        return [n for n in numbers if numel_of(n) == 1 and any(numel_of(user) > 1 for user in n.users)]

    assert len(reads_a_formula(module.graph)) == 1
    realize_numbers(module.graph)
    assert not reads_a_formula(module.graph)
    assert torch.equal(Interpreter(module, graph=module.graph).run(*args), expected)
