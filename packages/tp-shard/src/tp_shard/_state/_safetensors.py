"""Safetensors files of whole models: each rank reads its own slices, and all ranks write a file together.

The library reads the files. It only writes tensors that are all in memory, so this module writes them one by
one, in the format of https://github.com/huggingface/safetensors: eight bytes with the header's length, the
header as JSON, and the tensors in little-endian order.
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from tp_core.errors import RankFailedError, StateError
from tp_core.internal import write_atomically
from tp_core.state import plain_name

from tp_shard._shards._slices import ShardTable, unwrap
from tp_shard._state._checkpoint import gather_objects
from tp_shard._state._state_dict import first_rank, is_first_rank, stream

_DTYPES = {
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
_INDEX = ".safetensors.index.json"


class TensorFiles:
    """The tensors of one or several safetensors files.

    Args:
        path: A file, or a folder with one or several, with or without an index.

    Attributes:
        path: The given path.
        shapes: The shape of each tensor, by name.

    Raises:
        FileNotFoundError: There is no such file, or none in the folder.
        StateError: A header or the index is damaged, or names are in two files.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for file, names in _files_of(self.path):
            with _opened(file) as stored:
                found = dict.fromkeys(stored.keys())  # in their order: messages name the first ones
                for name in found if names is None else names:
                    if name not in found:
                        msg = f"the index of {self.path} has {name!r} in {file.name}, which lacks it"
                        raise StateError(msg)
                    if name in self.shapes:
                        msg = f"{name!r} is in two files: {self._files[name].name} and {file.name}"
                        raise StateError(msg)
                    self.shapes[name] = tuple(stored.get_slice(name).get_shape())
                    self._files[name] = file

    def fill(self, name: str, offsets: tuple[int, ...], target: Tensor) -> None:
        """Read a rectangular part of a tensor.

        Args:
            name: The name of the tensor.
            offsets: The first index of the part, in each dimension.
            target: The tensor to fill, of the shape of the part.

        Raises:
            OSError: The file cannot be read.
            StateError: The file was damaged after its header was read.
        """
        # Opened again for each part: the pages read of a mapped file count as this process's memory until the
        # file is closed. So at most the largest tensor counts (`a_rank_reads_its_own_slices_alone`).
        with _opened(self._files[name]) as stored:
            part = tuple(slice(n, n + size) for n, size in zip(offsets, target.shape, strict=True))
            target.copy_(stored.get_slice(name)[part])  # a view of the file: the one copy is this one


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Map a file into memory; an error of the library becomes one that names the file."""
    from safetensors import SafetensorError, safe_open  # here, so that other programs need not load it

    try:
        with safe_open(path, framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        msg = f"{path} is damaged: {error}"
        raise StateError(msg) from error


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
    for file_name, own in names.items():
        if Path(file_name).name != file_name:
            msg = f"{index} names {file_name!r}, which is not a file beside it"
            raise StateError(msg)
        yield index.parent / file_name, own


def export(model: nn.Module, path: str | os.PathLike[str], *, prefix: str = "") -> None:
    """Write the whole state of a model to a safetensors file.

    Rank 0 writes the file, and holds one whole tensor at a time, in host memory. In a mesh with an axis for
    the stages of a pipeline, the first rank of each stage writes the stage's file. A crash leaves an old file
    with this name as it was.

    The format is described at https://github.com/huggingface/safetensors: the length of a JSON header, the
    header, then the tensors' bytes. Tied tensors are written under each of their names.

    Args:
        model: The model; call it on every rank.
        path: The file.
        prefix: A prefix for every name.

    Raises:
        StateError: A tensor has a type that the format does not have.
        OSError: The file cannot be written; raised on rank 0.
        RankFailedError: Rank 0 could not write it; raised on the other ranks.

    Collectives: a point-to-point message of every shard to rank 0, and an all-gather of the outcomes.
    """
    model = unwrap(model)
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    header = _header(model, state, prefix)
    tensors = stream(model, state, to="rank0")
    failure: OSError | None = None
    if is_first_rank():
        try:
            _write(Path(path), header, tensors)
        except OSError as error:
            failure = error
    # On the other ranks this loop sends their shards. On rank 0 it receives the rest after a failed write, or
    # the others would wait in their sends (`test_all_ranks_learn_that_rank_0_could_not_write`).
    for _ in tensors:
        pass
    messages = gather_objects(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    message = messages[first_rank()]
    if message is not None:
        msg = f"rank {first_rank()} could not write {os.fspath(path)}: {message}"
        raise RankFailedError(msg)


def _header(model: nn.Module, state: dict[str, Tensor], prefix: str) -> bytes:
    table = ShardTable(model)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in state.items():
        if tensor.dtype not in _DTYPES:
            msg = f"{name} has type {tensor.dtype}, which a safetensors file cannot hold"
            raise StateError(msg)
        shard = table.get(name)
        shape = tuple(tensor.shape) if shard is None else shard.full_shape
        nbytes = torch.Size(shape).numel() * tensor.element_size()
        entries[prefix + plain_name(name)] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the tensors to 8 bytes
    return len(text).to_bytes(8, "little") + text


def _write(path: Path, header: bytes, tensors: Iterator[tuple[str, Tensor]]) -> None:
    def write(part: Path) -> None:
        with part.open("wb") as file:
            file.write(header)
            for _, tensor in tensors:
                _write_tensor(file, tensor)

    write_atomically(write, path)


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    """Write the bytes of a tensor in little-endian order, without a copy."""
    if sys.byteorder != "little":
        msg = "safetensors files are little-endian, and this machine is not"
        raise StateError(msg)
    flat = tensor.contiguous()
    if flat.numel():  # without numpy, which is optional for torch and has no bfloat16
        nbytes = flat.numel() * flat.element_size()
        file.write(memoryview((ctypes.c_char * nbytes).from_address(flat.data_ptr())))
