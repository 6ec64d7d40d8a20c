"""A run that is killed before any of its file operations goes on to the same bits, and leaves nothing."""

import os
import sys
from pathlib import Path

import cloudpickle
import pytest
from tp_testing import rank_outcomes, run_ranks

from tests.tp_trainer import small_run
from tests.tp_trainer.small_run import names, same, train

cloudpickle.register_pickle_by_value(small_run)  # for ranks, which do not know this folder

STATUS = 77
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "fcntl.flock"}
SETTINGS = {
    "one": {"keep": 1, "every_steps": 4},
    "several": {"keep": 2, "every_steps": 3, "best": "loss"},
    "in a thread": {"keep": 1, "every_steps": 4, "background": True},
}


def killed(folder, at, settings):
    """Train, and end the process without a word before its n-th operation in the folder."""
    left = at

    def watch(event, arguments):
        nonlocal left
        if event in OPERATIONS and any(is_in(folder, argument) for argument in arguments):
            left -= 1
            if left == 0:
                os._exit(STATUS)

    sys.addaudithook(watch)
    train(folder, **settings)
    return at - left


def is_in(folder, what):
    """Whether an operation is on a path in the folder, or on a file that is open there."""
    if isinstance(what, int):
        try:
            what = Path(f"/proc/self/fd/{what}").readlink()
        except OSError:
            return False
    return isinstance(what, str | os.PathLike) and Path(what).is_relative_to(folder)


def check_points(tmp_path, name, points):
    settings, expected = SETTINGS[name], train(None)
    (count,) = run_ranks(killed, 1, tmp_path / "whole", 0, settings)
    assert count > 20
    for at in points(count):
        folder = tmp_path / str(at)
        (outcome,) = rank_outcomes(killed, 1, folder, at, settings)
        assert outcome.exitcode == STATUS, str(outcome)
        assert same(train(folder, **settings), expected), f"killed before operation {at}"
        assert names(folder) == names(tmp_path / "whole"), f"killed before operation {at}"


@pytest.mark.parametrize("name", ["one", *(pytest.param(n, marks=pytest.mark.slow) for n in [*SETTINGS][1:])])
def test_a_run_that_is_killed_before_some_operation_goes_on(tmp_path, name):
    check_points(tmp_path, name, lambda count: range(3, count, 23))


def test_a_checkpoint_is_on_the_disk_before_its_name_is_and_then_the_name(tmp_path, monkeypatch):
    folder, flushed, missing, usual = tmp_path / "run", set(), [], Path.rename

    def note(handle):
        flushed.add(os.fstat(handle).st_ino)

    def rename(source, target):
        paths = [source, *source.rglob("*")]
        missing.append([path.name for path in paths if path.stat().st_ino not in flushed])
        usual(source, target)
        flushed.discard(folder.stat().st_ino)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", rename)
    train(folder, epochs=1, keep=10)
    assert missing == [[]] * 5
    assert folder.stat().st_ino in flushed


@pytest.mark.takes(60)
@pytest.mark.nightly
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_that_is_killed_before_any_operation_goes_on(tmp_path, name):
    check_points(tmp_path, name, lambda count: range(1, count))
