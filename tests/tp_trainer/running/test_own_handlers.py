"""Signal handlers that a program has set itself, beside those of a run with checkpoints."""

import logging
import os
import signal
import threading

import pytest
from tp_trainer import Interrupted
from tp_trainer._opening import _boundaries  # private: what is said once in a process

from tests.tp_trainer.small_run import names, train


@pytest.fixture
def handle():
    """Set a handler of a signal; at the end the one before is back."""
    before = {}

    def handle(number, handler):
        before[number] = signal.signal(number, handler)
        return handler

    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number, at=3):
    def before(n):
        if n == at:
            os.kill(os.getpid(), number)

    return before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_it_is_called_once_after_the_save(tmp_path, handle, number):
    called = []
    own = handle(number, lambda signum, frame: called.append((signum, frame, names(tmp_path)[-1])))
    with pytest.raises(Interrupted) as end:
        train(tmp_path, every_steps=None, before=send(number))
    assert end.value.signal == number
    assert called == [(number, None, "step-0000000003")]
    assert signal.getsignal(number) is own


def test_what_it_raises_ends_the_run(tmp_path, handle):
    class CleanedUpError(Exception):
        pass

    def own(*_):
        raise CleanedUpError

    handle(signal.SIGTERM, own)
    with pytest.raises(CleanedUpError):
        train(tmp_path, every_steps=None, before=send(signal.SIGTERM))
    assert names(tmp_path) == ["step-0000000003"]
    assert signal.getsignal(signal.SIGTERM) is own


def test_it_is_called_where_the_run_has_ended_before_it_could_save(tmp_path, handle):
    called = []
    handle(signal.SIGTERM, lambda *_: called.append(names(tmp_path)))

    def before(n):
        if n == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - the step's own
        train(tmp_path, every_steps=None, before=before)
    assert len(called) == 1


def test_a_run_in_a_thread_says_once_that_signals_do_not_save_it(tmp_path, caplog):
    _boundaries._warn_of_thread.cache_clear()
    with caplog.at_level(logging.WARNING, logger="tp_trainer"):
        for name in ("a", "b"):
            thread = threading.Thread(target=train, args=(tmp_path / name,))
            thread.start()
            thread.join()
    assert caplog.text.count("do not save this run; call fit in the main thread") == 1
