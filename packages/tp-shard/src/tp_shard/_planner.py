"""Plans for torch.distributed.checkpoint that say where in the whole tensor each shard lies.

DTensor would say it too, but cuts otherwise: 10 over 4 ranks as 3, 3, 3, 1 and not as 3, 3, 2, 2.
"""

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tp_core.errors import StateError

from tp_shard._group import ALONE, current_data_group
from tp_shard._table import Shard

__all__ = ["Piece", "load_tensors", "read_shapes", "save_tensors"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of this rank's state.

    Attributes:
        tensor: Its values, or where they shall go.
        shard: How it is cut; ``None`` if it is whole and the same on all ranks.
    """

    tensor: Tensor
    shard: Shard | None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        shape = tuple(self.tensor.shape)
        return shape if self.shard is None else self.shard.split.full_shape(shape)

    def chunks(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return where in the whole each part of it begins, and the part, a view."""
        shape = tuple(self.tensor.shape)
        if self.shard is None:
            return [((0,) * len(shape), self.tensor)]
        split, rank = self.shard.split, self.shard.group.rank
        found, at = [], 0
        for start, stop in split.ranges[rank]:
            offsets = tuple(start if i == split.dim else 0 for i in range(len(shape)))
            found.append((offsets, self.tensor.narrow(split.dim, at, stop - start)))
            at += stop - start
        return found


def save_tensors(pieces: dict[str, Piece], folder: Path) -> None:
    """Write the pieces of all ranks into a folder.

    Raises:
        StateError: A rank could not write.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
    from torch.distributed.checkpoint.state_dict_saver import save

    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            items = []
            for name, piece in pieces.items():
                if not _writes(piece):
                    continue
                for offsets, part in _owned(piece):
                    data = TensorWriteData(
                        chunk=ChunkStorageMetadata(torch.Size(offsets), part.shape),
                        properties=TensorProperties.create_from_tensor(part),
                        size=torch.Size(piece.full_shape),
                    )
                    index = MetadataIndex(name, torch.Size(offsets))
                    items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
            self.plan = SavePlan(items)
            return self.plan

        def lookup_object(self, index: MetadataIndex) -> Tensor:
            parts = pieces[index.fqn].chunks()
            return next(part for offsets, part in parts if torch.Size(offsets) == index.offset).contiguous()

    planner = Planner(flatten_state_dict=False)
    try:
        with _quietly():
            save({}, checkpoint_id=folder, planner=planner, no_dist=_alone())
    except CheckpointException as error:
        msg = f"the checkpoint {folder} could not be written: {_first(error)}"
        raise StateError(msg) from error


def load_tensors(pieces: dict[str, Piece], folder: Path) -> dict[str, Tensor]:
    """Read a folder into new tensors on the CPU, of the shapes of the pieces.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        StateError: It lacks a key, has another shape, or is damaged; the key is named.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import LoadPlan
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = _read_metadata(folder)
    saved = metadata.state_dict_metadata
    for name, piece in pieces.items():
        if name not in saved:
            msg = f"{folder} lacks {name}"
            raise StateError(msg)
        if tuple(saved[name].size) != piece.full_shape:
            msg = f"{folder} has {name} of shape {tuple(saved[name].size)}, and the model {piece.full_shape}"
            raise StateError(msg)
    _check_files(folder, metadata)
    places = {
        name: dataclasses.replace(piece, tensor=torch.empty_like(piece.tensor, device="cpu"))
        for name, piece in pieces.items()
    }

    class Planner(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            items = []
            for name, piece in places.items():
                chunks = [
                    ChunkStorageMetadata(torch.Size(offsets), part.shape)
                    for offsets, part in piece.chunks()
                    if part.numel() or part.dim() == 0
                ]
                items += create_read_items_for_chunk_list(name, saved[name], chunks)
            return LoadPlan(items)

        def lookup_tensor(self, index: MetadataIndex) -> Tensor:
            parts = places[index.fqn].chunks()
            return next(part for offsets, part in parts if torch.Size(offsets) == index.offset)

    try:
        with _quietly():
            load({}, checkpoint_id=folder, planner=Planner(flatten_state_dict=False), no_dist=_alone())
    except CheckpointException as error:
        msg = f"the checkpoint {folder} cannot be read: {_first(error)}"
        raise StateError(msg) from error
    return {name: piece.tensor for name, piece in places.items()}


def _first(error: Any) -> str:
    """Say what the first of the ranks that failed met; torch's exception has all of them."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: int(item[0]))
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def read_shapes(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and the type of each tensor in a checkpoint."""
    saved = _read_metadata(folder).state_dict_metadata
    return {name: (tuple(m.size), m.properties.dtype) for name, m in saved.items()}


def _read_metadata(folder: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if not (folder / ".metadata").is_file():
        msg = f"there is no checkpoint at {folder}: it has no .metadata"
        raise FileNotFoundError(msg)
    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as error:  # an unpickler fails in a dozen ways
        msg = f"{folder / '.metadata'} is damaged: {error}"
        raise StateError(msg) from error


def _check_files(folder: Path, metadata: Any) -> None:
    """Make sure that each file is as long as its tensors need.

    Raises:
        StateError: One is cut off, or not there; a tensor that is in it is named.
    """
    for index, stored in metadata.storage_data.items():
        file = folder / stored.relative_path
        size = file.stat().st_size if file.is_file() else -1
        if size < stored.offset + stored.length:
            what = "is not there" if size < 0 else f"is cut off at {size} bytes"
            msg = f"{file} {what}: it has (a part of) {index.fqn} up to byte {stored.offset + stored.length}"
            raise StateError(msg)


def _writes(piece: Piece) -> bool:
    data = current_data_group() or ALONE
    if piece.shard is not None:
        return data.rank == 0
    return not dist.is_initialized() or dist.get_rank() == 0


def _owned(piece: Piece) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return the parts of a piece that no earlier rank writes, and that are not empty."""
    parts = piece.chunks()
    if piece.shard is None:
        return parts
    split, rank = piece.shard.split, piece.shard.group.rank
    earlier = {r for ranges in split.ranges[:rank] for r in ranges}
    return [
        part
        for part, where in zip(parts, split.ranges[rank], strict=True)
        if where not in earlier and part[1].numel()
    ]


def _alone() -> bool:
    return not dist.is_available() or not dist.is_initialized()


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep torch from warning that a process without others is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
