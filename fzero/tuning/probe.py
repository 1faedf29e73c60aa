"""What does a rank do for `fzero tune`? It plans all candidates with the script's own model and batch, or times a few steps.

The command starts the script with `FZERO_TUNE` in the environment, a `Request` in JSON. Then a train step has a `Probe`. To
*describe*, the first batch that is seen ends the job: its ranks measure their rates together, and rank 0 plans and writes the
result. To *measure*, the job ends when the steps that are timed have been run; ranks wait for each other before the first and
after the last of them, and only there. Ranks end at once, without what the script would do at its end: nothing is to be saved.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from fzero.estimation.ledger import Device
from fzero.plans.machine_model import MachineModel
from fzero.profiling.machine import MeasuredRates, mean_rates, rates_of_rank
from fzero.runtime.batches import map_tensors
from fzero.runtime.loss import LossFn
from fzero.runtime.module_binding import replaced_forwards
from fzero.storage.host_memory import host_memory, process_memory
from fzero.tuning.space import Kind, Planned, Planner, batch_keys, candidates

VARIABLE = "FZERO_TUNE"


@dataclass(frozen=True, slots=True)
class Request:
    """What the command wants of the ranks.

    Attributes:
        mode: to plan all candidates, to plan them without a batch as soon as there is a model, or to time steps.
        out: the file that rank 0 writes.
        memory: bytes that a rank may take; None is what the machine has, and no limit is set.
        start, end: the first and the last step that are timed, from 1.
        keys: the configuration that the script was given, as in the file.
        stages, offload, nvme_path: what candidates may differ in (`fzero.tuning.space.candidates`); more is offloaded where
            nothing fits.
    """

    mode: Literal["describe", "describe without a batch", "measure"]
    out: str
    memory: float | None = None
    start: int = 3
    end: int = 5
    keys: Keys | None = None
    stages: tuple[int, ...] = (0, 1, 2, 3)
    offload: tuple[Kind, ...] = ("device",)
    nvme_path: str | None = None

    def as_text(self) -> str:
        """For the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Request | None:
        """The request of an environment; None where there is none."""
        text = environment.get(VARIABLE)
        if not text:
            return None
        found = json.loads(text)
        return cls(**found | {name: tuple(found[name]) for name in ("stages", "offload")})


class Probe:
    """Watches the steps of one rank, and ends it when it has seen enough."""

    def __init__(
        self,
        request: Request,
        axis: ProcessAxis,
        model: nn.Module,
        cfg: Config,
        loss_fn: LossFn | None,
        device: torch.device,
    ) -> None:
        self._request, self._axis, self._cfg, self._loss_fn, self._device = request, axis, cfg, loss_fn, device
        self._num_begun, self._num_samples = 0, cfg.batch_sizes(axis.size).train
        self._times: list[float] = []  # at which the steps that are timed began
        self._before = process_memory("VmRSS") if device.type == "cpu" else 0
        if request.mode == "measure":
            self._limit_memory()
            return
        self._model = _on_meta(model)
        if request.mode == "describe without a batch":
            self._describe(None, is_call=False)

    # --- what a step tells -------------------------------------------------------------------------------------------

    def sees(self, batch: Any, *, is_call: bool = False) -> None:
        """A batch has come: of a whole step, or the arguments of one call of the model (`is_call`).

        Raises:
            ValueError: a call's batch has another size than configured, so that what is timed is not the configuration.
        """
        if self._request.mode == "describe":
            self._describe(batch, is_call=is_call)
        if is_call:  # that of a whole step is checked by the step
            self._check_rows(batch)
        if self._num_samples is None:
            self._num_samples = _num_samples(batch) * self._axis.size * (self._num_micro_steps if is_call else 1)

    def begins(self) -> None:
        """A step begins."""
        self._num_begun += 1
        if self._num_begun == self._request.start:
            self._meet()
        if self._num_begun >= self._request.start:
            self._times.append(time.perf_counter())

    def has_updated(self) -> None:
        """A step is over."""
        if self._request.mode == "describe":  # no batch came by here
            self._describe(None, is_call=False)
        if self._num_begun == self._request.end:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._meet()
            self._times.append(time.perf_counter())
            nbytes = max(collectives.exchange(self._peak(), self._axis))
            self._end({"seconds": self._seconds(), "samples": self._num_samples, "nbytes": nbytes})

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _check_rows(self, batch: Any) -> None:
        """Some tensor's leading dimension must be the micro-batch; that of others may be anything, as of positions."""
        micro, found = self._cfg.batch_sizes(self._axis.size).micro, _leading(batch)
        if micro is not None and found and micro not in found:
            raise ValueError(
                f"the script's batch has {found[0]} rows, not {micro}: build batches by the configuration, all of one size"
            )

    @property
    def _num_micro_steps(self) -> int:
        return self._cfg.batch_sizes(self._axis.size).num_micro_steps

    def _seconds(self) -> float:
        """Of a step: the mean on CUDA, where the host does not see when one ends; else the median, which other work on the
        machine moves less."""
        steps = [after - before for before, after in pairwise(self._times)]
        return sum(steps) / len(steps) if self._device.type == "cuda" else median(steps)

    def _meet(self) -> None:
        collectives.exchange(None, self._axis)

    def _end(self, found: dict[str, Any]) -> NoReturn:
        """Writes what was found, and ends this rank when all have come here."""
        if self._axis.rank == 0:
            out = Path(self._request.out)
            out.with_suffix(".part").write_text(json.dumps(found))
            out.with_suffix(".part").replace(out)
        self._meet()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _limit_memory(self) -> None:
        """From here on this rank may take so many bytes more."""
        if self._request.memory is None:
            return
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._request.memory / total), self._device)
        elif resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY:
            most = process_memory("VmData") + int(self._request.memory)
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, process_memory("VmHWM") - self._before)

    def _describe(self, batch: Any, *, is_call: bool) -> NoReturn:
        """*Collective:* every rank."""
        request, world_size = self._request, self._axis.size
        machine = measured_machine(self._axis, self._device)
        described: dict[str, Any] = {}
        if self._axis.rank == 0:
            memory = _memory(self._device)
            limit = request.memory or memory
            found, note = self._planned(batch, machine, is_call=is_call, limit=limit)
            described = {
                "world_size": world_size,
                "device": self._device.type,
                "memory": limit,
                "model": type(self._model).__name__,
                "num_params": sum(param.numel() for param in self._model.parameters()),
                "note": note,
                "rates": asdict(machine),
                "candidates": [asdict(one) | {"fits": self._fits(one, limit)} for one in found],
            }
        self._end(described)

    def _planned(self, batch: Any, machine: MachineModel, *, is_call: bool, limit: float) -> tuple[list[Planned], str]:
        """The plans of all candidates, and what is not counted in them."""
        request = self._request
        assert request.keys is not None
        keys, settings = request.keys, autotuning(request.keys)
        _, micro, steps = self._cfg.batch_sizes(self._axis.size)
        if "train_micro_batch_size_per_gpu" in settings.arg_mappings:
            keys = changed(keys, batch_keys(keys, micro, steps))
        found: list[Planned] = []
        with _giving_loss(self._model, self._loss_fn, is_call=is_call):
            planner, note = self._planner(keys, machine, batch, is_call=is_call, steps=steps)
            more: tuple[Kind, ...] = ("host", "nvme") if request.nvme_path else ("host",)
            for offload in dict.fromkeys((request.offload, (*dict.fromkeys((*request.offload, *more)),))):
                if not any(self._fits(one, limit) for one in found):
                    space = candidates(
                        keys,
                        settings,
                        self._axis.size,
                        stages=request.stages,
                        offload=offload,
                        nvme_path=request.nvme_path,
                    )
                    known = {one.candidate.name for one in found}
                    found += [planner.planned(one) for one in space if one.name not in known]
        return found, note

    def _planner(
        self, keys: Keys, machine: MachineModel, batch: Any, *, is_call: bool, steps: int
    ) -> tuple[Planner, str]:
        """A planner that counts activations, unless the model cannot be traced; then the reason."""
        request, note = self._request, "no batch came: activations are not counted"
        device: Device = "cpu" if self._device.type == "cpu" else "cuda"
        planned_keys = _plannable(self._cfg, keys)
        if batch is not None:
            seen = _Seen(batch, is_call=is_call, num_micro_steps=1 if is_call else steps)
            try:
                trace_activations(self._model, planned_keys, seen.sample(None), device=device)
            except Exception as error:  # the script's own code, on tensors without values
                note = (
                    f"activations are not counted: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
                )
            else:
                note = ""
        sample = None if note else seen.sample
        made = Planner(
            self._model, planned_keys, self._axis.size, machine, sample=sample, nvme_path=request.nvme_path,
            device=device,
        )  # fmt: skip
        return made, note

    def _fits(self, one: Planned, limit: float) -> bool:
        """On the CPU, host memory is the device's."""
        host = one.nbytes.get("host", 0)
        if self._device.type == "cpu":
            return not one.refused and one.nbytes["device"] + host <= limit
        return not one.refused and one.nbytes["device"] <= limit and host <= _host_memory()


def probe_of(axis: Any, model: nn.Module, cfg: Config, loss_fn: LossFn | None, device: torch.device) -> Probe | None:
    """The probe that the environment asks for, of a step whose ranks are there."""
    request = Request.of(os.environ)
    if request is None or not isinstance(axis, ProcessAxis):
        return None
    return Probe(request, axis, model, cfg, loss_fn, device)


def measured_machine(axis: ProcessAxis, device: torch.device) -> MachineModel:
    """The rates of a rank while all work at once; those that are not measured are `MachineModel`'s own. *Collective.*"""
    collectives.exchange(None, axis)  # all begin together
    return mean_rates(
        [MeasuredRates(**told) for told in collectives.exchange(asdict(rates_of_rank(axis, device)), axis)]
    ).machine


class _Seen:
    """A batch that came, from which batches of other sizes are made, without memory."""

    def __init__(self, batch: Any, *, is_call: bool, num_micro_steps: int) -> None:
        if isinstance(batch, Iterator):
            batch, num_micro_steps = next(batch), 1
        self._batch, self._is_call = map_tensors(lambda x: x.to("meta"), batch), is_call
        self._rows = _num_samples(batch)
        self._own = max(1, self._rows // num_micro_steps)

    def sample(self, micro: int | None) -> Any:
        """As if so many samples had come; what has no leading dimension of samples stays."""
        rows = self._own if micro is None else micro

        def resized(x: Tensor) -> Tensor:
            is_of_samples = x.ndim > 0 and x.shape[0] == self._rows
            return torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device="meta") if is_of_samples else x

        return (map_tensors(resized, self._batch),)


def _num_samples(batch: Any) -> int:
    """The leading dimension of its first tensor; 1 of a batch without one."""
    return next(iter(_leading(batch)), 1)


def _leading(batch: Any) -> list[int]:
    """The leading dimensions of its tensors; none of an iterator, which is left alone."""
    if isinstance(batch, Iterator):
        return []
    tensors = optree.tree_leaves(map_tensors(lambda x: x, batch), none_is_leaf=True)
    return [x.shape[0] for x in tensors if isinstance(x, Tensor) and x.ndim > 0]


@contextmanager
def _giving_loss(model: nn.Module, loss_fn: LossFn | None, *, is_call: bool) -> Iterator[None]:
    """Inside, the model is called with a batch, and gives a loss: that of `loss_fn`, or a sum of all that it returns.

    The latter stands for what a script computes between an engine's forward and its backward.
    """
    is_inside = False

    def replaced(_: str, module: nn.Module) -> Callable[..., Any]:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return own(*args, **kwargs)
            is_inside = True
            try:
                return _loss(own, module, args[0])
            finally:
                is_inside = False

        return forward

    def _loss(own: Callable[..., Any], module: nn.Module, batch: Any) -> Any:
        if is_call:
            inputs, kwargs = batch
            return _summed(own(*inputs, **kwargs))
        if loss_fn is not None:
            loss = loss_fn(module, batch)
            return loss[0] if isinstance(loss, tuple) else loss
        if isinstance(batch, Mapping):
            return own(**batch)
        return own(*batch) if isinstance(batch, tuple | list) else own(batch)

    with replaced_forwards(model, [""], replaced):
        yield


def _summed(outputs: Any) -> Any:
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    plain = dict(outputs) if isinstance(outputs, Mapping) else outputs
    leaves = [x for x in optree.tree_leaves(plain) if isinstance(x, Tensor) and x.requires_grad]
    return sum(x.float().mean() for x in leaves)


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy without memory, before an engine puts its own parameters into the model."""
    params: dict[int, Any] = {
        id(param): nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        for param in model.parameters()
    }
    buffers: dict[int, Any] = {id(buffer): buffer.detach().to("meta") for buffer in model.buffers()}
    try:
        return copy.deepcopy(model, params | buffers)
    except Exception:  # a module may hold anything: a lock, a generator, a process group
        return model


def _plannable(cfg: Config, keys: Keys) -> Keys:
    """The configuration that the step has, whose optimizer may be the script's; that of the file where it has no JSON."""
    made = keys_of(cfg)
    try:
        Config.load(json.loads(json.dumps(made)))
    except (ValueError, TypeError):
        return keys
    return made


# --- memory ------------------------------------------------------------------------------------------------------


def _memory(device: torch.device) -> float:
    """Bytes that this rank may take: what is free on its GPU, or its share of what is available on this host."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return _host_memory()


def _host_memory() -> float:
    return host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
