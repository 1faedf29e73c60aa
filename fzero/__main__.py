"""The command line: `fzero config FILE`, or `python -m fzero config FILE`."""

from __future__ import annotations

import argparse
import sys
import warnings

from rich.console import Console

from fzero import Config, ConfigError, ConfigWarning
from fzero.config_table import reference, table


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; 1 when a configuration is wrong."""
    parser = argparse.ArgumentParser(prog="fzero", description="ZeRO as pure functions on PyTorch")
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="what a configuration comes to")
    config.add_argument("file", nargs="?", help="a JSON or Hjson file with DeepSpeed's keys")
    config.add_argument("--reference", action="store_true", help="print the reference of all keys, as Markdown")
    given = parser.parse_args(arguments)
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
