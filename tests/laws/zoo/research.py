"""More oddities in plain PyTorch."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import io
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils import checkpoint as checkpoints

from zoo.case import LENGTH, ROWS, WIDTH
from zoo.oddities import Block, Fit, Odd, linear, odd, sequences, images, vectors


class Exp(nn.Module):
    def forward(self, x): return x.exp()
    def right_inverse(self, x): return x.abs().add(0.1).log()

@odd()
class ParametrizedBias(Odd):
    def __init__(self):
        super().__init__()
        parametrize.register_parametrization(self.inlet, "bias", Exp())
        parametrize.register_parametrization(self.blocks[0].norm, "weight", Exp())

class LowRank(nn.Module):
    def forward(self, a, b): return a @ b
    def right_inverse(self, w):
        return w[:, :3].clone(), w[:3].clone()

@odd()
class ParametrizedByTwo(Odd):
    def __init__(self):
        super().__init__()
        parametrize.register_parametrization(self.outlet, "weight", LowRank())

class TransposeOf(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.other = other
    def forward(self, x): return self.other.weight.t() + 0 * x

@odd()
class TiedByParametrization(Odd):
    def __init__(self):
        super().__init__()
        parametrize.register_parametrization(self.outlet, "weight", TransposeOf(self.inlet))

@odd()
class SpectralToggled(Odd):
    def __init__(self):
        super().__init__()
        self.outlet = parametrizations.spectral_norm(self.outlet)
    def odd(self, x):
        self.outlet.eval()
        x = self.outlet(x)
        self.outlet.train()
        return x

class StandardConv(nn.Conv2d):
    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)

@odd(images)
def weight_standard():
    return Fit(StandardConv(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), StandardConv(8, 4, 3, padding=1))

class Yields(nn.Module):
    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(linear() for _ in range(3))
    def forward(self, x):
        for m in self.maps:
            x = m(x)
            yield x

@odd()
class GeneratorForward(Odd):
    def __init__(self):
        super().__init__()
        self.gen = Yields()
    def odd(self, x):
        return sum(self.gen(x))

@odd()
class GeneratorsInterleaved(Odd):
    def __init__(self):
        super().__init__()
        self.gen, self.gen2 = Yields(), Yields()
    def odd(self, x):
        return sum(a * b for a, b in zip(self.gen(x), self.gen2(x)))

@dataclasses.dataclass
class Out:
    hidden: Tensor
    extra: dict

class GivesOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = linear()
    def forward(self, x): return Out(self.map(x), {"w": self.map.weight, "b": [self.map.bias]})

@odd()
class DataclassOut(Odd):
    def __init__(self):
        super().__init__()
        self.give = GivesOut()
    def odd(self, x):
        out = self.give(x)
        x = self.blocks[0](out.hidden)
        return x @ out.extra["w"] + out.extra["b"][0]

@odd()
class GrowingCache(Odd):
    calls = 0
    def odd(self, x):
        self.calls += 1
        self.register_buffer("table", torch.arange(self.calls * WIDTH).float() / 50, persistent=False)
        return x + self.table[-WIDTH:]

@odd()
class StopGradient(Odd):
    def odd(self, x):
        w = {k: v.detach() for k, v in self.inlet.named_parameters()}
        target = functional_call(self.inlet, w, (x,))
        return F.mse_loss(self.blocks[0](x), target.detach()) + target

@odd()
class SelfConditioned(Odd):
    def body(self, x):
        with torch.no_grad():
            first = super().body(x)
        return super().body(x + first.detach())

@odd()
class BinaryWeights(Odd):
    def odd(self, x):
        w = self.inlet.weight
        return F.linear(x, w + (w.sign() - w).detach())

class Tagged(Tensor):
    def twice(self): return 2 * self.as_subclass(Tensor)

@odd()
class TaggedBuffer(Odd):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH).as_subclass(Tagged))
    def odd(self, x):
        return x * (self.mean.twice() if type(self.mean) is Tagged else 1000)

class Weight2(nn.Parameter):
    def twice(self): return 2 * self

@odd()
class ParameterWithAMethod(Odd):
    def __init__(self):
        super().__init__()
        self.own = Weight2(torch.ones(WIDTH))
    def odd(self, x):
        return x * self.own.twice()

@odd()
class ParameterWithAFlag(Odd):
    def __init__(self):
        super().__init__()
        self.own = Weight2(torch.ones(WIDTH))
    def odd(self, x):
        return x * self.own * (2 if isinstance(self.own, Weight2) else 1)

class Doubling(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return 2 * out if func is F.linear else out

@odd()
class ParameterWithAFunction(Odd):
    def __init__(self):
        super().__init__()
        self.own = Doubling(torch.randn(WIDTH, WIDTH))
    def odd(self, x):
        return F.linear(x, self.own)

@odd()
class FrozenParameterWithAFunction(Odd):
    def __init__(self):
        super().__init__()
        self.own = Doubling(torch.randn(WIDTH, WIDTH), False)
    def odd(self, x):
        return F.linear(x, self.own)

@odd()
class NnBuffer(Odd):
    def __init__(self):
        super().__init__()
        self.mean = nn.Buffer(torch.ones(WIDTH))
    def odd(self, x):
        self.mean = nn.Buffer(self.mean + x.detach().mean(0))
        return x * self.mean * (2 if isinstance(self.mean, nn.Buffer) else 1)

@odd()
class AsksForBuffer(Odd):
    def __init__(self):
        super().__init__()
        self.mean = nn.Buffer(torch.ones(WIDTH))
    def odd(self, x):
        self.mean += 1
        return x * self.mean * (2 if isinstance(self.mean, nn.Buffer) else 1)

@odd()
class ChangingDict(Odd):
    def __init__(self):
        super().__init__()
        self.dict = nn.ParameterDict({"a": nn.Parameter(torch.ones(WIDTH)), "b": nn.Parameter(torch.ones(WIDTH))})
    def odd(self, x):
        a = self.dict.pop("a")
        self.dict["c"] = a
        return x * self.dict["c"] * self.dict["b"]

@odd()
class ChangingDictBack(ChangingDict):
    def odd(self, x):
        a = self.dict.pop("a")
        x = x * a * self.dict["b"]
        self.dict["a"] = a
        return x * self.dict["a"]

@odd()
class Equilibrium(Odd):
    def odd(self, x):
        f = self.blocks[0]
        g = lambda z: 0.2 * torch.tanh(f(z)) + x
        with torch.no_grad():
            z = x
            for _ in range(5):
                z = g(z)
        z = g(z)
        z0 = z.clone().detach().requires_grad_()
        f0 = 0.2 * torch.tanh(f(z0)) + x.detach()
        def backward_hook(grad):
            y = grad
            for _ in range(4):
                y = torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + grad
            return y
        z.register_hook(backward_hook)
        return z

class Adjoint(torch.autograd.Function):
    """As in torchdiffeq."""
    @staticmethod
    def forward(ctx, func, y, *params):
        ctx.func = func
        with torch.no_grad():
            out = y + 0.1 * func(y)
        ctx.save_for_backward(y, *params)
        return out
    @staticmethod
    def backward(ctx, grad):
        y, *params = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            out = y + 0.1 * ctx.func(y)
            grads = torch.autograd.grad(out, [y, *params], grad, allow_unused=True)
        return None, *grads

@odd()
class NeuralOde(Odd):
    def odd(self, x):
        f = self.blocks[0]
        x = Adjoint.apply(f, x, *f.parameters())
        return x

@odd()
class NeuralOdeTwice(Odd):
    def odd(self, x):
        f = self.blocks[0]
        params = tuple(f.parameters())
        x = Adjoint.apply(f, x, *params)
        return Adjoint.apply(f, x, *params)

@odd()
class NeuralOdeOfCopies(Odd):
    def odd(self, x):
        f = self.blocks[0]
        params = {n: 1 * p for n, p in f.named_parameters()}
        return Adjoint.apply(lambda y: functional_call(f, params, (y,)), x, *params.values())

@odd()
class NeuralOdeStrict(Odd):
    def odd(self, x):
        f = self.blocks[0]
        return StrictAdjoint.apply(f, x, *f.parameters())

class StrictAdjoint(Adjoint):
    @staticmethod
    def backward(ctx, grad):
        y, *params = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            out = y + 0.1 * ctx.func(y)
            grads = torch.autograd.grad(out, [y, *params], grad)
        return None, *grads

@odd()
class ImplicitInTheBackward(Odd):
    def odd(self, x):
        f = self.blocks[0]
        with torch.no_grad():
            z = x
            for _ in range(3): z = 0.2 * torch.tanh(f(z)) + x
        z = 0.2 * torch.tanh(f(z)) + x
        z1 = z.detach()
        def hook(grad):
            with torch.enable_grad():
                z0 = z1.requires_grad_()
                f0 = 0.2 * torch.tanh(f(z0))
            y = grad
            for _ in range(3): y = torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + grad
            return y
        z.register_hook(hook)
        return z

@odd()
class CheckpointOfUnused(Odd):
    def __init__(self):
        super().__init__()
        self.blocks[0].spare = nn.Parameter(torch.ones(WIDTH))
    def odd(self, x):
        def f(x):
            return self.blocks[0](x * self.blocks[0].spare.detach())
        return checkpoints.checkpoint(f, x, use_reentrant=False)

class Reversible(torch.autograd.Function):
    """As in Reformer: calls backward within backward."""
    @staticmethod
    def forward(ctx, x, f):
        ctx.f = f
        with torch.no_grad():
            a, b = x.chunk(2, -1)
            out = torch.cat([a + f(b), b], -1)
        ctx.save_for_backward(out)
        return out
    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        a, b = out.chunk(2, -1)
        ga, gb = grad.chunk(2, -1)
        with torch.enable_grad():
            b = b.detach().requires_grad_()
            y = ctx.f(b)
            torch.autograd.backward(y, ga)
        return torch.cat([ga, gb + b.grad], -1), None

@odd()
class ReversibleBlocks(Odd):
    def __init__(self):
        super().__init__()
        self.narrow = nn.Sequential(nn.Linear(WIDTH // 2, WIDTH // 2), nn.Tanh())
    def odd(self, x):
        return Reversible.apply(x, self.narrow)

@odd()
class NestedCheckpoints(Odd):
    def body(self, x):
        def inner(x): return F.dropout(self.blocks[1](x), 0.2)
        def outer(x): return checkpoints.checkpoint(inner, self.blocks[0](x), use_reentrant=False)
        return self.outlet(checkpoints.checkpoint(outer, self.inlet(x), use_reentrant=False))

@odd()
class NestedReentrant(Odd):
    def body(self, x):
        def inner(x): return F.dropout(self.blocks[1](x), 0.2)
        def outer(x): return checkpoints.checkpoint(inner, self.blocks[0](x), use_reentrant=True)
        return self.outlet(checkpoints.checkpoint(outer, self.inlet(x), use_reentrant=True))

@odd()
class LateStop(Odd):
    def odd(self, x):
        with checkpoints.set_checkpoint_early_stop(False):
            x = checkpoints.checkpoint(self.blocks[0], x, use_reentrant=False)
        return checkpoints.checkpoint(lambda x: self.blocks[1](x), x, use_reentrant=False, preserve_rng_state=False)

@odd()
class AutocastToggled(Odd):
    def odd(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.blocks[0](x)
            with torch.autocast("cpu", enabled=False):
                x = self.blocks[1].norm(x.float())
            x = self.inlet(x)
        return x.float()

@odd()
class HooksWithKwargs(Odd):
    def __init__(self):
        super().__init__()
        self.inlet.register_forward_hook(lambda m, a, k, out: (out * 2), with_kwargs=True, always_call=True)
        self.outlet.register_forward_pre_hook(lambda m, a, k: ((a[0] + m.weight.mean(),), k), with_kwargs=True, prepend=True)

@odd()
class HooksInTheForward(Odd):
    def odd(self, x):
        seen = []
        handle = self.blocks[0].up.register_forward_hook(lambda m, a, out: seen.append(out * m.weight.mean()))
        x = self.blocks[0](x)
        handle.remove()
        return x + seen[0].mean()

class Delegates(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.inner = inner
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)
    def forward(self, x): return F.linear(x, self.weight, self.bias) * self.gain

@odd()
class GetAttr(Odd):
    def __init__(self):
        super().__init__()
        self.wrapped = Delegates(Delegates(linear()))
    def odd(self, x): return self.wrapped(x)

@odd()
class DynamicNames(Odd):
    def __init__(self):
        super().__init__()
        for i in range(3):
            self.register_module(f"map_{i}", linear())
    def odd(self, x):
        for i in (2, 0, 1):
            x = getattr(self, f"map_{i}")(x)
        return x

@odd()
class TwoThreads(Odd):
    def odd(self, x):
        outs = [None, None]
        grad = torch.is_grad_enabled()
        def run(i):
            with torch.set_grad_enabled(grad):
                outs[i] = self.blocks[i](x)
        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        return outs[0] + outs[1]

@odd()
class NewActivation(Odd):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()
    def odd(self, x):
        self.act = nn.Tanh()
        return self.act(x)

@odd()
class TeacherInBuffers(Odd):
    def __init__(self):
        super().__init__()
        for name, p in self.inlet.named_parameters():
            self.register_buffer("mean_" + name, p.detach().clone())
    def odd(self, x):
        with torch.no_grad():
            for name, p in self.inlet.named_parameters():
                getattr(self, "mean_" + name).lerp_(p, 0.5)
            target = functional_call(self.inlet, {n: getattr(self, "mean_" + n) for n in ("weight", "bias")}, (x,))
        return x + target

@odd()
class Queue(Odd):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.randn(WIDTH, 6))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))
    def odd(self, x):
        logits = x @ self.queue.clone().detach()
        at = int(self.at)
        self.queue[:, at:at + 2] = x.detach()[:2].T
        self.at[0] = (at + 2) % 6
        return x + logits.logsumexp(-1, keepdim=True)

@odd()
class BufferData(Odd):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
    def odd(self, x):
        self.mean.data = 0.9 * self.mean.data + 0.1 * x.detach().mean(0)
        return x - self.mean

@odd()
class BufferByDict(Odd):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
    def odd(self, x):
        self._buffers["mean"] = self._buffers["mean"] + x.detach().mean(0)
        self.__dict__["_buffers"]["mean"].mul_(0.5)
        return x - self.mean

@odd()
class VmapRandom(Odd):
    def odd(self, x):
        return torch.func.vmap(lambda row: F.dropout(self.blocks[0](row), 0.5), randomness="different")(x)

@odd(refused="torch.func.grad", refused_in=(3,))
class Jacobian(Odd):
    def odd(self, x):
        jac = torch.func.vmap(torch.func.jacrev(self.inlet))(x)
        return x + jac.square().sum((1, 2))[:, None]

@odd()
class JacobianForward(Odd):
    def odd(self, x):
        jac = torch.func.vmap(torch.func.jacfwd(self.inlet))(x)
        return x + jac.square().sum((1, 2))[:, None]

@odd(refused="torch.func.grad", refused_in=(3,))
class PerSampleGrads(Odd):
    def odd(self, x):
        params = dict(self.inlet.named_parameters())
        def loss(params, row): return functional_call(self.inlet, params, (row,)).square().sum()
        grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
        return x + 1e-2 * grads["weight"].var(0).sum()

@odd()
class StackedState(Odd):
    def odd(self, x):
        params, buffers = torch.func.stack_module_state(list(self.blocks))
        out = torch.func.vmap(lambda p: functional_call(self.blocks[0], p, (x,)))(params)
        return x + out.mean(0)

@odd()
class Invertible(Odd):
    def odd(self, x):
        w = self.inlet.weight + torch.eye(WIDTH)
        return x @ w.inverse() + torch.linalg.slogdet(w)[1] + torch.linalg.matrix_norm(w, "nuc")

@odd()
class WeakReferences(Odd):
    def __init__(self):
        super().__init__()
        self.r = weakref.ref(self.inlet.weight)
        self.m = weakref.ref(self.outlet)
    def odd(self, x): return F.linear(self.m()(x), self.r())

@odd()
class ParametersOverridden(Odd):
    def parameters(self, recurse=True):
        return iter([*self.inlet.parameters(), *self.outlet.parameters()])

@odd()
class MovesItself(Odd):
    def odd(self, x):
        self.blocks.to(x.device)
        return self.outlet.to(x.device, x.dtype).float()(x)

@odd()
class SeedsItself(Odd):
    def odd(self, x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            x = F.dropout(x, 0.3)
        y = F.dropout(x, 0.3)
        torch.manual_seed(5)
        return F.dropout(y, 0.2)

@odd()
class ZeroesGrads(Odd):
    def odd(self, x):
        self.zero_grad()
        return x if self.inlet.weight.grad is None else 2 * x

@odd()
class ParentInAList(Odd):
    def __init__(self):
        super().__init__()
        self.child = nn.Module()
        self.child.parent = [self]
        self.child.forward = lambda x: self.child.parent[0].inlet(x)
    def odd(self, x): return self.child(x)

@odd()
class CompiledFunction(Odd):
    def __init__(self):
        super().__init__()
        self.f = torch.compile(lambda x: F.linear(x, self.inlet.weight, self.outlet.bias), backend="eager")
    def odd(self, x): return self.f(x)

@odd()
class KeepsADetachedWeight(Odd):
    def odd(self, x):
        if not hasattr(self, "old"):
            self.old = self.inlet.weight.detach()
        return F.linear(x, self.old)

@odd()
class KeepsData(Odd):
    def odd(self, x):
        if not hasattr(self, "old"):
            self.old = self.inlet.weight.data
        return F.linear(x, self.old)

@odd()
class KeepsAWeight(Odd):
    def odd(self, x):
        if not hasattr(self, "old"):
            self.old = [self.inlet.weight]
        return F.linear(x, self.old[0])

@odd()
class KeepsAllWeights(Odd):
    def odd(self, x):
        if not hasattr(self, "old"):
            self.old = dict(self.named_parameters())
        return x + 1e-3 * sum(p.square().sum() for p in self.old.values())

@odd()
class OldPolicy(Odd):
    def odd(self, x):
        if not hasattr(self, "old"):
            self.old = [copy.deepcopy(self.blocks)]
        with torch.no_grad():
            y = self.old[0][1](self.old[0][0](x))
        return x + y

@odd()
class OldWeights(Odd):
    def odd(self, x):
        if not hasattr(self, "old"):
            self.old = {k: v.clone() for k, v in self.state_dict().items()}
        return x + F.linear(x, self.old["inlet.weight"] - self.inlet.weight)

@odd()
class OldStateDict(Odd):
    """Aliases: state_dict shares memory with the parameters."""
    def odd(self, x):
        if not hasattr(self, "old"):
            self.old = self.state_dict()
        return x + F.linear(x, self.old["inlet.weight"])

@odd()
class SavesItself(Odd):
    def odd(self, x):
        file = io.BytesIO()
        torch.save(self.state_dict(), file)
        file.seek(0)
        return F.linear(x, torch.load(file)["inlet.weight"])

@odd()
class MonkeyPatched(Odd):
    def __init__(self):
        super().__init__()
        self.blocks[0].forward = types.MethodType(lambda self, x: x + self.down(self.up(x)), self.blocks[0])

@odd()
class FrozenExpanded(Odd):
    def __init__(self):
        super().__init__()
        self.flat = nn.Parameter(torch.full((1,), 2.0).expand(WIDTH), requires_grad=False)
        self.conj = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64).conj(), requires_grad=False)
    def odd(self, x): return x * self.flat * self.conj.imag

@odd()
class NegativeBit(Odd):
    def __init__(self):
        super().__init__()
        self.neg = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64).conj().imag)
        self.imag = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64).imag)
        self.register_buffer("b", torch.randn(WIDTH, dtype=torch.complex64).conj().imag)
    def odd(self, x):
        self.b += 1
        return x * self.neg * self.imag + self.b

@odd()
class Float8(Odd):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
    def odd(self, x): return x @ self.table.float()

@odd()
class QuantizedTensor(Odd):
    def __init__(self):
        super().__init__()
        self.register_buffer("q", torch.quantize_per_tensor(torch.randn(WIDTH), 0.1, 0, torch.qint8))
    def odd(self, x): return x + self.q.dequantize()

@odd()
class Jagged(Odd):
    def odd(self, x):
        nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, len(x)]))
        return self.inlet(nested).values()

@odd()
class NamedTensorWeight(Odd):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH).rename("c"))
    def odd(self, x): return x * self.w.rename(None)

@odd()
class WrapperSubclass(Odd):
    def __init__(self):
        super().__init__()
        from torch.testing._internal.two_tensor import TwoTensor
        self.w = nn.Parameter(TwoTensor(torch.ones(WIDTH), torch.ones(WIDTH)))
    def odd(self, x): return x * self.w.a

@odd()
class FrozenWrapperSubclass(Odd):
    def __init__(self):
        super().__init__()
        from torch.testing._internal.two_tensor import TwoTensor
        self.w = nn.Parameter(TwoTensor(torch.ones(WIDTH), 2*torch.ones(WIDTH)), requires_grad=False)
    def odd(self, x): return x * self.w.b

@odd()
class DropsABlock(Odd):
    def odd(self, x):
        if len(self.blocks) > 1:
            del self.blocks[1]
        return x

@odd()
class CallsItself(Odd):
    depth = 0
    def odd(self, x):
        if self.depth == 2: return x
        self.depth += 1
        x = x + self(x / 2, x)
        self.depth -= 1
        return x

@odd()
class Forked(Odd):
    def odd(self, x):
        futures = [torch.jit.fork(b, x) for b in self.blocks]
        return sum(torch.jit.wait(f) for f in futures)

@odd()
class Coroutine(Odd):
    def odd(self, x):
        async def run(m):
            y = m(x)
            await asyncio.sleep(0)
            return m(y)
        async def both(): return await asyncio.gather(*map(run, self.blocks))
        return sum(asyncio.run(both()))

@odd()
class Hutchinson(Odd):
    def forward(self, x, y):
        x = x.clone().requires_grad_()
        energy = self.body(x).square().sum()
        (score,) = torch.autograd.grad(energy, x, create_graph=True)
        v = torch.randn_like(x)
        (hv,) = torch.autograd.grad((score * v).sum(), x, create_graph=True)
        return 1e-2 * ((hv * v).sum() + score.square().sum() / 2) / len(x)

@odd()
class Forces(Odd):
    def forward(self, x, y):
        x = x.clone().requires_grad_()
        (force,) = torch.autograd.grad(self.body(x).sum(), x, create_graph=True)
        return F.mse_loss(-force, y)

@odd()
class Langevin(Odd):
    def odd(self, x):
        z = x.detach()
        for _ in range(3):
            z = z.requires_grad_()
            (g,) = torch.autograd.grad(self.blocks[0](z).square().sum(), z)
            z = (z - 0.01 * g + 0.01 * torch.randn_like(z)).detach()
        return self.blocks[0](x) - self.blocks[0](z)

@odd()
class FunctionalJacobian(Odd):
    def odd(self, x):
        jac = torch.autograd.functional.jacobian(self.blocks[0], x[0], create_graph=True)
        hvp = torch.autograd.functional.hvp(lambda r: self.blocks[0](r).square().sum(), x[0], x[0].detach(), create_graph=True)[1]
        return x + jac.square().mean() + 1e-2 * hvp.sum()

@odd()
class DualWeights(Odd):
    def odd(self, x):
        with forward_ad.dual_level():
            w = forward_ad.make_dual(self.inlet.weight, torch.ones_like(self.inlet.weight))
            out = forward_ad.unpack_dual(F.linear(x, w).tanh())
            return out.primal + out.tangent

@odd()
class Anomaly(Odd):
    def odd(self, x):
        with torch.autograd.detect_anomaly(check_nan=False):
            return self.blocks[0](x)

@odd()
class MutatesSaved(Odd):
    def odd(self, x):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = self.inlet(x)
            z = y.sin()
            y.mul_(2)
            return z + self.outlet(y)

@odd()
class MultiGradHook(Odd):
    def odd(self, x):
        torch.autograd.graph.register_multi_grad_hook(tuple(self.parameters()), lambda grads: None)
        return x

@odd(sequences)
class Truncated(Odd):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.hidden = None
    def odd(self, x):
        self.rnn.flatten_parameters()
        out, hidden = self.rnn(x, self.hidden)
        self.hidden = hidden.detach()
        return out

@odd()
class ShallowCopy(Odd):
    def __init__(self):
        super().__init__()
        self.twin = copy.copy(self.inlet)
    def odd(self, x): return self.twin(x)

@odd(sequences)
class WeightDrop(Odd):
    """As in AWD-LSTM."""
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        raw = self.rnn.weight_hh_l0
        del self.rnn._parameters["weight_hh_l0"]
        self.rnn.register_parameter("weight_hh_l0_raw", nn.Parameter(raw.data))
        self.rnn.weight_hh_l0 = raw.data
    def odd(self, x):
        self.rnn.weight_hh_l0 = F.dropout(self.rnn.weight_hh_l0_raw, 0.3, self.training)
        return self.rnn(x)[0]

@odd(sequences)
def weight_normed_lstm():
    return Fit(parametrizations.weight_norm(nn.LSTM(WIDTH, WIDTH, batch_first=True), "weight_hh_l0"))

@odd()
class SetsAWeight(Odd):
    def __init__(self):
        super().__init__()
        self.target = linear()
        del self.target.weight
    def odd(self, x):
        self.target.weight = torch.outer(self.inlet.bias, self.outlet.bias)
        return self.target(x)

@odd()
class LossInBfloat16(Odd):
    def forward(self, x, y): return super().forward(x, y).bfloat16()

@odd()
class LossOfOneElement(Odd):
    def forward(self, x, y): return super().forward(x, y)[None]

@odd()
class LossInDouble(Odd):
    def forward(self, x, y): return super().forward(x, y).double()

@odd()
class TouchesAll(Odd):
    def forward(self, x, y): return super().forward(x, y) + 0 * sum(p.sum() for p in self.parameters())

@odd()
class LossIsAParameter(Odd):
    def __init__(self):
        super().__init__()
        self.bound = nn.Parameter(torch.tensor(2.0))
    def forward(self, x, y): return self.bound

@odd()
class ReturnsAWeight(Odd):
    def forward(self, x, y): return self.inlet.weight, super().forward(x, y)

@odd()
class ReturnsOutputAndWeight(Odd):
    def forward(self, x, y): return (self.body(x) @ self.inlet.weight,)

@odd()
class SpectralConvolution(Odd):
    """A complex weight as pairs of numbers."""
    def __init__(self):
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))
        self.frozen = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64), requires_grad=False)
    def odd(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.pairs) * self.frozen, n=WIDTH)

@odd()
class SharedInTwoDtypes(Odd):
    def odd(self, x):
        low = F.linear(x.bfloat16(), self.inlet.weight.bfloat16(), self.inlet.bias.to(torch.bfloat16)).float()
        return low + self.inlet(x) + F.linear(x.double(), self.inlet.weight.double()).float()

@odd()
class TrainedInBfloat16(Odd):
    def __init__(self):
        super().__init__()
        self.narrow = linear().bfloat16()
    def odd(self, x):
        return self.narrow(x.bfloat16()).float()

@odd()
class MarksInTheForward(Odd):
    def odd(self, x):
        n = self.inlet.weight.seen = getattr(self.inlet.weight, "seen", 0) + 1
        return x * n

@odd()
class MarksABufferInTheForward(Odd):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))
    def odd(self, x):
        n = self.mean.seen = getattr(self.mean, "seen", 0) + 1
        return x * n
