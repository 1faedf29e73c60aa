"""When does what run in a step, operator by operator? A trace that chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig

from fzero.resharding.place import copied
from fzero.state import TrainState
from fzero.step import TrainStep


def save_trace(path: str | Path, step: TrainStep, state: TrainState[Tensor], batch: Any) -> None:
    """Runs a step and writes what ran, in all threads, with the names of fzero's own parts
    (`fzero.common.profiler_ranges`), as a chrome trace.

    State and step stay as they are: the steps (one that does not count, and one that does) run on a copy of the
    state, which is in files where that is.

    *Collective:* every rank, like two steps; each writes its own file.

    Args:
        path: of this rank's file, which must have another name on each rank of a machine; its folder is made.
        step: of `make_train_step`.
        state, batch: as for a step; not an iterator, for the batch is used twice.

    Raises:
        ValueError: what a step raises.
        StoreError, MemoryError: there is no room for the copy of a state in files; the state given is as it was.
        OSError: the file cannot be written; told before anything runs.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("ab").close()
    twin, _ = step(copied(state, step), batch)
    # Of all threads, for files are read and written by threads of their own.
    with torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as recorded:
        step(twin, batch)
        if step.device.type == "cuda":
            torch.cuda.synchronize(step.device)
    recorded.export_chrome_trace(str(path))
