"""The values that ``tp train`` calls a function with: what its runs log, and leave in their folders."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tp_core.internal import write_atomically
from tp_core.plugins import Logger, RunInfo, RunStatus

from tp_trainer.loggers._files import keep_aside, place_for

__all__ = ["CONFIG", "GivenValues", "ValuesLogger", "given_values", "running_with"]

CONFIG = "config.yaml"
"""The file in the folder of a run from which it can be run again: ``tp train ... --config``."""


@dataclass(frozen=True, slots=True)
class GivenValues:
    """What a function is called with.

    Attributes:
        by_name: Plain values by their options' names: "optim.lr" of a nested one.
        text: All of them as YAML, which ``--config`` reads.
    """

    by_name: Mapping[str, Any]
    text: str


_GIVEN: ContextVar[GivenValues | None] = ContextVar("given_values", default=None)


def given_values() -> GivenValues | None:
    """Return the values of the function that is running; ``None`` where ``tp train`` runs none."""
    return _GIVEN.get()


@contextmanager
def running_with(values: GivenValues) -> Iterator[None]:
    """Have the runs that are started meanwhile log these values, and leave them in their folders."""
    token = _GIVEN.set(values)
    try:
        yield
    finally:
        _GIVEN.reset(token)


class ValuesLogger(Logger):
    """Writes ``config.yaml`` into the run's folder; other values that are there stay as ``config-1.yaml``.

    Args:
        text: What the file is to have.
    """

    name: ClassVar[str] = "values"

    def __init__(self, text: str) -> None:
        self._text = text

    def open(self, info: RunInfo) -> None:
        """Write the file, if it is not there."""
        path = place_for("ValuesLogger", None, info) / CONFIG
        if path.is_file() and path.read_text(encoding="utf-8") == self._text:
            return

        def write(part: Path) -> None:
            part.write_text(self._text, encoding="utf-8")

        keep_aside(path)
        # For its user alone: ``--config`` needs the values as they were given, a token too.
        write_atomically(write, path, mode=0o600)

    def log(self, numbers: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Leave out the numbers: other loggers have them."""

    def close(self, status: RunStatus) -> None:
        """Leave the file as it is."""
