"""`VectorSpace`: vectors with one number for each trained parameter, as the ranks of a
step hold them.

A vector is a dict of flat tensors by flat buffer, the part of each that this rank
updates: in stages 1–3 its shard, in stage 0 all of it. So a vector is a pytree on which
algorithms of linear algebra work leaf by leaf; the only operation that ranks do
together is the dot product.

Shape letters: P padded elements of a flat buffer, S elements of a shard, F shards.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fzero.comms.records import Label
from fzero.plans.plan import FlatParamPlan
from fzero.runtime.step_runtime import StepRuntime
from fzero.storage.shard_transfer import own_shard, updated_part
from fzero.verbs import gather_flat
from sharding.views import torch_dtype, unflatten

if TYPE_CHECKING:
    from fzero.runtime.step_spec import StepSpec

Vector = Mapping[str, Tensor]
"""Flat tensors by flat buffer: this rank's part of a vector."""


class HasRuntime(Protocol):
    """A `TrainStep`."""

    @property
    def runtime(self) -> StepRuntime: ...
    @property
    def spec(self) -> StepSpec: ...


def space(step: HasRuntime) -> VectorSpace:
    """The vectors that `step.hvp` and `step.gnvp` take and return.

        space = fzero.curvature.space(step)
        v = space.normal(seed=0)
        curvature = space.dot(v, step.hvp(state, batch, v)) / space.dot(v, v)

    Args:
        step: of `make_train_step`.
    """
    return VectorSpace(step.runtime)


@dataclass(frozen=True, slots=True)
class VectorSpace:
    """The vectors of a step; made by `space`."""

    run: StepRuntime

    @property
    def buffers(self) -> tuple[FlatParamPlan, ...]:
        """The flat buffers that a vector has a part of: those that are trained."""
        return tuple(b for b in self.run.plan.flat_buffers if b.trainable)

    def dot(self, a: Vector, b: Vector) -> Tensor:
        """The dot product of two vectors (0-d float64): each element counts once, and
        every rank gets the same bits, in all stages.

        *Collective* where there are several shards: every rank; sends one number.
        """
        shard = self.run.mesh.shard
        parts = [
            (own_shard(a[x.key], x, shard).double() * own_shard(b[x.key], x, shard)).sum()
            for x in self.buffers
        ]
        own = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
        rows_F: Tensor = self.run.mesh.stack(own, label=Label("norm", phase="boundary"))
        first, *others = rows_F.unbind()
        return sum(others, start=first)

    def normal(self, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """A random vector with independent normal elements: the same numbers for every
        stage, mesh and order of parameters. Sends nothing.

        Args:
            seed: the same on all ranks.
        """

        def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            return torch.randn(shape, generator=generator, dtype=dtype)

        return {
            b.key: self._part(b, {n: drawn(n, b.layout.shape(n)) for n in b.layout.names}, dtype)
            for b in self.buffers
        }

    def shard(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of a vector that is given in full. Sends nothing.

        Args:
            named: full tensors by the names of the trained parameters. Those that are
                missing are zero. They keep the widest of their dtypes.

        Raises:
            ValueError: a name is not of a trained parameter, or a shape is wrong.
        """
        shapes = {name: b.layout.shape(name) for b in self.buffers for name in b.layout.names}
        for name, x in named.items():
            if name not in shapes or tuple(x.shape) != tuple(shapes[name]):
                wanted = shapes.get(name)
                rule = (
                    f"have the shape {tuple(wanted)}"
                    if wanted is not None
                    else f"be of a trained parameter ({', '.join([*shapes][:4])}, …)"
                )
                raise ValueError(
                    f"vector: {name!r} must {rule}, got shape {tuple(x.shape)}; name the tensors "
                    f"as model.named_parameters() does"
                )
        dtype = torch.float32
        for x in named.values():
            dtype = torch.promote_types(dtype, x.dtype)
        return {b.key: self._part(b, named, dtype) for b in self.buffers}

    def gather(self, vector: Vector) -> dict[str, Tensor]:
        """The full tensors of a vector by parameter, on every rank.

        *Collective* in stages 1–3: every rank; sends `(F-1)/F · P` elements.
        """
        self.check(vector, "gather")
        found: dict[str, Tensor] = {}
        for b in self.buffers:
            views = unflatten(gather_flat(vector[b.key], b, self.run.mesh), b.layout)
            found |= {name: view.clone() for name, view in views.items()}
        return found

    def check(self, vector: Vector, call: str) -> None:
        """Raises ValueError unless `vector` is one of this space, on this device."""
        for b in self.buffers:
            x = vector.get(b.key) if isinstance(vector, Mapping) else None
            shape = (b.flow.updated_numel,)
            if not isinstance(x, Tensor) or x.shape != shape or x.device != self.run.device:
                got = (
                    f"shape {tuple(x.shape)} on {x.device}"
                    if isinstance(x, Tensor)
                    else f"{type(vector).__name__} without it"
                )
                raise ValueError(
                    f"{call}: vector[{b.key!r}] must be a tensor of shape {shape} on "
                    f"{self.run.device}, got {got}; make it with "
                    f"fzero.curvature.space(step).shard(tensors by name) or .normal(seed)"
                )
        if extra := [key for key in vector if key not in {b.key for b in self.buffers}]:
            raise ValueError(
                f"{call}: vector must have the trained flat buffers only, got {extra[0]!r}, too; "
                f"leave it out"
            )

    def _part(
        self, buffer: FlatParamPlan, named: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Tensor:
        """The part of a flat buffer that this rank updates, from full tensors."""
        flat_P = torch.zeros(buffer.padded_numel, dtype=dtype, device=self.run.device)
        for name, view in unflatten(flat_P, buffer.layout).items():
            if name in named:
                view.copy_(named[name])
        return updated_part(flat_P, buffer, self.run.mesh.shard).clone()

    def full_in_compute_dtype(self, vector: Vector) -> dict[str, Tensor]:
        """The full tensors by parameter, in the dtypes in which the model computes,
        each in memory of its own. *Collective* in stages 1–3: as `gather`, in these
        dtypes.
        """
        narrow = {
            b.key: vector[b.key].detach().to(torch_dtype(b.dtypes.param)) for b in self.buffers
        }
        return self.gather(narrow)
