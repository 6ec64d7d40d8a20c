"""The runner classes: six static methods, and calls that stream items through them."""

import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, Unpack

from tp_core.errors import ConfigError
from tp_core.output import shows_progress

from tp_runner._engines import PoolFactory, worker_devices
from tp_runner._options import RunnerOptions
from tp_runner._stats import RunnerStats
from tp_runner._stream import ResultStream
from tp_runner._workers._work import ClassProgram, copy_cfg
from tp_runner.errors import RunnerClosedError

if TYPE_CHECKING:
    import typing_extensions
    from tp_core import DeviceSpec
    from tp_core.output import Progress

    from tp_runner._scheduling._pool import RunnerPool
    from tp_runner._scheduling._source import MapStyle

    R = typing_extensions.TypeVar("R", default=Any)  # typing's has no default before Python 3.13
else:
    R = TypeVar("R")


class _Runner(Generic[R]):
    """A stream of items through one stateful worker for each device.

    A class may name the type of its results: ``class Halves(OrderedRunner[float])``.

    Args:
        devices: A device or a sequence of them, one worker for each; ``"auto"`` for the accelerators
            there are; ``None`` for one CPU worker on each core. **An integer is a number of CPU
            workers here**, where everything else of tp takes it for a number of accelerators.
        cfg: A mapping, namespace, dataclass or ``None``. Each worker gets its own copy, and the
            consumer a fresh one with each call.
        queue_scale: The most items on their way for each worker. By default the runner finds a
            bound itself: as few as keep the workers busy.
        engine: What the workers are: ``"process"``, ``"thread"``, ``"inline"``, ``"ray"`` or the
            name of an engine that a plugin brings.
        progress: Whether calls show a progress bar, on standard error or in a notebook's output; "auto" where
            there is a terminal or a notebook.
        n_workers: How many CPU workers, in place of ``devices``.
        options: The options of :class:`RunnerOptions`.

    Raises:
        ConfigError: An option is unknown or has a wrong value, or a method takes other arguments.
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
        devices: "DeviceSpec" = None,
        cfg: Any = None,
        queue_scale: float | None = None,
        *,
        n_workers: int | None = None,
        engine: str = "process",
        progress: "Progress" = "auto",
        **options: Unpack[RunnerOptions],
    ) -> None:
        self._cfg = copy_cfg(cfg)
        self._progress = shows_progress(progress)
        self._factory = PoolFactory(
            engine,
            ClassProgram(type(self), self._cfg),
            worker_devices(engine, devices, n_workers),
            {**options, "queue_scale": queue_scale, "ordered": self._ordered},
        )
        _check_methods(type(self))
        self.activate()

    # -- what subclasses override --------------------------------------------------------------

    @staticmethod
    def producer_init(device: str, cfg: Any) -> None:
        """Prepare a worker; attributes set on ``cfg`` are there for the other two."""

    @staticmethod
    def producer_work(device: str, cfg: Any, data: Any) -> Any:
        """Return the result of one item; with ``batch``, of each item of a batch."""
        del device, cfg
        return data

    @staticmethod
    def producer_end(device: str, cfg: Any) -> Any:
        """Finish a worker, before its process ends; :attr:`exit_results` has the returned value."""

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

    def __call__(self, items: "Iterable[Any] | MapStyle[Any]") -> Any:
        """Send all items through the workers and the results through the consumer.

        Returns:
            What ``consumer_end`` returns.

        Raises:
            WorkerError: The work on an item raised; all results before it were consumed.
            WorkerDiedError: A worker died, and was not started again.
            ItemTimeoutError: An item took longer than ``timeout_s``.
            NotPicklableError: An item or a result cannot travel between processes.
            RunnerClosedError: The runner is closed.
            ConfigError: The class overrides no method, and so does nothing with the items.
            Exception: Whatever the input or the consumer raised.
        """
        self._running()
        if not any(_is_overridden(type(self), name) for name in _METHODS):
            msg = (
                f"{type(self).__name__} does nothing with items and their results; write a class of it with "
                "producer_work(device, cfg, data), or take runner.stream(items)"
            )
            raise ConfigError(msg)
        cfg = copy_cfg(self._cfg)
        self.consumer_init(cfg)
        with self.stream(items) as results:
            consume = self.consumer_work
            for result in results:
                consume(cfg, result)
        return self.consumer_end(cfg)

    def stream(self, items: "Iterable[Any] | MapStyle[Any]") -> ResultStream[R]:
        """Return an iterator over the results, without a consumer; it can be closed early.

        Several streams, asynchronous streams and submitted items take turns on the workers. The iterator
        raises what a call of the runner raises, and ``RunCancelledError`` after :meth:`cancel`.

        Raises:
            RunnerClosedError: The runner is closed.
        """
        from tp_runner._map import stream

        return stream(self._running(), items, progress=self._progress)

    def astream(self, items: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[R]:
        """Return an asynchronous iterator over the results; the items may come asynchronously.

        It raises what the iterator of :meth:`stream` raises.

        Raises:
            RunnerClosedError: The runner is closed.
        """
        from tp_runner._async_stream import AsyncResultStream

        return AsyncResultStream(self._running(), items, progress=self._progress)

    def submit(self, item: Any) -> "Future[R]":
        """Return a future of the result of one item; for servers, from any thread.

        Leaving a ``with`` block, :meth:`close` and the end of the program finish every future;
        :meth:`stop`, and a ``with`` block that an exception leaves, end them with ``RunnerClosedError``.

        Raises:
            RunnerClosedError: The runner is closed.
        """
        return self._running().submit(item)

    def pause(self) -> None:
        """Hand out no more items until :meth:`resume`; workers finish the items that they have.

        Raises:
            RunnerClosedError: The runner is closed.
        """
        self._running().pause()

    def resume(self) -> None:
        """Hand out items again after :meth:`pause`.

        Raises:
            RunnerClosedError: The runner is closed.
        """
        self._running().resume()

    def cancel(self, *, kill_after_s: float | None = None) -> None:
        """End every stream: a thread that waits for its results gets ``RunCancelledError``.

        Args:
            kill_after_s: Wait this many seconds for workers that are busy with items of those streams, then
                kill and replace them; the others keep their states. By default they finish their items.

        Raises:
            RunnerClosedError: The runner is closed.
            ConfigError: ``kill_after_s`` is given, and these workers cannot be killed.
        """
        self._running().cancel(kill_after_s)

    def stats(self) -> RunnerStats:
        """Return the workers' statistics so far.

        Raises:
            RunnerClosedError: The runner is closed.
        """
        return self._running().stats()

    @property
    def exit_results(self) -> list[Any]:
        """The value of ``producer_end`` in each worker that has ended: after :meth:`close`, in all of them.

        They are in the order of the workers' numbers; of a worker that was replaced there is one for each
        that took its place, oldest first. One that was killed or stopped has ``None``, as ``producer_end``
        did not run to its end there.

        Raises:
            NotPicklableError: The value of one of them cannot travel to the caller.
            ConfigError: The engine, one of a plugin, knows nothing of it.
        """
        results: list[Any] = self._pool.exit_results() if self._pool is not None else []
        return results

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write what each worker did when, for a viewer of Chrome's trace format such as Perfetto.

        Raises:
            ConfigError: The runner was made without ``timeline=True``.
        """
        self._running().timeline().write_timeline(path)

    def draw_timeline(self, width: int = 72) -> str:
        """Return a picture in text, ``width`` characters wide, of how busy each worker was when.

        Raises:
            ConfigError: The runner was made without ``timeline=True``.
        """
        return self._running().timeline().draw_timeline(width)

    # -- life ----------------------------------------------------------------------------------

    def activate(self) -> None:
        """Start the workers, if they are not running.

        Raises:
            WorkerError: ``producer_init`` raised in a worker; the others are stopped.
        """
        if self._pool is None or self._pool.closed:
            self._pool = self._factory.open()

    def close(self, *, timeout_s: float | None = None) -> None:
        """Finish the submitted items and end the workers with ``producer_end``; a second call does nothing.

        Args:
            timeout_s: Seconds that the workers may take over their end, by default ``end_timeout_s``; those
                that have not ended then are killed, with a warning. 0 ends everything at once.

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
        if self._pool is not None:
            self._pool.drop()

    def _running(self) -> "RunnerPool":
        if self._pool is None or self._pool.closed:
            msg = f"this {type(self).__name__} is closed; activate() starts it again"
            raise RunnerClosedError(msg)
        return self._pool


# The methods of a runner, and what each of them gets.
_METHODS = {
    "producer_init": ("device", "cfg"),
    "producer_work": ("device", "cfg", "data"),
    "producer_end": ("device", "cfg"),
    "consumer_init": ("cfg",),
    "consumer_work": ("cfg", "data"),
    "consumer_end": ("cfg",),
}
_VARIADIC = 0x04  # of inspect: CO_VARARGS. Its import would be a tenth of a first start.
_LIKE = 0.85  # "producer_wrok" is 0.92 like "producer_work"; "producer_helper" is 0.71


def _is_overridden(kind: type, name: str) -> bool:
    return getattr(kind, name) is not getattr(_Runner, name)


def _check_methods(kind: type) -> None:
    """Check that a class has its methods under their names, and that they take what they get.

    Raises:
        ConfigError: A method takes other arguments, or has nearly the name of one that is not there.
    """
    for name, arguments in _METHODS.items():
        method: Any = getattr(kind, name)
        if not isinstance(method, type(_is_overridden)):  # a class method, or another callable
            continue
        code = method.__code__
        taken = code.co_varnames[: code.co_argcount]
        optional = len(method.__defaults__ or ())
        fits = len(taken) - optional <= len(arguments) <= len(taken) or bool(code.co_flags & _VARIADIC)
        if not fits or taken[:1] == ("self",):
            msg = (
                f"{kind.__name__}.{name}({', '.join(taken)}) does not take what a runner gives it; write "
                f"@staticmethod, and def {name}({', '.join(arguments)})"
            )
            raise ConfigError(msg)
    missing = [name for name in _METHODS if not _is_overridden(kind, name)]
    for own in vars(kind):
        if own.startswith(("produce", "consume")) and own not in _METHODS:
            # For a name that may be wrong: each start would wait for the import.
            from difflib import get_close_matches

            for meant in get_close_matches(own, missing, 1, _LIKE):
                msg = f"a runner never calls {own!r}, a method of {kind.__name__}; did you mean {meant!r}?"
                raise ConfigError(msg)


class OrderedRunner(_Runner[R]):
    __doc__ = (_Runner.__doc__ or "").replace(
        "A stream of items", "Results in the order of the items: a stream", 1
    )

    _ordered = True


class UnorderedRunner(_Runner[R]):
    __doc__ = (_Runner.__doc__ or "").replace("A stream of items", "Results as they come: a stream", 1)

    _ordered = False
