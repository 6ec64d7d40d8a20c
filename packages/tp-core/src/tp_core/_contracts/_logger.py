"""The contract of a logger, which gets the numbers of a run, and what it knows of the run."""

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

RunStatus = Literal["finished", "interrupted", "failed"]
"""How a run ended: by itself, by a signal after a step, or by an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """A run, as far as it is known when it begins.

    Attributes:
        folder: The folder of its checkpoints; ``None`` for a run that has none.
        resumed: Whether it goes on from a checkpoint.
        step: The optimizer steps that it has behind it.
        epoch: The epoch that it begins or goes on with, from 1.
        hyperparameters: What was chosen for it, by name: plain values.
        environment: Where it runs, by name: the host, variables of the launcher, the revision of the code.
        selection: Which backend was chosen and why: a table for people.
        candidates: The same as data: for each backend its "name", "score" and "reason" and whether it is
            "chosen".
        versions: The versions of distributions, by name.
    """

    folder: Path | None = None
    resumed: bool = False
    step: int = 0
    epoch: int = 1
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    selection: str = ""
    candidates: tuple[Mapping[str, Any], ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


class Logger(abc.ABC):
    """Writes what a run measures, to files or to a service. Only the first rank has one.

    :meth:`open` comes first and :meth:`close` last, once each, unless the process is killed. A run that
    goes on from a checkpoint gets what :meth:`state_dict` returned when it was written, before
    :meth:`open`, and goes on where that left off: what was logged after the checkpoint's step is there
    once in the end, and what was logged before it is not lost.

    Attributes:
        name: What users write to ask for this logger.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def open(self, info: RunInfo) -> None:
        """Begin, or go on with, the record of a run.

        Raises:
            tp_core.errors.TpError: The record cannot be written; nothing was trained yet.
        """

    @abc.abstractmethod
    def log(self, numbers: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Write numbers of one step; some may be NaN or infinite.

        Args:
            numbers: By name, such as "loss", "val_loss", "learning_rate".
            step: Optimizer steps done; never less than in the call before.
            epoch: The epoch they belong to, from 1.
        """

    def flush(self) -> None:  # noqa: B027 - most write at once
        """Bring rows to where others read them; called after those that are handed over together."""

    def event(  # noqa: B027 - most loggers have no place for them
        self, kind: str, facts: Mapping[str, Any], *, step: int, epoch: int
    ) -> None:
        """Note something that happened, such as a "checkpoint" or an "interruption".

        Args:
            kind: What happened.
            facts: More of it, by name: plain values.
            step: Optimizer steps done.
            epoch: The epoch it belongs to, from 1.
        """

    @abc.abstractmethod
    def close(self, status: RunStatus) -> None:
        """Write what is left and end the record."""

    def state_dict(self) -> dict[str, Any]:
        """Bring what was logged to a safe place, and return the plain values that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most have no state
        """Take what :meth:`state_dict` returned when the checkpoint was written; :meth:`open` follows."""


@dataclass(frozen=True, slots=True)
class LoggerFactory:
    """Makes a logger that users ask for by name.

    Attributes:
        name: What users write.
        help: One line of what it writes, and where.
        make: Returns a new logger with its defaults; what is heavy is imported in here.
        extra: What to install for it, ``"tp-trainer[wandb]"``; empty if nothing.
    """

    name: str
    help: str
    make: Callable[[], Logger]
    extra: str = ""
