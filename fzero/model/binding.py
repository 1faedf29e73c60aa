"""`bound`: a module computes with tensors that it does not own. It is bound to them
while it runs.

Inside `bound(...)` every access to a parameter, in any module and anywhere in its code,
calls a function that returns the tensor by the parameter's full name. A unit is
gathered at that moment: no hook has to guess which parameters a forward will use.
Afterwards the module is unchanged. `random_state` does the same for random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, takewhile
from operator import attrgetter
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _pop_mode, _push_mode

from fzero.common.random_states import random_states, set_random_states
from fzero.model import own_params
from fzero.model.errors import ShapeAndDtype, late, replaced, wrong_kind
from fzero.model.held_tensors import SharedTensor
from fzero.model.module_index import ModuleIndex
from fzero.model.own_params import (
    Fetch,
    FetchedParameters,
    Substitutes,
    marked,
    marks_of,
    shape_and_dtype,
)
from fzero.model.tensor_checks import check_no_hooks


def is_bound(model: nn.Module) -> bool:
    """Whether the model is inside `bound`."""
    return isinstance(model._parameters, FetchedParameters)


def bound(
    model: nn.Module, aliases: dict[str, str], fetch: Fetch, buffers: dict[str, Tensor]
) -> AbstractContextManager[None]:
    """Runs `model` on the tensors of `fetch` and `buffers`; afterwards, also after an
    error, the model is unchanged.

    Args:
        model: the module; the tensors that it owns are neither read nor written.
        aliases: the other names of tied parameters and buffers, each with the name that
            `fetch` and `buffers` use.
        fetch: the tensor of a parameter, by its full name.
        buffers: the module's buffers by full name. In-place changes reach these
            tensors; if the model assigns a new tensor to a buffer, the mapping holds
            the new tensor.
    """
    return Binding(model, aliases).to(fetch, buffers)


@dataclass(slots=True)
class _Place:
    """A module in a model: its full name, and whether it lists parameters by name.

    Attributes:
        names: the names of its own parameters for `fetch`, by key.
    """

    prefix: str
    module: nn.Module
    lists: bool
    names: dict[str, str] = field(default_factory=dict)


class Binding:
    """`bound` for a model and its aliases, which reads modules and names once, and
    again where they have changed.
    """

    def __init__(
        self, model: nn.Module, aliases: dict[str, str], held: Sequence[SharedTensor] = ()
    ) -> None:
        self._model, self._aliases, self._held = model, aliases, held
        self._parents, self._tied = _parents_of_ties(aliases), set(aliases.values())
        # the parameters that were named, by identity, and their keys
        self._known: tuple[list[int], list[str]] = [], []
        self._names_of: dict[int, str] = {}  # keyed by id() of the module's own parameter
        self._read()

    def hold(self, found: Sequence[SharedTensor]) -> None:
        """Adds tensors that the model keeps from a forward."""
        self._held = (*self._held, *found)

    def _read(self) -> None:
        listed, self._known = nn.Module.named_parameters, ([], [])
        self._index = ModuleIndex.of(self._model)
        self._places = [
            _Place(p, m, p in self._parents and type(m).named_parameters is listed)
            for p, m in self._index.modules.items()
        ]

    @property
    def index(self) -> ModuleIndex:
        """The modules of the model as they are now."""
        if not _is_current(self._index):
            self._read()
        return self._index

    @contextmanager
    def to(self, fetch: Fetch, buffers: dict[str, Tensor]) -> Iterator[None]:
        """See `bound`."""
        index, places = self.index, self._places
        found = [(place, place.module._parameters, place.module._buffers) for place in places]
        flat_weights = [(m, m._flat_weights, m._flat_weight_refs) for m in index.recurrent]
        hooks = [m.register_forward_pre_hook(fill_flat_weights) for m in index.recurrent]
        slots: list[_BufferSlot] = []
        own, marks = self._named([(place, own_parameters) for place, own_parameters, _ in found])
        names_of, fetch = self._names_of, partial(marked, fetch, marks) if marks else fetch
        lister = _lister(names_of, self._tied, fetch)
        # with a lister of their own, for example of an outer binding
        listers: list[tuple[nn.Module, Any]] = []
        try:
            for place, own_parameters, own_buffers in found:
                attributes = place.module.__dict__
                attributes["_parameters"] = FetchedParameters(
                    own_parameters, dict(place.names), fetch
                )
                if place.lists:
                    listers.append((place.module, attributes.get("named_parameters")))
                    attributes["named_parameters"] = MethodType(lister, place.module)
                attributes["_buffers"] = dict(own_buffers)
                if own_buffers:
                    slots += _bind_buffers(place.module, place.prefix, self._aliases, buffers)
            with own_params.substituted(self._substitutes(own, names_of, fetch, slots)):
                yield
                for place, _, own_buffers in found:
                    module: Any = place.module
                    if module._parameters.is_changed or len(module._buffers) > len(own_buffers):
                        _check_slots(place, own_buffers)
                        _keep_ties(place, own, names_of)
                if not _is_current(index):
                    _check_places(self._model, places)
                for slot in slots:
                    slot.check_kind()
        finally:
            for slot in slots:
                slot.take_marks()
                if slot.before is not None and slot.now is not None and slot.now is not slot.before:
                    # it may be part of the batch, or hold a graph
                    buffers[slot.name] = slot.now.detach().clone()
            for module, own_lister in listers:
                del module.__dict__["named_parameters"]
                if own_lister is not None:
                    module.__dict__["named_parameters"] = own_lister
            for place, own_parameters, own_buffers in found:
                module = place.module
                if module._non_persistent_buffers_set:
                    _keep_caches(
                        module,
                        own_buffers,
                        {slot.key for slot in slots if slot.of_module is module._buffers},
                    )
                module.__dict__["_parameters"], module.__dict__["_buffers"] = (
                    own_parameters,
                    own_buffers,
                )
            for hook in hooks:
                hook.remove()
            for module, own_weights, own_refs in flat_weights:
                module._flat_weights, module._flat_weight_refs = own_weights, own_refs

    def _substitutes(
        self,
        own: dict[int, Tensor],
        names: Mapping[int, str],
        fetch: Fetch,
        slots: Sequence[_BufferSlot],
    ) -> Substitutes:
        """The substitutes for the module's own parameters, and for tensors elsewhere
        that share memory with these or with the buffers in `slots`, if they are still
        alive; adds these to `own`."""
        bound_here = (
            {slot.name: slot for slot in slots if slot.before is not None} if self._held else {}
        )
        held: dict[int, SharedTensor] = {}
        for each in self._held:
            if (
                (not each.is_buffer or each.name in bound_here)
                and (x := each.tensor()) is not None
                and id(x) not in own
            ):
                own[id(x)], held[id(x)] = x, each
        return Substitutes(own, names, fetch, lambda name: bound_here[name].present, held)

    def _named(
        self, found: Sequence[tuple[_Place, Mapping[str, Any]]]
    ) -> tuple[dict[int, Tensor], dict[str, dict[str, Any]]]:
        """All own parameters of the modules, by identity, and the Python attributes
        that code has set on them, by name.

        Also sets `names` of each place, and `_names_of`.
        """
        own, keys = list[Any](), list[str]()
        for _, parameters in found:
            own += parameters.values()
            keys += (*parameters, "")
        known = [*map(id, own)], keys
        if known != self._known:
            names_of: dict[int, str] = {}
            for place, parameters in found:
                place.names, dot = {}, f"{place.prefix}." if place.prefix else ""
                for key, param in parameters.items():
                    if param is not None:
                        place.names[key] = names_of[id(param)] = self._aliases.get(
                            dot + key, dot + key
                        )
            self._known, self._names_of = known, names_of
        own = [param for param in own if param is not None]
        marks = {self._names_of[id(x)]: set_ for x in own if x.__dict__ and (set_ := marks_of(x))}
        for param in own:
            if type(param) is nn.Parameter:  # another rank in lockstep may have bound it
                if param._backward_hooks or param._post_accumulate_grad_hooks:
                    check_no_hooks(self._names_of[id(param)], param)
            elif kind := own_params.own_class(param):
                marks.setdefault(self._names_of[id(param)], {})["__class__"] = kind
        return {id(param): param for param in own}, marks


def _is_current(index: ModuleIndex) -> bool:
    """Whether its modules have the children that they had."""
    return [*map(_CHILDREN, index.modules.values())] == index.children


_CHILDREN = attrgetter("_modules")


class _BufferSlot(NamedTuple):
    """The entry of a bound module's `_buffers` for one buffer of the state, or for one
    that is None.
    """

    of_module: dict[str, Tensor | None]
    key: str
    name: str
    before: Tensor | None
    kind: ShapeAndDtype
    """The kind of `before` when it was bound."""
    own: Tensor | None
    """The module's own buffer."""

    @property
    def now(self) -> Tensor | None:
        return self.of_module.get(self.key)

    @property
    def present(self) -> Tensor:
        """`now`; raises if the forward has removed the buffer."""
        if (now := self.now) is None:
            self.check_kind()
        assert now is not None
        return now

    def take_marks(self) -> None:
        """Passes the Python attributes that the forward has set on to the module's own
        buffer: the state holds none.
        """
        own, before, now = self.own, self.before, self.now
        if own is None or before is None or now is None:
            return
        if own.__dict__ or now.__dict__:
            marks = marks_of(now)
            for key in marks_of(own).keys() - marks.keys():
                del own.__dict__[key]
            own.__dict__.update(marks)
        for key in marks_of(before) if before.__dict__ else ():
            del before.__dict__[key]

    def check_kind(self) -> None:
        """Raises ValueError where a forward has assigned None, or has made another
        shape or dtype (`resize_`, too).
        """
        if self.kind != (now := shape_and_dtype(self.now)):
            raise wrong_kind(self.name, self.kind, now)


def _bind_buffers(
    module: nn.Module, prefix: str, aliases: Mapping[str, str], buffers: Mapping[str, Tensor]
) -> Iterator[_BufferSlot]:
    """Replaces a module's buffers by those of the state."""
    dot = f"{prefix}." if prefix else ""
    for key, buffer in module._buffers.items():
        name, is_cache = (
            aliases.get(dot + key, dot + key),
            key in module._non_persistent_buffers_set,
        )
        if is_cache and name not in buffers:
            continue  # it belongs to the module, like an attribute
        if buffer is None:
            yield _BufferSlot(module._buffers, key, dot + key, None, None, None)
            continue
        if name not in buffers:
            raise late("buffer", name)
        module._buffers[key] = buffers[name]
        if buffer.__dict__:
            buffers[name].__dict__.update(marks_of(buffer))
        yield _BufferSlot(
            module._buffers, key, name, buffers[name], shape_and_dtype(buffers[name]), buffer
        )


def _check_slots(place: _Place, own_buffers: Mapping[str, Any]) -> None:
    """Raises ValueError if a forward has registered a parameter or buffer that is not
    in the state, or replaced a parameter by another one: that would be lost."""
    module = place.module
    parameters = module._parameters
    assert isinstance(parameters, FetchedParameters)
    dot = f"{place.prefix}." if place.prefix else ""
    for key in parameters.put:
        if dict.get(parameters, key) is not None:
            raise late("parameter", dot + key)
    for key, name in place.names.items():
        if parameters.names.get(key) != name:
            raise replaced(dot + key, parameters.names.get(key))
    for key, buffer in module._buffers.items():
        if (
            key not in own_buffers
            and buffer is not None
            and key not in module._non_persistent_buffers_set
        ):
            raise late("buffer", dot + key)


def _keep_ties(place: _Place, own: Mapping[int, Tensor], names_of: Mapping[int, str]) -> None:
    """Keeps further names that a forward has given to parameters
    (`self.kept = self.weight`), as attributes: the next forward finds them there.
    """
    parameters: Any = place.module._parameters
    for key in parameters.names.keys() - place.names.keys():
        name = parameters.names[key]
        of_module = next(param for at, param in own.items() if names_of[at] == name)
        place.module.__dict__[key] = of_module


def _keep_caches(
    module: nn.Module, own_buffers: dict[str, Tensor | None], of_state: set[str]
) -> None:
    """Keeps the buffers with `persistent=False` that are not in the state, such as a
    table that a forward makes once, as the forward has left them.

    Tensors made in a trace are not kept, because they have no values.
    """
    for key in (module._non_persistent_buffers_set & module._buffers.keys()) - of_state:
        made = module._buffers[key]
        if made is None or (type(made) is Tensor and not is_functorch_wrapped_tensor(made)):
            own_buffers[key] = made


def _check_places(model: nn.Module, found: Sequence[_Place]) -> None:
    """Raises ValueError where a forward has replaced a module by another one, or
    removed one that has parameters.
    """
    places = {id(place.module): place for place in found}
    for prefix, module in model.named_modules():
        place = places.pop(id(module), None)
        if place is None or place.prefix != prefix:
            for kind, slots in (("parameter", module._parameters), ("buffer", module._buffers)):
                for key, own in dict.items(slots):
                    if own is not None:
                        raise late(kind, f"{prefix}.{key}")
    for place in places.values():
        for key in place.names:
            raise replaced(f"{place.prefix}.{key}", None)


@contextmanager
def random_state(rng: dict[str, Tensor], device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Inside, the random state is `rng`; on exit the former one is restored. Yields a
    dict that receives the new state.
    """
    after, own = dict[str, Tensor](), random_states(device)
    set_random_states(rng, device)
    try:
        yield after
        after |= {kind: state for kind, state in random_states(device).items() if kind in rng}
    finally:
        set_random_states(own, device)


def beneath_model(num_modes: int) -> AbstractContextManager[object]:
    """Inside, nothing that a model has entered is active: `no_grad`, inference mode, a
    transform of torch.func, a dispatch mode.

    Args:
        num_modes: the number of dispatch modes that were active outside of the model.
    """
    is_plain = (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and peek_interpreter_stack() is None
    )
    return beneath_modes(num_modes) if is_plain else _beneath_all(num_modes)


@contextmanager
def _beneath_all(num_modes: int) -> Iterator[None]:
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        temporarily_clear_interpreter_stack(),
        _hooks_allowed(),
        beneath_modes(num_modes),
    ):
        yield


@contextmanager
def _hooks_allowed() -> Iterator[None]:
    """Inside, saved tensors may have hooks, as they may not in a transform of
    torch.func.
    """
    if (message := _autograd._saved_tensors_hooks_get_disabled_error_message()) is None:
        yield
        return
    _autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        _autograd._saved_tensors_hooks_disable(message)


def beneath_modes(num_modes: int) -> AbstractContextManager[object]:
    """Inside, only the first `num_modes` of the active modes of
    `torch.utils._python_dispatch` are active.

    A mode that a model enters must see the model's operations only. The gather of its
    parameters is not one of them, and is not repeated when the mode's region runs
    again.
    """
    return (
        _NOTHING if torch._C._len_torch_dispatch_stack() == num_modes else _without_modes(num_modes)
    )


_NOTHING = nullcontext()


@contextmanager
def _without_modes(num_modes: int) -> Iterator[None]:
    modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack() - num_modes)]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def _parents_of_ties(aliases: dict[str, str]) -> set[str]:
    """The root, and the names of the modules that contain two names of a tied
    parameter.
    """
    parents = {""}
    for alias, owner in aliases.items():
        steps = takewhile(lambda pair: pair[0] == pair[1], zip(alias.split("."), owner.split(".")))
        parents |= set(accumulate((step for step, _ in steps), "{}.{}".format))
    return parents


def _lister(names_of: dict[int, str], tied: set[str], fetch: Fetch) -> Callable[..., Any]:
    """The method `named_parameters` of a bound module. It identifies parameters by
    those of the module, not by fetched tensors.

    If the unit of a tied parameter is entered again, fetching gives a new tensor, and
    the parameter would be listed twice. A set of the tensors yielded so far would also
    keep all gathered buffers alive.
    """

    def named_parameters(
        self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        again: dict[str, Tensor] = {}
        seen: set[str] = set()
        for key, own in self._named_members(
            lambda member: dict.items(member._parameters), prefix, recurse, remove_duplicate
        ):
            # `functional_call` in the model's code has put a tensor of `fetch` back
            # (`FetchedParameters.__setitem__`).
            name = names_of.get(id(own)) or getattr(own, "fzero_name", None)
            if name is None:  # the model has assigned it
                yield key, own
                continue
            # `model.to("meta")` unties: each name gets its own parameter
            if remove_duplicate and name in seen:
                continue
            seen.add(name)
            value = again[name] if name in again else fetch(name)
            if name in tied:
                again[name] = value
            yield key, value

    named_parameters.fzero_bound = True  # type: ignore[attr-defined]
    return named_parameters


def fill_flat_weights(module: nn.RNNBase, inputs: Any) -> None:
    """Recurrent modules keep a list of their weights beside `_parameters`, and hand
    that list to the kernel.
    """
    module._flat_weights = [
        getattr(module, name) if hasattr(module, name) else None
        for name in module._flat_weights_names
    ]
