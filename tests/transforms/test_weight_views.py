"""Transforms of weights, and one of the test's own: each is a plain loop with its
formula.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from compressing import Net, StraightThrough, data, net, symmetric
from ranks import RankPool
from torch import Tensor, nn

import fzero
from fzero.transforms import (
    Changes,
    FunctionView,
    ModelTransform,
    lora,
    merged,
    packed,
    quantization_aware,
    unmerged,
    weight_norm,
)

LR, STEPS = 0.1, 3
BLOCKS = ("blocks.*.out", "blocks.*.mlp.up")
WEIGHTS = [f"blocks.{number}.{name}.weight" for number in range(2) for name in ("mlp.up", "out")]
Leaves = dict[str, Tensor]
Formula = Callable[[Leaves], dict[str, Tensor]]


# --- a transform of one's own ---------------------------------------------------------------------


def bounded(spec: Any) -> Changes:
    """Modules see tanh(s)·W, with a trained number s for each block's `out`."""
    views, added = {}, set[str]()
    for name, module in spec.model.named_modules():
        if name.endswith(".out"):
            if not hasattr(module, "size"):
                module.register_parameter("size", nn.Parameter(torch.ones(())))
            views[f"{name}.weight"] = (FunctionView(lambda w, s: s.tanh() * w, (f"{name}.size",)),)
            added.add(f"{name}.size")
    return Changes(
        name="bounded",
        views=views,
        added=frozenset(added),
        first_value=lambda name, like: torch.ones(()),
    )


# --- the same as plain loops ----------------------------------------------------------------------


def leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_()


def low_rank_start(model: nn.Module, trains: Sequence[str] = ()) -> Leaves:
    """Frozen weights, and A and B, which begin as fzero's."""
    found = {name: param.detach().clone() for name, param in model.named_parameters()}
    found |= {name: leaf(param) for name, param in found.items() if name in trains}
    copy = type(model)()
    fzero.make_train_step(copy, settings(), transforms=[lora(BLOCKS, rank=2, alpha=3)])
    return found | {name: leaf(x) for name, x in copy.named_parameters() if "lora" in name}


def low_rank(of: Callable[[Tensor], Tensor] = lambda x: x) -> Formula:
    def formula(leaves: Leaves) -> dict[str, Tensor]:
        seen = {name: x for name, x in leaves.items() if "lora" not in name}
        for name in WEIGHTS:
            a, b = (leaves[name.replace("weight", key)] for key in ("lora_A", "lora_B"))
            seen[name] = of(seen[name]) + b @ a * (3 / 2)
        return seen

    return formula


def rows_of(bits: int) -> Callable[[Tensor], Tensor]:
    return lambda weight: symmetric(bits, weight.shape[0])(weight)


def rounded(leaves: Leaves) -> dict[str, Tensor]:
    return leaves | {name: StraightThrough.apply(leaves[name], rows_of(4)) for name in WEIGHTS}


def norm_start(model: nn.Module) -> Leaves:
    found = {name: leaf(param) for name, param in model.named_parameters()}
    return found | {f"{name}_g": leaf(found[name].norm(dim=1, keepdim=True)) for name in WEIGHTS}


def with_length(leaves: Leaves) -> dict[str, Tensor]:
    seen = {name: x for name, x in leaves.items() if not name.endswith("_g")}
    for name in WEIGHTS:
        v = seen[name]
        seen[name] = leaves[f"{name}_g"] * v / v.norm(dim=1, keepdim=True)
    return seen


def all_trained(model: nn.Module) -> Leaves:
    return {name: leaf(param) for name, param in model.named_parameters()}


def bounded_start(model: nn.Module) -> Leaves:
    return all_trained(model) | {
        f"blocks.{number}.out.size": leaf(torch.ones(())) for number in range(2)
    }


def bounded_seen(leaves: Leaves) -> dict[str, Tensor]:
    seen = {name: x for name, x in leaves.items() if not name.endswith("size")}
    for number in range(2):
        name = f"blocks.{number}.out.weight"
        seen[name] = leaves[f"blocks.{number}.out.size"].tanh() * seen[name]
    return seen


def rounded_inputs(model: nn.Module) -> None:
    """The modules of `BLOCKS` round each token of their input to 4 bits."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (StraightThrough.apply(args[0], symmetric(4, len(args[0]))),)

    for name in WEIGHTS:
        model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(hook)


HEAD = ("head.weight", "head.bias")
CASES: dict[
    str, tuple[Callable[[], list[ModelTransform]], Callable[[nn.Module], Leaves], Formula]
] = {
    "lora": (
        lambda: [lora(BLOCKS, rank=2, alpha=3, trains="head.*")],
        functools.partial(low_rank_start, trains=HEAD),
        low_rank(),
    ),
    "lora, 8 bits": (
        lambda: [lora(BLOCKS, rank=2, alpha=3, bits=8)],
        low_rank_start,
        low_rank(rows_of(8)),
    ),
    "lora, 4 bits": (
        lambda: [lora(BLOCKS, rank=2, alpha=3, bits=4)],
        low_rank_start,
        low_rank(rows_of(4)),
    ),
    "quantized": (
        lambda: [quantization_aware(BLOCKS, weight_bits=4, activation_bits=4)],
        all_trained,
        rounded,
    ),
    "weight norm": (lambda: [weight_norm(BLOCKS)], norm_start, with_length),
    "own": (lambda: [bounded], bounded_start, bounded_seen),
}
EACH = pytest.mark.parametrize("case", CASES)


def plain(
    case: str, num_steps: int = STEPS, dtype: torch.dtype = torch.float32
) -> tuple[list[float], Leaves]:
    """The losses and last values of a loop on one process; with `dtype`, of masters in
    fp32.
    """
    _, start, formula = CASES[case]
    model, leaves, losses = net(), start(net()), list[float]()
    if case == "quantized":
        rounded_inputs(model)
    for index in range(num_steps):
        given = tuple(x.to(dtype) if x.is_floating_point() else x for x in data(index))
        seen = formula({name: x.to(dtype) for name, x in leaves.items()})
        loss = torch.func.functional_call(model, seen, given)
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for x in leaves.values():
                if x.grad is not None:
                    x -= LR * x.grad
                    x.grad = None
    return losses, {name: x.detach() for name, x in leaves.items()}


def settings(stage: int = 0, num_micro: int = 1, num_ranks: int = 1, **keys: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    size = 16 // num_micro // num_ranks
    counts = {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": num_micro}
    return {
        "zero_optimization": zero,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0,
        **counts,
        **keys,
    }


def trained(
    case: str, stage: int = 0, num_micro: int = 1, **how: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and weights of a step, on this rank's part of each batch."""
    num_ranks = how.pop("num_ranks", 1)
    cfg = settings(stage, num_micro, num_ranks, **how.pop("keys", {}))
    step = fzero.make_train_step(net(), cfg, transforms=CASES[case][0](), **how)
    state, losses = step.init(), []
    for index in range(STEPS):
        state, metrics = step(
            state, tuple(x.chunk(step.world_size)[step.rank] for x in data(index))
        )
        losses.append(float(metrics.loss))
    return losses, step.gather(state)


def simulated(
    case: str, stage: int, num_micro: int = 1, by: Any = "lockstep"
) -> tuple[list[float], dict[str, Tensor]]:
    step = fzero.make_train_step(net(), settings(stage, num_micro, 2), transforms=CASES[case][0]())
    ranks = fzero.simulate(step, 2, by=by)
    state, losses = ranks.init(), []
    for index in range(STEPS):
        state, metrics = ranks(state, tuple(torch.stack(x.chunk(2)) for x in data(index)))
        losses.append(float(metrics.loss))
    return losses, ranks.gather(state)


def check(case: str, found: tuple[list[float], Mapping[str, Tensor]], rtol: float) -> None:
    losses, leaves = plain(case)
    assert found[0] == pytest.approx(losses, rel=rtol)
    for name, x in leaves.items():
        if found[1][name].dtype != torch.uint8:
            torch.testing.assert_close(found[1][name], x, rtol=10 * rtol, atol=rtol)
    assert losses[0] != losses[-1]


@EACH
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.covering(1)
def test_a_step_is_the_plain_loop_in_every_stage(case: str, stage: int) -> None:
    # Not to the bit: a norm, and a product with a scale, may be rounded in another order than
    # torch's own.
    check(case, trained(case, stage), 1e-6)


@EACH
def test_all_stages_and_real_ranks_have_the_same_bits(case: str, ranks: RankPool) -> None:
    losses, weights = simulated(case, 0)  # without accumulation, where stages sum in one order
    for stage in (1, 2, 3):
        others = simulated(case, stage)
        assert others[0] == losses and all(
            torch.equal(others[1][name], x) for name, x in weights.items()
        )
    for real in ranks(2, trained, case, 3, num_ranks=2):
        assert real[0] == losses and all(
            torch.equal(real[1][name], x) for name, x in weights.items()
        )


@EACH
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.covering(1)
def test_with_ranks_and_accumulation_too(case: str, stage: int) -> None:
    # sums over ranks and micro-batches are in another order
    check(case, simulated(case, stage, num_micro=2), 2e-6)


@EACH
def test_steps_that_only_add_to_sums_drop_the_gradients_of_frozen_weights(case: str) -> None:
    check(case, trained(case, 0, num_micro=4), 2e-6)


@pytest.mark.sample(3)
@EACH
def test_a_captured_step_is_the_plain_loop(case: str) -> None:
    num_micro = 2 if case in ("lora", "own") else 1
    check(case, trained(case, 3, num_micro, compile="step", compile_backend="aot_eager"), 2e-6)


@EACH
def test_ranks_stacked_are_the_plain_loop(case: str) -> None:
    check(case, simulated(case, 3, by="vmap"), 1e-5)  # batched products round differently


@pytest.mark.parametrize("case", ["lora", "lora, 8 bits", "weight norm", "own"])
def test_bf16_is_the_plain_loop_with_masters(case: str) -> None:
    losses, _ = trained(case, 3, keys={"bf16": {"enabled": True, "auto_cast": True}})
    expected, _ = plain(case, dtype=torch.bfloat16)
    # a rounding to 8 bits of the loss or of the scales
    assert losses == pytest.approx(expected, rel=2**-7)


@EACH
def test_checkpointed_blocks_see_the_same_values(case: str) -> None:
    assert trained(case, 3, checkpoint=1)[0] == trained(case, 3)[0]


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in CASES if case != "quantized"])
def test_compiled_blocks_see_the_same_values(case: str) -> None:
    check(case, trained(case, 3, compile="block", compile_backend="aot_eager"), 2e-6)


# --- composition ----------------------------------------------------------------------------------


def order_cases() -> dict[str, tuple[list[ModelTransform], Callable[[Tensor, Tensor], Tensor]]]:
    """Each with what modules see of W and BA."""
    rounds, adapter = (
        quantization_aware(BLOCKS, weight_bits=4, activation_bits=None),
        lora(BLOCKS, rank=2, alpha=3),
    )
    return {
        "lora over rounded": ([rounds, adapter], lambda w, ba: rows_of(4)(w) + ba),
        "rounded lora": ([adapter, rounds], lambda w, ba: rows_of(4)(w + ba)),
    }


@pytest.mark.parametrize("order", order_cases())
def test_the_list_is_the_order_of_views(order: str) -> None:
    transforms, seen = order_cases()[order]
    step = fzero.make_train_step(net(), settings(), transforms=transforms)
    state = step.init()
    for index in range(STEPS):
        state, _ = step(state, data(index))
    weights = step.gather(state)
    plain_model = net()
    plain_model.load_state_dict(merged(step, weights))
    for name in WEIGHTS:
        a, b = (weights[name.replace("weight", key)] for key in ("lora_A", "lora_B"))
        assert b.any() and torch.equal(
            plain_model.get_parameter(name), seen(weights[name], b @ a * (3 / 2))
        )
    assert step.evaluate(state, data(9)).item() == pytest.approx(
        plain_model(*data(9)).item(), rel=1e-6
    )


def test_both_orders_of_a_trained_length_and_adapters_train_both() -> None:
    for transforms in (
        [weight_norm(BLOCKS), lora(BLOCKS, 2)],
        [lora(BLOCKS, 2), weight_norm(BLOCKS)],
    ):
        step = fzero.make_train_step(net(), settings(3), transforms=transforms)
        state = step.init()
        before = step.gather(state)
        # B is 0 in the first, so that A does not move
        state, _ = step(step(state, data(0))[0], data(1))
        moved = {name for name, x in step.gather(state).items() if not torch.equal(x, before[name])}
        assert moved == {
            name.replace("weight", k) for name in WEIGHTS for k in ("lora_A", "lora_B", "weight_g")
        }


# --- stored in few bits ---------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_weights_are_bytes_in_the_state_and_round_once(bits: Any) -> None:
    plans = []
    for transform in (lora("*", 2), lora("*", 2, bits=bits)):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        plans.append(
            fzero.make_train_step(
                model, settings(3), loss_fn=lambda m, x: m(x).sum(), transforms=[transform]
            )
        )
    full, few = (step.plan.bytes_per_rank["parameters"] for step in plans)
    assert full - few == 2 * (64 * 64 * (32 - bits) // 8 - 64 * 4)
    weight = plans[1].spec.model[0].weight
    assert weight.dtype == torch.uint8 and weight.numel() == 64 * 64 * bits // 8


def test_packed_weights_can_have_groups_and_odd_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3), nn.Conv1d(3, 2, 5))
    kept = {name: x.detach().clone() for name, x in model.named_parameters()}
    step = fzero.make_train_step(
        model,
        settings(),
        loss_fn=lambda m, x: m(x).sum(),
        transforms=[packed("*", bits=4, group=3)],
    )
    plain_weights = merged(step, step.gather(step.init()))
    groups = {"0.weight": 8, "1.weight": 3, "2.weight": 10}
    for name, number in groups.items():
        assert torch.equal(plain_weights[name], symmetric(4, number)(kept[name]))
    assert plain_weights.keys() == kept.keys()


def test_packed_after_another_view_is_refused() -> None:
    step = fzero.make_train_step(net(), settings(), transforms=[lora(BLOCKS, 2), packed(BLOCKS)])
    state = step.init()
    with pytest.raises(ValueError, match="packed: must come before other transforms"):
        step(state, data(0))


def test_float_weights_are_not_taken_for_bytes() -> None:
    step = fzero.make_train_step(net(), settings(), transforms=[packed(BLOCKS)])
    with pytest.raises(ValueError, match="must have the model's shape"):
        step.init(net().state_dict())


# --- first values, states, weights ----------------------------------------------------------------


@pytest.mark.parametrize("case", ["lora", "weight norm", "own"])
def test_plain_state_dicts_and_models_on_meta_begin_as_a_model_with_values(case: str) -> None:
    step = fzero.make_train_step(net(), settings(3), transforms=CASES[case][0]())
    expected = step.gather(step.init())
    with torch.device("meta"):
        model = Net()
    blank = fzero.make_train_step(model, settings(3), transforms=CASES[case][0]())
    found = blank.gather(blank.init(net().state_dict()))
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], x) for name, x in expected.items()
    )
    drawn = blank.gather(blank.init())
    for name in (name for name in drawn if name.endswith("_g")):
        torch.testing.assert_close(drawn[name], drawn[name[:-2]].norm(dim=1, keepdim=True))


@EACH
def test_a_saved_state_goes_on_with_the_same_bits(case: str, tmp_path: Any) -> None:
    expected = trained(case, 2)
    step = fzero.make_train_step(net(), settings(3), transforms=CASES[case][0]())
    state, losses = step.init(), []
    for index in range(STEPS):
        if index == 2:
            fzero.save(state, tmp_path, step=step)
            step = fzero.make_train_step(net(1), settings(1), transforms=CASES[case][0]())
            state = fzero.load(tmp_path, step=step).state
        state, metrics = step(state, data(index))
        losses.append(float(metrics.loss))
    assert losses == expected[0]


def test_adapters_are_taken_out_of_merged_weights() -> None:
    step = fzero.make_train_step(net(), settings(), transforms=[lora(BLOCKS, 2)])
    state = step(step.init(), data(0))[0]
    weights = step.gather(state)
    plain_weights = merged(step, weights)
    assert plain_weights.keys() == net().state_dict().keys()
    again = unmerged(step, plain_weights, weights)
    for name, x in weights.items():
        torch.testing.assert_close(again[name], x, rtol=1e-6, atol=1e-7)  # (W + BA) - BA is rounded
    assert not torch.equal(plain_weights[WEIGHTS[0]], weights[WEIGHTS[0]])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.table(x)), x.flip(0))


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "transform",
    [
        lora("*", 2),
        lora("*", 2, bits=8),
        weight_norm("*"),
        quantization_aware("*", activation_bits=None),
    ],
    ids=["lora", "lora, 8 bits", "weight norm", "quantized"],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_tied_weight_has_one_view_for_all_its_users(
    transform: ModelTransform, stage: int
) -> None:
    torch.manual_seed(0)
    step = fzero.make_train_step(Tied(), settings(stage), transforms=[transform])
    state, x = step.init(), torch.arange(16) % 8
    first = step.evaluate(state, x)
    for _ in range(STEPS):
        model = Tied()
        model.load_state_dict(merged(step, step.gather(state)))
        state, metrics = step(state, x)
        assert metrics.loss.item() == pytest.approx(model(x).item(), rel=1e-6)
    assert metrics.loss != first


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lora, packed, weight_norm, quantization_aware])
def test_a_pattern_that_matches_nothing_is_an_error(make: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"got '\*.q_proj', which matches none of Net's; names look like blocks.0.value",
    ):
        fzero.make_train_step(net(), settings(), transforms=[make("*.q_proj")])
    with pytest.raises(ValueError, match="must be a pattern of names or a list of them, got 3"):
        make(3)
    with pytest.raises(
        ValueError,
        match=r"must match all modules of a tied weight, got 'table.weight' without .* 'table",
    ):
        fzero.make_train_step(Tied(), settings(), transforms=[make("head")])


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: lora("*", 0), "rank must be a positive integer, got 0"),
    (lambda: lora("*", alpha=-1), "alpha must be a positive number, got -1"),
    (lambda: packed("*", bits=3), "bits must be 8 or 4, got 3"),
    (lambda: packed("*", group=0), "group must be a positive integer, got 0"),
    (lambda: quantization_aware("*", weight_bits=0), "weight_bits must be 1 to 16"),
    (
        lambda: quantization_aware("*", weight_bits=None, activation_bits=None),
        "must be a number, got None and None",
    ),
    (lambda: quantization_aware("*", per="row"), "per must be 'channel' or 'tensor', got 'row'"),
    (lambda: step_with(lora(BLOCKS), lora("blocks.0.out")), "must add a tensor once, got two"),
    (lambda: step_with(lora(BLOCKS, trains="foot.*")), "trains: must match parameters, got 'foot"),
    (lambda: step_with(packed(BLOCKS), weight_norm(BLOCKS)), "needs a weight with a gradient"),
    (
        lambda: step_with(quantization_aware(BLOCKS), compile="block"),
        "activation_bits must be None with compile='block'",
    ),
]


def step_with(*transforms: Any, **how: Any) -> Any:
    return fzero.make_train_step(net(), settings(), transforms=transforms, **how)


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments_are_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_planner_counts_the_numbers_that_packed_bytes_stand_for() -> None:
    """Without room for live parameters no value is kept, and a unit's values stand
    beside its bytes.
    """
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    cfg = {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW"},
    }
    found = fzero.estimation.compare_plans(
        model,
        cfg,
        world_size=2,
        batch=torch.empty(2, 64, device="meta"),
        loss_fn=lambda net, x: net(x).sum(),
        device="cpu",
        transforms=[fzero.transforms.lora("*", rank=2, bits=8)],
    )
    assert found["stage 3"].step.most("views") >= 4 * 64 * 64
