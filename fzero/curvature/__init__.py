"""Products of a loss' second derivatives with vectors, on the ranks of a step.

May import: runtime and below. Begin with `fzero.curvature.products`, which has the
Hessian's and the Gauss–Newton matrix' product; `vectors` has the space of vectors:
dot products, random vectors, from full tensors and back; `duals` has the parameters
with tangents that a forward computes with.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.curvature import products as products
    from fzero.curvature.products import gradient as gradient
    from fzero.curvature.vectors import VectorSpace as VectorSpace, space as space
else:
    __getattr__, __dir__, __all__ = door(
        __name__, {"products": "gradient", "vectors": "VectorSpace space", "": "products vectors"}
    )
