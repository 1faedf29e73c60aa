"""Checks that several values of this package share.

Every value of the package checks itself when it is made. An error names the field, the
rule, the value and the fix.
"""


def check_at_least(owner: str, field: str, value: int, minimum: int) -> None:
    """Raise unless `value` is an integer of at least `minimum`."""
    if not isinstance(value, int) or value < minimum:
        raise ValueError(
            f"{owner}: {field} must be an integer of at least {minimum}, got {value!r}; pass an "
            f"int from {minimum} on"
        )


def check_index(owner: str, field: str, value: int, length: int) -> None:
    """Raise unless `value` is an integer in `0 .. length - 1`; negative indices do not
    wrap around.
    """
    if not isinstance(value, int) or not 0 <= value < length:
        raise ValueError(
            f"{owner}: {field} must be at least 0 and below {length}, got {value!r}; pass one of "
            f"0..{length - 1}"
        )


def check_shape(owner: str, field: str, shape: tuple[int, ...]) -> None:
    """Raise unless every length in `shape` is an integer of at least 0; `()` is the
    shape of a 0-d tensor.
    """
    for length in shape:
        if not isinstance(length, int) or length < 0:
            raise ValueError(
                f"{owner}: {field} must hold integers of at least 0, got {tuple(shape)}; pass the "
                f"tensor's own shape"
            )
