"""Wrong calls end in words about the argument: the field, the rule, what was given, and
what to do.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import make

import fzero

CFG: dict[str, Any] = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2}
BATCH = torch.ones(2, 4)


def two() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def loss_fn(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def step_of(**options: Any) -> fzero.TrainStep:
    return fzero.make_train_step(make(two), CFG, **{"loss_fn": loss_fn, **options})


def engine() -> fzero.Engine:
    cfg = CFG | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    return fzero.initialize(model=make(two), config=cfg)[0]


def with_state(call: Callable[[fzero.TrainStep, Any], Any]) -> Callable[[], Any]:
    def run() -> Any:
        step = step_of()
        return call(step, step.init())

    return run


class Says(nn.Module):
    """Returns what it is asked to, made from its weight."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight, self.answer = nn.Parameter(torch.ones(3)), answer

    def forward(self, x: Any) -> Any:
        return self.answer(self.weight * x)


def says(answer: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
    """A step of a model that returns this."""

    def run() -> None:
        for stage in (0, 3):
            step = fzero.make_train_step(
                Says(answer), CFG | {"zero_optimization": {"stage": stage}}, **options
            )
            step(step.init(), torch.ones(2, 3))

    return run


def frozen() -> None:
    step = fzero.make_train_step(Says(lambda y: y.sum()).requires_grad_(False), CFG)
    step(step.init(), torch.ones(2, 3))


class Equal(nn.Linear):
    """Its modules are equal by value, so PyTorch finds the first one only."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and self.in_features == other.in_features

    def __hash__(self) -> int:
        return hash(self.in_features)


class EqualWithoutHash(nn.Linear):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


def dotted(kind: str, value: Any) -> nn.Module:
    model = two()
    getattr(model[0], f"_{kind}")["a.b"] = value
    return model


UNNAMED: dict[str, tuple[nn.Module, str]] = {
    "equal modules": (
        nn.Sequential(Equal(4, 4), Equal(4, 4)),
        "'0' and '1' are equal by the __eq__ of Equal, so PyTorch",
    ),
    "no hashes": (
        nn.Sequential(EqualWithoutHash(4, 4)),
        "must have hashes, .*unhashable type: 'EqualWithoutHash'",
    ),
    **{
        f"a {kind[:-1]} with a dot": (
            dotted(kind, value),
            rf"no dots, .* {kind[:-1]} 'a\.b' in 0 \(Linear\)",
        )
        for kind, value in (
            ("parameters", nn.Parameter(torch.ones(4))),
            ("buffers", torch.ones(4)),
            ("modules", nn.Linear(4, 4)),
        )
    },
}
"""Models whose parts PyTorch does not find by their names."""


def inside_its_own_forward() -> None:
    found: dict[str, Any] = {}

    def loss(model: Any, batch: Any) -> Any:
        found["step"](found["state"], batch)
        return model(batch).sum()

    found["step"] = step_of(loss_fn=loss)
    found["state"] = found["step"].init()
    found["step"](found["state"], BATCH)


def under(context: Any, call: Callable[[], Any]) -> None:
    with context:
        call()


def scheduler() -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(two().parameters()), 3)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    # what is trained
    "a class": (
        lambda: fzero.make_train_step(nn.Linear, CFG),
        r"model: must be a torch.nn.Module, got the class Linear; make one: Lin",
    ),
    "a function": (
        lambda: fzero.make_train_step(two, CFG),
        "model: must be a torch.nn.Module, got the function two; pass",
    ),
    "a list": (
        lambda: fzero.make_train_step([two()], CFG),
        r"model: .*got a list; pass torch.nn.Sequential\(\*modules\)",
    ),
    "None": (lambda: fzero.make_train_step(None, CFG), "model: .*got None; pass a torch.nn.Module"),
    "a state dict": (
        lambda: fzero.make_train_step(two().state_dict(), CFG),
        "model: .*got an OrderedDict",
    ),
    "a class to plan": (
        lambda: fzero.plan(nn.Linear, CFG),
        "model: must be a torch.nn.Module, got the class Linear",
    ),
    "a list to plan": (
        lambda: fzero.plan([two()], CFG),
        "model: must be a torch.nn.Module, got a list",
    ),
    "a class to compare": (
        lambda: fzero.estimation.compare_plans(nn.Linear, CFG),
        "model: must be a torch.nn.Module",
    ),
    "None to profile": (
        lambda: fzero.profiling.profile(None, BATCH),
        "model: must be a torch.nn.Module, got None",
    ),
    "a class for an engine": (
        lambda: fzero.initialize(model=nn.Linear, config=CFG),
        "model: must be a torch.nn.Module",
    ),
    # the loss
    "loss in a word": (
        lambda: step_of(loss_fn="mse"),
        "loss_fn: must be a function of model and batch .*got 'mse'; pass lambda",
    ),
    "loss of one": (
        lambda: step_of(loss_fn=lambda model: model),
        "loss_fn: must be a function of model and batch",
    ),
    "a loss module": (
        lambda: step_of(loss_fn=nn.MSELoss()),
        "loss_fn: must be a function of model and batch .*got a MSELoss",
    ),
    "a number as loss": (
        lambda: step_of(loss_fn=3),
        "loss_fn: must be a function of model and batch .*got 3",
    ),
    # what a forward returns
    **{
        f"an output: {got}, {index}": (
            says(answer),
            rf"loss: Says's output must be a scalar tensor.* got {got}; pass loss_fn=",
        )
        for index, (answer, got) in enumerate(
            [
                (lambda y: y, r"a tensor of shape \(2, 3\)"),
                (lambda y: y[:0], r"a tensor of shape \(0, 3\)"),
                (lambda y: (y, y), r"a tensor of shape \(2, 3\)"),
                *(
                    (answer, "'NoneType'")
                    for answer in (
                        *(lambda y: {"logits": y}, lambda y: (), lambda y: y.sum().item()),
                        *(lambda y: "loss", lambda y: None),
                    )
                ),
            ]
        )
    },
    "a loss of rows": (
        says(lambda y: y, loss_fn=lambda model, batch: model(batch)),
        r"loss: loss_fn must be a scalar tensor.* got a tensor of shape \(2, 3\)",
    ),
    "a detached loss": (
        says(lambda y: y.detach().sum()),
        "loss: Says's output must depend on a trainable parameter and does not",
    ),
    "a constant loss": (
        says(lambda y: torch.tensor(1.0)),
        "loss: Says's output must depend on a trainable parameter and does not",
    ),
    "a frozen model": (
        frozen,
        "loss: .* must depend on a trainable parameter and does not; unfreeze one",
    ),
    "no parameters": (
        lambda: fzero.make_train_step(nn.ReLU(), CFG),
        "make_train_step: ReLU has no parameters",
    ),
    **{
        f"{name}, {index}": (lambda use=use, model=model: use(model), f"model: .*{words}")
        for name, (model, words) in UNNAMED.items()
        for index, use in enumerate(
            (
                lambda model: fzero.plan(model, CFG),
                lambda model: fzero.make_train_step(model, CFG),
                lambda model: fzero.initialize(model=model, config=CFG),
            )
        )
    },
    # names and groups
    "units that are not there": (
        lambda: step_of(units=["0", r"layers.*"]),
        r"units: 'layers\.\*' must match a module with parameters .*names look like 0, 1",
    ),
    "stage 4": (
        lambda: fzero.make_train_step(two(), {"zero_optimization": {"stage": 4}}),
        "zero_optimization.stage: must be 0, 1, 2 or 3, or fzero's own '3 once', got 4",
    ),
    **{
        f"{world_size} ranks to {index}": (
            lambda use=use, world_size=world_size: use(two(), CFG, world_size=world_size),
            f"world_size: must be a positive integer, got {world_size!r}; say how many ranks",
        )
        for world_size in (0, -1, True, 2.0)
        for index, use in enumerate((fzero.plan, fzero.estimation.compare_plans))
    },
    "units as a string": (
        lambda: step_of(units="blocks.*"),
        r"units: must be a list of names, got 'blocks\.\*'; pass \['blocks",
    ),
    "units as a letter": (
        lambda: fzero.plan(two(), CFG, units="0"),
        r"units: must be a list of names, got '0'; pass \['0'\]",
    ),
    "units as numbers": (
        lambda: step_of(units=[0, 1]),
        "units: must be a list of names, got 0; pass names of modules",
    ),
    "units as a number": (lambda: step_of(units=3), "units: must be a list of names, got 3"),
    "units as classes": (
        lambda: step_of(units=[nn.Linear]),
        "units: must be a list of names, got the class Linear",
    ),
    "one group": (
        lambda: step_of(param_groups={"params": "bias"}),
        "param_groups: must be a list of mappings, got",
    ),
    "a pattern": (
        lambda: step_of(param_groups="bias"),
        "param_groups: must be a list of mappings, got 'bias'",
    ),
    "parameters": (
        lambda: step_of(param_groups=two().parameters()),
        "param_groups: must be a list of mappings, got a gener",
    ),
    "a list of patterns": (
        lambda: step_of(param_groups=["bias"]),
        r"param_groups\[0\]: must be a mapping, got 'bias'",
    ),
    # rates and transforms
    "a rate": (
        lambda: step_of(lr_schedule=0.1),
        "lr_schedule: must be a function of the number of updates so far, or None, got",
    ),
    "a scheduler": (
        lambda: step_of(lr_schedule=scheduler()),
        "lr_schedule: must be a function of .*got a StepLR",
    ),
    "a class of optimizers": (
        lambda: step_of(transform=torch.optim.SGD),
        "transform: must make a Transform .*torch_optimizer",
    ),
    "nothing": (
        lambda: step_of(transform=lambda lr: None),
        "transform: must make a Transform of a learning rate, got None",
    ),
    "no functions": (
        lambda: step_of(transform=fzero.Transform(1, 2, 3)),
        "transform: must be a Transform of three functions",
    ),
    "a factory": (
        lambda: fzero.chain(fzero.adamw),
        r"chain\[0\]: must be a Transform of three functions",
    ),
    "a factory to check": (
        lambda: fzero.optim.check_elementwise(fzero.adamw),
        "transform: must be a Transform of three functions",
    ),
    "a rate in a word": (lambda: fzero.adamw("1e-3"), "adamw: lr must be at least 0, got '1e-3'"),
    "no rate": (lambda: fzero.sgd(None), "sgd: lr must be at least 0, got None"),
    "one beta": (
        lambda: fzero.adamw(1e-3, betas=0.9),
        r"adamw: each of betas must be in \[0, 1\), got 0.9",
    ),
    "three betas": (
        lambda: fzero.adamw(1e-3, betas=(0.9, 0.9, 0.9)),
        "adamw: each of betas must be",
    ),
    "a factor in a word": (
        lambda: fzero.optim.scale("x"),
        "scale: factor must be a number, got 'x'",
    ),
    # other arguments of a step
    "a seed in a word": (
        lambda: step_of(seed="1"),
        "seed: must be a whole number, at least 0, got '1'",
    ),
    "half a seed": (lambda: step_of(seed=1.5), "seed: must be a whole number, at least 0, got 1.5"),
    "a seed below 0": (
        lambda: step_of(seed=-1),
        "seed: must be a whole number, at least 0, got -1",
    ),
    "donate in a word": (lambda: step_of(donate="no"), "donate: must be True or False, got 'no'"),
    "placements in a word": (
        lambda: step_of(placements="cpu"),
        "placements: must be a mapping of patterns .*got 'cpu'",
    ),
    "a list of placements": (
        lambda: step_of(placements=["cpu"]),
        "placements: must be a mapping of patterns",
    ),
    # where autograd is off
    "no_grad": (
        with_state(lambda step, state: under(torch.no_grad(), lambda: step(state, BATCH))),
        r"step: must be called with gradients enabled, got a call inside torch.no_grad\(\)",
    ),
    "inference": (
        with_state(lambda step, state: under(torch.inference_mode(), lambda: step(state, BATCH))),
        r"step: must be called outside of torch.inference_mode\(\)",
    ),
    "init in inference": (
        lambda: under(torch.inference_mode(), step_of().init),
        r"init: must be called outside of torch.inference_mode\(\)",
    ),
    "load in inference": (
        lambda: under(torch.inference_mode(), lambda: fzero.load("nowhere", step=step_of())),
        "load: must be called outside of",
    ),
    "an engine in inference": (
        lambda: under(torch.inference_mode(), engine),
        "initialize: must be called outside of",
    ),
    "inside its own forward": (
        inside_its_own_forward,
        "step: must not be called inside a forward of its own model",
    ),
    # states and what they are given
    "a module to init": (
        lambda: step_of().init(two()),
        "params: must be a state dict, got a Sequential; pass model.state_dict",
    ),
    "a list to init": (lambda: step_of().init([BATCH]), "params: must be a state dict, got a list"),
    "arrays to init": (
        lambda: step_of().init({k: v.numpy() for k, v in two().state_dict().items()}),
        r"params\['0.weight'\]: must be a tensor, got a ndarray",
    ),
    "init_fn in a word": (
        lambda: step_of().init(init_fn="normal"),
        "init_fn: must be a function of a module that fills it",
    ),
    "a batch to inspect": (
        with_state(lambda step, state: step.inspect(state, BATCH)),
        "inspect: must be a function without arg",
    ),
    "a batch to forward": (
        with_state(lambda step, state: step.forward(step.begin(state), BATCH)),
        "forward: must be a function",
    ),
    "no loss": (
        with_state(lambda step, state: step.backward(step.begin(state), None)),
        "backward: loss must be a 0-d tensor, got N",
    ),
    "a loss of two": (
        with_state(lambda step, state: step.backward(step.begin(state), BATCH)),
        r"backward: loss must be .*shape \(2, 4",
    ),
    "what load returns": (
        with_state(lambda step, state: step((state, {}), BATCH)),
        r"state: must be a TrainState, got a tuple; pass that of init\(\) .*load\(...\)\.state",
    ),
    "a state to update": (
        with_state(lambda step, state: step.update(state)),
        "update: must be given the AccumulationWindow of the last backward",
    ),
    "nobody observes": (
        lambda: step_of().observed(None),
        "observe: must be a function of a fzero.comms.CommRecord, got None",
    ),
    "a machine": (
        lambda: step_of().explain(BATCH, machine=3),
        "machine: must be a fzero.graph.MachineModel, got 3",
    ),
    # files
    "save to nowhere": (
        with_state(lambda step, state: fzero.save(state, "", step=step)),
        "dir: must be a path, got ''",
    ),
    "save to None": (
        with_state(lambda step, state: fzero.save(state, None, step=step)),
        "dir: must be a path, got None",
    ),
    "save a model": (
        with_state(lambda step, state: fzero.save(state, "x", step=two())),
        "step: must be a step, got a Sequential",
    ),
    "start to save": (
        with_state(lambda step, state: fzero.start_save(state, 3, step=step)),
        "dir: must be a path, got 3",
    ),
    "keep in a word": (
        with_state(lambda step, state: fzero.save(state, "x", step=step, keep="3")),
        "keep: must be a whole number, .*got '3'",
    ),
    "keep True": (
        with_state(lambda step, state: fzero.save(state, "x", step=step, keep=True)),
        "keep: must be a whole number, .*got True",
    ),
    "load from nowhere": (lambda: fzero.load("", step=step_of()), "dir: must be a path, got ''"),
    "load into nothing": (lambda: fzero.load("x", step=None), "step: must be a step, got None"),
    "weights to None": (
        with_state(lambda step, state: fzero.checkpoint.save_16bit_model(state, None, step=step)),
        "out: must be a path, got None",
    ),
    "place swapped": (
        with_state(lambda step, state: fzero.place(step, state)),
        r"step: must be a step, got a TrainState; pass place",
    ),
    "one state": (
        lambda: fzero.resharding.reshard_all(None, step_of(), step_of()),
        "states: must be a list of states, got None",
    ),
    # ranks and rates
    "ranks in a word": (
        lambda: fzero.comms.AbstractAxis("data", "4"),
        "AbstractAxis: size must be a whole number, at least 1, got '4'",
    ),
    "no ranks": (
        lambda: fzero.comms.AbstractAxis("data", 0),
        "AbstractAxis: size must be a whole number, at least 1, got 0",
    ),
    "bytes in a word": (
        lambda: fzero.estimation.fit(two(), CFG, world_size=2, device_nbytes="80GB"),
        "device_nbytes: must be a number of bytes",
    ),
    "a rate of a machine": (
        lambda: fzero.graph.MachineModel(flops="x"),
        "MachineModel: flops: must be a number, got 'x'",
    ),
    # engines
    "an optimizer in a word": (
        lambda: fzero.initialize(model=two(), config=CFG, optimizer="adam"),
        "optimizer: must be one of torch.optim",
    ),
    "a scheduler in a word": (
        lambda: fzero.initialize(model=two(), config=CFG, lr_scheduler="cosine"),
        "lr_scheduler: must have a method",
    ),
    "parameters in a word": (
        lambda: fzero.initialize(
            model=two(), config=CFG | {"optimizer": {"type": "Adam"}}, model_parameters="all"
        ),
        "model_parameters: must be parameters or groups of them, got 'all'",
    ),
    "a batch size in a word": (
        lambda: engine().set_train_batch_size("4"),
        "train_batch_size: must be a whole number",
    ),
    "no micro-batch": (
        lambda: engine().set_train_micro_batch_size(0),
        "train_micro_batch_size_per_gpu: must be a whole number",
    ),
    "a list of rates": (lambda: engine().set_lr([1e-3]), "set_lr: must be given a number, got"),
    "an empty tag": (lambda: engine().save_checkpoint("x", tag=""), "tag: must be a name, got ''"),
    "a client list": (
        lambda: engine().save_checkpoint("x", client_state=[1]),
        "client_state: must be a mapping, got",
    ),
    "a list of weights": (
        lambda: engine().load_module_state_dict([1]),
        "load_module_state_dict: must be given a state dict",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_call_is_reported_in_words_about_the_argument(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, words = CASES[name]
    with pytest.raises((ValueError, RuntimeError), match=f"^{words}"):
        call()
    assert not list(tmp_path.iterdir())


def test_a_backward_may_come_where_autograd_is_off() -> None:
    one = engine()
    loss = one(BATCH).sum()
    with torch.no_grad():
        one.backward(loss)
        one.step()
    assert one.was_step_applied()


def test_a_model_made_in_inference_mode_trains() -> None:
    with torch.inference_mode():
        model = make(two)
    step = fzero.make_train_step(model, CFG, loss_fn=loss_fn)
    _, metrics = step(step.init(), BATCH)
    assert metrics.loss == step_of()(step_of().init(), BATCH)[1].loss


MISSING = (
    ("fzero.testing", "hypothesis", "testing"),
    ("sharding.testing", "hypothesis", "testing"),
    ("fzero.integrations.transformers", "transformers", "trainer"),
    ("fzero.integrations.transformers", "accelerate", "trainer"),
)


def test_what_is_not_installed_is_reported_with_its_extra() -> None:
    code = f"""
import importlib, sys
import fzero
for module, missing, extra in {MISSING!r}:
    sys.modules[missing] = None
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        assert f"pip install 'fzero[{{extra}}]'" in str(error) and module in str(error), error
    else:
        raise AssertionError(module)
    del sys.modules[missing]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
