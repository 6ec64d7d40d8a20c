"""Whatever goes wrong while a checkpoint is written reaches the run, on all ranks, in threads too."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
from tp_core.errors import StateError
from tp_core.state import write_whole
from tp_testing import run_ranks

from tests.cases import first_fast
from tests.reference_training import StoppedError
from tests.tp_trainer import small_run
from tests.tp_trainer.small_run import names, same, train

ROOT = Path(__file__).parents[3]
cloudpickle.register_pickle_by_value(small_run)  # for ranks, which do not know this folder

ERRORS = [KeyError("metrics"), MemoryError(), RecursionError("too deep"), ValueError("surprise")]

WRITE = "tp_trainer._checkpoint._checkpointer.write_whole"  # a disk that fails at a certain moment


def failing(error, at=3):
    """Return a function that raises at its n-th call, in the place of the one that writes tensors."""
    calls, write = 0, write_whole

    def fail(tensors, path):
        nonlocal calls
        calls += 1
        written = write(tensors, path)
        if calls == at:
            raise error
        return written

    return fail


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("error", first_fast(ERRORS), ids=lambda error: type(error).__name__)
def test_any_error_of_the_writing_is_one_of_the_run(tmp_path, monkeypatch, error, asynchronous):
    monkeypatch.setattr(WRITE, failing(error))
    with pytest.raises(type(error)) as caught:
        train(tmp_path, background=asynchronous)
    assert caught.value is error
    assert f"while a checkpoint was written to {tmp_path}; the checkpoints" in "".join(error.__notes__)
    assert names(tmp_path) == ["step-0000000001", "step-0000000002"]
    monkeypatch.undo()
    assert same(train(tmp_path), train(None))


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_what_would_end_the_thread_alone_is_an_error_of_the_run(tmp_path, monkeypatch, error):
    monkeypatch.setattr(WRITE, failing(error))
    with pytest.raises(StateError, match=f"could not write checkpoints.*{type(error).__name__}") as caught:
        train(tmp_path, background=True)
    assert caught.value.__cause__ is error


def test_an_error_of_the_last_checkpoint_is_one_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(WRITE, failing(KeyError("last"), at=10))
    with pytest.raises(KeyError, match="last"):
        train(tmp_path, background=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_to_delete_old_ones_is_named_and_does_not_end_the_run(
    tmp_path, monkeypatch, caplog, asynchronous
):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert same(train(tmp_path, background=asynchronous), train(None))
    assert f"{tmp_path / '.step-0000000001.old'} could not be deleted" in caplog.text


def test_an_error_of_the_thread_beside_one_of_the_run_is_in_the_log(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(WRITE, failing(KeyError("of the thread")))
    with caplog.at_level(logging.ERROR, logger="tp_trainer"), pytest.raises(StoppedError):
        train(tmp_path, background=True, stop_at=4)
    assert "the last checkpoint could not be written" in caplog.text
    assert "of the thread" in caplog.text


PROGRAM = """
import sys
from unittest import mock
from tests.tp_trainer.small_run import train

def fail(tensors, path):
    raise KeyError("metrics")

mock.patch("tp_trainer._checkpoint._checkpointer.write_whole", fail).start()
train(sys.argv[1], background=True)
"""


@pytest.mark.slow
def test_the_exit_status_of_a_run_whose_thread_failed_is_not_0(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 1
    assert "Exception in thread" not in done.stderr
    assert "while a checkpoint was written to" in done.stderr


def told(folder, asynchronous):
    if os.environ["RANK"] == "0":
        pytest.MonkeyPatch().setattr(WRITE, failing(KeyError("surprise")))
    with pytest.raises((KeyError, StateError)) as caught:
        train(folder, background=asynchronous)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("asynchronous", first_fast([True, False]))
def test_all_ranks_learn_of_any_error(tmp_path, asynchronous):
    first, second = run_ranks(told, 2, tmp_path, asynchronous)
    assert first == ("KeyError", "'surprise'")
    assert second == (
        "StateError",
        f"rank 0 could not write checkpoints to {tmp_path}: KeyError: 'surprise'",
    )
