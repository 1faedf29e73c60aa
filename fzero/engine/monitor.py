"""Monitors: functions that write the numbers of a training run to CSV files and to TensorBoard.

Events are DeepSpeed's: `Train/Samples/{train_loss, lr, loss_scale}` over the samples seen by all ranks. Rank 0 writes them.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fzero.config.config import ConfigError
from fzero.engine.config_keys import EngineKeys, Monitor

PREFIX = "Train/Samples/"

Write = Callable[[Mapping[str, float], int], None]
"""Writes values by the names of their events, and the number of samples so far."""


def monitors(keys: EngineKeys) -> list[Write]:
    """The monitors that a configuration enables."""
    enabled = ((_csv_monitor, keys.csv_monitor), (_tensorboard, keys.tensorboard))
    return [monitor(block) for monitor, block in enabled if block.enabled]


def _csv_monitor(keys: Monitor) -> Write:
    """One file per event name, such as `output_path/job_name/Train_Samples_lr.csv`; each event appends a row."""
    folder = Path(keys.output_path or "csv_monitor") / keys.job_name
    folder.mkdir(parents=True, exist_ok=True)

    def write(events: Mapping[str, float], samples: int) -> None:
        for name, value in events.items():
            path = folder / f"{(PREFIX + name).replace('/', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if is_new:
                    rows.writerow(["step", PREFIX + name])
                rows.writerow([samples, value])

    return write


def _tensorboard(keys: Monitor) -> Write:
    """torch's own writer, which needs the package `tensorboard`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"tensorboard.enabled: needs the package tensorboard, which cannot be imported ({error}); pip install "
            f"tensorboard, or use csv_monitor"
        ) from None
    writer: Any = SummaryWriter(str(Path(keys.output_path or "runs") / keys.job_name))

    def write(events: Mapping[str, float], samples: int) -> None:
        for name, value in events.items():
            writer.add_scalar(PREFIX + name, value, samples)
        writer.flush()

    return write
