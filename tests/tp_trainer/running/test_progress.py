"""How far an epoch is, and how fast it goes."""

import pytest
from tp_trainer._running import _progress  # a clock of the test's own


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose one number is the time."""
    now = [0.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    return now


def test_steps_of_the_run_before_do_not_count_as_fast_ones(clock, capsys):
    ticker = _progress.Ticker("epoch 2/3", 1000, 30.0, first=500)
    assert ticker.next_update == 30.0
    clock[0] = 31.0
    ticker.update(501, 0.5)
    assert capsys.readouterr().err == "epoch 2/3  step 501/1000  loss=0.5  31.0 s per step\n"
    assert ticker.next_update == 61.0, "by the clock, whatever the speed was"
    clock[0] = 62.0
    ticker.update(601, None)
    assert capsys.readouterr().err == "epoch 2/3  step 601/1000  1.6 steps/s\n"


def test_what_a_loader_measured_is_shown(clock, capsys):
    ticker = _progress.Ticker("epoch 1", 10, 30.0)
    clock[0] = 40.0
    ticker.update(4, 0.5, {"tokens": 900.0, "padded_tokens": 1000.0, "wait_s": 10.0})
    assert "step 4/10  loss=0.5  fill=0.9  wait=25%  10.0 s per step" in capsys.readouterr().err
