"""`export_deepspeed`: writes a checkpoint from which DeepSpeed continues.

    fzero.deepspeed.export_deepspeed("checkpoints", "out")      # then, with "checkpoint": {"load_universal": true}:
    engine.load_checkpoint("out")

A checkpoint of fzero is written as a universal one of DeepSpeed, which its ZeRO 1, 2
and 3 load on any number of ranks. One tensor at a time is in memory. Neither a model
nor DeepSpeed is needed.
"""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fzero.checkpoint import folders as files
from fzero.checkpoint.folders import CheckpointError, StoredContents
from fzero.checkpoint.layout import key_of
from fzero.checkpoint.loading import opened
from fzero.common.safe_files import refuse_link
from fzero.deepspeed.formats.files import MODEL, MODEL_OF_RANK, PlainObject
from fzero.deepspeed.formats.flat import MASTER
from fzero.deepspeed.formats.source import KINDS, RULES
from sharding.views import torch_dtype

if TYPE_CHECKING:
    from fzero.checkpoint.dcp_format import DcpReader

Numbers = Mapping[str, float | int]
Steps = Literal["number", "tensor"]

VERSION = "0.19.6"
"""The version of DeepSpeed whose format is written."""


def export_deepspeed(dir: str | Path, out: str | Path, *, steps: Steps = "number") -> Path:
    """Writes a checkpoint of fzero as a universal checkpoint of DeepSpeed, in this
    process alone, one tensor at a time.

    Masters, optimizer state, counters, loss scale and the learning rate of the next
    update are transferred. DeepSpeed takes hyperparameters from its own configuration,
    and module buffers, frozen parameters and random state from its model; it does not
    read those of a universal checkpoint. (fzero does, with `import_deepspeed`.)

    Args:
        dir: as for `load`.
        out: a folder for `load_checkpoint`, which is made. `latest_universal` in it
            names the new checkpoint.
        steps: the type of the optimizer's update count: `"number"` for DeepSpeed's own
            (FusedAdam, DeepSpeedCPUAdam), `"tensor"` for those of torch (`torch_adam`,
            or one that a script makes).

    Returns:
        The checkpoint's own folder.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or `out` has this one
            already.
        ValueError: DeepSpeed does not have the optimizer.
    """
    source = files.find(Path(dir))
    contents, found = opened(source)
    if contents.left_out:
        raise CheckpointError(
            f"export: {source} must hold all parameters, and was saved without frozen ones; load "
            f"it with an engine, and save it with them"
        )
    numbers = contents.numbers
    name = f"global_step{int(numbers['state.step'])}_universal"
    folder, beside = Path(out) / name, Path(out) / f".{name}.new"
    if folder.exists():
        raise CheckpointError(
            f"export: {folder} must not be there yet, and is; remove it, or export to another "
            f"folder"
        )
    leaves_by_name = {name: _leaves(name, stored) for name, stored in contents.optimizer.items()}
    folders = {
        name: files.inside(beside / "zero", name, source / files.CONTENTS)
        for name in leaves_by_name
    }
    _make(beside)
    try:
        for param, leaves in leaves_by_name.items():
            _write_parameter(folders[param], param, leaves, found, numbers, steps)
        _save(_optimizer_state(contents, steps), beside / "zero" / "optimizer_state.pt")
        model = _model(contents, found, files.read_client(source))
        # ZeRO 1 and 2 look for the one, 3 for the other
        for file in (MODEL, MODEL_OF_RANK.format(0)):
            _save(model, beside / file)
        beside.rename(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    files.write_whole(Path(out) / "latest_universal", name.encode())
    return folder


def _make(folder: Path) -> None:
    """Makes a new folder. Removes an earlier export's folder of that name, unless it is
    a link.
    """
    try:
        refuse_link(folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"export: {folder} must be a new folder, got {error}; remove it, or export to another "
            f"folder"
        ) from error


def _leaves(name: str, stored: Mapping[str, Any] | None) -> dict[str, str] | None:
    """The tensors of a parameter's optimizer state, each with DeepSpeed's name; None
    for a frozen parameter.
    """
    if stored is None:
        return None
    known = dict(KINDS.values())
    leaves = known.get(stored["kind"], {})
    kept = [leaf for leaf in stored["keeps"] if leaf != ".step"]
    if not set(kept) <= set(leaves):
        raise ValueError(
            f"export: the optimizer of parameter {name!r} must be one that DeepSpeed knows "
            f"({', '.join(known)}), and is {stored['kind']} with {', '.join(kept)}; export the "
            f"weights alone (without --format)"
        )
    return {leaf: leaves[leaf] for leaf in kept}


def _write_parameter(
    folder: Path,
    name: str,
    leaves: Mapping[str, str] | None,
    found: DcpReader,
    numbers: Numbers,
    steps: Steps,
) -> None:
    """Writes the files of one parameter, a tensor at a time."""
    master = next(
        key for key in (key_of("master", name), key_of("params", name)) if key in found.stored
    )
    for key, file in (
        (master, MASTER),
        *((key_of(q, name), leaf) for q, leaf in (leaves or {}).items()),
    ):
        tensor = found.full(key)
        if leaves is not None:
            tensor = tensor.float()
        tensor = tensor if tensor.ndim else tensor.view(1)  # DeepSpeed cuts it along a dimension
        _save({"param": tensor, "cat_dim": 0}, folder / f"{file}.pt")
    if leaves is not None:
        _save(_count(numbers[key_of(".step", name)], steps), folder / "step.pt")


def _count(number: float, steps: Steps) -> int | Tensor:
    return int(number) if steps == "number" else torch.tensor(float(number))


def _optimizer_state(contents: StoredContents, steps: Steps) -> dict[str, Any]:
    """The optimizer's values that are not per parameter."""
    numbers, rates = contents.numbers, set(contents.rates.values())
    if len(rates) > 1:
        warnings.warn(
            f"export: DeepSpeed takes learning rates by the position of its groups, which a "
            f"checkpoint does not know, and there are {len(rates)}: none is written, so that its "
            f"first update takes those with which it starts; call "
            f"engine.lr_scheduler.step(engine.lr_scheduler.last_batch_iteration) after "
            f"load_checkpoint",
            stacklevel=3,
        )
    settings = {"lr": next(iter(rates))} if len(rates) == 1 else {}
    trained = [name for name, stored in contents.optimizer.items() if stored is not None]
    count = _count(numbers[key_of(".step", trained[0])], steps)
    rules = contents.loss_scaling
    state = {
        "dynamic_loss_scale": bool(rules.get("dynamic")),
        "overflow": False,
        "ds_version": VERSION,
        # at most so many groups; DeepSpeed takes as many as it has
        "param_groups": [settings] * len(trained),
        # where ZeRO 3 looks
        "optimizer_state_dict": {"state": {0: {"step": count}}, "param_groups": [settings]},
    }
    if rules.get("dynamic"):
        state["loss_scaler"] = _scaler(numbers, rules)
    return state


class _Scaler(PlainObject):
    """An object that DeepSpeed reads as a DynamicLossScaler."""


def _scaler(numbers: Numbers, rules: Mapping[str, Any]) -> _Scaler:
    scaler = _Scaler()
    vars(scaler).update(
        {theirs: rules[ours] for ours, theirs in RULES.items() if ours != "dynamic"}
    )
    num_good = int(numbers["state.loss_scale.num_good"])
    vars(scaler).update(
        cur_scale=float(numbers["state.loss_scale.scale"]),
        cur_hysteresis=int(numbers["state.loss_scale.hysteresis"]),
        cur_iter=num_good,
        last_overflow_iter=-1,
        scale_factor=2.0,
        dynamic=True,
        raise_error_at_min_scale=True,
        dtype=torch.float16,
    )
    return scaler


def _model(contents: StoredContents, found: DcpReader, client: Any) -> dict[str, Any]:
    """The model's file: names, shapes, counters, module buffers, and the user's own."""
    num_updates, optimizer = int(contents.numbers["state.step"]), contents.optimizer
    module = {}
    for key, name in contents.names.items():
        stored = key_of("params", name)
        dtype = torch_dtype(found.stored[stored].dtype)
        module[key] = torch.empty(0, dtype=dtype) if name in optimizer else found.full(stored)
    shapes = {name: torch.Size(found.stored[key_of("params", name)].shape) for name in optimizer}
    users = client if isinstance(client, Mapping) else {"client": client}
    return {key: value for key, value in users.items() if key != "deepspeed"} | {
        "module": module,
        "buffer_names": [key for key, name in contents.names.items() if name not in optimizer],
        "optimizer": None,
        "param_shapes": [
            {name: shape for name, shape in shapes.items() if optimizer[name] is not None}
        ],
        "frozen_param_shapes": {
            name: shape for name, shape in shapes.items() if optimizer[name] is None
        },
        "frozen_param_fragments": None,
        "shared_params": {key: name for key, name in contents.names.items() if key != name},
        "lr_scheduler": {
            "last_batch_iteration": num_updates - 1,
            "last_epoch": num_updates,
            "_step_count": num_updates + 1,
        },
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": num_updates,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": VERSION,
    }


_Base: Any = vars(pickle)["_Pickler"]  # the one in Python, of which a method can be another


class _Pickler(_Base):  # type: ignore[misc]
    """Names a class of DeepSpeed's without importing it."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is _Scaler:
            self.write(pickle.GLOBAL + b"deepspeed.runtime.fp16.loss_scaler\nDynamicLossScaler\n")
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def _save(value: Any, path: Path) -> None:
    """Writes a file of torch.save, flushed to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.flushed(path.parent), path.open("wb") as file:
        torch.save(value, file, pickle_module=SimpleNamespace(__name__="pickle", Pickler=_Pickler))
        file.flush()
        os.fsync(file.fileno())
