"""`make_modules()`: from then on the modules of the table (`fzero.deepspeed.table`) can
be imported, as if each had a file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from fzero.common.doors import door
from fzero.deepspeed.table import EXPORTS, is_package

PACKAGE = "fzero.deepspeed"


def names_of(
    module: str, row: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a module with the names of a row of
    the table.
    """
    up = "." * module.removeprefix(PACKAGE).count(".")  # rows are relative to the package
    return door(module, {up + home if home else "": names for home, names in row.items()})


class Exports(MetaPathFinder, Loader):
    """Finds and loads the modules of the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(f"{PACKAGE}.")
        if name == fullname or name not in EXPORTS:
            return None
        return spec_from_loader(fullname, self, is_package=is_package(name))

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.removeprefix(f"{PACKAGE}.")
        get, listed, names = names_of(module.__name__, EXPORTS[name])
        module.__doc__ = (
            f"`deepspeed.{name}`: names that fzero defines elsewhere (`fzero.deepspeed.table`)."
        )
        vars(module).update(__getattr__=get, __dir__=listed, __all__=names)


def make_modules() -> None:
    """Puts the finder first: a folder with stubs alone would be found as a package
    without names.
    """
    if not any(isinstance(finder, Exports) for finder in sys.meta_path):
        sys.meta_path.insert(0, Exports())
