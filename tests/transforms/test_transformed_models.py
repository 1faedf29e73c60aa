"""A model into which transforms have put tensors: further steps of it, first values,
checkpoints, and calls outside of a step.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from compressing import data, net, technique
from ranks import RankPool
from torch import Tensor, nn

import fzero
from fzero.data import RandomLTD, fixed_linear
from fzero.deepspeed.compression.compress import init_compression
from fzero.deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd
from fzero.estimation.activation_trace import trace_activations
from fzero.model.transforms import changes_of
from fzero.transforms import (
    Changes,
    FunctionView,
    lora,
    merged,
    packed,
    quantization_aware,
    weight_norm,
)

UP, OUT = "blocks.*.mlp.up", "blocks.*.out"


def settings(stage: int = 0, num_ranks: int = 1, **keys: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    adamw = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}}
    size = 16 // num_ranks
    return {
        "zero_optimization": zero,
        "optimizer": adamw,
        "train_micro_batch_size_per_gpu": size,
        **keys,
    }


def step_of(
    model: nn.Module, *transforms: Any, cfg: dict[str, Any] | None = None, **how: Any
) -> Any:
    return fzero.make_train_step(
        model, settings() if cfg is None else cfg, transforms=transforms, **how
    )


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


# --- further steps of one model -------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("others", [[lora(OUT, 2)], []])
@pytest.mark.parametrize("first", [lora(UP, 2), weight_norm(UP), packed(UP)])
def test_a_step_must_use_what_an_earlier_one_has_put_into_the_model(
    first: Any, others: list[Any]
) -> None:
    """Without a view it would be an ordinary parameter, which weight decay shrinks; and
    bytes would be no weight.
    """
    model = net()
    step_of(model, first)
    with pytest.raises(
        ValueError,
        match=r"must use all that transforms of an earlier .* none that uses 'blocks.0.mlp.up",
    ):
        step_of(model, *others)
    step_of(model, first, *others)


@pytest.mark.parametrize("first", [lora(UP, 2, bits=8), weight_norm(UP), packed(UP)])
def test_a_step_that_is_not_made_leaves_nothing_in_the_model(first: Any) -> None:
    def refuses(spec: Any) -> Any:
        assert len([*spec.model.named_parameters()]) > len(before)
        raise ValueError("refused")

    model = net()
    before, expected = dict(model.named_parameters()), model(*data(0))
    with pytest.raises(ValueError, match="refused"):
        step_of(model, first, refuses)
    assert [(name, id(x)) for name, x in model.named_parameters()] == [
        (name, id(x)) for name, x in before.items()
    ]
    assert torch.equal(model(*data(0)), expected)
    step_of(model)


def test_a_step_leaves_the_flags_of_the_model_as_they_are() -> None:
    model = net()
    before = {name: param.requires_grad for name, param in model.named_parameters()}
    step = step_of(model, lora(UP, 2, trains="head.*"))
    assert {
        name: param.requires_grad for name, param in model.named_parameters() if name in before
    } == before
    trained = {name for b in step.plan.flat_buffers if b.trainable for name in b.layout.names}
    adapters = {f"blocks.{index}.mlp.up.lora_{key}" for index in range(2) for key in "AB"}
    assert trained == adapters | {"head.weight", "head.bias"}
    after = step_of(model, lora(UP, 2, trains="head.bias"), after=step)
    now = {name for b in after.plan.flat_buffers if b.trainable for name in b.layout.names}
    assert now == adapters | {"head.bias"}
    model.head.weight.requires_grad_(False)
    with pytest.raises(
        ValueError,
        match=r"'head.weight' was frozen; .* a transform freezes parameters \(lora\), its trains",
    ):
        after(after.init(), data(0))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_of_frozen_parameters_is_planned_as_its_step(stage: int) -> None:
    cfg, batch = settings(stage), tuple(x.to("meta") for x in data(0))
    step = step_of(net(), lora(UP, 2), cfg=cfg)
    found = fzero.estimation.compare_plans(
        net(), cfg, batch=batch, device="cpu", transforms=[lora(UP, 2)]
    )
    held = found[f"stage {stage}"].plan.bytes_per_rank
    assert held == step.plan.bytes_per_rank


@pytest.mark.parametrize("make", [lambda: lora(UP, 2), lambda: lora(UP, 2, bits=8)])
def test_another_seed_draws_other_adapters(make: Any) -> None:
    model = net()
    first, second = step_of(model, make(), seed=0), step_of(model, make(), seed=1)
    values = [step.gather(step.init()) for step in (first, second, step_of(net(), make(), seed=1))]
    name = "blocks.0.mlp.up.lora_A"
    assert not torch.equal(values[0][name], values[1][name])
    assert all(torch.equal(values[1][key], x) for key, x in values[2].items())
    # the second step has not changed the first
    assert torch.equal(first.gather(first.init())[name], values[0][name])


def test_values_that_a_script_gives_adapters_are_first_values() -> None:
    model = net()
    step_of(model, lora(UP, 2))
    model.blocks[0].mlp.up.lora_B.data.fill_(0.5)
    step = step_of(model, lora(UP, 2), seed=1)
    assert step.gather(step.init())["blocks.0.mlp.up.lora_B"].eq(0.5).all()


def test_lengths_follow_weights_that_are_loaded_into_the_model() -> None:
    model = net()
    step = step_of(model, weight_norm(UP))
    model.load_state_dict(net(1).state_dict(), strict=False)
    weights = step.gather(step.init())
    torch.testing.assert_close(
        weights["blocks.0.mlp.up.weight_g"],
        net(1).blocks[0].mlp.up.weight.norm(dim=1, keepdim=True),
    )


# --- first values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transform", "key"),
    [(lora(UP, 2), "lora_B"), (lora(UP, 2, bits=8), "lora_A"), (weight_norm(UP), "weight_g")],
)
def test_what_a_transform_adds_is_given_whole_or_not_at_all(transform: Any, key: str) -> None:
    step = step_of(net(), transform)
    weights = step.gather(step.init())
    some = {name: x for name, x in weights.items() if name != f"blocks.0.mlp.up.{key}"}
    with pytest.raises(
        ValueError,
        match=rf"must have all parameters that \w+ adds, .* without 'blocks.0.mlp.up.{key}' \(1 ",
    ):
        step.init(some)
    trained = {"lora_A", "lora_B", "weight_g"}
    none = {name: x for name, x in weights.items() if name.rpartition(".")[2] not in trained}
    assert all(torch.equal(x, weights[name]) for name, x in step.gather(step.init(none)).items())


def test_rows_without_a_direction_have_no_length_to_train() -> None:
    torch.manual_seed(0)
    table = nn.Sequential(nn.Embedding(5, 4, padding_idx=2))
    step = step_of(table, weight_norm("*"), loss_fn=mean_square)
    state, metrics = step(step.init(), torch.arange(16) % 5)
    plain = merged(step, step.gather(state))["0.weight"]
    assert (
        metrics.loss.isfinite() and plain.isfinite().all() and not plain[2].any() and plain[1].any()
    )
    linear = nn.Sequential(nn.Linear(4, 3))
    with torch.no_grad():
        linear[0].weight[1] = 0
    with pytest.raises(
        ValueError, match=r"row must have a direction, got zeros in row 1 of '0.weight'"
    ):
        step_of(linear, weight_norm("*"), loss_fn=mean_square)


def test_a_transposed_convolution_has_a_length_for_each_output() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose1d(3, 5, 2))
    step = step_of(model, weight_norm("*"), loss_fn=mean_square)
    weights = step.gather(step.init())
    torch.testing.assert_close(
        weights["0.weight_g"], weights["0.weight"].norm(dim=(0, 2), keepdim=True)
    )
    with pytest.raises(ValueError, match="a transposed convolution must have groups=1, got 3"):
        step_of(nn.Sequential(nn.ConvTranspose1d(3, 6, 2, groups=3)), weight_norm("*"))
    with pytest.raises(
        ValueError,
        match=r"per must be 'tensor' for '0.weight', whose rows are inputs \(ConvTranspose1d\)",
    ):
        step_of(nn.Sequential(nn.ConvTranspose1d(3, 5, 2)), quantization_aware("*"))


# --- checkpoints ----------------------------------------------------------------------------------


OTHERS: list[tuple[list[Any], list[Any], str]] = [
    (
        [lora(UP, 2, alpha=16)],
        [lora(UP, 2, alpha=32)],
        r"'lora' was Lora\(.*alpha=16.* and is Lora\(.*alpha=32",
    ),
    (
        [quantization_aware(UP)],
        [],
        r"'quantization_aware' was QuantizationAware\(.* and is not there",
    ),
    (
        [],
        [quantization_aware(UP)],
        r"'quantization_aware' was not there and is QuantizationAware\(",
    ),
    (
        [quantization_aware(UP), lora(UP, 2)],
        [lora(UP, 2), quantization_aware(UP)],
        "their order was quantization_aware, lora and is lora, quantization_aware",
    ),
]


@pytest.mark.parametrize(("before", "now", "message"), OTHERS)
def test_a_checkpoint_says_with_which_transforms_it_was_saved(
    before: list[Any], now: list[Any], message: str, tmp_path: Path
) -> None:
    step = step_of(net(), *before)
    fzero.save(step.init(), tmp_path, step=step)
    with pytest.warns(
        UserWarning, match=f"the model had other transforms in the job that saved, .*{message}"
    ):
        fzero.load(tmp_path, step=step_of(net(), *now))


def test_transforms_that_change_no_number_are_not_compared(tmp_path: Path) -> None:
    step = step_of(net(), lora(UP, 2), checkpoint=1)
    fzero.save(step.init(), tmp_path, step=step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fzero.load(tmp_path, step=step_of(net(), lora(UP, 2)))


# --- values under autocast, and gradients of several ----------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("compile", [None, "step"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_view_has_one_dtype_in_forward_and_backward_under_autocast(
    stage: int, compile: Any
) -> None:
    seen: list[torch.dtype] = []

    def turned(weight: Tensor, by: Tensor) -> Tensor:
        seen.append((weight @ by).dtype)
        return weight @ by

    def transform(spec: Any) -> Changes:
        if not hasattr(spec.model[0], "turn"):
            spec.model[0].register_parameter("turn", nn.Parameter(torch.eye(8)))
        view, added = FunctionView(turned, ("0.turn",)), frozenset({"0.turn"})
        return Changes(name="turned", views={"0.weight": (view,)}, added=added)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    step = step_of(
        nn.Sequential(nn.Linear(8, 8)),
        transform,
        cfg=settings(stage),
        loss_fn=loss,
        compile=compile,
        compile_backend="aot_eager",
    )
    step(step.init(), torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))
    assert seen and {*seen} == {torch.float32}


def test_a_value_brings_the_gradients_of_all_its_views() -> None:
    step = step_of(net(), weight_norm(OUT), lora(OUT, 2))
    keys = [f"blocks.0.out.{key}" for key in ("weight_g", "lora_A", "lora_B")]
    assert changes_of(step.spec).relays["blocks.0.out.weight"] == tuple(keys)
    batch = tuple(x.to("meta") for x in data(0))
    found = trace_activations(
        step.spec.model, settings(), batch, device="cpu", changes=step.spec.changes
    )
    assert {event.name for event in found.events if event.kind == "grad"} >= {*keys}


# --- bad input ------------------------------------------------------------------------------------


def changing(**fields: Any) -> Any:
    return lambda spec: Changes(name="own", **fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: changing(views={"head.weight": FunctionView(torch.tanh)}),
            "must map each parameter's name to a tuple of views",
        ),
        (
            lambda: changing(views={"head.weight": (torch.tanh,)}),
            "to a tuple of views, got .*tanh.* for 'head.weight'",
        ),
        (
            lambda: changing(views=[("head.weight", ())]),
            "to a tuple of views, got .* for '\\(all\\)' from 'own'",
        ),
        (
            lambda: changing(forwards=lambda call: {"foot": lambda name, module: module.forward}),
            "forwards must be of modules of the model, got 'foot' from 'own'; names look like "
            "blocks, blocks.0",
        ),
    ],
)
def test_changes_of_something_else_are_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step = step_of(net(), make())
        step(step.init(), data(0))


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "transform", [packed("*"), lora("*", 2, bits=8), lora("*", 2), weight_norm("*")]
)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_weights_without_elements_are_refused(transform: Any, shape: tuple[int, int]) -> None:
    with pytest.raises(
        ValueError, match=r"must match weights with elements, got '0.weight' of shape"
    ):
        step_of(nn.Sequential(nn.Linear(*shape)), transform)


def test_packed_modules_say_that_they_need_a_step() -> None:
    model = net()
    step = step_of(model, packed(UP))
    with pytest.raises(ValueError, match="a Linear with packed weights must run in a step"):
        model(*data(0))
    state = step.init()
    found = step.inspect(state, lambda: model(*data(0)))
    plain = net()
    plain.load_state_dict(merged(step, step.gather(state)))
    torch.testing.assert_close(found, plain(*data(0)), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        torch.func.functional_call(model, plain.state_dict(), data(0)), found, rtol=1e-6, atol=0
    )


class ReadsInside(nn.Module):
    """Computes with weights of modules that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict(
            {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)}
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inner["a"], self.inner["b"]
        x = nn.functional.linear(x, a.weight, a.bias)
        out: Tensor = self.inner["c"](torch.func.functional_call(a, dict(b.named_parameters()), x))
        return out


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("compile", [None, "step"])
def test_packed_weights_are_numbers_where_other_modules_read_them(
    stage: int, compile: Literal["step"] | None
) -> None:
    torch.manual_seed(0)
    model, x = ReadsInside(), torch.randn(4, 4)
    step = step_of(
        model,
        packed(["inner.a", "inner.b"]),
        cfg=settings(stage) | {"train_micro_batch_size_per_gpu": 4},
        loss_fn=mean_square,
        compile=compile,
        compile_backend="aot_eager",
    )
    for call in (model, torch.compile(model, backend="eager")) if compile else (model,):
        with pytest.raises(ValueError, match="a Linear with packed weights must run in a step"):
            call(x)
    plain, state = ReadsInside(), step.init()
    plain.load_state_dict(merged(step, step.gather(state)))
    torch.testing.assert_close(step.evaluate(state, x), mean_square(plain, x), rtol=1e-6, atol=0)
    _, metrics = step(state, x)
    torch.testing.assert_close(metrics.loss.float(), mean_square(plain, x), rtol=1e-6, atol=0)


def test_bytes_are_never_trained() -> None:
    step = step_of(net(), lora(UP, 2, bits=8, trains="*"))
    frozen = {name for b in step.plan.flat_buffers if not b.trainable for name in b.layout.names}
    assert frozen == {
        f"blocks.{index}.mlp.up.{key}" for index in range(2) for key in ("weight", "weight_scale")
    }
    with pytest.raises(
        ValueError, match=r"trains: must match parameters, got 'blocks.0.mlp.up.weight'"
    ):
        step_of(step.spec.model, lora(UP, 2, bits=8, trains="blocks.0.mlp.up.weight"))


# --- beside other features ------------------------------------------------------------------------


def losses_of(stage: int, num_ranks: int = 1, transform: Any = None) -> list[float]:
    step = step_of(net(), transform or lora(UP, 2), cfg=settings(stage, num_ranks))
    state, losses = step.init(), []
    for index in range(3):
        state, metrics = step(
            state, tuple(x.chunk(step.world_size)[step.rank] for x in data(index))
        )
        losses.append(float(metrics.loss))
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_real_ranks_train_adapters_as_one(stage: int, ranks: RankPool) -> None:
    for found in ranks(2, losses_of, stage, num_ranks=2):
        assert found == pytest.approx(losses_of(stage), rel=1e-5)


@pytest.mark.parametrize("transform", [lora(UP, 2), lora(UP, 2, bits=8), weight_norm(UP)])
def test_views_read_parameters_from_files(transform: Any, tmp_path: Path) -> None:
    found = []
    for device in ("nvme", "none"):
        cfg = settings(3, bf16={"enabled": True, "auto_cast": True})
        for key in ("offload_param", "offload_optimizer"):
            cfg["zero_optimization"][key] = {
                "device": device,
                **({"nvme_path": str(tmp_path)} if device == "nvme" else {}),
            }
        step = step_of(net(), transform, cfg=cfg)
        state = step.init()
        for index in range(2):
            state, _ = step(state, data(index))
        found.append(step.gather(state))
    assert all(torch.equal(found[0][name], x) for name, x in found[1].items())


@pytest.mark.parametrize("transform", [lora(UP, 2), weight_norm(UP), quantization_aware(UP)])
def test_a_step_with_other_rates_has_the_same_views(transform: Any) -> None:
    step = step_of(net(), transform, cfg=settings(3))
    state = step(step.init(), data(0))[0]
    before, loss = step.gather(state), step.evaluate(state, data(1))
    still = step.following([0.0])
    assert still.evaluate(state, data(1)) == loss
    assert all(
        torch.equal(before[name], x) for name, x in still.gather(still(state, data(1))[0]).items()
    )


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x)) - torch.tanh(self.up(x.flip(1)))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        return (self.head(y) - x.flip(1)).square().mean()


@pytest.mark.parametrize(
    "transform", [lora("layers.*", 2), weight_norm("layers.*"), lora("layers.*", 2, bits=4)]
)
def test_dropped_tokens_leave_views_as_they_are(transform: Any) -> None:
    """All runners see the same; without dropping the losses are others."""
    found = []
    for stage, drops, how in ((0, True, {}), (3, True, {"checkpoint": 1}), (3, False, {})):
        torch.manual_seed(0)
        model: nn.Module = Layers()
        if drops:
            model = RandomLTD(layers=[1], schedule=fixed_linear(4, 8, steps=4, multiple=2)).wrap(
                model, Layer
            )
        step = step_of(model, transform, cfg=settings(stage), **how)
        state, losses = step.init(), []
        for index in range(2):
            x = torch.randn(16, 8, 8, generator=torch.Generator().manual_seed(index))
            state, metrics = step(state, x)
            losses.append(metrics.loss.item())
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-6) and found[0] != pytest.approx(
        found[2], rel=1e-3
    )


def test_layers_are_converted_after_compression() -> None:
    """An engine that is converted then trains as a step that drops tokens from its
    start.
    """
    quantized = technique(
        {"start_bits": 8, "target_bits": 4, "quantization_period": 1}, ["up"], schedule_offset=1
    )
    pruned = technique({"dense_ratio": 0.5}, ["head"], method="topk", schedule_offset=1)
    lengths = {"require_steps": 4, "seq_per_step": 2}
    ltd = {
        "enabled": True,
        "total_layer_num": 3,
        "random_ltd_layer_num": 1,
        "random_ltd_layer_id": [1],
        "model_mask_name": None,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "layer_token_lr_schedule": {"enabled": False},
        "random_ltd_schedule": {
            "min_value": 4,
            "max_value": 8,
            "schedule_type": "fixed_linear",
            "schedule_config": lengths,
        },
    }
    compress = {
        "compression_training": {"weight_quantization": quantized, "sparse_pruning": pruned}
    }
    efficiency = {
        "enabled": True,
        "seed": 1234,
        "data_routing": {"enabled": True, "random_ltd": ltd},
    }
    cfg = settings(3, data_efficiency=efficiency, **compress)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Layers()

    batches = [
        torch.randn(16, 8, 8, generator=torch.Generator().manual_seed(index)) for index in range(4)
    ]
    model = init_compression(made(), cfg)
    engine, losses = convert_to_random_ltd(fzero.initialize(model=model, config=cfg)[0], Layer), []
    for x in batches:
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    ltd_of_step = RandomLTD(layers=[1], schedule=fixed_linear(4, 8, steps=4, multiple=2))
    step, expected = step_of(ltd_of_step.wrap(made(), Layer), cfg=settings(3, **compress)), []
    state = step.init()
    for x in batches:
        state, metrics = step(state, x)
        expected.append(metrics.loss.item())
    assert losses == expected
