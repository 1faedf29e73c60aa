"""`deepspeed.runtime.data_pipeline.data_sampling.utils`: dtypes of index files."""

from fzero.data.index_files import fitting_dtype as find_fit_int_dtype

__all__ = ["find_fit_int_dtype"]
