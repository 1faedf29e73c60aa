"""Writers: functions that write named numbers to JSON lines, CSV files, TensorBoard, Weights & Biases, Comet, trackio and MLflow.

`fzero.log` and the monitors of an engine use them. A writer takes values by name, and the number of steps (for an engine:
of samples) so far. Optional packages are imported when a writer is made.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fzero.common.optional import package

Write = Callable[[Mapping[str, float], int], None]
"""Writes values by their names, and the number of steps or samples so far."""


def json_lines(path: Path, *, key: str = "step") -> Write:
    """One JSON object per call, appended to a file: its line is complete before the call returns.

    JSON has no NaN and no infinity: such a value is written as a string, `"nan"`, `"inf"` or `"-inf"`.

    Args:
        key: the name of the number of steps.
    """
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(values: Mapping[str, float], step: int) -> None:
        finite = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({key: step} | finite) + "\n")

    return write


def csv_files(folder: Path) -> Write:
    """One file per name, such as `Train_Samples_lr.csv`; each value appends a row."""
    folder.mkdir(parents=True, exist_ok=True)

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            path = folder / f"{name.replace('/', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if is_new:
                    rows.writerow(["step", name])
                rows.writerow([step, value])

    return write


def tensorboard(folder: Path, *, needed_by: str) -> Write:
    """torch's own writer, which needs the package `tensorboard`."""
    writer = package("tensorboard", needed_by=needed_by, module="torch.utils.tensorboard").SummaryWriter(str(folder))

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def wandb(*, needed_by: str, **of_run: Any) -> Write:
    """A run of Weights & Biases, with one call per value.

    Args:
        of_run: arguments of `wandb.init`.
    """
    module = package("wandb", needed_by=needed_by)
    module.init(**of_run)

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            module.log({name: value}, step=step)

    return write


def comet(*, needed_by: str, name: str | None, interval: int, **of_run: Any) -> Write:
    """An experiment of Comet; a value is written once in `interval` steps.

    Args:
        of_run: arguments of `comet_ml.start`.
    """
    experiment = package("comet_ml", needed_by=needed_by).start(**of_run)
    if name is not None:
        experiment.set_name(name)
    last: dict[str, int] = {}  # the step at which a value was written

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            if name not in last or step - last[name] >= interval:
                last[name] = step
                experiment.__internal_api__log_metric__(name=name, value=value, step=step)

    return write


def trackio(*, needed_by: str, **of_run: Any) -> Write:
    """A run of trackio.

    Args:
        of_run: arguments of `trackio.init`.
    """
    module = package("trackio", needed_by=needed_by)
    module.init(**of_run)
    return lambda values, step: module.log(dict(values), step=step)


def mlflow(*, needed_by: str, project: str) -> Write:
    """A run of MLflow in the experiment of this name."""
    module = package("mlflow", needed_by=needed_by)
    module.set_experiment(project)
    module.start_run()
    return lambda values, step: module.log_metrics(dict(values), step=step)
