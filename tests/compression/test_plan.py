"""What a configuration compresses in a model, and what it may not ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressing import ALL, net, settings, technique
from torch import nn

import fzero
from fzero import ConfigError, ConfigWarning
from fzero.compression import clean, compression, prepare, start_of_student
from fzero.config.compression import LayerReduction


def test_a_plan_prints_what_compresses_each_parameter_and_from_when() -> None:
    plan = compression(settings(ALL), net())
    text = str(plan).splitlines()
    assert (
        "blocks.0.out.weight     8→4 bits (period 1, doubling), symmetric, 4 groups, from update 1"
        in text
    )
    assert "blocks.1.mlp.up.bias    row mask, keeps 0.5 by scores, from update 1" in text
    assert [str(x).partition(" ")[0] for x in plan.params["blocks.0.mlp.up.weight"]] == [
        "8→4",
        "sparse",
        "row",
    ]
    assert str(compression(settings({}), net())) == "no compression" and not compression({}, net())


def test_a_plan_changes_no_model_and_a_step_keeps_its_modules_and_names() -> None:
    model = net()
    before, modules = dict(model.state_dict()), list(model.modules())
    compression(settings(ALL), model)
    assert model.state_dict().keys() == before.keys()
    step = fzero.make_train_step(model, settings(ALL))
    assert list(model.modules()) == modules
    added = {name for name in model.state_dict() if name not in before}
    assert {name.rpartition(".")[2] for name in added} == {
        *("sparse_mask_scores", "row_mask_scores", "head_pruning_scores", "x_min_max")
    }
    assert all(
        torch.equal(x, before[name]) for name, x in model.state_dict().items() if name in before
    )
    # nothing is registered twice
    assert fzero.make_train_step(model, settings(ALL)).plan == step.plan


def quantization(modules: list[str], **params: Any) -> dict[str, Any]:
    shared = {
        "quantize_groups": params.pop("quantize_groups", 1),
        "quantization_type": params.pop("type", "symmetric"),
    }
    return {"weight_quantization": technique({"target_bits": 4, **params}, modules, **shared)}


PRUNED = {"dense_ratio": 0.5}


@pytest.mark.parametrize(
    ("techniques", "message"),
    [
        (quantization(["("]), "must be a regular expression"),
        (quantization(["up", "mlp"]), "must name each module once, got 'blocks.0.mlp.up'"),
        (
            quantization(["up"], quantize_groups=5),
            "quantize_groups: must divide .* got 5 for 'blocks.0.mlp.up.weight' with 96",
        ),
        (
            quantization(["up"], target_bits=2, type="asymmetric"),
            "must be at least 3 where quantization_type is 'asymmetric'",
        ),
        (quantization(["up"], start_bits=2), "start_bits: must be at least target_bits, 4, got 2"),
        (
            {"row_pruning": technique({"dense_ratio": 0.0}, ["up"])},
            "dense_ratio: must be greater than 0, got 0",
        ),
        ({"row_pruning": technique({}, ["up"])}, "dense_ratio: is required"),
        (
            {"row_pruning": technique(PRUNED, [])},
            "modules: must have an expression, or the group compresses nothing",
        ),
        (
            {"row_pruning": technique(PRUNED, ["up"], metod="l1")},
            "metod: unknown key; did you mean 'method'",
        ),
        (
            {"sparse_pruning": technique(PRUNED, ["up"], method="snip_momentum")},
            "must be 'l1' or 'topk', got 'snip_momentum'",
        ),
        (
            {"head_pruning": technique(PRUNED, ["out"], num_heads=3)},
            "num_heads: must divide the columns of 'blocks.0.out', 8",
        ),
        ({"head_pruning": technique(PRUNED, ["out"])}, "num_heads: is required"),
        (
            {"head_pruning": technique(PRUNED, ["out"], method="l1", num_heads=4)},
            "method: must be 'topk'",
        ),
        (
            {"row_pruning": technique(PRUNED, ["up"], [["head"]])},
            "must match as many modules as are pruned, 2, got 1",
        ),
        (
            {"row_pruning": technique(PRUNED, ["up"], [["out"]])},
            "must have the size of what is pruned .* 12, in dimension 1",
        ),
        (
            {"sparse_pruning": technique(PRUNED, ["up"], [["down"]])},
            "must be left out for sparse pruning",
        ),
        (
            {"activation_quantization": technique({"bits": 5}, ["up"])},
            "bits: must be 4 or 8, got 5",
        ),
        (
            {"layer_reduction": {"enabled": True, "teacher_layer": [1], "keep_number_layer": 2}},
            "keep_number_layer: must be",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_field_and_the_fix(
    techniques: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compression(settings(techniques), net())


def test_what_is_no_module_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"model must be an nn\.Module, got function; call its class first"
    ):
        compression(settings(quantization(["up"])), net)  # type: ignore[arg-type]


def test_a_module_in_two_groups_of_a_technique_is_an_error() -> None:
    two = quantization(["up"])
    groups = two["weight_quantization"]["different_groups"]
    groups["other"] = {**groups["group"], "modules": ["blocks"]}
    with pytest.raises(
        ConfigError,
        match=r"must name no module of another group .* 'blocks.0.mlp.up', which is in 'group'",
    ):
        compression(settings(two), net())


def test_only_one_user_of_a_tied_weight_is_an_error() -> None:
    model = net()
    model.blocks[1].value.weight = model.blocks[0].value.weight
    with pytest.raises(
        ConfigError,
        match=r"must name all modules that share a weight, .* name 'blocks.1.value', too",
    ):
        compression(settings(quantization([r"0\.value"])), model)


def test_a_module_that_is_registered_twice_is_named_by_either_name() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
            self.again, self.tied, self.loose = self.up, nn.Linear(12, 8), nn.Linear(12, 8)
            self.tied.weight = self.down.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (
                self.down(torch.relu(self.again(x)))
                + self.tied(self.up(x))
                + self.loose(self.up(x))
            )

    def pruned(modules: list[str], related: list[list[str]]) -> dict[str, Any]:
        return settings(
            {"row_pruning": technique(PRUNED, modules, related, method="topk", schedule_offset=0)}
        )

    model = Twice()
    plan = compression(pruned(["again"], [["loose"]]), model)
    assert plan == compression(pruned(["^up|again"], [["loose"]]), model)
    assert (
        plan.params.keys() == {"up.weight", "up.bias"}
        and plan.aliases["again.weight"] == "up.weight"
    )
    with pytest.raises(
        ConfigError,
        match=r"related_modules: must name modules .* 'down', which shares .* with tied",
    ):
        compression(pruned(["again"], [["down"]]), model)
    prepare(model, pruned(["again"], [["loose"]]))
    weights = clean(model.state_dict(), plan)
    assert weights["again.weight"].shape == weights["up.weight"].shape == (6, 8)
    assert weights.keys() == Twice().state_dict().keys()


def test_eigenvalues_are_accepted_with_what_they_do_not_do() -> None:
    with pytest.warns(ConfigWarning, match=r"eigenvalue: .*quantize_training.*quantization_period"):
        fzero.Config.load({"eigenvalue": {"enabled": True}})


def test_an_expression_that_matches_nothing_compresses_nothing_with_a_warning() -> None:
    text = (
        r"group\.modules: compresses nothing, as in DeepSpeed, .* Linear or Conv2d or "
        r"Embedding, got 'nothing', .*'blocks.0"
    )
    with pytest.warns(ConfigWarning, match=text):
        plan = compression(settings(quantization(["nothing"])), net())
    assert not plan.params
    with pytest.warns(
        ConfigWarning, match=r"row_pruning.* compresses nothing.* matches modules of Mlp"
    ):
        plan = compression(
            settings({"row_pruning": technique(PRUNED, ["mlp$"], [["head"]])}), net()
        )
    assert not plan.params


def test_groups_of_a_technique_that_is_off_are_not_read() -> None:
    off = {
        "sparse_pruning": {
            "shared_parameters": {"enabled": False, "method": "snip_momentum"},
            "different_groups": {"a": {}},
        }
    }
    assert not compression(settings(off), net())


def test_a_star_is_every_linear_layer() -> None:
    plan = compression(settings(quantization(["*"])), net())
    assert plan.params.keys() == {
        f"{name}.weight" for name, x in net().named_modules() if isinstance(x, nn.Linear)
    }


# --- layer reduction ------------------------------------------------------------------------------


def test_a_student_begins_with_layers_of_its_teacher_buffers_included() -> None:
    class Deep(nn.Module):
        def __init__(self, num: int) -> None:
            super().__init__()
            self.layer = nn.ModuleList(
                nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(num)
            )
            self.head = nn.Linear(3, 2)

    teacher, student = Deep(4), Deep(2)
    for index, layer in enumerate(teacher.layer):
        layer[1].running_mean.fill_(index)
    reduction = LayerReduction(
        enabled=True, module_name_prefix="layer", teacher_layer=(1, 3), other_module_name=("head",)
    )
    student.load_state_dict(start_of_student(student.state_dict(), teacher.state_dict(), reduction))
    for own, theirs in ((0, 1), (1, 3)):
        pairs = zip(
            student.layer[own].state_dict().values(),
            teacher.layer[theirs].state_dict().values(),
            strict=True,
        )
        assert all(torch.equal(x, y) for x, y in pairs)
    assert (
        torch.equal(student.head.weight, teacher.head.weight)
        and student.layer[1][1].running_mean[0] == 3
    )
    with pytest.raises(
        ValueError,
        match=r"'layer.1' of the student and 'layer.7' of the teacher must have the same tensors",
    ):
        wrong = reduction.model_copy(update={"teacher_layer": (1, 7)})
        start_of_student(student.state_dict(), teacher.state_dict(), wrong)


def test_trained_scores_of_a_shared_weight_do_not_mask_the_bias_of_another_module() -> None:
    model = net()
    model.blocks[1].value.weight = model.blocks[0].value.weight
    rows = {"row_pruning": technique(PRUNED, ["value"], method="topk")}
    with pytest.raises(
        ConfigError,
        match=r"got 'blocks.1.value', which shares that of 'blocks.0.value'; set method to 'l1'",
    ):
        compression(settings(rows), model)
