"""Where the shards of a dimension begin and end.

Sizes differ by at most one and the larger ones come first, so that every rank can work out what
every other rank holds without asking.
"""

from tp_core.errors import ConfigError
from tp_core.internal import split_evenly

__all__ = ["bounds", "shard_sizes"]


def bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return where shard ``index`` of ``parts`` begins and ends in a dimension of ``length``.

    Example:
        >>> [bounds(9, 2, i) for i in range(2)]
        [(0, 5), (5, 9)]
    """
    size, extra = divmod(length, parts)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def shard_sizes(length: int, parts: int) -> list[int]:
    """Return the sizes of all shards of a dimension of ``length``, larger ones first.

    Raises:
        ConfigError: There is less than one part.
    """
    if parts < 1:
        msg = f"a dimension is split into 1 part or more, got {parts}"
        raise ConfigError(msg)
    return [part.stop - part.start for part in split_evenly(length, parts)]
