"""On how many examples is a law tried?

The profile `fzero`, of `make test-all`, tries 50 of a law that says nothing. Of every
law `short`, of `make test`, tries a fifth as many, and `nightly` ten times as many.
`HYPOTHESIS_PROFILE` names the profile.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

settings.register_profile("fzero", deadline=None, max_examples=50)
settings.register_profile("short", deadline=None, max_examples=10)
settings.register_profile("nightly", deadline=None, max_examples=500, print_blob=True)
# Before a test module makes settings of its own, which take from the profile what they leave out.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fzero"))


def examples(number: int, **others: Any) -> settings:
    """`number` examples in the profile `fzero`, and in proportion in another one."""
    by_profile = settings().max_examples / settings.get_profile("fzero").max_examples
    return settings(max_examples=max(1, round(number * by_profile)), **others)
