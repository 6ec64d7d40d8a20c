"""Pickling a program with its large arrays and tensors apart, so that workers share one copy of them."""

import ctypes
import io
import pickle
import sys
from typing import Any

__all__ = ["LARGE", "dumps_apart", "is_plain_memory"]

LARGE = 64 << 10
"""Buffers of at least so many bytes are kept apart."""


def dumps_apart(obj: Any, buffers: list[memoryview]) -> bytes:
    """Pickle an object with cloudpickle; add its large buffers to ``buffers``, in order.

    ``pickle.loads`` undoes it, given buffers that can be written to. Tensors that share their memory
    share it afterwards, too.
    """
    import cloudpickle

    def keep_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        buffers.append(raw)
        return False

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(_reducers_of_multiprocessing())

    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None:
        storages: dict[int, _Storage] = {}
        Pickler.dispatch_table[tensor] = lambda value: _reduce_tensor(value, storages)
    stream = io.BytesIO()
    Pickler(stream, protocol=5, buffer_callback=keep_small).dump(obj)
    return stream.getvalue()


def _reducers_of_multiprocessing() -> dict[type, Any]:
    """Return how its pipes and shared values are pickled; torch adds its tensors there, which are ours."""
    reduction = sys.modules.get("multiprocessing.reduction")
    if reduction is None:
        return {}
    reducers = reduction.ForkingPickler(io.BytesIO()).dispatch_table
    # Those of multiprocessing.reduction itself are of methods and partial objects, as cloudpickle's are.
    ours = {"multiprocessing.connection", "multiprocessing.heap", "multiprocessing.sharedctypes"}
    return {kind: reduce for kind, reduce in reducers.items() if reduce.__module__ in ours}


def is_plain_memory(tensor: Any) -> bool:
    """Whether a tensor is nothing but values in the host's memory, which a view can stand for."""
    import torch

    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class _Storage:
    """The memory of one or more tensors; the pickler meets the same object each time."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        nbytes = self._storage.nbytes()
        view = (ctypes.c_char * nbytes).from_address(self._storage.data_ptr())
        view.owner = self._storage  # which must outlive it
        return _rebuild_storage, (pickle.PickleBuffer(view),)


def _reduce_tensor(tensor: Any, storages: dict[int, _Storage]) -> Any:
    if not is_plain_memory(tensor) or tensor.untyped_storage().nbytes() < LARGE or vars(tensor):
        return tensor.__reduce_ex__(5)
    storage = tensor.untyped_storage()
    key = storage.data_ptr()
    holder = storages.get(key) or storages.setdefault(key, _Storage(storage))
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return _rebuild_tensor, (holder, tensor.dtype, *place)


def _rebuild_storage(buffer: Any) -> Any:
    import torch

    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _rebuild_tensor(storage: Any, dtype: Any, offset: int, shape: Any, stride: Any) -> Any:
    import torch

    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
