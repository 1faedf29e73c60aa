"""`Writer`: writes named numbers to JSON lines, CSV files, TensorBoard, Weights &
Biases, Comet, trackio and MLflow.

`fzero.log` and the monitors of an engine use them. A writer takes values by name, and
the number of steps (for an engine: of samples) so far. Optional packages are imported
when a writer is made. `fzero.log` closes its writers, which ends the runs that they
began; a run that the script had begun itself is written to, and stays open.
"""

from __future__ import annotations

import csv
import fcntl
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fzero.common.optional import package


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Writer:
    """A place where numbers go.

    Attributes:
        write: takes values by their names, and the number of steps or samples so far.
        close: ends what the writer began.
    """

    write: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None] = _nothing


def json_lines(path: Path) -> Writer:
    """One JSON object per call, appended to a file: its line is complete before the
    call returns.

    JSON has no NaN and no infinity: such a value is written as a string, `"nan"`,
    `"inf"` or `"-inf"`. The file is locked until the writer is closed, because the
    lines of two logs could not be told apart.

    Raises:
        ValueError: another log writes to the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(
            f"log: folder must be written by one log at a time, and another one writes {path}; "
            f"pass another folder"
        ) from None
    except OSError:  # a file system without locks
        pass

    def write(values: Mapping[str, float], step: int) -> None:
        finite = {
            name: value if math.isfinite(value) else str(value) for name, value in values.items()
        }
        file.write(json.dumps({"step": step} | finite) + "\n")
        file.flush()

    return Writer(write, file.close)


def csv_files(folder: Path) -> Writer:
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

    return Writer(write)


def tensorboard(folder: Path, *, needed_by: str) -> Writer:
    """torch's own writer, which needs the package `tensorboard`."""
    writer = package(
        "tensorboard", needed_by=needed_by, module="torch.utils.tensorboard"
    ).SummaryWriter(str(folder))

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Writer(write, writer.close)


def wandb(*, needed_by: str, **of_run: Any) -> Writer:
    """A run of Weights & Biases, with one call per value.

    Args:
        of_run: arguments of `wandb.init`.
    """
    module = package("wandb", needed_by=needed_by)
    is_ours = module.run is None
    if is_ours:
        module.init(**of_run)

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            module.log({name: value}, step=step)

    return Writer(write, module.finish if is_ours else _nothing)


def comet(*, needed_by: str, name: str | None, interval: int, **of_run: Any) -> Writer:
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

    return Writer(write)


def trackio(*, needed_by: str, **of_run: Any) -> Writer:
    """A run of trackio.

    Args:
        of_run: arguments of `trackio.init`.
    """
    module = package("trackio", needed_by=needed_by)
    module.init(**of_run)
    return Writer(lambda values, step: module.log(dict(values), step=step), module.finish)


def mlflow(*, needed_by: str, project: str) -> Writer:
    """A run of MLflow, in the experiment of this name if the script has not begun one."""
    module = package("mlflow", needed_by=needed_by)
    is_ours = module.active_run() is None
    if is_ours:
        module.set_experiment(project)
        module.start_run()
    return Writer(
        lambda values, step: module.log_metrics(dict(values), step=step),
        module.end_run if is_ours else _nothing,
    )
