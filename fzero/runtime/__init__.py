"""The eager step: a module bound to the state, forward and backward unit by unit, metrics, the update, offload, first
states.

May import: state, verbs, storage and below. Begin with `fzero.runtime.eager`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.runtime.step_spec import MismatchError as MismatchError
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "step_spec": "MismatchError",
        },
    )
