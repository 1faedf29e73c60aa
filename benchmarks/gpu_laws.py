"""The laws of `gpu.py`: fzero on a device against a plain loop, and its placements and
stages against each other.
"""

import math
import shutil
from typing import Any

from gpu_scale import (
    PRECISIONS,
    SGD,
    Laws,
    Scale,
    difference,
    own_folder,
    plain_training,
    small_training,
)


def stages(scale: Scale) -> dict[str, Any]:
    """All stages in fp32, bf16 and fp16: fp32 against a plain loop, and the bits of
    stage 0.
    """
    laws, expected = Laws(), plain_training(scale.device)
    for precision, keys in PRECISIONS.items():
        first = small_training(scale.device, stage=0, precision=keys)
        # the norm of a flat buffer, by which gradients are clipped, rounds in other places
        if precision == "fp32":
            plain = difference(small_training(scale.device, stage=0, optimizer=SGD), expected)
            laws.check(
                "fp32, stage 0, SGD, largest difference of a weight from a plain loop", plain, 1e-6
            )
        laws.check(
            f"{precision}, stage 0, loss is finite",
            float(not all(map(math.isfinite, first["losses"]))),
            0,
        )
        for stage in (1, 2, 3):
            found = small_training(scale.device, stage=stage, precision=keys)
            laws.check(
                f"{precision}, stage {stage}, difference from stage 0", difference(found, first), 0
            )
    return laws.result()


def offload(scale: Scale) -> dict[str, Any]:
    """State in pinned host memory and in files, in stage 3, against state on the
    device.
    """
    laws = Laws()
    folder = own_folder("state")
    placements: dict[str, dict[str, Any]] = {
        "optimizer on the host": {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "all on the host": {
            f"offload_{x}": {"device": "cpu", "pin_memory": True} for x in ("optimizer", "param")
        },
        "optimizer in files": {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}},
        "all in files": {
            f"offload_{x}": {"device": "nvme", "nvme_path": str(folder)}
            for x in ("optimizer", "param")
        },
    }
    for precision in ("fp32", "bf16"):
        expected = small_training(scale.device, stage=3, precision=PRECISIONS[precision])
        for name, zero in placements.items():
            found = small_training(
                scale.device, stage=3, precision=PRECISIONS[precision], zero=zero
            )
            # The processor's AdamW rounds otherwise than the device's; in bf16 that may change a
            # weight's last bit. The gradient of a key's bias is rounding and nothing else, by which
            # AdamW divides.
            most = 1e-4 if precision == "fp32" else 2**-7
            found = difference(found, expected, but="qkv.bias")
            laws.check(f"{precision}, {name}, difference from the device", found, most)
    shutil.rmtree(folder, ignore_errors=True)
    return laws.result()


def compiled(scale: Scale) -> dict[str, Any]:
    """The step as one graph, and equal blocks compiled once, against the eager step."""
    laws = Laws()
    for stage in (0, 3):
        expected = small_training(scale.device, stage=stage, optimizer=SGD)
        for how in ("block", "step"):
            found = small_training(
                scale.device, stage=stage, optimizer=SGD, compile=how, compile_backend=scale.backend
            )
            laws.check(
                f'stage {stage}, compile="{how}", difference from eager',
                difference(found, expected),
                1e-5,
            )
    return laws.result()


def checkpoint(scale: Scale) -> dict[str, Any]:
    """Two steps, save, load, two steps are four steps, bit for bit."""
    laws, folder = Laws(), own_folder("saved")
    for stage in (0, 3):
        shutil.rmtree(folder, ignore_errors=True)
        precision = PRECISIONS["bf16"]
        expected = small_training(scale.device, stage=stage, precision=precision)
        found = small_training(scale.device, stage=stage, precision=precision, folder=folder)
        laws.check(
            f"bf16, stage {stage}, difference after a resume", difference(found, expected), 0
        )
    shutil.rmtree(folder, ignore_errors=True)
    return laws.result()
