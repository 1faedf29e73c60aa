"""Data efficiency as functions of the step: difficulties, samplers, indices of metrics,
dropped layers and dropped tokens.

May import: common, sharding. Begin with `fzero.data.schedules`. Nothing here keeps a
position: a schedule is a function of n, the number of updates so far, a sampler one of
(seed, batch number), and random choices are made of a key (`fzero.data.keys`).
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.data.analyzer import analyze as analyze, measure as measure
    from fzero.data.index_files import read_metric as read_metric, write_metric as write_metric
    from fzero.data.layer_drop import kept_layers as kept_layers, theta as theta
    from fzero.data.loader import CurriculumLoader as CurriculumLoader
    from fzero.data.metrics import Metric as Metric
    from fzero.data.sampler import Admission as Admission, CurriculumSampler as CurriculumSampler
    from fzero.data.schedules import (
        Schedule as Schedule,
        fixed_discrete as fixed_discrete,
        fixed_linear as fixed_linear,
        fixed_root as fixed_root,
    )
    from fzero.data.token_batches import (
        TokenBatch as TokenBatch,
        batches_by_tokens as batches_by_tokens,
        scaled_rate as scaled_rate,
    )
    from fzero.data.token_dropping import RandomLTD as RandomLTD, kept_tokens as kept_tokens
    from fzero.data.truncation import truncated as truncated
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "analyzer": "analyze measure",
            "index_files": "read_metric write_metric",
            "layer_drop": "kept_layers theta",
            "loader": "CurriculumLoader",
            "metrics": "Metric",
            "sampler": "Admission CurriculumSampler",
            "schedules": "Schedule fixed_discrete fixed_linear fixed_root",
            "token_batches": "TokenBatch batches_by_tokens scaled_rate",
            "token_dropping": "RandomLTD kept_tokens",
            "truncation": "truncated",
        },
    )
