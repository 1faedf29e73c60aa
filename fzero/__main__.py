"""The command line: `fzero train.py …`, `fzero plan --model 7B`, `fzero config FILE`,
…; or `python -m fzero …`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.table import Table

from fzero import ConfigWarning, __version__
from fzero.cli.plan_profile import count, nbytes, parser_of, plan_model, print_result, profile_model
from fzero.common.optional import package
from fzero.common.text_tables import print_report
from fzero.config.table import ShownConfig

HELP = """usage: fzero [run] [flags] script.py args…   start a script in many processes
       fzero COMMAND …                       one of the commands below; fzero COMMAND --help explains it
       fzero --version                       the version of this package

ZeRO as pure functions on PyTorch

  run       start a script in many processes           fzero run --num_procs 2 train.py
                                                       fzero run --as-deepspeed ds_train.py
  plan      what each rank would hold and send         fzero plan --model 7B --world 64
  profile   where a model's time and work go           fzero profile --model 100M --sequence 256
  tune      the fastest configuration of a script      fzero tune --num_procs 2 train.py --config c.json
  test      whether fzero works here, in a minute      fzero test
  diff      where two recorded runs part               fzero diff runs/a runs/b
  laws      laws of training, also of other systems    fzero laws --system fsdp2
  env       this machine: versions, devices, rates     fzero env --path /fast
  config    what a configuration comes to              fzero config ds_config.json
  export    the weights of a checkpoint, as files      fzero export checkpoints weights
  import-deepspeed    a checkpoint of DeepSpeed        fzero import-deepspeed ds_checkpoints checkpoints"""

CONFIGS = """examples:
  fzero config ds_config.json
  fzero config ds_config.json --to fsdp2 > train_fsdp2.py
  fzero config accelerate.yaml --from accelerate > ds_config.json"""
EXPORTS = "example:\n  fzero export checkpoints weights --dtype bfloat16"
IMPORTS = "example:\n  fzero import-deepspeed ds_checkpoints checkpoints"


def show_config(arguments: list[str]) -> int:
    """Prints what each key of a configuration does, or a translation; returns 1 if the
    configuration is wrong.
    """
    parser = parser_of("config", "what a configuration comes to, or its translation", CONFIGS)
    parser.add_argument("file", nargs="?", help="a JSON or Hjson file with DeepSpeed's keys")
    parser.add_argument(
        "--defaults", action="store_true", help="show the keys that the file lacks, too"
    )
    parser.add_argument(
        "--reference", action="store_true", help="print the reference of all keys, as Markdown"
    )
    parser.add_argument(
        "--to", choices=("fsdp2",), help="print a Python file that trains so with FSDP2"
    )
    written = "read a file of another library, and print it as JSON for fzero"
    parser.add_argument("--from", dest="source", choices=("accelerate", "fsdp2"), help=written)
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    given = parser.parse_args(arguments)
    if given.reference:
        from fzero.config.reference import reference  # no command loads what only another one needs

        print(reference(), end="")
        return 0
    if given.file is None:
        parser.error("give a FILE, or --reference")
    if given.to and given.source:
        parser.error("--to and --from: give one of them")
    if given.to or given.source:
        return print_result(lambda: _translated(given.file, given.source), False)

    def make() -> tuple[Table, dict[str, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigWarning)  # the table shows them
            shown = ShownConfig.load(given.file)
        return shown.table(defaults=given.defaults), {
            "values": shown.values(),
            "given": [
                name
                for name, _, kind, _ in shown.rows()
                if kind in ("given", "conflict", "no effect")
            ],
            "notes": [note._asdict() for note in (*shown.notes, *shown.conflicts)],
        }

    return print_result(make, given.json)


def _translated(file: str, source: str | None) -> tuple[str, dict[str, Any]]:
    """A configuration as a file of FSDP2, or one of another library as JSON for fzero;
    notes go to stderr.
    """
    from fzero.config import translate

    if source is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigWarning)  # the file names what has no translation
            return translate.to_fsdp2(ShownConfig.load(file), file).rstrip(), {}
    yaml = package("yaml", needed_by="--from") if file.endswith((".yaml", ".yml")) else None
    faults = (ValueError,) if yaml is None else (ValueError, yaml.YAMLError)
    try:
        text = Path(file).read_text("utf-8")
        given = json.loads(text) if yaml is None else yaml.safe_load(text)
    except faults as error:
        kind = "JSON" if yaml is None else "YAML"
        raise ValueError(
            f"--from {source}: {file} is not {kind} ({error}); pass a file of keys and values, "
            f".json or .yaml"
        ) from None
    if not isinstance(given, Mapping):
        raise ValueError(
            f"--from {source}: {file} must hold keys and values, got {type(given).__name__}; pass "
            f"another file"
        )
    read = translate.from_fsdp2 if source == "fsdp2" else translate.from_accelerate
    made, left = read(given)
    for line in left:
        print(f"not translated: {line}", file=sys.stderr)
    return json.dumps(made, indent=2), {}


def export_weights(arguments: list[str]) -> int:
    """Writes the weights of a checkpoint as safetensors files, or all of it for
    DeepSpeed; returns 1 on failure.
    """
    what = (
        "the weights of a checkpoint as safetensors files, for from_pretrained; or all of it "
        "for DeepSpeed"
    )
    parser = parser_of("export", what, EXPORTS)
    parser.add_argument("dir", help="a folder that fzero.save wrote to, or one checkpoint in it")
    parser.add_argument("out", help="the folder to write to")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, help="of the parameters (default 16 bits)")
    parser.add_argument(
        "--max-file-nbytes",
        type=nbytes,
        default=5e9,
        metavar="BYTES",
        help="of one file (default 5GB)",
    )
    formats = ("safetensors", "deepspeed-universal")
    parser.add_argument(
        "--format",
        choices=formats,
        default=formats[0],
        help="the weights, or a checkpoint of DeepSpeed",
    )
    torch_optimizer = (
        "of a checkpoint of DeepSpeed: its optimizer is one of torch's (torch_adam, or made "
        "by a script)"
    )
    parser.add_argument("--torch-optimizer", action="store_true", help=torch_optimizer)
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    given = parser.parse_args(arguments)
    if given.format == formats[1] and given.dtype is not None:
        parser.error(
            "--dtype is for --format safetensors: a checkpoint of DeepSpeed has masters in "
            "float32; leave it out"
        )
    if given.format == formats[0] and given.torch_optimizer:
        parser.error("--torch-optimizer is for --format deepspeed-universal; leave it out")
    before = _files_in(given.out)
    from fzero.checkpoint import export
    from fzero.deepspeed import export_deepspeed

    def make() -> tuple[Table, dict[str, Any]]:
        if given.format == formats[0]:
            export(
                given.dir, given.out, dtype=given.dtype, max_file_nbytes=int(given.max_file_nbytes)
            )
        else:
            export_deepspeed(
                given.dir, given.out, steps="tensor" if given.torch_optimizer else "number"
            )
        written = {
            path: size for path, size in _files_in(given.out).items() if before.get(path) != size
        }
        return _written(given.out, written), {
            "out": given.out,
            "files": {path: size[0] for path, size in written.items()},
        }

    return print_result(make, given.json)


def _files_in(folder: str) -> dict[str, tuple[int, int]]:
    """Bytes of each file below a folder, and when it was written."""
    found = ((path, path.stat()) for path in sorted(Path(folder).rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): (about.st_size, about.st_mtime_ns) for path, about in found
    }


def _written(folder: str, files: Mapping[str, tuple[int, int]]) -> Table:
    made = Table("file", title=f"written to {folder}", title_justify="left", box=None)
    made.add_column("bytes", justify="right")
    for path, (size, _) in files.items():
        made.add_row(path, f"{size:,}")
    return made


def show_machine(arguments: list[str]) -> int:
    """Versions, devices and rates of this machine; returns 1 if the folder cannot be
    written to.
    """
    what = (
        "this machine, to paste into an issue: versions, devices, and rates measured in "
        "about ten seconds"
    )
    parser = parser_of(
        "env",
        what,
        "examples:\n  fzero env --path /fast\n  fzero env --ranks 2 --json > rates.json",
    )
    parser.add_argument(
        "--ranks",
        type=count,
        default=1,
        metavar="N",
        help="processes that measure at once (default 1)",
    )
    parser.add_argument(
        "--path", default=".", help="a folder on the disk to measure (default: this one)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="after which no other rate is measured (default 60; 0 only needed ones)",
    )
    parser.add_argument("--json", action="store_true", help="for a program; rates are per second")
    given = parser.parse_args(arguments)
    from fzero.profiling import machine as machine_report

    def say(what: str) -> None:
        print(f"measuring: {what}", file=sys.stderr, flush=True)

    def make() -> tuple[Table, dict[str, Any]]:
        try:
            # a path that is no folder is an error before anything is printed
            with os.scandir(given.path):
                found = machine_report.facts(given.path)
            if not given.json:
                print_report(machine_report.facts_table(found))
            how = {"num_ranks": given.ranks, "says": say, "seconds": given.seconds}
            rates = machine_report.measure_rates(given.path, **how)
        except OSError as error:
            raise ValueError(f"--path {given.path}: {error}") from error
        except RuntimeError as error:  # a rank failed
            raise ValueError(str(error)) from error
        return machine_report.rates_table(rates), asdict(replace(found, rates=rates))

    return print_result(make, given.json)


def convert(arguments: list[str]) -> int:
    """Writes a checkpoint of DeepSpeed as one of fzero; returns 1 on failure."""
    what = "a checkpoint of DeepSpeed as one of fzero, for fzero.load; DeepSpeed is not needed"
    parser = parser_of("import-deepspeed", what, IMPORTS)
    parser.add_argument(
        "dir", help="a folder that save_checkpoint wrote to, or one checkpoint in it"
    )
    parser.add_argument("out", help="a folder of fzero's checkpoints, which is made")
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    given = parser.parse_args(arguments)
    from fzero.deepspeed import convert_deepspeed

    def make() -> tuple[str, dict[str, Any]]:
        made = str(convert_deepspeed(given.dir, given.out))
        return made, {"checkpoint": made}

    return print_result(make, given.json)


def run(arguments: list[str]) -> int:
    """Starts a script in many processes; its exit code."""
    from fzero.tuning.cli import run

    return run(arguments)


def tune(arguments: list[str]) -> int:
    """Finds the fastest configuration of a script."""
    from fzero.tuning.cli import tune

    return tune(arguments)


def try_here(arguments: list[str]) -> int:
    """Tries fzero in this environment; 1 when something fails."""
    from fzero.cli.works_here import test

    return test(arguments)


def show_difference(arguments: list[str]) -> int:
    """Compares two recorded runs; 1 if they differ by more than rounding."""
    from fzero.cli.difference import difference

    return difference(arguments)


def try_laws(arguments: list[str]) -> int:
    """Tries the laws of training on a system; 1 when one is broken."""
    from fzero.cli.laws import laws

    return laws(arguments)


COMMANDS = {
    "run": run,
    "tune": tune,
    "plan": plan_model,
    "profile": profile_model,
    "test": try_here,
    "diff": show_difference,
    "laws": try_laws,
    "env": show_machine,
    "config": show_config,
    "export": export_weights,
    "import-deepspeed": convert,
}


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Words that begin with no name of a command are for `run`."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--version"]:
        print(f"fzero {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0 if words else 2
    command = COMMANDS.get(words[0])
    near = [] if words[0].startswith("-") else get_close_matches(words[0], COMMANDS, 1)
    if command is None and near and not Path(words[0]).exists():
        print(
            f"fzero: {words[0]!r} is no command and no file; did you mean fzero {near[0]}?",
            file=sys.stderr,
        )
        return 2
    return run(words) if command is None else command(words[1:])


if __name__ == "__main__":
    sys.exit(main())
