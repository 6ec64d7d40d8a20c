"""The conformance tests of loggers, for their authors to subclass."""

import abc
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tp_core.errors import ConfigError
from tp_core.plugins import Logger, RunInfo, RunStatus

from tp_testing._kit import DeclaredLimits

HYPERPARAMETERS: Mapping[str, Any] = {
    "learning_rate": 0.1,
    "optimizer": "SGD",
    "epochs": 3,
    "compile": False,
    "clip_norm": None,
}
_VALUES = (0.1, -2.5, 1e-30, 1e30)


class LoggerConformance(DeclaredLimits, abc.ABC):
    """The tests of every logger. A subclass, in a test module, makes the logger and reads its output.

    Example:
        >>> class TestMine(LoggerConformance):
        ...     def make(self, folder):
        ...         return MyLogger(folder)
        ...
        ...     def read(self, folder):
        ...         return my_rows_of(folder)
    """

    @abc.abstractmethod
    def make(self, folder: Path) -> Logger:
        """Return a new logger that writes into ``folder``."""

    @abc.abstractmethod
    def read(self, folder: Path) -> dict[str, list[tuple[int, float]]]:
        """Return the numbers in ``folder``: for each name its steps and values, in their order."""

    def read_hyperparameters(self, folder: Path) -> Mapping[str, Any] | None:  # noqa: ARG002
        """Return the hyperparameters in ``folder``; ``None`` if this logger writes none."""
        return None

    # -- the tests ------------------------------------------------------------------------------

    def test_it_has_a_name(self, tmp_path: Path) -> None:
        logger = self.make(tmp_path)
        assert isinstance(logger, Logger)
        assert isinstance(logger.name, str)
        assert logger.name

    def test_every_number_is_there_at_its_step(self, tmp_path: Path) -> None:
        rows = [{"loss": value, "val_loss": -value} for value in _VALUES]
        self._write(tmp_path, rows)
        expected = list(enumerate(_VALUES, start=1))
        self._compare(tmp_path, {"loss": expected, "val_loss": [(step, -v) for step, v in expected]})

    def test_numbers_may_come_and_go(self, tmp_path: Path) -> None:
        self._write(tmp_path, [{"loss": 1.0}, {"loss": 2.0, "val_loss": 3.0}, {"accuracy": 0.5}, {}])
        self._compare(
            tmp_path, {"loss": [(1, 1.0), (2, 2.0)], "val_loss": [(2, 3.0)], "accuracy": [(3, 0.5)]}
        )

    def test_several_rows_of_one_step_are_kept(self, tmp_path: Path) -> None:
        logger = self.make(tmp_path)
        logger.open(_info(tmp_path))
        logger.log({"loss": 1.0}, step=4, epoch=1)
        logger.log({"val_loss": 2.0}, step=4, epoch=1)
        logger.close("finished")
        self._compare(tmp_path, {"loss": [(4, 1.0)], "val_loss": [(4, 2.0)]})

    def test_numbers_that_are_not_finite_stay_what_they_are(self, tmp_path: Path) -> None:
        self._write(tmp_path, [{"loss": math.nan}, {"loss": math.inf}, {"loss": -math.inf}, {"loss": 1.0}])
        (_, nan), *others = self._read_back(tmp_path)["loss"]
        assert math.isnan(nan)
        assert others == [(2, math.inf), (3, -math.inf), (4, 1.0)]

    @pytest.mark.parametrize("name", ["val/loss", "grad norm", "λ", "train,loss", 'a"b'])
    def test_names_of_many_kinds_are_taken(self, tmp_path: Path, name: str) -> None:
        """Log odd names: a store that allows fewer characters may replace some, but must take the number."""
        self._write(tmp_path, [{name: 1.0}, {name: 2.0}])
        [values] = self._read_back(tmp_path).values()
        assert values == [(1, 1.0), (2, 2.0)]

    def test_a_run_without_numbers_leaves_a_record_that_can_be_read(self, tmp_path: Path) -> None:
        self._write(tmp_path, [])
        assert self._read_back(tmp_path) == {}

    def test_hyperparameters_are_written(self, tmp_path: Path) -> None:
        self._write(tmp_path, [{"loss": 1.0}])
        hyperparameters = self.read_hyperparameters(tmp_path)
        if hyperparameters is not None:
            assert {name: str(value) for name, value in hyperparameters.items()} == {
                name: str(value) for name, value in HYPERPARAMETERS.items()
            }

    @pytest.mark.parametrize("status", ["finished", "interrupted", "failed"])
    def test_it_closes_with_every_status(self, tmp_path: Path, status: RunStatus) -> None:
        logger = self.make(tmp_path)
        logger.open(_info(tmp_path))
        logger.event("checkpoint", {"path": str(tmp_path)}, step=0, epoch=1)
        logger.log({"loss": 1.0}, step=1, epoch=1)
        logger.close(status)
        self._compare(tmp_path, {"loss": [(1, 1.0)]})

    @pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
    def test_a_resumed_run_has_every_step_once(self, tmp_path: Path, *, closed: bool) -> None:
        logger = self.make(tmp_path)
        logger.open(_info(tmp_path))
        for step in range(1, 4):
            logger.log({"loss": float(step)}, step=step, epoch=1)
        state = logger.state_dict()  # what the checkpoint of step 3 has
        for step in range(4, 6):
            logger.log({"loss": float(step)}, step=step, epoch=1)
        if closed:
            logger.close("interrupted")
        again = self.make(tmp_path)
        again.load_state_dict(state)
        again.open(_info(tmp_path, resumed=True, step=3))
        for step in range(4, 8):
            again.log({"loss": float(step), "val_loss": 1.0}, step=step, epoch=1)
        again.close("finished")
        self._compare(
            tmp_path,
            {"loss": [(s, float(s)) for s in range(1, 8)], "val_loss": [(s, 1.0) for s in range(4, 8)]},
        )
        if not closed:
            logger.close("failed")  # for this process, which lives on, to keep nothing open

    def test_a_run_that_is_resumed_twice_from_one_step_has_every_step_once(self, tmp_path: Path) -> None:
        logger = self.make(tmp_path)
        logger.open(_info(tmp_path))
        logger.log({"loss": 1.0}, step=1, epoch=1)
        state = logger.state_dict()
        logger.close("failed")
        for last in (3, 4):
            logger = self.make(tmp_path)
            logger.load_state_dict(state)
            logger.open(_info(tmp_path, resumed=True, step=1))
            for step in range(2, last + 1):
                logger.log({"loss": float(step)}, step=step, epoch=1)
            logger.close("failed")
        self._compare(tmp_path, {"loss": [(s, float(s)) for s in range(1, 5)]})

    def test_a_resumed_run_is_written_if_its_checkpoint_knows_no_logger(self, tmp_path: Path) -> None:
        logger = self.make(tmp_path)
        logger.open(_info(tmp_path, resumed=True, step=3))
        logger.log({"loss": 4.0}, step=4, epoch=1)
        logger.close("finished")
        self._compare(tmp_path, {"loss": [(4, 4.0)]})

    def _write(self, folder: Path, rows: list[dict[str, float]]) -> None:
        logger = self.make(folder)
        logger.open(_info(folder))
        for step, row in enumerate(rows, start=1):
            logger.log(row, step=step, epoch=1)
        logger.close("finished")

    def _read_back(self, folder: Path) -> dict[str, list[tuple[int, float]]]:
        written = self.read(folder)
        if not isinstance(written, dict) or not all(isinstance(rows, list) for rows in written.values()):
            msg = (
                "read() must return the steps and values of each name in their order, "
                f"{{'loss': [(1, 0.5), (2, 0.25)]}}, got {type(written).__name__}: {written!r}"
            )
            raise ConfigError(msg)
        return written

    def _compare(self, folder: Path, expected: dict[str, list[tuple[int, float]]]) -> None:
        written = self._read_back(folder)
        assert sorted(written) == sorted(expected)
        for name, values in expected.items():
            assert [step for step, _ in written[name]] == [step for step, _ in values], name
            # Some stores keep 32 bits.
            assert [v for _, v in written[name]] == pytest.approx(
                [v for _, v in values], rel=1e-6, abs=0.0
            ), name


def _info(folder: Path, *, resumed: bool = False, step: int = 0) -> RunInfo:
    return RunInfo(
        folder=folder,
        resumed=resumed,
        step=step,
        hyperparameters=HYPERPARAMETERS,
        environment={"host": "a host", "SLURM_JOB_ID": "17"},
        selection="backend 'single' (auto): one device",
        candidates=({"name": "single", "score": 1.0, "reason": "one device", "chosen": True},),
        versions={"torch": "2"},
    )
