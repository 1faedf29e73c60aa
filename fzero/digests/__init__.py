"""Digests of what a step computes, and `replay`, which compares them: two runs of one
step, and ranks that hold the same values.
"""

from fzero.digests.digest import Digest as Digest, digest as digest
from fzero.digests.replaying import ReplayError as ReplayError, replay as replay
