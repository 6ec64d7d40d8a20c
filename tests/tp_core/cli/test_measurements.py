"""What `tp doctor` measures, and what it calls slow."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tp_core import LaunchEnvironment

# What a link, a disk or a clock is said to be cannot be had from this machine: the parts are called.
# private: a slow machine cannot be had
from tp_core.cli._measurements import lines_of, measure, meet, slow_parts, start_ranks
from tp_core.errors import RankFailedError
from tp_core.testing import run_ranks

from tests.run_tp import run

GB = 1e9

FAST = {
    "ranks": {
        "ranks": 4,
        "hosts": 2,
        "meeting_s": 0.5,
        "all_reduce_s": 1e-4,
        "all_reduce_bytes_per_s": {"cpu": 2 * GB, "cuda": 90 * GB},
        "clocks": {"node1 (host 1)": {"skew_s": 0.004, "uncertainty_s": 0.001}},
    },
    "copies": [{"source": "cpu", "target": "cuda:0", "bytes_per_s": 25 * GB}],
    "disk": {"folder": "/scratch", "write_bytes_per_s": 2 * GB},
}


def ranks(**changes):
    return FAST | {"ranks": FAST["ranks"] | changes}


def test_what_is_fast_is_shown_and_not_called_slow():
    assert slow_parts(FAST) == []
    shown = "\n".join(lines_of(FAST))
    for part in ("4 ranks on 2 host(s) met in 0.5 s", "0.10 ms", "all-reduce (cuda): 90.00 GB/s"):
        assert part in shown
    assert "clock of node1 (host 1): +0.004 s, to 0.001 s" in shown
    assert "cpu -> cuda:0: 25.00 GB/s" in shown
    assert "disk of /scratch: 2.00 GB/s" in shown


@pytest.mark.parametrize(
    ("found", "parts"),
    [
        (ranks(meeting_s=42.0), ["ranks took 42 s to meet (slow is more than 10 s)", "MASTER_ADDR"]),
        (
            ranks(all_reduce_bytes_per_s={"cpu": 0.4 * GB}),
            ["between 4 ranks (cpu) makes 0.40 GB/s (slow is less than 1.00 GB/s)", "1.0 s in each step"],
        ),
        (
            ranks(hosts=1, all_reduce_bytes_per_s={"cpu": 0.05 * GB}),
            ["0.05 GB/s (slow is less than 0.10 GB/s)", "keep the cores busy"],
        ),
        (ranks(hosts=1, all_reduce_bytes_per_s={"cuda": 3 * GB}), ["less than 5.00 GB/s", "nvidia-smi topo"]),
        (
            ranks(clocks={"node1 (host 1)": {"skew_s": -3.0, "uncertainty_s": 0.001}}),
            ["clock of node1 (host 1) is -3.0 s off (too much is 0.5 s)", "time server"],
        ),
        (
            FAST | {"copies": [{"source": "cuda:0", "target": "cpu", "bytes_per_s": 1.5 * GB}]},
            ["from cuda:0 to cpu make 1.50 GB/s (slow is less than 4.00 GB/s", "lanes"],
        ),
        (
            FAST | {"disk": {"folder": "/home", "write_bytes_per_s": 0.02 * GB}},
            ["disk of /home takes 0.02 GB/s (slow is less than 0.10 GB/s)", "10 GB takes 8 minutes"],
        ),
    ],
)
def test_what_is_slow_is_said_with_the_limit_and_what_it_costs(found, parts):
    (sentence,) = slow_parts(found)
    for part in parts:
        assert part in sentence


def test_a_clock_that_was_read_roughly_is_not_accused():
    assert slow_parts(ranks(clocks={"far (host 1)": {"skew_s": 0.9, "uncertainty_s": 0.6}})) == []


@pytest.fixture
def as_ranks(tmp_path, monkeypatch):
    """Put a shell script in the place of the interpreter of ranks."""

    def put(script):
        file = tmp_path / "rank"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))

    return put


@pytest.mark.slow
def test_ranks_that_do_not_meet_are_ended_at_the_deadline_and_named(as_ranks, tmp_path, capsys):
    as_ranks('[ "$RANK" = 0 ] || exec sleep 1000')
    with pytest.raises(
        RankFailedError, match=r"3 ranks .* had not met after 1 s; waiting: rank (0, )?1, 2; a fire"
    ):
        start_ranks(3, timeout_s=1.0)
    assert run(["doctor", "--timeout-s", "1", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "had not met after 1 s; waiting: rank" in problem


def test_a_rank_that_fails_is_named_with_its_last_line(as_ranks):
    as_ranks('[ "$RANK" = 0 ] && exec sleep 1000; echo "the library is missing" >&2; exit 3')
    with pytest.raises(RankFailedError, match="cannot meet: rank 1 failed: the library is missing"):
        start_ranks(2, timeout_s=800.0)


def test_a_folder_that_takes_no_file_is_a_problem(as_ranks, tmp_path):
    as_ranks("exit 1")
    found, problems = measure(LaunchEnvironment(), ranks=2, folder=tmp_path / "no", timeout_s=800.0)
    assert (found["ranks"], found["disk"]) == (None, None)
    assert "rank 0 failed: it printed nothing" in problems[0] or "rank 1 failed" in problems[0]
    assert "nothing can be written where checkpoints would go" in problems[1]


@pytest.mark.slow
def test_two_ranks_meet_and_the_disk_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tp_core.cli._measurements.SLOW_DISK", float("inf"))
    assert run(["doctor", "--ranks", "3", "--folder", str(tmp_path), "--json", "--timeout-s", "800"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["measurements"]
    assert (found["ranks"]["ranks"], found["ranks"]["hosts"], found["ranks"]["clocks"]) == (3, 1, {})
    assert found["ranks"]["all_reduce_bytes_per_s"]["cpu"] > 0
    assert found["disk"]["write_bytes_per_s"] > 0
    assert any("the disk of" in sentence for sentence in report["slow"])
    assert list(tmp_path.iterdir()) == []


def meet_of_two_hosts(shift_s):
    environment = LaunchEnvironment.read()
    rank = environment.rank
    if rank == 1:
        clock = time.time
        time.time = lambda: clock() + shift_s
    return meet(replace(environment, host_rank=rank, hosts=2, local_world_size=1), timeout_s=800.0)


@pytest.mark.slow
def test_clocks_of_other_hosts_are_compared_with_that_of_the_first():
    found, _ = run_ranks(meet_of_two_hosts, 2, 3600.0)
    ((host, clock),) = found["clocks"].items()
    assert "(host 1)" in host
    assert abs(clock["skew_s"] - 3600.0) <= clock["uncertainty_s"] + 0.1
    assert found["hosts"] == 2
    assert "+3600.0 s off" in slow_parts(FAST | {"ranks": found | {"meeting_s": 0.0}})[-1]


@pytest.mark.slow
def test_under_a_launcher_its_ranks_measure_together_and_the_first_one_reports(tmp_path):
    reports = run_ranks(doctor_on_a_rank, 2, str(tmp_path))
    assert [status for status, _ in reports] == [0, 0]
    assert json.loads(reports[0][1])["measurements"]["ranks"]["ranks"] == 2
    assert reports[1][1] == ""


def doctor_on_a_rank(folder):
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = run(["doctor", "--json", "--folder", folder, "--timeout-s", "800"])
    return status, out.getvalue()


def test_the_folder_is_the_current_one_by_default(as_ranks, tmp_path, monkeypatch, capsys):
    as_ranks("exit 1")
    monkeypatch.chdir(tmp_path)
    run(["doctor", "--json"])
    disk = json.loads(capsys.readouterr().out)["measurements"]["disk"]
    assert Path(disk["folder"]) == tmp_path
