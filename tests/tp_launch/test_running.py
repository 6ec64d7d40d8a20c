"""A launch that goes well: what the ranks get, and what the user sees."""

import os
import re
from pathlib import Path

import pytest
from tp_launch import LaunchRequest, execute  # a launch in this process spares an import of torch

from tests.own_words import own_words


def test_ranks_get_their_arguments_verbatim_and_their_lines_are_marked(tp, here, monkeypatch):
    monkeypatch.chdir(tp.cwd)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = tp.script(
        """
        import os, sys
        print("args", sys.argv[1:])
        print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], file=sys.stderr)
        print(os.environ["OMP_NUM_THREADS"], os.environ["PYTHONUNBUFFERED"], "TP_RANK_DIR" in os.environ)
        """
    )
    args = ["-n", "5", "--detach", "--", "", "${local_rank}", "$$", "a b"]
    done = here("launch", "-n", "2", script, *args)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done.exit_code == 0
    assert sorted(done.stdout.splitlines()) == [
        f"[rank0] {threads} 1 False",
        f"[rank0] args {args}",
        f"[rank1] {threads} 1 False",
        f"[rank1] args {args}",
    ]
    said, *marked = sorted(own_words(done.stderr).splitlines(), key=lambda line: line.startswith("[rank"))
    assert said.startswith(f"tp launch: OMP_NUM_THREADS={threads} for each process")
    assert sorted(marked) == ["[rank0] rank 0 of 2", "[rank1] rank 1 of 2"]
    assert list(tp.tmp.glob("tp-launch-*")) == []


@pytest.mark.slow
def test_output_is_live_and_in_whole_lines(tp):
    script = tp.script(
        """
        import pathlib, sys, time
        for i in range(50):
            print("a", "b", "c", i)
        sys.stdout.write("no end of line")
        while not pathlib.Path("go").exists():
            time.sleep(0.02)
        """
    )
    process = tp.start("launch", "-n", "2", script)
    lines = [process.stdout.readline() for _ in range(102)]  # while the ranks still wait
    (tp.cwd / "go").touch()
    assert process.wait(800) == 0
    for rank in range(2):
        mine = [line for line in lines if line.startswith(f"[rank{rank}] ")]
        expected = [f"[rank{rank}] a b c {i}\n" for i in range(50)]
        assert mine == [*expected, f"[rank{rank}] no end of line\n"]


def test_a_module_runs_and_its_logs_stay_when_asked(tp, monkeypatch, capfd):
    monkeypatch.chdir(tp.cwd)
    tp.script("print('hello from', __name__)", name="some_module.py")
    request = LaunchRequest(script="some_module", module=True, nproc_per_node=1, log_dir="logs")
    assert execute(request).status == 0
    assert capfd.readouterr().out == "[rank0] hello from __main__\n"
    (log,) = (tp.cwd / "logs").rglob("stdout.log")
    assert log.read_text() == "hello from __main__\n"


def test_a_restart_is_told_and_can_save_the_run(tp, capfd):
    script = tp.script(
        """
        import os, pathlib, sys
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        sys.exit(3 if first else 0)
        """
    )
    request = LaunchRequest(script=str(tp.cwd / script), nproc_per_node=1, max_restarts=2)
    assert execute(request).status == 0
    (said,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("tp launch:"))
    # On a busy machine torch may collect the process before its status is seen.
    assert re.fullmatch(r"tp launch: rank 0 failed( with exit code 3)?, restart 1 of 2", said)


def test_run_is_the_same_for_python(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    assert execute(LaunchRequest(script=str(script), nproc_per_node=1)).status == 0
    assert capfd.readouterr().out == "[rank0] ran\n"


class Clock:
    """Time that passes only while somebody sleeps."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_waiting_for_nobody_is_said_and_ends(tmp_path, free_port, monkeypatch, capfd):
    monkeypatch.setattr("tp_launch._addresses.time", Clock())
    (tmp_path / "script.py").touch()
    request = LaunchRequest(
        script=str(tmp_path / "script.py"),
        nproc_per_node=1,
        nnodes="2",
        rdzv_endpoint=f"127.0.0.1:{free_port}",
        rdzv_conf={"is_host": "0", "timeout": "60"},
    )
    assert f"nobody answered at 127.0.0.1:{free_port} within 60 s" in execute(request).message
    said = f"waiting for the rendezvous host at 127.0.0.1:{free_port} (Connection refused)"
    assert capfd.readouterr().err.count(said) == 1
