"""DeepSpeed's names for sequences that several ranks share, and for tiles, as clients
call them.
"""

from __future__ import annotations

from typing import Any

import divided
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from divided import Curve, check
from ranks import RankPool
from torch import Tensor, nn

import fzero.deepspeed
from fzero.config.config import ConfigError
from fzero.deepspeed.engine import sequences
from fzero.deepspeed.runtime.sequence_parallel.ulysses_sp import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
    sequence_tiled_compute,
)
from fzero.deepspeed.sequence.layer import DistributedAttention
from fzero.deepspeed.utils import groups

LENGTH = 7


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=divided.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).double()


def batch(number: int) -> dict[str, Tensor]:
    made = divided.batch(number, LENGTH)
    return {"input_ids": made["input_ids"], "labels": made["labels"]}


def expected(num_steps: int) -> Curve:
    model, losses = llama(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=divided.RATE)
    for number in range(num_steps):
        loss = model(**batch(number)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Curve(losses, {key: x.detach() for key, x in model.state_dict().items()})


def _weighted(loss: Tensor, labels: Tensor, group: Any) -> Tensor:
    """The mean over the labels of all ranks, as accelerate's and transformers' trainers
    make it.
    """
    gather = torch.distributed.nn.functional.all_gather
    losses, counts = gather(loss, group=group), gather((labels != -100).sum(), group=group)
    total = sum(x * n for x, n in zip(losses, counts, strict=True) if n > 0)
    return total / sum(counts)  # type: ignore[no-any-return]


def _trained(stage: int) -> Curve:
    model, size = llama(), 2
    rank = dist.get_rank()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=size,
        micro_batch_size=divided.SAMPLES,
        seq_length_is_variable=True,
        disable_in_eval=True,
    )
    try:
        loader = UlyssesSPDataLoaderAdapter(
            [batch(rank), batch(2 + rank)],
            sp_rank=mpu.get_sequence_parallel_rank(),
            sp_group=mpu.get_sequence_parallel_group(),
            sp_world_size=mpu.get_sequence_parallel_world_size(),
            device="cpu",
        )
        config = {
            "train_micro_batch_size_per_gpu": divided.SAMPLES,
            "train_batch_size": divided.SAMPLES,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": divided.RATE}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine, *_ = fzero.deepspeed.initialize(model=model, config=config, mpu=mpu)
        assert groups._get_sequence_parallel_world_size() == engine.sequence_parallel_size == size
        assert engine.dp_world_size == groups._get_data_parallel_world_size() == 1
        assert len(loader) == 4
        losses = []
        for part in loader:
            labels = part["shift_labels"]
            logits = engine(**part).logits
            own = model.loss_function(  # type: ignore[operator]
                logits=logits, labels=None, shift_labels=labels, vocab_size=divided.VOCABULARY
            )
            loss = _weighted(own, labels, mpu.get_sequence_parallel_group())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.eval()  # then each rank has whole sequences
        with torch.no_grad():
            whole = engine(input_ids=batch(0)["input_ids"]).logits
        assert whole.shape[1] == LENGTH
        return Curve(losses, engine.train_step.gather(engine.state))
    finally:
        UlyssesSPAttentionHF.unregister_from_transformers()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_registered_llama_trains_on_parts_as_a_plain_loop(ranks: RankPool, stage: int) -> None:
    for found in ranks(2, _trained, stage):
        check(found, expected(4))


def test_a_size_of_one_registers_nothing() -> None:
    how: dict[str, Any] = {"core_attn_implementation": "sdpa", "micro_batch_size": 1}
    assert (
        UlyssesSPAttentionHF.register_with_transformers("any", sequence_parallel_size=1, **how)
        is None
    )
    assert groups._get_sequence_parallel_group() is None
    with pytest.raises(ConfigError, match="must be 'sdpa'"):
        UlyssesSPAttentionHF.register_with_transformers(
            llama(), "flash_attention_2", sequence_parallel_size=2, micro_batch_size=1
        )
    with pytest.raises(ConfigError, match="must divide the 4 heads"):
        UlyssesSPAttentionHF.register_with_transformers(llama(), sequence_parallel_size=3, **how)


def _attended(batch_dim_idx: int) -> Tensor:
    sequences.divide(2)
    try:
        torch.manual_seed(0)
        whole = torch.randn(3, 2, 8, 4, 5, dtype=torch.float64)  # (B, L, H, D)
        own = whole.chunk(2, 2)[dist.get_rank()]
        query, key, value = own if batch_dim_idx == 0 else own.transpose(1, 2)

        def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            dims = (1, 2) if batch_dim_idx == 0 else (0, 2)
            if batch_dim_idx == 0:
                q, k, v = (x.transpose(*dims) for x in (q, k, v))
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)

        attention = DistributedAttention(local, groups._get_sequence_parallel_group(), 2, 1)  # type: ignore[arg-type]
        out = attention(query, key, value, batch_dim_idx)
        return out if batch_dim_idx == 0 else out.transpose(0, 1)
    finally:
        sequences.end()


@pytest.mark.parametrize("batch_dim_idx", [0, 1])
def test_distributed_attention_is_attention_over_the_whole(
    ranks: RankPool, batch_dim_idx: int
) -> None:
    torch.manual_seed(0)
    heads = torch.randn(3, 2, 8, 4, 5, dtype=torch.float64).transpose(2, 3)
    whole = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    found = torch.cat(ranks(2, _attended, batch_dim_idx), 1)
    torch.testing.assert_close(found, whole, atol=1e-14, rtol=1e-12)


# --- tiles ----------------------------------------------------------------------------------------


def _with_grads(loss_of: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    layer = nn.Linear(6, 6).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 6, (2, 9))
    loss = loss_of(layer, x, y)
    return loss, *torch.autograd.grad(loss, [x, *layer.parameters()])


def test_tiles_have_the_values_and_gradients_of_the_whole() -> None:
    def mlp(layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(layer(x))

    def sums(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(layer(x), y, reduction="sum")

    def of_tile(*, x: Tensor, layer: nn.Module) -> Tensor:
        return mlp(layer, x)

    def tiled(layer: nn.Module, x: Tensor) -> Tensor:
        return sequence_tiled_compute(
            of_tile, 9, 4, {"x": x}, {"layer": layer}, "x", output_reduction=None
        )

    def by_class(layer: nn.Module, x: Tensor) -> Tensor:
        return SequenceTiledCompute.apply(
            of_tile, 9, 4, ["x"], ["layer"], "x", None, 1, None, x, layer
        )

    whole = _with_grads(lambda layer, x, y: mlp(layer, x).square().sum())
    for apply in (lambda layer, x: TiledMLP.apply(mlp, layer, x, 4, None), tiled, by_class):
        found = _with_grads(lambda layer, x, y, apply=apply: apply(layer, x).square().sum())
        torch.testing.assert_close(found, whole)
    loss = _with_grads(lambda layer, x, y: sums(layer, x.flatten(0, 1), y.flatten()))
    found = _with_grads(
        lambda layer, x, y: TiledFusedLogitsLoss.apply(sums, layer, x, y, None, 4, None, "sum")
    )
    torch.testing.assert_close(found, loss)
