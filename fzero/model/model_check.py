"""`ModelCheck`: the modules and tensors of a model as its step knows them. It finds what a
script changes between two calls.

A step reads the model when it is made: names, shapes, ties. A state copies the values.
So a module that is replaced later, or a value that is written into the model, does not
reach the state. `ModelCheck.check` runs at each use of a state:

- modules, parameters and buffers are compared by identity, and parameters and buffers
  by their version and address, too. This is a loop in C over the dicts of the modules,
  about half a microsecond for each module and each tensor;
- only where something differs is the model read. What changes nothing that a state
  holds is accepted: another container of the same modules, a module without parameters,
  `model.to("meta")`, a value that is the state's own.

Writes through `param.data` have no count, and are found before the first step only,
where the values are read.

`FixedFlags` checks `requires_grad`: a step trains the parameters that required
gradients when it was made. It is read before each step, so the reading is one loop over
the parameters, 0.2 µs for each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain, compress
from operator import attrgetter
from typing import Any, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor, nn

from fzero.model.errors import kind_text
from fzero.model.module_index import ModuleIndex
from fzero.model.own_params import StandIn, address, bits_of, shape_and_dtype, state_tensors

Differing = Callable[[Mapping[str, Tensor]], Collection[str]]
"""The names of those of the given tensors that differ from the values of a state."""
Joined = Callable[[Collection[str]], Collection[str]]
"""The names that any rank has given."""

_DICTS = attrgetter("_modules", "_parameters", "_buffers")
_CHILDREN = attrgetter("_modules")
NEW_STEP = (
    "change the model before make_train_step, or go on with a step of the changed model: full = "
    "step.gather(state); new = make_train_step(model, cfg); state = "
    "new.init(params={**model.state_dict(), **full}), of `full` only those weights that you want "
    "to keep (where all names and shapes are the same, make_train_step(model, cfg, after=step) and "
    "fzero.reshard(state, step, new) keep values and optimizer state)"
)


class _Record(NamedTuple):
    """The modules and tensors of a model at one time, so that a look at them finds a
    difference quickly.
    """

    found: ModuleIndex
    parents: list[nn.Module]
    """The modules that have children."""
    tensors: dict[str, ref[Tensor]]
    gone: list[Any]
    """Filled when a tensor is freed: then its identity may become that of another."""
    keys: list[str]
    """The names of all children."""
    ids: list[int]
    """The identities of children, parameters and buffers."""
    is_counted: list[bool]
    """Which of them are tensors of a state, whose versions and addresses are compared.
    """
    marks: dict[int, tuple[int, int]]
    """Version and address of a tensor, by its identity."""

    @classmethod
    def of(cls, model: nn.Module, now: Mapping[str, Tensor]) -> Self:
        """The model as it is; `now`: its tensors."""
        found, gone = ModuleIndex.of(model), list[Any]()
        counted = {
            id(x) for x in now.values() if not x.is_inference() and (x.is_meta or address(x) >= 0)
        }
        values = _values_of(found.modules.values())
        is_counted, ids = [id(x) in counted for x in values], [*map(id, values)]
        parents = [module for module in found.modules.values() if module._modules]
        return cls(
            found,
            parents,
            {name: ref(x, gone.append) for name, x in now.items()},
            gone,
            _keys_of(parents),
            ids,
            is_counted,
            dict(zip(compress(ids, is_counted), _marks_of(values, is_counted), strict=True)),
        )

    def is_same(self, marks: list[tuple[int, int]] | None) -> bool:
        """Whether modules and tensors are the same objects, and the tensors have these
        marks.
        """
        values = _values_of(self.found.modules.values())
        if self.gone or [*map(id, values)] != self.ids or _keys_of(self.parents) != self.keys:
            return False
        return marks is not None and _marks_of(values, self.is_counted) == marks


def _values_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The children, parameters and buffers of modules."""
    return [*chain.from_iterable(map(dict.values, chain.from_iterable(map(_DICTS, modules))))]


def _keys_of(parents: Iterable[nn.Module]) -> list[str]:
    return [*chain.from_iterable(map(_CHILDREN, parents))]


def _marks_of(values: Iterable[Any], is_counted: Iterable[bool]) -> list[tuple[int, int]]:
    with torch._C.DisableTorchFunctionSubclass():
        return [(x._version, x.data_ptr()) for x in compress(values, is_counted)]


class ModelCheck:
    """A model's modules and tensors when a step is made, and the values when a state is
    made from them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._is_open, self._has_begun, self._has_warned = model, True, False, False
        self._marks: list[tuple[int, int]] | None = None  # None reads the values at the next check
        self._bits: dict[str, Tensor] = {}  # checksums of the values from which the state was made
        now = dict(state_tensors(model))
        self._kinds, self._ties = {name: shape_and_dtype(x) for name, x in now.items()}, _ties(now)
        self._remember(now)

    def record(self, *, given: bool) -> None:
        """Records the values of the tensors when a state is made from them; with
        `given`, the state has other values.
        """
        if not self._is_open:
            return
        now = dict(state_tensors(self._model))
        self._check_kinds(now)
        self._has_begun, self._bits = False, {}
        for name, x in () if given else now.items():
            if (
                not x.is_meta
                and type(x) in (Tensor, nn.Parameter, StandIn)
                and not hasattr(x, "fzero_divided")
            ):
                self._bits[name] = bits_of(x)
        self._record, self._marks = _Record.of(self._model, now), None

    def close(self) -> None:
        """Ends the check: the model's tensors are views of a state."""
        self._is_open, self._bits = False, {}

    def check_at_step(self, differing: Differing, joined: Joined = sorted) -> None:
        """`check` at a step. At a state's first one it reads the values."""
        if not self._has_begun:
            self._marks = None
        self.check(differing, joined)
        self._has_begun = True

    def check(self, differing: Differing, joined: Joined = sorted) -> None:
        """Checks the model at a use of a state.

        *Collective* in `joined`, where a parameter or buffer was replaced by another.

        Args:
            differing: the names of those of the given tensors that differ from the
                values of the state, as far as this rank holds these.
            joined: makes of the names that differ on this rank those that differ on
                any.

        Raises:
            ValueError: the model has other modules, parameters or buffers than its
                step, or before the first step other values than the state.
        """
        if not self._is_open:
            return
        if self._record.is_same(self._marks):
            return
        now = dict(state_tensors(self._model))
        self._check_kinds(now)
        self._check_values(now, differing, joined)
        self._remember(now)

    def _remember(self, now: Mapping[str, Tensor]) -> None:
        self._record = record = _Record.of(self._model, now)
        self._marks = _marks_of(_values_of(record.found.modules.values()), record.is_counted)

    # --- where something differs ------------------------------------------------------------------

    def _check_kinds(self, now: Mapping[str, Tensor]) -> None:
        """Raises where names, shapes, dtypes or ties differ, or a tensor has moved to
        another name.
        """
        found = {name: shape_and_dtype(x) for name, x in now.items()}
        if differing := [
            name for name in {**self._kinds, **found} if self._kinds.get(name) != found.get(name)
        ]:
            then, there = (kind_text(kinds.get(differing[0])) for kinds in (self._kinds, found))
            raise ValueError(
                f"model: must not change after the step is made, and {differing[0]!r} was {then} "
                f"and is {there}; {NEW_STEP}"
            )
        known = {
            id(x): name for name, then in self._record.tensors.items() if (x := then()) is not None
        }
        for name, x in now.items():
            before = known.get(id(x), name)
            if self._ties[before] != self._ties[name]:
                raise ValueError(
                    f"model: must not change after the step is made, and {name!r} is the tensor "
                    f"that was {before!r} (modules in another order, or newly tied), where the "
                    f"state has values of its own; {NEW_STEP}"
                )
        # moving a module to meta unties it
        here = {name: x for name, x in now.items() if not x.is_meta}
        for name, first in _ties(here).items():
            if self._ties[first] != self._ties[name]:
                raise ValueError(
                    f"model: must not change after the step is made, and {name!r} is newly tied to "
                    f"{first!r}; {NEW_STEP}"
                )
        for name, first in self._ties.items():
            if name in here and first in here and here[name] is not here[first]:
                raise ValueError(
                    f"model: must not change after the step is made, and {name!r} is no longer "
                    f"tied to {first!r}; {NEW_STEP}"
                )

    def _check_values(
        self, now: Mapping[str, Tensor], differing: Differing, joined: Joined
    ) -> None:
        """Raises, or warns, where tensors were replaced or written to."""
        before = {name: then() for name, then in self._record.tensors.items()}
        replaced = {
            name for name, x in now.items() if before[name] is not x and not self._is_freed(name, x)
        }
        suspects = {
            name: x for name, x in now.items() if name in replaced or self._may_be_written(name, x)
        }
        changed = {
            name: x
            for name, x in suspects.items()
            if name not in self._bits or not torch.equal(bits_of(x), self._bits[name])
        }
        if not changed:
            return
        if not self._has_begun and (names := [name for name in changed if name in self._bits]):
            raise ValueError(
                f"model: must keep its values from init to the first step, and {names[0]!r} was "
                f"changed since (load_state_dict, a reset, another module), which the state does "
                f"not see; call init after the change, or init(params=state_dict)"
            )
        lost = differing(changed)
        if replaced.intersection(changed) and (
            found := sorted(joined(replaced.intersection(lost)))
        ):
            raise ValueError(
                f"model: must not change after the step is made, and {found[0]!r} is another "
                f"tensor now (it or its module was replaced), whose values the state does not "
                f"have; {NEW_STEP}"
            )
        if lost and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"model: {min(lost)!r} was written to after the step was made (load_state_dict, "
                f"fill_, a reset), and the step computes with the values of the state, which do "
                f"not change; write into the state (state.buffers[name], step.with_weights), or "
                f"make another one, step.init(params=model.state_dict()). Of a model that you only "
                f"look at, take a copy (copy.deepcopy). This is said once",
                stacklevel=5,
            )

    def _is_freed(self, name: str, x: Tensor) -> bool:
        """Whether a module has lost its tensor to `model.to("meta")`."""
        owner = self._model.get_submodule(name.rpartition(".")[0])
        return x.is_meta and owner is self._record.found.every[name.rpartition(".")[0]]

    def _may_be_written(self, name: str, x: Tensor) -> bool:
        """Whether a tensor's values must be looked at: before the first step, and where
        its version or address differs.
        """
        if x.is_meta or id(x) not in self._record.marks:
            return False
        if self._marks is None and name in self._bits:
            return True
        with torch._C.DisableTorchFunctionSubclass():
            return bool(self._record.marks[id(x)] != (x._version, x.data_ptr()))


def _ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The first name of the same tensor, for each name."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(x), name) for name, x in tensors.items()}


# --- what is trained ------------------------------------------------------------------------------


class Flags:
    """Reads `requires_grad` of all parameters of a module."""

    def __init__(self, model: nn.Module) -> None:
        # Keep the dicts, not the parameters, because `model.to("meta")` replaces the parameters.
        self._slots = [module._parameters for module in model.modules() if module._parameters]

    def read(self) -> list[bool]:
        """The flags in the order of the modules."""
        # a parameter's class may intercept attribute access, at a cost
        with torch._C.DisableTorchFunctionSubclass():
            return [
                param.requires_grad
                for slots in self._slots
                for param in slots.values()
                if param is not None
            ]


class FixedFlags:
    """Raises where a parameter was frozen or unfrozen since this was made.

    Args:
        model: its flags are read.
        names: the parameters.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        self._model = model
        self._required = {
            name: param.requires_grad for name, param in model.named_parameters() if name in names
        }
        self._flags = Flags(model)
        self._first = self._flags.read()

    def check(self) -> None:
        """Raises a ValueError that names the parameters and the fix."""
        if self._flags.read() == self._first:
            return
        now = {n: p.requires_grad for n, p in self._model.named_parameters() if n in self._required}
        frozen = [name for name, flag in now.items() if self._required[name] and not flag]
        unfrozen = [name for name, flag in now.items() if flag and not self._required[name]]
        if frozen or unfrozen:
            changes = [
                f"{listed(names)} {word}"
                for names, word in ((frozen, "was frozen"), (unfrozen, "was unfrozen"))
                if names
            ]
            raise ValueError(
                f"requires_grad: must be for each parameter what it was when the step was made, "
                f"and {' and '.join(changes)}; make a step under the new flags and move the state "
                f"to it: new = make_train_step(model, cfg, after=step); state = "
                f"fzero.reshard(state, step, new); where a transform freezes parameters (lora), "
                f"its trains decides"
            )


def listed(names: Collection[str]) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b"]), listed(["a", "b", "c", "d", "e"])
    ("'a', 'b'", "'a', 'b', 'c' and 2 more")
    """
    first = ", ".join(map(repr, list(names)[:3]))
    return first + (f" and {len(names) - 3} more" if len(names) > 3 else "")
