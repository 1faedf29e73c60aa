"""Where the state of a pipeline comes from and goes to: `meta`, files of weights and
state, 16-bit exports; unusual layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from test_pipelines import (
    VOCABULARY,
    WIDTH,
    Block,
    Case,
    End,
    Norm,
    Start,
    assert_same as same_bits,
    data,
    flip,
    layers,
    simulated,
    tied_layers,
)
from torch import Tensor, nn

import fzero
from fzero.estimation import estimate_layers
from fzero.model.binding import Binding
from fzero.pipeline import LayerSpec, Pipeline, PipelineModule
from sharding import Mesh


class Flip(nn.Module):
    def forward(self, given: Any) -> Any:
        return flip(given)


class Blank(Start):
    """A first layer that can be filled: its own parameter is a module's."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.unused, 2.0)


class Scaled(Block):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)


def sequential() -> nn.Sequential:
    return nn.Sequential(
        Blank(), Scaled(), Scaled(p=0.1), Scaled(), Norm(in_place=True), Flip(), End()
    )


def specs() -> list[Any]:
    blocks = [LayerSpec(Scaled), LayerSpec(Scaled, p=0.1), LayerSpec(Scaled)]
    return [LayerSpec(Blank), *blocks, LayerSpec(Norm, True), flip, LayerSpec(End)]


def step_of(model: Any, stages: int, pipeline: Any = "1f1b") -> fzero.TrainStep:
    case = Case(stages)
    mesh = fzero.comms.AbstractAxis.of(case.mesh)
    loss_fn = None if isinstance(model, PipelineModule) else case.loss_fn
    return fzero.make_train_step(
        model, case.config(), mesh=mesh, pipeline=pipeline, loss_fn=loss_fn
    )


def module(stages: int) -> PipelineModule:
    return PipelineModule(specs(), num_stages=stages, loss_fn=Case().loss_fn)


def trained(
    step: fzero.TrainStep, weights: str | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    ranks: Any = fzero.simulate(step, by="lockstep")
    state = ranks.init() if weights is None else fzero.load_weights(weights, step=ranks)
    losses = []
    for batch in data(2, 4, 2):
        state, metrics = ranks(state, batch)
        losses.append(metrics.loss.item())
    return losses, ranks.gather(state)


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0] and one[1].keys() == other[1].keys()
    assert all(torch.equal(x, other[1][name]) for name, x in one[1].items())


def test_a_plain_sequential_trains_with_the_same_bits_on_all_stages_and_from_meta(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = sequential()
    wanted = trained(step_of(model, 1))
    assert_same(trained(step_of(model, 2)), wanted)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with torch.device("meta"):
        empty = sequential()
    first = trained(step_of(empty, 1))
    assert first[0] != wanted[0]
    # the same values, whatever the stages
    assert_same(trained(step_of(empty, 3, "zero_bubble")), first)
    assert_same(trained(step_of(empty, 3), str(tmp_path)), wanted)
    assert all(parameter.is_meta for parameter in empty.parameters())


@pytest.mark.long
def test_layers_described_by_specs_may_be_built_on_meta(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = sequential()
    wanted = trained(step_of(model, 1))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    on_meta = Pipeline(device="meta")
    made = [trained(step_of(module(stages), stages, on_meta)) for stages in (1, 2, 4)]
    for other in made[1:]:
        assert_same(other, made[0])
    step = step_of(module(2), 2, on_meta)
    assert all(p.is_meta for p in step.runtime.spec.model.parameters())
    assert_same(trained(step, str(tmp_path)), wanted)


@pytest.mark.long
def test_stages_cut_by_cost_train_with_the_same_bits() -> None:
    tokens = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    costs = estimate_layers(module(2), Case().config(), batch=(tokens, tokens), data=2)
    wanted = trained(step_of(module(1), 1))
    step = step_of(module(2), 2, Pipeline(partition=costs))
    assert_same(trained(step), wanted)
    assert_same(trained(step_of(module(2), 2, Pipeline(partition=[0, 1, 7]))), wanted)


# --- unusual layers -------------------------------------------------------------------------------


class Twice(torch.autograd.Function):
    """A function of one's own with two outputs, of which a layer may use one; it cannot
    be differentiated twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        return x * weight, x + weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, of_product: Tensor | None, of_sum: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        zero = torch.zeros_like(x)
        of_product, of_sum = (zero if grad is None else grad for grad in (of_product, of_sum))
        return of_product * weight + of_sum, (of_product * x + of_sum).sum((0, 1))


class Plain(nn.Module):
    """A layer of one tensor.

    Args:
        frozen: whether nothing of it trains.
        own: whether it computes by a function of its own; twice with one weight if it
            is 2.
        factor: of what goes into its tanh: where it is large, a gradient in fp16
            overflows here first.
    """

    def __init__(self, frozen: bool = False, own: int = 0, factor: float = 1.0) -> None:
        super().__init__()
        self.linear, self.own, self.factor = nn.Linear(WIDTH, WIDTH), own, factor
        self.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.own):
            x = Twice.apply(x, self.linear.bias)[0]
        return torch.tanh(self.linear(x) * self.factor)


class First(nn.Embedding):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__(VOCABULARY, WIDTH)
        self.requires_grad_(not frozen)


class Last(nn.Linear):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__(WIDTH, VOCABULARY)
        self.requires_grad_(not frozen)


def frozen_layers(pattern: str) -> Callable[[float], list[Any]]:
    """Layers of which those with a 1 in the pattern are frozen."""
    kinds = [First, *[Plain] * (len(pattern) - 2), Last]
    return lambda p: [
        LayerSpec(kind, frozen=bit == "1") for kind, bit in zip(kinds, pattern, strict=True)
    ]


def some_layers(number: int, **of_one: Any) -> Callable[[float], list[Any]]:
    """So many layers; `of_one`: what the third one is."""
    blocks = [LayerSpec(Plain, **(of_one if index == 1 else {})) for index in range(number - 2)]
    return lambda p: [LayerSpec(First), *blocks, LayerSpec(Last)]


def check_law(case: Case, *divisions: tuple[int, str]) -> list[tuple[float, ...]]:
    reference = simulated(case._replace(stages=0))
    for stages, order in divisions:
        same_bits(simulated(case._replace(stages=stages, order=order)), reference)
    return reference[0]


@pytest.mark.parametrize(
    "pattern",
    [
        "11100011",
        *(
            pytest.param(p, marks=pytest.mark.long)
            for p in ("11110000", "00001111", "00111100", "10101010", "11111110")
        ),
    ],
)
def test_whole_stages_may_be_frozen(pattern: str) -> None:
    """No gradient goes back to a stage that needs none, and one goes through a frozen
    stage to one that trains.
    """
    check_law(
        Case(made=frozen_layers(pattern)), (2, "1f1b"), (4, "zero_bubble"), (2, "interleaved:2")
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "chunks", "num_micro"), [(7, 2, 4), (7, 3, 4), (8, 3, 3), (9, 2, 5), (6, 3, 1)]
)
def test_layers_and_micro_batches_need_not_divide(number: int, chunks: int, num_micro: int) -> None:
    check_law(
        Case(made=some_layers(number), num_micro=num_micro),
        (2, f"interleaved:{chunks}"),
        (3, "1f1b"),
    )


@pytest.mark.parametrize("own", [pytest.param(1, marks=pytest.mark.long), 2])
def test_functions_of_ones_own_may_be_cut_into_two_backwards(own: int) -> None:
    check_law(Case(made=some_layers(6, own=own)), (3, "zero_bubble"))


@pytest.mark.long
def test_an_overflow_of_one_stage_is_one_of_all() -> None:
    keys = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}
    for factor in (1.0, 256.0):
        case = Case(made=some_layers(8, factor=factor), num_steps=8, keys=keys)
        curve = check_law(case, (2, "1f1b"), (4, "zero_bubble"), (4, "gpipe"))
        assert len({bool(overflow) for *_, overflow, _ in curve}) == 2


def test_the_first_parameter_whose_gradient_overflows_is_that_of_the_first_layer() -> None:
    # every gradient overflows
    keys = {"fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}}
    ranks = fzero.simulate(Case(2, made=some_layers(4), keys=keys).step(), by="lockstep")
    state, metrics = ranks(ranks.init(), data(1, 4, 2)[0])
    assert metrics.overflow and ranks.first_overflow(state) == "0.weight"


def test_a_stage_without_module_buffers_binds_its_model_once_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = fzero.simulate(Case(2, made=some_layers(4), num_data=1).step(), by="lockstep")
    first, second = data(2, 4, 1)
    # which also looks for gradients that the model has written by itself
    state, _ = ranks(ranks.init(), first)
    bound, to = list[Any](), Binding.to

    def counted(self: Binding, *given: Any) -> Any:
        bound.append(self)
        return to(self, *given)

    monkeypatch.setattr(Binding, "to", counted)
    ranks(state, second)
    assert len(bound) == 2


# --- files ----------------------------------------------------------------------------------------


def in_files(path: Path) -> dict[str, Any]:
    block = {"device": "nvme", "nvme_path": str(path)}
    return {
        "zero_optimization": {"stage": 1, "sub_group_size": 64, "offload_optimizer": block},
        "bf16": {"enabled": True},
        "data_types": {"buffer_dtype": "bf16"},
    }


@pytest.mark.long
def test_optimizer_state_in_files_gives_the_same_bits(tmp_path: Path) -> None:
    keys = in_files(tmp_path / "files")
    wanted = simulated(
        Case(2, keys={key: value for key, value in keys.items() if key != "zero_optimization"})
    )
    for stages, stage in ((1, 1), (2, 1), (4, 1), (2, 3)):
        case = Case(
            stages, keys=keys | {"zero_optimization": keys["zero_optimization"] | {"stage": stage}}
        )
        assert any(p.kind == "nvme" for p in case.step().plan.placements.values())
        assert str(simulated(case)[0]) == str(wanted[0])
    with pytest.raises(
        fzero.ConfigError, match=r"where stages tie layers, .* got 'nvme' with the tied embed"
    ):
        simulated(Case(2, made=tied_layers, keys=keys))


@pytest.mark.long
def test_state_in_files_is_saved_loaded_and_moved_to_other_stages(tmp_path: Path) -> None:
    first, other = (
        fzero.simulate(Case(stages, keys=in_files(tmp_path)).step(), by="lockstep")
        for stages in (2, 4)
    )
    batches = data(3, 4, 2)
    state, _ = first(first.init(), batches[0])
    fzero.save(state, tmp_path / "saved", step=first)
    moved = fzero.reshard(state, first, other)
    loaded = fzero.load(tmp_path / "saved", step=other).state
    curves = []
    for ranks, own in ((first, state), (other, moved), (other, loaded)):
        for batch in batches[1:]:
            own, metrics = ranks(own, batch)
        curves.append(metrics.loss.item())
    assert len(set(curves)) == 1


def trains_in_files(path: str) -> list[float]:
    """On a real rank; two stages have ranks of the same number in "data", and files of
    their own.
    """
    case = Case(2, num_data=1, keys=in_files(Path(path)))
    step = case.step(case.mesh)
    state, losses = step.init(), []
    for batch in data(2, 4, 1):
        state, metrics = step(state, tuple(x[0] for x in batch))
        losses.append(metrics.loss.item())
    return losses


def test_ranks_of_two_stages_keep_files_in_one_folder(ranks: RankPool, tmp_path: Path) -> None:
    keys = in_files(tmp_path) | {"zero_optimization": {"stage": 1}}
    wanted = [loss for loss, *_ in simulated(Case(2, num_data=1, num_steps=2, keys=keys))[0]]
    assert ranks(2, trains_in_files, str(tmp_path)) == [wanted, wanted]


@pytest.mark.parametrize("made", [tied_layers, pytest.param(layers, marks=pytest.mark.long)])
def test_weights_of_all_stages_are_exported_in_16_bits(made: Any, tmp_path: Path) -> None:
    found = []
    for stages in (1, 3):
        ranks = fzero.simulate(Case(stages, made=made).step(), by="lockstep")
        state = ranks.init()
        fzero.checkpoint.save_16bit_model(state, tmp_path / str(stages), step=ranks)
        found.append(ranks.gather(fzero.load_weights(tmp_path / str(stages), step=ranks)))
        full = ranks.gather(state)
        for name, x in found[-1].items():
            assert torch.equal(
                x,
                full[name].bfloat16().float()
                if full[name].is_floating_point() and "running" not in name
                else full[name],
            )
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())
    files = [sorted(path.name for path in (tmp_path / str(stages)).iterdir()) for stages in (1, 3)]
    assert files[0] == files[1]


@pytest.mark.long
@pytest.mark.parametrize("has_files", [False, True])
def test_stages_without_parameters_train_save_load_move_and_export(
    has_files: bool, tmp_path: Path
) -> None:
    keys = in_files(tmp_path / "files") if has_files else {}
    case = Case(
        3,
        keys={key: keys[key] for key in keys if key == "zero_optimization"}
        | {"train_batch_size": 12, "gradient_accumulation_steps": 3},
    )
    batch = tuple(torch.randn(12, 5) for _ in range(2))

    def made(stages: int, num_data: int) -> Any:
        specs = [LayerSpec(nn.Linear, 5, 7), torch.tanh, torch.relu, LayerSpec(nn.Linear, 7, 5)]
        model = PipelineModule(
            specs, num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform"
        )
        mesh = fzero.comms.AbstractAxis.of(Mesh.of(pipe=stages, data=num_data))
        return fzero.simulate(fzero.make_train_step(model, case.config(), mesh=mesh), by="lockstep")

    def after(ranks: Any, state: Any) -> tuple[Any, float]:
        state, metrics = ranks(state, tuple(x.reshape(ranks.plan.world_size, -1, 5) for x in batch))
        return state, metrics.loss.item()

    first, other = made(4, 2), made(1, 2)
    state, loss = after(first, first.init())
    assert loss == after(other, other.init())[1]
    fzero.save(state, tmp_path / "saved", step=first)
    fzero.checkpoint.save_16bit_model(state, tmp_path / "weights", step=first)
    wide = made(3, 2)
    moved, loaded = (
        fzero.reshard(state, first, wide),
        fzero.load(tmp_path / "saved", step=wide).state,
    )
    fzero.load_weights(tmp_path / "weights", step=wide)
    assert len({after(*pair)[1] for pair in ((first, state), (wide, moved), (wide, loaded))}) == 1
