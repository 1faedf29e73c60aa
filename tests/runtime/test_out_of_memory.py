"""A rank on the CPU that reaches its limit of memory reports the plan beside what was
measured.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from fzero.runtime.outcome import NO_HOST_MEMORY, explained

PROGRAM = """
import resource, torch, fzero
from torch import nn

step = fzero.make_train_step(nn.Linear(64, 64), {"zero_optimization": {"stage": 2}}, loss_fn=lambda m, x: wide(m(x)))

def wide(y):
    return (y.repeat(1, 4096) * 2).mean()  # 4096 times the memory of the outputs

state = step.init()
kept = torch.zeros(3, 1000, 1000)
state, _ = step(state, torch.ones(2, 64))
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 2**28, now + 2**28))
step(state, torch.ones(2048, 64))
"""


def test_a_rank_at_its_limit_names_the_plan_and_the_limit() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1 and any(words in ended.stderr for words in NO_HOST_MEMORY), (
        ended.stderr
    )
    assert "fzero: planned, without activations: a rank holds: parameters 16.6 kB" in ended.stderr
    assert "GiB resident at this process's peak, of an address space limited to" in ended.stderr
    assert (
        "the largest: 12,000,000 bytes of a float32 tensor (3, 1000, 1000); 524,288 bytes"
        in ended.stderr
    )
    assert (
        "are free on the machine" in ended.stderr
        and "For less: smaller micro-batches" in ended.stderr
    )


def test_another_error_is_left_alone() -> None:
    with pytest.raises(RuntimeError, match="of a model") as caught, explained(None):  # type: ignore[arg-type]
        raise RuntimeError("of a model")
    assert not hasattr(caught.value, "__notes__")
