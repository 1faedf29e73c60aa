"""`deepspeed.elasticity.config`: the errors of an elastic job."""

from fzero.config.fields import ConfigError


class ElasticityError(ConfigError):
    """The base of them."""


class ElasticityConfigError(ElasticityError):
    """The block `elasticity` is missing, off or invalid, or is not the scheduler's."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The number of ranks cannot train the batch."""
