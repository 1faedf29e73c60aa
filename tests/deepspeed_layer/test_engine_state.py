"""What an engine trains can be saved, looked at, changed and computed with, in every
stage.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import WIDTH, Net, assert_close, criterion, data, made, mine, plainly, settings
from ranks import RankError, RankPool
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from training import make

import fzero
import fzero.deepspeed as deepspeed
from fzero.deepspeed.engine.param_views import PartitionedParameter, PartitionedParameterError


class Noisy(Net):
    """With dropout, running statistics, and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, x: Tensor) -> dict[str, Any]:
        return super().forward(self.dropout(self.norm(x)))


WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.01}}


def _resumable(stage: int, **keys: Any) -> Any:
    cfg = settings(
        stage,
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=2,
        scheduler=WARMUP,
        **keys,
    )
    return fzero.initialize(
        model=make(Noisy), config=cfg, training_data=[(x, y) for x, y in zip(*data(0, 40))]
    )


def _train(engine: Any, batches: Any, num_steps: int) -> list[float]:
    losses = []
    for _ in range(2 * num_steps):
        x, y = next(batches)
        losses.append(engine.backward(criterion(engine(x), y)).item())
        engine.step()
    return losses


def _saves(stage: int, folder: Path, **keys: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Trains two steps, saves, and trains two more."""
    torch.manual_seed(7)
    engine, _, loader, _ = _resumable(stage, **keys)
    batches = deepspeed.utils.RepeatingLoader(loader)
    _train(engine, batches, 2)
    assert engine.save_checkpoint(folder, client_state={"note": [1, "two"]})
    return _train(engine, batches, 2), engine.module_state_dict()


def _resumes(stage: int, folder: Path, **keys: Any) -> tuple[list[float], dict[str, Tensor]]:
    engine, _, loader, scheduler = _resumable(stage, **keys)
    path, client = engine.load_checkpoint(folder)
    assert (path, client) == (str(folder / "global_step2" / "latest"), {"note": [1, "two"]})
    assert (engine.global_steps, engine.micro_steps) == (
        2,
        4,
    ) and scheduler.last_batch_iteration == 1
    assert engine.global_samples == 4 * engine.train_batch_size() // 2
    return _train(engine, deepspeed.utils.RepeatingLoader(loader), 2), engine.module_state_dict()


BF16 = {"bf16": {"enabled": True, "auto_cast": True}, "data_types": {"buffer_dtype": "bf16"}}


@pytest.mark.covering(1)
@pytest.mark.parametrize("keys", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_script_that_loads_goes_on_bit_for_bit(
    ranks: RankPool, tmp_path: Path, stage: int, keys: dict[str, Any]
) -> None:
    saved = ranks(2, _saves, stage, tmp_path, **keys)
    for (losses, weights), (others, loaded) in zip(
        saved, ranks(2, _resumes, stage, tmp_path, **keys), strict=True
    ):
        assert losses == others
        assert all(torch.equal(weights[name], loaded[name]) for name in weights)


def _loads_elsewhere(stage: int, folder: Path) -> dict[str, Tensor]:
    engine = fzero.initialize(model=make(Noisy), config=settings(stage))[0]
    engine.load_checkpoint(folder, tag="mine")
    return engine.module_state_dict()


def _saves_as_mine(stage: int, folder: Path) -> dict[str, Tensor]:
    engine = fzero.initialize(model=make(Noisy), config=settings(stage))[0]
    x, y = data(1)
    engine.backward(criterion(engine(x), y))
    engine.step()
    engine.save_checkpoint(folder, tag="mine", save_latest=False)
    engine.save_checkpoint(folder, tag="mine", save_latest=False)
    return engine.module_state_dict()


def test_a_checkpoint_is_loaded_by_any_stage_on_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    weights = ranks(2, _saves_as_mine, 3, tmp_path)[0]
    for world_size, stage in ((1, 0), (3, 2), (2, 1)):
        for loaded in ranks(world_size, _loads_elsewhere, stage, tmp_path):
            assert all(torch.equal(weights[name], loaded[name]) for name in weights)
    engine = made(0, Noisy)
    with pytest.warns(UserWarning, match="has no file 'latest'"):
        assert engine.load_checkpoint(tmp_path) == (None, None)


def test_what_is_not_to_be_loaded_is_not(tmp_path: Path) -> None:
    torch.manual_seed(3)
    engine, _, loader, _ = _resumable(2)
    _train(engine, deepspeed.utils.RepeatingLoader(loader), 2)
    engine.save_checkpoint(tmp_path)
    other, optimizer, _, scheduler = _resumable(2)
    other.load_checkpoint(tmp_path, load_module_only=True)
    expected = engine.module_state_dict()
    assert all(torch.equal(expected[name], x) for name, x in other.module_state_dict().items())
    assert (other.global_steps, scheduler.last_batch_iteration) == (0, -1)
    param = other.module.head.weight
    assert not deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg").any()
    other.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert (other.global_steps, scheduler.last_batch_iteration) == (2, -1)
    assert deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg").any()
    other.load_checkpoint(tmp_path)
    assert (
        scheduler.last_batch_iteration == 1
        and optimizer.param_groups[0]["lr"] == engine.get_lr()[0]
    )


def _tags(how: str, folder: Path) -> None:
    engine = made(0, checkpoint={"tag_validation": how})
    engine.save_checkpoint(folder, tag=f"of {engine.global_rank}")


def test_tags_that_differ_are_an_error_where_the_configuration_says_so(
    ranks: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match="tag must be the same on all ranks"):
        ranks(2, _tags, "Fail", tmp_path)
    ranks(2, _tags, "Ignore", tmp_path / "other")


def _consolidates(stage: int, folder: Path) -> tuple[bool, dict[str, Tensor]]:
    engine = fzero.initialize(model=make(Noisy), config=settings(stage, bf16={"enabled": True}))[0]
    engine.save_16bit_model(folder)
    engine.save_16bit_model(folder, "model.safetensors")
    return engine._zero3_consolidated_16bit_state_dict() is not None, engine.module_state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_are_written_in_16_bits(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    (has, full), (other_has, _) = ranks(2, _consolidates, stage, tmp_path)
    assert (has, other_has) == (True, False)
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert found.keys() == full.keys()
    for name, param in make(Noisy).named_parameters(remove_duplicate=False):
        assert found[name].dtype == torch.bfloat16 and torch.equal(
            found[name], param.detach().bfloat16()
        )
    assert (tmp_path / "model.safetensors").exists()


# --- single parameters ----------------------------------------------------------------------------


def _looks(stage: int) -> dict[str, Any]:
    """What an engine reports of one parameter, before and after changes."""
    engine = made(stage, train_micro_batch_size_per_gpu=6, gradient_accumulation_steps=1)
    get, reported = deepspeed.utils, {}
    param = engine.module.blocks[1].up.weight
    assert get.safe_get_full_grad(param) is None
    x, y = mine(engine, data(0))
    engine.backward(criterion(engine(x), y))
    reported["grad"] = get.safe_get_full_grad(param)
    get.safe_set_full_grad(param, torch.zeros_like(reported["grad"]))
    engine.step()
    reported["after"] = get.safe_get_full_fp32_param(param)
    reported["exp_avg"] = get.safe_get_full_optimizer_state(param, "exp_avg")
    get.safe_set_full_optimizer_state(
        param, torch.full_like(reported["exp_avg"], 2.0), "exp_avg_sq"
    )
    reported["exp_avg_sq"] = get.safe_get_full_optimizer_state(param, "exp_avg_sq")
    get.safe_set_full_fp32_param(param, torch.full(getattr(param, "ds_shape", param.shape), 3.0))
    reported["set"] = get.safe_get_full_fp32_param(param)
    with deepspeed.zero.GatheredParameters([param]):
        reported["gathered"] = param.detach().clone()
    reported["neighbour"] = get.safe_get_full_fp32_param(engine.module.blocks[1].up.bias)
    with pytest.raises(
        ValueError, match=r"must be one that has the parameter's shape: \['exp_avg', 'exp_avg_sq'\]"
    ):
        get.safe_get_full_optimizer_state(param, "momentum")
    return reported


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
def test_single_parameters_can_be_read_and_written(ranks: RankPool, stage: int) -> None:
    module = make(Net)
    x, y = data(0)
    criterion(module(x), y).backward()
    grads = [p.grad for p in module.parameters()]
    norm = torch.nn.utils.get_total_norm([g for g in grads if g is not None])
    param = module.blocks[1].up.weight
    for reported in ranks(2, _looks, stage):
        torch.testing.assert_close(reported["grad"], param.grad)
        # The gradient was set to zero, so that only the weight decay moved it.
        torch.testing.assert_close(reported["after"], param.detach() * (1 - 1e-2 * 0.1))
        assert norm > 0 and not reported["exp_avg"].any() and (reported["exp_avg_sq"] == 2).all()
        assert (reported["set"] == 3).all() and (reported["gathered"] == 3).all()
        assert not (reported["neighbour"] == 3).any()


def _modifies(stage: int, rank: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = made(stage, bf16={"enabled": True, "auto_cast": True})
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, modifier_rank=rank):
        if engine.global_rank == 1:
            engine.module.head.weight.data.fill_(0.25)
    before = engine.module_state_dict()
    x, y = mine(engine, data(0))
    engine.backward(criterion(engine(x), y).float())
    engine.step()
    return before, engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_changes_of_gathered_parameters_count_with_a_modifier_rank_and_are_an_error_without(
    ranks: RankPool, stage: int
) -> None:
    for before, after in ranks(2, _modifies, stage, 1):
        assert (before["head.weight"] == 0.25).all()
        assert (after["head.weight"] != 0.25).any() and (
            after["head.weight"] - 0.25
        ).abs().max() < 0.02  # by the master
    with pytest.raises(
        RankError,
        match=(
            r"'head\.weight' must not change while modifier_rank is None, and was changed on "
            r"rank 1"
        ),
    ):
        ranks(2, _modifies, stage, None)


def _away() -> list[str]:
    engine = made(3)
    param = engine.module.head.weight
    assert isinstance(param, PartitionedParameter) and isinstance(param, nn.Parameter)
    assert (param.shape, param.numel(), param.dtype) == ((0,), 0, torch.float32)
    assert (param.ds_shape, param.ds_numel) == ((3, WIDTH), 3 * WIDTH)
    assert sum(p.ds_numel for p in engine.parameters()) == sum(
        p.numel() for p in make(Net).parameters()
    )
    errors = []
    for use in (
        lambda: param + 1,
        lambda: nn.functional.linear(torch.ones(1, WIDTH), param),
        lambda: param.data.norm(),
        lambda: param.T,
    ):
        with pytest.raises(PartitionedParameterError) as caught:
            use()
        errors.append(str(caught.value))
    return errors


def test_a_parameter_that_is_divided_has_no_elements_and_refuses_to_compute(
    ranks: RankPool,
) -> None:
    for errors in ranks(2, _away):
        assert "and T needs them" in errors[3], "the attribute, and not __get__"
        assert all(
            "is sharded over the ranks" in error and "GatheredParameters" in error
            for error in errors
        )


# --- computing with the module --------------------------------------------------------------------


def _transforms(stage: int) -> dict[str, Any]:
    """Gradients for each sample, a Jacobian, and gradients of inputs, between the steps
    of training.
    """
    engine = made(stage)
    x, y = mine(engine, data(0))
    engine.backward(criterion(engine(x), y))
    reported: dict[str, Any] = {}
    reported["inputs"] = grad(lambda x: engine.module(x)["logits"].square().sum())(x)
    reported["jacobian"] = jacrev(lambda x: engine(x[None])["logits"][0])(x[0])
    reported["mapped"] = vmap(lambda x: engine(x[None])["logits"][0])(x)
    with engine.gathered() as params:

        def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(
                functional_call(engine.module, params, (x[None],))["logits"], y[None]
            )

        reported["each"] = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
    doubled = {name: 2 * value for name, value in params.items()}
    reported["doubled"] = functional_call(engine.module, doubled, (x,))["logits"]
    given = x.clone().requires_grad_()
    engine(given)  # which does not disturb
    engine.step()
    reported["weights"] = engine.module_state_dict()
    return reported


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
def test_transforms_of_torch_func_go_through_the_module_in_every_stage(
    ranks: RankPool, stage: int
) -> None:
    module = make(Net)
    _, expected = plainly(lambda m, i: [criterion(m(data(0)[0]), data(0)[1])], 1)
    params = {name: p.detach() for name, p in module.named_parameters()}
    for rank, reported in enumerate(ranks(2, _transforms, stage)):
        x, y = (t.chunk(2)[rank] for t in data(0))

        def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(
                functional_call(module, params, (x[None],))["logits"], y[None]
            )

        torch.testing.assert_close(
            reported["inputs"], grad(lambda x: module(x)["logits"].square().sum())(x)
        )
        torch.testing.assert_close(
            reported["jacobian"], jacrev(lambda x: module(x[None])["logits"][0])(x[0])
        )
        torch.testing.assert_close(reported["mapped"], module(x)["logits"].detach())
        doubled = functional_call(
            module, {name: 2 * value for name, value in params.items()}, (x,)
        )["logits"]
        torch.testing.assert_close(reported["doubled"], doubled)
        each = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
        assert_close(reported["each"], each)
        assert_close(reported["weights"], expected)


def _infers(stage: int) -> list[Tensor]:
    cfg = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    engine, optimizer, _, scheduler = fzero.initialize(model=make(Net), config=cfg)
    assert (optimizer, scheduler) == (None, None) and not any(
        p.requires_grad for p in engine.parameters()
    )
    assert not engine.state.grads and not engine.state.optimizer
    engine.eval()
    x, _ = mine(engine, data(0))
    reported = [engine(x)["logits"], engine.predict(x)]
    with engine.gathered():
        reported.append(engine.module(x)["logits"])
    inputs = x.clone().requires_grad_()
    engine(inputs)["logits"].sum().backward()
    reported.append(inputs.grad)
    with pytest.raises(RuntimeError, match="this engine has no optimizer"):
        engine.backward(torch.zeros((), requires_grad=True))
    return reported


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_without_an_optimizer_computes_and_does_not_train(
    ranks: RankPool, stage: int
) -> None:
    module = make(Net)
    for rank, (logits, predicted, gathered, slope) in enumerate(ranks(2, _infers, stage)):
        x = data(0)[0].chunk(2)[rank].requires_grad_()
        expected = module(x)["logits"]
        torch.testing.assert_close(logits, expected.detach())
        torch.testing.assert_close(gathered.detach(), expected.detach())
        assert torch.equal(predicted, expected.argmax(-1))
        torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), x)[0])


def _evaluates(stage: int) -> tuple[list[Tensor], dict[str, Tensor], int]:
    engine = fzero.initialize(model=make(Noisy), config=settings(stage))[0]
    reported = []
    for index in range(2):
        x, y = mine(engine, data(index))
        loss = criterion(engine(x), y)
        engine.eval()
        with torch.no_grad():  # between the halves
            reported.append(engine(x)["logits"])
        engine.train()
        engine.backward(loss)
        engine.step()
    own = [p for p in engine.module.parameters() if isinstance(p, PartitionedParameter)]
    assert torch.equal(
        engine.module.norm.running_mean, engine.module_state_dict()["norm.running_mean"]
    )
    return reported, engine.module_state_dict(), len(own)


def test_evaluation_leaves_no_trace_and_all_stages_agree(ranks: RankPool) -> None:
    found = [ranks(2, _evaluates, stage) for stage in range(4)]
    for stage in range(1, 4):
        for (outputs, weights, _), (others, theirs, _) in zip(found[0], found[stage], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(outputs, others))
            assert all(torch.equal(weights[name], theirs[name]) for name in weights)
    assert [ranks_[0][2] for ranks_ in found] == [0, 0, 0, len(list(make(Noisy).parameters()))]


def _streams(
    stage: int, folder: Path, where: str, precision: Mapping[str, Any]
) -> list[dict[str, Tensor]]:
    """The weights at times, with parameters, gradients, masters and moments on the
    device or in files.
    """
    cfg = settings(stage) | dict(precision)
    if where == "files":
        nvme = {"device": "nvme", "nvme_path": str(folder)}
        in_files = {"offload_optimizer": nvme, "offload_param": nvme | {"max_in_cpu": 0}}
        cfg["zero_optimization"] |= in_files if stage == 3 else {"offload_optimizer": nvme}
    engine = fzero.initialize(model=make(Net), config=cfg)[0]
    found = []

    def train(*steps: int) -> None:
        for index in steps:
            x, y = mine(engine, data(index))
            engine.backward(criterion(engine(x), y))
            engine.step()
        with engine.gathered() as params:
            found.append({name: value.clone() for name, value in params.items()})

    train(0, 1)
    assert deepspeed.utils.safe_get_full_optimizer_state(engine.module.head.weight, "exp_avg").any()
    engine.save_checkpoint(folder / where)
    assert all(
        torch.equal(found[0][name], value.to(found[0][name]))
        for name, value in engine.module_state_dict().items()
    )
    train(2)
    engine.load_checkpoint(folder / where)
    train(2)
    return found


@pytest.mark.parametrize(
    ("stage", "precision"), [(1, {}), (3, {}), (3, {"bf16": {"enabled": True, "auto_cast": True}})]
)
def test_what_lives_in_files_trains_as_on_the_device_and_goes_through_checkpoints(
    ranks: RankPool, tmp_path: Path, stage: int, precision: Mapping[str, Any]
) -> None:
    _, expected = plainly(lambda m, i: [criterion(m(data(i)[0]), data(i)[1])], 2)
    here, there = (
        ranks(2, _streams, stage, tmp_path, where, precision) for where in ("device", "files")
    )
    for (first, after, again), others in zip(here, there, strict=True):
        if not precision:
            assert_close(first, expected)
        for weights, theirs in zip((first, after, again), others, strict=True):
            assert all(torch.equal(weights[name], theirs[name]) for name in weights)
        assert all(torch.equal(after[name], again[name]) for name in after)


def test_states_that_are_away_are_missed() -> None:
    engine = made(3)
    engine.offload_states()
    with pytest.raises(RuntimeError, match="call reload_states first"):
        engine(data(0)[0])
    engine.reload_states()
    engine(data(0)[0])
    engine.destroy()
    assert "forward" not in engine.module.__dict__
    for call in (engine.reload_states, engine.offload_states, engine.module_state_dict):
        with pytest.raises(RuntimeError, match="must not be used after destroy"):
            call()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_on_meta_is_filled_unit_by_unit_and_trains(stage: int) -> None:
    with torch.device("meta"):
        model = Noisy()
    engine = fzero.initialize(model=model, config=settings(stage))[0]
    assert (
        engine.module.head.weight.device.type == "cpu"
        and engine.module.norm.running_mean.device.type == "cpu"
    )
    x, y = data(0)
    losses = []
    for _ in range(6):
        losses.append(engine.backward(criterion(engine(x), y)).item())
        engine.step()
    assert losses[-1] < losses[0]


# --- what scripts ask of it -----------------------------------------------------------------------


def _loaded(stage: int) -> tuple[Any, ...]:
    engine = made(stage, bf16={"enabled": True})
    other = {name: x + 1.0 for name, x in engine.module_state_dict().items()}
    engine.load_module_state_dict({"module": other})
    whole = engine.module_state_dict()
    some: dict[str, Any] = {}
    engine.module_state_dict(destination=some, prefix="module.")
    x, y = mine(engine, data(0))
    engine.backward(criterion(engine(x.bfloat16()), y))
    engine.step()
    with pytest.raises(
        ValueError,
        match=r"^load_module_state_dict: names must be those of the model, got no 'blocks",
    ):
        engine.load_module_state_dict({"head.bias": other["head.bias"]})
    engine.load_module_state_dict({"head.bias": torch.full((3,), 7.0)}, strict=False)
    return other, whole, some, engine.module_state_dict()["head.bias"]


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_are_loaded_are_those_of_the_masters_in_every_stage(
    stage: int, ranks: RankPool
) -> None:
    for other, whole, some, bias in ranks(2, _loaded, stage):
        assert other.keys() == whole.keys() and all(
            torch.equal(whole[name], other[name]) for name in other
        )
        assert {name.removeprefix("module.") for name in some} == other.keys()
        assert bias.tolist() == [7.0, 7.0, 7.0]


def test_an_engine_reports_its_settings_by_the_names_of_deepspeed() -> None:
    engine = made(
        2, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=3, bf16={"enabled": True}
    )
    assert engine.get_batch_info() == (12, 4, 3)
    assert engine.get_data_types() == (torch.bfloat16, torch.bfloat16) and engine.get_type() == [
        "adamw"
    ]
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("adamw", None)
    assert engine.zero_offload_optimizer() is None and not engine.zero_cpu_offload()
    assert not engine.flops_profiler_enabled() and engine.flops_profiler_profile_step() == 1
    assert (engine.get_data_parallel_rank(), engine.get_model_parallel_rank()) == (0, 0)
    engine.set_lr(0.25)
    assert engine.get_lr() == [0.25]
    with pytest.raises(ValueError, match=r"^module_state_dict: keep_vars must be False"):
        engine.module_state_dict(keep_vars=True)


def test_gathered_parameters_may_be_entered_again_and_subclassed() -> None:
    class Mine(deepspeed.zero.GatheredParameters):
        pass

    engine = fzero.initialize(model=make(Net), config=settings(3))[0]
    bias = engine.module.head.bias
    gathered = Mine(bias, modifier_rank=0)
    for value in (1.0, 2.0):
        with gathered:
            bias.data.fill_(value)
        with gathered:
            assert (bias.detach() == value).all()


def _merges(stage: int, factor: float) -> tuple[list[str], bool]:
    """As PEFT's `merge_adapter` and `unmerge_adapter`; returns the warnings, and
    whether the weights are the same bits.
    """
    engine = made(stage)
    before, params = engine.module_state_dict(), list(engine.module.parameters())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with torch.no_grad(), deepspeed.zero.GatheredParameters(params):
            for seed, param in enumerate(params):
                delta = (
                    torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * 0.05
                )
                param.add_(delta).sub_(delta * factor)
    after = engine.module_state_dict()
    x, y = mine(engine, data(0))
    engine.backward(criterion(engine(x), y))
    engine.step()
    said = [str(each.message) for each in seen if "GatheredParameters" in str(each.message)]
    return said, all(torch.equal(x, before[name]) for name, x in after.items())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_rounding_of_an_adapter_that_was_merged_and_unmerged_is_dropped(
    ranks: RankPool, stage: int
) -> None:
    for said, are_same in ranks(2, _merges, stage, 1.0):
        assert are_same and len(said) == 1 and "merged and unmerged" in said[0]
    with pytest.raises(RankError, match="must not change while modifier_rank is None"):
        ranks(2, _merges, stage, 0.999)


def test_the_consolidated_weights_have_deepspeeds_names() -> None:
    engine: Any = made(0)
    for name in ("_consolidated_16bit_state_dict", "_zero3_consolidated_16bit_state_dict"):
        assert getattr(engine, name)().keys() == engine.module_state_dict().keys()
