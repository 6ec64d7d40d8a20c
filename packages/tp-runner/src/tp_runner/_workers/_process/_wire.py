"""The messages between a parent and its worker processes: a fixed header, then a blob.

The blob is the table of the large buffers in shared memory, then the pickle. It
follows the header through the pipe when it is small and lies in shared memory otherwise.
Large buffers are kept apart from the pickle, so that they are copied once and never into it: out-of-band
data of pickle's protocol 5 (PEP 574).
"""

import copyreg
import ctypes
import io
import os
import pickle
import struct
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tp_runner._workers._pickling import is_plain_memory, large_buffers_into

# -- Classes and functions of the main module -------------------------------------------------
#
# __main__ is another module in a worker, so its definitions are sent once, by value, and then named by a key.
# Each time they are pickled anew and compared, and sent again when they have changed. A result of the
# program's class goes back by the key of the class: so it is of that very class, whatever its name means by
# then, and the worker's state of the class does not overwrite the program's
# (test_results_are_of_the_class_that_their_items_were_of).

_received: dict[str, Any] = {}  # in a worker: the definition of each key
_keys: dict[Any, str] = {}  # there, too: the keys of classes that came from the parent


class Definitions:
    """The definitions that each worker of a runner has got."""

    def __init__(self) -> None:
        self._sent: dict[int, dict[str, bytes]] = {}
        # Kept alive here: a worker may return instances of classes that the program has dropped.
        self._classes = {key: kind for kind, key in _trackers()[0].items()}

    def key_of(self, found: dict[str, Any]) -> Callable[[Any], str | None]:
        """Return a function that gives keys to a pickler, and notes their definitions in ``found``."""
        from cloudpickle import cloudpickle

        def key_of(obj: Any) -> str | None:
            if obj.__module__ != "__main__":
                return None
            current: Any = sys.modules["__main__"]
            for name in obj.__qualname__.split("."):
                current = getattr(current, name, None)
            if current is not obj:
                return None  # by value each time: another object has its name, or it has none
            is_class = isinstance(obj, type)
            # Private to cloudpickle: by its own key, cloudpickle gives a class back as the same object.
            key: str = cloudpickle._get_or_create_tracker_id(obj) if is_class else obj.__qualname__
            found[key] = obj
            return key

        return key_of

    def unsent(self, worker: int, found: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the definitions that a worker lacks for something that refers to ``found``.

        Raises:
            Exception: Something cannot be pickled.
        """
        import cloudpickle

        sent = self._sent.get(worker, {})
        data = {key: cloudpickle.dumps(obj, protocol=5) for key, obj in found.items()}
        return {key: pickled for key, pickled in data.items() if sent.get(key) != pickled}

    def note_sent(self, worker: int, unsent: Mapping[str, bytes], found: Mapping[str, Any]) -> None:
        """Note that a worker gets definitions."""
        self._sent.setdefault(worker, {}).update(unsent)
        self._classes.update({key: found[key] for key in unsent})

    def forget(self, worker: int) -> None:
        """Note that a worker has no definitions, or may have failed to unpickle some."""
        self._sent.pop(worker, None)


class SentDefinitions:
    """Definitions that travel ahead of items; the worker learns them by unpickling this object."""

    def __init__(self, unsent: Mapping[str, bytes]) -> None:
        self._unsent = dict(unsent)

    def __reduce__(self) -> tuple[Any, ...]:
        return _define, (self._unsent,)


def _define(unsent: Mapping[str, bytes]) -> None:
    for key, data in unsent.items():
        _received[key] = found = pickle.loads(data)
        if isinstance(found, type):
            _keys[found] = key


def find_definition(key: str) -> Any:
    """Return the definition of a key, in a worker or in the program."""
    found = _received.get(key)
    return _trackers()[1][key] if found is None else found


def remember_program() -> None:
    """Note, in a worker, which classes came with the program."""
    _keys.update(_trackers()[0])


def key_in_worker(obj: Any) -> str | None:
    """Return the key of a class that came from the parent."""
    return _keys.get(obj)


def _trackers() -> tuple[Any, Any]:
    """Return cloudpickle's tables: keys by class, and classes by key."""
    module: Any = sys.modules.get("cloudpickle.cloudpickle")
    if module is None:  # nothing was pickled by value
        return {}, {}
    # Private to cloudpickle: test_results_are_of_the_class_that_their_items_were_of notices their loss.
    return module._DYNAMIC_CLASS_TRACKER_BY_CLASS, module._DYNAMIC_CLASS_TRACKER_BY_ID


# -- Messages ---------------------------------------------------------------------------------

REQUEST = struct.Struct("<BxxxIIIqqqqqqqqq")
REPLY = struct.Struct("<BBxxIIIqqqdddd")

MAGIC = 0x72_4E_70_74
"""In each reply: bytes that the work writes to a wrong descriptor by mistake do not have it."""


class Request(NamedTuple):
    """The header of a message to a worker.

    Attributes:
        kind: ``START``, ``WORK`` or ``END``.
        n_items: How many items the chunk has.
        n_buffers: How many large buffers they refer to.
        attempt: How often the items were sent before.
        blob_nbytes: The length of the blob.
        seq: The chunk's number.
        start: The place of its first item in the input.
        blob_at: Where the blob is in shared memory; -1 when it follows the header.
        block_at: The offset of the chunk's block of shared memory, also for its results.
        block_nbytes: The length of the block.
        inputs_nbytes: How much of it, from its beginning, the items take.
        shared_nbytes: How large the shared memory is now.
        run: The number of the run.
    """

    kind: int
    n_items: int = 0
    n_buffers: int = 0
    attempt: int = 0
    blob_nbytes: int = 0
    seq: int = 0
    start: int = 0
    blob_at: int = -1
    block_at: int = 0
    block_nbytes: int = 0
    inputs_nbytes: int = 0
    shared_nbytes: int = 0
    run: int = 0


class Reply(NamedTuple):
    """The header of a message from a worker.

    Attributes:
        kind: ``READY``, ``DONE``, ``RELEASE``, ``LOG``, ``FAILED`` or ``BYE``.
        flags: Bits of the codec: ``FAILED``, ``HELD``, ``THROUGH_PIPE``.
        n_items: How many items the chunk has.
        n_buffers: How many large buffers their results refer to.
        magic: ``MAGIC``.
        seq: The chunk's number.
        blob_nbytes: The length of the blob.
        blob_at: Where the blob is in shared memory; -1 when it follows the header.
        began: When the work on the chunk began, by the monotonic clock.
        waited_s: How long the worker had waited for it.
        worked_s: How long the work took.
        sent_s: How long sending the results before these took.
    """

    kind: int
    flags: int = 0
    n_items: int = 0
    n_buffers: int = 0
    magic: int = MAGIC
    seq: int = 0
    blob_nbytes: int = 0
    blob_at: int = -1
    began: float = 0.0
    waited_s: float = 0.0
    worked_s: float = 0.0
    sent_s: float = 0.0


class GarbledError(Exception):
    """Error of bytes from a worker that are no message."""


INLINE = 16 << 10
"""Requests of up to so many bytes go through the pipe. Three of them fit into the 64 KiB of a pipe, and no
worker has more chunks at a time: so the parent never waits in a write."""

MOST_NBYTES = 1 << 40
"""No message is longer: a larger number comes from bytes that are no message."""

OUT_OF_BAND = 2048
"""Buffers of at least so many bytes are kept apart; smaller ones cost less inside the pickle."""

# From the parent: how to start, a chunk of items, the end.
START, WORK, END = 1, 2, 3
# From a worker: ready, results, inputs no longer used, a log record, the start or end failed, ended.
READY, DONE, RELEASE, LOG, FAILED, BYE = 11, 12, 13, 14, 15, 16


def align(offset: int) -> int:
    """Round up to where a buffer may begin: a cache line."""
    return (offset + 63) & ~63


def table_nbytes(n_buffers: int) -> int:
    """Return the length of the table of some buffers."""
    return 16 * n_buffers


def encode_table(places: Iterable[tuple[int, int]]) -> bytes:
    """Encode the offset and the length of each buffer."""
    flat = [number for place in places for number in place]
    return struct.pack(f"<{len(flat)}Q", *flat)


def split_blob(blob: Any, n_buffers: int) -> tuple[list[tuple[int, int]], memoryview]:
    """Take a blob apart into what :func:`encode_table` made for ``n_buffers`` buffers, and the pickle."""
    flat = struct.unpack_from(f"<{2 * n_buffers}Q", blob)
    return list(zip(flat[::2], flat[1::2], strict=True)), memoryview(blob)[table_nbytes(n_buffers) :]


def read_exactly(fd: int, nbytes: int) -> bytes | bytearray | None:
    """Read ``nbytes``, waiting for them; ``None`` at the end of the file."""
    data = os.read(fd, nbytes)
    if len(data) == nbytes:
        return data
    if not data:
        return None
    whole = bytearray(data)
    while len(whole) < nbytes:
        more = os.read(fd, nbytes - len(whole))
        if not more:
            return None
        whole += more
    return whole


def write_all(fd: int, data: Any) -> None:
    """Write all of ``data``, waiting for the reader."""
    written = os.write(fd, data)
    if written < len(data):
        rest = memoryview(data)[written:]
        while rest:
            rest = rest[os.write(fd, rest) :]


def pack(obj: Any, key_of: Callable[[Any], str | None] | None = None) -> tuple[bytes, list[memoryview]]:
    """Pickle ``obj``; return the pickle and the large buffers that it refers to, in order.

    Numpy arrays and dense CPU tensors are not copied: their buffers are views of them.

    Args:
        obj: The object.
        key_of: Gives classes and functions keys to travel by.
    """
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    if not _Pickler.knows_torch and "torch" in sys.modules:
        _register_tensor_reducer()
    pickler = (_Pickler if key_of is None else _KeyPickler)(
        stream, 5, buffer_callback=large_buffers_into(buffers, OUT_OF_BAND)
    )
    pickler.key_of = key_of
    pickler.dump(obj)
    return stream.getvalue(), buffers


def pack_by_value(obj: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle ``obj`` with cloudpickle: classes and functions of ``__main__`` go by value."""
    import cloudpickle

    buffers: list[memoryview] = []
    return cloudpickle.dumps(
        obj, protocol=5, buffer_callback=large_buffers_into(buffers, OUT_OF_BAND)
    ), buffers


def unpack(payload: Any, buffers: Sequence[Any]) -> Any:
    """Undo :func:`pack`; arrays and tensors are views of ``buffers``."""
    return pickle.loads(payload, buffers=buffers)


class _Pickler(pickle.Pickler):
    # A table of its own: the C pickler looks into it without calling back into Python.
    dispatch_table = copyreg.dispatch_table.copy()
    knows_torch = False
    key_of: Callable[[Any], str | None] | None


class _KeyPickler(_Pickler):
    """Pickler that gives keys to classes and functions; costs a call for each object of no built-in type."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _KEYED_TYPES) and self.key_of is not None:
            key = self.key_of(obj)
            if key is not None:
                return find_definition, (key,)
        return NotImplemented


_KEYED_TYPES = (type, types.FunctionType)


def _register_tensor_reducer() -> None:
    tensor = getattr(sys.modules["torch"], "Tensor", None)
    if tensor is None:  # another thread is importing torch
        return
    _Pickler.dispatch_table = copyreg.dispatch_table.copy()
    _Pickler.dispatch_table[tensor] = _reduce_tensor
    _Pickler.knows_torch = True


def _reduce_tensor(tensor: Any) -> Any:
    if not is_plain_memory(tensor) or not tensor.numel():
        return tensor.__reduce_ex__(5)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    view = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    # The tensor owns the memory of the view and must outlive it; an attribute ties them together.
    view.owner = tensor
    # To view the new tensor costs more than all the rest, and one dimension needs no view.
    shape = None if tensor.dim() == 1 else tuple(tensor.shape)
    return _rebuild_tensor, (pickle.PickleBuffer(view), tensor.dtype, shape)


def _rebuild_tensor(buffer: Any, dtype: Any, shape: tuple[int, ...] | None) -> Any:
    import torch

    tensor = torch.frombuffer(buffer, dtype=dtype)
    return tensor if shape is None else tensor.view(shape)
