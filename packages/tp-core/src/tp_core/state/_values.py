"""Nested values of anything that keeps state, with their tensors by name: what a run saves besides models."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_core._tensors._sharding import is_dtensor
from tp_core._tensors._slices import TensorSlice
from tp_core.errors import StateError
from tp_core.state._files import StoredTensors
from tp_core.state._nested import joined, refs_in, split
from tp_core.state._places import slice_of
from tp_core.state._plain import StoredTensor, to_json

__all__ = ["collect_values", "restore_values"]


def collect_values(
    name: str, value: Any, *, own: bool = False
) -> tuple[Any, dict[str, Tensor | TensorSlice]]:
    """Return a nested value as a plain one, and the tensors in it by the names that stand for them.

    Of a DTensor over all ranks it is this rank's slice; of one over some of them what this rank holds, as a
    tensor of its own.

    Args:
        name: What all of the tensors' names begin with.
        value: Tensors and plain values, in lists, tuples and dicts.
        own: Whether it is this rank's own state: what it holds of DTensors, too.

    Raises:
        StateError: ``value`` has something else in it.
    """
    tensors: dict[str, Tensor | TensorSlice] = {}

    def put(wanted: str, tensor: Tensor, _: Tensor | None) -> StoredTensor:
        while wanted in tensors:
            wanted += "_"
        tensors[wanted] = _held(tensor.detach(), own=own)
        return StoredTensor(wanted, like_parameter=False)

    plain = split(value, name, None, put)
    to_json(
        f"the state {name.removeprefix('state.')!r}", plain
    )  # which says what cannot be saved, before anything is written
    return plain, tensors


def _held(tensor: Tensor, *, own: bool) -> Tensor | TensorSlice:
    if not is_dtensor(tensor):
        return tensor
    if own or tensor.device_mesh.size() < dist.get_world_size():
        local: Tensor = tensor.to_local()
        return local
    return slice_of(lambda _, part: part, tensor, tensor)


def restore_values(value: Any, stored: StoredTensors) -> Any:
    """Return what :func:`collect_values` was given, with its tensors on the CPU.

    Raises:
        StateError: A tensor is missing, or a file is damaged.
    """
    infos: Mapping[str, Any] = stored.infos
    names = [ref.name for ref in refs_in(value)]
    missing = next((name for name in names if name not in infos), None)
    if missing is not None:
        msg = f"{stored.path} is damaged: it lacks {missing!r}"
        raise StateError(msg)
    tensors = {name: torch.empty(infos[name].shape, dtype=infos[name].dtype) for name in names}
    stored.fill(tensors)
    return joined(value, None, lambda ref, _: tensors[ref.name])
