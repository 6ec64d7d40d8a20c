"""torch.distributed.checkpoint with slices, and with an index that is read without running code.

The index is a pickle. It is read here by an unpickler that knows the few types it may hold. Apart from
:mod:`tp_core._tensors._files`, because importing torch's modules takes most of a second.
"""

import io
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from tp_core._tensors._archives import Part, fill_from_archive
from tp_core._tensors._atomic import showing_system_errors
from tp_core._tensors._digests import DigestingFile, FileRecord, without_checksums
from tp_core._tensors._sharding import is_dtensor
from tp_core._tensors._slices import TensorSlice
from tp_core.errors import StateError

__all__ = ["read_index", "read_into", "write"]

_CHECKPOINT = "torch.distributed.checkpoint"
_SUFFIX = ".distcp"
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
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

# Where the checkpoint was written. Python 3.13 names the module pathlib._local, the others pathlib, and a
# path of one system cannot be made on another: what is read is the pure path.
_PATHS: dict[str, type[PurePath]] = {
    "Path": PurePath,
    "PosixPath": PurePosixPath,
    "PurePath": PurePath,
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
    "WindowsPath": PureWindowsPath,
}
_PATH_MODULES = {"pathlib", "pathlib._local"}


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
    """Reads the index, and nothing that is not part of one."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _PATH_MODULES and name in _PATHS:
            return _PATHS[name]
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in _ALLOWED:
            msg = f"it names {module}.{name}, which has no place in an index of tensors"
            raise pickle.UnpicklingError(msg)
        return super().find_class(module, name)


def _member(kind: Any, name: Any) -> Any:
    """Return a member of an enumeration, which some Pythons (3.11.2) write as ``getattr(kind, name)``.

    Raises:
        UnpicklingError: ``kind`` is not an enumeration, or has no such member.
    """
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        msg = f"it asks for {name!r} of {kind!r}, which has no place in an index of tensors"
        raise pickle.UnpicklingError(msg)
    return kind[name]


class _DigestedFiles(FileSystem):
    """torch's way to files; those with tensors are digested while they are written.

    Attributes:
        written: The files with tensors, by name.
    """

    def __init__(self) -> None:
        self.written: dict[str, DigestingFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file."""
        with super().create_stream(path, mode) as stream:
            if Path(path).suffix != _SUFFIX:
                yield stream
                return
            file = DigestingFile(cast("BinaryIO", stream))
            self.written[Path(path).name] = file
            # Here, on the rank that writes: to others errors travel without the ones before them.
            with showing_system_errors(Path(path)):
                yield file


class _Reader(FileSystemReader):
    """torch's reader with an index that cannot run code, and without copies on the way."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return read_index(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with (Path(self.path) / name).open("rb", buffering=0) as file:
                for item in items:
                    stored = self.storage_data[item.storage_index]
                    target = planner.resolve_tensor(item).detach()
                    part = Part(tuple(item.storage_offsets), tuple(item.lengths))
                    fill_from_archive(target, file.fileno(), stored.offset, stored.length, part)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def write(
    tensors: Mapping[str, Tensor | TensorSlice],
    folder: Path,
    *,
    group: ProcessGroup | None,
    together: bool,
) -> dict[str, FileRecord]:
    """Write tensors; see :func:`tp_core.state.write_tensors`.

    Raises:
        OSError: The disk is full, or writing is not allowed.
        StateError: torch could not write for another reason.
    """
    try:
        with _without_warnings(), without_checksums():
            if together and dist.get_rank(group):
                # Whole ones are the first rank's: statistics of batch norms differ from rank to rank.
                tensors = {n: t for n, t in tensors.items() if isinstance(t, TensorSlice) or is_dtensor(t)}
            writer = FileSystemWriter(folder, sync_files=True)
            writer.fs = files = _DigestedFiles()
            save(
                dict(tensors),
                storage_writer=writer,
                planner=_SavePlanner(),
                process_group=group,
                no_dist=not together,
            )
            return {name: file.record() for name, file in files.written.items()}
    except CheckpointException as error:
        rank, cause = _first(error)
        if isinstance(cause, OSError):
            raise cause from error
        msg = f"tensors could not be written to {folder}: rank {rank}: {cause}"
        raise StateError(msg) from error


def read_into(targets: Mapping[str, Tensor | TensorSlice], folder: Path) -> None:
    """Fill ``targets``; see :func:`tp_core.state.read_tensors`.

    Raises:
        StateError: A file cannot be read.
    """
    try:
        with _without_warnings():
            load(dict(targets), storage_reader=_Reader(folder), planner=_LoadPlanner(), no_dist=True)
    except CheckpointException as error:
        _, cause = _first(error)
        msg = f"{folder} cannot be read: {type(cause).__name__}: {cause}"
        raise StateError(msg) from error


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence torch's warnings that one rank writes or reads alone, or over older files: both on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", "Detected an existing checkpoint", UserWarning)
        yield


def read_index(folder: Path) -> Metadata:
    """Return the index of the checkpoint in ``folder``.

    Raises:
        FileNotFoundError: ``folder`` has no checkpoint.
        StateError: The index is damaged, or holds what does not belong in one.
    """
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


def _first(error: CheckpointException) -> tuple[int, BaseException]:
    """Return the first rank that failed, and with what; torch's exception has all of them."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: int(item[0]))
    return rank, cause
