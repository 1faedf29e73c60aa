"""Graphs of training steps of a stack of blocks, traced without processes, and ways to
run them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fzero.graph.capture
from fzero.graph.backends import make_runner

c10d = torch.ops._c10d_functional
VOCAB, SEQ, BATCH = 13, 5, 2
GROUP = "0"
"""Tracing needs no process group, only its name."""


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """An embedding, blocks and a head that is tied to the embedding or not."""

    def __init__(self, hiddens: Sequence[int], width: int, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for hidden in hiddens)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@contextmanager
def captures() -> Iterator[list[Graph]]:
    """The graphs that steps capture inside."""
    graphs: list[Graph] = []

    def noted(*args: Any) -> Any:
        runner, graph = make_runner(*args)
        graphs.append(graph)
        return runner, graph

    with patch.object(fzero.graph.capture, "make_runner", noted):
        yield graphs


@dataclass(frozen=True)
class Traced:
    """The graph of one rank's step, its arguments on real tensors, and what the graph
    is made of.

    Attributes:
        module: the graph, as captured.
        args: for each rank, what the graph takes.
        unit_numels: padded elements of each unit, as declared.
        gathered: how many of the units are divided.
    """

    module: GraphModule
    args: list[list[Tensor]]
    unit_numels: list[int]

    @property
    def graph(self) -> Graph:
        return self.module.graph


@cache
def trace_step(
    hiddens: tuple[int, ...],
    *,
    width: int = 4,
    world_size: int = 2,
    stage: int = 3,
    tied: bool = True,
    clip: bool = False,
    by_exchange: bool = False,
    persist_below: int = 0,
    real: bool = True,
) -> Traced:
    """The graph of one step: gathers, forward, backward, reductions, Adam, copies into
    the placeholders.

    Args:
        hiddens: the width inside each block.
        width: of the stream between blocks.
        world_size: ranks W.
        stage: 0, 2 or 3.
        tied: whether the head is the embedding.
        clip: whether gradients are clipped by their norm.
        by_exchange: reduce-scatters as all-to-all and a sum in rank order.
        persist_below: units of fewer elements stay whole in stage 3.
        real: whether to make arguments.
    """
    torch.manual_seed(0)
    with torch.device("cpu" if real else "meta"):
        model = Stack(hiddens, width, tied=tied)
    units = [
        [f"blocks.{i}.{name}" for name, _ in block.named_parameters()]
        for i, block in enumerate(model.blocks)
    ]
    units = [["embed.weight"], *units, *([] if tied else [["head.weight"]])]
    params = dict(model.named_parameters())
    pad = 2 * world_size
    padded = [math.ceil(sum(params[n].numel() for n in unit) / pad) * pad for unit in units]
    cut = [stage == 3 and numel >= persist_below for numel in padded]
    sharded = [stage >= 2] * len(units)

    def unflatten(flat: Tensor, unit: Sequence[str]) -> dict[str, Tensor]:
        numels = [params[name].numel() for name in unit]
        parts = flat.split([*numels, flat.numel() - sum(numels)])
        return {name: part.view(params[name].shape) for name, part in zip(unit, parts)}

    def reduce(flat: Tensor) -> Tensor:
        if by_exchange:
            numel = flat.numel() // world_size
            parts = c10d.wait_tensor(
                c10d.all_to_all_single(flat, [numel] * world_size, [numel] * world_size, GROUP)
            )
            first, *others = parts.view(world_size, numel).unbind()
            for other in others:
                first = first + other
            return first / world_size
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(flat, "avg", world_size, GROUP))

    def step(
        tokens: Tensor,
        count: Tensor,
        flats: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
    ) -> Tensor:
        full = [
            c10d.wait_tensor(c10d.all_gather_into_tensor(flat, world_size, GROUP))
            if is_cut
            else flat.detach()
            for flat, is_cut in zip(flats, cut)
        ]
        leaves = [flat.requires_grad_() for flat in full]
        tree: dict[str, Tensor] = {}
        for leaf, unit in zip(leaves, units):
            tree |= unflatten(leaf, unit)
        if tied:
            tree["head.weight"] = tree["embed.weight"]
        with torch.enable_grad():
            loss = functional_call(model, tree, (tokens,), tie_weights=False)
            grads = torch.autograd.grad(loss, leaves)
        with torch.no_grad():
            if stage == 0:
                reduced = [c10d.wait_tensor(c10d.all_reduce(grad, "avg", GROUP)) for grad in grads]
            else:
                reduced = [reduce(grad) for grad in grads]
            if clip:
                norm_sq = torch.stack([grad.square().sum() for grad in reduced]).sum()
                if stage:
                    norm_sq = c10d.wait_tensor(c10d.all_reduce(norm_sq, "sum", GROUP))
                scale = torch.clamp(0.1 / (norm_sq.sqrt() + 1e-6), max=1.0)
                reduced = [grad * scale for grad in reduced]
            new_count = count + 1
            rank_slices = [
                flat if is_cut or not is_sharded else flat.detach()[: flat.numel() // world_size]
                for flat, is_cut, is_sharded in zip(flats, cut, sharded)
            ]
            news = []
            for flat, grad, exp_avg, exp_avg_sq in zip(rank_slices, reduced, exp_avgs, exp_avg_sqs):
                m = exp_avg * 0.9 + grad * 0.1
                v = exp_avg_sq * 0.95 + grad * grad * 0.05
                new = flat * 0.99 - 0.01 * (m / (1 - 0.9**new_count)) / (
                    (v / (1 - 0.95**new_count)).sqrt() + 1e-8
                )
                news.append((new, m, v))
            for index, (new, m, v) in enumerate(news):
                if sharded[index] and not cut[index]:
                    new = c10d.wait_tensor(c10d.all_gather_into_tensor(new, world_size, GROUP))
                flats[index].copy_(new)
                exp_avgs[index].copy_(m)
                exp_avg_sqs[index].copy_(v)
            count.copy_(new_count)
            return c10d.wait_tensor(c10d.all_reduce(loss.detach(), "avg", GROUP))

    def args_of(rank: int, device: str) -> list[Any]:
        tokens = torch.arange(BATCH * SEQ, device=device).view(BATCH, SEQ).mul(rank + 3) % VOCAB
        flats, firsts, seconds = [], [], []
        for numel, unit, is_cut, is_sharded in zip(padded, units, cut, sharded):
            shard = numel // world_size
            if real:
                flat = torch.cat([params[n].detach().flatten() for n in unit])
                flat = F.pad(flat, (0, numel - flat.numel()))
                flat = flat[rank * shard : (rank + 1) * shard].clone() if is_cut else flat
            else:
                flat = torch.empty(shard if is_cut else numel, device=device)
            flats.append(flat)
            firsts.append(torch.zeros(shard if is_sharded else numel, device=device))
            seconds.append(torch.zeros(shard if is_sharded else numel, device=device))
        return [tokens, torch.zeros((), device=device), flats, firsts, seconds]

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        if real:
            fake_args = torch.utils._pytree.tree_map(mode.from_tensor, args_of(0, "cpu"))
        else:
            fake_args = args_of(0, "cpu")
        module = make_fx(step)(*fake_args)
    every = (
        [torch.utils._pytree.tree_leaves(args_of(rank, "cpu")) for rank in range(world_size)]
        if real
        else []
    )
    return Traced(module, every, padded)


# --- running --------------------------------------------------------------------------------------


def run_ranks(graph: Graph, args: list[list[Tensor]]) -> list[list[Tensor]]:
    """Runs the graph for all ranks in lockstep; returns for each rank its result and
    its arguments, as written into.
    """
    args = [[arg.clone() for arg in of_rank] for of_rank in args]
    envs: list[dict[Any, Any]] = [{} for _ in args]
    inputs = [iter(of_rank) for of_rank in args]
    results: list[Any] = [None] * len(args)
    last_use = {arg: node for node in graph.nodes for arg in node.all_input_nodes}
    dead: dict[Any, list[Any]] = {}
    for arg, node in last_use.items():
        dead.setdefault(node, []).append(arg)
    for node in graph.nodes:
        values = [torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__) for env in envs]
        if node.op == "placeholder":
            made: Sequence[Any] = [next(of_rank) for of_rank in inputs]
        elif node.op == "output":
            results = [positional[0] for positional, _ in values]
            break
        elif getattr(node.target, "namespace", "") == "_c10d_functional":
            made = COLLECTIVES[node.target.__name__.split(".")[0]](
                [positional for positional, _ in values]
            )
        else:
            made = [node.target(*positional, **named) for positional, named in values]
        for env, value in zip(envs, made):
            env[node] = value
        for arg in dead.get(node, ()):
            for env in envs:
                del env[arg]
    return [[result, *of_rank] for result, of_rank in zip(results, args)]


def _in_rank_order(tensors: Sequence[Tensor], mean: bool) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors) if mean else total


def _exchange(calls: list[Any]) -> list[Tensor]:
    rows = [args[0].split(list(args[2])) for args in calls]
    return [torch.cat([row[rank] for row in rows]) for rank in range(len(calls))]


COLLECTIVES: dict[str, Callable[[list[Any]], list[Tensor]]] = {
    "wait_tensor": lambda calls: [args[0] for args in calls],
    "all_gather_into_tensor": lambda calls: [torch.cat([args[0] for args in calls])] * len(calls),
    "all_gather_into_tensor_coalesced": lambda calls: (
        [[torch.cat(shards) for shards in zip(*(args[0] for args in calls))]] * len(calls)
    ),
    "all_reduce": lambda calls: (
        [_in_rank_order([a[0] for a in calls], calls[0][1] == "avg")] * len(calls)
    ),
    "reduce_scatter_tensor": lambda calls: list(
        _in_rank_order([args[0] for args in calls], calls[0][1] == "avg").chunk(len(calls))
    ),
    "all_to_all_single": _exchange,
}
