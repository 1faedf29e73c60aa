"""`deepspeed.runtime.sequence_parallel`: sequences that several ranks share, on
`fzero.sequence`.
"""
