"""Checkpoints that cannot be read now: they are not damaged, and nothing is lost for it."""

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest
from tp_core.errors import StateError
from tp_core.files import _reads  # private, as below: no test can have a disk that fails
from tp_core.tensors import _digests
from tp_trainer._checkpoint import _folder

from tests.tp_trainer.small_run import leave, names, same, train

ERRORS = [errno.ESTALE, errno.EACCES, errno.EIO, errno.EMFILE]


@pytest.fixture(scope="module")
def nine_steps(tmp_path_factory):
    """The folder of a run that was killed after nine steps."""
    folder = tmp_path_factory.mktemp("nine") / "run"
    leave(folder, 9, keep=4, best="loss")
    return folder


@pytest.fixture(scope="module")
def undisturbed():
    return train(None)


@pytest.fixture
def folder(nine_steps, tmp_path):
    return Path(shutil.copytree(nine_steps, tmp_path / "run"))


class Disk:
    """Fails to read files whose paths have a text in them, so often; then it reads them."""

    def __init__(self, patch, within, number, times):
        self.within, self.number, self.left = within, number, times
        for owner, name in ((_digests, "record_of"), (_folder, "is_regular_file")):
            patch.setattr(owner, name, self._failing(getattr(owner, name)))

    def _failing(self, real):
        def read(path):
            if self.within in str(path) and self.left > 0:
                self.left -= 1
                raise OSError(self.number, os.strerror(self.number), str(path))
            return real(path)

        return read


def broken(patch, within, number=errno.ESTALE, *, times=10**9, retry_s=0.0):
    patch.setattr(_reads, "_RETRY_S", retry_s)
    return Disk(patch, within, number, times)


def test_what_cannot_be_read_for_a_moment_is_resumed_from(folder, undisturbed, monkeypatch, caplog):
    disk = broken(monkeypatch, "step-", times=9, retry_s=60.0)
    assert same(train(folder, keep=2), undisturbed)
    assert disk.left == 0
    assert names(folder) == ["step-0000000009", "step-0000000010"]
    assert "it is tried again for 60 s" in caplog.text


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_what_cannot_be_read_at_all_ends_the_run_and_changes_nothing(folder, monkeypatch, number):
    before = names(folder)
    for within in ("tensors.pt", "manifest.json"):
        with monkeypatch.context() as patch:
            broken(patch, within, number)
            with pytest.raises(
                OSError, match="step-0000000009 cannot be read, and nothing was changed"
            ) as end:
                train(folder)
        assert end.value.errno == number
        assert names(folder) == before


def test_a_damaged_one_stays_where_the_ones_before_it_cannot_be_read(folder, monkeypatch):
    os.truncate(folder / "step-0000000009" / "tensors.pt", 100)
    before = names(folder)
    broken(monkeypatch, "step-0000000008")
    with pytest.raises(OSError, match="step-0000000008 cannot be read"):
        train(folder)
    assert names(folder) == before


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(folder, monkeypatch):
    monkeypatch.setattr(_reads, "_RETRY_S", 0.0)
    real = Path.iterdir

    def iterdir(self):
        if self == folder:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return real(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    for resume in ("auto", None):
        with pytest.raises(PermissionError, match="Permission denied"):
            train(folder, resume=resume)


def resume_on_ranks(folder, failing_rank):
    with pytest.MonkeyPatch.context() as patch:
        if int(os.environ["RANK"]) == failing_rank:
            broken(patch, "step-")
        with pytest.raises(OSError, match="cannot be read, and nothing was changed") as end:
            train(folder)
        return str(end.value)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_all_ranks_end_with_the_cause_of_one(two_ranks, tmp_path, failing_rank):
    folder = tmp_path / "run"
    folder.mkdir()
    checkpoint = folder / "step-0000000004"
    (checkpoint / "tensors").mkdir(parents=True)
    for name in ("tensors/__0_0.safetensors", "tensors/__1_0.safetensors"):
        (checkpoint / name).write_bytes(b"x")
    known = {name: _digests.record_of(checkpoint / name) for name in ("tensors/__0_0.safetensors",)}
    known["tensors/__1_0.safetensors"] = known["tensors/__0_0.safetensors"]
    _folder.write_manifest(checkpoint, 4, {}, known)
    before = names(folder)
    first, second = two_ranks.run(resume_on_ranks, folder, failing_rank)
    assert first == second
    assert "Stale file handle" in first
    assert [name for name in names(folder) if name != ".lock"] == before


@pytest.mark.parametrize("best", [None, "loss"])
def test_a_save_deletes_nothing_while_it_cannot_look(folder, undisturbed, monkeypatch, caplog, best):
    disk = broken(monkeypatch, "step-0000000008")
    with caplog.at_level(logging.WARNING, logger="tp_trainer"):
        assert same(train(folder, keep=3, best=best), undisturbed)
    assert "no checkpoint is deleted until it can be read" in caplog.text
    assert names(folder) == [f"step-{step:010}" for step in range(6, 11)]
    disk.left = 0
    train(folder, keep=3, best=best, epochs=3)
    assert names(folder)[-3:] == [f"step-{step:010}" for step in range(13, 16)]
    assert len(names(folder)) <= 4  # the best beside them


def test_a_run_does_not_begin_again_by_itself(folder, monkeypatch):
    for path in folder.glob("step-*"):
        os.truncate(path / "tensors.pt", 100)
    before = names(folder)
    for _ in range(2):  # a scheduler puts the job back
        with pytest.raises(
            StateError, match=r"has 4 checkpoints and none is whole \(.*step-0000000009 is dam"
        ):
            train(folder)
        assert names(folder) == before
    shutil.rmtree(folder)
    train(folder)
    assert names(folder)[-1] == "step-0000000010"
