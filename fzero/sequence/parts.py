"""`Division`: cuts a micro-batch into the parts of the ranks that share its tokens.

Every rank of the axis has the same samples. Labels are shifted before the cut, because a
part's last token is followed by the first one of the next part. Sequences whose length
the ranks do not divide are padded at the end; padding has no label and no influence.

Shape letters: S ranks along the axis, B samples, L tokens of a sequence, T = ⌈L / S⌉
tokens of a rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.comms import collectives
from fzero.comms.axes import ProcessAxis
from fzero.comms.primitives import all_gather
from fzero.comms.records import Label

IGNORED = -100
PADDING: Mapping[str, float] = {
    "input_ids": 0,
    "inputs_embeds": 0,
    "token_type_ids": 0,
    "attention_mask": 0,
    "labels": IGNORED,
    "shift_labels": IGNORED,
}
"""The values with which tensors are padded, by their names in transformers."""
LABELS, SHIFTED, POSITIONS, KEPT = "labels", "shift_labels", "position_ids", "attention_mask"


class Part(NamedTuple):
    """A rank's part of a micro-batch.

    Attributes:
        batch: the arguments of the model, or of the loss function.
        length: the number L of tokens of the whole sequence, without padding.
        positions: (B, T), the positions of this rank's tokens; None where the model
            does not ask for them by name.
        packed: (B, S·T), the positions of all tokens, where several sequences stand in
            a row; else None.
        kept: (B, S·T), the attention mask of all tokens, where some are masked; else
            None.
    """

    batch: Any
    length: int
    positions: Tensor | None = None
    packed: Tensor | None = None
    kept: Tensor | None = None


@dataclass(frozen=True)
class Division:
    """How batches are cut.

    Args:
        dim: the dimension of tokens.
        pad: further values for padding, by key of a mapping or place in a tuple.
        whole: the keys or places of tensors that every rank gets whole.
        takes_positions: whether the model is of transformers: it gets position ids,
            shifted labels, and the number of labels.
        is_mean: whether gradients are averaged over ranks, not summed.
        has_loss_fn: whether the loss is that of a function, not the model's own.
    """

    dim: int
    pad: Mapping[Any, float]
    whole: frozenset[Any]
    takes_positions: bool
    is_mean: bool
    has_loss_fn: bool
    _seen: list[None] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, batch: Any, axis: Any) -> Part:
        """This rank's part. *Collective* for the first two micro-batches, on processes:
        every rank of the axis; compares their batches.

        Raises:
            ValueError: the batch differs within the axis, is not a tensor, tuple, list
                or mapping, has no tokens, or needs padding of unknown value.
        """
        if len(self._seen) < 2 and isinstance(axis, ProcessAxis):
            self._seen.append(None)
            _check_same(batch, axis)
        if isinstance(batch, Mapping):
            return self.of_mapping(dict(batch), axis)
        if not isinstance(batch, Tensor | tuple | list):
            raise ValueError(
                f"ulysses: a batch must be a tensor, a tuple, a list or a mapping of tensors, got "
                f"{type(batch).__name__}; divide it yourself, and pass splits=False"
            )
        leaves = [batch] if isinstance(batch, Tensor) else list(batch)
        length = self._length(dict(enumerate(leaves)))
        cut = [self._cut(place, x, length, axis) for place, x in enumerate(leaves)]
        return Part(cut[0] if isinstance(batch, Tensor) else type(batch)(cut), length)

    def of_mapping(self, batch: dict[str, Any], axis: Any) -> Part:
        length = self._length(batch)
        if isinstance(labels := batch.pop(LABELS, None), Tensor) and SHIFTED not in batch:
            self._check_not_shifted(labels, batch.get("input_ids"))
            batch[SHIFTED] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        positions, packed, kept = batch.get(POSITIONS), None, batch.get(KEPT)
        if self.takes_positions:
            first = next(x for x in batch.values() if self._has_tokens(x, length))
            if isinstance(positions, Tensor):
                # transformers, too, looks for several sequences only without a mask
                packed = positions if kept is None and _is_packed(positions) else None
            else:
                positions = torch.arange(length, device=first.device).expand(first.shape[0], -1)
            batch[POSITIONS] = positions
        cut = {key: self._cut(key, x, length, axis) for key, x in batch.items()}
        if not self.has_loss_fn and isinstance(shifted := batch.get(SHIFTED), Tensor):
            given = batch.get("num_items_in_batch")
            count = (shifted != IGNORED).sum() if given is None else torch.as_tensor(given)
            # of a mean over ranks each of the S ranks adds a part
            cut["num_items_in_batch"] = count / axis.size if self.is_mean else count
            cut[LABELS] = cut[SHIFTED]
        if not isinstance(kept, Tensor) or kept.ndim != 2 or _is_all(kept):
            kept = None
        return Part(
            cut,
            length,
            cut[POSITIONS] if self.takes_positions else None,
            None if packed is None else self._padded(POSITIONS, packed, axis),
            None if kept is None else self._padded(KEPT, kept, axis).bool(),
        )

    def _length(self, batch: Mapping[Any, Any]) -> int:
        named = (batch[key] for key in ("input_ids", "inputs_embeds") if key in batch)
        others = (x for key, x in batch.items() if key not in self.whole)
        found = [x for x in (*named, *others) if isinstance(x, Tensor) and x.ndim > self.dim]
        if not found:
            raise ValueError(
                f"ulysses: a batch must have a tensor with tokens along dimension {self.dim}, got "
                f"{_shapes(batch)}; pass dim=, or splits=False where it is divided already"
            )
        return found[0].shape[self.dim]

    def _has_tokens(self, x: Any, length: int) -> bool:
        return isinstance(x, Tensor) and x.ndim > self.dim and x.shape[self.dim] == length

    def _cut(self, key: Any, x: Any, length: int, axis: Any) -> Any:
        """The part of this rank of a tensor with tokens; any other is left as it is."""
        if key in self.whole or not self._has_tokens(x, length):
            return x
        x = self._padded(key, x, axis)
        size = x.shape[self.dim] // axis.size
        return x.narrow(self.dim, axis.rank * size, size).contiguous()

    def _padded(self, key: Any, x: Tensor, axis: Any) -> Tensor:
        missing = -x.shape[self.dim] % axis.size
        if not missing:
            return x
        if key == POSITIONS:  # goes on counting
            more = torch.arange(1, 1 + missing, device=x.device)
            return torch.cat([x, x[..., -1:] + more], -1)
        values = {**PADDING, **self.pad}
        if key not in values:
            raise ValueError(
                f"ulysses: {axis.size} ranks must divide the {x.shape[self.dim]} tokens of a "
                f"sequence, or the value of padding be known, got none for {key!r} of shape "
                f"{tuple(x.shape)}; pass pad={{{key!r}: …}} ({IGNORED} for labels), or pad it"
            )
        shape = [*x.shape]
        shape[self.dim] = missing
        return torch.cat([x, x.new_full(shape, values[key])], self.dim)

    def _check_not_shifted(self, labels: Tensor, inputs: Any) -> None:
        """Raises ValueError where labels are those of the next tokens already."""
        if (
            not isinstance(inputs, Tensor)
            or inputs.shape != labels.shape
            or not _has_values(labels)
        ):
            return
        counted = labels != IGNORED
        is_next = (labels[:, :-1] == inputs[:, 1:]) | ~counted[:, :-1]
        is_own = (labels == inputs) | ~counted
        if bool(counted[:, :-1].any()) and bool(is_next.all()) and not bool(is_own.all()):
            raise ValueError(
                f"ulysses: {LABELS!r} must be the tokens themselves, which are shifted here, got "
                f"labels that are the next tokens already; pass them as {SHIFTED!r}"
            )


@dataclass(frozen=True)
class _Place:
    rank: int
    size: int


def cut_sequences(
    batch: Mapping[str, Any], rank: int, size: int, *, pad: Mapping[Any, float] | None = None
) -> dict[str, Any]:
    """A rank's part of a batch of transformers: `labels` become `shift_labels`, and
    positions stand beside them. Sends nothing.

    Args:
        batch: tensors (B, L, …) are cut; others are whole.
        pad: further values for padding.
    """
    division = Division(1, {**(pad or {})}, frozenset(), True, True, True)
    return division.of_mapping(dict(batch), _Place(rank, size)).batch  # type: ignore[no-any-return]


def joined(given: Mapping[str, Any], tokens: Tensor, axis: Any) -> Part:
    """The part of a batch that its caller has divided, from the arguments of a model of
    transformers. *Collective:* every rank of the axis; gathers positions and masks.

    Args:
        given: its keyword arguments.
        tokens: (B, T) or (B, T, D).
    """
    num_own = tokens.shape[1]
    positions, mask, packed, kept = given.get(POSITIONS), given.get(KEPT), None, None
    if isinstance(mask, Tensor) and mask.ndim == 2:
        kept = all_gather(mask.to(torch.uint8), axis).bool()
        kept = None if _is_all(kept) else kept
    if positions is None:
        positions = torch.arange(num_own, device=tokens.device) + axis.rank * num_own
        positions = positions.expand(tokens.shape[0], -1)
    else:
        positions = positions.expand(tokens.shape[0], -1).contiguous()
        whole = all_gather(positions, axis)
        packed = whole if kept is None and _is_packed(whole) else None
    return Part(None, num_own * axis.size, positions, packed, kept)


class HasPlan(Protocol):
    """A train step."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def plan(self) -> Any: ...


def batch_of(step: HasPlan) -> tuple[int, int]:
    """The index of this rank's batch, and the number of different batches of a step: the
    ranks of one group of "seq" get the same.

        rank, size = fzero.sequence.batch_of(step)
        loader = DataLoader(data, sampler=DistributedSampler(data, size, rank))
    """
    size = step.plan.seq_size
    return step.rank // size, step.world_size // size


def check_counted(weight: Any, batch: Any) -> None:
    """Raises ValueError where a loss function has shifted labels that were shifted before
    the batch was divided: it has not counted the first label of each part.
    """
    shifted = batch.get(SHIFTED) if isinstance(batch, Mapping) else None
    if not isinstance(shifted, Tensor) or not isinstance(weight, Tensor | int | float):
        return
    if not _has_values(shifted) or (isinstance(weight, Tensor) and not _has_values(weight)):
        return
    counted = shifted != IGNORED
    most, fewer, given = int(counted.sum()), int(counted[:, 1:].sum()), float(weight)
    if given == fewer < most:
        raise ValueError(
            f"ulysses: a loss function must not shift {SHIFTED!r}, which are shifted before the "
            f"sequence is divided, got a weight of {given:g} where the part has {most} labels; "
            f"compare logits and labels of the same place"
        )


def _is_packed(positions: Tensor) -> bool:
    """Whether positions begin anew within a row; also where they have no values yet."""
    return not _has_values(positions) or bool((positions.diff(dim=-1) != 1).any())


def _is_all(mask: Tensor) -> bool:
    return _has_values(mask) and bool(mask.bool().all())


def _has_values(x: Tensor) -> bool:
    """Whether the values of a tensor can be read: not those of a fake or traced one."""
    is_traced = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    return not (x.is_meta or type(x) is not Tensor or is_traced)


def _check_same(batch: Any, axis: ProcessAxis) -> None:
    leaves = [x for x in optree.tree_leaves(batch) if isinstance(x, Tensor)]  # type: ignore[arg-type]
    if not all(map(_has_values, leaves)):
        return
    digest = 0
    for x in leaves:
        rows = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest = zlib.crc32(rows.tobytes(), zlib.crc32(repr(tuple(x.shape)).encode(), digest))
    device = leaves[0].device if leaves else torch.device("cpu")
    own = torch.tensor([digest], dtype=torch.int64, device=device)
    digests = collectives.start_stack(own, axis, label=Label("compare")).wait().view(-1).tolist()
    if other := next((rank for rank, one in enumerate(digests) if one != digests[0]), None):
        raise ValueError(
            f"ulysses: the {axis.size} ranks of the axis {axis.name!r} must have the same batch, "
            f"whose tokens they share, got others on its rank {other} than on its rank 0; load "
            f"batches by fzero.sequence.batch_of(step)"
        )


def _shapes(batch: Mapping[Any, Any]) -> str:
    shapes = [f"{key}: {tuple(x.shape)}" for key, x in batch.items() if isinstance(x, Tensor)]
    return ", ".join(shapes) or "no tensors"


def check_keys(given: Sequence[Any], field: str) -> None:
    if not all(isinstance(key, str | int) for key in given):
        raise ValueError(
            f"ulysses: {field} must name keys of a mapping or places in a tuple, got {given!r}; "
            f"pass {field} of 'attn_mask' or 1, say"
        )
