"""`ModelTransform`: a feature as a transformation of the model. A step is
`train(transform(model))`.

A transform is a function of the arguments of a step (`StepSpec`: model, configuration,
units, compile). It returns `Changes`:

- `views`: the values that modules get instead of parameters, and the way of a gradient
  back (`ParamView`);
- `forwards`: other forwards of modules, while the model is bound;
- tensors that it has added to modules, with their first values.

All runners apply the same changes: the eager step, a captured graph, all ranks at once,
generation and the dry run. In the model stay the tensors that were added, and the bytes
by which `packed` replaces weights.

Transforms compose in the order of their list: a view gets the value of the view before
it, and a later forward wraps an earlier one. So `[a, b]` is `b(a(model))`.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import chain
from types import MethodType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fzero.model.changes import own_forward

Tensors = Mapping[str, Tensor]
Number = int | Tensor
Choice = int | Callable[[str, nn.Module], bool]
"""Modules: n, for every n-th unit that is one module (the first included); or a
function of a module's name and the module.
"""


class PulledGrad(NamedTuple):
    """A gradient, to be multiplied by `mask` if there is one (bools or numbers,
    broadcasts); its writer does both in one pass.
    """

    grad: Tensor
    mask: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        """The product."""
        return self.grad if self.mask is None else self.grad * self.mask.to(self.grad.dtype)


class Pulled(NamedTuple):
    """The gradients of what a view is computed from.

    Attributes:
        grad: the gradient of the value that the view was given.
        trained: the gradients of the parameters in `ParamView.trains`, by name.
    """

    grad: PulledGrad
    trained: Mapping[str, Tensor] = {}


class ParamView(Protocol):
    """The value that modules get instead of a parameter: a pure function of it, of
    further tensors and of n.

    n is the number of updates so far: an int, or in a graph a 0-d int64 tensor. Other
    parameters that a view reads must be of the same module, so that they are gathered
    with it.
    """

    @property
    def offset(self) -> int:
        """The first n with another value than the parameter's own; in a graph `value`
        itself must choose.
        """
        ...

    @property
    def reads(self) -> tuple[str, ...]:
        """The full names of the parameters and module buffers that it reads besides the
        parameter.
        """
        ...

    @property
    def trains(self) -> tuple[str, ...]:
        """Of `reads`, the parameters that get a gradient. The parameter itself may be
        frozen.
        """
        ...

    @property
    def needs_input(self) -> bool:
        """Whether `pulled` needs x."""
        ...

    def shared(self, x: Tensor, tensors: Tensors) -> Tensors:
        """Tensors that `value` and `pulled` then find in `tensors`, made once for both;
        most views have none.
        """
        ...

    def value(self, x: Tensor, tensors: Tensors, n: Number) -> Tensor:
        """The value. It is differentiable, for graphs; an eager step records nothing
        and calls `pulled`.

        Args:
            x: the parameter, whole, or the value of the view before.
            tensors: has those of `reads`, by full name.
        """
        ...

    def pulled(self, grad: PulledGrad, x: Tensor | None, tensors: Tensors, n: Number) -> Pulled:
        """The gradients of x and of `trains`, from that of the value, for n ≥ offset.
        It is linear in `grad`.

        `pulled_by_autograd` is this for any differentiable `value`.
        """
        ...


def in_own_dtypes(x: Tensor) -> AbstractContextManager[None]:
    """A context without `torch.autocast`: a backward runs outside of it, and a view's
    value must be the same in both.
    """
    return torch.autocast(x.device.type, enabled=False)


def pulled_by_autograd(
    view: ParamView, grad: PulledGrad, x: Tensor | None, tensors: Tensors, n: Number
) -> Pulled:
    """`ParamView.pulled` by a derivative of `value`, which is computed once more. The
    view must have `needs_input`.
    """
    assert x is not None
    with torch.enable_grad():
        inputs = [
            x.detach().requires_grad_(x.is_floating_point()),
            *(tensors[name].detach() for name in view.trains),
        ]
        trained = [tensor.requires_grad_() for tensor in inputs[1:]]
        value = view.value(
            inputs[0], {**tensors, **dict(zip(view.trains, trained, strict=True))}, n
        )
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(
            torch.autograd.grad(value, wanted, grad.whole.to(value.dtype), materialize_grads=True)
        )
    of_x = next(found) if inputs[0].requires_grad else torch.zeros_like(x, dtype=grad.grad.dtype)
    return Pulled(PulledGrad(of_x), dict(zip(view.trains, found, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Call:
    """The forwards for which a model is bound."""

    num_updates: Callable[[], Number]
    """n, the number of updates so far; an eager step waits for the device to read it.
    """
    micro: Callable[[], Number]
    """The number of the forward that runs, or that runs again in its backward, counted
    from the last update.
    """
    rank: Number
    """This rank's number among those that hold different samples."""
    num_micro: int
    """Micro-batches of an update."""
    device: torch.device
    """The model's device."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """The other names of tied parameters and buffers."""
    in_graph: bool = False
    """Whether it is traced: n, `micro` and `rank` may then be tensors."""
    is_counted: bool = True
    """Whether forwards are counted; False where ranks call the model any number of
    times, without an update.
    """
    again: Callable[[], AbstractContextManager[None]] | None = None
    """A context in which parts of the forward run again, in a backward; None where
    there is none, or a graph does so itself.
    """
    moving: frozenset[str] | None = None
    """The names of the buffers that a forward changes; None while they are not known.
    """
    seq: Any = None
    """The axis of the ranks that share the tokens of the same samples, for primitives
    (`fzero.comms`); None where each rank has samples of its own.
    """
    constant: Any = None
    """The value of `Changes.constant` of this transform."""
    num_constants: int = 0
    """The number of values that the constants of all transforms have."""


LossFn = Callable[[nn.Module, Any], Any]
Wrap = Callable[[str, nn.Module], Callable[..., Any]]
"""Makes a function that is the forward of a module, from its name and the module, whose
`forward` is the one to wrap.
"""


def _no_value(name: str, like: Tensor) -> None:
    return None


def _no_tensors(values: Tensors) -> dict[str, Tensor]:
    return {}


class Size(NamedTuple):
    """The size of a view's value: its elements, and the name of a parameter of the same
    unit that has its dtype.
    """

    numel: int
    dtype_of: str


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes that a transform makes to one model. It holds no tensors."""

    name: str
    """The argument or key that asks for it, in messages."""
    text: str = ""
    """Its settings as text, which must be equal on all ranks."""
    views: Mapping[str, tuple[ParamView, ...]] = field(default_factory=dict)
    """The views of a parameter in the order of their application, by the first of its
    names.
    """
    sizes: Mapping[str, Size] = field(default_factory=dict)
    """The sizes of values that have another number of elements, or another dtype, than
    the parameter (packed bytes).
    """
    forwards: Callable[[Call], Mapping[str, Wrap]] | None = None
    """The forwards that modules have in a call, by the module's name; they may depend
    on n.
    """
    batch: Callable[[Any, Any], Any] | None = None
    """A function of a micro-batch, as it was given, and of the axis `Call.seq`: the
    micro-batch that the loss is computed from. It runs outside of graphs.
    """
    loss: Callable[[LossFn | None], LossFn] | None = None
    """Makes a loss function from the given one, or from None (the model's own output).
    """
    splits_samples: bool = False
    """Whether it divides the tokens of samples along the mesh axis "seq"; without such
    a transform a mesh must not have this axis.
    """
    is_by_forward: bool = False
    """Whether they read `Call.micro`, so that each forward is bound separately."""
    recomputed: tuple[str, ...] = ()
    """The modules that keep only their inputs and run again in the backward: a graph
    does so itself.
    """
    not_in_graph: str = ""
    """The error for a step in one graph, which cannot have it; empty if it can."""
    constant: Callable[[int], Hashable] | None = None
    """The values that a graph after n updates holds as constants; for other values the
    step is captured again.
    """
    num_constants: int = 0
    """The number of different values of `constant`."""
    added: frozenset[str] = frozenset()
    """The names of the tensors that it has added to modules. A parameter among them is
    trained if it requires a gradient.
    """
    trains: frozenset[str] | None = None
    """If not None, all other parameters than these and the added ones are frozen,
    whatever their `requires_grad`.
    """
    is_exact: bool = False
    """Whether the model computes the same numbers without it, so that a checkpoint may
    be loaded with or without it.
    """
    first_value: Callable[[str, Tensor], Tensor | None] = _no_value
    """The first value of an added tensor, by its name, with the dtype of a tensor, on
    the CPU.
    """
    first_buffers: Callable[[Tensors], dict[str, Tensor]] = _no_tensors
    """The first values of the added buffers that are made from weights, for those
    weights that it is given.
    """
    first_params: Callable[[Tensors], dict[str, Tensor]] = _no_tensors
    """The first values of the added parameters that are made from weights of their
    modules, for the weights that it is given.
    """
    made_buffers: frozenset[str] = frozenset()
    """The names of the added buffers that are made from weights; one without any
    element that is true is not made yet.
    """
    ranges: frozenset[str] = frozenset()
    """Buffers that hold (min, max): after a step all ranks take the least and the
    largest.
    """


class TransformedStep(Protocol):
    """The arguments of a step that a transform reads: a `fzero.runtime.StepSpec`."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def cfg(self) -> Any: ...
    @property
    def units(self) -> Sequence[str] | None: ...
    @property
    def compile(self) -> Literal["step", "block"] | None: ...
    @property
    def compile_backend(self) -> Literal["inductor", "aot_eager"]: ...
    @property
    def seed(self) -> int: ...
    @property
    def transforms(self) -> Sequence[Any]: ...
    @property
    def device(self) -> torch.device: ...


class ModelTransform(Protocol):
    """A feature: what it changes in the model of a step. It may add or replace tensors
    of modules, once.

    Raises:
        ConfigError, ValueError: the step cannot have it; names the field, the rule, the
            value and the fix.
    """

    def __call__(self, spec: TransformedStep, /) -> Changes: ...


def added_to(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The parameters that transforms have added to a module or replaced, each with its
    shape, or that of its value.
    """
    found: dict[str, tuple[int, ...]] = module.__dict__.setdefault("fzero_added", {})
    return found


def is_as_added(module: nn.Module, key: str) -> bool:
    """Whether a parameter that a transform has added still has the value that it got
    then.
    """
    noted = module.__dict__.get("fzero_first", {}).get(key)
    return noted is not None and noted == _checksum(module._parameters[key])


def _checksum(tensor: Tensor | None) -> int | None:
    if tensor is None or tensor.is_meta:
        return None
    return zlib.crc32(
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    )


def changes_of(spec: TransformedStep) -> AllChanges:
    """The changes that the transforms of a step make to its model.

    Raises:
        ValueError: a transform returns no valid changes, or an earlier step's
            transforms have added a tensor to the model that no transform of this step
            uses.
    """
    changes = AllChanges([_checked(transform(spec), spec.model) for transform in spec.transforms])
    names = {id(param): name for name, param in spec.model.named_parameters()}
    for module in spec.model.modules():
        for key in module.__dict__.get("fzero_added", ()):
            name = names.get(id(module._parameters.get(key)))
            if name is not None and name not in changes.added and name not in changes.sizes:
                raise ValueError(
                    f"transforms: must use all that transforms of an earlier step have put into "
                    f"the model, got none that uses {name!r}; pass those transforms, too, or build "
                    f"the model anew and load fzero.transforms.merged(…)"
                )
    return changes


def _checked(changes: Changes, model: nn.Module) -> Changes:
    """The changes, whose views are of parameters of the model; marks what they have
    added.
    """
    if not isinstance(changes, Changes):
        raise ValueError(
            f"transforms: must return fzero.transforms.Changes, got a {type(changes).__name__}; "
            f"return what the transform changes"
        )
    of_one = (
        changes.views.items() if isinstance(changes.views, Mapping) else [("(all)", changes.views)]
    )
    if found := next((pair for pair in of_one if not _are_views(pair[1])), None):
        raise ValueError(
            f"transforms: views must map each parameter's name to a tuple of views, got "
            f"{found[1]!r} for {found[0]!r} from {changes.name!r}; pass {{name: (view,)}}"
        )
    params = dict(model.named_parameters())
    if unknown := next((name for name in changes.views if name not in params), None):
        raise ValueError(
            f"transforms: views must be of parameters by the first of their names, got {unknown!r} "
            f"from {changes.name!r}; names look like {', '.join([*params][:4])}"
        )
    read = (key for views in changes.views.values() for view in views for key in view.reads)
    every = dict(
        chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
    )
    if unknown := next((key for key in (*read, *changes.added) if key not in every), None):
        raise ValueError(
            f"transforms: reads, trains and added must name parameters or buffers of the model, "
            f"got {unknown!r} from {changes.name!r}; register it in its module first"
        )
    for name in params.keys() & changes.added:
        module, _, key = name.rpartition(".")
        owner = model.get_submodule(module)
        added_to(owner).setdefault(key, tuple(params[name].shape))
        noted = owner.__dict__.setdefault("fzero_first", {})
        if key not in noted:
            noted[key] = _checksum(params[name])
    return changes


def _are_views(given: Any) -> bool:
    return isinstance(given, tuple) and all(
        hasattr(view, "value") and hasattr(view, "pulled") for view in given
    )


class AllChanges:
    """The changes of all transforms of a step, as one."""

    def __init__(self, changes: Sequence[Changes] = ()) -> None:
        self._changes = tuple(changes)
        self.views: dict[str, tuple[ParamView, ...]] = {}
        for one in changes:
            for name, views in one.views.items():
                self.views[name] = (*self.views.get(name, ()), *views)
        # By parameter, those whose gradients come with that of its value.
        relays = {
            name: tuple({key: 0 for view in own for key in view.trains})
            for name, own in self.views.items()
        }
        self.relays = {name: trained for name, trained in relays.items() if trained}
        self.sizes = {name: size for one in changes for name, size in one.sizes.items()}
        self.recomputed = tuple(name for one in changes for name in one.recomputed)
        self.added = frozenset[str]().union(*(one.added for one in changes))
        if sum(len(one.added) for one in changes) > len(self.added):
            twice = next(
                name for name in sorted(self.added) if sum(name in one.added for one in changes) > 1
            )
            raise ValueError(
                f"transforms: must add a tensor once, got two that add {twice!r}; let one module "
                f"have one of them"
            )
        self.reads = frozenset(
            key for own in self.views.values() for view in own for key in view.reads
        )
        self.ranges = frozenset[str]().union(*(one.ranges for one in changes))
        self.made_buffers = frozenset[str]().union(*(one.made_buffers for one in changes))
        self.is_by_forward = any(one.is_by_forward for one in changes)
        self.not_in_graph = next((one.not_in_graph for one in changes if one.not_in_graph), "")
        self.num_constants = sum(one.num_constants for one in changes)
        self.wrapping = [
            (index, one.forwards) for index, one in enumerate(changes) if one.forwards is not None
        ]

    @cached_property
    def texts(self) -> dict[str, str]:
        """The settings of each transform, by name; of several with one name, by number."""
        texts: dict[str, str] = {}
        for one in self._changes:
            key, number = one.name, 1
            while key in texts:
                number += 1
                key = f"{one.name} {number}"
            texts[key] = one.text
        return texts

    @cached_property
    def compared(self) -> dict[str, str]:
        """`texts` of the transforms without which the model would compute other
        numbers.
        """
        return {
            key: text
            for (key, text), one in zip(self.texts.items(), self._changes, strict=True)
            if not one.is_exact
        }

    def trained(self, model: nn.Module) -> Set[str] | None:
        """The names of the parameters that are trained; None where those that require a
        gradient are.
        """
        chosen = [one.trains for one in self._changes if one.trains is not None]
        if not chosen:
            return None
        own = {
            name
            for name, param in model.named_parameters()
            if name in self.added and param.requires_grad
        }
        return own | frozenset[str]().union(*chosen) - self.added - self.sizes.keys()

    @property
    def splits_samples(self) -> bool:
        return any(one.splits_samples for one in self._changes)

    def batch_fn(self, seq: Any) -> Callable[[Any], Any] | None:
        """The changes of a micro-batch on a rank of the axis `seq`; None for none."""
        found = [one.batch for one in self._changes if one.batch is not None]
        if seq is None or not found:
            return None
        return lambda batch: reduce(lambda changed, one: one(changed, seq), found, batch)

    def loss_fn(self, given: LossFn | None) -> LossFn | None:
        """The loss function with the changes of all transforms."""
        for one in self._changes:
            given = given if one.loss is None else one.loss(given)
        return given

    def check_given(self, given: Collection[str], model: nn.Module) -> None:
        """Raises ValueError where a state dict has only some of the trained parameters
        that one transform has added.
        """
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        for one in self._changes:
            added = one.added & trained
            there = sorted(added.intersection(given))
            if there and (missing := sorted(added.difference(given))):
                raise ValueError(
                    f"params: must have all parameters that {one.name} adds, or none of them, got "
                    f"{there[0]!r} without {missing[0]!r} ({len(missing)} missing); add them, or "
                    f"leave the others out to begin anew"
                )

    def check_unread(self, changed: Collection[str]) -> None:
        """Raises ValueError where views read a buffer that forwards change: its value
        depends on when it is read.
        """
        if found := self.reads.intersection(changed):
            raise ValueError(
                f"buffer {min(found)!r}: must not change in a forward where a view of a transform "
                f"reads it, and did; make it a parameter, or change it between steps"
            )

    def constants(self, n: int) -> tuple[Hashable, ...]:
        """The values that a graph holds as constants in a step after n updates."""
        return tuple(None if one.constant is None else one.constant(n) for one in self._changes)

    def first_value(self, name: str, like: Tensor) -> Tensor | None:
        """The first value of an added tensor, None for any other."""
        return next(
            (one.first_value(name, like) for one in self._changes if name in one.added), None
        )

    def first_buffers(self, values: Tensors) -> dict[str, Tensor]:
        """The added buffers that are made from these weights."""
        return {name: x for one in self._changes for name, x in one.first_buffers(values).items()}

    def first_params(self, values: Tensors) -> dict[str, Tensor]:
        """The added parameters that are made from these weights."""
        return {name: x for one in self._changes for name, x in one.first_params(values).items()}

    @contextmanager
    def bound(
        self,
        model: nn.Module,
        call: Callable[[], Call],
        constants: tuple[Hashable, ...] | None = None,
    ) -> Iterator[None]:
        """Inside, the modules of a bound model have their other forwards."""
        own: list[tuple[nn.Module, dict[str, Any]]] = []
        try:
            for index, forwards in self.wrapping:
                constant_of = self._changes[index].constant
                constant: Hashable = None
                if constant_of is not None:
                    constant = (
                        constants[index] if constants else constant_of(int(call().num_updates()))
                    )
                wrapped: list[nn.Module] = []  # a module with several names is wrapped once
                for name, wrap in forwards(
                    replace(call(), constant=constant, num_constants=self.num_constants)
                ).items():
                    module = _module_of(model, name, self._changes[index].name)
                    if not any(module is other for other in wrapped):
                        wrapped.append(module)
                        forward = _method(module, wrap(name, module))
                        own.append((module, own_forward(module)))
                        module.__dict__["forward"] = forward
            yield
        finally:
            for module, forward_before in reversed(own):
                module.__dict__.pop("forward", None)
                module.__dict__.update(forward_before)


def _module_of(model: nn.Module, name: str, transform: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        names = [name for name, _ in model.named_modules() if name]
        raise ValueError(
            f"transforms: forwards must be of modules of the model, got {name!r} from "
            f"{transform!r}; names look like {', '.join(names[:4]) or '(none)'}"
        ) from None


def _method(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward as a method of a module. A copy of the module that the model makes
    meanwhile gets the method with the copy, and runs a copy of the forward before:
    `forward` would compute with the parameters of the module that was copied."""
    before = module.forward

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = forward if self is module else copy.deepcopy(before, {id(module): self})
        return own(*args, **kwargs)

    run.__dict__["fzero_bound"] = True  # a graph does not depend on it as on the model's own
    return MethodType(run, module)
