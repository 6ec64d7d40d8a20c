"""Messages between a parent and its worker processes: their format, and the codecs of both sides."""

import collections
import contextlib
import copyreg
import io
import os
import pickle
import select
import struct
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tp_core.ranks import dumps_by_value

from tp_runner._workers._definitions import Definitions, SentDefinitions, find_definition, key_in_worker
from tp_runner._workers._failure import RESULT, Failure, raised_by_signal_handler
from tp_runner._workers._pickling import USERS_ERRORS, is_plain_memory, large_buffers_into, pack_results
from tp_runner._workers._shared_memory import Block, MappedMemory, SharedMemoryPool, align
from tp_runner._workers._work import Timing

if TYPE_CHECKING:
    from tp_runner._workers._fleet import Chunk

# -- Messages ---------------------------------------------------------------------------------
#
# A message is a fixed header, then a blob.
#
# The blob is the table of the large buffers in shared memory, then the pickle. It
# follows the header through the pipe when it is small and lies in shared memory otherwise.
# Large buffers are kept apart from the pickle, so that they are copied once and never into it: out-of-band
# data of pickle's protocol 5 (PEP 574).

REQUEST = struct.Struct("<BxxxIIIqqqqqqqqq")
REPLY = struct.Struct("<BBxxIIIqqqdddd")

MAGIC = 0x72_4E_70_74
"""In each reply: bytes that the work writes to a wrong descriptor by mistake do not have it."""


class Request(NamedTuple):
    kind: int  # ``START``, ``WORK`` or ``END``
    n_items: int = 0  # how many items the chunk has
    n_buffers: int = 0  # how many large buffers they refer to
    attempt: int = 0  # how often the items were sent before
    blob_nbytes: int = 0  # the length of the blob
    seq: int = 0  # the chunk's number
    start: int = 0  # the place of its first item in the input
    blob_at: int = -1  # where the blob is in shared memory; -1 when it follows the header
    block_at: int = 0  # the offset of the chunk's block of shared memory, also for its results
    block_nbytes: int = 0  # the length of the block
    inputs_nbytes: int = 0  # how much of it, from its beginning, the items take
    shared_nbytes: int = 0  # how large the shared memory is now
    run: int = 0  # the number of the run


class Reply(NamedTuple):
    kind: int  # ``READY``, ``DONE``, ``RELEASE``, ``LOG``, ``FAILED`` or ``BYE``
    flags: int = 0  # bits of the codec: ``HAS_FAILURES``, ``HELD``, ``THROUGH_PIPE``
    n_items: int = 0  # how many items the chunk has
    n_buffers: int = 0  # how many large buffers their results refer to
    magic: int = MAGIC
    seq: int = 0  # the chunk's number
    blob_nbytes: int = 0  # the length of the blob
    blob_at: int = -1  # where the blob is in shared memory; -1 when it follows the header
    began: float = 0.0  # when the work on the chunk began, by the monotonic clock
    waited_s: float = 0.0  # how long the worker had waited for it
    worked_s: float = 0.0  # how long the work took
    sent_s: float = 0.0  # how long sending the results before these took


class GarbledError(Exception):
    """Error of bytes from a worker that are no message."""


INLINE = 16 << 10
"""Requests of up to this many bytes go through the pipe. Three of them fit into the 64 KiB of a pipe, and no
worker has more chunks at a time: so the parent never waits in a write."""

MOST_NBYTES = 1 << 40
"""No message is longer: a larger number comes from bytes that are no message."""

OUT_OF_BAND = 2048
"""Buffers of at least this many bytes are kept apart; smaller ones cost less inside the pickle."""

# From the parent: how to start, a chunk of items, the end.
START, WORK, END = 1, 2, 3
# From a worker: ready, results, inputs no longer used, a log record, the start or end failed, ended.
READY, DONE, RELEASE, LOG, FAILED, BYE = 11, 12, 13, 14, 15, 16


def table_nbytes(n_buffers: int) -> int:
    return 16 * n_buffers


def encode_table(places: Iterable[tuple[int, int]]) -> bytes:
    flat = [number for place in places for number in place]
    return struct.pack(f"<{len(flat)}Q", *flat)


def split_blob(blob: Any, n_buffers: int) -> tuple[list[tuple[int, int]], memoryview]:
    """Take a blob apart into what :func:`encode_table` made for ``n_buffers`` buffers, and the pickle."""
    flat = struct.unpack_from(f"<{2 * n_buffers}Q", blob)
    table = list(zip(flat[::2], flat[1::2], strict=True))
    return table, memoryview(blob)[table_nbytes(n_buffers) :]


def read_exactly(fd: int, nbytes: int) -> bytes | bytearray | None:
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

    Numpy arrays and dense CPU tensors are not copied: their buffers are views of them. They arrive with their
    strides; those with gaps in their memory arrive without the gaps, in the same order of dimensions.
    """
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    if not _Pickler.knows_torch and "torch" in sys.modules:
        _Pickler.knows_torch = _register_reducer("torch", "Tensor", _reduce_tensor)
    if not _Pickler.knows_numpy and "numpy" in sys.modules:
        _Pickler.knows_numpy = _register_reducer("numpy", "ndarray", _reduce_array)
    kind = _Pickler if key_of is None else _KeyPickler
    pickler = kind(stream, 5, buffer_callback=large_buffers_into(buffers, OUT_OF_BAND))
    pickler.key_of = key_of
    pickler.dump(obj)
    return stream.getvalue(), buffers


def pack_by_value(obj: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle ``obj`` with cloudpickle: classes and functions of ``__main__`` go by value."""
    buffers: list[memoryview] = []
    payload = dumps_by_value(obj, protocol=5, buffer_callback=large_buffers_into(buffers, OUT_OF_BAND))
    return payload, buffers


class _Pickler(pickle.Pickler):
    # A table of its own: the C pickler looks into it without calling back into Python.
    dispatch_table = copyreg.dispatch_table.copy()
    knows_torch = False
    knows_numpy = False
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


def _register_reducer(module: str, name: str, reduce: Callable[[Any], Any]) -> bool:
    """Have objects of a class pickled by a function; return whether the class is there."""
    kind = getattr(sys.modules[module], name, None)
    if kind is None:  # another thread is importing the module
        return False
    _Pickler.dispatch_table = {**_Pickler.dispatch_table, **copyreg.dispatch_table, kind: reduce}
    return True


def _memory_order(strides: Sequence[int]) -> list[int]:
    """Return dimensions in the order in which they lie in memory, the outermost first."""
    return sorted(range(len(strides)), key=lambda dim: -abs(strides[dim]))


def _reduce_tensor(tensor: Any) -> Any:
    if not is_plain_memory(tensor) or not tensor.numel():
        return tensor.__reduce_ex__(5)
    if not _is_standard(tensor):
        return _reduce_strided_tensor(tensor)
    import ctypes  # torch has imported it

    view = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    # The tensor owns the memory of the view and must outlive it; an attribute ties them together.
    view.owner = tensor
    # To view the new tensor costs more than all the rest, and one dimension needs no view.
    shape = None if tensor.dim() == 1 else tuple(tensor.shape)
    return _rebuild_tensor, (pickle.PickleBuffer(view), tensor.dtype, shape)


def _is_standard(tensor: Any) -> bool:
    """Return whether the strides of a tensor follow from its shape alone."""
    if not tensor.is_contiguous():
        return False
    if 1 not in tensor.shape:
        return True
    # A dimension of one element may have any stride, and torch tells memory formats by it.
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


def _reduce_strided_tensor(tensor: Any) -> Any:
    strides = tensor.stride()
    order = _memory_order(strides)
    stored = tensor.permute(order)
    for place, dim in enumerate(order):
        if not strides[dim]:  # it repeats one element, which is sent once
            stored = stored.narrow(place, 0, 1)
    if not stored.is_contiguous():  # there are gaps between its elements
        stored = stored.contiguous()
        packed = list(strides)
        for place, dim in enumerate(order):
            if strides[dim]:
                packed[dim] = stored.stride(place)
        strides = tuple(packed)
    return _rebuild_strided_tensor, (stored.view(-1), tuple(tensor.shape), strides)


def _rebuild_strided_tensor(stored: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    return stored.as_strided(shape, strides)


def _reduce_array(array: Any) -> Any:
    if array.flags.forc or array.dtype.hasobject or not array.size:
        return array.__reduce_ex__(5)
    order = _memory_order(array.strides)
    # Dimensions that run backwards are sent forwards, and of those that repeat one element this alone.
    turned = tuple(slice(None, None, -1 if stride < 0 else 1) for stride in array.strides)
    single = tuple(slice(None) if stride else slice(1) for stride in array.strides)
    stored = sys.modules["numpy"].ascontiguousarray(array[turned][single].transpose(order))
    return _rebuild_array, (stored, order, array.shape, turned)


def _rebuild_array(stored: Any, order: list[int], shape: tuple[int, ...], turned: tuple[slice, ...]) -> Any:
    import numpy as np

    array = stored.transpose(np.argsort(order))
    if array.shape != shape:
        array = np.broadcast_to(array, shape)  # not to be written to, as it was
    return array[turned]


def _rebuild_tensor(buffer: Any, dtype: Any, shape: tuple[int, ...] | None) -> Any:
    import torch

    tensor = torch.frombuffer(buffer, dtype=dtype)
    if shape is None:
        return tensor
    return tensor.view(shape)


# -- Items and results --------------------------------------------------------------------------

# Flags: some results are failures; the inputs are still in use; large buffers are in the blob too.
HAS_FAILURES, HELD, THROUGH_PIPE = 1, 2, 4

SPARE = 64 << 10
"""Spare bytes for results beyond their expected size."""


def _blob_sizes(payload: bytes, buffers: list[memoryview]) -> tuple[int, int]:
    """Return the length of the blob, and how many bytes of shared memory blob and buffers take."""
    length = table_nbytes(len(buffers)) + len(payload)
    shared_nbytes = sum(align(buffer.nbytes) for buffer in buffers)
    if length > INLINE:
        shared_nbytes += align(length)
    return length, shared_nbytes


def _write_blob(
    memory: memoryview, at: int, payload: bytes, buffers: list[memoryview]
) -> tuple[list[Any], int]:
    """Copy buffers into shared memory, from ``at`` on, and a blob that is too long for the pipe behind them.

    Returns:
        The pieces for the pipe, and the place of the blob in shared memory, or -1.
    """
    places: list[tuple[int, int]] = []
    for buffer in buffers:
        memory[at : at + buffer.nbytes] = buffer
        places.append((at, buffer.nbytes))
        at = align(at + buffer.nbytes)
    table = encode_table(places)
    if len(table) + len(payload) <= INLINE:
        return [table, payload], -1
    memory[at : at + len(table)] = table
    memory[at + len(table) : at + len(table) + len(payload)] = payload
    return [], at


class ReplyWriter:
    """Writer of messages to the parent; threads may share it."""

    def __init__(self, fd: int, memory: MappedMemory) -> None:
        self._fd = fd
        self._memory = memory
        # -- Messages on their way into the pipe
        # Threads of the work may log while results are written, and messages must not mix in the pipe.
        # Reentrant: a finalizer or a signal handler of the writing thread may log, in the middle of a long
        # message; its record goes after that one (test_a_record_in_the_midst_of_a_result_follows_it).
        self._lock = threading.RLock()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._is_writing = False
        self._is_cut = False  # within a message: nothing can follow it
        # -- Inputs that the user's code keeps, by chunks, and those that it has let go
        self._kept: dict[int, weakref.ref[Any]] = {}
        self._released: collections.deque[int] = collections.deque()
        # -- Results
        self._sent_s = 0.0  # how long sending the last ones took
        self._key_of: Any = None  # set once results are of classes from the parent

    def message(self, kind: int, blob: Any = b"", *, seq: int = 0) -> None:
        header = REPLY.pack(*Reply(kind, seq=seq, blob_nbytes=len(blob)))
        self._send(b"".join((header, blob)))

    def _send(self, message: bytes) -> None:
        self._unsent.append(message)
        with self._lock:
            if self._is_writing or self._is_cut:
                return
            self._is_writing = True
            try:
                while self._unsent:
                    message = self._unsent.popleft()
                    write_all(self._fd, message)
            except BaseException:
                # A signal handler has raised. What follows a part of a message would pass for its rest; up to
                # PIPE_BUF bytes are written in one piece.
                self._is_cut = len(message) > select.PIPE_BUF
                raise
            finally:
                self._is_writing = False

    def failure(self, failure: Failure) -> None:
        self.message(FAILED, pickle.dumps(failure, 5))

    def record(self, record: Any) -> None:
        self.message(LOG, pickle.dumps(record, 5))

    def done(
        self,
        request: Request,
        timing: Timing,
        results: list[Any],
        lease: weakref.ref[Any] | None,
        *,
        failed: bool,
    ) -> None:
        """Send the results of a chunk; ``failed`` says whether some of them are failures."""
        started = time.monotonic()
        self._report_released()
        try:
            payload, buffers = self._pack(results)
        except USERS_ERRORS:  # find the results that cannot be pickled
            payload, buffers, unpicklable = pack_results(results, pack_by_value)
            failed = failed or unpicklable
        results.clear()
        memory = None if lease is None else lease()
        # As a rule nobody has the inputs any more: their memory, in this core's caches, takes the results.
        # Views that still exist, also in the results' buffers, keep the lease alive, and the inputs stay
        # (test_inputs_that_the_worker_keeps_stay_as_they_were).
        taken = request.inputs_nbytes if memory is not None else 0
        flags = HAS_FAILURES if failed else 0
        length, shared_nbytes = _blob_sizes(payload, buffers)
        if taken + shared_nbytes <= request.block_nbytes:
            blob, at = _write_blob(self._memory.view, request.block_at + taken, payload, buffers)
        else:  # through the pipe, one buffer after the other
            flags |= THROUGH_PIPE
            table = encode_table((0, buffer.nbytes) for buffer in buffers)
            blob = [table, *map(bytes, buffers), payload]
            at = -1
            length += sum(buffer.nbytes for buffer in buffers)
        n_buffers = len(buffers)
        # The buffers may be views of the inputs, and would keep them in use.
        del payload
        buffers.clear()
        if memory is not None:
            flags |= HELD
            seq = request.seq
            released = self._released
            # The callback runs in any thread, or in a collection: it only notes the chunk for the next reply.
            self._kept[seq] = weakref.ref(memory, lambda _: released.append(seq))
            del memory
        reply = Reply(
            DONE,
            flags,
            request.n_items,
            n_buffers,
            MAGIC,
            request.seq,
            length,
            at,
            timing.began,
            timing.waited_s,
            timing.worked_s,
            self._sent_s,
        )
        self._send(b"".join((REPLY.pack(*reply), *blob)))
        self._sent_s = time.monotonic() - started

    def _report_released(self) -> None:
        """Tell the parent of which chunks the inputs are no longer in use."""
        while self._released:
            seq = self._released.popleft()
            self._kept.pop(seq, None)
            self.message(RELEASE, seq=seq)

    def _pack(self, results: list[Any]) -> tuple[bytes, list[memoryview]]:
        if self._key_of is None:
            with contextlib.suppress(*USERS_ERRORS):
                return pack(results)
        self._key_of = key_in_worker  # later results are like these, as a rule
        return pack(results, self._key_of)


class Codec:
    """The parent's codec: from chunks to requests, from replies to results.

    Args:
        memory: The shared memory, for large buffers and blobs.
        same_main: Whether a worker has this process's main module.
        lease_at_most: How many bytes of results may be views of shared memory; more are copied out.
    """

    def __init__(self, memory: SharedMemoryPool, *, same_main: bool, lease_at_most: int) -> None:
        self._memory = memory
        self._same_main = same_main
        self._lease_at_most = lease_at_most
        self._result_bytes = 0.0  # the most that a result took lately
        self._definitions = Definitions()
        self._tracks_definitions = False  # for what items refer to in the main module
        self.forget = self._definitions.forget

    def encode(self, worker: int, chunk: "Chunk") -> tuple[Block, bytes]:
        """Put a chunk's items into shared memory; set its ``nbytes``.

        Returns:
            Their block, and the message to the worker.
        """
        payload, buffers = self._pack(worker, chunk.items)
        length, inputs_nbytes = _blob_sizes(payload, buffers)
        results_nbytes = 2.0 * inputs_nbytes  # untouched memory costs nothing: the first guess is generous
        if self._result_bytes:
            results_nbytes = self._result_bytes * len(chunk.items) * 1.25
        block = self._memory.allocate(inputs_nbytes + align(int(results_nbytes)) + SPARE)
        blob, at = _write_blob(self._memory.view, block.offset, payload, buffers)
        request = Request(
            WORK,
            n_items=len(chunk.items),
            n_buffers=len(buffers),
            attempt=chunk.sent - 1,
            blob_nbytes=length,
            seq=chunk.seq,
            start=chunk.start,
            blob_at=at,
            block_at=block.offset,
            block_nbytes=block.nbytes,
            inputs_nbytes=inputs_nbytes,
            shared_nbytes=self._memory.nbytes,
            run=chunk.run,
        )
        chunk.nbytes = inputs_nbytes
        if at < 0:  # the blob is no part of them
            chunk.nbytes += length
        return block, b"".join((REQUEST.pack(*request), *blob))

    def _pack(self, worker: int, items: list[Any]) -> tuple[bytes, list[memoryview]]:
        try:
            if not self._tracks_definitions:
                payload, buffers = pack(items)
                if self._same_main or b"__main__" not in payload:
                    return payload, buffers
            referred: dict[str, Any] = {}
            key_of = self._definitions.key_of(referred)
            payload, buffers = pack(items, key_of)
            self._tracks_definitions = bool(referred)  # later items are like these, as a rule
            if b"__main__" in payload:
                return pack_by_value(items)  # something else of __main__ than classes and functions
            unsent = self._definitions.unsent(worker, referred)
            if unsent:
                payload, buffers = pack((SentDefinitions(unsent), items), key_of)
        except Exception:  # noqa: BLE001 - cloudpickle may still be able to, or says why not
            return pack_by_value(items)
        self._definitions.note_sent(worker, unsent, referred)
        return payload, buffers

    def decode(self, block: Block, reply: Reply, blob: Any) -> tuple[list[Any], bool, int, bool]:
        """Unpickle results.

        Returns:
            The results, whether some are failures, how many bytes they took, and whether they are
            views of the block. Such a block is free again when the last view has died.
        """
        failed = bool(reply.flags & HAS_FAILURES)
        leased = False
        nbytes = reply.blob_nbytes
        buffers: list[Any] = []
        try:
            if reply.blob_at >= 0:
                blob = self._memory.view[reply.blob_at : reply.blob_at + nbytes]
            if reply.n_buffers:
                table, blob = split_blob(blob, reply.n_buffers)
                if reply.flags & THROUGH_PIPE:
                    for _, size in table:
                        buffers.append(bytearray(blob[:size]))
                        blob = blob[size:]
                else:
                    nbytes += sum(size for _, size in table)
                    leased = not reply.flags & HELD and self._memory.leased < self._lease_at_most
                    buffers = self._buffers(block, table, leased=leased)
            results = pickle.loads(blob, buffers=buffers)
        except USERS_ERRORS as error:
            if raised_by_signal_handler(error):
                raise
            results = [Failure.of(error, RESULT)] * reply.n_items
            failed = True
        self._result_bytes = max(nbytes / reply.n_items, 0.9 * self._result_bytes)
        return results, failed, nbytes, leased

    def _buffers(self, block: Block, table: list[tuple[int, int]], *, leased: bool) -> list[Any]:
        if not leased:
            memory = self._memory.view
            return [bytearray(memory[at : at + size]) for at, size in table]
        memory = self._memory.lease_block(block)
        base = block.offset
        return [memory[at - base : at - base + size] for at, size in table]
