"""`StateForm`: the specs of all tensors of a state, and the check that a state has this form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import optree
import torch
from torch import Tensor

from fzero.common.arguments import check_kind
from fzero.plans.plan import Plan
from fzero.state import TrainState, is_donated
from sharding import TensorSpec
from sharding.views import torch_dtype


@dataclass(frozen=True, slots=True)
class StateForm:
    """The tensors of a rank's state.

    Attributes:
        specs: the spec of every tensor, in the structure of the state.
        names: the paths of the tensors.
        leaves: the specs in the order of `names`.
        shapes: their shapes and dtypes on one rank.
        job: the job in words, for messages.
    """

    specs: TrainState[TensorSpec]
    names: list[str]
    leaves: list[TensorSpec]
    shapes: list[tuple[tuple[int, ...], torch.dtype]]
    treespec: Any
    job: str

    @classmethod
    def of(cls, specs: TrainState[TensorSpec], plan: Plan) -> Self:
        accessors, leaves, treespec = optree.tree_flatten_with_accessor(specs)
        shapes = [(spec.local_shape(plan.mesh), torch_dtype(spec.dtype)) for spec in leaves]
        names = [accessor.codify("state") for accessor in accessors]
        return cls(specs, names, leaves, shapes, treespec, f"stage {plan.stage}, {plan.world_size} ranks")

    def check(
        self,
        state: TrainState[Tensor],
        *,
        fix: str = "make it with this step's init(), or give its weights to init(params)",
    ) -> list[Any]:
        """The tensors of a state.

        Raises:
            ValueError: a tensor has another shape or dtype than in this step. (Another step may shard it differently.)
        """
        check_kind(
            "state", state, TrainState, "a TrainState", "pass that of init() or of the last step (load(...).state)"
        )
        flat: tuple[list[Any], Any] = optree.tree_flatten(state)  # type: ignore[arg-type]
        leaves, found = flat
        if found != self.treespec:
            theirs = [accessor.codify("state") for accessor in optree.tree_accessors(state)]
            differing = min({*theirs} ^ {*self.names}, default="another structure")
            raise ValueError(
                f"state: must be one of this step's, got one {'without' if differing in self.names else 'with'} {differing}; "
                f"{fix}"
            )
        if [(leaf.shape, leaf.dtype) for leaf in leaves] == self.shapes:
            return leaves
        for name, leaf, (shape, dtype) in zip(self.names, leaves, self.shapes, strict=True):
            if leaf.shape != shape or leaf.dtype != dtype:
                check_not_donated(state)
                raise ValueError(
                    f"{name}: must be {dtype} of shape {shape} in this step ({self.job}), got {leaf.dtype} of shape "
                    f"{tuple(leaf.shape)}; {fix}"
                )
        return leaves


def check_not_donated(state: TrainState[Tensor]) -> None:
    """Raises if a step took the state: the StoreError of its files if these failed, else a ValueError with the fix."""
    if is_donated(state):
        from fzero.storage.file_tensor import handles_of  # for the error alone

        for handle in handles_of(state):
            handle.check()
        raise ValueError(
            "state: must not be used again once a step took it (donate=True), because that step wrote the next state into its "
            "memory; go on with the state that the step returned (from a checkpoint, if its update raised), or make the step "
            "with donate=False"
        )
