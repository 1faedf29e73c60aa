"""`deepspeed.compression.basic_layer`: layer classes by DeepSpeed's names, for
`isinstance`. No module is replaced here.

An ordinary module counts as one of these:
`isinstance(nn.Linear(2, 2), LinearLayer_Compress)`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["BNLayer_Compress", "Conv2dLayer_Compress", "Embedding_Compress", "LinearLayer_Compress"]


class _IsPlain(type):
    """The type of a class whose instances are those of its base."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__mro__[1])


class LinearLayer_Compress(nn.Linear, metaclass=_IsPlain):
    """A Linear. A plan compresses it."""


class Conv2dLayer_Compress(nn.Conv2d, metaclass=_IsPlain):
    """A Conv2d. A plan compresses it."""


class Embedding_Compress(nn.Embedding, metaclass=_IsPlain):
    """An Embedding. A plan compresses it."""


class BNLayer_Compress(nn.BatchNorm2d, metaclass=_IsPlain):
    """A BatchNorm2d, which shrinks with the channels before it."""
