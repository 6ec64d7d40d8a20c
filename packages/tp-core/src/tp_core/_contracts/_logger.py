"""The contract of loggers, which write a run's numbers, and the facts of a run that they get."""

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

RunStatus = Literal["finished", "interrupted", "failed"]
"""The end of a run: by itself, by a signal after a step, or by an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The facts of a run that are known when it begins.

    Attributes:
        folder: The folder of its checkpoints; ``None`` for a run without any.
        resumed: Whether it continues from a checkpoint.
        step: The optimizer steps that are done.
        epoch: The epoch that it begins or continues, from 1.
        hyperparameters: Its hyperparameters by name: plain values.
        environment: Its environment by name: the host, variables of the launcher, the revision of the code.
        selection: The chosen backend and the reasons: a table for people.
        candidates: The same as data: the "name", "score" and "reason" of each backend, and whether it is
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
    """A writer of a run's measurements, to files or to a service. Only the first rank has one.

    :meth:`open` comes first and :meth:`close` last, once each, unless the process is killed. A resumed run
    first passes the checkpoint's :meth:`state_dict` to :meth:`load_state_dict`, then calls :meth:`open`.
    The logger continues there: numbers after the checkpoint's step appear once in the end, and numbers
    before it are not lost.

    Attributes:
        name: The name by which users choose this logger.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def open(self, info: RunInfo) -> None:
        """Begin or continue the record of a run.

        Raises:
            tp_core.errors.TpError: The record cannot be written; nothing was trained yet.
        """

    @abc.abstractmethod
    def log(self, numbers: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Write numbers of one step; some may be NaN or infinite.

        Args:
            numbers: The numbers by name: "loss", "val_loss", "learning_rate" and others.
            step: Optimizer steps done; never less than in the call before.
            epoch: The epoch they belong to, from 1.
        """

    def flush(self) -> None:  # noqa: B027 - most write at once
        """Write buffered rows to where others read them; called after a group of rows."""

    def event(  # noqa: B027 - most loggers have no place for them
        self, kind: str, facts: Mapping[str, Any], *, step: int, epoch: int
    ) -> None:
        """Record an event, for example a "checkpoint" or an "interruption".

        Args:
            kind: The kind of event.
            facts: Its details by name: plain values.
            step: Optimizer steps done.
            epoch: The epoch it belongs to, from 1.
        """

    @abc.abstractmethod
    def close(self, status: RunStatus) -> None:
        """Write buffered rows and end the record."""

    def state_dict(self) -> dict[str, Any]:
        """Flush what was logged to a safe place, and return the plain values that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most have no state
        """Restore the checkpoint's result of :meth:`state_dict`; :meth:`open` follows."""


@dataclass(frozen=True, slots=True)
class LoggerFactory:
    """A factory of a logger that users choose by name.

    Attributes:
        name: The name by which users choose it.
        help: One line about its output and where it goes.
        make: Returns a new logger with its defaults; heavy imports happen in here.
        extra: The extra to install for it, ``"tp-trainer[wandb]"``; empty if none.
    """

    name: str
    help: str
    make: Callable[[], Logger]
    extra: str = ""
