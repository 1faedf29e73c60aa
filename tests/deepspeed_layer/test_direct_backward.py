"""The laws of `loss.backward()`: it trains bit for bit as `engine.backward(loss)` does,
in every stage.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from engines import Net, assert_close, criterion, data, made, mine, plainly
from ranks import RankPool
from test_rank_death import Job
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import make

import fzero
from fzero.deepspeed.engine.direct_backward import tensors_in

NUM_STEPS = 3
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6, "auto_cast": True}}


def _by_gradient(engine: Any, outputs: Any, y: Tensor, loss: Tensor) -> None:
    """From two outputs, with the gradients of the loss by them."""
    seen = {"logits": outputs["logits"].detach(), "hidden": [outputs["hidden"][0].detach()]}
    leaves = [seen["logits"].requires_grad_(), seen["hidden"][0].requires_grad_()]
    grads = torch.autograd.grad(criterion(seen, y), leaves)
    torch.autograd.backward([outputs["logits"], outputs["hidden"][0]], grads)


WAYS: dict[str, Callable[[Any, Any, Tensor, Tensor], Any]] = {
    "engine": lambda engine, outputs, y, loss: engine.backward(loss),
    "loss": lambda engine, outputs, y, loss: loss.backward(),
    "scaled": lambda engine, outputs, y, loss: engine.scale(loss).backward(),
    "autograd": lambda engine, outputs, y, loss: torch.autograd.backward(loss),
    "by gradient": _by_gradient,
}


def _trained(
    way: str, stage: int, num_micro: int = 1, **keys: Any
) -> tuple[list[Any], dict[str, Tensor], float]:
    accumulation = {"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": num_micro}
    engine = made(stage, **accumulation, **keys)
    norms = []
    for index in range(NUM_STEPS * num_micro):
        x, y = mine(engine, data(index))
        outputs = engine(x)
        WAYS[way](engine, outputs, y, criterion(outputs, y).float())
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert engine.global_steps == NUM_STEPS
    return norms, engine.module_state_dict(), float(engine.metrics.loss)


def _trained_twice(ways: list[str], *args: Any, **keys: Any) -> list[Any]:
    return [_trained(way, *args, **keys) for way in ways]


def assert_same(runs: list[list[Any]]) -> None:
    for (norms, weights, loss), *others in runs:
        for other_norms, other_weights, other_loss in others:
            assert norms == other_norms
            assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
            assert other_loss != other_loss or other_loss == loss


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
def test_a_backward_of_the_script_has_the_bits_of_the_engines(ranks: RankPool, stage: int) -> None:
    ways = ["engine", "loss", "scaled", "autograd"]
    runs = ranks(2, _trained_twice, ways, stage)
    assert_same(runs)
    (_, direct, unseen), (*_, seen) = runs[0][1:3]
    # the loss is NaN where the engine has not seen it
    assert unseen != unseen and seen == runs[0][0][2]
    _, expected = plainly(lambda m, i: [criterion(m(data(i)[0]), data(i)[1])], NUM_STEPS)
    assert_close(direct, expected)
    assert_same(ranks(2, _trained_twice, ways[:2], stage, 2))


@pytest.mark.parametrize("stage", [0, 3])
def test_in_fp16_a_scaled_loss_has_the_bits_and_another_is_refused(
    ranks: RankPool, stage: int
) -> None:
    assert_same(ranks(2, _trained_twice, ["engine", "scaled"], stage, **FP16))
    assert_same(
        ranks(
            2, _trained_twice, ["engine", "loss"], stage, bf16={"enabled": True, "auto_cast": True}
        )
    )
    for seen, norm in ranks(2, _goes_on_unscaled, stage):
        assert "engine.scale(loss).backward()" in seen and norm > 0


def _goes_on_unscaled(stage: int) -> tuple[str, float]:
    engine = made(stage, **FP16)
    x, y = mine(engine, data(0))
    with pytest.raises(RuntimeError, match="in fp16 the loss must be multiplied") as caught:
        criterion(engine(x), y).float().backward()
    engine.scale(criterion(engine(x), y).float()).backward()
    engine.step()
    return str(caught.value), engine.get_global_grad_norm()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_of_outputs_go_backward_as_those_of_their_loss(
    ranks: RankPool, stage: int
) -> None:
    for (norms, weights, _), (other_norms, other_weights, _) in ranks(
        2, _trained_twice, ["engine", "by gradient"], stage
    ):
        assert norms == pytest.approx(other_norms, rel=1e-5)
        assert_close(other_weights, weights)


# --- several forwards, retained graphs, errors ----------------------------------------------------


def _scripts(model: Any, batch: Any, script: str) -> None:
    (x, y), (z, w) = batch(0), batch(1)
    first, second = model(x), model(z)
    if script == "one loss":
        (criterion(first, y) + criterion(second, w)).backward()
    elif script == "two losses":
        criterion(second, w).backward()
        criterion(first, y).backward()
    elif script == "retained":
        loss = criterion(first, y)
        loss.backward(retain_graph=True)
        (loss + criterion(second, w)).backward()
    elif script == "inputs":
        x = x.clone().requires_grad_()
        loss = criterion(model(x), y) + criterion(second, w)
        loss.backward()
        assert x.grad is not None and x.grad.abs().sum() > 0


def _runs_script(stage: int, script: str) -> dict[str, Tensor]:
    engine = made(stage)
    for index in range(NUM_STEPS):
        _scripts(engine, lambda k: mine(engine, data(10 * index + k)), script)  # noqa: B023
        engine.step()
    return engine.module_state_dict()


@pytest.mark.covering(1)
@pytest.mark.parametrize("script", ["one loss", "two losses", "retained", "inputs"])
@pytest.mark.parametrize("stage", [0, 3])
def test_any_order_of_forwards_and_backwards_trains_as_a_plain_loop(
    ranks: RankPool, stage: int, script: str
) -> None:
    module = make(Net)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    for index in range(NUM_STEPS):
        _scripts(module, lambda k: data(10 * index + k), script)  # noqa: B023
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for weights in ranks(2, _runs_script, stage, script):
        assert_close(weights, module.state_dict())


class Recomputed(Net):
    """The last module runs again in the backward, before autograd has seen any
    parameter.
    """

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = []
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
            hidden.append(x)
        return {"logits": checkpoint(self.head, x, use_reentrant=False), "hidden": hidden}


def _recomputes(stage: int) -> dict[str, Tensor]:
    engine = made(stage, Recomputed)
    for index in range(NUM_STEPS):
        x, y = mine(engine, data(index))
        criterion(engine(x), y).backward()
        engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", [2, 3])
def test_modules_that_run_again_in_the_backward_train_as_others(
    ranks: RankPool, stage: int
) -> None:
    _, expected = plainly(lambda m, i: [criterion(m(data(i)[0]), data(i)[1])], NUM_STEPS)
    for weights in ranks(2, _recomputes, stage):
        assert_close(weights, expected)


def _breaks(stage: int) -> tuple[dict[str, Tensor], str]:
    engine = made(stage, train_micro_batch_size_per_gpu=6, gradient_accumulation_steps=2)
    for index in range(NUM_STEPS):
        for micro in range(2):
            x, y = mine(engine, data(10 * index + micro))
            outputs = engine(x)
            if (index, micro) == (1, 0):
                outputs["hidden"][0].register_hook(lambda grad: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    criterion(outputs, y).backward()
                outputs = engine(x)  # this micro-step anew; nothing else was lost
            criterion(outputs, y).backward()
            engine.step()
    outputs = engine(x)
    outputs["hidden"][0].register_hook(lambda grad: 1 // 0)
    criterion(engine(x), y).backward()
    with pytest.raises(ZeroDivisionError):
        criterion(outputs, y).backward()
    engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(
        RuntimeError, match="dropped the gradients of earlier micro-steps"
    ) as caught:
        engine.step()
    return engine.module_state_dict(), str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_error_in_the_backward_loses_what_it_loses_in_the_engines(
    ranks: RankPool, stage: int
) -> None:
    def losses(model: Any, index: int) -> list[Tensor]:
        return [criterion(model(x), y) / 2 for x, y in (data(10 * index), data(10 * index + 1))]

    _, expected = plainly(losses, NUM_STEPS)
    for weights, text in ranks(2, _breaks, stage):
        assert_close(weights, expected)
        assert "zero_grad" in text


def test_gradients_by_inputs_alone_collect_nothing() -> None:
    engine = made(2)
    x, y = data(0)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(criterion(engine(x), y), x)
    assert grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match="must follow a backward"):
        engine.step()


def test_what_the_engine_cannot_scale_is_reported() -> None:
    engine = made(2)
    with pytest.raises(RuntimeError, match=r"engine.scale: must follow a forward"):
        engine.scale(torch.ones((), requires_grad=True))
    outputs = engine(data(0)[0])
    with pytest.raises(
        ValueError, match=r"engine.scale: needs a scalar loss .* output.backward\(gradient\)"
    ):
        engine.scale(outputs["logits"])


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True, "auto_cast": True}}])
@pytest.mark.parametrize("way", ["engine", "loss", "freed"])
def test_a_backward_through_a_step_that_is_over_says_so(
    way: str, precision: dict[str, Any]
) -> None:
    """Also where autograd finds first that it has freed the graph, or that the update
    has written memory that the graph holds.
    """
    engine, (x, y) = made(2, **precision), data(0)
    old = criterion(engine(x), y)
    engine.backward(old if way == "freed" else criterion(engine(x), y))
    engine.step()
    engine(x)
    with pytest.raises(RuntimeError, match="a step that is over"):
        WAYS["engine" if way == "freed" else way](engine, None, y, old)


def test_tensors_are_found_in_any_structure() -> None:
    from dataclasses import dataclass

    @dataclass
    class Output:
        loss: Any
        rest: Any

    found = tensors_in(
        Output(torch.tensor(0), {"a": (torch.tensor(1), [torch.tensor(2)]), "b": None})
    )
    assert [int(x) for x in found] == [0, 1, 2]


# --- unmanaged accumulation -----------------------------------------------------------------------


def _unmanaged(stage: int, direct: bool) -> Any:
    keys = {"managed_gradient_accumulation": False, "train_micro_batch_size_per_gpu": 6}
    engine = made(stage, gradient_accumulation_steps=2, **keys)
    counts, norms = [2, 1, 3], []
    for index, count in enumerate(counts):
        for micro in range(count):
            x, y = mine(engine, data(10 * index + micro))
            loss = criterion(engine(x), y)
            assert not engine.is_gradient_accumulation_boundary()
            if direct:
                loss.backward()
            else:
                engine.backward(loss)
        engine.step()
        assert engine.was_step_applied()
        norms.append(engine.get_global_grad_norm())
    assert (engine.global_steps, engine.global_samples) == (3, 12 * 6)
    with pytest.raises(RuntimeError, match="needs managed_gradient_accumulation"):
        engine.set_gradient_accumulation_boundary(True)
    return norms, engine.module_state_dict(), 0.0


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
def test_without_managed_accumulation_every_step_updates(ranks: RankPool, stage: int) -> None:
    # divided by gradient_accumulation_steps, as in DeepSpeed
    def losses(model: Any, index: int) -> list[Tensor]:
        return [
            criterion(model(data(10 * index + k)[0]), data(10 * index + k)[1]) / 2
            for k in range((2, 1, 3)[index])
        ]

    norms, expected = plainly(losses, 3)
    for managed, direct in zip(
        ranks(2, _unmanaged, stage, False), ranks(2, _unmanaged, stage, True), strict=True
    ):
        assert_same([[managed, direct]])
        assert managed[0] == pytest.approx(norms, rel=1e-4)
        assert_close(managed[1], expected)


# --- hangs ----------------------------------------------------------------------------------------


def run_rank(stage: str) -> None:
    """Rank 1 computes a loss and never goes backward."""
    torch.set_num_threads(1)
    fzero.join(timeout=timedelta(seconds=25))
    engine = made(int(stage))
    x, y = mine(engine, data(0))
    loss = criterion(engine(x), y)
    if engine.global_rank == 0:
        loss.backward()
    else:
        import time

        time.sleep(3600)


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_does_not_go_backward_is_named(stage: int) -> None:
    with Job(2, str(stage), 3, file=__file__) as job:
        code, errors = job.end_of(0)
    assert (
        code == 1
        and "rank 1" in errors
        and "has not come" in errors
        and "time.sleep(3600)" in errors
    ), errors
    assert "loss.backward()" in errors and "the collective did not come back in time" in errors


if __name__ == "__main__":
    import sys

    run_rank(sys.argv[1])
