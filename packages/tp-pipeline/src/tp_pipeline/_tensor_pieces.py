"""The pieces of parameters that another session has split over the ranks of a stage."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from tp_core.plugins import Session
from tp_core.tensors import TensorSlice

Start = tuple[int, ...]
"""Where a piece begins in the whole tensor."""


@dataclass(frozen=True, slots=True)
class TensorPieces:
    """Where the ranks that hold a model have pieces of one parameter.

    ::

        rank 0: columns 0-3    rank 1: columns 4-7        of a matrix with 8 columns

    Attributes:
        shape: The whole shape.
        of_ranks: For each rank, where each of its pieces begins in the whole, and its shape.
        session: The session that has split the parameter.
    """

    shape: torch.Size
    of_ranks: list[list[tuple[Start, torch.Size]]]
    session: Session

    @torch.no_grad()
    def gather(self, parameter: Tensor, *, group: ProcessGroup, senders: Sequence[int]) -> Tensor:
        """Return the whole parameter.

        Args:
            parameter: The parameter, which may be empty on ranks that send nothing.
            group: The ranks that hold the model together.
            senders: Those of them that send their pieces.

        Collectives: a broadcast of each piece.
        """
        me = dist.get_rank(group)
        whole = parameter.new_empty(self.shape)
        own: dict[Start, Tensor] = {}
        if me in senders:
            own = dict(self._views(parameter, parameter.data))
        for rank in senders:
            for start, shape in self.of_ranks[rank]:
                if rank == me:
                    piece = own[start].contiguous()
                else:
                    piece = parameter.new_empty(shape)
                dist.broadcast(piece, group_src=rank, group=group)
                whole[_region(start, shape)] = piece
        return whole

    def cut(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """Return this rank's pieces of a whole tensor, in the shape of its parameter."""
        if whole.shape != self.shape:
            return whole  # torch's own error says so
        own = whole.new_empty(parameter.shape)
        if own.numel():
            for start, piece in self._views(parameter, own):
                piece.copy_(whole[_region(start, piece.shape)])
        return own

    def _views(self, parameter: Tensor, value: Tensor) -> Iterator[tuple[Start, Tensor]]:
        """Yield views of a value of a parameter's shape, and where each begins in the whole."""
        placed = self.session.as_slice(parameter, value)
        if isinstance(placed, TensorSlice):
            for start, piece in placed.parts:
                yield tuple(start), piece


def gather_pieces(model: nn.Module, session: Session, group: ProcessGroup) -> dict[str, TensorPieces]:
    """Return the pieces of each parameter that a session has split, by name.

    Args:
        model: The model, prepared by the session.
        session: The session.
        group: The ranks that hold the model together.

    Collective: an all-gather of the places of pieces.
    """
    shapes: dict[str, torch.Size] = {}
    own: dict[str, list[tuple[Start, torch.Size]]] = {}
    for name, parameter in model.named_parameters():
        placed = session.as_slice(parameter, parameter.data)
        if isinstance(placed, TensorSlice):
            shapes[name] = torch.Size(placed.shape)
            own[name] = [(tuple(start), piece.shape) for start, piece in placed.parts]
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, own, group=group)
    return {
        name: TensorPieces(shape, [pieces.get(name, []) for pieces in of_ranks], session)
        for name, shape in shapes.items()
    }


def _region(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
