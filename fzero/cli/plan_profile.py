"""The commands `fzero plan --model 7B --world 64` and
`fzero profile --model 100M --sequence 256`.

Each returns 0, or 1 after one line on stderr for an invalid request.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from inspect import signature
from math import inf
from typing import TYPE_CHECKING, Any

import optree
import torch
from rich.console import Console, Group, RenderableType
from rich.progress import Progress
from rich.text import Text

from fzero import CheckpointError, ConfigWarning, make_train_step
from fzero.common.flags import Parser
from fzero.common.optional import MissingPackageError, package
from fzero.common.text_tables import print_report
from fzero.config.files import changed
from fzero.estimation import Answers, compare_plans, fit, plan_pipeline
from fzero.estimation.compare import keys_of, quietly
from fzero.estimation.dry_run import DryRun
from fzero.estimation.models import ModelError, NamedModel, filled, named, sample_from, sample_of
from fzero.graph import MachineModel
from fzero.profiling import profile, save_trace
from fzero.profiling.machine import rates_from
from fzero.profiling.profiler import OF_MANY_RANKS
from fzero.sequence import ulysses
from sharding import Mesh

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = {
    "": 1.0,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "KI": 2.0**10,
    "MI": 2.0**20,
    "GI": 2.0**30,
    "TI": 2.0**40,
}

PLAN = """bytes on a rank and bytes sent, for all stages and placements beside each other; or what fits.

MODEL is a number of parameters (7B: a plain GPT of that size), the config.json of a model of transformers or
its folder, the name of a class of transformers, with sizes if you like
(LlamaForCausalLM,num_hidden_layers=4,hidden_size=512), or an import path pkg.mod:fn of a function that returns
a module. No weights are made, and nothing is downloaded."""

PLAN_EXAMPLES = """examples:
  fzero plan --model 7B --world 64
  fzero plan --model 7B --world 8 --batch 16 --generate 1024
  fzero plan --model LlamaForCausalLM --config ds_config.json --world 8 --sequence 4096
  fzero plan --model 1B --world 8 --sequence 131072 --seq 2 --fit 80GB
  fzero plan --model 70B --world 1024 --pipe 8 --sequence 4096 --micro-batches 64 --picture stages.png
  fzero plan --model config.json --world 8 --sequence 4096 --fit 80GB --nvme /local --out fits.json
  fzero env --json > rates.json; fzero plan --model 350M --world 2 --sequence 1024 --rates rates.json --picture peak.png"""


PROFILE = """parameters, multiply-accumulates, floating point operations, time and rate of every module, forward and
backward, and of the update. Values are random: they do not matter here. MODEL is as in fzero plan."""

PROFILE_EXAMPLES = """examples:
  fzero profile --model 100M --sequence 256 --depth 1
  fzero profile --model config.json --sequence 256 --config ds_config.json --trace trace.json
  fzero profile --model my_package.models:small --sample my_package.models:batch --device cuda"""


def nbytes(word: str) -> float:
    """A number of bytes.

    >>> nbytes("80GB"), nbytes("1.5 KiB"), nbytes("2e9")
    (80000000000.0, 1536.0, 2000000000.0)
    """
    match = re.fullmatch(
        r"([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?", word.strip().upper().replace("E", "e")
    )
    if match is None or match[2] not in SCALES:
        raise argparse.ArgumentTypeError(
            f"must be a number of bytes, as 80GB, 64GiB or 8e10, got {word!r}"
        )
    return float(match[1]) * SCALES[match[2]]


def count(word: str) -> int:
    """A positive integer."""
    if not word.isdigit() or not int(word):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {word!r}")
    return int(word)


def positive(word: str) -> float:
    """A positive number."""
    value = 0.0
    with suppress(ValueError):
        value = float(word)
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {word!r}")
    return value


def parser_of(name: str, description: str, examples: str, **how: Any) -> Parser:
    """A parser whose help keeps its line breaks and ends with examples; `how` are
    further arguments of argparse.
    """
    how |= {"description": description, "epilog": examples}
    return Parser(prog=f"fzero {name}", formatter_class=argparse.RawDescriptionHelpFormatter, **how)


def plan_model(arguments: list[str]) -> int:
    """`fzero plan`."""
    parser = parser_of("plan", PLAN, PLAN_EXAMPLES)
    _add_model(parser)
    parser.add_argument(
        "--world", type=count, metavar="N", help="number of ranks (default: --seq, or 1)"
    )
    shares = "ranks that share the tokens of each sample (fzero.sequence.ulysses; default 1)"
    parser.add_argument("--seq", type=count, default=1, metavar="S", help=shares)
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="where the model is (default cuda)",
    )
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help="draw the bytes on the device over a step (needs matplotlib)",
    )
    answers = (
        "also count what a rank holds while it generates --batch answers of T tokens, with "
        "their prompts"
    )
    parser.add_argument("--generate", type=count, metavar="T", help=answers)
    pipes = parser.add_argument_group("pipelines")
    pipes.add_argument(
        "--pipe",
        type=count,
        metavar="P",
        help="plan a pipeline of P stages (give --sequence or --sample)",
    )
    orders = "its order: gpipe, 1f1b, zero_bubble or interleaved:V (default 1f1b)"
    pipes.add_argument("--order", metavar="NAME", help=orders)
    number = "of a step (default: the configuration's, or 4 P)"
    pipes.add_argument("--micro-batches", type=count, metavar="M", help=number)
    fits = parser.add_argument_group("what fits")
    what = "find the fastest configuration in so much device memory"
    fits.add_argument("--fit", type=nbytes, metavar="BYTES", help=what)
    fits.add_argument("--host", type=nbytes, metavar="BYTES", help="host memory of a rank")
    fits.add_argument("--disk", type=nbytes, metavar="BYTES", help="room for files of a rank")
    fits.add_argument(
        "--nvme", metavar="PATH", help="a folder on a local disk; without one no files are tried"
    )
    fits.add_argument("--out", metavar="FILE", help="write the configuration that fits as JSON")
    rates = parser.add_argument_group("rates of one rank per second, for the seconds of a step")
    rates.add_argument(
        "--rates",
        metavar="FILE",
        help="what fzero env --json printed; those given here go before them",
    )
    for name, (field, what) in RATES.items():
        default = f"default {getattr(MachineModel(), field):.0e}"
        rates.add_argument(f"--{name}", type=positive, metavar="RATE", help=f"{what} ({default})")
    given = parser.parse_args(arguments)
    if given.out and given.fit is None:
        parser.error("--out writes what fits: give --fit BYTES beside it")
    for flag in ("nvme", "host", "disk"):
        if getattr(given, flag) is not None and given.fit is None:
            parser.error(f"--{flag} says where something may fit: give --fit BYTES beside it")
    for flag in ("order", "micro_batches"):
        if getattr(given, flag) is not None and given.pipe is None:
            parser.error(f"--{flag.replace('_', '-')} is for a pipeline: give --pipe P beside it")
    if given.pipe is not None and given.sequence is None and not given.sample:
        parser.error(
            "--pipe needs the work of each layer: give a batch, --sequence T or --sample pkg.mod:fn"
        )
    if given.pipe is not None and given.out:
        parser.error("--out writes a configuration, which has no stages: leave it out, or --pipe")
    given.world = given.world or given.seq
    if given.seq > 1:
        if given.world % given.seq:
            parser.error(f"--seq must divide the --world of {given.world} ranks, got {given.seq}")
        if given.pipe is not None:
            parser.error("--seq divides sequences, which a pipeline passes on whole: leave one out")
    return print_result(lambda: _plan(given), given.json)


RATES = {
    "flops": ("flops", "operations"),
    "memory": ("memory", "bytes read and written on the device"),
    "network": ("network", "bytes sent"),
    "pcie": ("host", "bytes to host"),
    "files": ("disk", "bytes"),
    "processor": ("processor", "bytes of host memory read and written by an update there"),
}
"""The field of `MachineModel` that a flag sets, and what it counts."""


def _machine(given: argparse.Namespace) -> MachineModel:
    """The rates of a file, overridden by those of single flags."""
    machine = MachineModel() if given.rates is None else rates_from(given.rates).machine
    own = {
        field: getattr(given, name)
        for name, (field, _) in RATES.items()
        if getattr(given, name) is not None
    }
    if "flops" in own:
        # rates for every dtype and operator
        own |= dict.fromkeys(("flops_fp32", "attention", "attention_fp32"))
    if "memory" in own:
        own |= dict.fromkeys(("pointwise", "pointwise_fp32", "update", "update_fp32"))
    return replace(machine, **own)


def _plan(given: argparse.Namespace) -> tuple[RenderableType, dict[str, Any]]:
    if given.picture:  # before a plan that may take minutes
        package("matplotlib", needed_by="--picture")
    found = named(given.model)
    batch, batch_text = _batch(given, found, given.world)
    how = {
        "world_size": given.world,
        "batch": batch,
        "machine": _machine(given),
        "device": given.device,
        **_shared(given, found),
    }
    if given.pipe is not None:
        return _plan_pipe(given, found, batch, batch_text)
    if given.generate is not None:
        answers = Answers(_num_rows(given, given.world)[0], given.generate)
        how["answers"] = answers
        batch_text = ", ".join(
            filter(None, (batch_text, f"generating {answers.rows} × {answers.tokens} tokens"))
        )
    if given.fit is None:
        compared = compare_plans(found.model, given.config, **how)
        if given.picture:
            _draw(
                given.picture,
                f"{found.description}, {compared.given}",
                compared[compared.given].step,
            )
        return _under(found, batch_text, compared), _subject(found, batch_text) | compared.as_dict()
    host, disk = (inf if nbytes is None else nbytes for nbytes in (given.host, given.disk))
    how |= {
        "device_nbytes": given.fit,
        "host_nbytes": host,
        "disk_nbytes": disk,
        "nvme_path": given.nvme,
    }
    with _progress() as progress:
        fitting = fit(found.model, given.config, progress=progress, **how)
    if fitting.best is None:
        print_report(fitting, stderr=True)
    # an error where nothing fits
    data = _subject(found, batch_text) | {"config": fitting.config} | fitting.as_dict()
    if given.out:
        with _writing("--out", given.out):
            fitting.save(given.out)
    if given.picture and fitting.best is not None:
        _draw(given.picture, f"{found.description}, {fitting.best.name}", fitting.best.step)
    return _under(found, batch_text, fitting), data


def _shared(given: argparse.Namespace, found: NamedModel) -> dict[str, Any]:
    """The arguments of a plan whose ranks share sequences."""
    if given.seq == 1:
        return {}
    mesh = Mesh.of(data=given.world // given.seq, seq=given.seq)
    loss_fn = _loss_of_part if "labels" in signature(found.model.forward).parameters else None
    if hasattr(found.model, "loss_function"):  # of transformers, which gets the number of labels
        loss_fn = None
    return {"mesh": mesh, "transforms": [ulysses()], "loss_fn": loss_fn}


def _loss_of_part(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """The loss of a model that takes labels, and a weight."""
    others = {key: x for key, x in batch.items() if key != "shift_labels"}
    return model(**others, labels=batch["shift_labels"]), 1


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Inside, a bar on stderr counts configurations; there is none where stderr is no
    terminal.
    """
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("configurations")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _plan_pipe(
    given: argparse.Namespace, found: NamedModel, batch: Any, batch_text: str
) -> tuple[RenderableType, dict[str, Any]]:
    planned = plan_pipeline(
        found.model,
        given.config,
        stages=given.pipe,
        world_size=given.world,
        batch=batch,
        micro_batches=given.micro_batches,
        order=given.order or "1f1b",
        device_nbytes=inf if given.fit is None else given.fit,
        machine=_machine(given),
        device=given.device,
    )
    if given.picture:
        save_picture(given.picture, planned.draw())
    return _under(found, batch_text, planned), _subject(found, batch_text) | planned.as_dict()


def profile_model(arguments: list[str]) -> int:
    """`fzero profile`."""
    parser = parser_of("profile", PROFILE, PROFILE_EXAMPLES)
    _add_model(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument(
        "--depth",
        type=int,
        default=-1,
        metavar="D",
        help="of the deepest modules shown (default all)",
    )
    top, trace = (
        "largest classes named of each depth (default 1)",
        "also write a chrome trace of a step, of --config",
    )
    parser.add_argument("--top", type=count, default=1, metavar="K", help=top)
    parser.add_argument("--trace", metavar="FILE", help=f"{trace} on this process alone")
    given = parser.parse_args(arguments)
    if not given.sample and given.sequence is None:
        parser.error("give a batch: --sequence T (and --batch B), or --sample pkg.mod:fn")
    return print_result(lambda: _profile(given), given.json)


def _profile(given: argparse.Namespace) -> tuple[RenderableType, dict[str, Any]]:
    found = named(given.model)
    batch, batch_text = _batch(given, found)
    try:
        batch = optree.tree_map(lambda x: _with_values(x, given.device), batch)
        model = filled(found.model, given.device)
        made = profile(model, batch, given.config)
        if given.trace:
            as_it_is = {"optimizer": {"type": "AdamW"}}  # in the model's dtypes
            keys = as_it_is if given.config is None else keys_of(given.config)
            step = make_train_step(model, changed(keys, OF_MANY_RANKS))
            with _writing("--trace", given.trace):
                save_trace(given.trace, step, step.init(), batch)
    except (RuntimeError, AssertionError) as error:
        # torch: no such device, no memory, a batch that does not fit
        raise ModelError(
            f"profile: {found.description} on {given.device!r} gave {type(error).__name__}: {error}"
        ) from error
    report = made.report(module_depth=given.depth, top_modules=given.top)
    return _under(found, batch_text, report), _subject(found, batch_text) | made.as_dict()


def _with_values(x: Any, device: str) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.zeros(x.shape, dtype=x.dtype, device=device) if x.is_meta else x.to(device)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="MODEL", help="see above")
    parser.add_argument(
        "--config", metavar="FILE", help="fzero's or DeepSpeed's JSON (default: bf16 and AdamW)"
    )
    samples = "samples of a micro-step (default: those of the configuration, or 1)"
    parser.add_argument("--batch", type=count, metavar="B", help=samples)
    parser.add_argument(
        "--sequence", type=count, metavar="T", help="tokens of a sample; counts activations"
    )
    parser.add_argument(
        "--sample", metavar="pkg.mod:fn", help="a function that makes a batch, instead of the two"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")


def _batch(
    given: argparse.Namespace, found: NamedModel, world_size: int | None = None
) -> tuple[Any, str]:
    """One micro-batch, and its description; without a number of ranks its size is that
    of a configured micro-batch.
    """
    if given.sample:
        return sample_from(given.sample), f"the batch of {given.sample}"
    if given.sequence is None:
        return None, ""
    size, source = _num_rows(given, world_size)
    return sample_of(
        found.model, size, given.sequence
    ), f"micro-batch of {size} × {given.sequence} tokens ({source})"


def _num_rows(given: argparse.Namespace, world_size: int | None) -> tuple[int, str]:
    """The samples of a micro-batch, and what says so."""
    if given.batch is not None:
        return given.batch, "--batch"
    cfg = quietly(keys_of(given.config))
    size = (
        cfg.train_micro_batch_size_per_gpu
        if world_size is None
        else cfg.batch_sizes(world_size).micro
    )
    return size or 1, "the configuration" if size else "the default"


def _under(found: NamedModel, batch: str, report: Any) -> RenderableType:
    return Group(
        Text(", ".join(filter(None, (found.description, batch)))), "", report
    )  # else `models:heart:` is a picture


def _subject(found: NamedModel, batch: str) -> dict[str, Any]:
    return {"model": found.description} | ({"batch": batch} if batch else {})


def _draw(path: str, title: str, step: DryRun) -> None:
    save_picture(path, step.draw(title))


def save_picture(path: str, picture: Figure) -> None:
    """Writes a picture to the path of `--picture`."""
    try:
        picture.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        rule = "a file that can be written, of a format that matplotlib has"
        raise ModelError(
            f"--picture: must be {rule}, got {path!r} ({error}); pass another, as in peak.png"
        ) from error


@contextmanager
def _writing(flag: str, path: str) -> Iterator[None]:
    """Inside, the file of a flag is written; an error names the flag."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"{flag}: must be a file that can be written, got {path!r} ({error}); pass another"
        ) from error


def print_result(make: Callable[[], tuple[RenderableType, dict[str, Any]]], as_json: bool) -> int:
    """Prints the result as text or JSON and returns 0; an error is one line on stderr,
    and 1.
    """
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConfigWarning)
            report, data = make()
    except (ModelError, CheckpointError, MissingPackageError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            print(f"warning: {warning.message}", file=sys.stderr)
    if as_json:
        print(json.dumps(data, indent=2, default=str))
    elif isinstance(report, str):
        print(report)
    else:
        print_report(report)
    return 0
