"""How a rank's tensor relates to the whole one.

A rank may hold the whole of a tensor, its share of the rows, a part along one dimension, or a summand. Each
is tried, so that nothing has to be said about the layout of activations.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp_core.compare._bounds import distance, norm_of
from tp_core.compare._recording import LocalTensor


class BatchSelection(NamedTuple):
    """What a rank has of one tensor of a batch: rows, and places in the second dimension, by number."""

    shape: tuple[int, ...]
    rows: Tensor
    places: Tensor | None


Selections = Mapping[str, BatchSelection]


@dataclass(frozen=True, slots=True)
class Match:
    """How the ranks' tensors relate to the whole one.

    Attributes:
        kind: "same", "partial" (they sum to the whole), "unknown" (not comparable) or "parts".
        error: The norm of the difference, as a share of the whole's.
        where: The ranks with the tensors that differ, in words; empty for all of them, or where not known.
    """

    kind: str
    error: float = 0.0
    where: str = ""


def relate(
    exact: Tensor,
    locals_: Sequence[LocalTensor | None],
    shares: Sequence[Selections],
    limit: float,
    *,
    reorders: bool = False,
) -> Match:
    """Return how the ranks' tensors relate to the whole one.

    Args:
        exact: The whole tensor.
        locals_: The tensor of each rank; ``None`` for a rank that has none.
        shares: What each rank has of a batch: see :class:`BatchSelection`. Empty where all have all of it.
        limit: The largest norm of a difference, as :meth:`Bound.limit` has it.
        reorders: Whether parts along a dimension may be in any order.

    Example:
        >>> whole = torch.arange(6.0).view(2, 3)
        >>> relate(whole, [LocalTensor(whole[:, :2]), LocalTensor(whole[:, 2:])], [], 1e-9).kind
        'same'
        >>> relate(whole, [LocalTensor(whole / 2), LocalTensor(whole / 2)], [], 1e-9).kind
        'partial'
    """
    present = [(rank, local) for rank, local in enumerate(locals_) if local is not None]
    if not present:
        return Match("unknown")
    if present[0][1].layout:
        return _relate_laid_out(exact, [local for _, local in present], limit)
    expected = [selected(exact, shares[rank]) if rank < len(shares) else exact for rank, _ in present]
    parts = [local.tensor for _, local in present]
    if all(e.shape == p.shape for e, p in zip(expected, parts, strict=True)):
        errors = {r: distance(e, p) for (r, _), p, e in zip(present, parts, expected, strict=True)}
        error = max(errors.values())
        if error <= limit:
            return Match("same")
        groups = _same_samples(expected)
        sums = [distance(expected[group[0]], _sum(parts[i] for i in group)) for group in groups]
        if all(len(group) > 1 for group in groups) and max(sums) <= limit * len(present):
            return Match("partial", _share(error, exact))
        return Match("parts", _share(error, exact), _where(errors, limit))
    return _relate_joined(exact, expected, parts, limit, reorders=reorders)


def difference_on_ranks(whole: Tensor, found: Mapping[int, Tensor], limit: float) -> str:
    """Return in words how ranks differ from a whole tensor; empty where they do not.

    Each has the whole of it, or all have slices along one dimension.

    Args:
        whole: The whole tensor, such as a gradient.
        found: The tensors by rank.
        limit: The largest norm of a difference, as :meth:`Bound.limit` has it.
    """
    parts = list(found.values())
    if all(part.shape == whole.shape for part in parts):
        errors = {rank: distance(whole, part) for rank, part in found.items()}
        if max(errors.values()) <= limit:
            return ""
        if len(parts) > 1 and distance(whole, _sum(parts)) <= limit * len(parts):
            return "the ranks' parts sum to it, and were not summed"
        where = _where(errors, limit)
        if not norm_of(whole):
            return f"it is 0 on one device, and not{where or ' on ranks'}"
        apart = max(distance(parts[0], part) for part in parts)
        if apart > limit and not where:
            also = "; ranks differ from each other"
        else:
            also = ""
        return f"it differs by {_share(max(errors.values()), whole):.2g} of its norm{where}{also}"
    match = _relate_joined(whole, [whole] * len(parts), parts, limit)
    if match.kind == "unknown":
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        return f"ranks have {shapes}, which do not join to {tuple(whole.shape)}: give Strategy.whole()"
    if match.kind == "same":
        return ""
    return f"it differs by {match.error:.2g} of its norm"


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).sum(0)


def _share(error: float, exact: Tensor) -> float:
    return error / max(norm_of(exact), 1e-300)


def _where(errors: Mapping[int, float], limit: float) -> str:
    """Return which ranks are wrong, in words; empty where all are."""
    wrong = [str(rank) for rank, error in errors.items() if not error <= limit]
    if len(wrong) == len(errors):
        return ""
    return f" on rank{'s' * (len(wrong) > 1)} {', '.join(wrong)}"


def _relate_joined(
    exact: Tensor, expected: list[Tensor], parts: list[Tensor], limit: float, *, reorders: bool = False
) -> Match:
    """Compare parts that are slices along one dimension, in the order of ranks or in any."""
    error = 0.0
    for group in _same_samples(expected):
        whole, mine = expected[group[0]], [parts[i] for i in group]
        dim = cut_dim(whole, mine)
        if dim is None:
            return Match("unknown")
        joined = torch.cat(mine, dim).double()
        if reorders:
            joined = _in_order_of(joined, whole, dim)
        error = max(error, distance(whole, joined))
    kind = "same" if error <= limit else "parts"
    return Match(kind, _share(error, exact))


def cut_dim(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    """Return the dimension along which parts are slices of the whole; ``None`` where they are none."""
    if any(part.dim() != whole.dim() for part in parts):
        return None
    dims = [d for d in range(whole.dim()) if any(part.size(d) != whole.size(d) for part in parts)]
    if len(dims) != 1 or sum(part.size(dims[0]) for part in parts) != whole.size(dims[0]):
        return None
    return dims[0]


def _in_order_of(joined: Tensor, whole: Tensor, dim: int) -> Tensor:
    """Return slices along a dimension in the order of the whole's nearest ones, each taken once."""
    distances = torch.cdist(whole.double().transpose(0, dim).flatten(1), joined.transpose(0, dim).flatten(1))
    order = []
    for row in distances:
        order.append(int(row.argmin()))
        distances[:, order[-1]] = float("inf")
    return joined.index_select(dim, torch.tensor(order))


def _relate_laid_out(exact: Tensor, parts: list[LocalTensor], limit: float) -> Match:
    """Compare a DTensor, which says how its parts are laid out; copies of one part are compared, too."""
    joined: dict[tuple[int, ...], Tensor] = {
        tuple(rank for _, _, rank, _ in part.layout): part.tensor.double() for part in parts
    }
    for axis in reversed(range(len(parts[0].layout))):
        kind, dim, _, size = parts[0].layout[axis]
        joined_at: dict[tuple[int, ...], Tensor] = {}
        for key in {key[:axis] for key in joined}:
            along = [joined[(*key, i)] for i in range(size) if (*key, i) in joined]
            if len(along) != size or kind == "unknown":
                return Match("unknown")
            if kind == "shard":
                joined_at[key] = torch.cat(along, dim)
            elif kind in ("partial", "mean"):
                total = torch.stack(along).sum(0)
                if kind == "mean":
                    joined_at[key] = total / size
                else:
                    joined_at[key] = total
            else:
                apart = max(distance(along[0], part) for part in along)
                if apart > limit:
                    return Match("parts", _share(apart, exact))
                joined_at[key] = along[0]
        joined = joined_at
    whole = joined[()]
    if whole.shape != exact.shape:
        return Match("unknown")
    error = distance(exact, whole)
    kind = "parts" if error > limit else "same"
    return Match(kind, _share(error, exact))


def _same_samples(expected: list[Tensor]) -> list[list[int]]:
    """Return the groups of ranks that read the same samples."""
    groups: list[list[int]] = []
    for i, samples in enumerate(expected):
        for group in groups:
            first = expected[group[0]]
            if samples is first or (samples.shape == first.shape and bool((samples == first).all())):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def selected(exact: Tensor, share: Selections) -> Tensor:
    """Return the part of a whole activation that a rank has for its share of the batch."""
    for selection in share.values():
        if exact.dim() and exact.size(0) == selection.shape[0]:
            rows = exact[selection.rows]
            is_cut = selection.places is not None and len(selection.places) != selection.shape[1]
            if is_cut and exact.dim() > 1 and exact.size(1) == selection.shape[1]:
                rows = rows[:, selection.places]
            return rows
    return exact


def merged(found: Mapping[Any, LocalTensor], places: Sequence[Any], rows: int) -> LocalTensor | None:
    """Return the tensor of several calls, one for each micro-batch; ``None`` where a rank has none.

    Calls before those that have the rows of the rank's share are left out: torch's pipelining makes one to
    learn shapes.
    """
    parts = [local for place in places if (local := found.get(place)) is not None]
    if not parts:
        return None
    while len(parts) > 1 and parts[0].tensor.dim() and sum(p.tensor.size(0) for p in parts) > rows:
        parts = parts[1:]
    if len(parts) == 1:
        return parts[0]
    is_cut = any(kind == "shard" and dim == 0 for kind, dim, _, _ in parts[0].layout)
    if is_cut or not all(local.tensor.dim() for local in parts):
        return None
    try:
        return LocalTensor(torch.cat([local.tensor for local in parts]), parts[0].layout)
    except RuntimeError:  # of other widths, such as padded sequences
        return None


def joined_parts(like: Mapping[str, Tensor], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return whole tensors of those that ranks have whole, or in slices along one dimension."""
    whole = {}
    for name, tensor in like.items():
        parts = [tensors[name] for tensors in ranks if tensors.get(name) is not None]
        if parts and parts[0].shape == tensor.shape:
            whole[name] = parts[0]
        elif parts and (dim := cut_dim(tensor, parts)) is not None:
            whole[name] = torch.cat(parts, dim)
    return whole
