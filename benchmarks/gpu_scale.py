"""What the rows of `gpu.py` share: how large they are, a small training, and checks.

torch is imported inside of the functions, since the command must be able to say that it
is missing.
"""

import gc
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEGA = 1 << 20


def replace_file(path: Path, text: str) -> None:
    """Writes a file that is whole at every moment."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def keep(result: dict[str, Any]) -> None:
    """Hands a row's result, or what there is of it, to the process that started it."""
    begun = {"begun": float(os.environ["GPU_BEGUN"])}
    replace_file(Path(os.environ["GPU_ROW"]), json.dumps(begun | result))


def own_folder(name: str) -> Path:
    """A folder for what a row writes, beside those of rows that run at the same time."""
    return Path(os.environ["GPU_OUT"]) / "rows" / f"{name}-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the rows are: on a card, or `--tiny`."""

    device: str
    width: int
    num_blocks: int
    context: int
    num_rows: int
    num_steps: int
    """Steps of one round; the time of a step is the median round's."""
    product: int
    """The rows of the square matrices whose product measures the card's rate."""
    host: tuple[tuple[int, int], ...]
    """The widths and numbers of blocks of models whose state is in host memory."""
    host_micro_steps: int
    backend: str
    """Of fzero's compiled steps."""

    @property
    def on_card(self) -> bool:
        return self.device == "cuda"


HOST = ((2048, 26), (2560, 38), (4096, 34), (4096, 40))  # 1.3B, 3.0B, 6.8B, 8.1B parameters
CARD = Scale("cuda", 2048, 26, 2048, 8, 4, 8192, HOST, 2, "inductor")
TINY = Scale("cpu", 64, 2, 32, 2, 1, 256, ((64, 2), (128, 2)), 2, "aot_eager")


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def repeatable() -> None:
    """Makes operators give the same bits each time: those of attention that are fused
    add in another order each time.
    """
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)  # cuBLAS reads CUBLAS_WORKSPACE_CONFIG
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def forget() -> None:
    """Gives back what an earlier row of this process held."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # PyTorch keeps pinned memory that is free
        torch.cuda.reset_peak_memory_stats()


ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def small_training(
    device: str, num_steps: int = 4, folder: Path | None = None, rank: int = 0, **how: Any
) -> dict[str, Any]:
    """The losses and the weights of a small GPT, trained by fzero; with a folder it is
    saved and resumed half-way.
    """
    import torch
    from gpt import GPT, Size, make_batch

    import fzero

    size = Size(width=64, num_blocks=3, num_heads=4, context=32, num_rows=4)
    zero, precision, optimizer = (
        how.pop("zero", {}),
        how.pop("precision", {}),
        how.pop("optimizer", ADAMW),
    )
    cfg = {
        "train_micro_batch_size_per_gpu": size.num_rows,
        "optimizer": optimizer,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": how.pop("stage"), "stage3_param_persistence_threshold": 0}
        | zero,
    }

    def made() -> Any:
        torch.manual_seed(0)
        return fzero.make_train_step(GPT(size).to(device), cfg | precision, **how)

    step = made()
    state, losses = step.init(), []
    for number in range(num_steps):
        if folder is not None and number == num_steps // 2:
            fzero.save(state, folder, step=step)
            step = made()
            state = fzero.load(folder, step=step).state
        batch = tuple(x.to(device) for x in make_batch(size, step=number, rank=rank))
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    return {
        "losses": [float(x) for x in losses],
        "weights": {k: x.cpu() for k, x in step.gather(state).items()},
    }


def plain_training(device: str, num_steps: int = 4) -> dict[str, Any]:
    """The same training by a loop without fzero, in fp32, with SGD: AdamW divides
    rounding by rounding where a gradient is 0.
    """
    import torch
    from gpt import GPT, Size, make_batch

    size = Size(width=64, num_blocks=3, num_heads=4, context=32, num_rows=4)
    torch.manual_seed(0)
    model = GPT(size).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(num_steps):
        loss = model(*(x.to(device) for x in make_batch(size, step=number, rank=0)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return {
        "losses": [float(x) for x in losses],
        "weights": {k: x.cpu() for k, x in model.state_dict().items()},
    }


def difference(found: dict[str, Any], expected: dict[str, Any], but: str = "-") -> float:
    """The largest difference of two weights, `but` for those of a name; NaN if one has
    a NaN, which `max` may pass over.
    """
    import torch

    named = [(x, expected["weights"][k]) for k, x in found["weights"].items() if but not in k]
    return float(torch.stack([(x.float() - y.float()).abs().max() for x, y in named]).max())


class Laws:
    """The checks of a part: by name, what was found and whether that is right."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def check(self, name: str, found: float, most: float) -> None:
        self.rows.append(
            {"name": name, "found": found, "most": most, "passed": bool(found <= most)}
        )

    def result(self) -> dict[str, Any]:
        return {"passed": all(row["passed"] for row in self.rows), "laws": self.rows}


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
