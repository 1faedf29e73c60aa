"""`PipelineProgram`: runs the forwards and backwards of one stage in the order that a
`PipeOrder` says.

A chunk is a run of layers. Its forward of a micro-batch begins with what the chunk
before it has sent, and its backward with the gradients that the chunk after it sends
back. Autograd's graph ends at both borders (`_Border`). All else is a step with
gradient accumulation: each backward adds to the gradients of the state, and the last
one of the stage reduces them.

Random numbers are keyed (`fzero.pipeline.seeds`), so that dropout does not depend on
the number of stages.

Shape letters: A micro-batches, W ranks along "data".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fzero.comms import collectives
from fzero.comms.pending import abandon
from fzero.comms.records import CommRecord, Label
from fzero.model.binding import random_state
from fzero.model.changes import modes_kept
from fzero.pipeline.cut_backward import cut_backward
from fzero.pipeline.layers import StageLayers
from fzero.pipeline.messages import Expected, Mailbox, Message, Received, Route, tensors_in
from fzero.pipeline.orders import COMPUTE, PipeEvent, PipeOrder
from fzero.pipeline.seeds import StepSeeds, keyed
from fzero.pipeline.stages import Stages
from fzero.runtime import phases
from fzero.runtime.autograd_nodes import Visits
from fzero.runtime.batches import loss_of
from fzero.runtime.eager import recomputing
from fzero.runtime.finish import Collected, loss_row, mean_of
from fzero.runtime.inspection import inspecting
from fzero.runtime.phases import AccumulationWindow
from fzero.runtime.step_runtime import StepRuntime
from fzero.state import TrainState
from fzero.transforms.checkpointing import Site, checkpointed, host_moves, slots_of

State = TrainState[Tensor]
Call = Callable[[Any], Any]
Blocks = Callable[[int, int], Sequence[tuple[int, int, bool]]]
"""From the bounds of a chunk to its blocks: first layer, last layer + 1, and whether
the backward runs the block again.
"""
_LOSSES = Label("loss_stats", phase="boundary")


@dataclass(frozen=True)
class PipelineProgram:
    """The forwards and backwards of one stage; a `fzero.runtime.programs.Program` of
    its runtime.

    Attributes:
        model: this stage's layers.
        bounds: the bounds of all chunks.
        order: the order of all stages.
        evaluation: the order of so many micro-batches without gradients.
        loss_fn: the function of the last layer's output and the labels; None where the
            output is the loss.
        blocks: the parts of a chunk that are checkpointed.
        mailbox: carries the messages of this stage.
        last_loss: the result of `loss_fn` for the micro-batch that ran last, without
            its graph; empty where none has run here.
    """

    model: StageLayers
    bounds: tuple[int, ...]
    order: PipeOrder
    evaluation: Callable[[int], PipeOrder]
    loss_fn: Callable[[Any, Any], Any] | None
    blocks: Blocks
    mailbox: Mailbox
    last_loss: list[Tensor] = field(default_factory=list, compare=False)
    is_graph: ClassVar[bool] = False

    def split(self, run: StepRuntime, state: State, batch: Any) -> list[Any]:
        """This rank's micro-batches, once all ranks have theirs. *Collective:* every
        rank of the job; sends three numbers.
        """
        return stages_of(run).agreed(state, batch, lambda given: list(run.batches.split(given)))

    def __call__(self, run: StepRuntime, state: State, micro_batches: list[Any]) -> Collected:
        """The gradients of a step on these micro-batches. *Collective:* every rank."""
        stages = stages_of(run)
        with self._sending():
            window = phases.begin(run, state, measures_early=True)
            with (
                random_state(state.rng, run.device) as rng, keyed(run.device) as seeds,
                phases.bound_throughout(run, window) as window,
            ):  # fmt: skip
                training = _Training(self, run, micro_batches, seeds, window)
                self._execute(training, run, self.order)
            window = training.window
            window.forward_backward.close()
            stages.sum_ties(run.plan, window.state.grads, run.mesh.shard)
            collected = phases.collect(run, window, rng)
            stats_AW4 = stages.loss_stats(run, collected.loss_stats[training.rows])
        return collected._replace(loss_stats=stats_AW4, is_sum=bool(stats_AW4[0, 0, 1] >= 0))

    def evaluate(self, run: StepRuntime, state: State, batch: Any) -> Tensor:
        """The mean loss of one (inputs, labels), or of as many micro-batches as a step
        takes from an iterator, without gradients.

        *Collective:* every rank.
        """
        split = run.batches.split
        micro_batches = stages_of(run).agreed(
            state, batch, lambda one: list(split(one)) if isinstance(one, Iterator) else [one]
        )
        return self.mean_loss(run, self.outputs(run, state, micro_batches), len(micro_batches))

    def mean_loss(self, run: StepRuntime, passes: Passes, num_micro_batches: int) -> Tensor:
        """The mean of the losses of all ranks. *Collective:* every rank."""
        stages, none = (
            stages_of(run),
            torch.zeros((num_micro_batches, 2), dtype=torch.float64, device=run.device),
        )
        own_A2 = torch.stack(passes.losses) if passes.losses else none
        rows_A2 = collectives.stack(own_A2, stages.axis, label=_LOSSES)[-1]
        rows_M2 = (
            collectives.stack(rows_A2, run.mesh.world, label=_LOSSES).transpose(0, 1).flatten(0, 1)
        )
        return mean_of(rows_M2, is_sum=bool(rows_M2[0, 1] >= 0))[0].float()

    def outputs(
        self,
        run: StepRuntime,
        state: State,
        micro_batches: list[Any],
        *,
        computes_loss: bool = True,
    ) -> Passes:
        """Runs forwards alone, in evaluation mode. On the last stage the result has the
        outputs and the losses of this rank.
        """
        with (
            modes_kept(self.model),
            self._sending(),
            torch.no_grad(),
            random_state(state.rng, run.device),
            keyed(run.device) as seeds,
        ):
            passes = _Evaluation(self, run, micro_batches, seeds, computes_loss)
            with inspecting(run, state, "evaluate"):
                self.model.eval()
                self._execute(passes, run, self.evaluation(len(micro_batches)))
        return passes

    def following(self, run: StepRuntime) -> PipelineProgram:
        """The same program, which reads its optimizers from the runtime."""
        return self

    def observed(self, observe: Callable[[CommRecord], None]) -> PipelineProgram:
        """The same program, whose messages are also reported to `observe`."""
        return replace(
            self, mailbox=replace(self.mailbox, links=self.mailbox.links.observed(observe))
        )

    def _execute(self, passes: Passes, run: StepRuntime, order: PipeOrder) -> None:
        events = order.events[stages_of(run).stage]
        self.mailbox.expect(expected_of(order, stages_of(run).stage))
        for event in events:
            passes.do[event.kind](event)
        self.mailbox.end()

    @contextmanager
    def _sending(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            abandon(self.mailbox.abandon())
            raise


def stages_of(run: StepRuntime) -> Stages:
    """The stages of a pipelined step."""
    assert isinstance(run.job, Stages)
    return run.job


def message_of(order: PipeOrder, event: PipeEvent) -> Message:
    """The message that an event sends or receives."""
    is_output = event.kind in ("send_output", "receive_input")
    chunk = event.chunk - (event.kind in ("receive_input", "send_gradient"))
    return Message(
        Route("output" if is_output else "gradient", chunk), event.micro_batch, order.peer(event)
    )


@lru_cache
def expected_of(order: PipeOrder, stage: int) -> tuple[Expected, ...]:
    """The messages that a stage will receive, in order."""
    # per message of a peer: its receives from this stage before it
    num_received = dict[Message, int]()
    for peer, events in enumerate(order.events):
        count = 0
        for event in events if peer != stage else ():
            if event.kind in COMPUTE or order.peer(event) != stage:
                continue
            if event.kind.startswith("receive"):
                count += 1
            else:
                num_received[message_of(order, event)._replace(peer=peer)] = count
    received = (
        message_of(order, event)
        for event in order.events[stage]
        if event.kind.startswith("receive")
    )
    return tuple(Expected(message, num_received[message]) for message in received)


class Passes(ABC):
    """The forwards of one step, by chunk and micro-batch.

    Attributes:
        do: what each kind of event does.
        results: the outputs of the last layer, by micro-batch.
        losses: rows of (loss, weight or -1) of this rank.
    """

    def __init__(
        self,
        program: PipelineProgram,
        run: StepRuntime,
        micro_batches: list[Any],
        seeds: StepSeeds,
        computes_loss: bool = True,
    ) -> None:
        self.program, self.run, self.micro_batches, self.seeds = program, run, micro_batches, seeds
        self.order, self.mailbox, self.computes_loss = program.order, program.mailbox, computes_loss
        self.last_chunk = len(program.bounds) - 2
        self.inputs: dict[tuple[int, int], Received] = {}
        self.outgoing: dict[tuple[int, int], Any] = {}
        self.results: list[Any] = []
        self.losses: list[Tensor] = []
        self.do: dict[str, Callable[[PipeEvent], None]] = {
            "forward": self.forward,
            "receive_input": self.receive_input,
            "send_output": self.send,
        }

    def receive_input(self, event: PipeEvent) -> None:
        self.inputs[event.chunk, event.micro_batch] = self.mailbox.receive(
            message_of(self.order, event)
        )

    def send(self, event: PipeEvent) -> None:
        self.mailbox.send(
            message_of(self.order, event), self.outgoing.pop((event.chunk, event.micro_batch))
        )

    @abstractmethod
    def forward(self, event: PipeEvent) -> None:
        """Runs a chunk on its input, and keeps its output for the next chunk."""

    @abstractmethod
    def _through(self, start: int, stop: int, number: int, x: Any) -> Any:
        """The output of the layers from `start` to `stop`."""

    def _first(self, number: int) -> Any:
        return self.run.batches.cast(self.micro_batches[number][0])

    def _hand_on(self, chunk: int, number: int, out: Any) -> None:
        """Keeps a chunk's output for the message to the next chunk, or for that chunk
        itself.
        """
        if self.order.stage_of[chunk] == self.order.stage_of[chunk + 1]:
            self.inputs[chunk + 1, number] = Received.copied(out)
        else:
            self.outgoing[chunk, number] = out

    def _forward(
        self, chunk: int, number: int, x: Any
    ) -> tuple[Any, tuple[Tensor, Tensor | None] | None]:
        """A chunk's output; and for the last chunk the loss, with its weight."""
        start, stop = self.program.bounds[chunk : chunk + 2]
        dtype = self.run.autocast
        with nullcontext() if dtype is None else torch.autocast(self.run.device.type, dtype=dtype):
            x = self._through(start, stop, number, x)
        if chunk < self.last_chunk or not self.computes_loss:
            return x, None
        self.seeds.key(stop, number)
        labels, loss_fn = self.run.batches.cast(self.micro_batches[number][1]), self.program.loss_fn
        loss = loss_of(
            self.program.model,
            lambda model, batch: x if loss_fn is None else loss_fn(x, labels),
            None,
            reduces_by_sum=not self.run.rules.loss.is_mean,
            autocast=dtype,
            device=self.run.device.type,
        )
        self.program.last_loss[:] = [loss[0].detach()]
        return x, loss

    def _layers(self, start: int, stop: int, number: int, x: Any) -> Any:
        for index, call in self.program.model.calls(start, stop):
            self.seeds.key(index, number)
            x = call(x)
        return x


class _Evaluation(Passes):
    """Forwards alone, whose outputs and losses are kept."""

    def forward(self, event: PipeEvent) -> None:
        chunk, number = event.chunk, event.micro_batch
        x = (
            self._first(number)
            if chunk == 0
            else self.inputs[chunk, number].filled(self.inputs.pop((chunk, number)).tensors)
        )
        out, loss = self._forward(chunk, number, x)
        if chunk < self.last_chunk:
            self._hand_on(chunk, number, out)
        else:
            self.results.append(out)
            if loss is not None:
                self.losses.append(loss_row(*loss))

    def _through(self, start: int, stop: int, number: int, x: Any) -> Any:
        return self._layers(start, stop, number, x)


class _Open(NamedTuple):
    """A forward whose backward is to come.

    Attributes:
        visits: the units that it used.
        roots: where its backward begins: the loss, or the outputs that require
            gradients.
        inputs: the inputs that require a gradient, as outputs of their `_Border`.
        input_grads: receives their gradients.
        loss: the loss, with its weight; of the last chunk only.
    """

    visits: Visits
    roots: list[Any]
    inputs: list[GradientEdge]
    input_grads: list[Tensor | None]
    loss: tuple[Tensor, Tensor | None] | None


class _Training(Passes):
    """The forwards and backwards of one step.

    Attributes:
        window: the accumulation window.
        rows: the backwards of which the loss statistics count: those of the last chunk;
            on other stages, as many.
    """

    def __init__(
        self,
        program: PipelineProgram,
        run: StepRuntime,
        micro_batches: list[Any],
        seeds: StepSeeds,
        window: AccumulationWindow,
    ) -> None:
        super().__init__(program, run, micro_batches, seeds)
        self.window, self.rows = window, list[int]()
        self.anchor = torch.empty(0, device=run.device, requires_grad=True)
        self.no_loss = torch.zeros((), device=run.device)
        self.opened: dict[tuple[int, int], _Open] = {}
        self.waiting: dict[tuple[int, int], Callable[[], None]] = {}
        self.output_grads: dict[tuple[int, int], list[Tensor | None]] = {}
        self.is_sum = False
        own = program.order.events[stages_of(run).stage]
        self.num_left = sum(event.kind in ("backward", "backward_weight") for event in own)
        self.do |= {
            "backward": self.backward,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
            "receive_gradient": self.receive_gradient,
            "send_gradient": self.send,
        }

    # --- forwards ---------------------------------------------------------------------------------

    def forward(self, event: PipeEvent) -> None:
        chunk, number = event.chunk, event.micro_batch
        grads: list[Tensor | None] = []
        inputs: list[GradientEdge] = []
        x = (
            self._first(number)
            if chunk == 0
            else self._attached(self.inputs.pop((chunk, number)), grads, inputs)
        )
        kind = "train" if self.order.num_chunks == self.order.stages else f"chunk {chunk}"
        out, loss = phases.forward(
            self.run, self.window, partial(self._forward, chunk, number, x), kind=kind
        )
        forwards = self.window.forward_backward.forwards
        visits = {forwards.last_index: forwards.last.visits}
        if loss is not None:
            self.is_sum = loss[1] is not None
            self.opened[chunk, number] = _Open(
                visits, [loss[0]], inputs, grads, (loss[0].detach(), loss[1])
            )
            return
        roots = [
            get_gradient_edge(x) for x in tensors_in(out) if x.requires_grad
        ]  # the outputs themselves need not live
        self.opened[chunk, number] = _Open(visits, roots, inputs, grads, None)
        self._hand_on(chunk, number, out)

    def _attached(
        self, received: Received, grads: list[Tensor | None], inputs: list[GradientEdge]
    ) -> Any:
        """The input of a chunk, whose graph begins at the tensors that require a
        gradient.

        Args:
            grads: will receive their gradients in the backward.
            inputs: receives these tensors, as edges of the graph.
        """
        wants = received.requires_grad
        if not any(wants):
            return received.filled(received.tensors)
        needed = [x for x, wanted in zip(received.tensors, wants, strict=True) if wanted]
        grads.extend(None for _ in needed)
        of_border = border_of(self.anchor, needed, grads)
        inputs.extend([GradientEdge(x.grad_fn, x.output_nr) for x in of_border])  # type: ignore[arg-type]
        attached = iter(of_border)
        return received.filled(
            [
                next(attached) if wanted else x
                for x, wanted in zip(received.tensors, wants, strict=True)
            ]
        )

    def _through(self, start: int, stop: int, number: int, x: Any) -> Any:
        for first, last, runs_again in self.program.blocks(start, stop):
            block = partial(self._layers, first, last, number)
            x = (
                checkpointed(self._site(f"layers {first} to {last - 1}", block))(x)
                if runs_again
                else block(x)
            )
        return x

    def _site(self, name: str, block: Call) -> Site:
        run = self.run
        slots = slots_of(self.program.model, "", run.plan.aliases)
        moves = (
            host_moves(run.device)
            if run.spec.cfg.activation_checkpointing.cpu_checkpointing
            else None
        )
        again = partial(recomputing, self.window.forward_backward)
        return Site(
            name, block, slots, run.learned.moving_buffers, moves, again, self.anchor.detach()
        )

    # --- backwards --------------------------------------------------------------------------------

    def receive_gradient(self, event: PipeEvent) -> None:
        received = self.mailbox.receive(message_of(self.order, event))
        self.is_sum, *self.output_grads[event.chunk, event.micro_batch] = received.filled(
            received.tensors
        )

    def backward(self, event: PipeEvent) -> None:
        chunk, number = event.chunk, event.micro_batch
        opened = self.opened.pop((chunk, number))
        roots, grads = self._roots(chunk, number, opened)
        with self._going_back(chunk, opened):
            if roots:
                torch.autograd.backward(roots, grads)
        self._return(chunk, number, opened)

    def backward_input(self, event: PipeEvent) -> None:
        """The part of a backward that the stage before waits for: the gradients of a
        chunk's inputs.
        """
        chunk, number = event.chunk, event.micro_batch
        opened = self.opened[chunk, number]
        roots, grads = self._roots(chunk, number, opened)
        if not (roots and opened.inputs):
            self.waiting[chunk, number] = (
                partial(torch.autograd.backward, roots, grads) if roots else lambda: None
            )
        else:
            with phases.bound_to(self.run, self.window, lambda: (number,)):
                opened.input_grads[:], self.waiting[chunk, number] = cut_backward(
                    roots, grads, opened.inputs
                )
        self._return(chunk, number, opened)

    def backward_weight(self, event: PipeEvent) -> None:
        """The rest of a backward: the gradients of a chunk's weights."""
        place = event.chunk, event.micro_batch
        rest = self.waiting.pop(place)
        with self._going_back(event.chunk, self.opened.pop(place)):
            rest()

    def _roots(self, chunk: int, number: int, opened: _Open) -> tuple[list[Any], list[Any]]:
        """Where a backward begins, and the gradients there."""
        if opened.loss is not None:
            return [phases.scaled_loss(self.run, self.window, opened.roots[0])], [None]
        grads = self.output_grads.pop((chunk, number))
        found = [
            (root, grad) for root, grad in zip(opened.roots, grads, strict=True) if grad is not None
        ]
        return [root for root, _ in found], [grad for _, grad in found]

    @contextmanager
    def _going_back(self, chunk: int, opened: _Open) -> Iterator[None]:
        self.num_left -= 1
        # Other stages than the last one know no loss; `Stages.loss_stats` gives them that of the
        # last.
        loss, weight = opened.loss or (self.no_loss, None)
        # A mean is divided here, at the parameters. A sum is divided in the update, when all
        # weights are known.
        num_parts = 1 if self.is_sum else len(self.micro_batches)
        with phases.going_back(
            self.run,
            self.window,
            opened.visits,
            loss,
            weight=weight,
            num_parts=num_parts,
            is_last=self.num_left == 0,
            needs_grads=False,
        ) as after:
            yield
        (self.window,) = after
        counts = (
            chunk == self.last_chunk
            or self.order.stage_of[self.last_chunk] != stages_of(self.run).stage
        )
        if counts and len(self.rows) < len(self.micro_batches):
            self.rows.append(len(self.window.loss_stats) - 1)

    def _return(self, chunk: int, number: int, opened: _Open) -> None:
        """Keeps the gradients of a chunk's inputs for the chunk before it."""
        if chunk == 0:
            return
        if self.order.stage_of[chunk] == self.order.stage_of[chunk - 1]:
            self.output_grads[chunk - 1, number] = opened.input_grads
        else:
            self.outgoing[chunk, number] = (self.is_sum, *opened.input_grads)


class _Border(torch.autograd.Function):
    """The tensors that a chunk gets from the one before it, as outputs of a node, whose
    backward keeps their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tensors: list[Tensor], grads: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        ctx.kept = grads
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.kept[:] = grads
        return None, None, None


# Not `_Border.apply`: see `autograd_nodes.root_of`.
border_of: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Border).apply
