"""What the real DeepSpeed computes for tests/data:
`python tests/support/deepspeed_data.py FOLDER` writes FOLDER/numbers.json and an
analyzer's files, and reads the files that a test has written there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CURRICULA = [
    ("fixed_linear", {"total_curriculum_step": 37, "difficulty_step": 5}),
    ("fixed_root", {"total_curriculum_step": 41, "difficulty_step": 8, "root_degree": 3}),
    ("fixed_discrete", {"difficulty": [9, 20, 71], "max_step": [4, 30]}),
]
LTD: dict[str, Any] = {
    "total_layer_num": 24, "random_ltd_layer_num": 22, "global_batch_size": 16,
    "layer_token_lr_schedule": {"enabled": False},
    "random_ltd_schedule": {"min_value": 128, "max_value": 1020, "schedule_type": "fixed_linear",
                            "schedule_config": {"require_steps": 40, "seq_per_step": 8}},
}  # fmt: skip
STEPS = [*range(60), 59]
VALUES = [(index * 37) % 11 for index in range(50)]
LENGTHS = [(index * 13) % 29 + 1 for index in range(60)]


def curriculum(kind: str, numbers: dict[str, Any]) -> dict[str, Any]:
    return {
        "min_difficulty": 9,
        "max_difficulty": 71,
        "schedule_type": kind,
        "schedule_config": numbers,
    }


def main(folder: Path) -> None:
    import torch
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
    from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler
    from deepspeed.runtime.data_pipeline.data_sampling import variable_batch_size_and_lr as variable
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset
    from deepspeed.runtime.progressive_layer_drop import ProgressiveLayerDrop

    found: dict[str, Any] = {"curricula": [], "ltd": [], "theta": [], "rows": {}}
    for kind, numbers in CURRICULA:
        scheduler = CurriculumScheduler(curriculum(kind, dict(numbers)))
        found["curricula"].append(
            [scheduler.get_current_difficulty(), *map(scheduler.update_difficulty, range(1, 60))]
        )
    ltd = RandomLTDScheduler(dict(LTD))
    for n in STEPS:
        ltd.update_seq(n)
        found["ltd"].append(ltd.state_dict())
    found["total"] = RandomLTDScheduler(dict(LTD)).get_total_layer_tokens(30)
    drop = ProgressiveLayerDrop(0.3, 0.01)
    for n in range(50):
        drop.update_state(n)
        found["theta"].append(float(drop.get_theta()))
    analyzer = DataAnalyzer(
        VALUES,
        batch_size=8,
        metric_names=["mod", "total"],
        metric_functions=[
            torch.as_tensor,
            lambda batch: torch.stack([batch.sum(), batch.square().sum()]),
        ],
        metric_types=["single_value_per_sample", "accumulate_value_over_samples"],
        metric_dtypes=[torch.int64] * 2,
        save_path=str(folder / "theirs"),
    )
    analyzer.run_map()
    analyzer.run_reduce()
    for path in folder.glob("ours/*/*.idx"):
        rows = MMapIndexedDataset(str(path.with_suffix("")), skip_warmup=True)
        found["rows"][path.stem] = [
            str(rows.dtype.__name__),
            [rows[i].tolist() for i in range(len(rows))],
        ]
    packed = variable.batch_by_seqlens(
        LENGTHS, 64, effective_batch_size=2, sequence_picking_order="seqlen"
    )
    found["packed"] = json.loads(json.dumps(packed, default=int))
    (folder / "numbers.json").write_text(json.dumps(found, default=int))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
