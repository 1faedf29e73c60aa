"""`KeepsFiles`: an engine's checkpoints. `DIR/<tag>` is a folder of `fzero.save`, and `DIR/latest` names a tag.

Besides the state, a checkpoint holds the counters, scheduler, param groups, position in the data, and the script's own dict.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fzero.checkpoint import folders as files
from fzero.checkpoint.agreement import check_same_folder, of_rank_0, together
from fzero.checkpoint.folders import CheckpointError
from fzero.checkpoint.loading import load as load_state, starts
from fzero.checkpoint.saving import save as save_state
from fzero.checkpoint.weights import load_weights, save_16bit_model
from fzero.common.arguments import check_kind, check_path, refuse
from fzero.common.safe_files import create
from fzero.comms import collectives
from fzero.comms.failures import meet
from fzero.comms.records import Label
from fzero.engine.accessors import Accessors
from fzero.engine.client_optimizers import plain_values
from fzero.engine.generation import Generates

COUNTERS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")


class KeepsFiles(Generates):
    """The part of `Engine` that reads and writes files."""

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves the state and the script's progress under `save_dir/tag`, by default `global_step<N>`. *Collective:* every rank.

        The folder is a checkpoint of `fzero.save`; `save_dir/latest` names the tag.
        """
        step, world = self.active_step(), self.train_step.runtime.mesh.world
        check_path("save_checkpoint: save_dir", save_dir)
        check_kind("client_state", client_state, Mapping | None, "a mapping", "pass one, such as {'epoch': 3}")
        if tag is not None and not str(tag):
            refuse("tag", "a name", tag, "pass one, or None for global_step<N>")
        if exclude_frozen_parameters:
            raise ValueError(
                "save_checkpoint: exclude_frozen_parameters must be False, got True; frozen ones are saved once"
            )
        meet("Engine.save_checkpoint", world)
        folder = Path(save_dir)
        tag = _agreed_tag(self, f"global_step{self.global_steps}" if tag is None else str(tag))
        if self.open_window is not None and self.open_window.loss_stats:
            lost = "gradients since the last update are not saved; call it after an update to lose none"
            warnings.warn(f"save_checkpoint: {lost}", stacklevel=2)
        scheduler, loader = self.lr_scheduler, self.training_dataloader
        progress = {
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "groups": [plain_values(group) for group in self.hyper],
            "data": None if loader is None else loader.state_dict(),
        }
        state, client = self.state._replace(rng=_random_state_of(self)), dict(client_state or {})
        check_same_folder(world, folder, "save_checkpoint")
        of_rank_0(world, lambda: files.claim(folder))
        save_state(state, folder / tag, step=step, client={"engine": progress, "client": client}, keep=1)
        if save_latest:
            of_rank_0(world, lambda: files.write_whole(folder / files.LATEST, f"{tag}\n".encode()))
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
        """Continues from a checkpoint of any number of ranks and any stage. *Collective:* every rank.

        Returns:
            The folder and the `client_state`; `(None, None)` where no tag is given and there is no `latest`.
        """
        if custom_load_fn is not None:
            raise ValueError("load_checkpoint: custom_load_fn must be None, because the state is loaded and not a module; pass "
                             "the weights to fzero.load_weights")  # fmt: skip
        check_path("load_checkpoint: load_dir", load_dir)
        self.zero_grad()
        step, world, folder = self.train_step, self.train_step.runtime.mesh.world, Path(load_dir)
        takes_optimizer = load_optimizer_states and not load_module_only
        meet("Engine.load_checkpoint", world)
        if tag is None:
            tag = of_rank_0(world, lambda: files.latest_of(folder) if (folder / files.LATEST).exists() else None)
            if tag is None:
                text = f"load_checkpoint: {folder} has no file {files.LATEST!r}; nothing was loaded"
                warnings.warn(text, stacklevel=2)
                return None, None
        path = folder / tag
        if takes_optimizer and self.optimizer is not None:
            step = self.step_to_load(of_rank_0(world, lambda: starts(path)))
            state, client, _ = load_state(path, step=step)
            self.take_over(step, state)
        else:
            self.take_over(step, load_weights(path, step=step))
            client = together(world, lambda: files.read_client(files.find(path)))
        progress = client["engine"] if isinstance(client, dict) and "engine" in client else None
        if progress is None:
            raise CheckpointError(
                f"load_checkpoint: {path} must be saved by an engine, and was saved by fzero.save; load it with fzero.load"
            )
        if takes_optimizer:
            _set_random_state(self)
            for group, values in zip(self.hyper, progress["groups"]):
                group.update(values)
        if load_lr_scheduler_states and not load_module_only and None not in (self.lr_scheduler, progress["scheduler"]):
            self.lr_scheduler.load_state_dict(progress["scheduler"])
        if not load_module_only:
            for name in COUNTERS:
                setattr(self, name, progress["counters"][name])
            self.counted_from = self.micro_steps
            if self.training_dataloader is not None and progress["data"] is not None:
                self.training_dataloader.load_state_dict(progress["data"])
        self.show_state()
        return str(path), client["client"]

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the weights in the model's 16-bit dtype: one file by torch.save on rank 0, or safetensors files.

        *Collective:* every rank.

        Args:
            save_filename: `model.safetensors` selects `fzero.checkpoint.save_16bit_model`, which gathers one unit at a time.
        """
        check_path("save_16bit_model: save_dir", save_dir)
        folder, name = Path(save_dir), save_filename
        if name.endswith(".safetensors"):
            if name != "model.safetensors" or exclude_frozen_parameters:
                raise ValueError(
                    f"save_16bit_model: safetensors files are named model.safetensors and hold all weights, got {name!r} and "
                    f"exclude_frozen_parameters={exclude_frozen_parameters}; leave that out, or write a .bin"
                )
            save_16bit_model(self.state, folder, step=self.train_step)
            return True
        full = self.consolidated_16bit_state_dict(exclude_frozen_parameters)

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            beside = folder / f".{name}.new"
            with create(beside) as file:
                torch.save(full, file)
            beside.rename(folder / name)

        of_rank_0(self.train_step.runtime.mesh.world, write)
        return True

    save_fp16_model = save_16bit_model


def _agreed_tag(engine: Accessors, tag: str) -> str:
    """Rank 0's tag; `checkpoint.tag_validation` says whether differing tags raise, warn or are ignored."""
    how, step = engine.keys.checkpoint.tag_validation, engine.train_step
    tags: list[str] = collectives.exchange(tag, step.runtime.mesh.world, label=Label("save"))
    if len(set(tags)) > 1 and how != "IGNORE":
        message = f"save_checkpoint: tag must be the same on all ranks, got {tags}; rank 0's is used"
        if how == "FAIL":
            raise ValueError(f"{message} where checkpoint.tag_validation is not FAIL; pass the same tag")
        warnings.warn(message, stacklevel=3)
    return tags[0]


def _random_state_of(engine: Accessors) -> dict[str, torch.Tensor]:
    """The random state of the process, which the module uses."""
    found = {"cpu": torch.get_rng_state()}
    if "cuda" in engine.state.rng:
        found["cuda"] = torch.cuda.get_rng_state(engine.device)
    return found


def _set_random_state(engine: Accessors) -> None:
    rng = engine.state.rng
    torch.set_rng_state(rng["cpu"].clone())
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"], engine.device)
