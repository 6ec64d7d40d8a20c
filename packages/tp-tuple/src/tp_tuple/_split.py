"""How many items, or which, each part gets."""

import math
from collections.abc import Sequence

from tp_core.errors import ConfigError
from tp_core.internal import split_evenly

__all__ = ["balanced_rows", "consecutive_rows"]


def consecutive_rows(length: int, parts: int, weights: Sequence[float] | None) -> list[range]:
    """Cut ``range(length)`` into consecutive pieces, none of them empty.

    Fewer items than parts make fewer pieces. Without weights sizes differ by at most one; with
    weights they are proportional, to rounding by the largest remainders.
    """
    parts = min(parts, length)
    if weights is None:
        return [range(piece.start, piece.stop) for piece in split_evenly(length, parts)]
    sizes = _proportional(length, weights[:parts])
    ends = [sum(sizes[: i + 1]) for i in range(parts)]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _proportional(length: int, weights: Sequence[float]) -> list[int]:
    """Give each one item, so that no device is skipped, and share what is left by weight."""
    total = sum(weights)
    shares = [length * w / total for w in weights]
    sizes = [max(1, math.floor(s)) for s in shares]
    while sum(sizes) > length:  # the ones that were given to small shares come from the largest
        i = max(range(len(sizes)), key=lambda k: sizes[k] - shares[k] if sizes[k] > 1 else -math.inf)
        sizes[i] -= 1
    while sum(sizes) < length:
        i = max(range(len(sizes)), key=lambda k: shares[k] - sizes[k])
        sizes[i] += 1
    return sizes


def balanced_rows(costs: Sequence[float], parts: int, weights: Sequence[float] | None) -> list[list[int]]:
    """Deal items out so that the parts' total costs are nearly equal (or proportional to weights).

    The longest-processing-time rule: the dearest item goes first, each to the part that is least
    loaded. At most 4/3 of the best possible maximum (Graham, 1969). Inside a part the items keep
    their order.

    Raises:
        ConfigError: A cost is negative or not a number.
    """
    for i, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            msg = f"the cost of an item must be a number, not below 0; that of item {i} is {cost!r}"
            raise ConfigError(msg)
    parts = min(parts, len(costs))
    speeds = [1.0] * parts if weights is None else list(weights[:parts])
    rows: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        # An empty part first: each device that takes part needs an item.
        part = min(range(parts), key=lambda p: (bool(rows[p]), _finish(loads[p], costs[item], speeds[p]), p))
        rows[part].append(item)
        loads[part] += costs[item]
    return [sorted(r) for r in rows]


def _finish(load: float, cost: float, speed: float) -> float:
    """Return when a part would be done if it took the item too."""
    return (load + cost) / speed
