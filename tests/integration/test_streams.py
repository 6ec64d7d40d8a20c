"""Programs whose standard streams are missing, closed, or objects of their own: no entry point needs more."""

import io
import logging
import re
import sys
from pathlib import Path

import pytest
import torch
import tp_runner
from torch import nn
from tp_core.output import (
    error_console,
    flush_streams,
    get_logger,
    output_console,
    print_to_stderr,
    shows_progress,
)
from tp_core.plugins import registry
from tp_core.plugins._hooks import stdout_to_stderr  # private: those of this project print nothing
from tp_core.ranks import run_ranks
from tp_launch._outcome import LaunchOutcome, report  # private: what `tp launch` prints at its end
from tp_trainer import Trainer


class GivesLinesToALogger:
    """The idiom for logging what is printed."""

    def write(self, text):
        return len(text)

    def flush(self):
        pass


class HasWriteAlone:
    def write(self, text):
        return len(text)


class Raises:
    encoding = None

    def __getattr__(self, name):
        raise RuntimeError(name)


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS = {
    "missing": lambda: None,
    "closed": closed,
    "of a logger": GivesLinesToALogger,
    "with write alone": HasWriteAlone,
    "that raises": Raises,
}


def work(item):
    return 2 * item


class Doubles(tp_runner.OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        return 2 * item


def of_map(**options):
    assert list(tp_runner.map(work, [1, 2], n_workers=1, **options)) == [2, 4]


def of_runner():
    with Doubles(1, progress=True, engine="thread") as runner:
        assert list(runner.stream([1, 2])) == [2, 4]


def of_executor():
    with tp_runner.Executor(1, start_method="fork") as executor:
        assert executor.submit(work, 1).result() == 2


def of_pipeline(progress):
    with tp_runner.Pipeline(n_workers=1, engine="thread", progress=progress).map(work) as pipeline:
        assert list(pipeline.stream([1, 2])) == [2, 4]


def step(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def of_trainer(progress):
    model = nn.Linear(2, 1)
    batches = [(torch.ones(4, 2), torch.ones(4, 1))] * 2
    trainer = Trainer(devices="cpu", progress=progress)
    trainer.fit(model, torch.optim.SGD(model.parameters(), 0.1), batches, step=step, epochs=1)


def of_output():
    shows_progress("auto")
    flush_streams()
    print_to_stderr("a line")
    error_console().print("a line")
    output_console()


def of_plugins():
    registry.backends()
    with stdout_to_stderr():  # as around the code of each plugin
        pass


def of_ranks():
    assert run_ranks(abs, 2, -1) == [1, 1]


def of_launch():
    report(LaunchOutcome(1, message="it failed"))


ENTRY_POINTS = {
    "map, threads": lambda: of_map(engine="thread"),
    "map, inline, with a bar": lambda: of_map(engine="inline", progress=True),
    "map, fork": lambda: of_map(start_method="fork"),
    "runner": of_runner,
    "executor": of_executor,
    "pipeline": lambda: of_pipeline("auto"),
    "pipeline, with a table": lambda: of_pipeline(progress=True),
    "trainer": lambda: of_trainer("auto"),
    "trainer, with lines": lambda: of_trainer(progress=True),
    "output": of_output,
    "plugins": of_plugins,
    "launch": of_launch,
    "ranks": of_ranks,
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize(
    "entry", [pytest.param(name, marks=[pytest.mark.slow] * (name == "ranks")) for name in ENTRY_POINTS]
)
def test_no_entry_point_needs_more_of_the_streams(entry, kind, monkeypatch):
    stream = STREAMS[kind]()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    ENTRY_POINTS[entry]()
    assert sys.stdout is stream


PACKAGES = ["tp_context", "tp_core", "tp_data", "tp_pipeline", "tp_runner", "tp_shard", "tp_trainer"]


def warn(package, monkeypatch, *handlers):
    """Log a warning and a note in a program that has set up these handlers alone; pytest has its own."""
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", list(handlers))
        get_logger(package).warning("a line")
        get_logger(package).info("a note")


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("kind", STREAMS)
def test_no_warning_needs_more_of_the_streams(package, kind, monkeypatch):
    monkeypatch.setattr(sys, "stderr", STREAMS[kind]())
    warn(package, monkeypatch)


def test_a_warning_is_printed_where_the_program_has_set_up_no_logging(capsys, monkeypatch):
    warn("tp_core", monkeypatch)
    assert capsys.readouterr().err == "a line\n"


def test_a_warning_is_left_to_the_handlers_of_the_program(capsys, monkeypatch):
    lines = io.StringIO()
    warn("tp_core", monkeypatch, logging.StreamHandler(lines))
    assert (capsys.readouterr().err, lines.getvalue()) == ("", "a line\n")


def test_every_logger_of_the_packages_is_one_of_these():
    root = Path(__file__).parents[2] / "packages"
    others = re.compile(r"logging\.getLogger\([\"']tp_")
    assert [str(path) for path in root.glob("*/src/**/*.py") if others.search(path.read_text())] == []
