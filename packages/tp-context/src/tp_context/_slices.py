"""Sequences cut over the ranks of a group, and joined again.

A sequence is cut into twice as many chunks as there are ranks, and rank ``r`` has chunks ``r`` and
``2 * ranks - 1 - r``. So each rank has as many pairs of a query and an earlier key as the others::

    16 tokens, 2 ranks     rank 0: 0 1 2 3 | 12 13 14 15       rank 1: 4 5 6 7 | 8 9 10 11

Chunks differ by at most one token, so any length of at least one token for each rank can be cut. Where
documents, windows or a mask in the batch say that queries have other work, there are more chunks: each rank
gets as many of them, of as much work.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from tp_core import tree_map
from tp_core.data import CountedBatch
from tp_core.errors import StepError
from tp_core.sessions import all_gather_single

K = TypeVar("K")

TOGETHER = 2**22
"""The most bytes of whole tensors in one message: larger ones need memory beside each other.

In each message ranks wait for each other, and the more ranks share a core, the longer.
"""


class Cut:
    """The cut of all sequences of one length over the ranks of a group.

    Args:
        length: The number of tokens.
        rank: The rank of this process in the group.
        size: The number of ranks.
        group: The process group; ``None`` for all ranks.
        before: Called with a description before each exchange, so that a check can compare the ranks.
        work: How many keys the query at each position sees, (tokens,); ``None`` for all up to its own.
        avoid: Numbers of tokens that no rank gets: what else has as many would be taken for a slice.

    Attributes:
        length: The number of tokens.
        own: The ranges of this rank's tokens, in ascending order; a range may be empty.
        ranges: Those of each rank.
        counts: The number of tokens of each rank.
        tokens: The number of this rank's tokens.

    Raises:
        StepError: There are fewer tokens than ranks, or no cut avoids the numbers.
    """

    def __init__(
        self,
        length: int,
        rank: int,
        size: int,
        group: ProcessGroup | None,
        before: Callable[[object], None] | None = None,
        work: Tensor | None = None,
        avoid: Collection[int] = (),
    ) -> None:
        if length < size:
            msg = (
                f"a sequence of {length} token(s) cannot be split over {size} ranks; give longer sequences, "
                "or set the option context of backend 'context' to fewer ranks"
            )
            raise StepError(msg)
        self.length = length
        self.rank = rank
        self.size = size
        self.group = group
        self.before = before
        if work is None:
            chunks = _chunks(length, 2 * size)
            self.ranges = [[chunks[r], chunks[2 * size - 1 - r]] for r in range(size)]
        else:
            self.ranges = _balanced(work, size)
        if any(count in avoid for count in _counts(self.ranges)):
            self.ranges = _uneven(length, size, avoid)
        self.own = self.ranges[rank]
        self.counts = _counts(self.ranges)
        self.tokens = self.counts[rank]
        # The numbers of the ranges, rank after rank, in the order of their tokens.
        ranges = [ends for of_rank in self.ranges for ends in of_rank]
        self._order = sorted(range(len(ranges)), key=ranges.__getitem__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cut) and (self.ranges, self.rank) == (other.ranges, other.rank)

    def __hash__(self) -> int:
        return hash((self.length, self.rank, *self.own))

    def index(self, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in the whole sequence: (tokens,)."""
        return torch.cat([torch.arange(a, b, device=device) for a, b in self.own])

    def take(self, whole: Tensor, dim: int, rank: int | None = None, out: Tensor | None = None) -> Tensor:
        """Return a rank's part of a tensor along ``dim``; this rank's by default. ``out`` gets it."""
        ranges = self.ranges[self.rank if rank is None else rank]
        return torch.cat([whole.narrow(dim, a, b - a) for a, b in ranges], dim, out=out)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Return the whole of a tensor of which each rank has its part along ``dim``.

        Collectives: in forward an all-gather; in backward a sum over the ranks, of which each keeps its part.
        Ranks hold: sharded -> replicated; gradient: partial -> sharded.
        """
        if not part.is_floating_point():
            return self.all_gather(part, dim)
        whole: Tensor = _GatherSlices.apply(part, self, dim % part.dim())  # type: ignore[no-untyped-call]  # torch's
        return whole

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        """Do the forward of `gather`. Collective: an all-gather."""
        return self.all_gather_together([part], dim)[0]

    def all_gather_together(self, parts: Sequence[Tensor], dim: int) -> list[Tensor]:
        """Return the wholes of several tensors of one type.

        Collective: an all-gather of padded parts, one for each tensor if they are large.
        Ranks hold: sharded -> replicated.
        """
        if len(parts) > 1 and sum(p.nbytes // self.tokens for p in parts) * self.length > TOGETHER:
            return [self.all_gather(part, dim) for part in parts]
        rest = [[n for i, n in enumerate(p.shape) if i != dim % p.dim()] for p in parts]
        self.announce(("all_gather", dim, rest, str(parts[0].dtype)))
        most = max(self.counts)
        dtype = parts[0].dtype
        # gloo has no bool
        if dtype is torch.bool:
            sent_dtype = torch.uint8
        else:
            sent_dtype = dtype
        sent = parts[0].new_empty(sum(p.numel() // self.tokens * most for p in parts), dtype=sent_dtype)
        for part, place in zip(parts, views(sent, [p.shape for p in parts]), strict=True):
            place.copy_(part.detach())
        received = sent.new_empty((self.size, sent.numel()))
        all_gather_single(received.view(-1), sent, group=self.group)
        return [whole.to(dtype) for whole in self.joined(received, [p.shape for p in parts], dim)]

    def joined(self, flats: Iterable[Tensor], shapes: Sequence[torch.Size], dim: int) -> list[Tensor]:
        """Return the wholes of tensors of which each rank's flat tensor has its parts, one after another."""
        # Few calls of torch, as each attention does this: a split for each part, a copy for each whole.
        pieces: list[list[Tensor]] = [[] for _ in shapes]
        for flat, count, ranges in zip(flats, self.counts, self.ranges, strict=True):
            lengths = [b - a for a, b in ranges]
            parts = views(flat, [resized(shape, dim, count) for shape in shapes])
            for part, of_tensor in zip(parts, pieces, strict=True):
                of_tensor.extend(part.split(lengths, dim))
        return [torch.cat([of_tensor[i] for i in self._order], dim) for of_tensor in pieces]

    def divided(self, wholes: Sequence[Tensor], dim: int) -> Tensor:
        """Return a flat tensor of the parts of all ranks, as `joined` takes them."""
        sent = wholes[0].new_empty(sum(w.numel() for w in wholes))
        width = len(sent) // self.length
        for rank, flat in enumerate(sent.split([width * n for n in self.counts])):
            parts = views(flat, [resized(w.shape, dim, self.counts[rank]) for w in wholes])
            for whole, part in zip(wholes, parts, strict=True):
                self.take(whole.detach(), dim, rank, out=part)
        return sent

    def is_like(self, other: "Cut") -> bool:
        """Return whether a slice on some rank may be of either cut."""
        return any(a == b for a, b in zip(self.counts, other.counts, strict=True))

    def announce(self, what: object) -> None:
        """Describe an exchange that follows, in a check of the ranks."""
        if self.before is not None:
            self.before(what)

    def sum_and_take(self, wholes: list[Tensor], dim: int) -> list[Tensor]:
        """Do the backward of `gather`, for several tensors of one type.

        Each rank sends the others their parts alone, half of what an all-reduce sends. ``wholes`` is emptied:
        its tensors need no memory when sums arrive.

        Collective: an all-to-all, one for each tensor if they are large.
        Ranks hold: partial -> sharded.
        """
        if len(wholes) > 1 and sum(w.nbytes for w in wholes) > TOGETHER:
            return [self.sum_and_take([wholes.pop(0)], dim)[0] for _ in range(len(wholes))]
        self.announce(("sum", dim, [list(w.shape) for w in wholes], str(wholes[0].dtype)))
        shapes = [resized(w.shape, dim, self.tokens) for w in wholes]
        sent = self.divided(wholes, dim)
        wholes.clear()
        width = len(sent) // self.length
        received = sent.new_empty((self.size, width * self.tokens))
        counts = [width * n for n in self.counts]
        own = [width * self.tokens] * self.size
        dist.all_to_all_single(received.view(-1), sent, own, counts, group=self.group)
        del sent
        return views(received.sum(0), shapes)


def resized(shape: torch.Size, dim: int, tokens: int) -> torch.Size:
    """Return a shape of another number of tokens."""
    dim %= len(shape)
    return torch.Size([*shape[:dim], tokens, *shape[dim + 1 :]])


def views(flat: Tensor, shapes: Iterable[torch.Size]) -> list[Tensor]:
    """Return views of consecutive parts of a flat tensor; trailing elements are padding."""
    at = 0
    parts = []
    for shape in shapes:
        parts.append(flat[at : at + shape.numel()].view(shape))
        at += shape.numel()
    return parts


def _chunks(length: int, count: int) -> list[tuple[int, int]]:
    """Return the ranges of chunks that differ by at most one token."""
    least, longer = divmod(length, count)
    ends = [least * (i + 1) + min(i + 1, longer) for i in range(count)]
    return list(zip([0, *ends], ends, strict=False))


def _counts(ranges_of_ranks: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """Return the number of tokens of each rank."""
    return [sum(b - a for a, b in ranges) for ranges in ranges_of_ranks]


_MOST_MOVED = 16
"""The most tokens that a chunk gets from its neighbor: attention is almost as fast."""


def _uneven(length: int, size: int, avoid: Collection[int]) -> list[list[tuple[int, int]]]:
    """Return ranges of each rank, of which no rank has one of some numbers of tokens.

    Raises:
        StepError: There are none.
    """
    ends = [end for _, end in _chunks(length, 2 * size)]
    for moved in range(1, _MOST_MOVED + 1):
        shifted = list(ends)
        for rank in range(0, size - 1, 2):  # to the chunk of this rank from the next one's
            shifted[rank] += moved
        if size % 2:
            shifted[size - 2] -= moved
        chunks = list(zip([0, *shifted], shifted, strict=False))
        ranges = [[chunks[r], chunks[2 * size - 1 - r]] for r in range(size)]
        counts = _counts(ranges)
        is_whole = all(a <= b for a, b in chunks) and min(counts) > 0
        if is_whole and not any(count in avoid for count in counts):
            return ranges
    msg = (
        f"a sequence of {length} tokens cannot be cut over {size} ranks so that a slice is told from what "
        f"else the model attends to, which has {', '.join(map(str, sorted(avoid)))} entries; give longer "
        "sequences"
    )
    raise StepError(msg)


class OtherSizes(NamedTuple):
    """The sizes of what a model attends to, or numbers, beside sequences: latents, frames, pooled tokens.

    Attributes:
        sizes: Those that the check has seen.
        lengths: The lengths of the sequences there.
    """

    sizes: frozenset[int] = frozenset()
    lengths: tuple[int, ...] = ()

    def beside(self, length: int) -> set[int]:
        """Return the sizes beside sequences of a length: the same, and every second token or the like."""
        found = set(self.sizes)
        for whole in self.lengths:
            for size in self.sizes:
                for stride in {whole // size, whole // size + 1} if 0 < size < whole else ():
                    if stride > 1 and size in {whole // stride, -(-whole // stride)}:
                        found |= {length // stride, -(-length // stride)}
        return found


def sizes_of_others(batch: Any, sequences: "BatchSequences") -> frozenset[int]:
    """Return the sizes of a batch's tensors that are not cut, in which a model may see keys."""
    return frozenset(
        tensor.size(dim)
        for _, tensor in _named_tensors(batch)
        if id(tensor) not in sequences.dims
        for dim in range(1, tensor.dim())
    )


_CHUNK = 64
"""The fewest tokens of a chunk by work, if there are enough for two of a rank: attention is by blocks."""


def _balanced(work: Tensor, size: int) -> list[list[tuple[int, int]]]:
    """Return ranges of each rank: as many chunks, of as much work as can be."""
    each = max(2, min(32, len(work) // (size * _CHUNK)))
    chunks = _chunks(len(work), each * size)
    # Of a block of neighbors the keys are computed that one of them sees.
    costs = {(a, b): (b - a) * float(work[a:b].max()) if a < b else 0.0 for a, b in chunks}
    order = sorted(chunks, key=lambda chunk: (-costs[chunk], chunk))
    loads = [0.0] * size
    ranges_of_ranks: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    for first in range(0, len(order), size):  # the largest goes to whom has least so far
        ranks = sorted(range(size), key=loads.__getitem__)
        for rank, chunk in zip(ranks, order[first : first + size], strict=False):
            loads[rank] += costs[chunk]
            ranges_of_ranks[rank].append(chunk)
    return [sorted(ranges) for ranges in ranges_of_ranks]


class _GatherSlices(torch.autograd.Function):
    """All-gather in forward; a sum over the ranks in backward, of which each rank keeps its part.

    Ranks hold: sharded -> replicated; gradient: partial -> sharded.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, cut: Cut, dim: int) -> Tensor:
        ctx.cut, ctx.dim = cut, dim
        return cut.all_gather(part, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SumAndTake.apply(grad, ctx.cut, ctx.dim), None, None  # type: ignore[no-untyped-call]  # torch's


class _SumAndTake(torch.autograd.Function):
    """The adjoint of `_GatherSlices`, as a function of its own: so attention can be differentiated twice.

    Ranks hold: partial -> sharded; gradient: sharded -> replicated.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, cut: Cut, dim: int) -> Tensor:
        ctx.cut, ctx.dim = cut, dim
        return cut.sum_and_take([whole], dim)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _GatherSlices.apply(grad, ctx.cut, ctx.dim), None, None  # type: ignore[no-untyped-call]  # torch's


# -- The cuts of a batch ----------------------------------------------------------------------------


class Loss:
    """What is known of a loss on this rank.

    Attributes:
        units: The number of its units, as the model's labels say; ``None`` if unknown.
        counts: Whether it counts; set when the step has returned.
    """

    def __init__(self) -> None:
        self.units: float | None = None
        self.counts = True


class Cuts:
    """The cuts of the sequences of one batch, by length.

    Attributes:
        loss: What is known of the loss of the run of the step.
        packed: For models of transformers that pack documents into a row: the whole position numbers, and the
            number of the document at each position, both (batch, tokens). ``None`` for one document a row.
        attention: The algorithm of attention, as `ContextOptions.attention` names it.
        dims_of_dropout: The dimensions in which what dropout gets has a sequence, by the number of its
            dimensions, as the check has seen them: none, one, or several for tensors of several kinds.
        dims_of_outputs: The same of what the step returns, by name and the number of the value under it.
        other_sizes: Those of what the check has asked for on slices, and what is no slice.
    """

    def __init__(
        self, cuts: Collection[Cut], attention: str = "all-gather", *, of_runs: bool = False
    ) -> None:
        self.attention = attention
        self._by_tokens = {cut.tokens: cut for cut in cuts}
        self._by_length = {cut.length: cut for cut in cuts}
        self.loss = Loss()
        self.packed: tuple[Tensor, Tensor] | None = None
        self.dims_of_dropout: Mapping[int, Sequence[int]] = {}
        self.dims_of_outputs: Mapping[tuple[str, int], Sequence[int]] = {}
        self.other_sizes: frozenset[int] = frozenset()
        # Of several runs before one backward pass: an error only for what is recomputed in it.
        # The same on all ranks, though on this one slices may differ in length.
        self._unclear = any(one.is_like(other) for one, other in combinations(cuts, 2))
        if self._unclear and not of_runs:
            self._refuse("pad one of them by as many tokens as there are ranks")

    def _refuse(self, remedy: str) -> NoReturn:
        msg = (
            f"sequences of {' and '.join(map(str, self._by_length))} tokens have slices of the same length "
            f"on a rank, which cannot be distinguished; {remedy}"
        )
        raise StepError(msg)

    def __iter__(self) -> Iterator[Cut]:
        return iter(self._by_length.values())

    def announce(self, what: object) -> None:
        """Describe an exchange that follows, in a check of the ranks: one may have failed."""
        before = next(iter(self)).before
        if before is not None:
            before(what)

    def of_slice(self, tokens: int) -> Cut | None:
        """Return the cut with this many tokens on this rank."""
        cut = self._by_tokens.get(tokens)
        if cut is not None and self._unclear:
            others = [other for other in self if other is not cut]
            if any(cut.is_like(other) for other in others):
                self._refuse("go back after each run, or do not recompute activations")
        return cut

    def of_whole(self, length: int) -> Cut | None:
        """Return the cut of sequences of a length."""
        return self._by_length.get(length)


def find_slice(tensor: Tensor, cuts: Cuts, dims: Mapping[K, Sequence[int]], key: K) -> tuple[int, Cut] | None:
    """Return the dimension of a tensor that has this rank's slice, and its cut; ``None`` if there is none.

    A dimension of another meaning may be as long as a slice. So what the check has seen counts, and the
    length only where it has seen nothing like it.

    Args:
        tensor: The tensor.
        cuts: The cuts of the batch.
        dims: The dimensions that the check has seen, by kinds of tensors.
        key: The tensor's kind.
    """
    by_length: Sequence[int] = (1, *range(2, tensor.dim()), 0)
    for dim in dims.get(key, by_length):
        if dim < tensor.dim():
            cut = cuts.of_slice(tensor.size(dim))
        else:
            cut = None
        if cut is not None:
            return dim, cut
    return None


def differing_dim(whole: torch.Size, part: torch.Size) -> int | None:
    """Return the first dimension in which a tensor of a slice differs from the one of the whole."""
    differing = (dim for dim, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b)
    return next(differing, None)


# -- The sequences of a batch -----------------------------------------------------------------------


_TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids", "tokens")
"""Names of tensors (batch, tokens, ...) that say how long the sequences are."""


_KNOWN = {*_TOKENS, "labels", "position_ids", "token_type_ids", "attention_mask", "decoder_attention_mask"}
"""Names that say what a tensor is, beside its size."""


class BatchSequences(NamedTuple):
    """The tensors of a batch that are cut: by id, with their dimension; and the lengths of sequences."""

    dims: Mapping[int, int]
    lengths: tuple[int, ...]


def find_sequences(batch: Any, dims: Mapping[str, int] | None, *, decodes: bool = False) -> BatchSequences:
    """Return which tensors of a batch have a sequence, and where.

    Args:
        batch: The batch.
        dims: The dimension by name, as the user says it; ``None`` to find them by name and shape.
        decodes: Whether the model has a decoder beside its encoder: labels are sequences of their own length.

    Raises:
        StepError: Nothing has a sequence, a name or dimension is not there, or it is not clear.
    """
    named = list(_named_tensors(batch))
    if dims is not None:
        return _named_sequences(named, dims)
    for name, _ in named:
        if name.startswith("cu_seq"):
            msg = (
                f"the batch has {name!r}, for documents without a dimension of the batch; give packed "
                "documents as rows (batch, tokens) with position_ids that begin at 0 in each document"
            )
            raise StepError(msg)
    lengths = {t.size(1) for n, t in named if n in _TOKENS and t.dim() >= 2}
    if not lengths:
        # Token numbers without a name that is known: matrices of integers, all of one width.
        lengths = {t.size(1) for _, t in named if t.dim() == 2 and not t.is_floating_point()}
        if len(lengths) != 1:
            shapes = ", ".join(f"{n or 'the batch'} {tuple(t.shape)}" for n, t in named) or "no tensor"
            msg = (
                f"it is not clear what in the batch has the sequence ({shapes}); say it: "
                "options={'context': {'sequence': {'tokens': 1}}}, with the names of its tensors and the "
                "dimension of the sequence in each, or {'sequence': {}} if nothing is to be split"
            )
            raise StepError(msg)
    if decodes:
        lengths |= {t.size(1) for n, t in named if n == "labels" and t.dim() == 2}
    rows = next(t.size(0) for _, t in named if t.dim() >= 2 and t.size(1) in lengths)
    dim_by_id = {}
    for name, tensor in named:
        dim = _dim_of(name, tensor, lengths, rows)
        if dim is not None:
            dim_by_id[id(tensor)] = dim
            lengths.add(tensor.size(dim))
    return BatchSequences(dim_by_id, tuple(sorted(lengths)))


def form_of(batch: Any) -> tuple[tuple[str, int], ...]:
    """Return the names of a batch's tensors, and their numbers of dimensions."""
    return tuple((name, tensor.dim()) for name, tensor in _named_tensors(batch))


def dims_of(batch: Any, sequences: BatchSequences) -> list[int | None]:
    """Return the dimension of the sequence in each of a batch's tensors."""
    return [sequences.dims.get(id(tensor)) for _, tensor in _named_tensors(batch)]


def as_before(batch: Any, dims: Sequence[int | None]) -> BatchSequences:
    """Return the sequences of a batch, in the dimensions of an earlier one of the same form.

    Those were proved. In this batch something else may be as long as the tokens, and a sequence longer.
    """
    dim_by_id: dict[int, int] = {}
    lengths: set[int] = set()
    for (_, tensor), dim in zip(_named_tensors(batch), dims, strict=True):
        if dim is not None:
            dim_by_id[id(tensor)] = dim
            lengths.add(tensor.size(dim))
    return BatchSequences(dim_by_id, tuple(sorted(lengths)))


def taken_by_size(batch: Any, sequences: BatchSequences) -> list[str]:
    """Return the names of a batch's tensors that are cut for their size alone."""
    return [
        name for name, tensor in _named_tensors(batch) if id(tensor) in sequences.dims and name not in _KNOWN
    ]


def _named_sequences(named: list[tuple[str, Tensor]], dims: Mapping[str, int]) -> BatchSequences:
    by_name = dict(named)
    dim_by_id = {}
    lengths = set()
    for name, dim in dims.items():
        tensor = by_name.get(name)
        if tensor is None or tensor.dim() <= dim:
            if tensor is None:
                has = "not there"
            else:
                has = f"of shape {tuple(tensor.shape)}"
            msg = (
                f"the option sequence of backend 'context' names {name!r} with dimension {dim}, which is "
                f"{has}; "
                f"the batch has {', '.join(repr(n) for n, _ in named) or 'no tensor'}"
            )
            raise StepError(msg)
        dim_by_id[id(tensor)] = dim
        lengths.add(tensor.size(dim))
    return BatchSequences(dim_by_id, tuple(sorted(lengths)))


def _dim_of(name: str, tensor: Tensor, lengths: set[int], rows: int) -> int | None:
    """Return the dimension of the sequence in a tensor; ``None`` if it has none."""
    places = [d for d in range(tensor.dim()) if tensor.size(d) in lengths]
    if tensor.dim() == 1:
        if places and tensor.size(0) != rows:
            return 0
        if places and name in {"position_ids", "cache_position"}:
            return 0
        return None
    places = [d for d in places if d > 0]
    if not places:
        return None
    if "position" in name:  # (batch, tokens), or (3, batch, tokens) of images' coordinates
        if tensor.dim() - 1 in places:
            return tensor.dim() - 1
        return None
    if name in _TOKENS or name == "labels" or places == [1]:
        if 1 in places:
            return 1
        return None
    if "mask" in name or "bias" in name:
        return tensor.dim() - 2  # (..., queries, keys): this rank's queries, all keys
    if len(places) == 1:
        return places[0]
    msg = (
        f"the batch's {name or 'tensor'!r} of shape {tuple(tensor.shape)} has more than one dimension as "
        "long as "
        "the sequences; say which is the sequence's: options={'context': {'sequence': {...}}}, with the name "
        "and dimension of each tensor that is to be split"
    )
    raise StepError(msg)


def _named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch with their innermost name; the entries of a tuple have numbers."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _named_tensors(entry, str(key))
    elif isinstance(value, tuple | list):
        for i, entry in enumerate(value):
            yield from _named_tensors(entry, str(i))


def map_sequences(batch: Any, sequences: BatchSequences, change: Callable[[Tensor, int], Tensor]) -> Any:
    """Return a batch with the tensors that have a sequence changed, by ``change(tensor, dim)``."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            dim = sequences.dims.get(id(leaf))
        else:
            dim = None
        if dim is None:
            return leaf
        return change(leaf, dim)

    return tree_map(changed, batch)


def take_slices(batch: Any, sequences: BatchSequences, cuts: Cuts) -> Any:
    """Return this rank's slices of a batch."""

    def taken(tensor: Tensor, dim: int) -> Tensor:
        cut = cuts.of_whole(tensor.size(dim))
        if cut is None:
            return tensor
        return cut.take(tensor, dim)

    part = map_sequences(batch, sequences, taken)
    if isinstance(part, CountedBatch):
        own = part.weight
        # Where the model compares with the next label, a slice lacks the label of its last token.
        part.weight = lambda: own() if cuts.loss.units is None else cuts.loss.units  # type: ignore[method-assign]
    return part


def work_of(batch: Any, sequences: BatchSequences, windows: Sequence[int | None]) -> dict[int, Tensor]:
    """Return how many keys queries see, by the length of the sequence, where it is not all up to their own.

    Args:
        batch: The batch, whole.
        sequences: Its sequences.
        windows: The window of each layer; ``None`` for a layer without one.
    """
    work: dict[int, Tensor] = {}
    within: dict[int, Tensor] = {}  # the position in its document
    for name, tensor in _named_tensors(batch):
        dim = sequences.dims.get(id(tensor))
        if dim is None:
            continue
        length = tensor.size(dim)
        if name == "position_ids" and tensor.dim() == 2 and dim == 1:
            at = torch.arange(length, device=tensor.device).expand_as(tensor)
            begins = torch.diff(tensor, prepend=tensor[:, :1] - 1, dim=-1) != 1
            if bool(begins.any()):
                within[length] = at - torch.where(begins, at, 0).cummax(1).values
        elif "mask" in name and dim == tensor.dim() - 2 and tensor.size(-1) == length:
            sees = tensor
            if tensor.is_floating_point():
                sees = tensor > torch.finfo(tensor.dtype).min / 2
            work[length] = sees.bool().reshape(-1, length, length).sum((0, 2))
    for length in sequences.lengths:
        has_windows = any(window is not None and window < length for window in windows)
        if length in work or not (length in within or has_windows):
            continue
        seen = within.get(length, torch.arange(length)[None]) + 1
        total = torch.zeros(())
        for window in windows or [None]:
            total = total + seen.clamp(max=window or length).sum(0)
        work[length] = total
    return work
