"""`trace_activations`: the memory of activations and the FLOPs of one micro-step over
time, measured on fake tensors.

The model runs in a `FakeTensorMode` in the configuration's dtypes, with or without
checkpointing. Every storage that an operator allocates counts until it is freed:
activations, other results of kernels, and the gradient of a parameter until a step
would write it into its flat buffer. Parameters and the temporaries inside a kernel do
not count. With `cpu_checkpointing` the inputs of checkpointed modules are copied to
host memory and back as in a step on a GPU
(`fzero.transforms.checkpointing.host_moves`), and count as host memory meanwhile. The
operators are the CPU's, where attention without a mask is fused as on CUDA.

A trace is cut into `TraceEvent`s where a parameter is read, is needed again or has its
gradient: there a step gathers and reduces. `fzero.estimation.dry_run` replays them.
They are the same in all stages and placements.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.common.flops import flops_of_call
from fzero.comms.axes import AbstractAxis
from fzero.comms.mesh import SEQ
from fzero.comms.records import messages
from fzero.comms.traced import TracedAxis
from fzero.config.config import Config
from fzero.estimation.ledger import Device
from fzero.model.binding import bound
from fzero.model.changes import attributes_kept, replaced_forwards
from fzero.model.transforms import AllChanges, Call
from fzero.plans.machine_model import MachineModel, OperatorKind
from fzero.plans.plan import Plan
from fzero.plans.plan_spec import plan
from fzero.plans.traffic import ActivationSend
from fzero.plans.units import blocks_of
from fzero.runtime.batches import LossFn, loss_of, map_tensors, without_memory
from fzero.storage.buffer_sizes import pinned_nbytes
from fzero.transforms.checkpointing import Moves, Site, checkpointed, choose_modules
from sharding.views import dtype_name, torch_dtype


class OperatorCost(NamedTuple):
    """The cost of one operator: floating point operations, bytes read and written, and
    whether its dtype exceeds 16 bits.
    """

    flops: int
    nbytes: int
    is_wide: bool
    kind: OperatorKind = ""

    def seconds(self, machine: MachineModel) -> float:
        """Its duration in an eager step."""
        return machine.operator + machine.seconds(
            self.flops, self.nbytes, is_wide=self.is_wide, kind=self.kind
        )


class TraceEvent(NamedTuple):
    """An event of a parameter, and what happens until the next event.

    `fetch`: the forward reads the parameter; `unpack`: the backward reads it again;
    `grad`: its gradient is ready; `boundary`: the forward/backward boundary. Sizes are
    in bytes.
    """

    kind: Literal["begin", "fetch", "boundary", "unpack", "grad"]
    name: str = ""  # the parameter's name
    most: int = 0  # the peak of activations
    now: int = 0  # activations when the event starts
    work: tuple[OperatorCost, ...] = ()
    most_kept: int = 0  # `most` and `now` if checkpointed inputs stayed on the device
    now_kept: int = 0
    sends: tuple[ActivationSend, ...] = ()
    waiting: int = 0  # the peak of checkpointed inputs in host memory
    leaves: int = 0  # such inputs that are copied to host memory
    returns: int = 0  # and those that are copied back


@dataclass(frozen=True, slots=True)
class ActivationTrace:
    """The needs of one micro-step on one rank: peak bytes of activations, floating
    point operations, and the events.
    """

    nbytes: int
    flops: int
    events: tuple[TraceEvent, ...] = ()
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    """By module that ran: the bytes of the floating tensors that it took and returned
    first.
    """
    _seconds: dict[MachineModel, tuple[float, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def seconds(self, machine: MachineModel) -> tuple[float, ...]:
        """The duration of the work of each event."""
        if machine not in self._seconds:
            self._seconds[machine] = tuple(
                sum(work.seconds(machine) for work in event.work) for event in self.events
            )
        return self._seconds[machine]

    @property
    def sends(self) -> tuple[ActivationSend, ...]:
        """The collectives of activations in the micro-step, in order."""
        return tuple(send for event in self.events for send in event.sends)

    def without_moves(self) -> ActivationTrace:
        """The same micro-step with checkpointed inputs that stay on the device."""
        events = tuple(
            event._replace(most=event.most_kept, now=event.now_kept, waiting=0, leaves=0, returns=0)
            for event in self.events
        )
        return ActivationTrace(max(event.most for event in events), self.flops, events, self.sizes)

    @property
    def host_nbytes(self) -> int:
        """The peak of checkpointed inputs in host memory, in bytes."""
        return max((event.waiting for event in self.events), default=0)


class _Owner:
    """Lives as long as one of the storages that would be one if checkpointed inputs
    stayed on the device.
    """


class ActivationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operators allocate in the body, and their
    floating point operations.

    (`FlopCounterMode` would keep alive the tensors that checkpointed modules
    recompute.) `moves` copies checkpointed inputs to host memory and back, and counts
    them there. "kept" are the bytes on the device if they stayed: an input and its
    copies count once, until the last of them is freed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.events: list[TraceEvent] = []
        self.moves = Moves(partial(self._copied, "leaves"), partial(self._copied, "returns"))
        self._event, self._work = TraceEvent("begin"), list[OperatorCost]()
        self._sends: list[ActivationSend] = []
        # bytes by memory: now, and the most of this event
        self._held, self._peak = Counter[str](), Counter[str]()
        self._copying, self._copied_since = "", Counter[str]()
        self._copied_from: Any = None  # a storage
        self._owners: weakref.WeakKeyDictionary[Any, _Owner] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def most(self) -> int:
        """The peak bytes on the device."""
        return max([self._peak["device"], *(event.most for event in self.events)])

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Excludes tensors that exist already."""
        self._seen |= {x.untyped_storage() for x in tensors}

    def mark(self, kind: Literal["fetch", "boundary", "unpack", "grad"], name: str = "") -> None:
        """Ends the current event and begins the next."""
        peak, copied = self._peak, self._copied_since
        ended = self._event._replace(
            most=peak["device"], now=self._held["device"], work=tuple(self._work)
        )
        ended = ended._replace(
            most_kept=peak["kept"], now_kept=self._held["kept"], sends=tuple(self._sends)
        )
        self.events.append(
            ended._replace(waiting=peak["host"], leaves=copied["leaves"], returns=copied["returns"])
        )
        self._event, self._work, self._sends = TraceEvent(kind, name), [], []
        self._peak, self._copied_since = self._held.copy(), Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE_OF:  # two of three calls; autograd asks for the device of each tensor
            return args[0].fake_device
        if func is _WAIT:  # it returns the same tensor; a fake one is another
            func(*args)
            return args[0]
        if func in _COLLECTIVES:
            self._sends.append(_send_of(func, args))
        out = func(*args, **(kwargs or {}))
        flops = flops_of_call(func, args, kwargs or {}, out)
        self.flops += flops
        for x in tensors_in(out):
            storage = x.untyped_storage()
            if storage not in self._seen:
                self._seen.add(storage)
                self._add(storage, storage.nbytes())
        is_work = not self._copying and func not in _COLLECTIVES
        if is_work and (work := _work_of(func, flops, args, out)).nbytes:
            self._work.append(work)
        return out

    def _add(self, storage: Any, nbytes: int) -> None:
        if self._copying:
            owner = self._owners.get(self._copied_from)  # None: it is ignored
        else:
            owner = _Owner()
            self._hold(owner, "kept", nbytes)
        if owner is not None:
            self._owners[storage] = owner
        is_host = self._copying == "leaves"
        self._hold(
            storage, "host" if is_host else "device", pinned_nbytes(nbytes) if is_host else nbytes
        )

    def _hold(self, thing: Any, memory: str, nbytes: int) -> None:
        """Counts bytes until a storage or an owner is freed."""
        self._held[memory] += nbytes
        self._peak[memory] = max(self._peak[memory], self._held[memory])
        weakref.finalize(thing, self._held.subtract, {memory: nbytes})

    def _copied(self, direction: Literal["leaves", "returns"], x: Tensor) -> Tensor:
        """A copy between the device and host memory; it occupies the host link, and so
        adds no `OperatorCost`.
        """
        self._copying, self._copied_from = direction, x.untyped_storage()
        self._copied_since[direction] += x.nbytes
        try:
            return x.clone()
        finally:
            self._copying, self._copied_from = "", None


_C10D = torch.ops._c10d_functional
_WAIT = _C10D.wait_tensor.default
_COLLECTIVES = {
    _C10D.all_to_all_single.default: "all_to_all",
    _C10D.all_gather_into_tensor.default: "all_gather",
    _C10D.reduce_scatter_tensor.default: "reduce_scatter",
}


def _send_of(func: Any, args: tuple[Any, ...]) -> ActivationSend:
    """What one rank sends in a collective of the axis that `trace_activations` gives."""
    x, axis, kind = args[0], args[-1], _COLLECTIVES[func]
    size = len(args[1]) if kind == "all_to_all" else next(a for a in args if isinstance(a, int))
    whole = x.numel() * size if kind == "all_gather" else x.numel()
    message = next(messages(whole, (size,)))
    return ActivationSend(kind, axis, message.numel * message.num_others, dtype_name(x.dtype))


_DEVICE_OF = torch.ops.prim.device.default
_FUNCTIONS = (
    "_norm",
    "softmax",
    "gelu",
    "silu",
    "tanh",
    "sigmoid",
    "exp",
    "erf",
    "sum",
    "mean",
    "div",
)
"""Parts of the names of operators that compute for longer than they move bytes."""
_MOVES_NOTHING = ("empty", "_unsafe_view", "lift_fresh", "_reshape_alias", "detach")


def _work_of(func: Any, flops: int, args: tuple[Any, ...], out: Any) -> OperatorCost:
    name, made = func.overloadpacket.__name__, tensors_in(out)
    if (
        func.is_view
        or not made
        or name.startswith(_MOVES_NOTHING)
        or name in ("new_empty", "new_empty_strided")
    ):
        return OperatorCost(flops, 0, False)
    read = tensors_in(args)
    if name == "embedding":  # reads only the rows of the table that it returns
        read = read[1:] + made
    # counted operators only; attention also reads sums in fp32
    is_wide = made[0].dtype.itemsize > 2
    kind: OperatorKind = (
        "attention"
        if "attention" in name
        else "pointwise"
        if any(x in name for x in _FUNCTIONS)
        else ""
    )
    return OperatorCost(flops, sum(map(_nbytes, (*read, *made))), is_wide, kind)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree."""
    if isinstance(tree, Tensor):
        return [tree]
    return [x for x in optree.tree_leaves(tree, none_is_leaf=True) if isinstance(x, Tensor)]


def _nbytes(x: Tensor) -> int:
    """Bytes in memory; an expanded tensor has fewer than its elements would take."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def trace_activations(
    model: nn.Module,
    cfg: Config | Any,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    checkpoint: bool | None = None,
    on_host: bool | None = None,
    device: Device = "cuda",
    changes: AllChanges | None = None,
    seq_size: int = 1,
) -> ActivationTrace:
    """Activations and FLOPs of one forward and backward.

    Args:
        model: any module that runs on fake tensors, without branches on data.
        cfg: gives the dtypes and `activation_checkpointing`.
        batch: one rank's samples of a micro-step; tensors may be on `meta`.
        loss_fn: see `make_train_step`.
        checkpoint: whether units are checkpointed: as many as the configuration sets,
            or every one if it sets none. None follows the configuration.
        on_host: whether their inputs are kept in host memory; None follows
            `cpu_checkpointing`.
        device: where the model is; on the CPU inputs are in host memory already.
        changes: the changes of transforms: views, which give modules other values than
            the parameters, other forwards, batches and losses.
        seq_size: the number of ranks that share the samples; `changes` divide them.

    Raises:
        ValueError: the model cannot run on this batch, needs the values of tensors, or
            returns no loss.
    """
    cfg = Config.load(cfg)
    every = cfg.activation_checkpointing.every
    if checkpoint is not None:
        every = (every or 1) if checkpoint else None
    chosen = choose_modules(
        model, every, blocks=blocks_of(model), field="activation_checkpointing.every"
    )
    on_host = cfg.activation_checkpointing.cpu_checkpointing if on_host is None else on_host
    alive, call = ActivationCounter(), _call(seq_size)
    if changes is not None:
        loss_fn = changes.loss_fn(loss_fn)
        if (divided := changes.batch_fn(call.seq)) is not None:
            batch = divided(batch)
    autocast = torch_dtype(cfg.precision.autocast) if cfg.precision.autocast else None
    with faked(model, cfg, None if changes is None else changes.trained(model)) as (
        layout,
        params,
        buffers,
    ):
        fake_batch = without_memory(batch, torch.device("cpu"))
        if (dtype := cfg.casts_batch_to) is not None:
            fake_batch = map_tensors(
                lambda x: x.to(torch_dtype(dtype)) if x.is_floating_point() else x, fake_batch
            )
        for name, views in () if changes is None else changes.views.items():
            given = params | buffers
            params[name] = reduce(lambda x, view: view.value(x, given, 0), views, params[name])
        alive.ignore([*params.values(), *buffers.values(), *tensors_in(fake_batch)])
        recorder = _Recorder(alive, layout, params, {} if changes is None else changes.relays)
        with (
            _with_fix(model),
            attributes_kept(model),
            bound(model, layout.aliases, recorder.fetch, buffers),
            nullcontext() if changes is None else changes.bound(model, lambda: call),
            _checkpointed(model, chosen, alive.moves if on_host and device == "cuda" else None),
            saved_tensors_hooks(recorder.pack, recorder.unpack),
            _sizes_of_modules(model) as sizes,
            _nothing_packed(),
            alive,
        ):
            loss, _ = loss_of(
                model, loss_fn, fake_batch, reduces_by_sum=False, autocast=autocast, device="cpu"
            )
            alive.mark("boundary")
            loss.backward()  # type: ignore[no-untyped-call]
    alive.mark("boundary")  # ends the last event
    return ActivationTrace(alive.most, alive.flops, tuple(alive.events), sizes)


def _call(seq_size: int) -> Call:
    """The first forward of one rank. As in a graph blocks are not compiled one by one;
    checkpoints are those of `_checkpointed`.
    """
    device = torch.device("cpu")
    axis = AbstractAxis(SEQ, seq_size)  # of NCCL: one collective of each kind
    return Call(
        num_updates=lambda: 0,
        micro=lambda: 0,
        rank=0,
        num_micro=1,
        device=device,
        in_graph=True,
        seq=None if seq_size == 1 else TracedAxis.of(axis, device),
    )


@contextmanager
def faked(
    model: nn.Module, cfg: Config, trained: Collection[str] | None = None
) -> Iterator[tuple[Plan, dict[str, Tensor], dict[str, Tensor]]]:
    """Inside, tensors have no memory. Yields a plan, and the model's parameters and
    buffers in their configured dtypes.

    Args:
        trained: see `fzero.plans.PlanSpec`.
    """
    # The dtypes do not depend on the stage, and nothing here depends on the configured number of
    # samples.
    alone = cfg.model_copy(
        update={
            "zero_optimization": cfg.zero_optimization.model_copy(
                update={"stage": 0, "offload_optimizer": None}
            ),
            **dict.fromkeys(
                (
                    "train_batch_size",
                    "train_micro_batch_size_per_gpu",
                    "gradient_accumulation_steps",
                )
            ),
        }
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        layout = plan(model, alone, trained=trained)
        yield layout, _params(model, layout), _buffers(model, layout)


class _Gate(torch.autograd.Function):
    """A parameter as a step passes it to the model
    (`fzero.runtime.autograd_nodes.ParamLeaf`).

    Its gradient comes with those of the parameters `names`.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, param: Tensor, alive: ActivationCounter, names: tuple[str, ...]
    ) -> Tensor:
        ctx.alive, ctx.names = alive, names
        return param

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        for name in ctx.names:
            ctx.alive.mark("grad", name)
        return None, None, None, None


_gate: Callable[..., Tensor] = _Gate.apply  # type: ignore[assignment]


class _Recorder:
    """Passes parameters to the model unit by unit, and marks when they are read, needed
    again and have gradients.
    """

    def __init__(
        self,
        alive: ActivationCounter,
        layout: Plan,
        params: Mapping[str, Tensor],
        relays: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.alive, self.params, self._relays = alive, params, relays
        self._units = {
            name: unit for unit in layout.units for b in unit.buffers for name in b.layout.names
        }
        self._names = {x.untyped_storage()._cdata: name for name, x in params.items()}
        self._anchor = torch.empty(0, requires_grad=True)
        self._leaves = dict[str, Tensor]()

    def fetch(self, name: str) -> Tensor:
        # all visits of a unit share its nodes of autograd, as in a step
        if name not in self._leaves:
            with torch.enable_grad():
                for buffer in self._units[name].buffers:
                    for own in buffer.layout.names:
                        param = self.params[own]
                        names = (*((own,) if buffer.trainable else ()), *self._relays.get(own, ()))
                        self._leaves[own] = (
                            _gate(self._anchor, param, self.alive, names) if names else param
                        )
        self.alive.mark("fetch", name)
        return self._leaves[name]

    def pack(self, tensor: Tensor) -> tuple[Tensor, str]:
        return tensor, self._names.get(tensor.untyped_storage()._cdata, "")

    def unpack(self, packed: tuple[Tensor, str]) -> Tensor:
        tensor, name = packed
        if name:
            self.alive.mark("unpack", name)
        return tensor


def _params(model: nn.Module, layout: Plan) -> dict[str, Tensor]:
    own = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: torch.empty(own[name].shape, dtype=torch_dtype(buffer.dtypes.param))
        for buffer in layout.flat_buffers
        for name in buffer.layout.names
    }


def _buffers(model: nn.Module, layout: Plan) -> dict[str, Tensor]:
    own = dict(model.named_buffers(remove_duplicate=False))
    return {
        name: torch.empty(own[name].shape, dtype=torch_dtype(spec.dtype))
        for name, spec in layout.buffers.items()
    }


@contextmanager
def _with_fix(model: nn.Module) -> Iterator[None]:
    """Adds a fix to errors of the model; the body's own ValueErrors pass."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    # gets an error and its traceback before it is raised
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(drop)
    try:
        yield
    except ValueError:
        raise  # an error of the loss names its own fix
    except Exception as error:
        fix = "correct the model or the batch"
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            fix = "it reads values of tensors, and a dry run has none: use torch.where and the like"
        raise ValueError(
            f"batch: {type(model).__name__} must run forward and backward on it, got "
            f"{type(error).__name__}: {error}; {fix}, or plan without a batch"
        ) from error
    finally:
        log.removeFilter(drop)


@contextmanager
def _sizes_of_modules(model: nn.Module) -> Iterator[dict[str, tuple[int, int]]]:
    """Inside, each module that runs is entered with the bytes of the floating tensors
    that it takes and returns first.
    """
    sizes = dict[str, tuple[int, int]]()

    def nbytes(tree: Any) -> int:
        return sum(x.nbytes for x in tensors_in(tree) if x.is_floating_point())

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if name not in sizes:
                sizes[name] = nbytes(args), nbytes(out)

        return hook

    handles = [
        module.register_forward_hook(enter(name)) for name, module in model.named_modules() if name
    ]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()


def _checkpointed(
    model: nn.Module, names: tuple[str, ...], moves: Moves | None
) -> AbstractContextManager[None]:
    """Checkpoints as in a step, but restores no module buffers before a recomputation:
    they have no values here.
    """
    anchor = torch.empty(0)

    def wrapped(name: str, module: nn.Module) -> Callable[..., Any]:
        return checkpointed(Site(name, module.forward, [], frozenset(), moves, nullcontext, anchor))

    return replaced_forwards(model, names, wrapped) if names else nullcontext()


@contextmanager
def _nothing_packed() -> Iterator[None]:
    """Inside, transformers takes each row of a batch for one sequence. It reads this from
    the positions, which have no values here, and else makes a mask of all pairs of tokens.
    """
    masks = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if masks is None or (found := getattr(masks, name, None)) is None:
        yield
        return
    setattr(masks, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masks, name, found)


class Activations:
    """The traces of one model and batch, with and without checkpointing, each made
    once.

    Args:
        tiles: the changes of `tiled` traces.
        changes: those of the others.
        seq_size: the number of ranks that share the samples.

    Attributes:
        has_units: whether the model has units to checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        cfg: Config | Any,
        batch: Any,
        loss_fn: LossFn | None = None,
        device: Device = "cuda",
        tiles: AllChanges | None = None,
        changes: AllChanges | None = None,
        seq_size: int = 1,
    ) -> None:
        self.has_units = False
        with suppress(ValueError):
            self.has_units = bool(choose_modules(model, 1, blocks=blocks_of(model)))
        self._trace = cache(
            lambda checkpoint, tiled: trace_activations(
                model,
                cfg,
                batch,
                loss_fn=loss_fn,
                checkpoint=checkpoint,
                on_host=checkpoint,
                device=device,
                changes=tiles if tiled else changes,
                seq_size=seq_size,
            )
        )
        self._without_moves = cache(lambda tiled: self._trace(True, tiled).without_moves())

    def of(
        self, *, checkpoints: bool, on_host: bool = False, tiled: bool = False
    ) -> ActivationTrace:
        """The trace with or without checkpointed units, whose inputs are kept in host
        memory (`on_host`) or on the device, and with or without tiles.
        """
        if checkpoints and not on_host:
            return self._without_moves(tiled)
        return self._trace(checkpoints, tiled)

    def of_config(self, cfg: Config) -> ActivationTrace:
        """The trace with the checkpointing of a configuration."""
        checkpointing = cfg.activation_checkpointing
        return self.of(
            checkpoints=checkpointing.every is not None, on_host=checkpointing.cpu_checkpointing
        )
