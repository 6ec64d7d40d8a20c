"""Random numbers: independent for each replica, and a function of the caller's seed.

Replica 0 draws from its device's generator, as the plain module would. Every other replica draws
from a stream that is a function of that generator's state at the beginning of the call and of the
replica's number. So one seed gives one result, whatever the threads' timing, and no two replicas
drop the same units.

torch has one default generator per device, shared by all threads. Where a replica is alone on its
accelerator, that generator is seeded for the time of the call. Where replicas share one (the CPU's
always is), each drawing function is run alone, with the replica's state put into the generator; and
activation checkpoints are given that state, to draw from it again in backward.
"""

import hashlib
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tp_core.replicas._checkpoints import correct_checkpoints
from tp_core.replicas._random_ops import is_random_op

__all__ = ["SerializedRng", "Streams"]

_CPU = torch.device("cpu")


class Streams:
    """The random streams of the replicas during one call.

    Args:
        devices: The devices of the replicas that take part.
    """

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self._home = _generator(devices[0])
        self._start: Tensor | None = None
        self._is_shared = _are_shared(devices)
        if not all(self._is_shared):
            self.note_start()  # others do not wait for the lock before they draw
        self._lock = _drawing_lock()
        self._devices = devices
        self._drew = False

    def of(self, number: int) -> AbstractContextManager[Any]:
        """Return the context in which the replica of that number runs."""
        generator = _generator(self._devices[number])
        if generator is None:
            return nullcontext()
        if self._is_shared[number]:
            return SerializedRng(self, generator, number)
        return nullcontext() if number == 0 else OwnRng(self, generator, number)

    def note_start(self) -> None:
        """Keep the state of the call's beginning; it must be called before anything is drawn."""
        if self._start is None and self._home is not None:
            self._start = self._home.get_state()

    def close(self) -> None:
        """Make sure that the next call finds another state, if replica 0 drew nothing."""
        if not self._drew or self._home is None or self._start is None:
            return
        if torch.equal(self._start, self._home.get_state()):
            torch.rand((), device=self._devices[0])

    def seed(self, number: int) -> int:
        """Return the seed of a replica in this call."""
        state = b"" if self._start is None else self._start.numpy().tobytes()
        digest = hashlib.blake2b(state, digest_size=8, salt=number.to_bytes(8, "little"))
        return int.from_bytes(digest.digest()) >> 1  # torch takes a signed 64-bit seed

    def note_draw(self) -> None:
        """Note that a replica other than 0 drew a number."""
        self._drew = True

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while a replica draws."""
        return self._lock


class SerializedRng(TorchFunctionMode):
    """Serializes the random operations of replicas that share a generator, each with its own state."""

    def __init__(self, streams: Streams, generator: torch.Generator, number: int) -> None:
        super().__init__()
        self._streams = streams
        self._generator = generator
        self._number = number
        self._state: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not is_random_op(func, args, kwargs):
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        generator = self._generator
        with self._streams.lock:
            self._streams.note_start()
            if self._number == 0:
                correct_checkpoints(generator)
                return func(*args, **kwargs)
            saved = generator.get_state()
            if self._state is None:
                generator.manual_seed(self._streams.seed(self._number))
                self._streams.note_draw()
            else:
                generator.set_state(self._state)
            try:
                correct_checkpoints(generator)
                return func(*args, **kwargs)
            finally:
                self._state = generator.get_state()
                generator.set_state(saved)


class OwnRng:
    """Seeds the generator of a replica that is alone on its accelerator."""

    def __init__(self, streams: Streams, generator: torch.Generator, number: int) -> None:
        self._streams = streams
        self._generator = generator
        self._number = number

    def __enter__(self) -> None:
        self._saved = self._generator.get_state()
        self._generator.manual_seed(self._streams.seed(self._number))
        self._start = self._generator.get_state()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if not torch.equal(self._start, self._generator.get_state()):
            self._streams.note_draw()
        self._generator.set_state(self._saved)


@lru_cache(maxsize=64)
def _are_shared(devices: tuple[torch.device, ...]) -> tuple[bool, ...]:
    """Return for each device whether others draw from its generator, too."""
    return tuple(d.type == "cpu" or devices.count(d) > 1 for d in devices)


def _drawing_lock() -> AbstractContextManager[Any]:
    """Return the lock under which the generators are drawn from.

    The compiler restores their states after each compilation, with what was drawn meanwhile forgotten
    or a replica's state left in place. It holds a lock then; torch has no public name for it.
    """
    compiler: Any = sys.modules.get("torch._dynamo.convert_frame")
    return (
        threading.Lock() if compiler is None else cast("AbstractContextManager[Any]", compiler.compile_lock)
    )


def _generator(device: torch.device) -> torch.Generator | None:
    """Return the default generator of a device, or ``None`` where torch does not expose it.

    While a CUDA graph is captured it does not: random numbers are then drawn with each replay.
    """
    if device == _CPU:  # comparing the types takes several times as long
        return torch.default_generator
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    module = getattr(torch, device.type, None)
    generators: Any = getattr(module, "default_generators", None)
    if not generators or device.index is None:
        return None
    generator: torch.Generator = generators[device.index]
    return generator
