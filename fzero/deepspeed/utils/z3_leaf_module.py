"""`deepspeed.utils.z3_leaf_module`: marks on modules whose parameters are gathered
together.

The marks are kept for scripts that read them. They change nothing: `units=` of
`initialize` names what is gathered together, and a parameter is gathered at its use,
whatever the order of a mixture's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

_MARK = "_z3_leaf"


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked."""
    return bool(getattr(model, _MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """False: no parameter is gathered by a leaf module of its own."""
    return False


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks one module, or removes its mark."""
    setattr(model, _MARK, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks the modules of these classes, and returns them.

    Args:
        leaf_module_classes: classes, or their names, with or without module path.
        raise_if_not_found: False returns an empty list where no module has one of these
            classes.

    Raises:
        ValueError: no module has one of these classes, or the argument is no list of
            classes.
    """
    return _of_classes(
        "set_z3_leaf_modules", model, leaf_module_classes, raise_if_not_found, flag=True
    )


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Removes the marks of the modules of these classes, and returns them; arguments as
    `set_z3_leaf_modules`.
    """
    return _of_classes(
        "unset_z3_leaf_modules", model, leaf_module_classes, raise_if_not_found, flag=False
    )


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by their names in `named_modules`. Returns them, and the names of
    none.

    Raises:
        ValueError: a name is of no module.
    """
    return _named(
        "set_z3_leaf_modules_by_name", model, module_names, str.__eq__, flag, raise_if_not_found
    )


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules whose names end so. Returns them, and the suffixes of none.

    Raises:
        ValueError: no name ends with one of the suffixes.
    """
    function = "set_z3_leaf_modules_by_suffix"
    return _named(function, model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _named(
    function: str,
    model: nn.Module,
    wanted: Sequence[str],
    fits: Callable[[str, str], bool],
    flag: bool,
    raises: bool,
) -> tuple[list[nn.Module], list[str]]:
    found: dict[int, nn.Module] = {}
    missing = []
    for given in wanted:
        fitting = [module for name, module in model.named_modules() if fits(name, given)]
        found.update({id(module): module for module in fitting})
        missing += [] if fitting else [given]
    if missing and raises:
        raise ValueError(
            f"{function}: names must be of modules of {type(model).__name__}, got {missing}; print "
            f"the names of named_modules(), or pass raise_if_not_found=False"
        )
    _mark(found.values(), flag)
    return list(found.values()), missing


def _mark(modules: Iterable[nn.Module], flag: bool) -> None:
    for module in modules:
        set_z3_leaf_module(module, flag)


def _of_classes(
    function: str, model: nn.Module, given: Sequence[type | str], raises: bool, *, flag: bool
) -> list[nn.Module]:
    if isinstance(given, str | type) or not all(isinstance(kind, type | str) for kind in given):
        raise ValueError(
            f"{function}: leaf_module_classes must be a list of classes or their names, got "
            f"{given!r}; pass a list"
        )
    kinds = tuple(kind for kind in given if isinstance(kind, type))
    names = {kind for kind in given if isinstance(kind, str)}
    found = [m for m in model.modules() if isinstance(m, kinds) or names & _names_of(type(m))]
    if not found and raises:
        known = ", ".join(sorted({type(m).__name__ for m in model.modules()})[:8])
        raise ValueError(
            f"{function}: leaf_module_classes must be those of some modules of "
            f"{type(model).__name__}, got {given!r}; its modules are of {known}, or pass "
            f"raise_if_not_found=False"
        )
    _mark(found, flag)
    return found


def _names_of(cls: type) -> set[str]:
    return {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}
