"""The site builds without a broken link, has a page for every public name, and loads
nothing from the network.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.long


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "code" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it, where a broken link or anchor is an error; with
    proxies that refuse every connection.
    """
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_package_with_public_names_is_on_the_site() -> None:
    doors = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in [*ROOT.glob("fzero/**/__init__.py"), *ROOT.glob("sharding/__init__.py")]
        if " = door(" in path.read_text() and path.parent != ROOT / "fzero" / "common"
    }
    assert doors <= set(hooks().packages())


@pytest.mark.parametrize("package", hooks().packages())
def test_every_public_name_has_its_page(package: str, site: Path) -> None:
    names = getattr(importlib.import_module(package), "__all__", None)
    found = hooks().public_names(package)
    assert names is None or set(found) == set(names)
    listing = (site / "api" / package / "index.html").read_text()
    for name in found:
        link = re.search(rf'<a href="([^"]+)"><code>{name}</code></a>', listing)
        assert link, f"{package}.{name} is not in the list of its package"
        page = (site / "api" / package / link[1]).resolve().read_text()
        assert re.search(
            rf"<h1[^>]*>[^<]*[.\w]*\.{name}\b|<h1[^>]*>{name}\b", html.unescape(page)
        ), name


def test_pages_load_nothing_from_the_network(site: Path) -> None:
    loaded = re.compile(
        r"""<(?:script|img|iframe)[^>]*\ssrc="?(https?:)|<link[^>]*rel="?(?:stylesheet|icon|preconnect)[^>]*href="?(https?:)"""
    )
    for page in site.rglob("*.html"):
        found = loaded.search(page.read_text())
        assert not found, (page.relative_to(site), found and found[0])
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?https?:|@import", sheet.read_text()), sheet


def test_the_search_knows_pages_and_names(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    titles = {html.unescape(entry["title"]) for entry in index["docs"]}
    assert {"fzero.make_train_step", "My model does not fit", "Overflows"} <= titles


def test_a_page_takes_ten_minutes_at_most() -> None:
    """At 170 words a minute, which is slow; a word of code counts as one of prose."""
    for page in (ROOT / "docs" / "concepts").glob("*.md"):
        assert len(page.read_text().split()) <= 1700, page.name
