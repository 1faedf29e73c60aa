"""What fzero seeds on a machine with several cards: the generators of the processor and
of the model's card, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from pretended_cuda import PretendedCuda
from torch import nn
from training import Plain

import fzero
from fzero.optim.whole_params import check_shapes_do_not_matter
from fzero.pipeline.layers import LayerSeeds, LayerSpec, build_layer
from fzero.pipeline.seeds import StepSeeds
from fzero.plans.param_groups import UserTransform

Cards = tuple[torch.Generator, torch.Generator]
WITHOUT_VALUES = Plain(8, 2).to("meta")


@pytest.fixture
def cards() -> Iterator[Cards]:
    """The generators of two cards; the first one is the current card."""
    with PretendedCuda() as card:
        made = card.generator, torch.Generator().manual_seed(7)
        seed_all = lambda seed: [x.manual_seed(seed) for x in made] and None  # noqa: E731
        with patch.multiple(torch.cuda, default_generators=made, manual_seed_all=seed_all):
            yield made


def test_torch_seeds_all_cards(cards: Cards) -> None:
    torch.manual_seed(3)
    assert [x.initial_seed() for x in cards] == [3, 3]


@pytest.mark.parametrize("card", [0, 1])
def test_a_layer_of_a_pipeline_draws_keyed_numbers_on_its_own_card(card: int, cards: Cards) -> None:
    before = [x.initial_seed() for x in cards]
    seeds = StepSeeds(5, torch.device("cuda", card))
    seeds.key(1, 2)
    seed = seeds.of(1, 2)
    assert [x.initial_seed() for x in cards] == [
        seed if i == card else old for i, old in enumerate(before)
    ]
    assert torch.initial_seed() == seed


def fill(module: nn.Module) -> None:
    for x in module.parameters(recurse=False):
        nn.init.normal_(x)


def first_values() -> None:
    fzero.make_train_step(WITHOUT_VALUES, {}).init(init_fn=fill)


def layer() -> None:
    build_layer(LayerSpec(nn.Linear, 2, 2), 3, LayerSeeds())


def own_transform() -> None:
    assert UserTransform("transform", lambda lr: fzero.adamw(lr), 0.1).outcome


def optimizer_of_whole_parameters() -> None:
    check_shapes_do_not_matter(torch.optim.SGD, {"lr": 0.1})


@pytest.mark.parametrize(
    "make", [first_values, layer, own_transform, optimizer_of_whole_parameters]
)
def test_fzero_leaves_the_random_states_of_all_cards_as_they_were(
    make: object, cards: Cards
) -> None:
    before = [x.get_state() for x in (torch.default_generator, *cards)]
    make()  # type: ignore[operator]
    after = [x.get_state() for x in (torch.default_generator, *cards)]
    assert list(map(torch.equal, before, after)) == [True, True, True]
