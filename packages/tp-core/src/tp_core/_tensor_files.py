"""Named tensors in a folder, whole or in slices, in the format of torch.distributed.checkpoint.

Its index is a pickle. It is read here by an unpickler that knows the few types it may hold, so
that a file of a stranger runs no code. The tensors themselves are read with ``weights_only=True``.
"""

import io
import os
import pickle
import warnings
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tp_core._tensor_slices import TensorInfo, TensorSlice
from tp_core.errors import StateError

__all__ = ["read_tensors", "tensor_infos", "write_tensors"]

_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    *(
        (f"{_CHECKPOINT}.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}


class _SavePlanner(DefaultSavePlanner):
    """torch's planner, which also knows slices."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if isinstance(value, TensorSlice):
            return value.part_at(index.offset or ()).contiguous()
        return super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    """torch's planner, which also knows slices."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # torch's own makes copies of what it does not know. Here all is flat already.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        if isinstance(value, TensorSlice):
            return value.part_at(index.offset or ())
        return super().lookup_tensor(index)


class _Unpickler(pickle.Unpickler):
    """Reads the index, and nothing that is no part of one."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            msg = f"it names {module}.{name}, which has no place in an index of tensors"
            raise pickle.UnpicklingError(msg)
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """torch's reader with an index that cannot run code."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return _index(Path(self.path))


def write_tensors(
    tensors: Mapping[str, Tensor | TensorSlice],
    folder: str | os.PathLike[str],
    *,
    group: ProcessGroup | None = None,
    together: bool = False,
) -> None:
    """Write tensors into ``folder``.

    Args:
        tensors: By name. With ``together`` each rank gives its slices, and whole tensors that are
            the same on all ranks, which one of them writes.
        folder: Where; it is made if it is not there.
        group: The ranks that write together; all by default.
        together: Whether all ranks of the group call this, or one alone.

    Raises:
        OSError: The disk is full, or writing is not allowed.
        StateError: torch could not write for another reason.

    Collectives: with ``together`` those of ``torch.distributed.checkpoint.save``.
    """
    if not together:
        # It is meant: one rank writes, and the others need not wait for it.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    try:
        save(
            dict(tensors),
            storage_writer=FileSystemWriter(folder, sync_files=True),
            planner=_SavePlanner(),
            process_group=group,
            no_dist=not together,
        )
    except CheckpointException as error:
        rank, cause = _first(error)
        if isinstance(cause, OSError):
            raise cause from error
        msg = f"tensors could not be written to {Path(folder)}: rank {rank}: {cause}"
        raise StateError(msg) from error


def tensor_infos(folder: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """Return what is written in ``folder``, by name, in the order of the names.

    Raises:
        FileNotFoundError: There is no checkpoint.
        StateError: Its index is damaged.
    """
    found = _index(Path(folder)).state_dict_metadata
    return {
        name: TensorInfo(tuple(entry.size), entry.properties.dtype)
        for name, entry in sorted(found.items())
        if isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(targets: MutableMapping[str, Tensor | TensorSlice], folder: str | os.PathLike[str]) -> None:
    """Fill ``targets`` with what is written in ``folder``; each rank for itself, without the others.

    Slices need not be those that were written: each rank reads what lies in its own.

    Args:
        targets: Tensors to be filled, by name.
        folder: What :func:`write_tensors` wrote.

    Raises:
        FileNotFoundError: There is no checkpoint.
        StateError: A tensor is missing there, or has another shape; or a file is damaged. What has
            another name or shape is found before any target is touched.
    """
    infos = tensor_infos(folder)
    _check_files(Path(folder))
    for name, target in targets.items():
        if name not in infos:
            msg = f"{Path(folder)} lacks {name!r}; it has {', '.join(list(infos)[:5])} ..."
            raise StateError(msg)
        shape = tuple(target.shape)
        if shape != infos[name].shape:
            msg = f"{Path(folder)} has {name!r} of shape {infos[name].shape}, not {shape}"
            raise StateError(msg)
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    try:
        load(dict(targets), storage_reader=_Reader(folder), planner=_LoadPlanner(), no_dist=True)
    except CheckpointException as error:
        _, cause = _first(error)
        msg = f"{Path(folder)} cannot be read: {type(cause).__name__}: {cause}"
        raise StateError(msg) from error


def _first(error: CheckpointException) -> tuple[int, BaseException]:
    """Return the first rank that failed, and with what; torch's exception has all of them."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: int(item[0]))
    return rank, cause


def _check_files(folder: Path) -> None:
    """Make sure that each file is as long as its tensors need.

    Raises:
        StateError: One is cut off, or not there; a tensor that is in it is named.
    """
    for index, stored in _index(folder).storage_data.items():
        file = folder / stored.relative_path
        size = file.stat().st_size if file.is_file() else -1
        if size < stored.offset + stored.length:
            what = "is not there" if size < 0 else f"is cut off at {size} bytes"
            msg = f"{file} {what}: it has (a part of) {index.fqn} up to byte {stored.offset + stored.length}"
            raise StateError(msg)


def _index(folder: Path) -> Metadata:
    path = folder / ".metadata"
    if not path.is_file():
        msg = f"there is no checkpoint at {folder}: it has no .metadata"
        raise FileNotFoundError(msg)
    try:
        index = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a damaged pickle fails in any way
        msg = f"{path} is damaged: {error}"
        raise StateError(msg) from error
    if not isinstance(index, Metadata):
        msg = f"{path} is damaged: it holds {type(index).__name__}"
        raise StateError(msg)
    return index
