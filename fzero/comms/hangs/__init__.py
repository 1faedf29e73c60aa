"""Reports of hangs: where each rank is, which rank is missing, and the error of a
collective that does not end.

Begin with `fzero.comms.hangs.failures`, which the collectives call.
"""
