"""Steps of several ranks on the pretended device, with collectives in the order and
with the lifetimes of NCCL.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from pretended_cuda import PretendedCuda
from pretended_nccl import pretended_nccl
from ranks import RankError, RankPool
from test_meshes import MESHES, MODES, config_of, given_mesh
from test_pretended_cuda import PLACEMENTS, PRECISIONS, leave_out
from torch import Tensor
from training import Plain, make, part, vectors

import fzero
from fzero.comms import process_group
from fzero.comms.process_group import group_of
from fzero.comms.rendezvous import RankInfo
from fzero.optim.transforms import same_bits
from sharding import Mesh

WIDTH, NUM_STEPS = 8, 3
CODED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
PARTS: dict[str, dict[str, Any]] = PLACEMENTS | {"coded": {}, "LoCo": {}}
"""The state's placements, and comm hooks without and with a state."""


def train(device: str, mode: str, mesh: Mesh, precision: str, case: str) -> dict[str, Tensor]:
    """What some steps leave on a rank, in host memory: losses, norms, all tensors of
    the state, and weights.
    """
    model = make(lambda: Plain(WIDTH, 3)).to(device)
    keys = PRECISIONS[precision] | {
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 8,
    }
    cfg = config_of(mode, mesh, **keys)
    cfg["zero_optimization"] |= PLACEMENTS.get(case, {}) | {
        "reduce_bucket_size": 100,
        "sub_group_size": 64,
    }
    hooks = {}
    if case in ("coded", "LoCo"):
        coded = fzero.comms.compressed(fzero.comms.quantize(8))
        hooks["reduce_hook"] = coded if case == "coded" else fzero.comms.error_feedback(coded)
        hooks |= {"gather_hook": coded} if mode.endswith("3") else {}
    step = fzero.make_train_step(model, cfg, mesh=given_mesh(mode, mesh), **hooks)
    state, found = step.init(), {}
    for number in range(NUM_STEPS):
        batch = part(vectors(number, 8, WIDTH), step.rank, step.world_size)
        state, metrics = step(state, tuple(x.to(device) for x in batch))
        found |= {f"loss {number}": metrics.loss, f"norm {number}": metrics.grad_norm}
    accessors, leaves, _ = optree.tree_flatten_with_accessor(state._replace(rng={}))
    state_of = {accessor.codify("state"): x for accessor, x in zip(accessors, leaves, strict=True)}
    found |= {name: x for name, x in state_of.items() if isinstance(x, Tensor)}
    return {name: x.cpu() for name, x in (found | step.gather(state)).items()}


def differing(*how: Any, without: str | None = None) -> tuple[list[str], list[str]]:
    """On a rank: the names of what differs from a run on the CPU, and the kinds of
    collectives that ran.
    """
    expected = train("cpu", *how)
    with (
        pytest.MonkeyPatch.context() as patches,
        PretendedCuda() as card,
        pretended_nccl(card) as nccl,
    ):
        if without:
            leave_out(without, patches)
        found = train("cuda", *how)
    assert found.keys() == expected.keys()
    return [name for name, x in found.items() if not same_bits(x, expected[name])], sorted(
        set(nccl.started)
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["2x2", "4x1", "1x4"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", PARTS)
def test_a_step_of_several_ranks_has_no_race_and_the_bits_of_the_cpu(
    ranks: RankPool, mode: str, name: str, precision: str, case: str
) -> None:
    if "parameters" in case or "all" in case:
        mode = mode.replace("0", "3").replace("1", "3").replace("2", "3")
    for wrong, _ in ranks(4, differing, mode, MESHES[name], precision, case):
        assert wrong == []


@pytest.mark.parametrize("wait", ["wait_event", "wait_stream"])
def test_a_wait_that_a_step_of_several_ranks_leaves_out_is_found(
    ranks: RankPool, wait: str
) -> None:
    with pytest.raises(RankError, match=r"race|given back too early"):
        ranks(4, differing, "hpz 3", MESHES["2x2"], "fp32", "LoCo", without=wait)


# --- threads and groups ---------------------------------------------------------------------------


class Seen(Plain):
    """Notes, in forward and backward, whether autograd may use threads of its own."""

    found: set[tuple[str, bool]]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.found.add(("forward", torch._C._is_multithreading_enabled()))
        x = x.requires_grad_() * 1
        x.register_hook(
            lambda grad: self.found.add(("backward", torch._C._is_multithreading_enabled()))
        )
        return super().forward(x, y)


@pytest.mark.parametrize("stage", range(4))
def test_autograd_runs_a_step_in_the_thread_of_the_caller(stage: int) -> None:
    """On a device it would use another thread, with other thread-local state, for which
    lockstep ranks would wait.
    """
    model = make(lambda: Seen(WIDTH, 2))
    model.found = set()
    step = fzero.make_train_step(
        model, {"zero_optimization": {"stage": stage}, "train_batch_size": 4}
    )
    step(step.init(), vectors(0, 4, WIDTH))
    assert (
        model.found == {("forward", False), ("backward", False)}
        and torch._C._is_multithreading_enabled()
    )


DEVICE_THREAD = """
import os, threading, torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("other")
threads = []

class There(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data, requires_grad=False):
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=data.dtype, device="other:0", requires_grad=requires_grad)
        made.data_here = data
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.data_here if isinstance(x, There) else x, (args, kwargs or {}))
        kwargs |= {"device": "cpu"} if "device" in kwargs else {}
        return tree_map(lambda x: There(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs))

class Notes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        threads.append(threading.get_ident() == threading.main_thread().ident)
        return grad

Notes.apply(There(torch.ones(3), True)).sum().backward()
with torch.autograd.set_multithreading_enabled(False):
    Notes.apply(There(torch.ones(3), True)).sum().backward()
print(threads, flush=True)
os._exit(0)  # the engine's thread of the device never ends
"""


@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="torch < 2.12",
)
def test_pytorch_runs_a_backward_of_a_device_in_the_thread_of_the_caller_if_it_may_not_use_others() -> (
    None
):
    found = subprocess.run(
        [sys.executable, "-c", DEVICE_THREAD], capture_output=True, text=True, timeout=120
    )
    assert found.stdout.strip() == "[False, True]", found.stderr


def group_beside_a_bound_device() -> bool:
    whole: Any = dist.group.WORLD
    whole.bound_device_id = torch.device("cuda", 0)
    try:
        if dist.get_rank() < 2:  # of four; the others do not call
            group_of(None, (0, 1), "two of four")
        return whole.bound_device_id == torch.device("cuda", 0)
    finally:
        whole.bound_device_id = None


def test_a_group_of_some_ranks_needs_no_call_of_the_others_where_the_job_has_bound_its_device(
    ranks: RankPool,
) -> None:
    assert all(ranks(4, group_beside_a_bound_device))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_job_on_cards_binds_each_rank_to_its_own(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then NCCL connects when the group is made, where a rank that cannot is reported.
    gloo gets no device.
    """
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(
        process_group, "launched", lambda: RankInfo(1, 4, 3, "127.0.0.1", 29500, "torchrun")
    )
    monkeypatch.setattr(process_group, "keep_watch", lambda: None)
    monkeypatch.setattr(process_group.atexit, "register", lambda leave: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(made))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **how: made.append(how | {"backend": backend})
    )
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert fzero.join(device).rank == 1
    (how,) = made
    if device == "cpu":
        assert how["backend"] == "gloo" and "device_id" not in how and not chosen
    else:
        assert (
            how["backend"] == "nccl"
            and how["device_id"] == torch.device("cuda", 3)
            and chosen == [3]
        )
