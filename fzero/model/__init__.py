"""A torch Module as a function of tensors: it is bound to the tensors of a state while
it runs, and what a step cannot support in it is refused by name.

May import: common and sharding. Begin with `fzero.model.binding`.
"""
