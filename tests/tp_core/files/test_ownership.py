"""A place has one owner at a time: races, forks, interruptions, deaths, and file systems without locks."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import filelock
import pytest
from tp_core.errors import ConfigError
from tp_core.files import Ownership

fcntl = pytest.importorskip("fcntl", reason="Windows has other locks")

# Prints what a second owner meets, and dies as its owner.
DYING = """
import errno, os, signal, sys
from pathlib import Path
if sys.argv[2] == "none":
    sys.modules["fcntl"] = None  # as where Python has no such module
from tp_core.errors import ConfigError
from tp_core.files import Ownership
if sys.argv[2] == "broken":
    import fcntl
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    fcntl.flock = flock
lock = Ownership(Path(sys.argv[1]), is_folder=True)
try:
    Ownership(Path(sys.argv[1]), is_folder=True, grace_s=0)
except ConfigError as error:
    print(error, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def die_as_owner(place, locks):
    done = subprocess.run(
        [sys.executable, "-c", DYING, place, locks], capture_output=True, text=True, timeout=800, check=False
    )
    assert "is in use: process" in done.stdout, done.stderr
    return done


@pytest.fixture
def without_locks(monkeypatch):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_where_python_has_no_fcntl_a_place_has_one_owner_too(tmp_path):
    done = die_as_owner(tmp_path, "none")
    assert "has no locks" in done.stderr
    assert f"delete {tmp_path / '.lock.owner'}" in done.stdout
    Ownership(tmp_path, is_folder=True, grace_s=0).release()


def test_without_locks_a_dead_owner_of_this_host_is_followed(tmp_path, without_locks, caplog):
    die_as_owner(tmp_path, "broken")
    marker = tmp_path / ".lock.owner"
    left = marker.read_text()
    # The number of the dead one may be another process's by now, which started later.
    marker.write_text(re.sub(r"\A\d+", str(os.getppid()), left))
    with Ownership(tmp_path, is_folder=True, grace_s=0):
        assert marker.exists()
        with pytest.raises(ConfigError, match=r"\(this process\)"):
            Ownership(tmp_path, is_folder=True, grace_s=0)
    assert [*tmp_path.iterdir()] == []
    assert f"the file system of {tmp_path} has no locks" in caplog.text
    # One of another host may be alive.
    marker.write_text(re.sub(r"\n.+\n", "\nanother-host\n", left, count=1))
    with pytest.raises(ConfigError, match=rf"lost together with its host, delete {re.escape(str(marker))}"):
        Ownership(tmp_path, is_folder=True, grace_s=0)
    marker.unlink()
    Ownership(tmp_path, is_folder=True, grace_s=0).release()


def test_one_of_many_threads_has_the_place(tmp_path):
    inside, most, held = 0, 0, 0
    counting = threading.Lock()

    def work():
        nonlocal inside, most, held
        for _ in range(20):
            with Ownership(tmp_path / "file", grace_s=800):  # each end deletes the file that others wait for
                with counting:
                    inside += 1
                    most, held = max(most, inside), held + 1
                with counting:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(800)
    assert (most, held) == (1, 60)
    assert [*tmp_path.iterdir()] == []


def test_a_forked_copy_does_not_hold_the_place_and_cannot_renew_it(tmp_path):
    lock = Ownership(tmp_path, is_folder=True, grace_s=0)
    pid = os.fork()
    if pid == 0:
        status = 1
        with Path(os.devnull).open() as other:  # has the number that the lock had here
            try:
                lock.release()
                lock.renew()
            except ConfigError:
                os.fstat(other.fileno())  # nobody has closed it
                status = 2 if lock.is_held() else 0
            finally:
                os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert lock.is_held()
    lock.release()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_attempt_leaves_the_place_free(tmp_path, monkeypatch, error):
    def lock(descriptor, **_):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        raise error

    monkeypatch.setattr(filelock, "lock_descriptor", lock)
    with pytest.raises(error):
        Ownership(tmp_path, is_folder=True)
    monkeypatch.undo()
    Ownership(tmp_path, is_folder=True, grace_s=0).release()


@pytest.mark.parametrize("what", ["symlink", "link", "fifo", "folder"])
def test_what_only_has_the_name_of_a_lock_is_not_written_to(tmp_path, what):
    victim, lock = tmp_path / "victim", tmp_path / "run" / ".lock"
    victim.write_text("precious")
    lock.parent.mkdir()
    {
        "symlink": lambda: lock.symlink_to(victim),
        "link": lambda: lock.hardlink_to(victim),
        "fifo": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
    }[what]()
    with pytest.raises(OSError, match=re.escape(str(lock))):
        Ownership(lock.parent, is_folder=True, grace_s=0)
    assert victim.read_text() == "precious"


def test_a_file_in_a_folder_that_is_not_there_is_refused_by_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere in which model\.pt could be written"):
        Ownership(tmp_path / "nowhere" / "model.pt")
