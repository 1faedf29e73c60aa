"""The model of a step on full parameters, for `generate` and whatever else calls it
many times between two updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from fzero.comms.hangs.failures import store_barrier
from fzero.generation.lora import fuse_lora, merged
from fzero.model.binding import bound
from fzero.runtime.inspection import inspecting
from fzero.runtime.param_views import ParamViews
from fzero.state import TrainState
from fzero.step import TrainStep
from fzero.storage.file_tensor import in_memory
from fzero.storage.shard_transfer import read_later
from fzero.verbs import gather_flat
from sharding import Replicated
from sharding.views import unflatten


@contextmanager
def generating(
    step: TrainStep,
    state: TrainState[Tensor],
    *,
    by: Literal["copy", "unit"] = "copy",
    fuse: bool = True,
    writable: bool = False,
) -> Iterator[nn.Module]:
    """Inside, the step's model computes with the parameters of `state`. Yields the
    model.

        with fzero.generating(step, state) as model:
            tokens = model.generate(prompts, max_new_tokens=64)

    No gradients are collected, and the state keeps its bits: buffers are copies, and a
    changed parameter is an error (see `writable`). The training mode stays as it is;
    call `model.eval()` to generate without dropout. Under `torch_autocast` the model
    runs under `torch.autocast`, and it sees what is compressed (`compression_training`)
    as in training. Random numbers are those of torch's global generators, so that ranks
    draw different samples if they are seeded differently.

    *Collective*, to enter: every rank. By copy, a rank sends `(W-1)/W` of the divided
    parameters once (stage 3), and nothing in stages 0 to 2; inside, each rank calls the
    model as often as it likes. By unit, each forward sends as much in stage 3; ranks
    negotiate what to gather next, so a rank that calls the model less often gathers
    along when it leaves.

    Args:
        by: `"copy"` holds all parameters in full, in their own dtype:
            `copy_nbytes(step)` bytes more than a step has. `"unit"` gathers each unit
            when a forward uses it, and holds what a step gathers.
        fuse: whether LoRA layers run as one matrix (`fuse_lora`), by copy. By unit they
            run as in training.
        writable: whether the model may write to its parameters, for example peft's
            `merge_adapter`: in stages 0 to 2, too, it then has copies, which are
            dropped at the end.

    Raises:
        TypeError: `step` is no step.
        ValueError: a parameter was changed without `writable`, an argument is not
            known, or the step is a pipeline's.
    """
    if by not in ("copy", "unit"):
        raise ValueError(
            f"generating: by must be 'copy' or 'unit', got {by!r}; 'copy' gathers once, 'unit' in "
            f"each forward"
        )
    if by == "unit" and writable:
        raise ValueError(
            "generating: writable must be False with by='unit', got True; by='copy' has copies to "
            "write to"
        )
    check_whole(step, "generating")
    step.runtime.check_state(state)
    model, dtype = step.spec.model, step.runtime.autocast
    casts = nullcontext() if dtype is None else torch.autocast(step.device.type, dtype=dtype)
    if by == "unit":
        with inspecting(step.runtime, state, "generate", calls_vary=True), torch.no_grad(), casts:
            yield model
        return
    params, flats = _full(step, state, copies=writable)
    changes, call = (
        step.runtime.changes,
        step.runtime.call(read_later(state.step), is_counted=False),
    )
    params |= ParamViews(changes.views, call.num_updates, state.buffers).among(params)
    versions = [flat._version for flat in flats]
    buffers = {name: tensor.clone() for name, tensor in state.buffers.items()}
    fused = fuse_lora(model, params) if fuse else params
    seen = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in fused.items()}
    as_one = merged(model) if fuse else nullcontext()
    with (
        bound(model, step.plan.aliases, seen.__getitem__, buffers),
        changes.bound(model, lambda: call),
        torch.no_grad(),
        casts,
        as_one,
    ):
        yield model
    if not writable and [flat._version for flat in flats] != versions:
        raise ValueError(
            "generating: the model must not write to its parameters, and did, so that the state "
            "has changed; pass writable=True, which gives it copies, and use a state saved before"
        )


def check_whole(step: TrainStep, call: str) -> None:
    """Raises for what is no step, and for the step of a pipeline, where a rank has the
    layers of its own stage.
    """
    if not isinstance(step, TrainStep):
        raise TypeError(
            f"{call}: step must be what make_train_step returned, got {type(step).__name__}; load "
            f"what gather(state) of simulated ranks returns into a plain model"
        )
    if not step.runtime.job.is_whole:
        raise ValueError(
            f"{call}: the step must have the whole model, and is that of a pipeline stage; save a "
            f"checkpoint, and load it into a step without pipeline="
        )


def copy_nbytes(step: TrainStep) -> int:
    """The bytes that `generating` by copy holds on each rank in addition to the state:
    the full divided parameters.

    >>> from fzero import Config, make_train_step
    >>> from fzero.comms import AbstractAxis
    >>> zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    >>> cfg = Config.load(
    ...     {
    ...         "zero_optimization": zero,
    ...         "train_micro_batch_size_per_gpu": 1,
    ...         "optimizer": {"type": "Adam"},
    ...     }
    ... )
    >>> copy_nbytes(
    ...     make_train_step(nn.Linear(64, 64), cfg, mesh=AbstractAxis("data", 4))
    ... )  # 4160 elements and the padding
    16896
    """
    return step.plan.copy_nbytes


def _full(
    step: TrainStep, state: TrainState[Tensor], *, copies: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The full parameters by name, in their own dtypes, and the state's own tensors
    among those that they are views of.
    """
    found: dict[str, Tensor] = {}
    own: list[Tensor] = []
    if any(not isinstance(buffer.params.spec, Replicated) for buffer in step.plan.flat_buffers):
        store_barrier("generating", step.runtime.mesh.world)
    for buffer in step.plan.flat_buffers:
        held = state.params[buffer.key]
        flat: Tensor = in_memory(held).to(step.device)
        if not isinstance(buffer.params.spec, Replicated):
            flat = gather_flat(flat, buffer, step.runtime.mesh)
        if flat is held:
            own.append(flat)
            flat = flat.clone() if copies else flat
        found |= {name: view.detach() for name, view in unflatten(flat, buffer.layout).items()}
    return found, own
