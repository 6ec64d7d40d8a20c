"""What describes a tensor in a file: its shape, and which part of it a rank holds.

Apart from the functions that read and write, because torch's own take half a second to import.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["TensorInfo", "TensorSlice"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a written tensor.

    Attributes:
        shape: Its whole shape.
        dtype: Its type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """What this rank holds of a larger tensor: one or several rectangular parts of it.

    Attributes:
        shape: The shape of the whole tensor.
        parts: Where each part begins in it, in each dimension, and the part; reading writes into it.

    Example:
        >>> rows = torch.zeros(2, 3)
        >>> TensorSlice((5, 3), [((3, 0), rows)])  # doctest: +SKIP
    """

    shape: tuple[int, ...]
    parts: Sequence[tuple[tuple[int, ...], Tensor]]

    def part_at(self, offsets: Sequence[int]) -> Tensor:
        """Return the part that begins there."""
        return next(part for start, part in self.parts if tuple(start) == tuple(offsets))

    # The two methods are those that torch.distributed.checkpoint asks objects for.

    def __create_write_items__(self, fqn: str, _object: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.part_at(chunk.offsets)),
                    size=torch.Size(self.shape),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(start), sizes=part.size())
            for start, part in self.parts
            if part.numel()
        ]
