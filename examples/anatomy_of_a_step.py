"""A ZeRO train step composed by hand from four verbs; a stage is a row of specs.

    python examples/anatomy_of_a_step.py
        one rank
    torchrun --nproc-per-node 2 examples/anatomy_of_a_step.py
        two ranks, the same losses
    python examples/anatomy_of_a_step.py --simulate 2
        two ranks as a dimension of tensors in one process
    python examples/anatomy_of_a_step.py --compile
        each step as one graph (torch.compile), on any of these

A spec relates a tensor to the ranks: each rank holds the full tensor (`Replicated`) or
its own shard (`Sharded`). A stage has one spec each for the parameters, the gradients
and the optimizer state (arXiv:1910.02054, figure 1). `fzero.make_train_step` makes the
same step unit by unit, so that the full model is never gathered at once.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

import fzero
from sharding import Replicated, Sharded

FULL, SHARDED = Replicated(), Sharded("data")
STAGES = {  # parameters, gradients, optimizer state
    0: (FULL, FULL, FULL),
    1: (FULL, FULL, SHARDED),
    2: (FULL, SHARDED, SHARDED),
    3: (SHARDED, SHARDED, SHARDED),
}
SGD = fzero.sgd(0.02, momentum=0.9)
Tree = dict  # by parameter name: tensors, their specs, or their optimizer states
Axis = fzero.comms.ProcessAxis | fzero.comms.StackedAxis


def loss_fn(params: Tree, model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(functional_call(model, params, x), torch.sin(x))


def move(tree: Tree, old: Tree, new: Tree, axis: Axis) -> Tree:
    """The tree as `new` specs divide it."""
    return tree if old == new else fzero.shard(fzero.gather(tree, old, axis), new, axis)


def init(weights: Tree, stage: int, axis: Axis) -> tuple[Tree, Tree]:
    """A rank's parameters and optimizer state, from the full weights."""
    full, params_spec, _, state_spec = (
        fzero.specs_of(weights, spec) for spec in (FULL, *STAGES[stage])
    )
    params, owned = move(weights, full, params_spec, axis), move(weights, full, state_spec, axis)
    return params, {name: SGD.init(shard) for name, shard in owned.items()}


def step(
    params: Tree, state: Tree, batch: Tensor, model: nn.Module, stage: int, axis: Axis
) -> tuple[Tree, Tree, Tensor]:
    """A rank's new parameters and optimizer state, and the loss of the batch of all
    ranks.
    """
    weights = dict(model.named_parameters())  # gives their shapes
    full, params_spec, grads_spec, state_spec = (
        fzero.specs_of(weights, spec) for spec in (FULL, *STAGES[stage])
    )

    x = fzero.shard(batch, fzero.specs_of(batch, SHARDED), axis).view(-1, 1)  # this rank's samples
    grads, loss = grad_and_value(loss_fn)(move(params, params_spec, full, axis), model, x)
    grads = fzero.reduce_scatter_grads(grads, grads_spec, axis)  # now the mean over ranks
    params, grads = (
        move(params, params_spec, state_spec, axis),
        move(grads, grads_spec, state_spec, axis),
    )
    # a rank updates what it holds the state of
    params, state = fzero.optimizer_update(SGD, params, grads, state)
    loss = fzero.reduce_scatter_grads(loss, fzero.specs_of(loss), axis)
    return move(params, state_spec, params_spec, axis), state, loss


def train(
    model: nn.Module,
    batches: Tensor,
    stage: int,
    ranks: fzero.comms.Stacked | None = None,
    jit: Callable[[Callable], Callable] = lambda function: function,
) -> list[float]:
    """The loss of each batch, on this process' rank or on simulated ranks; the model
    gives its structure and initial weights.
    """
    # torchrun's ranks, or this process alone
    axis = fzero.join() if ranks is None else ranks.axis()
    each = ranks.map if ranks else lambda function: function
    weights = {name: param.detach() for name, param in model.named_parameters()}

    @jit
    def step_of_all(params: Tree, state: Tree, batch: Tensor) -> tuple[Tree, Tree, Tensor]:
        return each(partial(step, batch=batch, model=model, stage=stage, axis=axis))(params, state)

    params, state = each(partial(init, weights, stage, axis))()
    losses = []
    for batch in batches:
        params, state, loss = step_of_all(params, state, batch)
        losses.append(loss.flatten()[0].item())  # all ranks have the same
    return losses


def train_plainly(model: nn.Module, batches: Tensor) -> list[float]:
    """The same without ranks and specs: global batches and torch.optim."""
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_fn(dict(model.named_parameters()), model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Trains in all stages, composed from the verbs, and plainly."
    )
    parser.add_argument("--simulate", type=int, metavar="W", help="ranks in this process")
    parser.add_argument("--compile", action="store_true", help="capture each step as one graph")
    args = parser.parse_args()
    ranks = fzero.comms.Stacked(args.simulate) if args.simulate else None
    jit = partial(torch.compile, fullgraph=True) if args.compile else lambda function: function
    axis = fzero.join()
    torch.manual_seed(0)  # the same weights and batches on all ranks
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    batches = 3 * torch.randn(20, 24, 1)  # 20 steps of 24 samples over all ranks
    losses = {f"stage {stage}": train(model, batches, stage, ranks, jit) for stage in STAGES}
    losses["plain"] = train_plainly(model, batches)
    for name, curve in losses.items():
        # Equal to rounding: the mean of the ranks' means adds in another order than the mean of the
        # global batch.
        torch.testing.assert_close(curve, losses["plain"], rtol=1e-5, atol=0)
        if axis.rank == 0:
            print(
                f"{name:8} {args.simulate or axis.size} rank(s): loss {curve[0]:.6f} -> "
                f"{curve[-1]:.6f}"
            )
    fzero.shutdown()


if __name__ == "__main__":
    main()
