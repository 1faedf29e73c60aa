"""The law of reads: a parameter whose values a rank does not have (stage 3, zero.Init)
is never read in silence as an empty tensor, in whatever way a script reads it.

Each way returns something of the values. It gives the same for a gathered parameter as
for an ordinary one, and raises an error with the remedy for one that is not gathered.
`BLIND` has the ways that PyTorch tells no Python code of.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from engines import WIDTH, made
from ranks import RankPool
from torch import Tensor, nn
from torch.nn import functional as F

from fzero.deepspeed import zero
from fzero.deepspeed.engine.divided_params import DividedParameter

Way = Callable[[nn.Module], Any]
"""Something of the values of `module.weight`, of shape (3, WIDTH)."""


def saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def from_safetensors(x: Tensor) -> Tensor:
    return safetensors.torch.load(safetensors.torch.save({"x": x}))["x"]


def compiled(function: Callable[..., Any], *args: Any) -> Any:
    return torch.compile(function, backend="eager")(*args)


def square(x: Tensor) -> Tensor:
    return x.square().sum()


def copied(module: nn.Module) -> Any:
    other = nn.Linear(WIDTH, 3)
    with torch.no_grad():
        other.weight.copy_(module.weight)
    return other.weight.sum()


def traced(module: nn.Module) -> Any:
    weight = module.weight.detach()
    return torch.jit.trace(lambda x: x + weight.sum(), torch.ones(1))(torch.ones(1))


def in_a_parameter(module: nn.Module) -> Any:
    return nn.Parameter(module.weight).sum()


def exported(module: nn.Module) -> Any:
    return torch.export.export(module, (torch.ones(1, WIDTH),)).module()(torch.ones(1, WIDTH))


WAYS: dict[str, Way] = {
    "detach().numpy()": lambda m: m.weight.detach().numpy().sum(),
    "detach().sum()": lambda m: m.weight.detach().sum(),
    "detach().tolist()": lambda m: m.weight.detach().tolist(),
    "detach().cpu()": lambda m: m.weight.detach().cpu().sum(),
    "detach().half()": lambda m: m.weight.detach().half(),
    "detach().isnan()": lambda m: m.weight.detach().isnan().any(),
    "detach().detach()": lambda m: m.weight.detach().detach().sum(),
    "detach() + 1": lambda m: torch.zeros(3, 1) + m.weight.detach(),
    "cat": lambda m: torch.cat([torch.zeros(4), m.weight.detach().flatten()]),
    "equal": lambda m: torch.equal(m.weight.detach(), m.weight.detach()),
    "data": lambda m: m.weight.data.sum(),
    "data.detach()": lambda m: m.weight.data.detach().norm(),
    "data.copy": lambda m: m.weight.data.clone(),
    "state_dict": lambda m: m.state_dict()["weight"].sum(),
    "state_dict(keep_vars)": lambda m: m.state_dict(keep_vars=True)["weight"].sum(),
    "copy of the state_dict": lambda m: copy.deepcopy(m.state_dict())["weight"],
    "saved state_dict": lambda m: saved(m.state_dict())["weight"],
    "pickled state_dict": lambda m: pickle.loads(pickle.dumps(m.state_dict()))["weight"],
    "safetensors": lambda m: from_safetensors(m.weight.detach()),
    "safetensors of the parameter": lambda m: from_safetensors(m.weight),
    "save": lambda m: saved(m.weight),
    "save of detach()": lambda m: saved(m.weight.detach()),
    "saved module": lambda m: saved(nn.Sequential(m))[0].weight,
    "deepcopy": lambda m: copy.deepcopy(m.weight),
    "deepcopy of the module": lambda m: copy.deepcopy(nn.Sequential(m))[0].weight,
    "copy": lambda m: copy.copy(m.weight).sum(),
    "pickle": lambda m: pickle.loads(pickle.dumps(m.weight)),
    "clone": lambda m: m.weight.clone(),
    "numpy(force)": lambda m: m.weight.numpy(force=True),
    "asarray": lambda m: np.asarray(m.weight.detach()),
    "from_dlpack of numpy": lambda m: np.from_dlpack(m.weight.detach()),
    "from_dlpack": lambda m: torch.from_dlpack(m.weight.detach()),
    "tolist": lambda m: m.weight.tolist(),
    "index": lambda m: m.weight[0],
    "iteration": lambda m: [row.sum() for row in m.weight],
    "in": lambda m: 2.0 in m.weight,
    "len": lambda m: len(m.weight),
    "comparison": lambda m: m.weight == m.weight,
    "address": lambda m: m.weight.data_ptr() == m.weight.detach().data_ptr(),
    "storage": lambda m: m.weight.storage().tolist(),
    "T": lambda m: m.weight.T,
    "view": lambda m: m.weight.view(-1),
    "as_subclass": lambda m: m.weight.as_subclass(Tensor),  # type: ignore[type-var]
    "nn.Parameter(p)": in_a_parameter,
    "nn.Parameter(p.detach())": lambda m: nn.Parameter(m.weight.detach()).sum(),
    "nn.Buffer": lambda m: nn.Buffer(m.weight).sum(),
    "tensor of detach()": lambda m: torch.tensor(m.weight.detach()),
    "Tensor of detach()": lambda m: torch.Tensor(m.weight.detach()).sum(),
    "asarray of torch": lambda m: torch.asarray(m.weight.detach()).sum(),
    "norm": lambda m: torch.linalg.norm(m.weight),
    "foreach": lambda m: torch._foreach_norm([m.weight.detach()]),
    "aten": lambda m: torch.ops.aten.sum.default(m.weight.detach()),
    "linear": lambda m: F.linear(torch.ones(1, WIDTH), m.weight.detach()),
    "functional_call": lambda m: torch.func.functional_call(
        nn.Linear(WIDTH, 3, bias=False), {"weight": m.weight.detach()}, (torch.ones(1, WIDTH),)
    ),
    "to_vector": lambda m: nn.utils.parameters_to_vector([m.weight]),
    "func.grad": lambda m: torch.func.grad(square)(m.weight.detach()),
    "func.vjp": lambda m: torch.func.vjp(square, m.weight.detach())[0],
    "func.vmap": lambda m: torch.func.vmap(square)(m.weight.detach()),
    "functionalize": lambda m: torch.func.functionalize(square)(m.weight.detach()),
    "compile": lambda m: compiled(square, m.weight),
    "compile of detach()": lambda m: compiled(square, m.weight.detach()),
    "copied into": copied,
    "jit.trace": traced,
    "init": lambda m: nn.init.ones_(m.weight),
    "in place": lambda m: m.weight.detach().mul_(1),
    "average": lambda m: torch.optim.swa_utils.AveragedModel(nn.Sequential(m)).module[0].weight,
}

BLIND: dict[str, Way] = {
    "torch.tensor(p)": lambda m: torch.tensor(m.weight),
    "torch.Tensor(p)": lambda m: torch.Tensor(m.weight),
    "func.grad": lambda m: torch.func.grad(square)(m.weight),
    "func.vjp": lambda m: torch.func.vjp(square, m.weight)[1](torch.ones(()))[0],
    "func.vmap": lambda m: torch.func.vmap(square)(m.weight),
    "to_dlpack": lambda m: torch.from_dlpack(torch.utils.dlpack.to_dlpack(m.weight.detach())),
    "storage": lambda m: torch.tensor(list(m.weight.untyped_storage())),
}
"""Ways through which PyTorch's C++ takes the empty tensor itself. The result has no
elements, as in DeepSpeed.
"""


COPIES = {"deepcopy", "deepcopy of the module", "average"}
"""Ways that give a divided parameter of its own where no engine holds the first."""


def read(way: Way, module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return way(module)


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor | np.ndarray):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def divided() -> nn.Module:
    with zero.Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 1}):
        torch.manual_seed(2)
        return nn.Linear(WIDTH, 3)


def _reads(kind: str) -> list[str]:
    """The ways that are wrong."""
    engine = made(3) if kind == "engine" else None
    module: nn.Module = divided() if engine is None else engine.module.head
    with zero.GatheredParameters(module.parameters()):
        plain = nn.Linear(WIDTH, 3)
        plain.load_state_dict(module.state_dict())
    wrong = []
    for name, way in WAYS.items():
        if kind == "zero.Init" and name in COPIES:
            assert isinstance(read(way, module), DividedParameter)
            continue
        try:
            wrong.append(f"{name}: {read(way, module)!r}")
        except RuntimeError as error:  # or Dynamo's, which quotes it
            if "GatheredParameters" not in str(error):
                wrong.append(f"{name}: {error!r}")
    assert module.weight.shape == (0,)
    for name, way in BLIND.items():
        assert not read(way, module).numel(), name
    with torch.no_grad():
        for name, way in WAYS.items():
            if name not in ("saved module", "deepcopy of the module", "average", "init"):
                with zero.GatheredParameters(module.parameters()):
                    if not is_same(read(way, module), read(way, plain)):
                        wrong.append(f"gathered, {name}")
    return wrong


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["engine", "zero.Init"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_rank_does_not_have_is_never_read_in_silence(
    ranks: RankPool, world_size: int, kind: str
) -> None:
    assert ranks(world_size, _reads, kind) == [[]] * world_size
