"""The parts of `gpu.py`, in the order of their worth: rows in lanes, and the seconds of
each.

A row is a function of a `Scale` that returns a dictionary for the results: `passed` and
what was measured, or `not_run` and why. The rows of a lane run one after the other, in
one process as long as none fails; lanes run beside each other as far as the machine has
cores. Speeds have a lane to themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import gpu_host as host
import gpu_laws as laws
import gpu_probes as probes
import gpu_speed as speed
from gpu_ranks import absent, between_ranks, hang
from gpu_scale import Scale
from gpu_tests import run_tests


class Row(NamedTuple):
    """`seconds` end it if it hangs; they are several times what it should take."""

    run: Callable[[Scale], dict[str, Any]]
    seconds: int
    lane: str = "0"


@dataclass(frozen=True, slots=True)
class Part:
    """`seconds`: of a call with this part alone, on a card; what is not reached then is
    for the next call.
    """

    seconds: int
    about: str
    rows: dict[str, Row]


LAWS = {
    # Each lane begins with what decides most. Without compilers a probe takes a second or two.
    "the card and its rates": Row(probes.card, 30, "eager"),
    "an eager step": Row(probes.first_step, 30, "eager"),
    "NCCL: group and collectives": Row(probes.collectives, 45, "ranks"),
    "compile=block": Row(probes.compiled("block"), 90, "compile"),
    "streams of shard transfers": Row(probes.transfers, 30, "eager"),
    "no wait for the device in a step": Row(probes.waits, 30, "eager"),
    "fp16 overflow": Row(probes.overflow, 30, "eager"),
    "training in a group of one rank": Row(probes.joined_training, 45, "ranks"),
    "pinned pools": Row(probes.pinned, 30, "eager"),
    "fused AdamW and foreach clipping": Row(probes.kernels, 30, "eager"),
    "random numbers of the device": Row(probes.random_numbers, 30, "eager"),
    "activation checkpointing": Row(probes.recomputed, 30, "eager"),
    "gradient accumulation": Row(probes.accumulated, 30, "eager"),
    "ranks in lockstep": Row(probes.lockstep, 40, "simulated"),
    "ranks as a dimension": Row(probes.as_dimension, 60, "simulated"),
    "generation": Row(probes.generation, 30, "simulated"),
    "out of memory": Row(probes.out_of_memory, 45, "simulated"),
    "compile=step": Row(probes.compiled("step"), 100, "compile"),
    "FlexAttention": Row(probes.flex_attention, 60, "simulated"),
    "a rank that stays away, NCCL": Row(absent, 70, "ranks"),
    "stages": Row(laws.stages, 60, "laws"),
    "offload": Row(laws.offload, 80, "laws"),
    "checkpoint": Row(laws.checkpoint, 40, "laws"),
    "between ranks": Row(between_ranks, 60, "ranks"),
    "a rank that stays away": Row(hang, 60, "ranks"),
    "compiled": Row(laws.compiled, 120, "compile"),
    # They fill the compiler's cache for --speed, while the laws leave cores to it.
    "a graph of the large model, stage 0": Row(speed.fzero_contender(0, "step"), 140, "graph 0"),
    "a graph of the large model, stage 3": Row(speed.fzero_contender(3, "step"), 140, "graph 3"),
}
PLAIN, BLOCK, GRAPH = "plain, eager", "plain, blocks compiled", "plain, blocks compiled, CUDA graph"
SPEED = {
    PLAIN: Row(speed.plain(), 40),
    "fzero, stage 0": Row(speed.fzero_contender(0), 40),
    "fzero, stage 3": Row(speed.fzero_contender(3), 40),
    BLOCK: Row(speed.plain(compiled=True), 60),
    "fzero, stage 0, block": Row(speed.fzero_contender(0, "block"), 60),
    "fzero, stage 3, block": Row(speed.fzero_contender(3, "block"), 60),
    "fzero, stage 2": Row(speed.fzero_contender(2), 40),
    "FSDP2": Row(speed.fsdp2(compiled=False), 40),
    "FSDP2, blocks compiled": Row(speed.fsdp2(compiled=True), 60),
    "fzero, stage 0, step": Row(speed.fzero_contender(0, "step"), 120),
    "fzero, stage 3, step": Row(speed.fzero_contender(3, "step"), 150),
    "fzero, stage 1": Row(speed.fzero_contender(1), 40),
    "fzero, stage 1, block": Row(speed.fzero_contender(1, "block"), 60),
    "fzero, stage 2, block": Row(speed.fzero_contender(2, "block"), 60),
    "fzero, stage 1, step": Row(speed.fzero_contender(1, "step"), 120),
    "fzero, stage 2, step": Row(speed.fzero_contender(2, "step"), 120),
    # on one card its capture ended the process
    GRAPH: Row(speed.plain(compiled=True, graph=True), 60),
    "plain, eager, CUDA graph": Row(speed.plain(graph=True), 40),
    "idle times, plain": Row(speed.gaps(partial(speed.plain_contender, compiled=False)), 40),
    "idle times, fzero, stage 0": Row(speed.gaps(partial(speed.fzero_step, stage=0)), 40),
    "idle times, fzero, stage 3": Row(speed.gaps(partial(speed.fzero_step, stage=3)), 40),
    "idle times, fzero, stage 3, block": Row(
        speed.gaps(partial(speed.fzero_step, stage=3, how="block")), 40
    ),
    "planned peaks": Row(speed.planned, 120, "beside"),
}
NATIVE = "1.3B, state on the device"
HOST_STATE = {
    "rates of the host": Row(host.rates, 30),
    NATIVE: Row(host.native, 40),
    "1.3B, optimizer on the host": Row(host.on_host(0), 60),
    "6.8B, optimizer on the host": Row(host.on_host(2), 120),
    "3.0B, optimizer on the host": Row(host.on_host(1), 80),
    "8.1B, optimizer on the host": Row(host.on_host(3), 120),
    "6.8B, all on the host": Row(host.on_host(2, "all on the host"), 120),
}
PARTS = {
    "laws": Part(150, "which paths work at all, and fzero's laws on a device", LAWS),
    "speed": Part(200, "tokens per second of one GPT, beside a plain loop and FSDP2", SPEED),
    "host-state": Part(150, "state in host memory, and the largest model that trains", HOST_STATE),
    "tests": Part(200, "laws of tests/ on the device", {"tests": Row(run_tests, 200)}),
}
TOTAL = 590
"""Seconds of a call with all parts: ten minutes less what it takes to end. Each part
then has its share.
"""
GOALS = {"of the best plain loop": 1.0, "idle": 0.03, "host state": 0.6, "planned peak": 0.05}
