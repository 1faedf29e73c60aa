"""`deepspeed.checkpoint.ds_to_universal`: a universal checkpoint of DeepSpeed's, from
one of an engine or of DeepSpeed.

python -m fzero.deepspeed.checkpoint.ds_to_universal --input_folder DIR --output_folder
OUT
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from fzero.checkpoint.folders import LATEST, latest_of
from fzero.deepspeed.formats.export import export_deepspeed
from fzero.deepspeed.formats.files import is_deepspeeds
from fzero.deepspeed.formats.load import convert_deepspeed

_IGNORED = {"num_extract_workers": 4, "num_merge_workers": 2}
_FLAGS = ("keep_temp_folder", "no_strict", "inject_missing_state")


def parse_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """DeepSpeed's arguments; those for its worker processes have no effect."""
    parser = argparse.ArgumentParser(
        prog="ds_to_universal", description="Writes a universal checkpoint."
    )
    parser.add_argument(
        "--input_folder",
        required=True,
        help="the folder given to save_checkpoint, or of one checkpoint",
    )
    parser.add_argument(
        "--output_folder",
        required=True,
        help="the folder of the universal checkpoint, which is made",
    )
    for name, default in _IGNORED.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="has no effect")
    for name in _FLAGS:
        parser.add_argument(f"--{name}", action="store_true", help="has no effect")
    return parser.parse_args(args)


def main(args: argparse.Namespace) -> None:
    """Writes the checkpoint of `args.input_folder` as a universal one to
    `args.output_folder`.
    """
    folder, out = Path(args.input_folder), Path(args.output_folder)
    if is_deepspeeds(folder):
        with TemporaryDirectory(prefix=".fzero-", dir=out.parent) as beside:
            export_deepspeed(convert_deepspeed(folder, Path(beside, "converted")), out)
        return
    tag = folder / latest_of(folder) if (folder / LATEST).is_file() else folder
    export_deepspeed(tag if tag.is_dir() else folder, out)


if __name__ == "__main__":
    main(parse_arguments())
