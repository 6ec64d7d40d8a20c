"""torch.distributed.checkpoint with slices, and an index that is read without running code.

The index is a pickle. An unpickler that allows only the few types of an index reads it here. `_files`
imports this module in its functions, because importing torch's modules takes most of a second.
"""

import io
import math
import os
import pickle
import struct
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO, NamedTuple, cast

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

from tp_core.errors import StateError
from tp_core.tensors._atomic import showing_system_errors
from tp_core.tensors._digests import DigestingFile, FileRecord, read_at, without_checksums
from tp_core.tensors._slices import TensorSlice, is_dtensor

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

# The index has the path where the checkpoint was written. Python 3.13 names the module pathlib._local,
# others pathlib. A path of one system cannot be made on another, so it is read as a pure path.
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
    """torch's planner with support for slices."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if isinstance(value, TensorSlice):
            return value.part_at(index.offset or ()).contiguous()
        return super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    """torch's planner with support for slices."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # torch's own flattens the state, and copies values of types that it does not know. Here all is
        # flat, and slices must be filled in place.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        if isinstance(value, TensorSlice):
            return value.part_at(index.offset or ())
        return super().lookup_tensor(index)


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that allows only the types of an index."""

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
    """Return a member of an enumeration, which some Pythons (3.11.2) write as ``getattr(kind, name)``."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        msg = f"it asks for {name!r} of {kind!r}, which has no place in an index of tensors"
        raise pickle.UnpicklingError(msg)
    return kind[name]


class _DigestedFiles(FileSystem):
    """torch's file system, with digests of the files with tensors while they are written."""

    def __init__(self) -> None:
        self.written: dict[str, DigestingFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if Path(path).suffix != _SUFFIX:
                yield stream
                return
            file = DigestingFile(cast("BinaryIO", stream))
            self.written[Path(path).name] = file
            # Here, on the rank that writes: errors travel to other ranks without their causes.
            with showing_system_errors(Path(path)):
                yield file


class _Reader(FileSystemReader):
    """torch's reader, with an index that cannot run code, and without intermediate copies."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return read_index(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
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

    Collective: with ``together`` those of ``torch.distributed.checkpoint.save``.
    """
    try:
        with _without_warnings(), without_checksums():
            if together and dist.get_rank(group):
                # Whole tensors come from the first rank: statistics of batch norms differ between ranks.
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
    try:
        with _without_warnings():
            load(dict(targets), storage_reader=_Reader(folder), planner=_LoadPlanner(), no_dist=True)
    except CheckpointException as error:
        _, cause = _first(error)
        msg = f"{folder} cannot be read: {type(cause).__name__}: {cause}"
        raise StateError(msg) from error


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence torch's warnings that one rank writes or reads alone, or over older files: both intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", "Detected an existing checkpoint", UserWarning)
        yield


def read_index(folder: Path) -> Metadata:
    path = folder / ".metadata"
    if not path.is_file():
        msg = f"there is no checkpoint at {folder}: it has no .metadata"
        raise FileNotFoundError(msg)
    try:
        index = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a damaged pickle fails in any way
        msg = f"{path} is damaged: {error}"
        raise StateError(msg) from error
    if not isinstance(index, Metadata):
        msg = f"{path} is damaged: it holds {type(index).__name__}"
        raise StateError(msg)
    return index


def _first(error: CheckpointException) -> tuple[int, BaseException]:
    """Return the first rank that failed, and its error; torch's exception has those of all ranks."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: int(item[0]))
    return rank, cause


# -- Parts of tensors in archives of torch.save ---------------------------------------------------
# torch.load reads a whole tensor into new memory first. Here the archive's headers give the position, shape
# and dtype of the elements, and a part is read straight into its target. torch.load reads unusual archives.


_TAIL = 1 << 13  # bytes: the directory of an archive with few files is at its end
_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of the name and of what follows it, before the content

_STORAGES = {  # torch.save's names of storages
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}


class Part(NamedTuple):
    start: tuple[int, ...]
    shape: tuple[int, ...]


class _Elements(NamedTuple):
    """The position of a tensor's contiguous elements in a file."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Unusual(Exception):  # noqa: N818 - caught right here
    """An archive that this module leaves to torch."""


def fill_from_archive(target: Tensor, handle: int, position: int, nbytes: int, part: Part) -> None:
    """Fill a tensor with a part of the tensor in the archive at ``position`` in a file."""
    if 0 in part.shape:
        return
    try:
        elements = _find(handle, position, nbytes)
    except (_Unusual, zipfile.BadZipFile, KeyError, pickle.UnpicklingError, struct.error):
        whole = torch.load(io.BytesIO(_read(handle, position, nbytes)), map_location="cpu", weights_only=True)
        for dim, (start, length) in enumerate(zip(*part, strict=True)):
            whole = whole.narrow(dim, start, length)
        target.copy_(whole)
        return
    # Whole rows of the part in one read, as they are contiguous in the file.
    row = elements.shape[1:]
    first, rows = (part.start[0], (part.shape[0], *row)) if part.shape else (0, ())
    direct = (
        part.shape == rows
        and target.device.type == "cpu"
        and target.dtype == elements.dtype
        and target.is_contiguous()
    )
    memory = target if direct else torch.empty(rows, dtype=elements.dtype)
    _read_into(memory, handle, elements.position + first * math.prod(row) * elements.dtype.itemsize)
    if not direct:
        for dim in range(1, len(part.shape)):
            memory = memory.narrow(dim, part.start[dim], part.shape[dim])
        target.copy_(memory)


def _find(handle: int, position: int, nbytes: int) -> _Elements:
    tail = min(nbytes, _TAIL)
    with zipfile.ZipFile(io.BytesIO(_read(handle, position + nbytes - tail, tail))) as archive:
        # zipfile counts offsets from the beginning of the tail that it was given; `end` corrects that.
        files = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if any(info.compress_type != zipfile.ZIP_STORED for info in files.values()):
        raise _Unusual
    end = position + nbytes - tail

    def content(name: str) -> tuple[int, int]:
        info = files[name]
        head = end + info.header_offset
        lengths = _LOCAL_HEADER.unpack(_read(handle, head, _LOCAL_HEADER.size))
        return head + _LOCAL_HEADER.size + sum(lengths), info.file_size

    if _read(handle, *content("byteorder")).decode() != sys.byteorder:
        raise _Unusual
    shape, stride, dtype, key, count = _TensorUnpickler(
        io.BytesIO(_read(handle, *content("data.pkl")))
    ).load()
    begin, size = content(f"data/{key}")
    if (
        stride != torch.empty(shape, device="meta").stride()
        or count != math.prod(shape)
        or size != count * dtype.itemsize
        or begin + size > position + nbytes
    ):
        raise _Unusual
    return _Elements(begin, shape, dtype)


class _TensorUnpickler(pickle.Unpickler):
    """An unpickler of ``torch.save``'s description of a plain tensor, which runs no code."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _described
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return partial(_STORAGES.__getitem__, name)
        raise _Unusual

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str, int]:
        _, dtype_of, key, _, count = pid
        return dtype_of(), str(key), int(count)


def _described(
    storage: tuple[torch.dtype, str, int],
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    *_: Any,
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, str, int]:
    if offset:
        raise _Unusual
    dtype, key, count = storage
    return tuple(shape), tuple(stride), dtype, key, count


def _read(handle: int, position: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    _fill(memoryview(data), handle, position)
    return bytes(data)


def _read_into(memory: Tensor, handle: int, position: int) -> None:
    _fill(memory.reshape(-1).view(torch.uint8).numpy().data, handle, position)


def _fill(view: memoryview, handle: int, position: int) -> None:
    done = 0
    while done < len(view):
        nbytes = read_at(handle, view[done:], position + done)
        if not nbytes:
            msg = f"the file ends at byte {position + done}"
            raise EOFError(msg)
        done += nbytes
