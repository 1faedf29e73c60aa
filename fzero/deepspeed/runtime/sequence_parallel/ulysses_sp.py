"""`deepspeed.runtime.sequence_parallel.ulysses_sp`: the names that clients call, on
`fzero.sequence` and `fzero.tiling`.

Shape letters: S ranks that share a sequence, B samples, L tokens.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fzero.comms import collectives
from fzero.comms.axes import ProcessAxis
from fzero.comms.mesh import SEQ
from fzero.comms.records import Label
from fzero.config.config import ConfigError
from fzero.deepspeed.engine import sequences
from fzero.sequence.parts import cut_sequences
from fzero.sequence.transforms import Ulysses
from fzero.tiling.tiles import tiled

Reduction = Literal["mean", "sum"]


class UlyssesSPAttentionHF:
    """Attention of transformers over sequences that several ranks share; see
    `register_with_transformers`.
    """

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Divides sequences among ranks in engines that `initialize` makes with the
        result as `mpu`. *Collective:* every rank.

        Lengths may vary always; `micro_batch_size` and the lengths are checked by
        nobody, because nothing depends on them.

        Args:
            model_name_or_path: a model of transformers, or its name.
            core_attn_implementation: must be "sdpa".
            disable_in_eval: whether a model in evaluation mode gets whole sequences.

        Returns:
            The module `parallel_state_sp`; None for a size of 1.

        Raises:
            ConfigError: other attention, or the size does not divide ranks or heads.
        """
        if sequence_parallel_size == 1:
            return None
        config = getattr(model_name_or_path, "config", None)
        if config is None:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(model_name_or_path)
        own = getattr(config, "_attn_implementation", None)
        if core_attn_implementation != "sdpa" or own not in (None, "sdpa"):
            raise ConfigError(
                f"core_attn_implementation: must be 'sdpa', which the model must have, too, got "
                f"{core_attn_implementation!r} and {own!r}; load it with attn_implementation='sdpa'"
            )
        num_heads = config.get_text_config().num_attention_heads
        if num_heads % sequence_parallel_size:
            raise ConfigError(
                f"sequence_parallel_size: must divide the {num_heads} heads of attention, got "
                f"{sequence_parallel_size}; take a size that does"
            )
        transform = Ulysses(splits=False, may_count=True, in_eval=not disable_in_eval)
        sequences.divide(sequence_parallel_size, transform)
        from fzero.deepspeed.runtime.sequence_parallel import parallel_state_sp

        return parallel_state_sp

    @classmethod
    def unregister_from_transformers(cls, core_attn_implementation: str | None = None) -> None:
        """Gives each rank sequences of its own in engines that are made from here on."""
        sequences.end()


class UlyssesSPDataLoaderAdapter:
    """Batches of a loader, each divided among the ranks that share sequences.

    Each rank loads batches of its own. `S` batches are gathered at a time, and each is
    one item on every rank: its part of the tokens, with `shift_labels` for `labels`.

    Args:
        dl: yields mappings with `input_ids` and `labels`, (B, L); on all ranks equally
            many.
        sp_rank, sp_group, sp_world_size: as of `parallel_state_sp`.
        device: on which tensors are gathered.
        pad_to_sp_multiple: whether lengths that S does not divide are padded.
        pad_token_id: pads `input_ids`.
    """

    def __init__(
        self,
        dl: Iterable[Any],
        sp_rank: int,
        sp_group: Any,
        sp_world_size: int,
        device: Any,
        pad_to_sp_multiple: bool = True,
        pad_token_id: int = 0,
    ) -> None:
        self.dl, self.sp_rank, self.sp_group = dl, sp_rank, sp_group
        self.sp_world_size, self.device = sp_world_size, device
        self.pad_to_sp_multiple, self.pad_token_id = pad_to_sp_multiple, pad_token_id
        self.iter: Iterator[Any] = iter(dl)
        self.micro_batches: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size  # type: ignore[arg-type]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # while it is copied
            raise AttributeError(name)
        return getattr(self.dl, name)

    def refill(self) -> None:
        """Loads a batch on each rank, and divides all. *Collective:* every rank of the
        group.
        """
        try:
            batch = next(self.iter)
        except StopIteration:
            self.iter = iter(self.dl)
            raise
        if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= batch.keys():
            raise ValueError(
                f"UlyssesSPDataLoaderAdapter: batches must be mappings with input_ids and labels, "
                f"got {sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__}; "
                f"add them in the collator"
            )
        own = {key: x.cpu() if isinstance(x, Tensor) else x for key, x in batch.items()}
        axis = ProcessAxis(SEQ, self.sp_world_size, self.sp_rank, self.sp_group)
        for each in _of_all_ranks(own, axis, self.device):
            length = each["input_ids"].shape[1]
            if length % self.sp_world_size and not self.pad_to_sp_multiple:
                raise ValueError(
                    f"UlyssesSPDataLoaderAdapter: {self.sp_world_size} ranks must divide the "
                    f"tokens of a sequence, got {length}; pass pad_to_sp_multiple=True"
                )
            how = {"pad": {"input_ids": self.pad_token_id}}
            part = cut_sequences(each, self.sp_rank, self.sp_world_size, **how)
            self.micro_batches.append(part)


def _of_all_ranks(own: dict[str, Any], axis: ProcessAxis, device: Any) -> list[dict[str, Any]]:
    """The batches of all ranks, whose shapes may differ. *Collective:* every rank."""
    file = io.BytesIO()
    torch.save(own, file)
    mine = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(device)
    label = Label("other", "batches")
    sizes = collectives.stack(torch.tensor(mine.numel(), device=device), axis, label=label).tolist()
    padded = torch.nn.functional.pad(mine, (0, max(sizes) - mine.numel()))
    rows = collectives.stack(padded, axis, label=label).cpu()
    return [
        torch.load(io.BytesIO(row[:size].numpy().tobytes()), weights_only=True)
        for row, size in zip(rows, sizes, strict=True)
    ]


# --- tiles ----------------------------------------------------------------------------------------


class TiledMLP:
    """A token-wise function tile by tile, forward and backward (`fzero.tiled`)."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """`fn(self, x)` in tiles of tokens.

        Args:
            x: (…, L, D).
            shards: the number of tiles; fewer where it does not divide L.
            compute_params: has no effect: a step collects each gradient once.
        """
        num = next(n for n in range(min(shards, x.shape[-2]), 0, -1) if x.shape[-2] % n == 0)
        out: Tensor = tiled(lambda tile: fn(self, tile), num, dim=x.dim() - 2)(x)
        return out


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: Reduction | None = "mean",
) -> Tensor:
    """`fn(**kwargs)` in tiles along dimension 1 of some arguments; each tile runs again
    in the backward.

    All tensors that require gradients get them, also those besides
    `grad_requiring_tensor_key`.

    Args:
        output_unshard_dimension: 0 stacks scalars, 1 joins results along the tokens.
        output_reduction: of the joined result; None returns it whole.
    """
    if output_reduction not in (None, "mean", "sum"):
        raise ValueError(
            f"output_reduction: must be 'mean', 'sum' or None, got {output_reduction!r}; pass one"
        )
    size = -(-seqlen // shards)
    keys = list(kwargs_to_shard)

    def run(*tile: Tensor) -> Tensor:
        return fn(**dict(zip(keys, tile, strict=True)), **kwargs_to_pass)

    tiles = zip(*(torch.split(x, size, 1) for x in kwargs_to_shard.values()), strict=True)
    outs = [checkpoint(run, *tile, use_reentrant=False) for tile in tiles]
    joined = torch.stack(outs) if output_unshard_dimension == 0 else torch.cat(outs, 1)
    if output_reduction is None:
        return joined
    return joined.mean() if output_reduction == "mean" else joined.sum()


class SequenceTiledCompute:
    """See `sequence_tiled_compute`, whose mappings are lists of keys and values here."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: Reduction | None,
        *args: Any,
    ) -> Tensor:
        num = len(keys_to_shard)
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, args[:num], strict=True)),
            dict(zip(keys_to_pass, args[num:], strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledFusedLogitsLoss:
    """A loss of hidden states tile by tile, so that logits never exist whole; each tile
    runs again in the backward. (`fzero.linear_cross_entropy` needs no second run.)
    """

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
        output_reduction: Reduction = "mean",
    ) -> Tensor:
        """The mean or sum over tiles of `fn(self, x, y)`, or `fn(self, x, y, mask)`.

        Args:
            x: (B, L, D); tiles are of (B·L, D).
            y, mask: (B, L, …).
        """
        given = {"x": x, "y": y} if mask is None else {"x": x, "y": y, "mask": mask}
        flat = {key: tensor.flatten(0, 1)[None] for key, tensor in given.items()}
        tokens = x.shape[0] * x.shape[1]

        def of_tile(**tile: Tensor) -> Tensor:
            return fn(self, *(tensor[0] for tensor in tile.values()))

        how: dict[str, Any] = {"output_unshard_dimension": 0, "output_reduction": output_reduction}
        return sequence_tiled_compute(of_tile, tokens, shards, flat, {}, "x", **how)
