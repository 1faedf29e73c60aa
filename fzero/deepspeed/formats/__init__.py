"""DeepSpeed's checkpoints: read, converted and written. Begin with
`fzero.deepspeed.formats.load`.
"""
