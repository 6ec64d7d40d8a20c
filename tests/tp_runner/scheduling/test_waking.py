"""Whoever waits for a run hears of its end, whichever thread has found it out."""

import threading

import pytest
from tp_runner import OrderedRunner
from tp_runner._options import Settings
from tp_runner._scheduling._pool import Scheduler
from tp_runner._scheduling._source import Direct, Feeder
from tp_runner._workers._fleet import Done, Fleet, Timing

DEADLINE_S = 800.0


class OneWorker(Fleet):
    """Answers at once. An answer that another thread has taken does not wake who waits for it."""

    devices = ("cpu",)

    def __init__(self):
        super().__init__(self.devices)
        self.is_asleep, self.is_slow, self.has_word = False, False, False
        self.answers = []
        self.changed = threading.Condition()

    def start(self, may_restart):
        return []

    def send(self, worker, chunk):
        with self.changed:
            self.answers.append(Done(worker, chunk.seq, list(chunk.items), failed=False, timing=Timing()))
            self.changed.notify_all()

    def wait(self, timeout_s):
        with self.changed:
            self.is_asleep = True
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.has_news() and not self.is_slow, DEADLINE_S)
            self.is_asleep = self.has_word = False

    def poll(self):
        with self.changed:
            answers, self.answers = self.answers, []
        return answers

    def wake(self):
        with self.changed:
            self.has_word = True
            self.changed.notify_all()

    def close(self, *, timeout_s):
        pass

    def has_news(self):
        return self.has_word or bool(self.answers)

    def falls_asleep(self):
        """Wait until somebody sleeps, and let nothing wake them up until :meth:`looks_again`."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.is_asleep and not self.has_news(), DEADLINE_S)
            self.is_slow = True

    def looks_again(self):
        with self.changed:
            self.is_slow = False
            self.changed.notify_all()


def test_the_end_of_an_input_that_another_thread_has_noticed_wakes_up_who_waits_for_its_results():
    fleet, may_end = OneWorker(), threading.Event()
    scheduler = Scheduler(fleet, Settings(), wait=True)

    def nothing():
        assert may_end.wait(DEADLINE_S)
        yield from ()

    empty = Feeder(nothing(), fleet.wake)
    steps = scheduler.steps(lambda: scheduler.new_run(empty, ordered=True))
    got = []
    reader = threading.Thread(target=lambda: got.extend(steps), daemon=True)
    reader.start()
    other = scheduler.steps(lambda: scheduler.new_run(Direct([1, 2]), ordered=True))
    assert next(other) == [1]  # the second item has been sent, and is answered while the reader sleeps again
    fleet.falls_asleep()
    may_end.set()
    empty._thread.join(DEADLINE_S)  # its word is there, and the reader has not looked yet
    assert next(other) == [2]
    fleet.looks_again()
    reader.join(100.0)
    assert not reader.is_alive()
    assert got == []


class Same(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        return item


@pytest.mark.parametrize(
    "options", [{"start_method": "fork"}, {"engine": "thread"}], ids=["process", "thread"]
)
def test_a_word_for_who_waits_is_not_lost_to_another_thread_that_polls(options):
    with Same(n_workers=1, **options) as runner:
        assert list(runner.stream([1, 2])) == [1, 2]
        fleet = runner._pool._scheduler.fleet
        fleet.poll()
        fleet.wake()
        assert fleet.poll() == []  # as any thread does that has the lock, before the sleeper is awake
        sleeper = threading.Thread(target=fleet.wait, args=(None,), daemon=True)
        sleeper.start()
        sleeper.join(DEADLINE_S)
        assert not sleeper.is_alive()
