"""The safetensors format: a header that says where each tensor's bytes are, then the bytes.

https://github.com/huggingface/safetensors: eight bytes with the header's length, the header as JSON, the
tensors, little end first. Read here piece by piece, so that a rank reads what it holds and no more.
"""

import ctypes
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core.errors import RankFailedError, StateError
from tp_core.internal import write_atomically
from tp_core.state import plain_name

from tp_shard._shards._slices import ShardTable, unwrap
from tp_shard._state._state_dict import is_writer, stream

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""The names of types in files."""
_TYPES = {name: dtype for dtype, name in DTYPES.items()}

_INDEX = ".safetensors.index.json"
_MAX_HEADER = 100_000_000  # as the format's own library has it
_BLOCK = 4 << 20  # what is read at once where a shard is made of short runs
_LONG = 64 << 10  # a run of that many bytes is worth a read of its own


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file.

    Attributes:
        path: The file.
        dtype: The type of its elements.
        shape: Its shape.
        offset: Where in the file its bytes begin.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class TensorFiles:
    """The tensors of one or several safetensors files, which stay open until the end of a ``with`` block.

    Args:
        path: A file, or a folder with one or several, with or without an index.

    Raises:
        FileNotFoundError: There is no such file, or none in the folder.
        StateError: A header or the index is damaged, or names are in two files.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._open = ExitStack()
        self._files: dict[Path, BinaryIO] = {}
        if sys.byteorder != "little":
            msg = "safetensors files are little-endian, and this machine is not"
            raise StateError(msg)
        self.tensors: dict[str, StoredTensor] = {}
        for file, names in _files_of(self.path):
            found = _read_header(file)
            for name in found if names is None else names:
                if name not in found:
                    msg = f"the index of {self.path} has {name!r} in {file.name}, which lacks it"
                    raise StateError(msg)
                if name in self.tensors:
                    msg = f"{name!r} is in two files: {self.tensors[name].path.name} and {file.name}"
                    raise StateError(msg)
                self.tensors[name] = found[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def fill(self, name: str, offsets: tuple[int, ...], target: Tensor) -> None:
        """Read a rectangular part of a tensor.

        No more memory is taken than 4 MiB beside ``target``, on the CPU, of the tensor's own type.

        Args:
            name: Which tensor.
            offsets: Where the part begins, in each dimension.
            target: What is filled, of the shape of the part; contiguous in a tensor of the CPU is fastest.

        Raises:
            OSError: The file cannot be read.
            StateError: The file has become shorter since it was opened.
        """
        stored = self.tensors[name]
        file = self._files.get(stored.path)
        if file is None:
            file = self._files[stored.path] = self._open.enter_context(stored.path.open("rb", buffering=0))
        if target.numel():
            _Reader(file, stored).fill(offsets, target)


class _Reader:
    """Reads parts of one tensor.

    Elements that lie side by side in the file are a run. Long runs are read into their place at once, short
    ones by the block, with what lies between them.
    """

    def __init__(self, file: BinaryIO, stored: StoredTensor) -> None:
        self._file, self._stored = file, stored

    def fill(self, offsets: tuple[int, ...], target: Tensor) -> None:
        shape, sizes = self._stored.shape, tuple(target.shape)
        if not shape:
            self._run(0, target.view(1))
            return
        # All dimensions behind this one are taken whole: a run is what lies in it.
        dim = max((i for i, (n, m) in enumerate(zip(shape, sizes, strict=True)) if n != m), default=0)
        inner = math.prod(shape[dim + 1 :])
        row, column = shape[dim] * inner, offsets[dim] * inner
        if dim == 0:
            self._run(column, target)
            return
        for prefix in itertools.product(*map(range, sizes[: dim - 1])):
            first = 0  # the number of the first row, of those along the dimension before
            for n, at in zip(
                shape[:dim], (*map(sum, zip(prefix, offsets, strict=False)), offsets[dim - 1]), strict=True
            ):
                first = first * n + at
            self._rows(first, row, column, target[prefix])

    def _rows(self, first: int, row: int, column: int, target: Tensor) -> None:
        """Fill ``target`` from rows of ``row`` elements, of each those from ``column`` on."""
        itemsize = self._stored.dtype.itemsize
        run = target[0].numel()
        if run * itemsize >= _LONG:
            for i, part in enumerate(target.unbind()):
                self._run((first + i) * row + column, part)
            return
        count = max(1, _BLOCK // (row * itemsize))
        for start in range(0, target.size(0), count):
            part = target[start : start + count]
            found = self._read((first + start) * row + column, (part.size(0) - 1) * row + run)
            part.copy_(found.as_strided((part.size(0), run), (row, 1)).reshape(part.shape))

    def _run(self, start: int, target: Tensor) -> None:
        if not target.is_contiguous():
            step = target[0].numel()
            for i, part in enumerate(target.unbind()):
                self._run(start + i * step, part)
            return
        flat = target.view(-1)
        if flat.device.type == "cpu" and flat.dtype == self._stored.dtype:
            self._read_into(start, flat)
            return
        for part in flat.split(_BLOCK // self._stored.dtype.itemsize):
            part.copy_(self._read(start, part.numel()))
            start += part.numel()

    def _read(self, start: int, count: int) -> Tensor:
        found = torch.empty(count, dtype=self._stored.dtype)
        self._read_into(start, found)
        return found

    def _read_into(self, start: int, flat: Tensor) -> None:
        stored = self._stored
        memory = memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")
        at = stored.offset + start * stored.dtype.itemsize
        while memory:
            nbytes = os.preadv(self._file.fileno(), [memory], at)
            if nbytes == 0:
                msg = f"{stored.path} is cut off at byte {at}"
                raise StateError(msg)
            memory, at = memory[nbytes:], at + nbytes


def _files_of(path: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Yield the files, each with the names that an index says are in it; ``None`` for all."""
    if path.is_file() and not path.name.endswith(_INDEX):
        yield path, None
        return
    indexes = [path] if path.is_file() else sorted(path.glob(f"*{_INDEX}"))
    if len(indexes) > 1:
        msg = f"{path} has several indexes, {', '.join(i.name for i in indexes)}: give the one that is meant"
        raise StateError(msg)
    if not indexes:
        files = sorted(path.glob("*.safetensors"))
        if not files:
            msg = f"there is no safetensors file at {path}"
            raise FileNotFoundError(msg)
        for file in files:
            yield file, None
        return
    (index,) = indexes
    try:
        places: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        names: dict[str, list[str]] = {}
        for name, file_name in places.items():
            names.setdefault(file_name, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{index} is damaged: {error!r}"
        raise StateError(msg) from error
    for file_name, its in names.items():
        if Path(file_name).name != file_name:
            msg = f"{index} names {file_name!r}, which is not a file beside it"
            raise StateError(msg)
        yield index.parent / file_name, its


def _read_header(path: Path) -> dict[str, StoredTensor]:
    if not path.is_file():
        msg = f"there is no file {path}"
        raise FileNotFoundError(msg)
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER, size - 8):
                msg = f"a header of {length} bytes in a file of {size}"
                raise ValueError(msg)
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _stored(path, entry, 8 + length, size) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{path} is damaged: {error!r}"
        raise StateError(msg) from error


def _stored(path: Path, entry: Any, begin: int, size: int) -> StoredTensor:
    dtype, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if any(not isinstance(n, int) or n < 0 for n in (*shape, start)):
        msg = f"{entry} has what is not a size"
        raise ValueError(msg)
    if stop - start != math.prod(shape) * dtype.itemsize or begin + stop > size:
        msg = f"{entry} does not fit a file of {size} bytes"
        raise ValueError(msg)
    return StoredTensor(path, dtype, shape, begin + start)


# -- Files in the safetensors format, written tensor by tensor ------------------------------------


def export(model: nn.Module, path: str | os.PathLike[str], *, prefix: str = "") -> None:
    """Write the whole state of a model to a safetensors file that anyone can read.

    Rank 0 writes; it holds one whole tensor at a time, in host memory. A crash leaves an old file
    of that name as it was.

    The format is that of https://github.com/huggingface/safetensors: the length of a JSON header,
    the header, then the tensors' bytes. Tied tensors are written under each of their names.

    Args:
        model: The model; call it on every rank.
        path: The file.
        prefix: Put before every name.

    Raises:
        StateError: A tensor has a type that the format does not know.
        OSError: The file cannot be written; raised on rank 0.
        RankFailedError: Rank 0 could not write it; raised on the other ranks.

    Collectives: a message of every shard, and a broadcast of how it went.
    """
    model = unwrap(model)
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    header = _header(model, state, prefix)
    tensors = stream(model, state, to="rank0")
    failure: OSError | None = None
    if is_writer():
        try:
            _write(Path(path), header, tensors)
        except OSError as error:
            failure = error
    # On the other ranks there is nothing to see, and on rank 0 the rest must be taken in case of failure.
    for _ in tensors:
        pass
    message = _tell(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if message is not None:
        msg = f"rank 0 could not write {os.fspath(path)}: {message}"
        raise RankFailedError(msg)


def _tell(message: str | None) -> str | None:
    """Return rank 0's message on all ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return message
    values = [message]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _header(model: nn.Module, state: dict[str, Tensor], prefix: str) -> bytes:
    table = ShardTable(model)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in state.items():
        if tensor.dtype not in DTYPES:
            msg = f"{name} has type {tensor.dtype}, which a safetensors file cannot hold"
            raise StateError(msg)
        shard = table.get(name)
        shape = tuple(tensor.shape) if shard is None else shard.full_shape
        nbytes = torch.Size(shape).numel() * tensor.element_size()
        entries[prefix + plain_name(name)] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _write(path: Path, header: bytes, tensors: Iterator[tuple[str, Tensor]]) -> None:
    def write(part: Path) -> None:
        with part.open("wb") as file:
            file.write(header)
            for _, tensor in tensors:
                _write_tensor(file, tensor)

    write_atomically(write, path)


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    """Write the bytes of a tensor, little end first, without a copy of them."""
    if sys.byteorder != "little":
        msg = "safetensors files are little-endian, and this machine is not"
        raise StateError(msg)
    flat = tensor.contiguous()
    if flat.numel():  # past numpy, which torch can do without and which has no bfloat16
        nbytes = flat.numel() * flat.element_size()
        file.write(memoryview((ctypes.c_char * nbytes).from_address(flat.data_ptr())))
