"""The laws of the pretended device, which finds what is out of order; and fzero's code
for a device, run on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import optree
import pretended_cuda
import pytest
import torch
from hypothesis import example, given, strategies as st
from pretended_cuda import Crossed, PretendedCuda
from profiles import examples
from torch import Tensor
from training import Plain, make, vectors

import fzero
from fzero.optim.adam_kernels import adamw
from fzero.optim.transforms import TILE, Transform, mixed_precision, same_bits
from fzero.storage.movers import ByName, DeviceMover, Resident
from fzero.storage.shard_io import MovingTransfer
from fzero.storage.shard_transfer import BufferPool
from fzero.storage.stream import Mover, Streamed, update_streamed
from sharding import Placement, TensorSpec

# --- which memory ---------------------------------------------------------------------------------


def test_a_tensor_is_on_the_device_that_it_was_made_on_or_of() -> None:
    cuda = torch.device("cuda", 0)
    host = torch.arange(6.0)
    with PretendedCuda() as card:
        x = host.to("cuda")
        made = [
            x,
            x[2:].view(2, 2),
            x + 1,
            torch.zeros(3, device="cuda"),
            torch.empty_like(host, device=cuda),
            x.double(),
        ]
        made += [
            x.new_empty(2),
            torch.tensor([1], device="cuda"),
            host.cuda(),
            torch.nn.Linear(2, 2).cuda().weight,
        ]
        assert all(y.device == cuda and y.is_cuda and not y.is_cpu for y in made)
        weight = torch.ones(6, device="cuda", requires_grad=True)
        (weight * x).sum().backward()
        assert weight.grad is not None and weight.grad.device == cuda, "of a backward, too"
        back = [
            host,
            x.cpu(),
            x.to("cpu"),
            torch.empty_like(x, device="cpu"),
            x.new_zeros(3, device="cpu"),
            torch.ones(2),
        ]
        assert all(y.device == torch.device("cpu") and not y.is_cuda for y in back)
        pinned = host.pin_memory(), torch.empty(3, pin_memory=True), x.to("cpu", non_blocking=True)
        assert all(y.is_pinned() for y in pinned) and not any(y.is_pinned() for y in (*made, *back))
        assert weight.grad.tolist() == x.tolist() == list(range(6)) and same_bits(x.cpu(), host)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        before = torch.cuda.memory_allocated()
        del x, made, back
        assert (
            0
            < torch.cuda.memory_allocated()
            < before
            <= torch.cuda.max_memory_allocated()
            == card.max_nbytes
        )
    assert not torch.cuda.is_available() and host.device.type == "cpu"


def test_an_operator_that_mixes_memories_is_found() -> None:
    host = torch.ones(4)
    with PretendedCuda():
        x = torch.ones(4, device="cuda")
        assert (x * torch.tensor(2.0)).tolist() == [2.0] * 4, "numbers may come from the host"
        number = torch.tensor(0.0)
        kernel_state = [[x], [x.clone()], [x.clone()], [x.clone()], [], [number]]
        hyper = {
            "lr": 0.1,
            "beta1": 0.9,
            "beta2": 0.9,
            "weight_decay": 0.0,
            "eps": 1e-8,
            "amsgrad": False,
            "maximize": False,
        }
        mixes: list[Callable[[], object]] = [
            lambda: host + x,
            lambda: x.add_(host),
            lambda: host.add_(x),
            lambda: number.add_(x[0]),
            lambda: torch.cat([x, host]),
            lambda: torch._foreach_add_([x, host], [x, x]),
            lambda: torch._fused_adamw_(*kernel_state, **hyper),  # type: ignore[arg-type]
        ]
        for mix in mixes:
            with pytest.raises(RuntimeError, match="expected all tensors on the same device: aten"):
                mix()


def test_bytes_that_cross_are_counted() -> None:
    with PretendedCuda() as card:
        host = torch.ones(10)
        x = host.to("cuda")
        assert card.crossed == Crossed(40, 0)
        x.add_(1).mul_(torch.tensor(2.0)).clone()
        assert card.crossed == Crossed(40, 0), "nothing that stays"
        host[:4].copy_(x[:4])
        assert card.crossed == Crossed(40, 16)
        torch._foreach_copy_([host[:2], x[:3]], [x[:2], host[:3]])
        assert card.crossed == Crossed(52, 24)
        assert x[0].item() == 4.0 and bool(x[1] == 4.0)
        assert card.crossed == Crossed(52, 29)
        torch.full((), 1.0, device="cuda")
        waits = sum(card.waits.values())
        assert card.crossed == Crossed(52, 29), "a fill needs no bytes"
        torch.tensor(1.0, device="cuda")
        assert card.crossed == Crossed(56, 29) and sum(card.waits.values()) == waits + 1


# --- in which order -------------------------------------------------------------------------------


def side_stream_makes(order: str) -> None:
    """The current stream reads what another one makes."""
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        x = torch.zeros(8, device="cuda").add_(1)
        if order == "wait_event":
            event.record()
    now = torch.cuda.current_stream()
    orders: dict[str, Callable[[], Any]] = {
        "wait_stream": lambda: now.wait_stream(side),
        "wait_event": lambda: now.wait_event(event),
        "an event too early": lambda: now.wait_event(event),
        "of the stream": side.synchronize,
        "of all": torch.cuda.synchronize,
        "query": side.query,
        "a number": lambda: side_item(side, x),
    }
    orders.get(order, lambda: None)()
    assert (x + 1).sum().item() == 16
    x.record_stream(now)


def side_item(side: Any, x: Tensor) -> None:
    with torch.cuda.stream(side):
        x[0].item()


@pytest.mark.parametrize(
    "order", ["wait_stream", "wait_event", "of the stream", "of all", "query", "a number"]
)
def test_work_that_waits_for_other_streams_passes(order: str) -> None:
    with PretendedCuda():
        side_stream_makes(order)


@pytest.mark.parametrize("order", ["nothing", "an event too early"])
def test_work_that_does_not_wait_is_a_race(order: str) -> None:
    says = (
        r"race: aten.add.Tensor on stream 0 reads bytes 0:32 of device memory.* after "
        r"aten.add_.Tensor on stream 1 writes"
    )
    with pytest.raises(AssertionError, match=says), PretendedCuda():
        side_stream_makes(order)


@pytest.mark.parametrize(
    "case, races",
    [
        ("pinned, read", True),
        ("pinned, written", True),
        ("pinned, read by another copy", False),
        ("other bytes", False),
        ("pinned, synchronized", False),
        ("not pinned", False),
        ("blocking", False),
        ("another dtype", False),
        ("to the host at once", True),
        ("pinned, a kernel's number", True),
        ("pinned, only its shape", False),
    ],
)
def test_the_host_waits_only_for_copies_that_it_must_wait_for(case: str, races: bool) -> None:
    with PretendedCuda():
        host = torch.zeros(8)
        host = host.pin_memory() if case != "not pinned" else host
        x = torch.ones(
            8, device="cuda", dtype=torch.float64 if case == "another dtype" else torch.float32
        )

        def run() -> None:
            if case == "to the host at once":
                x.to("cpu", non_blocking=True).add_(1)
                return
            if case == "pinned, written":
                x.copy_(host, non_blocking=True)
                host.add_(1)
                return
            host[:6].copy_(x[:6], non_blocking=case != "blocking")
            if case == "pinned, synchronized":
                torch.cuda.current_stream().synchronize()
            if case == "pinned, read by another copy":
                host.to("cuda", non_blocking=True)
            elif case == "pinned, only its shape":
                (
                    torch.empty_like(host),
                    host.new_zeros(8),
                    torch.empty_like(host, device="cuda"),
                    host[1:],
                )
            elif case == "pinned, a kernel's number":
                x.mul_(host[0])
            else:
                host[6 if case == "other bytes" else 0 :].clone()

        if not races:
            return run()
        with pytest.raises(
            AssertionError, match=r"race: .* on (the host|stream 0) .* of pinned memory"
        ):
            run()


@example(
    program=[("write", 0, 0, 0, 2), ("wait", 1, 0), ("read", 1, 0, 0, 2), ("read", 2, 0, 0, 2)]
)
@examples(200)
@given(
    program=st.lists(
        st.one_of(
            st.tuples(
                st.just("read"),
                st.integers(0, 2),
                st.integers(0, 1),
                st.integers(0, 3),
                st.integers(1, 3),
            ),
            st.tuples(
                st.just("write"),
                st.integers(0, 2),
                st.integers(0, 1),
                st.integers(0, 3),
                st.integers(1, 3),
            ),
            st.tuples(st.just("wait"), st.integers(0, 2), st.integers(0, 2)),
            st.tuples(st.just("record"), st.integers(0, 2), st.integers(0, 1)),
            st.tuples(st.just("wait event"), st.integers(0, 2), st.integers(0, 1)),
            st.tuples(st.just("synchronize"), st.integers(0, 2)),
            st.tuples(st.just("host"), st.booleans(), st.integers(0, 3), st.integers(1, 3)),
        ),
        max_size=20,
    )
)
def test_a_program_races_where_two_uses_have_no_path_between_them(
    program: list[tuple[Any, ...]],
) -> None:
    """Streams copy from and to two pinned tensors, the host uses the first: against a
    search in the graph of all orders.
    """
    befores: list[set[int]] = []  # of each work: all that happens before it
    # all that is before its next work
    last: dict[Any, set[int]] = {"host": set(), 0: set(), 1: set(), 2: set()}
    events: list[set[int]] = [set(), set()]
    uses: list[tuple[int, bool, int, int]] = []
    expected = None
    for step, (what, *rest) in enumerate(program):
        if what in ("read", "write", "host"):
            on, memory, start, numel = rest if what != "host" else ("host", 0, *rest[1:])
            writes = what == "write" or (what == "host" and rest[0])
            before = last[on] | last["host"]
            for index, (other, other_writes, other_start, other_stop) in enumerate(uses):
                meet = other == memory and other_start < start + numel and start < other_stop
                if meet and (writes or other_writes) and index not in before and expected is None:
                    expected = step
            uses.append((memory, writes, start, start + numel))
            befores.append(before)
            last[on] = before | {len(befores) - 1}
        elif what == "wait":
            last[rest[0]] |= last[rest[1]]
        elif what == "record":
            events[rest[1]] = last[rest[0]] | last["host"]
        elif what == "wait event":
            last[rest[0]] |= events[rest[1]]
        else:
            last["host"] = last["host"] | last[rest[0]]

    found = None
    with PretendedCuda():
        pinned = [torch.zeros(8).pin_memory() for _ in range(2)]
        streams, marks = (
            [torch.cuda.Stream() for _ in range(3)],
            [torch.cuda.Event() for _ in range(2)],
        )
        for step, (what, *rest) in enumerate(program):
            try:
                if what in ("read", "write"):
                    on, memory, start, numel = rest
                    part = pinned[memory][start : start + numel]
                    with torch.cuda.stream(streams[on]):
                        if what == "read":
                            part.to("cuda", non_blocking=True)
                        else:
                            part.copy_(torch.ones(numel, device="cuda"), non_blocking=True)
                elif what == "host":
                    part = pinned[0][rest[1] : rest[1] + rest[2]]
                    _ = part.add_(1) if rest[0] else part.clone()
                elif what == "wait":
                    streams[rest[0]].wait_stream(streams[rest[1]])
                elif what == "record":
                    marks[rest[1]].record(streams[rest[0]])
                elif what == "wait event":
                    streams[rest[0]].wait_event(marks[rest[1]])
                else:
                    streams[rest[0]].synchronize()
            except AssertionError as error:
                assert "race" in str(error)
                found = step
                break
    assert found == expected


# --- memory given back ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reported", ["nothing", "too early", "record_stream", "wait_stream", "synchronize"]
)
def test_memory_given_back_while_another_stream_uses_it_is_found(reported: str) -> None:
    def run() -> None:
        side, now = torch.cuda.Stream(), torch.cuda.current_stream()
        x = torch.ones(8, device="cuda")
        side.wait_stream(now)
        if reported == "too early":
            now.wait_stream(side)
        with torch.cuda.stream(side):
            x.add_(1)
        if reported == "record_stream":
            x.record_stream(side)
        elif reported == "wait_stream":
            now.wait_stream(side)
        elif reported == "synchronize":
            side.synchronize()
        del x
        now.wait_stream(side)  # too late

    if reported in ("nothing", "too early"):
        says = (
            r"given back too early: 32 bytes of stream 0, .* after aten.add_.Tensor on "
            r"stream 1 writes bytes 0:32"
        )
        with pytest.raises(AssertionError, match=says), PretendedCuda():
            run()
    else:
        with PretendedCuda():
            run()


# --- fzero's movers -------------------------------------------------------------------------------

NUMEL, NUM_UPDATES = 1000, 3


def stream_updates(*, runs_on: str = "cuda", pinned: bool = True, **ahead: int) -> Crossed:
    """AdamW by sub-groups. On the device: a parameter and its state, from host memory,
    with the gradient there. On the CPU: the same, where it lives, but for the gradient
    and the copy that the model computes with. Tells the bytes that crossed."""
    transform, generator = adamw(0.1), torch.Generator().manual_seed(0)
    param, grad = torch.randn(NUMEL, generator=generator), torch.randn(NUMEL, generator=generator)
    names = "w", "w/exp_avg", "w/exp_avg_sq"
    with PretendedCuda() as card:
        host = dict(
            zip(names, [param.clone(), torch.zeros(NUMEL), torch.zeros(NUMEL)], strict=True)
        )
        counters = transform.init(torch.empty(0, device=runs_on))
        if runs_on == "cuda":
            host = {name: x.pin_memory() if pinned else x for name, x in host.items()}
            given = grad.cuda()
            buffer = Streamed(
                names, NUMEL, lambda *_: transform, lambda a, b: given[a:b].clone(), counters
            )
            mover: Mover = DeviceMover(host, "cuda")
        else:
            there = {
                "out": torch.empty(NUMEL, dtype=torch.bfloat16, device="cuda"),
                "grad": grad.cuda(),
            }
            at = lambda *part: mixed_precision(transform, state_dtype="float32", out=part[2])  # noqa: E731
            buffer = Streamed(names, NUMEL, at, None, counters, out="out", grad="grad")
            mover = ByName(
                dict.fromkeys(host, Resident(host))
                | dict.fromkeys(there, DeviceMover(there, "cpu"))
            )
        before = card.crossed
        for _ in range(NUM_UPDATES):
            if runs_on == "cpu":
                there["grad"].mul_(1.0)  # as if a backward had made it just now
            update_streamed([buffer], mover, sub_group_numel=64, **ahead)
        crossed = Crossed(
            card.crossed.to_device - before.to_device, card.crossed.to_host - before.to_host
        )
        found = [x.clone() for x in host.values()]  # which must be there by now
        copy = there["out"].clone().cpu() if runs_on == "cpu" else found[0].bfloat16()
    state = transform.init(param)
    for _ in range(NUM_UPDATES):
        _, param, state = transform.update(grad.clone(), param, state)
    expected = [param, *(x for x in optree.tree_leaves(state) if x.dim()), param.bfloat16()]
    assert len(found) == 3 and all(map(same_bits, [*found, copy], expected))
    return crossed


@pytest.mark.covering(1)
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("read_ahead", [0, 1, 2])
@pytest.mark.parametrize("write_behind", [0, 1, 2])
def test_an_update_on_the_device_of_what_lives_on_the_host_has_no_race(
    pinned: bool, read_ahead: int, write_behind: int
) -> None:
    once = NUM_UPDATES * 3 * 4 * NUMEL
    crossed = stream_updates(pinned=pinned, read_ahead=read_ahead, write_behind=write_behind)
    assert crossed == Crossed(once, once), "each byte once there and once back"


@pytest.mark.covering(1)
@pytest.mark.parametrize("read_ahead", [0, 1, 2])
@pytest.mark.parametrize("write_behind", [0, 1, 2])
def test_an_update_on_the_host_brings_gradients_and_puts_parameters_without_a_race(
    read_ahead: int, write_behind: int
) -> None:
    crossed = stream_updates(runs_on="cpu", read_ahead=read_ahead, write_behind=write_behind)
    assert crossed == Crossed(NUM_UPDATES * 2 * NUMEL, NUM_UPDATES * 4 * NUMEL)


WAITS = {
    "wait_event": [(pretended_cuda.Stream, "wait_event")],
    "wait_stream": [(pretended_cuda.Stream, "wait_stream")],
    "synchronize": [(pretended_cuda.Stream, "synchronize"), (pretended_cuda.Event, "synchronize")],
    "record_stream": [(PretendedCuda, "_record_stream")],
}


def leave_out(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls this waits for nothing."""
    for owner, name in WAITS[wait]:
        monkeypatch.setattr(owner, name, lambda *_: None)


@pytest.mark.parametrize(
    ("runs_on", "wait", "says"),
    [
        (
            "cuda",
            "wait_event",
            "race: aten.* on stream 0 .* of device memory, .* aten.copy_.default on stream 1",
        ),
        ("cuda", "wait_stream", "race: aten.copy_.default on stream 2 reads .* of device memory"),
        (
            "cuda",
            "synchronize",
            "race: aten.copy_.default on stream 1 reads .* of pinned memory, .* on stream 2 writes",
        ),
        ("cuda", "record_stream", "given back too early: 256 bytes of stream 1"),
        (
            "cpu",
            "wait_stream",
            "race: aten.copy_.default on stream 1 reads .* of device memory, .* stream 0 writes",
        ),
        (
            "cpu",
            "synchronize",
            "race: .* on the host .* bytes 0:256 of pinned memory, .* on stream 1 writes",
        ),
    ],
)
def test_a_wait_that_a_mover_leaves_out_is_found(
    runs_on: str, wait: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(wait, monkeypatch)
    with pytest.raises(AssertionError, match=says):
        stream_updates(runs_on=runs_on, read_ahead=1, write_behind=1)


def pass_over_shards(*, pinned: bool = True, asks_ahead: bool = True) -> None:
    """What a forward and a backward ask of a transfer: shards in turn, of which
    gradients are made, some in two additions.
    """
    shards = {f"h.{number}": torch.arange(float(64 + number)) for number in range(4)}
    grads = {name: torch.ones(len(x)) for name, x in shards.items()}
    with PretendedCuda() as card:
        if pinned:
            shards, grads = (
                {name: x.pin_memory() for name, x in of.items()} for of in (shards, grads)
            )
        transfer, names = MovingTransfer(torch.device("cuda", 0), BufferPool()), list(shards)
        for name, following in zip(names, [*names[1:], None]):
            here = transfer.load(name, shards[name])
            if following is not None and asks_ahead:
                transfer.prefetch(following, shards[following])
            values = here * 2
            transfer.write_back(name, grads[name], values, adds=False)
            if name == "h.1":
                transfer.write_back(name, grads[name], torch.ones(65, device="cuda"), adds=True)
            transfer.scratch.give(here)
            del here, values
        transfer.settle()
        norms = [here.sum() for here in transfer.each(grads.items())]
        for name, x in shards.items():
            assert same_bits(grads[name], 2 * x + (name == "h.1"))
        assert [norm.item() for norm in norms] == [grads[name].sum().item() for name in names]
        nbytes = sum(4 * len(x) for x in shards.values())
        added = 4 * 65  # comes to the device, and goes back
        assert card.crossed == Crossed(2 * nbytes + added, nbytes + added + 4 * 4)
        transfer.prefetch("h.0", shards["h.0"])
        transfer.abandon()


@pytest.mark.covering(1)
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("asks_ahead", [True, False])
def test_shards_come_and_gradients_go_without_a_race(pinned: bool, asks_ahead: bool) -> None:
    pass_over_shards(pinned=pinned, asks_ahead=asks_ahead)


@pytest.mark.parametrize(
    "wait, says",
    [
        (
            "wait_event",
            "race: aten.mul.Tensor on stream 0 reads .* of device memory, .* aten._to_copy.default "
            "on stream 1",
        ),
        ("synchronize", "race: .* of pinned memory, .* aten.copy_.default on stream 2 writes"),
        ("record_stream", "given back too early: 256 bytes of stream 1"),
    ],
)
def test_a_wait_that_a_stage_leaves_out_is_found(
    wait: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(wait, monkeypatch)
    with pytest.raises(AssertionError, match=says):
        pass_over_shards()


# --- whole steps ----------------------------------------------------------------------------------

ALONE = {"bf16_master_weights_and_grads": True, "stochastic_rounding": True}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True, "auto_cast": True}},
    "bf16 alone": {"bf16": {"enabled": True, "auto_cast": True} | ALONE},
    "fp16": {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 4}},
}
WIDTH, NUM_BLOCKS, NUM_STEPS = 8, 3, 2


def on_host(*quantities: str, pinned: bool = True) -> dict[str, Any]:
    """Keys of `zero_optimization`."""
    return {
        f"offload_{quantity}": {"device": "cpu", "pin_memory": pinned} for quantity in quantities
    }


PLACEMENTS: dict[str, dict[str, Any]] = {
    "on the device": {},
    "optimizer on the host": on_host("optimizer"),
    "optimizer on the host, not pinned": on_host("optimizer", pinned=False),
    "parameters on the host": on_host("param"),
    "all on the host": on_host("optimizer", "param"),
}


def train(
    device: str, stage: int, precision: str, zero: dict[str, Any], optimizer: str = "AdamW"
) -> dict[str, Tensor]:
    """What a training of some steps leaves, brought to host memory: losses, weights,
    and what is in memory of the state.
    """
    model = make(lambda: Plain(WIDTH, NUM_BLOCKS)).to(device)
    small = {
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": 64,
        "reduce_bucket_size": 100,
    }
    cfg = {
        "optimizer": {"type": optimizer, "params": {"lr": 1e-2}},
        "gradient_clipping": 1.0,
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage} | small | zero,
    }
    step = fzero.make_train_step(model, cfg | PRECISIONS[precision])
    state, found = step.init(), {}
    for number in range(NUM_STEPS):
        batch = tuple(x.to(device) for x in vectors(number, 4, WIDTH))
        state, metrics = step(state, batch)
        found[f"loss {number}"] = metrics.loss
    accessors, leaves, _ = optree.tree_flatten_with_accessor(state._replace(rng={}))
    state_of = {accessor.codify("state"): x for accessor, x in zip(accessors, leaves, strict=True)}
    found |= {name: x for name, x in state_of.items() if isinstance(x, Tensor)}
    return {name: x.cpu() for name, x in (found | step.gather(state)).items()}


@cache
def trained_on_cpu(stage: int, precision: str, optimizer: str = "AdamW") -> dict[str, Tensor]:
    return train("cpu", stage, precision, {}, optimizer)


def check_on_device(
    stage: int, precision: str, zero: dict[str, Any], optimizer: str = "AdamW"
) -> None:
    """Raises unless a training on the device has no race, and leaves the bits of the
    one on the CPU.
    """
    expected = trained_on_cpu(stage, precision, optimizer)
    with PretendedCuda():
        found = train("cuda", stage, precision, zero, optimizer)
    assert len(found) > NUM_STEPS
    assert [name for name, x in found.items() if not same_bits(x, expected[name])] == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "stage, placement",
    [
        (stage, at)
        for at, zero in PLACEMENTS.items()
        for stage in ([3] if "offload_param" in zero else range(4))
    ],
)
def test_a_step_on_the_device_gives_the_bits_of_the_cpu_without_a_race(
    stage: int, precision: str, placement: str
) -> None:
    check_on_device(stage, precision, PLACEMENTS[placement])


@pytest.mark.covering(1)
@pytest.mark.parametrize("placement", ["optimizer on the host", "all on the host"])
@pytest.mark.parametrize("optimizer", ["Lamb", "Muon"])
def test_so_does_an_optimizer_that_looks_at_whole_parameters(
    optimizer: str, placement: str
) -> None:
    check_on_device(3, "bf16", PLACEMENTS[placement], optimizer)


@pytest.mark.covering(1)
@pytest.mark.parametrize("quantities", [["optimizer"], ["param"], ["optimizer", "param"]])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_so_does_a_step_whose_state_is_in_files(
    precision: str, quantities: list[str], tmp_path: Path
) -> None:
    files = {"device": "nvme", "nvme_path": str(tmp_path)}
    check_on_device(3, precision, {f"offload_{quantity}": files for quantity in quantities})


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_that_a_step_leaves_out_is_found(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(wait, monkeypatch)
    says = "given back too early" if wait == "record_stream" else "race"
    with pytest.raises(AssertionError, match=says), PretendedCuda():
        train("cuda", 3, "fp32", PLACEMENTS["all on the host"])


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_a_learned_step_never_waits_for_the_device(stage: int, precision: str) -> None:
    """What is learned in the first step aside, with all state and the batch on the
    device.
    """
    with PretendedCuda() as card:
        cfg = {
            "zero_optimization": {"stage": stage},
            "train_batch_size": 4,
            "gradient_accumulation_steps": 2,
        }
        cfg |= PRECISIONS[precision]
        step = fzero.make_train_step(make(lambda: Plain(WIDTH, 2)).cuda(), cfg)
        state, batch = step.init(), tuple(x.cuda() for x in vectors(0, 4, WIDTH))
        for _ in range(2):
            card.waits.clear(), card.drains.clear()
            state, _ = step(state, batch)
        assert not card.waits and not +card.drains


@pytest.mark.parametrize(
    ("stage", "placement", "num_brought"),
    # By the update; or for the forward, and one of two blocks for the backward, too.
    [*((stage, "optimizer on the host", 1) for stage in range(4)), (3, "all on the host", 1.5)],
)
def test_of_state_on_the_host_gradients_and_parameters_cross_and_nothing_else(
    stage: int, placement: str, num_brought: float
) -> None:
    """Some numbers without a dimension aside: fewer bytes than any of the state's
    tensors has.
    """
    with PretendedCuda() as card:
        cfg = {
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}
            | PLACEMENTS[placement]
        }
        step = fzero.make_train_step(make(lambda: Plain(64, 2)).cuda(), cfg | PRECISIONS["bf16"])
        state, batch = step.init(), tuple(x.cuda() for x in vectors(0, 4, 64))
        for _ in range(2):
            before, card.waits = card.crossed, Counter()
            state, _ = step(state, batch)
        to_device, to_host = (now - then for now, then in zip(card.crossed, before, strict=True))
        assert sum(card.waits.values()) <= 4, (
            "for numbers that the update needs, not of each buffer"
        )
        left = card.pinned_nbytes() - sum(
            x.nbytes for x in optree.tree_leaves(state) if x.is_pinned()
        )
        assert left == 0, "no copy outlives its update"
        pinned = {
            part: all(x.is_pinned() for x in getattr(state, part).values())
            for part in ("grads", "master")
        }
    assert pinned == {"grads": stage >= 2, "master": False}, (
        "of what is on the host only what crosses"
    )
    nbytes = sum(2 * buffer.padded_numel for buffer in step.plan.flat_buffers)
    assert 0 <= to_host - nbytes < 128 and 0 <= to_device - num_brought * nbytes < 128


HOST = Placement("host", pinned=True)
PLACED: dict[str, Any] = {
    "on the device": None,
    "gradients": {"grads/*": HOST},
    "a part": {"optimizer/*/exp_avg": HOST},
    "all": {"master/*": HOST, "optimizer/*": HOST, "grads/*": HOST},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("there", PLACED)
@pytest.mark.parametrize("here", PLACED)
def test_a_state_is_taken_where_it_belongs_and_brought_there_by_place(
    here: str, there: str
) -> None:
    cfg = {"zero_optimization": {"stage": 2}} | PRECISIONS["bf16"]

    def made(placements: Any, device: str) -> fzero.TrainStep:
        return fzero.make_train_step(
            make(lambda: Plain(WIDTH, 2)).to(device), cfg, placements=placements
        )

    alone = made(None, "cpu")
    state = alone.init()
    for number in range(3):
        state, _ = alone(state, vectors(number, 4, WIDTH))
    expected = alone.gather(state)
    with PretendedCuda():
        first, second = (made(PLACED[name], "cuda") for name in (here, there))
        batches = [tuple(x.cuda() for x in vectors(number, 4, WIDTH)) for number in range(3)]
        state, _ = first(first.init(), batches[0])
        if here != there:
            with pytest.raises(
                ValueError,
                match=r"must be on (cpu|cuda:0) in this step, got a tensor on .* fzero.place",
            ):
                second(state, batches[1])
        for batch in batches[1:]:
            state, _ = second(fzero.place(state, second), batch)
        assert all(
            x.is_pinned() == (there == "a part")
            for x in optree.tree_leaves(state.optimizer)
            if x.ndim and x.is_cpu
        )
        assert all(same_bits(x, expected[name]) for name, x in second.gather(state).items())


def test_place_brings_a_short_tensor_of_an_optimizer_to_where_the_update_runs() -> None:
    def scaled(lr: float) -> Transform:
        def update(grad: Tensor, param: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
            state["mean"].lerp_(grad, 0.1)
            return grad, param.sub_(state["mean"] * state["rates"][1]), state

        return Transform(
            lambda param: {"mean": torch.zeros_like(param), "rates": param.new_tensor([0.0, lr])},
            update,
            lambda param: {"mean": param, "rates": TensorSpec((2,), param.dtype)},
        )

    host = {"optimizer/*": HOST}
    with PretendedCuda():
        steps = [
            fzero.make_train_step(
                make(lambda: Plain(WIDTH, 2)).cuda(), {}, transform=scaled, placements=placements
            )
            for placements in (None, host)
        ]
        batch, found = tuple(x.cuda() for x in vectors(0, 4, WIDTH)), []
        for order in ((0, 0, 0), (0, 1, 0), (1, 0, 1)):
            state = steps[order[0]].init()
            for index in order:
                state, _ = steps[index](fzero.place(state, steps[index]), batch)
            found.append(steps[order[-1]].gather(state))
        assert all(same_bits(x, found[0][name]) for others in found for name, x in others.items())


@pytest.mark.parametrize("where", ["init", "forward", "backward", "update"])
def test_an_error_for_want_of_memory_shows_the_plan_the_peak_and_where_a_snapshot_is(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", written.append)

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with PretendedCuda():
        cfg = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
        step = fzero.make_train_step(make(lambda: Plain(WIDTH, 2)).cuda(), cfg)
        batch = tuple(x.cuda() for x in vectors(0, 4, WIDTH))
        if where == "init":
            monkeypatch.setattr(type(step.runtime.builder), "make", fails)
        else:
            state = step.init()
            of = {"forward": "torch.tanh", "backward": "torch.autograd.backward"}
            monkeypatch.setattr(of.get(where, "fzero.optim.adam_kernels._advance"), fails)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
            step.init() if where == "init" else step(state, batch)
    (note,) = caught.value.__notes__
    assert f"parameters {sum(4 * b.padded_numel for b in step.plan.flat_buffers)} B, " in note
    assert "GiB allocated, 3.000 GiB reserved" in note and len(written) == 1 and written[0] in note
    assert Path(written[0]).parent == tmp_path


def test_a_backward_of_a_script_runs_in_its_thread_from_the_first_forward_of_an_engine() -> None:
    """On a device autograd would use another thread, in which nothing is bound."""
    with PretendedCuda():
        cfg = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        engine, *_ = fzero.initialize(model=make(lambda: Plain(WIDTH, 2)).cuda(), config=cfg)
        assert torch._C._is_multithreading_enabled()
        try:
            loss = engine(*(x.cuda() for x in vectors(0, 4, WIDTH)))
            found: list[bool] = []
            loss.register_hook(lambda grad: found.append(torch._C._is_multithreading_enabled()))
            loss.backward()
            engine.step()
            assert found == [False]
        finally:
            torch.autograd.set_multithreading_enabled(True)


@pytest.mark.parametrize(("device", "expected"), [("cpu", 2), ("cuda", 1)])
def test_a_device_updates_more_elements_in_one_kernel_than_fit_into_the_cache_of_a_processor(
    device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that launched a kernel for each of them would be slower than the device."""
    calls: list[int] = []
    kernel = torch._fused_adamw_
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda *args, **how: calls.append(1) or kernel(*args, **how)
    )  # type: ignore[func-returns-value]
    with PretendedCuda():
        param = torch.zeros(2 * TILE, device=device)
        narrow = param.bfloat16()
        transform = mixed_precision(fzero.optim.adamw(1e-3), state_dtype="float32", out=narrow)
        transform.update(torch.ones_like(narrow), param, transform.init(param))
    assert len(calls) == expected and narrow.unique().numel() == 1
