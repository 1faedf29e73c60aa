"""`deepspeed.utils.timer`: the engine's timers."""

from fzero.deepspeed.engine.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"

__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer"]
