"""Files that are whole or not there, whoever is killed while writing them."""

import os
import signal
import stat
import threading

import pytest
from tp_core.files import write_atomically
from tp_testing import rank_outcomes


def write_text(path, text="new"):
    write_atomically(lambda part: part.write_text(text), path)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_by_a_whole_one(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    write_text(path)
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file"]


def test_contents_are_on_the_disk_before_their_name_is_and_then_the_name(tmp_path, monkeypatch):
    path, flushed = tmp_path / "file", []
    path.write_text("old")

    def note(handle):
        flushed.append((stat.S_ISDIR(os.fstat(handle).st_mode), path.read_text()))

    monkeypatch.setattr(os, "fsync", note)
    write_text(path)
    assert flushed == [(False, "old"), (True, "new")]


def test_an_error_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(part):
        part.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(fail, path)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_text(tmp_path / "nowhere" / "file")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0, 0o666)])
def test_the_file_has_the_rights_that_the_user_gives_to_files(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "file")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_the_umask_is_never_changed(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "umask")
    write_text(tmp_path / "file")


def killed(path):
    def write(part):
        part.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    write_atomically(write, path)


def test_what_a_killed_writer_left_is_deleted_by_the_next_one(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    (outcome,) = rank_outcomes(killed, 1, path)
    assert outcome.exitcode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(names(tmp_path)) == 2
    write_text(path)
    assert names(tmp_path) == ["file"]


def test_what_another_writer_is_writing_is_left_to_it(tmp_path):
    path = tmp_path / "file"
    begun, go_on = threading.Event(), threading.Event()

    def slowly(part):
        part.write_text("first")
        begun.set()
        assert go_on.wait(800)

    thread = threading.Thread(target=write_atomically, args=(slowly, path))
    thread.start()
    assert begun.wait(800)
    write_text(path, "second")
    assert path.read_text() == "second"
    go_on.set()
    thread.join(800)
    assert path.read_text() == "first"
    assert names(tmp_path) == ["file"]


def test_files_of_other_names_are_left_alone(tmp_path):
    others = [".file.notes.tmp", ".files.0123456789abcdef.tmp", "file.0123456789abcdef.tmp", ".file.tmp"]
    for name in others:
        (tmp_path / name).write_text("mine")
    write_text(tmp_path / "file")
    assert names(tmp_path) == sorted([*others, "file"])
