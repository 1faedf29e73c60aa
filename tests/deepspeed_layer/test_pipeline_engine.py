"""The laws of `PipelineEngine`, on real ranks and alone: it trains as the functional
step, and keeps DeepSpeed's names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import fzero
import fzero.deepspeed as deepspeed
from fzero.data import RandomLTD, fixed_linear
from fzero.deepspeed.runtime.pipe.engine import PipelineEngine, PipelineError
from fzero.pipeline import LayerSpec, PipelineModule
from sharding import Mesh

MICRO, STEPS = 3, 4


def specs() -> list[Any]:
    return [
        LayerSpec(nn.Linear, 6, 8),
        torch.tanh,
        LayerSpec(nn.Dropout, 0.3),
        LayerSpec(nn.Linear, 8, 8),
        LayerSpec(nn.Linear, 8, 3),
    ]


def settings(num_data: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "pipeline": {"activation_checkpoint_interval": 1},
    }


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5 + rank)
    return [
        (torch.randn(2, 6, generator=generator), torch.randint(3, (2,), generator=generator))
        for _ in range(MICRO * STEPS)
    ]


def by_step(num_stages: int, num_data: int) -> list[float]:
    """The losses of the functional form."""
    module = PipelineModule(specs(), num_stages=num_stages, loss_fn=nn.functional.cross_entropy)
    fake = fzero.comms.AbstractAxis.of(Mesh.of(pipe=num_stages, data=num_data))
    config = {
        k: v for k, v in settings(num_data).items() if k not in ("pipeline", "steps_per_print")
    }
    ranks = fzero.simulate(fzero.make_train_step(module, config, mesh=fake), by="lockstep")
    state, losses, of_rank = ranks.init(), [], [batches(rank) for rank in range(num_data)]
    for index in range(STEPS):
        some = [
            tuple(
                map(
                    torch.stack,
                    zip(*(of_rank[r][MICRO * index + i] for r in range(num_data)), strict=True),
                )
            )
            for i in range(MICRO)
        ]
        state, metrics = ranks(state, iter(some))
        losses.append(metrics.loss.item())
    return losses


def made(num_stages: int, **keys: Any) -> Any:
    torch.set_num_threads(1)
    module = PipelineModule(specs(), num_stages=num_stages, loss_fn=nn.functional.cross_entropy)
    params = [p for p in module.parameters() if p.requires_grad]
    return deepspeed.initialize(
        model=module, model_parameters=params or None, config=settings(1) | keys
    )[0]


def trains(num_stages: int, folder: str) -> tuple[list[float], list[float], float]:
    engine = made(num_stages)
    assert (
        type(engine) is PipelineEngine
        and engine.num_stages == num_stages == engine.grid.get_pipe_parallel_world_size()
    )
    data = iter(batches(engine.grid.get_data_parallel_rank()))
    losses = [engine.train_batch(data).item() for _ in range(2)]
    engine.save_checkpoint(folder)
    losses += [engine.train_batch(data_iter=data).item() for _ in range(2)]
    again = iter(batches(engine.grid.get_data_parallel_rank())[2 * MICRO :])
    engine.load_checkpoint(folder)
    assert engine.global_steps == 2
    engine.set_dataiterator(again)
    resumed = [engine.train_batch().item() for _ in range(2)]
    assert engine.lr_scheduler.get_last_lr() == [1e-2]
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients enabled"):
        engine.train_batch(again)
    for call in (engine, engine.backward, engine.step):
        with pytest.raises(PipelineError, match="Only train_batch"):
            call(torch.ones(2, 6))
    evaluated = engine.eval_batch(iter(batches(9)), num_micro_batches=2)
    loss, logits = engine.eval_batch(iter(batches(9)), return_logits=True, num_micro_batches=2)
    assert loss == evaluated and (logits is not None) == engine.is_last_stage()
    assert logits is None or logits.shape == (4, 3)
    return losses, resumed, evaluated.item()


@pytest.mark.parametrize(("num_stages", "num_data"), [(2, 1), (2, 2)])
def test_the_engine_trains_as_the_step_and_continues_from_its_checkpoint(
    num_stages: int, num_data: int, ranks: RankPool, tmp_path: Path
) -> None:
    wanted = by_step(num_stages, num_data)
    found = ranks(num_stages * num_data, trains, num_stages, str(tmp_path))
    assert all(result[0] == wanted and result[1] == wanted[2:] for result in found)
    assert len({result[2] for result in found}) == 1


def test_alone_with_one_stage_it_trains_as_well(tmp_path: Path) -> None:
    wanted = by_step(1, 1)
    losses, resumed, _ = trains(1, str(tmp_path))
    assert losses == wanted and resumed == wanted[2:]


def last_losses(num_stages: int) -> list[float]:
    """`engine.loss` before the first batch, after two of training and one of
    evaluation; on the last stage, as seen.
    """
    torch.set_num_threads(1)
    seen: list[tuple[Tensor, Tensor]] = []

    def loss_fn(out: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(out, labels)
        seen.append((loss.detach().clone(), labels))
        return loss

    module = PipelineModule(specs(), num_stages=num_stages, loss_fn=loss_fn)
    engine = deepspeed.initialize(model=module, config=settings(1))[0]
    of_rank = batches(engine.grid.get_data_parallel_rank())
    losses, data = [engine.loss.item()], iter(of_rank)
    for index, call in enumerate((engine.train_batch, engine.train_batch, engine.eval_batch)):
        mean = call(data)
        assert engine.loss.shape == () and not engine.loss.requires_grad
        losses.append(engine.loss.item())
        if engine.is_last_stage():
            assert len(seen) == MICRO * (index + 1) and torch.equal(
                seen[-1][1], of_rank[len(seen) - 1][1]
            )
            assert engine.loss == seen[-1][0] != mean
        else:
            assert not seen and engine.loss == 0
    return losses


def test_the_loss_is_that_of_the_last_micro_batch_on_the_last_stage_and_0_elsewhere(
    ranks: RankPool,
) -> None:
    found = [last_losses(1), *ranks(4, last_losses, 2)]
    assert found[1] == found[2] == [0.0] * 4  # the first stage
    assert found[0][0] == found[3][0] == found[4][0] == 0
    assert found[0] == found[3]  # the stages change no number
    assert found[3][1:] != found[4][1:]  # each data rank has its own


def loads(folder: str, num_stages: int) -> list[float]:
    engine = made(num_stages)
    engine.load_checkpoint(folder)
    data = iter(batches(engine.grid.get_data_parallel_rank())[2 * MICRO :])
    return [engine.train_batch(data).item() for _ in range(2)]


def test_a_checkpoint_of_two_stages_loads_into_one_and_into_four(
    ranks: RankPool, tmp_path: Path
) -> None:
    wanted = by_step(2, 1)
    ranks(2, trains, 2, str(tmp_path))
    assert loads(str(tmp_path), 1) == wanted[2:]
    assert all(found == wanted[2:] for found in ranks(4, loads, str(tmp_path), 4))


CURRICULUM = {
    "enabled": True, "min_difficulty": 2, "max_difficulty": 6, "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 2},
}  # fmt: skip


def evaluates_between() -> list[int]:
    engine = made(2, curriculum_learning=CURRICULUM)
    of_training, of_evaluation, lengths = iter(batches(0)), iter(batches(1)), []

    def cut(batch: Any) -> Any:
        lengths.append(engine.curriculum_scheduler_legacy.get_current_difficulty())
        return batch

    engine.set_dataiterator(of_training)
    engine.set_batch_fn(cut)
    for _ in range(3):
        engine.train_batch()
        engine.eval_batch(of_evaluation, num_micro_batches=1)
    assert len(list(of_training)) == len(list(of_evaluation)) - 6 == MICRO
    for keys, message in (
        ({"num_micro_batches": 0}, "must be at least 1"),
        ({"reduce_output": "sum"}, "'avg' or None"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.eval_batch(of_evaluation, **keys)
    for call in (
        lambda: fzero.generating(engine.train_step, engine.state).__enter__(),
        lambda: next(fzero.generation.server_weights(engine.train_step, engine.state)),
    ):
        with pytest.raises(
            ValueError, match="must have the whole model, and is that of a pipeline stage"
        ):
            call()
    return lengths


def test_evaluation_takes_no_batch_of_training_and_both_follow_the_curriculum(
    ranks: RankPool,
) -> None:
    for lengths in ranks(2, evaluates_between):
        assert lengths == [2] * MICRO + [4] * (MICRO + 1) + [4] * (MICRO + 1) + [6]


def in_zero_init() -> None:
    with (
        pytest.raises(fzero.ConfigError, match="a PipelineModule must be made outside"),
        deepspeed.zero.Init(),
    ):
        PipelineModule(specs(), num_stages=2)


def refuses() -> None:
    with pytest.raises(
        fzero.ConfigError, match=r"progressive_layer_drop\.enabled: must be false with a pipeline"
    ):
        made(2, progressive_layer_drop={"enabled": True})
    module = PipelineModule(specs(), num_stages=2, loss_fn=nn.functional.cross_entropy)
    RandomLTD([0], fixed_linear(2, 4, steps=2, multiple=2)).wrap(module, nn.Linear)
    with pytest.raises(fzero.ConfigError, match="random_ltd: must be off with a pipeline"):
        deepspeed.initialize(model=module, config=settings(1))


def test_what_stages_cannot_do_is_refused(ranks: RankPool) -> None:
    ranks(2, in_zero_init)
    ranks(2, refuses)


def resizes() -> None:
    engine = made(2, pipeline={"activation_checkpoint_interval": 0})  # DeepSpeed's default
    assert engine.module.activation_checkpoint_interval == 0
    engine.set_train_batch_size(2 * 2)
    assert engine.micro_batches == 2
    data = iter(batches(0))
    first = engine.train_batch(data)
    assert first.isfinite() and len(list(data)) == (MICRO * STEPS - 2)


def test_the_number_of_micro_batches_may_change(ranks: RankPool) -> None:
    ranks(2, resizes)
