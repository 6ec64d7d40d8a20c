"""Checkpoints of a run: when one is due, what it contains, and how a run resumes."""

import os
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from tp_core.errors import ConfigError
from tp_core.plugins import Session

from tp_trainer._checkpoint import Checkpoints
from tp_trainer._checkpoint._checkpointer import Checkpointer
from tp_trainer._running._state import RunState
from tp_trainer._steps._meter import Meter


class Saving:
    """Writes the state of a run into checkpoints, and resumes it.

    Args:
        settings: Where and when to save.
        session: The session of the run.
        state: The state of the run.
        backend: The name of the backend.

    Attributes:
        checkpointer: Writes the files.
    """

    def __init__(self, settings: Checkpoints, session: Session, state: RunState, backend: str) -> None:
        self.checkpointer = Checkpointer(settings, session)
        self._session = session
        self._state = state
        self._backend = backend

    @property
    def last(self) -> Path | None:
        """The newest checkpoint that is whole."""
        return self.checkpointer.last

    def resume(self, wanted: str | os.PathLike[str] | None) -> bool:
        """Resume from a checkpoint, if there is one; return whether there was.

        Raises:
            ConfigError: The folder has checkpoints of later steps than the one where the run begins.
            StateError: The checkpoint is damaged or does not fit.

        Collectives: as in `Checkpointer.find` and `Checkpointer.check_free`.
        """
        checkpointer, state = self.checkpointer, self._state
        path = None if wanted is None else checkpointer.find(wanted)
        if path is not None:
            state.restore(path, checkpointer.read(path), replay=checkpointer.settings.replay)
            checkpointer.continues(path, state.step)
        if wanted != "auto":
            checkpointer.check_free(state.step)
        return path is not None

    def ends_epoch(self, epoch: int) -> bool:
        """Return whether a checkpoint is due after this epoch."""
        every = self.checkpointer.settings.every_epochs
        return every is not None and epoch % every == 0

    def save(self, done: int, meter: Meter | None) -> None:
        """Save the state after ``done`` batches of the current or next epoch, once per step.

        Collectives: as in `RunState.capture` and `Checkpointer.save`.
        """
        state, session = self._state, self._session
        if self.checkpointer.has_saved(state.step):
            return
        facts = {
            "step": state.step,
            "epoch": state.epoch,
            "backend": self._backend,
            "world_size": session.world_size,
            "metrics": dict(state.metrics),
            "versions": _versions(),
        }
        self.checkpointer.save(state.step, *state.capture(done, meter), facts)

    def finish(self) -> None:
        """Wait until the checkpoint under way is written.

        Raises:
            OSError: The last checkpoint could not be written.

        Collectives: as in `Checkpointer.finish`.
        """
        self.checkpointer.finish()

    def check_best(self) -> None:
        """Make sure that the metric of ``best=`` exists.

        Raises:
            ConfigError: No metric of the last epoch has that name.
        """
        name, known = self.checkpointer.settings.best, self._state.metrics
        if name is not None and name not in known:
            msg = f"best={name!r} is none of the metrics of the run, which are {', '.join(known)}"
            raise ConfigError(msg)


@cache
def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "tp-trainer": version("tp-trainer")}
