"""DeepSpeed's JSON as frozen values that check themselves.

May import: optim and below. Begin with `fzero.config.config`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.config.config import (
        Config as Config,
        ConfigError as ConfigError,
        ConfigWarning as ConfigWarning,
    )
    from fzero.config.elastic_sizes import (
        ElasticBatch as ElasticBatch,
        elastic_batch as elastic_batch,
        elastic_batch_of_nodes as elastic_batch_of_nodes,
    )
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "config": "Config ConfigError ConfigWarning",
            "elastic_sizes": "ElasticBatch elastic_batch elastic_batch_of_nodes",
        },
    )
