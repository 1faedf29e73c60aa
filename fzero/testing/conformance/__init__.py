"""Laws of data-parallel training, tried on fzero and on other systems.

    >>> from fzero.testing.conformance import LAWS
    >>> len(LAWS) >= 40
    True

`fzero laws --system fsdp2` prints a row for each law; docs/reference/laws.md is the table
of all systems. `training` has the six calls of an adapter, `laws` what a law works with;
`averages`, `norms`, `precision`, `resuming`, `parameters`, `forwards` and `jobs` are the
laws. `ranks` runs them on processes.
"""

from __future__ import annotations

from fzero.testing.conformance import (  # noqa: F401 - each enters its laws
    averages,
    forwards,
    jobs,
    norms,
    parameters,
    precision,
    resuming,
)
from fzero.testing.conformance.deepspeed_system import DEEPSPEED
from fzero.testing.conformance.laws import LAWS, Broken, Lab, Law, Plain, law
from fzero.testing.conformance.own_systems import OWN_SYSTEMS
from fzero.testing.conformance.ranks import Result, check_system, try_laws
from fzero.testing.conformance.torch_systems import TORCH_SYSTEMS
from fzero.testing.conformance.training import Norm, Refused, Setup, System, Trainer

__all__ = [
    "LAWS",
    "SYSTEMS",
    "Broken",
    "Lab",
    "Law",
    "Norm",
    "Plain",
    "Refused",
    "Result",
    "Setup",
    "System",
    "Trainer",
    "check_system",
    "law",
    "try_laws",
]

SYSTEMS = {system.name: system for system in (*OWN_SYSTEMS, *TORCH_SYSTEMS, DEEPSPEED)}
"""By the name of their column."""
