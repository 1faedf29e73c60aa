"""The commands that plan and profile: `fzero plan --model 7B --world 64`, `fzero profile --model 100M --sequence 256`.

Each gives 0, or 1 after one line on stderr where what was asked for is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import optree
import torch
from rich.console import Console, RenderableType

from fzero import ConfigWarning, Machine, compare_plans, fit, profile
from fzero.named_models import ModelError, Named, filled, named, sample_from, sample_of

SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2.0**10, "MI": 2.0**20, "GI": 2.0**30, "TI": 2.0**40}

PLAN = """bytes on a rank and bytes sent, for all stages and placements beside each other; or what fits.

MODEL is a number of parameters (7B: a plain GPT of that size), the config.json of a model of transformers or
its folder, the name of a class of transformers, or an import path pkg.mod:fn of a function that returns a
module. No weights are made, and nothing is downloaded."""

PLAN_EXAMPLES = """examples:
  fzero plan --model 7B --world 64
  fzero plan --model LlamaForCausalLM --config ds_config.json --world 8 --sequence 4096
  fzero plan --model config.json --world 8 --sequence 4096 --fit 80GB --nvme /local --out fits.json"""


PROFILE = """parameters, multiply-accumulates, floating point operations, time and rate of every module, forward and
backward, and of the update. Values are random: they do not matter here. MODEL is as in fzero plan."""

PROFILE_EXAMPLES = """examples:
  fzero profile --model 100M --sequence 256 --depth 1
  fzero profile --model my_package.models:small --sample my_package.models:batch --device cuda"""


def nbytes(word: str) -> float:
    """A number of bytes.

    >>> nbytes("80GB"), nbytes("1.5 KiB"), nbytes("2e9")
    (80000000000.0, 1536.0, 2000000000.0)
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?", word.strip().upper().replace("E", "e"))
    if match is None or match[2] not in SCALES:
        raise argparse.ArgumentTypeError(f"must be a number of bytes, as 80GB, 64GiB or 8e10, got {word!r}")
    return float(match[1]) * SCALES[match[2]]


def count(word: str) -> int:
    """A positive integer."""
    if not word.isdigit() or not int(word):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {word!r}")
    return int(word)


def rate(word: str) -> float:
    """A positive number."""
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {word!r}")
    return value


def parser_of(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser whose help ends with examples and whose words stand as they are written."""
    return argparse.ArgumentParser(
        prog=f"fzero {name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def plan_model(arguments: list[str]) -> int:
    """`fzero plan`."""
    parser = parser_of("plan", PLAN, PLAN_EXAMPLES)
    _add_model(parser)
    parser.add_argument("--world", type=count, default=1, metavar="N", help="number of ranks (default 1)")
    fits = parser.add_argument_group("what fits")
    fits.add_argument(
        "--fit", type=nbytes, metavar="BYTES", help="find the fastest configuration in so much device memory"
    )
    fits.add_argument("--host", type=nbytes, default=float("inf"), metavar="BYTES", help="host memory of a rank")
    fits.add_argument("--disk", type=nbytes, default=float("inf"), metavar="BYTES", help="room for files of a rank")
    fits.add_argument("--nvme", metavar="PATH", help="a folder on a local disk; without one no files are tried")
    fits.add_argument("--out", metavar="FILE", help="write the configuration that fits as JSON")
    rates = parser.add_argument_group("rates of one rank per second, by which configurations are compared")
    for name, what in (
        ("flops", "operations"),
        ("network", "bytes sent"),
        ("pcie", "bytes to host"),
        ("files", "bytes"),
    ):
        rates.add_argument(f"--{name}", type=rate, metavar="RATE", help=f"{what} (default {_default(name):.0e})")
    given = parser.parse_args(arguments)
    if given.out and given.fit is None:
        parser.error("--out writes what fits: give --fit BYTES beside it")
    return told(lambda: _plan(given), given.json)


RATES = {"flops": "flops", "network": "network", "pcie": "host", "files": "disk"}


def _default(name: str) -> float:
    return float(getattr(Machine(), RATES[name]))


def _plan(given: argparse.Namespace) -> tuple[RenderableType, dict[str, Any]]:
    found = named(given.model)
    batch = _batch(given, found)
    if given.fit is None:
        compared = compare_plans(found.model, given.config, world_size=given.world, batch=batch)
        return _under(found, compared), {"model": found.told} | compared.as_dict()
    machine = Machine(**{field: getattr(given, name) or _default(name) for name, field in RATES.items()})
    fitting = fit(
        found.model, given.config, world_size=given.world, device_nbytes=given.fit, host_nbytes=given.host,
        disk_nbytes=given.disk, nvme_path=given.nvme, machine=machine, batch=batch,
    )  # fmt: skip
    if fitting.best is None:
        Console(stderr=True).print(fitting, soft_wrap=True)
    data = {"model": found.told, "config": fitting.config} | fitting.as_dict()  # an error where nothing fits
    if given.out:
        fitting.save(given.out)
    return _under(found, fitting), data


def profile_model(arguments: list[str]) -> int:
    """`fzero profile`."""
    parser = parser_of("profile", PROFILE, PROFILE_EXAMPLES)
    _add_model(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--depth", type=int, default=-1, metavar="D", help="of the deepest modules shown (default all)")
    parser.add_argument(
        "--top", type=count, default=1, metavar="K", help="largest classes named of each depth (default 1)"
    )
    given = parser.parse_args(arguments)
    if not given.sample and given.sequence is None:
        parser.error("give a batch: --sequence T (and --batch B), or --sample pkg.mod:fn")
    return told(lambda: _profile(given), given.json)


def _profile(given: argparse.Namespace) -> tuple[RenderableType, dict[str, Any]]:
    found = named(given.model)
    batch = _batch(given, found)
    try:
        batch = optree.tree_map(lambda x: _with_values(x, given.device), batch)
        made = profile(filled(found.model, given.device), batch, given.config)
    except (RuntimeError, AssertionError) as error:  # of torch: no such device, no memory, a batch that does not fit
        raise ModelError(f"profile: {found.told} on {given.device!r} gave {type(error).__name__}: {error}") from error
    report = made.report(module_depth=given.depth, top_modules=given.top)
    return _under(found, report), {"model": found.told} | made.as_dict()


def _with_values(x: Any, device: str) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.zeros(x.shape, dtype=x.dtype, device=device) if x.is_meta else x.to(device)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="MODEL", help="see above")
    parser.add_argument("--config", metavar="FILE", help="fzero's or DeepSpeed's JSON (default: bf16 and AdamW)")
    parser.add_argument("--batch", type=count, default=1, metavar="B", help="samples of a micro-step (default 1)")
    parser.add_argument("--sequence", type=count, metavar="T", help="tokens of a sample; counts activations")
    parser.add_argument("--sample", metavar="pkg.mod:fn", help="a function that makes a batch, in place of the two")
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")


def _batch(given: argparse.Namespace, found: Named) -> Any:
    if given.sample:
        return sample_from(given.sample)
    return None if given.sequence is None else sample_of(found.model, given.batch, given.sequence)


def _under(found: Named, report: Any) -> RenderableType:
    from rich.console import Group

    return Group(found.told, "", report)


def told(make: Callable[[], tuple[RenderableType, dict[str, Any]]], as_json: bool) -> int:
    """Prints what is made, for people or machines; what is wrong in one line on stderr, and then 1."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConfigWarning)
            report, data = make()
    except (ModelError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for warning in caught:
        if issubclass(warning.category, ConfigWarning):
            print(f"warning: {warning.message}", file=sys.stderr)
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(report, soft_wrap=True)
    return 0
