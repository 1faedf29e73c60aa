"""The bytes that a rank holds while it generates (`fzero.generating`): the full
parameters, and the cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fzero.config.config import Config
from fzero.estimation.activation_trace import faked
from fzero.estimation.dry_run import DryRun
from fzero.estimation.models import PlainGPT
from fzero.model.binding import bound
from fzero.model.changes import attributes_kept, modes_kept
from fzero.plans.plan import Plan
from sharding.views import torch_dtype


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers that a rank generates at once: their number, and the tokens of prompt
    and answer of each.
    """

    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Generating:
    """Bytes on the device between two steps, while a rank generates. Activations of a
    forward are not counted.

    Attributes:
        state: the bytes of the model state.
        copy: the bytes of the divided parameters in full (`by="copy"`).
        gathers: the bytes of the units that are gathered at once (`by="unit"`), at the
            most.
        cache: the bytes of the keys and values of all tokens.
    """

    state: int
    copy: int
    gathers: int
    cache: int

    @classmethod
    def after(cls, plan: Plan, step: DryRun, cache: int) -> Generating:
        """The bytes after a step of a plan."""
        return cls(step.at_rest, plan.copy_nbytes, step.most("gathers"), cache)

    @property
    def by_copy(self) -> int:
        """All bytes with `by="copy"`."""
        return self.state + self.copy + self.cache

    @property
    def by_unit(self) -> int:
        """All bytes with `by="unit"`."""
        return self.state + self.gathers + self.cache

    def as_dict(self) -> dict[str, int]:
        """The numbers as JSON types."""
        parts = {name: getattr(self, name) for name in ("state", "copy", "gathers", "cache")}
        return parts | {"by copy": self.by_copy, "by unit": self.by_unit}


def cache_nbytes(model: nn.Module, cfg: Config | Any, answers: Answers) -> int:
    """The bytes of the keys and values of `answers`, read off a forward of the model on
    tensors without memory.

    Args:
        model: a model of transformers that returns `past_key_values`, or the plain GPT
            of a number of parameters, of which each block would keep a key and a value
            for each token.
        cfg: gives the dtypes.

    Raises:
        ValueError: the model has no such cache.

    >>> with torch.device("meta"):
    ...     model = PlainGPT(3, 128, 50)
    >>> cache_nbytes(
    ...     model, {"bf16": {"enabled": True}}, Answers(2, 10)
    ... )  # 2 tensors x 3 blocks x 2 x 10 x 128, 2 bytes each
    30720
    """
    cfg = Config.load(cfg)
    with faked(model, cfg) as (layout, params, buffers):
        if isinstance(model, PlainGPT):
            x = params["embedding.weight"]
            return (
                2
                * len(model.blocks)
                * answers.rows
                * answers.tokens
                * x.shape[1]
                * x.element_size()
            )
        ids = torch.zeros((answers.rows, answers.tokens), dtype=torch.int64)
        precision = cfg.precision
        casts = (
            torch.autocast("cpu", torch_dtype(precision.autocast))
            if precision.autocast
            else nullcontext()
        )
        try:
            with (
                modes_kept(model),
                attributes_kept(model),
                bound(model, layout.aliases, params.__getitem__, buffers),
                torch.no_grad(),
                casts,
            ):
                model.eval()
                out: Any = model(input_ids=ids, use_cache=True)
        except TypeError as error:
            raise _no_cache(model, str(error)) from error
        cache = getattr(out, "past_key_values", None)
        if cache is None:
            raise _no_cache(model, "its output has none")
        # others count tokens
        found = {x.untyped_storage()._cdata: x for x in _tensors(cache, set()) if x.dim() > 1}
        return sum(x.numel() * x.element_size() for x in found.values())


def _no_cache(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"generate: {type(model).__name__} must take input_ids and use_cache, and return "
        f"past_key_values, which are counted ({reason}); leave --generate out, and add the bytes "
        f"of the copy (Plan.copy_nbytes) and of your cache"
    )


def _tensors(held: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors of a cache: of its attributes, lists and dictionaries."""
    if isinstance(held, Tensor):
        yield held
    elif id(held) not in seen:
        seen.add(id(held))
        if isinstance(held, dict):
            inner: Any = held.values()
        elif isinstance(held, list | tuple):
            inner = held
        elif type(held).__module__.startswith("transformers.") and not isinstance(held, type):
            inner = getattr(held, "__dict__", {}).values()
        else:
            inner = ()
        for one in inner:
            yield from _tensors(one, seen)
