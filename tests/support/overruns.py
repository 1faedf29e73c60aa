"""Two faults of PyTorch on the CPU that write past the end of a tensor, without fzero.
Each ends most processes with a signal.

python tests/support/overruns.py convolution oneDNN #6035: 2.11 to 2.14, on a processor
with AVX2 or AVX-512 python tests/support/overruns.py reduction pytorch #196681: 2.11 to
2.14; `mend_reductions` prevents it
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor


def convolution() -> None:
    """The gradient of the weight of a strided 1x1 convolution, for few channels that
    lie innermost.
    """
    for size in (32, 64):
        for channels in (3, 4, 8):
            x = torch.randn(8, channels, size, size).contiguous(memory_format=torch.channels_last)
            weight = torch.randn(16, channels, 1, 1, requires_grad=True)
            F.conv2d(x, weight, stride=2).sum().backward()


def reduction() -> None:
    """A sum over the innermost of three loops; the outermost (66) is in vectors, too,
    of which the last is not full.
    """

    def f(x: Tensor) -> Tensor:
        gelu = 0.5 * x * (torch.erf(x * 0.7071067811865476) + 1)
        columns = F.pad(gelu.permute(3, 2, 1, 0), (0, 0, 0, 58), value=0.5)
        return F.pad(gelu, (0, 0, 0, 0, 0, 58), value=0.5) @ columns

    x = torch.randn(1, 8, 66, 66).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(torch.compile(f)(x), f(x))


if __name__ == "__main__":
    {"convolution": convolution, "reduction": reduction}[sys.argv[1]]()
    print("no fault was seen")
