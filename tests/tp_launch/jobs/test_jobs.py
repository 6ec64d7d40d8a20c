"""Jobs that outlive the terminal: listed, followed, stopped, and told apart from strangers."""

import errno
import itertools
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tp_core.errors import ConfigError, StateError
from tp_core.files import _reads  # private: how long it tries
from tp_launch import LaunchRequest
from tp_launch._job_commands import elapsed, log_chunks
from tp_launch._jobs import (  # private: jobs as other processes and versions leave them
    DetachedJob,
    JobStatus,
    create_job,
    find_job,
    list_jobs,
    load_job,
    process_identity,
    state_dir,
)

_WAITS = """
import os, pathlib, sys, time
print("started", sys.argv[1:], flush=True)
open("part", "w").write(str(os.getpid()))
os.rename("part", "pid")
while not pathlib.Path("go").exists():
    time.sleep(0.05)
print("ended")
sys.exit(int(sys.argv[1]))
"""


def _listed() -> dict[str, dict[str, object]]:
    return {job.name: job.to_dict() for job in list_jobs()}


@pytest.mark.slow
def test_a_detached_job_is_followed_to_its_end(tp, here):
    script = tp.script(_WAITS)
    job_id = tp("launch", "-n", "1", "--detach", "--name", "ab", script, "3", "-f").stdout.strip()
    follower = tp.start("logs", job_id[:5], "-f")
    assert follower.stdout.readline() == "[rank0] started ['3', '-f']\n"
    (listed,) = json.loads(here("jobs", "--json").stdout)
    assert (listed["id"], listed["name"], listed["state"]) == (job_id, "ab", "running")
    (tp.cwd / "go").touch()
    out, _ = follower.communicate(timeout=800)
    assert out.startswith("[rank0] ended\n")
    assert "rank 0 failed first: exit code 3" in out
    table = here("jobs").stdout
    assert table.split()[:6] == ["ID", "NAME", "STATE", "STARTED", "ELAPSED", "COMMAND"]
    assert "failed(3)" in table
    assert "script.py 3 -f" in table
    assert here("logs", "last", "-n", "1").stdout == "=" * 72 + "\n"
    assert "removed 1 ended" in here("jobs", "--clear").stderr
    assert _listed() == {}


@pytest.mark.slow
def test_a_stopped_job_leaves_nobody(tp, here, gone):
    script = tp.script(_WAITS)
    tp("launch", "-n", "1", "--detach", script, "0")
    pid = int(tp.wait_for("pid"))
    taken = here("launch", "--detach", "-n", "1", "--name", "script", str(tp.cwd / script), "0")
    assert taken.exit_code == 2
    assert "a job named 'script' is running; choose another --name" in taken.stderr
    done = tp("stop", "script")
    assert "stopped (SIGTERM; nothing was saved by fit: rank 0 was outside of a fit" in done.stdout
    gone(pid)
    assert (_listed()["script"]["state"], _listed()["script"]["status"]) == ("stopped", 143)
    assert "was not running: stopped" in here("stop", "last").stdout


@pytest.mark.slow
def test_a_job_that_holds_on_is_killed_with_its_whole_tree(tp, here, gone):
    script = tp.script(
        "import signal, subprocess\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "open('child', 'w').write(str(child.pid))\n" + _WAITS
    )
    tp("launch", "-n", "1", "--detach", script, "0")
    pids = [int(tp.wait_for(name)) for name in ("pid", "child")]
    done = here("stop", "last", "--grace-s", "0.5")
    assert done.stdout.endswith("stopped (SIGKILL)\n")
    gone(*pids)


@pytest.mark.slow
def test_a_job_whose_supervisor_was_killed_is_lost(tp, gone):
    tp("launch", "-n", "1", "--detach", tp.script(_WAITS), "0")
    pid = int(tp.wait_for("pid"))
    os.kill(int(_listed()["script"]["pid"]), signal.SIGKILL)
    gone(pid)
    assert _listed()["script"]["state"] == "lost"


def test_what_is_wrong_is_said_before_a_job_is_made(tp, here):
    done = here("launch", "--detach", "nope.py")
    assert done.exit_code == 2
    assert "there is no script 'nope.py'" in done.stderr
    assert not (tp.cwd / "state").exists()
    assert "no jobs" in here("jobs").stderr
    done = here("logs", "x")
    assert (done.exit_code, done.stderr) == (2, "tp logs: there is no job 'x'; there are: none at all\n")


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """Three jobs on disk, none of which was ever started."""
    monkeypatch.setenv("TP_STATE_DIR", str(tmp_path))
    ids = iter(("aa11", "aa22", "bb33"))
    monkeypatch.setattr("uuid.uuid4", lambda: _Id(next(ids)))
    made = [create_job(LaunchRequest(script=f"{n}.py")) for n in ("x", "y", "x")]
    for job in made:
        job.write_status(JobStatus(state="finished", pid=1, process="", started=0, ended=1, code=0))
    monkeypatch.undo()
    monkeypatch.setenv("TP_STATE_DIR", str(tmp_path))
    return made


class _Id:
    def __init__(self, text: str) -> None:
        self.hex = text


def _running(job, **changed) -> None:
    job.write_status(replace(JobStatus.of_this_process("running"), **changed))


def test_a_job_is_found_by_id_prefix_name_and_last(jobs):
    assert [find_job(ref).id for ref in ("aa11", "b", "y", "last")] == ["aa11", "bb33", "aa22", "bb33"]
    assert find_job("x").id == "bb33"  # the newest of that name
    _running(jobs[0])
    assert find_job("x").id == "aa11"  # the running one


def test_an_ambiguous_or_unknown_job_lists_those_there_are(jobs):
    with pytest.raises(ConfigError, match=r"'aa' may mean several jobs; they are: aa11 \(x\), aa22"):
        find_job("aa")
    with pytest.raises(ConfigError, match=r"there is no job 'zz'; there are: aa11 \(x\), aa22"):
        find_job("zz")


def test_a_reused_process_id_is_not_the_job(jobs):
    _running(jobs[0])
    assert jobs[0].is_running()
    _running(jobs[0], process=process_identity(1))
    assert jobs[0].status().state == "lost"


def test_a_damaged_job_is_left_out_and_named(jobs):
    (jobs[0].directory / "job.json").write_text("{")
    assert [job.id for job in list_jobs()] == ["aa22", "bb33"]
    with pytest.raises(StateError, match=r"aa11 holds no readable job.*delete it"):
        load_job(jobs[0].directory)


_JOB = {
    "": ["{", "", "[]", "null", "1", "[" * 100_000, '"\\ud800"', "{}"],
    "id": [None, 1, "another"],
    "name": [None, 1, ["x"]],
    "created": [None, "now", True, -1, 1e300, [0]],
    "cwd": [None, 3],
    "command": [None, "x", [1], {}],
    "grace_s": [None, "1", True, 1e999],
}
_STATUS = {
    "": ["{", "", "[]", "null", "{}"],
    "state": [None, 1, "sleeping"],
    "pid": [None, "1", 1.5, True],
    "process": [None, 3],
    "started": [None, "now", -1, 1e300],
    "ended": ["now", -1, 1e300],
    "code": ["0", 1.5],
    "reason": [None, 3],
}


def _damages(path, fields):
    """Write each damage to a file of JSON, one after the other."""
    whole = json.loads(path.read_text())
    for text in fields[""]:
        path.write_text(text)
        yield text[:80]
    for name in whole:
        left = {key: value for key, value in whole.items() if key != name}
        path.write_text(json.dumps(left))
        yield f"no {name}"
        for value in fields[name]:
            path.write_text(json.dumps(left | {name: value}))
            yield f"{name}={value!r}"
    path.unlink()
    yield "nothing there"
    path.mkdir()
    yield "a directory"
    path.rmdir()
    os.mkfifo(path)
    yield "a pipe"


def test_whatever_is_wrong_with_the_file_of_one_job_the_others_are_there(jobs, here):
    for damage in _damages(jobs[0].directory / "job.json", _JOB):
        assert [job.id for job in list_jobs()] == ["aa22", "bb33"], damage
        shown = here("jobs")
        assert (shown.exit_code, shown.stdout.count("finished")) == (0, 2), damage
        assert "tp jobs: left out: " in shown.stderr, damage
        assert find_job("y").id == "aa22", damage
    assert here("stop", "y").exit_code == 0
    assert "removed 2 ended" in here("jobs", "--clear").stderr
    assert jobs[0].directory.exists()


def test_whatever_is_wrong_with_the_status_of_one_job_the_others_are_there(jobs, here):
    optional = {"no ended", "no code", "no reason"}
    for damage in _damages(jobs[0].directory / "status.json", _STATUS):
        if damage in optional:
            continue
        states = [job.status().state for job in list_jobs()]
        assert states == ["damaged", "finished", "finished"], damage
        assert here("jobs").exit_code == 0, damage
        assert here("stop", "aa11").exit_code == 0, damage
    assert "removed 2 ended" in here("jobs", "--clear").stderr
    assert [job.id for job in list_jobs()] == ["aa11"]


def _unreadable(path, monkeypatch, *, times=10**9):
    """Have the system say of a file that it cannot be read, so often: root may read all files."""
    real = type(path).stat
    n_calls = itertools.count()

    def stat(self, **options):
        if self == path and next(n_calls) < times:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(self, **options)

    monkeypatch.setattr(type(path), "stat", stat)


def test_a_job_that_cannot_be_read_now_is_not_said_to_be_damaged(jobs, here, monkeypatch):
    monkeypatch.setattr(_reads, "_RETRY_S", 0.0)
    _unreadable(jobs[0].directory / "job.json", monkeypatch)
    assert [job.id for job in list_jobs()] == ["aa22", "bb33"]
    said = here("jobs").stderr
    assert "aa11 cannot be read: [Errno 13]" in said
    assert "delete it" not in said
    assert "aa11 cannot be read" in here("stop", "aa11").stderr


def test_a_job_whose_status_cannot_be_read_now_is_neither_ended_nor_removed(jobs, here, monkeypatch):
    monkeypatch.setattr(_reads, "_RETRY_S", 0.0)
    _unreadable(jobs[0].directory / "status.json", monkeypatch)
    assert [job.status().state for job in list_jobs()] == ["unreadable", "finished", "finished"]
    assert here("jobs").exit_code == 0
    done = here("stop", "aa11")
    assert done.exit_code == 1
    assert "whether job aa11 runs cannot be read" in done.stderr
    assert "removed 2 ended" in here("jobs", "--clear").stderr


def test_a_job_that_cannot_be_read_for_a_moment_is_read_then(jobs, here, monkeypatch):
    _unreadable(jobs[0].directory / "status.json", monkeypatch, times=2)
    assert jobs[0].status().state == "finished"
    _unreadable(jobs[1].directory / "job.json", monkeypatch, times=2)
    assert [job.id for job in list_jobs()] == ["aa11", "aa22", "bb33"]


def test_nobody_else_reads_what_was_started(jobs):
    assert {path.stat().st_mode & 0o777 for path in jobs[0].directory.iterdir()} == {0o600}


@pytest.mark.parametrize("pid", [-1, 0, 2**31, 2**70])
def test_an_id_that_no_process_can_have_is_that_of_a_lost_job(jobs, pid):
    _running(jobs[0], pid=pid)
    assert jobs[0].status().state == "lost"


def test_a_job_goes_on_when_the_clock_is_set(jobs, monkeypatch):
    _running(jobs[0])
    monkeypatch.setattr("psutil.Process.create_time", lambda _: 1.0)
    monkeypatch.setattr("psutil.boot_time", lambda: 1.0)
    assert jobs[0].status().state == "running"
    assert find_job("x").id == "aa11"


def test_a_job_without_a_log_is_said_to_have_none(jobs, here):
    done = here("logs", "y")
    assert done.exit_code == 1
    assert "the log of job aa22 cannot be read" in done.stderr


def test_a_name_is_given_to_one_of_many_that_start_at_once(jobs):
    def create(_):
        try:
            return create_job(LaunchRequest(script="s.py", name="one"))
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(create, range(8)))
    assert sum(isinstance(job, DetachedJob) for job in made) == 1
    assert sum("a job named 'one' is running" in text for text in made if isinstance(text, str)) == 7


@pytest.mark.parametrize("name", ["last", " ", "a\nb", "\x1b[31mred"])
def test_a_name_that_means_something_else_or_controls_the_terminal_is_refused(jobs, name):
    with pytest.raises(ConfigError, match="cannot be used; a name has printable char"):
        create_job(LaunchRequest(script="s.py", name=name))


def test_what_controls_a_terminal_is_shown_escaped(jobs, here):
    path = jobs[0].directory / "job.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"name": "\x1b[31m", "command": ["\x07x"]}))
    shown = here("jobs").stdout
    assert "\\x1b[31m" in shown
    assert "\\x07x" in shown
    assert not set(shown) & {"\x1b", "\x07"}
    assert "\x1b" not in here("logs", "zz").stderr


def test_a_state_directory_that_cannot_be_used_is_named(tmp_path, monkeypatch, here):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TP_STATE_DIR", str(tmp_path / "file"))
    script = tmp_path / "s.py"
    script.touch()
    done = here("launch", "--detach", "-n", "1", str(script))
    assert done.exit_code == 2
    assert "jobs cannot be kept in" in done.stderr
    assert "set TP_STATE_DIR to a directory that you can write to" in done.stderr
    assert here("jobs").exit_code == 2


def test_nobody_else_sees_the_ids_of_jobs(jobs):
    directory = state_dir() / "jobs"
    directory.chmod(0o755)  # as an earlier version left it
    create_job(LaunchRequest(script="s.py"))
    assert directory.stat().st_mode & 0o777 == 0o700


def test_the_state_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TP_STATE_DIR", "/a")
    assert str(state_dir()) == "/a"
    monkeypatch.delenv("TP_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/b")
    assert str(state_dir()) == "/b/tp"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_dir() == tmp_path / ".local/state/tp"


@pytest.mark.parametrize(
    ("lines", "shown"),
    [(None, b"a\nb\nc\n"), (0, b""), (1, b"c\n"), (2, b"b\nc\n"), (9, b"a\nb\nc\n")],
)
def test_the_last_lines_of_a_log(jobs, lines, shown):
    jobs[0].log.write_bytes(b"a\nb\nc\n")
    assert b"".join(log_chunks(jobs[0], follow=False, lines=lines)) == shown


def test_elapsed_time_reads_like_a_clock():
    assert [elapsed(s) for s in (5, 75.9, 3661, 90061)] == ["0:05", "1:15", "1:01:01", "1d 1:01:01"]
