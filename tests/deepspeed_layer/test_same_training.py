"""One configuration trains the same through the engine, through `make_train_step`, and
through the real DeepSpeed.

The configuration is DeepSpeed's example of stage 2, in every stage and precision, with
and without offload. It avoids what is at fault in DeepSpeed 0.19.6, which
docs/deepspeed.md lists.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from deepspeed_jobs import batch, make
from ranks import RankPool
from test_deepspeed_checkpoints import DeepSpeed

import fzero

WORLD_SIZE, NUM_BATCHES = 2, 8
"""The same batches come again and again, so that there is something to learn."""


class Case(NamedTuple):
    stage: int
    precision: str
    offload: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        offload = {
            f"offload_{what}": {"device": "cpu", "pin_memory": False} for what in self.offload
        }
        adam = {"lr": 0.005, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}
        # one loss scale throughout: DeepSpeed divides by the new one in the step that doubles it,
        # and in stage 0 does not multiply by it; the start is so high that the first steps overflow
        scale = (
            {"loss_scale": 1.0} if self.stage == 0 else {"loss_scale": 0, "initial_scale_power": 18}
        )
        return {
            "train_batch_size": 12,
            # no kernel to compile
            "optimizer": {"type": "Adam", "params": adam | {"torch_adam": True}},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.005, "warmup_num_steps": 20},
            },
            "gradient_clipping": 1.0,
            "fp16": {
                "enabled": self.precision == "fp16",
                "loss_scale_window": 1000,
                "hysteresis": 2,
            }
            | scale,
            "bf16": {"enabled": self.precision == "bf16"},
            "zero_optimization": {
                "stage": self.stage,
                "allgather_partitions": True,
                "allgather_bucket_size": 2e8,
                "overlap_comm": True,
                "reduce_scatter": True,
                "reduce_bucket_size": 2e8,
                "contiguous_gradients": True,
                "memory_efficient_linear": False,  # its kernel computes in another order
                **offload,
            },
        }


OPTIMIZER, BOTH = ("optimizer",), ("optimizer", "param")
PLACES = (
    *((stage, ()) for stage in range(4)),
    *((stage, OPTIMIZER) for stage in (1, 2, 3)),
    (3, BOTH),
)
CASES = tuple(
    Case(stage, precision, where)
    for stage, where in PLACES
    for precision in ("fp32", "bf16", "fp16")
)
SHORT = (
    Case(0, "fp32"),
    Case(1, "fp16"),
    Case(2, "bf16"),
    Case(2, "fp16", OPTIMIZER),
    Case(3, "bf16"),
)


def _by_engine(config: dict[str, Any], num_steps: int) -> list[float]:
    engine, *_ = fzero.initialize(model=make(), config=config)
    losses = []
    for number in range(num_steps):
        engine.backward(engine(*batch(number % NUM_BATCHES, engine.global_rank, engine.world_size)))
        engine.step()
        losses.append(engine.metrics.loss.item())  # type: ignore[union-attr]
    return losses


def _by_step(config: dict[str, Any], num_steps: int) -> list[float]:
    step = fzero.make_train_step(make(), config)
    state, losses = step.init(), []
    for number in range(num_steps):
        state, metrics = step(state, batch(number % NUM_BATCHES, step.rank, step.world_size))
        losses.append(metrics.loss.item())
    return losses


def of_deepspeed(deepspeed: DeepSpeed, case: Case, num_steps: int) -> list[float]:
    """Its losses. On the CPU one of some ten runs of its stage 3 goes another way than
    all others: the first two that agree.
    """
    job = {"config": case.config, "before": 0, "after": num_steps, "batches": NUM_BATCHES}
    # no key turns that step off
    job["forgets_first_step"] = case.stage == 0 and case.precision != "fp32"
    runs: list[list[float]] = []
    while True:
        (reported,) = deepspeed.run(WORLD_SIZE, [job])
        if case.stage < 3 or reported["losses"] in runs:
            return reported["losses"]
        runs.append(reported["losses"])
        assert len(runs) < 8, f"DeepSpeed does not repeat itself: {[run[-1] for run in runs]}"


def check_same(ranks: RankPool, deepspeed: DeepSpeed, case: Case, num_steps: int) -> None:
    """Both of ours give the same bits. DeepSpeed's losses differ by the order in which
    it adds up gradients and losses: by a unit in the last place in fp32; in 16 bits
    some gradients round the other way, by up to 2**-8 or 2**-11 of them, and the loss,
    a mean over all, moves by less."""
    by_engine, by_step = (
        ranks(WORLD_SIZE, way, case.config, num_steps)[0] for way in (_by_engine, _by_step)
    )
    theirs = of_deepspeed(deepspeed, case, num_steps)
    assert by_engine == by_step
    assert by_engine[0] == pytest.approx(theirs[0], rel=2e-7)
    assert by_engine == pytest.approx(
        theirs, rel={"fp32": 3e-7, "bf16": 2**-9, "fp16": 2**-11}[case.precision]
    )
    assert by_engine[-1] < by_engine[0] - 0.01


@pytest.mark.covering(0)
@pytest.mark.parametrize("case", SHORT, ids=str)
def test_engine_step_and_the_real_deepspeed_train_the_same(
    ranks: RankPool, deepspeed: DeepSpeed, case: Case
) -> None:
    check_same(ranks, deepspeed, case, 30)


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=str)
def test_they_train_the_same_over_200_steps(
    ranks: RankPool, deepspeed: DeepSpeed, case: Case
) -> None:
    check_same(ranks, deepspeed, case, 200)
