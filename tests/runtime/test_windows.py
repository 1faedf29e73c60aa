"""Accumulation windows in any order of their parts, against the plain loop.

A state machine of hypothesis holds a job of ranks in lockstep, and its oracle: one
module, `loss.backward()` for each rank's loss, AdamW. Its rules are the parts of a step:
forwards, backwards through some of them, backwards of another model through them,
updates, errors; and between windows whole steps, freezing, saving and loading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from profiles import examples
from torch import Tensor, nn
from training import config

import fzero
from fzero.storage.file_tensor import StoreError
from fzero.testing.training_machine import MEMORY

WIDTH, UNITS = 5, ("first", "rest", "last")
OPTIMIZER = {"lr": 0.02, "eps": 0.1, "weight_decay": 0.1}
"""An eps at which no weight changes by more than its gradient, so that rounding is not
amplified."""

GONE = "belongs to a step that is over|has been modified inplace"
"""Errors of a backward through a graph of a step that is over: fzero's, and autograd's
where it holds views of parameters that the update wrote."""


class Branches(nn.Module):
    """Three units: `first` runs twice and `rest` not at all where signs of the input say
    so, if it `branches`. Row 2 of the input makes the loss infinite, or raises."""

    def __init__(self, *, branches: bool) -> None:
        super().__init__()
        self.first, self.rest = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last, self.branches = nn.Linear(WIDTH, 3, bias=False), branches
        self.raises = ""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.raises == "forward":
            raise ZeroDivisionError
        if not self.branches or x[0, 0] > 0:
            h = torch.tanh(self.first(h))
        if not self.branches or x[0, 1] > 0:
            h = h + self.rest(h)
        out = self.last(h)
        if self.raises == "backward":
            out.register_hook(lambda grad: 1 / 0)
        return out.square().sum(dim=1)


class Pending(NamedTuple):
    """A forward through which no backward has gone: losses, weights and inputs by rank,
    of the job and of the oracle."""

    ours: Sequence[tuple[Tensor, Tensor]]
    plain: Sequence[tuple[Tensor, Tensor]]
    inputs: tuple[list[Tensor], list[Tensor]]


seeds = st.integers(0, 2**16)
some_units = st.sets(st.sampled_from(UNITS[:2]), max_size=2)


class Windows(RuleBasedStateMachine):
    """The windows of one job."""

    @initialize(
        stage=st.integers(0, 3),
        world_size=st.integers(1, 3),
        schedule=st.sampled_from(["learned", "negotiated"]),
        micro_steps=st.integers(1, 3),
        is_sum=st.booleans(),
        adds=st.booleans(),
        in_files=st.booleans(),
    )
    def start(
        self,
        stage: int,
        world_size: int,
        schedule: Any,
        micro_steps: int,
        is_sum: bool,
        adds: bool,
        in_files: bool,
    ) -> None:
        torch.manual_seed(stage)
        self.world_size, self.schedule, self.micro_steps = world_size, schedule, micro_steps
        self.folder = TemporaryDirectory(dir=MEMORY)
        at = fzero.Placement("nvme", path=f"{self.folder.name}/state")
        self.placements = {"optimizer/*": at} if in_files else None
        self.adds, self.is_sum, branches = (
            adds and not is_sum,
            is_sum,
            schedule == "negotiated" or stage < 3,
        )
        self.model, self.plain = (Branches(branches=branches) for _ in range(2))
        self.plain.load_state_dict(self.model.state_dict())
        self.moments: dict[nn.Parameter, Any] = {}
        self.step = self._made(stage, None)
        self.state, self.window = self.step.init(), None

    def teardown(self) -> None:
        self.state = self.window = None
        self.folder.cleanup()

    # --- the parts of a window --------------------------------------------------------------------

    def _open(self, seed: int) -> None:
        """Begins a window, unless there is one."""
        if self.window is not None:
            return
        num_parts, measures_early = 1 + seed % 3, bool(seed % 2)
        states = self.step.states_of(self.state)
        self.window = self._on_each(
            lambda rank, step: step.begin(states[rank], measures_early=measures_early)
        )
        self.num_parts, self.is_whole = 1 if self.is_sum else num_parts, False
        self.pending, self.rows = list[Pending](), list[Any]()
        self.without: list[set[str]] = []
        self.plain.zero_grad()

    @rule(seed=seeds, run=st.sampled_from(["train", "other"]), without=some_units)
    def forward(self, seed: int, run: str, without: set[str]) -> None:
        self._open(seed)
        names = frozenset(n for n in self._trained() if n.partition(".")[0] in without)
        ours, plain = ([x.requires_grad_() for x in self._batch(seed)] for _ in range(2))
        outputs = self._on_each(
            lambda rank, step: step.forward(
                self.window[rank],
                lambda: self.loss_of(step.spec.model, ours[rank]),
                run=run,
                no_grad_names=names,
            )
        )
        self._require({name: name not in names for name in self._trained()})
        expected = [self.loss_of(self.plain, x) for x in plain]
        self._require(dict.fromkeys(self._trained(), True))
        self.without.append(set(names))
        self.pending.append(Pending(outputs, expected, (ours, plain)))

    @rule(data=st.data(), seed=seeds, keeps=st.booleans(), is_last=st.booleans())
    def backward(self, data: Any, seed: int, keeps: bool, is_last: bool) -> None:
        """Through the sum of one or several forwards, in any order of these."""
        if self.window is None or not self.pending:
            self.forward(seed, "train", set())
        chosen = data.draw(st.sets(st.integers(0, len(self.pending) - 1), min_size=1, max_size=2))
        self._go_back(chosen, keeps=keeps, is_last=is_last)

    def _go_back(self, chosen: set[int], *, keeps: bool, is_last: bool) -> None:
        through = [self.pending[index] for index in chosen]

        def ours(rank: int, step: fzero.TrainStep) -> Any:
            losses, weights = zip(*(forward.ours[rank] for forward in through), strict=True)
            weight = {"weight": sum(weights)} if self.is_sum else {}
            return step.backward(
                self.window[rank],
                sum(losses),  # type: ignore[arg-type]
                num_parts=self.num_parts,
                is_last=is_last,
                retain_graph=keeps,
                **weight,
            )

        self.window = self._on_each(ours)
        share = self.num_parts if self.is_sum else self.num_parts * self.world_size
        for of_rank in zip(*(forward.plain for forward in through), strict=True):
            loss, weight = (sum(x) for x in zip(*of_rank, strict=True))
            (loss / share).backward(retain_graph=keeps)
            self.rows.append((loss.item(), weight.item()))  # type: ignore[union-attr]
        self.is_whole = is_last
        if not keeps:
            self.pending = [x for i, x in enumerate(self.pending) if i not in chosen]

    @rule(data=st.data(), seed=seeds, keeps=st.booleans())
    def backward_of_another_model(self, data: Any, seed: int, keeps: bool) -> None:
        """It gets the gradient of the input, and this one gets none."""
        if self.window is None or not self.pending:
            self.forward(seed, "train", set())
        index = data.draw(st.integers(0, len(self.pending) - 1))
        ours, plain, (inputs, expected) = self.pending[index]

        def one(rank: int, step: fzero.TrainStep) -> Tensor:
            loss = ours[rank][0]
            with step.backward_through(self.window[rank], loss, retain_graph=keeps):
                (grad,) = torch.autograd.grad(loss, inputs[rank], retain_graph=keeps)
            return grad

        for found, (loss, _), x in zip(self._on_each(one), plain, expected, strict=True):
            (grad,) = torch.autograd.grad(loss, x, retain_graph=keeps)
            torch.testing.assert_close(found, grad, rtol=1e-5, atol=1e-6)
        if not keeps:
            del self.pending[index]

    @rule(
        seed=seeds,
        scale=st.sampled_from([1.0, 3.0]),
        of_each=st.lists(some_units, min_size=1, max_size=3),
    )
    def update(self, seed: int, scale: float, of_each: list[set[str]]) -> None:
        """After a last backward; the gradients may be changed before it. A backward
        through what is left of the window raises."""
        if self.window is None or not self.is_whole:
            for index, without in enumerate(of_each):
                self.forward(seed + index, "train", without)
            through = range(len(self.pending) - len(of_each), len(self.pending))
            self._go_back(set(through), keeps=bool(seed % 2), is_last=True)
        for window in self.window if scale != 1 else ():
            for grad in window.state.grads.values():
                grad.mul_(scale)
        done = self._on_each(lambda rank, step: step.update(self.window[rank]))
        self._update_plain(self.without, scale)
        (metrics, *others), before = [m for _, m in done], self.state
        for rank, window in enumerate(self.window):
            with pytest.raises((ValueError, StoreError), match="a step took it"):
                self.step.steps[rank].update(window)
            for left in self.pending:
                with pytest.raises(RuntimeError, match=GONE):
                    left.ours[rank][0].backward()
        assert all(other.loss == metrics.loss for other in others)
        self.state, self.window = self.step.joined([state for state, _ in done], before), None
        self._compare(metrics)

    # --- what is refused, and leaves a window or the state as it is ------------------------------------

    @precondition(lambda self: self.window is None or not self.rows)
    @rule(seed=seeds)
    def update_without_a_backward(self, seed: int) -> None:
        self._open(seed)
        for rank, window in enumerate(self.window):
            with pytest.raises(ValueError, match="update: needs a backward since the last one"):
                self.step.steps[rank].update(window)

    @rule(seed=seeds, where=st.sampled_from(["forward", "backward"]))
    def raise_on_all_ranks(self, seed: int, where: str) -> None:
        """The window is over, and its state begins another one."""

        def fails(rank: int, step: fzero.TrainStep) -> None:
            model = step.spec.model
            with pytest.raises(ZeroDivisionError):
                model.raises = where
                try:
                    loss = step.forward(self.window[rank], lambda: self.loss_of(model, xs[rank]))
                    step.backward(self.window[rank], loss[0])
                finally:
                    model.raises = ""
            with pytest.raises(RuntimeError, match="update: must be of a window that no error"):
                step.update(self.window[rank])

        self._open(seed)
        xs = self._batch(seed)
        self._on_each(fails)
        self.window = None

    @precondition(lambda self: self.window is not None)
    @rule()
    def abandon(self) -> None:
        """A window that nobody updates leaves its state as it was."""
        self.window = None

    # --- between windows --------------------------------------------------------------------------

    @rule(seed=seeds, value=st.sampled_from([0.0, 0.0, math.nan, math.inf]), lazily=st.booleans())
    def whole_step(self, seed: int, value: float, lazily: bool) -> None:
        """A step of micro-batches is the window of its parts; a loss of one rank that is
        not finite is reported on all, and the step never happened."""
        self._settle()
        micro = [self._batch(seed + index) for index in range(self.micro_steps)]
        micro[-1][-1][-1] += value
        batch: Any = torch.stack([torch.cat(of_rank) for of_rank in zip(*micro, strict=True)])
        batch = map(torch.stack, micro) if lazily else batch
        if value:
            with pytest.raises(FloatingPointError, match=rf"ranks? \[{self.world_size - 1}\]"):
                self.step(self.state, batch)
            return
        self.state, metrics = self.step(self.state, batch)
        self.plain.zero_grad()
        self.rows = []
        share = 1 if self.is_sum else self.micro_steps * self.world_size
        for x in (x for of_micro in micro for x in of_micro):
            loss, weight = self.loss_of(self.plain, x)
            (loss / share).backward()
            self.rows.append((loss.item(), weight.item()))
        self._update_plain([set()], 1.0)
        self._compare(metrics)

    @rule(units=some_units)
    def freeze(self, units: set[str]) -> None:
        """What is trained before and after keeps its moments; what is unfrozen begins."""
        self._settle()
        for model in (self.model, self.plain):
            for name, param in model.named_parameters():
                param.requires_grad_(name.partition(".")[0] not in units)
        kept = {p for p in self.plain.parameters() if p.requires_grad}
        self.moments = {p: held for p, held in self.moments.items() if p in kept}
        new = self._made(self.step.plan.stage, self.step.steps[0])
        self.state = fzero.reshard(self.state, self.step, new)
        self.step = new

    @rule(stage=st.integers(0, 3))
    def save_and_load(self, stage: int) -> None:
        self._settle()
        fzero.save(self.state, f"{self.folder.name}/saved", step=self.step)
        branches = self.model.branches and (self.schedule == "negotiated" or stage < 3)
        if branches == self.model.branches:
            self.step = self._made(stage, self.step.steps[0])
        self.state = fzero.load(f"{self.folder.name}/saved", step=self.step).state

    def _settle(self) -> None:
        if self.window is not None:
            self.update(0, 1.0, [set()])

    # --- the oracle -------------------------------------------------------------------------------

    def _made(self, stage: int, after: fzero.TrainStep | None) -> Any:
        keys = config(stage, optimizer={"type": "AdamW", "params": OPTIMIZER})
        step = fzero.make_train_step(
            self.model,
            keys
            | {
                "gradient_accumulation_steps": self.micro_steps,
                "gradient_allreduce_op": "sum" if self.adds and stage < 3 else "mean",
            },
            loss_fn=lambda model, x: self.loss_of(model, x) if self.is_sum else model(x).mean(),
            units=list(UNITS),
            schedule=self.schedule,
            placements=self.placements,
            after=after,
        )
        return fzero.simulate(step, self.world_size, by="lockstep")

    def loss_of(self, model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """A mean, or the sum over the rows that begin above 0, and their number."""
        of_rows = model(x)
        if not self.is_sum:
            return of_rows.mean(), of_rows.new_ones(())
        chosen = (x[:, 0] > -0.5).to(x.dtype).index_fill(0, torch.tensor([1]), 1.0)
        return (of_rows * chosen).sum(), chosen.detach().sum()

    def _on_each(self, function: Callable[[int, fzero.TrainStep], Any]) -> list[Any]:
        found: list[Any] = self.step.on_each(lambda rank: function(rank, self.step.steps[rank]))
        return found

    def _batch(self, seed: int) -> list[Tensor]:
        """Two rows of each rank."""
        generator = torch.Generator().manual_seed(seed)
        return list(torch.randn(self.world_size, 2, WIDTH, generator=generator))

    def _trained(self) -> list[str]:
        return [name for name, p in self.model.named_parameters() if p.requires_grad]

    def _require(self, flags: dict[str, bool]) -> None:
        for name, flag in flags.items():
            self.plain.get_parameter(name).requires_grad_(flag)

    def _update_plain(self, without: Iterable[set[str]], scale: float) -> None:
        """Clips and updates: a parameter without a gradient has a zero one, but for flat
        buffers without gradients in all forwards, which stay."""
        left = set.intersection(*without)
        buffers = (b for b in self.step.plan.flat_buffers if b.trainable)
        kept = {n for b in buffers for n in b.layout.names if left.issuperset(b.layout.names)}
        params = [(n, p) for n, p in self.plain.named_parameters() if p.requires_grad]
        factor = scale / (sum(w for _, w in self.rows) if self.is_sum else 1)
        if self.adds and self.step.plan.stage < 3:  # over the ranks, not over micro-steps
            factor *= self.world_size
        for _, param in params:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad * factor
        updated = [p for n, p in params if n not in kept]
        self.norm = nn.utils.clip_grad_norm_(updated, 1.0)
        optimizer = torch.optim.AdamW(updated, **OPTIMIZER)
        optimizer.state.update({p: self.moments[p] for p in updated if p in self.moments})
        optimizer.step()
        self.moments |= {p: optimizer.state[p] for p in updated}

    def _compare(self, metrics: Any) -> None:
        total, weight = (sum(x) for x in zip(*self.rows, strict=True))
        loss = total / (weight if self.is_sum else len(self.rows))
        # fp32: sums over rows, ranks and micro-steps are made in another order
        assert metrics.loss.item() == pytest.approx(loss, rel=1e-5)
        assert metrics.grad_norm.item() == pytest.approx(self.norm.item(), rel=1e-4, abs=1e-6)
        found = self.step.gather(self.state)
        for name, expected in self.plain.state_dict().items():
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5)


TestWindows = Windows.TestCase
TestWindows.settings = examples(
    60, stateful_step_count=16, deadline=None, suppress_health_check=list(HealthCheck)
)
