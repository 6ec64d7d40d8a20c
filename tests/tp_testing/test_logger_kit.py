"""The conformance kit of loggers passes a good one, and notices each way to be wrong."""

import json
from pathlib import Path

import pytest
from tp_core.errors import ConfigError
from tp_core.plugins import Logger
from tp_testing import LoggerConformance

FILE = "numbers.json"


class Kept(Logger):
    """Writes all it has with every number."""

    name = "kept"

    def __init__(self, folder):
        self._path = Path(folder, FILE)
        self._rows = []
        self._facts = {}

    def open(self, info):
        self._facts = dict(info.hyperparameters)
        if info.resumed and self._path.exists():
            self._rows = [row for row in json.loads(self._path.read_text())["rows"] if row[1] <= info.step]
        self._write()

    def log(self, numbers, *, step, epoch):
        self._rows += [[name, step, value] for name, value in numbers.items()]
        self._write()

    def _write(self):
        self._path.write_text(json.dumps({"facts": self._facts, "rows": self._rows}))

    def close(self, status):
        self._write()


class TestKept(LoggerConformance):
    logger = Kept

    def make(self, folder):
        return self.logger(folder)

    def read(self, folder):
        found = {}
        for name, step, value in json.loads((folder / FILE).read_text())["rows"]:
            found.setdefault(name, []).append((step, value))
        return found

    def read_hyperparameters(self, folder):
        return json.loads((folder / FILE).read_text())["facts"]


class Nameless(Kept):
    name = ""


class Duplicating(Kept):
    def open(self, info):
        super().open(info)
        if info.resumed:
            self._rows = self._rows and [*self._rows, self._rows[-1]]


class Forgetting(Kept):
    def open(self, info):
        self._facts = dict(info.hyperparameters)
        self._write()


class Buffering(Kept):
    """Loses what it holds when it is killed."""

    def log(self, numbers, *, step, epoch):
        self._rows += [[name, step, value] for name, value in numbers.items()]


class Swallowing(Kept):
    def log(self, numbers, *, step, epoch):
        super().log({n: v for n, v in numbers.items() if v - v == 0}, step=step, epoch=epoch)


class Fixed(Kept):
    """Knows the names of the first row alone, as a CSV file with a header does."""

    def log(self, numbers, *, step, epoch):
        known = {row[0] for row in self._rows} or set(numbers)
        super().log({n: v for n, v in numbers.items() if n in known}, step=step, epoch=epoch)


class Overwriting(Kept):
    def log(self, numbers, *, step, epoch):
        self._rows = [row for row in self._rows if row[1] != step]
        super().log(numbers, step=step, epoch=epoch)


class Rounding(Kept):
    def log(self, numbers, *, step, epoch):
        super().log({n: round(v, 6) for n, v in numbers.items()}, step=step, epoch=epoch)


class Counting(Kept):
    """Counts rows itself instead of taking the step."""

    def log(self, numbers, *, step, epoch):
        super().log(numbers, step=len(self._rows) + 1, epoch=epoch)


class Untold(Kept):
    def open(self, info):
        super().open(info)
        self._facts = {}


@pytest.mark.parametrize(
    ("logger", "test", "arguments"),
    [
        (Nameless, "test_it_has_a_name", {}),
        (Duplicating, "test_a_resumed_run_has_every_step_once", {"closed": True}),
        (Forgetting, "test_a_resumed_run_has_every_step_once", {"closed": True}),
        (Forgetting, "test_a_run_that_is_resumed_twice_from_one_step_has_every_step_once", {}),
        (Buffering, "test_a_resumed_run_has_every_step_once", {"closed": False}),
        (Swallowing, "test_numbers_that_are_not_finite_stay_what_they_are", {}),
        (Fixed, "test_numbers_may_come_and_go", {}),
        (Overwriting, "test_several_rows_of_one_step_are_kept", {}),
        (Rounding, "test_every_number_is_there_at_its_step", {}),
        (Counting, "test_numbers_may_come_and_go", {}),
        (Untold, "test_hyperparameters_are_written", {}),
    ],
)
def test_an_altered_logger_is_caught(logger, test, arguments, tmp_path):
    kit = TestKept()
    getattr(kit, test)(_folder(tmp_path, "good"), **arguments)
    kit.logger = logger
    with pytest.raises(AssertionError):
        getattr(kit, test)(_folder(tmp_path, "altered"), **arguments)


def _folder(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    return folder


def test_what_read_returns_is_said_where_it_is_something_else(tmp_path):
    kit = TestKept()
    kit.read = lambda folder: [("loss", 1, 1.0)]
    with pytest.raises(ConfigError, match=r"read\(\) must return the steps and values of each name"):
        kit.test_numbers_may_come_and_go(tmp_path)
