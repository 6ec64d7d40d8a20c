"""Batches for trial runs of a model: of the kind of a given one, with other lengths, values and masks."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tp_core.compare._trial_runs import named_tensors

T = TypeVar("T")


def other_batches(
    batch: T, tables: Mapping[int, int], sizes: Callable[[int, int], Sequence[tuple[int, int]]]
) -> Iterator[T]:
    """Yield batches of the same kind with random values, in the order of ``sizes``.

    Equal values and single positions hide the effect of a plan. Tokens are drawn from the table in which they
    are looked up. Masks hide other places, where there are any. Other integers are repeated or left out.

    Args:
        batch: Tensors, nested in any values.
        tables: The sizes of the tables in which they are looked up, by the tensors' ids: see
            :func:`watched_tables`.
        sizes: A function from the rows and places of the tokens to those to try. Without tokens they are of
            the first tensor with two dimensions.
    """
    named = list(named_tensors(batch))
    tensors = [tensor for _, tensor in named]
    masks = {id(tensor) for name, tensor in named if "mask" in name}
    lead = next((t for t in tensors if id(t) in tables and t.dim() > 1), None)
    if lead is None:
        lead = next((t for t in tensors if t.dim() > 1), None)
    generator = torch.Generator().manual_seed(0)
    old = (-1, -1) if lead is None else (lead.size(0), lead.size(1))
    # Padding on both sides first, the user's own mask last: some models have no numbers for a hidden start.
    hidden: list[Callable[[Tensor], Tensor]] = [Tensor.clone]
    if masks:
        hidden = [_pad_both, _pad_right, *hidden]
    new_sizes = [old] if lead is None else sizes(*old)
    for new, hide in itertools.product(new_sizes, hidden):

        def other(
            tensor: Tensor, new: tuple[int, int] = new, hide: Callable[[Tensor], Tensor] = hide
        ) -> Tensor:
            resized = tensor.detach()
            for dim, size in enumerate(tensor.shape):
                if size == old[dim > 0]:
                    wanted = new[dim > 0]
                else:
                    wanted = size
                # Spread over all places, so that labels that only some have are among them.
                places = torch.arange(wanted) * size // max(1, wanted)
                if wanted != size:
                    resized = resized.index_select(dim, places)
            if id(tensor) in masks:
                return hide(resized)
            return _drawn(resized, tables.get(id(tensor)), generator).requires_grad_(tensor.requires_grad)

        yield mapped(batch, other)


def _pad_both(mask: Tensor) -> Tensor:
    """Return a mask with padding on the left of every second row, and on the right of the others."""
    padded = _pad_right(mask)
    if mask.dim() == 2:
        padded[::2] = padded[::2].flip(1)
    return padded


def _pad_right(mask: Tensor) -> Tensor:
    """Return a mask (rows, places) that hides a third of the places, if it hides none."""
    padded = mask.clone()
    if mask.dim() == 2 and mask.unique().numel() == 1:
        kept = mask.size(1) - mask.size(1) // 3
        padded[:, kept:] = (mask[:, kept:] == 0).to(mask.dtype)
    return padded


def _drawn(like: Tensor, count: int | None, generator: torch.Generator) -> Tensor:
    """Draw tokens of a table of ``count`` rows, or numbers of the scale of ``like``; masks stay."""
    if count is not None:
        return torch.randint(first_token(count), count, like.shape, generator=generator, dtype=like.dtype)
    if not like.is_floating_point() or not like.isfinite().all() or like.unique().numel() in (0, 2):
        return like.clone()  # it looks like a mask
    if float(like.min()) >= 0 and float(like.max()) <= 1:
        return torch.rand(like.shape, generator=generator, dtype=like.dtype)
    spread = like.std(correction=0)
    scale = spread if spread > 0 else 1.0
    drawn = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return like.mean() + scale * drawn


def first_token(count: int) -> int:
    """Return the first token to draw, past the special tokens, which usually come first."""
    if count > 20:
        return 10
    return 0


@contextmanager
def watched_tables(model: nn.Module, given: Sequence[Tensor]) -> Iterator[dict[int, int]]:
    """Note the sizes of the tables in which tensors are looked up in the block, by the tensors' ids."""
    table_sizes: dict[int, int] = {}

    def note(table: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor):
            return  # a table of positions, which takes the shape
        places = args[0]
        for tensor in given:
            same = tensor.untyped_storage().data_ptr() == places.untyped_storage().data_ptr()
            # Labels that a model shifts by one position, as tokens of its decoder.
            moved = tensor.shape == places.shape and tensor.dim() == 2 and tensor.size(1) > 1
            if same or (moved and torch.equal(tensor[:, :-1], places[:, 1:])):
                table_sizes.setdefault(id(tensor), table.num_embeddings)  # type: ignore[arg-type]  # of nn.Embedding

    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    handles = [table.register_forward_pre_hook(note) for table in tables]
    try:
        yield table_sizes
    finally:
        for handle in handles:
            handle.remove()


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    with _Mapping(function):
        return copy.deepcopy(value)


def copied(value: T, memo: dict[int, Any] | None = None) -> T:
    """Return a deep copy of a module; results of a computation that it keeps are detached."""
    with _Mapping(
        lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad and tensor.is_leaf)
    ):
        return copy.deepcopy(value, memo)


class _Mapping(TorchFunctionMode):
    """A mode that maps each tensor of a deep copy; torch itself refuses to copy tensors with a graph."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = self._function(tensor)
        return memo[id(tensor)]
