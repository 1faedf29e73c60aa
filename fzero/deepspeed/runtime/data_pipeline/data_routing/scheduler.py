"""`deepspeed.runtime.data_pipeline.data_routing.scheduler`: how many tokens are kept after so many updates."""

from fzero.deepspeed.engine.data_schedulers import RandomLTDScheduler

__all__ = ["RandomLTDScheduler"]
