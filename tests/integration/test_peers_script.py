"""The script that holds tests of others to our page: what it runs again, and what it makes of it."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "peers" / "run.py"

PASSES, FAILS, IS_KNOWN, LATER = "test_passes", "test_fails", "test_is_known", "test_of_a_later_version"
PAGE = {IS_KNOWN, LATER}
"""What is to fail; this version has no test of the last name."""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("peers_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Suite:
    """Tests that fail so often, and pass from then on."""

    def __init__(self, **n_failures):
        self.n_failures = n_failures
        self.asked = []

    def __call__(self, *arguments):
        self.asked.append(arguments)
        ran = set(arguments[1].split(" or ")) if arguments else {PASSES, FAILS, IS_KNOWN}
        failed = {test: f"why {test}" for test in ran if self.n_failures.get(test, 0) > 0}
        self.n_failures = {test: n - (test in ran) for test, n in self.n_failures.items()}
        return ran, failed


ALWAYS = 99


def test_what_the_page_names_fails_once_and_all_is_well(script, capsys):
    suite = Suite(test_is_known=ALWAYS)
    assert not script.held_to(PAGE, suite)
    assert suite.asked == [()]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("n_failures", [1, 2])
def test_what_fails_unexpectedly_is_run_again_by_name_and_may_pass(script, n_failures):
    suite = Suite(test_is_known=ALWAYS, test_fails=n_failures)
    assert not script.held_to(PAGE, suite)
    assert suite.asked == [(), *[("-k", FAILS)] * n_failures]


def test_what_fails_three_times_is_told_with_its_reason(script, capsys):
    suite = Suite(test_is_known=ALWAYS, test_fails=3, test_passes=1)
    assert script.held_to(PAGE, suite)
    assert suite.asked == [(), ("-k", f"{FAILS} or {PASSES}"), ("-k", FAILS)]
    assert "not on the page: test_fails: why test_fails\n" in capsys.readouterr().out


def test_what_the_page_names_has_to_fail(script, capsys):
    assert script.held_to(PAGE, Suite())
    assert capsys.readouterr().out == "on the page, and does not fail: test_is_known\n"


def test_of_some_tests_only_what_fails_unexpectedly_is_told(script):
    assert not script.held_to(PAGE, Suite(), ("-k", f"{PASSES} or {IS_KNOWN}"))
    assert script.held_to(PAGE, Suite(test_fails=ALWAYS), ("-k", FAILS))


REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites name="pytest tests"><testsuite name="pytest" errors="1" failures="1" skipped="1" tests="5">
<testcase classname="test_some" name="test_right" time="0.000" />
<testcase classname="test_some" name="test_wrong[1]" time="0.000" />
<testcase classname="test_some" name="test_wrong[2]" time="0.001">
<failure message="AssertionError: one&#10;two&#10;assert 2 == 1">def test_wrong(n)</failure></testcase>
<testcase classname="test_some" name="test_error" time="0.000">
<error message="failed on setup with &quot;OSError: no such place&quot;">def broken()</error></testcase>
<testcase classname="test_some" name="test_skipped" time="0.000">
<skipped type="pytest.skip" message="">test_some.py:8: </skipped></testcase>
</testsuite></testsuites>
"""


def test_outcomes_are_read_from_what_pytest_writes(script, tmp_path, capsys):
    (tmp_path / "report.xml").write_text(REPORT)
    ran, failed = script.judge(tmp_path / "report.xml")
    assert ran == {"test_right", "test_wrong", "test_error"}
    wrong, error = "AssertionError: one", 'failed on setup with "OSError: no such place"'
    assert failed == {"test_wrong": wrong, "test_error": error}
    assert capsys.readouterr().out == "{'passed': 2, 'failed': 2, 'skipped': 1}\n"


@pytest.mark.parametrize("peer", ["cpython", "loky", "joblib"])
def test_the_page_names_tests_of_each_peer(script, peer):
    assert len(script.named_on_page(peer)) > 5
