"""`ModelInGraph`: the loss of a model and its gradients, from flat buffers, as functions that a graph holds.

1. Autograd never sees a collective: the leaves are views of gathered buffers, cut by one split.
2. The gradient is that of a traced `torch.autograd.backward`, which runs the backward of an `autograd.Function`.

Shape letters: P padded elements of a flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.weak import WeakTensorKeyDictionary

from fzero.comms.collectives import labelled
from fzero.comms.mesh import AxisMesh, OneRank
from fzero.comms.records import Label
from fzero.comms.stacked import Stacked
from fzero.compression.inputs import quantized_inputs
from fzero.compression.plan import CompressionPlan
from fzero.graph.remat import BACKWARD, SEEN
from fzero.graph.tracing import alone, has_changed
from fzero.model.errors import INSIDE, UNRELATED, late, marked, of_own_class, was_changed, wrong_kind
from fzero.model.fetched_parameters import FetchedParameters, marks_of, new_marks
from fzero.model.own_params import Substitutes, check_no_hooks, own_class, shape_and_dtype, substituted
from fzero.runtime.loss import LossFn, loss_of
from fzero.runtime.step_runtime import StepRuntime
from fzero.runtime.token_dropping import replacing
from fzero.state import TrainState
from fzero.verbs import start_gather

See = Callable[[str], Tensor]


class WithLoss(nn.Module):
    """The model and its loss as one module, for `functional_call`."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, **how: Any) -> None:
        super().__init__()
        self.model, self.loss_fn, self.how = model, loss_fn, how
        self.inside: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context in which the model runs."""

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        with self.inside():
            return loss_of(self.model, self.loss_fn, batch, **self.how)

    def __call__(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Without the hooks of all modules: to the user this is no module."""
        return self.forward(batch)


class ModelInGraph:
    """The model on one rank, or on all ranks at once, computing with the tensors of a state.

    Args:
        run: the model and its plan, on one rank.
        mesh, ranks: on which it gathers, and runs.

    Attributes:
        length: the number of tokens that layers keep which drop tokens.
    """

    def __init__(self, run: StepRuntime, mesh: AxisMesh[Any], ranks: OneRank | Stacked) -> None:
        recipe, plan, model = run.recipe, run.plan, run.recipe.model
        self._run, self._compress, self.length = run, recipe.compress or CompressionPlan(), 0
        self._rules, self._graph, self._ranks = run.rules.loss, mesh, ranks
        self._comm_hooks, self._flats = plan.comm_hooks, plan.flat_buffers
        self._trained = tuple(flat for flat in self._flats if flat.trainable)
        # If a module has two names, its tensors are passed under one: functional_call cannot restore an attribute that it sets
        # twice.
        slots: set[str] = set()
        for name, module in model.named_modules():
            for listed in (module.named_parameters, module.named_buffers):
                slots.update(key for key, _ in listed(name, recurse=False, remove_duplicate=False))
        self._aliases = {alias: owner for alias, owner in plan.aliases.items() if alias in slots}
        how: dict[str, Any] = {"autocast": run.autocast, "device": run.device.type}
        self._module = WithLoss(model, recipe.loss_fn, reduces_by_sum=not self._rules.is_mean, **how)
        # Weak references: a model may be moved to `meta` to free its own parameters.
        self._own = WeakTensorKeyDictionary({param: name for name, param in model.named_parameters()})  # type: ignore[no-untyped-call]
        self._compressed = [(module, names) for module in model.modules() if (names := self._names_in(module))]
        self._recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]

    def _names_in(self, module: nn.Module) -> dict[str, str]:
        """The names of a module's own compressed parameters, by key."""
        names = {key: self._own[param] for key, param in module._parameters.items() if param is not None}
        return {key: name for key, name in names.items() if name in self._compress.params}

    def loss(self, state: TrainState[Tensor], batch: Any) -> tuple[Tensor, Tensor | None]:
        """The loss and its weight if it is a sum, without gradients; writes the module buffers of the state."""
        forward = self._ranks.each(self._forward)
        with (
            torch.no_grad(),
            self._ranks.drawing(),
            self._unchanged(self._ranks.each(self._cut)(state.params)) as tensors,
        ):
            return forward(tensors, state.buffers, batch, state.step, torch.zeros_like(state.step))

    @contextmanager
    def _unchanged(self, tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Raises ParameterError if the body changes parameters."""
        versions = {name: tensor._version for name, tensor in tensors.items()}
        yield tensors
        changed = [name for name, tensor in tensors.items() if has_changed(tensor)]
        if changed or any(tensor._version != versions[name] for name, tensor in tensors.items()):
            raise was_changed(changed[0] if changed else None)

    def value_and_grad(
        self, state: TrainState[Tensor], batch: Any, numbers: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], bool]:
        """One rank's row (4,): loss, weight or -1, two of `numbers`; its gradients by name; whether losses are sums.

        Writes the module buffers of the state. The third of `numbers` is that of the micro-batch.
        """
        tensors = {name: alone(tensor).detach() for name, tensor in self._ranks.each(self._cut)(state.params).items()}
        leaves = {name: tensors[name].requires_grad_() for flat in self._trained for name in flat.layout.names}
        are_sums: list[bool] = []

        def forward(
            tensors: dict[str, Tensor],
            buffers: dict[str, Tensor],
            batch: Any,
            n: Tensor,
            numbers: Tensor,
            scale: Tensor,
        ) -> tuple[Tensor, Tensor]:
            loss, weight = self._forward(tensors, buffers, batch, n, numbers[2])
            are_sums.append(weight is not None)
            loss_and_weight = [loss.detach().double(), (-torch.ones_like(loss) if weight is None else weight).double()]
            row = torch.cat([torch.stack(loss_and_weight), numbers[:2]]).detach()
            if self._rules.scales_loss:
                loss = loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale
            return loss, row

        with self._ranks.drawing(), self._unchanged(tensors):
            loss, row = self._ranks.each(forward)(
                tensors, state.buffers, batch, state.step, numbers, state.loss_scale.scale
            )
        if any(leaf.grad is not None for leaf in leaves.values()):
            raise RuntimeError(INSIDE)
        with (
            torch.fx.traceback.annotate(BACKWARD),
            self._in_backward({**tensors, **state.buffers}, state.step, numbers),
        ):
            # Each simulated rank has a loss of its own, and that loss has no gradient in another rank's parameters. Not
            # `torch.autograd.grad`: it leaves out what is no way to a leaf, and so a backward inside this one (reentrant
            # checkpoints, reversible nets) that adds to the leaves.
            torch.autograd.backward(loss, torch.ones_like(loss) if loss.dim() else None)
        grads = [leaf.grad for leaf in leaves.values()]
        for leaf in leaves.values():
            leaf.grad = None
        if all(grad is None for grad in grads):
            raise ValueError(UNRELATED)
        # Not zeros_like: it would read the parameter, and so gather its unit once more.
        grads_by_name = {
            name: torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), grads)
        }
        return row, grads_by_name, are_sums[0]

    def _cut(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parameters by name, cut from gathered flat buffers."""
        tensors: dict[str, Tensor] = {}
        for flat in self._flats:
            label = Label("gather", flat.key)
            with labelled(label):
                param_P = start_gather(params[flat.key], flat, self._graph, self._comm_hooks, label=label).wait()
            layout = flat.layout
            parts = torch.split(param_P, [*layout.numels, layout.partition.padding])
            tensors |= {name: part.view(shape) for name, shape, part in zip(layout.names, layout.shapes, parts)}
        return tensors

    def _see(self, tensors: Mapping[str, Tensor], n: Tensor) -> See:
        """The function that gives what modules see of a compressed parameter; a value is computed where it is first read."""
        plan, found = self._compress, dict[str, Tensor]()

        def see(name: str) -> Tensor:
            if name not in found:
                with torch.fx.traceback.annotate(SEEN):
                    found[name] = as_parameter(plan.seen(name, tensors[name], n.to(self._run.device), tensors))
            return found[name]

        return see

    def _dropping(self, n: Tensor, micro: Tensor) -> AbstractContextManager[None]:
        """In the body, the layers that drop tokens do so."""
        if self._run.recipe.drop is None:
            return nullcontext()
        from fzero.data.token_dropping import Draw  # a step without dropped tokens does not load it

        rank = self._ranks.rank if isinstance(self._ranks, Stacked) else self._run.rank
        draw = Draw(self.length, n.to(self._run.device), micro.to(torch.int64), rank, self._run.plan.num_micro_steps)
        return replacing(self._module.model, self._run.recipe.drop, lambda: draw)

    @contextmanager
    def _seeing(self, see: See, n: Tensor, micro: Tensor) -> Iterator[None]:
        """In the body, modules read compressed parameters through `see`, inputs are quantized where the plan says so, and layers
        drop tokens.
        """
        slots = [(module, module._parameters) for module, _ in self._compressed]
        try:
            for module, names in self._compressed:
                module.__dict__["_parameters"] = FetchedParameters(module._parameters, dict(names), see)
            with self._quantizing(n), self._dropping(n, micro):
                yield
        finally:
            for module, own in slots:
                now = module._parameters
                module.__dict__["_parameters"] = own
                own.update(
                    {key: dict.__getitem__(now, key) for key in now}
                )  # a parameter that the model assigned is found

    def _quantizing(self, n: Tensor) -> AbstractContextManager[None]:
        """In the body, modules see quantized inputs, if the plan says so."""
        if not self._compress.inputs:
            return nullcontext()
        return quantized_inputs(self._module.model, self._compress, n.to(self._run.device))

    def _forward(
        self, tensors: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any, n: Tensor, micro: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The loss, and its weight if it is a sum; writes the `buffers` that the model changes."""
        tensors = {**{name: as_parameter(tensor) for name, tensor in tensors.items()}, **buffers}
        for name, own in chain(self._module.model.named_parameters(), self._module.model.named_buffers()):
            if kind := own_class(own):
                raise of_own_class(name, kind)
            if (given_as := self._aliases.get(name, name)) in tensors:  # caches belong to their module
                attributes = vars(tensors[given_as])
                attributes.update(marks_of(own))
                attributes["fzero_marks"] = {**attributes}
        given, kinds = self._named(tensors), {name: shape_and_dtype(buffer_) for name, buffer_ in buffers.items()}
        see = self._see(tensors, n)
        self._module.inside = partial(self._seeing, see, n, micro)
        with self._reads_from(tensors, see, lambda name: given[f"model.{name}"]):
            loss, weight = torch.func.functional_call(self._module, given, (batch,), tie_weights=False)
        for name, tensor in tensors.items():
            if given[f"model.{name}"] is not tensor and name not in buffers:
                raise late("parameter", name)
            if found := new_marks(tensor):
                raise marked("buffer" if name in buffers else "parameter", name, found[0])
        _check_no_late_buffers(self._module.model, self._aliases, buffers)
        for module in self._recurrent:  # an RNN's list of weights would keep the graph's tensors alive
            module._init_flat_weights()
        for name, buffer_ in buffers.items():
            now = given[f"model.{name}"]  # functional_call leaves the tensor here that the model assigned to the buffer
            if kinds[name] != shape_and_dtype(now):
                raise wrong_kind(name, kinds[name], shape_and_dtype(now))
            if now is not buffer_:
                buffer_.copy_(now.detach())
        return loss, weight

    def _named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors by their names in `_module`; adds those of aliases to `tensors`."""
        for alias, owner in self._aliases.items():
            tensors[alias] = tensors[owner]
        return {f"model.{name}": tensor for name, tensor in tensors.items()}

    @contextmanager
    def _in_backward(self, tensors: dict[str, Tensor], n: Tensor, numbers: Tensor) -> Iterator[None]:
        """In the body, what runs of the model (`torch.utils.checkpoint`, hooks) computes with `tensors`, too."""
        if isinstance(self._ranks, Stacked):  # its tensors are of all ranks, and of a forward's code of one
            yield
            return
        see = self._see(tensors, n)
        with (
            _reparametrize_module(self._module, self._named(tensors)), self._reads_from(tensors, see, tensors.__getitem__),
            self._seeing(see, n, numbers[2]),
        ):  # fmt: skip
            yield

    @contextmanager
    def _reads_from(self, tensors: Mapping[str, Tensor], see: See, buffer: See) -> Iterator[None]:
        """In the body, the module's own parameters are read as `tensors`, or as `see` gives them; held buffers by `buffer`."""
        own: dict[int, Tensor] = {id(param): param for param in self._module.parameters()}
        names = dict[int, str]()
        for param, name in self._own.items():  # type: ignore[no-untyped-call]
            check_no_hooks(name, param)
            names[id(param)] = name

        def fetch(name: str) -> Tensor:
            return see(name) if name in self._compress.params else tensors[name]

        with substituted(Substitutes.of(own, names, fetch, buffer, self._run.recipe.held or ())):
            yield


def as_parameter(tensor: Tensor) -> Tensor:
    """The same tensor, which now passes as an `nn.Parameter`."""
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor


def _check_no_late_buffers(model: nn.Module, aliases: Mapping[str, str], buffers: Collection[str]) -> None:
    """Raises ValueError for a buffer that was registered after the step was made; caches belong to their module."""
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            is_cache = key in module._non_persistent_buffers_set
            if buffer is not None and not is_cache and aliases.get(name, name) not in buffers:
                raise late("buffer", name)
