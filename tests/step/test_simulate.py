"""The laws of simulated ranks: a job's bits in lockstep, and whatever goes wrong
reported as a job would.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optree
import pytest
import torch
from ranks import RankPool
from test_models import MODELS, images, text
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from training import Odd, Plain, adamw, config, make, part, tokens, train_plainly, vectors

import fzero
from fzero.comms.lockstep import Hub, StuckError
from fzero.simulation import VmapRanks, stacked

TWO_MICRO_STEPS = {"train_batch_size": 24, "gradient_accumulation_steps": 2}
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


class Noisy(nn.Module):
    """Random numbers in the forward, running statistics, and a count of its own in
    Python.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2))
            for _ in range(3)
        )
        self.num_calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.num_calls += 1
        for block in self.blocks:
            x = x + block(x) + 0.1 * torch.randn_like(x) / self.num_calls
        return nn.functional.mse_loss(x, y)


class Branching(Plain):
    """Runs some of its blocks only, by data."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index % 2 == int(x.sum() > 0):
                x = block(x)
        return nn.functional.mse_loss(x, y)


def _gpt2_with_dropout() -> nn.Module:
    model = MODELS["gpt2"]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    data: Callable[[int], Any]
    cfg: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}


CASES = {
    "plain": Case(Plain, vectors),
    "odd": Case(Odd, functools.partial(tokens, size=24), TWO_MICRO_STEPS),
    "noisy": Case(Noisy, functools.partial(vectors, size=24), TWO_MICRO_STEPS),
    "checkpointed": Case(Noisy, vectors, {}, {"units": ["blocks.*"], "checkpoint": 1}),
    "bf16": Case(Odd, tokens, {"bf16": {"enabled": True}}),
    "overflows": Case(
        Plain,
        vectors,
        {"fp16": {"enabled": True, "initial_scale_power": 24, "auto_cast": True, "hysteresis": 1}},
    ),
    "autocast": Case(Plain, vectors, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "muon": Case(Odd, tokens, {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}),
    "lamb": Case(Odd, tokens, {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}),
    "gpt2": Case(_gpt2_with_dropout, text),
    "bert": Case(
        MODELS["bert"], text, {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}}
    ),
    "resnet": Case(MODELS["resnet"], images),
    "negotiated": Case(Branching, vectors, {}, {"schedule": "negotiated"}),
}


def _step(case: Case, stage: int) -> fzero.TrainStep:
    return fzero.make_train_step(
        make(case.model), config(stage) | {"optimizer": ADAM} | case.cfg, **case.options
    )


def _on_a_rank(case: str, stage: int, num_steps: int) -> tuple[Any, list[fzero.Metrics]]:
    step = _step(CASES[case], stage)
    state, curve = step.init(), []
    for index in range(num_steps):
        state, metrics = step(state, part(CASES[case].data(index), step.rank, step.world_size))
        curve.append(metrics)
    return state, curve


def for_ranks(batch: Any, world_size: int) -> Any:
    """A global batch as the stacked batches of the ranks."""
    return stacked([part(batch, rank, world_size) for rank in range(world_size)])


COMBINATIONS = [
    (case, stage, world_size)
    for place, case in enumerate(CASES)
    for stage in range(4)
    for world_size in (2, 3, 4)
    if case in ("odd", "noisy") or (place + stage + world_size) % 3 == 0
]
"""All of two models, of the others every third."""


@pytest.mark.covering(0)
@pytest.mark.parametrize(("case", "stage", "world_size"), COMBINATIONS)
def test_ranks_in_lockstep_have_the_bits_of_as_many_processes(
    ranks: RankPool, case: str, stage: int, world_size: int
) -> None:
    on_ranks = ranks(world_size, _on_a_rank, case, stage, 3)
    simulated = fzero.simulate(_step(CASES[case], stage), world_size, by="lockstep")
    state = simulated.init()
    for index in range(3):
        state, metrics = simulated(state, for_ranks(CASES[case].data(index), world_size))
        assert_same(metrics, on_ranks[0][1][index])
    assert_same(state, stacked([of_rank for of_rank, _ in on_ranks]))


def assert_same(state: Any, other: Any) -> None:
    """Both have the same structure, shapes, dtypes and bits."""
    paths, leaves, treespec = optree.tree_flatten_with_path(state)
    others, same = optree.tree_flatten(other)
    assert same == treespec
    for path, x, y in zip(paths, leaves, others, strict=True):
        torch.testing.assert_close(
            x, y, rtol=0, atol=0, equal_nan=True, msg=lambda text, path=path: f"{path}: {text}"
        )


def test_ranks_in_lockstep_compute_with_the_callers_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            assert Hub(2).run(lambda rank: torch.get_num_threads()) == [num_threads] * 2
    finally:
        torch.set_num_threads(before)


def test_a_rank_in_lockstep_keeps_what_the_model_counts_for_itself() -> None:
    simulated = fzero.simulate(_step(CASES["noisy"], 0), 3, by="lockstep")
    simulated(simulated.init(), for_ranks(vectors(0, 24), 3))
    assert [rank.spec.model.num_calls for rank in simulated.steps] == [2] * 3  # micro-steps


@pytest.mark.covering(0)
@pytest.mark.parametrize("stage", [0, 3])
def test_so_many_ranks_are_the_plain_loop_on_the_global_batch(stage: int) -> None:
    def data(index: int) -> Any:
        return tokens(index, 64)

    world_size = 32
    simulated = fzero.simulate(
        fzero.make_train_step(make(Odd), config(stage)), world_size, by="lockstep"
    )
    state, curve = simulated.init(), []
    for index in range(3):
        state, metrics = simulated(state, for_ranks(data(index), world_size))
        curve.append((metrics.loss.item(), metrics.grad_norm.item()))
    plain_curve, plain_weights = train_plainly(Odd, data, adamw, num_steps=3)
    # Rounding only, as in test_stages: a mean of means is another sum, and AdamW turns last bits
    # into parts of lr = 1e-2.
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(plain_curve), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(simulated.gather(state), plain_weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("by", ["vmap", "lockstep"])
def test_a_simulated_state_is_donated_and_a_simulated_step_leaves_the_process_as_it_was(
    by: Any,
) -> None:
    simulated = fzero.simulate(_step(CASES["noisy"], 2), 2, by=by)
    state = simulated.init()
    torch.manual_seed(3)
    before, num_threads = torch.get_rng_state(), threading.active_count()
    new, _ = simulated(state, for_ranks(vectors(0, 24), 2))
    assert torch.equal(torch.get_rng_state(), before) and threading.active_count() == num_threads
    assert all(new.params[key] is state.params[key] for key in state.params)


@pytest.mark.parametrize("by", ["vmap", "lockstep"])
def test_an_undonated_simulated_state_stays_good(by: Any) -> None:
    simulated = fzero.simulate(
        fzero.make_train_step(make(Plain), config(2), donate=False), 3, by=by
    )
    state = simulated.init()
    kept = optree.tree_map(torch.clone, state)
    new, _ = simulated(state, for_ranks(vectors(0), 3))
    assert_same(state, kept)
    assert not any(torch.equal(new.params[key], state.params[key]) for key in state.params)


def test_micro_batches_may_come_from_an_iterator() -> None:
    cfg = config(2) | {"train_batch_size": 12, "gradient_accumulation_steps": 3}
    simulated = fzero.simulate(fzero.make_train_step(make(Plain), cfg), 2, by="lockstep")
    at_once, _ = simulated(simulated.init(), for_ranks(vectors(0), 2))
    given = [
        stacked([part(part(vectors(0), rank, 2), index, 3) for rank in range(2)])
        for index in range(3)
    ]
    one_by_one, _ = simulated(simulated.init(), iter(given))
    assert_same(at_once, one_by_one)
    with pytest.raises(ValueError, match="must give 3 micro-batches"):
        simulated(simulated.init(), iter(given[:2]))


def test_evaluation_and_weights_are_those_of_one_process() -> None:
    step = fzero.make_train_step(make(Odd), config(3))
    simulated = fzero.simulate(step, 4, by="lockstep")
    state, alone = simulated.init(), step.init()
    assert_same(simulated.gather(state), step.gather(alone))
    loss = simulated.evaluate(state, for_ranks(tokens(0), 4))
    # a mean of four means
    torch.testing.assert_close(loss, step.evaluate(alone, tokens(0)), rtol=2e-6, atol=0)


# --- ranks as a dimension -------------------------------------------------------------------------

SGD = {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.5}}
VMAPPED = (
    "plain",
    "odd",
    "noisy",
    "checkpointed",
    "bf16",
    "overflows",
    "autocast",
    "gpt2",
    "resnet",
)
NARROW = {"bf16": 2**-7, "autocast": 2**-7}


def _run(
    simulated: fzero.simulation.LockstepRanks, case: Case, num_steps: int
) -> tuple[Any, list[fzero.Metrics]]:
    state, curve = simulated.init(), []
    for index in range(num_steps):
        state, metrics = simulated(state, for_ranks(case.data(index), simulated.world_size))
        curve.append(metrics)
    return state, curve


def assert_near(found: Any, expected: Any, *, rounding: float) -> None:
    """Two runs of SGD in the same arithmetic, but for the order in which a batched
    product adds up.

    `rounding` is that of one gradient or loss, relative to the largest: some 2^6 sums
    of the dtype's last bit. Three clipped gradients (norm 1 or less) then move a weight
    by no more than 3 · lr · 2 (momentum) times that.
    """
    (state, curve), (others, expected_curve) = found, expected
    for metrics, other in zip(curve, expected_curve, strict=True):
        torch.testing.assert_close(metrics, other, rtol=rounding, atol=0, equal_nan=True)
    for key in state.params:
        for mine, theirs in ((state.params, others.params), (state.master, others.master)):
            if key in mine:  # a 16-bit parameter may also round to its neighbour
                ulp = rounding if mine[key].dtype == torch.bfloat16 else 0
                torch.testing.assert_close(
                    mine[key], theirs[key], rtol=ulp, atol=3 * 0.01 * 2 * rounding
                )
    assert_same(
        (state.step, state.rng, state.loss_scale), (others.step, others.rng, others.loss_scale)
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", VMAPPED)
def test_ranks_as_a_dimension_are_ranks_in_lockstep_to_rounding(name: str, stage: int) -> None:
    case = CASES[name]._replace(cfg=CASES[name].cfg | {"optimizer": SGD})
    by_vmap = fzero.simulate(_step(case, stage), 4, by="vmap")
    in_turn = fzero.simulate(_step(case, stage), 4, by="lockstep")
    assert_near(_run(by_vmap, case, 3), _run(in_turn, case, 3), rounding=NARROW.get(name, 2.0**-17))


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("name", "stage"), [("plain", 0), ("odd", 1), ("bf16", 2), ("overflows", 3)]
)
def test_a_captured_simulation_is_the_eager_one_to_rounding(name: str, stage: int) -> None:
    case = CASES[name]._replace(cfg=CASES[name].cfg | {"optimizer": SGD})
    captured = fzero.simulate(_step(case, stage), 3, by="vmap", compile="aot_eager")
    eager = fzero.simulate(_step(case, stage), 3, by="vmap")
    assert_near(_run(captured, case, 3), _run(eager, case, 3), rounding=NARROW.get(name, 2.0**-17))
    assert len(captured.program.compiled.graphs) == 1 + ("gradient_accumulation_steps" in case.cfg)


@pytest.mark.covering(0)
@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad", "Lion"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_sixty_four_ranks_at_once_are_the_plain_loop_on_the_global_batch(
    stage: int, optimizer: str
) -> None:
    def data(index: int) -> Any:
        return tokens(index, 128)

    keys = {"optimizer": {"type": optimizer, "params": {"lr": 1e-3}}, "gradient_clipping": 1.0}
    results = []
    for world_size in (64, 1):
        step = fzero.make_train_step(make(Odd), keys | {"zero_optimization": {"stage": stage}})
        simulated = fzero.simulate(step, world_size, by="vmap")
        state, curve = simulated.init(), []
        for index in range(3):
            state, metrics = simulated(state, for_ranks(data(index), world_size))
            curve.append((metrics.loss.item(), metrics.grad_norm.item()))
        results.append((torch.tensor(curve), simulated.gather(state)))
    # Rounding only, as above; these optimizers turn the last bits of a gradient near zero into
    # parts of 3 · lr.
    torch.testing.assert_close(results[0][0], results[1][0], rtol=4e-6, atol=4e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=3 * 1e-3 * 2)
    different = (
        torch.cat([(results[0][1][k] - results[1][1][k]).flatten().abs() for k in results[0][1]])
        > 1e-5
    )
    assert different.double().mean() < 0.01


class Poisoned(torch.autograd.Function):
    """Its backward triples the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


class Canary(Plain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(Poisoned.apply(x * self.blocks[0].scale), y)


def test_a_backward_of_its_own_is_honoured_or_refused() -> None:
    case = Case(Canary, vectors, {"optimizer": SGD})
    by_vmap, in_turn = (fzero.simulate(_step(case, 3), 2, by=by) for by in ("vmap", "lockstep"))
    found, expected = _run(by_vmap, case, 2), _run(in_turn, case, 2)
    assert_near(found, expected, rounding=2.0**-17)
    captured = fzero.simulate(_step(case, 3), 2, by="vmap", compile="aot_eager")
    with pytest.raises(
        fzero.comms.VmapError,
        match=r"Poisoned is a torch.autograd.Function, whose backward a capture",
    ):
        _run(captured, case, 1)


class Padded(nn.Module):
    """An embedding whose padding gets no gradient, and a forward that asks whether
    there are gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4, padding_idx=-4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.head(self.embed(x).sum(dim=1))
        if hidden.requires_grad and hidden.grad_fn is not None and self.head.weight.is_leaf:
            hidden = 3 * hidden
        return hidden.square().mean()


def _padded(by: Any, model: nn.Module, **options: Any) -> list[float]:
    """The losses of two ranks; rank 1's batch has the padding, too."""
    simulated = fzero.simulate(fzero.make_train_step(model, config(0)), 2, by=by, **options)
    state, losses = simulated.init(), []
    for _ in range(3):
        state, metrics = simulated(state, torch.tensor([[[1, 2], [3, 1]], [[1, 1], [4, 0]]]))
        losses.append(metrics.loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"compile": "aot_eager"}], ids=["eager", "graph"])
def test_padding_has_no_gradient_and_a_forward_may_ask_for_gradients_on_all_ranks_at_once(
    options: Any,
) -> None:
    found = _padded("vmap", make(Padded), **options)
    assert found == pytest.approx(_padded("lockstep", make(Padded)), rel=1e-5)


def test_a_backward_hook_of_a_module_is_refused_by_vmap_and_run_in_lockstep() -> None:
    model = make(Padded)
    model.head.register_full_backward_hook(
        lambda module, of_inputs, of_outputs: (2 * of_inputs[0],)
    )  # type: ignore[operator, union-attr]
    with pytest.raises(fzero.comms.VmapError, match="by='lockstep'"):
        _padded("vmap", model)
    with pytest.warns(UserWarning, match="lockstep"):
        assert (
            _padded(None, model) == _padded("lockstep", model) != _padded("lockstep", make(Padded))
        )


class ControlFlow(Plain):
    """A model that calls an operator of control flow with a clone of a weight."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator, self.linear = operator, nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.linear.weight.clone()
        if self.operator == "cond":
            x = torch.cond(x.sum() > 0, lambda x: x @ weight, lambda x: x.sin() @ weight, (x,))
        elif self.operator == "map":
            x = map_rows(lambda row: row @ weight, x)
        elif self.operator == "while_loop":
            x = while_loop(lambda x: x.sum() > 0, lambda x: (x @ weight,), (x,))[0]
        else:
            x = scan(lambda total, row: (total + row, row @ weight), x[0], x)[1]
        return super().forward(x, y)


@pytest.mark.parametrize("operator", ["cond", "map", "scan", "while_loop"])
def test_operators_of_control_flow_are_refused_by_vmap_and_named(operator: str) -> None:
    case = Case(functools.partial(ControlFlow, operator), vectors)
    with pytest.raises(
        fzero.comms.VmapError, match=rf"must not call the operator {operator} .*by='lockstep'"
    ):
        _run(fzero.simulate(_step(case, 3), 2, by="vmap"), case, 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("operator", ["cond", "map", "scan", "while_loop"])
def test_operators_of_control_flow_run_in_lockstep_where_vmap_was_tried_first(
    operator: str,
) -> None:
    case = Case(functools.partial(ControlFlow, operator), vectors)
    expected = _run(fzero.simulate(_step(case, 3), 2, by="lockstep"), case, 2)
    with pytest.warns(UserWarning, match=f"operator {operator} .* in lockstep"):
        found = _run(fzero.simulate(_step(case, 3), 2), case, 2)
    assert_same(found, expected)


def test_what_vmap_cannot_do_is_reported_or_done_in_lockstep() -> None:
    class Reads(Plain):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) * (2 if x.sum().item() > 0 else 1)

    case = Case(Reads, vectors)
    with pytest.raises(
        fzero.comms.VmapError,
        match=r"cannot run this step for all ranks at once: .*item.*by='lockstep'",
    ):
        _run(fzero.simulate(_step(case, 2), 2, by="vmap"), case, 1)
    with pytest.warns(UserWarning, match="the ranks run in lockstep, which takes longer") as warned:
        found = _run(fzero.simulate(_step(case, 2), 2), case, 2)
    assert len(warned) == 1  # it is not tried again
    expected = _run(fzero.simulate(_step(case, 2), 2, by="lockstep"), case, 2)
    assert_same(found, expected)
    with pytest.warns(UserWarning, match="must be elementwise .* in lockstep"):
        fzero.simulate(_step(CASES["muon"], 2), 2)
    with pytest.raises(fzero.ConfigError, match="must be elementwise"):
        fzero.simulate(_step(CASES["muon"], 2), 2, by="vmap")
    with pytest.raises(fzero.comms.VmapError, match="draws random numbers in a graph of all ranks"):
        _run(
            fzero.simulate(_step(CASES["noisy"], 0), 2, by="vmap", compile="aot_eager"),
            CASES["noisy"],
            1,
        )


def test_an_error_of_the_batch_or_the_model_is_raised_as_it_is_and_changes_no_way(
    recwarn: Any,
) -> None:
    class Fussy(Plain):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if x.shape[-1] == 12:
                raise NotImplementedError("no batches of 12")
            return super().forward(x, y)

    simulated = fzero.simulate(_step(Case(Fussy, vectors), 2), 2)
    state = simulated.init()
    for width, error in ((10, RuntimeError), (12, NotImplementedError)):
        with pytest.raises(error, match=r"must match|shapes|no batches of 12"):
            simulated(state, for_ranks(vectors(0, 12, width), 2))
    state, _ = simulated(state, for_ranks(vectors(0), 2))
    assert isinstance(simulated, VmapRanks) and not simulated.is_in_lockstep and not list(recwarn)


def test_lockstep_takes_over_the_micro_batches_that_an_iterator_gave_to_vmap() -> None:
    class Reads(Plain):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) * (2 if x.sum().item() > 0 else 1)

    step = _step(Case(Reads, vectors, TWO_MICRO_STEPS), 2)
    micro_batches = [for_ranks(vectors(index), 2) for index in range(2)]
    changing, in_turn = fzero.simulate(step, 2), fzero.simulate(step, 2, by="lockstep")
    with pytest.warns(UserWarning, match="the ranks run in lockstep"):
        found = changing(changing.init(), iter(micro_batches))
    assert_same(found, in_turn(in_turn.init(), iter(micro_batches)))


def test_an_update_that_fails_half_way_is_not_made_again_in_lockstep() -> None:
    num_calls = 0

    def fails_in_the_end(lr: float) -> fzero.Transform:
        plain = fzero.sgd(lr=lr)

        def update(grad: Tensor, param: Tensor, state: Any) -> Any:
            nonlocal num_calls
            num_calls += is_training
            if num_calls == 4:  # the second flat buffer, after two ranks of the first
                raise RuntimeError("not enough memory")
            return plain.update(grad, param, state)

        return fzero.Transform(plain.init, update, plain.specs)

    is_training = False
    simulated = fzero.simulate(
        fzero.make_train_step(make(Plain), config(0), transform=fails_in_the_end), 2
    )
    state = simulated.init()
    is_training = True
    with pytest.raises(RuntimeError, match="not enough memory"):
        simulated(state, for_ranks(vectors(0), 2))
    assert num_calls == 4


def test_an_error_of_all_ranks_at_once_names_the_rank_and_the_parameter() -> None:
    simulated = fzero.simulate(_step(CASES["plain"], 3), 3, by="vmap")
    state = simulated.init()
    kept = optree.tree_map(torch.clone, state)
    batch = for_ranks(vectors(0), 3)
    batch[0][1].fill_(float("nan"))
    with pytest.raises(
        FloatingPointError, match=r"not finite on ranks \[1\].*first parameter 'blocks.0.weight'"
    ):
        simulated(state, batch)
    assert_same(state._replace(grads=kept.grads), kept)
    simulated(state, for_ranks(vectors(0), 3))


def test_a_simulated_state_is_resharded_as_real_ones_are() -> None:
    before, after = (
        fzero.simulate(_step(CASES["noisy"], stage), size) for stage, size in ((1, 2), (3, 3))
    )
    state, _ = before(before.init(), for_ranks(vectors(0, 24), 2))
    moved = fzero.reshard(state, before, after)
    expected = fzero.resharding.reshard_all(
        fzero.simulation.unstacked(state, 2), before.steps[0], after.steps[0]
    )
    assert_same(moved, stacked(expected))
    assert_same(after.gather(moved), before.gather(state))
    after(moved, for_ranks(vectors(1, 24), 3))
    with pytest.raises(ValueError, match="both steps must be simulated or neither"):
        fzero.reshard(state, before, after.steps[0])


# --- what goes wrong ------------------------------------------------------------------------------


def test_an_error_on_one_rank_is_raised_with_its_rank() -> None:
    simulated = fzero.simulate(_step(CASES["plain"], 3), 3, by="lockstep")
    state = simulated.init()
    kept = optree.tree_map(torch.clone, state)
    batch = for_ranks(vectors(0), 3)
    batch[0][1].fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"not finite on ranks \[1\]"):
        simulated(state, batch)
    state, _ = simulated(kept, for_ranks(vectors(0), 3))

    def fails_on_rank_2(rank: int) -> Any:
        if rank == 2:
            raise KeyError("only here")
        return simulated.steps[rank].evaluate(
            fzero.simulation.unstacked(state, 3)[rank], part(vectors(0), rank, 3)
        )

    with pytest.raises(KeyError, match="only here") as raised:
        simulated.on_each(fails_on_rank_2)
    assert "rank 2 of 3" in raised.value.__notes__[0]
    with pytest.raises(fzero.CollectiveError, match="the ranks are in different steps"):
        simulated.evaluate(state, for_ranks(vectors(0), 3))


def test_ranks_that_wait_for_each_other_are_reported_so() -> None:
    hub = Hub(2)
    with pytest.raises(StuckError, match="rank 0 waits for rank 1, which also waits"):
        hub.run(lambda rank: hub.receive(hub.expect(1 - rank, rank)))
    with pytest.raises(StuckError, match="rank 1 waits for rank 0, which has ended"):
        hub.run(lambda rank: rank and hub.receive(hub.expect(0, 1)))
    assert hub.run(lambda rank: rank) == [0, 1]


def test_messages_arrive_in_order_whenever_they_are_looked_at() -> None:
    hub = Hub(2)

    def late(rank: int) -> list[Any]:
        for value in "abc":
            hub.send(rank, 1 - rank, value + str(rank))
        expected = [hub.expect(1 - rank, rank) for _ in range(3)]
        return [hub.receive(message) for message in reversed(expected)]

    assert hub.run(late) == [["c1", "b1", "a1"], ["c0", "b0", "a0"]]


class Dropping(Plain):
    """Layer drop: skips each block with a probability, drawn by each rank for itself or
    alike.
    """

    probability, is_alike, num_calls = 0.0, False, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.num_calls += 1
        generator = torch.Generator().manual_seed(self.num_calls) if self.is_alike else None
        for block in self.blocks:
            if torch.rand((), generator=generator) >= self.probability:
                x = block(x)
        return nn.functional.mse_loss(x, y)


def _dropped(
    stage: int,
    num_ranks: int,
    num_steps: int,
    probability: float,
    is_alike: bool,
    keys: dict[str, Any],
) -> list[Tensor]:
    model = make(functools.partial(Dropping, num_blocks=3))
    model.probability, model.is_alike = probability, is_alike
    model.register_parameter("offset", nn.Parameter(torch.zeros(())))
    model.register_forward_pre_hook(lambda module, args: (args[0] + module.offset, args[1]))
    simulated = fzero.simulate(
        fzero.make_train_step(model, config(stage) | keys), num_ranks, by="lockstep"
    )
    state = simulated.init()
    losses = []
    for index in range(num_steps):
        state, metrics = simulated(state, for_ranks(vectors(index), num_ranks))
        losses.append(metrics.loss)
    return losses


HALVES = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 3}


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:the .*ward runs its units in an order")
@pytest.mark.parametrize(
    ("num_ranks", "probability", "is_alike", "keys"),
    [
        (1, 0.5, False, {}), (2, 0.5, False, {}), (2, 0.8, False, {}), (2, 0.3, True, {}),
        (2, 0.3, False, HALVES), (2, 0.3, True, HALVES),
    ],
)  # fmt: skip
def test_layer_drop_trains_with_the_learned_order_as_in_stage_2(
    num_ranks: int, probability: float, is_alike: bool, keys: dict[str, Any]
) -> None:
    for expected, loss in zip(
        _dropped(2, num_ranks, 20, probability, is_alike, keys),
        _dropped(3, num_ranks, 20, probability, is_alike, keys),
        strict=True,
    ):
        assert torch.equal(loss, expected)


class Switching(Plain):
    """Runs its blocks the other way round from the second step on; or on one rank
    alone.
    """

    is_alone = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        turns = bool(y[0, 0] > 0)
        for block in reversed(self.blocks) if turns else self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


def test_ranks_that_depart_from_the_order_together_negotiate_and_one_that_does_alone_is_reported() -> (
    None
):
    found = {}
    for stage in (2, 3):
        simulated = fzero.simulate(
            fzero.make_train_step(make(Switching), config(stage)), 2, by="lockstep"
        )
        state, (x, y) = simulated.init(), for_ranks(vectors(0), 2)
        state, _ = simulated(state, (x, -y.abs()))
        for sign in (1, -1, 1):
            if stage == 3 and sign == 1 and stage not in found:
                with pytest.warns(UserWarning, match="all ranks negotiate it from now on"):
                    state, metrics = simulated(state, (x, y.abs()))
            else:
                state, metrics = simulated(state, (x, sign * y.abs()))
            found.setdefault(stage, []).append(metrics.loss)
    assert all(map(torch.equal, found[2], found[3]))
    alone = fzero.simulate(fzero.make_train_step(make(Switching), config(3)), 2, by="lockstep")
    state, _ = alone(alone.init(), (x, -y.abs()))
    with pytest.raises(fzero.ScheduleError, match="schedule='negotiated'"):
        alone(state, (x, torch.stack([y[0].abs(), -y[1].abs()])))


class Uncopyable(Plain):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("holds a connection")


def test_what_cannot_be_simulated_is_reported() -> None:
    step = fzero.make_train_step(make(Plain), config(0))
    with pytest.raises(ValueError, match="world_size must be a positive integer, got 0"):
        fzero.simulate(step, 0, by="lockstep")
    simulated = fzero.simulate(step, 2, by="lockstep")
    with pytest.raises(ValueError, match=r"leading dimension of 2 ranks, got shape \(12, 16\)"):
        simulated(simulated.init(), vectors(0))
    with pytest.raises(ValueError, match=r"leading dimension of 2 ranks, got shape \(\)"):
        simulated(step.init(), for_ranks(vectors(0), 2))
    with pytest.raises(
        ValueError, match=r"Uncopyable must be a model that deepcopy can copy.*holds a connection"
    ):
        fzero.simulate(fzero.make_train_step(Uncopyable(), config(0)), 2)


class Tagged(Tensor):
    """A tensor with a class of its own."""


class Unlike(Plain):
    """Does what differs between one rank and a dimension of ranks, unless it is
    refused.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer(
            "tag", torch.ones(1).as_subclass(Tagged) if kind == "a class" else torch.ones(1)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        if self.kind == "dropout":
            x = x.reshape(x.shape[0], 4, -1).transpose(0, 1)
            x = nn.functional.dropout(
                nn.functional.dropout(x.transpose(1, 2), 0.3).transpose(1, 2) * 1, 0.3, inplace=True
            )
            x = x.transpose(0, 1).flatten(1)
        if self.kind == "a generator":
            x = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
        if self.kind == "a kept tensor":
            if not hasattr(self, "old"):
                self.old = self.blocks[0].weight.detach()
            x = x + self.old.sum()
        if self.kind == "a tensor of this forward":
            self.last = x.square().mean()
            x = x * self.last
        return nn.functional.mse_loss(x * len(type(self.tag).__name__), y)


REFUSED_AS_A_DIMENSION = {
    "dropout": "",
    "a tensor of this forward": "",
    "a class": "no methods of other classes",
    "a generator": "generator of the model's own",
    "a kept tensor": "the forward keeps the parameter that 'old' was in an earlier step",
}


@pytest.mark.parametrize("kind", REFUSED_AS_A_DIMENSION)
def test_as_a_dimension_a_model_is_that_of_a_rank_or_refused(kind: str) -> None:
    curves = []
    for by in ("lockstep", "vmap"):
        step = fzero.simulate(
            fzero.make_train_step(make(lambda: Unlike(kind)), config(1)), 2, by=by
        )  # type: ignore[arg-type]
        state, curve = step.init(), []
        try:
            for index in range(3):
                state, metrics = step(state, for_ranks(vectors(index), 2))
                curve.append(metrics.loss.item())
        except (ValueError, RuntimeError) as error:
            assert by == "vmap" and REFUSED_AS_A_DIMENSION[kind], error
            assert REFUSED_AS_A_DIMENSION[kind] in str(error) and "by='lockstep'" in str(error)
            return
        curves.append(curve)
    assert not REFUSED_AS_A_DIMENSION[kind] and curves[1] == pytest.approx(curves[0], rel=1e-5)
