"""The tensors of state that no rank splits: one file, which one rank writes.

What ranks split goes through torch.distributed.checkpoint; for a whole state that takes ten times as
long, and half a second to import.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from tp_core import TensorInfo, TensorSlice
from tp_core.errors import StateError

from tp_trainer._files import load_state

__all__ = ["fill_from_whole", "infos_of_whole", "read_whole", "write_whole"]


def write_whole(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors by name.

    Raises:
        OSError: The disk is full, or writing is not allowed.
    """
    # torch writes whole storages: a view would bring all of a larger one with it.
    own = {
        name: tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        for name, tensor in tensors.items()
    }
    with path.open("wb") as file:
        torch.save(own, file)


def read_whole(path: Path) -> Mapping[str, Tensor]:
    """Return what :func:`write_whole` wrote, mapped: what is not looked at is not read.

    Raises:
        StateError: The file is damaged.
    """
    return load_state(path, mapped=True)


def infos_of_whole(stored: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """Return what is known of each tensor, in the order of the names."""
    return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(stored.items())}


def fill_from_whole(
    targets: Mapping[str, Tensor | TensorSlice], stored: Mapping[str, Tensor], path: Path
) -> None:
    """Fill whole tensors, or a rank's slices of them, with what was read from ``path``.

    Raises:
        StateError: A tensor is missing there, or has another shape; no target has been touched.
    """
    for name, target in targets.items():
        if name not in stored:
            msg = f"{path} lacks {name!r}; it has {', '.join(list(stored)[:5])} ..."
            raise StateError(msg)
        if tuple(target.shape) != tuple(stored[name].shape):
            msg = f"{path} has {name!r} of shape {tuple(stored[name].shape)}, not {tuple(target.shape)}"
            raise StateError(msg)
    for name, target in targets.items():
        parts = target.parts if isinstance(target, TensorSlice) else [((0,) * target.dim(), target)]
        for start, part in parts:
            place = tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))
            part.copy_(stored[name][place])
