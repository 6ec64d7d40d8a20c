"""Tensors on the disk, by name: their shapes and dtypes, and what can be filled from them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tp_core.errors import StateError
from tp_core.modules._parameters import TensorSlice


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The shape and dtype of a written tensor.

    Attributes:
        shape: Its whole shape.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size of its elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class StoredTensors(ABC):
    """Tensors by name, on the disk.

    Attributes:
        path: Their file or folder.
        infos: The shape and dtype of each tensor, in the order of the names.
    """

    path: Path
    infos: Mapping[str, TensorInfo]

    @abstractmethod
    def fill(self, targets: Mapping[str, Tensor | TensorSlice]) -> None:
        """Fill whole tensors, or a rank's slices of them.

        Raises:
            StateError: A tensor is missing or has another shape, which is found before any target is
                touched; or a file is damaged.
        """


def check_targets(
    targets: Mapping[str, Tensor | TensorSlice], infos: Mapping[str, TensorInfo], place: Path
) -> None:
    """Check that what is to be filled is in a place with these tensors, in the same shapes."""
    for name, target in targets.items():
        if name not in infos:
            msg = f"{place} lacks {name!r}; it has {', '.join(list(infos)[:5])} ..."
            raise StateError(msg)
        if tuple(target.shape) != infos[name].shape:
            msg = f"{place} has {name!r} of shape {infos[name].shape}, not {tuple(target.shape)}"
            raise StateError(msg)
