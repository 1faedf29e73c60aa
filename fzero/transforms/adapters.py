"""The weights of transformed models: merged into plain ones, and the adapters of `lora`
alone, in the files of PEFT.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fzero.common.optional import package
from fzero.comms.hangs.failures import store_barrier
from fzero.model.transforms import in_own_dtypes
from fzero.transforms.low_rank import LowRank
from fzero.transforms.matching import shape_of

if TYPE_CHECKING:
    from fzero.runtime.step_runtime import StepRuntime
    from fzero.runtime.step_spec import StepSpec
    from fzero.state import TrainState


class Step(Protocol):
    """The attributes of a `TrainStep` that are read here."""

    @property
    def runtime(self) -> StepRuntime: ...
    @property
    def spec(self) -> StepSpec: ...
    @property
    def rank(self) -> int: ...


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def merged(step: Step, weights: Mapping[str, Tensor], n: int | None = None) -> dict[str, Tensor]:
    """The state dict of the plain model that computes as the transformed one, from
    `step.gather(state)`.

    Parameters have the values of all their views; tensors that transforms have added
    are left out. Other forwards of modules (rounded inputs) are not part of it.

    Args:
        n: the number of updates at which views have these values; None is after all of
            their offsets.
    """
    changes, names = step.spec.changes, step.spec.stored_names
    by_name = {names[key]: tensor for key, tensor in weights.items() if key in names}
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, value in by_name.items():
            with in_own_dtypes(value):
                for view in changes.views.get(name, ()):
                    if n is None or n >= view.offset:
                        value = view.value(value, by_name, view.offset if n is None else n)
            found[name] = value
    return {
        key: found[names[key]]
        for key in weights
        if key in names and names[key] not in changes.added
    }


def unmerged(
    step: Step, plain: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The frozen weights again, from `merged` ones and the adapters in `weights`; equal
    to the first to rounding.

    Raises:
        ValueError: a weight has further views, from which there is no way back.
    """
    names, found = step.spec.stored_names, dict(weights)
    by_name = {names[key]: tensor for key, tensor in weights.items() if key in names}
    with torch.no_grad():
        for key, value in plain.items():
            views = step.spec.changes.views.get(names.get(key, key), ())
            if any(not isinstance(view, LowRank) for view in views):
                raise ValueError(
                    f"unmerged: {key!r} must have adapters only, got {views}; keep its own weights"
                )
            with in_own_dtypes(value):
                for view in reversed(views):
                    value = value - view.value(torch.zeros_like(value), by_name, 0)
            found[key] = value
    return found


def save_adapter(
    step: Step, state: TrainState[Tensor], folder: str | Path, *, base: str | None = None
) -> None:
    """Writes the adapters of `lora` alone, as
    `peft.PeftModel.from_pretrained(model, folder)` loads them.

    *Collective:* every rank gathers a flat buffer at a time; rank 0 writes.

    Args:
        folder: on rank 0's file system.
        base: the name or path of the frozen model, for the file.

    Raises:
        ValueError: the step has no adapters, or of several ranks and scales, which
            fzero does not write.
    """
    adapters = _adapters(step, "save_adapter")
    ranks, scales = {one.rank for one in adapters}, {one.view.scale for one in adapters}
    if len(ranks) > 1 or len(scales) > 1:
        raise ValueError(
            f"save_adapter: all adapters must have one rank and scale, got {ranks}, {scales}; use "
            f"one lora(…)"
        )
    save_file = package(
        "safetensors", module="safetensors.torch", needed_by="save_adapter"
    ).save_file
    step.runtime.check_state(state)
    store_barrier("save_adapter", step.runtime.mesh.world)
    wanted = {name for one in adapters for name in one.view.reads}
    found: dict[str, Tensor] = {}
    for views in step.runtime.full_weights(state):
        if step.rank == 0:
            found |= {
                name: view.detach().to("cpu", copy=True)
                for name, view in views.items()
                if name in wanted
            }
    step.runtime.agree_on_files(state)
    if step.rank:
        return
    tensors: dict[str, Tensor] = {}
    for one in adapters:
        tensors |= one.to_peft(*(found[name] for name in one.view.trains))
    rank = ranks.pop()
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": scales.pop() * rank,
        "target_modules": sorted(one.name for one in adapters),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": all(one.view.is_transposed for one in adapters),
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "task_type": None,
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()},
        Path(folder, WEIGHTS),
        {"format": "pt"},
    )
    Path(folder, CONFIG).write_text(json.dumps(config, indent=2))


def load_adapter(step: Step, folder: str | Path) -> dict[str, Tensor]:
    """The adapters in a folder of PEFT by their names in the model:
    `step.init({**model.state_dict(), **load_adapter(step, …)})`.

    Raises:
        ValueError: the folder has other adapters than the step, or another scale.
    """
    load_file = package(
        "safetensors", module="safetensors.torch", needed_by="load_adapter"
    ).load_file
    adapters, config = _adapters(step, "load_adapter"), json.loads(Path(folder, CONFIG).read_text())
    for key in ("use_rslora", "use_dora", "alpha_pattern", "rank_pattern"):
        if config.get(key):
            raise ValueError(
                f"load_adapter: {CONFIG} must have no {key!r}, which asks for other weights than W "
                f"+ alpha/r·BA, got {config[key]!r}; merge this adapter with peft, and load the "
                f"weights"
            )
    scale, file = config["lora_alpha"] / config["r"], load_file(Path(folder, WEIGHTS))
    found: dict[str, Tensor] = {}
    for one in adapters:
        if one.rank != config["r"] or one.view.scale != scale:
            raise ValueError(
                f"load_adapter: rank and scale must be those of the step, {one.rank} and "
                f"{one.view.scale:g} for {one.name!r}, got {config['r']} and {scale:g}; pass "
                f"lora(…, rank={config['r']}, alpha={config['lora_alpha']:g})"
            )
        found |= one.from_peft(file)
    keys = {
        key for one in adapters for key in one.to_peft(*(found[name] for name in one.view.trains))
    }
    if others := sorted(file.keys() - keys):
        raise ValueError(
            f"load_adapter: the step must have every adapter of the file, got {others[0]!r}; widen "
            f"its pattern"
        )
    return found


class _Adapter(NamedTuple):
    """The adapter of one module, whose tensors have other keys and shapes in PEFT's
    file.
    """

    name: str
    module: nn.Module
    view: LowRank
    rank: int

    @property
    def keys(self) -> tuple[str, str]:
        """PEFT's keys; the first is A's here. PEFT multiplies a table's two in the
        other order.
        """
        a, b = (
            ("embedding_B", "embedding_A")
            if isinstance(self.module, nn.Embedding)
            else ("A.weight", "B.weight")
        )
        return f"base_model.model.{self.name}.lora_{a}", f"base_model.model.{self.name}.lora_{b}"

    def to_peft(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        """Its tensors under PEFT's keys: transposed for a table, and a kernel for a
        convolution's A.
        """
        if isinstance(self.module, nn.Embedding):
            a, b = a.t(), b.t()
        elif kernel := shape_of(self.module)[2:]:
            a, b = a.reshape(self.rank, -1, *kernel), b.reshape(*b.shape, *(1 for _ in kernel))
        return dict(zip(self.keys, (a, b), strict=True))

    def from_peft(self, file: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its tensors by their names in the model."""
        missing = next((key for key in self.keys if key not in file), None)
        if missing is not None:
            raise ValueError(
                f"load_adapter: the file must have {missing!r}, got {', '.join(sorted(file)[:4])}; "
                f"pass lora the pattern of this file"
            )
        a, b = (file[key] for key in self.keys)
        a, b = (
            (a.t(), b.t())
            if isinstance(self.module, nn.Embedding)
            else (a.flatten(1), b.flatten(1))
        )
        return dict(zip(self.view.trains, (a.contiguous(), b.contiguous()), strict=True))


def _adapters(step: Step, call: str) -> list[_Adapter]:
    """Those of a step; one for each user of a tied weight."""
    names = {id(param): name for name, param in step.spec.model.named_parameters()}
    found = [
        _Adapter(name, module, view, step.spec.model.get_parameter(view.trains[0]).shape[0])
        for name, module in step.spec.model.named_modules()
        for view in step.spec.changes.views.get(
            names.get(id(module._parameters.get("weight")), ""), ()
        )
        if isinstance(view, LowRank)
    ]
    if not found:
        raise ValueError(
            f"{call}: the step must have adapters, got none; pass "
            f"transforms=[fzero.transforms.lora(…)]"
        )
    return found
