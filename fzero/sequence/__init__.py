"""Sequences that several ranks share: each has a part of the tokens, and attention swaps
tokens for heads (Ulysses).

May import: transforms and below. Begin with `fzero.sequence.ulysses`, the transform;
`parts` divides batches, `exchange` has the all-to-alls, `attention` finds the calls of
attention.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.sequence.exchange import attend as attend
    from fzero.sequence.parts import Part as Part, batch_of as batch_of
    from fzero.sequence.transforms import ulysses as ulysses
else:
    __getattr__, __dir__, __all__ = door(
        __name__, {"exchange": "attend", "parts": "Part batch_of", "transforms": "ulysses"}
    )
