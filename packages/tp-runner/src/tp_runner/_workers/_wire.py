"""Messages between a parent and its worker processes, and items and results in shared memory."""

import collections
import contextlib
import copyreg
import ctypes
import dataclasses
import io
import mmap
import os
import pickle
import select
import struct
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tp_core.errors import ConfigError
from tp_core.ranks import dumps_by_value

from tp_runner._options import Settings
from tp_runner._workers._failure import RESULT, Failure
from tp_runner._workers._fleet import Chunk, Timing
from tp_runner._workers._pickling import (
    LARGE,
    USERS_ERRORS,
    dump_program,
    is_plain_memory,
    large_buffers_into,
    pack_results,
)
from tp_runner._workers._start import MOST_PASSED, collect_descriptors
from tp_runner._workers._work import IDLE

# -- Shared memory that the parent owns and every worker maps: reused, unnamed, one descriptor ----
# A large program lies there too: a worker has private copies only of the pages that it writes to.


SMALLEST = 64 << 10
INITIAL = 64 << 20  # untouched pages of the file cost nothing


@dataclass(slots=True, frozen=True)
class Block:
    """A range of the shared memory: ``nbytes`` from ``offset`` on."""

    offset: int
    nbytes: int


class MappedMemory:
    """A process's map of the file of a shared memory; it grows with the file."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self._nbytes = 0
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        """Map at least ``nbytes``. Views of the old map stay valid: they keep it alive."""
        if nbytes > self._nbytes:
            self._map = mmap.mmap(self._fd, nbytes)
            self.view = memoryview(self._map)
            self._nbytes = nbytes

    def release(self) -> None:
        """Drop the map, which ends with the last view of it."""
        self.view = memoryview(b"")
        del self._map

    def lease(self, offset: int, nbytes: int) -> Any:
        """Return an object that owns this range; views made of it keep it alive."""
        return (ctypes.c_char * nbytes).from_buffer(self._map, offset)


class SharedMemoryPool(MappedMemory):
    """The parent's side: a pool of blocks, in eight sizes between two powers of two.

    Free blocks are in a stack for each size. So the pool hands out those first that were used last: their
    pages are touched and warm. Memory that was never touched costs nothing.
    """

    def __init__(self) -> None:
        self.fd = unnamed_file()
        os.ftruncate(self.fd, INITIAL)
        self.nbytes = INITIAL
        self.leased = 0
        self._end = 0
        self._free: dict[int, list[Block]] = collections.defaultdict(list)
        self._leases: dict[int, tuple[weakref.ref[Any], Block]] = {}
        self._returned: collections.deque[int] = collections.deque()
        super().__init__(self.fd, INITIAL)

    def allocate(self, nbytes: int) -> Block:
        """Return a block of at least ``nbytes``; the file grows when it must."""
        self._collect()
        size = wanted = _round_size(nbytes)
        while size <= 2 * wanted:
            if free := self._free.get(size):
                return free.pop()
            size = _round_size(size + 1)
        block = Block(self._end, wanted)
        self._end += wanted
        if self._end > self.nbytes:
            self.nbytes = max(2 * self.nbytes, 1 << (self._end - 1).bit_length())
            os.ftruncate(self.fd, self.nbytes)
            self.grow(self.nbytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back."""
        self._free[block.nbytes].append(block)

    def lease_block(self, block: Block) -> memoryview:
        """Return a view of a block, which is free again when the last view of it has died."""
        lease = self.lease(block.offset, block.nbytes)
        # The callback runs wherever the last view dies, in any thread or a collection. It takes no lock: it
        # only notes the block, and the next allocation frees it.
        key, returned = block.offset, self._returned
        self._leases[key] = (weakref.ref(lease, lambda _: returned.append(key)), block)
        self.leased += block.nbytes
        return memoryview(lease).cast("B")

    def _collect(self) -> None:
        while self._returned:
            _, block = self._leases.pop(self._returned.popleft())
            self.leased -= block.nbytes
            self.free(block)

    def close(self) -> None:
        """Close the file; memory goes back when the last view has died."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.release()
        self._free.clear()


def _round_size(nbytes: int) -> int:
    """Round up to a block's size: a multiple of an eighth of the power of two below it."""
    step = max(SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step


def align(offset: int) -> int:
    """Round up to where a buffer may begin: a cache line."""
    return (offset + 63) & ~63


def unnamed_file() -> int:
    """Return a descriptor of memory without a name, which nobody need remove after a crash."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tp-runner", os.MFD_CLOEXEC)
    import tempfile  # where there is no memfd

    fd, path = tempfile.mkstemp(prefix="tp-runner-")
    os.unlink(path)  # noqa: PTH108 - it has no name from here on
    return fd


WORDS = 8  # a cache line: number of the chunk, place in it, start time; then cancelled runs
FIRST_CANCELLED = 3
_ROW = WORDS * 8


class Heartbeat(NamedTuple):
    """The state of a worker."""

    seq: int  # the number of the chunk at work, ``IDLE`` or ``ENDING``
    place: int  # the place of the item at work in that chunk
    began_ns: int  # when the work on it began, by the monotonic clock; 0 between items


class Heartbeats:
    """One row of words for each worker, which the parent reads at any time.

    It outlives a worker's death, and says which item killed it.
    """

    def __init__(self, n_workers: int) -> None:
        self.fd = unnamed_file()
        os.ftruncate(self.fd, n_workers * _ROW)
        self._rows = [self.row(self.fd, worker) for worker in range(n_workers)]
        self._n_cancelled = [0] * n_workers

    @staticmethod
    def row(fd: int, worker: int) -> MutableSequence[int]:
        """Map the row of one worker."""
        whole = memoryview(mmap.mmap(fd, (worker + 1) * _ROW)).cast("q")
        return whole[worker * WORDS :]  # type: ignore[return-value]  # a memoryview of integers

    def current(self, worker: int) -> Heartbeat:
        """Return the state of a worker, dead or alive."""
        return Heartbeat._make(self._rows[worker][:FIRST_CANCELLED])

    def cancel(self, worker: int, run: int) -> None:
        """Mark a run as cancelled for a worker.

        There is room for more runs than a worker can have chunks of at a time.
        """
        row, at = self._rows[worker], FIRST_CANCELLED + self._n_cancelled[worker] % (WORDS - FIRST_CANCELLED)
        if run not in row[FIRST_CANCELLED:WORDS]:
            row[at] = run
            self._n_cancelled[worker] += 1

    def clear(self, worker: int) -> None:
        """Mark a dead worker as idle, for the one in its place."""
        self._rows[worker][0] = IDLE

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._rows.clear()


class PackedProgram(NamedTuple):
    """A program, pickled for its workers."""

    program: Any  # its pickle, or for a fork itself
    buffers: list[memoryview]  # the large arrays and tensors in it, in order
    descriptors: list[int]  # the files that workers must be started with
    settings: Settings  # the runner's, with the modules that are imported once for all workers

    def stored_in(self, memory: SharedMemoryPool) -> Any:
        """Return the message to a worker: the program, or its place in shared memory, if it is large."""
        if self.buffers or (isinstance(self.program, bytes) and len(self.program) > LARGE):
            return _store_program(memory, self.program, self.buffers)
        return self.program


def pack_program(program: Any, devices: tuple[str, ...], settings: Settings) -> PackedProgram:
    """Pickle a program, unless workers are forked and have it; find modules to import once."""
    descriptors: list[int] = []
    buffers: list[memoryview] = []
    if settings.start_method == "fork":
        return PackedProgram(program, buffers, descriptors, settings)
    try:
        with collect_descriptors(descriptors):
            payload = dump_program(program, buffers)
        if settings.start_method == "forkserver" and len(descriptors) > MOST_PASSED:
            msg = (
                f"the work refers to {len(descriptors)} pipes, queues or shared values of multiprocessing, "
                f"and a fork server passes {MOST_PASSED} at most; start_method='spawn' passes any number"
            )
            raise ConfigError(msg)
    except BaseException:
        for fd in descriptors:
            os.close(fd)
        raise
    found: tuple[str, ...] = ()
    if settings.seed is not None:
        found = ("numpy", "torch")
    elif "torch" in sys.modules or b"torch" in payload or set(devices) != {"cpu"}:
        found = ("torch",)
    settings = dataclasses.replace(settings, preload=(*settings.preload, *found))
    return PackedProgram(payload, buffers, descriptors, settings)


class StoredProgram(NamedTuple):
    """The place of a program in shared memory."""

    offset: int  # its begin in shared memory
    nbytes: int  # how long it is
    # the begin and the length of the pickle, then of each of its buffers, from the offset on
    places: tuple[tuple[int, int], ...]


def _store_program(memory: SharedMemoryPool, payload: bytes, buffers: list[memoryview]) -> StoredProgram:
    """Put a pickle and its buffers into shared memory, where they stay."""
    places: list[tuple[int, int]] = []
    end = 0
    parts = [memoryview(payload), *(buffer.cast("B") for buffer in buffers)]
    for part in parts:
        places.append((end, part.nbytes))
        end = align(end + places[-1][1])
    block = memory.allocate(end)
    for (at, nbytes), part in zip(places, parts, strict=True):
        memory.view[block.offset + at : block.offset + at + nbytes] = part
    return StoredProgram(block.offset, end, tuple(places))


def load_program(fd: int, stored: StoredProgram) -> Any:
    """Unpickle a program; its arrays and tensors are views of this process's own copy-on-write map."""
    view = memoryview(mmap.mmap(fd, stored.nbytes, access=mmap.ACCESS_COPY, offset=stored.offset))
    payload, *buffers = (view[at : at + nbytes] for at, nbytes in stored.places)
    return pickle.loads(payload, buffers=buffers)


# -- Classes and functions of the main module -------------------------------------------------
#
# __main__ is another module in a worker, so its definitions are sent once, by value, and then named by a key.
# Each time they are pickled again and compared, and sent again when they have changed. A result of the
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
        """Return the definitions that a worker lacks for something that refers to ``found``."""
        sent = self._sent.get(worker, {})
        data = {key: dumps_by_value(obj, protocol=5) for key, obj in found.items()}
        return {key: pickled for key, pickled in data.items() if sent.get(key) != pickled}

    def note_sent(self, worker: int, unsent: Mapping[str, bytes], found: Mapping[str, Any]) -> None:
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
    flags: int = 0  # bits of the codec: ``FAILED``, ``HELD``, ``THROUGH_PIPE``
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
    return list(zip(flat[::2], flat[1::2], strict=True)), memoryview(blob)[table_nbytes(n_buffers) :]


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

    Numpy arrays and dense CPU tensors are not copied: their buffers are views of them.
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
    buffers: list[memoryview] = []
    return dumps_by_value(obj, protocol=5, buffer_callback=large_buffers_into(buffers, OUT_OF_BAND)), buffers


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


# -- Items and results --------------------------------------------------------------------------

# Flags: some results are failures; the inputs are still in use; large buffers are in the blob too.
FAILED, HELD, THROUGH_PIPE = 1, 2, 4

SPARE = 64 << 10
"""Spare bytes for results beyond their expected size."""


def _blob_sizes(payload: bytes, buffers: list[memoryview]) -> tuple[int, int]:
    """Return the length of the blob, and how many bytes of shared memory blob and buffers take."""
    length = table_nbytes(len(buffers)) + len(payload)
    room = sum(align(buffer.nbytes) for buffer in buffers)
    return length, room + (align(length) if length > INLINE else 0)


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
        # Threads of the work may log while results are written, and messages must not mix in the pipe.
        # Reentrant: a finalizer or a signal handler of the writing thread may log, in the middle of a long
        # message; its record goes after that one (test_a_record_in_the_midst_of_a_result_follows_it).
        self._lock = threading.RLock()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._is_writing = self._is_cut = False
        self._kept: dict[int, weakref.ref[Any]] = {}
        self._released: collections.deque[int] = collections.deque()
        self._sent_s = 0.0
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
                    write_all(self._fd, message := self._unsent.popleft())
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
        started = time.monotonic()
        while self._released:
            seq = self._released.popleft()
            self._kept.pop(seq, None)
            self.message(RELEASE, seq=seq)
        try:
            payload, buffers = self._pack(results)
        except USERS_ERRORS:  # find the results that cannot be pickled
            payload, buffers, unpicklable = pack_results(results, pack_by_value)
            failed = failed or unpicklable
        results.clear()
        held = None if lease is None else lease()
        # As a rule nobody has the inputs any more: their memory, in this core's caches, takes the results.
        # Views that still exist, also in the results' buffers, keep the lease alive, and the inputs stay
        # (test_inputs_that_the_worker_keeps_stay_as_they_were).
        taken = request.inputs_nbytes if held is not None else 0
        length, room = _blob_sizes(payload, buffers)
        fits = taken + room <= request.block_nbytes
        if fits:
            blob, at = _write_blob(self._memory.view, request.block_at + taken, payload, buffers)
        else:  # through the pipe, one buffer after the other
            table = encode_table((0, buffer.nbytes) for buffer in buffers)
            blob, at = [table, *map(bytes, buffers), payload], -1
            length += sum(buffer.nbytes for buffer in buffers)
        n_buffers = len(buffers)
        del payload
        buffers.clear()
        flags = (FAILED if failed else 0) | (0 if fits else THROUGH_PIPE)
        if held is not None:
            flags |= HELD
            seq, released = request.seq, self._released
            # The callback runs in any thread, or in a collection: it only notes the chunk for the next reply.
            self._kept[seq] = weakref.ref(held, lambda _: released.append(seq))
            del held
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

    def encode(self, worker: int, chunk: Chunk) -> tuple[Block, bytes]:
        """Put a chunk's items into shared memory; set its ``nbytes``.

        Returns:
            Their block, and the message to the worker.
        """
        payload, buffers = self._pack(worker, chunk.items)
        length, inputs = _blob_sizes(payload, buffers)
        # Untouched memory costs nothing, so the first guess is generous.
        expected = self._result_bytes * len(chunk.items) * 1.25 if self._result_bytes else 2.0 * inputs
        block = self._memory.allocate(inputs + align(int(expected)) + SPARE)
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
            inputs_nbytes=inputs,
            shared_nbytes=self._memory.nbytes,
            run=chunk.run,
        )
        chunk.nbytes = inputs if at >= 0 else inputs + length
        return block, b"".join((REQUEST.pack(*request), *blob))

    def _pack(self, worker: int, items: list[Any]) -> tuple[bytes, list[memoryview]]:
        try:
            if not self._tracks_definitions:
                payload, buffers = pack(items)
                if self._same_main or b"__main__" not in payload:
                    return payload, buffers
            found: dict[str, Any] = {}
            payload, buffers = pack(items, self._definitions.key_of(found))
            self._tracks_definitions = bool(found)  # later items are like these, as a rule
            if b"__main__" in payload:
                return pack_by_value(items)  # something else of __main__ than classes and functions
            if unsent := self._definitions.unsent(worker, found):
                payload, buffers = pack((SentDefinitions(unsent), items), self._definitions.key_of(found))
        except Exception:  # noqa: BLE001 - cloudpickle may still be able to, or says why not
            return pack_by_value(items)
        self._definitions.note_sent(worker, unsent, found)
        return payload, buffers

    def decode(self, block: Block, reply: Reply, blob: Any) -> tuple[list[Any], bool, int, bool]:
        """Unpickle results.

        Returns:
            The results, whether some are failures, how many bytes they took, and whether they are
            views of the block. Such a block is free again when the last view has died.
        """
        failed, leased, nbytes = bool(reply.flags & FAILED), False, reply.blob_nbytes
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
            results, failed = [Failure.of(error, RESULT)] * reply.n_items, True
        self._result_bytes = max(nbytes / reply.n_items, 0.9 * self._result_bytes)
        return results, failed, nbytes, leased

    def _buffers(self, block: Block, table: list[tuple[int, int]], *, leased: bool) -> list[Any]:
        if not leased:
            memory = self._memory.view
            return [bytearray(memory[at : at + size]) for at, size in table]
        memory, base = self._memory.lease_block(block), block.offset
        return [memory[at - base : at - base + size] for at, size in table]
