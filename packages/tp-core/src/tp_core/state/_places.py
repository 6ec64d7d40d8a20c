"""Where a tensor of a checkpoint goes: a whole one, a slice of one, this rank's part of a DTensor."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tp_core._tensors._sharding import is_dtensor
from tp_core._tensors._slices import TensorSlice
from tp_core.errors import StateError

__all__ = ["Cut", "Place", "fill_from_whole", "is_cut", "slice_of", "whole"]

Cut = Callable[[Tensor, Tensor | TensorSlice], Tensor | TensorSlice]
"""``cut(parameter, value)`` tells which part of a whole tensor ``value`` is: ``Session.as_slice``."""


def slice_of(cut: Cut, parameter: Tensor, value: Tensor) -> Tensor | TensorSlice:
    """Return ``value``, which has its parameter's shape, with where it lies in the whole: views, no copies.

    Raises:
        StateError: A DTensor is a sum that is yet to be made.
    """
    if not is_dtensor(value):
        return cut(parameter, value)
    return _within(cut, parameter, value, value.to_local())


def is_cut(cut: Cut, parameter: Tensor) -> bool:
    """Whether this rank has a part of the parameter only."""
    return is_dtensor(parameter) or isinstance(cut(parameter, parameter), TensorSlice)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole value of a DTensor, or of what has its method ``full_tensor``; others as they are.

    Collectives: those of ``full_tensor``.
    """
    if not is_dtensor(tensor):
        put_together: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
        return tensor if put_together is None else put_together()
    device = tensor.device_mesh.device_type
    # Parts that the host keeps (offload): its ranks' group exchanges on the device alone.
    there: Any = tensor if tensor.device.type == device else tensor.to(device)
    full: Tensor = there.full_tensor()
    return full


class Place:
    """Memory for what this rank holds of a tensor, to be filled and then taken.

    Args:
        cut: Which part of a whole tensor this rank's is.
        like: A parameter, or an entry of the model's state: its shape, its cut and its mesh are taken over.
        dtype: The type of the memory, which is new, on the CPU; ``None`` for the memory of ``like`` itself.
    """

    def __init__(self, cut: Cut, like: Tensor, dtype: torch.dtype | None) -> None:
        self._like = like
        self._is_own = dtype is None and not like.is_meta
        local: Tensor = like.detach().to_local() if is_dtensor(like) else like.detach()  # type: ignore[attr-defined]  # a DTensor
        self._memory = local if self._is_own else torch.empty(local.shape, dtype=dtype or like.dtype)
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


def fill_from_whole(target: Tensor | TensorSlice, value: Tensor) -> None:
    """Fill a tensor, or a rank's slice of it, with its part of a whole one.

    Args:
        target: What is filled, in place: a tensor of the shape of ``value``, or the parts of one.
        value: The whole tensor, of any type and on any device.
    """
    parts = target.parts if isinstance(target, TensorSlice) else [((0,) * target.dim(), target)]
    for start, part in parts:
        place = tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))
        part.copy_(value[place])


def _within(cut: Cut, parameter: Tensor, dtensor: Any, local: Tensor) -> Tensor | TensorSlice:
    """Return which part of the whole this rank's part of a DTensor is; ``local`` has that part's shape."""
    parts = _parts(dtensor, local) if dtensor.numel() else []
    found = cut(parameter, TensorSlice(tuple(dtensor.shape), parts))
    if not torch.Size(found.shape).numel():  # no rank would write it
        return torch.empty(found.shape, dtype=local.dtype)
    return found


def _parts(dtensor: Any, local: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return where this rank's part of a DTensor begins, with ``local``, which has its shape."""
    if any(placement.is_partial() for placement in dtensor.placements):
        msg = (
            f"a DTensor of shape {tuple(dtensor.shape)} has the placements {dtensor.placements}: a sum that "
            "is yet to be made cannot be saved; redistribute it first"
        )
        raise StateError(msg)
    # What torch.distributed.checkpoint asks DTensors for, by the same name as on our slices.
    (chunk,) = dtensor.__create_chunk_list__()
    return [(tuple(chunk.offsets), local)] if local.numel() else []
