"""How far an epoch is, and how fast it goes."""

import io
import sys

import pytest
import torch
from tp_trainer import Trainer
from tp_trainer._running import _progress  # a clock of the test's own

from tests.reference_training import mean_square


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


def test_a_bar_has_the_last_validation_and_the_samples_per_second(clock):
    shown = []
    ticker = _progress.Ticker("epoch 2", 10, 0.1, lambda done, words: shown.append((done, words)))
    clock[0] = 1.0
    ticker.update(4, 0.5, val={"val_loss": 0.25, "val_acc": 0.75, "val_f1": 0.5}, samples_per_s=1234.5)
    assert shown == [(4, "loss=0.5  val_loss=0.25  val_acc=0.75  1,234 samples/s")]


def test_what_a_script_has_printed_comes_before_the_line_of_an_epoch(monkeypatch):
    calls = []

    class Buffered(io.StringIO):
        def flush(self):
            calls.append("stdout")

    class Shown(io.StringIO):
        def write(self, text):
            calls.append(text.partition(" ")[0].strip())
            return len(text)

    monkeypatch.setattr(sys, "stdout", Buffered())
    monkeypatch.setattr(sys, "stderr", Shown())
    model = torch.nn.Linear(2, 1)
    with Trainer(devices="cpu") as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.fit(model, optimizer, [(torch.ones(4, 2),)], step=mean_square)
    assert calls[calls.index("epoch") - 1] == "stdout"


def test_a_bar_for_the_terminal_of_a_launcher_is_one_line(clock, monkeypatch, capsys):
    monkeypatch.setenv("TP_ON_TERMINAL", "1")
    with _progress.Reporter(progress="auto").epoch("epoch 1/2", 40) as ticker:
        clock[0] = 1.0
        ticker.update(20, 0.5, samples_per_s=100.0)
    bar = "━" * 10 + " " * 10
    assert capsys.readouterr().err == f"epoch 1/2 {bar} 20/40 loss=0.5  100 samples/s\r"


def test_under_a_launcher_a_stream_of_the_program_needs_no_more_than_elsewhere(monkeypatch):
    class Written:
        def __init__(self):
            self.texts = []

        def write(self, text):
            self.texts.append(text)

    stream = Written()
    monkeypatch.setenv("TP_ON_TERMINAL", "1")
    monkeypatch.setattr(sys, "stderr", stream)
    model = torch.nn.Linear(2, 1)
    with Trainer(devices="cpu") as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.fit(model, optimizer, [(torch.ones(4, 2),)], step=mean_square)
    assert any("epoch 1/1" in text for text in stream.texts)
