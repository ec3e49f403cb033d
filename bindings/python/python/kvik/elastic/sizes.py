"""Sizes as people write them."""

import re

import kvik

UNITS = {"k": 10, "m": 20, "g": 30, "t": 40}
SIZE = re.compile(r"(\d+)\s*(?:([kmgt]?)i?b?)", re.IGNORECASE)


def size_of(field: str, value: object) -> int:
    """Bytes of a number, or of a text such as `20GiB`; units are powers of 1024.

    Raises with the field and what is allowed where it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise kvik.InvalidValueError(f"`{field}` is {value!r}; allowed: a number of bytes, or a text such as 20GiB")
    unit = match[2].lower()
    return int(match[1]) << (UNITS[unit] if unit else 0)
