"""The command line: `fzero config FILE`, `fzero export DIR OUT`; or `python -m fzero …`."""

from __future__ import annotations

import argparse
import sys
import warnings

from rich.console import Console

from fzero import CheckpointError, Config, ConfigError, ConfigWarning, export
from fzero.config_table import reference, table


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; 1 when what it is given is wrong."""
    parser = argparse.ArgumentParser(prog="fzero", description="ZeRO as pure functions on PyTorch")
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="what a configuration comes to")
    config.add_argument("file", nargs="?", help="a JSON or Hjson file with DeepSpeed's keys")
    config.add_argument("--reference", action="store_true", help="print the reference of all keys, as Markdown")
    exports = commands.add_parser(
        "export", help="the weights of a checkpoint as safetensors files, for from_pretrained"
    )
    exports.add_argument("dir", help="a folder that fzero.save wrote to, or one checkpoint in it")
    exports.add_argument("out", help="the folder to write to")
    exports.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="of the parameters (default 16 bits)"
    )
    exports.add_argument("--max-file-nbytes", type=int, default=5 * 10**9, help="bytes of one file (default 5e9)")
    given = parser.parse_args(arguments)
    if given.command == "export":
        try:
            export(given.dir, given.out, dtype=given.dtype, max_file_nbytes=given.max_file_nbytes)
        except (CheckpointError, ValueError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    if given.reference:
        print(reference(), end="")
        return 0
    if given.file is None:
        config.error("give a FILE, or --reference")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigWarning)  # the table tells them
            cfg = Config.load(given.file)
        Console().print(table(cfg))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
