"""Oddities of research code, as `zoo.oddities`: parametrizations, gradients within the
forward, and what models keep.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import checkpoint as checkpoints

from zoo.case import WIDTH
from zoo.oddities import Fit, Odd, linear, odd, sequences


class Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.abs().add(0.1).log()


@odd()
class ParametrizedBias(Odd):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.inlet, "bias", Exp())
        parametrize.register_parametrization(self.blocks[0].norm, "weight", Exp())


class TransposeOf(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return self.other.weight.t() + 0 * x


@odd()
class TiedByParametrization(Odd):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.outlet, "weight", TransposeOf(self.inlet))


@odd()
class SpectralToggled(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.outlet = parametrizations.spectral_norm(self.outlet)

    def odd(self, x: Tensor) -> Tensor:
        self.outlet.eval()
        x = self.outlet(x)
        self.outlet.train()
        return x


class Yields(nn.Module):
    """Its forward is a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for each in self.maps:
            x = each(x)
            yield x


@odd()
class GeneratorsInterleaved(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Yields(), Yields()

    def odd(self, x: Tensor) -> Tensor:
        return sum(a * b for a, b in zip(self.one(x), self.other(x), strict=True))


@odd()
class GrowingCache(Odd):
    """A table that a longer input makes anew, as for rotary embeddings."""

    calls = 0

    def odd(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.register_buffer(
            "table", torch.arange(self.calls * WIDTH).float() / 50, persistent=False
        )
        return x + self.table[-WIDTH:]


@odd()
class SelfConditioned(Odd):
    """A first pass without gradients, as in diffusion models."""

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            first = super().body(x)
        return super().body(x + first.detach())


class Tagged(Tensor):
    def twice(self) -> Tensor:
        return 2 * self.as_subclass(Tensor)


@odd()
class TaggedBuffer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH).as_subclass(Tagged))

    def odd(self, x: Tensor) -> Tensor:
        return x * (self.mean.twice() if type(self.mean) is Tagged else 1000)


class Doubled(nn.Parameter):
    """A parameter with a method of its own."""

    def twice(self) -> Tensor:
        return 2 * self


@odd()
class ParameterWithAMethod(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.own = Doubled(torch.ones(WIDTH))

    def odd(self, x: Tensor) -> Tensor:
        return x * self.own.twice() * (2 if isinstance(self.own, Doubled) else 1)


class Doubling(nn.Parameter):
    """A parameter that changes what a function does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return 2 * out if func is F.linear else out


@odd()
class FrozenParameterWithAFunction(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.own = Doubling(torch.randn(WIDTH, WIDTH), False)

    def odd(self, x: Tensor) -> Tensor:
        return F.linear(x, self.own)


class Adjoint(torch.autograd.Function):
    """As in torchdiffeq: the backward runs the module again, and differentiates by the
    parameters of the forward.
    """

    @staticmethod
    def forward(ctx: Any, func: Any, y: Tensor, *params: Tensor) -> Tensor:
        ctx.func = func
        with torch.no_grad():
            out = y + 0.1 * func(y)
        ctx.save_for_backward(y, *params)
        return out

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        y, *params = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            out = y + 0.1 * ctx.func(y)
            grads = torch.autograd.grad(out, [y, *params], *given, allow_unused=True)
        return None, *grads


@odd()
class NeuralOde(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return Adjoint.apply(self.blocks[0], x, *self.blocks[0].parameters())


@odd()
class NeuralOdeOfCopies(Odd):
    def odd(self, x: Tensor) -> Tensor:
        copies = {name: 1 * param for name, param in self.blocks[0].named_parameters()}
        return Adjoint.apply(
            lambda y: functional_call(self.blocks[0], copies, (y,)), x, *copies.values()
        )


@odd()
class Equilibrium(Odd):
    """A deep equilibrium model: a hook solves for the gradient, and runs the module
    again for it.
    """

    def map(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.2 * torch.tanh(self.blocks[0](z)) + x

    def odd(self, x: Tensor) -> Tensor:
        z = x
        with torch.no_grad():
            for _ in range(3):
                z = self.map(z, x)
        z = self.map(z, x)
        fixed, given = z.detach(), x.detach()

        def solve(grad: Tensor) -> Tensor:
            with torch.enable_grad():
                again = self.map(fixed.requires_grad_(), given)
            found = grad
            for _ in range(3):
                found = torch.autograd.grad(again, fixed, found, retain_graph=True)[0] + grad
            return found

        z.register_hook(solve)
        return z


class Reversible(torch.autograd.Function):
    """As in Reformer: calls backward in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, func: Any) -> Tensor:
        ctx.func = func
        with torch.no_grad():
            one, other = x.chunk(2, -1)
            out = torch.cat([one + func(other), other], -1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None]:
        other = ctx.saved_tensors[0].chunk(2, -1)[1].detach().requires_grad_()
        grad_one, grad_other = given[0].chunk(2, -1)
        with torch.enable_grad():
            torch.autograd.backward(ctx.func(other), grad_one)
        return torch.cat([grad_one, grad_other + other.grad], -1), None


@odd()
class ReversibleBlocks(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Sequential(nn.Linear(WIDTH // 2, WIDTH // 2), nn.Tanh())

    def odd(self, x: Tensor) -> Tensor:
        return Reversible.apply(x, self.narrow)


@odd()
class NestedCheckpoints(Odd):
    def body(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return F.dropout(self.blocks[1](x), 0.2)

        def outer(x: Tensor) -> Tensor:
            return checkpoints.checkpoint(inner, self.blocks[0](x), use_reentrant=False)

        return self.outlet(checkpoints.checkpoint(outer, self.inlet(x), use_reentrant=False))


@odd()
class AutocastToggled(Odd):
    def odd(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.blocks[0](x)
            with torch.autocast("cpu", enabled=False):
                x = self.blocks[1].norm(x.float())
            x = self.inlet(x)
        return x.float()


@odd()
class HooksWithKwargs(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.inlet.register_forward_hook(
            lambda m, a, k, out: out * 2, with_kwargs=True, always_call=True
        )
        self.outlet.register_forward_pre_hook(
            lambda m, a, k: ((a[0] + m.weight.mean(),), k), with_kwargs=True, prepend=True
        )


class Delegates(nn.Module):
    """Answers for the module that it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * self.gain


@odd()
class GetAttr(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.wrapped = Delegates(Delegates(linear()))

    def odd(self, x: Tensor) -> Tensor:
        return self.wrapped(x)


@odd()
class TeacherInBuffers(Odd):
    def __init__(self) -> None:
        super().__init__()
        for name, p in self.inlet.named_parameters():
            self.register_buffer("mean_" + name, p.detach().clone())

    def odd(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for name, p in self.inlet.named_parameters():
                getattr(self, "mean_" + name).lerp_(p, 0.5)
            target = functional_call(
                self.inlet, {n: getattr(self, "mean_" + n) for n in ("weight", "bias")}, (x,)
            )
        return x + target


@odd()
class BufferData(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def odd(self, x: Tensor) -> Tensor:
        self.mean.data = 0.9 * self.mean.data + 0.1 * x.detach().mean(0)
        return x - self.mean


@odd()
class PerSampleGrads(Odd):
    def odd(self, x: Tensor) -> Tensor:
        params = dict(self.inlet.named_parameters())

        def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
            return functional_call(self.inlet, params, (row,)).square().sum()

        grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
        return x + 1e-2 * grads["weight"].var(0).sum()


@odd()
class StackedState(Odd):
    def odd(self, x: Tensor) -> Tensor:
        params, _ = torch.func.stack_module_state(list(self.blocks))
        out = torch.func.vmap(lambda p: functional_call(self.blocks[0], p, (x,)))(params)
        return x + out.mean(0)


@odd(refused="must be listed by the model's parameters")
class ParametersOverridden(Odd):
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter([*self.inlet.parameters(), *self.outlet.parameters()])


@odd()
class MovesItself(Odd):
    def odd(self, x: Tensor) -> Tensor:
        self.blocks.to(x.device)
        return self.outlet.to(x.device, x.dtype).float()(x)


@odd()
class CompiledFunction(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.f = torch.compile(
            lambda x: F.linear(x, self.inlet.weight, self.outlet.bias), backend="eager"
        )

    def odd(self, x: Tensor) -> Tensor:
        return self.f(x)


@odd()
class KeepsADetachedWeight(Odd):
    def odd(self, x: Tensor) -> Tensor:
        if not hasattr(self, "old"):
            self.old = self.inlet.weight.detach()
        return F.linear(x, self.old)


@odd()
class KeepsAWeight(Odd):
    def odd(self, x: Tensor) -> Tensor:
        if not hasattr(self, "old"):
            self.old = [self.inlet.weight]
        return F.linear(x, self.old[0])


@odd()
class OldPolicy(Odd):
    """Keeps a copy of itself from its first forward."""

    def odd(self, x: Tensor) -> Tensor:
        if not hasattr(self, "old"):
            self.old = [copy.deepcopy(self.blocks)]
        with torch.no_grad():
            y = self.old[0][1](self.old[0][0](x))
        return x + y


@odd()
class OldStateDict(Odd):
    """Aliases: state_dict shares memory with the parameters."""

    def odd(self, x: Tensor) -> Tensor:
        if not hasattr(self, "old"):
            self.old = self.state_dict()
        return x + F.linear(x, self.old["inlet.weight"])


@odd()
class FrozenExpanded(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.full((1,), 2.0).expand(WIDTH), requires_grad=False)
        self.conj = nn.Parameter(
            torch.randn(WIDTH, dtype=torch.complex64).conj(), requires_grad=False
        )

    def odd(self, x: Tensor) -> Tensor:
        return x * self.flat * self.conj.imag


@odd()
class NegativeBit(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.neg = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64).conj().imag)
        self.imag = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64).imag)
        self.register_buffer("b", torch.randn(WIDTH, dtype=torch.complex64).conj().imag)

    def odd(self, x: Tensor) -> Tensor:
        self.b += 1
        return x * self.neg * self.imag + self.b


@odd(refused="buffer 'q': must be dense.* got Tensor of torch.qint8")
class QuantizedTensor(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "q", torch.quantize_per_tensor(torch.randn(WIDTH), 0.1, 0, torch.qint8)
        )

    def odd(self, x: Tensor) -> Tensor:
        return x + self.q.dequantize()


@odd()
class Jagged(Odd):
    def odd(self, x: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, len(x)]))
        return self.inlet(nested).values()


@odd(refused="parameter 'w': must be dense.* got TwoTensor")
class FrozenWrapperSubclass(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(
            TwoTensor(torch.ones(WIDTH), 2 * torch.ones(WIDTH)), requires_grad=False
        )

    def odd(self, x: Tensor) -> Tensor:
        return x * self.w.b


@odd(refused="'blocks.1.norm.weight': must keep its place in the module, and .* removed it")
class DropsABlock(Odd):
    def odd(self, x: Tensor) -> Tensor:
        if len(self.blocks) > 1:
            del self.blocks[1]
        return x


@odd()
class CallsItself(Odd):
    depth = 0

    def odd(self, x: Tensor) -> Tensor:
        if self.depth == 2:
            return x
        self.depth += 1
        x = x + self(x / 2, x)
        self.depth -= 1
        return x


@odd()
class Hutchinson(Odd):
    """Score matching, with a third derivative."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = self.body(x).square().sum()
        (score,) = torch.autograd.grad(energy, x, create_graph=True)
        v = torch.randn_like(x)
        (hv,) = torch.autograd.grad((score * v).sum(), x, create_graph=True)
        return 1e-2 * ((hv * v).sum() + score.square().sum() / 2) / len(x)


@odd()
class Forces(Odd):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (force,) = torch.autograd.grad(self.body(x).sum(), x, create_graph=True)
        return F.mse_loss(-force, y)


@odd()
class Langevin(Odd):
    def odd(self, x: Tensor) -> Tensor:
        z = x.detach()
        for _ in range(3):
            z = z.requires_grad_()
            (g,) = torch.autograd.grad(self.blocks[0](z).square().sum(), z)
            z = (z - 0.01 * g + 0.01 * torch.randn_like(z)).detach()
        return self.blocks[0](x) - self.blocks[0](z)


@odd(refused="must get no gradient hook in the forward")
class MultiGradHook(Odd):
    def odd(self, x: Tensor) -> Tensor:
        torch.autograd.graph.register_multi_grad_hook(tuple(self.parameters()), lambda grads: None)
        return x


@odd(sequences)
class Truncated(Odd):
    """Keeps its hidden state from one step to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.hidden = None

    def odd(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        out, hidden = self.rnn(x, self.hidden)
        self.hidden = hidden.detach()
        return out


@odd()
class ShallowCopy(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.twin = copy.copy(self.inlet)

    def odd(self, x: Tensor) -> Tensor:
        return self.twin(x)


@odd(sequences)
class WeightDrop(Odd):
    """As in AWD-LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        raw = self.rnn.weight_hh_l0
        del self.rnn._parameters["weight_hh_l0"]
        self.rnn.register_parameter("weight_hh_l0_raw", nn.Parameter(raw.data))
        self.rnn.weight_hh_l0 = raw.data

    def odd(self, x: Tensor) -> Tensor:
        self.rnn.weight_hh_l0 = F.dropout(self.rnn.weight_hh_l0_raw, 0.3, self.training)
        return self.rnn(x)[0]


@odd(sequences)
def weight_normed_lstm() -> nn.Module:
    return Fit(
        parametrizations.weight_norm(nn.LSTM(WIDTH, WIDTH, batch_first=True), "weight_hh_l0")
    )


@odd()
class LossOfOneElement(Odd):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y)[None]


@odd()
class ReturnsAWeight(Odd):
    """Its loss is a function of a weight, which it returns."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.inlet.weight, super().forward(x, y)


@odd()
class SpectralConvolution(Odd):
    """A complex weight as pairs of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))
        self.frozen = nn.Parameter(
            torch.randn(WIDTH // 2 + 1, dtype=torch.complex64), requires_grad=False
        )

    def odd(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(
            torch.fft.rfft(x) * torch.view_as_complex(self.pairs) * self.frozen, n=WIDTH
        )


@odd()
class TrainedInBfloat16(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = linear().bfloat16()

    def odd(self, x: Tensor) -> Tensor:
        return self.narrow(x.bfloat16()).float()


@odd(refused="'inlet.weight': must get no attribute in the forward.* got 'seen'")
class MarksInTheForward(Odd):
    def odd(self, x: Tensor) -> Tensor:
        n = self.inlet.weight.seen = getattr(self.inlet.weight, "seen", 0) + 1
        return x * n


@odd()
class MarksABufferInTheForward(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def odd(self, x: Tensor) -> Tensor:
        n = self.mean.seen = getattr(self.mean, "seen", 0) + 1
        return x * n
