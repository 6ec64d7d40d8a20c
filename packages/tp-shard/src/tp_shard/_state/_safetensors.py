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
from torch import Tensor
from tp_core.errors import StateError

__all__ = ["DTYPES", "StoredTensor", "TensorFiles"]

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
