"""`CsvMonitor`, `TensorBoardMonitor`: write the numbers of a training run to CSV files and to TensorBoard.

Events are DeepSpeed's: `Train/Samples/{train_loss, lr, loss_scale}` over the samples seen by all ranks. Rank 0 writes them.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fzero.config.config import ConfigError
from fzero.engine.config_keys import EngineKeys, Monitor

PREFIX = "Train/Samples/"


class CsvMonitor:
    """One file per event name, such as `output_path/job_name/Train_Samples_lr.csv`; each event appends a row."""

    def __init__(self, keys: Monitor) -> None:
        self.folder = Path(keys.output_path or "csv_monitor") / keys.job_name
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, events: Mapping[str, float], samples: int) -> None:
        for name, value in events.items():
            path = self.folder / f"{(PREFIX + name).replace('/', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if is_new:
                    rows.writerow(["step", PREFIX + name])
                rows.writerow([samples, value])


class TensorBoardMonitor:
    """torch's own writer, which needs the package `tensorboard`."""

    def __init__(self, keys: Monitor) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"tensorboard.enabled: needs the package tensorboard, which cannot be imported ({error}); pip install "
                f"tensorboard, or use csv_monitor"
            ) from None
        self._writer: Any = SummaryWriter(str(Path(keys.output_path or "runs") / keys.job_name))

    def write(self, events: Mapping[str, float], samples: int) -> None:
        for name, value in events.items():
            self._writer.add_scalar(PREFIX + name, value, samples)
        self._writer.flush()


def monitors(keys: EngineKeys) -> list[CsvMonitor | TensorBoardMonitor]:
    """The monitors that a configuration enables."""
    found: list[CsvMonitor | TensorBoardMonitor] = []
    if keys.csv_monitor.enabled:
        found.append(CsvMonitor(keys.csv_monitor))
    if keys.tensorboard.enabled:
        found.append(TensorBoardMonitor(keys.tensorboard))
    return found
