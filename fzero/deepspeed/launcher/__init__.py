"""`deepspeed.launcher`: names of the launcher; `fzero run` starts jobs."""

from __future__ import annotations

from fzero.deepspeed.launcher import runner

__all__ = ["runner"]
