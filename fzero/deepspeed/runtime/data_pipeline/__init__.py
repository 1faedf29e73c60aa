"""`deepspeed.runtime.data_pipeline`: curricula, samplers, analyzers and dropped tokens;
see docs/data.md.
"""
