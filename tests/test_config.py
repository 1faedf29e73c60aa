"""The laws of configuration: what is accepted, what it means, and that every refusal names its key."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fzero import Config, ConfigError
from fzero.__main__ import main
from fzero.config import OPTIMIZERS, Adam, AdamW, SGDParams, with_overrides
from fzero.config_table import reference
from fzero.deepspeed_keys import ACCEPTED, NOT_YET
from sharding.testing import world_sizes


def refusal(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(source)
    return str(caught.value)


def zero(**values: Any) -> dict[str, Any]:
    return {"zero_optimization": values}


def optimizer(name: Any, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


# --- what is accepted --------------------------------------------------------------------------------------------


def test_an_empty_configuration_means_the_defaults() -> None:
    cfg = Config.load({})
    assert cfg == Config()
    assert (cfg.train_batch_size, cfg.train_micro_batch_size_per_gpu, cfg.gradient_clipping) == (None, None, 1.0)
    assert isinstance(cfg.optimizer, AdamW)
    assert cfg.optimizer.params.model_dump() == {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    assert cfg.zero_optimization.model_dump() == {
        "stage": 0,
        "reduce_bucket_size": 500_000_000,
        "round_robin_gradients": False,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_max_live_parameters": 1_000_000_000,
    }


FULL: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "round_robin_gradients": True},
}


def test_a_mapping_a_file_and_a_config_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FULL))
    cfg = Config.load(FULL)
    assert Config.load(path) == Config.load(str(path)) == Config.load(cfg) == cfg
    assert cfg.optimizer.params.betas == (0.8, 0.9) and cfg.zero_optimization.stage == 3


def test_a_mapping_is_not_changed_by_loading() -> None:
    source = {**FULL, "gradient_accumulation_steps": 1}
    kept = json.dumps(source)
    Config.load(source)
    assert json.dumps(source) == kept


def test_what_a_config_writes_loads_as_the_same_config() -> None:
    for source in ({}, FULL, optimizer("adam", adam_w_mode=False), optimizer("SGD", momentum=0.9, nesterov=True)):
        cfg = Config.load(source)
        assert Config.load(json.loads(cfg.model_dump_json())) == cfg


@pytest.mark.parametrize(("given_value", "value"), [(2, 2), (2.0, 2), ("2", 2), (3, 3), ("0", 0)])
def test_a_stage_may_be_a_string_or_an_integral_float(given_value: Any, value: int) -> None:
    assert Config.load(zero(stage=given_value)).zero_optimization.stage == value


def test_counts_may_be_strings_or_integral_floats() -> None:
    cfg = Config.load({"train_batch_size": "8", **zero(reduce_bucket_size=5e8, stage3_prefetch_bucket_size="1000")})
    sizes = cfg.zero_optimization
    assert (cfg.train_batch_size, sizes.reduce_bucket_size, sizes.stage3_prefetch_bucket_size) == (8, 500_000_000, 1000)
    assert all(isinstance(size, int) for size in (cfg.train_batch_size, sizes.reduce_bucket_size))


def test_rates_may_be_strings_or_integers() -> None:
    cfg = Config.load({**optimizer("adamw", lr="1e-2", weight_decay=0), "gradient_clipping": "2"})
    assert (cfg.optimizer.params.lr, cfg.optimizer.params.weight_decay, cfg.gradient_clipping) == (0.01, 0.0, 2.0)


@pytest.mark.parametrize("name", ["param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters"])
def test_stage_3_keys_may_stand_without_their_prefix(name: str) -> None:
    assert getattr(Config.load(zero(**{name: 7})).zero_optimization, f"stage3_{name}") == 7
    assert getattr(Config.load(zero(**{f"stage3_{name}": 7})).zero_optimization, f"stage3_{name}") == 7
    message = refusal(zero(**{name: 7, f"stage3_{name}": 8}))
    assert message == (
        f"zero_optimization.stage3_{name}: stands beside {name!r}, which is the same; remove one of them"
    )


@pytest.mark.parametrize("name", ["Adam", "adam", "ADAM", "AdamW", "adamw", "aDaMw", "SGD", "sgd"])
def test_case_does_not_matter_in_the_name_of_an_optimizer(name: str) -> None:
    assert Config.load(optimizer(name)).optimizer.type.lower() == name.lower()


def test_an_optimizer_without_a_type_is_adamw() -> None:
    assert Config.load({"optimizer": {"params": {"lr": 0.5}}}) == Config.load(optimizer("AdamW", lr=0.5))


# --- what it means -----------------------------------------------------------------------------------------------


def _moved_by_decay_alone(name: str, **params: Any) -> float:
    """What an update with a zero gradient does to a parameter of 1: only decoupled weight decay moves it by lr·wd."""
    import torch

    transform = Config.load(optimizer(name, lr=0.5, weight_decay=0.5, **params)).optimizer.transform()
    _, param, _ = transform.update(torch.zeros(1), torch.ones(1), transform.init(torch.ones(1)))
    return param.item()


def test_adam_decouples_the_weight_decay_unless_told_otherwise_as_in_deepspeed() -> None:
    assert _moved_by_decay_alone("AdamW") == 0.75
    assert _moved_by_decay_alone("Adam") == 0.75
    assert _moved_by_decay_alone("Adam", adam_w_mode=True) == 0.75
    coupled = _moved_by_decay_alone("Adam", adam_w_mode=False)  # the decay is the whole gradient: a step of lr
    assert coupled == pytest.approx(0.5, abs=1e-6)  # but for eps = 1e-8 beside a gradient of 0.5
    assert _moved_by_decay_alone("SGD") == 0.75


def test_only_adam_has_a_mode_and_no_weight_decay_by_default() -> None:
    assert isinstance(Config.load(optimizer("Adam")).optimizer, Adam)
    assert Config.load(optimizer("Adam")).optimizer.params.weight_decay == 0.0
    assert refusal(optimizer("AdamW", adam_w_mode=True)).startswith("optimizer.params.adam_w_mode: unknown key")


def test_every_hyper_parameter_of_an_optimizer_reaches_its_update() -> None:
    import torch

    values: dict[str, dict[str, Any]] = {
        "SGD": {"lr": 0.5, "momentum": 0.5, "dampening": 0.5, "weight_decay": 0.5},
        "AdamW": {"lr": 0.5, "betas": [0.5, 0.5], "eps": 0.5, "weight_decay": 0.5},
        "Adam": {"lr": 0.5, "betas": [0.5, 0.5], "eps": 0.5, "weight_decay": 0.5, "adam_w_mode": False},
    }

    def after_two_updates(name: str, params: Mapping[str, Any]) -> float:
        transform = Config.load(optimizer(name, **params)).optimizer.transform()
        param = torch.ones(1)
        state = transform.init(param)
        for grad in (1.0, -3.0):
            _, param, state = transform.update(torch.tensor([grad]), param, state)
        return param.item()

    for name, params in values.items():
        reference = after_two_updates(name, params)
        for field in params:
            fewer = {key: value for key, value in params.items() if key != field}
            assert after_two_updates(name, fewer) != reference, f"{name}: {field} changes nothing"
    nesterov = {"lr": 0.5, "momentum": 0.5}
    assert after_two_updates("SGD", nesterov) != after_two_updates("SGD", {**nesterov, "nesterov": True})


# --- batch sizes -------------------------------------------------------------------------------------------------

counts = st.integers(1, 30)


@given(counts, counts, world_sizes())
def test_what_is_missing_of_the_batch_triple_is_inferred(micro: int, steps: int, world_size: int) -> None:
    train = micro * steps * world_size
    keys = {
        "train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps
    }  # fmt: skip
    assert Config().batch_sizes(world_size) == (None, None, 1)
    assert Config(**keys).batch_sizes(world_size) == (train, micro, steps)
    for left_out in keys:
        given = {key: value for key, value in keys.items() if key != left_out}
        assert Config(**given).batch_sizes(world_size) == (train, micro, steps)
    assert Config(train_batch_size=micro * world_size).batch_sizes(world_size) == (micro * world_size, micro, 1)
    assert Config(train_micro_batch_size_per_gpu=micro).batch_sizes(world_size) == (micro * world_size, micro, 1)


@given(counts, st.none() | counts, st.none() | counts, world_sizes())
def test_batch_sizes_fit_each_other_and_the_world_size_or_are_refused(
    train: int, micro: int | None, steps: int | None, world_size: int
) -> None:
    cfg = Config(
        train_batch_size=train, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps
    )  # fmt: skip
    known = (micro or 1) * (steps or 1) * world_size
    is_all = micro is not None and steps is not None
    if (train == known) if is_all else train % known == 0:
        found = cfg.batch_sizes(world_size)
        assert found.train == train == found.micro * found.num_micro_steps * world_size
        assert micro in (None, found.micro) and steps in (None, found.num_micro_steps)
        return
    with pytest.raises(ConfigError, match=rf"train_batch_size: must equal .*, got {train} for .* × {world_size};"):
        cfg.batch_sizes(world_size)


def test_accumulation_without_a_batch_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps: needs train_batch_size or .*, got 4 alone"):
        Config(gradient_accumulation_steps=4).batch_sizes(1)


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", sorted(NOT_YET))
def test_a_deepspeed_key_that_is_not_honoured_says_so_wherever_it_stands(key: str) -> None:
    says = "fzero knows this DeepSpeed key and does not honour it yet; remove it to run without"
    assert refusal({key: 2}) == f"{key}: {says}"
    assert refusal(zero(**{key: 2})) == f"zero_optimization.{key}: {says}"
    assert refusal({"optimizer": {"type": "Adam", key: {"enabled": True}}}) == f"optimizer.{key}: {says}"
    assert refusal(optimizer("SGD", **{key: {}})) == f"optimizer.params.{key}: {says}"


SWITCHED_OFF = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "fp16": {"enabled": False, "loss_scale": 0},
    "bf16": {"enabled": False},
    "communication_data_type": None,
    "gradient_allreduce_op": "mean",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True, "weight_decay": 0.5}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "zero_quantized_weights": False,
        "zero_hpz_partition_size": 1,
        "reduce_bucket_size": "auto",
    },
    "steps_per_print": float("inf"),
}


def test_keys_that_change_nothing_are_accepted_and_told_with_the_reason() -> None:
    cfg = Config.load(SWITCHED_OFF)
    assert cfg.model_dump() == Config.load(optimizer("AdamW", weight_decay=0.5) | zero(stage=3)).model_dump()
    kinds = {note.key: note.kind for note in cfg.notes}
    assert kinds == {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "fp16": "off",
        "bf16": "off",
        "communication_data_type": "off",
        "optimizer.params.lr": "auto",
        "optimizer.params.torch_adam": "accepted",
        "zero_optimization.overlap_comm": "accepted",
        "zero_optimization.contiguous_gradients": "accepted",
        "zero_optimization.offload_optimizer": "off",
        "zero_optimization.zero_quantized_weights": "off",
        "zero_optimization.zero_hpz_partition_size": "off",
        "zero_optimization.reduce_bucket_size": "auto",
        "steps_per_print": "accepted",
    }
    assert all(note.reason for note in cfg.notes)


@pytest.mark.parametrize(
    "source",
    [
        {"fp16": {"enabled": True}},
        {"fp16": {}},
        {"fp16": True},
        {"managed_gradient_accumulation": False},
        zero(offload_optimizer={"device": "cpu"}),
        zero(ignore_unused_parameters=False),
        zero(zero_hpz_partition_size=8),
        optimizer("Adam", bias_correction=False),
        optimizer("Adam", amsgrad=True),
    ],
)
def test_a_key_that_would_change_something_is_not_accepted(source: Any) -> None:
    assert "does not honour it yet" in refusal(source)


def test_gradients_are_not_added_up_in_stage_3() -> None:
    says = "gradient_allreduce_op: must be 'mean' in stage 3, got 'sum'"
    assert says in refusal({"gradient_allreduce_op": "sum"} | zero(stage=3))


def test_a_key_is_known_in_one_way_only() -> None:
    assert not {name.rpartition(".")[2] for name in ACCEPTED} & NOT_YET


def test_older_spellings_of_a_configuration_are_read() -> None:
    assert Config.load({"zero_optimization": True}).zero_optimization.stage == 1
    assert Config.load({"zero_optimization": False}).zero_optimization.stage == 0
    text = base64.urlsafe_b64encode(b'{"gradient_clipping": 0.25}').decode()
    assert Config.load(text).gradient_clipping == 0.25


def test_a_key_is_either_honoured_or_not() -> None:
    blocks = (Config, *OPTIMIZERS.values(), *(o.model_fields["params"].annotation for o in OPTIMIZERS.values()))
    for block in (*blocks, Config.model_fields["zero_optimization"].annotation):
        names = {*block.model_fields, *(field.alias for field in block.model_fields.values())}
        assert not names & NOT_YET - OWN_KEYS


OWN_KEYS = {"bias_correction"}
"""Hyper-parameters of one optimizer only, which others do not honour yet."""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation: unknown key; did you mean 'zero_optimization'?"),
        ({"optimiser": {}}, "optimiser: unknown key; did you mean 'optimizer'?"),
        ({"train_batch_sise": "auto"}, "train_batch_sise: unknown key; did you mean 'train_batch_size'?"),
        (zero(stages="auto"), "zero_optimization.stages: unknown key; did you mean 'stage'?"),
        (zero(Stage=1), "zero_optimization.Stage: unknown key; did you mean 'stage'?"),
        (optimizer("SGD", momentun=0.9), "optimizer.params.momentun: unknown key; did you mean 'momentum'?"),
        (optimizer("Adam", beta=0.9), "optimizer.params.beta: unknown key; did you mean 'betas'?"),
        ({"qqqq": 1}, "qqqq: unknown key; known here: train_batch_size, train_micro_batch_size_per_gpu, "),
        ({"Adam": {}}, "Adam: unknown key; known here: train_batch_size"),
        ({"optimizer": {"AdamW": {}}}, "optimizer.AdamW: unknown key; known here: type, params"),
        (optimizer("SGD", SGD=1), "optimizer.params.SGD: unknown key; known here: lr"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_name_or_all_names(source: Any, message: str) -> None:
    assert refusal(source).startswith(message)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("Adamm", "Adam"), ("AdanW", "AdamW"), ("sg", "SGD"), ("FusedAdam", "Adam"), ("radm", "RAdam")],
)
def test_an_unknown_optimizer_is_told_with_the_nearest_one(name: str, nearest: str) -> None:
    known = "(known: Adam, AdamW, SGD, Adagrad, Lion, Lamb, Adafactor, Muon and elementwise classes of torch.optim)"
    assert refusal(optimizer(name)) == f"optimizer: no optimizer is named {name!r}; did you mean {nearest!r}? {known}"


@pytest.mark.parametrize("stage", [4, -1, 1.5, "4", "-1", "two", "", None, True, [1], {}, float("nan")])
def test_an_unknown_stage_is_refused_by_its_value(stage: Any) -> None:
    message = refusal(zero(stage=stage))
    assert message.startswith("zero_optimization.stage: must be ")
    assert stage == {} or message.endswith(f", got {stage!r}")


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"train_batch_size": 2.5}, "train_batch_size"),
        ({"train_micro_batch_size_per_gpu": "2.5"}, "train_micro_batch_size_per_gpu"),
        ({"train_batch_size": 0}, "train_batch_size"),
        ({"train_batch_size": True}, "train_batch_size"),
        ({"train_batch_size": "some"}, "train_batch_size"),
        ({"gradient_clipping": -1.0}, "gradient_clipping"),
        ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op"),
        ({"gradient_clipping": True}, "gradient_clipping"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping"),
        (zero(reduce_bucket_size=0), "zero_optimization.reduce_bucket_size"),
        (zero(reduce_bucket_size=1e-3), "zero_optimization.reduce_bucket_size"),
        (zero(round_robin_gradients="perhaps"), "zero_optimization.round_robin_gradients"),
        (zero(prefetch_bucket_size=-1), "zero_optimization.prefetch_bucket_size"),
        (zero(stage3_prefetch_bucket_size=0.5), "zero_optimization.stage3_prefetch_bucket_size"),
        (zero(stage3_max_live_parameters=0), "zero_optimization.stage3_max_live_parameters"),
        (zero(stage3_param_persistence_threshold=-1), "zero_optimization.stage3_param_persistence_threshold"),
        (optimizer("AdamW", lr=-1), "optimizer.params.lr"),
        (optimizer("AdamW", lr=float("inf")), "optimizer.params.lr"),
        (optimizer("AdamW", betas=[0.9, 1.0]), "optimizer.params.betas.1"),
        (optimizer("AdamW", betas=[0.9]), "optimizer.params.betas.1"),
        (optimizer("AdamW", betas=0.9), "optimizer.params.betas"),
        (optimizer("SGD", dampening=float("nan")), "optimizer.params.dampening"),
        (optimizer("SGD", nesterov=True), "optimizer.params"),
        ({"zero_optimization": 3}, "zero_optimization"),
        ({"optimizer": "AdamW"}, "optimizer"),
        ({"optimizer": {"type": 3}}, "optimizer"),
        ({3: {}}, "3"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(source: Any, field: str) -> None:
    assert refusal(source).startswith(f"{field}: ")


def test_nesterov_without_momentum_is_told_with_its_values() -> None:
    assert "nesterov needs momentum > 0 and dampening = 0, got 0.9 and 0.5; change these" in refusal(
        optimizer("SGD", momentum=0.9, dampening=0.5, nesterov=True)
    )
    assert SGDParams(momentum=0.9, nesterov=True).nesterov


def test_every_wrong_field_gets_a_line() -> None:
    lines = refusal({"train_batch_size": 0, "nope": 1, **zero(stage=7, offload_param={})}).splitlines()
    assert {line.partition(":")[0] for line in lines} == {
        "train_batch_size", "nope", "zero_optimization.stage", "zero_optimization.offload_param",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"train_batch_size": 8, "train_batch_size": 9}',
            "train_batch_size: a key may stand once in an object, found 2",
        ),
        ('{"zero_optimization": {"stage": 1, "stage": 1}}', "stage: a key may stand once in an object, found 2"),
        ("[1]", "must hold a JSON object, got list"),
        ("3", "must hold a JSON object, got int"),
        ("{'stage': 1}", "is not JSON: Expecting property name"),
        ("", "is not JSON"),
        ('{"gradient_clipping": NaN}', "gradient_clipping: must be a finite number, got nan"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert message in refusal(path)


def test_what_is_not_a_readable_file_is_refused_by_its_path(tmp_path: Path) -> None:
    missing, binary = tmp_path / "missing.json", tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    assert f"cannot read {str(missing)!r}: No such file" in refusal(missing)
    assert f"cannot read {str(tmp_path)!r}: Is a directory" in refusal(tmp_path)
    assert f"{str(binary)!r} is not JSON" in refusal(binary)


@pytest.mark.parametrize("source", [3, None, ["stage"], {1, 2}])
def test_what_is_neither_a_mapping_nor_a_path_is_refused_by_its_type(source: Any) -> None:
    assert f"needs a mapping or the path of a JSON file, got {type(source).__name__}" in refusal(source)


# --- any configuration at all ------------------------------------------------------------------------------------

FIELDS: tuple[tuple[str, ...], ...] = (
    *((name,) for name in Config.model_fields),
    *(("zero_optimization", name) for name in Config.model_fields["zero_optimization"].annotation.model_fields),
    *(("optimizer", "params", name) for name in ("lr", "betas", "eps", "weight_decay")),
)
names = st.text("abcdefghijklmnopqrstuvwxyz_03", min_size=1, max_size=12)
scalars = st.none() | st.booleans() | st.integers(-5, 10**10) | st.floats() | st.text(max_size=5)
json_values = st.recursive(
    scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(names, x, max_size=3), max_leaves=5
)


def _with(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """FULL with `value` at `path`."""
    source = json.loads(json.dumps(FULL))
    block = source
    for name in path[:-1]:
        block = block[name]
    block[path[-1]] = value
    return source


@given(st.sampled_from(FIELDS), json_values)
def test_a_refused_value_is_refused_by_the_name_of_its_key(path: tuple[str, ...], value: Any) -> None:
    try:
        cfg = Config.load(_with(path, value))
    except ConfigError as error:
        for line in str(error).splitlines():
            field = line.partition(": ")[0]
            assert field == ".".join(path) or field.startswith(".".join(path) + ".")
    else:
        assert Config.load(cfg.model_dump()) == cfg


@given(st.sampled_from([(), ("zero_optimization",), ("optimizer",), ("optimizer", "params")]), names, json_values)
def test_an_unknown_key_is_refused_by_its_name(block: tuple[str, ...], name: str, value: Any) -> None:
    path = (*block, name)
    if path in FIELDS or path in (("optimizer", "type"), ("optimizer", "params")):
        return
    assert refusal(_with(path, value)).startswith(".".join(path) + ": ")


# --- optimizers of other kinds -----------------------------------------------------------------------------------


def test_the_names_of_all_optimizers_are_read_in_any_case() -> None:
    for name in (*OPTIMIZERS, "Adamax", "NAdam", "RMSprop", "ASGD", "Rprop", "RAdam", "Adadelta"):
        for spelling in (name, name.lower(), name.upper()):
            cfg = Config.load(optimizer(spelling))
            assert cfg.optimizer.type == name
            assert Config.load(cfg.model_dump()) == cfg


def test_a_class_of_torch_has_its_own_parameters_and_defaults() -> None:
    cfg = Config.load(optimizer("nadam", weight_decay=0.5, maximize=True, foreach=None))
    params = cfg.optimizer.params
    assert (params.lr, params.betas, params.momentum_decay, params.maximize) == (2e-3, (0.9, 0.999), 4e-3, True)
    assert refusal(optimizer("nadam", momentun_decay=0.1)) == (
        "optimizer.params.momentun_decay: unknown key; did you mean 'momentum_decay'?"
    )
    assert refusal(optimizer("nadam", lr=-1)).startswith("optimizer.params.lr: must be greater than or equal to 0")
    assert "NAdam: does not take a flat tensor" in refusal(optimizer("nadam", momentum_decay=-1))


@pytest.mark.parametrize(
    ("name", "reason"), [("lbfgs", "LBFGS: needs a closure"), ("SparseAdam", "does not support dense gradients")]
)
def test_a_class_of_torch_that_cannot_work_on_shards_is_refused_with_the_reason(name: str, reason: str) -> None:
    message = refusal(optimizer(name))
    assert message.startswith("optimizer: ") and reason in message


def test_lamb_honours_what_adam_does_not() -> None:
    assert Config.load(optimizer("Lamb", bias_correction=False)).optimizer.params.bias_correction is False
    assert Config.load(optimizer("Lamb", bias_correction="auto")).optimizer.params.bias_correction is True
    message = refusal(optimizer("Lamb", min_coeff=2.0, max_coeff=1.0))
    assert "min_coeff must be at most max_coeff, got 2.0 > 1.0" in message


def test_parameters_of_different_kinds_go_different_ways() -> None:
    kinds = {
        name: Config.load(optimizer(name)).optimizer.kind_of for name in ("AdamW", "Lamb", "Adafactor", "Muon", "Rprop")
    }
    shapes: dict[str, tuple[int, ...]] = {
        "h.w": (2, 3),
        "h.b": (3,),
        "Embedding.w": (9, 2),
        "lm_head.w": (9, 2),
        "conv": (2, 2, 3, 3),
    }
    expected = {
        "AdamW": ["", "", "", "", ""],
        "Lamb": ["", "", "", "", ""],
        "Rprop": ["", "", "", "", ""],
        "Adafactor": ["matrix", "vector", "matrix", "matrix", "matrix"],
        "Muon": ["muon", "adam", "adam", "adam", "muon"],
    }
    assert {name: [kind_of(*item) for item in shapes.items()] for name, kind_of in kinds.items()} == expected


def _after_two_updates(block: Any, **asked: Any) -> list[float]:
    import torch

    from fzero import Pieces
    from sharding.layout import FlatLayout

    transform = block.transform(pieces=Pieces.whole(FlatLayout(("w",), ((2, 3),), 1)), **asked)
    param = torch.linspace(-1, 1, 6)
    state = transform.init(param)
    for grad in (torch.tensor([1.0, 2.0, -1.0, 0.5, 3.0, 1.0]), torch.tensor([-3.0, 0.25, 1.0, 1.0, 2.0, -1.0])):
        _, param, state = transform.update(grad, param, state)
    return param.tolist()


@pytest.mark.parametrize(
    ("name", "kind", "params"),
    [
        (
            "Lamb",
            "",
            {
                "lr": 0.5,
                "betas": [0.5, 0.5],
                "eps": 0.5,
                "weight_decay": 0.5,
                "max_coeff": 0.5,
                "bias_correction": False,
            },
        ),
        ("Lamb", "", {"min_coeff": 5.0}),
        ("Adafactor", "matrix", {"lr": 0.5, "beta2_decay": -0.1, "eps": [2.0, 0.9], "weight_decay": 0.5}),
        ("Adafactor", "matrix", {"d": 3.0, "lr": 0.5}),
        (
            "Muon",
            "muon",
            {"lr": 0.5, "muon_lr": 0.25, "momentum": 0.5, "weight_decay": 0.5, "ns_steps": 2, "nesterov": False},
        ),
        ("Muon", "adam", {"lr": 0.5, "adam_lr": 0.25, "betas": [0.5, 0.5], "eps": 0.5, "weight_decay": 0.5}),
        ("Adamax", "", {"lr": 0.5, "betas": [0.5, 0.5], "eps": 0.5, "weight_decay": 0.5, "maximize": True}),
    ],
)
def test_every_hyper_parameter_of_these_reaches_the_update(name: str, kind: str, params: dict[str, Any]) -> None:
    found = _after_two_updates(Config.load(optimizer(name, **params)).optimizer, kind=kind)
    for field in params:
        fewer = {key: value for key, value in params.items() if key != field}
        other = _after_two_updates(Config.load(optimizer(name, **fewer)).optimizer, kind=kind)
        assert other != found or (field == "lr" and f"{kind}_lr" in params), f"{name}: {field} changes nothing"


def test_a_schedule_moves_the_rates_of_muon_in_proportion_and_the_first_beta_of_its_adam() -> None:
    both = Config.load(optimizer("Muon", lr=0.5, muon_lr=0.25, adam_lr=0.125)).optimizer
    halved = Config.load(optimizer("Muon", lr=0.25, muon_lr=0.125, adam_lr=0.0625)).optimizer
    for kind in ("muon", "adam"):
        assert _after_two_updates(both, kind=kind, lr=0.25) == _after_two_updates(halved, kind=kind)
    moved = Config.load(optimizer("Muon", betas=[0.5, 0.95])).optimizer
    still = Config.load(optimizer("Muon")).optimizer
    assert _after_two_updates(still, kind="adam", momentum=0.5) == _after_two_updates(moved, kind="adam")
    assert _after_two_updates(still, kind="muon", momentum=0.5) == _after_two_updates(moved, kind="muon")
    beta = Config.load(optimizer("Adamax", betas=[0.5, 0.999])).optimizer
    assert _after_two_updates(Config.load(optimizer("Adamax")).optimizer, momentum=0.5) == _after_two_updates(beta)


def test_muons_adam_has_deepspeeds_rate_where_none_is_given() -> None:
    assert Config.load(optimizer("Muon")).optimizer.params.adam_lr == 3e-4
    assert Config.load(optimizer("Muon", lr="auto")).optimizer.params.adam_lr == 3e-4
    assert Config.load(optimizer("Muon", lr=0.5)).optimizer.params.adam_lr is None
    assert "lr must not be 0 beside muon_lr" in refusal(optimizer("Muon", lr=0, muon_lr=0.5))
    assert "ns_method" in refusal(optimizer("Muon", ns_method="gram"))


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("Lamb", {}, "Lamb: looks at whole parameters, so that its transform needs pieces, got None"),
        ("Adafactor", {}, "Adafactor: looks at whole parameters"),
        ("Muon", {"kind": "muon"}, "Muon: looks at whole parameters"),
        ("Muon", {}, "Muon: the kind of parameters must be 'muon' or 'adam', got ''"),
    ],
)
def test_a_transform_says_what_it_needs(name: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.load(optimizer(name)).optimizer.transform(**asked)


@pytest.mark.parametrize("name", ["Lamb", "Adafactor", "Muon", "Adamax"])
def test_a_groups_hyper_parameters_are_checked_as_the_configurations(name: str) -> None:
    block = Config.load(optimizer(name, weight_decay=0.25)).optimizer
    changed = with_overrides(block, {"lr": 0.5}, "param_groups[0]")
    assert type(changed) is type(block) and (changed.params.lr, changed.params.weight_decay) == (0.5, 0.25)
    with pytest.raises(ConfigError, match=rf"param_groups\[0\].foo: .*; {name} has: lr, "):
        with_overrides(block, {"foo": 1}, "param_groups[0]")


def test_a_value_that_only_the_class_itself_refuses_is_refused_in_a_group_too() -> None:
    with pytest.raises(ConfigError, match=r"^param_groups\[0\]: .*Adamax: does not take .* Invalid epsilon"):
        with_overrides(Config.load(optimizer("Adamax")).optimizer, {"eps": -1.0}, "param_groups[0]")


# --- what is shown -----------------------------------------------------------------------------------------------


def test_the_reference_in_docs_is_the_models() -> None:
    page = Path(__file__).parents[1] / "docs" / "config.md"
    assert page.read_text() == reference(), "make it anew: python -m fzero config --reference > docs/config.md"


def test_every_honoured_key_has_a_meaning_in_the_reference() -> None:
    for block in (Config, Config.model_fields["zero_optimization"].annotation):
        assert all(field.description for field in block.model_fields.values())


def test_the_command_shows_values_and_reasons_or_every_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SWITCHED_OFF | {"steps_per_print": 10}))
    assert main(["config", str(path)]) == 0
    shown = capsys.readouterr().out
    for row in (
        r"zero_optimization\.stage +3 +given",
        r"gradient_clipping +1\.0 +default",
        r"steps_per_print +10 +accepted +fzero prints nothing",
        r"optimizer\.params\.lr +auto +auto +left to fzero",
    ):
        assert re.search(row, shown), shown
    path.write_text('{"zero_optimization": {"stage": 7}, "gradient_cliping": 1}')
    assert main(["config", str(path)]) == 1
    errors = capsys.readouterr().err
    assert "zero_optimization.stage: must be 0, 1, 2 or 3" in errors and "did you mean 'gradient_clipping'" in errors
