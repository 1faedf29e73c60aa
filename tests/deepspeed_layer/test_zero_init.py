"""The laws of models that `zero.Init` divides: a plain model's values, and at most one
module whole on a rank.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Net, assert_close, criterion, data, losses_of_steps, made, mine, settings
from ranks import RankPool
from torch import Tensor, nn
from training import make

import fzero
from fzero.config.config import ConfigError, ConfigWarning
from fzero.deepspeed import zero
from fzero.deepspeed.engine.divided import Divided
from fzero.deepspeed.engine.param_views import PartitionedParameterError
from fzero.runtime.step_spec import MismatchError

Made = Callable[[], nn.Module]


class Tricky(nn.Module):
    """Its constructors use the parameters of their children in the ways that
    hand-written models do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6, padding_idx=0)
        self.attention = nn.MultiheadAttention(6, 2)  # sets a child's bias
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(6, 2, 7), 2, enable_nested_tensor=False
        )  # copies
        self.first, self.second = nn.Linear(6, 5), nn.Linear(6, 5)
        nn.init.xavier_uniform_(self.first.weight)
        with torch.no_grad():
            self.first.bias.add_(1.0)
            self.first.weight[0] = 2.0
        self.second.weight.data = self.first.weight.data.clone()
        self.second.weight.data[1].fill_(3.0)
        for name, param in self.named_parameters():
            if name.endswith("out_proj.weight"):
                nn.init.normal_(param, mean=0.0, std=0.02)
        self.apply(self._scale)
        self.scales = nn.ParameterList([torch.ones(3) * 4])
        self.scales.append(nn.Parameter(torch.arange(3.0)))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("count", torch.tensor(2.0))

    def _scale(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(0.5)


class Other(Tricky):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3)


def _whole(model: nn.Module) -> dict[str, Tensor]:
    with zero.GatheredParameters(model.parameters()):
        return {name: x.detach().clone() for name, x in model.state_dict().items()}


def _same_as_plain(cls: type[nn.Module]) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(3 + rank)  # rank 0's values count
    with zero.Init():
        model = cls()
    assert (
        nn.Module.apply.__module__ == "torch.nn.modules.module"
        and "__init_subclass__" not in nn.Module.__dict__
    )
    assert not hasattr(nn.Linear.__init__, "__wrapped__")
    for param in model.parameters():
        assert isinstance(param, nn.Parameter) and param.requires_grad and param.is_leaf
        assert (
            param.shape == (0,)
            and param.ds_numel == param.ds_shape.numel()
            and param.ds_tensor.dim() == 1
        )
    assert len({param.ds_id for param in model.parameters()}) == len([*model.parameters()])
    twin = copy.deepcopy(model)
    assert all(
        torch.equal(a, b)
        for a, b in zip(_whole(twin).values(), _whole(model).values(), strict=True)
    )
    assert model.head.weight is model.emb.weight and twin.head.weight is twin.emb.weight
    pieces = {name: param.ds_tensor.clone() for name, param in model.named_parameters()}
    return {"values": _whole(model), "pieces": pieces}


@pytest.mark.parametrize("cls", [Tricky, Other])
def test_a_divided_model_has_the_values_of_a_plain_one(
    ranks: RankPool, cls: type[nn.Module]
) -> None:
    first, second = ranks(2, _same_as_plain, cls)
    torch.manual_seed(3)
    plain = cls().state_dict()
    assert_close(first["values"], plain, 0.0)
    assert_close(second["values"], plain, 0.0)
    for name, piece in first["pieces"].items():
        assert torch.equal(torch.cat([piece, second["pieces"][name]]), plain[name].flatten())


@contextmanager
def _alive(owner: type, method: str) -> Iterator[list[int]]:
    """The most elements that results of a method had together, among those alive and
    not empty, whenever it returned.
    """
    most, original = [0], getattr(owner, method)
    made: list[weakref.ref[Tensor]] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        made.append(weakref.ref(result))
        found = (ref() for ref in made)
        most[0] = max(
            most[0],
            sum(x.numel() for x in found if x is not None and type(x) in (Tensor, nn.Parameter)),
        )
        return result

    setattr(owner, method, counted)
    try:
        yield most
    finally:
        setattr(owner, method, original)


def _one_module_at_a_time() -> tuple[int, int]:
    with _alive(nn.Parameter, "__new__") as while_made, zero.Init(dtype=torch.bfloat16):
        model = nn.Sequential(*[nn.Linear(10, 10) for _ in range(20)])
    assert model[3].weight.dtype == torch.bfloat16 == model[3].weight.ds_tensor.dtype
    with _alive(Divided, "full") as while_taken:
        engine = fzero.initialize(model=model, config=settings(3), units=["*"])[0]
    assert not any(hasattr(param, "fzero_divided") for param in model.parameters())
    assert len(engine.train_step.plan.units) >= 20
    return while_made[0], while_taken[0]


def test_at_most_one_module_is_whole(ranks: RankPool) -> None:
    for while_made, while_taken in ranks(2, _one_module_at_a_time):
        assert while_made == while_taken == 110, "of 2200"


def _trained(divides: bool, stage: int, offload: str | None, folder: str | None) -> Any:
    keys = settings(stage)
    if offload:
        keys["zero_optimization"]["offload_param"] = {"device": offload, "nvme_path": folder}
    with zero.Init(config_dict_or_path=keys, enabled=divides):
        model = make(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    del keys["optimizer"]
    engine = fzero.initialize(model=model, config=keys, optimizer=optimizer)[0]
    return losses_of_steps(engine), engine.module_state_dict()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("stage", "offload"), [(0, None), (2, None), (3, None), (3, "cpu"), (3, "nvme")]
)
def test_training_is_that_of_a_plain_model(
    ranks: RankPool, tmp_path: Path, stage: int, offload: str | None
) -> None:
    expected = ranks(2, _trained, False, stage, offload, str(tmp_path))
    for (losses, weights), (wanted, values) in zip(
        ranks(2, _trained, True, stage, offload, str(tmp_path)), expected
    ):
        assert losses == wanted
        assert_close(weights, values, 0.0)


def _gathers() -> None:
    rank = torch.distributed.get_rank()
    with zero.Init(), zero.Init(dtype=torch.float16):  # the inner one changes nothing
        model = make(Net)
    weight, bias = model.head.weight, model.head.bias
    assert weight.dtype == torch.float32
    with zero.GatheredParameters([bias, weight][:: 1 - 2 * rank], modifier_rank=1):  # any order
        assert weight.shape == (3, 12) and weight.ds_status.name == "AVAILABLE"
        if rank == 1:
            nn.init.constant_(weight, 7.0)
        with zero.GatheredParameters(weight):
            assert weight.shape == (3, 12)
        assert weight.shape == (3, 12)
    assert (
        weight.ds_status.name == "NOT_AVAILABLE"
        and bool((weight.ds_tensor == 7).all())
        and weight.numel() == 0
    )
    assert bool((_whole(model)["head.weight"] == 7).all())
    with (
        pytest.raises(
            RuntimeError,
            match="must not change while modifier_rank is None, and was changed on rank 1",
        ),
        zero.GatheredParameters(model.parameters()),
        torch.no_grad(),
    ):
        if rank == 1:
            weight[0] = 1.0
    assert bool((_whole(model)["head.weight"] == 7).all())
    for use in (weight.clone, lambda: model.head(torch.ones(12)), weight.half, weight.data.sum):
        with pytest.raises(PartitionedParameterError, match="is divided over the ranks"):
            use()
    assert model.to("cpu") is model and not any(x.numel() for x in model.state_dict().values())
    with pytest.raises(ValueError, match="must have its values, and is divided over the ranks"):
        fzero.make_train_step(model, settings(3))


def test_divided_parameters_are_gathered_before_there_is_an_engine(ranks: RankPool) -> None:
    ranks(2, _gathers)


MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to(device)": lambda model: model.to("cpu:0"),
    "to(dtype)": lambda model: model.to(torch.bfloat16),
    "to(device, dtype)": lambda model: model.to(torch.device("cpu", 0), torch.float64),
    "to(tensor)": lambda model: model.to(torch.ones(1, dtype=torch.float16)),
    "cpu": nn.Module.cpu,
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "double": nn.Module.double,
    "float": nn.Module.float,
    "half, float": lambda model: model.half().float(),
    "type": lambda model: model.type(torch.float16),
    "of a part": lambda model: model.attention.half() and model,  # type: ignore[operator]
}
"""What a script does to a whole model, or to a part of it, before `initialize`."""


def _moved(kind: str, remote: str, folder: str) -> dict[str, Tensor]:
    with zero.Init(
        config_dict_or_path={
            "zero_optimization": {"offload_param": {"device": remote, "nvme_path": folder}}
        }
    ):
        torch.manual_seed(3)
        model = Tricky()
    numbers = [param.ds_id for param in model.parameters()]
    assert MOVES[kind](model) is model
    assert [
        param.ds_id for param in model.parameters()
    ] == numbers and model.head.weight is model.emb.weight
    assert all(
        param.dtype == param.ds_tensor.dtype and not param.numel() for param in model.parameters()
    )
    return _whole(model)


@pytest.mark.covering(1)
@pytest.mark.parametrize("remote", ["none", "nvme"])
@pytest.mark.parametrize("kind", MOVES)
def test_a_divided_model_is_moved_and_cast_like_a_plain_one(
    ranks: RankPool, tmp_path: Path, kind: str, remote: str
) -> None:
    torch.manual_seed(3)
    plain = MOVES[kind](Tricky()).state_dict()
    for found in ranks(2, _moved, kind, remote, str(tmp_path)):
        assert {name: x.dtype for name, x in found.items()} == {
            name: x.dtype for name, x in plain.items()
        }
        assert_close(found, plain, 0.0)


def _mixed(stage: int) -> None:
    """What TRL does to move a reference model towards the trained one: rank 0 writes,
    with parameters of two engines.
    """
    with zero.Init():
        third = make(Net, seed=6)
    keys = settings(stage)
    del keys["optimizer"]
    first, second = made(stage), fzero.initialize(model=make(Net, seed=5), config=keys)[0]
    modules = first.module, second.module, third
    with zero.GatheredParameters(
        [param for module in modules for param in module.parameters()], modifier_rank=0
    ):
        for source, *targets in zip(*(module.parameters() for module in modules), strict=True):
            for target in targets if first.global_rank == 0 else ():
                target.data.mul_(0.5).add_(source.data, alpha=0.5)
    plain = make(Net).state_dict()
    assert_close(first.module_state_dict(), plain, 0.0)
    for found, seed in ((second.module_state_dict(), 5), (_whole(third), 6)):
        start = make(Net, seed=seed).state_dict()
        assert_close(
            found, {name: (0.5 * start[name]).add(x, alpha=0.5) for name, x in plain.items()}, 0.0
        )


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_of_several_engines_are_gathered_together(ranks: RankPool, stage: int) -> None:
    ranks(2, _mixed, stage)


def _nested(stage: int) -> None:
    engine = made(stage)
    weight, bias = engine.module.head.weight, engine.module.head.bias
    with zero.GatheredParameters([weight, bias], modifier_rank=0):
        with zero.GatheredParameters([weight, engine.module.blocks[0].up.weight], modifier_rank=1):
            if engine.global_rank == 1:
                weight.data.fill_(3.0)
        assert weight.shape == (3, 12) and bool((weight == 3).all()) and bias.shape == (3,)
        with engine.gathered(["head.weight"]):
            weight.data.zero_()  # of a copy
        assert bool((weight == 3).all())
        if engine.global_rank == 0:
            bias.data.fill_(2.0)
    assert weight.numel() == (0 if stage == 3 else 36)
    with engine.gathered():
        with zero.GatheredParameters(weight):
            pass
        assert bool((weight == 3).all()) and engine.module.blocks[0].up.weight.shape == (20, 12)
    found = engine.module_state_dict()
    assert bool((found["head.weight"] == 3).all()) and bool((found["head.bias"] == 2).all())
    x, y = mine(engine, data(0))
    engine.backward(criterion(engine(x), y))
    engine.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_an_inner_gather_leaves_the_outer_one_its_values(ranks: RankPool, stage: int) -> None:
    ranks(2, _nested, stage)


def _makes_another_model() -> None:
    rank = torch.distributed.get_rank()
    with zero.Init():
        nn.Linear(4, 4)
        for sizes in ((4, 4 + rank), *[(3, 3)] * rank, (5, 5)):  # an own shape, and one module more
            with pytest.raises(
                MismatchError,
                match=r"zero\.Init: must be the same on all ranks, but 'parameter 0' is",
            ):
                nn.Linear(*sizes)
            if sizes == (3, 3):
                return


def _wrong_writes() -> None:
    engine = made(3)
    with zero.Init():
        divided = make(Net)
    for model in (engine.module, divided):
        weight = model.head.weight
        with pytest.raises(
            ValueError, match="modifier_rank must be None or a rank from 0 to 1, got 2"
        ):
            zero.GatheredParameters(weight, modifier_rank=2).__enter__()
        for other, rule in (
            (torch.zeros(4, 12), "keep its shape"),
            (torch.zeros(3, 12).double(), "have one dtype"),
        ):
            with (
                pytest.raises(RuntimeError, match=f"GatheredParameters: a parameter must {rule}"),
                zero.GatheredParameters(weight, modifier_rank=0),
            ):
                weight.data = other if engine.global_rank == 0 else weight.data


def test_ranks_that_differ_get_one_error(ranks: RankPool) -> None:
    ranks(2, _makes_another_model)
    ranks(2, _wrong_writes)


def _fails() -> int:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    zero.Init(module=model)
    before = _whole(model)
    with pytest.raises(ConfigError):
        fzero.initialize(
            model=model, config=settings(3), optimizer=torch.optim.SGD([torch.ones(2)], lr=1.0)
        )
    assert_close(_whole(model), before, 0.0)  # it is divided as before
    return model[0].weight.ds_tensor.numel()


def test_a_model_in_memory_is_divided_and_stays_so_after_an_error(ranks: RankPool) -> None:
    assert ranks(2, _fails) == [6, 6]


def test_values_of_init_are_checked(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="remote_device: must be one of 'none', 'cpu', 'nvme', got 'disk'"
    ):
        zero.Init(remote_device="disk")
    with pytest.raises(ConfigError, match=r"'nvme' needs offload_param\.nvme_path"):
        zero.Init(remote_device="nvme")
    with pytest.warns(ConfigWarning, match="shards are not quantized"):
        zero.Init(zero_quantized_weights=True)
    for config, dtype in (
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"fp16": {"enabled": "true"}}, torch.float16),
        ({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": "auto"}}, torch.float32),
    ):
        with zero.Init(config_dict_or_path=config):
            assert nn.Linear(2, 2, dtype=torch.float64).weight.dtype == dtype
    with zero.Init():
        model = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2, device="meta"))
        model[0].weight.requires_grad_(False)
    assert (
        model[0].weight.dtype == torch.float64
        and not model[0].weight.requires_grad
        and model[1].weight.is_meta
    )
    folder = tmp_path / "new"
    block = {"device": "nvme", "nvme_path": str(folder)}
    with zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3, "offload_param": block}}):
        model = nn.Linear(3, 3)
    assert folder.is_dir() and not [*folder.iterdir()] and model.weight.ds_tensor.numel() == 9


def test_parameters_of_engines_and_errors_in_constructors_are_left_alone() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.inner.weight.data.zero_()
            raise KeyError("mine")

    with zero.Init():
        engine = made(1)
        wrapper = nn.Sequential(engine.module)
        with pytest.raises(KeyError, match="mine"):
            Fails()
        after = nn.Linear(2, 2)
    assert (
        next(wrapper.parameters()).numel()
        and next(engine.parameters()).numel()
        and not after.weight.numel()
    )
    engine(data(0)[0])


def test_a_model_of_deepspeed_itself_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.weight.ds_param_type = "ZeroParamType.PARTITIONED"  # what its zero.Init sets
    for use in (
        lambda: fzero.initialize(model=model, config=settings(3)),
        lambda: zero.GatheredParameters(model.parameters()).__enter__(),
        lambda: zero.Init(module=model),
    ):
        with pytest.raises(ConfigError, match="must not be divided by the package DeepSpeed"):
            use()
