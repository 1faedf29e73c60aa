"""`package`: an optional package that a feature needs, or one error that says how to
install it.
"""

from __future__ import annotations

import importlib
from typing import Any

EXTRAS = {
    "comet_ml": "comet",
    "hypothesis": "testing",
    "matplotlib": "pictures",
    "mlflow": "mlflow",
    "safetensors": "trainer",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "transformers": "trainer",
    "wandb": "wandb",
    "yaml": "trainer",
}
"""The extra of fzero that installs each optional package."""


class MissingPackageError(ImportError):
    """An optional package that was asked for cannot be imported."""


def package(name: str, *, needed_by: str, module: str | None = None, instead: str = "") -> Any:
    """A module of an optional package; call it before the work that needs the package.

    Args:
        name: the package, a key of `EXTRAS`.
        needed_by: the call, flag or key that needs it, to begin the error.
        module: the module to import, if not the package itself.
        instead: what works without the package, to end the error.

    Raises:
        MissingPackageError: it cannot be imported.
    """
    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        other = f", or {instead}" if instead else ""
        raise MissingPackageError(
            f"{needed_by}: needs the package {name}, which cannot be imported ({error}); pip "
            f"install 'fzero[{EXTRAS[name]}]'{other}",
            name=name,
        ) from None
