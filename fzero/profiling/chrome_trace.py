"""`save_trace`: the operators of a step over time, as a trace for chrome://tracing and
ui.perfetto.dev.
"""

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
    """Runs a step and writes a chrome trace of all its threads, with the names of
    fzero's own ranges (`fzero.common.profiler_ranges`).

    State and step do not change: two steps, a warm-up and the recorded one, run on a
    copy of the state; state in files is copied to files.

    *Collective:* every rank, like two steps; each writes its own file.

    Args:
        path: the path of this rank's file, a different name on each rank of a machine;
            its folder is created.
        step: of `make_train_step`.
        state, batch: as for a step; no iterator, because the batch is used twice.

    Raises:
        ValueError: as a step does.
        StoreError, MemoryError: there is no room for the copy of a state in files; the
            given state is unchanged.
        OSError: the file cannot be written; raised before the first step.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("ab").close()
    twin, _ = step(copied(state, step), batch)
    # All threads, because separate threads read and write files.
    with torch.profiler.profile(
        experimental_config=_ExperimentalConfig(profile_all_threads=True)
    ) as recorded:
        step(twin, batch)
        if step.device.type == "cuda":
            torch.cuda.synchronize(step.device)
    recorded.export_chrome_trace(str(path))
