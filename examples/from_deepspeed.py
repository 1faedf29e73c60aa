"""A training script that was written for DeepSpeed, and runs on fzero. One line
changed:

    - import deepspeed
    + import fzero.deepspeed as deepspeed

    fzero --num_procs 2 examples/from_deepspeed.py --deepspeed_config examples/ds_config.json
        before: deepspeed --num_gpus 2 …
    fzero --num_procs 2 examples/from_deepspeed.py --deepspeed_config
        examples/ds_config.json --steps 80 continues

It has the usual parts of such scripts: a command line with `add_config_arguments`, a
model that returns logits, the script's own loss between `engine(...)` and
`engine.backward(...)`, a dataset for `training_data`, checkpoints from which it
resumes, an evaluation, and a file with the weights. The model learns to add: it reads
the digits of two numbers and predicts those of their sum. docs/deepspeed.md lists the
differences.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fzero.deepspeed as deepspeed

NUM_DIGITS, WIDTH = 2, 96
PLACES = 10 ** torch.arange(NUM_DIGITS + 1)  # 1, 10, 100


class Sums(Dataset):
    """Pairs of numbers, as digits, and the digits of their sums."""

    def __init__(self, start: int, stop: int, step: int) -> None:
        self.pairs = range(start, stop, step)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        numbers = torch.tensor(divmod(self.pairs[index], 10**NUM_DIGITS))
        digits = numbers[:, None] // PLACES[:NUM_DIGITS] % 10
        return digits.flatten(), numbers.sum() // PLACES % 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(0.5 * torch.randn(2 * NUM_DIGITS, 10, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 10 * (NUM_DIGITS + 1))

    def forward(self, digits: Tensor) -> Tensor:
        x = self.embed[torch.arange(2 * NUM_DIGITS, device=digits.device), digits].sum(dim=1)
        return self.head(self.blocks(x)).unflatten(-1, (NUM_DIGITS + 1, 10))


def evaluate(engine: deepspeed.DeepSpeedEngine, data: Dataset) -> float:
    """The fraction of digits that are right."""
    engine.eval()
    digits, sums = (
        torch.stack(column).to(engine.device)
        for column in zip(*(data[i] for i in range(len(data))))
    )
    with torch.no_grad():
        right = (engine(digits).argmax(-1) == sums).float().mean().item()
    engine.train()
    return right


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60, help="updates until the end")
    parser.add_argument(
        "--out", type=Path, default=Path("out/adder"), help="checkpoints and weights"
    )
    args = deepspeed.add_config_arguments(parser).parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=Adder(), training_data=Sums(0, 10 ** (2 * NUM_DIGITS), 3)
    )
    path, _ = engine.load_checkpoint(args.out)  # (None, None) the first time
    if path is not None and engine.global_rank == 0:
        print(f"goes on from {path}")

    batches = deepspeed.utils.RepeatingLoader(loader)
    while engine.global_steps < args.steps:
        digits, sums = (x.to(engine.device) for x in next(batches))
        logits = engine(digits)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), sums.flatten())
        engine.backward(loss)
        engine.step()

    right = evaluate(engine, Sums(1, 10 ** (2 * NUM_DIGITS), 50))
    engine.save_checkpoint(args.out, client_state={"right": right})
    engine.save_16bit_model(args.out)
    if engine.global_rank == 0:
        print(
            f"after {engine.global_steps} steps {right:.1%} of the digits of unseen sums are right"
        )


if __name__ == "__main__":
    main()
