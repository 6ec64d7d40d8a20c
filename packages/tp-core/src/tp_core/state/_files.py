"""The tensors of a state on the disk: one file, or a folder that several ranks have written together."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tp_core.errors import StateError
from tp_core.files._atomic import showing_system_errors
from tp_core.modules._parameters import TensorSlice, fill_from_whole, is_dtensor, local_parts
from tp_core.tensors._digests import INDEX, DigestingFile, FileRecord, without_checksums
from tp_core.tensors._files import read_tensors, tensor_infos
from tp_core.tensors._stored import StoredTensors, TensorInfo, check_targets

# -- Where a tensor of a checkpoint goes: a whole one, a slice of one, this rank's part of a DTensor


Cut = Callable[[Tensor, Tensor | TensorSlice], Tensor | TensorSlice]
"""``cut(parameter, value)`` returns ``value`` with its place in the whole tensor: ``Session.as_slice``."""


def slice_of(cut: Cut, parameter: Tensor, value: Tensor) -> Tensor | TensorSlice:
    """Return ``value``, which has its parameter's shape, with where it lies in the whole: views, no copies.

    Raises:
        StateError: A DTensor is a sum that is yet to be made.
    """
    if not is_dtensor(value):
        return cut(parameter, value)
    return _within(cut, parameter, value, value.to_local())


def is_cut(cut: Cut, parameter: Tensor) -> bool:
    """Return whether this rank has only a part of the parameter."""
    return is_dtensor(parameter) or isinstance(cut(parameter, parameter), TensorSlice)


class SliceBuffer:
    """Memory for this rank's part of a tensor, to fill and then take.

    Args:
        cut: Which part of a whole tensor this rank's is.
        like: A parameter, or an entry of the model's state: its shape, its cut and its mesh are taken over.
        dtype: The type of the memory, which is new, on the CPU; ``None`` for the memory of ``like`` itself.
    """

    def __init__(self, cut: Cut, like: Tensor, dtype: torch.dtype | None) -> None:
        self._like = like
        self._is_own = dtype is None and not like.is_meta
        local: Tensor = like.detach().to_local() if is_dtensor(like) else like.detach()  # type: ignore[attr-defined]  # a DTensor
        if self._is_own:
            self._memory = local
        else:
            self._memory = torch.empty(local.shape, dtype=dtype or like.dtype)
        self.target: Tensor | TensorSlice = (
            _within(cut, like, like, self._memory) if is_dtensor(like) else cut(like, self._memory)
        )

    def take(self) -> Tensor:
        """Return the tensor: a DTensor where ``like`` is one."""
        like: Any = self._like
        if self._is_own:
            return self._like
        if not is_dtensor(like):
            return self._memory
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            self._memory.to(like.to_local().device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


def _within(cut: Cut, parameter: Tensor, dtensor: Any, local: Tensor) -> Tensor | TensorSlice:
    """Return which part of the whole this rank's part of a DTensor is; ``local`` has that part's shape."""
    parts = _parts(dtensor, local) if dtensor.numel() else []
    part = cut(parameter, TensorSlice(tuple(dtensor.shape), parts))
    if not torch.Size(part.shape).numel():  # no rank would write it
        return torch.empty(part.shape, dtype=local.dtype)
    return part


def _parts(dtensor: Any, local: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return where this rank's part of a DTensor begins, with ``local``, which has its shape."""
    if any(placement.is_partial() for placement in dtensor.placements):
        msg = (
            f"a DTensor of shape {tuple(dtensor.shape)} has the placements {dtensor.placements}: a sum that "
            "is yet to be made cannot be saved; redistribute it first"
        )
        raise StateError(msg)
    ((start, _),) = local_parts(dtensor)
    if local.numel():
        return [(start, local)]
    return []


# -- The tensors of a state on the disk: one file, or a folder that several ranks have written together
# torch.distributed.checkpoint plans who writes what of a split state. For a whole state that takes ten times
# as long, and half a second to import, so torch.save writes it.


TENSORS_FILE = "tensors.pt"
"""The name of the file in a trainer's checkpoint."""
TENSORS_FOLDER = "tensors"
"""The name of the folder in a trainer's checkpoint, where ranks have split the state."""


class _Folder(StoredTensors):
    def __init__(self, path: Path) -> None:
        self.path, self.infos = path, tensor_infos(path)

    def fill(self, targets: Mapping[str, Tensor | TensorSlice]) -> None:
        read_tensors(dict(targets), self.path)


class _File(StoredTensors):
    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: Mapping[str, Tensor] = load_state(path, mapped=True)  # what is not used is not read
        for name, value in self._tensors.items():
            if not isinstance(value, Tensor):
                msg = f"{path} has {name!r}, which is {type(value).__name__} and not a tensor"
                raise StateError(msg)
        self.infos = {n: TensorInfo(tuple(t.shape), t.dtype) for n, t in sorted(self._tensors.items())}

    def fill(self, targets: Mapping[str, Tensor | TensorSlice]) -> None:
        check_targets(targets, self.infos, self.path)
        for name, target in targets.items():
            fill_from_whole(target, self._tensors[name])


def open_tensors(path: str | os.PathLike[str]) -> StoredTensors:
    """Return the tensors of a state: of a file, of a folder, or of a trainer's checkpoint.

    Raises:
        FileNotFoundError: The folder has no tensors.
        StateError: The file, or the index of the folder, is damaged.
    """
    path = Path(path)
    if path.is_file():
        return _File(path)
    if not (path / INDEX).is_file():
        if (path / TENSORS_FILE).is_file():
            return _File(path / TENSORS_FILE)
        if (path / TENSORS_FOLDER).is_dir():
            return _Folder(path / TENSORS_FOLDER)
    return _Folder(path)


def write_whole(tensors: Mapping[str, Tensor], path: Path) -> FileRecord:
    """Write tensors that this rank has whole into one file, and flush it to the disk.

    Returns:
        The size and the digest of the bytes that were passed to the system.

    Raises:
        OSError: The disk is full, or writing is not allowed.
    """
    # torch writes whole storages: a view would add all of its larger tensor to the file.
    own = {
        name: tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        for name, tensor in tensors.items()
    }
    with path.open("wb") as file:
        digesting = DigestingFile(file)
        with without_checksums(), showing_system_errors(path):
            torch.save(own, digesting)  # type: ignore[arg-type]  # it asks for write() and flush() alone
        digesting.flush()
        os.fsync(file.fileno())
        return digesting.record()


def _reason(error: Exception) -> str:
    """Return torch's reason to refuse a file in one line; its own text advises to run the file's code."""
    text = str(error)
    if match := re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", text):
        return f"it holds {match[1]}, and only tensors and plain values are read, since others may run code"
    if "Weights only load failed" in text:
        return "it is damaged, or was not written by torch.save"
    return " ".join(text.split())


def load_state(path: str | os.PathLike[str], *, mapped: bool = False) -> Mapping[str, Any]:
    """Read a file of ``torch.save``, onto the CPU or mapped; it never runs the file's code.

    Raises:
        OSError: The file does not exist, or may not be read.
        StateError: The file is damaged, or holds something else than tensors and plain values.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as error:  # torch has a dozen errors for a damaged file
        msg = f"{Path(path)} cannot be read as saved state: {_reason(error)}"
        raise StateError(msg) from error
    if not isinstance(state, Mapping):
        msg = f"{Path(path)} holds {type(state).__name__}, and a state is a dict of tensors"
        raise StateError(msg)
    return state
