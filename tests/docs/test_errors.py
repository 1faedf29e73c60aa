"""The page of errors: what is raised is found there by its first words, with the fix."""

from __future__ import annotations

import html
import importlib.util
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fzero
from fzero.checkpoint.folders import find
from sharding import Mesh, Placement, Sharded

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.long


@cache
def listed() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "docs_errors", ROOT / "docs" / "code" / "errors.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def all_messages() -> list[Any]:
    return [*listed().messages()]


RAISING: dict[str, Callable[[], object]] = {
    "placement": lambda: Placement("nvme"),
    "mesh": lambda: Mesh.of(node=2),
    "spec": lambda: Sharded(),
    "codec": lambda: fzero.comms.quantize(3),  # type: ignore[arg-type]
    "folder": lambda: find(Path("/nowhere")),
    "config": lambda: fzero.Config.load(
        {"train_batch_size": 7, "gradient_accumulation_steps": 3}
    ).batch_sizes(4),
}


@pytest.mark.parametrize("name", RAISING)
def test_an_error_is_found_by_its_first_words(name: str) -> None:
    with pytest.raises((ValueError, RuntimeError)) as raised:
        RAISING[name]()
    text = str(raised.value)
    patterns = [
        re.compile(re.sub(r"‹[^›]*›", ".*", re.escape(message.rule)) + ".*", re.DOTALL)
        for message in all_messages()
    ]
    assert any(pattern.fullmatch(text) for pattern in patterns), text


def test_every_error_class_is_explained() -> None:
    """Those that a user of the public names can catch."""
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    doors = (fzero, fzero.comms, fzero.checkpoint)
    names = {name for door in doors for name in door.__all__ if name.endswith(("Error", "Warning"))}
    assert names and all(f"`{name}`" in page for name in names)


def test_messages_have_a_fix() -> None:
    """Nine in ten end with one after their last semicolon; the rest are of DeepSpeed's
    own words, or name it otherwise.
    """
    messages = all_messages()
    assert len(messages) > 500
    assert sum(not message.fix for message in messages) <= len(messages) // 6


def test_the_page_shows_each_message_once() -> None:
    page = html.unescape(listed().page("# Errors"))
    assert page.count("path is required when kind is") == 1
    assert page.index("## Checkpoints") < page.index("## Specs and layouts")
