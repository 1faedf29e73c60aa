"""Monitors: the writers of `fzero.profiling.writers` that a configuration enables.

Events are DeepSpeed's: `Train/Samples/{train_loss, lr, loss_scale}` over the samples
seen by all ranks. Rank 0 writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fzero.common.optional import MissingPackageError, package
from fzero.config.config import ConfigError
from fzero.deepspeed.engine.config_keys import CometKeys, EngineKeys
from fzero.profiling import writers
from fzero.profiling.writers import Writer

PREFIX = "Train/Samples/"

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""The packages of the monitors, by their keys."""


def monitors(keys: EngineKeys) -> list[Writer]:
    """The monitors that a configuration enables."""
    check_packages(keys)
    made: list[Writer] = []
    if keys.tensorboard.enabled:
        folder = Path(keys.tensorboard.output_path or "runs") / keys.tensorboard.job_name
        made.append(writers.tensorboard(folder, needed_by="tensorboard.enabled"))
    if (run := keys.wandb).enabled:
        made.append(
            writers.wandb(
                needed_by="wandb.enabled", project=run.project, group=run.group, entity=run.team
            )
        )
    if keys.csv_monitor.enabled:
        folder = Path(keys.csv_monitor.output_path or "csv_monitor") / keys.csv_monitor.job_name
        made.append(writers.csv_files(folder))
    if keys.comet.enabled:
        made.append(_comet(keys.comet))
    return [_with_events(writer) for writer in made]


def check_packages(keys: EngineKeys) -> None:
    """Raises where the package of an enabled monitor is missing: on every rank, before
    rank 0 writes alone.

    Raises:
        ConfigError: a package cannot be imported.
    """
    for key, name in PACKAGES.items():
        if getattr(keys, key).enabled:
            module = "torch.utils.tensorboard" if key == "tensorboard" else None
            try:
                package(name, needed_by=f"{key}.enabled", module=module, instead="use csv_monitor")
            except MissingPackageError as error:
                raise ConfigError(str(error)) from None


def event_of(name: str) -> str:
    """The event of a value: a script's own name has a slash already.

    >>> event_of("lr"), event_of("Eval/loss")
    ('Train/Samples/lr', 'Eval/loss')
    """
    return name if "/" in name else PREFIX + name


class MonitorMaster:
    """`engine.monitor`: the monitors that a configuration enables, for a script's own
    events.

    Attributes:
        enabled: whether there are any on this rank.
    """

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers, self.enabled = writers, bool(writers)

    def write_events(self, event_list: Sequence[tuple[str, float, int]]) -> None:
        """Writes events: name, value, and the number of samples so far."""
        for name, value, samples in event_list:
            for writer in self._writers:
                writer.write({name: float(value)}, samples)


def _with_events(writer: Writer) -> Writer:
    """A writer whose values have the names of DeepSpeed's events."""

    def named(values: Mapping[str, float], samples: int) -> None:
        writer.write({event_of(name): value for name, value in values.items()}, samples)

    return replace(writer, write=named)


def _comet(keys: CometKeys) -> Writer:
    return writers.comet(
        needed_by="comet.enabled",
        name=keys.experiment_name,
        interval=keys.samples_log_interval,
        api_key=keys.api_key,
        project=keys.project,
        workspace=keys.workspace,
        experiment_key=keys.experiment_key,
        mode=keys.mode,
        online=keys.online,
    )
