"""`ModelInGraph`: the loss of a model and its gradients, from flat buffers, as
functions that a graph holds.

1. Autograd never sees a collective: the leaves are views of gathered buffers, cut by
  one split.
2. The gradient is that of a traced `torch.autograd.backward`, which runs the backward
  of an `autograd.Function`.

Shape letters: P padded elements of a flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor

from fzero.comms.collectives import labelled
from fzero.comms.mesh import AxisMesh, OneRank
from fzero.comms.records import Label
from fzero.comms.stacked import Stacked
from fzero.graph.guards import Guard
from fzero.graph.impure import (
    attributes_of,
    check_caches,
    check_class,
    check_follows,
    check_not_kept,
    held_by_modules,
    no_tensor_classes,
)  # fmt: skip
from fzero.graph.remat import BACKWARD, SEEN
from fzero.graph.tracing import alone, has_changed, memory_of
from fzero.model.errors import (
    INSIDE,
    UNRELATED,
    flag_changed,
    has_hook,
    late,
    marked,
    of_own_class,
    was_changed,
)
from fzero.model.own_params import marks_of, new_marks, own_class
from fzero.model.tensor_checks import check_unchanged
from fzero.model.transforms import Call, in_own_dtypes
from fzero.plans.flat_params import FlatParamPlan
from fzero.runtime.batches import loss_of
from fzero.runtime.module_buffers import check_no_views
from fzero.runtime.step_runtime import StepRuntime
from fzero.state import TrainState
from fzero.verbs import start_gather

See = Callable[[str], Tensor]


class ModelInGraph:
    """The model on one rank, or on all ranks at once, computing with the tensors of a
    state.

    Args:
        run: the model and its plan, on one rank.
        mesh, ranks: on which it gathers, and runs.

    Attributes:
        constants: the numbers of transforms that the present graph holds.
    """

    def __init__(self, run: StepRuntime, mesh: AxisMesh[Any], ranks: OneRank | Stacked) -> None:
        spec, plan = run.spec, run.plan
        self._run, self.constants = run, run.changes.constants(0)
        self._rules, self._graph, self._ranks = run.rules.loss, mesh, ranks
        self._comm_hooks, self._flats = plan.comm_hooks, plan.flat_buffers
        self._trained = tuple(flat for flat in self._flats if flat.trainable)
        self._kept: dict[str, Tensor] = {}  # attributes under torch.vmap, after the last forward
        self._of_params: set[str] = set()  # attributes that any forward has set to a parameter
        how: dict[str, Any] = {"autocast": run.autocast, "device": run.device.type}
        self._loss_of: Callable[[Any], tuple[Tensor, Tensor | None]] = partial(
            loss_of, spec.model, run.loss_fn, reduces_by_sum=not self._rules.is_mean, **how
        )
        # Functions of the model, whose tensors have another class under torch.vmap.
        self._functions: list[FunctionType] = []
        if isinstance(ranks, Stacked):
            functions = () if spec.loss_fn is None else (spec.loss_fn,)
            with Guard.recording(run.binding.index, functions) as guard:
                self._functions = guard.functions

    def loss(self, state: TrainState[Tensor], batch: Any) -> tuple[Tensor, Tensor | None]:
        """The loss and its weight if it is a sum, without gradients; writes the module
        buffers of the state.
        """
        forward = self._ranks.map(self._forward)
        with (
            torch.no_grad(),
            self._ranks.random_per_rank(),
            self._unchanged(self._ranks.map(self._cut)(state.params), state.buffers) as tensors,
        ):
            return forward(tensors, state.buffers, batch, state.step, torch.zeros_like(state.step))

    @contextmanager
    def _unchanged(
        self, tensors: dict[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """Raises ParameterError if the body changes parameters or their flags, or one
        of two buffers that share memory.
        """
        versions = {name: x._version for name, x in (tensors | dict(buffers)).items()}
        flags = {name: x.requires_grad for name, x in tensors.items()}
        yield tensors

        def changed(given: Mapping[str, Tensor]) -> list[str]:
            return [
                name for name, x in given.items() if has_changed(x) or x._version != versions[name]
            ]

        if found := changed(tensors):
            raise was_changed(found[0])
        for name, x in tensors.items():
            if x.requires_grad != flags[name]:
                raise flag_changed(name)
        check_unchanged(changed(buffers), self._run.learned.sharing)
        self._run.changes.check_unread(changed(buffers))

    def value_and_grad(
        self, state: TrainState[Tensor], batch: Any, step_info: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], bool]:
        """One rank's row (4,): loss, weight or -1, two of `step_info`; its gradients by
        name; whether losses are sums.

        Writes the module buffers of the state. The third of `step_info` is that of the
        micro-batch.
        """
        tensors = {
            name: alone(tensor).detach()
            for name, tensor in self._ranks.map(self._cut)(state.params).items()
        }
        leaves = {
            name: tensors[name].requires_grad_()
            for flat in self._trained
            for name in flat.layout.names
        }
        are_sums: list[bool] = []

        def forward(
            tensors: dict[str, Tensor],
            buffers: dict[str, Tensor],
            batch: Any,
            n: Tensor,
            step_info: Tensor,
            scale: Tensor,
        ) -> tuple[Tensor, Tensor]:
            loss, weight = self._forward(tensors, buffers, batch, n, step_info[2])
            are_sums.append(weight is not None)
            loss_and_weight = [
                loss.detach().double(),
                (-torch.ones_like(loss) if weight is None else weight).double(),
            ]
            row = torch.cat([torch.stack(loss_and_weight), step_info[:2]]).detach()
            if self._rules.scales_loss:
                loss = loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale
            return loss, row

        with self._ranks.random_per_rank(), self._unchanged(tensors, state.buffers):
            loss, row = self._ranks.map(forward)(
                tensors, state.buffers, batch, state.step, step_info, state.loss_scale.scale
            )
        if any(leaf.grad is not None for leaf in leaves.values()):
            raise RuntimeError(INSIDE)
        with (
            torch.fx.traceback.annotate(BACKWARD),
            self._in_backward(tensors, state.buffers, state.step, step_info),
        ):
            # Each simulated rank has a loss of its own, and that loss has no gradient in another
            # rank's parameters. Not `torch.autograd.grad`: it leaves out what is no way to a leaf,
            # and so a backward inside this one (reentrant checkpoints, reversible nets) that adds
            # to the leaves.
            torch.autograd.backward(loss, torch.ones_like(loss) if loss.dim() else None)
        grads = [leaf.grad for leaf in leaves.values()]
        for leaf in leaves.values():
            leaf.grad = None
        if all(grad is None for grad in grads):
            raise ValueError(UNRELATED)
        # Not zeros_like: it would read the parameter, and so gather its unit once more.
        grads_by_name = {
            name: torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            if grad is None
            else grad
            for (name, leaf), grad in zip(leaves.items(), grads)
        }
        return row, grads_by_name, are_sums[0]

    def gathered(self, params: dict[str, Tensor]) -> Iterator[tuple[FlatParamPlan, Tensor]]:
        """The full flat buffers (P), gathered one after the other."""
        for flat in self._flats:
            label = Label("gather", flat.key)
            with labelled(label):
                param_P = start_gather(
                    params[flat.key], flat, self._graph, self._comm_hooks, label=label
                ).wait()
            yield flat, param_P

    def _cut(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parameters by name, cut from gathered flat buffers."""
        tensors: dict[str, Tensor] = {}
        for flat, param_P in self.gathered(params):
            layout = flat.layout
            parts = torch.split(param_P, [*layout.numels, layout.partition.padding])
            tensors |= {
                name: part.view(shape)
                for name, shape, part in zip(layout.names, layout.shapes, parts)
            }
        return tensors

    def _see(self, tensors: Mapping[str, Tensor], n: Tensor) -> See:
        """The function that gives what modules see of a parameter with views; a value
        is computed where it is first read.
        """
        views, found = self._run.changes.views, dict[str, Tensor]()

        def see(name: str) -> Tensor:
            if name not in found:
                value = tensors[name]
                with torch.fx.traceback.annotate(SEEN), in_own_dtypes(value):
                    for view in views[name]:
                        value = view.value(value, tensors, n.to(self._run.device))
                    found[name] = as_parameter(value, name)
            return found[name]

        return see

    def _call(self, n: Tensor, micro: Tensor) -> Call:
        run, ranks = self._run, self._ranks
        return Call(
            num_updates=lambda: n.to(run.device),
            micro=lambda: micro.to(torch.int64),
            in_graph=True,
            device=run.device,
            rank=ranks.rank if isinstance(ranks, Stacked) else run.rank,
            num_micro=run.plan.num_micro_steps,
            aliases=run.plan.aliases,
            seq=self._graph.seq,
        )

    def _forward(
        self,
        tensors: dict[str, Tensor],
        buffers: dict[str, Tensor],
        batch: Any,
        n: Tensor,
        micro: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """The loss, and its weight if it is a sum; writes the `buffers` that the model
        changes.
        """
        model = self._run.spec.model
        for name, own in chain(model.named_parameters(), model.named_buffers()):
            if kind := own_class(own):
                raise of_own_class(name, kind)
            check_class(name, own)
        before = {
            name: marks_of(as_parameter(x, name) if name in tensors else x)
            for name, x in chain(tensors.items(), model.named_buffers())
        }
        held, homes = (
            attributes_of(model, self._of_params),
            {memory_of(x) for x in tensors.values() if x.numel()},
        )
        with no_tensor_classes(self._functions), self._bound(tensors, buffers, n, micro):
            loss, weight = self._loss_of(batch)
        check_follows(model, held)
        index = self._run.binding.index
        self._of_params |= held_by_modules(index, lambda x: memory_of(x) in homes).keys()
        if isinstance(self._ranks, Stacked):
            self._kept = check_not_kept(index, self._kept)
        if found := [name for name, x in tensors.items() if x._backward_hooks]:
            raise has_hook(found[0])
        for name, x in chain(tensors.items(), model.named_buffers()):
            if found := [key for key in new_marks(x) if key not in before.get(name, ())]:
                raise marked("parameter" if name in tensors else "buffer", name, found[0])
        return loss, weight

    @contextmanager
    def _bound(
        self, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], n: Tensor, micro: Tensor
    ) -> Iterator[None]:
        """In the body, the model computes with `tensors`, as their views show them, and
        `buffers`; it writes into these.
        """
        run, present = self._run, {**buffers}
        see, views = self._see({**buffers, **tensors}, n), run.changes.views

        def fetch(name: str) -> Tensor:
            if name not in tensors:
                raise late("parameter", name)
            return see(name) if name in views else tensors[name]

        homes = {memory_of(x) for x in tensors.values() if x.numel()}
        with (
            run.binding.to(fetch, present),
            run.changes.bound(run.spec.model, lambda: self._call(n, micro), self.constants),
        ):
            yield
            check_no_views(run.binding.index, lambda x: memory_of(x) in homes)
            check_caches(run.binding.index, run.plan.aliases, buffers)
        for name, buffer in buffers.items():
            if present[name] is not buffer:  # the model has assigned it
                buffer.copy_(present[name])

    def _in_backward(
        self,
        tensors: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        n: Tensor,
        step_info: Tensor,
    ) -> AbstractContextManager[None]:
        """In the body, what runs of the model (`torch.utils.checkpoint`, hooks)
        computes with these tensors, too.
        """
        # stacked tensors hold all ranks, but the model's code expects one
        if isinstance(self._ranks, Stacked):
            return nullcontext()
        return self._bound(tensors, buffers, n, step_info[2])


def as_parameter(tensor: Tensor, name: str) -> Tensor:
    """The same tensor, which now passes as the parameter of that name."""
    tensor._is_param, tensor.fzero_name = True, name  # type: ignore[attr-defined]
    return tensor
