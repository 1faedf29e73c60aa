"""`fzero.deepspeed.install()`: from then on `import deepspeed` is fzero.deepspeed, here
and in processes started from here.

1. A finder stands before Python's own: `deepspeed.a.b` is the module
   `fzero.deepspeed.a.b`, the same object. Where fzero lacks a module of DeepSpeed's,
   its names are those of fzero with the same origin in DeepSpeed, or stand-ins that
   raise when they are used (`fzero.deepspeed.missing`). Modules and names that
   DeepSpeed does not have either raise as usual.
2. The folder `alias_path` is on the module search path of this process and, by
   PYTHONPATH, of its children. There `importlib.metadata` finds DeepSpeed's version,
   and children find a module `deepspeed` that calls `install`.
3. The command `deepspeed` of that folder is first on the PATH.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module, util
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from fzero.deepspeed.missing import message, stand_in
from fzero.deepspeed.names import ROOT, Definition, modules, names_of, origin, submodules
from fzero.deepspeed.table import EXPORTS

OWN = "fzero.deepspeed"
FOLDER = Path(__file__).with_name("alias_path")
PYTHON = "FZERO_PYTHON"
"""The variable with the interpreter of the command `deepspeed`."""


@cache
def own_modules() -> frozenset[str]:
    """The modules of DeepSpeed of which fzero has its own, `fzero.` before their names."""
    folder = Path(__file__).parent
    files = (path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py"))
    found = {".".join(part for part in (ROOT, *parts) if part != "__init__") for parts in files}
    found |= {f"{ROOT}.{name}" for name in EXPORTS}
    return frozenset(name for name in found if name in modules())


def find(module: str, name: str) -> Any:
    """What `module.name` of DeepSpeed is here, where fzero's module of that name does
    not have it.

    Raises:
        AttributeError: DeepSpeed has no such name either.
    """
    where = origin(module, name)
    if where is None:
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}, here or in DeepSpeed (0.19.6 to 0.19.8)"
        )
    if where.kind == "modules":
        return import_module(where.module)
    own = own_object(where, name)
    return stand_in(where) if own is None else own[0]


def own_object(where: Definition, name: str) -> tuple[Any] | None:
    """fzero's object of this origin in DeepSpeed, wherever fzero has it; None if it has
    none.

    >>> own_object(
    ...     Definition("deepspeed.runtime.zero.partition_parameters", "Init", "classes"), "Init"
    ... )
    (<class 'fzero.deepspeed.runtime.zero.partition_parameters.Init'>,)
    """
    for theirs in sorted(own_modules()):
        for given in dict.fromkeys((where.name, name)):
            if (
                origin(theirs, given) == where
                and (found := own_attribute(theirs, given)) is not None
            ):
                return found
    return None


def own_attribute(theirs: str, name: str) -> tuple[Any] | None:
    """What fzero's module for a module of DeepSpeed has under a name itself."""
    if theirs not in own_modules():
        return None
    module = import_module(f"fzero.{theirs}")
    if name in vars(module):
        return (vars(module)[name],)
    getter = (
        _before[module.__name__] if module.__name__ in _before else vars(module).get("__getattr__")
    )
    if getter is not None:
        with suppress(AttributeError):
            return (getter(name),)
    return None


_before: dict[str, Callable[[str], Any] | None] = {}
"""Each module's own `__getattr__`, which `fall_back` has replaced."""


def fall_back(module: ModuleType, theirs: str) -> None:
    """Gives a module of fzero the other names of DeepSpeed's module."""
    before: Callable[[str], Any] | None = vars(module).get("__getattr__")
    _before[module.__name__] = before

    def __getattr__(name: str) -> Any:
        error = AttributeError(
            f"module {theirs!r} has no attribute {name!r}, here or in DeepSpeed (0.19.6 to 0.19.8)"
        )
        if before is not None:
            try:
                return before(name)
            except AttributeError as raised:
                error = raised
        if f"{theirs}.{name}" in own_modules():  # bound in DeepSpeed, which imports it
            return import_module(f"fzero.{theirs}.{name}")
        if origin(theirs, name) is None:
            raise error
        return find(theirs, name)

    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    if submodules(theirs) and "__path__" not in vars(module):
        module.__path__ = []  # DeepSpeed has a package here, whose modules are then stand-ins


class NamedModule(Loader):
    """Loads a module of fzero's as `loader` does, and gives it the other names of
    DeepSpeed's module.
    """

    def __init__(self, loader: Loader, theirs: str) -> None:
        self.loader, self.theirs = loader, theirs

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        fall_back(module, self.theirs)

    def __getattr__(self, name: str) -> Any:  # its source, its resources
        return getattr(self.loader, name)


class OwnModule(Loader):
    """Loads a module of DeepSpeed's name as the module of fzero's."""

    def __init__(self, own: str) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(self.own)  # Python returns this one

    def get_code(self, name: str) -> CodeType | None:
        """The code for `python -m`."""
        spec = util.find_spec(self.own)
        loader = spec.loader if spec is not None else None
        return loader.get_code(self.own) if isinstance(loader, InspectLoader) else None


class MissingModule(Loader):
    """Loads a module of DeepSpeed that fzero has not."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        theirs = module.__name__
        module.__doc__ = message(theirs)
        public = {name for name in names_of(theirs) if not name.startswith("_")}
        everything = sorted({*names_of(theirs), *submodules(theirs)})

        def __getattr__(name: str) -> Any:
            if name == "__all__":
                return sorted(public)
            found = find(theirs, name)
            setattr(module, name, found)
            return found

        module.__getattr__ = __getattr__  # type: ignore[method-assign]
        module.__dir__ = lambda: [*vars(module), *everything]  # type: ignore[method-assign]

    def get_code(self, name: str) -> CodeType:
        """The code for `python -m`: the error in words."""
        return compile(f"import sys\nsys.exit({message(name)!r})", name, "exec")


class Finder(MetaPathFinder):
    """Finds `deepspeed` and the modules below it, and fzero's modules of these names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{OWN}."):
            theirs = fullname.removeprefix("fzero.")
            return self._named(fullname, path, theirs) if theirs in own_modules() else None
        if fullname in own_modules():
            return util.spec_from_loader(fullname, OwnModule(f"fzero.{fullname}"), is_package=True)
        if fullname.startswith(f"{ROOT}.") and fullname in modules():
            return util.spec_from_loader(
                fullname, MissingModule(), is_package=modules()[fullname].is_package
            )
        return None

    def _named(self, fullname: str, path: Sequence[str] | None, theirs: str) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path)) is not None:
                if spec.loader is not None:
                    spec.loader = NamedModule(spec.loader, theirs)
                return spec
        return None


def install(*, announce: bool | None = None) -> None:
    """Makes `import deepspeed` give fzero.deepspeed, in this process and in those that
    it starts.

    Call it before other libraries are imported: some ask then whether DeepSpeed is
    there.

    Args:
        announce: whether rank 0 prints a line; by default it does, unless a parent
            process was aliased already.

    Raises:
        RuntimeError: DeepSpeed itself has been imported.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    present = sys.modules.get(ROOT)
    is_ours = present is None or getattr(present, "__file__", None) == str(FOLDER / "deepspeed.py")
    if not is_ours:
        raise RuntimeError(
            f"install: must come before `import deepspeed`, and DeepSpeed has been imported from "
            f"{getattr(present, '__file__', None)}; call it at the top of the script, or start the "
            f"script with fzero run --as-deepspeed"
        )
    sys.meta_path.insert(0, Finder())
    import_module(OWN)
    for theirs in own_modules():
        if (module := sys.modules.get(f"fzero.{theirs}")) is not None:
            fall_back(module, theirs)
            sys.modules[theirs] = module
    inherited = str(FOLDER) in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    _extend_paths()
    if (not inherited if announce is None else announce) and os.environ.get("RANK", "0") == "0":
        print(
            "fzero: `import deepspeed` is fzero.deepspeed here and in processes started here",
            file=sys.stderr,
            flush=True,
        )


def _extend_paths() -> None:
    """Puts the folder first on the search paths of this process and its children,
    behind a script's own folder.
    """
    if str(FOLDER) not in sys.path:
        sys.path.insert(1, str(FOLDER))
    root = str(FOLDER.parents[2])
    is_installed = root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    is_found = not is_installed and root in [os.path.abspath(folder) for folder in sys.path]
    _put_first("PYTHONPATH", str(FOLDER), *([root] if is_found else []))
    _put_first("PATH", str(FOLDER / "bin"))
    os.environ[PYTHON] = sys.executable


def _put_first(variable: str, first: str, *last: str) -> None:
    before = [
        part for part in os.environ.get(variable, "").split(os.pathsep) if part and part != first
    ]
    os.environ[variable] = os.pathsep.join(
        [first, *before, *(part for part in last if part not in before)]
    )
