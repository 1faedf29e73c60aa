"""The law of pipelines: the numbers do not depend on stages or order, bit for bit; in
lockstep and on real processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import fzero
from fzero.pipeline import F, LayerSpec, PipelineModule, TiedLayerSpec
from fzero.profiling import trace_comm
from sharding import Mesh

VOCABULARY, WIDTH, LENGTH = 11, 8, 5
NOTHING: dict[str, Any] = {}
ORDERS = ("gpipe", "1f1b", "interleaved:2", "zero_bubble")


class Start(nn.Module):
    """Integers to a tuple of floats, a mask of bools and integers, which all cross
    stages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.embed(ids), ids % 3 != 0, ids


class Block(nn.Module):
    def __init__(self, frozen: bool = False, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(p),
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.linear.bias.requires_grad_(not frozen)

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, mask, ids = given
        x = x + self.drop(torch.tanh(self.linear(self.norm(x)) * self.scale)) * mask[..., None]
        return x, mask, ids


class Norm(nn.Module):
    """A layer with module buffers that a step changes, which changes its input in
    place.
    """

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.norm, self.in_place = nn.BatchNorm1d(WIDTH), in_place

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
        x = given[0].mul_(2) if self.in_place else given[0] * 2
        return {"x": self.norm(x.transpose(1, 2)), "ids": given[2]}


def flip(given: dict[str, Tensor]) -> list[Tensor]:
    """A layer without parameters; its output is not contiguous."""
    return [given["x"].transpose(1, 2), given["ids"]]


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, given: list[Tensor]) -> Tensor:
        return self.head(given[0])


def layers(p: float = 0.0, *, in_place: bool = True) -> list[Any]:
    blocks = [LayerSpec(Block, frozen=index == 1, p=p) for index in range(3)]
    return [LayerSpec(Start), *blocks, LayerSpec(Norm, in_place), flip, LayerSpec(End), torch.abs]


# torch.utils.checkpoint allows no change of an input in place
layers_out_of_place = partial(layers, in_place=False)


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def summed(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    counts = labels != 0
    each = nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * counts.flatten()).sum(), counts.sum()


def config(num_micro: int, num_data: int, **keys: Any) -> dict[str, Any]:
    found = {
        "train_batch_size": 2 * num_micro * num_data,
        "gradient_accumulation_steps": num_micro,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "zero_optimization": {"stage": keys.pop("stage", 1)},
    } | keys
    return {key: value for key, value in found.items() if value is not None}


def data(num_steps: int, num_micro: int, num_data: int) -> list[tuple[Tensor, Tensor]]:
    """For each step, inputs and labels of all data ranks (D, B, length)."""
    generator = torch.Generator().manual_seed(3)
    shape = (num_data, 2 * num_micro, LENGTH)
    return [
        tuple(torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
        for _ in range(num_steps)
    ]  # type: ignore[misc]


class Case(NamedTuple):
    """One training; `stages` is 0 for gradient accumulation without a pipeline."""

    stages: int = 2
    order: Any = "1f1b"
    num_data: int = 2
    num_micro: int = 4
    num_steps: int = 3
    p: float = 0.0
    made: Callable[..., list[Any]] = layers
    loss_fn: Any = loss_of
    interval: int = 0
    options: Any = NOTHING
    keys: Any = NOTHING

    def config(self) -> dict[str, Any]:
        return config(self.num_micro, self.num_data, **self.keys)

    def model(self) -> PipelineModule:
        return PipelineModule(
            self.made(self.p),
            num_stages=self.stages or 1,
            loss_fn=self.loss_fn,
            partition_method="uniform",
            activation_checkpoint_interval=self.interval,
        )

    def step(self, mesh: Any = None) -> fzero.TrainStep:
        if self.stages:
            mesh = mesh or fzero.comms.AbstractAxis.of(self.mesh)
            return fzero.make_train_step(
                self.model(), self.config(), mesh=mesh, pipeline=self.order, **self.options
            )
        whole = self.model().build(0, len(self.made(self.p)))
        units = list(dict.fromkeys(name.partition(".")[0] for name, _ in whole.named_parameters()))
        loss_fn = self.loss_fn
        return fzero.make_train_step(
            whole,
            self.config(),
            units=units,
            mesh=mesh or fzero.comms.AbstractAxis("data", self.num_data),
            loss_fn=lambda model, batch: loss_fn(model(batch[0]), batch[1]),
            **self.options,
        )

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(pipe=self.stages, data=self.num_data)


Result = tuple[list[tuple[float, ...]], dict[str, Tensor]]


def simulated(case: Case) -> Result:
    ranks = fzero.simulate(case.step(), by="lockstep")
    state, curve = ranks.init(), []
    for batch in data(case.num_steps, case.num_micro, case.num_data):
        state, metrics = ranks(state, batch)
        curve.append(tuple(float(number) for number in metrics))
    return curve, ranks.gather(state)


def on_processes(case: Case) -> list[Result]:
    """On a real rank; also a reference, as gradient accumulation in its own group,
    comes from `simulated`.
    """
    torch.set_num_threads(1)
    step = case.step(case.mesh)
    state, curve = step.init(), []
    for batch in data(case.num_steps, case.num_micro, case.num_data):
        own = tuple(x[step.rank % case.num_data] for x in batch)
        state, metrics = step(state, own)
        curve.append(tuple(float(number) for number in metrics))
    return curve, step.gather(state)  # type: ignore[return-value]


def assert_same(found: Result, wanted: Result) -> None:
    assert repr(found[0]) == repr(wanted[0])  # of the same bits; the norm of an overflow is nan
    assert found[1].keys() == wanted[1].keys()
    differing = [name for name in wanted[1] if not torch.equal(found[1][name], wanted[1][name])]
    assert not differing


# --- the law --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_stages_and_orders_change_no_bit(order: str, stage: int) -> None:
    reference = simulated(Case(stages=0, keys={"stage": stage}))
    # it trains, and clips
    assert len({loss for loss, *_ in reference[0]}) == 3 and reference[0][0][1] > 0.05
    for stages in (1, 2, 4):
        assert_same(simulated(Case(stages, order, keys={"stage": stage})), reference)


ONCE = {"stage": 3, "stage3_param_persistence_threshold": 4}
LIMITED = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 200}


@pytest.mark.parametrize(
    "num_data",
    [2, pytest.param(1, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)],
)
def test_in_stage_3_parameters_are_gathered_once_and_no_bit_changes(num_data: int) -> None:
    changes: Any = {
        "zero_optimization": ONCE,
        "bf16": {"enabled": True},
        "data_types": {"buffer_dtype": "bf16"},
    }
    reference = simulated(
        Case(stages=0, num_data=num_data, keys=changes | {"zero_optimization": ONCE | {"stage": 1}})
    )
    for stages, order in ((2, "1f1b"), (4, "zero_bubble"), (2, "interleaved:2")):
        case = Case(stages, order, num_data=num_data, keys=changes)
        assert_same(simulated(case), reference)
    ranks = fzero.simulate(Case(2, num_data=num_data, keys=changes).step(), by="lockstep")
    sent, planned = (
        trace_comm(ranks, ranks.init(), data(1, 4, num_data)[0]).by_purpose(),
        ranks.plan.sent_nbytes_per_step,
    )
    assert (
        sent.get("gather", 0) == planned["all_gather in the forward"]
        and not planned["all_gather in the backward"]
    )
    assert sent.get("reduce", 0) == planned["reduce_scatter of gradients"]
    assert (planned["all_gather in the forward"] > 0) == (num_data > 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["fp16", "weighted loss", "sums", "LAMB", "a group of one stage", "offload", "checkpointing"],
)
def test_stage_3_has_the_numbers_of_stage_1_in_every_configuration(name: str) -> None:
    case = Case(**CASES[name])
    offload = case.keys.get("zero_optimization", {})
    zeros = [offload | ONCE | {"stage": stage} for stage in (1, 3)]
    assert_same(
        *(
            simulated(case._replace(keys=dict(case.keys) | {"zero_optimization": zero}))
            for zero in zeros
        )
    )


@pytest.mark.long
@pytest.mark.parametrize("num_micro", [1, 2, 3])
def test_any_number_of_micro_batches_will_do(num_micro: int) -> None:
    reference = simulated(Case(stages=0, num_micro=num_micro))
    for order in ORDERS:
        assert_same(simulated(Case(4, order, num_micro=num_micro)), reference)


CASES: dict[str, dict[str, Any]] = {
    "fp16": {
        "keys": {
            "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1},
            "data_types": {"buffer_dtype": "fp16"},
        },
        "num_steps": 10,
    },
    "bf16": {"keys": {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}}},
    "stochastic rounding": {
        "keys": {
            "bf16": dict.fromkeys(
                ("enabled", "bf16_master_weights_and_grads", "stochastic_rounding"), True
            ),
            "data_types": {"buffer_dtype": "bf16"},
        }
    },
    "autocast": {"keys": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}},
    "weighted loss": {"loss_fn": summed},
    "sums": {"keys": {"gradient_clipping": 0.0, "prescale_gradients": True}},
    "no clipping": {"keys": {"gradient_clipping": 0.0}},
    "LAMB": {"keys": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}},
    "Muon": {"keys": {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}},
    "SOAP": {"options": {"transform": fzero.optim.soap(frequency=2)}},
    "parameter groups": {
        "options": {"param_groups": [{"params": r"norm|bias", "weight_decay": 0.0, "lr": 1e-3}]}
    },
    "a group of one stage": {"options": {"param_groups": [{"params": r"^6\.", "lr": 1e-3}]}},
    "offload": {
        "keys": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    },
    "checkpointing": {"interval": 2, "made": layers_out_of_place},
    "one data rank": {"num_data": 1},
}


def test_owners_of_matrices_are_ranks_of_their_stage() -> None:
    plan = Case(num_data=3, **CASES["SOAP"]).step().plan
    owners = [owner for of_buffer in plan.owners.values() for owner in of_buffer]
    assert {*owners} == {0, 1, 2} and plan.mesh.size == 3


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_law_holds_for_what_a_configuration_can_say(name: str) -> None:
    case = Case(**CASES[name])
    reference = simulated(case._replace(stages=0, interval=0))
    if name == "fp16":
        assert any(overflow for *_, overflow, _ in reference[0]) and not all(
            overflow for *_, overflow, _ in reference[0]
        )
    for stages, order in ((2, "1f1b"), (4, "zero_bubble"), (2, "interleaved:2")):
        assert_same(simulated(case._replace(stages=stages, order=order)), reference)


@pytest.mark.long
def test_dropout_does_not_depend_on_stages_or_order() -> None:
    reference = simulated(Case(1, p=0.5, num_micro=4))
    assert reference[0] != simulated(Case(1, p=0.0, num_micro=4))[0]
    for stages, order in ((2, "gpipe"), (4, "1f1b"), (2, "interleaved:2"), (2, "zero_bubble")):
        assert_same(simulated(Case(stages, order, p=0.5)), reference)
    assert_same(
        simulated(Case(2, p=0.5, interval=1, made=layers_out_of_place)), reference
    )  # a second run draws the same numbers


@pytest.mark.parametrize(("stages", "order", "stage"), [(2, "1f1b", 0), (1, "interleaved:2", 1)])
def test_a_pipeline_trains_as_a_plain_loop(stages: int, order: str, stage: int) -> None:
    """To rounding: the loop knows nothing of fzero."""
    case = Case(
        stages, order, num_data=2, keys={"scheduler": None, "stage": stage}, made=plain_layers
    )
    model = case.model().build(0, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for ids, labels in data(case.num_steps, case.num_micro, case.num_data):
        loss = loss_of(model(ids.flatten(0, 1)), labels.flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        losses.append(loss.item())
    curve, weights = simulated(case)
    assert [loss for loss, *_ in curve] == pytest.approx(losses, rel=1e-5)
    assert [norm for _, norm, *_ in curve] == pytest.approx(norms, rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def plain_layers(p: float) -> list[Any]:
    return [
        LayerSpec(nn.Embedding, VOCABULARY, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(nn.Linear, WIDTH, VOCABULARY),
    ]


# --- on real processes ----------------------------------------------------------------------------


REAL = [
    Case(2, "1f1b", p=0.5, interval=1, made=layers_out_of_place),
    Case(4, "zero_bubble", num_data=1),
    Case(2, "interleaved:2", keys={"stage": 0}),
    Case(4, "gpipe", num_data=1, loss_fn=summed),
    pytest.param(Case(2, "1f1b", keys={"zero_optimization": ONCE}), marks=pytest.mark.long),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "case",
    REAL,
    ids=[f"{case.order} on {case.stages}" for case in REAL if isinstance(case, Case)] + ["stage 3"],
)
def test_processes_give_the_bits_of_the_simulation_and_equal_metrics(
    case: Case, ranks: RankPool
) -> None:
    reference = simulated(case._replace(stages=1, order="1f1b", interval=0))
    for found in ranks(case.mesh.size, on_processes, case):
        assert_same(found, reference)


def tied_layers(p: float = 0.0) -> list[Any]:
    embed = partial(TiedLayerSpec, "embed", nn.Embedding, VOCABULARY, WIDTH)
    middle = [
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        torch.tanh,
        embed(forward_fn=back_and_forth),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
    ]
    return [embed(), *middle, embed(forward_fn=as_head)]


def as_head(module: nn.Embedding, x: Tensor) -> Tensor:
    return x @ module.weight.T


def back_and_forth(module: nn.Embedding, x: Tensor) -> Tensor:
    return torch.tanh(as_head(module, x)) @ module.weight


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.long)])
def test_tied_weights_are_summed_over_their_stages_and_stay_equal_bit_for_bit(stage: int) -> None:
    case = Case(stages=0, made=tied_layers, num_steps=4, keys={"stage": stage})
    model = case.model().build(0, 6)
    assert next(name for name, _ in model.named_parameters()) == "tied_modules.embed.weight"
    whole = simulated(case._replace(stages=1))
    for stages, order in ((2, "1f1b"), (4, "gpipe"), (3, "zero_bubble")):
        step = case._replace(stages=stages, order=order).step()
        ranks = fzero.simulate(step, by="lockstep")
        state = ranks.init()
        for index, batch in enumerate(data(case.num_steps, case.num_micro, case.num_data)):
            state, metrics = ranks(state, batch)
            assert tuple(float(x) for x in metrics) == pytest.approx(whole[0][index], rel=1e-5)
        copies = [
            x
            for own in state
            for key, x in own.params.items()
            if key.startswith("tied_modules.embed")
        ]
        assert len(copies) == 2 * min(stages, 3) and all(
            torch.equal(copies[0], other) for other in copies
        )
        found = ranks.gather(state)
        assert found.keys() == whole[1].keys()
        for name, value in whole[1].items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


# --- what is refused, and reported ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"keys": {"stage": 2}},
            r"stage: must be 0, 1 or 3 with a pipeline, got 2; .* 4 reductions in place of one",
        ),
        (
            {"keys": {"zero_optimization": LIMITED}},
            r"at most stage3_max_live_parameters, 200, got \d+ on stage [01]; .* 12 transfers",
        ),
        (
            {"keys": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}},
            "zero_optimization.offload_param: must be left out with a pipeline",
        ),
        (
            {"options": {"compile": "step"}},
            "compile: must be None with a pipeline, .* in no one graph",
        ),
        (
            {"options": {"units": ["0"]}},
            "units: must be None with a pipeline, .* each layer is a unit",
        ),
        (
            {"options": {"param_groups": [{"params": "^9"}]}},
            "param_groups.0. *.params: must take a parameter of the model",
        ),
        (
            {"order": lambda stages, micro: [[F(0)], [F(0, 1)]]},
            "every micro-batch must run forward once",
        ),
        ({"order": 7}, "pipeline: must be an order"),
        ({"stages": 16}, "stages .* must be at most the number of layers"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_in_words(change: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, fzero.ConfigError), match=text):
        simulated(Case()._replace(**change))


def wrong_batches(kind: str) -> str:
    """On four ranks: two stages, two data ranks; rank 3 is on the last stage."""
    case = Case()
    step = case.step(case.mesh)
    state = step.init()
    batches = data(1, 4, 2)[0]
    own = tuple(x[step.rank % 2] for x in batches)
    micro = [tuple(parts) for parts in zip(*(x.chunk(4) for x in own), strict=True)]
    given: Any = iter(micro)
    if step.rank == 3:
        given = iter(micro[:2]) if kind == "short" else own[0] if kind == "no pair" else broken()
    with pytest.raises((ValueError, OSError)) as caught:
        step(state, given)
    state, _ = step(state, iter(micro))  # nothing has begun, so the state is still good
    return str(caught.value)


def broken() -> Iterator[Any]:
    raise OSError("disk gone")
    yield


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("short", "ended after 2"),
        ("no pair", r"must be \(inputs, labels\), got Tensor"),
        ("broken", "disk gone"),
    ],
)
def test_every_rank_is_reported_of_a_batch_that_one_lacks(
    kind: str, text: str, ranks: RankPool
) -> None:
    messages = ranks(4, wrong_batches, kind)
    assert all(text.replace("\\", "") in message for message in messages)
    assert all("pipeline stage 1 (rank 3) has no batch" in message for message in messages[:3])


def no_tensor(x: Any) -> Any:
    return object()


def test_outputs_that_are_no_tensors_are_named() -> None:
    made = lambda p: [LayerSpec(nn.Linear, 4, 4), no_tensor, LayerSpec(nn.Linear, 4, 4)]  # noqa: E731
    case = Case(2, made=made, loss_fn=None, num_data=1)
    ranks = fzero.simulate(case.step(), by="lockstep")
    x = torch.ones(1, 8, 4)
    with pytest.raises(
        ValueError,
        match=(
            r"a layer must give tensors to the next stage, .* got a object in the output of "
            r"chunk 0"
        ),
    ):
        ranks(ranks.init(), (x, x))


def test_an_evaluation_after_one_that_failed_has_messages_of_its_own() -> None:
    ranks = fzero.simulate(Case(2, made=plain_layers, num_data=1).step(), by="lockstep")
    state, (batch,) = ranks.init(), data(1, 4, 1)
    micro_batches = list(zip(*(x.chunk(4, dim=1) for x in batch), strict=True))
    wanted = ranks.evaluate(state, iter(micro_batches))
    with pytest.raises(IndexError, match="out of bounds"):
        ranks.evaluate(state, iter([(ids, labels + VOCABULARY) for ids, labels in micro_batches]))
    assert ranks.evaluate(state, iter(micro_batches)) == wanted


def test_shapes_may_change_from_batch_to_batch() -> None:
    curves = []
    for stages in (1, 2):
        ranks = fzero.simulate(Case(stages, num_data=1, num_micro=3).step(), by="lockstep")
        state, losses = ranks.init(), []
        for lengths in ((5, 5, 5), (2, 300, 3), (1, 1, 40)):
            batch = [
                tuple(torch.full((1, 2, length), 1 + length % 7) for _ in range(2))
                for length in lengths
            ]
            state, metrics = ranks(state, iter(batch))
            losses.append(metrics.loss.item())
        curves.append(losses)
    assert curves[0] == curves[1] and all(map(math.isfinite, curves[0]))


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("made", [layers, pytest.param(tied_layers, marks=pytest.mark.long)])
def test_a_checkpoint_continues_on_any_number_of_stages(made: Any, tmp_path: Any) -> None:
    case = Case(2, "1f1b", made=made, num_steps=4)
    batches = data(4, 4, 2)

    def trained(ranks: Any, state: Any, some: Any) -> tuple[Any, Result]:
        curve = []
        for batch in some:
            state, metrics = ranks(state, batch)
            curve.append(tuple(float(number) for number in metrics))
        return state, (curve, ranks.gather(state))

    first = fzero.simulate(case.step(), by="lockstep")
    state, _ = trained(first, first.init(), batches[:2])
    fzero.save(state, tmp_path, step=first)
    _, wanted = trained(first, state, batches[2:])
    for stages, order in ((2, "1f1b"), (1, "gpipe"), (4, "zero_bubble"), (2, "interleaved:2")):
        ranks = fzero.simulate(case._replace(stages=stages, order=order).step(), by="lockstep")
        _, found = trained(ranks, fzero.load(tmp_path, step=ranks).state, batches[2:])
        if made is layers or stages == 2:
            assert_same(found, wanted)
        else:  # tied gradients are added in another order
            assert [loss for loss, *_ in found[0]] == pytest.approx(
                [loss for loss, *_ in wanted[0]], rel=1e-5
            )
    if made is layers:  # and without a pipeline
        ranks = fzero.simulate(case._replace(stages=0).step(), by="lockstep")
        assert_same(trained(ranks, fzero.load(tmp_path, step=ranks).state, batches[2:])[1], wanted)
        weights = fzero.simulate(case._replace(stages=4).step(), by="lockstep")
        start = fzero.simulate(case._replace(stages=1).step(), by="lockstep")
        loaded = weights.gather(fzero.load_weights(tmp_path, step=weights))
        same = start.gather(fzero.load_weights(tmp_path, step=start))
        assert loaded.keys() == same.keys() and all(
            torch.equal(loaded[name], same[name]) for name in same
        )


def saved_and_loaded(case: Case, folder: str) -> list[tuple[float, ...]]:
    """On a real rank: three steps, with the state saved and loaded before the last."""
    step = case.step(case.mesh)
    state = step.init()
    curve = []
    for index, batch in enumerate(data(case.num_steps, case.num_micro, case.num_data)):
        if index == 2:
            fzero.save(state, folder, step=step)
            state = fzero.load(folder, step=step).state
        state, metrics = step(state, tuple(x[step.rank % case.num_data] for x in batch))
        curve.append(tuple(float(number) for number in metrics))
    return curve


def test_processes_save_and_load(ranks: RankPool, tmp_path: Any) -> None:
    case = Case(2, p=0.5)
    wanted = simulated(case)[0]
    assert all(curve == wanted for curve in ranks(4, saved_and_loaded, case, str(tmp_path)))
    loaded = fzero.simulate(case._replace(stages=4, order="gpipe").step(), by="lockstep")
    _, metrics = loaded(fzero.load(tmp_path, step=loaded).state, data(3, 4, 2)[2])
    assert tuple(float(number) for number in metrics) == wanted[2]
