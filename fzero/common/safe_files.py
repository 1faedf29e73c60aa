"""Safe paths and files: names and links that other users leave in a folder cannot lead
a reader or a writer out of it.

A name from a file (a parameter, a tag, a shard) is joined to a folder only after
`check_inside`. New files are made by `create`, which follows no link and uses no
existing file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def check_inside(name: str) -> str:
    """The relative path of a file inside a folder.

    Raises:
        ValueError: it leads out of the folder.

    >>> check_inside("__0_0.distcp")
    '__0_0.distcp'
    >>> check_inside("../x")
    Traceback (most recent call last):
        ...
    ValueError: names '../x', which must lie in the folder and leads out of it
    """
    parts = name.split("/")
    if (
        not name.strip("./")
        or name.startswith("/")
        or ".." in parts
        or any(ord(c) < 32 for c in name)
    ):
        raise ValueError(f"names {name!r}, which must lie in the folder and leads out of it")
    return name


def create(path: Path) -> BinaryIO:
    """A new file, open for writing. A file that a killed process left under this name
    is removed first.

    Raises:
        FileExistsError: the path is a link, which writes would follow, or another
            process makes the same file.
        OSError: an error of the system.
    """
    refuse_link(path)
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    return os.fdopen(fd, "wb")


def refuse_link(path: Path) -> None:
    """Raises a FileExistsError if the path is a link: writes would go to its target."""
    if path.is_symlink():
        raise FileExistsError(
            f"{path}: must not be a link, but leads to {os.readlink(path)}; remove it, because "
            f"fzero did not make it"
        )


def check_own(folder: Path) -> None:
    """Raises if a folder is a link, or belongs to another user than that of this
    process.

    Raises:
        PermissionError: another user owns it, and could change the files in it.
        FileExistsError: it is a link.
    """
    refuse_link(folder)
    owner = folder.stat().st_uid
    if owner != os.geteuid():
        raise PermissionError(
            f"{folder}: must belong to the user of this process ({os.geteuid()}), but belongs to "
            f"user {owner}, who could change the state in it; remove it, or pass another path"
        )
