"""The laws of steps with comm hooks: the same numbers on every rank and in every stage,
and the bytes that were counted.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import optree
import pytest
import torch
from hypothesis import given, strategies as st
from profiles import examples
from ranks import RankError, RankPool
from test_codecs import codecs
from test_compiled import AOT, SGD, Short
from test_meshes import MESHES, SQUARE, config_of, given_mesh
from test_simulate import CASES, assert_same, for_ranks
from torch import Tensor
from torch.fx import Graph
from training import ADAMW, Odd, Plain, config, make, part, tokens, vectors

import fzero
from fzero import comms
from fzero.comms.codecs import Codec
from fzero.comms.comm_hooks import CommHook
from fzero.config.config import ConfigError
from fzero.graph.analysis import analyse
from fzero.graph.liveness import liveness
from fzero.graph.traffic import sent_in
from fzero.simulation import LockstepRanks, stacked
from fzero.storage.shard_transfer import own_shard
from sharding import Mesh, Sharded
from sharding.views import flatten

Q8, Q4, HALF = (
    fzero.comms.compressed(fzero.comms.quantize(8, 32)),
    fzero.comms.compressed(fzero.comms.quantize(4, 32)),
    fzero.comms.compressed(fzero.comms.cast("bfloat16")),
)
FEEDBACK = fzero.comms.error_feedback(Q4)
LOCO = fzero.comms.reset_every(fzero.comms.error_feedback(Q4, decay=0.8), every=2)
PLUS_PLUS = {
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zeropp_loco_param": {"reset_T": 2},
}

WIRES: dict[str, Mapping[str, Any]] = {
    "zero++": {"gather_hook": Q8, "reduce_hook": Q4},
    "loco": {"gather_hook": Q8, "reduce_hook": LOCO},
    "cast": {"gather_hook": HALF, "reduce_hook": HALF},
    "reductions": {"reduce_hook": LOCO},
    "by axis": {"reduce_hook": {"data": FEEDBACK, "node": Q8}},
    "exact within": {"reduce_hook": {"node": FEEDBACK}},
}


def simulated(
    stage: int | str,
    mesh: Mesh,
    model: Any = Odd,
    *,
    observe: Any = None,
    options: Mapping[str, Any] = {},
    **keys: Any,
) -> LockstepRanks:
    mode = stage if isinstance(stage, str) else f"hybrid {stage}"
    step = fzero.make_train_step(
        make(model),
        config_of(mode, mesh) | keys,
        mesh=fzero.comms.AbstractAxis("data", mesh.size, mesh=given_mesh(mode, mesh)),
        **options,
    )
    return LockstepRanks(step.spec, mesh.size, observe, mesh=given_mesh(mode, mesh))


def run(ranks: LockstepRanks, data: Any, num_steps: int = 3) -> tuple[list[fzero.Metrics], Any]:
    state, curve = ranks.init(), []
    for index in range(num_steps):
        state, metrics = ranks(state, for_ranks(data(index), ranks.world_size))
        curve.append(metrics)
    return curve, state


# --- on real processes ----------------------------------------------------------------------------


def _on_a_rank(case: str, mode: str, mesh: Mesh, hooks: str) -> tuple[Any, list[fzero.Metrics]]:
    model, data, keys, options = CASES[case]
    cfg = config_of(mode, mesh) | {"optimizer": ADAMW} | keys
    step = fzero.make_train_step(
        make(model), cfg, mesh=given_mesh(mode, mesh), **options, **WIRES[hooks]
    )
    state, curve = step.init(), []
    for index in range(3):
        state, metrics = step(state, part(data(index), step.rank, step.world_size))
        curve.append(metrics)
    return state, curve


ONE = Mesh.of(data=3)
COMBINATIONS = [
    *(("odd", "hybrid 3", ONE, hooks) for hooks in ("zero++", "loco", "cast")),
    *(("odd", f"hybrid {stage}", ONE, "reductions") for stage in range(3)),
    *(
        (case, "hybrid 3", ONE, "loco")
        for case in ("noisy", "checkpointed", "bf16", "overflows", "negotiated")
    ),
    *(("odd", mode, SQUARE, "by axis") for mode in ("hybrid 0", "hybrid 1", "mics 3", "hpz 3")),
    ("odd", "mics 3", SQUARE, "exact within"),
    ("bf16", "hpz 3", SQUARE, "loco"),
    ("muon", "mics 1", SQUARE, "by axis"),
]


@pytest.mark.covering(0)
@pytest.mark.parametrize(("case", "mode", "mesh", "hooks"), COMBINATIONS)
def test_comm_hooks_in_lockstep_have_the_bits_of_as_many_processes(
    ranks: RankPool, case: str, mode: str, mesh: Mesh, hooks: str
) -> None:
    model, data, keys, options = CASES[case]
    on_ranks = ranks(mesh.size, _on_a_rank, case, mode, mesh, hooks)
    in_turn = simulated(
        mode,
        mesh,
        model,
        options={**options, **WIRES[hooks]},
        **({"optimizer": ADAMW} | dict(keys)),
    )
    state = in_turn.init()
    for index in range(3):
        state, metrics = in_turn(state, for_ranks(data(index), mesh.size))
        assert_same(metrics, on_ranks[0][1][index])
    assert_same(state, stacked([of_rank for of_rank, _ in on_ranks]))


# --- the same numbers -----------------------------------------------------------------------------


@pytest.mark.covering(0)
@pytest.mark.parametrize("mesh", [ONE, SQUARE, MESHES["3x2"]], ids=str)
@pytest.mark.parametrize("hook", [Q4, LOCO, HALF], ids=lambda hook: hook.name)
def test_all_stages_give_the_same_bits_through_a_comm_hook(mesh: Mesh, hook: CommHook) -> None:
    of_stage = [simulated(stage, mesh, options={"reduce_hook": hook}) for stage in range(4)]
    first, *others = ((*run(ranks, tokens), ranks) for ranks in of_stage)
    for curve, state, ranks in others:
        assert_same(curve, first[0])
        assert_same(ranks.gather(state), first[2].gather(first[1]))
        assert_same(state.hook_states, first[1].hook_states)
    exact, _ = run(simulated(0, mesh), tokens)
    assert exact[0].loss == first[0][0].loss and exact[2].loss != first[0][2].loss


def test_the_sums_of_micro_steps_go_through_the_comm_hook_one_by_one_where_gradients_are_divided() -> (
    None
):
    keys = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2}
    of_stage = [
        run(simulated(stage, ONE, options={"reduce_hook": LOCO}, **keys), tokens)
        for stage in range(4)
    ]
    assert_same(of_stage[0][0], of_stage[1][0])
    assert_same(of_stage[2][0], of_stage[3][0])
    rounds = [
        next(iter(state.hook_states.values()))["data"].num_rounds.tolist() for _, state in of_stage
    ]
    assert rounds == [[3] * 3] * 2 + [[6] * 3] * 2


@pytest.mark.parametrize("mode", ["hybrid 1", "hybrid 3", "mics 3", "hpz 3"])
def test_exact_comm_hooks_are_none(mode: str) -> None:
    given = {"reduce_hook": fzero.comms.exact()} | (
        {"gather_hook": fzero.comms.exact()} if mode[-1] == "3" else {}
    )
    logs: list[list[Any]] = [[], []]
    runs = [
        run(
            simulated(
                mode,
                SQUARE,
                observe=lambda rank, sent, log=log: log.append((rank, sent)),
                options=options,
            ),
            tokens,
        )
        for log, options in zip(logs, ({}, given), strict=True)
    ]
    assert_same(runs[1], runs[0])
    assert Counter(logs[0]) == Counter(logs[1])


@pytest.mark.parametrize("hooks", ["zero++", "loco"])
def test_one_rank_sends_nothing_and_changes_nothing(hooks: str) -> None:
    log: list[Any] = []
    alone = simulated(
        3, Mesh.of(data=1), observe=lambda _, sent: log.append(sent), options=WIRES[hooks]
    )
    through, plainly = run(alone, tokens), run(simulated(3, Mesh.of(data=1)), tokens)
    assert_same(through, plainly)
    assert not log and not through[1].hook_states and not alone.plan.comm_hooks


@pytest.mark.parametrize("mode", ["hybrid 0", "hybrid 2", "mics 3", "hpz 3"])
def test_ranks_that_should_hold_the_same_do(mode: str) -> None:
    mesh, hooks = MESHES["3x2"], {"reduce_hook": {"data": Q4, "node": FEEDBACK}}
    in_turn = simulated(
        mode, mesh, options=hooks | ({"gather_hook": Q8} if mode[-1] == "3" else {})
    )
    _, state = run(in_turn, tokens, 2)
    for name in ("params", "optimizer"):
        specs = optree.tree_leaves(getattr(in_turn.specs, name))
        for rows, spec in zip(optree.tree_leaves(getattr(state, name)), specs, strict=True):
            by_shard: dict[int, Tensor] = {}
            for rank, row in enumerate(rows):
                shard = mesh.shard_of(rank, spec.spec) if isinstance(spec.spec, Sharded) else 0
                assert torch.equal(by_shard.setdefault(shard, row), row)


# --- as one graph, and as a dimension -------------------------------------------------------------

TWICE = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1}
NARROW = {"bf16": {"enabled": True, "auto_cast": True}, "communication_data_type": "fp32"}
GRAPHS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "hpz 3": ("hpz 3", {}, {"gather_hook": HALF}),
    "mics 1, twice": ("mics 1", TWICE, {"reduce_hook": {"node": FEEDBACK}}),
    "hybrid 3, narrow": ("hybrid 3", TWICE | NARROW, {"reduce_hook": LOCO, "gather_hook": Q8}),
}


def _sent_by_axis(log: list[fzero.comms.CommRecord]) -> Counter[str]:
    """Bytes of parameters and gradients: a graph's labels do not tell them from norms,
    which are fewer.
    """
    sent: Counter[str] = Counter()
    for record in log:
        sent[record.axis] += record.nbytes * (record.nbytes > 16)
    return sent


def _captured(case: str) -> tuple[Any, Any, Counter[str], dict[str, int]]:
    mode, keys, hooks = GRAPHS[case]
    cfg = config_of(mode, SQUARE) | {"optimizer": SGD, "gradient_clipping": 0.05} | keys
    found = []
    for options in ({}, AOT):
        log: list[fzero.comms.CommRecord] = []
        axis = replace(fzero.join(), observe=log.append, mesh=given_mesh(mode, SQUARE))
        step = fzero.make_train_step(make(Short), cfg, mesh=axis, **hooks, **options)
        state, curve = step.init(), []
        for index in range(2):
            log.clear()
            state, metrics = step(state, part(vectors(index, 8), step.rank, step.world_size))
            curve.append((metrics.loss.item(), metrics.grad_norm.item()))
        sent = _sent_by_axis(log)
        found.append((curve, step.gather(state), state.hook_states))
    planned = {name: sum(kinds.values()) for name, kinds in step.plan.sent_nbytes_by_axis.items()}
    return *found, sent, planned


@pytest.mark.covering(0)
@pytest.mark.parametrize("case", GRAPHS)
def test_a_captured_step_has_the_bits_of_the_eager_one_and_sends_the_bytes_of_the_plan(
    ranks: RankPool, case: str
) -> None:
    for in_turn, captured, sent, planned in ranks(4, _captured, case):
        assert_same(captured, in_turn)
        assert {name: sent[name] for name in planned} == planned


def _on_paper(**options: Any) -> tuple[fzero.TrainStep, Graph]:
    """A step of one rank of four, and its graph as it would run."""
    cfg = config(3, **options.pop("zero", {}))
    step = fzero.make_train_step(
        make(functools.partial(Plain, 16, 3)),
        cfg,
        mesh=fzero.comms.AbstractAxis("data", 4),
        **options,
    )
    (captured,) = step.trace(part(vectors(0), 0, 4))
    return step, captured.scheduled().graph


@pytest.mark.long
def test_a_graph_sends_codes_in_the_order_in_which_it_sends_numbers() -> None:
    """So reductions start beside the backward, and no unit's full gradient waits for
    the end of it.
    """
    graphs = [_on_paper(**hooks)[1] for hooks in ({}, {"gather_hook": Q8, "reduce_hook": LOCO})]
    exact, coded = ([sent.label for sent in sent_in(graph, {})] for graph in graphs)
    assert coded == exact
    assert liveness(graphs[1]).peak_gathered_numel <= liveness(graphs[0]).peak_gathered_numel


@pytest.mark.long
@pytest.mark.parametrize(
    ("hook", "bucket"),
    [
        (Q8, {}),
        (fzero.comms.compressed(fzero.comms.quantize(4, 6)), {"allgather_bucket_size": 10**6}),
        (HALF, {}),
    ],
    ids=["8 bits", "4 bits, joined", "cast"],
)
def test_a_graph_decodes_at_most_two_units_at_a_time_and_encodes_them_again_for_the_backward(
    hook: CommHook, bucket: dict[str, int]
) -> None:
    step, graph = _on_paper(gather_hook=hook, zero=bucket)
    _, exact = _on_paper(zero=bucket)
    found, meant = analyse(graph), analyse(exact)
    assert Counter((g.unit, g.numel) for g in found.gathers) == Counter(
        (g.unit, g.numel) for g in meant.gathers
    )
    *_, second, largest = sorted(unit.gathered_numel for unit in step.plan.units)
    # The next unit is there as codes only, which count where numbers travel as they are.
    assert (
        largest
        <= liveness(graph).peak_gathered_numel
        <= liveness(exact).peak_gathered_numel
        <= largest + second
    )
    where = {node: place for place, node in enumerate(graph.nodes)}
    stays = [
        (where[gather.issue[0]], max(where[user] for node in gather.settle for user in node.users))
        for gather in found.gathers
    ]
    assert all(
        sum(first <= place <= last for first, last in stays) <= 2 for place in range(len(where))
    )


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("mode", "mesh"),
    [("hybrid 0", ONE), ("hybrid 3", ONE), ("mics 1", SQUARE), ("hpz 3", MESHES["3x2"])],
)
def test_ranks_as_a_dimension_are_those_in_lockstep_to_rounding(mode: str, mesh: Mesh) -> None:
    hooks = {"reduce_hook": LOCO} | ({"gather_hook": Q8} if mode[-1] == "3" else {})
    data = functools.partial(tokens, size=2 * mesh.size)
    for keys in ({}, TWICE):
        in_turn = simulated(mode, mesh, options=hooks, **keys)
        at_once = fzero.simulate(in_turn.steps[0], mesh=mesh, by="vmap")
        (*_, expected), state = run(in_turn, data, 2)
        (*_, found), other = run(at_once, data, 2)
        # Batched products round otherwise, and a number that is rounded to the next code differs by
        # 1 / 7 of its block's largest.
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-3, atol=0)
        torch.testing.assert_close(found.grad_norm, expected.grad_norm, rtol=1e-2, atol=0)
        for x, y in zip(
            optree.tree_leaves(other.hook_states),
            optree.tree_leaves(state.hook_states),
            strict=True,
        ):
            assert (x - y).double().norm() <= 0.1 * y.double().norm()


# --- errors ---------------------------------------------------------------------------------------


@given(codecs(), st.integers(2, 4), st.integers(3, 20))
@examples(25)
def test_the_model_sees_parameters_within_the_bound_of_the_codec_the_same_on_every_rank_and_in_an_evaluation(
    codec: Codec, world_size: int, width: int
) -> None:
    seen: list[dict[str, Tensor]] = []

    def loss_of(model: Any, batch: Any) -> Tensor:
        seen.append({name: param.detach().clone() for name, param in model.named_parameters()})
        loss: Tensor = model(*batch)
        return loss

    model = functools.partial(Plain, width, 2)
    options = {"gather_hook": fzero.comms.compressed(codec), "loss_fn": loss_of}
    in_turn = simulated(3, Mesh.of(data=world_size), model, options=options)
    state, data = in_turn.init(), for_ranks(vectors(0, 2 * world_size, width), world_size)
    in_turn.evaluate(state, data)
    exact = in_turn.gather(state)
    for buffer in in_turn.plan.flat_buffers:
        flat = flatten({name: exact[name] for name in buffer.layout.names}, buffer.layout)
        bound = codec.bound(flat.view(world_size, -1)).flatten()
        for found in seen:
            arrived = flatten({name: found[name] for name in buffer.layout.names}, buffer.layout)
            inside = slice(0, buffer.layout.numel)
            assert ((arrived.double() - flat.double()).abs() <= bound)[inside].all()
    evaluated = seen[0]
    in_turn(state, data)
    assert len(seen) == 2 * world_size
    for found in seen:
        assert_same(found, evaluated)


@given(
    codecs(),
    st.sampled_from([Mesh.of(data=2), Mesh.of(data=3), SQUARE, MESHES["3x2"]]),
    st.sampled_from([0, 2, 3]),
)
@examples(25)
def test_the_mean_gradient_is_within_the_bounds_of_what_was_sent(
    codec: Codec, mesh: Mesh, stage: int
) -> None:
    """Along each axis what every rank sends errs by its own bound, of what it then is:
    the exact sum and the errors so far.
    """
    keys = {"gradient_clipping": 0.0}
    coded = simulated(
        stage, mesh, Plain, options={"reduce_hook": {"data": fzero.comms.compressed(codec)}}, **keys
    )
    batch, model = vectors(0, 2 * mesh.size), make(Plain)
    names = [name for name, _ in model.named_parameters()]
    params = list(model.parameters())
    summands = [
        dict(
            zip(
                names,
                torch.autograd.grad(model(*part(batch, rank, mesh.size)), params),
                strict=True,
            )
        )
        for rank in range(mesh.size)
    ]
    state, _ = coded(coded.init(), for_ranks(batch, mesh.size))
    size = mesh.axis_size("data")
    for buffer in coded.plan.flat_buffers:
        flats = [
            flatten({n: grads[n] / mesh.size for n in buffer.layout.names}, buffer.layout)
            for grads in summands
        ]
        meant = torch.stack(flats).double().sum(0)
        bound = sum(codec.bound(flat.view(size, -1)).flatten() for flat in flats)
        # Sums in fp32, of numbers that the division by the ranks has rounded.
        bound = bound + (mesh.size + 2) * 2**-24 * (
            torch.stack(flats).double().abs().sum(0) + bound
        )
        own = {coded.plan.mesh.shard_of(r, Sharded("data")): r for r in range(mesh.size)}
        rows = state.grads[buffer.key]
        found = torch.cat([own_shard(rows[own[shard]], buffer, shard) for shard in range(size)])
        assert ((found.double() - meant).abs() <= bound).all()


@pytest.mark.long
def test_feedback_brings_the_sum_of_gradients_near_the_exact_one() -> None:
    """With a fixed model (lr 0) all that arrives is all that was meant, but for the
    last errors; without it errors add up.
    """
    frozen = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "gradient_clipping": 0.0}

    def total(**options: Any) -> Tensor:
        ranks, summed = simulated(2, ONE, Plain, options=options, **frozen), torch.zeros(())
        state = ranks.init()
        for index in range(20):
            state, _ = ranks(state, for_ranks(vectors(index), 3))
            summed = summed + torch.cat([grads.flatten() for grads in state.grads.values()])
        return summed

    exact = total()
    far, near = ((total(reduce_hook=hook) - exact).norm() for hook in (Q4, FEEDBACK))
    assert near < far / 3


# --- bytes ----------------------------------------------------------------------------------------


def _sent(log: list[fzero.comms.CommRecord]) -> dict[str, Counter[str]]:
    """Bytes by axis, of what the plan tells: parameters and gradients."""
    by_axis: dict[str, Counter[str]] = {}
    for record in log:
        purpose = record.label.purpose
        if purpose in ("gather", "reduce", "all_gather_params"):
            by_axis.setdefault(record.axis, Counter())[purpose] += record.nbytes
    return by_axis


def _planned(plan: fzero.Plan) -> dict[str, Counter[str]]:
    purposes = {
        "all_gather in the forward": "gather", "all_gather in the backward": "gather",
        "reduce_scatter of gradients": "reduce", "all_reduce of gradients": "reduce",
        "all_gather of updated parameters": "all_gather_params",
    }  # fmt: skip
    by_axis: dict[str, Counter[str]] = {}
    for axis, sent in plan.sent_nbytes_by_axis.items():
        for collective, nbytes in sent.items():
            if nbytes:
                by_axis.setdefault(axis, Counter())[purposes[collective]] += nbytes
    return by_axis


def _counted_and_planned(mode: str, mesh: Mesh, hooks: str, keys: Mapping[str, Any]) -> Any:
    log: list[fzero.comms.CommRecord] = []
    axis = replace(fzero.join(), observe=log.append, mesh=given_mesh(mode, mesh))
    step = fzero.make_train_step(
        make(Plain), config_of(mode, mesh) | keys, mesh=axis, **WIRES.get(hooks, {})
    )
    state = step.init()
    for index in range(2):
        log.clear()
        state, _ = step(state, part(vectors(index, 24), step.rank, step.world_size))
    assert sum(step.plan.sent_nbytes_per_step.values()) == sum(
        sum(c.values()) for c in _planned(step.plan).values()
    )
    return _sent(log), _planned(step.plan)


BF16 = {"bf16": {"enabled": True, "auto_cast": True}}
TWO_MICRO_STEPS = {"train_batch_size": 24, "gradient_accumulation_steps": 2}


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("mode", "mesh", "hooks", "keys"),
    [
        *(
            (f"hybrid {stage}", ONE, "none", keys)
            for stage, keys in ((0, {}), (1, BF16), (3, TWO_MICRO_STEPS))
        ),
        *(
            (f"hybrid {stage}", ONE, "reductions", keys)
            for stage, keys in ((0, {}), (1, BF16), (2, TWO_MICRO_STEPS))
        ),
        *(
            ("hybrid 3", ONE, hooks, keys)
            for hooks, keys in (("zero++", {}), ("loco", TWO_MICRO_STEPS), ("cast", BF16))
        ),
        *((mode, SQUARE, "by axis", {}) for mode in ("hybrid 0", "mics 1", "mics 3", "hpz 3")),
        ("mics 3", SQUARE, "exact within", TWO_MICRO_STEPS),
    ],
)
def test_a_step_sends_the_bytes_that_the_plan_says(
    ranks: RankPool, mode: str, mesh: Mesh, hooks: str, keys: Mapping[str, Any]
) -> None:
    for counted, planned in ranks(mesh.size, _counted_and_planned, mode, mesh, hooks, keys):
        assert counted == planned and planned


def test_zero_plus_plus_sends_a_quarter_and_an_eighth_and_the_plan_says_so() -> None:
    exact, coded = (
        fzero.plan(make(functools.partial(Plain, 64)), config(3, **keys), world_size=4)
        for keys in ({}, {"zero_quantized_weights": True, "zero_quantized_gradients": True})
    )
    before, after = exact.sent_nbytes_per_step, coded.sent_nbytes_per_step
    assert coded.sent_per_step == exact.sent_per_step
    for collective, factor in (
        ("all_gather in the forward", 4),
        ("reduce_scatter of gradients", 8),
    ):
        # A block of 256 has a scale of four bytes, and a shard's last block may be shorter.
        assert factor / 1.2 < before[collective] / after[collective] < factor
    said = " ".join(str(coded).split())
    assert (
        "gathers along data through quantize(8, 256), reductions along data through quantize(4, "
        "256)" in said
    )
    assert f"{sum(after.values()):,}, without comm hooks {sum(before.values()):,}" in said
    assert "comm hooks" not in str(exact)


# --- overflows ------------------------------------------------------------------------------------


def _poisoned(index: int, batch: Any, rank: int) -> Any:
    """The batch of all ranks; at step 1 one rank's has an infinity."""
    x, y = (t.clone() for t in batch)
    if index == 1:
        x[rank, 0, 0] = float("inf")
    return x, y


SKIPS = [
    {"bf16": {"enabled": True, "check_grad_overflow": True}},
    {"fp16": {"enabled": True, "loss_scale": 8}},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("keys", SKIPS, ids=["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_overflow_on_one_rank_is_seen_by_all_and_gives_back_every_bit(
    stage: int, keys: Mapping[str, Any]
) -> None:
    in_turn = simulated(stage, ONE, Plain, options={"reduce_hook": LOCO}, **keys)
    dtype = torch.bfloat16 if "bf16" in keys else torch.float16
    state = in_turn.init()
    for index in range(3):
        before = optree.tree_map(torch.clone, state)
        batch = _poisoned(index, for_ranks(vectors(index), 3), rank=2)
        state, metrics = in_turn(state, tuple(x.to(dtype) for x in batch))
        assert metrics.overflow.item() == (index == 1)
        if index == 1:
            for part_ in ("step", "params", "master", "optimizer", "hook_states", "rng"):
                assert_same(getattr(state, part_), getattr(before, part_))
            assert in_turn.first_overflow(state) is not None
        else:
            assert not torch.equal(
                optree.tree_leaves(state.hook_states)[0], optree.tree_leaves(before.hook_states)[0]
            )


def test_an_error_in_the_middle_leaves_what_comm_hooks_remember() -> None:
    in_turn = simulated(2, ONE, Plain, options={"reduce_hook": FEEDBACK})
    state, _ = in_turn(in_turn.init(), for_ranks(vectors(0), 3))
    before = optree.tree_map(torch.clone, state.hook_states)
    with pytest.raises(FloatingPointError):
        in_turn(state, _poisoned(1, for_ranks(vectors(1), 3), rank=0))
    assert_same(state.hook_states, before)


@pytest.mark.parametrize("by", ["lockstep", "vmap"])
def test_what_was_lost_follows_the_loss_scale(by: Literal["lockstep", "vmap"]) -> None:
    keys = {
        "fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 1, "hysteresis": 1}
    }
    in_turn = fzero.simulate(
        simulated(2, ONE, Plain, options={"reduce_hook": FEEDBACK}, **keys).steps[0], by=by
    )
    fixed = simulated(
        2, ONE, Plain, options={"reduce_hook": FEEDBACK}, fp16={"enabled": True, "loss_scale": 64}
    )
    data = [tuple(x.half() for x in for_ranks(vectors(index), 3)) for index in range(2)]
    state, other = in_turn.init(), fixed.init()
    for batch in data:
        state, _ = in_turn(state, batch)
        other, _ = fixed(other, batch)
    assert state.loss_scale.scale.tolist() == [128.0] * 3
    for one, scaled in zip(
        optree.tree_leaves(other.hook_states), optree.tree_leaves(state.hook_states), strict=True
    ):
        assert one.any()
        if by == "lockstep":
            assert torch.equal(2 * one, scaled)
        else:
            # batched products in fp16 round otherwise, and what rounds to another code of 4 bits is
            # lost otherwise
            assert scaled.shape == one.shape and 1 < scaled.norm() / one.norm() < 3


def test_a_comm_hook_may_leave_its_result_anywhere() -> None:
    def add(
        full: Tensor, axis: Any, state: Any, *, after: Any = None, **_: Any
    ) -> fzero.comms.Sending:
        if after is not None:
            after.wait()
        return fzero.comms.completed(
            fzero.comms.exact().reduce_scatter(full, axis, state)[0], state
        )

    elsewhere = fzero.comms.exact()._replace(name="elsewhere", start_reduce_scatter=add)
    for mode, mesh in (("hybrid 0", ONE), ("hybrid 2", SQUARE), ("hpz 3", SQUARE)):
        found = [
            run(simulated(mode, mesh, options={"reduce_hook": hook}), tokens)
            for hook in (None, elsewhere)
        ]
        assert_same(*[state.params for _, state in found])


# --- the state ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "mesh"),
    [("hybrid 0", ONE), ("hybrid 3", ONE), ("mics 3", MESHES["3x2"]), ("hpz 3", SQUARE)],
)
def test_specs_report_what_comm_hooks_remember(mode: str, mesh: Mesh) -> None:
    in_turn = simulated(
        mode,
        mesh,
        options={"reduce_hook": {"data": LOCO} | ({"node": FEEDBACK} if mesh is not ONE else {})},
    )
    state = in_turn.init()
    for tensor, spec in zip(
        optree.tree_leaves(state), optree.tree_leaves(in_turn.specs), strict=True
    ):
        assert tuple(tensor.shape) == (mesh.size, *spec.local_shape(mesh))
    nbytes = sum(x.nbytes for x in optree.tree_leaves(state.hook_states)) // mesh.size
    assert nbytes == in_turn.plan.bytes_per_rank["comm hooks"] > 0
    buffer = in_turn.plan.flat_buffers[0]
    assert state.hook_states[buffer.key]["data"].state.shape == (mesh.size, buffer.padded_numel)
    if mesh is not ONE:
        assert state.hook_states[buffer.key]["node"].shape[
            1
        ] == buffer.padded_numel // mesh.axis_size("data")


def test_a_state_without_its_comm_hooks_is_reported() -> None:
    plain, wired = simulated(2, ONE), simulated(2, ONE, options={"reduce_hook": FEEDBACK})
    with pytest.raises(ValueError, match=r"got one without state\.hook_states"):
        wired(plain.init(), for_ranks(tokens(0), 3))


@pytest.mark.parametrize("stages", [(0, 3), (3, 1), (2, 2)])
def test_what_comm_hooks_remember_stays_where_only_the_stage_changes(
    stages: tuple[int, int],
) -> None:
    old, new = (simulated(stage, ONE, options={"reduce_hook": LOCO}) for stage in stages)
    _, state = run(old, tokens, 3)
    moved = fzero.reshard(state, old, new)
    assert_same(moved.hook_states, state.hook_states)
    _, there = run(new, tokens, 3)
    for index in (3, 4):
        batch = for_ranks(tokens(index), 3)
        moved, metrics = new(moved, batch)
        there, expected = new(there, batch)
        assert_same(metrics, expected)
    assert_same(moved, there)


def test_what_comm_hooks_remember_starts_anew_on_other_ranks_and_that_is_reported() -> None:
    old, new = (
        simulated(2, mesh, options={"reduce_hook": FEEDBACK}) for mesh in (ONE, Mesh.of(data=2))
    )
    _, state = run(old, tokens)
    with pytest.warns(UserWarning, match="states of comm hooks .* are dropped"):
        moved = fzero.reshard(state, old, new)
    assert all(not x.any() for x in optree.tree_leaves(moved.hook_states)) and any(
        x.any() for x in optree.tree_leaves(state.hook_states)
    )
    new(moved, for_ranks(tokens(4), 2))


def _reshard_on_a_rank() -> tuple[Any, Any]:
    steps = [fzero.make_train_step(make(Odd), config(stage), reduce_hook=LOCO) for stage in (1, 3)]
    state = steps[0].init()
    for index in range(2):
        state, _ = steps[0](state, part(tokens(index), steps[0].rank, 3))
    return state.hook_states, fzero.reshard(state, *steps).hook_states


def test_so_they_do_on_real_processes(ranks: RankPool) -> None:
    for before, after in ranks(3, _reshard_on_a_rank):
        assert_same(after, before)


# --- configuration --------------------------------------------------------------------------------


def test_the_configuration_means_comm_hooks() -> None:
    asked = simulated(3, ONE, zero_optimization=config(3)["zero_optimization"] | PLUS_PLUS)
    by_hand = simulated(
        3,
        ONE,
        options={
            "gather_hook": fzero.comms.compressed(fzero.comms.quantize(8, 256)),
            "reduce_hook": comms.reset_every(
                comms.error_feedback(comms.compressed(comms.quantize(4, 256)), decay=0.8), every=2
            ),
        },
    )
    assert str(asked.plan.comm_hooks) == str(by_hand.plan.comm_hooks)
    assert_same(run(asked, tokens), run(by_hand, tokens))
    frozen = fzero.plan(
        make(Odd), config(3, zero_quantized_nontrainable_weights=True), world_size=2
    ).comm_hooks
    assert set(frozen.frozen) == {"data"} and not frozen.gather and not frozen.reduce
    below = fzero.plan(make(Odd), config(2, **PLUS_PLUS), world_size=2).comm_hooks
    assert not below.gather and not below.frozen and below.reduce


def test_keys_of_comm_hooks_that_have_no_effect_are_reported_when_a_step_is_made_as_by_the_configuration() -> (
    None
):
    cfg = config(1, zero_quantized_weights=True, zeropp_loco_param={"err_beta": 0.5})
    notes = fzero.Config.load(cfg).conflicts
    with pytest.warns(fzero.ConfigWarning) as warned:
        fzero.make_train_step(make(Plain), cfg)
    said = {
        f"{note.key}: has no effect, for {note.reason}; leave it out"
        for note in notes
        if "zero" in note.key
    }
    assert {str(warning.message) for warning in warned} >= {
        text for text in said if "zero_q" in text or "loco" in text
    }
    assert len(warned) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", fzero.ConfigWarning)
        fzero.make_train_step(make(Plain), config(3, **PLUS_PLUS))


WRONG: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "stage": (
        2,
        {"gather_hook": Q8},
        {},
        "gather_hook: needs zero_optimization.stage 3, .* got stage 2",
    ),
    "memory": (
        3,
        {"gather_hook": FEEDBACK},
        {},
        "gather_hook: must be without a state, .* got error_feedback",
    ),
    "beside": (
        3,
        {"reduce_hook": Q8},
        {"zero_quantized_gradients": True},
        "reduce_hook: excludes zero_optimization.zero_q",
    ),
    "axis": (
        3,
        {"reduce_hook": {"rack": Q8}},
        {},
        "reduce_hook: must name axes .*'data' of Mesh.*, got 'rack'",
    ),
    "node": (
        3,
        {"gather_hook": {"node": Q8}},
        {},
        "gather_hook: must name axes .*'data' of Mesh.*, got 'node'",
    ),
    "codec": (
        3,
        {"reduce_hook": fzero.comms.quantize(8)},
        {},
        "reduce_hook: must be a comm hook, or comm hooks by axis, got Codec",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_comm_hooks_of_no_use_are_reported(name: str) -> None:
    stage, options, keys, says = WRONG[name]
    with pytest.raises(ConfigError, match=says):
        fzero.make_train_step(
            make(Plain), config(stage, **keys), mesh=fzero.comms.AbstractAxis("data", 2), **options
        )


def test_a_comm_hook_that_remembers_is_counted_from_one() -> None:
    with pytest.raises(
        ValueError,
        match="reset_every: every must be a positive number of rounds, got 0; pass 1024, say",
    ):
        fzero.comms.reset_every(FEEDBACK, every=0)


def _make_with_a_wire_of_its_own() -> None:
    hook = Q8 if fzero.join().rank else Q4
    fzero.make_train_step(make(Plain), config(2), reduce_hook=hook)


def test_ranks_with_different_comm_hooks_are_reported(ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, _make_with_a_wire_of_its_own)
    assert all(
        isinstance(error, fzero.runtime.MismatchError) and "comm hooks" in str(error)
        for error in caught.value.errors
    )
