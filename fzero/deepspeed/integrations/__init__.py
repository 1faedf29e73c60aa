"""Training loops of other libraries on top of the engine. Each module needs its
library; fzero itself does not.
"""
