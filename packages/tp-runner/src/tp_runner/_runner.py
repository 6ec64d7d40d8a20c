"""The runner classes: six static methods, and calls that stream items through them."""

import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tp_runner._cfg import copy_cfg
from tp_runner._devices import resolve
from tp_runner._errors import RunnerClosed
from tp_runner._open import Opener
from tp_runner._program import ClassProgram
from tp_runner._stats import RunnerStats
from tp_runner._stream import ResultStream

if TYPE_CHECKING:
    from tp_runner._pool import RunnerPool

__all__ = ["OrderedRunner", "UnorderedRunner"]


class _Runner:
    """A stream of items through one stateful worker for each device.

    Args:
        devices: A number of CPU workers; a device or a sequence of them, one worker for each;
            ``"auto"`` for the accelerators there are; ``None`` for one CPU worker on each core.
        cfg: A mapping, namespace, dataclass or ``None``. Each worker gets its own copy, and the
            consumer a fresh one with each call.
        queue_scale: The most items on their way for each worker. By default the runner finds a
            bound itself: as few as keep the workers busy.
        engine: What the workers are: ``"process"``, ``"thread"``, ``"inline"``, ``"ray"`` or the
            name of an engine that a plugin brings.
        progress: Whether calls show a progress bar.
        options: ``start_method``, ``on_error``, ``retries``, ``restart``, ``timeout_s``, ``batch``,
            ``collate``, ``max_wait_s``, ``max_bytes``, ``threads``, ``log_level``, ``timeline``;
            the README says what they do.

    Raises:
        ConfigError: An option is unknown or has a wrong value.
        DeviceError: A device does not exist here.
        NotPicklableError: The class refers to something that cannot travel to the workers.
        WorkerError: ``producer_init`` raised in a worker; the others are stopped.

    Example:
        >>> class Squares(OrderedRunner):
        ...     @staticmethod
        ...     def producer_work(device, cfg, data):
        ...         return data**cfg.exponent
        >>> with Squares(devices=2, cfg={"exponent": 2}, engine="thread") as runner:
        ...     list(runner.stream([1, 2, 3]))
        [1, 4, 9]
    """

    _ordered: ClassVar[bool]
    _pool: "RunnerPool | None" = None

    def __init__(
        self,
        devices: Any = None,
        cfg: Any = None,
        queue_scale: float | None = None,
        *,
        engine: str = "process",
        progress: bool = False,
        **options: Any,
    ) -> None:
        self._cfg = copy_cfg(cfg)
        self._progress = progress
        self._opener = Opener(
            engine,
            ClassProgram(type(self), self._cfg),
            resolve(devices, elsewhere=engine == "ray"),
            {**options, "queue_scale": queue_scale, "ordered": self._ordered},
        )
        self.activate()

    # -- what subclasses override --------------------------------------------------------------

    @staticmethod
    def producer_init(device: str, cfg: Any) -> None:
        """Prepare a worker; what is set on ``cfg`` stays there for the other two."""

    @staticmethod
    def producer_work(device: str, cfg: Any, data: Any) -> Any:
        """Return the result of one item; with ``batch``, of each item of a batch."""
        del device, cfg
        return data

    @staticmethod
    def producer_end(device: str, cfg: Any) -> None:
        """Finish a worker, before its process ends."""

    @staticmethod
    def consumer_init(cfg: Any) -> None:
        """Prepare for the results of one call; runs in the caller."""

    @staticmethod
    def consumer_work(cfg: Any, data: Any) -> None:
        """Take one result; runs in the caller."""

    @staticmethod
    def consumer_end(cfg: Any) -> Any:
        """Return what the call returns; runs in the caller."""

    # -- calls ---------------------------------------------------------------------------------

    def __call__(self, items: Iterable[Any]) -> Any:
        """Send all items through the workers and the results through the consumer.

        Returns:
            What ``consumer_end`` returns.

        Raises:
            WorkerError: The work on an item raised; all results before it were consumed.
            WorkerDied: A worker died.
            Exception: Whatever the input or the consumer raised.
        """
        cfg = copy_cfg(self._cfg)
        self.consumer_init(cfg)
        with self.stream(items) as results:
            consume = self.consumer_work
            for result in results:
                consume(cfg, result)
        return self.consumer_end(cfg)

    def stream(self, items: Iterable[Any]) -> ResultStream:
        """Return an iterator over the results, without a consumer; it can be closed early."""
        from tp_runner._calls import stream

        return stream(self._running(), items, progress=self._progress)

    def astream(self, items: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
        """Return an asynchronous iterator over the results; the items may come asynchronously."""
        from tp_runner._calls import astream

        return astream(self._running(), items, progress=self._progress)

    def submit(self, item: Any) -> "Future[Any]":
        """Return a future of the result of one item; for servers, from any thread."""
        return self._running().submit(item)

    def pause(self) -> None:
        """Hand out no more items until :meth:`resume`."""
        self._running().pause()

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._running().resume()

    def cancel(self) -> None:
        """End the current call from another thread; it raises ``RunCancelled``."""
        self._running().cancel()

    def stats(self) -> RunnerStats:
        """Return what the workers have done so far."""
        return self._running().stats()

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write what each worker did when, for a trace viewer; needs ``timeline=True``."""
        self._running().write_timeline(path)

    # -- life ----------------------------------------------------------------------------------

    def activate(self) -> None:
        """Start the workers, if they are not running."""
        if self._pool is None or self._pool.closed:
            self._pool = self._opener.open()

    def close(self, *, timeout_s: float = 60.0) -> None:
        """End the workers with ``producer_end``; calling it again does nothing.

        Args:
            timeout_s: How long they may take; those that have not ended then are killed.

        Raises:
            WorkerError: ``producer_end`` raised.
        """
        if self._pool is not None:
            self._pool.close(timeout_s=timeout_s)

    def stop(self) -> None:
        """End the workers at once, without ``producer_end``."""
        self.close(timeout_s=0.0)

    def __enter__(self) -> Self:
        self.activate()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.stop()

    def __del__(self) -> None:
        self.stop()

    def _running(self) -> "RunnerPool":
        if self._pool is None or self._pool.closed:
            msg = f"this {type(self).__name__} is closed; activate() starts it again"
            raise RunnerClosed(msg)
        return self._pool


class OrderedRunner(_Runner):
    __doc__ = (_Runner.__doc__ or "").replace(
        "A stream of items", "Results in the order of the items: a stream", 1
    )

    _ordered = True


class UnorderedRunner(_Runner):
    __doc__ = (_Runner.__doc__ or "").replace("A stream of items", "Results as they come: a stream", 1)

    _ordered = False
