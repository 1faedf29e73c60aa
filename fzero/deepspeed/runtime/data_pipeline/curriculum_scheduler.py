"""`deepspeed.runtime.data_pipeline.curriculum_scheduler`: the difficulty of a step."""

from fzero.deepspeed.engine.data_schedulers import CurriculumScheduler

__all__ = ["CurriculumScheduler"]
