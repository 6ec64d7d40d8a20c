"""Parts of one tensor that ``torch.save`` has written somewhere in a file, read straight into their place.

torch.load reads all of the tensor into new memory first. Here its archive is asked where the elements lie,
and which shape and type they have; of anything unusual torch.load is still asked.
"""

import io
import math
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Part", "fill_from_archive"]

_TAIL = 1 << 13  # the list of an archive's few files lies at its end
_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of the name and of what follows it, before the content

_STORAGES = {  # what torch.save calls memory of a type
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
    """A part of a tensor: where it begins, and how far it reaches, in each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


class _Elements(NamedTuple):
    """Where the elements of a tensor lie in a file, one after the other."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Unusual(Exception):  # noqa: N818 - caught right here
    """An archive that this module leaves to torch."""


def fill_from_archive(target: Tensor, handle: int, position: int, nbytes: int, part: Part) -> None:
    """Fill a tensor with a part of the one whose archive lies at ``position`` in a file.

    Args:
        target: Of the shape of the part; on any device, of any type that the tensor's can be copied to.
        handle: The file.
        position: Where the archive begins.
        nbytes: How long it is.
        part: Which part.

    Raises:
        Exception: The archive is damaged: whatever torch raises then.
    """
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
    # The rows of the part, whole: they lie one after the other.
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
    """Return where the elements of the archive's tensor lie.

    Raises:
        _Unusual: The elements are not contiguous, or torch writes no such archive of a plain tensor.
    """
    tail = min(nbytes, _TAIL)
    with zipfile.ZipFile(io.BytesIO(_read(handle, position + nbytes - tail, tail))) as archive:
        # Where the tail begins after the archive, zipfile counts from the tail.
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
    shape, stride, dtype, key, count = _Unpickler(io.BytesIO(_read(handle, *content("data.pkl")))).load()
    begin, size = content(f"data/{key}")
    if (
        stride != torch.empty(shape, device="meta").stride()
        or count != math.prod(shape)
        or size != count * dtype.itemsize
        or begin + size > position + nbytes
    ):
        raise _Unusual
    return _Elements(begin, shape, dtype)


class _Unpickler(pickle.Unpickler):
    """Reads what ``torch.save`` says of a plain tensor, and runs nothing."""

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
    """Fill memory with what lies in a file.

    Raises:
        EOFError: The file ends before.
    """
    done = 0
    while done < len(view):
        nbytes = os.preadv(handle, [view[done:]], position + done)
        if not nbytes:
            msg = f"the file ends at byte {position + done}"
            raise EOFError(msg)
        done += nbytes
