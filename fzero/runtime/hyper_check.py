"""`HyperCheck`: whether all ranks update with the same hyper-parameters, by a checksum that travels with the loss."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fzero.runtime.update import Hyper, Updater
from fzero.state import TrainState


@dataclass(slots=True)
class HyperCheck:
    """The hyper-parameters whose checksum this rank has sent, and those whose checksum it will send.

    Attributes:
        groups: the names of the parameter groups.
        optimizers: the optimizer of each group that the step was made with.
        now: the hyper-parameters of the next update, as known in the last backward; None if the host would have to wait for the
            device.
        last: the hyper-parameters of the last update.
        is_late: whether `last` differs from the hyper-parameters whose checksum the backward before that update sent.
        scale: the loss scale; None where the host would have to wait for the device.
    """

    groups: Sequence[str]
    optimizers: tuple[str, ...]
    now: Hyper | None = None
    last: Hyper | None = None
    is_late: bool = False
    scale: float | None = None

    def checksum(
        self, updater: Updater, state: TrainState[Tensor], hyper: Hyper | None = None, *, num_parts: int = 1
    ) -> int:
        """A checksum of the numbers that this rank computes by itself.

        These are the hyper-parameters of the next update, if the host knows the number of updates so far. If the checksum before
        the last update did not include that update's hyper-parameters, they are added.
        """
        is_known = state.step.device.type == "cpu"
        self.now = updater.hyper(int(state.step)) if hyper is None and is_known else hyper
        scale = state.loss_scale.scale
        self.scale = float(scale) if hyper is None and scale.device.type == "cpu" else None
        return zlib.crc32(repr((self.now, self.last if self.is_late else None, num_parts, self.scale)).encode())

    def used(self, hyper: Hyper) -> None:
        """Remembers the hyper-parameters that an update uses."""
        self.last, self.is_late = hyper, hyper != self.now

    def named(self, num_parts: int = 1) -> dict[str, dict[str, str]]:
        """The numbers behind the last checksum, as text by subject and name."""

        def text(hyper: Hyper | None) -> dict[str, dict[str, str]]:
            if hyper is None:
                return {}
            return hyper._replace(optimizers=hyper.optimizers or self.optimizers).named(self.groups)

        late = {f"{subject}, used in the last update": values for subject, values in text(self.last).items()}
        return text(self.now) | {"loss": {"divided by": str(num_parts), "multiplied by": str(self.scale)}} | late
