"""`EngineFiles`: an engine's checkpoints. `DIR/<tag>` is a folder of `fzero.save`, and
`DIR/latest` names a tag.

Besides the state, a checkpoint holds the counters, scheduler, param groups, position in
the data, and the script's own dict.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.checkpoint import folders as files
from fzero.checkpoint.agreement import check_same_folder, of_rank_0, together
from fzero.checkpoint.folders import CheckpointError
from fzero.checkpoint.loading import load_partly, starts
from fzero.checkpoint.saving import save as save_state
from fzero.checkpoint.weights import load_weights, save_16bit_model
from fzero.common.arguments import check_kind, check_path, refuse
from fzero.common.random_states import random_states, set_random_states
from fzero.common.safe_files import create
from fzero.comms import collectives
from fzero.comms.hangs.failures import store_barrier
from fzero.comms.records import Label
from fzero.deepspeed.engine.client_optimizers import plain_values
from fzero.deepspeed.formats.files import MODEL, MODEL_OF_RANK, is_one
from fzero.deepspeed.formats.load import client_of as deepspeeds_client, import_deepspeed
from fzero.resharding.parameters import weight_of, with_weight

if TYPE_CHECKING:
    from fzero.deepspeed.engine.engine import Engine

ZERO_TO_FP32 = """#!/usr/bin/env python
# Writes the fp32 weights of a checkpoint of this folder: python zero_to_fp32.py . OUTPUT_DIR [--tag TAG]

from fzero.deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
"""
"""The program that `save_checkpoint` writes beside the checkpoints, where users of
DeepSpeed look for it.
"""
COUNTERS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")


class EngineFiles:
    """The part of an engine that reads and writes files."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves the state and the script's progress under `save_dir/tag`, by default
        `global_step<N>`. *Collective:* every rank.

        The folder is a checkpoint of `fzero.save`; `save_dir/latest` names the tag, and
        `save_dir/zero_to_fp32.py` is a program that writes the fp32 weights.

        Args:
            exclude_frozen_parameters: whether frozen parameters are left out.
                `load_checkpoint` then keeps those of the model.
        """
        world = self.engine.active_step().runtime.world
        check_path("save_checkpoint: save_dir", save_dir)
        check_kind(
            "client_state",
            client_state,
            Mapping | None,
            "a mapping",
            "pass one, such as {'epoch': 3}",
        )
        if tag is not None and not str(tag):
            refuse("tag", "a name", tag, "pass one, or None for global_step<N>")
        store_barrier("Engine.save_checkpoint", world)
        if self.engine.live_optimizer is not None:
            self.engine.live_optimizer.settle()
        step = self.engine.train_step
        folder = Path(save_dir)
        tag = _agreed_tag(
            self.engine, f"global_step{self.engine.global_steps}" if tag is None else str(tag)
        )
        if self.engine.open_window is not None and self.engine.open_window.loss_stats:
            lost = (
                "gradients since the last update are not saved; call it after an update to "
                "lose none"
            )
            warnings.warn(f"save_checkpoint: {lost}", stacklevel=3)
        scheduler, loader = self.engine.lr_scheduler, self.engine.training_dataloader
        progress = {
            "counters": {name: getattr(self.engine, name) for name in COUNTERS},
            "scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "groups": [plain_values(group) for group in self.engine.hyper],
            "data": None if loader is None else loader.state_dict(),
        }
        state, client = (
            self.engine.state._replace(rng=dict(self.engine.random_state())),
            dict(client_state or {}),
        )
        check_same_folder(world, folder, "save_checkpoint")
        of_rank_0(world, lambda: files.claim(folder))
        frozen = {
            name for b in step.plan.flat_buffers if not b.trainable for name in b.layout.names
        }
        without = frozen if exclude_frozen_parameters else ()
        content = {"engine": progress, "client": client}
        save_state(state, folder / tag, step=step, client=content, keep=1, without=without)
        of_rank_0(
            world, lambda: files.write_whole(folder / "zero_to_fp32.py", ZERO_TO_FP32.encode())
        )
        if save_latest:
            of_rank_0(world, lambda: files.write_whole(folder / files.LATEST, tag.encode()))
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continues from a checkpoint of any number of ranks and any stage, also one of
        DeepSpeed's. *Collective:* every rank.

        With `checkpoint.load_universal` in the configuration, `latest_universal` names
        the checkpoint, if it is there.

        Returns:
            A file in the checkpoint's folder (`latest`, or DeepSpeed's model file) and
            the `client_state`; `(None, None)` where no tag is given and there is no
            `latest`.
        """
        if custom_load_fn is not None:
            raise ValueError(
                "load_checkpoint: custom_load_fn must be None, because the state is loaded and not "
                "a module; pass the weights to fzero.load_weights"
            )
        check_path("load_checkpoint: load_dir", load_dir)
        self.engine.close_window()
        world, folder = self.engine.train_step.runtime.world, Path(load_dir)
        takes_optimizer = load_optimizer_states and not load_module_only
        store_barrier("Engine.load_checkpoint", world)
        if tag is None:
            tag = of_rank_0(
                world, lambda: _latest(folder, universal=self.engine.keys.checkpoint.load_universal)
            )
            if tag is None:
                text = f"load_checkpoint: {folder} has no file {files.LATEST!r}; nothing was loaded"
                warnings.warn(text, stacklevel=3)
                return None, None
        path = folder / tag
        progress, client = self._take(path, takes_optimizer=takes_optimizer)
        if takes_optimizer:
            self.engine.set_random_state()
            for group, values in zip(self.engine.hyper, progress["groups"]):
                group.update(values)
        if (
            load_lr_scheduler_states
            and not load_module_only
            and None not in (self.engine.lr_scheduler, progress["scheduler"])
        ):
            self.engine.lr_scheduler.load_state_dict(progress["scheduler"])
        if not load_module_only:
            for name in COUNTERS:
                setattr(self.engine, name, progress["counters"].get(name, 0))
            self.engine.accumulation.counted_from = self.engine.micro_steps
            self.engine.resume_data()
            if self.engine.training_dataloader is not None and progress["data"] is not None:
                self.engine.training_dataloader.load_state_dict(progress["data"])
        self.engine.show_state()
        names = (MODEL, MODEL_OF_RANK.format(0), files.LATEST, files.MANIFEST)
        return str(next(path / name for name in names if (path / name).exists())), client

    def _take(self, path: Path, *, takes_optimizer: bool) -> tuple[dict[str, Any], Any]:
        """Takes over the state of a checkpoint; returns the progress of its engine, and
        the `client_state`.
        """
        step, world = self.engine.train_step, self.engine.train_step.runtime.world
        is_theirs, trains = (
            of_rank_0(world, lambda: is_one(path)),
            takes_optimizer and self.engine.live_optimizer is not None,
        )
        if not trains:
            self.engine.take_over(step, load_weights(path, step=step))
            client = together(
                world,
                lambda: (
                    deepspeeds_client(path) if is_theirs else files.read_client(files.find(path))
                ),
            )
        elif is_theirs:
            state, client, _ = import_deepspeed(path, step=step)
            self.engine.take_over(step, state)
        else:
            step = self.engine.layouts.step_to_load(of_rank_0(world, lambda: starts(path)))
            (state, client, _), missing = load_partly(path, step=step)
            for name in missing:
                state = with_weight(
                    step, state, name, weight_of(self.engine.train_step, self.engine.state, name)
                )
            self.engine.take_over(step, state)
        if is_theirs:
            return _progress_of_deepspeed(client), client
        if isinstance(client, dict) and "engine" in client:
            return client["engine"], client["client"]
        raise CheckpointError(
            f"load_checkpoint: {path} must be saved by an engine, and was saved by fzero.save; "
            f"load it with fzero.load"
        )

    def random_state(self) -> Mapping[str, Tensor]:
        """The random state of the process, which the module uses; in a pipeline the
        state's, because its layers draw keyed numbers.
        """
        state, step = self.engine.state, self.engine.train_step
        if step.runtime.spec.is_part:
            return state.rng
        return {kind: x for kind, x in random_states(step.device).items() if kind in state.rng}

    def set_random_state(self) -> None:
        """Makes the state's the random state of the process, but in a pipeline."""
        step = self.engine.train_step
        if not step.runtime.spec.is_part:
            set_random_states(self.engine.state.rng, step.device)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the weights in the model's 16-bit dtype: one file by torch.save on
        rank 0, or safetensors files.

        *Collective:* every rank.

        Args:
            save_filename: `model.safetensors` selects
                `fzero.checkpoint.save_16bit_model`, which gathers one unit at a time.
        """
        check_path("save_16bit_model: save_dir", save_dir)
        folder, name = Path(save_dir), save_filename
        if name.endswith(".safetensors"):
            if name != "model.safetensors" or exclude_frozen_parameters:
                raise ValueError(
                    f"save_16bit_model: safetensors files are named model.safetensors and hold all "
                    f"weights, got {name!r} and "
                    f"exclude_frozen_parameters={exclude_frozen_parameters}; leave that out, or "
                    f"write a .bin"
                )
            save_16bit_model(self.engine.state, folder, step=self.engine.active_step())
            return True
        full = self.engine.consolidated_16bit_state_dict(exclude_frozen_parameters)

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            beside = folder / f".{name}.new"
            with create(beside) as file:
                torch.save(full, file)
            beside.rename(folder / name)

        of_rank_0(self.engine.train_step.runtime.world, write)
        return True

    save_fp16_model = save_16bit_model


def _latest(folder: Path, *, universal: bool) -> str | None:
    """The tag of the newest checkpoint."""
    names = ("latest_universal", files.LATEST) if universal else (files.LATEST,)
    return next((files.latest_of(folder, name) for name in names if (folder / name).exists()), None)


def _progress_of_deepspeed(client: dict[str, Any]) -> dict[str, Any]:
    """An engine's progress, from that of a checkpoint of DeepSpeed's."""
    theirs = client.pop("deepspeed")
    counters = {name: int(theirs.get(name) or 0) for name in COUNTERS}
    scheduler = theirs.get("lr_scheduler")
    groups = [plain_values(group) for group in theirs.get("param_groups") or []]
    return {"counters": counters, "scheduler": scheduler, "groups": groups, "data": None}


def _agreed_tag(engine: Engine, tag: str) -> str:
    """Rank 0's tag; `checkpoint.tag_validation` says whether differing tags raise, warn
    or are ignored.
    """
    how, step = engine.keys.checkpoint.tag_validation, engine.train_step
    tags: list[str] = collectives.exchange(tag, step.runtime.world, label=Label("save"))
    if len(set(tags)) > 1 and how != "IGNORE":
        message = (
            f"save_checkpoint: tag must be the same on all ranks, got {tags}; rank 0's is used"
        )
        if how == "FAIL":
            raise ValueError(
                f"{message} where checkpoint.tag_validation is not FAIL; pass the same tag"
            )
        warnings.warn(message, stacklevel=4)
    return tags[0]
