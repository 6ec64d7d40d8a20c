"""The shards in a model's state: their splits, and their places in the whole tensors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from tp_core.errors import ModelError
from tp_core.plugins import TensorSlice

from tp_shard._groups._group import ALONE, Group, current_group
from tp_shard._shards._attributes import get_split
from tp_shard._shards._layer import ParallelLayer
from tp_shard._split import Split

_WRAPPERS = frozenset({"module", "_orig_mod"})  # DistributedDataParallel's and torch.compile's


@dataclass(frozen=True, slots=True)
class Shard:
    """One parameter or buffer of a model that is a shard.

    Attributes:
        tensor: The model's own tensor; a tied one is the same object under several names. Under
            ``fully_shard`` it is a DTensor of the shape of the shard.
        split: Its split.
        group: The ranks that hold it together.
    """

    tensor: Tensor
    split: Split
    group: Group

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.split.full_shape(tuple(self.tensor.shape))


class ShardTable:
    """The shards of a model, by the names of its state, with or without the prefixes of wrappers.

    Args:
        model: Any module; it may be wrapped.

    Raises:
        ModelError: The model is not a module.
    """

    def __init__(self, model: object) -> None:
        if not isinstance(model, nn.Module):
            msg = f"the model must be a torch.nn.Module, got {type(model).__name__}: {model!r}"
            raise ModelError(msg)
        self.exact = dict(_shards(model))
        self._bare = {_bare(name): shard for name, shard in self.exact.items()}
        self._own = {_bare(name): tensor for name, tensor, *_ in _tensors(model)}

    def get(self, name: str) -> Shard | None:
        """Return the shard with this name, ``None`` if the entry is not split."""
        return self.exact.get(name) or self._bare.get(_bare(name))

    def own(self, name: str) -> Tensor | None:
        """Return the model's parameter or buffer with this name, split or not."""
        return self._own.get(_bare(name))


def unwrap(model: nn.Module) -> nn.Module:
    """Return the plain module inside ``DistributedDataParallel`` and ``torch.compile``."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module, str]]:
    """Yield a model's parameters and buffers under all of their names, with their module and name there."""
    for path, module in model.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield start + name, tensor, module, name


def _shards(model: nn.Module) -> Iterator[tuple[str, Shard]]:
    for full_name, tensor, module, name in _tensors(model):
        if isinstance(module, ParallelLayer):
            split, group = module.splits.get(name), module.group
        else:  # a layer of the user's own, with marks on its tensors
            group = current_group() or ALONE
            split = get_split(tensor, group)
        if split is not None and group.size > 1:
            yield full_name, Shard(tensor, split, group)


# -- The place of a rank's shard in the whole tensor ----------------------------------------------
# Not DTensor's: it splits 10 over 4 ranks as 3, 3, 3, 1, where ours are 3, 3, 2, 2. Under ``fully_shard`` a
# rank's shard is split once more over the copies of the model, so it may be a part of a part.


Part = tuple[tuple[int, ...], Tensor]
"""A part of a tensor: its offset in each dimension, and its values."""


def parts_of_whole(parts: Sequence[Part], split: Split, rank: int, *, own: bool = False) -> list[Part]:
    """Return parts of a rank's shard as parts of the whole tensor: views, no copies.

    Args:
        parts: Parts of the shard; the whole shard begins at 0.
        split: The split of the whole tensor.
        rank: The rank that holds the shard.
        own: Whether to leave out pieces that an earlier rank holds too.
    """
    # A piece that several ranks hold counts for the first of them alone: written or summed twice, a key head
    # that ranks share would be counted twice.
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
    """Return ``value``, of the shape of a shard, with its place in the whole tensor: views, no copies.

    Without a shard the value is whole and the same on all ranks, or a part that carries its own place.
    """
    if shard is None:
        return value
    parts = value.parts if isinstance(value, TensorSlice) else [((0,) * value.dim(), value)]
    whole = shard.split.full_shape(tuple(value.shape))
    return TensorSlice(whole, parts_of_whole(parts, shard.split, shard.group.rank, own=own))


def shard_spec(model: nn.Module, *, own: bool = False) -> Callable[..., Tensor | TensorSlice]:
    """Return a function ``cut(parameter, value)`` that gives ``value`` its place in the whole tensor.

    Args:
        model: The model; under ``fully_shard`` with the parameters that it holds between steps.
        own: Whether pieces that several ranks hold count for the first of them alone, for writing.
    """
    shards = {id(shard.tensor): shard for shard in ShardTable(model).exact.values()}
    return lambda parameter, value: slice_of(value, shards.get(id(parameter)), own=own)
