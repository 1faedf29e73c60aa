"""docs/reading.md: the path through the core is short, and the places that it names
exist.
"""

from __future__ import annotations

import re
from pathlib import Path

from test_limits import num_characters

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reading.md").read_text()
PATH, CHANGES = TEXT.split("## Eleven changes")


def test_the_path_through_the_core_has_at_most_twelve_files_of_150_000_characters() -> None:
    files = re.findall(r"\| \[(fzero/[\w/]+\.py)\]\(\.\./(fzero/[\w/]+\.py)\) \|", PATH)
    assert all(shown == target for shown, target in files)
    num = sum(num_characters((ROOT / name).read_text()) for name, _ in files)
    assert 0 < len(files) <= 12 and num <= 150_000


def test_eleven_changes_are_named_with_places_that_exist() -> None:
    rows = [row for row in CHANGES.splitlines() if row.startswith("| another")]
    assert len(rows) == 11
    for row in rows:
        files = re.findall(r"`((?:fzero|sharding)/[\w/]+(?:\.py|/))`", row)
        sources = [(ROOT / name).read_text() for name in files if name.endswith(".py")]
        assert all((ROOT / name).exists() for name in files), row
        place = row.split("|")[2]
        for name in re.findall(r"`([A-Za-z_]+)(?:\.(\w+))?`", place):
            assert any(
                re.search(rf"\b{part}\b", source) for source in sources for part in name if part
            ), (row, name)
