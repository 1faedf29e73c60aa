"""Training loops of other libraries on top of fzero. Each module needs its library;
fzero itself does not.
"""
