"""`fzero.replay` finds what was changed in one run, and names rank, unit and tensor.

Faults are made on real ranks: one bit of one element is flipped in one of the runs.
"""

from __future__ import annotations

import itertools
import random
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import optree
import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.comms import compressed, error_feedback, quantize
from fzero.comms.pending import Pending
from fzero.digests import digest as digests, replaying, watching
from fzero.digests.digest import digest
from fzero.optim.transforms import same_bits
from fzero.pipeline import PipelineModule
from fzero.resharding.place import copied
from fzero.runtime import gathers, reductions
from fzero.storage.file_tensor import FileTensor, handles_of, in_memory
from sharding import Mesh

WIDTH, NUM_BLOCKS = 8, 3
UNITS = ("first", "h.0", "h.1", "h.2", "last")
NUM_FAULTS = 20
KINDS = ("weights", "moments", "activation", "gradient", "reduction", "gather")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.narrow(self.wide(x).relu())
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.h = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.h:
            x = self.drop(block(x))
        out: Tensor = self.last(x)
        return out


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    loss: Tensor = (model(x) - y).square().mean()
    return loss


class OddNet(nn.Module):
    """With a tied, a frozen, an empty and a 0-d parameter, buffers, and a module that runs
    again in the backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.h[2].wide.weight = self.h[0].wide.weight
        self.h[1].narrow.bias.requires_grad_(False)
        self.empty, self.scale = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(1.5))
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)) * self.scale + self.empty.sum()
        x = self.drop(checkpoint(self.h[0], x, use_reentrant=True))
        x = self.drop(checkpoint(self.h[1], x, use_reentrant=False))
        out: Tensor = self.last(self.h[2](x))
        return out


def made(
    stage: int, *, accumulation: int = 1, cfg: Mapping[str, Any] = {}, **keys: Any
) -> tuple[fzero.TrainStep, Any, Any]:
    torch.manual_seed(0)
    model = keys.pop("model", Net)()
    cfg = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": accumulation,
    } | cfg
    step = fzero.make_train_step(model, cfg, loss_fn=loss_of, units=UNITS, **keys)
    torch.manual_seed(1 + step.rank)
    return step, step.init(), (torch.randn(4, 4), torch.randn(4, 2))


# --- faults ---------------------------------------------------------------------------------------


def flipped(x: Tensor, random: random.Random) -> Tensor:
    """The tensor with one flipped bit, in place."""
    flat = x.detach().view(-1).view(torch.uint8)
    flat[random.randrange(len(flat))] ^= 1 << random.randrange(8)
    return x


class Nth:
    """A call's number, of all calls in the runs since it was made."""

    def __init__(self, hit: int) -> None:
        self.calls, self.hit = 0, hit

    def __call__(self) -> bool:
        self.calls += 1
        return self.calls - 1 == self.hit


@contextmanager
def fault(
    kind: str, step: fzero.TrainStep, unit: str, run: int, draw: random.Random
) -> Iterator[None]:
    """Inside, run `run` of two has a fault of this kind in a unit."""
    module, flips = step.spec.model.get_submodule(unit), Nth(run)
    buffer = next(u for u in step.plan.units if u.name == unit).buffers[0]
    with ExitStack() as stack:
        if kind == "weights":
            in_state(stack, step, lambda state: state.params[buffer.key], flips, draw)
        elif kind == "moments":
            after_update(stack, buffer.key, flips, draw)
        elif kind == "activation":
            part = module.wide if isinstance(module, Block) else module

            def out(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
                return flipped(out.clone(), draw) if flips() else None

            stack.callback(part.register_forward_hook(out, prepend=True).remove)
        elif kind == "gradient":

            def reads(module: nn.Module, args: Any) -> None:
                if flips():
                    edge = get_gradient_edge(next(iter(module.parameters())))
                    at = edge.output_nr

                    def came(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                        return *grads[:at], flipped(grads[at].clone(), draw), *grads[at + 1 :]

                    edge.node.register_prehook(came)

            stack.callback(module.register_forward_pre_hook(reads).remove)
        else:
            where, name = {
                "reduction": (reductions, "start_reduce_scatter_grads"),
                "gather": (gathers, "start_gather"),
            }[kind]
            collective(stack, where, name, buffer.key, flips, draw)
        yield


def in_state(
    stack: ExitStack,
    step: fzero.TrainStep,
    leaf: Callable[[Any], Tensor],
    flips: Nth,
    draw: random.Random,
) -> None:
    plain = replaying.watched_step

    def watched(step: Any, state: Any, batch: Any) -> Any:
        if flips():
            flipped(leaf(state), draw)
        return plain(step, state, batch)

    stack.enter_context(patch.object(replaying, "watched_step", watched))


def after_update(stack: ExitStack, key: str, flips: Nth, draw: random.Random) -> None:
    plain = watching.end

    def end(*args: Any) -> Any:
        state, metrics = plain(*args)
        if flips():
            flipped(optree.tree_leaves(state.optimizer[key])[0], draw)
        return state, metrics

    stack.enter_context(patch.object(watching, "end", end))


def collective(
    stack: ExitStack, where: Any, name: str, key: str, flips: Nth, draw: random.Random
) -> None:
    plain = getattr(where, name)

    def start(x: Tensor, buffer: Any, *args: Any, **kwargs: Any) -> Any:
        sending = plain(x, buffer, *args, **kwargs)
        pending = getattr(sending, "pending", sending)
        if buffer.key == key and flips():
            result = flipped(pending.wait(), draw)
            pending = Pending(pending.label, [], None, result)
            return sending._replace(pending=pending) if hasattr(sending, "pending") else pending
        return sending

    stack.enter_context(patch.object(where, name, start))


PHASES = {
    "weights": "given state",
    "moments": "update",
    "activation": "forward",
    "gradient": "backward",
    "reduction": "reduction",
    "gather": "gather",
}


class Tried(NamedTuple):
    """The faults of one rank: how many were found, and what was said wrongly."""

    num_found: int
    num_without_effect: int
    wrong: list[str]


def _finds(stage: int, seeds: list[int]) -> Tried:
    step, state, batch = made(stage)
    state, _ = fzero.replay(step, state, batch)
    num_found = num_without_effect = 0
    wrong = []
    clean = optree.tree_leaves(fzero.replay(step, state, batch))
    for seed in seeds:
        draw = random.Random(seed)
        kind, unit = draw.choice(KINDS[: 6 if stage == 3 else 5]), draw.choice(UNITS)
        at, rank = draw.randrange(2), draw.randrange(step.world_size)
        before = [x.clone() for x in optree.tree_leaves(state)]
        with fault(kind, step, unit, at, draw) if rank == step.rank else ExitStack():
            try:
                result = optree.tree_leaves(fzero.replay(step, state, batch))
            except fzero.ReplayError as error:
                num_found += 1
                if (error.cause, error.ranks, error.unit) != ("fault", (rank,), unit):
                    wrong.append(f"{seed}: {kind} in {unit} on {rank}: {error}")
                elif error.phase != PHASES[kind] and kind != "gather":
                    wrong.append(f"{seed}: {kind} in {unit}: {error}")
                elif kind != "activation" and "element" not in error.where:
                    wrong.append(f"{seed}: no element: {error}")
            else:  # behind a ReLU, in padding, or in a weight that a backward does not read
                num_without_effect += 1
                if not all(map(torch.equal, result, clean)):
                    wrong.append(f"{seed}: {kind} in {unit} on {rank} was not found")
        assert all(map(torch.equal, optree.tree_leaves(state), before))
    fzero.replay(step, state, batch)
    return Tried(num_found, num_without_effect, wrong)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_flipped_bit_is_found_and_named(ranks: RankPool, stage: int) -> None:
    seeds = [*range(stage * NUM_FAULTS, (stage + 1) * NUM_FAULTS)]
    for tried in ranks(2, _finds, stage, seeds):
        assert not tried.wrong
        assert tried.num_found >= 0.75 * NUM_FAULTS, tried


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_of_a_hundred_flips_on_three_ranks_all_are_found_and_named(
    ranks: RankPool, stage: int
) -> None:
    """25 in each stage; those without an effect are not counted."""
    seeds = [*range(1000 + 40 * stage, 1000 + 40 * (stage + 1))]
    tried = ranks(3, _finds, stage, seeds)
    assert not any(of_rank.wrong for of_rank in tried)
    assert tried[0].num_found >= 25, tried


def _weights_of_a_rank(stage: int) -> tuple[str, tuple[int, ...], str, str]:
    step, state, batch = made(stage)
    if step.rank == 1:
        key = step.plan.units[2].buffers[0].key
        state.params[key].view(torch.uint8)[4 * 3] ^= 1
    with pytest.raises(
        fzero.ReplayError, match=r"ranks that hold the same values differ"
    ) as caught:
        fzero.replay(step, state, batch)
    error = caught.value
    return error.cause, error.ranks, error.unit, error.where


@pytest.mark.parametrize("stage", [0, 2])
def test_a_rank_with_other_weights_is_named(ranks: RankPool, stage: int) -> None:
    found = ranks(3, _weights_of_a_rank, stage)
    assert found == [("ranks", (1,), "h.0", "element 3")] * 3


class Drawing(nn.Module):
    """It draws from a generator that no state holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x) * random.random())
        return out


def test_a_model_that_draws_its_own_numbers_is_not_deterministic() -> None:
    model = Drawing()
    step = fzero.make_train_step(model, {"optimizer": {"type": "SGD"}}, loss_fn=loss_of)
    batch = torch.randn(4, 4), torch.randn(4, 2)
    with pytest.raises(fzero.ReplayError, match="gives another result at each run") as caught:
        fzero.replay(step, step.init(), batch)
    assert (caught.value.cause, caught.value.phase, caught.value.unit) == (
        "nondeterministic", "forward", "last",
    )  # fmt: skip


HOST = {"device": "cpu"}
ODD: dict[str, dict[str, Any]] = {
    "odd": {"model": OddNet},
    "odd, accumulated": {"model": OddNet, "accumulation": 2},
    "overflow": {
        "cfg": {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 40, "hysteresis": 1}}
    },
    "error feedback": {
        "reduce_hook": error_feedback(compressed(quantize(8, block=32))), "model": OddNet,
    },
    "on the host": {
        "cfg": {"zero_optimization": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}},
        "model": OddNet,
    },
    "negotiated": {"schedule": "negotiated", "model": OddNet},
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = ODD | {
    "replicas": {"mesh": {"node": 2, "data": 2}, "model": OddNet},
    "plain": {},
    "in one graph": {"compile": "step", "compile_backend": "aot_eager"},
    "blocks": {"compile": "block", "compile_backend": "aot_eager"},
    "checkpoints": {"checkpoint": 2},
    "checkpoints of micro-batches": {"checkpoint": 1, "accumulation": 2},
    "donated": {"donate": True},
    "copied": {"donate": False},
}


def _is_the_step(stage: int, name: str, every: int = 2) -> None:
    keys = dict(SETTINGS[name])
    if "mesh" in keys:
        keys["mesh"] = Mesh.of(**keys["mesh"])
    step, state, batch = made(stage, **keys)
    other = copied(state, step)
    for _ in range(3):
        state, found = fzero.replay(step, state, batch, every=every)
        other, expected = step(other, batch)
        assert torch.equal(found.loss, expected.loss)
        leaves, others = (optree.tree_leaves(in_memory(of)) for of in (state, other))
        for x, y in zip(leaves, others, strict=True):
            assert same_bits(x, y)  # gradients of an overflow are NaN


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - ODD.keys() - {"replicas"}))
@pytest.mark.parametrize("stage", [0, 3])
def test_a_replayed_step_has_the_bits_of_the_step(ranks: RankPool, stage: int, name: str) -> None:
    ranks(2, _is_the_step, stage, name)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_odd_models_and_settings_are_replayed_without_a_false_report(
    ranks: RankPool, world_size: int, stage: int, name: str
) -> None:
    ranks(world_size, _is_the_step, stage, name, 1)


@pytest.mark.parametrize("stage", [0, 3])
def test_replicas_are_replayed_without_a_false_report(ranks: RankPool, stage: int) -> None:
    ranks(4, _is_the_step, stage, "replicas", 1)


def in_files(folder: Path, *what: str) -> dict[str, Any]:
    where = {"device": "nvme", "nvme_path": str(folder)}
    small = {"sub_group_size": 64, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": {"stage": 3, **{f"offload_{of}": where for of in what}, **small}}


def _is_the_step_in_files(folder: Path, what: tuple[str, ...]) -> None:
    with patch.dict(SETTINGS, {"files": {"cfg": in_files(folder, *what), "model": OddNet}}):
        _is_the_step(3, "files", 2)
        _is_the_step(3, "files", 1)


@pytest.mark.parametrize("what", [("optimizer",), ("optimizer", "param")], ids=" ".join)
def test_a_replayed_step_with_state_in_files_has_the_bits_of_the_step(
    ranks: RankPool, tmp_path: Path, what: tuple[str, ...]
) -> None:
    ranks(2, _is_the_step_in_files, tmp_path, what)
    assert not [*tmp_path.rglob("*.bin")]  # those of both copies are gone


def _finds_a_flip_in_a_file(folder: Path, run: int, is_given: bool) -> tuple[Any, ...]:
    step, state, batch = made(3, cfg=in_files(folder, "optimizer", "param"))
    state, _ = fzero.replay(step, state, batch)
    key, flips, draw = step.plan.units[2].buffers[0].key, Nth(run), random.Random(0)

    def changes(tensor: Any) -> None:
        values = tensor[3:4]
        tensor.part(slice(3, 4)).copy_(flipped(values, draw))

    plain_end, plain_step = watching.end, replaying.watched_step

    def end(*args: Any) -> Any:
        new, metrics = plain_end(*args)
        if flips():
            changes(handles_of(new.optimizer[key])[0])
        return new, metrics

    def watched(step: Any, state: Any, batch: Any) -> Any:
        if flips():
            changes(handles_of(state.optimizer[key])[0])
        return plain_step(step, state, batch)

    where = (replaying, "watched_step", watched) if is_given else (watching, "end", end)
    with (
        patch.object(*where) if step.rank == 1 else ExitStack(),
        pytest.raises(fzero.ReplayError, match="gave two results") as caught,
    ):
        fzero.replay(step, state, batch)
    fzero.replay(step, state, batch)  # the given state is unchanged
    error = caught.value
    return error.cause, error.ranks, error.phase, error.unit, error.where


@pytest.mark.parametrize("run", [0, 1])
@pytest.mark.parametrize("is_given", [False, True])
def test_a_flipped_bit_in_a_file_is_found_and_named(
    ranks: RankPool, tmp_path: Path, run: int, is_given: bool
) -> None:
    phase = "given state" if is_given else "update"
    found = ranks(2, _finds_a_flip_in_a_file, tmp_path, run, is_given)
    assert found == [("fault", (1,), phase, "h.0", "element 3")] * 2


@pytest.mark.parametrize("numel", [0, 1, 7, 64, 1000, 4097])
def test_a_digest_of_a_file_is_that_of_its_tensor(tmp_path: Path, numel: int) -> None:
    """In parts of any length."""
    x = torch.randn(numel)
    file = cast(FileTensor, InFile(x))
    for length in (1, 100, 1 << 24):
        with patch.object(digests, "ELEMENTS_OF_FILE", length):
            found = digest(file)
        assert found.same_as(digest(x)) and not found.first_difference(digest(x))


def test_simulated_ranks_are_replayed_each() -> None:
    step = fzero.make_train_step(OddNet(), {"zero_optimization": {"stage": 3}}, loss_fn=loss_of)
    ranks = fzero.simulate(step, 3, by="lockstep")
    state = ranks.init()
    for _ in range(2):
        states = ranks.states_of(state)
        batches = ranks.batches_of((torch.randn(3, 4, 4), torch.randn(3, 4, 2)))
        results = ranks.on_each(
            lambda rank, s=states, b=batches: fzero.replay(ranks.steps[rank], s[rank], b[rank])  # type: ignore[misc]
        )
        state = ranks.joined([new for new, _ in results])


@pytest.mark.parametrize("is_in_both", [False, True])
def test_a_number_that_one_run_alone_makes_infinite_is_a_fault(is_in_both: bool) -> None:
    step = fzero.make_train_step(Net(), {}, loss_fn=loss_of, units=UNITS)
    state, batch, flips = step.init(), (torch.randn(4, 4), torch.randn(4, 2)), Nth(2)

    def grows(module: nn.Module, args: tuple[Tensor]) -> Tensor | None:
        return torch.full_like(args[0], torch.inf) if flips() or is_in_both else None

    step.spec.model.get_submodule("last").register_forward_pre_hook(grows)
    with pytest.raises(FloatingPointError if is_in_both else fzero.ReplayError) as caught:
        fzero.replay(step, state, batch)
    if isinstance(caught.value, fzero.ReplayError):
        found = caught.value
        assert (found.cause, found.phase, found.unit) == ("fault", "forward", "last")
    state, _ = step(state, batch) if not is_in_both else (state, None)


class InFile:
    """What a digest needs of a `FileTensor`."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.shape, self.dtype = x, tuple(x.shape), x.dtype

    def numel(self) -> int:
        return self.x.numel()

    def __getitem__(self, elements: slice) -> Tensor:
        return self.x[elements].clone()


@dataclass
class Rows:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("kind", [Rows, UserDict])
def test_a_batch_of_another_class_is_copied_for_each_run(kind: type) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, y = (batch.x, batch.y) if kind is Rows else (batch["x"], batch["y"])
        loss: Tensor = (model(x.add_(1)) - y).square().mean()
        return loss

    step = fzero.make_train_step(Net(), {"optimizer": {"type": "SGD"}}, loss_fn=loss_fn)
    x, y = torch.randn(4, 4), torch.randn(4, 2)
    fzero.replay(step, step.init(), kind(x=x.clone(), y=y))


def _pipeline(order: str) -> None:
    layers = PipelineModule(
        nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]), 2, loss_fn=F.mse_loss
    )
    cfg = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    step = fzero.make_train_step(layers, cfg, mesh=Mesh.of(pipe=2, data=2), pipeline=order)
    torch.manual_seed(0)
    state, batch = step.init(), (torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    other = optree.tree_map(torch.clone, state)
    for _ in range(2):
        state, _ = fzero.replay(step, state, batch)
        other, _ = step(other, batch)
        assert all(map(torch.equal, optree.tree_leaves(state), optree.tree_leaves(other)))
    if step.rank == 3:  # one of two ranks that hold the last layers
        next(iter(state.params.values())).view(torch.uint8)[0] ^= 1
    with pytest.raises(fzero.ReplayError, match=r"given state of unit .* on ranks 2 .* and 3"):
        fzero.replay(step, state, batch)


@pytest.mark.parametrize("order", ["1f1b", "gpipe", "zero_bubble", "interleaved:2"])
def test_a_pipeline_is_replayed_and_compared_within_its_stages(ranks: RankPool, order: str) -> None:
    ranks(4, _pipeline, order)


def test_micro_batches_of_an_iterator_are_used_twice() -> None:
    cfg = {"optimizer": {"type": "SGD"}, "gradient_accumulation_steps": 2}
    step = fzero.make_train_step(Net(), cfg, loss_fn=loss_of, units=UNITS)
    state, batches = step.init(), [(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(4)]
    loader = iter(batches)
    for index in range(2):
        expected, _ = step(optree.tree_map(torch.clone, state), iter(batches[2 * index :]))
        state, _ = fzero.replay(step, state, loader)
        pairs = zip(
            optree.tree_leaves(state.params), optree.tree_leaves(expected.params), strict=True
        )
        assert all(torch.equal(x, y) for x, y in pairs)
    with pytest.raises(StopIteration):
        next(loader)


def test_a_batch_may_be_a_list_and_may_be_changed_by_the_loss_function() -> None:
    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        x, y = batch
        loss: Tensor = (model(x.add_(1)) - y).square().mean()
        return loss

    step = fzero.make_train_step(Net(), {"optimizer": {"type": "SGD"}}, loss_fn=loss_fn)
    state, x, y = step.init(), torch.randn(4, 4), torch.randn(4, 2)
    _, expected = step(optree.tree_map(torch.clone, state), [x.clone(), y])
    _, found = fzero.replay(step, state, [x, y])
    assert torch.equal(found.loss, expected.loss)


def test_what_cannot_be_replayed_is_refused() -> None:
    step = fzero.make_train_step(Net(), {"optimizer": {"type": "SGD"}}, loss_fn=loss_of)
    state, batch = step.init(), (torch.randn(4, 4), torch.randn(4, 2))
    with pytest.raises(ValueError, match="every must be a whole number of steps of at least 1"):
        fzero.replay(step, state, batch, every=0)
    with pytest.raises(ValueError, match="replay: must be a step of make_train_step"):
        fzero.replay(Net(), state, batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5, 2), (40,)])
def test_a_digest_names_the_element_of_any_flipped_bit(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    places = [*itertools.product(*map(range, shape))]
    for index, place in enumerate(places):
        for bit in range(1 if dtype == torch.bool else 8 * x.element_size()):
            y = x.clone()
            bytes_of = y.view(-1).view(torch.uint8) if shape else y.view(1).view(torch.uint8)
            bytes_of[index * x.element_size() + bit // 8] ^= 1 << bit % 8
            expected = place if len(shape) > 1 else index
            assert digest(x).first_difference(digest(y)) == f"element {expected}"
            assert not digest(x).same_as(digest(y))
    assert digest(x).same_as(digest(x.clone()))
    assert not digest(x).first_difference(digest(x.clone()))
