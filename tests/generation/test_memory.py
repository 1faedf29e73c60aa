"""The bytes of generation: a rank holds those that `fzero plan --generate` plans, and a
server's weights take little memory.
"""

from __future__ import annotations

import gc
import json
from typing import Any

import optree
import pytest
import torch
from ranks import RankPool
from test_generating import gpt2, ids, loss_of, settings
from torch import nn

import fzero
from fzero.__main__ import main
from fzero.estimation import Answers, compare_plans, fit
from fzero.estimation.activation_trace import ActivationCounter
from fzero.estimation.generation import cache_nbytes
from fzero.generation import copy_nbytes, server_weights

ROWS, TOKENS = 3, 11


def _held(stage: int, precision: str) -> Any:
    step = fzero.make_train_step(
        gpt2(), fzero.Config.load(settings(stage, precision)), loss_fn=loss_of
    )
    state = step.init()
    counter = ActivationCounter()
    counter.ignore([*step.spec.model.parameters(), *state.params.values(), *state.buffers.values()])
    with counter, fzero.generating(step, state, fuse=False) as model:
        gc.collect()
        counter.mark("fetch")
        copied = counter.events[-1]
        prompt = torch.ones(ROWS, TOKENS, dtype=torch.int64)
        cache = model.eval()(input_ids=prompt, use_cache=True).past_key_values
    held = sum(
        x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values)
    )
    counter.mark("fetch")
    answers = Answers(ROWS, TOKENS)
    planned = compare_plans(
        gpt2(), settings(stage, precision), world_size=2, device="cpu", answers=answers
    )
    return copied.most, held, planned[f"stage {stage}"].generating, copy_nbytes(step)


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "torch_autocast"])
@pytest.mark.parametrize("stage", [1, 3])
def test_planned_bytes_of_generation_are_those_that_a_rank_holds(
    ranks: RankPool, stage: int, precision: str
) -> None:
    for most, cache, planned, copied in ranks(2, _held, stage, precision):
        assert planned.cache == cache and planned.copy == copied
        assert copied <= most <= copied + 4096  # a few small tensors besides
        assert (copied > 0) == (stage == 3)
        assert planned.by_copy == planned.state + copied + cache


def test_the_cache_is_that_of_each_kind_of_attention() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    grouped = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
    window = MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=4, sliding_window=8))
    before = {name: param.clone() for name, param in grouped.named_parameters()}
    # keys and values, layers, rows, ...
    assert cache_nbytes(grouped, {}, Answers(3, 20)) == 2 * 2 * 3 * 20 * 2 * 8 * 4
    # the window less the present token
    assert cache_nbytes(window, {}, Answers(3, 20)) == 2 * 2 * 3 * 7 * 4 * 8 * 4
    assert (
        all(torch.equal(param, before[name]) for name, param in grouped.named_parameters())
        and grouped.training
    )
    with pytest.raises(
        ValueError,
        match=r"^generate: Linear must take input_ids and use_cache, and return past_key_values",
    ):
        cache_nbytes(nn.Linear(2, 2), {}, Answers(1, 1))


def test_a_plan_that_fits_has_room_to_generate() -> None:
    answers, large = Answers(2, 16), 1e12
    model = gpt2()
    keys = settings(3)
    free = fit(model, keys, world_size=2, device_nbytes=large, device="cpu", answers=answers).best
    assert free is not None and free.generating is not None
    generating = free.generating
    assert generating.by_unit < generating.by_copy
    found = fit(model, keys, world_size=2, device_nbytes=large, device="cpu", answers=answers)
    assert 'Generating with by="copy" takes ' in str(found)
    many = Answers(2000, 30)  # whose keys and values are most of the memory
    needs = fit(model, keys, world_size=2, device_nbytes=large, device="cpu", answers=many).best
    assert needs is not None and needs.generating is not None
    limit = (needs.generating.by_copy + needs.generating.by_unit) // 2
    between = fit(model, keys, world_size=2, device_nbytes=limit, device="cpu", answers=many)
    assert 'Generating with by="unit" takes ' in str(
        between
    ) and "(gathered once it would take " in str(between)
    without = fit(model, keys, world_size=2, device_nbytes=limit // 2, device="cpu")
    assert without.best is not None
    assert (
        fit(model, keys, world_size=2, device_nbytes=limit // 2, device="cpu", answers=many).best
        is None
    )


def test_the_command_counts_the_copy_and_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "1M", "--world", "4", "--batch", "3", "--generate", "20"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert (
        "generating 3 × 20 tokens" in printed
        and "gathered copy" in printed
        and "keys and values" in printed
    )
    assert main([*words, "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["configurations"]}
    of_stage_3 = found["stage 3"]["generating"]
    width, blocks, nbytes = 128, 1, 2
    assert of_stage_3["cache"] == 2 * blocks * 3 * 20 * width * nbytes
    assert found["stage 2"]["generating"]["copy"] == 0 < of_stage_3["copy"]


# --- weights for a server -------------------------------------------------------------------------


def _peak(stage: int, precision: str, to: Any) -> tuple[int, int, int]:
    step = fzero.make_train_step(
        gpt2(), fzero.Config.load(settings(stage, precision)), loss_fn=loss_of
    )
    state, _ = step(step.init(), ids(step.rank))
    counter = ActivationCounter()
    counter.ignore(
        leaf
        for leaf in optree.tree_leaves((state.params, state.master))
        if isinstance(leaf, torch.Tensor)
    )
    with counter:
        for _ in server_weights(step, state, dtype=torch.bfloat16, to=to):
            pass
    largest = max(buffer.padded_numel for buffer in step.plan.flat_buffers)
    return (
        counter.most,
        4 * largest,
        4 * sum(buffer.padded_numel for buffer in step.plan.flat_buffers),
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("to", ["all", "rank0"])
def test_a_servers_weights_take_the_memory_of_one_unit(
    ranks: RankPool, precision: str, to: str
) -> None:
    for most, unit, everything in ranks(2, _peak, 3, precision, to):
        assert 1.5 * unit < everything
        # its fp32 weights, and one tensor of them in 16 bits
        assert unit <= most <= 1.5 * unit + 4096
