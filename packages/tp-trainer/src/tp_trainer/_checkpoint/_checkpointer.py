"""Writes the checkpoints of a run when they are due, and finds the one to go on from."""

import logging
import math
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from tp_core.errors import ConfigError, StateError, TpError
from tp_core.plugins import Session, TensorSlice
from tp_core.state import StoredTensors, open_tensors

from tp_trainer._checkpoint._files import bytes_in, read_json
from tp_trainer._checkpoint._settings import Checkpoints
from tp_trainer._checkpoint._verifying import step_of, verify
from tp_trainer._checkpoint._writer import RANKS, STATE, Values, Writer

__all__ = ["Checkpointer"]

log = logging.getLogger("tp_trainer")

_LOOK_S = 0.5
_GRACE_S = 15.0


class Checkpointer:
    """Writes the checkpoints of a run when they are due, and finds the one to go on from.

    Args:
        settings: What the user wants.
        session: Whose run it is; every method is called on all of its ranks.
    """

    def __init__(self, settings: Checkpoints, session: Session) -> None:
        self.settings = settings
        self._session = session
        self._writer = Writer(settings, session)
        self._folder = self._writer.folder
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._writing: threading.Thread | None = None
        self._written_into: Path | None = None  # if all ranks write there together

    @property
    def last(self) -> Path | None:
        """The newest checkpoint of the run."""
        return self._writer.last

    # -- when -----------------------------------------------------------------------------------

    def steps_left(self, step: int) -> int | None:
        """Return how many optimizer steps after ``step`` the next checkpoint is due, if at a step."""
        every = self.settings.every_steps
        return None if every is None else every - step % every

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due at ``step`` because of its number."""
        every = self.settings.every_steps
        return every is not None and step > 0 and step % every == 0 and not self.has_saved(step)

    def has_saved(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` has been written, or begun."""
        return step == self._saved_step

    @property
    def due_at(self) -> float:
        """When the last checkpoint is as old as one may be, by `time.monotonic`."""
        age = self.settings.every_s
        return math.inf if age is None else self._saved_at + age

    # -- writing --------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the folder for this run, before anything is read or written there, and make it if needed.

        Raises:
            ConfigError: Another run uses the folder; on all ranks.
            OSError: The folder cannot be written to; on all ranks.

        Collectives: those of :meth:`_exchange`.
        """
        if self._session.is_main:
            self._writer.open()
        self._exchange()

    def close(self) -> None:
        """Wait for a thread that writes, and release the folder for other runs.

        After an error of the run nobody asks any more how the writing went: the log says it.
        """
        if self._writing is not None:
            self._end_of_writing(self._writing)
            self._writing = None
        if self._writer.failure is not None:
            log.error("the last checkpoint could not be written", exc_info=self._writer.failure)
            self._writer.failure = None
        self._writer.close()

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor | TensorSlice],
        state: Mapping[str, Any],
        mine: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint.

        Args:
            step: The optimizer step it stands at.
            tensors: What `collect_state` returned.
            state: Plain values, the same on all ranks.
            mine: Plain values of this rank.
            facts: What the manifest says; its "metrics" decide which one is the best.

        Raises:
            OSError: The disk is full, or writing is not allowed; the checkpoints before are as they
                were. With ``background`` it may be that of the last time.
            StateError: A value is none that can be written.

        Collectives: a gather of ``mine`` and a broadcast of how it went; with slices, those of
        writing together, which with ``background`` are the threads' own.
        """
        self._join()
        ranks = self._session.gather_objects(dict(mine))
        is_split = any(isinstance(value, TensorSlice) for value in tensors.values())
        folder = self._writer.begin(step, together=is_split)
        if folder is not None:
            values = Values(step, dict(state), ranks, dict(facts))
            write = partial(self._writer.write, folder, values, together=is_split)
            if self.settings.background:
                if is_split:
                    self._writer.join_group()
                copies = self._writer.copied(tensors)
                # A daemon: one that waits for ranks that never come must not hold up the process's end.
                self._writing = threading.Thread(
                    target=write, args=(copies,), name="tp-checkpoint", daemon=True
                )
                self._written_into = folder if is_split else None
                self._writing.start()
            else:
                write(tensors)
        if not self.settings.background:
            self._exchange()
        self._saved_step, self._saved_at = step, time.monotonic()

    def finish(self) -> None:
        """Wait until what was begun is written, and keep no more than that.

        Raises:
            OSError: The last checkpoint could not be written.
        """
        self._join()
        if self._session.is_main and self.last is not None and self.last.parent == self._folder.path:
            self._writer.prune(
                self.last
            )  # which a run that was killed right after its last save has not done
        self._writer.leave_group()

    def _end_of_writing(self, thread: threading.Thread) -> None:
        """Wait for a thread that writes, after an error of the run.

        Where all ranks write together it may wait for one that waits for this one elsewhere, in a
        step: after a while in which no rank has written anything it is left to itself.
        """
        size, left_s = -1, _GRACE_S
        while thread.is_alive():
            thread.join(_LOOK_S)
            if self._written_into is None:
                continue
            now = bytes_in(self._written_into)
            size, left_s = now, _GRACE_S if now != size else left_s - _LOOK_S
            if left_s <= 0:
                log.error(
                    "the last checkpoint was not finished: for %g s no rank has written any more of it",
                    _GRACE_S,
                )
                self._writer.give_up()
                return

    def _join(self) -> None:
        if self.settings.background:
            if self._writing is not None:
                self._writing.join()
                self._writing = None
            self._exchange()

    def _exchange(self) -> None:
        """Exchange over all ranks how the writing went, and where the last checkpoint is.

        Raises:
            ConfigError: Another run has taken the folder.
            OSError: A rank could not write.
            StateError: Something that no checkpoint holds was to be written, or a thread failed otherwise.

        Collectives: those of :meth:`Session.gather_objects`.
        """
        failure, self._writer.failure = self._writer.failure, None
        answers = self._session.gather_objects((_described(failure), self.last))
        self._writer.last = answers[0][1]
        if isinstance(failure, Exception):
            raise failure
        for rank, (told, _) in enumerate(answers):
            if told is not None:
                kind, text = told
                msg = f"rank {rank} could not write checkpoints to {self._folder.path}: {text}"
                raise kind(msg) from failure

    # -- reading --------------------------------------------------------------------------------

    def find(self, resume: str | Path) -> Path | None:
        """Return the checkpoint to go on from, the same on all ranks.

        Args:
            resume: A checkpoint, or "auto" for the newest that is whole, if there is one.

        Raises:
            StateError: The checkpoint that was named is not whole.

        Collectives: a broadcast, and those of :func:`verify` for each checkpoint that is looked at.
        """
        if resume == "auto":
            return self._folder.newest_whole(self._session)
        path = self._session.broadcast(Path(resume).absolute())
        verify(path, self._session)
        return path

    def check_free(self, step: int) -> None:
        """Make sure that the folder has no checkpoint after ``step``, where the run begins.

        One of another run would be taken for the newest: kept instead of those of this run, and the
        one to go on from later.

        Raises:
            ConfigError: There is a checkpoint after ``step``; on all ranks.

        Collectives: one broadcast.
        """
        later = [path.name for path in self._folder.committed() if step_of(path) > step]
        later = self._session.broadcast(later)
        if later:
            begins = f"begins after step {step}" if step else "begins anew"
            msg = (
                f"{self._folder.path} has {', '.join(sorted(later))}, and the run {begins}: give "
                "resume='auto' to go on from the newest, or another folder, or delete what is not needed "
                "any more"
            )
            raise ConfigError(msg)

    def continues(self, path: Path, step: int) -> None:
        """Note that the run goes on from ``path``, which stands at ``step``."""
        self._writer.last, self._saved_step, self._saved_at = path, step, time.monotonic()

    @staticmethod
    def read(path: Path) -> tuple[StoredTensors, dict[str, Any], list[dict[str, Any]]]:
        """Return the tensors, the plain values, and those of each rank.

        Raises:
            StateError: A file of the checkpoint cannot be read here.
        """
        return open_tensors(path), read_json(path / STATE), read_json(path / RANKS)


def _described(failure: BaseException | None) -> tuple[type[Exception], str] | None:
    """Return what other ranks are told of a failure: which kind they raise, and its words."""
    if failure is None:
        return None
    kind = next((kind for kind in (OSError, ConfigError) if isinstance(failure, kind)), StateError)
    named = isinstance(failure, (OSError, TpError))
    return kind, str(failure) if named else f"{type(failure).__name__}: {failure}"
