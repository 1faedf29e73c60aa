"""The folder that precedes others on the PYTHONPATH of aliased processes: a `deepspeed`
module, its metadata and command.
"""
