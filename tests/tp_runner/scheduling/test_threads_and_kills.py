"""What threads, tasks, signals, forks and kills do to a runner: nothing lost, twice or silent."""

import asyncio
import collections
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import tp_runner
from tp_core.errors import ConfigError, TpError
from tp_runner import (
    Executor,
    OrderedRunner,
    Pipeline,
    RunCancelledError,
    RunnerClosedError,
    WorkerDiedError,
    WorkerError,
)
from tp_runner._scheduling import _source  # private: a run ends in the midst of submit() by luck alone
from tp_runner._scheduling._run import Assignments, PassState  # private: the moments of one line, below
from tp_runner._workers import _fork_server  # private: a server's limit for an answer is five minutes
from tp_runner._workers._processes import WorkerHandle  # private: the moment after a send cannot be had

DEADLINE_S = 100.0
FORK = {"start_method": "fork"}
THREAD = {"engine": "thread"}
INLINE = {"engine": "inline"}
ENGINES = [FORK, THREAD, INLINE]


def double(item):
    return 2 * item


def nap(seconds):
    time.sleep(seconds)
    return seconds


class Worker(OrderedRunner):
    """Does what an item asks for."""

    @staticmethod
    def producer_init(device, cfg):
        cfg.state = object()

    @staticmethod
    def producer_work(device, cfg, item):
        match item:
            case ("nap", seconds):
                return nap(seconds)
            case ("pid", seconds):
                time.sleep(seconds)
                return os.getpid()
            case ("until cancelled", path):
                path.touch()
                deadline = time.monotonic() + DEADLINE_S
                while not tp_runner.item().cancelled and time.monotonic() < deadline:
                    time.sleep(0.005)
                path.with_suffix(".seen").write_text(str(tp_runner.item().cancelled))
            case ("hang", path):
                path.touch()
                time.sleep(DEADLINE_S)
            case ("raise",):
                raise ValueError(item)
            case ("die",):
                os.kill(os.getpid(), signal.SIGKILL)
            case ("die once", path):
                if not path.exists():
                    path.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            case ("write", data, path, spared):
                if path is None or not path.exists():
                    if path is not None:
                        path.touch()
                    _write_to_every_pipe(data, spared)
        return 2 * item if isinstance(item, int) else item[0]


def _write_to_every_pipe(data, spared):
    for path in descriptors():
        with contextlib.suppress(OSError):
            if int(path.name) > 2 and pipe_of(path) not in {None, *spared}:
                os.write(int(path.name), data)


def descriptors():
    return list(Path("/proc/self/fd").iterdir())


def pipe_of(path):
    """Return the name of the pipe that a descriptor is of, if it is of one."""
    with contextlib.suppress(OSError):
        name = str(path.readlink())
        return name if name.startswith("pipe:") else None


def taken_by(n_threads, stream, *, take=list.extend):
    """Return what each of some threads gets from a stream, and what each one raises."""
    got, raised = [[] for _ in range(n_threads)], [None] * n_threads

    def read(n):
        try:
            take(got[n], stream)
        except BaseException as error:  # noqa: BLE001 - it is looked at
            raised[n] = error

    threads = [threading.Thread(target=read, args=(n,)) for n in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)
    return got, raised


def one_by_one(got, stream):
    with contextlib.suppress(StopIteration):
        while True:
            got.append(next(stream))


def first_ones_again(got, stream):
    while True:
        taken = list(itertools.islice(stream, 7))
        got.extend(taken)
        if not taken:
            return


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- threads that share a stream ---------------------------------------------------------------


def shares(make, *, n_threads=2, n_items=3000, take=list.extend):
    def check(tmp_path):
        stream, close = make(range(n_items))
        got, raised = taken_by(n_threads, stream, take=take)
        close()
        assert raised == [None] * n_threads
        assert sorted(itertools.chain(*got)) == [2 * i for i in range(n_items)]  # each of them once
        assert all(part == sorted(part) for part in got)  # in the order of taking

    return check


def of_map(options):
    return lambda items: (tp_runner.map(double, items, n_workers=2, **options), lambda: None)


def of_runner(kind, options):
    def make(items):
        runner = kind(2, **options)
        return runner.stream(items), runner.close

    return make


def of_pipeline(options):
    def make(items):
        pipeline = Pipeline(n_workers=2, **options).map(abs).map(double)
        return pipeline.stream(items), pipeline.close

    return make


def a_failure_reaches_every_thread(options, item, kind):
    def check(tmp_path):
        with Worker(2, **options) as runner:
            stream = runner.stream([*range(500), item, *range(500)])
            got, raised = taken_by(3, stream)
            assert sorted(itertools.chain(*got)) == [2 * i for i in range(500)]
            for _ in range(3):  # threads that begin later, with the identifiers of those that have ended
                raised += taken_by(1, stream)[1]
            assert [type(error).__name__ for error in raised] == [kind] * 6
            if kind == "WorkerError":
                assert list(runner.stream([1])) == [2]

    return check


def a_broken_input_reaches_every_thread(tmp_path):
    def items():
        yield from range(500)
        raise LookupError("broken")

    got, raised = taken_by(2, tp_runner.map(double, items(), n_workers=2, **THREAD))
    assert sorted(itertools.chain(*got)) == [2 * i for i in range(500)]
    assert [type(error) for error in raised] == [LookupError] * 2


def a_close_frees_every_thread(options):
    def check(tmp_path):
        stream = tp_runner.map(nap, itertools.repeat(0.001), n_workers=2, **options)
        closer = threading.Timer(0.3, stream.close)
        closer.start()
        _, raised = taken_by(3, stream)
        closer.join(DEADLINE_S)
        assert {type(error) for error in raised} <= {RunCancelledError, type(None)}  # None: none had to wait

    return check


def a_cancel_before_the_first_result_counts(tmp_path):
    with Worker(1, **FORK) as runner:
        stream = runner.stream(itertools.count())
        stream.cancel()
        with pytest.raises(RunCancelledError):
            next(stream)
        assert list(runner.stream([1])) == [2]


def a_map_that_is_cancelled_while_it_starts(tmp_path):
    def init(device):
        (tmp_path / "begun").touch()
        time.sleep(0.3)

    stream = tp_runner.map(lambda state, item: item, itertools.count(), init=init, n_workers=1, **FORK)
    canceller = threading.Thread(target=lambda: (wait_for((tmp_path / "begun").exists), stream.cancel()))
    canceller.start()
    with pytest.raises(RunCancelledError):
        next(stream)
    canceller.join(DEADLINE_S)


def tasks_share_an_asynchronous_stream(tmp_path):
    async def main(runner):
        stream = runner.astream(range(2000))

        async def take():
            return [result async for result in stream]

        return await asyncio.gather(*(take() for _ in range(4)))

    with Worker(2, **FORK) as runner:
        got = asyncio.run(main(runner))
    assert sorted(itertools.chain(*got)) == [2 * i for i in range(2000)]


def tasks_share_the_failure_of_a_stream(tmp_path):
    async def main(runner):
        stream = runner.astream([*range(100), ("raise",)])

        async def take():
            return [result async for result in stream]

        return await asyncio.gather(*(take() for _ in range(3)), return_exceptions=True)

    with Worker(2, **FORK) as runner:
        assert {type(error).__name__ for error in asyncio.run(main(runner))} == {"WorkerError"}


# -- signals and forks -------------------------------------------------------------------------


class HandlerError(Exception):
    pass


@contextlib.contextmanager
def alarm(seconds, error=HandlerError):
    def handle(*_):
        raise error

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def a_handler_that_raises_leaves_the_stream(options, *, by_loop=False):
    def check(tmp_path):
        stream = tp_runner.map(nap, [0.01, 0.8, 0.02], n_workers=1, **options)
        results = iter(stream) if by_loop else stream
        assert next(results) == 0.01
        with alarm(0.2), pytest.raises(HandlerError):
            next(results)
        assert list(results) == [0.8, 0.02]

    return check


class AskedLock(threading._PyRLock):  # private: the one that is written in Python, so that it can be changed
    """A lock that a signal reaches as soon as it has said that it is open."""

    is_due = False

    def _is_owned(self):
        is_owned = super()._is_owned()
        if AskedLock.is_due and not is_owned:
            AskedLock.is_due = False
            os.kill(os.getpid(), signal.SIGALRM)
        return is_owned


def a_handler_that_raises_before_the_lock_is_taken_back(tmp_path):
    with pytest.MonkeyPatch.context() as patch, alarm(0):
        patch.setattr(threading, "RLock", AskedLock)
        stream = tp_runner.map(nap, [0.01, 0.2, 0.02], n_workers=1, **FORK)
        assert next(stream) == 0.01
        AskedLock.is_due = True
        with pytest.raises(HandlerError):
            next(stream)
        assert not AskedLock.is_due
        assert list(stream) == [0.2, 0.02]


def handlers_that_raise_all_the_time_lose_nothing_silently(options):
    """Between two waits, too: then the stream ends, and says so to whoever asks for more."""

    def check(tmp_path):
        with Worker(2, **options) as runner:
            for n in range(20):
                stream, got, is_whole = runner.stream(iter(range(3000))), [], False
                with contextlib.suppress(HandlerError), alarm(0.002 + n / 4000):
                    while not is_whole:
                        with contextlib.suppress(HandlerError):
                            try:
                                got.extend(stream)
                            except TpError:  # which one depends on what was at work
                                break
                            is_whole = True
                expected = [2 * i for i in range(3000)]
                assert got == (expected if is_whole else expected[: len(got)])
                assert list(runner.stream([1])) == [2]  # and the workers are there again

    return check


def a_handler_that_raises_while_another_stream_is_told(where, name, *, is_whole):
    """The other one has each of its results once, or says that it has not: it waits for none in vain."""

    def check(tmp_path):
        method, is_due = getattr(where, name), False

        def told(target, about, *rest):
            nonlocal is_due
            chunk = target._inflight[about.seq][1] if where is Assignments else about
            if is_due and chunk.run == 1:
                is_due = False
                os.kill(os.getpid(), signal.SIGALRM)
            return method(target, about, *rest)

        expected = [2 * i for i in range(4000)]
        with Worker(1, **FORK) as runner, pytest.MonkeyPatch.context() as patch, alarm(0):
            patch.setattr(where, name, told)
            other, mine = runner.stream(range(4000)), runner.stream(itertools.count())
            got = [next(other)]
            is_due = True
            with pytest.raises(HandlerError):
                collections.deque(mine, 0)
            if is_whole:
                assert [*got, *other] == expected
            else:
                with pytest.raises(RunCancelledError, match="a signal handler raised while results were"):
                    got.extend(other)
                assert got == expected[: len(got)]
            assert list(runner.stream([1])) == [2]

    return check


def a_handler_that_raises_when_an_item_was_sent(tmp_path):
    """It is no error of the item: the stream would end there as if it were whole."""
    with Worker(1, **FORK) as runner:
        write, n_written = WorkerHandle.write, itertools.count()

        def write_and_interrupt(handle, data):
            write(handle, data)
            if next(n_written) == 1:
                os.kill(os.getpid(), signal.SIGALRM)

        with pytest.MonkeyPatch.context() as patch, alarm(0):
            patch.setattr(WorkerHandle, "write", write_and_interrupt)
            got = []
            stream = runner.stream(iter(range(50)))
            with pytest.raises(HandlerError):
                got.extend(stream)
            with pytest.raises(RunCancelledError):
                got.extend(stream)
        assert got == [2 * i for i in range(len(got))]
        assert list(runner.stream([1])) == [2]


def a_handler_that_raises_in_the_input(tmp_path):
    """It is no error of the input, after which the results of the items before it would come."""

    def items():
        yield from range(5)
        os.kill(os.getpid(), signal.SIGALRM)
        yield from range(5, 50)

    with Worker(1, **INLINE) as runner, alarm(0):
        stream = runner.stream(items())
        with pytest.raises(HandlerError):
            list(stream)
        with pytest.raises(RunCancelledError):
            next(stream)


def an_interrupt_ends_the_stream_and_who_asks_for_more_is_told(tmp_path):
    with Worker(1, **FORK) as runner:
        stream = runner.stream([1, ("nap", 0.8), 2])
        assert next(stream) == 2
        with alarm(0.2, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            next(stream)
        with pytest.raises(RunCancelledError, match="KeyboardInterrupt"):
            next(stream)
        assert list(runner.stream([1])) == [2]


def a_handler_cancels(kill_after_s):
    def check(tmp_path):
        with Worker(2, **FORK) as runner:
            stream = runner.stream([1, ("hang", tmp_path / "begun")])
            assert next(stream) == 2
            before = signal.signal(signal.SIGALRM, lambda *_: stream.cancel(kill_after_s=kill_after_s))
            timer = threading.Thread(
                target=lambda: (wait_for((tmp_path / "begun").exists), os.kill(os.getpid(), signal.SIGALRM))
            )
            timer.start()
            try:
                with pytest.raises(RunCancelledError):
                    next(stream)
            finally:
                signal.signal(signal.SIGALRM, before)
            timer.join(DEADLINE_S)
            assert list(runner.stream([1, 2])) == [2, 4]

    return check


def a_handler_closes_the_runner(options):
    def check(tmp_path):
        runner = Worker(1, **options)
        stream = runner.stream([1, ("hang", tmp_path / "begun")])
        assert next(stream) == 2
        before = signal.signal(signal.SIGALRM, lambda *_: runner.close(timeout_s=0.0))
        timer = threading.Thread(
            target=lambda: (wait_for((tmp_path / "begun").exists), os.kill(os.getpid(), signal.SIGALRM))
        )
        timer.start()
        try:
            with pytest.raises(RunnerClosedError):
                next(stream)
        finally:
            signal.signal(signal.SIGALRM, before)
        timer.join(DEADLINE_S)

    return check


def a_handler_shuts_an_executor_down_while_it_takes_calls(tmp_path):
    executor, futures = Executor(1, **FORK), []
    before = signal.signal(signal.SIGALRM, lambda *_: executor.shutdown(cancel_futures=True))
    write, n_written = WorkerHandle.write, itertools.count()

    def write_and_interrupt(handle, data):
        write(handle, data)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and next(n_written) == 3:  # the lock is held here
            os.kill(os.getpid(), signal.SIGALRM)

    def submit_all():
        while True:
            futures.append(executor.submit(abs, -1))

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WorkerHandle, "write", write_and_interrupt)
            with pytest.raises(RunnerClosedError, match="was shut down"):
                submit_all()
    finally:
        signal.signal(signal.SIGALRM, before)
    ends = [future.cancelled() or future.exception(DEADLINE_S) or future.result(0) for future in futures]
    assert {end if isinstance(end, int) else type(end) for end in ends} <= {1, RunnerClosedError}


def in_a_fork(check):
    """Run a function in a forked copy of this process; return what it returned, as text."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.write(theirs, check().encode())
        os._exit(0)
    os.close(theirs)
    text = b"".join(iter(lambda: os.read(ours, 4096), b"")).decode()
    os.close(ours)
    os.waitpid(child, 0)
    return text


def a_fork_is_refused(options):
    def check(tmp_path):
        with Worker(2, **options) as runner, Executor(1, **options) as executor:
            stream = runner.stream(range(50_000))
            first = next(stream)

            def names():
                found = []
                for call in (
                    lambda: runner.submit(1),
                    lambda: list(runner.stream([1])),
                    lambda: collections.deque(stream, 0),
                    lambda: executor.submit(abs, 1),
                    runner.cancel,
                ):
                    try:
                        call()
                    except RunnerClosedError as error:
                        found.append("copy" in str(error))
                stream.close()
                runner.close()
                return str(found)

            assert in_a_fork(names) == str([True] * 5)
            assert [first, *stream] == [2 * i for i in range(50_000)]

    return check


# -- kills -------------------------------------------------------------------------------------


class SlowToStart(OrderedRunner):
    """One worker is ready at once, and is killed while the other one starts."""

    @staticmethod
    def producer_init(device, cfg):
        path = cfg.folder / "first"
        with contextlib.suppress(FileExistsError):
            with path.open("x") as file:
                file.write(str(os.getpid()))
            if cfg.who == "ready":
                return
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        while cfg.who == "ready" and not (cfg.folder / "killed").exists() and time.monotonic() < deadline:
            time.sleep(0.005)


def a_death_in_the_start(who, max_restarts, options):
    def check(tmp_path):
        def kill():
            path = tmp_path / "first"
            wait_for(lambda: path.exists() and path.read_text())
            time.sleep(0.2)  # so that its word is there; if it is not yet, it is the other case
            os.kill(int(path.read_text()), signal.SIGKILL)
            time.sleep(0.2)
            (tmp_path / "killed").touch()

        killer = threading.Thread(target=kill)
        if who == "ready":
            killer.start()
        cfg = {"folder": tmp_path, "who": who}
        if max_restarts:
            with SlowToStart(2, cfg, max_restarts=max_restarts, **options) as runner:
                assert list(runner.stream(range(50))) == [*range(50)]
        else:
            with pytest.raises(WorkerDiedError, match="killed by SIGKILL"):
                SlowToStart(2, cfg, **options)
        if who == "ready":
            killer.join(DEADLINE_S)

    return check


def a_death_in_the_start_of_a_map(max_restarts):
    def check(tmp_path):
        def init(device):
            if tp_runner.worker().number == 1 and not (tmp_path / "dead").exists():
                (tmp_path / "dead").touch()
                os.kill(os.getpid(), signal.SIGKILL)

        def work(state, item):
            wait_for((tmp_path / "dead").exists)
            return 2 * item

        options = {"n_workers": 2, "init": init, "max_restarts": max_restarts, **FORK}
        results = tp_runner.map(work, range(100), **options)
        if max_restarts:
            assert list(results) == [2 * i for i in range(100)]
        else:
            with pytest.raises(WorkerDiedError, match="before it was ready: killed by SIGKILL"):
                list(results)

    return check


def a_restart_that_fails_in_the_start(tmp_path):
    fork, n_started = os.fork, itertools.count()

    def two_alone():
        if next(n_started) == 2:  # a system that starts no third process in this moment cannot be had
            raise OSError("there are too many processes")
        return fork()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fork", two_alone)
        with pytest.raises(WorkerError, match="there are too many processes"):
            SlowToStart(2, {"folder": tmp_path, "who": "starting"}, max_restarts=3, **FORK)


def garbage(data, max_restarts, options):
    def check(tmp_path):
        written = tmp_path / "written" if max_restarts else None
        spared = {pipe_of(path) for path in descriptors()}  # those of the test run itself
        items = [*range(20), ("write", data, written, spared), *range(20)]
        with Worker(2, max_restarts=max_restarts, **options) as runner:
            if max_restarts:
                assert list(runner.stream(items)) == [*range(0, 40, 2), "write", *range(0, 40, 2)]
            else:
                with pytest.raises(WorkerDiedError, match="bytes came from it that are no message"):
                    list(runner.stream(items))
            assert list(runner.stream([1])) == [2]

    return check


def _kill_servers():
    for server in list(_fork_server._servers.values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGKILL)


def killed_fork_servers_leave_no_descriptor(tmp_path):
    assert list(tp_runner.map(double, range(5), n_workers=1)) == [0, 2, 4, 6, 8]
    before = len(descriptors())
    for _ in range(4):
        _kill_servers()
        assert list(tp_runner.map(double, range(5), n_workers=1)) == [0, 2, 4, 6, 8]
    assert len(descriptors()) == before


def fork_servers_that_are_killed_all_the_time(tmp_path):
    ended = threading.Event()

    def kill():
        while not ended.wait(0.001):
            _kill_servers()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(WorkerError, match="fork servers, one in the place of the other, were killed"):
            list(tp_runner.map(double, range(5), n_workers=1))
    finally:
        ended.set()
        killer.join(DEADLINE_S)
    assert list(tp_runner.map(double, range(5), n_workers=1)) == [0, 2, 4, 6, 8]


def a_hung_end_is_named(options):
    def check(tmp_path):
        class Hangs(OrderedRunner):
            @staticmethod
            def producer_end(device, cfg):
                time.sleep(DEADLINE_S)

        words = r"worker 0 on cpu had not ended after 0.3 s, and was killed"
        with pytest.warns(RuntimeWarning, match=words), Hangs(1, end_timeout_s=0.3, **options) as runner:
            assert list(runner.stream([1])) == [1]
        assert runner.exit_results == [None]

    return check


# -- cancelling --------------------------------------------------------------------------------


def cancelled_work_can_see_it(options, by):
    def check(tmp_path):
        begun = tmp_path / "begun"
        with Worker(1, **options) as runner:
            stream = runner.stream([1, ("until cancelled", begun)])
            assert next(stream) == 2
            wait_for(begun.exists)
            getattr(stream, by)()
            assert list(runner.stream([3])) == [6]  # the worker is free, or this would wait for long
        assert begun.with_suffix(".seen").read_text() == "True"

    return check


def a_kill_frees_the_busy_worker_and_no_other(of):
    def check(tmp_path):
        with Worker(2, **FORK) as runner:
            pids = set(runner.stream([("pid", 0.05)] * 12))
            assert len(pids) == 2
            stream = runner.stream([1, ("hang", tmp_path / "begun"), 2, 3])
            assert next(stream) == 2
            wait_for((tmp_path / "begun").exists)
            (runner if of == "runner" else stream).cancel(kill_after_s=0.1)
            assert len(pids.intersection(runner.stream([("pid", 0.05)] * 12))) == 1
            assert sum(worker.deaths for worker in runner.stats().workers) == 1

    return check


def a_kill_leaves_the_items_of_other_streams(tmp_path):
    with Worker(1, **FORK) as runner:
        future = runner.submit(("nap", 0.5))
        stream = runner.stream(range(100))
        assert next(stream) == 0
        stream.cancel(kill_after_s=0.0)
        assert future.result(DEADLINE_S) == 0.5
        assert list(runner.stream([1])) == [2]


def threads_are_not_killed(tmp_path):
    with Worker(1, **THREAD) as runner:
        stream = runner.stream(range(10))
        assert next(stream) == 0
        with pytest.raises(ConfigError, match="kill_after_s=1 needs workers that are processes"):
            stream.cancel(kill_after_s=1)
        assert list(stream) == [2 * i for i in range(1, 10)]  # refused before anything was lost


def a_kill_over_a_frame_with_the_lock(tmp_path):
    with Worker(1, **FORK) as runner:
        stream = runner.stream([1, ("hang", tmp_path / "begun")])
        assert next(stream) == 2
        wait_for((tmp_path / "begun").exists)
        with runner._pool._scheduler.lock:  # as a handler that interrupts the hand-out of items
            runner.cancel(kill_after_s=0.0)
        taken, _ = taken_by(1, runner.stream([1]))  # and the lock is free for another thread
        assert taken == [[2]]


def a_submit_while_the_run_ends_gets_its_end(tmp_path):
    lock = threading.RLock()
    submissions = _source.Submissions(lock, None)
    end = threading.Thread(target=submissions.abandon, args=(RunnerClosedError("it is over"),))
    with lock:  # as in RunnerPool.submit, which has just seen that it is not over
        assert not submissions.is_finishing
        end.start()
        end.join(0.2)
        future = submissions.submit(1, raise_original=False)
    end.join(DEADLINE_S)
    assert isinstance(future.exception(0), RunnerClosedError)


class OfServer(OrderedRunner):
    """Its workers are started by a fork server of its own."""

    @staticmethod
    def producer_work(device, cfg, item):
        return os.getppid(), os.getpid()


def a_fork_server_that_does_not_answer(stops, error=None):
    """It is used no more; a late answer is not taken for the next one's."""

    def check(tmp_path):
        options = {"env": {"SILENT": str(tmp_path)}}
        with OfServer(1, **options) as runner:
            ((server, _),) = runner.stream([1])
            (ours,) = [each for each in _fork_server._servers.values() if each.pid == server]
            os.kill(server, signal.SIGSTOP)
            try:
                if error is None:
                    ours._socket.settimeout(0.2)
                    with pytest.raises(WorkerError, match="does not answer"):
                        OfServer(1, **options)
                else:
                    with alarm(0.2, error), pytest.raises(error):
                        OfServer(1, **options)
            finally:
                os.kill(server, signal.SIGKILL if stops else signal.SIGCONT)
            with OfServer(1, **options) as other:
                ((another, pid),) = other.stream([1])
                assert another != server
                assert [handle.process.pid for handle in other._pool.fleet._handles.values()] == [pid]

    return check


def an_attempt_is_counted(tmp_path):
    def work(item):
        with (tmp_path / str(item)).open("a+") as file:
            file.write(f"{tp_runner.item().index}:{tp_runner.item().attempt} ")
        if item == 1 and tp_runner.item().attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if item == 2 and tp_runner.item().attempt < 2:
            raise ValueError
        return item

    options = {"n_workers": 1, "max_restarts": 1, "max_retries": 2, "queue_scale": 1, **FORK}
    assert list(tp_runner.map(work, range(4), **options)) == [*range(4)]
    assert [(tmp_path / str(i)).read_text().split() for i in (0, 1)] == [["0:0"], ["1:0", "1:1"]]
    tries = (tmp_path / "2").read_text().split()
    assert tries[-1] == "2:2"
    assert len(set(tries)) == len(tries)


FAST = {
    "two threads, map, processes": shares(of_map(FORK)),
    "two threads, map, threads": shares(of_map(THREAD)),
    "two threads, map, inline": shares(of_map(INLINE), n_items=500),
    "a failure, three threads": a_failure_reaches_every_thread(THREAD, ("raise",), "WorkerError"),
    "tasks": tasks_share_an_asynchronous_stream,
    "a handler raises behind a send": a_handler_that_raises_when_an_item_was_sent,
    "a handler raises in the input": a_handler_that_raises_in_the_input,
    "a handler raises before another stream is told": a_handler_that_raises_while_another_stream_is_told(
        Assignments, "find", is_whole=True
    ),
    "a handler raises while another stream is told": a_handler_that_raises_while_another_stream_is_told(
        PassState, "on_done", is_whole=False
    ),
    "a handler raises before the lock is taken back": a_handler_that_raises_before_the_lock_is_taken_back,
    "a handler raises in next": a_handler_that_raises_leaves_the_stream(FORK),
    "a handler cancels, and kills": a_handler_cancels(0.05),
    "a handler closes the runner": a_handler_closes_the_runner(FORK),
    "a handler shuts an executor down": a_handler_shuts_an_executor_down_while_it_takes_calls,
    "a cancel comes before the first result": a_cancel_before_the_first_result_counts,
    "a fork, processes": a_fork_is_refused(FORK),
    "a death in a start": a_death_in_the_start("ready", 0, FORK),
    "a death in a start, restarted": a_death_in_the_start("ready", 1, FORK),
    "garbage": garbage(b"x" * 100, 0, FORK),
    "a hung end": a_hung_end_is_named(FORK),
    "cancelled work sees it, processes": cancelled_work_can_see_it(FORK, "cancel"),
    "a kill of a stream's worker": a_kill_frees_the_busy_worker_and_no_other("stream"),
    "a kill over a frame with the lock": a_kill_over_a_frame_with_the_lock,
    "a submit while the run ends": a_submit_while_the_run_ends_gets_its_end,
    "threads are not killed": threads_are_not_killed,
    "attempts": an_attempt_is_counted,
}
SLOW = {
    "two threads, map, fork server": shares(of_map({}), n_items=20_000),
    "eight threads, map": shares(of_map(FORK), n_threads=8, n_items=20_000),
    "two threads, one by one": shares(of_map(FORK), take=one_by_one),
    "three threads, slices": shares(of_map(FORK), n_threads=3, take=first_ones_again),
    "two threads, a runner": shares(of_runner(Worker, FORK), n_items=20_000),
    "two threads, a pipeline on threads": shares(of_pipeline(THREAD)),
    "a death, three threads": a_failure_reaches_every_thread(FORK, ("die",), "WorkerDiedError"),
    "a broken input, two threads": a_broken_input_reaches_every_thread,
    "a close, three threads, processes": a_close_frees_every_thread(FORK),
    "a map cancelled in its start": a_map_that_is_cancelled_while_it_starts,
    "a failure, tasks": tasks_share_the_failure_of_a_stream,
    "a handler raises in a loop": a_handler_that_raises_leaves_the_stream(FORK, by_loop=True),
    "handlers raise all the time": handlers_that_raise_all_the_time_lose_nothing_silently(FORK),
    "an interrupt": an_interrupt_ends_the_stream_and_who_asks_for_more_is_told,
    "a fork, fork server": a_fork_is_refused({}),
    "a death before it is ready, restarted": a_death_in_the_start("starting", 1, FORK),
    "a restart that fails in a start": a_restart_that_fails_in_the_start,
    "a death in a start, fork server, restarted": a_death_in_the_start("ready", 3, {}),
    "a death in a map's start, restarted": a_death_in_the_start_of_a_map(2),
    "zeros": garbage(bytes(48), 0, FORK),
    "garbage of 20 kB": garbage(b"\xff" * 20_000, 0, FORK),
    "garbage, fork server": garbage(b"x" * 1000, 1, {}),
    "killed fork servers": killed_fork_servers_leave_no_descriptor,
    "fork servers killed all the time": fork_servers_that_are_killed_all_the_time,
    "a silent fork server": a_fork_server_that_does_not_answer(stops=True),
    "a fork server that is late": a_fork_server_that_does_not_answer(stops=False),
    "an interrupt before the fork server answers": a_fork_server_that_does_not_answer(
        stops=False, error=KeyboardInterrupt
    ),
    "closed work sees it, fork server": cancelled_work_can_see_it({}, "close"),
    "a kill of a runner's workers": a_kill_frees_the_busy_worker_and_no_other("runner"),
    "a kill beside another stream": a_kill_leaves_the_items_of_other_streams,
}
# Each has a fault of those above, and one of their kinds of workers.
NIGHTLY = {
    "two threads, a runner on threads": shares(of_runner(Worker, THREAD)),
    "two threads, a pipeline": shares(of_pipeline(FORK)),
    "two threads, a pipeline inline": shares(of_pipeline(INLINE), n_items=300),
    "a failure, three threads, processes": a_failure_reaches_every_thread(FORK, ("raise",), "WorkerError"),
    "a close, three threads, threads": a_close_frees_every_thread(THREAD),
    "handlers raise all the time, threads": handlers_that_raise_all_the_time_lose_nothing_silently(THREAD),
    "a handler raises in next, threads": a_handler_that_raises_leaves_the_stream(THREAD),
    "a handler raises in a loop, threads": a_handler_that_raises_leaves_the_stream(THREAD, by_loop=True),
    "a fork, threads": a_fork_is_refused(THREAD),
    "a death before it is ready": a_death_in_the_start("starting", 0, FORK),
    "a death in a start, fork server": a_death_in_the_start("ready", 0, {}),
    "a death in a map's start": a_death_in_the_start_of_a_map(0),
    "three bytes of garbage": garbage(b"abc", 0, FORK),
    "garbage, restarted": garbage(b"x" * 100, 1, FORK),
    "a hung end, fork server": a_hung_end_is_named({}),
    "cancelled work sees it, threads": cancelled_work_can_see_it(THREAD, "cancel"),
    "closed work sees it, processes": cancelled_work_can_see_it(FORK, "close"),
}
TABLE = [
    *FAST,
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW),
    *(pytest.param(kind, marks=pytest.mark.nightly) for kind in NIGHTLY),
]


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc, and kills processes")
@pytest.mark.parametrize("kind", TABLE)
def test_nothing_is_lost_or_silent(kind, tmp_path):
    {**FAST, **SLOW, **NIGHTLY}[kind](tmp_path)
