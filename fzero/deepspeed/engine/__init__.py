"""The stateful facade for DeepSpeed's scripts. Begin with
`fzero.deepspeed.engine.initialize`.
"""
