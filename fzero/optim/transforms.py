"""Optimizers as transforms of flat buffers: what does one update do to a gradient, a parameter and a state?

A transform is three pure functions, in the manner of optax, of one flat buffer (N elements, any N: a whole buffer in
stage 0, a shard elsewhere; nothing here knows which):

- `init(param_N)` makes the state, a NamedTuple of tensors,
- `update(grad_N, param_N, state)` gives the three back, changed; what it is given is *donated* to it: it may write
  into its arguments and return them, so copy first what you want to keep (`fzero.optimizer_update` does),
- `specs(param_spec)` says how each tensor of the state is divided and where it lives, given the parameter's.

A link of a `chain` that changes gradients (`scale`, say) returns the parameter as it was; one that changes the
parameter consumes the gradient. That one type lets a fused kernel be a link like any other.

All of these are elementwise, so that a shard of the update is the update of a shard; `fzero.optim.matrix` has those
that are not.

A learning rate may be a 0-d tensor, so that it is data in a captured graph and no constant. Fused kernels cannot be
captured; there the same formula stands, operation by operation, for a compiler to fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from sharding import Replicated, Sharded, TensorSpec
from sharding.views import dtype_name

Leaf = TypeVar("Leaf")
"""What stands in a state: tensors, or their specs."""


class Transform(NamedTuple):
    """The triple (init, update, specs), and for kernels that can skip by themselves an `update_skip_if`.

    For those that update several buffers in one call there is a pair `fused`: the `update` that it does the same as, so that
    a transform with another `update` has none, and the function of lists, which writes where its arguments are, and gives the
    states.
    """

    init: Callable[[Tensor], Any]
    update: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor, Any]]
    specs: Callable[[TensorSpec], Any]
    update_skip_if: Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor, Any]] | None = None
    fused: tuple[Any, Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Any]], list[Any]]] | None = None

    @property
    def is_fused(self) -> bool:
        """Whether one call updates several buffers."""
        return self.fused is not None and self.fused[0] is self.update

    def update_each(self, grads: Sequence[Tensor], params: Sequence[Tensor], states: Sequence[Any]) -> list[Any]:
        """The states after the updates of several buffers, in one call where there is a kernel for that.

        For transforms that write where their arguments are, as those of `fzero.optim.precision` do.
        """
        if self.fused is not None and self.is_fused:
            return self.fused[1](grads, params, states)
        return [self.update(*of)[2] for of in zip(grads, params, states, strict=True)]


class Trial(NamedTuple):
    """Updates of a flat tensor of random numbers, to find out what a transform does."""

    numel: int
    num_updates: int
    start: int = 0
    """The updates that came before, by the state's own counts."""


SHORT_TRIAL = Trial(numel=128, num_updates=4)

LONG_RUN, LARGE = 128, 1 << 16
"""Updates of the longest run that a transform is tried with, and elements of the largest tensor."""

LATE_STARTS = (498, 998, 2046, 9_998)
"""Counts of updates from which a few more pass a round number."""


def is_traced() -> bool:
    """Whether kernels that only run as they are cannot: in a captured graph, and under `torch.vmap`."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def skip_if(skip: Tensor, transform: Transform) -> Transform:
    """The transform whose update leaves parameter and state as they were where `skip` is true (a 0-d bool).

    Data-flow: the host does not read `skip`. The gradient may hold anything then, also NaN.
    """

    def update(grad: Tensor, param: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        if transform.update_skip_if is not None and not is_traced():
            return transform.update_skip_if(skip, grad, param, state)
        leaves, treespec = optree.tree_flatten(state)
        old = [param, *leaves]
        kept = [x.clone() for x in old]
        _, *new = transform.update(grad, param, state)
        chosen = [torch.where(skip, x, y) for x, y in zip(kept, [new[0], *treespec.flatten_up_to(new[1])], strict=True)]
        for x, value in zip(old, chosen, strict=True):
            x.copy_(value)
        return grad, param, state

    return Transform(transform.init, update, transform.specs)


def chain(*transforms: Transform) -> Transform:
    """The transforms one after the other; the state is the tuple of theirs.

    >>> halved = chain(scale(0.5), sgd(lr=1.0))
    >>> grad, param = torch.tensor([4.0]), torch.tensor([10.0])
    >>> halved.update(grad, param, halved.init(param))[1]
    tensor([8.])
    """
    for index, transform in enumerate(transforms):
        check_transform_kind(f"chain[{index}]", transform)

    def init(param: Tensor) -> tuple[Any, ...]:
        return tuple(transform.init(param) for transform in transforms)

    def update(grad: Tensor, param: Tensor, state: tuple[Any, ...]) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        new_state = []
        for transform, old in zip(transforms, state, strict=True):
            grad, param, new = transform.update(grad, param, old)
            new_state.append(new)
        return grad, param, tuple(new_state)

    def specs(param: TensorSpec) -> tuple[Any, ...]:
        return tuple(transform.specs(param) for transform in transforms)

    return Transform(init, update, specs)


def separate(news: Sequence[Tensor], olds: Sequence[Tensor]) -> list[Tensor]:
    """The new values, copied where they share memory with another of the old ones, which may be written first."""
    owners = {x.untyped_storage().data_ptr() for x in olds}
    return [
        new if new.data_ptr() == old.data_ptr() or new.untyped_storage().data_ptr() not in owners else new.clone()
        for new, old in zip(news, olds, strict=True)
    ]


Rate = float | Tensor
"""A number, or a 0-d tensor that holds it."""


def _add_times(x: Tensor, y: Tensor, factor: Rate) -> Tensor:
    """Adds `factor * y` to `x`, in place: rounded once if the factor is a number, and the product by itself if a tensor."""
    return x.add_(y * factor) if isinstance(factor, Tensor) else x.add_(y, alpha=factor)


def _lerp(x: Tensor, y: Tensor, share: Rate) -> Tensor:
    """Moves `x` towards `y` by a share of the way, in place."""
    return x.lerp_(y, share.to(x.dtype)) if isinstance(share, Tensor) else x.lerp_(y, share)


def _run_fused(
    kernel: Callable[..., None], params: Sequence[Tensor], grads: Sequence[Tensor], *moments: Sequence[Tensor]
) -> None:
    """Calls a fused kernel of PyTorch, which writes parameters and moments in place.

    On the CPU such a kernel takes as many consecutive elements as a tensor has, whatever its strides say: it would pair wrong
    elements, and write past the end of an expanded tensor. So a tensor that is not contiguous goes through a copy.
    """
    written = [params, *moments]
    copies = [[x.contiguous() for x in tensors] for tensors in written]  # of a contiguous tensor the tensor itself
    kernel(copies[0], [x.contiguous() for x in grads], *copies[1:])
    for tensors, dense in zip(written, copies, strict=True):
        for x, copy in zip(tensors, dense, strict=True):
            if copy is not x:
                x.copy_(copy)


class ScaleState(NamedTuple):
    """`scale` remembers nothing."""


def scale(factor: float) -> Transform:
    """Multiplies the gradient by `factor`."""
    if not isinstance(factor, int | float):
        raise ValueError(f"scale: factor must be a number, got {factor!r}; pass 0.5, say")

    def init(param: Tensor) -> ScaleState:
        return ScaleState()

    def update(grad: Tensor, param: Tensor, state: ScaleState) -> tuple[Tensor, Tensor, ScaleState]:
        return grad.mul_(factor), param, state

    def specs(param: TensorSpec) -> ScaleState:
        return ScaleState()

    return Transform(init, update, specs)


class SGDState(NamedTuple, Generic[Leaf]):
    """`step` counts updates (0-d float32); `momentum` is the running direction, None when the factor is 0."""

    step: Leaf
    momentum: Leaf | None


def sgd(
    lr: Rate, *, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> Transform:
    """`torch.optim.SGD`: weight decay joins the gradient (L2).

    Raises:
        ValueError: a negative value, or nesterov without momentum or with dampening.
    """
    check_range("sgd", lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"sgd: nesterov needs momentum > 0 and dampening = 0, got {momentum} and {dampening}; change these"
        )

    def init(param: Tensor) -> SGDState[Tensor]:
        return SGDState(no_steps(param), torch.zeros_like(param) if momentum else None)

    def update(grad: Tensor, param: Tensor, state: SGDState[Tensor]) -> tuple[Tensor, Tensor, SGDState[Tensor]]:
        if weight_decay:
            grad.add_(param, alpha=weight_decay)
        direction = grad
        if state.momentum is not None:
            # torch.optim dampens every gradient but the first; the step is a tensor, so this is data, not a branch.
            kept = torch.where(state.step == 0, 1.0, 1.0 - dampening) if dampening else None
            state.momentum.mul_(momentum).add_(grad if kept is None else grad.mul_(kept))
            direction = grad.add_(state.momentum, alpha=momentum) if nesterov else state.momentum
        _add_times(param, direction, -lr)
        return grad, param, SGDState(state.step.add_(1), state.momentum)

    def specs(param: TensorSpec) -> SGDState[TensorSpec]:
        return SGDState(step_spec(param), param if momentum else None)

    return Transform(init, update, specs)


class AdamState(NamedTuple, Generic[Leaf]):
    """`step` counts updates (0-d float32); the moments have the parameter's shape and dtype."""

    step: Leaf
    exp_avg: Leaf
    exp_avg_sq: Leaf


def adamw(
    lr: Rate, *, betas: tuple[Rate, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01
) -> Transform:
    """`torch.optim.AdamW` (decoupled weight decay, arXiv:1711.05101), by PyTorch's fused kernel: one pass over memory."""
    return _adam("adamw", torch._fused_adamw_, lr, betas, eps, weight_decay)


def adam(
    lr: Rate, *, betas: tuple[Rate, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> Transform:
    """`torch.optim.Adam` (weight decay joins the gradient), by PyTorch's fused kernel: one pass over memory."""
    return _adam("adam", torch._fused_adam_, lr, betas, eps, weight_decay)


def _adam(
    name: str, kernel: Callable[..., None], lr: Rate, betas: tuple[Rate, float], eps: float, weight_decay: float
) -> Transform:
    check_range(name, lr=lr, eps=eps, weight_decay=weight_decay)
    check_betas(name, betas)

    def init(param: Tensor) -> AdamState[Tensor]:
        return AdamState(no_steps(param), torch.zeros_like(param), torch.zeros_like(param))

    def update(
        grad: Tensor, param: Tensor, state: AdamState[Tensor], found_inf: Tensor | None = None
    ) -> tuple[Tensor, Tensor, AdamState[Tensor]]:
        return grad, param, update_fused([grad], [param], [state], found_inf)[0]

    def update_fused(
        grads: Sequence[Tensor],
        params: Sequence[Tensor],
        states: Sequence[AdamState[Tensor]],
        found_inf: Tensor | None = None,
    ) -> list[AdamState[Tensor]]:
        for state in states:
            state.step.add_(1 if found_inf is None else 1 - found_inf)
        full = [
            (grad, param, *state) for grad, param, state in zip(grads, params, states, strict=True) if param.numel()
        ]
        if is_traced():
            for grad, param, *state_ in full:
                by_element(grad, param, AdamState(*state_))
        elif full:
            full_grads, full_params, steps, exp_avgs, exp_avg_sqs = zip(*full, strict=True)

            def run(params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any) -> None:
                kernel(
                    params, grads, exp_avgs, exp_avg_sqs, [], steps,
                    lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps,
                    amsgrad=False, maximize=False, found_inf=found_inf,
                )  # fmt: skip

            _run_fused(run, full_params, full_grads, exp_avgs, exp_avg_sqs)
        return list(states)

    def by_element(grad: Tensor, param: Tensor, state: AdamState[Tensor]) -> None:
        """What the kernel does."""
        first, second = (1 - beta ** state.step.double() for beta in betas)
        if kernel is torch._fused_adamw_:
            param.mul_(1 - lr * weight_decay)
        elif weight_decay:
            grad = grad.add(param, alpha=weight_decay)
        _lerp(state.exp_avg, grad, 1 - betas[0])
        state.exp_avg_sq.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
        param.sub_(state.exp_avg / (state.exp_avg_sq.sqrt() / second.sqrt() + eps) * (lr / first))

    def update_skip_if(
        skip: Tensor, grad: Tensor, param: Tensor, state: AdamState[Tensor]
    ) -> tuple[Tensor, Tensor, AdamState[Tensor]]:
        return update(grad, param, state, skip.float())

    def specs(param: TensorSpec) -> AdamState[TensorSpec]:
        return AdamState(step_spec(param), param, param)

    return Transform(init, update, specs, update_skip_if, (update, update_fused))


class AdagradState(NamedTuple, Generic[Leaf]):
    """`step` counts updates (0-d float32); `sum` is that of the squared gradients."""

    step: Leaf
    sum: Leaf


def adagrad(
    lr: Rate,
    *,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> Transform:
    """`torch.optim.Adagrad` (Duchi et al. 2011; weight decay joins the gradient), by PyTorch's fused kernel."""
    given = {"initial_accumulator_value": initial_accumulator_value, "eps": eps}
    check_range("adagrad", lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, **given)

    def init(param: Tensor) -> AdagradState[Tensor]:
        return AdagradState(no_steps(param), torch.full_like(param, initial_accumulator_value))

    def update(grad: Tensor, param: Tensor, state: AdagradState[Tensor]) -> tuple[Tensor, Tensor, AdagradState[Tensor]]:
        step = state.step.add_(1)
        if is_traced():
            decayed = grad.add(param, alpha=weight_decay) if weight_decay else grad
            state.sum.addcmul_(decayed, decayed)
            param.sub_(decayed / (state.sum.sqrt() + eps) * (lr / (1 + (step.double() - 1) * lr_decay)))
        elif param.numel():
            kernel = partial(
                torch._fused_adagrad_,
                lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps, maximize=False, state_steps=[step],
            )  # fmt: skip
            _run_fused(kernel, [param], [grad], [state.sum])
        return grad, param, AdagradState(step, state.sum)

    def specs(param: TensorSpec) -> AdagradState[TensorSpec]:
        return AdagradState(step_spec(param), param)

    return Transform(init, update, specs)


class LionState(NamedTuple, Generic[Leaf]):
    """`step` counts updates (0-d float32); `exp_avg` is the momentum."""

    step: Leaf
    exp_avg: Leaf


def lion(lr: Rate, *, betas: tuple[Rate, float] = (0.9, 0.99), weight_decay: float = 0.0) -> Transform:
    """Lion (Chen et al., arXiv:2302.06675, algorithm 2): the sign of a momentum, with decoupled weight decay."""
    check_range("lion", lr=lr, weight_decay=weight_decay)
    check_betas("lion", betas)

    def init(param: Tensor) -> LionState[Tensor]:
        return LionState(no_steps(param), torch.zeros_like(param))

    def update(grad: Tensor, param: Tensor, state: LionState[Tensor]) -> tuple[Tensor, Tensor, LionState[Tensor]]:
        # The gradient's memory takes the mix whose sign is the direction, and the momentum follows from the mix: with
        # g = (mix - b0·m) / (1 - b0), b1·m + (1 - b1)·g has these two factors. So no memory is needed.
        mix, share = _lerp(grad, state.exp_avg, betas[0]), (1 - betas[1]) / (1 - betas[0])
        _add_times(state.exp_avg.mul_(betas[1] - betas[0] * share), mix, share)
        _add_times(param.mul_(1 - lr * weight_decay), mix.sign_(), -lr)
        return grad, param, LionState(state.step.add_(1), state.exp_avg)

    def specs(param: TensorSpec) -> LionState[TensorSpec]:
        return LionState(step_spec(param), param)

    return Transform(init, update, specs)


TRIALS = (
    Trial(numel=128, num_updates=LONG_RUN),
    *(Trial(numel=128, num_updates=4, start=start) for start in LATE_STARTS),
    Trial(numel=LARGE, num_updates=2),
)
"""What shows whether a transform is elementwise, as far as running it can show that."""


def check_elementwise(transform: Transform, *, name: str = "transform") -> None:
    """Raises unless a shard of the update is the update of a shard, as far as updates of random numbers show.

    A transform that passes may be used on shards, for which it need not know what they hold. The shards are multiples of
    32 long, as all are here, so that vectorised kernels do the same to every element.

    Tried are 128 updates one after the other, a few more around the 500th, 1000th, 2048th and 10,000th (for a transform whose
    state has a 0-d count of updates), and two of 65,536 elements, on the CPU. What a transform does at other counts, with more
    elements or for numbers that do not come up here stays unseen. `fzero.testing.check_transform` tries more.

    Raises:
        ValueError: two halves, updated one by one, are not the whole bit for bit.

    >>> norm = Transform(lambda p: None, lambda g, p, s: (g, p - g / g.norm(), s), lambda spec: None)
    >>> check_elementwise(norm, name="norm")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: norm: must be elementwise, ...
    >>> check_elementwise(adamw(1e-3))
    """
    check_transform_kind(name, transform)
    check_trials(transform, TRIALS, name=name)


def check_trials(transform: Transform, trials: Sequence[Trial], *, name: str) -> None:
    """As `check_elementwise`, by these trials."""
    for trial in trials:
        param, grads = trial_tensors(torch.float32, trial)
        half = len(param) // 2
        with torch.random.fork_rng(devices=[]):
            differs = find_cut(transform, param, grads, ((0, half), (half, len(param))), start=trial.start)
        if differs:
            raise ValueError(
                f"{name}: must be elementwise, and two halves of {half} elements updated one by one differ from the whole in "
                f"{differs}; a shard does not know the elements of other ranks, so use a transform that takes `contents`"
            )


def find_cut(
    transform: Transform,
    param: Tensor,
    grads: Sequence[Tensor] | Tensor,
    bounds: Sequence[tuple[int, int]],
    *,
    start: int = 0,
) -> str | None:
    """Where the contents of a flat tensor, updated one by one, are not those of the whole bit for bit; None is nowhere.

    Args:
        param, grads: the parameter and a gradient for each update, flat; they stay as they are.
        bounds: where each piece starts and stops; together they are all elements, in order.
        start: the updates that the state's counts stand at before the first; see `started`.
    """
    slices = [slice(0, len(param)), *(slice(*bound) for bound in bounds)]
    params = [param[of].clone() for of in slices]
    states = [started(transform, x, start) for x in params]
    names = leaf_names(states[0])
    for count, grad in enumerate(grads, start + 1):
        updated = [transform.update(grad[of].clone(), x, state) for of, x, state in zip(slices, params, states)]
        params, states = [x for _, x, _ in updated], [state for _, _, state in updated]
        if not same_bits(torch.cat(params[1:]), params[0]):
            return f"the parameter after update {count}"
    specs = optree.tree_leaves(
        transform.specs(TensorSpec(tuple(param.shape), dtype_name(param.dtype), Sharded("data")))
    )
    leaves = [optree.tree_leaves(state) for state in states]
    for index, (spec, of_all, *of_pieces) in enumerate(zip(specs, *leaves, strict=True)):
        cut = [torch.cat(of_pieces)] if isinstance(spec.spec, Sharded) else of_pieces
        if not all(same_bits(x, of_all) for x in cut):
            return names[index]
    return None


def started(transform: Transform, param: Tensor, count: int) -> Any:
    """The state of `init`, but that its counts of updates stand at `count`.

    >>> started(adamw(1e-3), torch.zeros(2), 9_999).step
    tensor(9999.)
    """
    state = transform.init(param)
    return at_count(state, counts_of(transform), count) if count else state


def at_count(state: Any, counts: Sequence[int], count: int) -> Any:
    """The state with `count` in the tensors that are counts, by their places among its tensors."""
    leaves, treespec = optree.tree_flatten(state)
    return treespec.unflatten([torch.full_like(x, count) if i in counts else x for i, x in enumerate(leaves)])


def counts_of(transform: Transform) -> list[int]:
    """The places, among the tensors of a state, of 0-d ones that each of the first two updates raises by one."""
    param, grads = trial_tensors(torch.float32, Trial(numel=32, num_updates=2))
    state = transform.init(param)
    values = [[x.clone() for x in optree.tree_leaves(state)]]
    for grad in grads:
        _, param, state = transform.update(grad, param, state)
        values.append([x.clone() for x in optree.tree_leaves(state)])
    return [i for i, (x, y, z) in enumerate(zip(*values, strict=True)) if x.dim() == 0 and y == x + 1 and z == x + 2]


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and equal elements, where NaN equals a NaN of the same bits."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return torch.equal(x, y) or torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def leaf_names(state: Any) -> list[str]:
    """The tensors of a state as Python would read them.

    >>> leaf_names(AdamState(torch.zeros(()), torch.zeros(1), torch.zeros(1)))
    ['state.step', 'state.exp_avg', 'state.exp_avg_sq']
    """
    return [accessor.codify("state") for accessor in optree.tree_accessors(state)]


def trial_tensors(dtype: torch.dtype, trial: Trial = SHORT_TRIAL) -> tuple[Tensor, Tensor]:
    """A parameter (numel,) and a gradient for each update (num_updates, numel), random and of quite different sizes."""
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(trial.numel, generator=generator)
    grads = torch.randn(trial.num_updates, trial.numel, generator=generator) * torch.logspace(-3, 2, trial.numel)
    return param.to(dtype), grads.to(dtype)


def check_transform_kind(name: str, transform: object) -> None:
    """Raises unless it is a transform, and not the function that makes one."""
    if not isinstance(transform, Transform) or not all(map(callable, transform[:3])):
        raise ValueError(
            f"{name}: must be a Transform of three functions, got {transform!r:.80}; make one, fzero.adamw(1e-3), say"
        )


def check_betas(name: str, betas: tuple[Rate, float]) -> None:
    """Raises unless both are in [0, 1)."""
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{name}: each of betas must be in [0, 1), got {betas}; 0.9 for the first is usual")


def no_steps(param: Tensor) -> Tensor:
    """The count of updates before the first: a float32, as torch.optim's are, where the parameter is."""
    return torch.zeros((), dtype=torch.float32, device=param.device)


def step_spec(param: TensorSpec) -> TensorSpec:
    """Where that count lives: every rank has it."""
    return replace(param, shape=(), dtype="float32", spec=Replicated(), multiple_of=1)


def check_range(name: str, **values: Rate) -> None:
    """Raises unless all are numbers from 0 on."""
    for field, value in values.items():
        if not isinstance(value, int | float | Tensor) or not value >= 0:
            raise ValueError(f"{name}: {field} must be at least 0, got {value!r}; give a number that is not negative")
