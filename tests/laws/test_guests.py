"""The core names no guest: a walk over the syntax trees of the rooms through which
every step goes.

A guest is a capability with a room of its own. It reaches the core as a value that
answers a protocol (a `Program`, a `Job`, an `Observer`). So a new guest changes no file
of the core, and a reader of the core meets none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from test_rooms import ROOT, files, name_of, tree_of


class Guest(NamedTuple):
    """The words that name a guest in code.

    Attributes:
        words: parts of names (of `num_stages` these are "num", "stages", and
            "num_stages" itself), and texts that code compares.
        doors: the names that pass the guest on unread, each as "module: name".
        means_another: names with one of the words that mean something else.
    """

    words: frozenset[str]
    doors: frozenset[str] = frozenset()
    means_another: frozenset[str] = frozenset()


GUESTS = {
    "pipelines": Guest(
        frozenset({"pipeline", "pipelines", "pipelined", "pipe", "is_stage", "num_stages"}),
        # The public argument, whose value goes to `parallelism.py`.
        doors=frozenset({"fzero.step: pipeline"}),
        # Keys of `offload_optimizer`: whether its transfers overlap with the update.
        means_another=frozenset({"pipeline_read", "pipeline_write"}),
    ),
    "generation": Guest(frozenset({"generate", "generates", "generating", "generation"})),
    "the tuner": Guest(frozenset({"tuner", "tuning", "autotuner", "autotuning"})),
    "activation checkpointing": Guest(
        frozenset(
            {"checkpoint", "checkpoints", "checkpointing", "checkpointed", "cpu_checkpointing"}
        ),
        # the public argument, which becomes a transform
        doors=frozenset({"fzero.step: checkpoint"}),
    ),
    "compression": Guest(
        frozenset(
            {
                "compress",
                "compresses",
                "compressed",
                "compression",
                "prune",
                "pruned",
                "pruning",
                "scores",
                "scored",
            }
        ),
        # itertools.compress, and the comm hook of what is sent
        means_another=frozenset({"compress", "compressed"}),
    ),
    "dropped tokens": Guest(
        frozenset({"token_dropping", "drops_tokens", "random_ltd", "ltd", "dropping", "tokens"})
    ),
    "dropped layers": Guest(
        frozenset({"progressive_layer_drop", "drops_layers", "layer_drop", "pld", "theta"})
    ),
    "compiled blocks": Guest(frozenset({"compiled_blocks", "blocks_to_compile", "with_blocks"})),
    "LoRA": Guest(frozenset({"lora", "peft", "adapter", "adapters"})),
}
CORE = ("step.py", "state.py", "verbs.py", "runtime/*.py", "model/*.py", "plans/*.py")
PATHS = sorted(path for pattern in CORE for path in (ROOT / "fzero").glob(pattern))


@cache
def words_of(name: str) -> set[str]:
    """The parts of a name, in lower case, and the name itself.

    >>> sorted(words_of("PipelineStages"))
    ['pipeline', 'pipelinestages', 'stages']
    """
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {part.lower() for part in parts} | {name.lower()}


def names_in(tree: ast.AST) -> Iterator[str]:
    """Every name in the code: of variables, fields, arguments, functions, classes,
    modules, and texts that are compared.

    Docstrings and messages are for readers, and may speak of anything.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names):
                yield from (part for alias in names for part in alias.name.split("."))
            case ast.ImportFrom(module=str(module), names=names):
                yield from module.split(".")
                yield from (alias.name for alias in names)
            case ast.Compare(left=left, comparators=comparators):
                yield from (
                    x.value
                    for side in (left, *comparators)
                    for x in ast.walk(side)
                    if isinstance(x, ast.Constant) and isinstance(x.value, str)
                )
            case ast.MatchValue(value=ast.Constant(value=str(text))):
                yield text


@cache
def names_of(path: Path) -> tuple[str, ...]:
    return tuple(names_in(tree_of(path)))


def mentions(guest: Guest, path: Path) -> list[str]:
    """The names in a file that name a guest, each as "module: name"."""
    found = (name for name in names_of(path) if name not in guest.means_another)
    return [f"{name_of(path)}: {name}" for name in found if words_of(name) & guest.words]


@pytest.mark.parametrize("guest", GUESTS.values(), ids=GUESTS)
def test_the_core_names_no_guest(guest: Guest) -> None:
    assert {mention for path in PATHS for mention in mentions(guest, path)} == guest.doors


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from fzero.pipeline import Pipeline", "pipeline"),
        ("import fzero.pipeline.stages", "pipeline"),
        ("run = spec.pipeline", "pipeline"),
        ("class Spec:\n    is_stage: bool = False", "is_stage"),
        ("class PipelineStages: ...", "PipelineStages"),
        ("def f(*, num_stages): ...", "num_stages"),
        ("f(pipeline=None)", "pipeline"),
        ("if 'pipe' in mesh.names: ...", "pipe"),
        ("match axis:\n    case 'pipe': ...", "pipe"),
    ],
)
def test_a_mention_is_found_wherever_code_can_make_it(code: str, name: str) -> None:
    found = [
        each for each in names_in(ast.parse(code)) if words_of(each) & GUESTS["pipelines"].words
    ]
    assert name in found


def test_each_guest_is_named_in_a_room_of_its_own() -> None:
    """Its words are those that its own code uses, so that the law above would see them
    in the core.
    """
    for guest in GUESTS.values():
        assert any(mentions(guest, path) for path in files("fzero") if path not in PATHS)


if __name__ == "__main__":
    for each, of_guest in GUESTS.items():
        all_mentions = [mention for path in PATHS for mention in mentions(of_guest, path)]
        print(f"{each}: {len(all_mentions)}", *all_mentions, sep="\n    ")
