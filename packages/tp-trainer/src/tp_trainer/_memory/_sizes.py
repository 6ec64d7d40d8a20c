"""Amounts of memory, as users write them."""

import re

from tp_core.errors import ConfigError

__all__ = ["parse_nbytes"]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_nbytes(text: str) -> int:
    """Return the bytes of "80GiB", "512 MiB" or "24e9".

    Raises:
        ConfigError: The text is something else.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", text, flags=re.IGNORECASE)
    if found is None or found[1].count(".") > 1 or not found[1].strip("."):
        msg = f"an amount of memory is written 80GiB, 512MiB or 24e9, got {text!r}"
        raise ConfigError(msg)
    size = _UNITS[found[2].upper()]
    if not found[3]:  # powers of ten
        size = 1000 ** list(_UNITS).index(found[2].upper())
    return int(float(found[1]) * size)
