"""Models of transformers whose sequences several ranks share: masked, packed, sliding
windows, grouped heads.
"""

from __future__ import annotations

from typing import Any

import divided
import pytest
import torch
import transformers
from divided import SAMPLES, VOCABULARY, Curve, check, settings, trained
from ranks import RankPool
from torch import Tensor, nn

import fzero
from fzero.sequence import ulysses
from sharding import Mesh

EVEN, UNEVEN = 8, 7
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def build(kind: str, num_keys: int = 2) -> nn.Module:
    sizes, window = {**SIZES, "num_key_value_heads": num_keys}, {"sliding_window": 4}
    torch.manual_seed(0)
    if kind == "llama":
        model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    elif kind == "mistral":
        config: Any = transformers.MistralConfig(**sizes, **window)
        model = transformers.MistralForCausalLM(config)
    else:  # one layer sees all, one a window
        how = {"head_dim": 8, "use_sliding_window": True, "max_window_layers": 1}
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **window, **how))
    return model.double()


def batch(step: int, length: int, kind: str) -> dict[str, Any]:
    made = divided.batch(step, length)
    if kind != "packed":
        del made["position_ids"]
    if kind == "masked":
        mask = torch.ones(SAMPLES, length, dtype=torch.long)
        mask[0, -3:], mask[2, :2] = 0, 0
        made["labels"][mask == 0] = divided.IGNORED
        made["attention_mask"] = mask
    if kind == "packed":
        positions = torch.cat([torch.arange(3), torch.arange(length - 3)])
        made["position_ids"] = positions.expand(SAMPLES, -1).contiguous()
        made["labels"][:, 3], made["use_cache"] = divided.IGNORED, False
    return made


def expected(model: nn.Module, length: int, kind: str, num_groups: int = 2) -> Curve:
    """The mean over groups of the model's own loss, as data parallel ranks have it."""

    def loss_of(model: nn.Module, number: int) -> Tensor:
        whole = batch(number, length, kind)
        parts = [divided.rows(whole, group, num_groups) for group in range(num_groups)]
        return torch.stack([model(**part).loss for part in parts]).mean()

    return divided.plain(model, loss_of)


def make(model: nn.Module, stage: int, mesh: Any = divided.MESH, **how: Any) -> fzero.TrainStep:
    given = {"transforms": [ulysses("seq")], **how}
    return fzero.make_train_step(model, settings(stage), mesh=mesh, **given)


def abstract(mesh: Mesh) -> Any:
    return fzero.comms.AbstractAxis.of(mesh, backend="gloo")


@pytest.mark.covering(2)
@pytest.mark.parametrize("length", [EVEN, UNEVEN])
@pytest.mark.parametrize("kind", ["full", "masked", "packed"])
@pytest.mark.parametrize("model", ["llama", "mistral", "qwen3"])
def test_simulated_ranks_train_a_model_of_transformers_as_a_plain_loop(
    model: str, kind: str, length: int
) -> None:
    ranks = fzero.simulate(make(build(model), 3, abstract(divided.MESH)), by="lockstep")
    found = trained(ranks, lambda n: divided.of_all_ranks(batch(n, length, kind)))
    check(found, expected(build(model), length, kind))


@pytest.mark.parametrize(("num_keys", "kind", "stage"), [(1, "full", 0), (2, "masked", 2)])
def test_fewer_key_heads_than_ranks_train_as_a_plain_loop(
    num_keys: int, kind: str, stage: int
) -> None:
    mesh = Mesh.of(data=1, seq=4)
    model = build("llama", num_keys)
    ranks = fzero.simulate(make(model, stage, abstract(mesh), checkpoint=1), by="lockstep")
    found = trained(ranks, lambda n: divided.of_all_ranks(batch(n, EVEN, kind), mesh))
    check(found, expected(build("llama", num_keys), EVEN, kind, num_groups=1))


def _on_ranks(stage: int, kind: str, **how: Any) -> Curve:
    step = make(build("llama"), stage, **how)

    def batch_of(number: int) -> dict[str, Any]:
        return divided.rows(batch(number, UNEVEN, kind), *fzero.sequence.batch_of(step))

    return trained(step, batch_of)


@pytest.mark.parametrize(
    ("stage", "kind"), [(0, "full"), (1, "packed"), (2, "masked"), (3, "packed")]
)
def test_real_ranks_train_a_llama_as_a_plain_loop(ranks: RankPool, stage: int, kind: str) -> None:
    for found in ranks(4, _on_ranks, stage, kind):
        check(found, expected(build("llama"), UNEVEN, kind))


@pytest.mark.parametrize("kind", ["full", "packed"])
def test_a_captured_llama_trains_as_a_plain_loop(ranks: RankPool, kind: str) -> None:
    how = {"compile": "step", "compile_backend": "aot_eager"}
    for found in ranks(4, _on_ranks, 3, kind, **how):
        check(found, expected(build("llama"), UNEVEN, kind))


def _generated() -> list[int]:
    step = make(build("llama"), 3)
    state = step.init()
    with fzero.generating(step, state) as model:
        found = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    return found[0].tolist()


def test_generation_has_whole_prompts_on_every_rank(ranks: RankPool) -> None:
    whole = build("llama").generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    assert ranks(4, _generated) == [whole[0].tolist()] * 4


def test_other_attention_of_transformers_is_refused_by_name() -> None:
    model = build("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        make(model, 0, abstract(divided.MESH))
