"""`deepspeed.utils.zero_to_torch`: the program that writes the weights of a checkpoint
in a dtype.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fzero.deepspeed.utils.zero_to_fp32 import (
    OUTPUT_DTYPE_NAMES,
    arguments_of,
    convert_zero_checkpoint_to_state_dict,
)


def main(args: Sequence[str] | None = None) -> None:
    """The program `zero_to_torch.py`, with DeepSpeed's arguments."""
    parser = argparse.ArgumentParser(
        prog="zero_to_torch.py", description="Writes the weights of a checkpoint in a dtype."
    )
    parser.add_argument("--dtype", choices=sorted(OUTPUT_DTYPE_NAMES), required=True)
    convert_zero_checkpoint_to_state_dict(**arguments_of(parser, args))


if __name__ == "__main__":
    main()
