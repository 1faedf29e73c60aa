"""Small models with all kinds of parameters that a training step meets.

A `ToyRecipe` consists of integers and words. `make_toy_model` builds its module, with
the same weights every time, so that several processes can each build their own. The
recipes cover repeated blocks of different sizes, tied and frozen parameters, a 0-d
parameter, a zero-sized one, blocks of another dtype, and LayerNorm. The model is an
autoencoder: its forward takes a batch and returns the mean squared error over the
samples, so that the losses of equal local batches average to the loss of the global
batch. Every parameter that is not frozen gets a gradient.

Shape letters: B samples, F features, D width, H hidden of one block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Literal, cast

import torch
from torch import Tensor, nn

from sharding.checks import check_at_least
from sharding.views import torch_dtype


@dataclass(frozen=True, slots=True)
class ToyRecipe:
    """The parts of a toy model.

    Args:
        features: F, the length of a sample.
        width: D, the width between the blocks.
        hidden: H of each block; one block per number.
        tied: "none"; "ends" shares the first weight with the last; "blocks" shares one
            weight between equal blocks.
        frozen: "none", "inlet" (the first layer) or "biases" (every bias of a Linear).
        norm: each block starts with a LayerNorm.
        scale: there is a 0-d parameter.
        empty: there is a zero-sized parameter.
        dtypes: the dtypes of the blocks, in turn; all other parameters are float32.
        seed: the seed of the weights.
    """

    features: int
    width: int
    hidden: tuple[int, ...]
    tied: Literal["none", "ends", "blocks"] = "none"
    frozen: Literal["none", "inlet", "biases"] = "none"
    norm: bool = False
    scale: bool = False
    empty: bool = False
    dtypes: tuple[str, ...] = ("float32",)
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        object.__setattr__(self, "dtypes", tuple(self.dtypes))
        for field, value in (("features", self.features), ("width", self.width)):
            check_at_least("ToyRecipe", field, value, 1)
        for index, value in enumerate(self.hidden):
            check_at_least("ToyRecipe", f"hidden[{index}]", value, 1)
        for field, word, words in (
            ("tied", self.tied, ("none", "ends", "blocks")),
            ("frozen", self.frozen, ("none", "inlet", "biases")),
        ):
            if word not in words:
                raise ValueError(
                    f"ToyRecipe: {field} must be one of {words}, got {word!r}; pass one of these"
                )
        if not self.dtypes:
            raise ValueError("ToyRecipe: dtypes must name at least one, got (); pass ('float32',)")


class ResidualBlock(nn.Module):
    """A residual block of two Linears."""

    def __init__(self, width: int, hidden: int, *, norm: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(width) if norm else nn.Identity()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Args: x_BD (B, D), of any dtype. Returns: (B, D), of the same."""
        h_BH = torch.tanh(self.up(self.norm(x_BD.to(self.up.weight.dtype))))
        x_BD = x_BD + self.down(h_BH).to(x_BD.dtype)
        return x_BD


class Outlet(nn.Module):
    """A Linear whose weight is stored transposed, so that it can be tied to that of the
    inlet.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, features) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x_BD: Tensor) -> Tensor:
        """Args: x_BD (B, D). Returns: (B, F)."""
        return x_BD @ self.weight + self.bias


class ToyModel(nn.Module):
    """An autoencoder that returns its loss; `features` is the length of its samples.

    >>> model = make_toy_model(ToyRecipe(features=3, width=4, hidden=(5,), scale=True))
    >>> model(torch.zeros(2, model.features)).shape
    torch.Size([])
    """

    def __init__(self, recipe: ToyRecipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.features = recipe.features
        self.inlet = nn.Linear(recipe.features, recipe.width)
        self.blocks = nn.ModuleList(
            ResidualBlock(recipe.width, hidden, norm=recipe.norm).to(torch_dtype(dtype))
            for hidden, dtype in zip(recipe.hidden, cycle(recipe.dtypes))
        )
        self.outlet = Outlet(recipe.features, recipe.width)
        self.scale = nn.Parameter(torch.tensor(0.5)) if recipe.scale else None
        self.empty = nn.Parameter(torch.zeros(0, recipe.width)) if recipe.empty else None
        if recipe.tied == "ends":
            self.outlet.weight = cast(nn.Parameter, self.inlet.weight)
        if recipe.tied == "blocks":
            _tie_equal(list(self.blocks))
        for name, parameter in self.named_parameters():
            is_bias = name.endswith("bias") and "norm" not in name
            if (recipe.frozen == "inlet" and name.startswith("inlet")) or (
                recipe.frozen == "biases" and is_bias
            ):
                parameter.requires_grad_(False)

    def forward(self, x_BF: Tensor) -> Tensor:
        """Args: x_BF (B, F), float32 (or what the model was cast to). Returns: the mean
        squared error, 0-d.
        """
        h_BD = self.inlet(x_BF)
        for block in self.blocks:
            h_BD = block(h_BD)
        if self.scale is not None:
            h_BD = h_BD * self.scale
        if self.empty is not None:
            h_BD = torch.cat([h_BD, self.empty])
        error_BF: Tensor = self.outlet(h_BD) - x_BF
        return error_BF.square().mean()


def make_toy_model(recipe: ToyRecipe) -> ToyModel:
    """Build the model of a recipe; the same recipe gives the same weights, and the
    random state of torch does not change.

    >>> recipe = ToyRecipe(features=3, width=4, hidden=(5,), seed=1)
    >>> torch.equal(make_toy_model(recipe).inlet.weight, make_toy_model(recipe).inlet.weight)
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return ToyModel(recipe)


def _tie_equal(blocks: Sequence[nn.Module]) -> None:
    first_of_kind: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}
    for block in blocks:
        assert isinstance(block, ResidualBlock)
        weight = block.up.weight
        block.up.weight = first_of_kind.setdefault((tuple(weight.shape), weight.dtype), weight)
