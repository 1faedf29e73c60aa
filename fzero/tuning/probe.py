"""`Probe`: the part of `fzero tune` inside a rank. It plans all candidates with the
script's model and batch, or times steps.

The command starts the script with a `Request` as JSON in the environment variable
`FZERO_TUNE`; a train step then has a `Probe`. In the mode *describe*, the first batch
ends the job: its ranks measure their rates together, and rank 0 plans and writes the
result. In the mode *measure*, the job ends after the timed steps; ranks wait for each
other only before the first and after the last of them. Ranks exit immediately, without
the script's own ending, so that it saves nothing.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, NoReturn

import optree
import torch
from torch import Tensor, nn

from fzero.comms import collectives
from fzero.comms.axes import ProcessAxis
from fzero.config.autotuning import autotuning
from fzero.config.config import Config
from fzero.config.files import changed
from fzero.estimation.activation_trace import trace_activations
from fzero.estimation.compare import Keys, keys_of
from fzero.estimation.fit_search import Limits
from fzero.estimation.ledger import Device
from fzero.model.changes import replaced_forwards
from fzero.plans.machine_model import MachineModel
from fzero.profiling.machine import MeasuredRates, mean_rates, rates_of_rank
from fzero.runtime.batches import LossFn, map_tensors
from fzero.storage.host_memory import host_memory, process_memory
from fzero.tuning.space import OffloadTarget, Planner, Trial, batch_keys, candidates

VARIABLE = "FZERO_TUNE"


@dataclass(frozen=True, slots=True)
class Request:
    """The command's request to the ranks: plan all candidates, also without a batch
    once the model exists, or time steps.
    """

    mode: Literal["describe", "describe without a batch", "measure"]
    out: str  # the file that rank 0 writes
    # bytes that a rank may use; None is the machine's memory, without an enforced limit
    memory: float | None = None
    start: int = 3  # the first timed step, from 1
    end: int = 5  # the last one
    keys: Keys | None = None  # the script's configuration, as in the file
    stages: tuple[int, ...] = (0, 1, 2, 3)
    offload: tuple[OffloadTarget, ...] = ("device",)  # if nothing fits, more offload is tried
    nvme_path: str | None = None

    def as_text(self) -> str:
        """The request as the value of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Request | None:
        """The request in an environment; None if there is none."""
        text = environment.get(VARIABLE)
        if not text:
            return None
        fields = json.loads(text)
        return cls(**fields | {name: tuple(fields[name]) for name in ("stages", "offload")})


class Probe:
    """Observes the steps of one rank, and ends the process once it has its result."""

    def __init__(
        self,
        request: Request,
        axis: ProcessAxis,
        model: nn.Module,
        cfg: Config,
        loss_fn: LossFn | None,
        device: torch.device,
    ) -> None:
        self._request, self._axis, self._cfg, self._loss_fn, self._device = (
            request,
            axis,
            cfg,
            loss_fn,
            device,
        )
        self._num_begun, self._num_samples = 0, cfg.batch_sizes(axis.size).train
        self._times: list[float] = []  # the start of each timed step, and the end of the last
        self._before = process_memory("VmRSS") if device.type == "cpu" else 0
        if request.mode == "measure":
            self._limit_memory()
            return
        self._model = _on_meta(model)
        if request.mode == "describe without a batch":
            self._describe(None, is_call=False)

    # --- called by a step -------------------------------------------------------------------------

    def sees(self, batch: Any, *, is_call: bool = False) -> None:
        """Called with each batch: of a full step, or the arguments of one call of the
        model (`is_call`).

        Raises:
            ValueError: a call's batch has another size than configured, so that the
                timing would be of another configuration.
        """
        if self._request.mode == "describe":
            self._describe(batch, is_call=is_call)
        micro, rows = self._cfg.batch_sizes(self._axis.size).micro, _leading(batch)
        # The step itself checks its full batch. Some tensors of a call, such as positions, may have
        # another leading dimension.
        if is_call and micro is not None and rows and micro not in rows:
            fix = "build batches by the configuration, all of one size"
            raise ValueError(f"the script's batch has {rows[0]} rows, not {micro}: {fix}")
        if self._num_samples is None:
            num_micro_steps = (
                self._cfg.batch_sizes(self._axis.size).num_micro_steps if is_call else 1
            )
            self._num_samples = _num_samples(batch) * self._axis.size * num_micro_steps

    def begins(self) -> None:
        """Called at the start of a step."""
        self._num_begun += 1
        if self._num_begun == self._request.start:
            self._barrier()
        if self._num_begun >= self._request.start:
            self._times.append(time.perf_counter())

    def has_updated(self) -> None:
        """Called at the end of a step."""
        if self._request.mode == "describe":  # the step did not pass its batch to `sees`
            self._describe(None, is_call=False)
        if self._num_begun == self._request.end:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._barrier()
            self._times.append(time.perf_counter())
            nbytes = max(collectives.exchange(self._peak(), self._axis))
            self._end({"seconds": self._seconds(), "samples": self._num_samples, "nbytes": nbytes})

    def _seconds(self) -> float:
        """The time of a step: on CUDA the mean, because the host sees no single step
        end; else the median, against other load.
        """
        steps = [after - before for before, after in pairwise(self._times)]
        return sum(steps) / len(steps) if self._device.type == "cuda" else median(steps)

    def _barrier(self) -> None:
        collectives.exchange(None, self._axis)

    def _end(self, result: dict[str, Any]) -> NoReturn:
        """Writes the result, waits for all ranks, and ends this process."""
        if self._axis.rank == 0:
            out = Path(self._request.out)
            out.with_suffix(".part").write_text(json.dumps(result))
            out.with_suffix(".part").replace(out)
        self._barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _limit_memory(self) -> None:
        """Limits this rank to the requested bytes beyond those in use now."""
        if self._request.memory is None:
            return
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, self._request.memory / total), self._device
            )
        elif resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY:
            most = process_memory("VmData") + int(self._request.memory)
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, process_memory("VmHWM") - self._before)

    def _describe(self, batch: Any, *, is_call: bool) -> NoReturn:
        """Plans all candidates on rank 0 and ends the job. *Collective:* every rank."""
        request, world_size = self._request, self._axis.size
        self._barrier()  # so that all ranks measure together
        rates = collectives.exchange(asdict(rates_of_rank(self._axis, self._device)), self._axis)
        machine = mean_rates([MeasuredRates(**of_rank) for of_rank in rates]).machine
        described: dict[str, Any] = {}
        if self._axis.rank == 0:
            limit = request.memory or _memory(self._device)
            plans, note = self._planned(batch, machine, is_call=is_call, limit=limit)
            described = {
                "world_size": world_size,
                "device": self._device.type,
                "memory": limit,
                "model": type(self._model).__name__,
                "num_params": sum(param.numel() for param in self._model.parameters()),
                "note": note,
                "rates": asdict(machine),
                "candidates": [asdict(one) for one in plans],
            }
        self._end(described)

    def _planned(
        self, batch: Any, machine: MachineModel, *, is_call: bool, limit: float
    ) -> tuple[list[Trial], str]:
        """The plans of all candidates, and a note on what they do not count."""
        request = self._request
        assert request.keys is not None
        keys, settings = request.keys, autotuning(request.keys)
        world_size = self._axis.size
        _, micro, steps = self._cfg.batch_sizes(world_size)
        if "train_micro_batch_size_per_gpu" in settings.arg_mappings:
            keys = changed(keys, batch_keys(keys, micro, steps))
        limits = Limits(limit, _host_memory())
        plans: list[Trial] = []
        with _giving_loss(self._model, self._loss_fn, is_call=is_call):
            planner, note = self._planner(keys, machine, batch, is_call=is_call, steps=steps)
            more: tuple[OffloadTarget, ...] = ("host", "nvme") if request.nvme_path else ("host",)
            for offload in dict.fromkeys(
                (request.offload, (*dict.fromkeys((*request.offload, *more)),))
            ):
                if all(one.refused for one in plans):
                    space = candidates(
                        keys,
                        settings,
                        world_size,
                        stages=request.stages,
                        offload=offload,
                        nvme_path=request.nvme_path,
                    )
                    known = {one.name for one in plans}
                    plans += [
                        planner.planned(one, limits) for one in space if one.name not in known
                    ]
        return plans, note

    def _planner(
        self, keys: Keys, machine: MachineModel, batch: Any, *, is_call: bool, steps: int
    ) -> tuple[Planner, str]:
        """A planner, and a note if it cannot count activations."""
        sample, note = None, "no batch was seen: activations are not counted"
        device: Device = "cpu" if self._device.type == "cpu" else "cuda"
        planned_keys = _plannable(self._cfg, keys)
        if batch is not None:
            made = _sampler(batch, num_micro_steps=1 if is_call else steps)
            try:
                trace_activations(self._model, planned_keys, made(None), device=device)
                sample, note = made, ""
            except Exception as error:  # the script's own code may fail on fake tensors
                note = (
                    f"activations are not counted: "
                    f"{(str(error) or type(error).__name__).splitlines()[0]}"
                )
        how: dict[str, Any] = {
            "device": device,
            "sample": sample,
            "nvme_path": self._request.nvme_path,
        }
        return Planner(self._model, planned_keys, self._axis.size, machine, **how), note


def probe_of(
    axis: Any, model: nn.Module, cfg: Config, loss_fn: LossFn | None, device: torch.device
) -> Probe | None:
    """The probe that the environment requests, for a step on real processes."""
    request = Request.of(os.environ)
    if request is None or not isinstance(axis, ProcessAxis):
        return None
    return Probe(request, axis, model, cfg, loss_fn, device)


def _sampler(batch: Any, *, num_micro_steps: int) -> Callable[[int | None], Any]:
    """Makes the script's batch with another number of samples (None: its own), on
    `meta`; other tensors keep their shape.
    """
    if isinstance(batch, Iterator):
        batch, num_micro_steps = next(batch), 1
    on_meta, num_samples = map_tensors(lambda x: x.to("meta"), batch), _num_samples(batch)

    def sample(micro: int | None) -> Any:
        rows = max(1, num_samples // num_micro_steps) if micro is None else micro

        def resized(x: Tensor) -> Tensor:
            is_of_samples = x.ndim > 0 and x.shape[0] == num_samples
            return (
                torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device="meta")
                if is_of_samples
                else x
            )

        return (map_tensors(resized, on_meta),)

    return sample


def _num_samples(batch: Any) -> int:
    """The leading dimension of the first tensor; 1 for a batch without tensors."""
    return next(iter(_leading(batch)), 1)


def _leading(batch: Any) -> list[int]:
    """The leading dimensions of the tensors of a batch; none for an iterator, which
    must not advance.
    """
    if isinstance(batch, Iterator):
        return []
    tensors = optree.tree_leaves(map_tensors(lambda x: x, batch), none_is_leaf=True)
    return [x.shape[0] for x in tensors if isinstance(x, Tensor) and x.ndim > 0]


@contextmanager
def _giving_loss(model: nn.Module, loss_fn: LossFn | None, *, is_call: bool) -> Iterator[None]:
    """In the body, the model takes a batch and returns a loss: `loss_fn`'s, or the sum
    of its outputs.

    The sum replaces the loss that a script computes between an engine's forward and
    backward.
    """
    is_inside = False

    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return own(*args, **kwargs)
        is_inside = True
        try:
            return loss(args[0])
        finally:
            is_inside = False

    def loss(batch: Any) -> Any:
        if is_call:
            inputs, kwargs = batch
            return _summed(own(*inputs, **kwargs))
        if loss_fn is not None:
            found = loss_fn(model, batch)
            return found[0] if isinstance(found, tuple) else found
        if isinstance(batch, Mapping):
            return own(**batch)
        return own(*batch) if isinstance(batch, tuple | list) else own(batch)

    with replaced_forwards(model, [""], lambda name, module: forward):
        yield


def _summed(outputs: Any) -> Any:
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    plain = dict(outputs) if isinstance(outputs, Mapping) else outputs
    leaves = [x for x in optree.tree_leaves(plain) if isinstance(x, Tensor) and x.requires_grad]
    return sum(x.float().mean() for x in leaves)


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy on `meta`, made before an engine replaces the model's parameters."""
    made: dict[int, Any] = {id(buffer): buffer.detach().to("meta") for buffer in model.buffers()}
    for param in model.parameters():
        made[id(param)] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    try:
        return copy.deepcopy(model, made)
    except Exception:
        # a module may hold objects without copies: a lock, a generator, a process group
        return model


def _plannable(cfg: Config, keys: Keys) -> Keys:
    """The step's configuration, whose optimizer may be the script's; the file's if the
    step's cannot be written as JSON.
    """
    made = keys_of(cfg)
    with suppress(ValueError, TypeError):
        Config.load(json.loads(json.dumps(made)))
        return made
    return keys


def _memory(device: torch.device) -> float:
    """Bytes that this rank may use: free memory of its GPU, or available memory of this
    host / ranks on it.
    """
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else _host_memory()


def _host_memory() -> float:
    return host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
