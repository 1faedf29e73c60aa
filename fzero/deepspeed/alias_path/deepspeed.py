"""`import deepspeed` in a process that an aliased one started:
`fzero.deepspeed.install` replaces this module.
"""

if __name__ == "deepspeed":  # not where a tool imports fzero.deepspeed.alias_path.deepspeed
    import sys
    from importlib.util import find_spec
    from pathlib import Path

    if find_spec("fzero") is None:  # the parent found it in its current folder
        sys.path.append(str(Path(__file__).parents[3]))

    from fzero.deepspeed.alias import install

    install()
