"""The index of a folder of tensors, as JSON: which parts of each tensor are in which safetensors file."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp_core.errors import StateError
from tp_core.files._reads import is_absence, is_regular_file, retry_read
from tp_core.modules._parameters import TensorSlice, local_parts
from tp_core.tensors._digests import INDEX
from tp_core.tensors._safetensors import check_file, fill_from_file
from tp_core.tensors._stored import TensorInfo

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


class StoredPart(NamedTuple):
    """One part of a tensor: its offset in each dimension, its shape, and the name of its file."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A tensor in a folder; the parts do not overlap, and together they are all of it."""

    info: TensorInfo
    parts: list[StoredPart]


def dump_index(index: Mapping[str, IndexEntry]) -> str:
    return json.dumps(
        {
            name: {
                "dtype": str(entry.info.dtype).removeprefix("torch."),
                "shape": entry.info.shape,
                "parts": entry.parts,
            }
            for name, entry in sorted(index.items())
        }
    )


def read_index(folder: Path) -> dict[str, IndexEntry]:
    """Return what is in a folder, in the order of the names.

    Raises:
        FileNotFoundError: ``folder`` has no index.
        OSError: The index could not be read for some seconds.
        StateError: The index is damaged.
    """
    path = folder / INDEX
    if not retry_read(lambda: is_regular_file(path)):
        msg = f"there is no checkpoint at {folder}: it has no {INDEX}"
        raise FileNotFoundError(msg)
    try:
        entries = json.loads(retry_read(path.read_text))
        return {name: _entry(stored) for name, stored in sorted(entries.items())}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = f"{path} is damaged: {error!r}"
        raise StateError(msg) from error


def _entry(stored: Any) -> IndexEntry:
    shape = _sizes(stored["shape"])
    parts = []
    for offsets, sizes, file in stored["parts"]:
        part = StoredPart(_sizes(offsets), _sizes(sizes), file)
        ends = [a + n for a, n in zip(part.offsets, part.shape, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            msg = f"a part of {sizes} at {offsets} is not within {shape}"
            raise ValueError(msg)
        if Path(file).name != file:
            msg = f"{file!r} is not a file beside it"
            raise ValueError(msg)
        parts.append(part)
    return IndexEntry(TensorInfo(shape, _DTYPES[stored["dtype"]]), parts)


def _sizes(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        msg = f"{values} are not sizes"
        raise ValueError(msg)
    return tuple(values)


# -- reading ---------------------------------------------------------------------------------------


def read_into(
    targets: Mapping[str, Tensor | TensorSlice], index: Mapping[str, IndexEntry], folder: Path
) -> None:
    """Fill targets, whose names and shapes are the index's; the files are checked before any is touched."""
    infos: dict[str, dict[str, TensorInfo]] = {}
    slices: dict[str, dict[str, TensorSlice]] = {}
    for name, target in targets.items():
        entry = index[name]
        missing = sum(memory.numel() for _, memory in local_parts(target))
        for part in entry.parts:
            overlaps = list(_overlaps(target, part))
            missing -= sum(memory.numel() for _, memory in overlaps)
            if overlaps:
                infos.setdefault(part.file, {})[name] = TensorInfo(part.shape, entry.info.dtype)
                slices.setdefault(part.file, {})[name] = TensorSlice(part.shape, overlaps)
        if missing:
            msg = f"{folder / INDEX} is damaged: it lacks a part of {name!r}, or has one twice"
            raise StateError(msg)
    try:
        for file, expected in infos.items():
            retry_read(partial(check_file, folder / file, expected))
        for file, of_file in slices.items():
            retry_read(partial(fill_from_file, folder / file, of_file, infos[file]))
    except OSError as error:
        if not is_absence(error):
            raise
        msg = f"{folder} cannot be read: {error}"
        raise StateError(msg) from error


def _overlaps(target: Tensor | TensorSlice, part: StoredPart) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield what a stored part has of a target: the offsets within the part, and the memory."""
    for start, memory in local_parts(target):
        lows = [max(a, b) for a, b in zip(start, part.offsets, strict=True)]
        ends = [a + n for a, n in zip(start, memory.shape, strict=True)]
        highs = [min(end, b + n) for end, b, n in zip(ends, part.offsets, part.shape, strict=True)]
        if all(low < high for low, high in zip(lows, highs, strict=True)):
            place = tuple(slice(low - a, high - a) for low, high, a in zip(lows, highs, start, strict=True))
            within = tuple(low - b for low, b in zip(lows, part.offsets, strict=True))
            yield within, memory[place]
