"""`tiled`: a token-wise function that runs tile by tile, and again in the backward.

1. The forward runs the function on one tile after the other, and keeps none of its
   intermediates. A torch function mode (`_Noting`) notes the tensors that the function
   reads besides its tile and that need a gradient: parameters of modules, tensors of a
   closure, further arguments.
2. `_Tiles`, a node of autograd, joins the results. Its inputs are the tensor that was
   cut and the noted ones, which it saves; in stage 3 autograd saves them as places in
   a gathered buffer, so all tiles of a backward share one gather.
3. Its backward runs the function on each tile again, on the saved tensors instead of
   those that the function finds, and adds up their gradients (in fp32).

torch.compile cannot look into such a node, and takes `torch.utils.checkpoint` for each
tile instead.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import ref

import optree
import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from fzero.common.arguments import check_callable
from fzero.model.own_params import FetchedParameters, is_bound, with_present
from fzero.tiling.shapes import check_divides

Again = Callable[[], AbstractContextManager[None]]


def tiled(fn: Callable[..., Tensor], shards: int, dim: int = 1) -> Tiled:
    """`fn`, a token-wise function, computed in `shards` tiles along a dimension.

    The result is `fn`'s, to the rounding of smaller products. Intermediates of one tile
    exist at a time, forward and backward; the price is a second forward. Every rank
    calls it; it sends nothing itself.

    Args:
        fn: `fn(x, *args, **kwargs)` returns a tensor whose size along `dim` is x's, and
            whose tokens along it depend on the same tokens of x alone. It is called
            again in the backward, so it must be a function: a module, or code that
            reads parameters. The first call checks on a drawn permutation that it mixes
            no tokens, as long as it draws no random numbers outside of dropout modules.
        shards: the number of tiles; must divide x's size along `dim`.
        dim: the dimension of the tokens, of x and of the result.

    Returns:
        A function of the same arguments. All tensors among them but the first are
        given to each tile whole. Gradients of all tensors that `fn` reads add up, in
        fp32 under half precision.

    Raises:
        ValueError: from a call: `shards` does not divide, `fn` mixes tokens or changes
            their number, or reads a tensor by an `autograd.Function` of its own without
            having it as an argument.
    """
    check_callable("tiled: fn", fn, "of one tile")
    check_divides("tiled", 0, shards, "tokens")
    return Tiled(fn, shards, dim)


@dataclass(frozen=True)
class Tiled:
    """See `tiled`, which makes it.

    Attributes:
        again: a context for each second run of `fn`.
        name: the field in messages.
        checked: holds True once `fn` has been checked.
    """

    fn: Callable[..., Tensor]
    shards: int
    dim: int = 1
    again: Again = nullcontext
    name: str = "tiled"
    checked: list[bool] = field(default_factory=list, compare=False, repr=False)

    def __call__(self, x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
        size = self._size(x)
        if torch.compiler.is_dynamo_compiling():
            return self._in_dynamo(torch.split(x, size, self.dim), args, kwargs)
        if not self.checked and _has_values(x):
            self._check_tokens(x.detach(), args, kwargs)
        call = _Call(self, size, *_noted_random(x))
        run = _Noting()
        # further arguments may be read by code that no mode sees
        call.args, call.kwargs = run.given((args, kwargs))
        tiles = [
            self._tile(call, run, index, tile, args, kwargs)
            for index, tile in enumerate(torch.split(x, size, self.dim))
        ]
        if not self.checked and _has_values(x):
            self.checked.append(True)
        call.keys = [*run.captured]
        call.slots = _slots_of(self.fn, run.captured)
        captured = [*run.captured.values()]
        return _joined(call, x, len(tiles), *tiles, *captured)

    def _size(self, x: Any) -> int:
        """The size of a tile."""
        if not isinstance(x, Tensor) or not -x.dim() <= self.dim < x.dim():
            got = f"{x.dim()} dimensions" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(
                f"{self.name}: the first argument must be a tensor with dimension {self.dim}, got "
                f"{got}; pass it by position, or choose dim="
            )
        return max(1, check_divides(self.name, x.shape[self.dim], self.shards, "tokens"))

    def _tile(
        self, call: _Call, run: _Noting, index: int, tile: Tensor, args: Any, kwargs: Any
    ) -> Tensor:
        """The result of a tile, without its graph."""
        tile = tile.detach().contiguous()  # for code that takes a view of it
        before = call.random.state() if call.draws else None
        proxies = get_proxy_mode()
        nodes = 0 if proxies is None else len(proxies.tracer.graph.nodes)
        with run.of_tile(tile):
            out = self.fn(tile, *args, **kwargs)
        if proxies is not None:
            self._refuse_draws([*proxies.tracer.graph.nodes][nodes:])
        elif call.draws:
            call.note(before)
        if not isinstance(out, Tensor) or out.dim() < 1 or out.shape[self.dim] != call.size:
            got = tuple(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ValueError(
                f"{self.name}: fn must return one tensor with as many tokens as its input along "
                f"dimension {self.dim} ({call.size}), got {got}; return the tokens' tensor alone"
            )
        if index == 0 and not self.checked:
            self._check_graph(out, tile, run)
        return out.detach()

    def _in_dynamo(self, tiles: Sequence[Tensor], args: Any, kwargs: Any) -> Tensor:
        recomputes = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
        if recomputes:
            return torch.cat(
                [checkpoint(self.fn, tile, *args, use_reentrant=False, **kwargs) for tile in tiles],
                self.dim,
            )
        return torch.cat([self.fn(tile.contiguous(), *args, **kwargs) for tile in tiles], self.dim)

    # --- checks -------------------------------------------------------------------------------

    def _refuse_draws(self, nodes: Sequence[Any]) -> None:
        seeded = torch.Tag.nondeterministic_seeded
        if any(seeded in getattr(node.target, "tags", ()) for node in nodes):
            raise ValueError(
                f"{self.name}: fn must draw no random numbers where a step is one graph, which "
                f"would draw others for the backward, got dropout or the like; set it to 0, or "
                f"leave compile out"
            )

    def _check_graph(self, out: Tensor, tile: Tensor, run: _Noting) -> None:
        """Raises if the graph of a result reaches a tensor that was not noted."""
        noted = [own for x in (*run.captured.values(), tile) for own in _levels(x)]
        known, ends = {id(x) for x in noted}, {x.grad_fn for x in noted}
        todo, seen = [out.grad_fn], {None, *ends}
        while todo:
            node: Any = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            is_old = node._sequence_nr() < run.first_node
            if (variable is not None and id(variable) not in known) or (
                variable is None and is_old
            ):
                shape = "" if variable is None else f" of shape {tuple(variable.shape)}"
                raise ValueError(
                    f"{self.name}: fn must pass all tensors that need gradients through operators "
                    f"of PyTorch, or have them as arguments, got one{shape} that only an "
                    f"autograd.Function reads; pass it to the tiled function: "
                    f"tiled(fn, {self.shards})(x, weight)"
                )
            todo += [following for following, _ in node.next_functions]

    def _check_tokens(self, x: Tensor, args: Any, kwargs: Any) -> None:
        """Raises if a token's result depends on others: those of drawn tokens alone
        must be as among all.
        """
        few = x.narrow(self.dim, 0, min(x.shape[self.dim], 32)).contiguous()
        if few.shape[self.dim] < 2 or not x.numel():
            return
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randperm(few.shape[self.dim], generator=generator)[: few.shape[self.dim] // 2]
        drawn = drawn.to(x.device)
        random = _Random(x.device)
        before = random.state()
        uncached = torch.autocast(
            x.device.type,
            torch.get_autocast_dtype(x.device.type),
            enabled=torch.is_autocast_enabled(x.device.type),
            cache_enabled=False,  # a weight cast here would have no gradient later
        )
        with torch.no_grad(), uncached, _without_dropout(self.fn):
            whole = self.fn(few, *args, **kwargs)
            if random.has_moved(before):
                random.set(before)
                return
            part = few.index_select(self.dim, drawn)
            try:
                alone = self.fn(part, *args, **kwargs)
            except RuntimeError as error:
                raise ValueError(
                    f"{self.name}: fn must take any number of tokens along dimension {self.dim}, "
                    f"got an error for {len(drawn)} of {few.shape[self.dim]}: {error}; leave what "
                    f"mixes tokens outside of it, or choose dim="
                ) from error
        if not isinstance(whole, Tensor) or whole.shape[self.dim] != few.shape[self.dim]:
            return  # `_tile` reports it
        among = whole.index_select(self.dim, drawn)
        rounding = 100 * torch.finfo(among.dtype).eps if among.is_floating_point() else 0
        apart = (alone - among).abs().amax() if among.numel() else 0
        if not apart <= rounding * max(1.0, float(among.abs().amax())):
            raise ValueError(
                f"{self.name}: fn must compute each token along dimension {self.dim} from that "
                f"token alone, got results that differ by {float(apart):.2g} for a drawn "
                f"permutation of {len(drawn)} of {few.shape[self.dim]} tokens; leave attention, "
                f"convolutions and norms over tokens outside of it, or choose dim="
            )


def _joined(call: _Call, x: Tensor, num: int, *tensors: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        joined: Tensor = _Tiles.apply(call, x, num, *tensors)  # type: ignore[no-untyped-call]
        return joined
    return torch.cat(tensors[:num], call.tiled.dim)


# --- runs of the function -------------------------------------------------------------------------


class _Mode(TorchFunctionMode):
    """Runs of a function; `found` gets each tensor that operators are given and that
    the function has not made, and returns the one to take.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, Any] = {}

    @abstractmethod
    def found(self, key: Hashable, x: Tensor) -> Tensor: ...

    @contextmanager
    def of_tile(self, tile: Tensor) -> Iterator[None]:
        """One run, on a tile."""
        self._made = {id(tile): ref(tile)}
        with self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = optree.tree_map(self.value, (tuple(args), kwargs or {}), none_is_leaf=True)
        out = func(*args, **kwargs)
        for x in (out,) if isinstance(out, Tensor) else _tensors(out):
            self._made[id(x)] = ref(x)
        return out

    def value(self, x: Any) -> Any:
        """The argument that an operator gets."""
        if not isinstance(x, Tensor):
            return x
        if is_bound(x):  # a parameter that code holds outside of its module
            x = with_present(_same, (x,), {})
        key = _key_of(x)
        made = self._made.get(id(x)) if type(key) is int else None
        return x if made is not None and made() is x else self.found(key, x)


class _Noting(_Mode):
    """The first runs.

    Attributes:
        captured: the tensors that need a gradient, or are wrapped by a transform of
            torch.func, by key.
        first_node: autograd's number at the beginning.
    """

    def __init__(self) -> None:
        super().__init__()
        self.captured: dict[Hashable, Tensor] = {}
        self.first_node = torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]

    def given(self, tree: Any) -> Any:
        """A tree of arguments, with keys (`_Key`) for the tensors that are noted."""

        def noted(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            key = _key_of(self.value(x))
            return _Key(key) if key in self.captured else x

        return optree.tree_map(noted, tree, none_is_leaf=True)

    def found(self, key: Hashable, x: Tensor) -> Tensor:
        """See `_Mode`. Without gradients an operator belongs to an `autograd.Function`,
        whose own arguments count.
        """
        needed = x.requires_grad or is_functorch_wrapped_tensor(x)
        if needed and torch.is_grad_enabled():
            self.captured.setdefault(key, x)
        return x


class _Again(_Mode):
    """A second run, which gets saved tensors for those with a place among them."""

    def __init__(
        self, saved: Sequence[Tensor], places: Mapping[Hashable, int], used: set[int], name: str
    ) -> None:
        super().__init__()
        self._saved, self._places, self._used, self._name = saved, places, used, name
        self._own = {id(x) for x in saved}

    def found(self, key: Hashable, x: Tensor) -> Tensor:
        """See `_Mode`."""
        place = self._places.get(key)
        if place is not None:
            self._used.add(place)
            return self._saved[place]
        if x.requires_grad and torch.is_grad_enabled() and id(x) not in self._own:
            raise_changed(self._name, f"another one, of shape {tuple(x.shape)}")
        return x


def raise_changed(name: str, got: str) -> NoReturn:
    raise ValueError(
        f"{name}: fn must read the same tensors in the backward as in the forward, got {got}; "
        f"tile a module, or pass the tensors as arguments"
    )


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class _Key:
    """Stands for a noted tensor among the arguments of a call."""

    key: Hashable


def _key_of(x: Tensor) -> Hashable:
    """The name of a parameter that a step has passed to its model, which is another
    tensor after another gather; else the tensor's identity.
    """
    name = x.__dict__.get("fzero_name")
    return id(x) if name is None else ("fzero", name)


def _slots_of(
    fn: Any, captured: Mapping[Hashable, Tensor]
) -> dict[Hashable, tuple[dict[str, Any], str]]:
    """See `_Call.slots`; of the modules that a function is, or reads by its closure or
    its globals.
    """
    owner = inspect.unwrap(getattr(fn, "__func__", fn))
    held = [fn, getattr(fn, "__self__", None)]
    if inspect.isfunction(owner):
        held += inspect.getclosurevars(owner).nonlocals.values()
        held += inspect.getclosurevars(owner).globals.values()
    slots: dict[Hashable, tuple[dict[str, Any], str]] = {}
    for module in (inner for x in held if isinstance(x, nn.Module) for inner in x.modules()):
        own = module._parameters
        for name in own:
            # a step's model is asked for names, not for tensors, which would be gathered
            key = (
                ("fzero", own.names.get(name))
                if isinstance(own, FetchedParameters)
                else id(own[name])
            )
            if key in captured:
                slots[key] = own, name
    return slots


def _tensors(tree: Any) -> list[Tensor]:
    if not isinstance(tree, tuple | list | dict):
        return []
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]  # type: ignore[arg-type]


class _Random:
    """The state of the random numbers of a device and of the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on = [torch.cuda] if device.type == "cuda" else []

    def state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(each.get_rng_state() for each in self._on)]

    def set(self, state: Sequence[Tensor]) -> None:
        for put, own in zip(
            (torch.set_rng_state, *(each.set_rng_state for each in self._on)), state, strict=True
        ):
            put(own)

    def has_moved(self, since: Sequence[Tensor]) -> bool:
        return not all(map(torch.equal, self.state(), since))


def _noted_random(x: Tensor) -> tuple[_Random, bool]:
    """The random state that a call notes, and whether it does: a trace and a dry run
    have none.
    """
    modes = _get_current_dispatch_mode_stack()
    is_real = get_proxy_mode() is None and not any(isinstance(m, FakeTensorMode) for m in modes)
    return _Random(x.device), is_real and x.device.type != "meta"


def _has_values(x: Tensor) -> bool:
    """Whether a call computes with numbers, outside of traces and transforms."""
    return _noted_random(x)[1] and not torch._C._are_functorch_transforms_active()


@contextmanager
def _without_dropout(fn: Any) -> Iterator[None]:
    """Inside, the dropout modules of a module, or of that of a method, do nothing."""
    owner = getattr(fn, "__self__", fn)
    modules = owner.modules() if isinstance(owner, nn.Module) else ()
    off = [x for x in modules if isinstance(x, nn.modules.dropout._DropoutNd) and x.training]
    try:
        for each in off:
            each.training = False
        yield
    finally:
        for each in off:
            each.training = True


@dataclass(slots=True)
class _Call:
    """One call: what its backward needs besides the saved tensors.

    Attributes:
        size: tokens of a tile.
        draws: whether the function draws random numbers; True until it is known.
        states: the random state before each tile, if it does.
        keys: of the noted tensors, in the order in which they are saved.
        slots: of noted parameters, the dict and key of a module that held it, which by
            then holds another tensor if `torch.func.functional_call` or a step had put it
            there.
    """

    tiled: Tiled
    size: int
    random: _Random
    draws: bool
    states: list[list[Tensor]] = field(default_factory=list)
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    keys: list[Hashable] = field(default_factory=list)
    slots: Mapping[Hashable, tuple[dict[str, Any], str]] = field(default_factory=dict)
    autocast: Any = field(default_factory=lambda: _autocast_now())

    def note(self, before: Any) -> None:
        """Keeps the random state before a tile; the first tile says whether it is
        needed.
        """
        if not self.states and not self.random.has_moved(before):
            self.draws = False
        else:
            self.states.append(before)

    @contextmanager
    def _as_first(self, index: int) -> Iterator[None]:
        """The random state and autocast of the first run of a tile."""
        with ExitStack() as stack:
            stack.enter_context(self.tiled.again())
            for device, dtype, is_on in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled=is_on))
            now = self.random.state() if self.states else None
            try:
                if self.states:
                    self.random.set(self.states[index])
                yield
            finally:
                if now is not None:
                    self.random.set(now)

    def again(self, index: int, tile: Tensor, captured: Sequence[Tensor], used: set[int]) -> Tensor:
        """The result of a tile, computed from saved tensors; adds the places of those
        that it reads to `used`.
        """
        places = {key: place for place, key in enumerate(self.keys)}

        def given(x: Any) -> Any:
            if not isinstance(x, _Key):
                return x
            used.add(places[x.key])
            return captured[places[x.key]]

        args, kwargs = optree.tree_map(given, (self.args, self.kwargs), none_is_leaf=True)
        for key, (held, name) in self.slots.items():
            # past the `fetch` of a step's model, which outside of it has its own tensors
            places[id(dict.__getitem__(held, name))] = places[key]
        tile, run = tile.contiguous(), _Again(captured, places, used, self.tiled.name)
        with self._as_first(index), run.of_tile(tile):
            return self.tiled.fn(tile, *args, **kwargs)


def _autocast_now() -> list[tuple[str, torch.dtype, bool]]:
    return [
        (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
    ]


# --- the node of autograd -------------------------------------------------------------------------


class _Tiles(torch.autograd.Function):
    """(call, x, number of tiles, the results of tiles, noted tensors) → the results,
    joined.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, x: Tensor, num: int, *tensors: Tensor) -> Tensor:
        return torch.cat(tensors[:num], call.tiled.dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, x, ctx.num, *tensors = inputs
        ctx.save_for_backward(x, *tensors[ctx.num :])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        needs = [ctx.needs_input_grad[1], *ctx.needs_input_grad[3 + ctx.num :]]
        of_x, *others = _pulled(ctx.call, tensors, grad, needs)
        return None, of_x, None, *(None for _ in range(ctx.num)), *others


def _pulled(
    call: _Call, tensors: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of x and of the noted tensors, tile by tile."""
    x, *captured = tensors
    dim, size = call.tiled.dim, call.size
    wanted = [index for index, needed in enumerate(needs) if needed]
    is_recorded = torch.is_grad_enabled() and _is_derived_again((*tensors, grad))
    parts, sums, used = list[Tensor](), dict[int, Tensor](), set[int]()
    with torch.set_grad_enabled(is_recorded):
        for index, (tile, own) in enumerate(
            zip(torch.split(x, size, dim), torch.split(grad, size, dim), strict=True)
        ):

            def run(*some: Tensor, index: int = index, tile: Tensor = tile) -> Tensor:
                inputs = [tile, *captured]
                for place, one in zip(wanted, some, strict=True):
                    inputs[place] = one
                return call.again(index, inputs[0], inputs[1:], used)

            primals = [tile if place == 0 else tensors[place] for place in wanted]
            found = _pull(run, primals, own, is_recorded)
            for place, part in zip(wanted, found, strict=True):
                if place == 0:
                    parts.append(part)
                else:
                    _add(sums, place, part)
    if not used.issuperset(place - 1 for place in wanted if place):
        raise_changed(call.tiled.name, f"{len(used)} of {len(captured)}")
    of_all: list[Tensor | None] = [None] * len(tensors)
    for place, total in sums.items():
        of_all[place] = total.to(tensors[place].dtype)
    if parts:
        of_all[0] = torch.cat(parts, dim)
    return of_all


def _pull(
    run: Callable[..., Tensor], primals: Sequence[Tensor], grad: Tensor, is_recorded: bool
) -> Sequence[Tensor]:
    """The gradients of a tile."""
    if torch._C._are_functorch_transforms_active():
        pulled: Any = torch.func.vjp(run, *primals)
        found: Sequence[Tensor] = pulled[1](grad)
        return found
    with torch.enable_grad():
        inputs = [x.view_as(x) if is_recorded else x.detach().requires_grad_() for x in primals]
        out = run(*inputs)
    return torch.autograd.grad(out, inputs, grad, create_graph=is_recorded, materialize_grads=True)


def _add(sums: dict[int, Tensor], place: int, part: Tensor) -> None:
    """Adds a tile's gradient to a sum, in fp32 at least."""
    is_half = part.is_floating_point() and part.dtype.itemsize < 4
    if place not in sums:
        # a copy, because autograd may return one tensor as the gradient of several inputs
        sums[place] = part.float() if is_half else part.clone()
    elif torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        sums[place] = sums[place] + part
    else:
        sums[place] = sums[place].add_(part)


def _levels(x: Tensor) -> list[Tensor]:
    """A tensor, and those that it wraps for transforms of torch.func."""
    found = [x]
    while is_functorch_wrapped_tensor(found[-1]):
        found.append(get_unwrapped(found[-1]))
    return found


def _is_derived_again(tensors: Sequence[Tensor]) -> bool:
    """Whether anything may differentiate a backward that runs now: autograd below the
    transform of torch.func that runs it, or another transform.
    """
    if not torch._C._are_functorch_transforms_active():
        return True
    levels = retrieve_all_functorch_interpreters()
    if sum(level.key() in (TransformType.Grad, TransformType.Jvp) for level in levels) > 1:
        return True
    return any(_levels(x)[-1].requires_grad for x in tensors)
