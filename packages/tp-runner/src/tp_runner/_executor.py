"""An executor of ``concurrent.futures`` on the workers of a runner, and joblib's backend on it."""

import concurrent.futures
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack

from tp_core.errors import ConfigError, DeviceError
from tp_core.launching import available_cores

from tp_runner._engines import PoolFactory, worker_devices
from tp_runner._options import RunnerOptions, check_truth, refuse_async
from tp_runner._scheduling._source import MapStyle, as_iterable
from tp_runner._workers._item import warn_of_copied_generators
from tp_runner.errors import RunnerClosedError

if TYPE_CHECKING:
    from tp_core import DeviceSpec


P = ParamSpec("P")
R = TypeVar("R")

MAX_RESTARTS = 1000  # one call that kills its worker must not break the executor for the others


class Executor(concurrent.futures.Executor):
    """Executor of functions on the workers of a runner.

    It takes the place of ``concurrent.futures.ProcessPoolExecutor``: in asyncio's ``run_in_executor``,
    ``as_completed``, ``map`` over several iterables. Arrays and tensors travel through shared memory, as
    out-of-band buffers of pickle's protocol 5 (PEP 574); functions and classes of ``__main__``, lambdas and
    closures travel too. A future raises what the function raised, with the worker's traceback in its
    ``__cause__``. A worker that dies is started again, and so is its call. A call with which three workers
    died raises ``WorkerDiedError``, here also a ``BrokenProcessPool``; the other calls are not affected.

    Args:
        max_workers: How many CPU workers; by default one on each core.
        devices: Devices in place of a number of workers, one worker for each.
        initializer: Called once in each worker, before its first call.
        initargs: Its arguments.
        engine: What the workers are: ``"process"``, ``"thread"`` or ``"ray"``.
        options: The options of :class:`RunnerOptions`, except batches and ``on_error``.

    Raises:
        ConfigError: An option is unknown, has a wrong value or means nothing here.
        DeviceError: ``max_workers`` is not a positive number, or a device does not exist here.
        NotPicklableError: ``initializer`` cannot travel to the workers.
        WorkerError: ``initializer`` raised in a worker.

    Example:
        >>> with Executor(2, engine="thread") as executor:
        ...     list(executor.map(pow, [2, 3], [5, 2]))
        [32, 9]
    """

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        devices: "DeviceSpec" = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        engine: str = "process",
        **options: Unpack[RunnerOptions],
    ) -> None:
        for name in ("batch", "collate", "max_wait_s", "on_error"):
            if options.get(name) is not None:
                msg = f"an Executor has no use for {name}={options.get(name)!r}: it makes single calls"
                raise ConfigError(msg)
        if "n_workers" in options:  # type checkers refuse it
            msg = "an Executor has no n_workers: write Executor(2), or max_workers=2"
            raise ConfigError(msg)
        if isinstance(max_workers, int) and max_workers < 1:
            msg = f"max_workers must be greater than 0, got {max_workers!r}"
            raise DeviceError(msg)
        names = worker_devices(engine, devices, max_workers)
        if engine == "process" and options.get("max_restarts") is None:
            options["max_restarts"] = MAX_RESTARTS
        self.n_workers = len(names)
        self._checked_code: Any = None  # the code of the function that was submitted last
        factory = PoolFactory(engine, _Program(initializer, initargs), names, options)
        self._has_copies = factory.has_copies
        self._pool = factory.open()

    def submit(
        self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> "concurrent.futures.Future[R]":
        """Return a future of ``fn(*args, **kwargs)``.

        The future raises what ``fn`` raised, ``WorkerDiedError`` or ``NotPicklableError``.

        Raises:
            RunnerClosedError: The executor was shut down; it is a ``RuntimeError`` too.
            ConfigError: ``fn`` is an ``async def``, which no worker awaits.
        """
        code = getattr(fn, "__code__", fn)
        if code is not self._checked_code:  # as a rule many calls have one function
            self._checked_code = code
            refuse_async(fn)
            _refuse_unfinished(fn)
            if self._has_copies:
                warn_of_copied_generators([fn], stacklevel=2)
        if self._pool.closed:
            msg = "cannot schedule new futures: this executor was shut down; make another one"
            raise RunnerClosedError(msg)
        future: concurrent.futures.Future[R] = self._pool.submit((fn, args, kwargs), raise_original=True)
        return future

    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any] | MapStyle[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[R]:
        """Return an iterator over the results of ``fn`` on the items of one or more iterables, in order.

        Args:
            fn: The function, which takes an item of each iterable.
            iterables: Read at once, to the end of the shortest.
            timeout: Within how many seconds of this call a result has to be there, or the iterator raises a
                ``TimeoutError``; by default it waits.
            chunksize: Without effect: how many calls travel together follows from the time that they take.

        Raises:
            ConfigError: ``chunksize`` is less than 1.
            RunnerClosedError: The executor was shut down; it is a ``RuntimeError`` too.
        """
        if chunksize < 1:
            msg = f"chunksize must be at least 1, got {chunksize!r}"
            raise ConfigError(msg)
        return super().map(fn, *(as_iterable(items) for items in iterables), timeout=timeout)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers after all submitted calls.

        Args:
            wait: Whether to return only then.
            cancel_futures: Whether to cancel calls that no worker has yet.
        """
        for name, value in (("wait", wait), ("cancel_futures", cancel_futures)):
            check_truth({name: value}, name)
        if cancel_futures:
            self._pool.cancel_submitted()
        if wait:
            self._pool.close()
        else:
            self._pool.drop()

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            self._pool.drop()


class _Program:
    def __init__(self, initializer: Callable[..., object] | None, initargs: tuple[Any, ...]) -> None:
        self.works = [initializer]
        self._initializer = initializer
        self._initargs = initargs

    def __call__(self, device: str) -> Callable[[Any], Any]:
        del device
        if self._initializer is not None:
            self._initializer(*self._initargs)
        return _call


def _refuse_unfinished(function: Any) -> None:
    """Refuse a function of a module that is being imported.

    Calls are pickled in a thread of their own too. To pickle the function by its name, that thread would wait
    for the end of the import, which waits for the call.
    """
    spec = getattr(sys.modules.get(getattr(function, "__module__", None) or ""), "__spec__", None)
    if getattr(spec, "_initializing", False):  # private to importlib
        name = function.__qualname__
        msg = (
            f"{name} is of the module {function.__module__!r}, which is still being imported, and each "
            "worker would import it too; start the work in a function, or put it under "
            "if __name__ == '__main__'"
        )
        raise ConfigError(msg)


def _call(task: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> Any:
    function, args, kwargs = task
    return function(*args, **kwargs)


# -- The backend ``"tp"`` of joblib, where joblib is installed ------------------------------------


# Options that joblib hands to every backend: for memory maps of large arguments, which travel through shared
# memory here, and for joblib itself.
_JOBLIB_OPTIONS = {"context", "max_nbytes", "mmap_mode", "prefer", "require", "temp_folder", "verbose"}


def register_joblib() -> None:
    """Make ``joblib.parallel_config("tp")`` run joblib's work, scikit-learn's too, on our workers.

    Raises:
        ConfigError: joblib is not installed.

    Example:
        >>> register_joblib()
        >>> with joblib.parallel_config("tp", n_jobs=2):
        ...     joblib.Parallel()(joblib.delayed(abs)(i) for i in (-1, -2))
        [1, 2]
    """
    try:
        from joblib.parallel import register_parallel_backend
    except ImportError as error:
        msg = "joblib is not installed; pip install joblib"
        raise ConfigError(msg) from error
    register_parallel_backend("tp", _backend())


@functools.cache
def _backend() -> Any:
    """Return the class of the backend; its parents are joblib's."""
    from joblib.parallel import AutoBatchingMixin, FallbackToBackend, ParallelBackendBase, SequentialBackend

    class TpBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]  # joblib has no types
        """Backend that runs joblib's batches of calls on an :class:`Executor`.

        Its options are given to ``Parallel`` or to ``parallel_config``.
        """

        supports_retrieve_callback = True
        supports_inner_max_num_threads = True
        default_n_jobs = -1
        _executor: Executor | None = None

        def effective_n_jobs(self, n_jobs: int | None) -> int:
            """Return how many workers ``n_jobs`` asks for; -1 is one on each core."""
            if n_jobs == 0:
                msg = "n_jobs == 0 in Parallel has no meaning; give a number of workers, or -1 for each core"
                raise ValueError(msg)
            if n_jobs is None:
                return 1
            if n_jobs > 0:
                return n_jobs
            return max(1, available_cores() + 1 + n_jobs)

        def configure(self, n_jobs: int = 1, parallel: Any = None, **options: Any) -> int:
            """Start the workers; a single one is the caller, as with joblib's own backends."""
            n_workers = self.effective_n_jobs(n_jobs)
            if n_workers == 1:
                raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
            self.parallel = parallel
            self._options = options
            executor_options = {"threads": self.inner_max_num_threads, **self.backend_kwargs}
            for name, value in options.items():
                if name not in _JOBLIB_OPTIONS and value is not None:
                    executor_options[name] = value
            self._executor = Executor(n_workers, **executor_options)
            return n_workers

        def submit(
            self, func: Callable[[], Any], callback: Callable[[Any], None] | None = None
        ) -> "concurrent.futures.Future[Any]":
            assert self._executor is not None  # noqa: S101 - joblib configures first
            for function, *_ in getattr(func, "items", ()):
                _refuse_unfinished(function)
            future = self._executor.submit(_call_batch, func)
            if callback is not None:
                future.add_done_callback(callback)
            return future

        def retrieve_result_callback(self, out: "concurrent.futures.Future[Any]") -> Any:
            return out.result()

        def terminate(self) -> None:
            executor, self._executor = self._executor, None
            if executor is not None:
                executor.shutdown()
            self.reset_batch_stats()

        def abort_everything(self, ensure_ready: bool = True) -> None:
            """End the workers at once, after a failure; start new ones if more work will come."""
            executor, self._executor = self._executor, None
            if executor is not None:
                executor._pool.stop()
            if ensure_ready:
                self.configure(self.parallel.n_jobs, self.parallel, **self._options)

    return TpBackend


def _call_batch(func: Callable[[], Any]) -> Any:
    register_joblib()
    return func()
