"""The check of a division into equal tiles."""

from __future__ import annotations

from fzero.common.arguments import check_whole


def check_divides(where: str, num: int, shards: int, what: str) -> int:
    """The size of one of `shards` equal parts of `num`.

    Raises:
        ValueError: `shards` is no number of at least 1, or does not divide.
    """
    check_whole(f"{where}: shards", shards, 1)
    if num % shards:
        near = next(n for n in range(shards, 0, -1) if num % n == 0)
        raise ValueError(
            f"{where}: shards must divide the {num} {what}, got {shards}; pass {near}, or pad to a "
            f"multiple of {shards}"
        )
    return num // shards
