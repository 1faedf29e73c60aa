"""One set of figures: what several pages show is what docs/performance.md shows; the
tutorial's pages lead to each other.
"""

from __future__ import annotations

import re

import pytest
from pages import ROOT

DOCS = ROOT / "docs"
PERFORMANCE = (DOCS / "performance.md").read_text()
TUTORIAL = ("plain", "stage_3", "checkpoint", "plan", "traffic", "optimizer", "simulation")


def test_the_comparison_shows_rows_of_the_figures() -> None:
    figures = re.findall(
        r"^\| 57M \| (\d) \| (\d+) \| ([^|]+) \| (\d+) \|", PERFORMANCE, re.MULTILINE
    )
    comparison = (DOCS / "reference" / "comparison.md").read_text()
    shown = re.findall(r"^\| (\d) \| (\d+) \| ([^|]+) \| (\d+) \|$", comparison, re.MULTILINE)
    assert shown == figures and len(shown) == 4


def test_a_picture_has_one_caption() -> None:
    captions: dict[str, set[str]] = {}
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for text, picture in re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", page.read_text()):
            captions.setdefault(picture.rpartition("/")[2], set()).add(text)
    assert {picture: texts for picture, texts in captions.items() if len(texts) > 1} == {}


@pytest.mark.parametrize("number", range(len(TUTORIAL)))
def test_the_tutorial_has_a_link_to_the_page_before_and_after(number: int) -> None:
    lines = (DOCS / "tutorial" / f"{TUTORIAL[number]}.md").read_text().splitlines()
    *_, last = (line for line in lines if re.match(r"(Previous|Next): ", line))
    if number:
        assert "Previous: [" in last and f"({TUTORIAL[number - 1]}.md)" in last
    if number + 1 < len(TUTORIAL):
        assert "Next: [" in last and f"({TUTORIAL[number + 1]}.md)" in last


def test_the_readme_begins_with_what_decides() -> None:
    """Two commands, for whom, install, ten lines of code and one figure, in one screen
    of forty lines.
    """
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    decides = (
        "make demo",
        "make test",
        "For whom",
        "Only here",
        "pip install",
        "Several GPUs have not been tried",
        "state, metrics = step",
    )
    for part in decides:
        assert part in screen, part
    assert len(re.findall(r"^!\[", screen, re.MULTILINE)) == 1
