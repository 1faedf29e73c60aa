"""The recipes of examples/derivatives: in stages 0 and 3 on two ranks they have the
numbers of a plain loop, and docs/recipes/derivatives.md shows these numbers.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ROOT
from ranks import RankPool
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

FOLDER = ROOT / "examples" / "derivatives"
PAGE = ROOT / "docs" / "recipes" / "derivatives.md"
TRAINED = {
    "R1": "penalties",
    "WGAN-GP": "penalties",
    "MeanFlow": "mean_flow",
    "denoising score matching": "score_matching",
    "sliced score matching": "score_matching",
    "MAML": "maml",
    "physics-informed": "physics",
}
ROUNDING = 1e-5
"""Relative to losses of about 1, after up to 40 updates: means over two ranks' rows are
added in another order.
"""


def recipe(name: str) -> Any:
    for folder in (FOLDER, FOLDER.parent):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def trained(name: str, stage: int) -> list[float]:
    losses: list[float] = recipe("runs").on_ranks(*recipe(TRAINED[name]).RECIPES[name](), stage)
    return losses


def plain(name: str) -> list[float]:
    losses: list[float] = recipe("runs").plainly(*recipe(TRAINED[name]).RECIPES[name]())
    return losses


def clipped(stage: int) -> list[float]:
    losses: list[float] = recipe("private").on_ranks(stage, 0.0)
    return losses


def noisy(stage: int) -> list[float]:
    losses: list[float] = recipe("private").on_ranks(stage, 1.0)
    return losses


def eigenvalue(stage: int) -> float:
    found: float = recipe("eigenvalue").top_eigenvalue(stage)
    return found


def influences(stage: int) -> list[float]:
    found: list[float] = recipe("influence").influences(stage)
    return found


def assert_near(found: list[float], expected: list[float], tolerance: float = ROUNDING) -> None:
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("name", TRAINED)
def test_a_recipe_has_the_losses_of_the_plain_loop(ranks: RankPool, name: str) -> None:
    expected = plain(name)
    assert expected[-1] < expected[0]
    for stage in (0, 3):
        for found in ranks(2, trained, name, stage):
            assert_near(found, expected)


def test_clipped_training_has_the_losses_of_a_loop_over_samples(ranks: RankPool) -> None:
    expected, with_noise = recipe("private").plainly(), noisy(0)
    for stage in (0, 3):
        assert_near(ranks(2, clipped, stage)[0], expected)
        assert_near(ranks(2, noisy, stage)[0], with_noise)
    assert abs(with_noise[-1] - expected[-1]) > 1e-3


def plain_eigenvalue(num: int = 12) -> float:
    """Lanczos with products of torch.func, from the same start."""
    example, algebra = recipe("eigenvalue"), recipe("linear_algebra")
    fzero = importlib.import_module("fzero")
    net, (x, y) = example.model(), example.batch()
    params = {name: param.detach() for name, param in net.named_parameters()}
    step = fzero.make_train_step(net, recipe("runs").config(0))
    space = fzero.curvature.space(step)

    def product(v: dict[str, Tensor]) -> dict[str, Tensor]:
        of_loss = grad(lambda params: functional_call(net, params, (x, y)))
        with sdpa_kernel(SDPBackend.MATH):
            found: dict[str, Tensor] = jvp(of_loss, (params,), (v,))[1]
        return found

    class Plain:
        @staticmethod
        def dot(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
            return torch.stack([(a[key].double() * b[key]).sum() for key in a]).sum()

    value: float = algebra.lanczos(product, Plain, space.gather(space.normal(seed=0)), num)[0]
    return value


def test_the_top_eigenvalue_is_that_of_the_plain_product(ranks: RankPool) -> None:
    expected = plain_eigenvalue()
    for stage in (0, 3):
        # Lanczos in fp32 loses about a digit of the products
        assert_near(ranks(2, eigenvalue, stage), [expected] * 2, 10 * ROUNDING)


def plain_influences(num: int = 4) -> list[float]:
    """With the Gauss–Newton matrix itself, in fp64."""
    example = recipe("influence")
    net = example.model().double()
    names, params = zip(*net.named_parameters(), strict=True)
    flat, sizes = torch.cat([p.detach().flatten() for p in params]), [p.numel() for p in params]

    def outputs(flat: Tensor, x: Tensor) -> Tensor:
        parts = [one.view_as(p) for one, p in zip(flat.split(sizes), params, strict=True)]
        found: Tensor = functional_call(net, dict(zip(names, parts, strict=True)), (x,))
        return found

    def gradient(batch: Any) -> Tensor:
        x, y = batch
        found: Tensor = grad(lambda f: example.loss_of(outputs(f, x.double()), (x, y)))(flat)
        return found

    (x, y), test = example.samples(64, 1), example.samples(1, 2)
    jacobian = vmap(lambda one: jacrev(outputs)(flat, one))(x.double())
    p = outputs(flat, x.double()).softmax(1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    matrix = torch.einsum("nci,ncd,ndj->ij", jacobian, inner, jacobian) / len(x)
    matrix += example.DAMPING * torch.eye(len(flat), dtype=torch.float64)
    solved = torch.linalg.solve(matrix, gradient(test))
    return [-float(solved @ gradient((x[row : row + 1], y[row : row + 1]))) for row in range(num)]


def test_influences_are_those_by_the_matrix_itself(ranks: RankPool) -> None:
    expected = plain_influences()
    for stage in (0, 3):
        for found in ranks(2, influences, stage):
            # conjugate gradients stop at a residual of 1e-6, of a condition of about 10
            assert_near(found, expected, 10 * ROUNDING)


def test_recipes_and_algorithms_are_short() -> None:
    for path in sorted(FOLDER.glob("*.py")):
        assert len(path.read_text().splitlines()) <= 80, path.name
    text = (FOLDER / "linear_algebra.py").read_text()
    for name in ("lanczos", "conjugate_gradients"):
        body = re.search(rf"^def {name}\(.*?(?=\n\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
        assert body is not None and len(body[0].strip().splitlines()) <= 30, name


def shown() -> dict[str, list[str]]:
    """The cells of the page's table, by recipe."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 4 and row[0] != "recipe"}


def test_the_page_lists_every_recipe_with_its_numbers() -> None:
    table = shown()
    assert {
        Path(name).stem for row in table.values() for name in re.findall(r"\w+\.py", row[0])
    } == {path.stem for path in FOLDER.glob("*.py")} - {"runs", "linear_algebra"}
    runs = recipe("runs")
    for name in TRAINED:
        assert table[name][2] == runs.ends(plain(name)), name
    assert table["DP-SGD"][2] == f"{runs.ends(recipe('private').plainly())} without noise"
    assert table["top eigenvalue"][2] == f"{plain_eigenvalue():.4f}"
    assert table["influence"][2] == ", ".join(f"{x:.4f}" for x in plain_influences())
