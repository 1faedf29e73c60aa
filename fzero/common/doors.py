"""Public names of a package that are imported at their first use (PEP 562), so that
`import fzero` loads no other module.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def door(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: the `__name__` of the package.
        modules: the public names, by the module that defines them, relative to the
            package; `there:here` where it has another name there. Under the key ""
            stand names of modules, which are not in `__all__`.

    >>> __getattr__, __dir__, __all__ = door("collections", {"abc": "Mapping Sequence"})
    >>> __getattr__("Mapping").__module__
    'collections.abc'
    >>> __getattr__("Maping")
    Traceback (most recent call last):
    ...
    AttributeError: module 'collections' has no attribute 'Maping'
    """
    words = (
        (module, word.split(":")) for module, names in modules.items() for word in names.split()
    )
    homes = {names[-1]: (module, names[0]) for module, names in words}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, there = homes[name]
        module = importlib.import_module(f".{home or there}", package)
        value = getattr(module, there) if home else module
        setattr(sys.modules[package], name, value)  # the next use finds it at once
        return value

    def listed() -> list[str]:
        # not `door` and `TYPE_CHECKING`
        own = {name for name in vars(sys.modules[package]) if name.startswith("__")}
        return sorted(own | {*homes})

    return get, listed, sorted(name for name, (home, _) in homes.items() if home)
