"""What a script does to gradients and moments is what it does in a plain loop, in the
stages in which DeepSpeed honours it.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankError, RankPool
from torch import Tensor, nn

import fzero
import fzero.deepspeed as deepspeed
from fzero.runtime.step_spec import MismatchError

D = 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, eps=1e-4, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(
        params, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3
    ),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
}
"""fzero's own kernels (Adagrad's class makes its state before the first step), and a
class that itself makes the step.
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.head(torch.tanh(self.body(x))), y)


def batch(index: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * index + rank)
    return torch.randn(4, D, generator=generator), torch.randn(4, D, generator=generator)


def moments(entry: Any) -> dict[str, Tensor]:
    return {
        key: value for key, value in entry.items() if key != "step" and isinstance(value, Tensor)
    }


def zero_all(module: Any, optimizer: Any) -> None:
    for entry in optimizer.state.values():
        for value in entry.values():
            value.zero_()


def zero_moments(module: Any, optimizer: Any) -> None:
    for entry in optimizer.state.values():
        for value in moments(entry).values():
            value.zero_()


def replace_moments(module: Any, optimizer: Any) -> None:
    for entry in optimizer.state.values():
        for key, value in moments(entry).items():
            entry[key] = torch.full_like(value, 0.01)


def scale_one(module: Any, optimizer: Any) -> None:
    for value in moments(optimizer.state[module.head.weight]).values():
        value.mul_(0.1)


def pop_one(module: Any, optimizer: Any) -> None:
    del optimizer.state[module.head.weight]


def pop_and_put_back(module: Any, optimizer: Any) -> None:
    optimizer.state[module.head.weight] = optimizer.state.pop(module.head.weight)


def pop_some_again(module: Any, optimizer: Any) -> None:
    optimizer.state.pop(module.head.weight)
    optimizer.state[module.body.bias] = {}


def assign_all(module: Any, optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


STATE = {
    "clear": lambda module, optimizer: optimizer.state.clear(),
    "assign an empty one": assign_all,
    "zero all": zero_all,
    "zero moments": zero_moments,
    "replace moments": replace_moments,
    "scale those of one parameter": scale_one,
    "remove one entry": pop_one,
    "remove an entry, and put it back": pop_and_put_back,
    "remove two entries": pop_some_again,
}


def mul(module: Any, optimizer: Any) -> None:
    for param in module.parameters():
        param.grad.mul_(0.01)


def through_data(module: Any, optimizer: Any) -> None:
    for param in module.parameters():
        param.grad.data.mul_(0.01)


def assign(module: Any, optimizer: Any) -> None:
    module.head.weight.grad = torch.ones(D, D)


def none_of_one(module: Any, optimizer: Any) -> None:
    module.head.weight.grad = None


GRADS = {
    "mul_": mul,
    "through .data": through_data,
    "assign": assign,
    "None for one parameter": none_of_one,
    "clip_grad_norm_": lambda module, optimizer: nn.utils.clip_grad_norm_(
        module.parameters(), 0.01
    ),
    "optimizer.zero_grad": lambda module, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad to zeros": lambda module, optimizer: optimizer.zero_grad(
        set_to_none=False
    ),
    "module.zero_grad": lambda module, optimizer: module.zero_grad(),
}
EDITS = STATE | GRADS
Found = tuple[list[float], dict[str, Tensor]]


def _plain(edit: str, kind: str, world_size: int, *, at: tuple[int, ...]) -> Found:
    torch.manual_seed(0)
    module = Net()
    optimizer, losses = OPTIMIZERS[kind](module.parameters()), []
    for index in range(5):
        if index in at and edit in STATE:
            EDITS[edit](module, optimizer)
        each = torch.stack([module(*batch(index, rank)) for rank in range(world_size)])
        optimizer.zero_grad()
        each.mean().backward()
        if index in at and edit in GRADS:
            EDITS[edit](module, optimizer)
        optimizer.step()
        losses.append(each[0].item())
    return losses, copy.deepcopy(module.state_dict())


def _made(stage: int, kind: str, **keys: Any) -> tuple[Any, Any]:
    """An engine, and the script's own optimizer."""
    torch.manual_seed(0)
    module = Net()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        **keys,
    }
    client = OPTIMIZERS[kind](module.parameters())
    return fzero.initialize(model=module, optimizer=client, config=config)[0], client


def _engine(
    edit: str, kind: str, stage: int, *, at: tuple[int, ...], is_clients: bool = False
) -> Found:
    engine, client = _made(stage, kind)
    optimizer, losses = client if is_clients else engine.optimizer, []
    for index in range(5):
        if index in at and edit in STATE:
            EDITS[edit](engine.module, optimizer)
        loss = engine(*batch(index, engine.global_rank))
        engine.backward(loss)
        if index in at and edit in GRADS:
            EDITS[edit](engine.module, optimizer)
        engine.step()
        assert all(param.grad is None for param in engine.module.parameters())
        losses.append(loss.item())
    return losses, engine.module_state_dict()


def _assert_alike(found: Found, plain: Found) -> None:
    # sums over the ranks come in another order
    torch.testing.assert_close(found, plain, rtol=2e-5, atol=2e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("edit", STATE)
def test_moments_that_a_script_changes_are_those_of_the_next_update(edit: str, kind: str) -> None:
    at = (2, 3)
    plain = _plain(edit, kind, 1, at=at)
    for stage in range(4):
        for is_clients in (False, True):
            _assert_alike(_engine(edit, kind, stage, at=at, is_clients=is_clients), plain)


@pytest.mark.sample(4)
@pytest.mark.parametrize("edit", STATE)
def test_so_it_is_on_two_ranks(ranks: RankPool, edit: str) -> None:
    plain = _plain(edit, "AdamW", 2, at=(2, 3))
    for stage in range(4):
        losses, weights = ranks(2, _engine, edit, "AdamW", stage, at=(2, 3))[0]
        _assert_alike((losses, weights), plain)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("edit", GRADS)
def test_gradients_that_a_script_changes_in_stage_0_are_those_of_the_update(
    edit: str, kind: str
) -> None:
    at = (1, 3)
    for is_clients in (False, True):
        _assert_alike(
            _engine(edit, kind, 0, at=at, is_clients=is_clients), _plain(edit, kind, 1, at=at)
        )


@pytest.mark.sample(2)
@pytest.mark.parametrize("edit", GRADS)
def test_gradients_that_two_ranks_change_in_stage_0_are_those_of_the_update(
    ranks: RankPool, edit: str
) -> None:
    _assert_alike(
        ranks(2, _engine, edit, "AdamW", 0, at=(1, 2))[0], _plain(edit, "AdamW", 2, at=(1, 2))
    )


def test_engine_zero_grad_before_the_step_makes_an_update_of_nothing_in_stage_0_and_an_error_elsewhere() -> (
    None
):
    for stage in range(4):
        engine, _ = _made(stage, "AdamW")
        before = engine.module_state_dict()
        engine.backward(engine(*batch(0, 0)))
        engine.zero_grad()
        if stage:
            with pytest.raises(RuntimeError, match="must follow a backward"):
                engine.step()
            continue
        engine.step()
        assert engine.global_steps == 1 and not engine.optimizer.state
        assert all(torch.equal(x, before[name]) for name, x in engine.module_state_dict().items())


def _within(of: str, stage: int) -> tuple[Found, list[str]]:
    """`zero_grad` after the first of two micro-steps, with a forward under way."""
    engine, _ = _made(stage, "AdamW", gradient_accumulation_steps=2)
    losses, said = [], []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for index in range(6):
            loss = engine(*batch(index, engine.global_rank))
            if index in (3, 5):
                {"engine": engine, "optimizer": engine.optimizer, "module": engine.module}[
                    of
                ].zero_grad()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        said += [str(each.message) for each in seen if "zero_grad" in str(each.message)]
    return (losses, engine.module_state_dict()), said


def _plain_within(world_size: int, *, drops: bool) -> Found:
    torch.manual_seed(0)
    module = Net()
    optimizer, losses = OPTIMIZERS["AdamW"](module.parameters()), []
    for index in range(6):
        each = torch.stack([module(*batch(index, rank)) for rank in range(world_size)])
        if index in (3, 5) and drops:
            optimizer.zero_grad()
        (each.mean() / 2).backward()
        losses.append(each[0].item())
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, copy.deepcopy(module.state_dict())


@pytest.mark.covering(1)
@pytest.mark.parametrize("of", ["engine", "optimizer", "module"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_within_an_accumulation_drops_where_deepspeeds_does_and_warns_where_it_differs(
    ranks: RankPool, of: str, stage: int
) -> None:
    drops = stage < 2 or of == "engine" or (of == "optimizer" and stage == 3)
    warns = (of, stage) in {("engine", 2), ("engine", 3), ("optimizer", 2)}
    for world_size in (1, 2):
        found, said = (
            ranks(world_size, _within, of, stage)[0] if world_size > 1 else _within(of, stage)
        )
        _assert_alike(found, _plain_within(world_size, drops=drops))
        assert len(said) == warns, said


def test_a_gradient_in_16_bits_is_the_state_s() -> None:
    """The views are in the dtype in which gradients are added up."""
    weights = []
    for by_grad in (True, False):
        torch.manual_seed(0)
        config = {
            "bf16": {"enabled": True, "auto_cast": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        }
        engine: Any = fzero.initialize(model=Net(), config=config)[0]
        for index in range(3):
            engine.backward(engine(*batch(index, 0)))
            for param in engine.module.parameters():
                if by_grad:
                    param.grad.mul_(0.5)
                else:
                    deepspeed.utils.safe_set_full_grad(
                        param, deepspeed.utils.safe_get_full_grad(param) * 0.5
                    )
            engine.step()
        weights.append(engine.module_state_dict())
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


def test_a_loss_outside_the_forward_adds_to_the_gradients_that_are_shown() -> None:
    engine, _ = _made(0, "AdamW")
    weight = engine.module.head.weight
    engine.backward(engine(*batch(0, 0)))
    before = weight.grad.clone()
    weight.square().sum().backward()
    torch.testing.assert_close(weight.grad, before + 2 * weight.detach())
    with (
        engine.gathered(),
        pytest.raises(ValueError, match=r"'head\.weight': must be used inside the forward"),
    ):
        weight.square().sum().backward()  # of copies


def test_the_state_has_the_form_of_torch_optim() -> None:
    for stage in (0, 2):
        engine, client = _made(stage, "AdamW")
        weight, state = engine.module.head.weight, engine.optimizer.state
        assert (
            len(state) == 0 and weight not in state and not state[weight] and client.state is state
        )
        engine.backward(engine(*batch(0, 0)))
        engine.step()
        assert set(state) == set(engine.module.parameters()) and list(state[weight]) == [
            "step",
            "exp_avg",
            "exp_avg_sq",
        ]
        assert state[weight]["step"] == 1 and state[weight]["exp_avg"].any()
        assert (state[weight]["exp_avg"].shape == (D, D)) == (stage == 0)
        with pytest.raises(KeyError, match="has no place for 'mine'"):
            state[weight]["mine"] = torch.ones(1)
        with pytest.raises(TypeError, match="remove the whole entry"):
            del state[weight]["exp_avg"]
        with pytest.raises(KeyError, match="keys are the parameters of engine"):
            state[torch.ones(1)]
        with pytest.raises(KeyError, match="'exp_avg_sq' is missing"):
            state[weight] = {"exp_avg": torch.ones(D, D)}
        kept = copy.deepcopy(state[weight])
        assert type(kept) is dict and torch.equal(kept["exp_avg"], state[weight]["exp_avg"])
        client.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with pytest.raises(RuntimeError, match="add_param_group"):
            engine(*batch(1, 0))


def test_an_own_optimizer_that_loads_its_state_dict_trains_on_in_stage_0() -> None:
    first, of_first = _made(0, "AdamW")
    for index in range(2):
        first.backward(first(*batch(index, 0)))
        first.step()
    second, of_second = _made(0, "AdamW")
    second.module.load_state_dict(first.module.state_dict())
    of_second.load_state_dict(copy.deepcopy(of_first.state_dict()))
    for engine in (first, second):
        engine.backward(engine(*batch(3, 0)))
        engine.step()
    _assert_alike(([], second.module_state_dict()), ([], first.module_state_dict()))


def _edits_after_a_backward(stage: int) -> None:
    engine, _ = _made(stage, "AdamW")
    for index in range(2):
        engine.backward(engine(*batch(index, engine.global_rank)))
        if index:
            del engine.optimizer.state[engine.module.head.weight]
        engine.step()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_count_that_divides_a_flat_buffer_after_a_backward_is_refused_by_name(
    ranks: RankPool, stage: int
) -> None:
    with pytest.raises(
        RankError,
        match=r"optimizer\.state: must change between engine\.step\(\) and the next forward",
    ):
        ranks(2, _edits_after_a_backward, stage)


def _restarts(stage: int, folder: Any) -> Found:
    """Removes an entry, saves, and loads into another engine."""
    engine, _ = _made(stage, "AdamW")
    engine.backward(engine(*batch(0, engine.global_rank)))
    engine.step()
    del engine.optimizer.state[engine.module.head.weight]
    engine.save_checkpoint(folder)
    engine, _ = _made(stage, "AdamW")
    engine.load_checkpoint(folder)
    losses = []
    for index in range(1, 3):
        loss = engine(*batch(index, engine.global_rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_entry_that_was_removed_begins_anew_after_a_checkpoint_too(
    ranks: RankPool, tmp_path: Any, stage: int
) -> None:
    torch.manual_seed(0)
    module = Net()
    optimizer, losses = OPTIMIZERS["AdamW"](module.parameters()), []
    for index in range(3):
        each = torch.stack([module(*batch(index, rank)) for rank in range(2)])
        optimizer.zero_grad()
        each.mean().backward()
        optimizer.step()
        losses.append(each[0].item())
        if not index:
            del optimizer.state[module.head.weight]
    _assert_alike(ranks(2, _restarts, stage, tmp_path)[0], (losses[1:], module.state_dict()))


# --- changes that ranks make differently ----------------------------------------------------------


def grads_by_rank(module: Any, optimizer: Any, rank: int) -> None:
    module.head.weight.grad.mul_(1 + rank)


def grads_on_one_rank(module: Any, optimizer: Any, rank: int) -> None:
    if rank:
        module.head.weight.grad.add_(1)


def grad_none_on_one_rank(module: Any, optimizer: Any, rank: int) -> None:
    if not rank:
        module.head.weight.grad = module.head.bias.grad = None


def moments_on_one_rank(module: Any, optimizer: Any, rank: int) -> None:
    if rank:
        optimizer.state[module.head.weight]["exp_avg"].mul_(0.5)


def moments_by_rank(module: Any, optimizer: Any, rank: int) -> None:
    optimizer.state[module.head.weight]["exp_avg"] = torch.full((D, D), float(rank))


def counts_by_rank(module: Any, optimizer: Any, rank: int) -> None:
    for entry in optimizer.state.values():
        entry["step"].fill_(3 + rank)


def alike(module: Any, optimizer: Any, rank: int) -> None:
    """Every rank reads, and changes all in the same way; one rank reads more."""
    for param in module.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)
        for key in ("exp_avg", "exp_avg_sq") if param in optimizer.state else ():
            optimizer.state[param][key].mul_(0.9)
    if rank:
        repr(optimizer.state)


UNLIKE: dict[Any, tuple[str, bool]] = {
    grads_by_rank: (
        r"'head\.weight\.grad' is 'values of checksum \w+' on rank 0 and 'values",
        True,
    ),
    grads_on_one_rank: (r"\.grad' is None on rank 0 and 'values of checksum \w+' on rank 1", True),
    grad_none_on_one_rank: (r"'head\.weight\.grad' is 'None' on rank 0 and None on rank 1", True),
    moments_on_one_rank: (
        r"'optimizer\.state\[head\.weight\]\[exp_avg\]' is None on rank 0 and 'values",
        False,
    ),
    moments_by_rank: (
        r"'optimizer\.state\[head\.weight\]\[exp_avg\]' is 'values of checksum \w+' on rank 0 and "
        r"'val",
        False,
    ),
    counts_by_rank: (
        r"'optimizer\.state\[body\.weight\]\[step\]' is '3\.0' on rank 0 and '4\.0' on rank 1",
        False,
    ),
}
"""What ranks change differently, with the error, and whether it comes between a
backward and the update.
"""


def _unlike(
    edit: Callable[[Any, Any, int], None], stage: int, is_late: bool
) -> tuple[str, list[str], int]:
    """The error, the fingerprints of weights at the end, and the step in which it came."""
    engine, _ = _made(stage, "AdamW")
    index = 0
    try:
        for index in range(5):
            if index == 2 and not is_late:
                edit(engine.module, engine.optimizer, engine.global_rank)
            engine.backward(engine(*batch(index, engine.global_rank)))
            if index == 2 and is_late:
                edit(engine.module, engine.optimizer, engine.global_rank)
            engine.step()
    except MismatchError as error:
        return str(error), [], index
    return "", [repr(x.tolist()) for x in engine.module_state_dict().values()], index


@pytest.mark.parametrize("edit", UNLIKE)
def test_copies_that_ranks_change_differently_are_an_error_by_the_next_backward(
    ranks: RankPool, edit: Callable[[Any, Any, int], None]
) -> None:
    words, is_late = UNLIKE[edit]
    for said, _, index in ranks(2, _unlike, edit, 0, is_late):
        assert re.search(
            "gradients and optimizer state that the script has changed: must be the same on all "
            "ranks",
            said,
        )
        assert re.search(words, said) and "compute it from what is the same on all ranks" in said
        assert index in (2, 3)


@pytest.mark.parametrize("is_late", [False, True])
def test_copies_that_ranks_change_alike_stay_copies(ranks: RankPool, is_late: bool) -> None:
    for said, weights, _ in (found := ranks(2, _unlike, alike, 0, is_late)):
        assert not said and weights == found[0][1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_moments_of_which_a_rank_holds_a_part_are_its_own_to_change(
    ranks: RankPool, stage: int
) -> None:
    for said, weights, _ in (found := ranks(2, _unlike, _own_part, stage, False)):
        assert not said and weights == found[0][1]


def _own_part(module: Any, optimizer: Any, rank: int) -> None:
    if rank:
        for param in module.parameters():
            optimizer.state[param]["exp_avg"].mul_(0.5)
