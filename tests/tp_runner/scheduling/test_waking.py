"""Whoever waits for a run hears of its end, whichever thread has found it out."""

import threading

import pytest
from tp_core.plugins import registry
from tp_runner import OrderedRunner
from tp_runner.engines import Done, Fleet, FleetEngine, Timing

DEADLINE_S = 800.0


class OneWorker(Fleet):
    """Answers at once. An answer that another thread has taken does not wake who waits for it."""

    def __init__(self, devices):
        super().__init__(devices)
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


@pytest.fixture
def fleets():
    """The fleets of runners with the engine "one-worker"."""
    made = []

    class OneWorkerEngine(FleetEngine):
        name, score, summary = "one-worker", 1, "one worker that answers at once"

        def make_fleet(self, program, devices, settings):
            made.append(OneWorker(devices))
            return made[-1]

    registry.register(OneWorkerEngine)
    yield made
    registry.unregister("one-worker")


def feeders():
    return {thread for thread in threading.enumerate() if thread.name == "tp-runner-feeder"}


def test_the_end_of_an_input_that_another_thread_has_noticed_wakes_up_who_waits_for_its_results(
    fleets, wait_until
):
    may_end, before, got = threading.Event(), feeders(), []

    def nothing():
        assert may_end.wait(DEADLINE_S)
        yield from ()

    with OrderedRunner(1, engine="one-worker") as runner:
        (fleet,) = fleets
        reader = threading.Thread(target=lambda: got.extend(runner.stream(nothing())), daemon=True)
        reader.start()
        wait_until(lambda: feeders() - before)
        (feeder,) = feeders() - before
        other = runner.stream([1, 2])
        assert next(other) == 1  # the second one is sent, and answered while the reader sleeps again
        fleet.falls_asleep()
        may_end.set()
        feeder.join(DEADLINE_S)  # its word is there, and the reader has not looked yet
        assert next(other) == 2
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
        fleet = runner._pool.fleet
        fleet.poll()
        fleet.wake()
        assert fleet.poll() == []  # as any thread does that has the lock, before the sleeper is awake
        sleeper = threading.Thread(target=fleet.wait, args=(None,), daemon=True)
        sleeper.start()
        sleeper.join(DEADLINE_S)
        assert not sleeper.is_alive()
