"""Where in the whole tensor a rank's shard of it lies.

DTensor would say it too, but cuts otherwise: 10 over 4 ranks as 3, 3, 3, 1 and not as 3, 3, 2, 2. Under
``fully_shard`` a rank's shard is cut once more over the copies of the model: a part of a part.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from tp_core.plugins import TensorSlice

from tp_shard._shards._table import Shard, ShardTable
from tp_shard._split import Split

__all__ = ["Part", "cut_of", "parts_of_whole", "slice_of"]

Part = tuple[tuple[int, ...], Tensor]
"""Where a part begins in a tensor, in each dimension, and the part."""


def parts_of_whole(parts: Sequence[Part], split: Split, rank: int, *, own: bool = False) -> list[Part]:
    """Return parts of a rank's shard as parts of the whole: views, no copies.

    Args:
        parts: What there is of the shard, such as the whole of it, which begins at 0.
        split: How the whole is cut.
        rank: Whose shard it is.
        own: Whether to leave out pieces that an earlier rank holds too.
    """
    earlier = {r for pieces in split.ranges[:rank] for r in pieces} if own else set()
    found = []
    for begins, values in parts:
        first = begins[split.dim]
        last = first + values.size(split.dim)
        at = 0
        for start, stop in split.ranges[rank]:
            low, high = max(at, first), min(at + stop - start, last)
            if low < high and (start, stop) not in earlier:
                offsets = tuple(start + low - at if i == split.dim else n for i, n in enumerate(begins))
                found.append((offsets, values.narrow(split.dim, low - first, high - low)))
            at += stop - start
    return found


def slice_of(value: Tensor | TensorSlice, shard: Shard | None, *, own: bool = False) -> Tensor | TensorSlice:
    """Return ``value``, of the shape of a shard, with where in the whole it lies; views of it, no copies.

    Where there is no shard, the value is whole and the same on all ranks, or a part that says where it lies.
    """
    if shard is None:
        return value
    parts = value.parts if isinstance(value, TensorSlice) else [((0,) * value.dim(), value)]
    whole = shard.split.full_shape(tuple(value.shape))
    return TensorSlice(whole, parts_of_whole(parts, shard.split, shard.group.rank, own=own))


def cut_of(model: nn.Module, *, own: bool = False) -> Callable[..., Tensor | TensorSlice]:
    """Return ``cut(parameter, value)``, which says which part of the whole ``value`` is.

    Args:
        model: The model; under ``fully_shard`` its parameters are those that it holds between steps.
        own: Whether pieces that several ranks hold count for the first of them alone, for writing.
    """
    shards = {id(shard.tensor): shard for shard in ShardTable(model).exact.values()}
    return lambda parameter, value: slice_of(value, shards.get(id(parameter)), own=own)
