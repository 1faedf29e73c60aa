"""The torch.compile backend of a captured step: it checks what Dynamo captured, schedules it and keeps the graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from fzero.comms.stacked import check_draws_nothing
from fzero.comms.traced import TracedAxis
from fzero.graph.backends import aot_eager, graph_only, inductor
from fzero.graph.schedule import PassOptions, copy_of
from fzero.plans.plan import Plan
from fzero.runtime.own_params import ParameterError, was_changed

BackendName = Literal["inductor", "aot_eager"]

_STATE = re.compile(
    r"L\['\w+'\](?:\[\d+\])?\['([^']*)'\]"
)  # a tensor in a dict, under its key; flat buffers have their own keys


def pass_options(plan: Plan) -> PassOptions:
    """The limits of a step's schedule: those of the configuration, and the defaults of the eager step for the rest."""
    named = {
        "prefetch": plan.prefetch,
        "max_reuse_distance": plan.max_reuse_distance,
        "gather_bucket": plan.gather_bucket,
        "reduce_bucket": plan.reduce_bucket,
    }
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    ahead = PassOptions().ahead if plan.prefetch is None else None
    return PassOptions(ahead=ahead, max_live=plan.max_live, max_reducing=plan.max_reducing, **given)


@dataclass(slots=True)
class Backend:
    """A torch.compile backend that schedules captured graphs (`fzero.graph.schedule`), counts the captures and keeps the graphs.

    Attributes:
        units: the unit of each flat buffer, by its key.
        checkpoint: the modules that the backward runs again (`fzero.graph.remat`).
        own: the names of the module's own parameters, which no graph may read: a graph reads the state's.
        axes: the axes whose exchanges skip the own rank (gloo).
        stacked: whether one graph runs all ranks; it must not draw random numbers.
        graphs: the scheduled aten graph of each capture, in order; a `copy_` writes each mutated input.
        num_captured: the number of captures, including those whose passes a cache saved.
    """

    name: BackendName
    options: PassOptions
    units: Mapping[str, str] = field(default_factory=dict)
    checkpoint: dict[str, str] = field(default_factory=dict)
    own: Mapping[Tensor, str] = field(default_factory=WeakTensorKeyDictionary)
    axes: tuple[TracedAxis, ...] = ()
    stacked: bool = False
    graphs: list[torch.fx.Graph] = field(default_factory=list)
    num_captured: int = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        self.check(module)
        self.num_captured += 1
        make = inductor if self.name == "inductor" else aot_eager
        sources = [node.meta["grapharg"].source.name for node in module.graph.nodes if node.op == "placeholder"]
        backend = make(
            self.options,
            units=[self.unit_of(source) for source in sources],
            checkpoint=self.checkpoint,
            axes=self.axes,
            observe=self._keep,
        )
        return backend(module, inputs)

    def check(self, module: torch.fx.GraphModule) -> None:
        """Raises ParameterError if the captured graph reads the module's own parameters, or writes into any parameter."""
        for node in module.graph.find_nodes(op="placeholder"):
            example = node.meta["grapharg"].example
            name = self.own.get(example) if isinstance(example, Tensor) else None
            if name is not None:
                raise ParameterError(
                    f"parameter {name!r}: must be read from its module where the step is one graph, got code that holds it "
                    f"elsewhere (a list, a closure, functools.partial), where it would not be trained; read the module's "
                    f"attribute, or pass compile='block' or None"
                )
        if not self.stacked:  # a stacked step checks writes before the capture
            check_writes(module)

    def graph_only(self, module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """A backend that captures the graph and runs nothing."""
        self.check(module)
        return graph_only(module, inputs)

    def _keep(self, graph: torch.fx.Graph) -> None:
        if self.stacked:
            check_draws_nothing(graph)
        self.graphs.append(copy_of(graph))

    def unit_of(self, source: str) -> str | None:
        """The unit of a tensor, from its name in a captured function, such as `L['params']['blocks.0/float32']`."""
        key = _STATE.match(source)
        return self.units.get(key[1]) if key else None


def as_parameter(tensor: Tensor, name: str) -> Tensor:
    """The same tensor, which now passes as an `nn.Parameter`; Dynamo captures the call as one node (`allow_in_graph`)."""
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises ParameterError for an operator that writes into one of `parameters`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parameters: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[index] if index < len(args) else kwargs.get(argument.name)
                for tensor in given if isinstance(given, list | tuple) else [given]:
                    self._check(tensor)
        return func(*args, **kwargs)

    def _check(self, written: Any) -> None:
        for name, param in self.parameters if isinstance(written, Tensor) else ():
            offset = written.storage_offset() - param.storage_offset()
            is_shared = written.untyped_storage()._cdata == param.untyped_storage()._cdata
            if is_shared and 0 <= offset < param.numel():
                raise was_changed(name)


def check_writes(module: torch.fx.GraphModule) -> None:
    """Runs the captured forward on fake tensors; raises ParameterError if it writes into a parameter."""
    nodes = list(module.graph.nodes)
    ends = [index for index, node in enumerate(nodes) if node.target is torch.autograd.grad]
    fakes = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
    modes = [fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)]
    if not ends or not modes:  # the graph of an update has no forward
        return
    interpreter, writes = torch.fx.Interpreter(module, garbage_collect_values=False), _Writes()
    values = iter(fakes)
    # Outside of the tracing context, whose fake tensors are other ones by now.
    with torch._guards.tracing(None), modes[0], writes, torch.enable_grad():
        for node in nodes[: ends[0]]:
            if node.op == "placeholder":
                value = next(values)
                interpreter.env[node] = value.detach() if isinstance(value, Tensor) else value
                continue
            interpreter.env[node] = interpreter.run_node(node)
            if node.target is as_parameter:
                writes.parameters.append((node.args[1], interpreter.env[node]))
