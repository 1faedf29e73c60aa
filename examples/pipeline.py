"""A pipeline: the demo's GPT on two stages, one process each.

    python examples/pipeline.py
        two stages
    python examples/pipeline.py --stages 2 --ranks 4
        two stages, each on two ranks that divide the batch
    python examples/pipeline.py --order zero_bubble
        another order of forwards and backwards; the numbers stay the same
    make demo ARGS="--pipe 2"
        the same program

The model is a list of layers. Each rank builds the layers of its stage only. A step is
`state, metrics = step(state, batch)`, as without a pipeline, and has the same bits for
any number of stages. docs/pipelines.md explains the rest.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from gpt import GPT, NUM_BYTES, SIZES, Block, Embedding, Size, trigrams
from text import random_batch, read_text
from torch import Tensor, nn
from train_gpt import BITS, launch

import fzero
from fzero.pipeline import LayerSpec, PipelineModule, plan_order
from sharding import Mesh

MICRO_BATCH, NUM_MICRO_BATCHES = 2, 4  # windows per rank and micro-batch; micro-batches of a step


class Start(nn.Module):
    """The first layer: bytes to vectors."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.num_trigrams = size.num_trigrams
        self.byte = Embedding(NUM_BYTES, size.width, std=0.3)
        self.position = Embedding(size.context, size.width, std=0.3)
        self.trigram = Embedding(size.num_trigrams, size.width, std=0.3)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.byte(tokens_BT) + self.position(torch.arange(tokens_BT.shape[1]))
        return x_BTD + self.trigram(trigrams(tokens_BT, self.num_trigrams))


class End(nn.Module):
    """The last layer: vectors to logits of the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = nn.Linear(size.width, NUM_BYTES, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.head(self.norm(x_BTD))


def loss_of(logits: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


def layers(size: Size) -> list[LayerSpec]:
    return [
        LayerSpec(Start, size),
        *(LayerSpec(Block, size) for _ in range(size.depth)),
        LayerSpec(End, size),
    ]


def as_gpt(weights: dict[str, Tensor], size: Size) -> GPT:
    """The same model in one module, for sampling; `weights` are named after the numbers
    of the layers.
    """
    places = {
        "0": "",
        **{str(1 + index): f"blocks.{index}." for index in range(size.depth)},
        str(size.depth + 1): "",
    }
    model = GPT(size)
    model.load_state_dict(
        {places[name.partition(".")[0]] + name.partition(".")[2]: x for name, x in weights.items()}
    )
    return model


def train(
    num_stages: int, *, steps: int, size: Size, order: str = "1f1b", seed: int = 0
) -> list[float]:
    """The program of every rank; returns the bits per byte of each step."""
    world = fzero.join()
    mesh = Mesh.of(pipe=num_stages, data=world.size // num_stages)
    model = PipelineModule(
        layers(size),
        num_stages=num_stages,
        loss_fn=loss_of,
        base_seed=seed,
        partition_method="type:block",
    )
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": NUM_MICRO_BATCHES,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
    }
    step = fzero.make_train_step(model, config, mesh=mesh, pipeline=order, seed=seed)
    if step.rank == 0:
        print(plan_order(order, num_stages, NUM_MICRO_BATCHES))
        print(
            "layers of the stages:",
            ", ".join(f"{a}-{b - 1}" for a, b in zip(model.parts, model.parts[1:])),
        )
    state, losses, (text, _) = step.init(), [], read_text()
    started = time.perf_counter()
    while len(losses) < steps:
        where = {"seed": seed, "step": len(losses), "rank": step.data_rank}
        batch = random_batch(
            text, context=size.context, batch_size=MICRO_BATCH * NUM_MICRO_BATCHES, **where
        )
        state, metrics = step(
            state, batch
        )  # (tokens, targets): the first stage reads the tokens, the last one the targets
        losses.append(metrics.loss.item() * BITS)  # the same number on all ranks
        if step.rank == 0 and len(losses) % max(1, steps // 10) == 0:
            pace = (time.perf_counter() - started) / len(losses)
            recent = losses[-10:]
            print(
                f"step {len(losses)}/{steps}: {sum(recent) / len(recent):.3f} bits per byte, "
                f"{1000 * pace:.0f} ms a step"
            )
    weights = step.gather(state, to="rank0")
    if step.rank == 0:
        generator = torch.Generator().manual_seed(seed)
        sample = as_gpt(weights, size).generate(
            b"def ", num_bytes=100, temperature=0.8, generator=generator
        )
        print(sample.decode(errors="replace"))
    fzero.shutdown()
    return losses


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo's GPT as a pipeline.")
    parser.add_argument("--stages", type=int, default=2, help="number of stages")
    parser.add_argument(
        "--ranks",
        type=int,
        help="number of processes, a multiple of the stages (default: the stages)",
    )
    parser.add_argument("--order", default="1f1b", help="gpipe, 1f1b, zero_bubble or interleaved:2")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--size", default="small", choices=SIZES, help="size of the model")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse_options()
    if fzero.launched() is None:
        raise SystemExit(launch(options.ranks or options.stages))
    train(options.stages, steps=options.steps, size=SIZES[options.size], order=options.order)
