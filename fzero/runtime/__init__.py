"""One step of one rank: forward and backward unit by unit, the end of a step, update,
first states.

May import: state, verbs, storage, model and below. Begin with `fzero.runtime.phases`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.runtime.step_spec import MismatchError as MismatchError, StepSpec as StepSpec
else:
    __getattr__, __dir__, __all__ = door(__name__, {"step_spec": "MismatchError StepSpec"})
