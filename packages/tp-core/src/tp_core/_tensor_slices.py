"""What is said of a tensor in a file: its shape, and which part of it a rank holds.

Apart from the functions that read and write, because torch's own take half a second to import.
"""

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
    """The rectangular part of a larger tensor that this rank holds.

    Attributes:
        local: The part; reading writes into it.
        shape: The shape of the whole tensor.
        offsets: Where the part begins in it, in each dimension.
    """

    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    # The two methods are those that torch.distributed.checkpoint asks objects for.

    def __create_write_items__(self, fqn: str, _object: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(self.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self._chunk(),
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=torch.Size(self.shape),
                ),
            )
        ]

    def __create_chunk_list__(self) -> list[Any]:
        return [self._chunk()]

    def _chunk(self) -> Any:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.local.size())
