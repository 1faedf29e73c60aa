"""The sharpness of the demo's GPT: the top eigenvalue of its loss' Hessian, by Lanczos.

    fzero --num_procs 2 examples/derivatives/eigenvalue.py

Each product (`step.hvp`) is a forward and a backward in which numbers carry a tangent.
The basis of Lanczos is divided among the ranks as the parameters are.
"""

import sys
from pathlib import Path

import runs
import torch
from linear_algebra import lanczos
from torch import Tensor, nn

import fzero

sys.path.append(str(Path(__file__).parents[1]))
from gpt import GPT, SIZES


def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(SIZES["tiny"])


def batch(num: int = 8) -> tuple[Tensor, Tensor]:
    text = torch.randint(97, 123, (num, 33), generator=torch.Generator().manual_seed(1))
    return text[:, :-1], text[:, 1:]


def top_eigenvalue(stage: int, num: int = 12) -> float:
    """The largest eigenvalue after `num` products."""
    step = fzero.make_train_step(model(), runs.config(stage))
    state, space = step.init(), fzero.curvature.space(step)
    own = runs.own_rows(batch(), step)
    value, _ = lanczos(lambda v: step.hvp(state, own, v), space, space.normal(seed=0), num)
    return value


if __name__ == "__main__":
    for stage in (0, 3):
        print(f"top eigenvalue, stage {stage}: {top_eigenvalue(stage):.4f}")
