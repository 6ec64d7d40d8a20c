"""Named tensors in a folder, whole or in slices: safetensors files, and an index of the parts in them.

A file of unknown origin runs no code: nothing is unpickled.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from tp_core.modules._parameters import TensorSlice
from tp_core.tensors._digests import FileRecord
from tp_core.tensors._index import read_index, read_into
from tp_core.tensors._stored import TensorInfo, check_targets

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    from tp_core.tensors._folder_writer import write

    return write(tensors, Path(folder), group=group, together=together)


def tensor_infos(folder: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """Return the shapes and dtypes of the tensors in ``folder``, by name, in the order of the names.

    Raises:
        FileNotFoundError: ``folder`` has no checkpoint.
        StateError: The folder's index is damaged.
    """
    return {name: entry.info for name, entry in read_index(Path(folder)).items()}


def read_tensors(targets: Mapping[str, Tensor | TensorSlice], folder: str | os.PathLike[str]) -> None:
    """Fill ``targets`` from ``folder``; each rank reads by itself.

    Slices may differ from the written ones: each rank reads the elements of its own.

    Args:
        targets: The tensors to fill, by name.
        folder: A folder of :func:`write_tensors`.

    Raises:
        FileNotFoundError: ``folder`` has no checkpoint.
        OSError: A file could not be read for some seconds.
        StateError: A tensor is missing there, or has another shape; or a file is damaged. Names, shapes and
            the headers of files are checked before any target is changed.

    Collective: none.
    """
    folder = Path(folder)
    index = read_index(folder)
    check_targets(targets, {name: entry.info for name, entry in index.items()}, folder)
    read_into(targets, index, folder)
