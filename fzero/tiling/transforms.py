"""`tiled_head` and `tiled_mlp`: tiles as transforms of a model, no line of which
changes.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fzero.common.arguments import check_whole
from fzero.model.transforms import Call, Changes, TransformedStep, Wrap
from fzero.plans.units import blocks_of
from fzero.tiling.logits import Logits
from fzero.tiling.shapes import check_divides
from fzero.tiling.tiles import Tiled
from fzero.transforms.matching import Patterns, patterns_of


@dataclass(frozen=True)
class TiledHead:
    """The transform of `tiled_head`."""

    patterns: tuple[str, ...] | None
    shards: int | None
    chunk_tokens: int | None

    def __str__(self) -> str:
        """The call that makes it."""
        names = {"shards": self.shards, "chunk_tokens": self.chunk_tokens}
        given = [f"{key}={value}" for key, value in names.items() if value is not None]
        return f"fzero.tiled_head({', '.join([*_as_argument(self.patterns), *given])})"

    def __call__(self, spec: TransformedStep) -> Changes:
        """See `ModelTransform`. It adds nothing."""
        names = self._names(spec.model)
        chunks = {
            key: value
            for key, value in (("shards", self.shards), ("chunk_tokens", self.chunk_tokens))
            if value is not None
        }

        def forwards(call: Call) -> Mapping[str, Wrap]:
            if not call.is_counted:  # generation needs logits
                return {}
            return dict.fromkeys(names, lambda name, head: _uncomputed(name, head, chunks))

        return Changes(name="tiled_head", text=str(self), forwards=forwards, is_exact=True)

    def _names(self, model: nn.Module) -> tuple[str, ...]:
        named = dict(model.named_modules())
        if self.patterns is None:
            get = getattr(model, "get_output_embeddings", None)
            head = None if get is None else get()
            found = [name for name, module in named.items() if module is head is not None]
            if not found:
                raise ValueError(
                    f"tiled_head: needs the head's name where the model has no "
                    f"get_output_embeddings, got {type(model).__name__}; pass pattern='lm_head', say"
                )
        else:
            found = _matching("tiled_head", self.patterns, [name for name in named if name])
        for name in found:
            if type(named[name]).forward is not nn.Linear.forward:
                raise ValueError(
                    f"tiled_head: must be an nn.Linear with its own forward, got a "
                    f"{type(named[name]).__name__} for {name!r}; call fzero.linear_cross_entropy "
                    f"in the model"
                )
        return tuple(found)


def _uncomputed(name: str, head: nn.Module, chunks: Mapping[str, int]) -> Callable[..., Any]:
    if "forward" in head.__dict__:
        raise ValueError(
            f"tiled_head: must be the first transform of {name!r} that gives it a forward, got one "
            f"after another; put tiled_head before it, or let that one leave {name!r} out"
        )

    def forward(input: Tensor) -> Any:
        weight, bias = head.weight, head.bias
        return Logits(input, weight, bias, name, chunks, input.dtype)  # type: ignore[arg-type]

    return forward


def tiled_head(
    pattern: Patterns | None = None,
    *,
    shards: int | None = None,
    chunk_tokens: int | None = None,
) -> TiledHead:
    """Computes the cross entropy of a linear head without its logits
    (`fzero.linear_cross_entropy`), wherever the model or its loss function does so.

    The model may scale the logits by a number, cap them by one tanh, cast them, cut
    them by tokens, reshape them, and pass them to `F.cross_entropy` with reduction
    "mean" or "sum": the causal models of transformers do. Anything else with them is an
    error. Generation has logits as ever.

    Args:
        pattern: the name of the `nn.Linear`, with `*` for any part; None asks the model
            (`get_output_embeddings` of transformers).
        shards, chunk_tokens: see `fzero.linear_cross_entropy`.

    Raises:
        ValueError: from the step: no head has such a name, it is no `nn.Linear`, or the
            model uses its logits otherwise.
    """
    if shards is not None and chunk_tokens is not None:
        raise ValueError(
            f"tiled_head: shards and chunk_tokens both set the chunks, got {shards} and "
            f"{chunk_tokens}; leave one of them out"
        )
    for key, value in (("shards", shards), ("chunk_tokens", chunk_tokens)):
        if value is not None:
            check_whole(f"tiled_head: {key}", value, 1)
    patterns = None if pattern is None else patterns_of("tiled_head", pattern)
    return TiledHead(patterns, shards, chunk_tokens)


@dataclass(frozen=True)
class TiledMLP:
    """The transform of `tiled_mlp`."""

    patterns: tuple[str, ...]
    shards: int
    dim: int

    def __str__(self) -> str:
        """The call that makes it."""
        dim = "" if self.dim == 1 else f", dim={self.dim}"
        return f"fzero.tiled_mlp({_as_argument(self.patterns)[0]}, {self.shards}{dim})"

    def __call__(self, spec: TransformedStep) -> Changes:
        """See `ModelTransform`. It adds nothing."""
        named = {
            name: module
            for name, module in spec.model.named_modules()
            if name and type(module).forward is not nn.Module.forward
        }
        names = _matching("tiled_mlp", self.patterns, list(named))
        blocks = blocks_of(spec.model, spec.units)
        for name in names:
            inside = next((x for x in blocks if x != name and f"{x}.".startswith(f"{name}.")), None)
            if inside is not None:
                raise ValueError(
                    f"tiled_mlp: a module must lie in one unit, which stage 3 gathers once for all "
                    f"tiles, got {name!r} with the unit {inside!r} inside; match what is inside of "
                    f"a unit, or name larger ones in units="
                )
            outer = next((x for x in names if x != name and name.startswith(f"{x}.")), None)
            if outer is not None:
                raise ValueError(
                    f"tiled_mlp: must match no module inside of another, got {name!r} in {outer!r}; "
                    f"make the pattern narrower"
                )
        checked: dict[str, list[bool]] = {name: [] for name in names}

        def forwards(call: Call) -> Mapping[str, Wrap]:
            if not call.is_counted:  # generation computes token by token
                return {}

            def wrap(name: str, module: nn.Module) -> Callable[..., Any]:
                again = nullcontext if call.again is None else call.again
                where = f"tiled_mlp: {name!r}"
                tiles = Tiled(module.forward, self.shards, self.dim, again, where, checked[name])
                return lambda *args, **kwargs: tiles(*args, **kwargs)

            return dict.fromkeys(names, wrap)

        return Changes(name="tiled_mlp", text=str(self), forwards=forwards, is_exact=True)


def _as_argument(patterns: tuple[str, ...] | None) -> list[str]:
    """Patterns as they are written in a call: none, one, or a list."""
    if patterns is None:
        return []
    return [repr(patterns[0] if len(patterns) == 1 else [*patterns])]


def _matching(field: str, patterns: tuple[str, ...], names: list[str]) -> list[str]:
    """The names that any of the patterns matches."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"{field}: must match a module, got {pattern!r}; names look like "
                f"{', '.join(names[:4]) or '(none)'}, and * stands for any part"
            )
    return [name for name in names if any(fnmatch.fnmatchcase(name, each) for each in patterns)]


def tiled_mlp(pattern: Patterns, shards: int, *, dim: int = 1) -> TiledMLP:
    """Computes token-wise modules (an MLP) tile by tile along the tokens, forward and
    backward (`fzero.tiled`).

    Args:
        pattern: names of modules whose forward takes the tokens' tensor first, with `*`
            for any part. In stage 3 each must lie in one unit.
        shards: the number of tiles; must divide the number of tokens.
        dim: the dimension of the tokens.

    Raises:
        ValueError: from the step: no module has such a name, one has several units, or
            mixes tokens.
    """
    check_divides("tiled_mlp", 0, shards, "tokens")
    return TiledMLP(patterns_of("tiled_mlp", pattern), shards, dim)
