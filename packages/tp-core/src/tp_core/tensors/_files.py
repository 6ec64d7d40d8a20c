"""Named tensors in a folder, whole or in slices, in the format of torch.distributed.checkpoint.

A file of unknown origin runs no code. The index is read by an unpickler of few types, and the tensors with
``weights_only=True``.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from tp_core.errors import StateError
from tp_core.tensors._digests import FileRecord
from tp_core.tensors._slices import TensorInfo, TensorSlice

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata


class StoredTensors(ABC):
    """Tensors by name, on the disk.

    Attributes:
        path: Their file or folder.
        infos: The shape and dtype of each tensor, in the order of the names.
    """

    path: Path
    infos: Mapping[str, TensorInfo]

    @abstractmethod
    def fill(self, targets: Mapping[str, Tensor | TensorSlice]) -> None:
        """Fill whole tensors, or a rank's slices of them.

        Raises:
            StateError: A tensor is missing or has another shape, which is found before any target is
                touched; or a file is damaged.
        """


def write_tensors(
    tensors: Mapping[str, Tensor | TensorSlice],
    folder: str | os.PathLike[str],
    *,
    group: "ProcessGroup | None" = None,
    together: bool = False,
) -> dict[str, FileRecord]:
    """Write tensors into ``folder``, and flush them to the disk.

    Args:
        tensors: The tensors by name. With ``together`` each rank gives its slices and whole tensors; whole
            ones are written from the first rank.
        folder: The folder, which is made if it does not exist.
        group: The ranks that write together; all by default.
        together: Whether all ranks of the group call this, or one rank alone.

    Returns:
        Digests of the written bytes, by the names of the files with tensors that this rank has written.

    Raises:
        OSError: The disk is full, or writing is not allowed.
        StateError: torch could not write for another reason.

    Collective: with ``together`` those of ``torch.distributed.checkpoint.save``.
    """
    from tp_core.tensors._folder_format import write

    return write(tensors, Path(folder), group=group, together=together)


def tensor_infos(folder: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """Return the shapes and dtypes of the tensors in ``folder``, by name, in the order of the names.

    Raises:
        FileNotFoundError: ``folder`` has no checkpoint.
        StateError: The folder's index is damaged.
    """
    from tp_core.tensors._folder_format import read_index

    return _infos(read_index(Path(folder)))


def _infos(index: "Metadata") -> dict[str, TensorInfo]:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return {
        name: TensorInfo(tuple(entry.size), entry.properties.dtype)
        for name, entry in sorted(index.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(targets: MutableMapping[str, Tensor | TensorSlice], folder: str | os.PathLike[str]) -> None:
    """Fill ``targets`` from ``folder``; each rank reads by itself.

    Slices may differ from the written ones: each rank reads the elements of its own.

    Args:
        targets: The tensors to fill, by name.
        folder: A folder of :func:`write_tensors`.

    Raises:
        FileNotFoundError: ``folder`` has no checkpoint.
        StateError: A tensor is missing there, or has another shape; or a file is damaged. Names and
            shapes are checked before any target is changed.

    Collective: none.
    """
    from tp_core.tensors._folder_format import read_index, read_into

    folder = Path(folder)
    index = read_index(folder)
    _check_files(folder, index)
    check_targets(targets, _infos(index), folder)
    read_into(targets, folder)


def check_targets(
    targets: Mapping[str, Tensor | TensorSlice], infos: Mapping[str, TensorInfo], place: Path
) -> None:
    """Check that what is to be filled is in a place with these tensors, in the same shapes."""
    for name, target in targets.items():
        if name not in infos:
            msg = f"{place} lacks {name!r}; it has {', '.join(list(infos)[:5])} ..."
            raise StateError(msg)
        if tuple(target.shape) != infos[name].shape:
            msg = f"{place} has {name!r} of shape {infos[name].shape}, not {tuple(target.shape)}"
            raise StateError(msg)


def _check_files(folder: Path, index: "Metadata") -> None:
    """Check that each file is as long as its tensors need."""
    for part, stored in index.storage_data.items():
        file = folder / stored.relative_path
        size = file.stat().st_size if file.is_file() else -1
        if size < stored.offset + stored.length:
            what = "is not there" if size < 0 else f"is cut off at {size} bytes"
            msg = f"{file} {what}: it has (a part of) {part.fqn} up to byte {stored.offset + stored.length}"
            raise StateError(msg)
