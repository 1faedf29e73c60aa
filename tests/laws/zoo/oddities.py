"""Oddities in plain PyTorch: each class below does one thing that PyTorch allows and
that few models do.

A class enters the table under its name. Its `body` maps (rows, WIDTH) to the like, and
its loss is the mean squared error.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, rnn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoints

from zoo.case import LENGTH, ROWS, VOCABULARY, WIDTH, Case

ODDITIES: dict[str, Case] = {}
FIRST, SECOND = "first", "second"


def vectors() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def sequences() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, LENGTH, WIDTH), torch.randn(ROWS, LENGTH, WIDTH)


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH)), torch.randn(ROWS, LENGTH, WIDTH)


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 3, 8, 8), torch.randn(ROWS, 4, 8, 8)


def odd(batch: Callable[[], tuple[Tensor, Tensor]] = vectors, **known: Any) -> Callable[[Any], Any]:
    """Enters a class, or a function that makes a module, under its name."""

    def enter(make: Any) -> Any:
        ODDITIES[make.__name__] = Case(lambda: (make(), batch()), **known)
        return make

    return enter


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 24),
            nn.Linear(24, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Odd(nn.Module):
    """Two blocks between two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = linear(), linear()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), y)

    def body(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(self.odd(x))

    def odd(self, x: Tensor) -> Tensor:
        return x


class Fit(nn.Module):
    """The mean squared error of a sequence of modules."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.body(x)
        return F.mse_loss(out[0] if isinstance(out, tuple) else out, y)


IN_PARTS = "where ranks skip units each for itself, stage 3 may send a gradient in two parts"
STAYS = (
    "gradients of a weight are added up stay by stay in its unit, and in a plain loop use by use"
)


# --- weights that are reached by other ways than attributes of their module -----------------------


@odd(refused="must have no modules of TorchScript")
class Scripted(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.middle = torch.jit.script(nn.Sequential(linear(), nn.Tanh()))

    def odd(self, x: Tensor) -> Tensor:
        return self.middle(x)


@odd(refused="must have no modules of TorchScript")
class Traced(Scripted):
    def __init__(self) -> None:
        super().__init__()
        self.middle = torch.jit.trace(nn.Sequential(linear(), nn.Tanh()), torch.zeros(2, WIDTH))


@odd()
class WeightInAList(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.inlet.weight]

    def odd(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kept[0])


@odd()
class WeightInAClosure(Odd):
    def __init__(self) -> None:
        super().__init__()
        weight = self.inlet.weight
        self.map = lambda x: x @ weight

    def odd(self, x: Tensor) -> Tensor:
        return self.map(x)


@odd()
class WeightInAPartial(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.map = functools.partial(F.linear, weight=self.inlet.weight)

    def odd(self, x: Tensor) -> Tensor:
        return self.map(x)


@odd()
class BoundMethodOfATensor(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.multiply = self.scale.mul

    def odd(self, x: Tensor) -> Tensor:
        return self.multiply(x)


@odd()
class ListOfAllParameters(Odd):
    """Makes a list of them when it is built, as optimizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.every = list(self.parameters())

    def odd(self, x: Tensor) -> Tensor:
        return x + 1e-3 * sum(param.square().sum() for param in self.every)


@odd()
class DataInAList(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.kept, self.row = [self.inlet.weight.data], {"first": self.inlet.weight.detach()[0]}

    def odd(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kept[0]) + self.row["first"]


@odd()
class DataInAClosure(Odd):
    def __init__(self) -> None:
        super().__init__()
        weight, transposed = self.inlet.weight.data, self.inlet.weight.data.t()
        self.map = lambda x: x @ transposed + torch.cat([weight, weight])[0]

    def odd(self, x: Tensor) -> Tensor:
        return self.map(x)


@odd()
class WholeDataInAList(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.inlet.weight.data]

    def odd(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kept[0])


@odd()
class OtherParameterInAList(Odd):
    """A Parameter of the same memory that no module has: no optimizer of a plain loop
    updates it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept = [nn.Parameter(self.inlet.weight.data)]

    def odd(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kept[0])


@odd()
class ViewInAList(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.inlet.weight.t(), self.outlet.bias.expand(3, WIDTH)]

    def odd(self, x: Tensor) -> Tensor:
        return x @ self.kept[0] + self.kept[1].sum(0)


@odd()
class BufferInAList(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.kept = [self.mean, self.mean[:4]]

    def odd(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.kept[0].lerp_(x.mean(0), 0.5)
            self.kept[1].add_(0.25)
        return x - self.kept[0]


@odd()
class WholeBufferInAList(BufferInAList):
    def odd(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.kept[0].lerp_(x.mean(0), 0.5)
        return x - self.kept[0]


@odd(refused="must not be read through a tensor that shares its memory and shows more")
class PartsOfOneTensor(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.all = torch.randn(2, WIDTH, WIDTH) / 4
        self.inlet.weight, self.outlet.weight = nn.Parameter(self.all[0]), nn.Parameter(self.all[1])

    def odd(self, x: Tensor) -> Tensor:
        return x * self.all.norm()


@odd()
class ModuleInAList(Odd):
    """Has a module that it does not register: nobody trains that."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [linear()]

    def odd(self, x: Tensor) -> Tensor:
        return self.hidden[0](x)


@odd()
class RegisteredModuleInAListToo(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.order = [self.blocks[1], self.blocks[0], self.inlet]

    def odd(self, x: Tensor) -> Tensor:
        for module in self.order:
            x = module(x)
        return x


@odd()
class BoundForward(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.map = self.inlet.forward

    def odd(self, x: Tensor) -> Tensor:
        return self.map(x)


@odd(rounds=STAYS)
class ReadsWeightsEveryWay(Odd):
    def odd(self, x: Tensor) -> Tensor:
        named = dict(self.named_parameters())
        weight = (
            self.inlet._parameters["weight"]
            + named["outlet.weight"]
            + getattr(self.inlet, "weight")  # noqa: B009
        )
        flat = nn.utils.parameters_to_vector(self.blocks.parameters())
        return (
            x @ weight / 4
            + next(self.parameters()).mean()
            + flat.square().mean()
            + self.state_dict()["inlet.bias"]
        )


@odd()
class GetsParameter(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x @ self.get_parameter("blocks.0.up.weight").t()[:, :WIDTH]


@odd()
class AsksForParameter(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return 2 * x if isinstance(self.inlet.weight, nn.Parameter) else x


@odd()
class AsksForFlags(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * (1 + sum(param.requires_grad for param in self.parameters()) / 16)


@odd()
class AsksForLeaf(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return 2 * x if self.inlet.weight.is_leaf else x


@odd()
class ForeachOfParameters(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x + 1e-3 * torch.stack(torch._foreach_norm(list(self.parameters()))).sum()


@odd()
class NumpyOfAWeight(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * float(self.inlet.weight.detach().numpy().max())


# --- weights that the forward changes -------------------------------------------------------------

CHANGED = r"parameter '(outlet|body\.0)\.weight': must not be changed in place by the forward"


@odd(refused=CHANGED)
class ClampsData(Odd):
    def odd(self, x: Tensor) -> Tensor:
        self.outlet.weight.data.clamp_(-0.1, 0.1)
        return x


@odd(refused=CHANGED)
class ReplacesData(Odd):
    def odd(self, x: Tensor) -> Tensor:
        self.outlet.weight.data = self.outlet.weight.data.clamp(-0.1, 0.1)
        return x


@odd(refused=CHANGED)
class ChangesADetachedView(Odd):
    def odd(self, x: Tensor) -> Tensor:
        self.outlet.weight.detach()[0].mul_(0.5)
        return x


@odd(refused=CHANGED)
class ChangesByNumpy(Odd):
    def odd(self, x: Tensor) -> Tensor:
        self.outlet.weight.detach().numpy()[0] *= 0.5
        return x


@odd(refused=CHANGED)
class ForcedNorm(Odd):
    """The forced weight normalisation of EDM2."""

    def odd(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.outlet.weight.copy_(F.normalize(self.outlet.weight))
        return x


@odd(words, refused=CHANGED)
def max_norm() -> nn.Module:
    return Fit(nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0), Block(), Block())


@odd(refused="must not be changed in place by the forward")
class Teacher(Odd):
    """An average of a layer's weights, in frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = linear().requires_grad_(False)

    def odd(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.inlet.parameters()):
                mine.lerp_(theirs, 0.1)
        return x + self.teacher(x)


@odd(refused="parameter 'scale': must be there when the step is made")
class LateParameter(Odd):
    def odd(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(WIDTH))
        return x * self.scale


@odd(refused="parameter 'inlet.weight': must be there when the step is made")
class NewParameter(Odd):
    """Puts a parameter in another's place in the forward."""

    def odd(self, x: Tensor) -> Tensor:
        self.inlet.weight = nn.Parameter(self.inlet.weight.detach() * 0.5)
        return x + self.inlet(x)


@odd(refused="parameter 'outlet.weight': must be there when the step is made")
class NewHead(Odd):
    """Puts a module in another's place in the forward."""

    def odd(self, x: Tensor) -> Tensor:
        self.outlet = nn.Linear(WIDTH, WIDTH)
        return x


@odd(refused="parameters of the model: must keep requires_grad in the forward")
class TogglesFlags(Odd):
    """Freezes a part while it runs, as a GAN does with its discriminator."""

    def odd(self, x: Tensor) -> Tensor:
        self.inlet.requires_grad_(False)
        x = x + self.inlet(x)
        self.inlet.requires_grad_(True)
        return x


@odd()
class CopiesAModule(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return copy.deepcopy(self.inlet)(x) @ copy.deepcopy(self.outlet.weight)


@odd()
class MarksAParameter(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.inlet.weight.scale = 3.0

    def odd(self, x: Tensor) -> Tensor:
        return x * getattr(self.inlet.weight, "scale", 1.0)


@odd()
class AsksForType(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return 2 * x if type(self.inlet.weight) is nn.Parameter else x


@odd(
    refused="'outlet.weight': must keep its place in the module, and the forward put 'inlet.weight'"
)
class TiesInTheForward(Odd):
    def odd(self, x: Tensor) -> Tensor:
        self.outlet.weight = self.inlet.weight
        return x


@odd(refused="must not be changed in place by the forward")
class TeacherOfAnotherUnit(Odd):
    """Its teacher's unit has been left when the teacher's weight changes."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = linear().requires_grad_(False)

    def odd(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, weight in zip(
                self.teacher.parameters(), self.inlet.parameters(), strict=True
            ):
                mean.lerp_(weight, 0.1)
        return x + self.teacher(x)


@odd(
    refused="buffer 'mean': must not share memory with a parameter, and the forward assigned a view"
)
class BufferOfAParameter(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def odd(self, x: Tensor) -> Tensor:
        self.mean = self.inlet.bias.data
        return x + self.mean


@odd(refused="buffer 'mean': must have memory of its own where a forward changes it")
class BuffersOfOneMemory(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, WIDTH))
        self.register_buffer("row", self.mean[0])

    def odd(self, x: Tensor) -> Tensor:
        self.mean.add_(0.5)
        return x + self.row


@odd(
    refused=r"buffer 'seen': must keep its shape and dtype, .* to torch.float32 of shape \(2, 16\)"
)
class ResizedBuffer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, WIDTH))

    def odd(self, x: Tensor) -> Tensor:
        self.seen.resize_(2, WIDTH)
        return x


@odd(refused="backward: must not be called inside the forward")
class CallsBackward(Odd):
    def odd(self, x: Tensor) -> Tensor:
        self.inlet(x.detach()).sum().backward()
        return x


@odd(refused="'inlet.weight': must keep requires_grad in the forward")
class Unfreezes(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.inlet.requires_grad_(False)

    def odd(self, x: Tensor) -> Tensor:
        self.inlet.requires_grad_(True)
        return self.inlet(x)


@odd(refused="parameter 'blocks.0.norm.weight': must be there when the step is made")
class ReversesItsBlocks(Odd):
    """Its blocks change places in every forward."""

    def odd(self, x: Tensor) -> Tensor:
        self.blocks = nn.ModuleList(reversed(self.blocks))
        return x


# --- ties and shares ------------------------------------------------------------------------------


@odd()
class TiedThrice(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.outlet.weight = self.inlet.weight
        self.third = linear()
        self.third.weight, self.third.bias = self.inlet.weight, self.outlet.bias

    def odd(self, x: Tensor) -> Tensor:
        return self.third(x)


@odd()
class TiedTransposed(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.blocks[0].up.weight), self.blocks[0].up.weight.t())


@odd()
class TiedInContainers(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([self.inlet.weight, self.outlet.bias])
        self.dict = nn.ParameterDict({"b": self.inlet.weight, "a": nn.Parameter(torch.ones(WIDTH))})

    def odd(self, x: Tensor) -> Tensor:
        return x @ self.list[0] @ self.dict["b"] * self.dict["a"] + self.list[1]


@odd()
class OneBlockThrice(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()] * 3)


@odd()
class SharedModules(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up = self.blocks[0].up
        self.blocks[1].norm = self.blocks[0].norm


@odd(refused="must have memory of its own")
class SharedStorage(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.outlet.weight = nn.Parameter(self.inlet.weight.data)


@odd(refused="must have memory of its own")
class OverlappingStorage(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(self.inlet.weight.data[:4])

    def odd(self, x: Tensor) -> Tensor:
        return x + self.rows.sum(0)


@odd()
class SharedBuffers(Odd):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_buffer(
                "count", torch.zeros(3) if block is self.blocks[0] else self.blocks[0].count
            )

    def odd(self, x: Tensor) -> Tensor:
        self.blocks[0].count += 1
        return x * self.blocks[1].count.sum()


COPIED = (
    "a kernel adds up in another order where a weight is contiguous, and in a flat buffer it "
    "always is"
)


# --- shapes, dtypes and kinds of parameters -------------------------------------------------------


@odd()
class OddShapes(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 4))
        self.one, self.deep = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, 2, 1, 2, 4))

    def odd(self, x: Tensor) -> Tensor:
        return x * self.scalar * self.one * self.deep.reshape(-1) + self.empty.sum()


@odd(refused="'pairs': must be real to be trained")
class ComplexWeights(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def odd(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.pairs, n=WIDTH)


@odd(rounds=COPIED)
class OddStrides(Odd):
    """Parameters that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / 4)
        self.sliced = nn.Parameter(torch.randn(2 * WIDTH)[::2])

    def odd(self, x: Tensor) -> Tensor:
        return x @ self.turned * self.sliced


@odd(images, rounds=COPIED)
def channels_last() -> nn.Module:
    body = Fit(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 4, 3, padding=1),
    )
    return body.to(memory_format=torch.channels_last)


@odd()
class Quantised(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(
            torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False
        )
        self.mask = nn.Parameter(torch.arange(WIDTH) % 2 == 0, requires_grad=False)

    def odd(self, x: Tensor) -> Tensor:
        return x @ (self.table / 9) * self.mask


@odd()
class MixedDtypes(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = linear().double(), linear().bfloat16().requires_grad_(False)

    def odd(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x.double()).bfloat16()).float()


class Weight(nn.Parameter):
    """A class of parameters of the user's own."""


@odd()
class ParameterOfAnotherClass(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.own = Weight(torch.ones(WIDTH))

    def odd(self, x: Tensor) -> Tensor:
        return x * self.own


@odd(refused=r"'body.0.weight': must have a shape")
def lazy() -> nn.Module:
    return Fit(nn.LazyLinear(WIDTH), nn.Tanh(), linear())


@odd()
def lazy_after_a_forward() -> nn.Module:
    model = Fit(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(), linear())
    model(*vectors())
    return model


@odd()
class Containers(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.tree = nn.ModuleDict(
            {
                FIRST: nn.ModuleList(
                    nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))
                    for _ in range(3)
                ),
                SECOND: nn.Sequential(
                    nn.ModuleDict({"0": linear()})["0"], nn.Sequential(nn.Sequential(linear()))
                ),
            }
        )
        self.weights = nn.ParameterList(nn.ParameterList([torch.ones(WIDTH)]) for _ in range(2))

    def odd(self, x: Tensor) -> Tensor:
        for each in self.tree[FIRST]:
            x = each(x)
        return self.tree[SECOND](x) * self.weights[1][0]


@odd()
class OddNames(Odd):
    def __init__(self) -> None:
        super().__init__()
        for name in ("self", "weight/bias", "a b", "é", "fetch", "step"):
            self.register_parameter(name, nn.Parameter(torch.ones(WIDTH)))
            self.add_module(f"{name}-", linear())

    def odd(self, x: Tensor) -> Tensor:
        for name in ("self", "weight/bias", "a b", "é", "fetch", "step"):
            x = getattr(self, f"{name}-")(x) * getattr(self, name)
        return x


@odd()
class Frozen(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.outlet.weight.requires_grad_(False)


@odd()
class Unused(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.never, self.spare = linear(), nn.Parameter(torch.ones(3))


@odd()
class UnusedOnOneRank(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return self.inlet(x) if x[0, 0] > 0 else x


# --- weights that are computed --------------------------------------------------------------------


@odd()
def weight_norm() -> nn.Module:
    return Fit(
        parametrizations.weight_norm(linear()), nn.Tanh(), parametrizations.weight_norm(linear())
    )


@odd()
def spectral_norm() -> nn.Module:
    return Fit(
        parametrizations.spectral_norm(linear()),
        nn.Tanh(),
        parametrizations.spectral_norm(linear()),
    )


@odd(rounds=COPIED)
def orthogonal() -> nn.Module:
    return Fit(parametrizations.orthogonal(linear()), nn.Tanh(), linear())


@odd()
def weight_norm_of_old() -> nn.Module:
    return Fit(nn.utils.weight_norm(linear()), nn.Tanh(), nn.utils.weight_norm(linear()))


@odd()
def spectral_norm_of_old() -> nn.Module:
    return Fit(nn.utils.spectral_norm(linear()), nn.Tanh(), nn.utils.spectral_norm(linear()))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).t()


@odd()
class ParametrizedAndCached(Odd):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.outlet, "weight", Symmetric())
        parametrize.register_parametrization(
            self.outlet, "weight", parametrizations._SpectralNorm(self.outlet.weight)
        )

    def odd(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.outlet(self.outlet(x))


@odd()
def pruned() -> nn.Module:
    maps = [linear(), linear()]
    for each in maps:
        prune.l1_unstructured(each, "weight", 0.5)
    return Fit(maps[0], nn.Tanh(), maps[1])


@odd()
class Hyper(Odd):
    """Calls a child with weights of its own making."""

    def odd(self, x: Tensor) -> Tensor:
        weights = {"weight": 2 * self.inlet.weight, "bias": self.inlet.bias + 1}
        return functional_call(self.outlet, weights, (x,))


@odd()
class Ensemble(Odd):
    def odd(self, x: Tensor) -> Tensor:
        stacked = {
            name: torch.stack([dict(block.named_parameters())[name] for block in self.blocks])
            for name, _ in self.blocks[0].named_parameters()
        }
        return torch.func.vmap(lambda weights: functional_call(self.blocks[0], weights, (x,)))(
            stacked
        ).mean(0)


@odd()
class InnerStep(Odd):
    """A step of gradient descent within the forward, as in meta-learning, by a weight
    that was used before.
    """

    def odd(self, x: Tensor) -> Tensor:
        weight = self.inlet.weight
        (grad,) = torch.autograd.grad(
            F.linear(x, weight).square().mean(), weight, create_graph=True
        )
        return F.linear(x, weight - 0.1 * grad)


@odd()
class InnerStepOfOneUse(InnerStep):
    def odd(self, x: Tensor) -> Tensor:
        return super().odd(x.detach())


@odd()
class InnerStepOfACopy(Odd):
    """The same, by a copy that its uses share."""

    def odd(self, x: Tensor) -> Tensor:
        weight = 1 * self.inlet.weight
        (grad,) = torch.autograd.grad(
            F.linear(x, weight).square().mean(), weight, create_graph=True
        )
        return F.linear(x, weight - 0.1 * grad)


@odd()
class InnerStepOfAHeldWeight(Odd):
    """By a weight that it has kept since the first use."""

    def body(self, x: Tensor) -> Tensor:
        weight = self.inlet.weight
        loss = self.inlet(self.blocks[0](F.linear(x, weight))).square().mean()
        (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
        return self.outlet(F.linear(x, weight - 0.1 * grad))


@odd()
class GradOfFunctions(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x + torch.func.vmap(torch.func.grad(lambda row: self.outlet(row).square().sum()))(x)


@odd()
class ForwardMode(Odd):
    def odd(self, x: Tensor) -> Tensor:
        out, slope = torch.func.jvp(self.inlet, (x,), (torch.ones_like(x),))
        return out + torch.func.vmap(self.blocks[0])(slope)


# --- random numbers and order ---------------------------------------------------------------------


@odd(rounds=IN_PARTS)
class LayerDrop(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def odd(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.5:
                x = block(x)
        return x


@odd()
class DepthFromData(Odd):
    def odd(self, x: Tensor) -> Tensor:
        for _ in range(int(x.sum().abs() * 10) % 3):
            for block in self.blocks:
                x = block(x)
        return x


@odd()
class RandomOrder(Odd):
    """All ranks draw the same order, in Python."""

    def odd(self, x: Tensor) -> Tensor:
        self.draws = getattr(self, "draws", 0) + 1
        for index in random.Random(7).sample(range(2), 2):
            x = self.blocks[index](x)
        return x


@odd()
class ExpertsByToken(Odd):
    """A mixture of experts, each called with the tokens that choose it, and left out
    where none does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH)) for _ in range(4)
        )

    def odd(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, places = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out


@odd()
def dropouts() -> nn.Module:
    return Fit(
        linear(),
        nn.Dropout(0.5),
        Block(),
        nn.AlphaDropout(0.3),
        nn.RReLU(),
        nn.FeatureAlphaDropout(0.2),
        Block(),
    )


@odd()
class Noise(Odd):
    def odd(self, x: Tensor) -> Tensor:
        noise = torch.distributions.Normal(x, F.softplus(self.inlet(x)) + 0.1).rsample()
        return noise + F.gumbel_softmax(x, hard=True) + torch.bernoulli(x.sigmoid())


@odd()
class OwnGenerator(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(3))


# --- checkpoints, compilers and modes -------------------------------------------------------------


@odd()
class Checkpointed(Odd):
    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoints.checkpoint(
                lambda x, block=block: F.dropout(block(x), 0.3), x, use_reentrant=self.reentrant
            )
        return self.outlet(x)


@odd()
class CheckpointedReentrant(Checkpointed):
    reentrant = True


@odd()
class CheckpointedSequence(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return checkpoints.checkpoint_sequential(
            [*self.blocks, self.inlet, nn.Dropout(0.3)], 2, x, use_reentrant=False
        )


@odd()
class CheckpointedSelectively(Odd):
    def odd(self, x: Tensor) -> Tensor:
        keep = functools.partial(
            checkpoints.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
        )
        x = checkpoints.checkpoint(
            nn.Sequential(*self.blocks), x, use_reentrant=False, context_fn=keep
        )
        return checkpoints.checkpoint(
            super().odd, self.inlet(x), use_reentrant=False, context_fn=keep
        )


@odd()
class CompiledBlocks(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(torch.compile(Block(), backend="eager") for _ in range(2))


@odd()
class CompiledInPlace(Odd):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


@odd(refused="must have no module compiled by torch.compile", refused_in=(3,))
def compiled_model() -> nn.Module:
    return torch.compile(Odd(), backend="aot_eager")


@odd()
def graph_module() -> nn.Module:
    return torch.fx.symbolic_trace(Odd())


@odd()
class AutocastInside(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def odd(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.block(x)
        return x.float()


@odd(
    rounds=(
        "autocast keeps the cast of a leaf, so that in a plain loop gradients of two uses "
        "are added up in bfloat16"
    ),
    tolerance=1e-3,
)
class AutocastOfTwoUses(Odd):
    def odd(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.inlet(x) + self.inlet(x + 1)
        return x.float()


@odd()
class NoGradInside(Odd):
    def odd(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.blocks[0](x)
        with torch.inference_mode():
            factor = self.blocks[1](x).sum().item()
        return x + target * (1 + 1e-3 * factor)


@odd()
class SavedOnCpu(Odd):
    def odd(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = self.blocks[0](x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            return self.blocks[1](x)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is F.gelu else out


@odd()
class FunctionMode(Odd):
    def odd(self, x: Tensor) -> Tensor:
        with Doubles():
            return self.blocks[0](x)


@odd()
class Threads(Odd):
    def odd(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.blocks[0], x).result() + self.inlet(x)


# --- autograd -------------------------------------------------------------------------------------


class Cubed(torch.autograd.Function):
    """Saves a parameter, and computes only what is needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad
        return (
            grads[0] * weight**3 if need_x else None,
            (grads[0] * x * 3 * weight**2).sum(0) if need_weight else None,
        )


@odd()
class CustomFunction(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return Cubed.apply(x, self.inlet.bias)


class KeepsOnContext(Cubed):
    """Keeps a parameter as an attribute, which PyTorch advises against."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.kept = (x, weight)
        return x * weight**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.kept
        return grads[0] * weight**3, (grads[0] * x * 3 * weight**2).sum(0)


@odd()
class CustomFunctionThatKeeps(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return KeepsOnContext.apply(x, self.inlet.bias)


@odd()
class GradientPenalty(Odd):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = super().forward(x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


@odd()
class Adversarial(Odd):
    """A generator and a critic with the sign of its gradient turned."""

    def odd(self, x: Tensor) -> Tensor:
        made = self.blocks[0](x)
        made.register_hook(lambda grad: -grad)
        return self.blocks[1](made) - self.blocks[1](x.detach())


@odd()
class InPlace(Odd):
    def odd(self, x: Tensor) -> Tensor:
        x = self.inlet(x).relu_() + 1
        x[:, :2] = self.outlet(x.clone())[:, :2]
        return F.dropout(x, 0.2, inplace=True).mul_(2).add_(1)


@odd()
class ChangesItsBatch(Odd):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x, y)


@odd()
class Hooks(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_pre_hook(
            lambda module, args: (args[0] * module.up.weight[0, 0],)
        )
        self.blocks[0].register_forward_hook(lambda module, args, out: out + module.norm.bias)
        self.blocks[1].register_full_backward_hook(lambda module, grads, outs: (0.5 * grads[0],))
        self.blocks[1].register_full_backward_pre_hook(lambda module, grads: (2 * grads[0],))


@odd(refused="inlet.weight.*has a gradient hook")
class ParameterHook(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.inlet.weight.register_hook(lambda grad: 2 * grad)


@odd(refused="'inlet.weight': must get no gradient hook in the forward")
class ParameterHookInside(Odd):
    """Scales a gradient with a hook that it sets in its first forward."""

    hooked = False

    def odd(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.hooked = bool(self.inlet.weight.register_hook(lambda grad: 2 * grad))
        return self.inlet(x)


@odd()
class KeepsTheGraph(Odd):
    """Keeps its last output in an attribute."""

    def odd(self, x: Tensor) -> Tensor:
        self.last = self.blocks[0](x)
        return x + self.last


# --- buffers --------------------------------------------------------------------------------------


@odd()
class Buffers(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("factor", torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(2, WIDTH), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0)
        self.register_buffer("edge", torch.full((2,), -torch.inf))
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex64))

    def odd(self, x: Tensor) -> Tensor:
        self.count += 1
        self.factor = self.factor + 0.5
        self.wave.mul_(1j)
        self.seen = x[:2]
        return x * self.factor * self.mask + self.edge.exp().sum() + self.count


@odd(refused="buffer 'seen': must keep its shape and dtype, .* to torch.float32 of shape")
class GrowingBuffer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, WIDTH))

    def odd(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach()[:1]])
        return x


@odd(refused="buffer 'graph': must be dense")
class SparseBuffer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(WIDTH).to_sparse())

    def odd(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.graph, x.t()).t()


@odd(refused="buffer 'scale': must keep its shape and dtype, .* to torch.float64 of shape")
class BufferOfAnotherDtype(Odd):
    """A buffer whose dtype the forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def odd(self, x: Tensor) -> Tensor:
        self.scale = self.scale.double() * 1.5
        return x * self.scale.float()


@odd(refused="buffer 'first': must keep its shape and dtype, or stay None, .* to None")
class BufferThatGoes(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.full((WIDTH,), 2.0))

    def odd(self, x: Tensor) -> Tensor:
        x = x if self.first is None else x * self.first
        self.first = None
        return x


@odd(refused=r"buffer 'scale': must keep its shape and dtype, or stay None, .* of shape \(16,\)")
class BufferFromTheFirstBatch(Odd):
    """Takes its scale from the first batch, as an ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def odd(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = 1 / x.detach().std(0)
        return x * self.scale


@odd(refused="buffer 'scale': must be there when the step is made")
class BufferOfTheFirstForward(BufferFromTheFirstBatch):
    def __init__(self) -> None:
        Odd.__init__(self)

    def odd(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", 1 / x.detach().std(0))
        return x * self.scale


@odd()
class CodeBook(Odd):
    """A vector quantiser: its code words are averages in buffers, and the gradient goes
    straight through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, WIDTH))

    def odd(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            chosen = torch.cdist(x, self.codes).argmin(-1)
            self.codes.index_add_(0, chosen, 0.1 * (x - self.codes[chosen]))
        return x + (self.codes[chosen] - x).detach()


# --- modules of PyTorch ---------------------------------------------------------------------------


@odd(sequences)
def lstm() -> nn.Module:
    return Fit(
        linear(),
        nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True, dropout=0.2),
    )


@odd(sequences)
def lstm_projected() -> nn.Module:
    return Fit(nn.LSTM(WIDTH, 24, proj_size=WIDTH, batch_first=True))


@odd(sequences)
def gru() -> nn.Module:
    return Fit(linear(), nn.GRU(WIDTH, WIDTH, batch_first=True))


@odd(sequences)
class Packed(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(WIDTH, WIDTH, batch_first=True)

    def odd(self, x: Tensor) -> Tensor:
        lengths = torch.arange(len(x)) + LENGTH - len(x) + 1
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return (
            x
            + rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=LENGTH)[0]
        )


@odd(sequences, rounds=STAYS)
class Cells(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.gru.weight_hh = self.gru.weight_ih

    def odd(self, x: Tensor) -> Tensor:
        state, hidden, outs = None, None, []
        for each in x.unbind(1):
            state = self.lstm(each, state)
            hidden = self.gru(state[0], hidden)
            outs.append(hidden)
        return torch.stack(outs, 1)


@odd(sequences)
class Attention(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True, add_bias_kv=True)
        self.other = nn.MultiheadAttention(
            WIDTH, 4, kdim=WIDTH, vdim=WIDTH, bias=False, batch_first=True
        )

    def odd(self, x: Tensor) -> Tensor:
        x = x + self.one(x, x, x, need_weights=False)[0]
        return x + self.other(x, x[:, :3], x[:, :3])[0]


@odd(sequences)
def encoder() -> nn.Module:
    return Fit(
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=True, norm_first=True), 2
        )
    )


@odd(sequences)
class Transformer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(WIDTH, 2, 1, 2, 24, batch_first=True)

    def odd(self, x: Tensor) -> Tensor:
        return self.both(
            x,
            x.flip(1),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(LENGTH),
            tgt_is_causal=True,
        )


@odd(words)
def sparse_embedding() -> nn.Module:
    return Fit(nn.Embedding(VOCABULARY, WIDTH, sparse=True, padding_idx=3), Block(), Block())


@odd(words)
class Bags(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.sum = nn.EmbeddingBag(VOCABULARY, WIDTH, sparse=True, mode="sum")
        self.max = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="max", scale_grad_by_freq=False)
        self.freq = nn.Embedding(VOCABULARY, WIDTH, scale_grad_by_freq=True)

    def body(self, x: Tensor) -> Tensor:
        return super().body((self.sum(x) + self.max(x))[:, None] + self.freq(x))


@odd(words)
class AdaptiveSoftmax(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scores = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCABULARY, [8, 20]),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scores(self.body(self.embed(x)).flatten(0, 1), x.flatten()).loss


@odd(images)
def convolutions() -> nn.Module:
    return Fit(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.PReLU(8),
        nn.Conv2d(8, 8, 3, groups=8, stride=2, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(inplace=True),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.BatchNorm2d(4, momentum=None),
    )


@odd()
class NormsAtRest(Odd):
    """A SyncBatchNorm runs on a CPU in evaluation mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.BatchNorm1d(WIDTH), nn.SyncBatchNorm(WIDTH)

    def odd(self, x: Tensor) -> Tensor:
        self.other.eval()
        return self.other(self.one(x))


@odd()
def norm_without_statistics() -> nn.Module:
    return Fit(
        linear(),
        nn.BatchNorm1d(WIDTH, track_running_stats=False),
        linear(),
        nn.BatchNorm1d(WIDTH, affine=False),
    )


@odd()
class BilinearAndLosses(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.distance = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.CosineEmbeddingLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.pair(self.body(x), y)
        return self.distance(out, y, torch.ones(len(x))) + nn.TripletMarginLoss()(out, x, y)


@odd()
def data_parallel() -> nn.Module:
    return nn.DataParallel(Odd())


@odd(refused="'of_weight")
class QuantisationAware(Odd):
    """Fake quantisation with observers, whose buffers find their shapes in the forward."""

    def __init__(self) -> None:
        super().__init__()
        per_row = torch.ao.quantization.default_per_channel_weight_fake_quant
        self.of_weight, self.of_x = per_row(), torch.ao.quantization.default_fake_quant()

    def odd(self, x: Tensor) -> Tensor:
        return F.linear(self.of_x(x), self.of_weight(self.inlet.weight))


@odd()
class Counts(Odd):
    """Keeps a count in a Python attribute."""

    calls = 0

    def odd(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls
