"""The writer of a run's checkpoints, in a thread or not, and the search for the one to resume from."""

import math
import os
import shutil
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor
from tp_core.errors import ConfigError, StateError
from tp_core.files import Ownership
from tp_core.launching import write_exit_report
from tp_core.output import get_logger
from tp_core.plugins import Session
from tp_core.sessions import agree_on_failure, new_process_group
from tp_core.state import TENSORS_FILE, TENSORS_FOLDER, FileRecord, StoredTensors, open_tensors, write_whole
from tp_core.tensors import TensorSlice

from tp_trainer._checkpoint import Checkpoints
from tp_trainer._checkpoint._folder import (
    STATE,
    RunFolder,
    bytes_in,
    on_first_rank,
    read_json,
    step_of,
    verify,
    write_json,
)
from tp_trainer._checkpoint._host_copies import HostCopies

log = get_logger("tp_trainer")

RANKS = "ranks.json"

_DELETING_S = 5.0  # deleting large checkpoints on a network file system takes seconds
_RETRY_S = 0.05
_WRITES = 5  # attempts at one checkpoint, if the folder is deleted during each
_LOOK_S = 0.5  # between two looks at the bytes that a thread has written
_GRACE_S = 15.0  # a thread that has written no byte for so long counts as stuck


class Checkpointer:
    """Writes the checkpoints of a run when they are due, and finds the one to resume from.

    Every method is called on all ranks of the session.
    """

    def __init__(self, settings: Checkpoints, session: Session) -> None:
        self.settings = settings
        self._session = session
        self._writer = Writer(settings, session)
        self._host_copies = HostCopies()  # of what the training changes while a thread writes
        self._folder = self._writer.folder
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._writing: threading.Thread | None = None
        self._written_into: Path | None = None  # the folder, if all ranks write there together

    @property
    def last(self) -> Path | None:
        """The newest complete checkpoint of the run."""
        return self._writer.last

    # -- times ----------------------------------------------------------------------------------

    def steps_left(self, step: int) -> int | None:
        """Return the number of optimizer steps from ``step`` to the next checkpoint of ``every_steps``."""
        every = self.settings.every_steps
        if every is None:
            return None
        return every - step % every

    def is_due(self, step: int) -> bool:
        every = self.settings.every_steps
        return every is not None and step > 0 and step % every == 0 and not self.has_saved(step)

    def has_saved(self, step: int) -> bool:
        """Return whether the checkpoint of ``step`` is written, or under way."""
        return step == self._saved_step

    @property
    def due_at(self) -> float:
        """The time of the next checkpoint of ``every_s``, by `time.monotonic`."""
        age = self.settings.every_s
        if age is None:
            return math.inf
        return self._saved_at + age

    # -- writing --------------------------------------------------------------------------------

    def open(self) -> None:
        """Lock the folder for this run, before anything is read or written there; make it if needed.

        Raises:
            ConfigError: Another run uses the folder; on all ranks.
            OSError: The folder cannot be written to; on all ranks.

        Collectives: as in :meth:`_exchange`.
        """
        if self._session.is_main:
            self._writer.open()
        self._exchange()

    def close(self) -> None:
        """Wait for the writing thread, and release the folder for other runs.

        After an error of the run nothing else reports a failure of the write, so it is logged here.
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
        """Write a checkpoint of the tensors of `collect_state`, and of plain values.

        ``state`` is equal on all ranks, and ``mine`` is this rank's. ``facts`` are for the manifest; its
        "metrics" decide which checkpoint is the best.

        Raises:
            OSError: The disk is full, or writing is not allowed; earlier checkpoints are unchanged. With
                ``background`` it may be the error of the previous write.

        Collectives: a gather of ``mine`` and a gather of the outcomes. With slices also a broadcast, and the
        collectives of `Writer.write`; with ``background`` the threads make these over their own group.
        """
        self._join()
        ranks = self._session.gather_objects(dict(mine), where="values of a checkpoint")
        is_split = any(isinstance(value, TensorSlice) for value in tensors.values())
        folder = self._writer.begin(step, together=is_split)
        if folder is not None:
            values = Values(step, dict(state), ranks, dict(facts))
            write = partial(self._writer.write, folder, values, together=is_split)
            if self.settings.background:
                if is_split:
                    self._writer.join_group()
                copies = self._host_copies.take(tensors)
                # A daemon: a thread that waits for ranks that are gone must not keep the process alive.
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
        """Wait until the checkpoint under way is written, and delete surplus ones.

        Collectives: with ``background`` as in :meth:`_exchange`.
        """
        self._join()
        if self._session.is_main and self.last is not None and self.last.parent == self._folder.path:
            # A run that was killed between its last save and the deletions has left surplus ones.
            self._writer.prune(self.last)
        self._writer.leave_group()

    def _end_of_writing(self, thread: threading.Thread) -> None:
        """Wait for the writing thread, after an error of the run.

        If all ranks write together, it may wait for a rank that waits for this rank in a step: a deadlock.
        So once no rank has written a byte for 15 seconds, it is abandoned.
        """
        size, left_s = -1, _GRACE_S
        while thread.is_alive():
            thread.join(_LOOK_S)
            if self._written_into is None:
                continue
            now = bytes_in(self._written_into)
            left_s = _GRACE_S if now != size else left_s - _LOOK_S
            size = now
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
        """Exchange the outcome of the write over all ranks, and rank 0's path of the last checkpoint.

        Raises:
            OSError: A rank could not write.

        Collectives: one broadcast, and one all-gather of objects.
        """
        failure, self._writer.failure = self._writer.failure, None
        self._writer.last = self._session.broadcast(self.last, where="the last checkpoint")
        doing = f"write checkpoints to {self._folder.path}"
        agree_on_failure(failure, self._session.gather_objects, doing)

    # -- reading --------------------------------------------------------------------------------

    def find(self, resume: str | os.PathLike[str]) -> Path | None:
        """Return the checkpoint to resume from, the same on all ranks; for "auto" the newest whole one.

        Raises:
            OSError: The folder or a checkpoint could not be read for some seconds; nothing was changed.
            StateError: The checkpoint is damaged; for "auto", all of them. Nothing was changed.

        Collectives: a broadcast, then as in :func:`verify` for each checkpoint that is checked.
        """
        if resume == "auto":
            return self._folder.newest_whole(self._session)
        path = self._session.broadcast(Path(resume).absolute(), where="the checkpoint to resume from")
        verify(path, self._session)
        return path

    def check_free(self, step: int) -> None:
        """Make sure that the folder has no checkpoint of a step after ``step``, where the run begins.

        A later one, of another run, would count as the newest: it would be kept instead of this run's own,
        and a later resume would start from it.

        Raises:
            ConfigError: There is a checkpoint after ``step``; on all ranks.
            OSError: The folder could not be read for some seconds; on all ranks.

        Collectives: one broadcast.
        """
        committed = on_first_rank(self._session, self._folder.committed, where="later checkpoints")
        later = [path.name for path in committed if step_of(path) > step]
        if later:
            if step:
                begins = f"begins after step {step}"
            else:
                begins = "begins again"
            msg = (
                f"{self._folder.path} has {', '.join(sorted(later))}, and the run {begins}: give "
                "resume='auto' to continue from the newest, or another folder, or delete what is not needed "
                "any more"
            )
            raise ConfigError(msg)

    def continues(self, path: Path, step: int) -> None:
        self._writer.last, self._saved_step, self._saved_at = path, step, time.monotonic()
        if self._session.is_main:
            write_exit_report(0, path)

    def read(self, path: Path) -> tuple[StoredTensors, dict[str, Any], list[dict[str, Any]]]:
        """Return the tensors, the common plain values, and the plain values of each rank.

        Raises:
            OSError: A rank could not read a file for some seconds; on all ranks.
            StateError: A file is not there, or damaged; on all ranks.

        Collectives: a gather of the outcomes.
        """
        failure: OSError | StateError | None = None
        try:
            contents = open_tensors(path), read_json(path / STATE), read_json(path / RANKS)
        except (OSError, StateError) as error:
            failure = error
        agree_on_failure(failure, self._session.gather_objects, f"read {path}")
        return contents


# -- One checkpoint, written by rank 0 alone or together with the other ranks ---------------------


class Values(NamedTuple):
    """The contents of a checkpoint besides tensors."""

    step: int
    state: Mapping[str, Any]
    ranks: list[Any]
    facts: Mapping[str, Any]


class _LostRankError(StateError):
    """Raised when a rank is gone that writes together with this one: no further collective can work."""


class Writer:
    """Writes into the folder of a run, and keeps a failure until the next exchange between ranks.

    Attributes:
        last: The newest checkpoint that was written, on rank 0.
        failure: The failure since the last exchange.
    """

    def __init__(self, settings: Checkpoints, session: Session) -> None:
        self.folder = RunFolder(settings.folder)
        self.last: Path | None = None
        self.failure: BaseException | None = None
        self._settings = settings
        self._session = session
        self._lock: Ownership | None = None
        self._group: dist.ProcessGroup | None = None  # of the threads that write state together
        # Between `give_up` and `_complete`: an abandoned thread must not commit into another run's folder,
        # as test_a_thread_that_was_given_up_touches_nothing_of_the_next_run shows.
        self._committing = threading.Lock()
        self._given_up = False

    def open(self) -> None:
        """Lock the folder for this run, on rank 0, and check that it is writable."""
        path = self.folder.path
        try:
            self._lock = Ownership(path, is_folder=True)
            self.folder.sweep()
            self.folder.scratch(0).rmdir()
        except Exception as error:  # noqa: BLE001 - all ranks raise it together
            error.add_note(f"while the folder for checkpoints was opened, before the first step: {path}")
            self.failure = error

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def give_up(self) -> None:
        """Abandon the writing thread: from now on it commits no checkpoint.

        When it continues, the folder may belong to another run.
        """
        with self._committing:
            self._given_up = True

    def begin(self, step: int, *, together: bool) -> Path | None:
        """Return the folder that this rank writes into, or ``None``.

        Collectives: one broadcast, if all ranks write.
        """
        folder = None
        if self._session.is_main:
            try:
                folder = self._new_scratch(step)
            except Exception as error:  # noqa: BLE001 - all ranks raise it together
                self.fail(error)
        if together:
            return self._session.broadcast(folder, where="the folder of a checkpoint")
        return folder

    def _new_scratch(self, step: int) -> Path:
        """Return a new folder to write into; lock the run's folder again if it was deleted."""
        if self._lock is None:
            return self.folder.scratch(step)
        is_lost = not self._lock.is_held()
        if is_lost:
            log.warning(
                "%s was deleted, or its lock, while the run writes its checkpoints there; it is made again, "
                "and what is gone is gone",
                self.folder.path,
            )
        deadline = time.monotonic() + _DELETING_S
        while True:
            try:
                if is_lost:
                    self._lock.renew()
                return self.folder.scratch(step)
            except FileNotFoundError:  # the deletion is still going on
                if time.monotonic() > deadline:
                    raise
            is_lost = True
            time.sleep(_RETRY_S)

    def _was_deleted(self, error: Exception | None) -> bool:
        """Return whether the folder was deleted during a write; wait for the end of the deletion."""
        if self._lock is None or not isinstance(error, OSError):
            return False
        if self._lock.is_held() and not isinstance(error, FileNotFoundError):
            return False
        # As long as the lock is there the deletion may continue, and would take the new folder, too.
        deadline = time.monotonic() + _DELETING_S
        while self._lock.is_held() and time.monotonic() < deadline:
            time.sleep(_RETRY_S)
        return True

    def join_group(self) -> None:
        """Form the process group of the threads that write together.

        In the main thread's group, their collectives would pair with the training's.

        Collectives: torch makes a new group, once.
        """
        if self._group is None:
            self._group = new_process_group(backend="gloo")

    def leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    def write(
        self,
        folder: Path,
        values: Values,
        tensors: Mapping[str, Tensor | TensorSlice],
        *,
        together: bool,
    ) -> None:
        """Write the tensors, on all ranks or on rank 0, and the rest on rank 0.

        A failure is kept for the next exchange between ranks. In a thread, that is every exception.

        Collectives: as in :meth:`_write_together`, if all ranks write.
        """
        try:
            if together:
                self._write_together(tensors, folder, values)
            else:
                self._write_alone(cast("Mapping[str, Tensor]", tensors), folder, values)
        except BaseException as error:
            if not self._settings.background and not isinstance(error, Exception):
                raise  # a second Ctrl-C ends the run at once
            self.fail(error, folder)

    def _write_alone(self, tensors: Mapping[str, Tensor], folder: Path, values: Values) -> None:
        """Write the whole state on rank 0; write it again if the folder is deleted in between."""
        for writes_left in reversed(range(_WRITES)):
            try:
                written = {TENSORS_FILE: write_whole(tensors, folder / TENSORS_FILE)}
                self._complete(folder, values, written)
                return
            except OSError as error:
                if not writes_left or not self._was_deleted(error):
                    raise
            folder = self._new_scratch(values.step)

    def _write_together(
        self, tensors: Mapping[str, Tensor | TensorSlice], folder: Path, values: Values
    ) -> None:
        """Write this rank's part, and on rank 0 the rest; all ranks again if the folder is deleted.

        Collectives, over the group of the threads: for each attempt as in :meth:`_write_parts`, and one
        broadcast.
        """
        for writes_left in reversed(range(_WRITES)):
            failure: Exception | None = None
            try:
                written = self._write_parts(tensors, folder)
                if self._session.is_main:
                    self._complete(folder, values, written)
            except _LostRankError:
                raise
            except Exception as error:  # noqa: BLE001 - the others wait to learn whether to write again
                failure = error
            again: list[Path | None] = [None]
            if self._session.is_main and writes_left and self._was_deleted(failure):
                try:
                    again = [self._new_scratch(values.step)]
                except (ConfigError, OSError) as error:
                    failure = error
            dist.broadcast_object_list(again, src=0, group=self._group)
            if again[0] is None:
                if failure is not None:
                    raise failure
                return
            folder = again[0]

    def _write_parts(
        self, tensors: Mapping[str, Tensor | TensorSlice], folder: Path
    ) -> dict[str, FileRecord]:
        """Write this rank's part, and raise here and on rank 0 if it could not.

        Returns:
            The files of all ranks, synced to the disk, with their digests.

        Collectives, over the group of the threads: as in `write_tensors`, then one gather.
        """
        from tp_core.state import write_tensors

        failure: Exception | None = None
        files: dict[str, FileRecord] = {}
        try:
            written = write_tensors(tensors, folder / TENSORS_FOLDER, together=True, group=self._group)
            files = {f"{TENSORS_FOLDER}/{name}": record for name, record in written.items()}
        except Exception as error:  # noqa: BLE001 - the others wait to learn of it
            failure = error
        answers: list[Any] = [None] * self._session.world_size
        try:
            if failure is None:
                text = None
            else:
                text = str(failure) or repr(failure)
            kind = FileNotFoundError if isinstance(failure, FileNotFoundError) else OSError
            dist.all_gather_object(answers, (text, kind, files), group=self._group)
        except RuntimeError as error:  # a rank has gone
            for lost in (failure, error):
                if lost is not None:
                    traceback.clear_frames(lost.__traceback__)  # the frames hold the group
            self.leave_group()  # closes its connections: ranks that wait for this one get an error
            msg = f"the ranks that write a checkpoint together lost one: {error}"
            raise _LostRankError(msg) from error
        if failure is not None:
            raise failure
        for rank, (text, kind, _) in enumerate(answers):
            if text is not None and self._session.is_main:
                msg = f"rank {rank}: {text}"
                raise kind(msg)
        return {name: record for *_, records in answers for name, record in records.items()}

    def _complete(self, folder: Path, values: Values, written: Mapping[str, FileRecord]) -> None:
        write_json(folder / STATE, values.state)
        write_json(folder / RANKS, values.ranks)
        with self._committing:
            if self._given_up:
                shutil.rmtree(folder, ignore_errors=True)
                return
            self.last = self.folder.commit(folder, values.facts, written)
            write_exit_report(0, self.last)
            self.prune(self.last)

    def prune(self, last: Path) -> None:
        """Delete the checkpoints that the settings do not keep beside ``last``."""
        settings = self._settings
        self.folder.prune(last, keep=settings.keep, best=settings.best, mode=settings.mode or "min")

    def fail(self, error: BaseException, folder: Path | None = None) -> None:
        """Keep a failure for the next exchange, and delete the incomplete folder."""
        self.failure, before = error, ""
        if self._session.is_main:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)  # the failure matters, and the next start sweeps
            with suppress(OSError):  # of a disk that lost more: the failure itself matters
                if self.folder.committed():
                    before = "; the checkpoints before it are whole"
                else:
                    before = ""
        error.add_note(f"while a checkpoint was written to {self.folder.path}{before}")
