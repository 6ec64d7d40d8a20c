"""What `tp doctor` says of ranks that meet, and of those that cannot."""

import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import time

import pytest
from tp_testing import run_ranks

from tests.run_tp import run

DEADLINE_S = "800"
MEET = "tp_core.cli._meeting.meet"  # private: ranks of this host that cannot meet are not to be had


def doctor(*words):
    """Return the exit status of `tp doctor`, and what it reports; a rank above 0 reports nothing."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = run(["doctor", "--json", *words])
    return status, json.loads(out.getvalue() or "null")


def test_ranks_meet_and_add_up_a_number(capsys):
    status, report = doctor("--ranks", "3", "--timeout-s", DEADLINE_S)
    found = report["meeting"]
    assert (status, report["problems"]) == (0, [])
    assert (found["ranks"], found["hosts"], found["devices"][0]) == (3, 1, "cpu")
    assert 0 < found["seconds"] < float(DEADLINE_S)
    assert doctor("--ranks", "0")[1]["meeting"] is None


@pytest.mark.slow
def test_the_page_says_that_they_met(capsys):
    assert run(["doctor", "--timeout-s", DEADLINE_S]) == 0
    assert "Ranks: 2 on 1 host(s) met and added up a number (cpu" in capsys.readouterr().out


@pytest.mark.slow
def test_without_cloudpickle_and_without_a_fork_server_they_meet_too(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "tp_core._launch._rank_pool.find_spec", lambda name: None if name == "cloudpickle" else found(name)
    )
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert doctor("--timeout-s", DEADLINE_S)[1]["meeting"]["ranks"] == 2


def raise_on_the_second(timeout_s):
    if os.environ["RANK"] == "1":
        msg = "the library is missing"
        raise RuntimeError(msg)
    time.sleep(1000)


def die_on_the_second(timeout_s):
    if os.environ["RANK"] == "1":
        os._exit(3)
    time.sleep(1000)


def hang_on_the_second(timeout_s):
    if os.environ["RANK"] == "1":
        time.sleep(1000)


@pytest.mark.parametrize(
    ("function", "deadline_s", "said"),
    [
        (raise_on_the_second, 800, "rank 1 raised: RuntimeError: the library is missing; a firewall"),
        (die_on_the_second, 800, "rank 1 ended with status 3; a firewall"),
        # The other rank has to have ended by then, on a busy machine, too.
        pytest.param(
            hang_on_the_second,
            60,
            "rank 1 had not ended at the deadline; a firewall",
            marks=[pytest.mark.slow, pytest.mark.takes(60)],
        ),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_the_rank_that_fails_is_named_with_what_it_said(function, deadline_s, said, monkeypatch):
    monkeypatch.setattr(MEET, function)
    monkeypatch.setattr("tp_core.cli._meeting._GRACE_S", 0.0)
    status, report = doctor("--timeout-s", str(deadline_s))
    (problem,) = report["problems"]
    assert (status, report["meeting"]) == (1, None)
    assert problem.startswith(f"2 ranks of this host cannot meet: {said}"), problem


def meet_alone(timeout_s):
    from tp_core.cli._meeting import meet

    if os.environ["RANK"] == "0":
        meet(timeout_s)
    time.sleep(1000)


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_says_for_what(monkeypatch):
    monkeypatch.setattr(MEET, meet_alone)
    monkeypatch.setattr("tp_core.cli._meeting._GRACE_S", 800.0)
    (problem,) = doctor("--timeout-s", "2")[1]["problems"]
    assert "cannot meet: rank 0 raised: " in problem
    assert "within 2 s" in problem


@pytest.mark.slow
def test_under_a_launcher_its_ranks_meet_and_the_first_one_reports():
    reports = run_ranks(doctor, 2, "--timeout-s", DEADLINE_S)
    assert [status for status, _ in reports] == [0, 0]
    assert reports[0][1]["meeting"]["ranks"] == 2
    assert reports[1][1] is None
