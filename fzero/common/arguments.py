"""Checks of arguments at the start of a call, so that an error names the wrong
argument.

A check costs less than the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from os import PathLike, fspath
from typing import Any, NoReturn

import torch
from torch import nn


def refuse(field: str, rule: str, value: object, fix: str) -> NoReturn:
    """Raises a ValueError that names the field, the rule, the value in few words, and
    the fix.
    """
    raise ValueError(f"{field}: must be {rule}, got {shown(value)}; {fix}")


def shown(value: object) -> str:
    """A value in few words.

    >>> shown("mse"), shown(nn.Linear), shown(nn.Linear(2, 2)), shown([0] * 99)
    ("'mse'", 'the class Linear', 'a Linear', 'a list')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isfunction(value) or inspect.ismethod(value):
        return f"the function {value.__name__}"
    is_short = value is None or isinstance(value, bool | int | float | str)
    return repr(value)[:80] if is_short else _kind(value)


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def check_model(model: object, field: str = "model") -> None:
    """Raises unless it is a module whose parts each have one name; a class of modules
    or a list of modules is not one.
    """
    if isinstance(model, nn.Module):
        _check_parts(model, field)
        return
    fix = "pass a torch.nn.Module"
    if isinstance(model, type) and issubclass(model, nn.Module):
        fix = f"make one: {model.__name__}(...)"
    elif isinstance(model, list | tuple):
        fix = "pass torch.nn.Sequential(*modules), or a module that holds them"
    refuse(field, "a torch.nn.Module", model, fix)


def _check_parts(model: nn.Module, field: str) -> None:
    """Raises for parts that PyTorch itself does not find by name: equal modules, and
    names with dots.
    """
    alone = "compare modules by identity: leave __eq__ and __hash__ out of the class"
    try:
        every, found = [*model.named_modules(remove_duplicate=False)], dict(model.named_modules())
    except TypeError as error:
        raise ValueError(
            f"{field}: its modules must have hashes, by which PyTorch finds them ({error}); {alone}"
        ) from error
    by_identity = {id(module) for module in found.values()}
    for name, module in every:
        if isinstance(module, torch.jit.ScriptModule):  # its parts are listed in another way
            continue
        for what, held in (
            ("parameter", module._parameters),
            ("buffer", module._buffers),
            ("module", module._modules),
        ):
            if dotted := [key for key in held if "." in key]:
                raise ValueError(
                    f"{field}: names of parameters, buffers and modules must have no dots, which "
                    f"stand between modules, got the {what} {dotted[0]!r} in "
                    f"{name or 'the model itself'} ({type(module).__name__}); replace them, with _ "
                    f"say"
                )
        if id(module) not in by_identity:
            same = next(other for other, first in found.items() if first == module)
            raise ValueError(
                f"{field}: its modules must differ from each other, but {same!r} and {name!r} are "
                f"equal by the __eq__ of {type(module).__name__}, so PyTorch leaves the second out "
                f"of model.parameters(), and it would not be trained; {alone}"
            )


def check_loss_fn(loss_fn: object) -> None:
    """Raises unless it is None or a function of a model and a batch."""
    fix = "pass lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]), say"
    rule = "a function of model and batch that gives the loss, or None"
    if loss_fn is None:
        return
    if not callable(loss_fn) or isinstance(loss_fn, nn.modules.loss._Loss):
        refuse("loss_fn", rule, loss_fn, fix)
    try:
        inspect.signature(loss_fn).bind(None, None)
    except TypeError as error:
        refuse("loss_fn", rule, loss_fn, f"{error}: {fix}")
    except ValueError:  # a function in C has no signature
        pass


def check_callable(field: str, value: object, what: str, *, optional: bool = False) -> None:
    """Raises unless it can be called; `what` describes the function in the message."""
    if not callable(value) and not (optional and value is None):
        refuse(field, f"{what}{', or None' if optional else ''}", value, "pass a function")


def check_names(field: str, names: object) -> None:
    """Raises unless it is None or a collection of strings; a single string would be
    read as its letters.
    """
    if names is None:
        return
    if isinstance(names, str):
        refuse(field, "a list of names", names, f"pass [{names!r}]")
    for name in (
        names if isinstance(names, Iterable) and not isinstance(names, nn.Module) else [names]
    ):
        if not isinstance(name, str):
            refuse(
                field, "a list of names", name, "pass names of modules, as of model.named_modules()"
            )


def check_whole(field: str, value: object, least: int) -> None:
    """Raises unless it is an integer of at least `least`; a bool is not one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        refuse(field, f"a whole number, at least {least}", value, f"pass an int from {least} on")


def check_path(field: str, path: object) -> None:
    """Raises unless it is a path, also one of another class (`os.PathLike`); an empty
    path would be the current folder.
    """
    if not isinstance(path, str | PathLike) or not fspath(path):
        refuse(field, "a path", path, "pass one, '.' for the present folder")


def check_kind(field: str, value: object, kinds: Any, rule: str, fix: str) -> None:
    """Raises unless the value is an instance of one of these classes."""
    if not isinstance(value, kinds):
        refuse(field, rule, value, fix)


def passed_on(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor, from its `locals()`, for a base class that has
    the same names.
    """
    return {name: value for name, value in given.items() if name not in ("self", "__class__")}


def check_no_inference(what: str) -> None:
    """Raises inside torch.inference_mode(), whose tensors cannot be trained afterwards."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{what}: must be called outside of torch.inference_mode(), whose tensors cannot be "
            f"trained, got a call inside; call it before or after the block (torch.no_grad() will "
            f"do)"
        )


def refuse_without_grad(what: str) -> NoReturn:
    """Raises because autograd is off, so that there would be no gradients."""
    check_no_inference(what)
    raise RuntimeError(
        f"{what}: must be called with gradients enabled, got a call inside torch.no_grad() or "
        f"set_grad_enabled(False); call it outside, or use step.evaluate(state, batch) for a loss "
        f"without gradients"
    )
