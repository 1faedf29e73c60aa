"""`tiled_head` and `tiled_mlp`: a model that stays as it is trains as a plain loop does,
in all stages and runners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from alive import most_alive
from ranks import RankPool
from torch import Tensor, nn
from training import part

import fzero
from fzero.comms.records import CommRecord
from fzero.estimation.activation_trace import trace_activations
from fzero.transforms import lora, quantization_aware
from fzero.transforms.checkpointing import Moves

VOCABULARY, WIDTH, LENGTH, NUM_STEPS, RATE = 29, 12, 8, 3, 0.3


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, length: int = LENGTH) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(width), nn.Linear(length, length), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm(x))


class LM(nn.Module):
    """A language model with a tied head and capped logits."""

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        length: int = LENGTH,
        *,
        is_tied: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, length) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embed.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(tokens))
        logits = 5.0 * torch.tanh(logits / 5.0)
        classes = logits.view(-1, logits.size(-1))
        return F.cross_entropy(classes, labels.view(-1), label_smoothing=0.1)


def make(model: Callable[[], nn.Module] = LM) -> nn.Module:
    torch.manual_seed(0)
    return model()


def batch(number: int, ranks: int | None = None) -> tuple[Tensor, Tensor]:
    """Ignored labels, as many on each of two ranks, because the model's loss is a mean."""
    generator = torch.Generator().manual_seed(number)
    tokens, labels = (
        torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator) for _ in range(2)
    )
    labels[0, :3] = labels[2, :3] = -100
    if ranks is None:
        return tokens, labels
    return tokens.view(ranks, -1, LENGTH), labels.view(ranks, -1, LENGTH)


def settings(stage: int, **keys: Any) -> dict[str, Any]:
    return {
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **keys,
    }


def tiles() -> list[Any]:
    return [fzero.tiled_head("head", chunk_tokens=5), fzero.tiled_mlp("blocks.*.mlp", 4)]


Curve = tuple[Tensor, dict[str, Tensor]]


def trained(step: Any, of_step: Callable[[int], Any]) -> Curve:
    """The losses, and the weights at the end."""
    state, losses = step.init(), []
    for number in range(NUM_STEPS):
        state, metrics = step(state, of_step(number))
        losses.append(metrics.loss.reshape(-1)[0])
    return torch.stack(losses), step.gather(state)


def trained_plainly(model: nn.Module, loss_of: Callable[[nn.Module, Any], Tensor]) -> Curve:
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch(number))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), model.state_dict()


def check(found: Curve, expected: Curve) -> None:
    """Products of fewer tokens and sums in another order round otherwise in fp32."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    for name, x in found[1].items():
        torch.testing.assert_close(x, expected[1][name], rtol=1e-4, atol=1e-5)


def plain() -> Curve:
    return trained_plainly(make(), lambda model, given: model(*given))


@pytest.mark.parametrize("checkpoint", [None, 1])
@pytest.mark.parametrize("stage", range(4))
def test_an_eager_step_trains_as_a_plain_loop(stage: int, checkpoint: int | None) -> None:
    step = fzero.make_train_step(make(), settings(stage), transforms=tiles(), checkpoint=checkpoint)
    check(trained(step, batch), plain())


@pytest.mark.parametrize("by", ["lockstep", "vmap"])
@pytest.mark.parametrize("stage", range(4))
def test_simulated_ranks_train_as_a_plain_loop(stage: int, by: Any) -> None:
    step = fzero.make_train_step(make(), settings(stage), transforms=tiles())
    check(trained(fzero.simulate(step, 2, by=by), lambda n: batch(n, 2)), plain())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("stage", "checkpoint"), [(3, None), (0, None), (3, 1), (1, None), (2, None)]
)
def test_a_step_in_one_graph_trains_as_a_plain_loop(stage: int, checkpoint: int | None) -> None:
    step = fzero.make_train_step(
        make(),
        settings(stage),
        transforms=tiles(),
        checkpoint=checkpoint,
        compile="step",
        compile_backend="aot_eager",
    )
    check(trained(step, batch), plain())


@pytest.mark.sample(3)
@pytest.mark.parametrize("compile", [None, "step"])
@pytest.mark.parametrize("stage", range(4))
def test_tiles_with_their_inputs_in_host_memory_train_as_a_plain_loop(
    monkeypatch: pytest.MonkeyPatch, stage: int, compile: Any
) -> None:
    monkeypatch.setattr(
        "fzero.transforms.checkpointing.host_moves", lambda device: Moves(torch.clone, torch.clone)
    )
    keys = {"activation_checkpointing": {"every": 1, "cpu_checkpointing": True}}
    how = {} if compile is None else {"compile": compile, "compile_backend": "aot_eager"}
    step = fzero.make_train_step(make(), settings(stage, **keys), transforms=tiles(), **how)
    check(trained(step, batch), plain())


@pytest.mark.sample(2)
@pytest.mark.parametrize(("stage", "by"), [(3, "lockstep"), (0, None), (3, None)])
def test_compiled_blocks_train_as_a_plain_loop(stage: int, by: Any) -> None:
    step = fzero.make_train_step(
        make(), settings(stage), transforms=tiles(), compile="block", compile_backend="aot_eager"
    )
    ranks = step if by is None else fzero.simulate(step, 2, by=by)
    check(trained(ranks, lambda n: batch(n, None if by is None else 2)), plain())


@pytest.mark.long
def test_inductor_trains_as_a_plain_loop() -> None:
    step = fzero.make_train_step(make(), settings(3), transforms=tiles(), compile="step")
    check(trained(step, batch), plain())


def _on_ranks(stage: int) -> Curve:
    step = fzero.make_train_step(make(), settings(stage), transforms=tiles())
    return trained(step, lambda n: part(batch(n), step.rank, step.world_size))


@pytest.mark.parametrize("stage", [0, 3])
def test_real_ranks_train_as_a_plain_loop(ranks: RankPool, stage: int) -> None:
    expected = plain()
    for found in ranks(2, _on_ranks, stage):
        check(found, expected)


# --- the functions in a model of one's own --------------------------------------------------------


class Written(LM):
    """Calls the functions itself."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block.mix(x.transpose(1, 2)).transpose(1, 2)
            x = x + fzero.tiled(lambda t, own=block: own.mlp(own.norm(t)), 4)(x)
        return self.norm(x)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = fzero.linear_cross_entropy(
            self.hidden(tokens), self.head.weight, labels,
            chunk_tokens=5, softcap=5.0, label_smoothing=0.1,
        )  # fmt: skip
        assert isinstance(loss, Tensor)
        return loss


@pytest.mark.parametrize("stage", range(4))
def test_a_model_may_call_the_functions_itself(stage: int) -> None:
    step = fzero.make_train_step(make(Written), settings(stage))
    check(trained(fzero.simulate(step, 2, by="lockstep"), lambda n: batch(n, 2)), plain())


def test_a_model_that_calls_the_functions_is_captured() -> None:
    step = fzero.make_train_step(
        make(Written), settings(3), compile="step", compile_backend="aot_eager"
    )
    check(trained(step, batch), plain())


def weighted(model: nn.Module, given: Any) -> tuple[Tensor, Tensor]:
    """A sum and its weight, for a mean over the tokens of all ranks."""
    total, count = fzero.linear_cross_entropy(
        model.hidden(given[0]), model.head.weight, given[1], shards=4, z_loss=1e-3,
        bias=model.head.bias, reduction="sum_and_count",
    )  # type: ignore[operator, arg-type]  # fmt: skip
    return total, count


def weighted_plainly(model: Any, given: Any) -> Tensor:
    logits = model.head(model.hidden(given[0]))
    counts = given[1] != -100
    z_loss = (logits.logsumexp(-1).square() * counts).sum() / counts.sum()
    return F.cross_entropy(logits.flatten(0, 1), given[1].flatten()) + 1e-3 * z_loss


def uneven(number: int) -> tuple[Tensor, Tensor]:
    tokens, labels = batch(number)
    labels[0] = -100  # the ranks count different numbers of tokens
    return tokens, labels


@pytest.mark.parametrize("stage", [0, 3])
def test_sum_and_count_give_the_mean_over_the_tokens_of_all_ranks(stage: int) -> None:
    def untied() -> nn.Module:
        return LM(is_tied=False)

    step = fzero.make_train_step(make(untied), settings(stage), loss_fn=weighted)
    found = trained(
        fzero.simulate(step, 2, by="lockstep"),
        lambda n: tuple(x.view(2, 2, LENGTH) for x in uneven(n)),
    )
    model = make(untied)
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = weighted_plainly(model, uneven(number))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    check(found, (torch.stack(losses), model.state_dict()))


# --- gathers and memory ---------------------------------------------------------------------------


def gathers(transforms: list[Any], model: Callable[[], nn.Module] = LM) -> Counter[Any]:
    """The all-gathers of a second step in stage 3, by flat buffer and phase."""
    step = fzero.make_train_step(make(model), settings(3), transforms=transforms)
    ranks, found = fzero.simulate(step, 2, by="lockstep"), Counter[Any]()
    state, _ = ranks(ranks.init(), batch(0, 2))

    def note(record: CommRecord) -> None:
        if record.label.purpose == "gather":
            found[record.label.buffer, record.label.phase] += 1

    ranks.observed(note)(state, batch(1, 2))
    return found


def test_all_tiles_of_a_forward_and_of_a_backward_share_a_gather() -> None:
    """As many as without tiles, for all units: each once in a direction."""
    found, without = gathers(tiles()), gathers([])
    assert found == without and sum(found.values()) > 0
    assert gathers([], Written) == without


def long_lm() -> nn.Module:
    return LM(4096, 32, 64)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_planned_peak_is_the_measured_one_and_an_eighth_of_the_plain_one(
    precision: str,
) -> None:
    cfg = settings(0, **({"bf16": {"enabled": True}} if precision == "bf16" else {}))
    tokens = torch.arange(16 * 64).view(16, 64)
    given, found = (tokens, tokens), dict[bool, int]()
    for is_tiled in (False, True):
        transforms = (
            [fzero.tiled_head("head", shards=64), fzero.tiled_mlp("blocks.*.mlp", 8)]
            if is_tiled
            else []
        )
        step = fzero.make_train_step(make(long_lm), cfg, transforms=transforms)
        planned = trace_activations(
            step.spec.model, cfg, given, device="cpu", changes=step.spec.changes
        ).nbytes
        found[is_tiled] = most_alive(make(long_lm), cfg, given, transforms=transforms)
        assert found[is_tiled] == pytest.approx(planned, rel=0.03)
    assert found[True] < found[False] / 8


# --- models of transformers -----------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
CAUSAL: dict[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "Gemma2, which caps": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **SMALL, final_logit_softcapping=3.0, query_pre_attn_scalar=8, sliding_window=8
        )
    ),
    "Granite, which divides": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**SMALL, logits_scaling=2.0)
    ),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL)),
    "GPT2, which is tied": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=LENGTH,
            resid_pdrop=0, attn_pdrop=0, embd_pdrop=0, use_cache=False,
        )
    ),
}  # fmt: skip


def sentences(number: int) -> dict[str, Tensor]:
    tokens, labels = batch(number)
    return {"input_ids": tokens, "labels": labels}


def of_transformers(name: str, stage: int, **how: Any) -> None:
    transforms = [fzero.tiled_head(chunk_tokens=7), fzero.tiled_mlp("*.mlp", 4)]
    step = fzero.make_train_step(make(CAUSAL[name]), settings(stage), transforms=transforms, **how)
    expected = trained_plainly(
        make(CAUSAL[name]),
        lambda model, given: model(input_ids=given[0], labels=given[1]).loss,
    )
    check(trained(step, sentences), expected)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models_of_transformers_train_as_a_plain_loop(name: str, stage: int) -> None:
    of_transformers(name, stage)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models_of_transformers_train_so_in_one_graph(name: str) -> None:
    of_transformers(name, 3, compile="step", compile_backend="aot_eager")


def test_evaluation_has_no_logits_and_generation_has() -> None:
    model = make(CAUSAL["Llama"])
    transforms = [fzero.tiled_head(chunk_tokens=7), fzero.tiled_mlp("*.mlp", 4)]
    step = fzero.make_train_step(model, settings(3), transforms=transforms)
    state = step.init()
    plain = make(CAUSAL["Llama"])
    torch.testing.assert_close(
        step.evaluate(state, sentences(0)), plain(**sentences(0)).loss.detach()
    )
    tokens = batch(0)[0][:1, :5]
    how = {"max_new_tokens": 4, "do_sample": False}
    with fzero.generating(step, state) as gathered:
        found = gathered.generate(tokens, **how)
    assert torch.equal(found, plain.generate(tokens, **how))


# --- beside other transforms, and bad input -------------------------------------------------------


def test_adapters_of_the_same_modules_train_as_without_tiles() -> None:
    def of(*others: Any) -> Curve:
        transforms = [lora("blocks.*.mlp.up", rank=2), *others]
        return trained(fzero.make_train_step(make(), settings(3), transforms=transforms), batch)

    check(of(*tiles()), of())


class Logit(LM):
    """Whose loss `use` computes of the logits."""

    use: Callable[[Any], Any]

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        return type(self).use(self.head(self.hidden(tokens)))


USES: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "torch's softmax": lambda x: F.softmax(x, -1),
    "an index of classes": lambda x: x[..., 0],
    "a second tanh": lambda x: x.tanh().tanh(),
    "a product with a tensor": lambda x: x * torch.ones(VOCABULARY),
    r"view\(8, -1, 1\)": lambda x: x.view(8, -1, 1),
    "probabilities": lambda x: F.cross_entropy(x.flatten(0, 1), torch.ones(32, VOCABULARY)),
    "reduction='none'": lambda x: F.cross_entropy(
        x.flatten(0, 1), torch.zeros(32, dtype=torch.int64), reduction="none"
    ),
}


@pytest.mark.parametrize("got", USES)
def test_any_other_use_of_logits_is_an_error_that_names_it(got: str) -> None:
    kind = type("Own", (Logit,), {"use": staticmethod(USES[got])})
    step = fzero.make_train_step(make(kind), settings(0), transforms=[fzero.tiled_head("head")])
    with pytest.raises(ValueError, match=f"^tiled_head: the logits of 'head' may .*{got}"):
        step(step.init(), batch(0))


USED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "shifted": lambda x, y: F.cross_entropy(
        x[:, :-1].reshape(-1, VOCABULARY), y[:, 1:].reshape(-1)
    ),
    "shifted by dots": lambda x, y: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, x.shape[-1]), y[..., 1:].reshape(-1)
    ),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "permuted": lambda x, y: F.cross_entropy(x.permute(0, 2, 1).float(), y),
    "picked": lambda x, y: F.cross_entropy(x[y != -100].float(), y[y != -100], reduction="sum"),
    "module": lambda x, y: nn.CrossEntropyLoss()((x * 0.5).flatten(0, 1), y.flatten()),
    "scaled": lambda x, y: F.cross_entropy(
        (torch.tensor(0.5) * x).to(torch.float64).flatten(0, -2), y.flatten()
    ),
    "capped": lambda x, y: F.cross_entropy(torch.tanh(x / 2).flatten(0, 1), y.flatten()),
}


@pytest.mark.parametrize("how", USED)
def test_usual_ways_from_logits_to_a_loss_give_that_loss(how: str) -> None:
    def loss(model: nn.Module, given: Any) -> Tensor:
        hidden = model.hidden(given[0])  # type: ignore[operator]
        return USED[how](model.head(hidden), given[1])  # type: ignore[operator]

    def untied() -> nn.Module:
        return LM(is_tied=False)

    step = fzero.make_train_step(
        make(untied), settings(0), transforms=[fzero.tiled_head("head")], loss_fn=loss
    )
    expected = trained_plainly(make(untied), lambda model, given: loss(model, given).float())
    check(trained(step, batch), expected)


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (lambda: [fzero.tiled_head()], "needs the head's name .* got LM"),
        (lambda: [fzero.tiled_head("haed")], "must match a module, got 'haed'; names look like"),
        (lambda: [fzero.tiled_head("norm")], "must be an nn.Linear .* got a LayerNorm for 'norm'"),
        (lambda: [fzero.tiled_head("head", shards=2, chunk_tokens=2)], "both set the chunks"),
        (lambda: [fzero.tiled_head("head", shards=0)], "shards: must be a whole number"),
        (
            lambda: [quantization_aware("*.mlp.up"), fzero.tiled_head("blocks.0.mlp.up")],
            "must be the first transform of 'blocks.0.mlp.up'",
        ),
        (lambda: [fzero.tiled_mlp("mlp", 4)], "must match a module, got 'mlp'"),
        (lambda: [fzero.tiled_mlp(["blocks.0.mlp", "blocks.0"], 4)], "no module inside of another"),
        (lambda: [fzero.tiled_mlp("blocks.*.mlp", 3)], "shards must divide the 8 tokens, got 3"),
        (
            lambda: [fzero.tiled_mlp("blocks.*.mix", 4, dim=2)],
            "'blocks.0.mix': fn must take any number of tokens along dimension 2, got",
        ),
    ],
    ids=range(10),
)
def test_bad_input_is_an_error_that_names_the_rule(
    transforms: Callable[[], list[Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^tiled_(head|mlp).*{message}"):
        step = fzero.make_train_step(make(), settings(0), transforms=transforms())
        step(step.init(), batch(0))


def test_a_module_of_several_units_is_refused() -> None:
    """Each tile would gather all of them."""
    with pytest.raises(ValueError, match=r"'blocks.0.mlp' with the unit 'blocks.0.mlp.up' inside"):
        fzero.make_train_step(
            make(),
            settings(3),
            units=["blocks.*.mlp.up", "blocks.*.mlp.down"],
            transforms=[fzero.tiled_mlp("blocks.*.mlp", 4)],
        )
