"""What the real DeepSpeed accepts and computes:
`python tests/support/deepspeed_values.py FILE` writes FILE as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NUMBERS: list[Any] = [-2, -1, 0, 1, 2, 0.5, "7", "x"]
LRS = ([0.1], [0.1, 0.2])
_CYCLE = {"cycle_first_step_size": 5, "decay_step_size": 2, "decay_lr_rate": 0.5}
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 6}),
    (
        "WarmupLR",
        {
            "warmup_num_steps": 6,
            "warmup_max_lr": 0.3,
            "warmup_min_lr": 0.01,
            "warmup_type": "linear",
        },
    ),
    ("WarmupLR", {"warmup_num_steps": 6, "warmup_max_lr": [0.3, 0.4], "warmup_min_lr": [0.0, 0.1]}),
    ("WarmupDecayLR", {"total_num_steps": 15, "warmup_num_steps": 4}),
    ("WarmupDecayLR", {"total_num_steps": 15, "warmup_num_steps": 4, "warmup_max_lr": [0.3, 0.1]}),
    ("WarmupCosineLR", {"total_num_steps": 15, "warmup_num_steps": 4, "warmup_min_ratio": 0.1}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.02, "lr_range_test_step_size": 3}),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": [0.02, 0.03],
            "lr_range_test_step_size": 3,
            "lr_range_test_staircase": True,
        },
    ),
    ("OneCycle", {"cycle_min_lr": 0.05, "cycle_max_lr": 0.5, **_CYCLE}),
    ("OneCycle", {"cycle_min_lr": [0.05, 0.01], "cycle_max_lr": [0.5, 0.1], **_CYCLE}),
]


def fits(params: dict[str, Any], lrs: list[float]) -> bool:
    """Whether no list among the parameters has another length than the groups."""
    return all(len(value) == len(lrs) for value in params.values() if isinstance(value, list))


def main(file: Path) -> None:
    import torch
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    blocks = {
        "": DeepSpeedZeroConfig,
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "offload_param": DeepSpeedZeroOffloadParamConfig,
    }
    accepted: list[list[Any]] = []
    for block, model in blocks.items():
        for name, field in model.model_fields.items():
            if field.annotation not in (int, float):
                continue
            for value in NUMBERS:
                try:
                    model(**{field.alias or name: value})
                    is_accepted = True
                except ValueError:
                    is_accepted = False
                accepted.append([block, field.alias or name, value, is_accepted])
    rates: list[list[Any]] = []
    for name, params in SCHEDULES:
        for lrs in LRS:
            if not fits(params, lrs):
                continue
            optimizer = torch.optim.AdamW(
                [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
            )
            scheduler = getattr(lr_schedules, name)(optimizer, **params)
            found = []
            for _ in range(20):
                found.append([group["lr"] for group in optimizer.param_groups])
                scheduler.step()
            rates.append([name, params, lrs, found])
    file.write_text(json.dumps({"accepted": accepted, "rates": rates}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
