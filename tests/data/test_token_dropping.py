"""Random layer-token dropping: beside a plain loop, in all stages and runners, with
masks, positions and recomputation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import here
from ranks import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from training import make

import fzero
from fzero.config.config import ConfigError, ConfigWarning
from fzero.data import RandomLTD, fixed_linear, kept_tokens
from fzero.data.keys import key_of
from fzero.data.token_dropping import Draw

LENGTH, WIDTH, VOCABULARY, BATCH = 8, 8, 13, 4
SCHEDULE = fixed_linear(2, 8, steps=4, multiple=2)  # r(n) = 2 2 4 6 8 8 …
SGD = {"type": "SGD", "params": {"lr": 0.3}}


class Layer(nn.Module):
    """Attention that sees the order of its tokens, and a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(
        self, x: Tensor, mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> tuple[Tensor, str]:
        shift = 0 if position_ids is None else position_ids[..., None] / LENGTH
        q, k, v = self.qkv(self.norm(x) + shift).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5
        weights = (scores if mask is None else scores + mask[:, 0]).softmax(-1)
        return x + torch.tanh(self.out(weights @ v)), "weights"


class Group(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.checkpoints = False

    def forward(self, x: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, mask, position_ids=places)[0]
            return x

        return (
            checkpoint(run, x, use_reentrant=False)
            if self.checkpoints and self.training
            else run(x)
        )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.groups = nn.ModuleList(Group() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(LENGTH, device=tokens.device)[None]
        mask = (
            torch.full((LENGTH, LENGTH), -1e4, device=tokens.device)
            .triu(1)[None, None]
            .repeat(len(tokens), 1, 1, 1)
        )
        x = self.embed(tokens)
        for group in self.groups:
            x = group(x, mask, places)
        return nn.functional.cross_entropy(
            self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )


def tokens(index: int, batch: int = BATCH) -> Tensor:
    return here(
        torch.randint(
            0, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(index)
        )
    )


LTD = RandomLTD(layers=[1, 2], schedule=SCHEDULE, mask="mask")


def net(ltd: RandomLTD | None = LTD) -> Net:
    model = make(Net)
    return model if ltd is None else ltd.wrap(model, Layer)  # type: ignore[return-value]


def settings(stage: int, num_micro: int = 1, world: int = 1) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    sizes = {"train_batch_size": BATCH, "gradient_accumulation_steps": num_micro}
    sizes["train_micro_batch_size_per_gpu"] = BATCH // (num_micro * world)
    return {"zero_optimization": zero, "optimizer": SGD, "gradient_clipping": 0, **sizes}


def trained(
    num: int = 6, stage: int = 0, *, num_micro: int = 1, model: Net | None = None, **how: Any
) -> list[float]:
    step = fzero.make_train_step(model or net(), settings(stage, num_micro), **how)
    state, losses = step.init(), []
    for index in range(num):
        state, metrics = step(state, tokens(index))
        losses.append(metrics.loss.item())
    return losses


def lockstep(
    stage: int, *, num_micro: int = 1, by: str = "lockstep", model: Net | None = None, **how: Any
) -> Any:
    cfg = settings(stage, num_micro, 2)
    mesh = fzero.comms.AbstractAxis("data", 2, backend="gloo")
    ranks = fzero.simulate(fzero.make_train_step(model or net(), cfg, mesh=mesh, **how), 2, by=by)
    state, losses = ranks.init(), []
    for index in range(6):
        state, metrics = ranks(state, tokens(index).view(2, BATCH // 2, LENGTH))
        losses.append(metrics.loss.item())
    return losses, ranks.gather(state)


def plainly() -> list[float]:
    """A loop of plain PyTorch on one process, whose layers 1 and 2 see the kept tokens."""
    model = make(Net)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3), []
    causal = here(torch.full((LENGTH, LENGTH), -1e4).triu(1))
    for n in range(6):
        batch, length = tokens(n), SCHEDULE(n)
        x = model.embed(batch)
        for number, layer in enumerate(layer for group in model.groups for layer in group.layers):
            places = here(torch.arange(LENGTH)).expand(BATCH, -1)
            if number in (1, 2) and length < LENGTH:
                places = kept_tokens(
                    key_of(1234, n, number, 0), here(torch.arange(BATCH)), num=length, of=LENGTH
                )
            rows = []
            for sample in range(BATCH):
                own = places[sample]
                out = layer(
                    x[sample, own][None], causal[own][:, own][None, None], position_ids=own[None]
                )[0]
                rows.append(x[sample].index_copy(0, own, out[0]))
            x = torch.stack(rows)
        loss = nn.functional.cross_entropy(
            model.head(x)[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def close(one: list[float], two: list[float]) -> bool:
    """To rounding: products of other shapes round differently."""
    return torch.allclose(torch.tensor(one), torch.tensor(two), atol=2e-6, rtol=0)


# --- the choice -----------------------------------------------------------------------------------


def test_every_choice_of_tokens_is_about_equally_likely() -> None:
    """20 choices of 3 of 6, 10,000 samples: 500 each, within five standard deviations."""
    kept = kept_tokens(99, torch.arange(10_000), num=3, of=6)
    assert (kept.diff(dim=1) > 0).all()
    _, counts = kept.unique(dim=0, return_counts=True)
    assert len(counts) == 20 and (counts - 500).abs().max() < 5 * 500**0.5


def test_the_choice_differs_by_update_layer_micro_batch_rank_and_seed_and_not_by_how_ranks_divide_the_batch() -> (
    None
):
    def of(
        n: int = 0,
        micro: int = 0,
        rank: int = 0,
        num: int = 2,
        seed: int = 1,
        layer: int = 0,
        batch: int = 4,
    ) -> Any:
        draw = Draw(10, n, micro, rank, num)
        return draw.kept(seed, layer, batch=batch, of=64, device=torch.device("cpu")).tolist()

    others = [of(n=1), of(micro=1), of(rank=1), of(seed=2), of(layer=1), of(micro=2)]
    assert of() not in others and len({str(x) for x in others}) == len(others)
    whole = of(num=1, batch=8)
    assert of() + of(micro=1) == whole == of(num=1, batch=4) + of(num=1, rank=1, batch=4)


# --- steps ----------------------------------------------------------------------------------------


def test_a_step_is_the_plain_loop_with_kept_tokens() -> None:
    losses = trained()
    assert close(losses, plainly())
    assert not close(losses, trained(model=net(None)))


def test_with_all_tokens_the_bits_are_those_without() -> None:
    whole = RandomLTD(
        layers=range(4), schedule=fixed_linear(8, 8, steps=1, multiple=8), mask="mask"
    )
    assert trained(model=net(whole)) == trained(model=net(None))
    longer = RandomLTD(
        layers=range(4), schedule=fixed_linear(64, 64, steps=1, multiple=8), mask="mask"
    )
    assert trained(model=net(longer)) == trained(model=net(None))


@pytest.mark.parametrize("num_micro", [pytest.param(1, marks=pytest.mark.long), 2])
def test_all_stages_have_the_same_bits(num_micro: int) -> None:
    found = [lockstep(stage, num_micro=num_micro) for stage in range(4)]
    pairs = [(0, 1), (1, 2), (2, 3)] if num_micro == 1 else [(0, 1), (2, 3)]
    for one, two in pairs:
        assert found[one][0] == found[two][0]
        assert all(torch.equal(found[one][1][name], found[two][1][name]) for name in found[one][1])
    assert all(close(losses, trained()) for losses, _ in found)  # the batch of all ranks decides


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
def test_a_layer_that_runs_again_keeps_the_same_tokens(stage: int) -> None:
    expected = trained(stage=stage, num_micro=2)
    assert (
        trained(stage=stage, num_micro=2, checkpoint=lambda name, module: isinstance(module, Group))
        == expected
    )
    assert (
        trained(stage=stage, num_micro=2, checkpoint=lambda name, module: isinstance(module, Layer))
        == expected
    )
    model = net()
    for group in model.groups:
        group.checkpoints = True  # torch's own, in the model's code
    assert trained(stage=stage, num_micro=2, model=model) == expected


def test_evaluation_sees_all_tokens() -> None:
    step, plain = (
        fzero.make_train_step(net(), settings(0)),
        fzero.make_train_step(net(None), settings(0)),
    )
    assert step.evaluate(step.init(), tokens(0)) == plain.evaluate(plain.init(), tokens(0))


def test_names_of_parameters_are_unchanged_and_the_model_outside_a_step_is_plain() -> None:
    model = net()
    step = fzero.make_train_step(model, settings(0))
    state, _ = step(step.init(), tokens(0))
    assert step.gather(state).keys() == net(None).state_dict().keys()
    assert all("forward" not in vars(module) for module in model.modules())
    assert torch.equal(model(tokens(0)), net(None)(tokens(0)))


@pytest.mark.parametrize("num_micro", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_simulation_by_vmap_is_that_of_ranks_in_turn(num_micro: int) -> None:
    assert close(
        lockstep(0, num_micro=num_micro, by="vmap")[0], lockstep(0, num_micro=num_micro)[0]
    )


def test_counted_flops_of_a_layer_follow_its_kept_tokens() -> None:
    """Forward and backward: three times 2·r·D·4D in its matrices and 2·2·r²·D in
    attention, per sample.
    """

    def counted(kept: int) -> int:
        ltd = RandomLTD(
            layers=[1, 2], schedule=fixed_linear(kept, kept, steps=1, multiple=1), mask="mask"
        )
        step = fzero.make_train_step(net(ltd), settings(0))
        state = step.init()
        with FlopCounterMode(display=False) as counter:
            step(state, tokens(0))
        return int(counter.get_total_flops())

    def of_layer(kept: int) -> int:
        return 3 * BATCH * (2 * kept * WIDTH * 4 * WIDTH + 2 * 2 * kept**2 * WIDTH)

    for kept in (2, 4):
        assert counted(LENGTH) - counted(kept) == 2 * (of_layer(LENGTH) - of_layer(kept))


@pytest.mark.long
@pytest.mark.parametrize("num_micro", [1, 2])
def test_one_graph_for_each_length(num_micro: int) -> None:
    step = fzero.make_train_step(
        net(), settings(3, num_micro), compile="step", compile_backend="aot_eager"
    )
    state, losses = step.init(), []
    for index in range(6):
        state, metrics = step(state, tokens(index))
        losses.append(metrics.loss.item())
    assert close(losses, trained(stage=3, num_micro=num_micro))
    assert step.program is not None and len(step.program.compiled.graphs) == 4 + (num_micro > 1)


@pytest.mark.long
def test_a_captured_simulation_drops_the_same_tokens() -> None:
    step = fzero.make_train_step(
        net(), settings(2, 1, 2), mesh=fzero.comms.AbstractAxis("data", 2, backend="gloo")
    )
    ranks = fzero.simulate(step, 2, by="vmap", compile="aot_eager")
    state, losses = ranks.init(), []
    for index in range(3):
        state, metrics = ranks(state, tokens(index).view(2, BATCH // 2, LENGTH))
        losses.append(metrics.loss.item())
    assert close(losses, trained(3))


@pytest.mark.long
def test_compiled_blocks_and_a_checkpointed_graph_train_alike() -> None:
    expected = trained(stage=3)
    assert close(
        trained(stage=3, compile="block", compile_backend="aot_eager", units=["groups.*.layers.*"]),
        expected,
    )
    graph: dict[str, Any] = {"compile": "step", "compile_backend": "aot_eager"}
    layers = fzero.make_train_step(
        net(), settings(3), checkpoint=lambda name, module: isinstance(module, Group), **graph
    )
    state, losses = layers.init(), []
    for index in range(3):
        state, metrics = layers(state, tokens(index))
        losses.append(metrics.loss.item())
    assert close(losses, expected[:3])


@pytest.mark.parametrize("compile", ["step", "block"])
def test_many_lengths_are_refused_with_their_number_and_a_multiple(compile: Any) -> None:
    ltd = RandomLTD(layers=[1], schedule=fixed_linear(128, 1024, steps=400, multiple=8))
    with pytest.raises(
        ConfigError, match=r"at most 8 lengths .* got 113; set seq_per_step to 128 \(now 8\)"
    ):
        fzero.make_train_step(net(ltd), settings(0), compile=compile)
    numbers = {"total_curriculum_step": 99, "difficulty_step": 8}
    block = {
        "enabled": True,
        "min_difficulty": 8,
        "max_difficulty": 1024,
        "schedule_type": "fixed_linear",
    }
    cfg = {**settings(0), "curriculum_learning": {**block, "schedule_config": numbers}}
    with (
        pytest.warns(ConfigWarning, match="curriculum_learning: is for the engine"),
        pytest.raises(
            ConfigError,
            match=(
                r"curriculum_learning: must have .* set difficulty_step to 128 \(now 8\) and "
                r"min_difficulty to 128"
            ),
        ),
    ):
        fzero.make_train_step(net(None), cfg, compile=compile)


def test_a_graph_refuses_progressive_layer_drop() -> None:
    cfg = {**settings(0), "progressive_layer_drop": {"enabled": True}}
    with pytest.raises(ConfigError, match="must be false with compile='step'"):
        fzero.make_train_step(net(None), cfg, compile="step")


def _resumed(folder: str, stage: int, first: int, last: int) -> list[float]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    step = fzero.make_train_step(net(), settings(stage, 1, world))
    state = step.init() if first == 0 else fzero.load(folder, step=step)[0]
    losses = []
    for index in range(first, last):
        state, metrics = step(state, tokens(index).view(world, -1, LENGTH)[rank])
        losses.append(metrics.loss.item())
    fzero.save(state, folder, step=step)
    return losses


def test_real_ranks_resume_on_another_number_of_ranks(ranks: RankPool, tmp_path: Any) -> None:
    first = ranks(2, _resumed, str(tmp_path / "ck"), 3, 0, 2)
    second = ranks(1, _resumed, str(tmp_path / "ck"), 0, 2, 6)
    assert first[0] == first[1] and close(first[0] + second[0], trained())


# --- arguments of layers --------------------------------------------------------------------------


def test_masks_lose_rows_and_columns_in_every_form() -> None:
    from fzero.data.token_dropping import _Kept

    batch, of = 3, 6
    places = kept_tokens(5, torch.arange(batch), num=4, of=of)
    kept = _Kept(places, of, "batch_seq")
    whole = torch.rand(batch, 2, of, of)
    expected = torch.stack([whole[b][:, places[b]][:, :, places[b]] for b in range(batch)])
    assert torch.equal(kept._mask(whole, "x"), expected)
    assert torch.equal(kept._mask(whole[:1], "x")[1], whole[0][:, places[1]][:, :, places[1]])
    assert torch.equal(kept._mask(whole[:, 0], "x"), expected[:, 0])
    assert torch.equal(kept._mask(whole[0, 0], "x")[2, 0], whole[0, 0][places[2]][:, places[2]])
    assert torch.equal(kept._mask(whole[:, :1, :1], "x")[1, 0, 0], whole[1, 0, 0, places[1]])
    assert torch.equal(kept._mask(whole[:, 0, 0], "x")[2], whole[2, 0, 0, places[2]])
    with pytest.raises(ValueError, match="the mask of layer 'x' must have the shape"):
        kept._mask(torch.rand(of, batch), "x")
    causal = torch.ones(of, of).tril()
    assert all(torch.equal(mask[0], torch.ones(4, 4).tril()) for mask in kept._mask(causal, "x"))


def test_hidden_states_with_the_sequence_first_are_taken_alike() -> None:
    class First(nn.Module):
        def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
            assert x.shape[:2] == rotary[0].shape[:2] == (3, 2)
            return x + rotary[0]

    layer = First()
    ltd = RandomLTD(layers=[0], schedule=SCHEDULE, gathers=("rotary",), order="seq_batch")
    draw = Draw(3, 0, 0, 0, 1)
    run = ltd.plan(nn.Sequential(layer), First).forward_of("0", layer, lambda: draw)
    x, turns = torch.rand(6, 2, 4), torch.arange(6.0)[:, None, None].expand(6, 1, 4) + 1
    out = run(x, rotary=(turns, turns))
    kept = draw.kept(1234, 0, batch=2, of=6, device=x.device)
    for sample in range(2):
        changed = (out - x)[:, sample, 0].nonzero().flatten()
        assert changed.tolist() == kept[sample].tolist()
        assert torch.allclose((out - x)[changed, sample, 0], changed + 1.0)


def test_what_layers_cannot_be_given_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"must be of 0 … 3, the positions among the 4 modules of Layer, got 4"
    ):
        net(RandomLTD(layers=[4], schedule=SCHEDULE))
    with pytest.raises(
        ValueError,
        match=r"must be an argument of Layer.forward \(x, mask, position_ids\), got 'masks'",
    ):
        net(RandomLTD(layers=[0], schedule=SCHEDULE, mask="masks"))
    with pytest.raises(
        ValueError, match=r"argument 'mask' of layer 'groups\.0\.layers\.0' has shape"
    ):
        trained(1, model=net(RandomLTD(layers=[0], schedule=SCHEDULE)))
    numbers = {
        "min_value": 2,
        "max_value": 8,
        "schedule_config": {"require_steps": 4, "seq_per_step": 2},
    }
    routing = {"enabled": True, "random_ltd": {"enabled": True, "random_ltd_schedule": numbers}}
    cfg = {**settings(0), "data_efficiency": {"enabled": True, "data_routing": routing}}
    with pytest.raises(ConfigError, match="needs the class of the layers"):
        fzero.make_train_step(net(None), cfg)
