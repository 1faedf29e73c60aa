"""Laws of a job as a whole: what it sends, what it holds, and how it ends."""

from __future__ import annotations

import gc
import os
import socket
import struct
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from fzero.testing.conformance.averages import ADAMW, SGD
from fzero.testing.conformance.laws import DDP, FEATURES, TORCH, ZERO, Broken, Lab, law
from fzero.testing.conformance.models import OUTPUTS, Net
from fzero.testing.conformance.training import Setup


class Wide(nn.Module):
    """Large enough that what a step says of itself is small beside what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(FEATURES, 128)
        self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(16))
        self.outlet = nn.Linear(128, OUTPUTS)

    def forward(self, x_BF: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x_BF))
        for block in self.blocks:
            x = torch.tanh(block(x))
        y: Tensor = self.outlet(x)
        return y


WIDE = replace(ADAMW, model=Wide)


def nbytes_sent() -> int:
    """What this process has sent on its open TCP sockets (Linux: tcpi_bytes_acked)."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue  # a copy of it would become no socket, and stay open
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                about = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue  # not a TCP socket
        total += struct.unpack_from("Q", about, 120)[0]
    return total


@law(
    "each rank sends 2Ψ in stages 0 to 2, and 3Ψ in stage 3 (§7), times (W-1)/W",
    ZERO,
    needs_processes=True,
)
def bytes_sent_are_those_of_the_paper(lab: Lab) -> None:
    trainer = lab.trained(WIDE, range(3))
    numel = sum(p.numel() for p in Wide().parameters())
    lab.others()
    before = nbytes_sent()
    lab.trained(WIDE, range(3, 5), trainer)
    lab.others()
    time.sleep(0.2)  # until all is acknowledged
    sent = (nbytes_sent() - before) / 2 / (4 * numel) * lab.world_size / (lab.world_size - 1)
    expected = 3 if lab.stage == 3 else 2
    if not expected * 0.9 < sent < expected * 1.05:
        raise Broken(f"a rank sends {sent:.2f} Ψ per update, must be {expected} Ψ")


@law(
    "stage 3 holds 1/W of parameters, gradients and states (§5, figure 1)",
    ZERO,
    needs_processes=True,
)
def memory_is_that_of_the_paper(lab: Lab) -> None:
    numel = sum(p.numel() for p in Wide().parameters())
    gc.collect()
    before = held_nbytes()
    trainer = lab.trained(WIDE, range(2))
    gc.collect()
    held = (held_nbytes() - before) / (4 * numel)
    share = 1 / lab.world_size
    # weights, gradients, and AdamW's two moments, in fp32; gradients may be dropped
    most = {0: 4, 1: 2 + 2 * share, 2: 1 + 3 * share, 3: 4 * share}[lab.stage]
    del trainer
    if held > most * 1.05 + 3 * 2**16 / numel:  # three buckets of the size that adapters ask for
        raise Broken(f"a rank holds {held:.2f} Ψ between updates, must be at most {most:.2f} Ψ")


def held_nbytes() -> int:
    """Bytes of the tensors that Python sees, each memory once. Those that a capture has
    left have none.
    """
    found = {}
    for one in gc.get_objects():
        if issubclass(type(one), Tensor) and not isinstance(one, FakeTensor | FunctionalTensor):
            for part in parts_of(one):
                storage = part.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory in one: of a DTensor its local part; a gradient, too."""
    local = getattr(tensor, "_local_tensor", tensor)
    grad = tensor.grad if tensor.is_leaf else None
    return [local.detach(), *(() if grad is None else parts_of(grad))]


@law("a training that is dropped gives its memory back", f"torch.Tensor, memory, {TORCH}")
def memory_returns(lab: Lab) -> None:
    lab.trained(WIDE, range(1))  # what is kept once for all jobs is kept now
    gc.collect()
    before = held_nbytes()
    for _ in range(2):
        trainer = lab.trained(WIDE, range(2))
        del trainer
        gc.collect()
    numel = sum(p.numel() for p in Wide().parameters())
    left = (held_nbytes() - before) / (4 * numel)
    if left > 0.1:
        raise Broken(f"{left:.2f} Ψ are still held after the training was dropped")


def dies_on_the_last_rank(model: nn.Module, batch: Tensor) -> Tensor:
    """Ends the process at a batch of one row."""
    if len(batch) == 1:
        os._exit(9)
    y: Tensor = model(batch)
    return y.square().mean()


@law(
    "the others end with an error that names the rank which did not respond",
    f"torch.distributed.monitored_barrier, {TORCH}",
    needs_processes=True,
    num_lost=1,
)
def a_rank_that_dies_is_named(lab: Lab) -> None:
    trainer = lab.trained(replace(SGD, loss=dies_on_the_last_rank), range(2))
    batches = [*lab.batches(2)[:-1], lab.batches(2, rows=1)[-1]]
    try:
        trainer.step(batches)
        trainer.step(lab.batches(3))  # a system may notice in the next collective
    except Exception as error:
        if f"rank {lab.world_size - 1}" in str(error).lower():
            return
        raise Broken(f"the error names no rank: {type(error).__name__}: {error}") from None
    raise Broken("training goes on without the rank")


class Narrow(Net):
    """Of another shape on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            self.outlet = nn.Linear(self.inlet.out_features, OUTPUTS, bias=False)


@law("ranks whose parameters differ in shape are refused on all ranks", DDP, needs_processes=True)
def another_model_on_one_rank_is_refused(lab: Lab) -> None:
    setup = Setup(Narrow)
    try:
        lab.trained(setup, range(1))
    except (RuntimeError, ValueError):
        return
    raise Broken("a model of another shape on the last rank is trained without an error")
