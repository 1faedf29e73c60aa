"""Monitors: functions that write the numbers of a training run to CSV files, TensorBoard, Weights & Biases and Comet.

Events are DeepSpeed's: `Train/Samples/{train_loss, lr, loss_scale}` over the samples seen by all ranks. Rank 0 writes them.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fzero.config.config import ConfigError
from fzero.engine.config_keys import CometKeys, EngineKeys, Monitor, WandbKeys

PREFIX = "Train/Samples/"

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""The packages of the monitors, by their keys."""

Write = Callable[[Mapping[str, float], int], None]
"""Writes values by the names of their events, and the number of samples so far."""


def monitors(keys: EngineKeys) -> list[Write]:
    """The monitors that a configuration enables."""
    made: list[Write] = []
    if keys.tensorboard.enabled:
        made.append(_tensorboard(keys.tensorboard))
    if keys.wandb.enabled:
        made.append(_wandb(keys.wandb))
    if keys.csv_monitor.enabled:
        made.append(_csv_monitor(keys.csv_monitor))
    if keys.comet.enabled:
        made.append(_comet(keys.comet))
    return made


def check_packages(keys: EngineKeys) -> None:
    """Raises where the package of an enabled monitor is missing: on every rank, before rank 0 writes alone.

    Raises:
        ConfigError: a package cannot be imported.
    """
    for key in PACKAGES:
        if getattr(keys, key).enabled:
            _package(key)


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
    module = _package("tensorboard", "torch.utils.tensorboard")
    writer = module.SummaryWriter(str(Path(keys.output_path or "runs") / keys.job_name))

    def write(events: Mapping[str, float], samples: int) -> None:
        for name, value in events.items():
            writer.add_scalar(event_of(name), value, samples)
        writer.flush()

    return write


def _wandb(keys: WandbKeys) -> Write:
    """One log call per event, by the samples so far."""
    wandb = _package("wandb")
    wandb.init(project=keys.project, group=keys.group, entity=keys.team)

    def write(events: Mapping[str, float], samples: int) -> None:
        for name, value in events.items():
            wandb.log({event_of(name): value}, step=samples)

    return write


def _comet(keys: CometKeys) -> Write:
    """One metric per event, once in `samples_log_interval` samples."""
    comet = _package("comet")
    experiment = comet.start(
        api_key=keys.api_key, project=keys.project, workspace=keys.workspace, experiment_key=keys.experiment_key,
        mode=keys.mode, online=keys.online,
    )  # fmt: skip
    if keys.experiment_name is not None:
        experiment.set_name(keys.experiment_name)
    last: dict[str, int] = {}  # samples when an event was logged

    def write(events: Mapping[str, float], samples: int) -> None:
        for name, value in events.items():
            if name not in last or samples - last[name] >= keys.samples_log_interval:
                last[name] = samples
                experiment.__internal_api__log_metric__(name=event_of(name), value=value, step=samples)

    return write


def _package(key: str, module: str | None = None) -> Any:
    """The module of a monitor's package.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return importlib.import_module(module or PACKAGES[key])
    except ImportError as error:
        package = PACKAGES[key]
        raise ConfigError(
            f"{key}.enabled: needs the package {package}, which cannot be imported ({error}); pip install {package}, or use "
            f"csv_monitor"
        ) from None
