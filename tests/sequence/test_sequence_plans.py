"""Plans of ranks that share sequences: what they send, what they hold, and that they
wait for each other in the same places.
"""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import divided
import pytest
from alive import most_alive
from divided import HEADS, LM, MESH, WIDTH, Encoder, in_fp64, settings, sum_and_count
from ranks import RankPool

import fzero
from fzero.cli.plan_profile import plan_model
from fzero.comms.records import CommRecord
from fzero.estimation import compare_plans, fit, plan_for
from fzero.estimation.activation_trace import trace_activations
from fzero.estimation.dry_run import dry_run
from fzero.estimation.models import named, sample_of
from fzero.plans.schedule_check import check_schedules
from fzero.plans.unit_orders import Event, ScheduleError
from fzero.runtime.sequencer import Sequencer
from fzero.sequence import ulysses
from fzero.sequence.exchange import num_sent
from sharding import Mesh

LENGTH = 8
LLAMA = "LlamaForCausalLM,num_hidden_layers=2,hidden_size=64,intermediate_size=256,vocab_size=512"
SHARED: dict[str, Any] = {"transforms": [ulysses("seq")], "loss_fn": sum_and_count}


# --- what is sent ---------------------------------------------------------------------------------


def _sent_and_planned(kind: Any, length: int, more: dict[str, Any]) -> tuple[Any, Any, Any]:
    """What a second step sends along "seq" by collective, in elements and bytes; what
    its plan says; and the seconds-free dry run.
    """
    records: list[CommRecord] = []
    cfg = settings(3, **more)
    step = fzero.make_train_step(in_fp64(kind), cfg, mesh=MESH, **SHARED).observed(records.append)
    num = step.plan.num_micro_steps
    whole = divided.rows(divided.batch(0, length, pads=kind is Encoder), step.rank // 2, 2)
    state, _ = step(step.init(), whole)
    records.clear()
    step(state, whole)
    found: dict[str, int] = {}
    nbytes = 0
    for each in (
        each for each in records if each.axis == "seq" and each.label.purpose != "compare"
    ):
        name = f"{each.collective} of activations"
        found[name] = found.get(name, 0) + each.num_elements
        nbytes += each.nbytes
    one = divided.rows(whole, 0, num)
    plan = plan_for(step, one)
    trace = trace_activations(
        step.spec.model, cfg, one, loss_fn=sum_and_count, changes=step.spec.changes, seq_size=2
    )
    sent = dry_run(plan, trace).timeline.sent_by_axis["seq"]
    return (found, nbytes), (plan.sent_by_axis["seq"], plan.sent_nbytes_by_axis["seq"]), sent


@pytest.mark.parametrize(
    ("kind", "length", "more"),
    [
        (LM, 8, {}),
        (LM, 7, {"gradient_accumulation_steps": 2}),
        (LM, 8, {"activation_checkpointing": {"every": 1}}),
        (Encoder, 8, {}),
    ],
    ids=["plain", "accumulated, uneven", "checkpointed", "masks of keys"],
)
def test_a_plan_for_a_batch_counts_what_ranks_send_along_seq(
    ranks: RankPool, kind: Any, length: int, more: dict[str, Any]
) -> None:
    for (found, nbytes), (planned, planned_nbytes), dry in ranks(
        4, _sent_and_planned, kind, length, more
    ):
        assert planned == found
        assert sum(planned_nbytes.values()) == nbytes
        assert dry == nbytes


def test_the_plan_of_a_batch_has_the_all_to_alls_beside_what_it_has_without() -> None:
    step = divided.make(in_fp64(LM), 3)
    plan = plan_for(step, divided.rows(divided.batch(0, LENGTH), 0, 2))
    of_one = num_sent((2, HEADS, LENGTH // 2, WIDTH // HEADS), num_keys=HEADS, size=2)
    own = {"all_to_all of activations": 6 * of_one}
    assert plan.sent_per_step == step.plan.sent_per_step | own
    assert "along seq" in str(plan) and "plan_for" not in str(plan)
    assert "plan_for(step, batch)" in " ".join(str(step.plan).split())


# --- what is held ---------------------------------------------------------------------------------


def _alive(cfg: dict[str, Any], length: int) -> tuple[int, int]:
    whole = divided.rows(divided.batch(0, length), 0, 2)
    whole["position_ids"] = whole["position_ids"] % 64
    how = {"mesh": Mesh.of(data=1, seq=2), **SHARED}
    found = most_alive(in_fp64(LM), cfg, whole, **how)
    step = fzero.make_train_step(in_fp64(LM), cfg, **how)
    traced = trace_activations(
        step.spec.model,
        cfg,
        whole,
        loss_fn=sum_and_count,
        device="cpu",
        changes=step.spec.changes,
        seq_size=2,
    )
    return found, traced.nbytes


@pytest.mark.parametrize("every", [None, 1])
def test_planned_activations_of_a_part_are_those_that_a_running_step_makes(
    ranks: RankPool, every: int | None
) -> None:
    more = {} if every is None else {"activation_checkpointing": {"every": every}}
    for found, planned in ranks(2, _alive, settings(0, **more), 512):
        # a step also holds the rank's part of the batch, and its weight
        assert found == pytest.approx(planned, rel=0.03)


def test_ranks_that_share_a_sequence_are_planned_with_their_part_of_it() -> None:
    """Twice the ranks for twice the length: the same activations, and one more thing to
    send.
    """
    batch = divided.rows(divided.batch(0, 64), 0, 2)
    long = divided.rows(divided.batch(0, 128), 0, 2)
    shared = {"mesh": Mesh.of(data=1, seq=2), "world_size": 2, **SHARED}
    model = in_fp64(LM)
    loss_fn = lambda model, batch: sum_and_count(model, divided.shifted(batch))  # noqa: E731
    one = compare_plans(model, settings(3), batch=batch, loss_fn=loss_fn)["stage 3"]
    two = compare_plans(model, settings(3), batch=long, **shared)["stage 3"]
    # in fp64 scores of (128, 128) of half of the heads are twice those of (64, 64) of all
    assert two.activations < 1.5 * one.activations
    assert (
        two.activations
        < compare_plans(model, settings(3), batch=long, loss_fn=loss_fn)["stage 3"].activations
        / 1.8
    )
    assert two.sent_by_axis["seq"] > 0 and "seq" not in one.sent_by_axis
    assert two.tokens == 2 * one.tokens
    assert two.step.timeline.sent_by_axis["seq"] == two.sent_by_axis["seq"]
    with pytest.raises(ValueError, match="only with a transform that divides"):
        compare_plans(model, settings(3), world_size=2, mesh=shared["mesh"])


def test_what_fits_on_ranks_that_share_sequences_has_their_batch_and_their_transform() -> None:
    model = named(f"{LLAMA},num_attention_heads=4,num_key_value_heads=1").model
    shared = {"mesh": MESH, "world_size": 4, "transforms": [ulysses("seq")]}
    shared["batch"] = sample_of(model, 4, 4096)
    roomy = fit(model, settings(0), device_nbytes=1e12, **shared)
    assert roomy.transforms == tuple(shared["transforms"])
    # four samples on each of two groups
    assert roomy.config["train_batch_size"] == 8
    least = min(rung.nbytes("device") for rung in roomy.ladder)
    tight = fit(model, settings(0), device_nbytes=1.05 * least, **shared)
    assert type(tight.transforms[0]).__name__ == "Ulysses"
    assert len(tight.transforms) > 1 and "fzero.sequence.ulysses('seq'), " in str(tight)
    assert tight.best.sent_by_axis["seq"] > roomy.best.sent_by_axis["seq"]  # checkpoints


def _cli(capsys: pytest.CaptureFixture[str], words: str) -> Any:
    assert plan_model([*words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_line_plans_ranks_that_share_sequences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"--model {LLAMA}"
    found = _cli(capsys, f"{words} --sequence 4096 --seq 2")
    plain = _cli(capsys, f"{words} --sequence 2048")
    assert found["mesh"] == {"data": 1, "seq": 2}
    two, one = (each["configurations"][0] for each in (found, plain))
    assert two["bytes"]["device"]["activations"] == pytest.approx(
        one["bytes"]["device"]["activations"], rel=0.05
    )
    # per layer queries, keys, values and results, in bf16, there and in the backward
    assert two["sent"]["seq"] == 2 * 2 * 2 * (4 * 64) * 2048 // 2
    best = _cli(capsys, "--model 30M --sequence 4096 --seq 3 --fit 1GB")["best"]
    assert best["sent"]["seq"] > 0
    with pytest.raises(SystemExit):
        plan_model(["--model", "30M", "--sequence", "4096", "--world", "3", "--seq", "2"])
    assert "--seq must divide the --world of 3 ranks" in capsys.readouterr().err


# --- the checker ----------------------------------------------------------------------------------


def _schedule(stage: int) -> tuple[list[Event], Any]:
    """The events of a rank's second step, with its exchanges among them."""
    events: list[Event] = []
    execute = Sequencer.execute

    def executed(work: Any, found: Any) -> None:
        events.extend(found)
        execute(work, found)

    def note(record: CommRecord) -> None:
        if record.axis == "seq" and record.label.purpose == "heads":
            events.append(Event("exchange", "seq"))

    step = divided.make(in_fp64(LM), stage, simulates=False).observed(note)
    whole = divided.rows(divided.batch(0, LENGTH), *fzero.sequence.batch_of(step))
    with patch.object(Sequencer, "execute", executed):
        state, _ = step(step.init(), whole)
        events.clear()
        step(state, whole)
    return events, step.plan.unit_rules


@pytest.mark.parametrize("stage", [0, 3])
def test_the_checker_knows_the_exchanges_of_ranks_that_share_samples(
    ranks: RankPool, stage: int
) -> None:
    schedules, rules = zip(*ranks(4, _schedule, stage), strict=True)
    exchanges = [event.kind for event in schedules[0]].count("exchange")
    assert exchanges == 3 * 2 * 2  # blocks, there and back, forward and backward
    check_schedules(schedules, rules[0], seq_size=2)
    place = next(n for n, event in enumerate(schedules[3]) if event.kind == "exchange")
    less = [*schedules[:3], [*schedules[3][:place], *schedules[3][place + 1 :]]]
    check_schedules(less, rules[0])
    with pytest.raises(ScheduleError, match=r"'exchange seq' on rank 2 and .* on rank 3"):
        check_schedules(less, rules[0], seq_size=2)
