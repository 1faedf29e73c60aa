"""Compression as a pure function of the gathered parameter and the number of updates:
quantization, pruning, layer reduction.

May import: model, config, optim and below. Begin with `fzero.compression.plan`;
`fzero.compression.matching` makes the plan.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.compression.cleaning import clean as clean, shrunk as shrunk
    from fzero.compression.inputs import quantized_inputs as quantized_inputs
    from fzero.compression.matching import compression as compression
    from fzero.compression.plan import (
        CompressionPlan as CompressionPlan,
        compression_of as compression_of,
    )
    from fzero.compression.prepared import prepare as prepare
    from fzero.compression.students import start_of_student as start_of_student
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "cleaning": "clean shrunk",
            "inputs": "quantized_inputs",
            "matching": "compression",
            "plan": "CompressionPlan compression_of",
            "prepared": "prepare",
            "students": "start_of_student",
        },
    )
