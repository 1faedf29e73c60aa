"""An encoder, compressed by each technique of `compression_training`: its accuracy, and
the time of the shrunk one.

    python examples/compress.py
        in a minute on two cores; torchrun --nproc-per-node 2 works, too
    python examples/compress.py --steps 300

1. A dense encoder learns to name the most frequent kind of token.
2. Each technique goes on from its weights, compressed: `make_train_step` applies the
  block of the configuration by itself.
3. `clean` makes that permanent; `shrunk` gives the smaller module, whose forward is
  timed.
4. A student with two of the four layers begins with those of the dense encoder, and is
  distilled from it.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fzero
from fzero.compression import clean, compression_of, shrunk, start_of_student

WIDTH, HEADS, KINDS, LENGTH, BATCH = 64, 4, 4, 24, 64


class Attention(nn.Module):
    """Attention of all tokens to all tokens; the width of its heads follows from the
    size of its matrices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            of(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for of in (self.query, self.key, self.value)
        )
        mixed: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class Layer(nn.Module):
    """Attention, then two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        hidden: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return hidden


class Encoder(nn.Module):
    """Tokens to the logits of kinds."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(num_layers)))
        self.classifier = nn.Linear(WIDTH, KINDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.layers(self.embed(tokens)).mean(1))
        return logits


def task(index: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Tokens, and the most frequent of their kinds (a token's kind is its number modulo
    4).
    """
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, 16, (size, LENGTH), generator=generator)
    return tokens, F.one_hot(tokens % KINDS, KINDS).sum(1).argmax(1)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, kinds = batch
    return F.cross_entropy(model(tokens), kinds)


def group(
    params: dict[str, Any], modules: list[str], related: Any = None, **shared: Any
) -> dict[str, Any]:
    """A technique with one group, from update 10 on."""
    given = {"params": params, "modules": modules, "related_modules": related}
    return {
        "shared_parameters": {"enabled": True, "schedule_offset": 10, **shared},
        "different_groups": {"all": given},
    }


LINEARS = [r"attention\.", r"up$", r"down$"]
QKV = [[r"attention\.(query)$", r"attention\.(key)$", r"attention\.(value)$"]]
TECHNIQUES: dict[str, dict[str, Any]] = {
    "none": {},
    "weights of 8 bits": {
        "weight_quantization": group({"target_bits": 8}, LINEARS, quantize_weight_in_forward=True)
    },
    "weights of 8→4 bits": {
        "weight_quantization": group(
            {"start_bits": 8, "target_bits": 4, "quantization_period": 5}, LINEARS
        )
    },
    "weights of 2 bits": {
        "weight_quantization": group({"target_bits": 2}, LINEARS, quantize_weight_in_forward=True)
    },
    "inputs of 8 bits": {
        "activation_quantization": group({"bits": 8}, LINEARS, range_calibration="static")
    },
    "sparse, l1, half": {"sparse_pruning": group({"dense_ratio": 0.5}, LINEARS, method="l1")},
    "sparse, topk, half": {"sparse_pruning": group({"dense_ratio": 0.5}, LINEARS, method="topk")},
    "rows, topk, half": {
        "row_pruning": group({"dense_ratio": 0.5}, ["up$"], [["down$"]], method="topk")
    },
    "heads, topk, half": {
        "head_pruning": group(
            {"dense_ratio": 0.5}, [r"attention\.out$"], QKV, method="topk", num_heads=HEADS
        )
    },
    "rows and heads": {
        "row_pruning": group({"dense_ratio": 0.25}, ["up$"], [["down$"]], method="topk"),
        "head_pruning": group(
            {"dense_ratio": 0.5}, [r"attention\.out$"], QKV, method="topk", num_heads=HEADS
        ),
    },
}
"""The block `compression_training` of each run."""


def config(techniques: dict[str, Any]) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "compression_training": techniques,
    }


def train(step: fzero.TrainStep, state: Any, num_steps: int) -> Any:
    for index in range(num_steps):
        tokens, kinds = task(index)
        part = slice(
            step.rank * BATCH // step.world_size, (step.rank + 1) * BATCH // step.world_size
        )
        state, _ = step(state, (tokens[part], kinds[part]))
    return state


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    tokens, kinds = task(10**6, 1024)
    return float((model(tokens).argmax(1) == kinds).float().mean())


@torch.no_grad()
def milliseconds(model: nn.Module) -> float:
    """The least processor time of a forward on one thread, in which another load on the
    machine counts little.
    """
    tokens, _ = task(0, 256)
    times, num_threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(8):
        start = time.process_time()
        model(tokens)
        times.append(time.process_time() - start)
    torch.set_num_threads(num_threads)
    return min(times) * 1e3


def distilled(dense: Encoder, num_steps: int) -> nn.Module:
    """A student with two of the teacher's layers, which learns from the teacher's
    logits, too.
    """
    student = Encoder(num_layers=2)
    block = {
        "enabled": True,
        "module_name_prefix": "layers",
        "teacher_layer": [1, 3],
        "other_module_name": ["embed", "classifier"],
    }
    reduction = fzero.Config.load(
        {"compression_training": {"layer_reduction": block}}
    ).compression_training.layer_reduction
    student.load_state_dict(start_of_student(student.state_dict(), dense.state_dict(), reduction))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, kinds = batch
        logits = model(tokens)
        with torch.no_grad():
            wanted = F.log_softmax(dense(tokens), -1)
        distance = F.kl_div(
            F.log_softmax(logits, -1), wanted, log_target=True, reduction="batchmean"
        )
        return F.cross_entropy(logits, kinds) + distance

    step = fzero.make_train_step(student, config({}), loss_fn=loss_fn)
    state = train(step, step.init(), num_steps)
    student.load_state_dict(step.gather(state))
    return student


def main(num_steps: int = 120) -> dict[str, tuple[float, float]]:
    """Trains each variant; returns its accuracy and the milliseconds of a forward, by
    name.
    """
    torch.manual_seed(0)
    dense = Encoder()
    step = fzero.make_train_step(dense, config({}), loss_fn=loss_of)
    dense.load_state_dict(step.gather(train(step, step.init(), num_steps)))
    results: dict[str, tuple[float, float]] = {}
    for name, techniques in TECHNIQUES.items():
        step = fzero.make_train_step(copy.deepcopy(dense), config(techniques), loss_fn=loss_of)
        state = train(step, step.init(), num_steps)
        model = shrunk(dense, clean(step.gather(state), compression_of(step))).eval()
        results[name] = accuracy(model), milliseconds(model)
    student = distilled(dense.requires_grad_(False), num_steps)
    results["2 of 4 layers, distilled"] = accuracy(student), milliseconds(student)
    if step.rank == 0:
        print(f"{'technique':26} accuracy      ms")
        for name, (right, took) in results.items():
            print(f"{name:26} {right:8.1%} {took:7.2f}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120, help="updates of each run")
    main(parser.parse_args().steps)
