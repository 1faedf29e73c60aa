"""Gradients of each sample: their norms, their clipping, and the noise of DP-SGD
(Abadi et al. 2016, arXiv:1607.00133).

May import: step and below. Begin with `fzero.per_sample.clipping`, a transform of the
model; `factors` has the formulas of layers, `leaves` the modules they are of, `ledger`
adds up the norms of a forward, and `noise` makes a private step.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.per_sample.clipping import clip as clip
    from fzero.per_sample.noise import PrivateStep as PrivateStep, private as private
else:
    __getattr__, __dir__, __all__ = door(
        __name__, {"clipping": "clip", "noise": "PrivateStep private"}
    )
