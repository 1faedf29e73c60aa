"""`import_deepspeed`, `convert_deepspeed`: continue in fzero from a checkpoint of
DeepSpeed.

    state, client, path = fzero.deepspeed.import_deepspeed("checkpoints", step=step)     # on the ranks of a job, of any number
    fzero.deepspeed.convert_deepspeed("checkpoints", "out")                # as a checkpoint of fzero, in one process

Both read checkpoints of ZeRO 0 to 3 and universal ones, saved on any number of ranks.
The files are read under the keys of fzero's own checkpoints, so that the rules of
`fzero.load` apply. A rank reads the ranges that it holds.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from fzero.checkpoint import folders as files
from fzero.checkpoint.dcp_format import write
from fzero.checkpoint.layout import StoredSlice, nbytes_of
from fzero.checkpoint.loading import Loaded, Saved, load_by_ranks, restored
from fzero.checkpoint.saving import FEW_BYTES, Contents, content_of, publish
from fzero.deepspeed.formats.files import find
from fzero.deepspeed.formats.source import DeepSpeedFiles
from fzero.resharding.reshard import AnyStep
from fzero.step import TrainStep
from fzero.storage.state_files import StateFiles
from sharding.dtypes import itemsize
from sharding.views import torch_dtype

MOST_NBYTES = 1 << 28
"""The most bytes of a file of `convert_deepspeed`, unless a tensor is larger; as many
are in memory.
"""


def import_deepspeed(dir: str | Path, *, step: AnyStep) -> Loaded:
    """A state of `step` that continues from DeepSpeed's checkpoint; this rank's part.

    Masters, optimizer state, counters, module buffers and loss scale are DeepSpeed's;
    the learning rate continues from its scheduler's position. Hyperparameters are those
    of `step`. Ranks, stage, placement and dtypes may differ, as for `load`. Module
    buffers that `state_dict` leaves out and the random state are as in `init`.

    *Collective:* every rank of the step; sends some numbers. Each rank reads the ranges
    that it holds, mapped into memory, without running code of the files.

    Args:
        dir: the folder passed to `save_checkpoint`, whose `latest` (or
            `latest_universal`) is loaded, or one checkpoint.
        step: to continue with, of the same model.

    Returns:
        The state; as `client` DeepSpeed's `client_state`, with its counters and
        settings under `"deepspeed"`; and the folder.

    Raises:
        CheckpointError: on every rank: there is no checkpoint, a file is missing or
            truncated, needs code to be read, or is from a job with pipeline, tensor or
            expert parallelism; the message has the file.
        ValueError: on every rank: the model or the optimizer differs, or a tensor would
            become narrower.
        CollectiveError: another rank died, or does not take part.
    """
    return load_by_ranks("fzero.deepspeed.import_deepspeed", dir, step, find, _load)


def _load(path: Path, step: TrainStep, scratch: StateFiles | None) -> Loaded:
    found = DeepSpeedFiles(path)
    found.check_optimizer()
    saved = Saved(found, found.numbers, found.optimizer, {}, found.scales_dynamically)
    return Loaded(restored(saved, step, scratch), found.client, path)


def client_of(dir: str | Path) -> dict[str, Any]:
    """The `client` of `import_deepspeed`."""
    return DeepSpeedFiles(find(Path(dir))).client


def convert_deepspeed(dir: str | Path, out: str | Path) -> Path:
    """Writes DeepSpeed's checkpoint as one of fzero for `load`, `load_weights` and
    `export`, in this process alone.

    Needs no model. About 256 MB are in memory, or the largest tensor.

    Args:
        dir: as for `import_deepspeed`.
        out: a folder of fzero's checkpoints, which is made. The new one is its latest.

    Returns:
        The checkpoint's own folder.

    Raises:
        CheckpointError: as for `import_deepspeed`; or the disk is too small, or cannot
            be written to.
    """
    found, path = DeepSpeedFiles(find(Path(dir))), Path(out)
    found.check_optimizer()
    parts = [StoredSlice.whole(key, like) for key, like in found.stored.items()]
    content = content_of(found.client)
    batches = list(_batches(part for part in parts if part.stop))
    needed = {number: nbytes_of(batch) for number, batch in enumerate(batches)}
    files.check_space(path, needed | {len(batches): len(content) + FEW_BYTES})
    folder, slices = files.begin(path, int(found.numbers["state.step"])), []
    try:
        for number, batch in enumerate(batches):
            fragments = [
                (part, torch.empty(part.stop, dtype=torch_dtype(part.dtype))) for part in batch
            ]
            found.read(fragments)
            slices += write(folder, number, fragments)
        contents = Contents(
            found.stored,
            found.aliases,
            found.numbers,
            found.optimizer,
            {},
            found.names,
            found.rates,
            found.loss_scaling,
            found.stage,
            (("data", found.world_size),),
            found.scales_dynamically,
        )
        return publish(folder, path, slices, contents, content)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _batches(parts: Iterable[StoredSlice]) -> Iterator[list[StoredSlice]]:
    batch: list[StoredSlice] = []
    nbytes = 0
    for part in parts:
        own = part.stop * itemsize(part.dtype)
        if batch and nbytes + own > MOST_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(part)
        nbytes += own
    if batch:
        yield batch
