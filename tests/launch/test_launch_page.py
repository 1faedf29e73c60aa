"""What docs/launching.md shows is what is printed: each worked example is run with
`--dry_run`.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from fzero.launch import feed
from fzero.launch.cli import main
from fzero.launch.environment import FORWARDED
from fzero.launch.launchers import LAUNCHERS

PAGE = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()
EXAMPLES = re.findall(r"^\$ fzero (.*--dry_run.*)\n((?:(?!```).*\n)+)", PAGE, flags=re.MULTILINE)
HOSTS = re.search(r"^```\n(# hosts.*?)```", PAGE, flags=re.MULTILINE | re.DOTALL)


def printed(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What a command prints on a machine of 64 cores, in the folder /home/me."""
    for name in [*os.environ]:
        if name.startswith(("GLIBC", *FORWARDED)):
            monkeypatch.delenv(name)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "getcwd", lambda: "/home/me")
    monkeypatch.setenv("HOME", str(folder))
    assert HOSTS is not None
    (folder / "hosts").write_text(HOSTS[1])
    assert main(shlex.split(command)) == 0
    shown = capsys.readouterr().out.replace(sys.executable, "/usr/bin/python3")
    return shown.replace(
        str(Path(feed.__file__).parents[1]), "/usr/lib/python3/dist-packages/fzero"
    )


@pytest.mark.parametrize(
    ("command", "shown"), EXAMPLES, ids=[command[:60] for command, _ in EXAMPLES]
)
def test_the_page_shows_what_is_printed(command, shown, tmp_path, monkeypatch, capsys):
    assert printed(command, tmp_path, monkeypatch, capsys) == shown


def test_the_page_has_an_example_of_every_launcher():
    used = {re.search(r"--launcher (\w+)", command) for command, _ in EXAMPLES}
    assert {match[1] for match in used if match} | {"ssh"} == {*LAUNCHERS} and None in used
