"""The planner counts operations, bytes and memory of attention by the density of its
layout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fzero.attention import BigBird, BSLongformer, Fixed, Layout, Local, sparse_attention
from fzero.deepspeed.ops.sparse_attention import BSLongformerSparsityConfig, SparseAttentionUtils
from fzero.estimation.activation_trace import ActivationTrace, trace_activations

BATCH, HEADS, LENGTH, BLOCK, WIDTH = 1, 2, 256, 8, 16


class Attends(nn.Module):
    """Attention of scaled inputs over a layout."""

    def __init__(self, layout: Layout, backend: Any = "auto") -> None:
        super().__init__()
        self.scale, self.layout, self.backend = nn.Parameter(torch.ones(())), layout, backend

    def forward(self, x: Tensor) -> Tensor:
        q = x * self.scale
        return sparse_attention(q, q, q, self.layout, block=BLOCK, backend=self.backend).mean()


def traced(layout: Layout, backend: Any = "auto") -> ActivationTrace:
    return trace_activations(
        Attends(layout, backend),
        {},
        torch.empty(BATCH, HEADS, LENGTH, WIDTH, device="meta"),
        loss_fn=call,
    )


def call(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    return loss


LAYOUTS = [
    pattern.layout(LENGTH // BLOCK, heads=HEADS) for pattern in (Local(), BSLongformer(), Fixed())
]


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS, BigBird(different_layout_per_head=True).layout(LENGTH // BLOCK, heads=HEADS)],
)
def test_operations_are_those_of_the_kept_blocks(layout: Layout) -> None:
    """Seven products for each kept block: two forward, five backward, as FlashAttention
    does.
    """
    kept = layout.lower_triangle() if layout.attention == "unidirectional" else layout
    blocks = kept.num_kept * (HEADS if layout.num_heads == 1 else 1)
    assert traced(layout).flops == 7 * 2 * BATCH * blocks * BLOCK**2 * WIDTH


def test_bytes_grow_with_the_density_and_memory_stays_below_that_of_the_mask() -> None:
    found = [traced(layout) for layout in LAYOUTS]
    moved = [sum(work.nbytes for event in one.events for work in event.work) for one in found]
    assert moved == sorted(moved) and moved[0] < moved[-1] / 2
    masked = traced(LAYOUTS[0], "sdpa")
    assert found[0].nbytes < masked.nbytes and found[0].flops < masked.flops / 5


@pytest.mark.parametrize("backend", ["blocks", "sdpa"])
def test_tensors_without_memory_have_shapes(backend: Any) -> None:
    x = torch.empty(BATCH, HEADS, LENGTH, WIDTH, device="meta", requires_grad=True)
    y = sparse_attention(x, x, x, LAYOUTS[1], block=BLOCK, backend=backend)
    y.sum().backward()
    assert y.shape == x.shape and x.grad is not None and y.is_meta


def test_a_run_counts_the_same_operations() -> None:
    model, batch = Attends(LAYOUTS[1]), torch.randn(BATCH, HEADS, LENGTH, WIDTH)
    with FlopCounterMode(display=False) as counter:
        model(batch).backward()
    assert counter.get_total_flops() == traced(LAYOUTS[1]).flops


@pytest.mark.long
def test_a_sparse_bert_of_4096_tokens_is_traced_without_its_memory() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 32,
        "max_position_embeddings": 4096,
    }
    config = transformers.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    names = ("input_ids", "labels", "attention_mask")
    batch = {name: torch.empty(1, 4096, dtype=torch.int64, device="meta") for name in names}
    found = []
    for window in (None, 3, 9):
        model = transformers.BertForMaskedLM(config)
        if window is not None:
            sparsity = BSLongformerSparsityConfig(2, 64, num_sliding_window_blocks=window)
            SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
                model, 4096, sparsity
            )
        found.append(
            trace_activations(model, {}, batch, loss_fn=lambda model, batch: model(**batch).loss)
        )
    dense, narrow, wide = found
    per_block = 7 * 2 * 2 * 64**2 * 16
    kept = [BSLongformer(num_sliding_window_blocks=window).layout(64).num_kept for window in (3, 9)]
    assert wide.flops - narrow.flops == per_block * (kept[1] - kept[0])
    assert narrow.flops < wide.flops < dense.flops and narrow.nbytes < dense.nbytes
