"""`Leaf`: a module whose parameters are used by its own forward, and its gradients of
each sample.

A leaf is an outermost module with parameters of its own. A layer that `factors` knows
has a formula; of any other the forward and the backward run once more for each sample,
with the memory of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fzero.per_sample.factors import Formula, Use, Whole, formula_of

MIXED = (nn.modules.batchnorm._BatchNorm,)
"""Layers whose output for a sample depends on the others."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A module and the parameters that it uses.

    Attributes:
        name: its name in the model.
        module: the module.
        params: the names of its trained parameters in the model, by their names in the
            module.
        formula: makes their gradients; None where the module must run again.
    """

    name: str
    module: nn.Module
    params: Mapping[str, str]
    formula: Formula | None

    def uses(
        self,
        forward: Callable[..., Any],
        given: tuple[Any, ...],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> Iterator[tuple[str, Use]]:
        """The name of each trained parameter in the model, and its gradients of the
        samples.

        Args:
            forward: the module's, without what wraps it.
            given: the arguments and keyword arguments of the call.
            params: the values of its parameters, in the order of `params`; empty for a
                formula.
            grads: the gradients of its outputs, each (B, …).
        """
        if self.formula is None:
            with own_forward_of(self.module, forward):
                found = self._again(given, params, grads)
            for name, own in zip(self.params.values(), found, strict=True):
                yield name, Whole(own)
            return
        (x, *_), _ = given
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        x = x.to(wide) if x.is_floating_point() else x
        for key, use in self.formula(self.module, x, grads[0].to(wide)).items():
            if key in self.params:
                yield self.params[key], use

    def _again(
        self, given: tuple[Any, ...], params: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> list[Tensor]:
        """The gradients (B, numel) of each parameter, sample by sample."""
        num, rows = len(grads[0]), []
        for index in range(num):

            def one(x: Any, index: int = index) -> Any:
                is_own = isinstance(x, Tensor) and x.dim() > 0 and len(x) == num
                return x[index : index + 1].detach() if is_own else x

            args, kwargs = optree.tree_map(one, given, none_is_leaf=True)
            with torch.enable_grad():
                own = [param.detach().requires_grad_() for param in params]
                out = functional_call(
                    self.module, dict(zip(self.params, own, strict=True)), args, kwargs
                )
                outputs = [x for x in optree.tree_leaves(out) if is_differentiable(x)]
                found = torch.autograd.grad(
                    outputs,
                    own,
                    [grad[index : index + 1].to(x.dtype) for x, grad in zip(outputs, grads)],
                    allow_unused=True,
                    materialize_grads=True,
                )
            rows.append(
                [x.flatten().float() if x.dtype.itemsize < 4 else x.flatten() for x in found]
            )
        return [torch.stack(own) for own in zip(*rows, strict=True)]


@contextmanager
def own_forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module has this forward, and no recomputation or tap around it."""
    wrapped = module.__dict__.pop("forward", None)
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if wrapped is not None:
            module.__dict__["forward"] = wrapped


def is_differentiable(x: Any) -> bool:
    """Whether a part of an output has a gradient."""
    return isinstance(x, Tensor) and x.requires_grad


def leaves_of(model: nn.Module, trained: Callable[[str], bool], call: str) -> list[Leaf]:
    """The leaves of a model that use trained parameters.

    Args:
        trained: whether the parameter with this name is trained.
        call: who asks, for errors.

    Raises:
        ValueError: samples depend on each other, or a module that must run again draws
            random numbers.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    found: list[Leaf] = []

    def visit(name: str, module: nn.Module) -> None:
        if not any(True for _ in module.parameters(recurse=False)):
            for key, child in module.named_children():
                visit(f"{name}.{key}" if name else key, child)
            return
        every = module.named_parameters(remove_duplicate=False)
        params = {key: names[id(param)] for key, param in every}
        params = {key: own for key, own in params.items() if trained(own)}
        if params and not any(leaf.module is module for leaf in found):
            formula = formula_of(module)
            found.append(Leaf(name, module, params, formula))
            _check(found[-1], call)

    visit("", model)
    return found


def _check(leaf: Leaf, call: str) -> None:
    module = leaf.module
    for key, child in module.named_modules():
        where = ".".join(filter(None, (leaf.name, key)))
        if isinstance(child, MIXED):
            raise ValueError(
                f"{call}: a model must treat each sample by itself, got {type(child).__name__} "
                f"{where!r}, whose output depends on the whole batch; use GroupNorm or LayerNorm"
            )
        dropout = child.p if isinstance(child, nn.modules.dropout._DropoutNd) else None
        dropout = getattr(child, "dropout", 0) if dropout is None else dropout
        if leaf.formula is None and isinstance(dropout, float) and dropout > 0:
            raise ValueError(
                f"{call}: {leaf.name!r} ({type(module).__name__}) has no formula and runs again "
                f"for each sample, so it must draw no random numbers, got dropout {dropout} in "
                f"{where!r}; set it to 0, or put its parameters into layers of their own"
            )


def check_unchanged(leaf: Leaf, call: str) -> None:
    """Raises ValueError where a transform has added parameters to a leaf: its formula
    does not know them.
    """
    for child in leaf.module.modules():
        if added := child.__dict__.get("fzero_added"):
            raise ValueError(
                f"{call}: must not be used with a transform that adds parameters to modules, got "
                f"{sorted(added)} in {leaf.name!r}; leave that transform out"
            )
