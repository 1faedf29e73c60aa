"""`show_part`: an engine has the public methods and attributes of a part that it holds,
and each is the part's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def show_part(
    engine: type, part: str, kind: type, *, also: Iterable[str] = (), but: Iterable[str] = ()
) -> None:
    """Gives the class of engines every public name of a part's class.

    Args:
        engine: the class; a name that it has itself stays.
        part: the engine's attribute that holds the part.
        kind: the class of the part.
        also: names that begin with `_`, and are shown as well.
        but: names that are not shown.
    """
    public = [
        name for name in [*vars(kind), *inspect.get_annotations(kind)] if not name.startswith("_")
    ]
    for name in dict.fromkeys([*public, *also]):
        if name not in vars(engine) and name not in but:
            member: Any = vars(kind).get(name)
            if not isinstance(member, staticmethod):
                is_method = inspect.isfunction(member)
                member = _method(part, member) if is_method else _attribute(part, name, member)
            setattr(engine, name, member)


def _method(part: str, member: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(member)
    def call(engine: Any, /, *args: Any, **kwargs: Any) -> Any:
        return member(getattr(engine, part), *args, **kwargs)

    return call


def _attribute(part: str, name: str, member: Any) -> property:
    doc = member.__doc__ if isinstance(member, property) else None
    return property(
        lambda engine: getattr(getattr(engine, part), name),
        lambda engine, value: setattr(getattr(engine, part), name, value),
        doc=doc,
    )
