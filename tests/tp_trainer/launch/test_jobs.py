"""Jobs that outlive the terminal: listed, followed, stopped, and told apart from strangers."""

import json
import os
import signal
import time

import psutil
import pytest
from tp_core.errors import ConfigError, StateError
from tp_trainer._launch._jobs import (
    Status,
    create_job,
    find_job,
    is_running,
    list_jobs,
    load_job,
    state_dir,
)
from tp_trainer._launch._request import LaunchRequest
from tp_trainer._launch._show import elapsed, log_chunks

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


def test_a_detached_job_is_followed_to_its_end(tp, here):
    script = tp.script(_WAITS)
    job_id = tp("launch", "-n", "1", "--detach", "--name", "ab", script, "3", "-f").stdout.strip()
    follower = tp.start("logs", job_id[:5], "-f")
    assert follower.stdout.readline() == "[rank0] started ['3', '-f']\n"
    (listed,) = json.loads(here("jobs", "--json").stdout)
    assert (listed["id"], listed["name"], listed["state"]) == (job_id, "ab", "running")
    (tp.cwd / "go").touch()
    out, _ = follower.communicate(timeout=20)
    assert out.startswith("[rank0] ended\n")
    assert "rank 0 failed first: exit code 3" in out
    table = here("jobs").stdout
    assert table.split()[:6] == ["ID", "NAME", "STATE", "STARTED", "ELAPSED", "COMMAND"]
    assert "failed(3)" in table
    assert "script.py 3 -f" in table
    assert here("logs", "last", "-n", "1").stdout == "=" * 72 + "\n"
    assert "removed 1 ended" in here("jobs", "--clear").stderr
    assert _listed() == {}


def test_a_stopped_job_leaves_nobody(tp, here, gone):
    script = tp.script(_WAITS)
    tp("launch", "-n", "1", "--detach", script, "0")
    pid = int(tp.wait_for("pid"))
    taken = here("launch", "--detach", "-n", "1", "--name", "script", str(tp.cwd / script), "0")
    assert taken.exit_code == 2
    assert "a job named 'script' is running; choose another --name" in taken.stderr
    done = tp("stop", "script")
    assert done.stdout.endswith("stopped (SIGTERM)\n")
    gone(pid)
    assert (_listed()["script"]["state"], _listed()["script"]["status"]) == ("stopped", 143)
    assert "was not running: stopped" in here("stop", "last").stdout


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
    made = [create_job(LaunchRequest(script=f"{n}.py"), command=(n,)) for n in ("x", "y", "x")]
    monkeypatch.undo()
    monkeypatch.setenv("TP_STATE_DIR", str(tmp_path))
    return made


class _Id:
    def __init__(self, text: str) -> None:
        self.hex = text


def _running(job, *, pid_created: float) -> None:
    job.write_status(Status(state="running", pid=os.getpid(), pid_created=pid_created, started=time.time()))


def test_a_job_is_found_by_id_prefix_name_and_last(jobs):
    assert [find_job(ref).id for ref in ("aa11", "b", "y", "last")] == ["aa11", "bb33", "aa22", "bb33"]
    assert find_job("x").id == "bb33"  # the newest of that name
    _running(jobs[0], pid_created=psutil.Process().create_time())
    assert find_job("x").id == "aa11"  # the running one


def test_an_ambiguous_or_unknown_job_lists_those_there_are(jobs):
    with pytest.raises(ConfigError, match=r"'aa' may mean several jobs; they are: aa11 \(x\), aa22"):
        find_job("aa")
    with pytest.raises(ConfigError, match=r"there is no job 'zz'; there are: aa11 \(x\), aa22"):
        find_job("zz")


def test_a_reused_process_id_is_not_the_job(jobs):
    _running(jobs[0], pid_created=psutil.Process().create_time())
    assert is_running(jobs[0])
    _running(jobs[0], pid_created=psutil.Process().create_time() - 60)
    assert jobs[0].status().state == "lost"


def test_the_name_last_is_refused(jobs):
    with pytest.raises(ConfigError, match="'last' means the newest job"):
        create_job(LaunchRequest(script="s.py", name="last"), command=())


def test_a_damaged_job_is_left_out_and_named(jobs):
    (jobs[0].directory / "job.json").write_text("{")
    assert [job.id for job in list_jobs()] == ["aa22", "bb33"]
    with pytest.raises(StateError, match=r"aa11 holds no readable job.*delete it"):
        load_job(jobs[0].directory)


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
