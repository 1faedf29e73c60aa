"""`fzero.load` of what other jobs saved with torch.distributed.checkpoint: model and
optimizer, whose training goes on.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from training import ADAMW, Block, config, make, part, tokens

import fzero

WIDTH, NUM_STEPS = 12, 3
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1), ADAMW),
    "SGD": (
        lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
        {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    ),
    "RMSprop": (
        lambda params: torch.optim.RMSprop(params, lr=1e-3),
        {"type": "RMSprop", "params": {"lr": 1e-3}},
    ),
}


class Language(nn.Module):
    """With tied weights and a frozen bias; each trained parameter gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = (
            nn.Embedding(29, WIDTH),
            nn.ModuleList(Block(WIDTH) for _ in range(3)),
        )
        self.head = nn.Linear(WIDTH, 29, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].up.bias.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Unused(Language):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


def train_in_fsdp2(
    folder: str, optimizer: str, flat: bool, kind: type[Language]
) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps and a save; then the losses of three more steps, and the weights
    after them.
    """
    model, mesh = make(kind), dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(module, mesh=mesh)
    optim, losses = OPTIMIZERS[optimizer][0](model.parameters()), []
    for index in range(2 * NUM_STEPS):
        if index == NUM_STEPS:
            states = get_state_dict(
                model, optim, options=StateDictOptions(flatten_optimizer_state_dict=flat)
            )
            dcp.save({"model": states[0], "optim": states[1], "epoch": 1}, checkpoint_id=folder)
        loss = model(*part(tokens(index), dist.get_rank(), dist.get_world_size()))
        loss.backward()
        optim.step()
        optim.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(mean.item())
    return losses[NUM_STEPS:], {name: x.full_tensor() for name, x in model.state_dict().items()}


def go_on(loaded: Any, step: Any, num_ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    state, losses = loaded, []
    for index in range(NUM_STEPS, 2 * NUM_STEPS):
        batch = tuple(x.unflatten(0, (num_ranks, -1)) for x in tokens(index))
        state, metrics = step(state, batch)
        losses.append(metrics.loss.item())
    return losses, step.gather(state)


def made(
    optimizer: str, stage: int, kind: type[Language] = Language, **options: Any
) -> fzero.TrainStep:
    cfg = config(stage, clip=0.0, optimizer=OPTIMIZERS[optimizer][1])
    return fzero.make_train_step(make(kind, seed=1), cfg, **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_from_fsdp2_with_its_numbers(
    ranks: RankPool, optimizer: str, flat: bool, tmp_path: Path
) -> None:
    """To rounding: FSDP2 adds gradients in another order, and Adam divides by small
    second moments.
    """
    folder = tmp_path / "saved"
    expected = ranks(2, train_in_fsdp2, str(folder), optimizer, flat, Language)[0]
    for stage in (0, 3):
        for num_ranks in (1, 2):
            step = fzero.simulate(made(optimizer, stage), num_ranks, by="lockstep")
            if optimizer == "SGD":
                with pytest.warns(
                    UserWarning,
                    match=r"has no count of updates \(SGD keeps none\), so state.step is 1",
                ):
                    loaded = fzero.load(folder, step=step)
            else:
                loaded = fzero.load(folder, step=step)
            assert loaded.client is None and loaded.path == folder
            assert loaded.state.step.eq(1 if optimizer == "SGD" else NUM_STEPS).all()
            torch.testing.assert_close(
                go_on(loaded.state, step, num_ranks), expected, rtol=2e-6, atol=1e-5
            )


def load_and_go_on(folder: str, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    step = made("AdamW", stage)
    state, losses = fzero.load(folder, step=step).state, []
    for index in range(NUM_STEPS, 2 * NUM_STEPS):
        state, metrics = step(state, part(tokens(index), step.rank, step.world_size))
        losses.append(metrics.loss.item())
    return losses, step.gather(state)


def test_real_ranks_go_on_from_fsdp2(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    expected = ranks(2, train_in_fsdp2, folder, "AdamW", False, Language)[0]
    for found in (ranks(2, load_and_go_on, folder, 3)[1], ranks(2, load_and_go_on, folder, 0)[0]):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-5)
    # leaves optimizer and epoch where they are
    state = fzero.load_weights(folder, step=(step := made("AdamW", 0)))
    assert not state.step and step.gather(state).keys() == expected[1].keys()


def test_a_parameter_without_state_begins_anew_in_a_flat_buffer_of_its_own(
    ranks: RankPool, tmp_path: Path
) -> None:
    """It got no gradient in the job that saved, whose optimizer therefore counted no
    update of it.
    """
    folder = tmp_path / "saved"
    ranks(2, train_in_fsdp2, str(folder), "AdamW", False, Unused)
    with pytest.raises(
        ValueError, match=r"optimizer state of 'unused' begins anew; make the new step with after="
    ):
        fzero.load(folder, step=made("AdamW", 2, Unused))
    starts = fzero.checkpoint.starts(folder)
    step = made("AdamW", 2, Unused, after=starts)
    with pytest.warns(
        UserWarning, match="the optimizer state of 'unused' begins anew, because it was not saved"
    ):
        state = fzero.load(folder, step=step).state
    counts = {
        name: int(state.optimizer[buffer.key].step)
        for name, (_, buffer) in step.plan.param_units.items()
        if buffer.trainable
    }
    assert counts.pop("unused") == 0 and set(counts.values()) == {NUM_STEPS}


# --- one process ----------------------------------------------------------------------------------


def save(
    folder: Path, *, width: int = 4, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain job's checkpoint, wrapped by `wrap`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 5), nn.Linear(5, 2))
    optim = options.get("optimizer", lambda params: torch.optim.AdamW(params, lr=1e-2))(
        model.parameters()
    )
    model(torch.ones(3, width)).sum().backward()
    optim.step()
    dcp.save(
        options.get("wrap", dict)(*get_state_dict(model, optim)), checkpoint_id=folder, no_dist=True
    )
    return model, optim


def small(width: int = 4) -> fzero.TrainStep:
    model = nn.Sequential(nn.Linear(width, 5), nn.Linear(5, 2))
    return fzero.make_train_step(model, config(0), loss_fn=lambda model, x: model(x).sum())


WRAPS: dict[str, Any] = {
    "usual": lambda model, optim: {"model": model, "optim": optim},
    "other words": lambda model, optim: {"net": model, "opt": optim, "epoch": 3},
    "nested": lambda model, optim: {
        "app": {"model": model, "optim": optim},
        "loader": {"seed": torch.ones(2)},
    },
    "parameters at the top": lambda model, optim: {**model, "optimizer": optim},
    "an average beside the model": lambda model, optim: {
        "model": model,
        "ema": model,
        "optim": optim,
    },
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_model_and_optimizer_are_found_under_any_keys(wrap: str, tmp_path: Path) -> None:
    model, optim = save(tmp_path / "saved", wrap=WRAPS[wrap])
    step = small()
    state = fzero.load(tmp_path / "saved", step=step).state
    for name, param in model.named_parameters():
        torch.testing.assert_close(step.gather(state)[name], param.detach(), rtol=0, atol=0)
        key = step.plan.param_units[name][1].key
        layout = step.plan.flats[key][1].layout
        found = state.optimizer[key].exp_avg[slice(*layout.bounds(name))].view(param.shape)
        torch.testing.assert_close(found, optim.state[param]["exp_avg"], rtol=0, atol=0)
    assert state.step == 1


def test_masters_are_the_job_s_parameters_and_16_bit_parameters_their_rounding(
    tmp_path: Path,
) -> None:
    model, _ = save(tmp_path / "saved", wrap=WRAPS["usual"])
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    step = fzero.make_train_step(
        net, config(2) | {"bf16": {"enabled": True}}, loss_fn=lambda model, x: model(x).sum()
    )
    state = fzero.load(tmp_path / "saved", step=step).state
    for name, param in model.named_parameters():
        buffer = step.plan.param_units[name][1]
        master = state.master[buffer.key][slice(*buffer.layout.bounds(name))].view(param.shape)
        torch.testing.assert_close(master, param.detach(), rtol=0, atol=0)
        rounded = state.params[buffer.key][slice(*buffer.layout.bounds(name))].view(param.shape)
        torch.testing.assert_close(rounded, param.detach().bfloat16(), rtol=0, atol=0)


def amsgrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, amsgrad=True)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"optimizer": amsgrad},
            ValueError,
            "the optimizer of parameter '0.weight' must keep the same tensors in both jobs, and "
            "kept exp_avg, exp_avg_sq, max_exp_avg_sq, step in the saving job and keeps exp_avg, "
            "exp_avg_sq, step in this one; load only the weights",
        ),
        (
            {"width": 3},
            ValueError,
            "'model.0.weight' must have shape (5, 4) in the checkpoint, and has (5, 3)",
        ),
        (
            {"optimizer": plain_sgd},
            fzero.CheckpointError,
            "under two keys, and the optimizer state of this model were not found; save them so, "
            "or take the weights alone",
        ),
        (
            {"wrap": lambda model, optim: {"a": model, "b": model, "optim": optim}},
            fzero.CheckpointError,
            "the parameters of this model were found under each of ['a.', 'b.']",
        ),
    ],
    ids=["another optimizer", "another model", "no state", "two models"],
)
def test_what_cannot_be_loaded_is_an_error_with_the_remedy(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    save(tmp_path / "saved", **{"wrap": WRAPS["usual"]} | options)
    with pytest.raises(error, match=re.escape(message)) as caught:
        fzero.load(tmp_path / "saved", step=small())
    assert not isinstance(caught.value, fzero.checkpoint.NoCheckpointError)
