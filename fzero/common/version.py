"""`__version__`: the version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The version of fzero; "not installed" where it runs from its source folder."""
    try:
        return version("fzero")
    except PackageNotFoundError:
        return "not installed"


__version__ = installed_version()
