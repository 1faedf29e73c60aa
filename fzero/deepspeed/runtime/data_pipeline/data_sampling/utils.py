"""`deepspeed.runtime.data_pipeline.data_sampling.utils`: dtypes of index files."""

from __future__ import annotations

import numpy as np

from fzero.data.index_files import fitting_dtype


def find_fit_int_dtype(min_value: int, max_value: int) -> type[np.integer]:
    """The smallest dtype of integers that holds both numbers."""
    return fitting_dtype(min_value, max_value)


__all__ = ["find_fit_int_dtype"]
