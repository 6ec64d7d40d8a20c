"""One run of pytest whose outcomes are written down one by one: python session.py RECORD INI ROOT ARGUMENT...

What has happened is in the file RECORD, a line of JSON each, also when the process is killed.
"""

import json
import sys
import time
from pathlib import Path

sys.path[0] = sys.argv[3]  # ROOT, where workers find the test modules; not this folder

import pytest  # noqa: E402 - after the path


class Recorder:
    """A plugin that writes a line for what was collected, and for each test's start and end."""

    def __init__(self, path):
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - for as long as the process lives

    def write(self, **event):
        self._file.write(json.dumps({"at": time.time(), **event}) + "\n")
        self._file.flush()

    def pytest_collectreport(self, report):
        if report.failed:
            self.write(event="not collected", id=report.nodeid, message=report.longreprtext[-4000:])

    def pytest_collection_finish(self, session):
        self.write(event="collected", ids=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid):
        self.write(event="start", id=nodeid)

    def pytest_runtest_logreport(self, report):
        message = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else None
        if message is None and not report.passed:
            message = report.longreprtext[-4000:]
        self.write(
            event="report",
            id=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            seconds=report.duration,
            message=message,
        )

    def pytest_runtest_logfinish(self, nodeid):
        self.write(event="end", id=nodeid)

    def pytest_warning_recorded(self, warning_message, nodeid):
        text = f"{warning_message.category.__name__}: {str(warning_message.message)[:400]}"
        self.write(event="warning", id=nodeid, message=text)


def main(record, ini, root, *arguments):
    options = ["-c", ini, "--rootdir", root, "--import-mode=importlib", "-p", "no:cacheprovider", "-q"]
    options += ["-m", "gpu", "--continue-on-collection-errors", *arguments]
    return pytest.main(options, plugins=[Recorder(record)])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
