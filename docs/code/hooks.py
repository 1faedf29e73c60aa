"""What mkdocs does beside rendering pages: a page for every public name, and one for
every source file that a page links to.

Pages link to files of the repository as they would be read there
(`../examples/gpt.py`). The site has no such files, so each of them becomes a page of
the site, with its text as a code block. Public names are read from the syntax tree of
the packages: no module of fzero is imported, and PyTorch need not be installed.
"""

from __future__ import annotations

import ast
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import errors

ROOT = Path(__file__).parents[2]

FIRST = (
    "fzero",
    "fzero.checkpoint",
    "fzero.optim",
    "fzero.comms",
    "fzero.estimation",
    "fzero.profiling",
    "fzero.resharding",
    "fzero.generation",
    "fzero.testing",
    "fzero.compression",
    "fzero.attention",
    "fzero.integrations.transformers",
    "fzero.config",
    "fzero.plans",
    "fzero.storage",
    "fzero.runtime",
    "fzero.graph",
    "sharding",
    "sharding.testing",
)
"""The packages whose public names have pages, in the order of the menu; new rooms with
public names come after them.
"""

INTERNAL = {"fzero.common"}
"""Rooms whose public names are for other rooms only."""

LINK = re.compile(r"(?<!!)\]\(((?:\.\./)+[^)#\s]+)((?:#[^)\s]*)?)\)")


def packages() -> list[str]:
    """`FIRST`, and every other room that calls `door`."""
    rooms = [
        path.parent
        for path in sorted(ROOT.glob("fzero/*/__init__.py"))
        if " = door(" in path.read_text()
    ]
    names = [".".join(room.relative_to(ROOT).parts) for room in rooms]
    return [*FIRST, *(name for name in names if name not in FIRST and name not in INTERNAL)]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The menu's part "API" has an entry for each package."""
    entries: list[Any] = [{"Public names": "api/index.md"}]
    for package in packages():
        pages = [
            f"api/{package}/index.md",
            *(f"api/{package}/{name}.md" for name in own_names(package)),
        ]
        entries.append({package: pages})
    config.nav = [*(config.nav or []), {"API": entries}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = api_pages()
    for file in files.documentation_pages():
        for target, _ in LINK.findall(file.content_string):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(file.src_uri), target))
            if path.startswith("../") and (ROOT / path[3:]).is_file():
                pages[source_page(path[3:])] = source_text(path[3:])
    for uri, text in sorted(pages.items()):
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to the repository's files become links to their pages; the page of errors
    gets its lists.
    """
    if page.file.src_uri == "reference/errors.md":
        markdown = errors.page(markdown)
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        if not path.startswith("../"):
            return match[0]
        if (ROOT / path[3:]).is_dir():
            return "]"  # a folder has no page
        return f"]({posixpath.relpath(source_page(path[3:]), folder or '.')})"

    markdown = re.sub(
        r"\[([^\]]+)(\]\((?:\.\./)+[^)]*\))",
        lambda m: unlinked(m[1], LINK.sub(replaced, m[2])),
        markdown,
    )
    return markdown


def unlinked(text: str, link: str) -> str:
    return text if link == "]" else f"[{text}{link}"


def source_page(path: str) -> str:
    return f"source/{path}.md"


def source_text(path: str) -> str:
    language = {".py": "python", ".json": "json", ".md": "markdown"}.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text()
    return (
        f"---\nsearch:\n  exclude: true\n---\n\n# "
        f"{path}\n\n``````{language}\n{text.rstrip()}\n``````\n"
    )


def public_names(package: str) -> dict[str, str]:
    """Each public name of a package, and the dotted path of its definition:
    `{"save": "fzero.checkpoint.saving.save"}`.

    They are those of `__all__`, or of the call of `door` that makes it; without either,
    the functions and classes of a module.
    """
    tree = ast.parse(source_of(package))
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "door":
            modules = ast.literal_eval(node.args[1])
            names |= {name for module, part in modules.items() if module for name in part.split()}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names |= set(ast.literal_eval(node.value))
    if not names:
        names = {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        }
    return {
        name: resolved(imported.get(name, f"{package}.{name}"))
        for name in sorted(names, key=str.lower)
    }


def source_of(module: str) -> str:
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def resolved(path: str) -> str:
    """The dotted path of the definition, where a module only imports the name."""
    module, _, name = path.rpartition(".")
    for node in ast.parse(source_of(module)).body:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] in ("fzero", "sharding")
        ):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return resolved(f"{node.module}.{alias.name}")
    return path


def own_names(package: str) -> dict[str, str]:
    """The names whose page is this package's: of a definition that several packages
    offer, the first has the page.
    """
    before = {
        path
        for earlier in packages()[: packages().index(package)]
        for path in public_names(earlier).values()
    }
    return {name: path for name, path in public_names(package).items() if path not in before}


def api_pages() -> dict[str, str]:
    """The pages of public names, by their path in the site."""
    homes: dict[str, str] = {}
    pages = {}
    overview = [
        "# API",
        "",
        "A page for each public name, from its docstring.",
        "",
        "| package | holds | names |",
        "| --- | --- | ---: |",
    ]
    for package in packages():
        names = public_names(package)
        about = (
            (ast.get_docstring(ast.parse(source_of(package))) or "")
            .split("\n\n")[0]
            .replace("\n", " ")
        )
        overview.append(f"| [{package}]({package}/index.md) | {about} | {len(names)} |")
        for name, path in names.items():
            if path not in homes:
                homes[path] = f"{package}/{name}.md"
                pages[f"api/{homes[path]}"] = (
                    f"---\ntitle: {name}\n---\n\n::: {path}\n    options:\n      heading: "
                    f"{package}.{name}\n"
                )
        rows = [f"- [`{name}`](../{homes[path]}): {summary(path)}" for name, path in names.items()]
        pages[f"api/{package}/index.md"] = "\n".join([f"# {package}", "", about, "", *rows, ""])
    pages["api/index.md"] = "\n".join([*overview, ""])
    return pages


def summary(path: str) -> str:
    """The first line of a definition's docstring."""
    module, _, name = path.rpartition(".")
    body = ast.parse(source_of(module)).body
    for node, after in zip(body, [*body[1:], None]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            return str(after.value.value).split("\n\n")[0].replace("\n", " ") if is_text else ""
    return ""
