"""What the last line of a launch that a signal ended says of what was saved."""

import signal
from pathlib import Path

import pytest
from tp_core import launching
from tp_launch._outcome import Rank, RankDeath, account, exit_report_path, reported_exit


@pytest.fixture
def ranks(tmp_path):
    made = []
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        made.append(
            Rank(local_rank=number, rank=number + 4, directory=directory, stdout=Path(), stderr=Path())
        )
    return made


def report_exit(rank, monkeypatch, saved, number=signal.SIGTERM):
    monkeypatch.setenv(launching.EXIT_REPORT, str(exit_report_path(rank.directory)))
    launching.write_exit_report(number, saved)


def said(ranks, *codes, killed=(), is_hurried=False):
    deaths = {number: RankDeath(number, code) for number, code in enumerate(codes)}
    return account(ranks, deaths=deaths, killed=killed, grace_s=30.0, is_hurried=is_hurried)


def test_what_one_rank_reports_was_saved(ranks, monkeypatch, tmp_path):
    report_exit(ranks[1], monkeypatch, tmp_path / "run" / "step-8")
    assert said(ranks, -signal.SIGKILL, 143, killed={0}) == f"saved: {tmp_path}/run/step-8"
    assert reported_exit(ranks[1], 143).saved == f"{tmp_path}/run/step-8"
    assert reported_exit(ranks[1], 1) is None  # it failed afterwards
    assert reported_exit(ranks[0], 143) is None


@pytest.mark.parametrize(
    ("codes", "killed", "reason"),
    [
        (
            (-9, -15),
            {0},
            "rank 4 had not ended after 30 s and was killed; fit has saved no checkpoint before",
        ),
        ((-15, 1), (), "rank 5 ended with exit code 1"),
        ((0, 0), (), "rank 4 ended with exit code 0"),
        ((-15, -11), (), "rank 5 was ended by SIGSEGV"),
        ((-15, -15), (), "rank 4 was outside of a fit with checkpoints, where SIGTERM ends it at once"),
        ((None, None), (), "rank 4 has ended"),
    ],
)
def test_why_nothing_was_saved(ranks, codes, killed, reason):
    assert said(ranks, *codes, killed=killed) == f"nothing was saved by fit: {reason}"


def test_a_rank_that_was_killed_at_a_second_interrupt_had_not_the_whole_grace(ranks, monkeypatch, tmp_path):
    line = "nothing was saved by fit: rank 4 was killed at the second Ctrl-C, before it had ended; "
    assert said(ranks, -9, 0, killed={0}, is_hurried=True) == f"{line}fit has saved no checkpoint before"
    report_exit(ranks[0], monkeypatch, tmp_path / "step-8", number=0)
    newest = f"the newest checkpoint is {tmp_path}/step-8"
    assert said(ranks, -9, 0, killed={0}, is_hurried=True) == line + newest
    assert said(ranks, -11, -15) == f"nothing was saved by fit: rank 4 was ended by SIGSEGV; {newest}"
    assert reported_exit(ranks[0], 128) is None


def test_a_launch_that_had_not_started_anything_says_so():
    assert said([]) == "nothing was saved: no rank had been started"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"signal": "x", "saved": null}'])
def test_a_file_that_a_rank_did_not_finish_is_no_report(ranks, text):
    exit_report_path(ranks[0].directory).write_text(text)
    assert reported_exit(ranks[0], 143) is None


def test_no_report_is_written_where_no_launcher_wants_one(monkeypatch, tmp_path):
    monkeypatch.delenv(launching.EXIT_REPORT, raising=False)
    launching.write_exit_report(signal.SIGTERM, tmp_path)
    monkeypatch.setenv(launching.EXIT_REPORT, str(tmp_path / "gone" / "end.json"))
    launching.write_exit_report(signal.SIGTERM, tmp_path)
    assert list(tmp_path.iterdir()) == []
