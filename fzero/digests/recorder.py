"""`record`: a step that also writes what it computes, as sums of every tensor that do
not depend on stage, number of ranks or placement; and `record_module`, which does so for
a plain PyTorch loop.

Each rank adds up its own parts of the tensors, each element on one rank. The ranks
exchange these sums, and rank 0 writes a line (`fzero.digests.recording`).
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fzero.checkpoint.agreement import check_same_folder, check_step
from fzero.common.arguments import check_kind, check_model, check_path, check_whole
from fzero.common.version import installed_version
from fzero.comms import collectives
from fzero.comms.axes import RankAxis
from fzero.comms.process_group import job
from fzero.comms.records import Label
from fzero.comms.rendezvous import launched
from fzero.digests.recording import (
    Header,
    ModelTensor,
    Recorded,
    RecordingError,
    Tensors,
    Writer,
)
from fzero.digests.sums import NUMBERS, Sums, added, sums_of
from fzero.resharding.new_state import by_name
from fzero.resharding.parameters import ALSO
from fzero.resharding.tensors import FlatTensor, buffers_of, of_plan
from fzero.runtime import phases
from fzero.runtime.finish import Collected, mean_of
from fzero.simulation import LockstepRanks, VmapRanks
from fzero.state import Metrics, TrainState
from fzero.step import TrainStep, end
from fzero.storage.shard_transfer import own_shard, part_of, to_device

State = TrainState[Tensor]
Key = tuple[str, str]
"""Quantity and name of a tensor."""
_COMPARE = Label("compare")
_ELEMENTS = 1 << 24
"""Elements of a state in other memory that are on the device at a time."""


class RunsStep(Protocol):
    """A step, or one that is also recorded."""

    def __call__(self, state: Any, batch: Any, /) -> tuple[Any, Metrics]: ...


def record(step: TrainStep | LockstepRanks, folder: str | Path, *, every: int = 1) -> RunsStep:
    """The same step, which also records what it computes; `fzero diff` compares such
    recordings.

        recorded = fzero.record(step, "runs/a", every=100)
        for batch in loader:
            state, metrics = recorded(state, batch)

    It writes, for each parameter, sums (`fzero.digests.Sums`) of the weights (the
    masters, where there are any) before and after the step, of the gradients (the mean
    over the batch, without loss scale, before clipping) and of the optimizer's tensors;
    of module buffers; and the metrics. The sums do not depend on how ranks divide a
    tensor. The results and the donation of a state are those of `step`.

    A recorded step reads the state and the gradients once more (10 ns for an element on
    one core) and waits for the device. A line takes about 350 bytes for a tensor.

    *Collective:* every rank, here and as `step(state, batch)`; a recorded step sends
    264 bytes for each of these tensors to every rank.

    Args:
        step: of `make_train_step`, or of `fzero.simulate(..., by="lockstep")`.
        folder: of this run; `recording.jsonl` in it is appended to. All ranks give the
            same; rank 0 writes.
        every: the steps whose number of updates is a multiple of it are recorded.

    Raises:
        ValueError: an argument is wrong.
        RecordingError: on every rank: the folder has a recording of another model,
            another run writes to it, or it cannot be written.
    """
    check_step(step)
    check_path("folder", folder)
    check_whole("every", every, 1)
    if isinstance(step, VmapRanks):
        raise ValueError(
            "record: step must compute rank by rank, got simulated ranks that are a dimension; "
            "pass simulate(..., by='lockstep')"
        )
    if isinstance(step, LockstepRanks):
        ranks = step
        steps = ranks.on_each(lambda rank: RecordedStep(ranks.steps[rank], Path(folder), every))
        return partial(ranks.in_turn, steps=steps)
    return RecordedStep(step, Path(folder), every)


class RecordedStep:
    """A step of one rank that is recorded; made by `record`."""

    def __init__(self, step: TrainStep, folder: Path, every: int) -> None:
        self._step, self._every = step, every
        world, job = step.runtime.world, step.runtime.job
        check_same_folder(world, folder, "record")
        params = {
            name: ((*shape,), unit.name)
            for unit in step.plan.units
            for b in unit.buffers
            for name, shape in zip(b.layout.names, b.layout.shapes, strict=True)
        }
        buffers = {
            name: ((*spec.shape,), name.rpartition(".")[0])
            for name, spec in step.plan.buffers.items()
        }
        everyone = collectives.exchange((params, buffers), world, label=_COMPARE)
        self._params, self._buffers = (
            _merged([of_rank[i] for of_rank in everyone], job.names) for i in range(2)
        )
        self._writer = _opened(folder, self._header(), world)
        self._known: dict[str, list[list[Key]]] = {}
        self._last: Recorded | None = None

    def _header(self) -> Header:
        spec, plan = self._step.spec, self._step.plan
        precision = spec.cfg.precision
        dtypes = sorted({f"{b.dtypes.param}, master {b.dtypes.master}" for b in plan.flat_buffers})
        settings = {
            **_versions(self._step.device),
            "precision": "; ".join(dtypes)
            + (f", autocast {precision.autocast}" if precision.autocast else ""),
            "stage": str(plan.stage),
            "ranks": ", ".join(f"{name} {size}" for name, size in self._step.mesh.axes),
            "micro-batches": str(plan.num_micro_steps),
            "compile": f"{spec.compile}, {spec.compile_backend}" if spec.compile else "none",
            "optimizer": ", ".join(sorted({type(x).__name__ for x in plan.optimizer.values()})),
        }
        how: dict[str, Any] = {"settings": settings, "every": self._every}
        return Header(of="step", params=self._params, buffers=self._buffers, **how)

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """See `record`."""
        run = self._step.runtime
        run.check_state(state)
        number = int(state.step)
        if number % self._every:
            return self._step(state, batch)
        state, micro_batches = phases.check(run, state, batch)
        given = self._all("given", self._of_state(state, without="optimizer"))
        collected = run.program(run, state, micro_batches)
        if collected.transfer is not None:
            collected.transfer.settle()
        grads = self._all("gradient", self._of_grads(collected))
        try:
            new, metrics = end(run, collected)
        except FloatingPointError as error:
            self._write(Recorded(number, {}, 1.0, str(error), given, grads))
            raise
        made = grads | self._all("made", self._of_state(new))
        numbers = {name: float(x) for name, x in metrics._asdict().items() if name != "overflow"}
        skipped = "overflow" if bool(metrics.overflow) else ""
        limit, norm = run.rules.loss.clip, numbers["grad_norm"]
        clip = min(limit / (norm + 1e-6), 1.0) if limit and not skipped else 1.0
        self._write(Recorded(number, {**numbers}, clip, skipped, given, made))
        return new, metrics

    def _write(self, step: Recorded) -> None:
        if self._writer is not None:
            self._writer.write(step.line(self._last))
            self._last = step

    def _all(self, part: str, own: Iterable[tuple[Key, Tensor]]) -> Tensors:
        """The sums over all ranks. *Collective.*"""
        step, world = self._step, self._step.runtime.world
        rows: dict[Key, Tensor] = {}
        for key, numbers in own:
            rows[key] = added(rows[key], numbers) if key in rows else numbers
        if part not in self._known:  # the parts of a rank are the same in each step
            keys = collectives.exchange([list(key) for key in rows], world, label=_COMPARE)
            self._known[part] = [[(of, name) for of, name in each] for each in keys]
        known = self._known[part]
        table = torch.zeros(max(map(len, known)), NUMBERS, dtype=torch.int64, device=step.device)
        for row, key in zip(table, known[world.rank]):
            if key in rows:
                row.copy_(rows[key])
        found: Tensors = {}
        everyone = collectives.stack(table, world, label=_COMPARE).cpu()
        for keys, of_rank in zip(known, everyone, strict=True):
            for (quantity, name), numbers in zip(keys, of_rank):
                of, sums = found.setdefault(quantity, {}), Sums.of(numbers)
                of[name] = of[name] + sums if name in of else sums
        names = [*self._params, *self._buffers]
        return {of: {name: x[name] for name in names if name in x} for of, x in found.items()}

    # --- the parts of this rank -------------------------------------------------------------------

    def _of_state(self, state: State, without: str = "") -> Iterator[tuple[Key, Tensor]]:
        """The sums of this rank's parts of a state."""
        plan, job, tensors = self._step.plan, self._step.runtime.job, by_name(state)
        for held in of_plan(plan):
            known = held.tensors
            for path, tensor in known.items():
                is_weight = path in ("params", "master")
                if (path == "params" and "master" in known) or (without and not is_weight):
                    continue
                if job.stores(tensor.name):
                    quantity = "weight" if is_weight else _label(path, known)
                    yield from self._of_flat(quantity, tensor, tensors[tensor.name])
            if without or self._fine_shard:
                continue
            for path, name in held.numbers.items():
                if job.stores(name):
                    numbers = sums_of(tensors[name].reshape(1).float(), 0)
                    for param in held.buffer.layout.names:
                        yield (_label(path, held.numbers), param), numbers
        for tensor in buffers_of(plan).values():
            if job.stores(tensor.name):
                yield from self._of_flat("module buffer", tensor, tensors[tensor.name])

    def _of_grads(self, collected: Collected) -> Iterator[tuple[Key, Tensor]]:
        """The sums of this rank's parts of the mean gradients."""
        run, plan, state = self._step.runtime, self._step.plan, collected.state
        rows = collected.loss_stats.flatten(0, 1)[:, :2]
        _, weight = mean_of(rows, is_sum=collected.is_sum)
        over = float(run.rules.loss.multiple(weight, state.loss_scale.scale))
        for held in of_plan(plan):
            b = held.buffer
            if b.trainable and run.job.stores(held.own_grads.name):
                tensor, flat = held.own_grads, own_shard(state.grads[b.key], b, run.mesh.shard)
                is_used = b.key not in collected.skipped
                yield from self._of_flat("gradient", tensor, flat, over if is_used else 0.0)

    def _of_flat(
        self, quantity: str, tensor: FlatTensor, flat: Any, over: float = 1.0
    ) -> Iterator[tuple[Key, Tensor]]:
        """The sums of this rank's fine shard of a flat tensor over a number, by
        parameter; those of zeros if the number is 0.
        """
        fine = self._fine_shard
        for part in tensor.fragments(range(fine, fine + 1)):
            for start in range(part.start, part.stop, _ELEMENTS):
                stop = min(start + _ELEMENTS, part.stop)
                at = part.offset + start - part.start
                own = to_device(part_of(flat, at, at + stop - start), self._step.device)
                if over != 1:
                    own = own.to(torch.promote_types(own.dtype, torch.float32))
                    own = own / over if over else torch.zeros_like(own)
                yield (quantity, part.name), sums_of(own, start)

    @property
    def _fine_shard(self) -> int:
        return self._step.plan.ranks.index(self._step.runtime.rank)


def _merged(parts: Sequence[Mapping[str, Any]], order: Sequence[str]) -> dict[str, ModelTensor]:
    """The tensors of all ranks, in an order of the names."""
    found = {name: of for part in parts for name, of in part.items()}
    names = dict.fromkeys([*(name for name in order if name in found), *found])
    return {name: ModelTensor(tuple(found[name][0]), found[name][1]) for name in names}


def _opened(folder: Path, header: Header, world: RankAxis) -> Writer | None:
    """The writer, on rank 0; its error is raised on all ranks. *Collective.*"""
    writer, problem = None, None
    if world.rank == 0:
        try:
            writer = Writer(folder, header)
        except (OSError, RecordingError) as error:
            problem = str(error)
    (problem, *_) = collectives.exchange(problem, world, label=_COMPARE)
    if problem is not None:
        raise RecordingError(problem)
    return writer


def _label(path: str, paths: Iterable[str]) -> str:
    """The name of a tensor of the optimizer: the last word of its path, if no other
    path ends with it.

    >>> _label(".exp_avg", [".step", ".exp_avg"]), _label("[1].step", ["[0].step", "[1].step"])
    ('exp_avg', '[1].step')
    """

    def last(path: str) -> str:
        return re.findall(r"\w+", path)[-1] if re.search(r"\w", path) else path

    name = last(path)
    name = {"step": "count"}.get(name, ALSO.get(name, name))
    return name if [last(other) for other in paths].count(last(path)) == 1 else path


def _versions(device: torch.device) -> dict[str, str]:
    """The settings that do not depend on the step."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        commit = found.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = "unknown"
    return {
        "fzero": installed_version(),
        "torch": torch.__version__,
        "commit": commit,
        "device": f"{device.type} {name}".strip(),
    }


# --- a plain loop ---------------------------------------------------------------------------------


def record_module(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: str | Path,
    *,
    every: int = 1,
    start: int = 0,
) -> RecordedModule:
    """Records a plain PyTorch loop, as `record` does a step of fzero, so that a port can
    be compared with its origin.

        recorded = fzero.digests.record_module(model, optimizer, "runs/origin")
        for batch in loader:
            loss = loss_fn(model, batch)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            recorded.note(loss=loss, grad_norm=norm)  # may be left out
            optimizer.step()
            optimizer.zero_grad()

    Hooks of the optimizer read weights and gradients before `optimizer.step()`, and
    weights and optimizer state after it; nothing is changed. Gradients are recorded as
    the optimizer gets them: clipped and unscaled (a step that a gradient scaler skips is
    not seen). With DDP, rank 0 records its own tensors; with FSDP2 (DTensors) the full
    ones, and then every rank makes a recorder, which gathers them in recorded steps.

    Args:
        model: the module, also one that is compiled, or wrapped in DDP or FSDP2.
        optimizer: the one that trains it.
        folder: as for `record`.
        every: as for `record`; the updates are counted.
        start: the number of updates before this loop, after a checkpoint was loaded.

    Raises:
        ValueError: an argument is wrong.
        RecordingError: the folder has a recording of another model, another run writes
            to it, or it cannot be written.
    """
    check_model(model)
    kind = "a torch.optim.Optimizer"
    check_kind("optimizer", optimizer, torch.optim.Optimizer, kind, "pass that of the loop")
    check_path("folder", folder)
    check_whole("every", every, 1)
    check_whole("start", start, 0)
    return RecordedModule(model, optimizer, Path(folder), every, start)


class RecordedModule:
    """A plain loop that is recorded; made by `record_module`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: Path,
        every: int,
        start: int,
    ) -> None:
        self._params = {_plain(model, name): p for name, p in model.named_parameters()}
        self._buffers = {_plain(model, name): x for name, x in model.named_buffers()}
        self._optimizer, self._every, self._number = optimizer, every, start
        rank, world_size = _place()
        self._is_first = rank == 0
        self._last: Recorded | None = None
        self._numbers: dict[str, list[float]] = {}
        self._given: Tensors = {}
        self._grads: Tensors = {}
        self._writer = None
        if self._is_first:
            try:
                self._writer = Writer(folder, self._header(world_size))
            except OSError as error:
                raise RecordingError(
                    f"record_module: folder must be one that this process may write ({error}); "
                    f"pass another"
                ) from None
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def _header(self, world_size: int) -> Header:
        params, buffers = (
            {n: ModelTensor((*x.shape,), n.rpartition(".")[0]) for n, x in tensors.items()}
            for tensors in (self._params, self._buffers)
        )
        device = next(iter(self._params.values())).device
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in self._params.values()})
        settings = {
            **_versions(device),
            "precision": "; ".join(dtypes),
            "stage": "plain loop",
            "ranks": str(world_size),
            "optimizer": type(self._optimizer).__name__,
        }
        how: dict[str, Any] = {"settings": settings, "every": self._every}
        return Header(of="module", params=params, buffers=buffers, **how)

    def note(self, *, loss: Any = None, grad_norm: Any = None) -> None:
        """Notes numbers of the next update, as rank 0 gives them. Of several losses
        (micro-batches) the mean counts, of several norms the last one.
        """
        if loss is not None:
            self._numbers.setdefault("loss", []).append(_number(loss))
        if grad_norm is not None:
            self._numbers["grad_norm"] = [_number(grad_norm)]

    def close(self) -> None:
        """Ends the recording: removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        if self._writer is not None:
            self._writer.close()

    def _before(self, *_: Any) -> None:
        if self._number % self._every == 0:
            self._given = {"weight": self._sums(self._params), **self._module_buffers()}
            grads = {name: p.grad for name, p in self._params.items() if p.grad is not None}
            self._grads = {"gradient": self._sums(grads)}

    def _after(self, *_: Any) -> None:
        number, self._number = self._number, self._number + 1
        noted, self._numbers = self._numbers, {}
        if number % self._every:
            return
        made = self._grads | self._module_buffers() | {"weight": self._sums(self._params)}
        for name, param in self._params.items():
            for key, x in self._optimizer.state.get(param, {}).items():
                if isinstance(x, Tensor):
                    x = x.float() if x.dim() == 0 else x
                    made.setdefault(_label(key, [key]), {}).update(self._sums({name: x}))
        numbers: dict[str, float | None] = {
            name: sum(values) / len(values) for name, values in noted.items()
        }
        rate = torch.as_tensor(self._optimizer.param_groups[0]["lr"], dtype=torch.float32)
        numbers["lr"] = float(rate)  # as fzero's metrics have it
        step = Recorded(number, numbers, None, "", self._given, made)
        if self._writer is not None:
            self._writer.write(step.line(self._last))
        self._last = step

    def _module_buffers(self) -> Tensors:
        return {"module buffer": self._sums(self._buffers)} if self._buffers else {}

    def _sums(self, tensors: Mapping[str, Tensor]) -> dict[str, Sums]:
        found = {}
        for name, x in tensors.items():
            if hasattr(x, "full_tensor"):
                x = x.full_tensor()
            if self._is_first:
                found[name] = Sums.of(sums_of(x, 0))
        return found


def _place() -> tuple[int, int]:
    """Rank and number of ranks: of the process group, else as a launcher says."""
    world, start = job(), launched()
    if world.size > 1 or start is None:
        return world.rank, world.size
    return start.rank, start.world_size


def _number(x: Any) -> float:
    return float(x.detach() if isinstance(x, Tensor) else x)


def _plain(model: nn.Module, name: str) -> str:
    """The name of a tensor in the model itself, inside of wrappers."""
    if type(model).__name__ == "DistributedDataParallel":
        name = name.removeprefix("module.")
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
