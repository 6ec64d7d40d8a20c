"""Runs the tests that others wrote for their executors on ours, from where they are installed.

    python tests/peers/run.py cpython     # those of test.test_concurrent_futures, where this Python has them
    python tests/peers/run.py loky        # those of loky, which must be installed; pip fetches its tests

What fails must be named, with its reason, on the page docs/runner-peers.md, and what is named there must
fail. Needs pytest, pytest-timeout, and the packages tp-core and tp-runner; further arguments are pytest's.
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
TIMEOUT_S = 120


def main(peer, *arguments):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
        if peer == "cpython":
            if importlib.util.find_spec("test.test_concurrent_futures") is None:
                sys.exit(f"{sys.executable} has no test.test_concurrent_futures; take one that has")
            what = ["--pyargs", "test.test_concurrent_futures"]
        else:
            # Its settings end pytest itself after a minute; --timeout ends the test.
            own = ["faulthandler_timeout=0", "faulthandler_exit_on_timeout=false"]
            what = ["tests/test_process_executor_spawn.py", *(f"-o{setting}" for setting in own)]
            environment["TP_PEERS_LOKY"] = "1"
            folder = tests_of_loky(folder)
        report = folder / "report.xml"
        command = [
            "-p",
            "stand_in",
            "-p",
            "no:cacheprovider",
            f"--timeout={TIMEOUT_S}",
            f"--rootdir={folder}",
        ]
        command += ["--import-mode=importlib"] if peer == "cpython" else []
        command += [f"--junitxml={report}", "-q", "--tb=line", "-W", "ignore", *what, *arguments]
        subprocess.run([sys.executable, "-m", "pytest", *command], cwd=folder, env=environment, check=False)
        if not report.exists():
            sys.exit("pytest itself ended: one of the tests has ended its process")
        failed = judge(report)
    known = named_on_page(peer)
    for test in sorted(failed.keys() - known):
        print(f"not on the page: {test}: {failed[test]}")
    if arguments:  # only some were asked for
        return bool(failed.keys() - known)
    for test in sorted(known - failed.keys()):
        print(f"on the page, and does not fail: {test}")
    return failed.keys() != known


def tests_of_loky(folder):
    """Fetch the source distribution, which has the tests, of the loky that is installed."""
    version = importlib.metadata.version("loky")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=loky", f"loky=={version}"]
    subprocess.run(pip, cwd=folder, check=True)
    with tarfile.open(next(folder.glob("loky-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"loky-{version}"


def judge(report):
    """Print how many tests passed; return those that did not, with the first line of why."""
    outcomes, failed = Counter(), {}
    for case in ET.parse(report).getroot().iter("testcase"):
        bad = [part for part in case if part.tag in {"failure", "error"}]
        skipped = any(part.tag == "skipped" for part in case)
        outcomes["failed" if bad else "skipped" if skipped else "passed"] += 1
        if bad:
            failed[re.sub(r"\[.*", "", case.get("name"))] = bad[0].get("message", "").partition("\n")[0][:150]
    print(dict(outcomes))
    return failed


def named_on_page(peer):
    """Return the tests in the first column of the peer's table."""
    section = PAGE.read_text().partition(f"<!-- {peer} -->")[2].partition("<!-- end -->")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return {test for row in rows for test in re.findall(r"`(test_\w+)`", row)}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
