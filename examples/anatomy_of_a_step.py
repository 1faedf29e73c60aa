"""A ZeRO train step composed by hand from four verbs; a stage is a row of specs.

    python examples/anatomy_of_a_step.py                                 one rank
    torchrun --nproc-per-node 2 examples/anatomy_of_a_step.py            two ranks, the same losses

A spec relates a tensor to the ranks: each rank holds the full tensor (`Replicated`) or its own shard (`Sharded`). A stage
has one spec each for the parameters, the gradients and the optimizer state (arXiv:1910.02054, figure 1).
`fzero.make_train_step` makes the same step unit by unit, so that the full model is never gathered at once.
"""

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
LR, MOMENTUM = 0.02, 0.9
Tree = dict  # by parameter name: tensors, their specs, or their optimizer states


def loss_fn(params: Tree, model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(functional_call(model, params, x), torch.sin(x))


def train(model: nn.Module, batches: Tensor, stage: int, axis: fzero.comms.ProcessAxis) -> list[float]:
    """The loss of each batch; the model gives its structure and its initial weights."""
    weights = {name: param.detach() for name, param in model.named_parameters()}
    full, params_spec, grads_spec, state_spec = (fzero.specs_of(weights, spec) for spec in (FULL, *STAGES[stage]))
    sgd = fzero.sgd(LR, momentum=MOMENTUM)

    def move(tree: Tree, old: Tree, new: Tree) -> Tree:
        return tree if old == new else fzero.shard(fzero.gather(tree, old, axis), new, axis)

    def step(params: Tree, state: Tree, batch: Tensor) -> tuple[Tree, Tree, Tensor]:
        grads, loss = grad_and_value(loss_fn)(move(params, params_spec, full), model, batch)
        grads = fzero.reduce_scatter_grads(grads, grads_spec, axis)  # now the mean over ranks
        params, grads = move(params, params_spec, state_spec), move(grads, grads_spec, state_spec)
        params, state = fzero.optimizer_update(
            sgd, params, grads, state
        )  # a rank updates the parameters whose state it holds
        loss = fzero.reduce_scatter_grads(loss, fzero.specs_of(loss), axis)
        return move(params, state_spec, params_spec), state, loss

    params = move(weights, full, params_spec)
    state = {name: sgd.init(shard) for name, shard in move(weights, full, state_spec).items()}
    losses = []
    for batch in batches:
        params, state, loss = step(params, state, batch.chunk(axis.size)[axis.rank])
        losses.append(loss.item())
    return losses


def train_plainly(model: nn.Module, batches: Tensor) -> list[float]:
    """The same without ranks and specs: global batches and torch.optim."""
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_fn(dict(model.named_parameters()), model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    axis = fzero.join()  # torchrun's ranks, or this process alone
    torch.manual_seed(0)  # the same weights and batches on all ranks
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    batches = 3 * torch.randn(20, 24, 1)  # 20 steps of 24 samples over all ranks
    losses = {f"stage {stage}": train(model, batches, stage, axis) for stage in STAGES}
    losses["plain"] = train_plainly(model, batches)
    for name, curve in losses.items():
        # Equal to rounding: the mean of the ranks' means adds in another order than the mean of the global batch.
        torch.testing.assert_close(curve, losses["plain"], rtol=1e-5, atol=0)
        if axis.rank == 0:
            print(f"{name:8} {axis.size} rank(s): loss {curve[0]:.6f} -> {curve[-1]:.6f}")
    fzero.shutdown()
