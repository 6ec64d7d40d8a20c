"""Files in the safetensors format, written tensor by tensor."""

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core.errors import RankFailedError, StateError
from tp_core.internal import write_atomically
from tp_core.state import plain_name

from tp_shard._shards._table import ShardTable, unwrap
from tp_shard._state._safetensors import DTYPES
from tp_shard._state._state_dict import is_writer, stream

__all__ = ["export"]


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
