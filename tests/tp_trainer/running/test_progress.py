"""How far an epoch is, and how fast it goes."""

import pytest
from tp_trainer._running import _progress
from tp_trainer._running._progress import Ticker


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose one number is the time."""
    now = [0.0]
    monkeypatch.setattr(_progress.time, "perf_counter", lambda: now[0])
    return now


def test_steps_of_the_run_before_do_not_count_as_fast_ones(clock, capsys):
    ticker = Ticker("epoch 2/3", 1000, 30.0, first=500)
    assert ticker.next_update == 501
    clock[0] = 31.0
    ticker.update(501, 0.5)
    assert capsys.readouterr().err == "epoch 2/3  step 501/1000  loss=0.5  31.0 s per step\n"
    assert ticker.next_update == 502, "as slow as it is, after the next step"
    clock[0] = 62.0
    ticker.update(601, None)
    assert capsys.readouterr().err == "epoch 2/3  step 601/1000  1.6 steps/s\n"


def test_it_speaks_when_its_interval_is_over_alone(clock, capsys):
    ticker = Ticker("epoch 1", 10**6, 30.0)
    for done in (1, 10, 100):
        clock[0] += 1e-6
        ticker.update(done, 1.0)
    assert capsys.readouterr().err == ""
    assert ticker.next_update == 1100, "fast steps are not looked at one by one"
