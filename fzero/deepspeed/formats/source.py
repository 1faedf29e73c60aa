"""`DeepSpeedFiles`: a checkpoint of DeepSpeed, read under the keys of fzero's own
checkpoints.

It is a `fzero.checkpoint.loading.Source`: it has shapes and dtypes by key, and fills
flat tensors with ranges of the stored ones. `fzero.deepspeed.formats.flat` has the
positions of elements. Frozen parameters and module buffers are in the model's file; in
ZeRO 3 each rank's file has a shard of each frozen parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from fzero.checkpoint.folders import CheckpointError, inside
from fzero.checkpoint.layout import Stored, StoredSlice, key_of
from fzero.deepspeed.formats import files
from fzero.deepspeed.formats.files import MODEL, MODEL_OF_RANK, WEIGHTS_ALONE, WORD, read
from fzero.deepspeed.formats.flat import MASTER, FlatPosition, Flats, need, of_ranks
from fzero.deepspeed.formats.universal import tensor_in, universal, whole
from sharding.views import dtype_name

KINDS: dict[tuple[str, ...], tuple[str, dict[str, str]]] = {
    ("exp_avg", "exp_avg_sq"): ("AdamState", {".exp_avg": "exp_avg", ".exp_avg_sq": "exp_avg_sq"}),
    ("exp_avg",): ("LionState", {".exp_avg": "exp_avg"}),
    ("sum",): ("AdagradState", {".sum": "sum"}),
    ("momentum_buffer",): ("SGDState", {".momentum": "momentum_buffer"}),
}
"""fzero's optimizer state for each set of tensors per parameter, with DeepSpeed's names
of its quantities.
"""

RULES = {
    "dynamic": "is_dynamic",
    "window": "scale_window",
    "hysteresis": "delayed_shift",
    "consecutive": "consecutive_hysteresis",
    "minimum": "min_scale",
}
"""The rules of the loss scale, by the names of `fzero.optim.LossScaling`: what
DeepSpeed calls them.
"""

THEIRS = {
    *(
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "lr_scheduler",
    ),
    *(
        "frozen_param_fragments",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "csr_tensor_module_names",
    ),
    *(
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
    ),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info"),
}
"""The keys of a model's file that are DeepSpeed's; the others are the user's
`client_state`.
"""


class DeepSpeedFiles:
    """One checkpoint, in a folder. `fzero.checkpoint.saving.Contents` documents the
    attributes that both have.

    Attributes:
        client: the user's `client_state`, and under `"deepspeed"` the counters and
            settings of DeepSpeed.
        stage, world_size: of the job; a universal checkpoint counts as stage 0.

    Raises:
        CheckpointError: a file is missing or cut, needs code to be read, or is of a job
            that is not of data parallelism alone.
    """

    def __init__(self, folder: Path) -> None:
        files.check_folder(folder)
        self.folder = folder
        self._path = next(
            (p for p in (folder / MODEL, folder / MODEL_OF_RANK.format(0)) if p.exists()),
            folder / MODEL,
        )
        self._model = _checked_model(self._path)
        self._module = {
            name: x for name, x in self._model["module"].items() if isinstance(x, Tensor)
        }
        self.world_size = int(self._model.get("dp_world_size", 1))
        self._buffers = [
            name for name in self._model.get("buffer_names") or () if name in self._module
        ]
        ties = self._model.get("shared_params")
        self._ties: Mapping[str, str] = _shared(self._module) if ties is None else ties
        self._flats = self._opened()
        self._frozen = self._frozen_shapes()
        self._of_rank = cache(lambda rank: _checked_model(folder / MODEL_OF_RANK.format(rank)))
        self._sources: dict[str, tuple[str, str]] = {}
        self.stored = dict(self._all_stored())
        first_of = {name: self._ties.get(name, name) for name in self._module}
        self.names = {
            name: first for name, first in first_of.items() if f"model.{first}" in self.stored
        }
        self.numbers = self._numbers()
        self.optimizer = dict(self._optimizer_kinds())
        self.client = self._client()

    @cached_property
    def stage(self) -> int:
        return self._flats.stage

    @cached_property
    def aliases(self) -> dict[str, str]:
        return {f"model.{name}": f"model.{first}" for name, first in self._ties.items()}

    @cached_property
    def scales_dynamically(self) -> bool:
        return bool(self._flats.scaler.get("is_dynamic"))

    @cached_property
    def loss_scaling(self) -> dict[str, Any]:
        return {
            name: self._flats.scaler[key]
            for name, key in RULES.items()
            if key in self._flats.scaler
        }

    @cached_property
    def rates(self) -> dict[str, float]:
        rates = {float(group["lr"]) for group in self._flats.settings if "lr" in group}
        return dict.fromkeys(self._flats.shapes, rates.pop()) if len(rates) == 1 else {}

    def _opened(self) -> Flats:
        found = files.optimizer_files(self.folder)
        if (self.folder / "zero").is_dir():
            return universal(self.folder, self._model, self._path)
        if found:
            return of_ranks(found, self._model, self._path)
        if self._path.name != MODEL or self._model.get("optimizer") is None:
            raise CheckpointError(
                f"{WORD}: {self.folder} must hold the masters and optimizer state in "
                f"'*_optim_states.pt', and has none; copy those of all ranks, or {WEIGHTS_ALONE}"
            )
        return whole(self._model, self._path, self._declared())

    def _declared(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what counts as parameters in the model's file, as it has them."""
        others = {*self._buffers, *self._ties}
        return {name: tuple(x.shape) for name, x in self._module.items() if name not in others}

    def _frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = self._model.get("frozen_param_shapes")
        if shapes is not None:
            return {name: tuple(shape) for name, shape in shapes.items()}
        if self._path.name != MODEL:  # saved without
            return {}
        return {
            name: shape
            for name, shape in self._declared().items()
            if name not in self._flats.shapes
        }

    # --- contents ---------------------------------------------------------------------------------

    def _all_stored(self) -> Iterator[tuple[str, Stored]]:
        leaves = self._kind()[1]
        for name, shape in self._flats.shapes.items():
            group = self._flats.places[name].group
            master = dtype_name(self._flats.dtype(MASTER, group))
            param = dtype_name(self._module[name].dtype) if name in self._module else master
            for quantity, source, dtype in (("params", MASTER, param), ("master", MASTER, master)):
                if quantity == "params" or param != master:
                    yield self._known(quantity, source, name), Stored(shape, dtype)
            for quantity, leaf in leaves.items():
                dtype = dtype_name(self._flats.dtype(leaf, group))
                yield self._known(quantity, leaf, name), Stored(shape, dtype)
        for name, shape in self._frozen.items():
            dtype = dtype_name(next(self._runs("frozen", name, 0, 0))[1].dtype)
            yield self._known("params", "frozen", name), Stored(shape, dtype)
        for name in self._buffers:
            buffer = self._module[name]
            yield (
                self._known("params", "buffer", name),
                Stored(tuple(buffer.shape), dtype_name(buffer.dtype)),
            )

    def _known(self, quantity: str, source: str, name: str) -> str:
        key = key_of(quantity, name)
        self._sources[key] = source, name
        return key

    def _kind(self) -> tuple[str, dict[str, str]]:
        return KINDS.get(self._flats.leaves, ("unknown", {}))

    def check_optimizer(self) -> None:
        """Raises unless there is optimizer state, of a kind that is known. (Weights can
        be read without.)
        """
        if self._flats.leaves in KINDS:
            return
        known = "; ".join(", ".join(leaves) for leaves in KINDS)
        found = ", ".join(self._flats.leaves) or "none, as before the first update"
        raise CheckpointError(
            f"{WORD}: the optimizer state in {self.folder} must be one of those known here "
            f"({known}), and is {found}; take the weights alone, fzero.load_weights of this folder"
        )

    def _optimizer_kinds(self) -> Iterator[tuple[str, Any]]:
        kind, leaves = self._kind()
        for name, shape in self._flats.shapes.items():
            yield (
                name,
                {"kind": kind, "keeps": sorted([".step", *(leaves if math.prod(shape) else ())])},
            )
        for name in self._frozen:
            yield name, None

    def _numbers(self) -> dict[str, float | int]:
        updates, scaler = self._num_updates(), self._flats.scaler
        last_overflow = scaler.get("last_overflow_iter")
        num_good = scaler.get("cur_iter", 0) - (-1 if last_overflow is None else last_overflow) - 1
        numbers: dict[str, float | int] = {
            "state.step": updates,
            "state.loss_scale.scale": float(scaler.get("cur_scale", 1.0)),
            "state.loss_scale.hysteresis": int(scaler.get("cur_hysteresis", 1)),
            "state.loss_scale.num_good": max(num_good, 0),
        }
        steps = cache(self._flats.step)
        for name in self._flats.shapes:
            step = steps(self._flats.places[name].group)
            numbers[key_of(".step", name)] = float(updates if step is None else step)
        return numbers

    def _num_updates(self) -> int:
        """The number of updates by which the scheduler computes the learning rate;
        without a scheduler, that of all updates.
        """
        schedule = self._model.get("lr_scheduler") or {}
        if "last_batch_iteration" in schedule:  # DeepSpeed's, which count from -1
            return int(schedule["last_batch_iteration"]) + 1
        if "last_epoch" in schedule:  # torch's
            return int(schedule["last_epoch"])
        return int(need(self._model, "global_steps", self._path)) - int(
            self._model.get("skipped_steps", 0)
        )

    def _client(self) -> dict[str, Any]:
        counters = (
            "global_steps",
            "global_samples",
            "skipped_steps",
            "lr_scheduler",
            "dp_world_size",
            "ds_version",
        )
        known = {key: self._model[key] for key in counters if key in self._model}
        users = {key: value for key, value in self._model.items() if key not in THEIRS}
        return users | {"deepspeed": known | {"param_groups": self._flats.settings}}

    # --- reading ----------------------------------------------------------------------------------

    def read(self, fragments: Iterable[tuple[StoredSlice, Tensor]]) -> None:
        """See `fzero.checkpoint.loading.Source`. Raises CheckpointError: a file is
        truncated, or contradicts the others.
        """
        for part, flat in fragments:
            source, name = self._sources[part.key]
            for start, values in self._runs(source, name, part.start, part.stop):
                # DeepSpeed's masters are parameters.
                flat[start - part.start :][: values.numel()].copy_(values.detach())

    def _runs(self, source: str, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """(First element, values) of each contiguous run of elements [start, stop) of
        the parameter.
        """
        if source == "buffer":
            yield start, self._module[name].reshape(-1)[start:stop]
        elif source == "frozen":
            yield from self._frozen_runs(name, start, stop)
        else:
            flats = self._flats
            place = flats.places[name]
            for first, rank, offset, numel in place.spans(start, stop):
                flat = flats.flat(source, rank, place.group)
                if flat.numel() < offset + numel:
                    raise CheckpointError(
                        f"{WORD}: {flats.where(rank, place.group)} must have at least "
                        f"{offset + numel} elements of {source!r} where {name!r} is, and has "
                        f"{flat.numel()}; take files of one save, all with the same tag"
                    )
                yield first, flat.reshape(-1)[offset : offset + numel]

    def _frozen_runs(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        numel, there = math.prod(self._frozen[name]), self._module.get(name)
        alone = inside(self.folder / "zero", name, self._path) / f"{MASTER}.pt"
        if there is not None and there.numel() == numel:
            yield start, there.reshape(-1)[start:stop]
        elif alone.exists():
            yield start, tensor_in(alone).reshape(-1)[start:stop]
        elif start == stop:  # an empty range: only the dtype is asked for
            yield start, self._fragment(0, name)[:0]
        else:
            for first, rank, offset, count in FlatPosition(
                0, 0, 0, -(-numel // self.world_size)
            ).spans(start, stop):
                yield first, self._fragment(rank, name)[offset : offset + count]

    def _fragment(self, rank: int, name: str) -> Tensor:
        """A rank's shard of a frozen parameter."""
        path = self.folder / MODEL_OF_RANK.format(rank)
        return cast(
            Tensor, need(need(self._of_rank(rank), "frozen_param_fragments", path), name, path)
        )


def _checked_model(path: Path) -> dict[str, Any]:
    model: dict[str, Any] = read(path)
    files.check_model(path, model)
    return model


def _shared(module: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of tensors that share memory with an earlier one, which they stand
    with.
    """
    first: dict[tuple[int, int], str] = {}
    ties = {}
    for name, x in module.items():
        if x.numel():
            place = x.untyped_storage().data_ptr(), int(x.storage_offset())
            if first.setdefault(place, name) != name:
                ties[name] = first[place]
    return ties


def source_of(path: Path) -> DeepSpeedFiles | None:
    """The checkpoint in a folder; None where it is not DeepSpeed's."""
    return DeepSpeedFiles(files.find(path)) if files.is_deepspeeds(path) else None
