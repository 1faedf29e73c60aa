"""`deepspeed.runtime.data_pipeline.data_sampling`: which samples are in which batch."""
