"""`explain` of a pipeline: what it predicts of messages and stored activations is what
a run does.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from functools import partial
from typing import Any

import pytest
import torch
from pretended_cuda import PretendedCuda
from ranks import RankPool
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import fzero
from fzero.comms import collectives
from fzero.comms.pending import Pending, ended
from fzero.estimation import PipelinePlan, plan_pipeline
from fzero.pipeline import LayerSpec, PipelineModule
from fzero.pipeline.execution import stages_of
from fzero.pipeline.messages import Expected, Links, Mailbox, Message, Route
from fzero.profiling import trace_comm
from sharding import Mesh

# so that a message is longer than the shortest block, 4096 bytes
WIDTH, ROWS, STAGES, DATA = 96, 17, 4, 2
ORDERS = ("gpipe", "1f1b", "zero_bubble", "interleaved:2")
STORED = Counter[int]()
"""The bytes that autograd stores now, by stage. Ranks in lockstep share it."""
MOST = Counter[int]()


class Counted(nn.Module):
    """Two layers, which count the activations that autograd keeps for them."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        self.one, self.two, self.stage = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            stage,
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.stage is None:
            return self.two(torch.tanh(self.one(x)))
        with saved_tensors_hooks(partial(_Kept, self.stage), lambda kept: kept.x):
            return self.two(torch.tanh(self.one(x)))


class _Kept:
    def __init__(self, stage: int, x: Tensor) -> None:
        self.stage, self.x = stage, x
        # Parameters are no activations; the output of tanh is saved twice.
        self.nbytes = x.nbytes if x.shape[0] == ROWS else 0
        self.nbytes //= 1 if x.shape[-1] == WIDTH else 2
        STORED[stage] += self.nbytes
        MOST[stage] = max(MOST[stage], STORED[stage])

    def __del__(self) -> None:
        STORED[self.stage] -= self.nbytes


def config(num_micro: int, **keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": num_micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1},
    } | keys  # fmt: skip


def made(
    order: str, num_micro: int, mesh: Any, *, counts: bool = False, interval: int = 0
) -> fzero.TrainStep:
    chunks = 2 if order.startswith("interleaved") else 1
    per_chunk = 4 // chunks
    layers = [
        LayerSpec(Counted, index // per_chunk % STAGES if counts else None)
        for index in range(per_chunk * chunks * STAGES)
    ]
    model = PipelineModule(
        layers, num_stages=STAGES, loss_fn=functional.mse_loss, partition_method="uniform",
        activation_checkpoint_interval=interval,
    )  # fmt: skip
    return fzero.make_train_step(model, config(num_micro), mesh=mesh, pipeline=order)


def batch(num_micro: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    return tuple(torch.ones(ROWS * num_micro, WIDTH, device=device) for _ in range(2))  # type: ignore[return-value]


def sent_by_a_stage(order: str, num_micro: int) -> tuple[int, list[int], list[int]]:
    """On a real rank: its stage, and the bytes of its messages, as a step sends them
    and as `explain` predicts them.
    """
    torch.set_num_threads(1)
    step = made(order, num_micro, Mesh.of(pipe=STAGES, data=1))
    links: Any = stages_of(step.runtime).links
    # gloo's thread spins where one connection sends and receives at once
    assert links.up.group is not links.down.group
    given = batch(num_micro)
    comm = trace_comm(step, step.init(), given)
    planned = step.explain(given)
    assert isinstance(planned, PipelinePlan)
    stage = step.rank
    sent = [row.nbytes for row in comm.rows if row.purpose == "stages"]
    return stage, sent, [planned.timeline.sent[stage], len(planned.timeline.messages[stage])]


@pytest.mark.parametrize(
    "order", [ORDERS[1], *(pytest.param(order, marks=pytest.mark.long) for order in ORDERS[2:])]
)
def test_messages_are_the_predicted_ones(order: str, ranks: RankPool) -> None:
    for stage, sent, (nbytes, number) in ranks(STAGES, sent_by_a_stage, order, 4):
        assert len(sent) == number > 0
        # Each message has its form beside its tensors: less than half a kilobyte.
        assert nbytes < sum(sent) < nbytes + 512 * number, f"stage {stage}"


@pytest.mark.parametrize(
    "order",
    [
        ORDERS[1],
        *(pytest.param(order, marks=pytest.mark.long) for order in (ORDERS[0], *ORDERS[2:])),
    ],
)
def test_stored_activations_are_the_predicted_ones(order: str) -> None:
    mesh = fzero.comms.AbstractAxis.of(Mesh.of(pipe=STAGES, data=1))
    num_micro = 8 if order == "interleaved:2" else 6
    step = made(order, num_micro, mesh, counts=True)
    planned = step.explain(batch(num_micro, "meta"))
    assert isinstance(planned, PipelinePlan)
    ranks = fzero.simulate(step, by="lockstep")
    MOST.clear()
    x, y = (part[None] for part in batch(num_micro))
    ranks(ranks.init(), (x, y))
    assert not any(STORED.values())
    of_layer = ROWS * WIDTH * 4 * 3  # its input, and twice as much between its parts
    for stage in range(STAGES):
        # the loss
        predicted = planned.timeline.stored[stage] - 4 * in_flight(planned, stage) * (
            stage == STAGES - 1
        )
        assert MOST[stage] == predicted
        if order in ("gpipe", "1f1b"):
            assert (
                predicted
                == (num_micro if order == "gpipe" else min(STAGES - stage, num_micro))
                * of_layer
                * 4
            )


def in_flight(planned: PipelinePlan, stage: int) -> int:
    """The most micro-batches of the last chunk of a stage that are stored at one time."""
    now, most = 0, 0
    for event in planned.order.compute(stage):
        if event.chunk == planned.order.num_chunks - 1:
            now += (event.kind == "forward") - (event.kind in ("backward", "backward_weight"))
            most = max(most, now)
    return most


def test_explain_has_the_models_own_stages_order_and_costs(tmp_path: Any) -> None:
    step = made("zero_bubble", 8, fzero.comms.AbstractAxis.of(Mesh.of(pipe=STAGES, data=DATA)))
    planned = step.explain(batch(8, "meta"))
    assert isinstance(planned, PipelinePlan)
    assert (planned.order.name, planned.bounds, planned.layers.data) == (
        "zero bubble",
        (0, 4, 8, 12, 16),
        DATA,
    )
    assert "4 stages × 2 data ranks = 8 ranks, 8 micro-batches" in str(planned) and "Bubble" in str(
        planned
    )
    assert (
        planned.bubble
        < made("1f1b", 8, fzero.comms.AbstractAxis.of(step.mesh)).explain(batch(8)).bubble
    )  # type: ignore[union-attr]
    (axes,) = planned.draw().axes
    # and its reduce
    assert len(axes.patches) == sum(
        len(planned.order.compute(stage)) + 1 for stage in range(STAGES)
    )
    with pytest.raises(ValueError, match="explain: needs a batch"):
        step.explain()
    with pytest.raises(ValueError, match="trace: a pipeline runs in no graph"):
        step.trace(batch(8))


def test_recomputed_blocks_store_their_inputs_and_take_a_forward_more() -> None:
    mesh = fzero.comms.AbstractAxis.of(Mesh.of(pipe=STAGES, data=DATA))
    without, planned = (
        made("1f1b", 4, mesh, interval=interval).explain(batch(4)) for interval in (0, 2)
    )
    assert (
        isinstance(planned, PipelinePlan)
        and isinstance(without, PipelinePlan)
        and planned.checkpoints
    )
    assert planned.timeline.stored[3] == ROWS * WIDTH * 4 * 2  # two inputs
    # and the loss
    assert planned.timeline.stored[3] < without.timeline.stored[3] == ROWS * WIDTH * 4 * 3 * 4 + 4
    costs = zip(planned.timeline.costs, without.timeline.costs, strict=True)
    assert all(
        again.backward == pytest.approx(once.backward + once.forward) for again, once in costs
    )


def test_a_module_is_planned_as_it_is_explained() -> None:
    step = made("1f1b", 8, fzero.comms.AbstractAxis.of(Mesh.of(pipe=STAGES, data=DATA)))
    explained: Any = step.explain(batch(8))
    model = step.spec.model
    planned = plan_pipeline(
        model,
        config(8),
        stages=STAGES,
        world_size=STAGES * DATA,
        batch=batch(1),
        bounds=model.parts,
        device="cpu",
    )  # type: ignore[arg-type]
    assert planned.as_dict() == explained.as_dict()


def test_a_sent_block_is_freed_when_the_order_says_that_it_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else every output of a step would be in memory at its end."""
    blocks = list[weakref.ref[Tensor]]()
    most, start_send = [0], collectives.start_send

    def watched(x: Tensor, target: int, axis: Any, **kwargs: Any) -> Any:
        if axis.rank == 0:
            blocks.append(weakref.ref(x))
            most[0] = max(most[0], sum(block() is not None for block in blocks))
        return start_send(x, target, axis, **kwargs)

    monkeypatch.setattr(collectives, "start_send", watched)
    ranks = fzero.simulate(
        made("1f1b", 12, fzero.comms.AbstractAxis.of(Mesh.of(pipe=STAGES, data=1))), by="lockstep"
    )
    ranks(ranks.init(), tuple(part[None] for part in batch(12)))
    assert len(blocks) >= 12
    assert most[0] <= STAGES + 1  # those whose backward has not come, and the one that is made


def test_messages_may_be_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two mailboxes of one message, on a pretended device; NCCL itself has not run."""
    sent = dict[int, deque[Tensor]]()
    up = fzero.comms.AbstractAxis("pipe", 2), fzero.comms.AbstractAxis("pipe", 2, rank=1)

    def start_send(x: Tensor, target: int, axis: Any, *, label: Any) -> Pending:
        sent.setdefault(target, deque()).append(x)
        return ended(x, label)

    def start_receive(x: Tensor, source: int, axis: Any, *, label: Any) -> Pending:
        return Pending(label, (), lambda: x.copy_(sent[axis.rank].popleft()))

    monkeypatch.setattr(collectives, "start_send", start_send)
    monkeypatch.setattr(collectives, "start_receive", start_receive)
    with PretendedCuda():
        device: Any = torch.device("cuda", 0)
        first, second = (Mailbox(Links(axis, axis), device) for axis in up)  # type: ignore[arg-type]
        for numel in (4, 4000, 4000):
            tree = {
                "x": torch.arange(float(numel), device=device),
                "ids": (torch.arange(3, device=device), 7),
            }
            second.expect([Expected(Message(Route("output", 0), 0, 0), 0)])
            first.send(Message(Route("output", 0), 0, 1), tree)
            received = second.receive(Message(Route("output", 0), 0, 0))
            found = received.filled(received.tensors)
            first.end()
            assert found["x"].is_cuda and torch.equal(found["x"].cpu(), torch.arange(float(numel)))
            assert found["ids"][1] == 7 and found["ids"][0].dtype == torch.int64
