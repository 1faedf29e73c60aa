"""`deepspeed.runtime.data_pipeline.data_routing`: which tokens pass through which
layers.
"""
