"""What a thread reads of the input, and when."""

import collections
import contextlib
import itertools
import sqlite3
import time

import pytest
import tp_runner
from tp_runner._scheduling._source import Feeder  # private: the race takes an item in one moment alone


@pytest.fixture
def cursor():
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE pairs (a, b)")
        connection.executemany("INSERT INTO pairs VALUES (?, ?)", ((n, 2 * n) for n in range(50)))
        yield connection.execute("SELECT a, b FROM pairs ORDER BY a")


@pytest.mark.parametrize("options", [{"engine": "thread"}, {"start_method": "fork"}], ids=["thread", "fork"])
def test_a_cursor_is_read_in_the_thread_that_it_belongs_to(cursor, options):
    assert list(tp_runner.map(sum, cursor, devices=2, **options)) == [3 * n for n in range(50)]


def test_what_cannot_be_read_in_another_thread_is_said_to_be_so(cursor):
    with pytest.raises(sqlite3.ProgrammingError, match="thread") as caught:
        list(tp_runner.map(sum, (row for row in cursor), devices=1, engine="thread"))
    assert "open what belongs to one thread inside the generator" in caught.value.__notes__[0]


def test_an_incomplete_batch_is_due_in_time_that_began_just_when_the_last_one_was_taken(wait_until):
    class Racing(collections.deque):
        """Is found empty, and has an item a moment later."""

        def __len__(self):
            n_items = super().__len__()
            if not n_items and self.later:
                feeder._oldest = time.monotonic()  # as the thread notes it
                self.append(self.later.pop())
            return n_items

    feeder = Feeder(itertools.repeat(1, 4), lambda: None, 100.0)
    feeder._start()
    feeder._want(8)
    wait_until(lambda: feeder._ended)
    racing = Racing(feeder._buffer)
    racing.later = [1]
    feeder._buffer = racing
    assert feeder.take(4, whole=4, fitting=12) == [1, 1, 1, 1]
    assert 0 < feeder.seconds_until_due() <= 100.0
