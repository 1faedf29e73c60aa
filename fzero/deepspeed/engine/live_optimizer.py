"""`OptimizerState`: `engine.optimizer.state`, by parameter, for scripts that read or
change moments as with torch.optim.

    for param in adapters:
        del engine.optimizer.state[param] # its moments and its count of updates begin
        anew
    engine.optimizer.state[weight]["exp_avg"].mul_(0.1)

It holds no tensors of its own: those of a parameter are views of the engine's state. In
stage 0 they have the parameter's shape; in stages 1 to 3 they are this rank's elements
of it (1-d, possibly none), as DeepSpeed's flat ones hold them. As in torch.optim a
parameter has an entry from its first update on.

A count of updates is shared by a flat buffer. So counts that a script sets, and entries
that it removes, are written before the next forward or update; where they differ within
a flat buffer, the buffer is divided (`fzero.deepspeed.engine.layouts`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from fzero.deepspeed.engine.replica_edits import ReplicaEdits
from fzero.plans.flat_params import FlatParamPlan
from fzero.plans.plan_spec import starts_of
from fzero.resharding import parameters as whole
from fzero.resharding.new_state import initialise

if TYPE_CHECKING:
    from fzero.deepspeed.engine.engine import Engine

STEP = "step"
"""The name of the count of updates."""


class ParamState(MutableMapping[str, Any]):
    """`optimizer.state[param]`: the count of updates and the moments of one parameter."""

    def __init__(self, of: OptimizerState, name: str) -> None:
        self._of, self._name = of, name

    def __getitem__(self, key: str) -> Tensor:
        if key not in list(self):
            raise KeyError(key)
        return self._of.read(self._name, key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._of.write(self._name, key, value)

    def __delitem__(self, key: str) -> NoReturn:
        raise TypeError(
            f"optimizer.state[{self._name!r}]: must keep its tensors, and {key!r} would be "
            f"removed; remove the whole entry (del optimizer.state[param]), whose moments then "
            f"begin anew, or write into the tensor"
        )

    def clear(self) -> None:
        """Its moments and its count begin anew."""
        self._of.restart([self._name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._of.keys_of(self._name))

    def __len__(self) -> int:
        return len(self._of.keys_of(self._name))

    def copy(self) -> dict[str, Tensor]:
        """Copies of the tensors."""
        return {key: value.clone() for key, value in self.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)

    def __repr__(self) -> str:
        return repr(dict(self))


def in_plain_dicts(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """A hook of `state_dict` of the script's own optimizer: its entries become plain
    dicts of the same tensors.
    """
    state_dict["state"] = {key: dict(value) for key, value in state_dict["state"].items()}


class OptimizerState(MutableMapping[Tensor, ParamState]):
    """The optimizer state of an engine, by parameter of its module.

    Args:
        engine: returns the engine.

    Attributes:
        edits: what the script has done to state of which each rank holds a copy: all of
            it in stage 0, counts in every stage.
    """

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self._of = engine
        # the counts that are not written yet, and whether the moments begin anew with them
        self._pending: dict[str, tuple[float, bool]] = {}
        self.edits = ReplicaEdits()
        self._shown: dict[str, Tensor] = {}  # counts that the script holds, into which it may write

    # --- as a mapping -----------------------------------------------------------------------------

    def __getitem__(self, param: Tensor) -> ParamState:
        return ParamState(self, self._name(param))

    def __setitem__(self, param: Tensor, values: Mapping[str, Any]) -> None:
        name = self._name(param)
        if not values:
            self.restart([name])
            return
        wanted = [STEP, *whole.optimizer_keys(self._step, name)]
        if missing := [key for key in wanted if key not in values and key != STEP]:
            raise KeyError(
                f"optimizer.state[{name!r}]: must get all of {', '.join(wanted)}, and "
                f"{missing[0]!r} is missing; pass it, or assign single tensors"
            )
        for key in wanted:
            if key in values:
                self.write(name, key, values[key])

    def __delitem__(self, param: Tensor) -> None:
        if param not in self:
            raise KeyError(param)
        self.restart([self._name(param)])

    def pop(self, param: Tensor, *default: Any) -> Any:
        """Returns copies of a parameter's tensors, and resets its entry to that of a
        new optimizer.
        """
        if param not in self:
            if default:
                return default[0]
            raise KeyError(param)
        found = self[param].copy()
        del self[param]
        return found

    def clear(self) -> None:
        """All moments and counts begin anew, as those of a new optimizer."""
        self.restart(starts_of(self._step.plan))

    def replace(self, values: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Takes the entries of a mapping by parameter; parameters without one begin
        anew.
        """
        if values is self:
            return
        given = {self._name(param): of_param for param, of_param in values.items()}
        self.restart(starts_of(self._step.plan).keys() - given.keys())
        for name, of_param in given.items():
            self[self._of().live.own[name]] = of_param

    def __iter__(self) -> Iterator[Tensor]:
        own = self._of().live.own
        return (own[name] for name in starts_of(self._step.plan) if self.keys_of(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        name = self._of().live.name_of(param) if isinstance(param, Tensor) else None
        return name in starts_of(self._step.plan) and bool(self.keys_of(str(name)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({param: of_param.copy() for param, of_param in self.items()},)

    # --- one parameter ----------------------------------------------------------------------------

    def keys_of(self, name: str) -> list[str]:
        """The names of a parameter's tensors; none before its first update."""
        return [STEP, *whole.optimizer_keys(self._step, name)] if self._count(name) else []

    def read(self, name: str, key: str) -> Tensor:
        """One of a parameter's tensors, into which a script may write."""
        if key == STEP:
            return self._shown.setdefault(
                name, torch.tensor(self._count(name), dtype=torch.float32)
            )
        step, engine = self._step, self._of()
        found = whole.optimizer_part(step, engine.state, name, key)
        if not isinstance(found, Tensor):
            raise RuntimeError(
                f"optimizer.state[{name!r}][{key!r}]: is in a file, and has no tensor in memory; "
                f"call safe_get_local_optimizer_state and safe_set_local_optimizer_state of "
                f"fzero.deepspeed.utils, or assign a value"
            )
        if self._home(name).flow.updates == "shard":
            return found
        shown = found.view(engine.live.own[name].shape)
        self.edits.show(_called(name, key), found, shown)
        return shown

    def write(self, name: str, key: str, value: Any) -> None:
        """Sets one of a parameter's tensors."""
        if key == STEP:
            self._pending[name] = float(value), False
            self._shown.pop(name, None)
            return
        known = whole.optimizer_keys(self._step, name)
        if key not in known:
            raise KeyError(
                f"optimizer.state[{name!r}]: has no place for {key!r}, but for "
                f"{', '.join([STEP, *known])}; keep other values in a dict of your own"
            )
        if self._pending.get(name, (0.0, False))[1]:
            self._pending[name] = 0.0, False
        given = torch.as_tensor(value)
        whole.with_local_optimizer_state(self._step, self._of().state, name, key, given)
        if self._home(name).flow.updates != "shard":
            self.edits.note(_called(name, key), given)

    def restart(self, names: Iterable[str]) -> None:
        """The moments of some parameters begin anew, at once; their counts before the
        next forward or update.
        """
        names, engine = set(names), self._of()
        for buffer in self._trained():
            inside = [name for name in buffer.layout.names if name in names]
            initialise(engine.state, self._step, engine.train_step.data_rank, buffer, inside)
        for name in names:
            self._pending[name] = 0.0, True
            self._shown.pop(name, None)

    # --- counts of updates ------------------------------------------------------------------------

    def settle(self) -> None:
        """Writes the counts that the script has set.

        *Collective* where they differ within a flat buffer: every rank.

        Raises:
            RuntimeError: they do, and gradients were collected since the last update.
        """
        self.edits.look()
        written = ((name, float(count)) for name, count in self._shown.items())
        changed = {name: (count, False) for name, count in written if count != self._count(name)}
        changed |= self._pending
        if not changed:
            return
        for name, (count, _) in changed.items():
            self.edits.note(_called(name, STEP), str(count))
        left = self._write_counts(changed)
        if left:
            engine, starts = self._of(), starts_of(self._step.plan)
            numbers: dict[Any, int] = {}
            for name in sorted(left):
                starts[name] = numbers.setdefault(
                    (starts[name], changed[name]), 1 + max([*starts.values(), *numbers.values()])
                )
            kept = self._pending, self._shown
            engine.layouts.divide(starts.keys(), starts, of="optimizer.state", changed=sorted(left))
            self._pending, self._shown = kept
            left = self._write_counts({name: changed[name] for name in left})
            assert not left, left
        self._pending = {}
        self.refresh()

    def _write_counts(self, changed: Mapping[str, tuple[float, bool]]) -> set[str]:
        """Writes the counts of flat buffers whose parameters have one; returns the
        names in the others.
        """
        left = set[str]()
        engine = self._of()
        for buffer in self._trained():
            names = [name for name in buffer.layout.names if name in changed]
            kinds = {changed[name] for name in names}
            if names and len(names) == len(buffer.layout.names) and len(kinds) == 1:
                ((count, is_anew),) = kinds
                if is_anew:
                    initialise(engine.state, self._step, engine.train_step.data_rank, buffer, names)
                for written in whole.optimizer_counts(self._step, engine.state, buffer):
                    written.fill_(count)
            else:
                left |= set(names)
        return left

    def refresh(self) -> None:
        """Writes the present counts into the tensors that the script holds: after an
        update.
        """
        self.edits.updated()
        for name, shown in self._shown.items():
            shown.fill_(self._count(name))

    def forget(self) -> None:
        """Drops what was set and not written: another state was loaded."""
        self._pending, self._shown, self.edits = {}, {}, ReplicaEdits()

    @contextmanager
    def keeping(self, names: Collection[str]) -> Iterator[None]:
        """Inside, an update leaves these parameters as they are, with their moments and
        counts.

        Parameters whose flat buffer has others are written back after it, and their
        counts before the next forward.
        """
        found: dict[str, tuple[float, list[Tensor]]] = {}
        for buffer in self._trained():
            inside = [name for name in buffer.layout.names if name in names]
            if len(inside) < len(buffer.layout.names):
                found |= {
                    name: (self._count(name), [part[:].clone() for part in self._parts(name)])
                    for name in inside
                }
        yield
        for name, (count, copies) in found.items():
            for part, values in zip(self._parts(name), copies, strict=True):
                part.copy_(values)
            if count != self._count(name):
                self._pending[name] = count, False

    def _parts(self, name: str) -> list[Any]:
        return whole.updated_parts(self._step, self._of().state, name)

    def _count(self, name: str) -> float:
        if name in self._pending:
            return self._pending[name][0]
        counts = whole.optimizer_counts(self._step, self._of().state, self._home(name))
        return float(counts[0]) if counts else float(self._of().state.step)

    # --- names ------------------------------------------------------------------------------------

    @property
    def _step(self) -> Any:
        return self._of().active_step()

    def _trained(self) -> list[FlatParamPlan]:
        return [buffer for buffer in self._step.plan.flat_buffers if buffer.trainable]

    def _home(self, name: str) -> FlatParamPlan:
        home: FlatParamPlan = self._step.plan.param_units[name][1]
        return home

    def _name(self, param: Tensor) -> str:
        name = self._of().live.name_of(param) if isinstance(param, Tensor) else None
        if name is None or name not in starts_of(self._step.plan):
            what = f"{name!r}, which is frozen" if name else f"a {type(param).__name__}"
            raise KeyError(
                f"optimizer.state: keys are the parameters of engine.module that are trained, got "
                f"{what}; iterate over optimizer.state, or over engine.module.parameters()"
            )
        return name


def _called(name: str, key: str) -> str:
    return f"optimizer.state[{name}][{key}]"
