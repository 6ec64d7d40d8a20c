"""Pickling with large buffers kept apart, so that they are copied once and never into a pickle."""

import copyreg
import ctypes
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tp_runner._workers._program_pickle import is_plain_memory

__all__ = ["pack", "pack_by_value", "unpack"]

OUT_OF_BAND = 2048
"""Buffers of at least so many bytes are kept apart; smaller ones cost less inside the pickle."""


def pack(obj: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle ``obj``; return the pickle and the large buffers that it refers to, in order.

    Numpy arrays and dense CPU tensors are not copied: their buffers are views of them.
    """
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    if not _Pickler.knows_torch and "torch" in sys.modules:
        _learn_torch()
    _Pickler(stream, 5, buffer_callback=_collector(buffers)).dump(obj)
    return stream.getvalue(), buffers


def pack_by_value(obj: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle ``obj`` with cloudpickle: classes and functions of ``__main__`` go by value."""
    import cloudpickle

    buffers: list[memoryview] = []
    return cloudpickle.dumps(obj, protocol=5, buffer_callback=_collector(buffers)), buffers


def unpack(payload: Any, buffers: Sequence[Any]) -> Any:
    """Undo :func:`pack`; arrays and tensors are views of ``buffers``."""
    return pickle.loads(payload, buffers=buffers)


def _collector(buffers: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """Return what decides whether a buffer stays in the pickle, and keeps the others."""

    def keep_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND:
            return True
        buffers.append(raw)
        return False

    return keep_small


class _Pickler(pickle.Pickler):
    # A table of its own: the C pickler looks into it without calling back into Python.
    dispatch_table = copyreg.dispatch_table.copy()
    knows_torch = False


def _learn_torch() -> None:
    tensor = getattr(sys.modules["torch"], "Tensor", None)
    if tensor is None:  # torch is in the middle of being imported
        return
    _Pickler.dispatch_table = copyreg.dispatch_table.copy()
    _Pickler.dispatch_table[tensor] = _reduce_tensor
    _Pickler.knows_torch = True


def _reduce_tensor(tensor: Any) -> Any:
    if not is_plain_memory(tensor) or (nbytes := tensor.numel() * tensor.element_size()) < OUT_OF_BAND:
        return tensor.__reduce_ex__(5)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    view = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    # The tensor must outlive the view, whose memory it owns; an attribute ties them together.
    view.owner = tensor
    return _rebuild_tensor, (pickle.PickleBuffer(view), tensor.dtype, tuple(tensor.shape))


def _rebuild_tensor(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(buffer, dtype=dtype).view(shape)
