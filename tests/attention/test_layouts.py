"""Layouts have DeepSpeed's bits, for every size, head and option."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fzero.attention import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    Layout,
    Local,
    Pattern,
    Variable,
    density,
    from_tensor,
    to_tensor,
)

# --- golden values --------------------------------------------------------------------------------

FIXED_8 = "####...# " * 4 + "...##### " * 4
GOLDEN: list[tuple[Pattern, int, str]] = [
    (Fixed(), 8, FIXED_8),
    (
        Fixed(attention="unidirectional"),
        8,
        "#....... ##...... ###..... ####.... ...##... ...###.. ...####. ...#####",
    ),
    (Fixed(), 6, "####.# " * 4 + "...### " * 2),
    (
        Fixed(num_global_blocks=2, attention="unidirectional"),
        8,
        "#....... ##...... ####.... ####.... ..###... ..####.. ..###### ..######",
    ),
    (Fixed(horizontal_global_attention=True), 4, "#### #### #### ####"),
    (
        Variable(local_window_blocks=(1, 3), global_block_indices=(2,)),
        6,
        "#.#... .###.. .###.. .###.. ..#.## ..#.##",
    ),
    (
        Variable(
            global_block_indices=(1,), global_block_end_indices=(3,), local_window_blocks=(2,)
        ),
        5,
        "###.. ###.. .###. .###. .##.#",
    ),
    (BSLongformer(global_block_indices=(1,)), 4, "##.. #### .### .###"),
    (Local(attention="bidirectional"), 4, "##.. ###. .### ..##"),
    (Dense(), 2, "## ##"),
]


@pytest.mark.parametrize(("pattern", "num_blocks", "picture"), GOLDEN)
def test_a_pattern_keeps_these_blocks(pattern: Pattern, num_blocks: int, picture: str) -> None:
    assert str(pattern.layout(num_blocks)).split() == picture.split()


def test_layouts_have_these_numbers_of_blocks_and_densities() -> None:
    counts = {
        Fixed(): 40,
        Fixed(attention="unidirectional"): 24,
        BSLongformer(): 34,
        BSLongformer(attention="unidirectional"): 21,
    }
    assert {pattern: pattern.layout(8).num_kept for pattern in counts} == counts
    for pattern, at_32, at_128 in (
        (Fixed(), 0.344, 0.273),
        (Fixed(attention="unidirectional"), 0.188, 0.141),
        (BSLongformer(), 0.150, 0.039),
    ):
        assert [round(density(pattern.layout(n)), 3) for n in (32, 128)] == [at_32, at_128]


RANDOM_8 = "######## ##...... #.#..... #.##.... #.#.#... #...##.. #.#...#. #......#"


def test_random_blocks_are_those_of_the_seed_the_layer_and_the_head() -> None:
    pattern = BigBird(different_layout_per_head=True, num_sliding_window_blocks=1)
    layout = pattern.layout(8, heads=2, seed=3, layer=1)
    assert layout.picture(1).split() == RANDOM_8.split()
    assert layout == pattern.layout(8, heads=2, seed=3, layer=1)
    others = [
        pattern.layout(8, heads=2, seed=3, layer=2),
        pattern.layout(8, heads=2, seed=4, layer=1),
    ]
    assert len({layout, *others}) == 3 and layout.rows[0] != layout.rows[1]


# --- DeepSpeed's own code -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def upstream() -> ModuleType:
    """DeepSpeed's file of layouts, by itself."""
    found = importlib.util.find_spec("deepspeed")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs DeepSpeed")
    path = Path(found.submodule_search_locations[0]) / "ops/sparse_attention/sparsity_config.py"
    spec = importlib.util.spec_from_file_location("upstream_sparsity_config", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def patterns() -> st.SearchStrategy[Pattern]:
    """Patterns with options, of which a part is refused for some sizes."""
    heads, count = st.booleans(), st.integers(1, 4)
    way = st.sampled_from(["bidirectional", "unidirectional"])
    starts = st.lists(st.integers(0, 12), min_size=1, max_size=3)
    ranges = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=3)

    def with_ranges(cls: type[Pattern]) -> Callable[..., Pattern]:
        def made(
            ranges: list[tuple[int, int]] | None, starts: list[int], **options: Any
        ) -> Pattern:
            if ranges is None:
                return cls(global_block_indices=tuple(starts), **options)
            given = tuple(start for start, _ in ranges)
            return cls(
                global_block_indices=given,
                global_block_end_indices=tuple(a + n for a, n in ranges),
                **options,
            )

        return made

    @st.composite
    def fixed(draw: st.DrawFn) -> Pattern:
        glob = draw(st.integers(1, 3))
        per_window = draw(st.integers(1, 3))
        each, attention = draw(heads), draw(way)
        return Fixed(
            num_local_blocks=glob * per_window,
            num_global_blocks=glob,
            attention=attention,
            different_layout_per_head=each,
            horizontal_global_attention=attention == "bidirectional" and draw(st.booleans()),
            num_different_global_patterns=draw(st.integers(1, per_window)) if each else 1,
        )

    common = {"ranges": st.none() | ranges, "starts": starts, "different_layout_per_head": heads}
    return st.one_of(
        st.builds(Dense, different_layout_per_head=heads),
        fixed(),
        st.builds(
            with_ranges(Variable),
            **common,
            num_random_blocks=st.integers(0, 3),
            attention=st.just("unidirectional"),
            local_window_blocks=st.lists(count, min_size=1, max_size=4).map(tuple),
        ),
        st.builds(
            with_ranges(Variable),
            **common,
            num_random_blocks=st.integers(0, 3),
            horizontal_global_attention=st.booleans(),
            local_window_blocks=st.lists(count, min_size=1, max_size=4).map(tuple),
        ),
        st.builds(
            BigBird,
            different_layout_per_head=heads,
            num_random_blocks=st.integers(0, 3),
            num_sliding_window_blocks=count,
            num_global_blocks=st.integers(0, 3),
        ),
        st.builds(
            BigBird,
            different_layout_per_head=heads,
            num_random_blocks=st.integers(0, 1),
            num_sliding_window_blocks=count,
            attention=st.just("unidirectional"),
        ),
        st.builds(
            with_ranges(BSLongformer), **common, num_sliding_window_blocks=count, attention=way
        ),
        st.builds(Local, num_sliding_window_blocks=count, attention=way),
    )


def theirs(
    upstream: ModuleType, pattern: Pattern, num_blocks: int, heads: int, seed: int, layer: int
) -> torch.Tensor:
    """The layout as DeepSpeed makes it, with Python's random numbers of each head begun
    anew.
    """
    options = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(pattern).items()
    }
    if isinstance(pattern, Local):
        del options["different_layout_per_head"]
    cls = getattr(
        upstream,
        (
            f"{'LocalSlidingWindow' if isinstance(pattern, Local) else type(pattern).__name__}SparsityConfig"
        ),
    )

    class Seeded(cls):  # type: ignore[misc]
        def set_random_layout(self, h: int, layout: torch.Tensor) -> torch.Tensor:
            random.seed(f"{seed}/{layer}/{h}")
            return super().set_random_layout(h, layout)

    made: torch.Tensor = Seeded(heads, block=2, **options).make_layout(2 * num_blocks)
    return made


@settings(max_examples=150)
@given(patterns(), st.integers(1, 12), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2))
def test_every_layout_has_upstreams_bits(
    upstream: ModuleType, pattern: Pattern, num_blocks: int, heads: int, seed: int, layer: int
) -> None:
    try:
        expected = theirs(upstream, pattern, num_blocks, heads, seed, layer)
    except ValueError:
        with pytest.raises(ValueError, match=type(pattern).__name__):
            pattern.layout(num_blocks, heads=heads, seed=seed, layer=layer)
        return
    layout = pattern.layout(num_blocks, heads=heads, seed=seed, layer=layer)
    assert torch.equal(to_tensor(layout).long().expand(heads, -1, -1), expected)


# --- what fzero does otherwise --------------------------------------------------------------------


def test_a_unidirectional_bigbird_draws_as_many_blocks_as_a_row_has() -> None:
    layout = BigBird(
        num_random_blocks=3, attention="unidirectional", num_sliding_window_blocks=1
    ).layout(8)
    assert [len(layout.columns(row)) >= min(3, row + 1) for row in range(8)] == [True] * 8
    assert layout == layout.lower_triangle()


def test_unidirectional_layouts_may_have_blocks_above_the_diagonal_which_the_lower_triangle_drops() -> (
    None
):
    layout = Fixed(num_global_blocks=2, attention="unidirectional").layout(8)
    assert layout.columns(2) == (0, 1, 2, 3) and layout.lower_triangle().columns(2) == (0, 1, 2)


@given(st.integers(1, 9), st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_layout_is_its_tensor_and_its_corner_is_the_tensors(
    num_blocks: int, heads: int, draw: random.Random
) -> None:
    rows = tuple(
        tuple(draw.getrandbits(num_blocks) for _ in range(num_blocks)) for _ in range(heads)
    )
    layout = Layout(rows)
    tensor = to_tensor(layout)
    assert to_tensor(from_tensor(tensor)).expand(heads, -1, -1).equal(tensor)
    assert density(layout) == tensor.double().mean()
    size = draw.randint(1, num_blocks)
    assert to_tensor(layout.corner(size)).equal(tensor[:, :size, :size])
    assert to_tensor(layout.lower_triangle()).equal(tensor.tril())
    assert layout.of_heads(range(heads)) == layout
    assert hash(layout) == hash(Layout(rows)) and layout.picture(0).count("#") == tensor[0].sum()


WRONG: list[tuple[type[Pattern], dict[str, Any], str]] = [
    (
        Fixed,
        {"num_local_blocks": 4, "num_global_blocks": 3},
        r"Fixed.num_global_blocks: must divide num_local_blocks, 4, got 3",
    ),
    (
        Fixed,
        {"num_different_global_patterns": 2},
        "num_different_global_patterns: needs different_layout_per_head",
    ),
    (
        Fixed,
        {"num_different_global_patterns": 5, "different_layout_per_head": True},
        "must be at most .* 4 / 1, got 5",
    ),
    (
        Fixed,
        {"attention": "unidirectional", "horizontal_global_attention": True},
        "horizontal_global_attention: needs",
    ),
    (Fixed, {"num_local_blocks": 0}, "num_local_blocks: must be at least 1, got 0"),
    (Variable, {"local_window_blocks": ()}, "local_window_blocks: must be sizes of at least 1"),
    (
        Variable,
        {"global_block_end_indices": (1, 2)},
        "global_block_end_indices: must have as many as .* 1, got 2",
    ),
    (Variable, {"global_block_end_indices": (0,)}, "must each be above its start"),
    (Variable, {"num_random_blocks": -1}, "num_random_blocks: must be at least 0, got -1"),
    (
        BSLongformer,
        {"attention": "both"},
        "BSLongformer.attention: must be 'bidirectional' or 'unidirectional', got 'both'",
    ),
    (
        Local,
        {"num_sliding_window_blocks": 0},
        "num_sliding_window_blocks: must be at least 1, got 0",
    ),
]


@pytest.mark.parametrize(("cls", "options", "says"), WRONG)
def test_wrong_options_are_refused_by_their_name(
    cls: type[Pattern], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        cls(**options)


def test_wrong_layouts_are_refused() -> None:
    with pytest.raises(
        ValueError, match="num_global_blocks: must be at most the number of blocks, 2, got 3"
    ):
        BigBird(num_global_blocks=3, num_sliding_window_blocks=1).layout(2)
    for rows, says in (
        ((), "1 or more"),
        (((1,), (1, 2)), "same number of rows"),
        (((2,),), "columns must be in 0 to 0"),
    ):
        with pytest.raises(ValueError, match=says):
            Layout(rows)
    with pytest.raises(ValueError, match="row 1 of head 0 keeps none"):
        Layout(((1, 0),)).check_rows()
    for call, says in (
        (lambda x: x.corner(3), "1 to 2, got 3"),
        (lambda x: x.coarsened(3), "divide 2 blocks, got 3"),
    ):
        with pytest.raises(ValueError, match=says):
            call(Layout(((1, 2),)))
    with pytest.raises(ValueError, match="heads, blocks, blocks"):
        from_tensor(torch.ones(2, 3))
