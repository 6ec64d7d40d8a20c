"""The loggers of a run. Rank 0 opens, feeds and closes them; all ranks make the same calls."""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from tp_core.discovery import PluginRegistry, Selection
from tp_core.errors import ConfigError
from tp_core.plugins import Logger, RunInfo, RunStatus, Session

from tp_trainer._running._settings import LoopSettings
from tp_trainer._secrets import mask_secrets
from tp_trainer.loggers._buffer import LogBuffer
from tp_trainer.loggers._jsonl import JsonLinesLogger
from tp_trainer.loggers._named import (
    ValuesLogger,
    candidates,
    environment,
    given_values,
    make_loggers,
    versions,
)

log = logging.getLogger("tp_trainer")


class RunLog:
    """The log of a run: what it sends to its loggers.

    Args:
        session: The session of the run.
        loggers: The loggers; none for a run that logs nothing.
        every_steps: After how many optimizer steps numbers are read.
        folder: The folder of the run's checkpoints, or ``None``.
        facts: Returns facts about the run, by fields of `RunInfo`; called on rank 0 alone.

    Attributes:
        is_asked: Whether the run logs anything, on all ranks alike.
        every: After how many optimizer steps numbers are read.
    """

    def __init__(
        self,
        session: Session,
        loggers: Iterable[Logger] = (),
        *,
        every_steps: int = 50,
        folder: Path | None = None,
        facts: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        asked = list(loggers)
        self.is_asked = bool(asked)
        self.every = every_steps
        self._session, self._folder, self._facts = session, folder, facts
        self._buffer = LogBuffer(asked if session.is_main else [], every_steps=every_steps)

    @property
    def is_on(self) -> bool:
        """Whether this rank has a logger."""
        return bool(self._buffer)

    def open(self, *, resumed: bool, step: int, epoch: int) -> None:
        """Open the loggers.

        Raises:
            TpError: A logger cannot be opened; on all ranks.

        Collectives: one broadcast, if the run logs anything.
        """
        if not self.is_asked:
            return
        failure: Exception | None = None
        if self.is_on:
            try:
                where: dict[str, Any] = {
                    "folder": self._folder,
                    "resumed": resumed,
                    "step": step,
                    "epoch": epoch,
                }
                self._buffer.open(RunInfo(**where, **self._facts()))
            except Exception as error:  # noqa: BLE001 - all ranks raise it together
                failure = error
        # Before rank 0 raises: the other ranks would wait for it in the first step.
        failure_text = self._session.broadcast(None if failure is None else str(failure) or repr(failure))
        if failure is not None:
            raise failure
        if failure_text is not None:
            msg = f"the first rank could not open a logger: {failure_text}"
            raise ConfigError(msg)

    def add(self, numbers: Mapping[str, Any], *, step: int, epoch: int) -> None:
        """Buffer numbers of a step, without waiting for the accelerator."""
        self._buffer.add(numbers, step=step, epoch=epoch)

    def flush(self) -> None:
        """Send the buffered numbers to the loggers."""
        self._buffer.flush()

    def event(self, kind: str, facts: Mapping[str, Any], *, step: int, epoch: int) -> None:
        """Log an event."""
        self._buffer.event(kind, facts, step=step, epoch=epoch)

    def close(self, status: RunStatus) -> None:
        """Send the remaining numbers and close the loggers. A failure is logged and not raised."""
        try:
            self._buffer.close(status)
        except Exception:
            log.exception("the last numbers of the run could not be logged")

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the loggers, the same on all ranks.

        Collectives: one broadcast over several ranks.
        """
        state = self._buffer.state_dict()
        found: dict[str, Any] = self._session.broadcast(state) if self._session.world_size > 1 else state
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the loggers from their states in a checkpoint."""
        self._buffer.load_state_dict(state)


def plan_log(
    session: Session,
    settings: LoopSettings,
    known: Mapping[str, Any],
    *,
    plugins: PluginRegistry,
    selection: Selection,
) -> RunLog:
    """Return the log of a run. A run with loggers and a checkpoint folder also gets a ``log.jsonl`` there.

    Args:
        session: The session of the run.
        settings: The settings of the run.
        known: The hyperparameters that the trainer knows.
        plugins: The registry with the installed loggers.
        selection: The chosen backend.

    Raises:
        ConfigError: There is no logger of a name, or what it needs is not installed.
        PluginError: The plugin that brings it is broken or blocked.
    """
    checkpoint, options = settings.checkpoint, settings.log
    folder = None if checkpoint is None else Path(checkpoint.folder).absolute()
    loggers = make_loggers(options.loggers, plugins)
    if loggers and folder is not None and not any(isinstance(one, JsonLinesLogger) for one in loggers):
        loggers.append(JsonLinesLogger())
    given = given_values()
    if given is not None and folder is not None:
        loggers.append(ValuesLogger(given.text))

    def facts() -> dict[str, Any]:
        return {
            "hyperparameters": mask_secrets(
                {**(given.by_name if given else {}), **known, **(options.hyperparameters or {})}
            ),
            "environment": environment(),
            "selection": str(selection),
            "candidates": candidates(selection),
            "versions": versions(),
        }

    return RunLog(session, loggers, every_steps=options.every_steps, folder=folder, facts=facts)


def of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the class name of an optimizer, and its first group's numbers and texts."""
    group = optimizer.param_groups[0]
    plain = {name: value for name, value in group.items() if isinstance(value, bool | int | float | str)}
    return {"optimizer": type(optimizer).__name__, **plain}
