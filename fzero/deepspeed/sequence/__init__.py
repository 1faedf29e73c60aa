"""`deepspeed.sequence`: attention over sequences that several ranks share, on
`fzero.sequence`.
"""
