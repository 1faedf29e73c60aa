"""`LayerDrop`: progressive layer drop (`fzero.data.theta`), for a model that drops its
own layers (`fzero.data.kept_layers`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from torch import nn

from fzero.config.config import ConfigError
from fzero.data.layer_drop import theta
from fzero.model.transforms import Call, Changes, TransformedStep, Wrap


@dataclass(frozen=True)
class LayerDrop:
    """The transform that passes `progressive_layer_drop=True` and `pld_theta=` to the
    model in training mode, as DeepSpeed does.

    With n updates so far θ is that of n - 1, which begins at 1.

    Attributes:
        limit: the value to which θ falls.
        gamma: how fast.
    """

    limit: float = 0.5
    gamma: float = 0.001

    def __call__(self, spec: TransformedStep) -> Changes:
        """See `ModelTransform`."""
        if spec.compile == "step":
            raise ConfigError(
                "progressive_layer_drop.enabled: must be false with compile='step', whose graph "
                "always runs the same layers, got true; pass compile='block', or leave compile out"
            )
        given = inspect.signature(type(spec.model).forward).parameters.values()
        names = {x.name for x in given}
        if not {"progressive_layer_drop", "pld_theta"} <= names and all(
            x.kind is not x.VAR_KEYWORD for x in given
        ):
            raise ConfigError(
                f"progressive_layer_drop.enabled: needs a model whose forward takes "
                f"progressive_layer_drop and pld_theta, got {type(spec.model).__name__}; drop "
                f"layers there with fzero.data.kept_layers, or switch the block off"
            )
        why = (
            "progressive_layer_drop.enabled: must be false where a step is one graph, got "
            "true; switch it off"
        )
        return Changes(
            name="progressive_layer_drop", text=str(self), forwards=self._forwards, not_in_graph=why
        )

    def _forwards(self, call: Call) -> Mapping[str, Wrap]:
        return {"": partial(self._with_theta, call)} if call.is_counted else {}

    def _with_theta(self, call: Call, name: str, model: nn.Module) -> Callable[..., Any]:
        forward = model.forward

        @wraps(forward)
        def with_theta(*args: Any, **kwargs: Any) -> Any:
            if not model.training:
                return forward(*args, **kwargs)
            now = theta(max(int(call.num_updates()) - 1, 0), limit=self.limit, gamma=self.gamma)
            return forward(*args, **{"progressive_layer_drop": True, "pld_theta": now, **kwargs})

        return with_theta
