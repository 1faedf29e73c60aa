"""What does compression cost? A step with each technique, beside
`torch.nn.utils.parametrize` with the same formula.

    python benchmarks/compression.py                               # three minutes on one core
    python benchmarks/compression.py --width 1536 --only "row l1"   # where Python's part is small
    python benchmarks/compression.py --rounds 2 --only "sparse l1"  # does it run?

Four square matrices, SGD, a batch of 64, one thread. The cost of a technique is what it
adds to the processor time of the same contender's step without one: the median of the
differences between a step with it and one without, side by side. Each contender is
built five times, because its memory lies elsewhere each time; `±` is half of what the
five medians differ by. The parametrizations are those that one would write by hand from
DeepSpeed's formulas: straight-through functions, masks as fp32 buffers, scores sorted
at each forward. Inputs are quantized in a forward pre-hook.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fzero
from fzero.common import print_report

NUM_LAYERS, NUM_ROWS, NUM_HEADS = 4, 64, 8
NUM_BUILDS, WARM_UP = 5, 3
Formula = Callable[[Tensor], Tensor]


def make_model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = ((nn.Linear(width, width), nn.ReLU()) for _ in range(NUM_LAYERS))
    return nn.Sequential(*(module for pair in layers for module in pair))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


# --- the formulas as parametrizations -------------------------------------------------------------


def straight(formula: Formula) -> Formula:
    """The formula with the identity as its derivative."""

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return formula(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    return Straight.apply


def symmetric(w: Tensor, bits: int = 8) -> Tensor:
    scale = 2 * w.abs().amax() / 2**bits
    return (w / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale


def symmetric_rows(x: Tensor, bits: int = 8) -> Tensor:
    scale = 2 * x.abs().amax(-1, keepdim=True) / 2**bits
    return (x / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale


def asymmetric(w: Tensor, bits: int = 8) -> Tensor:
    low, high = w.amin(), w.amax()
    scale = (high - low) / 2**bits
    zero = (low / scale).round() * scale
    return ((w - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


def ternary(w: Tensor) -> Tensor:
    size = w.abs()
    kept = (size > 0.7 * size.mean()).to(w.dtype)
    return kept * w.sign() * ((size * kept).sum() / kept.sum())


def binary(w: Tensor) -> Tensor:
    return w.sign() * w.abs().mean()


def top(scores: Tensor) -> Tensor:
    """1 for the larger half of the scores, else 0; by a sort, as DeepSpeed has it."""
    order = scores.reshape(-1).sort(descending=True).indices
    mask = torch.zeros(scores.numel())
    mask[order[: math.ceil(scores.numel() / 2)]] = 1
    return mask.view_as(scores)


class Formulaic(nn.Module):
    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula = straight(formula)

    def forward(self, w: Tensor) -> Tensor:
        return self.formula(w)


class Masked(nn.Module):
    """Times a mask that never changes, of the larger half of the parts."""

    def __init__(self, sizes: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", top(sizes.detach()))

    def forward(self, w: Tensor) -> Tensor:
        return w * self.mask.reshape(self.mask.shape[: w.dim()])


class Scored(nn.Module):
    """Times the mask of trained scores."""

    def __init__(self, shape: tuple[int, ...], is_heads: bool = False) -> None:
        super().__init__()
        self.scores, self.top, self.is_heads = (
            nn.Parameter(torch.randn(shape)),
            straight(top),
            is_heads,
        )

    def forward(self, w: Tensor) -> Tensor:
        mask = self.top(self.scores)
        if self.is_heads:
            return w * mask.reshape(-1, 1).expand(-1, w.shape[1] // mask.numel()).reshape(1, -1)
        return w * mask.reshape(mask.shape[: w.dim()])


# --- the techniques -------------------------------------------------------------------------------


def quantized(bits: int, kind: str = "symmetric") -> dict[str, Any]:
    shared = {"quantization_type": kind, "quantize_weight_in_forward": True}
    return block("weight_quantization", shared, {"start_bits": bits, "target_bits": bits})


def block(technique: str, shared: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    shared = {"enabled": True, "schedule_offset": 0, **shared}
    groups = {"all": {"params": params, "modules": [r"^\d+$"]}}
    return {technique: {"shared_parameters": shared, "different_groups": groups}}


HALF = {"dense_ratio": 0.5}
TECHNIQUES: dict[str, tuple[dict[str, Any], Callable[[nn.Linear], nn.Module] | None]] = {
    "weights, 8 bits": (quantized(8), lambda layer: Formulaic(symmetric)),
    "weights, 8 bits, asymmetric": (
        quantized(8, "asymmetric"),
        lambda layer: Formulaic(asymmetric),
    ),
    "weights, ternary": (quantized(2), lambda layer: Formulaic(ternary)),
    "weights, binary": (quantized(1), lambda layer: Formulaic(binary)),
    "inputs, 8 bits": (block("activation_quantization", {}, {"bits": 8}), None),
    "sparse l1": (
        block("sparse_pruning", {"method": "l1"}, HALF),
        lambda layer: Masked(layer.weight.abs()),
    ),
    "sparse topk": (
        block("sparse_pruning", {"method": "topk"}, HALF),
        lambda layer: Scored(tuple(layer.weight.shape)),
    ),
    "row l1": (
        block("row_pruning", {"method": "l1"}, HALF),
        lambda layer: Masked(layer.weight.abs().sum(1, True)),
    ),
    "row topk": (
        block("row_pruning", {"method": "topk"}, HALF),
        lambda layer: Scored((layer.out_features, 1)),
    ),
    "head topk": (
        block("head_pruning", {"method": "topk", "num_heads": NUM_HEADS}, HALF),
        lambda layer: Scored((1, NUM_HEADS), is_heads=True),
    ),
}  # a channel is a row of a convolution


def make_fzero(technique: str | None, width: int, stage: int) -> Callable[[Tensor], object]:
    config: dict[str, Any] = {
        "train_batch_size": NUM_ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    if technique is not None:
        config["compression_training"] = TECHNIQUES[technique][0]
    step = fzero.make_train_step(make_model(width), config, loss_fn=loss_of)
    state = step.init()

    def train(x: Tensor) -> None:
        nonlocal state
        state, _ = step(state, x)

    return train


def make_plain(technique: str | None, width: int) -> Callable[[Tensor], object]:
    model = make_model(width)
    if technique is not None:
        make = TECHNIQUES[technique][1]
        for layer in (module for module in model if isinstance(module, nn.Linear)):
            if make is None:
                formula = straight(symmetric_rows)
                layer.register_forward_pre_hook(
                    lambda module, args, formula=formula: (formula(args[0]),)
                )
                continue
            module = make(layer)
            of_bias = (
                Masked(layer.weight.detach().abs().sum(1)) if technique == "row l1" else module
            )
            parametrize.register_parametrization(layer, "weight", module)
            # the mask of rows applies to the bias, too
            if technique is not None and technique.startswith("row"):
                layer.register_parameter("bias", nn.Parameter(layer.bias.detach()))
                parametrize.register_parametrization(layer, "bias", of_bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(x: Tensor) -> None:
        loss = loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return train


def measured(technique: str, width: int, num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds that the technique adds to a step: per contender one median for each
    of `NUM_BUILDS` builds.
    """
    makers: dict[str, Callable[[str | None], Callable[[Tensor], object]]] = {
        "stage 0": lambda name: make_fzero(name, width, 0),
        "stage 3": lambda name: make_fzero(name, width, 3),
        "parametrize": lambda name: make_plain(name, width),
    }
    medians: dict[str, list[float]] = {name: [] for name in makers}
    x = torch.randn(NUM_ROWS, width)
    for _ in range(NUM_BUILDS):
        pairs = {name: (make(None), make(technique)) for name, make in makers.items()}
        added: dict[str, list[float]] = {name: [] for name in makers}
        for round_ in range(WARM_UP + num_rounds):
            for name, (without, with_it) in pairs.items():
                # The two take turns at being first, so that neither always follows the other
                # contenders.
                order = (without, with_it) if round_ % 2 else (with_it, without)
                took = {step: processor_ms(step, x) for step in order}
                added[name].append(took[with_it] - took[without])
        for name, differences in added.items():
            medians[name].append(statistics.median(differences[WARM_UP:]))
    return medians


def processor_ms(step: Callable[[Tensor], object], x: Tensor) -> float:
    start = time.process_time()
    step(x)
    return 1e3 * (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--width", type=int, default=512, help="of the matrices (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=40, help="turns per build (default: %(default)s)"
    )
    parser.add_argument(
        "--only", choices=list(TECHNIQUES), action="append", help="these techniques (default: all)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/compression"), help="folder (default: %(default)s)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(
        title=(
            f"ms that a technique adds to a step of {NUM_LAYERS} Linear({arguments.width}, "
            f"{arguments.width})"
        ),
        box=box.SIMPLE,
    )
    for title in (
        "technique",
        "stage 0",
        "stage 3",
        "parametrize",
        "stage 0 / parametrize",
        "stage 3 / parametrize",
    ):
        table.add_column(title, justify="left" if title == "technique" else "right")
    results = {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for technique in arguments.only or TECHNIQUES:
        results[technique] = found = measured(technique, arguments.width, arguments.rounds)
        cells = [
            f"{statistics.median(ms):.2f} ± {(max(ms) - min(ms)) / 2:.2f}" for ms in found.values()
        ]
        stage_0, stage_3, plain = map(statistics.median, found.values())
        table.add_row(technique, *cells, f"{stage_0 / plain:.2f}", f"{stage_3 / plain:.2f}")
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
    print_report(table)


if __name__ == "__main__":
    main()
