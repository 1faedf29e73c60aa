"""Random layer-token dropping (Yao et al. 2022, arXiv:2211.11586): in training, chosen
layers see a random choice of the tokens.

1. `RandomLTD` says which layers, how many tokens after n updates, and which arguments
   have a sequence dimension. `wrap` notes it in a model, whose modules and parameters
   stay as they are; a step then replaces the forwards of the layers while it runs.
2. A layer gets r of the S positions of each sample, in their order; its outputs are
   written back, and the other positions keep their inputs. With r ≥ S, and in
   evaluation, it runs as it is.
3. Which positions is a function of (seed, n, layer, place of the sample in the batch of
   all ranks), and of nothing else: the same in a layer that runs again in the backward,
   in all stages and runners, and for another number of ranks.

Shape letters: B samples, S positions, r kept positions, D features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fzero.data.keys import key_of, mixed
from fzero.data.schedules import Root

__all__ = ["Draw", "RandomLTD", "TokenDropping", "dropping_of", "kept_tokens"]

Number = int | Tensor


def kept_tokens(key: Number, samples_B: Tensor, *, num: int, of: int) -> Tensor:
    """The kept positions of each sample (B, num), int64, ascending; without repetition,
    and each choice equally likely.

    Args:
        key: 32 random bits (`fzero.data.keys.key_of`).
        samples_B: the places of the samples, int64.
        num: positions to keep, of `of`.

    >>> kept_tokens(7, torch.tensor([0, 1]), num=3, of=6).tolist()
    [[2, 3, 4], [1, 2, 4]]
    """
    places_S = mixed(torch.arange(of, device=samples_B.device))
    scores_BS = mixed(mixed(mixed(samples_B) ^ key)[:, None] ^ places_S)
    return scores_BS.argsort(1)[:, :num].sort(1).values


class Draw(NamedTuple):
    """The inputs of the random choices of one forward.

    Attributes:
        length: r.
        n: the number of updates so far.
        micro: the number of the forward since the last update.
        rank: the rank of this process.
        num_micro: micro-batches of an update.
    """

    length: int
    n: Number
    micro: Number
    rank: Number
    num_micro: int

    def kept(self, seed: int, layer: int, *, batch: int, of: int, device: torch.device) -> Tensor:
        """The kept positions of a layer's samples (B, r)."""
        first = (self.rank * self.num_micro + self.micro % self.num_micro) * batch
        samples_B = torch.arange(batch, device=device) + first
        return kept_tokens(
            key_of(seed, self.n, layer, self.micro // self.num_micro),
            samples_B,
            num=self.length,
            of=of,
        )


@dataclass(frozen=True)
class RandomLTD:
    """Which layers drop tokens, and how.

        ltd = fzero.data.RandomLTD(layers=range(1, 11), schedule=fixed_linear(128, 1024, steps=400, multiple=8))
        model = ltd.wrap(model, GPT2Block)
        step = fzero.make_train_step(model, cfg)

    Args:
        layers: positions among the modules of the layers' class, from 0 (DeepSpeed's
            `random_ltd_layer_id`).
        schedule: r(n), the number of kept positions after n updates.
        mask: the argument of a layer that is the attention mask, (B or 1, heads or 1, S
            or 1, S), (B, S, S), (S, S) or (B, S): its rows and columns of kept
            positions are taken. None if there is none.
        gathers: arguments with the sequence dimension of hidden states: tensors, or
            tuples of them.
        keeps: arguments that happen to have a dimension of S, and stay as they are.
        order: the first two dimensions of the hidden states, which are a layer's first
            argument.
        seed: the seed of the choices.
    """

    layers: Sequence[int]
    schedule: Root
    mask: str | None = None
    gathers: tuple[str, ...] = ("position_ids", "position_embeddings")
    keeps: tuple[str, ...] = ()
    order: Literal["batch_seq", "seq_batch"] = "batch_seq"
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.order not in ("batch_seq", "seq_batch"):
            raise ValueError(
                f"random_ltd: order must be 'batch_seq' or 'seq_batch', got {self.order!r}; pass "
                f"one of these"
            )
        if len({*self.layers}) != len(self.layers):
            raise ValueError(
                f"random_ltd: layers must name each layer once, got {list(self.layers)}; remove one"
            )

    def wrap(self, model: nn.Module, kind: type[nn.Module]) -> nn.Module:
        """Notes in a model that its layers of a class drop tokens in steps that are
        made from here on; returns the model.

        Raises:
            ValueError: a number of a layer is out of range, or the layer has no
                argument of the mask's name.
        """
        model.__dict__["token_dropping"] = self.plan(model, kind)
        return model

    def plan(self, model: nn.Module, kind: type[nn.Module]) -> TokenDropping:
        """The names of the layers in a model. A module with two names counts once."""
        found = [
            (name, module) for name, module in model.named_modules() if isinstance(module, kind)
        ]
        for layer in self.layers:
            if not 0 <= layer < len(found):
                raise ValueError(
                    f"random_ltd_layer_id: must be of 0 … {len(found) - 1}, the positions among "
                    f"the {len(found)} modules of {kind.__name__}, got {layer}; leave it out, or "
                    f"give the class of the layers"
                )
        if self.mask is not None:
            for layer in self.layers:
                names = _arguments_of(found[layer][1])
                if self.mask not in names and not any(name.startswith("**") for name in names):
                    raise ValueError(
                        f"model_mask_name: must be an argument of {kind.__name__}.forward "
                        f"({', '.join(names)}), got {self.mask!r}; name the mask, or leave it out"
                    )
        return TokenDropping(tuple((layer, found[layer][0]) for layer in sorted(self.layers)), self)


@dataclass(frozen=True)
class TokenDropping:
    """The layers of one model that drop tokens, as (number, name)."""

    layers: tuple[tuple[int, str], ...]
    how: RandomLTD

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.layers)

    def length(self, n: int) -> int:
        """r(n)."""
        return self.how.schedule(n)

    @property
    def lengths(self) -> list[int]:
        """All values of r."""
        return self.how.schedule.values(0)

    def forward_of(
        self, name: str, module: nn.Module, draw: Callable[[], Draw]
    ) -> Callable[..., Any]:
        """A layer's forward with kept tokens.

        Args:
            draw: called in each forward in training mode.
        """
        forward, how, names = module.forward, self.how, _arguments_of(module)
        layer = next(layer for layer, own in self.layers if own == name)

        @wraps(forward)
        def dropped(*args: Any, **kwargs: Any) -> Any:
            if not module.training:
                return forward(*args, **kwargs)
            hidden: Any = args[0] if args else kwargs.get(names[0])
            batch, of = _batch_and_positions(hidden, how.order, name)
            now = draw()
            if now.length >= of:
                return forward(*args, **kwargs)
            kept = _Kept(
                now.kept(how.seed, layer, batch=batch, of=of, device=hidden.device), of, how.order
            )
            given = [
                *zip([*names, *(f"number {i}" for i in range(len(args)))], args),
                *kwargs.items(),
            ]
            parts = [
                kept.of(x) if x is hidden else kept.argument(own, x, how, name) for own, x in given
            ]
            named = dict(zip(kwargs, parts[len(args) :], strict=True))
            return kept.written_back(hidden, forward(*parts[: len(args)], **named), name)

        return dropped


def dropping_of(model: nn.Module) -> TokenDropping | None:
    """What `RandomLTD.wrap` has noted in a model."""
    return model.__dict__.get("token_dropping")


def _arguments_of(module: nn.Module) -> list[str]:
    """The names of the arguments of a module's forward."""
    _, *given = inspect.signature(type(module).forward).parameters.values()
    # with the stars of `*args` and `**kwargs`
    return [str(x).partition(":")[0].partition("=")[0] for x in given]


def _batch_and_positions(hidden: Any, order: str, name: str) -> tuple[int, int]:
    if not isinstance(hidden, Tensor) or hidden.dim() < 2:
        given = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise ValueError(
            f"random_ltd: the first argument of layer {name!r} must be its hidden states (batch, "
            f"sequence, …), got {given}; give the class of the layers"
        )
    first, second = hidden.shape[:2]
    return (first, second) if order == "batch_seq" else (second, first)


class _Kept(NamedTuple):
    """The kept positions of one call of a layer (B, r), of `num` positions."""

    places_Br: Tensor
    num: int
    order: str

    def _index(self, like: Tensor) -> tuple[int, Tensor]:
        """The sequence dimension, and the index of `gather` and `scatter`."""
        places = self.places_Br if self.order == "batch_seq" else self.places_Br.t()
        index = places.reshape(*places.shape, *(1 for _ in like.shape[2:])).expand(
            *places.shape, *like.shape[2:]
        )
        return (1, index) if self.order == "batch_seq" else (0, index)

    def of(self, x: Tensor) -> Tensor:
        """The kept positions of hidden states."""
        dim, index = self._index(x)
        return x.gather(dim, index)

    def written_back(self, hidden: Tensor, outputs: Any, name: str) -> Any:
        """The hidden states with a layer's outputs at the kept positions, in the place
        of the first output.
        """
        if isinstance(outputs, tuple | list):
            return type(outputs)((self.written_back(hidden, outputs[0], name), *outputs[1:]))
        dim, index = self._index(hidden)
        if not isinstance(outputs, Tensor) or outputs.shape != index.shape:
            given = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ValueError(
                f"random_ltd: layer {name!r} must return hidden states of the shape "
                f"{tuple(index.shape)} that it is given, alone or as the first of a tuple, got "
                f"{given}; leave its number out"
            )
        return hidden.scatter(dim, index, outputs.to(hidden.dtype))

    def argument(self, own: str, value: Any, how: RandomLTD, layer: str) -> Any:
        """An argument for the kept positions."""
        if own == how.mask:
            return value if value is None else self._mask(value, layer)
        if own in how.gathers:
            return optree.tree_map(
                lambda x: self._positions(x, own, layer), value, none_is_leaf=True
            )
        first = next(_with_dimension(value, self.num), None)
        if first is not None and own not in how.keeps:
            raise ValueError(
                f"random_ltd: argument {own!r} of layer {layer!r} has shape {tuple(first.shape)} "
                f"with the sequence length {self.num}, and is not named; name it in gathers= where "
                f"it has a position for each token, as the mask (model_mask_name), or in keeps= "
                f"where it stays as it is"
            )
        return value

    def _positions(self, x: Any, own: str, layer: str) -> Any:
        """A tensor (B or 1, S, …), or (S, B or 1, …), at the kept positions."""
        if not isinstance(x, Tensor):
            return x
        batch, of = (
            (x.shape[:2] if self.order == "batch_seq" else x.shape[1::-1])
            if x.dim() >= 2
            else (0, 0)
        )
        if of != self.num or batch not in (1, len(self.places_Br)):
            raise ValueError(
                f"random_ltd: argument {own!r} of layer {layer!r} must have the batch (or 1) and "
                f"the sequence length {self.num} as its first dimensions, got {tuple(x.shape)}; "
                f"leave it out of gathers="
            )
        _, index = self._index(x)
        shape = index.shape[:2] + x.shape[2:]
        full = (
            (len(self.places_Br), self.num)
            if self.order == "batch_seq"
            else (self.num, len(self.places_Br))
        )
        return x.expand(*full, *x.shape[2:]).gather(
            1 if self.order == "batch_seq" else 0, index.expand(shape)
        )

    def _mask(self, mask: Tensor, layer: str) -> Tensor:
        """Rows and columns of the kept positions."""
        batch, of = len(self.places_Br), self.num
        if mask.dim() == 2 and mask.shape == (batch, of) and batch != of:
            return mask.gather(1, self.places_Br)
        if mask.dim() == 2 and mask.shape == (of, of) and batch != of:
            mask = mask[None, None]
        if (
            mask.dim() not in (3, 4)
            or mask.shape[-1] != of
            or mask.shape[-2] not in (1, of)
            or mask.shape[0] not in (1, batch)
        ):
            raise ValueError(
                f"random_ltd: the mask of layer {layer!r} must have the shape (batch or 1, heads "
                f"or 1, {of} or 1, {of}), (batch, {of}, {of}), ({of}, {of}) or (batch, {of}), and "
                f"for a batch of {of} three or four dimensions, got {tuple(mask.shape)}; name "
                f"another mask, or give it more dimensions"
            )
        mask = mask.expand(batch, *mask.shape[1:])
        inner = (1,) * (mask.dim() - 2)
        if mask.shape[-2] == of:
            rows = self.places_Br.view(batch, *inner[1:], -1, 1).expand(*mask.shape[:-2], -1, of)
            mask = mask.gather(-2, rows)
        return mask.gather(-1, self.places_Br.view(batch, *inner, -1).expand(*mask.shape[:-1], -1))


def _with_dimension(value: Any, num: int) -> Iterator[Tensor]:
    """The tensors in an argument that have a dimension of `num`."""
    leaves = optree.tree_leaves(value, none_is_leaf=True)
    return (x for x in leaves if isinstance(x, Tensor) and num in x.shape)
