"""Random numbers: independent for each replica, and a function of the caller's seed.

Replica 0 draws from its device's generator, as the module by itself would. Every other replica
draws from a stream that follows from the state of that generator when the call began and from the
replica's number. So one seed gives one run, whatever the threads' timing, and no two replicas drop
the same units.

torch has one default generator per device, shared by all threads. Where a replica is alone on its
accelerator, that generator is set for the time of the call. Where replicas share one (the CPU's
always is), each drawing function is run alone, with the replica's state put into the generator.
"""

import hashlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tp_core.replicas._drawing import draws

__all__ = ["Streams"]


class Streams:
    """The random streams of the replicas during one call.

    Args:
        devices: The devices of the replicas that take part.
    """

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self._home = _generator(devices[0])
        self._start = None if self._home is None else self._home.get_state()
        self._shared = len(set(devices)) < len(devices) or any(d.type == "cpu" for d in devices)
        self._lock = threading.Lock()
        self._devices = devices
        self._drew = False

    def of(self, number: int) -> AbstractContextManager[Any]:
        """Return the context in which the replica of that number runs."""
        generator = _generator(self._devices[number])
        if generator is None:
            return nullcontext()
        if self._shared:
            return _Turns(self, generator, number)
        return nullcontext() if number == 0 else _Set(self, generator, number)

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
    def lock(self) -> threading.Lock:
        """Held while a replica draws."""
        return self._lock


class _Turns(TorchFunctionMode):
    """Lets replicas that share a generator draw one after the other, each from its own state."""

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
        if not draws(func, args, kwargs):
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        with self._streams.lock:
            if self._number == 0:
                return func(*args, **kwargs)
            generator = self._generator
            saved = generator.get_state()
            if self._state is None:
                generator.manual_seed(self._streams.seed(self._number))
                self._streams.note_draw()
            else:
                generator.set_state(self._state)
            try:
                return func(*args, **kwargs)
            finally:
                self._state = generator.get_state()
                generator.set_state(saved)


class _Set:
    """Lets a replica that is alone on its accelerator draw from its own stream."""

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


def _generator(device: torch.device) -> torch.Generator | None:
    """Return the default generator of a device, or ``None`` where torch does not give it away."""
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type, None)
    generators: Any = getattr(module, "default_generators", None)
    if not generators or device.index is None:
        return None
    generator: torch.Generator = generators[device.index]
    return generator
