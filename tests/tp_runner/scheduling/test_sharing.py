"""Several streams, futures and threads on the workers of one runner."""

import asyncio
import itertools
import os
import threading
import time

import numpy as np
import pytest
from tp_runner import OrderedRunner, RunCancelledError, WorkerDiedError, WorkerError
from tp_runner._workers._work import MOST_UNASKED  # private: how many items pass between two looks

from tests.tp_runner.obedient import Ordered, Unordered

ENGINES = [{"start_method": "fork"}, {"engine": "thread"}]
IDS = ["process", "thread"]


class Sleeps(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, seconds):
        time.sleep(seconds)
        return seconds


@pytest.mark.parametrize("options", [*ENGINES, {"engine": "inline"}], ids=[*IDS, "inline"])
def test_streams_of_one_thread_take_turns(options):
    with Ordered(2, **options) as runner:
        streams = [runner.stream(range(n * 1000, n * 1000 + 300)) for n in range(3)]
        for results in zip(itertools.count(), *streams, strict=False):
            i, *values = results
            assert values == [(n * 1000 + i) * 10 for n in range(3)]


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_streams_of_many_threads_take_turns(options):
    results = {}

    def read(runner, n):
        results[n] = list(runner.stream(i + n for i in range(500)))

    with Ordered(2, **options) as runner:
        threads = [threading.Thread(target=read, args=(runner, n)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(800)
    assert results == {n: [(i + n) * 10 for i in range(500)] for n in range(6)}


def test_a_long_stream_does_not_keep_a_short_one_waiting():
    with Sleeps(2, start_method="fork") as runner:
        long = runner.stream(itertools.repeat(0.002))
        next(long)
        assert list(runner.stream([0.001] * 20)) == [0.001] * 20  # or the endless one would be served first
        long.close()


def test_a_stream_that_nobody_reads_is_bounded():
    n_read = 0

    def items():
        nonlocal n_read
        while True:
            n_read += 1
            yield np.zeros(1 << 17)  # 1 MiB

    with OrderedRunner(2, max_bytes=16 << 20) as runner:
        idle = runner.stream(items())
        next(idle)
        for _ in runner.stream(range(20_000)):
            pass
        assert n_read < 60
        idle.close()


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_one_stream_is_cancelled_by_itself(options):
    with Sleeps(2, **options) as runner:
        endless = runner.stream(itertools.repeat(0.001))
        other = runner.stream([0.001] * 50)
        next(other)
        threading.Timer(0.2, endless.cancel).start()
        with pytest.raises(RunCancelledError, match="this stream was cancelled"):
            list(endless)
        assert len(list(other)) == 49


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_a_closed_stream_gives_its_workers_back_however_slow_its_items_have_become(options, tmp_path):
    begun, n_fast = tmp_path / "begun", 20_000

    class Slows(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            if item >= n_fast:  # by then many items travel together
                with begun.open("a") as file:
                    file.write("x")
                time.sleep(0.01)
            return item

    def close():
        while not begun.exists():
            time.sleep(0.001)
        stream.close()

    with Slows(1, **options) as runner:
        stream = runner.stream(iter(range(1_000_000)))
        closer = threading.Thread(target=close)
        closer.start()
        with pytest.raises(RunCancelledError):
            list(stream)
        closer.join(800)
        assert list(runner.stream([1])) == [1]
    assert len(begun.read_text()) <= MOST_UNASKED + 2


def test_a_failure_ends_its_own_stream_alone():
    with Ordered(2, start_method="fork") as runner:
        other = runner.stream(range(2000))
        next(other)
        with pytest.raises(WorkerError, match="boom"):
            list(runner.stream([1, ("raise", ValueError("boom")), 2]))
        assert list(other) == [i * 10 for i in range(1, 2000)]


def test_a_death_is_mended_for_all_streams(tmp_path):
    with Unordered(2, start_method="fork", max_restarts=1) as runner:
        other = runner.stream(range(3000))
        first = next(other)
        assert list(runner.stream([("kill-once", str(tmp_path / "dead"))])) == ["survived"]
        assert sorted([first, *other]) == [i * 10 for i in range(3000)]


def test_when_no_worker_is_left_every_stream_says_so():
    with Ordered(1, start_method="fork") as runner:
        other = runner.stream([("sleep", 0.05)] * 1000)
        next(other)
        future = runner.submit(("kill", 9))
        with pytest.raises(WorkerDiedError):
            list(other)
        assert isinstance(future.exception(800), WorkerDiedError)


def test_an_interrupt_of_one_stream_loses_nothing_of_another(run_script):
    out = run_script(
        """
        import os, signal, threading
        import tp_runner

        if __name__ == "__main__":
            with tp_runner.OrderedRunner(2, start_method="fork") as runner:
                found = []
                thread = threading.Thread(target=lambda: found.extend(runner.stream(iter(range(300_000)))))
                thread.start()
                try:
                    for n, _ in enumerate(runner.stream(iter(int, 1))):
                        if n == 1000:
                            os.kill(os.getpid(), signal.SIGINT)
                except KeyboardInterrupt:
                    print("interrupted")
                thread.join()
                print(found == list(range(300_000)))
        """
    )
    assert out.split() == ["interrupted", "True"]


# -- futures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [*ENGINES, pytest.param({}, marks=pytest.mark.slow)], ids=[*IDS, "forkserver"]
)
def test_leaving_the_block_finishes_every_future(options):
    for _ in range(5):
        with Ordered(2, **options) as runner:
            futures = [runner.submit(i) for i in range(20)]
        assert [future.result(0) for future in futures] == [i * 10 for i in range(20)]


def test_a_block_left_while_items_wait_for_a_batch_finishes_them():
    kind = type("Same", (OrderedRunner,), {"producer_work": staticmethod(lambda d, c, batch: batch)})
    with kind(1, batch=8, max_wait_s=100.0, engine="thread") as runner:
        futures = [runner.submit(i) for i in range(3)]
    assert [future.result(0) for future in futures] == [0, 1, 2]


def test_an_incomplete_batch_of_submitted_items_goes_at_once():
    kind = type("Same", (OrderedRunner,), {"producer_work": staticmethod(lambda d, c, batch: batch)})
    with kind(1, batch=8, engine="thread") as runner:
        assert runner.submit(5).result(800) == 5


def test_the_end_of_the_program_finishes_every_future(run_script):
    out = run_script(
        """
        import time
        import tp_runner

        class Prints(tp_runner.OrderedRunner):
            @staticmethod
            def producer_work(device, cfg, item):
                time.sleep(0.05)
                return item

        if __name__ == "__main__":
            runner = Prints(2)
            for i in range(6):
                runner.submit(i).add_done_callback(lambda future: print(future.result(), flush=True))
        """
    )
    assert sorted(out.split()) == ["0", "1", "2", "3", "4", "5"]


def test_a_dropped_runner_finishes_its_futures_and_ends(wait_until):
    runner = Sleeps(1, start_method="fork")
    with Ordered(1, start_method="fork") as other:
        assert other.submit(("pid",)).result(800) != os.getpid()
    future = runner.submit(0.2)
    del runner
    assert future.result(800) == 0.2


def test_a_waiting_future_can_be_cancelled(tmp_path):
    class Waits(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            while not (tmp_path / "go").exists():
                time.sleep(0.01)
            return item

    with Waits(1, None, 1, start_method="fork") as runner:
        futures = [runner.submit(i) for i in range(8)]
        assert futures[-1].cancel()
        (tmp_path / "go").touch()
        assert futures[0].result(800) == 0
    assert futures[-1].cancelled()
    assert [future.result(0) for future in futures[:-1]] == [*range(7)]


def test_a_result_that_is_an_error_object_is_a_result():
    error = WorkerError("kept", index=3)
    with OrderedRunner(1, engine="thread") as runner:
        assert runner.submit(error).result(800) is error


def test_async_streams_share_a_runner():
    async def main(runner):
        async def one(n):
            return [x async for x in runner.astream(range(n, n + 200))]

        return await asyncio.gather(*(one(n) for n in range(4)))

    with Ordered(2, start_method="fork") as runner:
        assert asyncio.run(main(runner)) == [[i * 10 for i in range(n, n + 200)] for n in range(4)]
