"""Monitors: functions that write the numbers of a training run to CSV files and to TensorBoard.

Events are DeepSpeed's: `Train/Samples/{train_loss, lr, loss_scale}` over the samples seen by all ranks. Rank 0 writes them.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
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


def event_of(name: str) -> str:
    """The event of a value: a script's own name has a slash already.

    >>> event_of("lr"), event_of("Eval/loss")
    ('Train/Samples/lr', 'Eval/loss')
    """
    return name if "/" in name else PREFIX + name


class MonitorMaster:
    """`engine.monitor`: the monitors that a configuration enables, for a script's own events.

    Attributes:
        enabled: whether there are any on this rank.
    """

    def __init__(self, writers: Sequence[Write]) -> None:
        self._writers, self.enabled = writers, bool(writers)

    def write_events(self, event_list: Sequence[tuple[str, float, int]]) -> None:
        """Writes events: name, value, and the number of samples so far."""
        for name, value, samples in event_list:
            for write in self._writers:
                write({name: float(value)}, samples)


def _csv_monitor(keys: Monitor) -> Write:
    """One file per event name, such as `output_path/job_name/Train_Samples_lr.csv`; each event appends a row."""
    folder = Path(keys.output_path or "csv_monitor") / keys.job_name
    folder.mkdir(parents=True, exist_ok=True)

    def write(events: Mapping[str, float], samples: int) -> None:
        for name, value in events.items():
            event = event_of(name)
            path = folder / f"{event.replace('/', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if is_new:
                    rows.writerow(["step", event])
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
            writer.add_scalar(event_of(name), value, samples)
        writer.flush()

    return write
