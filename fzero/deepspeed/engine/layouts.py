"""`Layouts`: the flat buffers of an engine's state, which follow what the script
freezes and where moments begin anew.

A flat buffer has one counter of updates, and is updated or not as a whole. Parameters
that differ in either get flat buffers of their own, between an update and the next
forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from fzero.comms.hangs.failures import store_barrier
from fzero.model.model_check import Flags, listed
from fzero.plans.plan_spec import starts_of
from fzero.resharding.reshard import reshard
from fzero.runtime.step_spec import StepSpec
from fzero.step import TrainStep

if TYPE_CHECKING:
    from fzero.deepspeed.engine.engine import Engine


class Layouts:
    """The steps of an engine whose flat buffers differ.

    Args:
        engine: its step and state change.
        held: the names of the parameters that the optimizer holds.
    """

    def __init__(self, engine: Engine, held: frozenset[str]) -> None:
        self._engine, self._held, self._flags = engine, held, Flags(engine.module)
        self._seen: list[bool] | None = None  # the flags in the last training forward
        # under which no flat buffer has both trained and `no_grad_names` parameters
        self._unmixed: list[bool] | None = None
        self._no_grad_names: frozenset[str] = frozenset()

    def forget(self) -> None:
        """Reads the flags anew in the next forward."""
        self._seen = self._unmixed = None

    def follow_flags(self) -> frozenset[str]:
        """The parameters that are *still* in the next forward: they have optimizer
        state, and require no gradients.

        Frozen parameters keep master and optimizer state, as with torch.optim, and are
        not updated. Parameters that are unfrozen for the first time, and flat buffers
        that are partly still, need another plan, between two updates.

        *Collective* where another plan is needed: every rank, which must have the same
        flags.

        Raises:
            RuntimeError: another plan is needed, and gradients were collected since the
                last update.
            CollectiveError: another plan is needed on this rank, but not on one with
                other flags.
        """
        engine = self._engine
        flags, window = self._flags.read(), engine.open_window
        if flags == self._seen and (window is not None or flags == self._unmixed):
            return self._no_grad_names
        wanted = {name for name in self._held if engine.live.own[name].requires_grad}
        known = starts_of(engine.train_step.plan)
        no_grad_names = frozenset(known.keys() - wanted)
        rests = (
            no_grad_names
            if window is None
            else no_grad_names & window.forward_backward.forwards.no_grad_names
        )
        buffers = (b for b in engine.train_step.plan.flat_buffers if b.trainable)
        cuts = any(
            0 < len(rests.intersection(b.layout.names)) < len(b.layout.names) for b in buffers
        )
        if not wanted <= known.keys() or cuts:
            changed = sorted(wanted - known.keys()) or sorted(no_grad_names)
            self.divide(wanted | known.keys(), known, of="requires_grad", changed=changed)
            rests = no_grad_names
        if rests == no_grad_names:
            self._unmixed = flags
        self._seen, self._no_grad_names = flags, no_grad_names
        engine.live.follow_flags()
        engine.outside_grads.watch()
        return no_grad_names

    def divide(
        self,
        trained: Collection[str],
        starts: Mapping[str, int],
        *,
        of: str,
        changed: Collection[str],
    ) -> None:
        """Moves the state to the flat buffers of `_step_for`, so that parameters that
        begin at different updates have their own. *Collective:* every rank.

        Args:
            of: the field of the script that has changed, and `changed` the names.

        Raises:
            RuntimeError: gradients were collected since the last update.
        """
        engine, window = self._engine, self._engine.open_window
        if window is not None and window.loss_stats and not engine.grads.are_dropped:
            raise RuntimeError(
                f"{of}: must change between engine.step() and the next forward where flat buffers "
                f"must be laid out anew, and {listed(changed)} changed after a backward; change it "
                f"after engine.step(), or call engine.zero_grad() first"
            )
        if window is not None:
            engine.close_window()
        old = engine.train_step
        store_barrier(f"Engine.forward with other flat buffers ({of})", old.runtime.mesh.world)
        new = self._step_for(trained, starts)
        state = reshard(engine.state, old, new)
        assert state is not None, "every rank is in both jobs"
        engine.take_over(new, state)

    def _step_for(self, trained: Collection[str], starts: Mapping[str, int]) -> TrainStep:
        """A step that trains these parameters; those that require no gradients get flat
        buffers of their own.

        *Collective:* every rank. `starts`: when the optimizer state of each began
        (`starts_of`); for others it begins now.
        """
        numbers: dict[tuple[int, bool], int] = {(start, True): start for start in starts.values()}
        anew = 1 + max(numbers.values(), default=-1)
        found = {}
        for name in sorted(trained):
            kind = (starts.get(name, anew), self._engine.live.own[name].requires_grad)
            found[name] = numbers.setdefault(kind, 1 + max(numbers.values(), default=-1))
        old = self._engine.train_step
        return self.step_of(replace(old.spec, trained=frozenset(trained), starts=found))

    def step_of(self, spec: StepSpec) -> TrainStep:
        """Another step of the same ranks. *Collective:* every rank."""
        engine = self._engine
        with engine.live.shaped():
            step = TrainStep(spec, engine.train_step.runtime.ranks)
        step.runtime.learned.model_check.close()
        return step

    def step_to_load(self, starts: Mapping[str, int]) -> TrainStep:
        """The step that continues from a checkpoint: the present one if its optimizer
        states began alike, else a new one.

        *Collective* where it is new: every rank.

        Args:
            starts: when the optimizer state of each parameter in the checkpoint began.
        """
        step = self._engine.train_step
        trained = {
            name
            for name in self._held
            if name in starts or self._engine.live.own[name].requires_grad
        }
        buffers = [buffer.layout.names for buffer in step.plan.flat_buffers if buffer.trainable]
        began_together = all(len({starts.get(name) for name in names}) == 1 for names in buffers)
        is_same = began_together and trained == starts_of(step.plan).keys()
        return step if is_same else self._step_for(trained, starts)
