"""Adapters alone, in the files of PEFT: PEFT's model computes as fzero's, and fzero
reads what PEFT writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import fzero
from fzero.transforms import load_adapter, lora, save_adapter

VOCABULARY, WIDTH = 11, 6
KEYS = {
    "table.lora_embedding_A": (2, VOCABULARY),
    "table.lora_embedding_B": (WIDTH, 2),
    "up.lora_A.weight": (2, WIDTH),
    "up.lora_B.weight": (4, 2),
    "wide.lora_A.weight": (2, 4),
    "wide.lora_B.weight": (8, 2),
    "kernel.lora_A.weight": (2, 8, 3),
    "kernel.lora_B.weight": (VOCABULARY, 2, 1),
}


class Model(nn.Module):
    """A table, a linear layer, one of transformers' with its input first, and a
    convolution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.wide = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, 4),
            Conv1D(8, 4),
        )
        self.kernel = nn.Conv1d(8, VOCABULARY, 3, padding=1)

    def logits(self, x: Tensor) -> Tensor:
        return self.kernel(self.wide(torch.tanh(self.up(self.table(x)))).mT).mT

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.logits(x).flatten(0, 1), x.flip(1).flatten())


class Logits(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


def model_of(kind: type[Model] = Model) -> Any:
    torch.manual_seed(0)
    return kind()


def tokens(index: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(index))


def trained(folder: str, stage: int, *, rank: int = 2, **how: Any) -> tuple[Any, Any]:
    cfg = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    cfg["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    step = fzero.make_train_step(model_of(), cfg, transforms=[lora("*", rank, alpha=3, **how)])
    state = step.init()
    for index in range(3):
        state, _ = step(state, tokens(index).chunk(step.world_size)[step.rank])
    save_adapter(step, state, folder, base="tiny")
    return step, state


def saved(folder: str, stage: int) -> float:
    step, state = trained(folder, stage)
    return step.evaluate(state, tokens(9)).item()


def test_a_file_has_pefts_keys_and_shapes_and_no_other_weights(tmp_path: Path) -> None:
    trained(str(tmp_path), 3)
    file = load_file(tmp_path / "adapter_model.safetensors")
    assert {key: tuple(x.shape) for key, x in file.items()} == {
        f"base_model.model.{k}": s for k, s in KEYS.items()
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 3)
    assert (
        config["target_modules"] == ["kernel", "table", "up", "wide"]
        and config["base_model_name_or_path"] == "tiny"
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_peft_loads_it_and_computes_the_same(
    num_ranks: int, tmp_path: Path, ranks: RankPool
) -> None:
    peft = pytest.importorskip("peft")
    loss = ranks(num_ranks, saved, str(tmp_path), 3)[0]
    with pytest.warns(
        UserWarning, match="fan_in_fan_out"
    ):  # peft asks each module which of its dimensions is the input
        theirs = peft.PeftModel.from_pretrained(model_of(Logits), str(tmp_path))
    found = nn.functional.cross_entropy(
        theirs(tokens(9)).flatten(0, 1), tokens(9).flip(1).flatten()
    )
    assert found.item() == pytest.approx(loss, rel=1e-6)
    plain = nn.functional.cross_entropy(
        model_of().logits(tokens(9)).flatten(0, 1), tokens(9).flip(1).flatten()
    )
    assert abs(plain.item() - loss) > 1e-3


def test_what_peft_writes_is_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=["up", "table"], init_lora_weights=False
    )
    theirs = peft.get_peft_model(model_of(Logits), config)
    theirs.save_pretrained(str(tmp_path))
    step = fzero.make_train_step(model_of(), {}, transforms=[lora(["up", "table"], 2, alpha=3)])
    state = step.init({**model_of().state_dict(), **load_adapter(step, tmp_path)})
    found = nn.functional.cross_entropy(
        theirs(tokens(9)).flatten(0, 1), tokens(9).flip(1).flatten()
    )
    assert step.evaluate(state, tokens(9)).item() == pytest.approx(found.item(), rel=1e-6)


@pytest.mark.parametrize("bits", [None, 8])
def test_training_goes_on_from_a_file(bits: Any, tmp_path: Path) -> None:
    how = {} if bits is None else {"bits": bits}
    step, state = trained(str(tmp_path), 0, **how)
    model = model_of()
    other = fzero.make_train_step(model, {}, transforms=[lora("*", 2, alpha=3, **how)])
    again = other.init({**model.state_dict(), **load_adapter(other, tmp_path)})
    assert other.evaluate(again, tokens(9)) == step.evaluate(state, tokens(9))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_rslora", True),
        ("use_dora", True),
        ("alpha_pattern", {"up": 8}),
        ("rank_pattern", {"up": 4}),
    ],
)
def test_adapters_that_compute_otherwise_are_errors(key: str, value: Any, tmp_path: Path) -> None:
    step, _ = trained(str(tmp_path), 0)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=f"must have no '{key}', which asks for other weights"):
        load_adapter(step, tmp_path)


def test_other_adapters_are_errors(tmp_path: Path) -> None:
    trained(str(tmp_path), 0)

    def step(*args: Any, **how: Any) -> Any:
        return fzero.make_train_step(
            model_of(), {}, transforms=[lora(*args, **how)] if args else []
        )

    with pytest.raises(ValueError, match=r"got 2 and 1\.5; pass lora\(…, rank=2, alpha=3\)"):
        load_adapter(step("*", 3, alpha=3), tmp_path)
    with pytest.raises(
        ValueError,
        match=r"the step must have every adapter of the file, got 'base_model.model.kernel",
    ):
        load_adapter(step("up", 2, alpha=3), tmp_path)
    with pytest.raises(ValueError, match="load_adapter: the step must have adapters, got none"):
        load_adapter(step(), tmp_path)
    trained(str(tmp_path / "up"), 0)
    few = step("up", 2, alpha=3)
    save_adapter(few, few.init(), tmp_path / "up")
    with pytest.raises(ValueError, match=r"the file must have 'base_model.model.table"):
        load_adapter(step("*", 2, alpha=3), tmp_path / "up")
