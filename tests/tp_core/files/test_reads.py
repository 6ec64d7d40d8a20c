"""Reads that fail for a moment, and files that are not there."""

import errno
import os

import pytest
import torch
from tp_core.errors import StateError
from tp_core.files import _reads, is_absence, is_regular_file, retry_read  # private: how long it tries
from tp_core.state import read_tensors, record_of, write_tensors
from tp_core.tensors import _digests, _index  # private: a disk that fails cannot be had otherwise


def failing(times, number=errno.ESTALE, then=lambda *_: 42):
    """Return a function that fails so often, and its calls."""
    calls = []

    def read(*args):
        calls.append(args)
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return then(*args)

    return read, calls


def test_what_fails_for_a_moment_is_read_and_said_once(caplog):
    read, calls = failing(3)
    assert retry_read(read) == 42
    assert len(calls) == 4
    assert caplog.text.count("Stale file handle; it is tried again for 5 s") == 1


def test_what_fails_for_long_raises_its_cause(monkeypatch):
    monkeypatch.setattr(_reads, "_RETRY_S", 0.0)
    for number in (errno.EACCES, errno.EIO, errno.EMFILE):
        with pytest.raises(OSError, match=os.strerror(number)):
            retry_read(failing(10**9, number)[0])


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP])
def test_absence_is_seen_at_once(number):
    read, calls = failing(10**9, number)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        retry_read(read)
    assert is_absence(caught.value)
    assert len(calls) == 1


def test_a_file_of_which_the_system_says_nothing_is_not_absent(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    found = [is_regular_file(tmp_path / name) for name in ("file", "loop", "nothing", "file/below", ".")]
    assert found == [True, False, False, False, False]
    monkeypatch.setattr("pathlib.Path.stat", failing(1, errno.EACCES)[0])
    with pytest.raises(PermissionError):
        is_regular_file(tmp_path / "file")


def test_a_record_differs_from_a_file_only_by_what_was_read(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"123")
    record = record_of(path)
    monkeypatch.setattr(_digests, "record_of", failing(2, then=record_of)[0])
    assert record.difference(path) is None
    monkeypatch.setattr(_reads, "_RETRY_S", 0.0)
    monkeypatch.setattr(_digests, "record_of", failing(10**9)[0])
    with pytest.raises(OSError, match="Stale file handle"):
        record.difference(path)
    path.unlink()
    assert record.difference(path) == "is missing"


def test_tensors_that_cannot_be_read_are_not_damaged(tmp_path, monkeypatch):
    write_tensors({"a": torch.ones(3)}, tmp_path)
    target = torch.zeros(3)
    monkeypatch.setattr(_index, "check_file", failing(2, then=lambda *_: None)[0])
    read_tensors({"a": target}, tmp_path)
    assert (target == 1).all()
    monkeypatch.setattr(_reads, "_RETRY_S", 0.0)
    monkeypatch.setattr(_index, "check_file", failing(10**9)[0])
    with pytest.raises(OSError, match="Stale file handle"):
        read_tensors({"a": target}, tmp_path)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(StateError, match="is damaged"):
        read_tensors({"a": target}, tmp_path)
