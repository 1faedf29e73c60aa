"""Generation between updates: tokens of a plain model, a state that keeps its bits, and
what is sent.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import fzero
from fzero.comms import CommRecord
from fzero.data import RandomLTD, fixed_linear
from fzero.generation import copy_nbytes, fuse_lora, server_weights

VOCAB, PROMPT, NEW = 32, 4, 6


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": VOCAB}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))
    for param in model.parameters():  # untrained weights always repeat one token
        param.data.mul_(6)
    return model


def settings(stage: int, precision: str = "fp32", **zero: Any) -> dict[str, Any]:
    more = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "torch_autocast":
        more[precision]["dtype"] = "bfloat16"
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        **more,
    }


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def ids(seed: int, rows: int = 2) -> Tensor:
    return torch.randint(1, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(seed))


def greedy(model: Any, prompt: Tensor, num_new: int = NEW, **more: Any) -> Tensor:
    more = {
        "do_sample": False,
        "max_new_tokens": num_new,
        "pad_token_id": 0,
        "eos_token_id": None,
    } | more
    tokens: Tensor = model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), **more)
    return tokens


def _as_a_plain_model(stage: int, precision: str, zero: dict[str, Any], by: str) -> Any:
    step = fzero.make_train_step(
        gpt2(), fzero.Config.load(settings(stage, precision, **zero)), loss_fn=loss_of
    )
    sent: list[CommRecord] = []
    seen = step.observed(sent.append)
    state, plain = step.init(), gpt2()
    state, _ = step(state, ids(step.rank))
    before = [
        leaf.clone() if isinstance(leaf, Tensor) else leaf
        for leaf in optree.tree_leaves(state.params)
    ]
    num_new = NEW + (2 * step.rank if by == "copy" else 0)
    with fzero.generating(seen, state, by=by) as model:
        found = [greedy(model, ids(seed), num_new) for seed in (5, 6)]
    num_sent = sum(record.num_elements for record in sent if record.label.phase != "agreement")
    plain.load_state_dict(step.gather(state))
    plain.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "torch_autocast"):
        expected = [greedy(plain, ids(seed), num_new) for seed in (5, 6)]
    kept = all(
        a is b or torch.equal(a, b)
        for a, b in zip(before, optree.tree_leaves(state.params))
        if isinstance(a, Tensor)
    )
    full = sum(buffer.padded_numel for buffer in step.plan.flat_buffers)
    state, metrics = step(state, ids(9 + step.rank))
    return found, expected, kept, num_sent, full, metrics.loss.item()


@pytest.mark.covering(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "torch_autocast"])
@pytest.mark.parametrize("offload", [None, "cpu", "nvme"])
def test_tokens_are_those_of_a_plain_model_and_parameters_are_sent_once(
    ranks: RankPool, stage: int, precision: str, offload: str | None, tmp_path: Path
) -> None:
    block = {"device": offload} | ({"nvme_path": str(tmp_path)} if offload == "nvme" else {})
    zero: dict[str, Any] = {} if offload is None else {"offload_optimizer": block}
    if offload and stage == 3:
        zero["offload_param"] = block | ({"max_in_cpu": 0} if offload == "nvme" else {})
    for found, expected, kept, num_sent, full, _ in ranks(
        2, _as_a_plain_model, stage, precision, zero, "copy"
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert (
            len({tuple(row) for tokens in found for row in tokens[:, PROMPT:].tolist()}) > 1
        )  # they depend on the prompt
        assert kept
        assert num_sent == (full // 2 if stage == 3 else 0)


@pytest.mark.parametrize("stage", [1, 3])
def test_by_unit_tokens_are_the_same(ranks: RankPool, stage: int) -> None:
    (found, expected, kept, num_sent, full, loss), _ = ranks(
        2, _as_a_plain_model, stage, "fp32", {}, "unit"
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and kept
    assert (num_sent > full) == (stage == 3)
    (_, _, _, _, _, by_copy), _ = ranks(2, _as_a_plain_model, stage, "fp32", {}, "copy")
    assert loss == by_copy


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_by_unit_tokens_are_the_same_from_other_memory(
    ranks: RankPool, offload: str, tmp_path: Path
) -> None:
    block = {"device": offload} | (
        {"nvme_path": str(tmp_path), "max_in_cpu": 0} if offload == "nvme" else {}
    )
    for found, expected, _, _, _, _ in ranks(
        2, _as_a_plain_model, 3, "fp32", {"offload_param": block}, "unit"
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _of_other_lengths(lengths: list[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    step, state = _made(3)
    pairs = []
    for num_new in (of_ranks[step.rank] for of_ranks in lengths):
        with fzero.generating(step, state, by="unit") as model:
            found = greedy(model, ids(5), num_new)
        plain = gpt2()
        plain.load_state_dict(step.gather(state))
        pairs.append((found, greedy(plain, ids(5), num_new)))
        state, _ = step(state, ids(step.rank))
    return pairs


def test_by_unit_ranks_may_stop_at_different_lengths(ranks: RankPool) -> None:
    for pairs in ranks(2, _of_other_lengths, [(4, 4), (4, 9), (9, 4), (1, 3)]):
        assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_compressed_model_generates_with_what_it_trains_with(stage: int) -> None:
    given = {"start_bits": 2, "target_bits": 2, "quantization_period": 1}
    group = {"params": given, "modules": ["0"]}
    ranges = {"params": {"bits": 4}, "modules": ["2"]}
    shared = {"enabled": True, "schedule_offset": 0}
    block = {
        "weight_quantization": {"shared_parameters": shared, "different_groups": {"all": group}},
        "activation_quantization": {
            "shared_parameters": shared | {"range_calibration": "dynamic"},
            "different_groups": {"all": ranges},
        },
    }
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(2, 8)
    cfg = fzero.Config.load(settings(stage) | {"compression_training": block})
    step = fzero.make_train_step(model, cfg, loss_fn=lambda model, x: model(x).square().mean())
    state, _ = step(step.init(), x)
    found = []
    for by in ("copy", "unit"):
        with fzero.generating(step, state, by=by) as shown:
            found.append(shown(x))
            assert (by == "unit") or shown[0].weight.unique().numel() <= 4  # 2 bits
    assert torch.equal(*found)


# --- writes ---------------------------------------------------------------------------------------


def _made(stage: int = 1, model: Any = None) -> tuple[Any, Any]:
    step = fzero.make_train_step(
        model or gpt2(), fzero.Config.load(settings(stage)), loss_fn=loss_of
    )
    return step, step.init()


@pytest.mark.parametrize("by", ["copy", "unit"])
def test_one_inside_another_gives_the_same_tokens(by: str) -> None:
    step, state = _made(3)
    with fzero.generating(step, state, by=by) as model:
        with fzero.generating(step, state) as again:
            inner = greedy(again, ids(1))
        assert torch.equal(greedy(model, ids(1)), inner)


@pytest.mark.parametrize("by", ["copy", "unit"])
def test_no_layer_drops_tokens_while_it_generates(by: str) -> None:
    """In training mode, too, which the model may be in."""
    ltd = RandomLTD([0, 1], fixed_linear(2, PROMPT, steps=9, multiple=2))
    step, state = _made(3, ltd.wrap(gpt2(), GPT2Block))
    expected = gpt2()(input_ids=ids(1)).logits
    with fzero.generating(step, state, by=by) as model:
        assert torch.equal(model.train()(input_ids=ids(1)).logits, expected)


def test_simulated_ranks_generate_from_their_gathered_weights() -> None:
    step = fzero.make_train_step(
        gpt2(),
        fzero.Config.load(settings(3)),
        loss_fn=loss_of,
        mesh=fzero.comms.AbstractAxis("data", 2),
    )
    ranks = fzero.simulate(step, by="lockstep")
    state = ranks.init()
    for call in (
        lambda: fzero.generating(ranks, state).__enter__(),  # type: ignore[arg-type]
        lambda: next(server_weights(ranks, state)),  # type: ignore[arg-type]
    ):
        with pytest.raises(
            TypeError,
            match="must be what make_train_step returned, got LockstepRanks; load what gather",
        ):
            call()
    gpt2().load_state_dict(ranks.gather(state))


def test_a_write_is_refused_and_with_copies_dropped() -> None:
    step, state = _made()
    before = step.gather(state)
    with fzero.generating(step, state, writable=True) as model:
        model.transformer.wte.weight.mul_(2)
        assert torch.equal(model.lm_head.weight, 2 * before["lm_head.weight"])  # tied
    assert all(torch.equal(value, before[name]) for name, value in step.gather(state).items())
    with (
        pytest.raises(ValueError, match="must not write to its parameters, and did"),
        fzero.generating(step, state) as model,
    ):
        model.transformer.wte.weight.mul_(2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"by": "token"}, "by must be 'copy' or 'unit'"),
        ({"by": "unit", "writable": True}, "writable must be False"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], says: str) -> None:
    step, state = _made()
    with pytest.raises(ValueError, match=re.escape(says)), fzero.generating(step, state, **given):
        pass


# --- LoRA -----------------------------------------------------------------------------------------


class ChatLinear(nn.Module):
    """A LoRA layer with the attributes of DeepSpeed-Chat's."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width), requires_grad=False)
        self.lora_right_weight = nn.Parameter(torch.randn(width, rank))
        self.lora_left_weight = nn.Parameter(torch.randn(rank, width))
        self.lora_scaling, self.fuse_lora = 0.5, False

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight)
        return (
            y
            if self.fuse_lora
            else y + (x @ self.lora_right_weight @ self.lora_left_weight) * self.lora_scaling
        )


def _chat(stage: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(ChatLinear(8), nn.Tanh(), ChatLinear(8))
    cfg = fzero.Config.load(settings(stage))
    step = fzero.make_train_step(model, cfg, loss_fn=lambda model, x: model(x).square().mean())
    state, x = step.init(), torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    state, _ = step(state, x)
    before = step.gather(state)
    with fzero.generating(step, state) as fused:
        assert fused[0].fuse_lora
        merged = fused(x)
    with fzero.generating(step, state, fuse=False) as plain:
        unmerged = plain(x)
    assert not model[0].fuse_lora
    return (
        merged,
        unmerged,
        all(torch.equal(value, before[name]) for name, value in step.gather(state).items()),
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_merged_lora_gives_the_same_to_rounding_and_weights_keep_their_bits(
    ranks: RankPool, stage: int
) -> None:
    for merged, unmerged, kept in ranks(2, _chat, stage):
        # another order of fp32 sums: torch's tolerance for them
        torch.testing.assert_close(merged, unmerged)
        assert not torch.equal(merged, unmerged) and kept


def test_fuse_lora_is_pure_and_refuses_a_shared_matrix() -> None:
    model = nn.Sequential(ChatLinear(4), ChatLinear(4))
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    before = {name: value.clone() for name, value in params.items()}
    fused = fuse_lora(model, params)
    assert all(torch.equal(params[name], before[name]) for name in params)
    expected = (
        params["1.weight"] + 0.5 * (params["1.lora_right_weight"] @ params["1.lora_left_weight"]).T
    )
    assert torch.equal(fused["1.weight"], expected)
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="must be its own, and is tied to"):
        fuse_lora(model, params)


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_adapters_of_peft_are_merged_and_stay_as_they_are(kind: dict[str, Any], stage: int) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.LoraConfig(
        r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights=False, **kind
    )
    step, state = _made(stage, peft.get_peft_model(gpt2(), adapted))
    x, before = ids(3), step.gather(state)
    with fzero.generating(step, state) as model:
        merged = model.eval()(input_ids=x).logits
    with fzero.generating(step, state, fuse=False) as model:
        unmerged = model.eval()(input_ids=x).logits
    with fzero.generating(step, state, fuse=False, writable=True) as model:
        model.merge_adapter()
        by_peft = model(input_ids=x).logits
        model.unmerge_adapter()
    # sums of another order through six matrices
    torch.testing.assert_close(merged, unmerged, rtol=1e-4, atol=1e-4)
    assert torch.equal(merged, by_peft)
    assert all(torch.equal(value, before[name]) for name, value in step.gather(state).items())


# --- weights for a server -------------------------------------------------------------------------


def _served(stage: int) -> Any:
    step, state = _made(stage)
    state, _ = step(state, ids(step.rank))
    gathered = step.gather(state)
    pairs = dict(server_weights(step, state, dtype=torch.bfloat16))
    unfinished = server_weights(step, state)
    next(unfinished)
    assert torch.is_grad_enabled()  # the caller's mode stays between two pairs
    assert len(list(unfinished)) == len(pairs) - 1  # every rank takes all
    return pairs, gathered, len(list(server_weights(step, state, to="rank0"))), copy_nbytes(step)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_server_gets_each_weight_once_in_its_dtype(ranks: RankPool, stage: int) -> None:
    for rank, (pairs, gathered, num_pairs, nbytes) in enumerate(ranks(2, _served, stage)):
        assert pairs.keys() == gathered.keys() - {"lm_head.weight"}  # tied: under its first name
        assert all(torch.equal(value, gathered[name].bfloat16()) for name, value in pairs.items())
        assert num_pairs == (len(pairs) if rank == 0 else 0)
        assert (nbytes > 0) == (stage == 3)
