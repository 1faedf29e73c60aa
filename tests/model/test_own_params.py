"""A model's parameters are the state's, however its code gets at them; what a step
cannot follow is refused by name.
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from zoo.oddities import ODDITIES

import fzero
from fzero.model.own_params import StandIn
from fzero.runtime import visits
from fzero.simulation import simulate

STEPS = 3


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {
        "optimizer": {"type": "SGD", "params": {"lr": 0.125}},
        "zero_optimization": zero,
        **more,
    }


def batches() -> list[Tensor]:
    return [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(STEPS)]


class Model(nn.Module):
    """Two layers, whose output is the loss; what a test is about comes between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.set_up()

    def set_up(self) -> None: ...

    def use(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x).square().mean()


def make(model: type[Model]) -> Model:
    torch.manual_seed(0)
    return model()


def plain_weights(model: type[Model]) -> dict[str, Tensor]:
    module = make(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
    for x in batches():
        optimizer.zero_grad()
        module(x).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    return module.state_dict()


def trained(step: Any, num_ranks: int = 1) -> dict[str, Tensor]:
    state = step.init()
    for x in batches():
        state, _ = step(state, x if num_ranks == 1 else x.view(num_ranks, -1, 4))
    weights: Any = step.gather(state)
    return weights


def assert_trains_as_plainly(model: type[Model], **how: Any) -> None:
    expected = plain_weights(model)
    for stage in (0, 3):
        found = trained(fzero.make_train_step(make(model), config(stage), units=["a", "b"], **how))
        torch.testing.assert_close({name: found[name] for name in expected}, expected)


# --- parameters that code does not get from their modules -----------------------------------------


class InAList(Model):
    def set_up(self) -> None:
        self.weights = [self.a.weight]

    def use(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(F.linear(x, self.weights[0], self.a.bias)))


class InAPartial(Model):
    def set_up(self) -> None:
        self.linear = functools.partial(F.linear, weight=self.a.weight)

    def use(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.linear(x)))


class ByMethods(Model):
    """Reads by every way that modules have, under names of its own too."""

    def use(self, x: Tensor) -> Tensor:
        assert isinstance(self.get_parameter("a.weight"), nn.Parameter)
        assert isinstance(self.a.weight, nn.Parameter) and not isinstance(
            self.a.weight * 1, nn.Parameter
        )
        own = self.a._parameters
        assert own.get("weight") is self.a.weight and own.get("absent", "none") == "none"
        self.tied = self.a.weight
        swapped = torch.func.functional_call(self.a, {"weight": self.b.weight}, (x,))
        return self.b(torch.tanh(self.a(x) + F.linear(x, self.tied) + swapped))


class Compiled(InAPartial):
    def set_up(self) -> None:
        super().set_up()
        self.compile(backend="eager")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_that_compiles_itself_is_trained_with_what_its_code_holds() -> None:
    """What torch.compile looks at while it traces must not be gathered."""
    found = trained(fzero.make_train_step(make(Compiled), config(0), units=["a", "b"]))
    torch.testing.assert_close(found, plain_weights(InAPartial))


def test_inside_the_forward_a_parameter_is_one_for_modules_and_for_isinstance() -> None:
    module = make(ByMethods)
    optimizer = torch.optim.SGD(list(module.parameters()), lr=0.125)
    for x in batches():
        optimizer.zero_grad()
        module(x).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    expected = {name: x for name, x in module.state_dict().items() if name != "tied"}
    found = trained(fzero.make_train_step(make(ByMethods), config(3), units=["a", "b"]))
    torch.testing.assert_close(found, expected)


class CopiesAndReadsAttributes(Model):
    """Copies a submodule in its forward, and reads an attribute that code has set on a
    parameter.
    """

    def set_up(self) -> None:
        self.a.weight.scale = 0.5  # type: ignore[assignment]

    def use(self, x: Tensor) -> Tensor:
        twin, weight = copy.deepcopy(self.a), copy.deepcopy(self.a.weight)
        assert (
            type(twin._parameters) is dict
            and type(weight) is nn.Parameter
            and weight.grad_fn is None
        )
        return super().use(x) + self.a.weight.scale * (twin(x) @ weight)


class KnowsItsParameters(Model):
    """Takes another branch where a parameter is not what it is in a plain loop."""

    def use(self, x: Tensor) -> Tensor:
        is_one = type(self.a.weight) is nn.Parameter and type(self.a.weight * 1) is Tensor
        is_leaf = (
            self.a.weight.is_leaf
            and not (self.a.weight * 1).is_leaf
            and nn.Parameter(torch.ones(1)).is_leaf
        )
        return super().use(x) * (1 + is_one + 2 * is_leaf)


class KnowsLeaves(InAList):
    def use(self, x: Tensor) -> Tensor:
        return super().use(x) * (1 + self.a.weight.is_leaf + 2 * self.weights[0].is_leaf)


def test_a_parameter_in_the_forward_has_its_class_its_attributes_and_is_a_leaf() -> None:
    for model in (CopiesAndReadsAttributes, KnowsItsParameters, KnowsLeaves):
        assert_trains_as_plainly(model)
        step = fzero.make_train_step(make(model), config(3), units=["a", "b"])
        torch.testing.assert_close(
            trained(simulate(step, 2, by="lockstep"), 2), plain_weights(model)
        )
    assert_trains_as_plainly(KnowsLeaves, compile="step", compile_backend="aot_eager")


class KeepsData(Model):
    def use(self, x: Tensor) -> Tensor:
        self.kept = getattr(self, "kept", None) or [self.a.weight.data]
        return super().use(x) + self.kept[0].sum()


class KeepsAWeight(Model):
    def use(self, x: Tensor) -> Tensor:
        self.kept = getattr(self, "kept", None) or [self.a.weight]
        return super().use(x) @ self.kept[0]


@pytest.mark.parametrize("model", [KeepsData, KeepsAWeight])
@pytest.mark.filterwarnings("ignore:the (for|back)ward runs its units in an order")
def test_what_a_model_keeps_from_its_first_forward_follows_the_parameter(
    model: type[Model],
) -> None:
    assert_trains_as_plainly(model)
    step = fzero.make_train_step(make(model), config(3), units=["a", "b"])
    torch.testing.assert_close(trained(simulate(step, 2, by="lockstep"), 2), plain_weights(model))


class KeepsDataLater(Model):
    calls = 0

    def use(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept = getattr(self, "kept", None) or (
            [self.a.weight.data] if self.calls > 1 else None
        )
        return super().use(x)


def test_a_view_of_gathered_memory_that_a_later_forward_keeps_is_reported() -> None:
    step = fzero.make_train_step(make(KeepsDataLater), config(3), units=["a", "b"])
    with pytest.warns(
        UserWarning,
        match=r"parameters of 'a/float32': a tensor that a forward of an earlier step made",
    ):
        trained(simulate(step, 2, by="lockstep"), 2)


class Doubled(nn.Parameter):
    """A class of parameters with a method, and with another meaning of a function."""

    def twice(self) -> Tensor:
        return 2 * self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return 2 * out if func is torch.outer else out


class OfItsOwnClass(Model):
    def set_up(self) -> None:
        self.a.bias = Doubled(self.a.bias.data)

    def use(self, x: Tensor) -> Tensor:
        bias = self.a.bias
        assert isinstance(bias, Doubled)
        return super().use(x) + bias.twice() + torch.outer(bias, bias).sum()


def test_a_parameter_of_a_class_of_its_own_is_one_in_the_forward() -> None:
    assert_trains_as_plainly(OfItsOwnClass)
    for stage in (0, 3):
        engine, *_ = fzero.initialize(
            model=make(OfItsOwnClass), config=config(stage, train_micro_batch_size_per_gpu=8)
        )
        for x in batches():
            engine.backward(engine(x))
            engine.step()
        with engine.gathered() as found:
            torch.testing.assert_close(dict(found), plain_weights(OfItsOwnClass))
    step = fzero.make_train_step(
        make(OfItsOwnClass), config(0), compile="step", compile_backend="aot_eager"
    )
    with pytest.raises(
        ValueError, match=r"'a.bias': must be an nn.Parameter in one graph.* got Doubled"
    ):
        trained(step)


class Marks(Model):
    """Sets attributes in its forward: of a parameter, or of a buffer, of which it makes
    another one each time.
    """

    kind = "parameter"

    def set_up(self) -> None:
        self.register_buffer("mean", torch.ones(4))

    def use(self, x: Tensor) -> Tensor:
        held = self.a.weight if self.kind == "parameter" else self.mean
        count = getattr(held, "seen", 0) + 1
        if self.kind == "new buffer":
            held = self.mean = self.mean.detach().clone()
        held.seen = count  # type: ignore[union-attr, assignment]
        return super().use(x) * count  # type: ignore[operator]


class MarksABuffer(Marks):
    kind = "buffer"


class MarksANewBuffer(Marks):
    kind = "new buffer"


@pytest.mark.parametrize(
    "options", [{}, {"compile": "step", "compile_backend": "aot_eager"}], ids=["eager", "graph"]
)
def test_an_attribute_that_a_forward_sets_is_kept_or_refused_by_its_name(
    options: dict[str, Any],
) -> None:
    for model, kind in (
        (Marks, "parameter 'a.weight'"),
        (MarksABuffer, "buffer 'mean'"),
        (MarksANewBuffer, ""),
    ):
        if kind and (options or model is Marks):
            with pytest.raises(
                ValueError, match=f"{kind}: must get no attribute in the forward.* got 'seen'"
            ):
                trained(fzero.make_train_step(make(model), config(3), units=["a", "b"], **options))
        elif not options:
            assert_trains_as_plainly(model)
            step = fzero.make_train_step(module := make(model), config(3))
            state, _ = step(step.init(), batches()[0])
            assert module.mean.seen == 1 and not vars(state.buffers["mean"])  # type: ignore[union-attr]


class Adjoint(torch.autograd.Function):
    """Runs a function again in its backward, and differentiates by the parameters that
    its forward was given.
    """

    is_strict = False

    @staticmethod
    def forward(ctx: Any, func: Any, x: Tensor, *params: Tensor) -> Tensor:
        ctx.func = func
        ctx.save_for_backward(x, *params)
        with torch.no_grad():
            out: Tensor = func(x)
            return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = ctx.func(x)
            return None, *torch.autograd.grad(
                out, [x, *params], grads, allow_unused=not Adjoint.is_strict
            )


class ByAdjoint(Model):
    def use(self, x: Tensor) -> Tensor:
        out: Tensor = Adjoint.apply(self.a, super().use(x), *self.a.parameters())  # type: ignore[no-untyped-call]
        return self.b(out)


class ByAdjointOfCopies(Model):
    def use(self, x: Tensor) -> Tensor:
        copies = {name: 1 * param for name, param in self.a.named_parameters()}
        call = functools.partial(torch.func.functional_call, self.a, copies)
        out: Tensor = Adjoint.apply(lambda x: call((x,)), super().use(x), *copies.values())  # type: ignore[no-untyped-call]
        return self.b(out)


class BySolver(Model):
    """A hook that runs a module again differentiates by its input alone."""

    def use(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.a(x))
        fixed = out.detach()

        def solve(grad: Tensor) -> Tensor:
            with torch.enable_grad():
                again = torch.tanh(self.a(fixed.requires_grad_()))
            return torch.autograd.grad(again, fixed, grad)[0] + grad

        out.register_hook(solve)
        return self.b(out)


@pytest.mark.covering(1)
@pytest.mark.parametrize("small", [4, visits.SMALL])
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_module_that_a_backward_runs_again_gets_its_gradient(
    is_strict: bool, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adjoint, "is_strict", is_strict)
    monkeypatch.setattr(visits, "SMALL", small)
    for model in (ByAdjoint, ByAdjointOfCopies, BySolver):
        assert_trains_as_plainly(model)
        for stage in (0, 3):
            step = fzero.make_train_step(make(model), config(stage), units=["a", "b"])
            torch.testing.assert_close(
                trained(simulate(step, 2, by="lockstep"), 2), plain_weights(model)
            )


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_through_two_forwards_runs_the_modules_of_each_again(stage: int) -> None:
    expected = make(ByAdjoint)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.125)
    model = make(ByAdjoint)
    step = fzero.make_train_step(model, config(stage, gradient_clipping=0.0), units=["a", "b"])
    state, (x, y, _) = step.init(), batches()
    (expected(x) * expected(y)).backward()
    optimizer.step()
    window = step.begin(state)
    losses = [step.forward(window, functools.partial(model, each)) for each in (x, y)]
    state, _ = step.update(step.backward(window, losses[0] * losses[1]))
    torch.testing.assert_close(step.gather(state), expected.state_dict())


class Listed(Model):
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.a.parameters(recurse)


class OfTwoTensors(Model):
    def set_up(self) -> None:
        self.pair = nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4)))  # type: ignore[no-untyped-call]


class Quantized(Model):
    def set_up(self) -> None:
        self.register_buffer("table", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))


class Drops(Model):
    def use(self, x: Tensor) -> Tensor:
        out = super().use(x)
        del self.b
        return out


def test_tensors_and_lists_that_a_state_cannot_follow_are_refused_by_name() -> None:
    for model, message in (
        (Listed, r"parameter 'b.weight': must be listed by the model's parameters\(\)"),
        (OfTwoTensors, "parameter 'pair': must be dense, .* got TwoTensor"),
        (Quantized, "buffer 'table': must be dense, .* got Tensor of torch.qint8"),
        (
            Drops,
            "parameter 'b.weight': must keep its place in the module, and the forward removed it",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            trained(fzero.make_train_step(make(model), config(3)))


class Conjugated(Model):
    """Its tensors are views that PyTorch negates or conjugates when they are read."""

    def set_up(self) -> None:
        pairs = torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj()
        self.parts, self.pairs = (
            nn.Parameter(pairs.imag),
            nn.Parameter((2 * pairs).conj(), requires_grad=False),
        )

    def use(self, x: Tensor) -> Tensor:
        return super().use(x) * self.parts + self.pairs.imag


def test_negated_and_conjugated_tensors_train() -> None:
    assert_trains_as_plainly(Conjugated)


class ForwardMode(Model):
    def use(self, x: Tensor) -> Tensor:
        return super().use(x) + torch.func.jacfwd(self.a)(x[0]).sum(0)


def test_ranks_in_lockstep_do_not_mix_the_levels_of_forward_mode() -> None:
    """They are of the process, and a rank waits inside one."""
    step = fzero.make_train_step(make(ForwardMode), config(3), units=["a", "b"])
    lockstep, state = simulate(step, 2, by="lockstep"), None
    for x in batches():
        state, _ = lockstep(lockstep.init() if state is None else state, x.view(2, 4, 4))
    found, expected = lockstep.gather(state), plain_weights(ForwardMode)
    torch.testing.assert_close({name: found[name] for name in expected}, expected)


class Asks(Model):
    def use(self, x: Tensor) -> Tensor:
        assert isinstance(self.get_parameter("a.weight"), nn.Parameter)
        return super().use(x) if isinstance(self.a.weight, nn.Parameter) else super().use(x) * 0


def test_a_parameter_is_one_in_a_captured_and_in_a_stacked_step() -> None:
    assert_trains_as_plainly(Asks, compile="step", compile_backend="aot_eager")
    found = trained(
        simulate(fzero.make_train_step(make(Asks), config(1)), 2, by="vmap"), num_ranks=2
    )
    torch.testing.assert_close(found, plain_weights(Asks))


def test_after_a_step_and_after_an_error_the_parameters_are_the_module_s_own_again() -> None:
    model = make(InAList)
    step = fzero.make_train_step(model, config(0))
    with pytest.raises(RuntimeError):
        step(step.init(), torch.ones(2, 5))
    step(step.init(), batches()[0])
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    gc.collect()
    assert (
        isinstance(StandIn(torch.ones(2)), nn.Parameter)
        and type(StandIn(torch.ones(2))) is nn.Parameter
    )


@pytest.mark.parametrize(
    "script", [torch.jit.script, lambda module: torch.jit.trace(module, torch.zeros(2, 4))]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_of_torchscript_are_refused(script: Callable[[nn.Module], nn.Module]) -> None:
    model = make(Model)
    model.a = script(model.a)
    with pytest.raises(ValueError, match=r"no modules of TorchScript .*'a'"):
        fzero.make_train_step(model, config(0))


def test_a_loss_of_the_module_s_own_parameters_is_refused() -> None:
    """In parts of a step there is code of the user's between forward and backward. (An
    engine trains such a loss.)
    """
    model = make(Model)
    step = fzero.make_train_step(model, config(0))
    window = step.begin(step.init())
    loss = step.forward(window, lambda: model(batches()[0]))
    with pytest.raises(ValueError, match=r"'a.weight': must be used inside the forward"):
        step.backward(window, loss + model.a.weight.norm())


# --- memory of their own --------------------------------------------------------------------------


def test_a_trained_parameter_that_shares_memory_is_refused_and_neighbours_are_not() -> None:
    def check(share: Callable[[Model], object]) -> None:
        model = make(Model)
        share(model)
        fzero.make_train_step(model, config(0))

    def two(model: Model) -> None:
        model.b.weight = nn.Parameter(model.a.weight.data)

    def a_row(model: Model) -> None:
        model.b.bias = nn.Parameter(model.a.weight.data[:, 1])

    def a_buffer(model: Model) -> None:
        model.register_buffer("seen", model.a.weight.data)

    for share in (two, a_row, a_buffer):
        with pytest.raises(
            ValueError,
            match=r"parameter 'a.weight': must have memory of its own, and shares it with",
        ):
            check(share)

    def columns(model: Model) -> None:
        both = torch.randn(4, 8)
        model.a.weight, model.b.weight = nn.Parameter(both[:, :4]), nn.Parameter(both[:, 4:])

    def frozen(model: Model) -> None:
        two(model)
        model.a.weight.requires_grad_(False)
        model.b.weight.requires_grad_(False)

    def tied(model: Model) -> None:
        model.b.weight = model.a.weight

    for share in (columns, frozen, tied):
        check(share)


# --- what a forward may not do --------------------------------------------------------------------


IN_A_GRAPH = ("ClampsData", "ForcedNorm", "max_norm", "ResizedBuffer", "LateParameter")
"""Models that the law below captures, too."""


@pytest.mark.parametrize(
    "name",
    # a compiled module is refused where units are gathered, and one rank gathers none
    [name for name, case in ODDITIES.items() if case.refused and name != "compiled_model"],
)
def test_what_a_state_cannot_hold_is_refused_by_its_name(name: str) -> None:
    case = ODDITIES[name]

    def tries(runner: Callable[[Any], Any], batch: Any, stage: int, **how: Any) -> None:
        torch.manual_seed(0)
        model, _ = case.make()
        loss_of = lambda model, batch: model(*batch)  # noqa: E731
        with pytest.raises((ValueError, RuntimeError), match=case.refused):
            step = runner(fzero.make_train_step(model, config(stage), loss_fn=loss_of, **how))
            step(step.init(), batch)

    batch = tuple(x[:4] for x in case.make()[1])
    for stage in case.refused_in:
        tries(lambda step: step, batch, stage)
    stacked = tuple(x.unflatten(0, (2, 2)) for x in batch)
    for stage in {0, 3} & {*case.refused_in}:
        tries(lambda step: simulate(step, 2, by="lockstep"), stacked, stage)
    if name in IN_A_GRAPH:
        tries(lambda step: step, batch, 3, compile="step", compile_backend="aot_eager")


class Keeps(Model):
    """Computes with what an earlier forward has kept of a parameter."""

    def __init__(self, take: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.take, self.kept = take, list[Tensor]()

    def use(self, x: Tensor) -> Tensor:
        before, self.kept = self.kept, [self.take(self.a.weight)]
        return super().use(x) + sum(kept.square().sum() for kept in before)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "take",
    [Tensor.t, lambda weight: weight[0], lambda weight: weight.view(-1)],
    ids=["t", "row", "view"],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_view_of_a_parameter_that_a_forward_keeps_is_refused_in_a_later_step(
    stage: int, take: Callable[[Tensor], Tensor]
) -> None:
    step = fzero.make_train_step(make(lambda: Keeps(take)), config(stage))
    state, _ = step(step.init(), batches()[0])
    with pytest.raises(ValueError, match=r"or kept for a later one, and one of them, or a view"):
        step(state, batches()[1])


class ClampsLater(Model):
    num_calls = 0

    def use(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > 1:
            self.a.weight.data.clamp_(-0.01, 0.01)
        return super().use(x)


def test_changes_that_come_later_are_found_where_that_is_asked_for() -> None:
    step = fzero.make_train_step(make(ClampsLater), config(3), check_params="always")
    state, _ = step(step.init(), batches()[0])
    with pytest.raises(ValueError, match=r"'a.weight': must not be changed in place"):
        step(state, batches()[1])
    with pytest.raises(ValueError, match=r"check_params: must be 'first' or 'always', got 'never'"):
        fzero.make_train_step(make(Model), config(0), check_params="never")  # type: ignore[arg-type]


class MergesToEvaluate(Model):
    """As loralib does: the weights are changed by `eval()`."""

    def train(self, mode: bool = True) -> MergesToEvaluate:
        if not mode:
            self.a.weight.data += 1
        super().train(mode)
        return self


def test_a_model_that_changes_its_parameters_to_evaluate_is_refused() -> None:
    model = make(MergesToEvaluate)
    step = fzero.make_train_step(model, config(0))
    with pytest.raises(ValueError, match=r"'a.weight': must not be changed in place"):
        step.evaluate(step.init(), batches()[0])
    assert model.training


class Rebuilds(Model):
    """Makes modules anew around those that have the parameters, which keep their names."""

    def set_up(self) -> None:
        self.pair = nn.Sequential(self.a, nn.Tanh())
        del self.a

    def use(self, x: Tensor) -> Tensor:
        self.pair = nn.Sequential(self.pair[0], nn.Tanh())
        return self.b(self.pair(x))


def test_a_forward_may_make_modules_around_those_that_have_parameters() -> None:
    expected = plain_weights(Rebuilds)
    torch.testing.assert_close(trained(fzero.make_train_step(make(Rebuilds), config(3))), expected)


class Caches(Model):
    """Makes tables once, of which a plain loop keeps nothing in the state dict either."""

    def set_up(self) -> None:
        self.register_buffer("table", None, persistent=False)

    def use(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = x.detach().clone()
            self.register_buffer("late", self.table + 1, persistent=False)
        return super().use(x * self.table + self.late)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_table_that_a_forward_registers_for_itself_stays_with_the_module(stage: int) -> None:
    expected, step = plain_weights(Caches), fzero.make_train_step(make(Caches), config(stage))
    torch.testing.assert_close(trained(step), expected)
    assert step.init() and "late" not in step.gather(step.init())


class Averages(Model):
    """Keeps an average in a buffer that its forward registers and then assigns, and
    another one that it empties.
    """

    def use(self, x: Tensor) -> Tensor:
        if not hasattr(self, "average"):
            self.register_buffer("average", torch.zeros(4), persistent=False)
            self.register_buffer("first", x.detach().mean(0), persistent=False)
        self.average = 0.5 * self.average + x.detach().mean(0)
        shift = 0.0 if self.first is None else self.first
        self.first = None
        return super().use(x + self.average + shift)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_forward_may_assign_a_buffer_that_it_has_registered_for_itself(stage: int) -> None:
    expected = plain_weights(Averages)
    torch.testing.assert_close(
        trained(fzero.make_train_step(make(Averages), config(stage))), expected
    )


# --- parametrizations for the time of a call ------------------------------------------------------


class Plus(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


class AdaptedForACall(Model):
    """As PEFT's `target_parameters`: a layer is parametrized while it is called, and
    plain before and after.
    """

    def set_up(self) -> None:
        self.down, self.up = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))

    def call(self, layer: nn.Linear, x: Tensor) -> Tensor:
        requires_grad = layer.weight.requires_grad
        parametrize.register_parametrization(layer, "weight", Plus(self.down @ self.up))
        layer.parametrizations["weight"].original.requires_grad_(requires_grad)
        try:
            return layer(x)  # type: ignore[no-any-return]
        finally:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)

    def use(self, x: Tensor) -> Tensor:
        return self.b(self.a(torch.tanh(self.call(self.a, self.a(x)))))


class FrozenAndAdaptedForACall(AdaptedForACall):
    def set_up(self) -> None:
        super().set_up()
        self.a.requires_grad_(False)


class AdaptedInACheckpoint(AdaptedForACall):
    def use(self, x: Tensor) -> Tensor:
        x = checkpoint(
            functools.partial(self.call, self.a), torch.tanh(self.b(x)), use_reentrant=False
        )
        return self.b(torch.tanh(x))


class AdaptedTwice(AdaptedForACall):
    def call(self, layer: nn.Linear, x: Tensor) -> Tensor:
        parametrize.register_parametrization(layer, "weight", Plus(self.b.weight.detach()))
        return super().call(layer, x)


class AdaptedWhileAnotherRuns(AdaptedForACall):
    """Between, its unit is released and gathered again."""

    def use(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.a, "weight", Plus(self.down @ self.up))
        with parametrize.cached():
            x = self.a(torch.tanh(self.b(torch.tanh(self.a(x)))))
        parametrize.remove_parametrizations(self.a, "weight", leave_parametrized=False)
        return self.b(x)


ADAPTED: list[type[Model]] = [
    AdaptedForACall,
    FrozenAndAdaptedForACall,
    AdaptedInACheckpoint,
    AdaptedTwice,
    AdaptedWhileAnotherRuns,
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", ADAPTED)
def test_a_parametrization_for_the_time_of_a_call_trains_as_in_a_plain_loop(
    model: type[Model],
) -> None:
    expected = plain_weights(model)
    for stage in range(4):
        step = fzero.make_train_step(make(model), config(stage), units=["a", "b"])
        torch.testing.assert_close(trained(simulate(step, 2, by="lockstep"), 2), expected)
    assert_trains_as_plainly(model, compile="step", compile_backend="aot_eager")


class LeftParametrized(AdaptedForACall):
    def use(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.a, "weight", Plus(self.down @ self.up))
        x = self.a(x)
        parametrize.remove_parametrizations(self.a, "weight", leave_parametrized=True)
        return self.b(x)


@pytest.mark.parametrize("how", [{}, {"compile": "step", "compile_backend": "aot_eager"}], ids=str)
def test_a_parametrization_that_changes_the_parameter_for_good_is_refused(
    how: dict[str, Any],
) -> None:
    for stage in (0, 3):
        step = fzero.make_train_step(make(LeftParametrized), config(stage), **how)
        with pytest.raises(ValueError, match="must not be changed in place by the forward"):
            step(step.init(), batches()[0])


# --- gradients that a forward asks for ------------------------------------------------------------


class Penalty(Model):
    """A penalty on the slope of the output, as in WGAN-GP, with units used twice."""

    def use(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = super().use(super().use(x))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope


def test_a_gradient_by_the_input_inside_a_forward_is_the_plain_loops() -> None:
    assert_trains_as_plainly(Penalty)


class InnerGrad(Model):
    def use(self, x: Tensor) -> Tensor:
        return self.b(
            x + torch.func.vmap(torch.func.grad(lambda row: self.a(row).square().sum()))(x)
        )


def test_a_gradient_by_torch_func_inside_a_forward_is_the_plain_loops() -> None:
    assert_trains_as_plainly(InnerGrad)


# --- changes that the step does not see -----------------------------------------------------------


def test_a_hook_that_comes_after_the_step_is_refused() -> None:
    model = make(Model)
    step = fzero.make_train_step(model, config(1))
    state, _ = step(step.init(), batches()[0])
    model.a.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(ValueError, match=r"'a.weight': has a gradient hook"):
        step(state, batches()[1])
    engine, *_ = fzero.initialize(
        model=make(Model), config=config(1, train_micro_batch_size_per_gpu=8)
    )
    engine.module.b.bias.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(ValueError, match=r"'b.bias': has a gradient hook"):
        engine(batches()[0])


def test_a_module_that_changes_between_init_and_the_first_step_is_refused() -> None:
    def change(
        what: Callable[[Model], object],
        num_ranks: int = 1,
        compile: Any = None,
        *,
        evaluates: bool = False,
    ) -> None:
        model = make(Model)
        step: Any = fzero.make_train_step(
            model, config(1), compile=compile, compile_backend="aot_eager"
        )
        step = step if num_ranks == 1 else simulate(step, num_ranks)
        state, batch = (
            step.init(),
            batches()[0] if num_ranks == 1 else batches()[0].view(num_ranks, -1, 4),
        )
        if evaluates:  # which does not end the check
            step.evaluate(state, batch)
        what(model)
        # the values are read again only where a change was counted
        if evaluates and what is not through_data:
            step.evaluate(state, batch)
        else:
            step(state, batch)

    def load(model: Model) -> None:
        model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()})

    def through_data(model: Model) -> None:
        model.a.weight.data.add_(1)

    def new_head(model: Model) -> None:
        model.b = nn.Linear(4, 3)

    def one_more(model: Model) -> None:
        model.c = nn.Linear(4, 3)

    for what, message in (
        (
            through_data,
            r"must keep its values from init to the first step, and 'a.weight' was changed since",
        ),
        (
            load,
            r"must keep its values from init to the first step, and 'a.weight' was changed since",
        ),
        (
            lambda model: model.half(),
            r"'a.weight' was torch.float32 of shape \(4, 4\) and is torch.float16",
        ),
        (
            new_head,
            (
                r"'b.weight' was torch.float32 of shape \(4, 4\) and is torch.float32 of "
                r"shape \(3, 4\)"
            ),
        ),
        (one_more, r"'c.weight' was not there and is torch.float32"),
    ):
        for how in (
            {},
            {"num_ranks": 2},
            {"compile": "step"},
            {"evaluates": True},
            {"evaluates": True, "num_ranks": 2},
        ):
            with pytest.raises(ValueError, match=message):
                change(what, **how)  # type: ignore[arg-type]
    change(lambda model: model.to("meta"))
    change(lambda model: model.load_state_dict(model.state_dict()))  # the same values


def test_a_module_may_change_between_the_step_and_init_and_after_the_first_step() -> None:
    model = make(Model)
    step = fzero.make_train_step(model, config(0))
    with torch.no_grad():
        model.a.weight += 1
    state = step.init()
    torch.testing.assert_close(step.gather(state)["a.weight"], model.a.weight.detach())
    state, _ = step(state, batches()[0])
    model.load_state_dict(step.gather(state))  # to look at it, say
    step(state, batches()[1])


class OfABuffer(Model):
    """Reads an attribute of a buffer, and makes a buffer with one in its forward."""

    def set_up(self) -> None:
        self.register_buffer("scale", torch.ones(4))
        self.scale.factor = lambda: 2.0  # type: ignore[union-attr, assignment]

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(4), persistent=False)
            self.cache.factor = 2.0  # type: ignore[union-attr, assignment]
        factor = getattr(self.scale, "factor", lambda: 1.0)() * self.cache.factor  # type: ignore[union-attr, operator]
        loss: Tensor = (self.a(x) * self.scale * factor).square().mean()
        return loss


@pytest.mark.parametrize(
    "options", [{}, {"compile": "step", "compile_backend": "aot_eager"}], ids=["eager", "graph"]
)
def test_attributes_of_buffers_are_the_modules_and_none_of_the_state(
    options: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    model, x = OfABuffer(), batches()[0]
    model(x)  # makes the cache
    expected = model(x).item()
    step = fzero.make_train_step(
        model, config(3, optimizer={"type": "SGD", "params": {"lr": 0.0}}), **options
    )
    state, with_attribute = step(step.init(), x)
    del model.scale.factor  # type: ignore[union-attr]
    state, without = step(state, x)
    # a power of two
    assert (with_attribute.loss.item(), without.loss.item()) == (expected, expected / 4)
    assert not any(vars(buffer) for buffer in state.buffers.values())
    copy.deepcopy(state)


def _by_a_thread(function: Callable[[], Tensor]) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0] if found else torch.zeros(1, 4)


class Ends(Model):
    """Its forward ends in one of several ways."""

    way = ""
    inside: list[bool] = []  # noqa: RUF012 - what was changed in the forward

    def forward(self, x: Tensor) -> Tensor:
        self.inside.append(
            type(self.a.weight) is not nn.Parameter or "is_leaf" in vars(nn.Parameter)
        )
        if self.way == "an error":
            raise ValueError("an error")
        if self.way == "an interrupt":
            raise KeyboardInterrupt
        if self.way == "a thread":
            _by_a_thread(lambda: self.a.weight.sum())
        return super().forward(x)


@pytest.mark.covering(1)
@pytest.mark.parametrize("compile", [None, "step"])
@pytest.mark.parametrize("way", ["", "a thread", "an error", "an interrupt"])
@pytest.mark.parametrize("stage", [0, 3])
def test_nothing_of_the_model_or_of_pytorch_stays_changed_behind_a_step(
    stage: int, way: str, compile: Any
) -> None:
    model = make(Ends)
    how: dict[str, Any] = (
        {} if compile is None else {"compile": compile, "compile_backend": "aot_eager"}
    )
    step = fzero.make_train_step(model, config(stage), units=["a", "b"], **how)
    state = step.init()
    Ends.way, Ends.inside = way, []
    try:
        with suppress(ValueError, KeyboardInterrupt, fzero.CompileError):
            step(state, batches()[0])
    finally:
        Ends.way = ""
    assert any(Ends.inside) or compile == "step"  # a capture takes back what it did to lists
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    assert (
        "is_leaf" not in vars(nn.Parameter)
        and parametrize._maybe_set.__module__ == parametrize.__name__
    )
