"""The backend ``"tp"`` of joblib. It imports joblib: :func:`tp_runner.register_joblib` imports it."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

from joblib.parallel import AutoBatchingMixin, ParallelBackendBase
from tp_core.internal import available_cores

from tp_runner._executor import Executor

__all__ = ["TpBackend"]


class TpBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]  # joblib has no types
    """Runs joblib's batches of calls on an :class:`Executor`, whose options ``parallel_config`` takes."""

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
            msg = "n_jobs=0 means nothing to joblib; give a number of workers, or -1 for one on each core"
            raise ValueError(msg)
        if n_jobs is None:
            return 1
        return n_jobs if n_jobs > 0 else max(1, available_cores() + 1 + n_jobs)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **options: Any) -> int:
        """Start the workers."""
        del options  # joblib's own, about memory-mapped arguments: ours travel through shared memory
        n_workers = self.effective_n_jobs(n_jobs)
        self.parallel = parallel
        given = {"threads": self.inner_max_num_threads, **self.backend_kwargs}
        self._executor = Executor(n_workers, **given)
        return n_workers

    def submit(
        self, func: Callable[[], Any], callback: Callable[[Any], None] | None = None
    ) -> "concurrent.futures.Future[Any]":
        """Schedule a batch of calls."""
        assert self._executor is not None  # noqa: S101 - joblib configures first
        future = self._executor.submit(func)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: "concurrent.futures.Future[Any]") -> Any:
        """Return what a batch came to, or raise what it raised."""
        return out.result()

    def terminate(self) -> None:
        """End the workers."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """End the workers at once, after a failure; start new ones if more work will come."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor._pool.stop()
        if ensure_ready:
            self.configure(self.parallel.n_jobs, self.parallel)
