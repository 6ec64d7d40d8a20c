"""Our executor in the place of others, for tests that other projects wrote for theirs.

A plugin of pytest: ``-p stand_in`` puts it there before those tests are imported, and ``install()`` does
so in the programs that they start.
"""

import concurrent.futures
import functools
import os
import sys
import time
import types
import unittest
import weakref
from pathlib import Path

from tp_runner import Executor, register_joblib

HERE = Path(__file__).parent

_open = weakref.WeakSet()


class ProcessStandIn(Executor):
    """Takes what ``ProcessPoolExecutor`` takes, the standard library's or loky's, by our names for it."""

    def __init__(
        self,
        max_workers=None,
        mp_context=None,
        initializer=None,
        initargs=(),
        *,
        max_tasks_per_child=None,
        context=None,
        **options,
    ):
        method = mp_context or context
        # Without a fork server beside the workers: loky's tests count this process's children.
        options["start_method"] = "spawn" if method is None else method.get_start_method()
        super().__init__(
            max_workers,
            initializer=initializer,
            initargs=initargs,
            max_items_per_worker=max_tasks_per_child,
            **options,
        )
        _open.add(self)

    # What their tests look at to see whether all is well; loky's do so before and after every one.

    _flags = types.SimpleNamespace(broken=None)

    @property
    def _max_workers(self):
        return self.n_workers

    @property
    def _processes(self):
        handles = self._pool.fleet._handles
        return {handle.process.pid: handle.process for handle in handles.values()}

    def shutdown(self, wait=True, *, cancel_futures=False, kill_workers=False):
        if kill_workers:
            self._pool.stop()
        super().shutdown(wait, cancel_futures=cancel_futures)


class ThreadStandIn(Executor):
    """Takes what ``ThreadPoolExecutor`` takes."""

    @property
    def _max_workers(self):
        return self.n_workers

    def __init__(self, max_workers=None, thread_name_prefix="", initializer=None, initargs=()):
        super().__init__(max_workers, initializer=initializer, initargs=initargs, engine="thread")
        _open.add(self)


def install():
    """Put our executors where others are looked for."""
    for kind, name in ((ProcessStandIn, "ProcessPoolExecutor"), (ThreadStandIn, "ThreadPoolExecutor")):
        kind.__name__ = name  # their tests name it to programs that they start
        setattr(concurrent.futures, name, kind)
    if os.environ["TP_PEERS"] == "loky":
        import loky.process_executor

        loky.ProcessPoolExecutor = loky.process_executor.ProcessPoolExecutor = ProcessStandIn
    if os.environ["TP_PEERS"] == "joblib":
        from joblib.parallel import BACKENDS

        register_joblib()
        BACKENDS["loky"] = BACKENDS["tp"]  # which is joblib's default


def _in_programs_too():
    """Have the programs that CPython's tests start find our executors."""
    from test import support
    from test.support import script_helper

    support.SHORT_TIMEOUT = support.LONG_TIMEOUT = 800.0  # theirs are for a machine with nothing else to do
    run = script_helper.assert_python_ok

    @functools.wraps(run)
    def with_ours(option, code, *arguments, **variables):
        first = f"import sys; sys.path[:] = {sys.path!r}; import stand_in; stand_in.install()\n"
        return run(option, first + code, *arguments, **variables)

    script_helper.assert_python_ok = with_ours


class _StoppingResult:
    """A result of unittest that ends what a failed test has left before its ``tearDown`` waits for that."""

    def __init__(self, result):
        self._result = result

    def __getattr__(self, name):
        return getattr(self._result, name)

    def addError(self, *arguments):  # noqa: N802 - unittest's name
        _stop_all()
        self._result.addError(*arguments)

    def addFailure(self, *arguments):  # noqa: N802 - unittest's name
        _stop_all()
        self._result.addFailure(*arguments)


def _stop_after_failures():
    run = unittest.TestCase.run
    unittest.TestCase.run = lambda case, result=None: run(case, _StoppingResult(result))


def _have_patience():
    """Relax limits of loky's tests, which are for a machine with nothing else to do."""
    mixin = sys.modules["tests._executor_mixin"]
    mixin.TIMEOUT = 800
    mixin.time = types.SimpleNamespace(sleep=time.sleep, time=lambda: time.time() / 80)


sys.path.insert(0, str(HERE))
install()
if os.environ["TP_PEERS"] == "cpython":
    _in_programs_too()
    _stop_after_failures()


def pytest_collection_finish():
    """Change what has been imported by now."""
    if os.environ["TP_PEERS"] == "loky":
        _have_patience()


def pytest_runtest_makereport(call):
    """End what a test that failed in its middle has left: its own end would wait for all of its calls."""
    if call.when == "call" and call.excinfo is not None:
        _stop_all()


def pytest_runtest_logfinish():
    """End what a test has left: loky's next ones would count its processes."""
    _stop_all()


def _stop_all():
    for executor in list(_open):
        executor._pool.stop()
    _open.clear()


def pytest_unconfigure():
    """End at once: a test that failed in its middle may have left calls that nobody lets go on."""
    sys.stdout.flush()
    os._exit(0)
