"""`fzero.sequence.ulysses`: ranks that share sequences train as one rank that has them
whole.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import divided
import pytest
import torch
import torch.nn.functional as F
from divided import HEADS, LM, MESH, SAMPLES, WIDTH, Curve, Encoder, check, in_fp64, trained
from ranks import RankPool
from torch import Tensor, nn

import fzero
from fzero.comms.records import CommRecord
from fzero.comms.stacked import Stacked, StackedAxis
from fzero.config.config import ConfigError
from fzero.sequence import ulysses
from fzero.sequence.exchange import num_sent
from sharding import Mesh

EVEN, UNEVEN = 8, 7


def expected(length: int) -> Curve:
    return divided.plain(in_fp64(LM), divided.mean_of_tokens(length))


# --- training -------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("length", [EVEN, UNEVEN])
@pytest.mark.parametrize("by", ["lockstep", "vmap"])
@pytest.mark.parametrize("stage", range(4))
def test_simulated_ranks_that_share_sequences_train_as_a_plain_loop(
    stage: int, by: Any, length: int
) -> None:
    ranks = fzero.simulate(divided.make(in_fp64(LM), stage), by=by)
    batch_of = lambda number: divided.of_all_ranks(divided.batch(number, length))  # noqa: E731
    check(trained(ranks, batch_of), expected(length))


def _on_ranks(stage: int, length: int, **how: Any) -> Curve:
    step = divided.make(in_fp64(LM), stage, simulates=False, **how)
    return trained(
        step,
        lambda number: divided.rows(divided.batch(number, length), *fzero.sequence.batch_of(step)),
    )


@pytest.mark.parametrize(("stage", "length"), [(0, EVEN), (1, UNEVEN), (2, EVEN), (3, UNEVEN)])
def test_real_ranks_that_share_sequences_train_as_a_plain_loop(
    ranks: RankPool, stage: int, length: int
) -> None:
    for found in ranks(4, _on_ranks, stage, length):
        check(found, expected(length))


def _in_blocks(
    kind: Any, stage: int, length: int, every: int | None
) -> tuple[Curve, Counter[str], int]:
    records: list[CommRecord] = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    how: dict[str, Any] = {"compile": "block", "compile_backend": "aot_eager", "checkpoint": every}
    step = divided.make(in_fp64(kind), stage, simulates=False, **how).observed(records.append)
    pads = kind is Encoder
    curve = trained(
        step,
        lambda number: divided.rows(
            divided.batch(number, length, pads=pads), *fzero.sequence.batch_of(step)
        ),
    )
    phases = Counter(each.label.phase for each in records if each.label.purpose == "heads")
    return curve, phases, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("stage", "length"), [(3, UNEVEN), (1, EVEN)])
def test_a_captured_step_of_ranks_that_share_sequences_trains_as_a_plain_loop(
    ranks: RankPool, stage: int, length: int
) -> None:
    how = {"compile": "step", "compile_backend": "aot_eager"}
    for found in ranks(4, _on_ranks, stage, length, **how):
        check(found, expected(length))


@pytest.mark.parametrize(
    ("kind", "stage", "length", "every"),
    [(LM, 3, UNEVEN, 1), (Encoder, 0, EVEN, None)],
)
def test_compiled_blocks_of_ranks_that_share_sequences_train_as_a_plain_loop(
    ranks: RankPool, kind: Any, stage: int, length: int, every: int | None
) -> None:
    found = ranks(4, _in_blocks, kind, stage, length, every)
    pads = kind is Encoder
    plain = divided.plain(in_fp64(kind), divided.mean_of_tokens(length, pads=pads))
    for curve, phases, num_graphs in found:
        check(curve, plain)
        # exchanges are collectives of the step: they are observed, and report hangs
        num = divided.NUM_STEPS * len(in_fp64(kind)._modules["blocks" if kind is LM else "layers"])
        masks = num if pads else 0
        again = 2 * num if every else 0
        assert phases == {"forward": 2 * num + masks + again, "backward": 2 * num}
        assert num_graphs > 0


def test_a_checkpointed_block_swaps_again_in_its_second_run() -> None:
    step = divided.make(in_fp64(LM), 3, checkpoint=1)
    ranks, sent = fzero.simulate(step, by="lockstep"), Counter[str]()
    ranks.steps[0] = ranks.steps[0].observed(lambda record: sent.update([record.label.purpose]))
    batch_of = lambda number: divided.of_all_ranks(divided.batch(number, UNEVEN))  # noqa: E731
    check(trained(ranks, batch_of), expected(UNEVEN))
    # a forward, a second one and a backward of two all-to-alls, in each of 3 blocks
    assert sent["heads"] == 3 * 2 * 3 * divided.NUM_STEPS


@pytest.mark.parametrize(
    ("mesh", "micro_steps"), [(Mesh.of(data=1, seq=4), 1), (Mesh.of(data=2, seq=2), 2)]
)
def test_micro_batches_and_groups_of_all_ranks_train_as_a_plain_loop(
    mesh: Mesh, micro_steps: int
) -> None:
    cfg = divided.settings(
        2,
        train_batch_size=SAMPLES,
        train_micro_batch_size_per_gpu=SAMPLES // mesh.axis_size("data") // micro_steps,
    )
    step = fzero.make_train_step(
        in_fp64(LM),
        cfg,
        mesh=fzero.comms.AbstractAxis.of(mesh, backend="gloo"),
        transforms=[ulysses("seq")],
        loss_fn=divided.sum_and_count,
    )
    assert step.plan.num_micro_steps == micro_steps
    ranks = fzero.simulate(step, by="lockstep")
    batch_of = lambda number: divided.of_all_ranks(divided.batch(number, EVEN), mesh)  # noqa: E731
    check(trained(ranks, batch_of), expected(EVEN))


@pytest.mark.parametrize("length", [EVEN, UNEVEN])
def test_attention_to_both_sides_does_not_see_padding(length: int) -> None:
    made = partial(LM, is_causal=False)
    ranks = fzero.simulate(divided.make(in_fp64(made), 1), by="lockstep")
    batch_of = lambda number: divided.of_all_ranks(divided.batch(number, length))  # noqa: E731
    oracle = divided.plain(in_fp64(made), divided.mean_of_tokens(length))
    check(trained(ranks, batch_of), oracle)


def test_pytorchs_encoder_gets_the_padding_of_all_parts() -> None:
    step = divided.make(in_fp64(Encoder), 3, transforms=[ulysses("seq", pad={"kept": 0})])
    ranks = fzero.simulate(step, by="lockstep")
    batch_of = lambda number: divided.of_all_ranks(  # noqa: E731
        divided.batch(number, UNEVEN, pads=True)
    )
    oracle = divided.plain(in_fp64(Encoder), divided.mean_of_tokens(UNEVEN, pads=True))
    check(trained(ranks, batch_of), oracle)


def test_an_evaluation_is_that_of_the_whole_sequence() -> None:
    whole, model = divided.batch(0, UNEVEN), in_fp64(LM)
    losses, count = divided.sum_and_count(model, divided.shifted(whole))
    ranks = fzero.simulate(divided.make(model, 3), by="lockstep")
    found = ranks.evaluate(ranks.init(), divided.of_all_ranks(whole))
    torch.testing.assert_close(found, (losses / count).float().detach())


# --- attention over parts -------------------------------------------------------------------------


def _parts(whole: Tensor, size: int) -> Tensor:
    return torch.stack(whole.chunk(size, -2))


@pytest.mark.parametrize(
    ("num_heads", "num_keys", "size"), [(4, 4, 2), (4, 2, 2), (4, 1, 4), (8, 2, 4), (12, 2, 3)]
)
@pytest.mark.parametrize("mask", ["none", "causal", "whole", "of heads", "keys"])
def test_attention_over_parts_is_attention_over_the_whole(
    num_heads: int, num_keys: int, size: int, mask: str
) -> None:
    torch.manual_seed(0)
    length, ranks = 2 * size, Stacked(size)
    query, key, value = (
        torch.randn(2, n, length, 3, dtype=torch.float64, requires_grad=True)
        for n in (num_heads, num_keys, num_keys)
    )
    masks = {
        "none": None,
        "causal": None,
        "whole": torch.rand(length, length) > 0.3,
        "of heads": torch.randn(1, num_heads, length, length, dtype=torch.float64),
        "keys": torch.rand(2, 1, 1, length) > 0.3,
    }
    given, how = masks[mask], {"is_causal": mask == "causal", "enable_gqa": True}
    if given is not None and given.dtype == torch.bool:
        given[..., 0] = True  # each query has a key
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=given, **how)
    axis = StackedAxis(size, name="seq", ranks=ranks)

    def on_rank(*own: Any) -> Tensor:
        q, k, v, *rest = own
        part = rest[0] if rest else None if mask in ("none", "causal") else given
        return fzero.sequence.attend(q, k, v, part, axis=axis, **how)

    parts = [_parts(x, size) for x in (query, key, value)]
    if mask == "keys":
        assert given is not None
        parts.append(torch.stack(given.chunk(size, -1)))
    found = ranks.map(on_rank)(*parts)
    torch.testing.assert_close(found, _parts(expected, size), atol=1e-12, rtol=1e-12)
    weights = torch.randn_like(expected)
    inputs = (query, key, value)
    grads = torch.autograd.grad((expected * weights).sum(), inputs)
    own = torch.autograd.grad((found * _parts(weights, size)).sum(), inputs)
    torch.testing.assert_close(own, grads, atol=1e-12, rtol=1e-12)


# --- plan, records, explain -----------------------------------------------------------------------


def _sent(length: int) -> list[CommRecord]:
    records: list[CommRecord] = []
    step = divided.make(in_fp64(LM), 3, simulates=False).observed(records.append)
    whole = divided.rows(divided.batch(0, length), *fzero.sequence.batch_of(step))
    step(step.init(), whole)
    return [record for record in records if record.label.purpose == "heads"]


def test_records_and_explain_count_the_all_to_alls(ranks: RankPool) -> None:
    of_one = num_sent((2, HEADS, EVEN // 2, WIDTH // HEADS), num_keys=HEADS, size=2)
    for records in ranks(4, _sent, EVEN):
        assert {(each.collective, each.axis) for each in records} == {("all_to_all", "seq")}
        phases = Counter[str]()
        for each in records:
            phases[each.label.phase] += each.num_elements
        assert phases == {"forward": 3 * of_one, "backward": 3 * of_one}
    step = divided.make(in_fp64(LM), 3)
    captured = step.trace(divided.rows(divided.batch(0, EVEN), 0, 2))
    traced = [each for graph in captured for each in graph.sent() if each.axis == "seq"]
    assert sum(each.num_elements for each in traced) == 6 * of_one
    assert {each.label.purpose for each in traced} == {"heads"}
    assert "along seq" in str(step.explain(divided.rows(divided.batch(0, EVEN), 0, 2)))


def test_the_state_is_sharded_over_all_ranks_of_both_axes() -> None:
    how: dict[str, Any] = {"cfg": divided.settings(3), "model": in_fp64(LM)}
    both, data = (fzero.plan(mesh=mesh, **how) for mesh in (MESH, Mesh.of(data=4)))
    assert both.bytes_per_rank == data.bytes_per_rank
    assert both.sent_per_step == data.sent_per_step
    assert "data 2 × seq 2" in str(both)
    assert "share the tokens" in " ".join(str(both).split())


# --- errors ---------------------------------------------------------------------------------------


def _raises(message: str, whole: dict[str, Any] | None = None, **how: Any) -> None:
    model = how.pop("model", LM)
    with pytest.raises((ValueError, KeyError, ConfigError), match=message) as caught:
        mesh = how.pop("mesh", MESH)
        ranks = fzero.simulate(divided.make(in_fp64(model), 1, mesh, **how), by="lockstep")
        whole = divided.batch(0, EVEN) if whole is None else whole
        ranks(ranks.init(), divided.of_all_ranks(whole, mesh))
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert message != "labels" or "shift_labels" in notes


def _mean(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return divided.sum_and_count(model, batch)[0]


def _by_labels(model: nn.Module, batch: dict[str, Any]) -> Any:
    return batch["labels"].sum(), 1


def _twice(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    logits, labels = model(batch["input_ids"], batch["position_ids"]), batch["shift_labels"]
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return losses, (labels[:, 1:] != divided.IGNORED).sum()


class Counting(LM):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return super().forward(tokens, torch.arange(tokens.shape[1])[None])


class Convolving(LM):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)


class Weighing(Encoder):
    def forward(self, tokens: Tensor, positions: Tensor, kept: Any = None) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.layers[0].self_attn(x, x, x)[0])


class Masked(LM):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)[:, None]
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        return self.head(F.scaled_dot_product_attention(*[x.expand(-1, 4, -1, -1)] * 3, mask)[:, 0])


def test_what_would_be_wrong_is_refused_by_name() -> None:
    whole = divided.batch(0, EVEN)
    _raises("must divide the heads", mesh=Mesh.of(data=1, seq=3))
    _raises(r"must return \(sum, weight\)", loss_fn=_mean)
    _raises("labels", loss_fn=_by_labels)
    _raises("must not shift", loss_fn=_twice)
    _raises("next tokens already", {**whole, "labels": whole["input_ids"].roll(-1, 1)})
    _raises("positions of its tokens", model=Counting)
    _raises("by attention alone", model=Convolving)
    _raises("need_weights=False", model=Weighing)
    _raises("attn_mask must be of the whole", model=Masked)
    _raises("loss_fn: must be given", loss_fn=None)
    _raises("or the value of padding", {**divided.batch(0, UNEVEN, pads=True)}, model=Encoder)
    _raises("only with a transform", transforms=[])
    with pytest.raises(ValueError, match="must follow 'data'"):
        fzero.plan(in_fp64(LM), {}, mesh=Mesh.of(seq=2, data=2))
    with pytest.raises(ValueError, match="axis must be 'seq'"):
        ulysses("data")


def test_a_forward_outside_of_the_loss_is_refused_unless_the_caller_divides() -> None:
    ranks = fzero.simulate(divided.make(in_fp64(LM), 1), by="lockstep")
    state, step = ranks.init(), ranks.steps[0]
    whole = divided.batch(0, EVEN)
    call = lambda: step.runtime.spec.model(whole["input_ids"], whole["position_ids"])  # noqa: E731
    own = ranks.states_of(state)
    with pytest.raises(ValueError, match="splits=False"):
        step.inspect(own[0], call)


def _other_batches() -> str:
    step = divided.make(in_fp64(LM), 1, simulates=False)
    try:
        step(step.init(), divided.rows(divided.batch(step.rank, EVEN), 0, 2))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_of_one_group_with_other_batches_are_told_so(ranks: RankPool) -> None:
    for found in ranks(4, _other_batches):
        assert "must have the same batch" in found
        assert "batch_of" in found
