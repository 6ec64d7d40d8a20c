"""Objects whose pickling or unpickling ends the program, or is interrupted: no chunk is lost by it."""

import os

import pytest
import tp_runner
from tp_runner import Executor, NotPicklableError, OrderedRunner

MAIN = os.getpid()


class Raises:
    """Raises where it is pickled."""

    def __init__(self, kind):
        self.kind = kind

    def __reduce__(self):
        raise self.kind("no")


class RaisesThere:
    """Raises where it is unpickled."""

    def __reduce__(self):
        return _raise, ()


def _raise():
    raise SystemExit("no")


@pytest.mark.parametrize("kind", [TypeError, SystemExit, GeneratorExit])
def test_a_call_that_cannot_be_pickled_is_an_error_and_the_next_one_goes_on(kind):
    with Executor(1, start_method="fork") as executor:
        assert executor.submit(abs, -1).result() == 1
        with pytest.raises(kind):
            executor.submit(id, Raises(kind)).result()
        assert executor.submit(abs, -2).result() == 2


@pytest.mark.parametrize("bad", [Raises(SystemExit), RaisesThere()], ids=["here", "there"])
def test_an_item_is_an_error_in_its_place(bad):
    found = list(tp_runner.map(type, [1, bad, 2.5], n_workers=1, start_method="fork", on_error="return"))
    assert isinstance(found[1], NotPicklableError)
    assert [found[0], found[2]] == [int, float]


@pytest.mark.parametrize("bad", [Raises(SystemExit), RaisesThere()], ids=["there", "here"])
def test_a_result_is_an_error_in_its_place(bad):
    results = {1: "one", 2: bad, 3: "three"}
    found = list(tp_runner.map(results.get, [1, 2, 3], n_workers=1, start_method="fork", on_error="return"))
    assert isinstance(found[1], NotPicklableError)
    assert [found[0], found[2]] == ["one", "three"]


def test_an_interrupt_while_an_item_is_pickled_leaves_the_runner_usable():
    class Interrupts:
        times = 1

        def __reduce__(self):
            if os.getpid() == MAIN and Interrupts.times:
                Interrupts.times -= 1
                raise KeyboardInterrupt
            return int, (7,)

    with OrderedRunner(1, start_method="fork") as runner:
        results = runner.stream([1, Interrupts(), 3])
        with pytest.raises(KeyboardInterrupt):
            list(results)
        assert list(runner.stream([1, Interrupts(), 3])) == [1, 7, 3]
