"""The backend ``"tp"`` of joblib, where joblib is installed: its batches of calls on an executor."""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

from tp_core.errors import ConfigError
from tp_core.internal import available_cores

from tp_runner._executor import Executor

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
            """Return how many workers ``n_jobs`` asks for; -1 is one on each core.

            Raises:
                ValueError: ``n_jobs`` is 0.
            """
            if n_jobs == 0:
                msg = "n_jobs == 0 in Parallel has no meaning; give a number of workers, or -1 for each core"
                raise ValueError(msg)
            if n_jobs is None:
                return 1
            return n_jobs if n_jobs > 0 else max(1, available_cores() + 1 + n_jobs)

        def configure(self, n_jobs: int = 1, parallel: Any = None, **options: Any) -> int:
            """Start the workers; a single one is the caller, as with joblib's own backends.

            Raises:
                ConfigError: An option is neither joblib's nor an executor's.
            """
            n_workers = self.effective_n_jobs(n_jobs)
            if n_workers == 1:
                raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
            self.parallel, self._options = parallel, options
            given = {"threads": self.inner_max_num_threads, **self.backend_kwargs}
            given |= {name: v for name, v in options.items() if name not in _JOBLIB_OPTIONS and v is not None}
            self._executor = Executor(n_workers, **given)
            return n_workers

        def submit(
            self, func: Callable[[], Any], callback: Callable[[Any], None] | None = None
        ) -> "concurrent.futures.Future[Any]":
            """Schedule a batch of calls."""
            assert self._executor is not None  # noqa: S101 - joblib configures first
            future = self._executor.submit(_call, func)
            if callback is not None:
                future.add_done_callback(callback)
            return future

        def retrieve_result_callback(self, out: "concurrent.futures.Future[Any]") -> Any:
            """Return the result of a batch, or raise its error."""
            return out.result()

        def terminate(self) -> None:
            """End the workers."""
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


def _call(func: Callable[[], Any]) -> Any:
    """Run a batch of calls in a worker; register the backend there, as nested calls may name it."""
    register_joblib()
    return func()
