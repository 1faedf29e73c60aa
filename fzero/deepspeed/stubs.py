"""Stubs of the modules of the table, which have no files, for type checkers and
editors: the build puts them into the wheel.

In a checkout: python fzero/deepspeed/stubs.py
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
# by its path, as a build has no torch to import fzero with
TABLE = runpy.run_path(str(HERE / "table.py"))


def stub_of(name: str) -> str:
    """The imports of one module."""
    lines = []
    for home, words in TABLE["EXPORTS"][name].items():
        module = {"": f"fzero.deepspeed.{name}", ".": f"fzero{home}"}.get(
            home[:1], f"fzero.deepspeed.{home}"
        )
        for word in words.split():
            there, _, here = word.partition(":")
            # Only `as` the same name exports a name from a stub.
            lines.append(
                f"from {module} import {there} as {there}\n"
                + (f"{here} = {there}\n" if here else "")
            )
    return "".join(lines)


def write(folder: Path) -> None:
    """Writes the stubs into a folder of fzero's sources, or of its build."""
    for name in TABLE["EXPORTS"]:
        last = "__init__.pyi" if TABLE["is_package"](name) else ""
        path = folder / "fzero" / "deepspeed" / name.replace(".", "/")
        path = path / last if last else path.with_suffix(".pyi")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stub_of(name))


class BuildWithStubs(build_py):  # type: ignore[misc]
    """Builds the package with the stubs."""

    def run(self) -> None:
        super().run()
        write(HERE.parents[1] if self.editable_mode else Path(self.build_lib))


if __name__ == "__main__":
    write(HERE.parents[1])
