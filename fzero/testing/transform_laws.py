"""The laws that an optimizer transform must keep, so that every ZeRO stage, precision
and placement can use it.

The examples are updates of one flat buffer, cut into shards as in fzero. A fault is
described in words, with the tensor that differs. Shape letters: P padded elements of a
flat buffer = W·S, S elements of a shard, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import optree
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.optim.elementwise import LATE_STARTS, at_count, counts_of, find_cut, started
from fzero.optim.transforms import Transform, leaf_names, mixed_precision, same_bits, skip_if
from fzero.plans.flat_params import ALIGNMENT
from fzero.testing.laws import Laws
from sharding import FlatLayout, TensorSpec
from sharding.testing import layouts, overflow_patterns, shapes, tensor_specs, world_sizes
from sharding.views import dtype_name, torch_dtype

GUARD = 8 * ALIGNMENT  # elements of other tensors before and after a shard, in the same memory


@dataclass(frozen=True, slots=True)
class Updates:
    """Updates of one flat buffer with random numbers of very different magnitudes;
    padding is zero.

    >>> layout = FlatLayout(("w",), ((3,),), world_size=2, multiple_of=32)
    >>> updates = Updates(layout, "float32", num_updates=4, seed=0)
    >>> updates.param.shape, updates.grads.shape, updates.param[3:].any().item()
    (torch.Size([64]), torch.Size([4, 64]), False)
    """

    layout: FlatLayout
    dtype: str
    num_updates: int
    seed: int
    # the number of earlier updates, by the state's own counts (`fzero.optim.elementwise.started`)
    start: int = 0

    @property
    def param(self) -> Tensor:
        """The parameter before the first update (P,)."""
        return self._random(1, self.seed)[0]

    @property
    def grads(self) -> Tensor:
        """The gradient of each update (num_updates, P)."""
        return self._random(self.num_updates, self.seed + 1) * torch.logspace(-3, 2, self.numel).to(
            torch_dtype(self.dtype)
        )

    @property
    def numel(self) -> int:
        """P."""
        return self.layout.partition.padded_numel

    def _random(self, num_rows: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(num_rows, self.numel, generator=generator)
        rows[:, self.layout.numel :] = 0
        return rows.to(torch_dtype(self.dtype))


def updates(min_parameters: int = 0, max_parameters: int = 4) -> st.SearchStrategy[Updates]:
    """Updates of buffers on a few ranks, including empty ones, and ones of which some
    ranks hold padding only.
    """
    # large enough for several ranks
    parameters = shapes() | st.tuples(st.integers(ALIGNMENT + 1, 6 * ALIGNMENT))
    aligned = layouts(max_parameters, 5, min_parameters=min_parameters, parameters=parameters).map(
        lambda layout: replace(layout, multiple_of=ALIGNMENT)
    )
    return st.builds(
        Updates,
        aligned,
        st.sampled_from(["float32", "float64"]),
        num_updates=st.integers(1, 4),
        seed=st.integers(0, 999),
        start=st.sampled_from((0, *LATE_STARTS)),
    )


def several_updates() -> st.SearchStrategy[list[Updates]]:
    """Updates of several buffers of one dtype, with different numbers of updates."""
    return st.lists(updates(), min_size=1, max_size=4).map(
        lambda them: [replace(x, dtype=them[0].dtype) for x in them]
    )


class Skips(NamedTuple):
    """Updates of which some are skipped."""

    updates: Updates
    overflows: tuple[tuple[bool, ...], ...]  # per step and rank, whether a gradient is not finite


class Cut(NamedTuple):
    """A parameter's spec, and its number of ranks."""

    spec: TensorSpec
    world_size: int


Make = Callable[[], Transform]  # makes a new instance of the transform
TRANSFORM_LAWS = Laws[Make, Any](updates(min_parameters=1))
# the additional laws for a step that is compiled as one graph
CAPTURE_LAWS = Laws[Make, Updates](updates())
RATE_LAWS = Laws[Callable[[Any], Transform], Updates](updates(min_parameters=1))
"""The law for a function of the learning rate in a step that is compiled as one graph.
"""


def _run(transform: Transform, param: Tensor, grads: Sequence[Tensor] | Tensor, start: int) -> Any:
    """Parameter and state after the updates; works on copies."""
    param = param.clone()
    state = started(transform, param, start)
    for grad in grads:
        _, param, state = transform.update(grad.clone(), param, state)
    return param, state


def _copy(tree: Any) -> Any:
    return optree.tree_map(torch.clone, tree)


def _differs(found: Any, expected: Any) -> str | None:
    """The first tensor of (parameter, state) that is not the expected one bit for bit."""
    names = ["the parameter", *leaf_names(expected[1])]
    for name, x, y in zip(
        names, optree.tree_leaves(found), optree.tree_leaves(expected), strict=True
    ):
        if not same_bits(x, y):
            return name
    return None


EMPTY = st.builds(
    Updates,
    st.builds(
        lambda world_size: FlatLayout((), (), world_size, multiple_of=ALIGNMENT), world_sizes(3)
    ),
    st.sampled_from(["float32", "float64"]),
    num_updates=st.integers(1, 2),
    seed=st.just(0),
)
LARGE = Updates(
    FlatLayout(("p",), ((1 << 17,),), 2, multiple_of=ALIGNMENT), "float32", num_updates=2, seed=0
)
"""The buffer that is always tried, to detect what an update does for many elements
only.
"""


def long(num_updates: int) -> tuple[Updates]:
    """The run on two ranks that is always tried, to detect what an update does
    periodically.
    """
    layout = FlatLayout(("p",), ((2 * ALIGNMENT,),), 2, multiple_of=ALIGNMENT)
    return (Updates(layout, "float32", num_updates, seed=0),)


def long_late_and_large(num_updates: int) -> tuple[Updates, ...]:
    """Both, and short runs that begin after many updates."""
    late = (replace(long(4)[0], start=start) for start in LATE_STARTS)
    return (*long(num_updates), *late, LARGE)


# --- the laws, in the order in which they are tried; the first ones have the clearest messages ----


@TRANSFORM_LAWS.law(
    "specs must describe exactly what init makes",
    "Give each tensor of the state the spec that it needs: dataclasses.replace(param_spec, ...) "
    "keeps what is the same, and fzero.optim.transforms.step_spec(param_spec) is that of a count",
    st.builds(Cut, tensor_specs(dtypes=("float32", "float64", "bfloat16")), world_sizes()),
)
def _misplaced(make: Make, cut: Cut) -> str | None:
    spec, world_size = cut
    param = torch.ones(spec.local_shape(world_size), dtype=torch_dtype(spec.dtype))
    transform = make()
    leaves, structure = optree.tree_flatten(transform.init(param), none_is_leaf=True)
    specs, placed = optree.tree_flatten(transform.specs(spec), none_is_leaf=True)
    if structure != placed:
        return f"init makes {structure} and specs describes {placed}"
    names = [accessor.codify("state") for accessor in structure.accessors()]
    for name, leaf, described in zip(names, leaves, specs, strict=True):
        if leaf is None and described is None:
            continue
        if not isinstance(leaf, Tensor) or not isinstance(described, TensorSpec):
            return f"{name} is a {type(leaf).__name__} and its spec a {type(described).__name__}"
        made = tuple(leaf.shape), dtype_name(leaf.dtype)
        if made != (described.local_shape(world_size), described.dtype):
            return f"init makes {name} with shape and dtype {made} and specs describes {described}"
        if described.placement != spec.placement:
            return (
                f"specs puts {name} on {described.placement} and its parameter is on "
                f"{spec.placement}"
            )
    return None


@TRANSFORM_LAWS.law(
    "an update must work on no elements, for a shard may be empty",
    "Skip what needs an element where param.numel() is 0",
    EMPTY,
)
def _fails(make: Make, example: Updates) -> str | None:
    _run(make(), example.param, example.grads, example.start)
    return None


@TRANSFORM_LAWS.law(
    "an update must keep structure, shapes and dtypes",
    "Return gradient, parameter and state as they came; a state is one NamedTuple of tensors, made "
    "in init",
    updates(),
    long,
)
def _changed_kind(make: Make, example: Updates) -> str | None:
    transform, param = make(), example.param
    state = started(transform, param, example.start)
    for grad in example.grads:
        before = (grad, param, state)
        leaves, structure = optree.tree_flatten(before)
        kinds = [(tuple(x.shape), x.dtype) for x in leaves]
        names = ["the gradient", "the parameter", *leaf_names(state)]
        after = transform.update(grad.clone(), param, state)
        if optree.tree_structure(tuple(after)) != structure:
            return f"an update of {structure} gives {optree.tree_structure(tuple(after))}"
        for name, x, kind in zip(names, optree.tree_leaves(tuple(after)), kinds, strict=True):
            if not isinstance(x, Tensor) or (tuple(x.shape), x.dtype) != kind:
                return f"{name} is {kind} before an update and {x!r:.100} after it"
        _, param, state = after
    return None


@TRANSFORM_LAWS.law(
    "no two tensors of parameter and state may share memory, for each is written in place",
    "Clone one of them",
    corners=long,
)
def _aliased(make: Make, example: Updates) -> str | None:
    transform, param = make(), example.param
    state = transform.init(param)
    for index, grad in enumerate([None, *example.grads]):
        if grad is not None:
            _, param, state = transform.update(grad.clone(), param, state)
        named = zip(
            ["the parameter", *leaf_names(state)], [param, *optree.tree_leaves(state)], strict=True
        )
        for (first, x), (second, y) in combinations(named, 2):
            if max(x.data_ptr(), y.data_ptr()) < min(
                x.data_ptr() + x.nbytes, y.data_ptr() + y.nbytes
            ):
                return (
                    f"{first} and {second} share memory after "
                    f"{f'update {index}' if index else 'init'}"
                )
    return None


@TRANSFORM_LAWS.law(
    "an update may write to its three arguments only, and init to nothing",
    "Work on the tensors that are given and not on their storage; clone what init keeps",
    updates(),
    lambda _: (LARGE,),
)
def _trespasses(make: Make, example: Updates) -> str | None:
    transform, memories = make(), list[tuple[str, Tensor]]()

    def guarded(x: Tensor, name: str) -> Tensor:
        memories.append((name, torch.full((x.numel() + 2 * GUARD,), 7, dtype=x.dtype)))
        return memories[-1][1][GUARD : GUARD + x.numel()].copy_(x)

    param = guarded(example.param, "the parameter")
    state = started(transform, param, example.start)
    if not same_bits(param, example.param):
        return "init writes to the parameter"
    for grad in example.grads:
        _, param, state = transform.update(guarded(grad, "the gradient"), param, state)
    for name, memory in memories:
        if (memory[:GUARD] != 7).any() or (memory[-GUARD:] != 7).any():
            return f"an update writes to the memory around {name}"
    return None


@TRANSFORM_LAWS.law(
    "equal updates must be equal bit for bit",
    "Keep what an update remembers in the state, as tensors, and draw no random numbers",
    corners=long,
)
def _remembers(make: Make, example: Updates) -> str | None:
    expected = _run(make(), example.param, example.grads, example.start)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(example.seed + 1)
        before = torch.get_rng_state()
        differs = _differs(_run(make(), example.param, example.grads, example.start), expected)
        if not torch.equal(before, torch.get_rng_state()):
            return "it draws random numbers of torch's generator"
    return f"the same updates, made twice, differ in {differs}" if differs else None


@TRANSFORM_LAWS.law(
    "the state must be all that an update remembers",
    "Keep what an update remembers in the state: nothing in a closure, nothing by id() or "
    "data_ptr()",
    corners=long,
)
def _is_disturbed(make: Make, example: Updates) -> str | None:
    expected = _run(make(), example.param, example.grads, example.start)
    transform, other = make(), make()
    others = Updates(example.layout, example.dtype, example.num_updates, example.seed + 2)
    extra = torch.ones(ALIGNMENT, dtype=torch_dtype(example.dtype))
    param, state = example.param, started(transform, example.param, example.start)
    for grad in example.grads:  # tensors at other addresses for each, as after loading a checkpoint
        param, state = _copy((param, state))
        _, param, state = transform.update(grad.clone(), param, state)
    if differs := _differs((param, state), expected):
        return f"updates go another way in {differs} when a copy of the state goes on"
    param, other_param = example.param, torch.cat([others.param, extra])
    state, other_state = started(transform, param, example.start), other.init(other_param)
    for grad, other_grad in zip(example.grads, others.grads, strict=True):
        _, param, state = transform.update(grad.clone(), param, state)
        _, other_param, other_state = other.update(
            torch.cat([other_grad, extra]), other_param, other_state
        )
    if differs := _differs((param, state), expected):
        return (
            f"updates go another way in {differs} when those of another flat buffer come "
            f"between them"
        )
    return None


@TRANSFORM_LAWS.law(
    "the update of a shard must be the shard of the update, bit for bit",
    "Let each element go its own way; a transform that needs norms or sums over others takes "
    "`contents` (fzero.optim.ShardContents)",
    updates(),
    long_late_and_large,
)
def _sees_others(make: Make, example: Updates) -> str | None:
    bounds = [example.layout.partition.bounds(rank) for rank in range(example.layout.world_size)]
    differs = find_cut(make(), example.param, example.grads, bounds, start=example.start)
    if not differs:
        return None
    return (
        f"the shards of {len(bounds)} ranks, updated one by one, differ from the whole in {differs}"
    )


@TRANSFORM_LAWS.law(
    "a skipped update must leave everything as it was, bit for bit",
    "Let update_skip_if(skip, ...) advance nothing where skip is true and be update where it is "
    "not, or leave it out",
    st.builds(Skips, updates(min_parameters=1), overflow_patterns(max_steps=4, max_world_size=3)),
    lambda num: (Skips(*long(num), ((True,), (False,))), Skips(LARGE, ((True,),))),
)
def _is_not_skipped(make: Make, example: Skips) -> str | None:
    (of, overflows), transform = example, make()
    expected = _run(transform, of.param, of.grads, of.start)
    skips = [any(row) for row in overflows]
    param, state, good = of.param, started(transform, of.param, of.start), iter(of.grads)
    for skip in [*skips, *[False] * of.num_updates]:
        grad = torch.full_like(param, float("nan")) if skip else next(good, None)
        if grad is None:
            break
        kept = _copy((param, state))
        _, param, state = skip_if(torch.tensor(skip), transform).update(grad.clone(), param, state)
        if skip and (differs := _differs((param, state), kept)):
            return f"a skipped update changes {differs}"
    differs = _differs((param, state), expected)
    return f"after skipped updates {differs} is another than without them" if differs else None


@TRANSFORM_LAWS.law(
    "an update of 16-bit numbers must be that of the same numbers in fp32, rounded at the end",
    "Let nothing depend on how many elements are updated at a time, nor on memory that an earlier "
    "update had",
    corners=lambda _: (LARGE,),
)
def _is_not_widened(make: Make, example: Updates) -> str | None:
    transform, factor = make(), torch.tensor(0.25)
    param, grads = example.param.float(), example.grads.bfloat16()
    expected = _run(transform, param, grads.float() * factor, example.start)
    tiled = max(ALIGNMENT, example.numel // (8 * ALIGNMENT) * ALIGNMENT)
    counts = counts_of(transform)
    for tile in (None, tiled):
        own, out = param.clone(), param.bfloat16()
        how = mixed_precision(
            skip_if(torch.tensor(False), transform),
            state_dtype="float32",
            factor=factor,
            out=out,
            tile=tile,
        )
        state = at_count(how.init(own), counts, example.start) if example.start else how.init(own)
        for grad in grads:
            _, own, state = how.update(grad.clone(), own, state)
        tiles = "" if tile is None else f", in tiles of {tile} elements,"
        if differs := _differs((own, state), expected):
            return (
                f"bf16 gradients of an fp32 master{tiles} make another {differs} than the "
                f"same ones in fp32"
            )
        assert torch.equal(out, own.bfloat16())
    narrow = []
    for tile in (None, tiled):
        how = mixed_precision(transform, state_dtype="bfloat16", tile=tile)
        narrow.append(_run(how, param.bfloat16(), grads, example.start))
    differs = _differs(*narrow)
    return (
        f"all in bf16, tiles of {tiled} elements give another {differs} than one"
        if differs
        else None
    )


@TRANSFORM_LAWS.law(
    "one call for several buffers must be their updates one by one, bit for bit",
    "Let `several` write each parameter in place and give every buffer's own state, empty ones' "
    "too, or leave it out",
    several_updates(),
    lambda num: ([*long(num), *long(3)], [LARGE, *long(1)]),
)
def _several_differ(make: Make, example: list[Updates]) -> str | None:
    transform, last = make(), max(of.num_updates for of in example)
    if not transform.is_fused:
        return None
    side_by_side = torch.cat([of.param for of in example])
    params = torch.split(side_by_side, [of.numel for of in example])
    states = [
        started(transform, param, of.start) for of, param in zip(example, params, strict=True)
    ]
    for to_go in range(last, 0, -1):  # all end together, so some begin after others
        now = [index for index, of in enumerate(example) if of.num_updates >= to_go]
        grads = [example[index].grads[-to_go] for index in now]
        _, news = transform.update_each(
            grads, [params[index] for index in now], [states[index] for index in now]
        )
        if len(news) != len(now):
            return f"one call for {len(now)} buffers gives {len(news)} states"
        for index, new in zip(now, news, strict=True):
            states[index] = new
    for index, of in enumerate(example):
        if differs := _differs(
            (params[index], states[index]), _run(transform, of.param, of.grads, of.start)
        ):
            return (
                f"buffer {index} of {len(example)}, updated in one call with the others, "
                f"differs in {differs}"
            )
    return None


class _Reading(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that read the value of a tensor to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(
            word in str(operator)
            for word in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal.default")
        ):
            self.operators.append(str(operator))
        return operator(*args, **(kwargs or {}))


@CAPTURE_LAWS.law(
    "an update must not read the values of tensors, for a captured step has none",
    "Choose with torch.where; no if or float() of a tensor, no .item()",
    corners=long,
)
def _reads(make: Make, example: Updates) -> str | None:
    with _Reading() as reading:
        # finding the counts of a state also reads values
        _run(make(), example.param, example.grads, start=0)
    return f"the host reads a value by {reading.operators[0]}" if reading.operators else None


@RATE_LAWS.law(
    "a learning rate in a 0-d tensor must be data, for a captured step has no other",
    "Compute with the tensor itself, inside update: no float(lr), no lr.item(), nothing derived "
    "from it outside",
    corners=long,
)
def _freezes_rate(make: Callable[[Any], Transform], example: Updates) -> str | None:
    rate = torch.tensor(0.5, dtype=torch_dtype(example.dtype))
    later, expected = make(rate), make(torch.full_like(rate, 0.25))
    rate.fill_(0.25)
    updated = (
        _run(transform, example.param, example.grads, example.start)
        for transform in (later, expected)
    )
    differs = _differs(*updated)
    if rate.item() != 0.25:
        return "an update writes to the learning rate"
    return (
        f"a learning rate that changes after the transform is made does not change {differs}"
        if differs
        else None
    )
