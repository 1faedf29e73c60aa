"""The pages to follow do what they say: their files run, and print what they show."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from pages import ROOT, blocks, run_pages

DOCS = ROOT / "docs"
TUTORIAL = [DOCS / "tutorial" / f"{name}.md" for name in (
    "plain", "stage_3", "checkpoint", "plan", "traffic", "optimizer", "simulation")]  # fmt: skip
FOLLOWED = [
    DOCS / "start.md",
    DOCS / "kit.md",
    DOCS / "concepts" / "transforms.md",
    *sorted((DOCS / "recipes").glob("*.md")),
]


@pytest.mark.long
def test_the_tutorial_prints_what_it_shows(tmp_path: Path) -> None:
    assert sorted(TUTORIAL) == sorted((DOCS / "tutorial").glob("*.md"))
    run_pages(TUTORIAL, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.stem)
def test_a_page_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    run_pages([page], tmp_path)


@pytest.mark.parametrize(
    "page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS))
)
def test_python_on_a_page_is_python(page: Path) -> None:
    text = page.read_text()
    tabs = re.findall(r"^    ```python\n(.*?)^    ```$", text, re.MULTILINE | re.DOTALL)
    for code in [
        *(block.text for block in blocks(text) if block.language == "python"),
        *map(textwrap.dedent, tabs),
    ]:
        compile(code, f"{page.name}, {code.splitlines()[0]}", "exec")
