"""Bytes per element of each dtype.

Dtypes are names here, such as `"float32"`, so that bytes can be counted without torch.
"""

ITEMSIZES: dict[str, int] = {
    **dict.fromkeys(
        ("bool", "int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"), 1
    ),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("complex128",), 16),
}


def itemsize(dtype: str) -> int:
    """Bytes of one element of the dtype of that name.

    >>> itemsize("bfloat16"), itemsize("float32")
    (2, 4)
    """
    if dtype not in ITEMSIZES:
        raise ValueError(
            f"itemsize: unknown dtype {dtype!r}; pass one of {', '.join(sorted(ITEMSIZES))}"
        )
    return ITEMSIZES[dtype]
