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
from fzero.config.config import Config, ConfigError
from fzero.deepspeed.engine import sequences
from fzero.deepspeed.engine.deepspeed_config import DeepSpeedConfig
from fzero.deepspeed.runtime.chunked_cross_entropy import (
    ChunkedCausalLMLoss,
    chunked_cross_entropy,
    install_chunked_causal_lm_loss,
)
from fzero.deepspeed.runtime.sequence_parallel.ulysses_sp import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
    sequence_tiled_compute,
)
from fzero.deepspeed.sequence.layer import DistributedAttention
from fzero.deepspeed.sequence.linear_cross_entropy import vocab_parallel_linear_cross_entropy
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


# --- losses of 0.19.8 -----------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("rows", [None, 2, 5])
def test_the_loss_of_logits_in_blocks_is_that_of_the_whole(reduction: Any, rows: Any) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 11, requires_grad=True)
    target = torch.tensor([3, -100, 0, 10, -100, 2, 2])
    whole = F.cross_entropy(logits, target, reduction=reduction)
    found = chunked_cross_entropy(logits, target, reduction=reduction, block_rows=rows)
    torch.testing.assert_close(found, whole)
    weights = torch.arange(1.0, 8.0) if reduction == "none" else torch.tensor(1.0)
    one, other = (torch.autograd.grad(x, logits, weights) for x in (found, whole))
    torch.testing.assert_close(one, other)
    half = logits.detach().bfloat16().requires_grad_()
    of_half = chunked_cross_entropy(half, target, reduction=reduction, block_rows=rows)
    assert of_half.dtype == torch.float32
    torch.testing.assert_close(of_half, F.cross_entropy(half.float(), target, reduction=reduction))
    assert chunked_cross_entropy(logits, torch.full((7,), -100)).isnan()  # as PyTorch's


def test_the_backward_of_a_loss_in_blocks_keeps_the_logits_alone() -> None:
    kept: list[int] = []
    logits = torch.randn(64, 16, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.nbytes) or x, lambda x: x
    ):
        chunked_cross_entropy(logits, torch.zeros(64, dtype=torch.int64), block_rows=8)
    # blocks and targets; one fp32 copy would be twice the logits
    assert sum(kept) <= logits.nbytes + 2 * 64 * 8


def test_a_causal_model_gets_the_loss_in_blocks_and_trains_as_before() -> None:
    model, given = llama(), batch(0)
    before = model(**given).loss
    counted = model(**given, num_items_in_batch=torch.tensor(9)).loss
    installed = install_chunked_causal_lm_loss(model, block_rows=3)
    assert isinstance(installed, ChunkedCausalLMLoss) and model.loss_function is installed
    # the loss is in fp32, as its name says, where this model is in fp64
    torch.testing.assert_close(model(**given).loss.double(), before.double(), rtol=1e-6, atol=0)
    found = model(**given, num_items_in_batch=torch.tensor(9)).loss
    torch.testing.assert_close(found.double(), counted.double(), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="must be transformers' ForCausalLMLoss"):
        install_chunked_causal_lm_loss(model)


def _head() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(2, 6, 5, requires_grad=True)
    weight, bias = torch.randn(13, 5, requires_grad=True), torch.randn(13, requires_grad=True)
    target = torch.randint(0, 13, (2, 6))
    target[0, :4] = -100
    return hidden, weight, bias, target


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_the_loss_of_a_head_without_logits_is_that_of_the_whole(reduction: Any, chunk: Any) -> None:
    hidden, weight, bias, target = _head()
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    whole = F.cross_entropy(logits, target.flatten(), reduction=reduction)
    how = {"bias": bias, "reduction": reduction, "chunk_size": chunk}
    found = vocab_parallel_linear_cross_entropy(hidden, weight, target, **how)
    assert found.shape == (target.shape if reduction == "none" else ())
    torch.testing.assert_close(found.flatten(), whole.flatten())
    pairs = zip(
        *(torch.autograd.grad(x.sum(), (hidden, weight, bias)) for x in (found, whole)), strict=True
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other)
    none = vocab_parallel_linear_cross_entropy(hidden, weight, torch.full_like(target, -100))
    assert none == 0  # as DeepSpeed's


def _summed_losses(reduction: Any) -> tuple[Tensor, Tensor]:
    sequences.divide(2)
    try:
        hidden, weight, bias, target = _head()
        rank, group = dist.get_rank(), groups._get_sequence_parallel_group()
        part = slice(3 * rank, 3 * rank + 3)
        loss = vocab_parallel_linear_cross_entropy(
            hidden[:, part], weight, target[:, part], bias, sp_group=group, reduction=reduction
        )
        return loss.detach(), torch.autograd.grad(loss, weight)[0]
    finally:
        sequences.end()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_ranks_that_share_sequences_add_up_the_losses_of_a_head(
    ranks: RankPool, reduction: Any
) -> None:
    hidden, weight, bias, target = _head()
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    whole = F.cross_entropy(logits, target.flatten(), reduction=reduction)
    losses, grads = zip(*ranks(2, _summed_losses, reduction), strict=True)
    for loss in losses:
        torch.testing.assert_close(loss, whole.detach())
    torch.testing.assert_close(sum(grads), torch.autograd.grad(whole, weight)[0])


def test_losses_refuse_what_they_cannot_do_by_name() -> None:
    hidden, weight, _, target = _head()
    logits, labels = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="weight must be of the whole vocabulary"):
        vocab_parallel_linear_cross_entropy(
            hidden, weight, target, vocab_start_index=13, vocab_end_index=26
        )
    for how, message in (
        ({"backend": "triton"}, "no kernel of Triton"),
        ({"backend": "liger"}, "backend must be one of"),
        ({"block_rows": 0}, "block_rows must be"),
        ({"reduction": "max"}, "reduction must be"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            chunked_cross_entropy(logits, labels, **how)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"must be of torch\.int64"):
        chunked_cross_entropy(logits, labels.int())


# --- keys of a configuration ----------------------------------------------------------------------


class Exchanging(nn.Module):
    """A model that exchanges tokens and heads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(29, 8), nn.Linear(8, 24)
        self.attention = DistributedAttention(
            _attend_local,  # type: ignore[arg-type]
            groups._get_sequence_parallel_group(),
            2,
            1,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        heads = (x.unflatten(-1, (4, 2)) for x in self.qkv(self.embed(tokens)).chunk(3, -1))
        return self.attention(*heads, 0).flatten(2)


def _attend_local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


def _keyed(keys: dict[str, Any], mesh_param: Any = None) -> Any:
    """The sizes, a part of the output, and the largest difference of its gradient."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
        **keys,
    }
    try:
        sequences.divide(2)  # the group of `DistributedAttention`
        torch.manual_seed(0)
        model = Exchanging()
        sequences.end()
        asked = DeepSpeedConfig(config).world_size
        engine, *_ = fzero.deepspeed.initialize(model=model, config=config, mesh_param=mesh_param)
        tokens = torch.arange(16).view(2, 8).chunk(2, 1)[dist.get_rank() % 2]
        loss = engine(tokens).square().sum()
        engine.backward(loss)
        engine.step()
        sizes = (engine.sequence_parallel_size, engine.dp_world_size, engine.train_batch_size())
        return asked, sizes, loss.item(), engine.config.get("sequence_parallel_size")
    except ConfigError as error:
        return str(error)
    finally:
        sequences.end()


def test_the_keys_of_a_configuration_are_a_mesh_param(ranks: RankPool) -> None:
    both = {"sequence_parallel_size": 2, "data_parallel_size": 2}
    by_param = ranks(4, _keyed, {}, (2, 2))
    for keys in (both, {"sequence_parallel_size": 2}):
        for found, other in zip(ranks(4, _keyed, keys), by_param, strict=True):
            assert found[0] == 2 and found[1] == (2, 2, 4) == other[1]
            assert found[2] == other[2] and found[3] == 2
    (four, *_) = ranks(4, _keyed, {"data_parallel_size": 4})
    assert four[1] == (1, 4, 8)


def test_keys_that_do_not_fit_the_ranks_are_told_so(ranks: RankPool) -> None:
    def message(keys: dict[str, Any], mesh_param: Any = None) -> str:
        found: str = ranks(4, _keyed, keys, mesh_param)[0]
        return found

    assert "must be the 4 ranks of the job, divided by the 2" in message(
        {"sequence_parallel_size": 2, "data_parallel_size": 4}
    )
    assert "must divide the 4 ranks" in message({"sequence_parallel_size": 3})
    assert "at least 1, got 0" in message({"sequence_parallel_size": 0})
    assert "the key 'sequence_parallel_size', got [2, 4]" in message(
        {"sequence_parallel_size": 2}, (1, 4)
    )
    with pytest.raises(ConfigError, match=r"mesh=Mesh.of\(data=…, seq=…\)"):
        Config.load({"sequence_parallel_size": 2})


# --- axolotl --------------------------------------------------------------------------------------


def _tiled_engine(stage: int, num_shards: int | None) -> Curve:
    """The calls of axolotl's patch of a perceptron class (`tiled_mlp`), which is not
    installed: the number of tiles is the largest of all ranks, and the parameters are
    collected at the first call.
    """
    cls, tiles = transformers.models.llama.modeling_llama.LlamaMLP, []
    original = cls.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        num = torch.tensor(-(-x.shape[-2] // x.shape[-1]) if num_shards is None else num_shards)
        if num_shards is None:
            dist.all_reduce(num, op=dist.ReduceOp.MAX)
        if not self._compute_params:
            self._compute_params = [p for p in self.parameters() if p.requires_grad]

        def of_tile(module: Any, tile: Tensor) -> Tensor:
            tiles.append(tile.shape[1])
            return original(module, tile)

        return TiledMLP.apply(of_tile, self, x, int(num), self._compute_params)

    cls.forward, cls._compute_params = forward, []
    try:
        config = {
            "train_micro_batch_size_per_gpu": divided.SAMPLES // 2,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": divided.RATE}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine, *_ = fzero.deepspeed.initialize(model=llama(), config=config)
        losses = []
        for number in range(3):
            part = divided.rows(long_batch(number), dist.get_rank(), 2)
            loss = engine(**part).loss
            engine.backward(loss)
            engine.step()
            losses.append(torch.tensor(loss.item()))
            dist.all_reduce(losses[-1])
        assert num_shards is None or tiles[-1] == 8 // num_shards
        mean = [x.item() / 2 for x in losses]
        return Curve(mean, engine.train_step.gather(engine.state))
    finally:
        cls.forward = original
        del cls._compute_params


def long_batch(number: int) -> dict[str, Tensor]:
    tokens = divided.batch(number, 8)["input_ids"]
    return {"input_ids": tokens, "labels": tokens}  # each rank has as many labels


@pytest.mark.parametrize(("stage", "num_shards"), [(2, 4), (3, 4), (3, None)])
def test_axolotls_patch_of_perceptrons_trains_a_llama_as_a_plain_loop(
    ranks: RankPool, stage: int, num_shards: int | None
) -> None:
    model, losses = llama(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=divided.RATE)
    for number in range(3):
        loss = model(**long_batch(number)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    plain = Curve(losses, {key: x.detach() for key, x in model.state_dict().items()})
    for found in ranks(2, _tiled_engine, stage, num_shards):
        check(found, plain)
