"""`TorchJob`: model and optimizer of another PyTorch job (FSDP2, DDP), saved with
torch.distributed.checkpoint.

    dcp.save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)

The files hold `model.<parameter>` and `optim.state.<parameter>.<tensor>`. Other words
may stand for "model" and "optim", and dicts may enclose them. The tensors are read
under the keys of fzero's own checkpoints, so that the rules of `fzero.load` apply. The
sharded parameters are also the masters. Hyper-parameters and other values of the job
are pickles, which are not read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fzero.checkpoint import folders as files
from fzero.checkpoint.dcp_format import DcpReader, Fragment
from fzero.checkpoint.folders import CheckpointError
from fzero.checkpoint.layout import StoredSlice, key_of, kinds_of
from fzero.plans.plan import Plan
from fzero.resharding.tensors import of_plan

USUAL = ("model.", "optim.", "optimizer.")
"""The prefixes that are taken where several fit."""
OTHER_WORDS = {"momentum": "momentum_buffer"}
"""Tensors of optimizer state that torch.optim calls otherwise."""


def is_torch_job(folder: Path) -> bool:
    """Whether a folder is a checkpoint that torch.distributed.checkpoint has written
    for another program.
    """
    ours = (files.MANIFEST, files.CONTENTS, files.OWNER)
    return (folder / files.METADATA).is_file() and not any(
        (folder / name).exists() for name in ours
    )


class TorchJob:
    """One checkpoint, read for a plan. `fzero.checkpoint.loading.Saved` documents
    `numbers` and `optimizer`.

    Args:
        folder: with a `.metadata`.
        plan: whose parameters and optimizer state are looked for.
        aliases: the other names of tied parameters, each with the first one.

    Attributes:
        stored: shape and dtype of each tensor, by the key that fzero's own checkpoint
            would have.

    Raises:
        CheckpointError: the folder has no parameter of this model, or no optimizer
            state.
        ValueError: the optimizer kept other tensors.
    """

    def __init__(self, folder: Path, plan: Plan, aliases: Mapping[str, str]) -> None:
        self.folder, self._reader, self._plan = folder, _reader(folder), plan
        there, names = (
            self._reader.stored,
            [n for buffer in plan.flat_buffers for n in buffer.layout.names],
        )
        self._known = {name: name for name in (*names, *plan.buffers)} | dict(aliases)
        parts = {key: [m.end() for m in re.finditer(r"^|\.", key)] for key in there}
        self._weights = self._prefix(
            "the parameters", ((k[:at], k[at:]) for k in there for at in parts[k])
        )
        states = ((k, m) for k in there for m in re.finditer(r"(?<![^.])state\.", k))
        state_of = [(k[: m.start()], k[m.end() :].rpartition(".")[0], k) for k, m in states]
        self._optimizer = self._prefix(
            "the optimizer state", ((prefix, name) for prefix, name, _ in state_of)
        )
        # per parameter: the key of each tensor of its state
        self._kept: dict[str, dict[str, str]] = defaultdict(dict)
        for prefix, name, key in state_of:
            if prefix == self._optimizer and name in self._known:
                self._kept[self._known[name]][key.rpartition(".")[2]] = key
        self._keys = dict(self._all_keys())
        self.stored = {key: there[theirs] for key, theirs in self._keys.items()}

    def _prefix(self, what: str, found: Iterable[tuple[str, str]]) -> str:
        """The prefix under which most parameters are, of all (prefix, name)."""
        names: dict[str, set[str]] = defaultdict(set)
        for prefix, name in found:
            if name in self._known:
                names[prefix].add(self._known[name])
        most = max(map(len, names.values()), default=0)
        fit = [prefix for prefix in names if len(names[prefix]) == most]
        usual = [prefix for prefix in fit if prefix in USUAL]
        if not fit or (len(fit) > 1 and len(usual) != 1):
            got = f"found under each of {sorted(fit)}" if fit else "not found"
            raise CheckpointError(
                f"load: {self.folder} must hold what get_model_state_dict and "
                f"get_optimizer_state_dict of torch.distributed.checkpoint return, under two keys, "
                f"and {what} of this model were {got}; save them so, or take the weights alone "
                f"with fzero.load_weights"
            )
        return (usual if len(fit) > 1 else fit)[0]

    def _all_keys(self) -> Iterator[tuple[str, str]]:
        """The key of each tensor in a checkpoint of fzero, and its key here."""
        for key in self._reader.stored:
            if key.startswith(self._weights) and not (
                self._kept and key.startswith(f"{self._optimizer}state.")
            ):
                name = key.removeprefix(self._weights)
                yield key_of("params", self._known.get(name, name)), key
        for name, kind in self.optimizer.items():
            for path in kind["keeps"] if kind is not None else ():
                if key := self._kept[name].get(_word(path)):
                    yield key_of(path, name), key

    @cached_property
    def optimizer(self) -> dict[str, dict[str, Any] | None]:
        """The kind of state of each parameter that is stored; None where none was kept."""
        found: dict[str, dict[str, Any] | None] = {}
        for name, kind in kinds_of(self._plan).items():
            if kind is None or name not in self._kept:
                found[name] = None
                continue
            wanted, kept = {_word(path) for path in kind["keeps"]}, set(self._kept[name])
            is_empty = wanted <= {"step"}  # a parameter without elements has no moments here
            if (wanted - kept) - {"step"} or (not is_empty and (kept - wanted) - {"step"}):
                raise ValueError(
                    f"load: the optimizer of parameter {name!r} must keep the same tensors in both "
                    f"jobs, and kept {', '.join(sorted(kept))} in the saving job and keeps "
                    f"{', '.join(sorted(wanted))} in this one; load only the weights with "
                    f"fzero.load_weights"
                )
            found[name] = kind
        return found

    @cached_property
    def numbers(self) -> dict[str, float | int]:
        """The 0-d tensors. An optimizer that counts no updates (SGD) has made one."""
        wanted = {
            key_of(path, name): self._kept[name].get(_word(path))
            for tensors in of_plan(self._plan)
            for path in tensors.numbers
            for name in tensors.buffer.layout.names
            if self.optimizer[name] is not None
        }
        values = _scalars(
            self._reader, {*self._counts, *(key for key in wanted.values() if key is not None)}
        )
        numbers: dict[str, float | int] = {
            ours: values.get(key or "", 1.0) for ours, key in wanted.items()
        }
        num_updates = int(max((values[key] for key in self._counts), default=1))
        return numbers | {"state.step": num_updates, "state.loss_scale.scale": 1.0}

    @property
    def _counts(self) -> list[str]:
        """The keys of the parameters' counts of updates."""
        return [kept["step"] for kept in self._kept.values() if "step" in kept]

    @property
    def counts_updates(self) -> bool:
        """Whether the number of updates is stored."""
        return bool(self._counts)

    def read(self, fragments: Iterable[Fragment]) -> None:
        """See `fzero.checkpoint.loading.Source`."""
        self._reader.read(
            (replace(part, key=self._keys[part.key]), flat) for part, flat in fragments
        )


def starts_of(folder: Path) -> dict[str, int]:
    """As `fzero.checkpoint.starts`, of a `TorchJob`."""
    reader, steps = _reader(folder), dict[str, str]()
    for key in reader.stored:
        if found := re.match(r"(?:.*?\.)?state\.(.+)\.(\w+)$", key):
            steps.setdefault(found[1], "")
            steps[found[1]] = key if found[2] == "step" else steps[found[1]]
    values, known = _scalars(reader, {key for key in steps.values() if key}), dict[float, int]()
    return {name: known.setdefault(values.get(key, 0.0), len(known)) for name, key in steps.items()}


def _word(path: str) -> str:
    """The name in torch.optim of a tensor of optimizer state.

    >>> _word(".exp_avg"), _word(".tensors['square_avg']"), _word(".momentum")
    ('exp_avg', 'square_avg', 'momentum_buffer')
    """
    word: str = re.findall(r"\w+", path)[-1]
    return OTHER_WORDS.get(word, word)


def _scalars(reader: DcpReader, keys: Iterable[str]) -> dict[str, float]:
    """Tensors of one element, by key."""
    found = {key: torch.zeros(1, dtype=torch.float64) for key in keys}
    reader.read((StoredSlice.whole(key, reader.stored[key]), x) for key, x in found.items())
    return {key: x.item() for key, x in found.items()}


def _reader(folder: Path) -> DcpReader:
    return DcpReader(folder)
