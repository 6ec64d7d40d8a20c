"""Runs the tests that others wrote for their executors on ours, from where they are installed.

    python tests/peers/run.py cpython     # those of test.test_concurrent_futures, or Debian's
    python tests/peers/run.py loky        # those of loky, which must be installed; pip fetches its tests
    python tests/peers/run.py joblib      # those of joblib's parallel backends, from where it is installed

What fails, and fails again by itself, must be named, with its reason, on the page docs/runner-peers.md, and
what is named there must fail, where this version of theirs runs it. Needs pytest, pytest-timeout, and the
packages tp-core and tp-runner; further arguments are pytest's.
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "runner-peers.md"
TIMEOUT_S = 800  # for a hang alone, on however busy a machine
ATTEMPTS = 3


def main(peer, *arguments):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [str(HERE), *filter(None, sys.path)]
        own = ["-p", "stand_in", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}", "-q", "--tb=line"]
        if peer == "cpython":
            paths[:0] = folder_of_cpythons(folder)
            # One of theirs looks at what logging prints where nobody has told it what to do with records.
            own += ["--import-mode=importlib", "--pyargs", "test.test_concurrent_futures", "-p", "no:logging"]
        elif peer == "joblib":
            own += ["--import-mode=importlib", "--pyargs", "joblib.test.test_parallel"]
        else:
            folder = tests_of_loky(folder)
            # Its settings end pytest itself after a minute; --timeout ends the test.
            own += ["-ofaulthandler_timeout=0", "-ofaulthandler_exit_on_timeout=false"]
            own += ["tests/test_process_executor_spawn.py"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TP_PEERS": peer}
        report = folder / "report.xml"
        command = [sys.executable, "-m", "pytest", f"--rootdir={folder}", f"--junitxml={report}", *own]

        def run(*more):
            report.unlink(missing_ok=True)
            subprocess.run([*command, "-W", "ignore", *more], cwd=folder, env=environment, check=False)
            if not report.exists():
                sys.exit("pytest itself ended: one of the tests has ended its process")
            return judge(report)

        return held_to(named_on_page(peer), run, arguments)


def held_to(page, run, arguments=()):
    """Run the tests, those that fail unexpectedly again; print how that differs from what the page says.

    Args:
        page: The tests that are to fail, where they are run.
        run: Takes arguments for pytest; returns the tests that ran, and why each of those failed that did.
        arguments: Which tests to run; all by default, and then those on the page must fail.

    Returns:
        Whether it differs.
    """
    ran, failed = run(*arguments)
    known = page & ran
    # Some of theirs count on a sleep that ends before another one, which a busy machine does not grant.
    for _ in range(1, ATTEMPTS):
        if again := failed.keys() - known:
            print("again:", *sorted(again))
            failed = {test: why for test, why in failed.items() if test in known}
            failed |= run("-k", " or ".join(sorted(again)))[1]
    for test in sorted(failed.keys() - known):
        print(f"not on the page: {test}: {failed[test]}")
    if arguments:  # only some were asked for
        return bool(failed.keys() - known)
    for test in sorted(known - failed.keys()):
        print(f"on the page, and does not fail: {test}")
    return failed.keys() != known


def folder_of_cpythons(folder):
    """Return where the package ``test`` with the tests is, if this Python has none: as a list of paths."""
    if importlib.util.find_spec("test.test_concurrent_futures") is not None:
        return []
    installed = Path("/usr/lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "test")
    if not any(installed.glob("test_concurrent_futures*")):
        sys.exit(f"neither {sys.executable} nor {installed} has test_concurrent_futures: install the latter")
    (folder / "test").symlink_to(installed)
    return [str(folder)]


def tests_of_loky(folder):
    """Fetch the source distribution, which has the tests, of the loky that is installed."""
    version = importlib.metadata.version("loky")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=loky", f"loky=={version}"]
    subprocess.run(pip, cwd=folder, check=True)
    with tarfile.open(next(folder.glob("loky-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"loky-{version}"


def judge(report):
    """Print how many tests passed; return all that ran, and those that failed, with the first line of why."""
    outcomes, ran, failed = Counter(), set(), {}
    for case in ET.parse(report).getroot().iter("testcase"):
        bad = [part for part in case if part.tag in {"failure", "error"}]
        skipped = any(part.tag == "skipped" for part in case)
        outcomes["failed" if bad else "skipped" if skipped else "passed"] += 1
        name = re.sub(r"\[.*", "", case.get("name"))
        if not skipped:
            ran.add(name)
        if bad:
            failed[name] = bad[0].get("message", "").partition("\n")[0][:150]
    print(dict(outcomes))
    return ran, failed


def named_on_page(peer):
    """Return the tests in the first column of the peer's table."""
    section = PAGE.read_text().partition(f"<!-- {peer} -->")[2].partition("<!-- end -->")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return {test for row in rows for test in re.findall(r"`(test_\w+)`", row)}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
