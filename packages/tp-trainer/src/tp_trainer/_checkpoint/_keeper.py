"""Writes the checkpoints of a run when they are due, and finds the one to go on from."""

import math
import shutil
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from tp_core import Session, TensorSlice
from tp_core.errors import ConfigError, StateError

from tp_trainer._checkpoint._folders import (
    commit,
    committed,
    newest_whole,
    prune,
    read_json,
    scratch,
    step_of,
    verify,
    write_json,
)
from tp_trainer._checkpoint._settings import Checkpoints
from tp_trainer._checkpoint._whole import write_whole

__all__ = ["Keeper"]

_SPLIT = "tensors"  # a folder
_WHOLE = "tensors.pt"
_STATE = "state.json"
_RANKS = "ranks.json"


class Keeper:
    """Writes the checkpoints of a run when they are due, and finds the one to go on from.

    Args:
        settings: What the user wants.
        session: Whose run it is; every method is called on all of its ranks.
    """

    def __init__(self, settings: Checkpoints, session: Session) -> None:
        self.settings = settings
        self.last: Path | None = None
        self._session = session
        self._folder = Path(settings.folder)
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._writing: threading.Thread | None = None
        self._failure: OSError | StateError | None = None
        self._host: dict[tuple[Any, ...], Tensor] = {}
        self._group: dist.ProcessGroup | None = None  # of the threads that write state together

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
    def is_old(self) -> bool:
        """Whether the last checkpoint is as old as one may be."""
        age = self.settings.every_s
        return age is not None and time.monotonic() - self._saved_at >= age

    # -- writing --------------------------------------------------------------------------------

    def try_folder(self) -> None:
        """Make the folder, so that one that cannot be written to is an error before the first step.

        Raises:
            OSError: It cannot; on all ranks.

        Collectives: one broadcast.
        """
        if self._session.is_main:
            try:
                scratch(self._folder, 0).rmdir()
            except OSError as error:
                self._failed(error, None)
        self._tell()

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
            tensors: What `collect` returned.
            state: Plain values, the same on all ranks.
            mine: Plain values of this rank.
            facts: What the manifest says; its "metrics" decide which one is the best.

        Raises:
            OSError: The disk is full, or writing is not allowed; the checkpoints before are as they
                were. With ``async_`` it may be that of the last time.
            StateError: A value is none that can be written.

        Collectives: a gather of ``mine`` and a broadcast of how it went; with slices, those of
        writing together, which with ``async_`` are the threads' own.
        """
        self._join()
        ranks = self._session.gather_objects(dict(mine))
        is_split = any(isinstance(value, TensorSlice) for value in tensors.values())
        folder = self._scratch(step, shared=is_split)
        if folder is not None:
            write = partial(self._write, folder, dict(state), ranks, dict(facts), together=is_split)
            if self.settings.async_:
                if is_split and self._group is None:
                    # The thread's collectives must not meet those of training.
                    self._group = dist.new_group(backend="gloo")
                copies = self._copied(tensors)
                self._writing = threading.Thread(target=write, args=(copies,), name="tp-checkpoint")
                self._writing.start()
            else:
                write(tensors)
        if not self.settings.async_:
            self._tell()
        self._saved_step, self._saved_at = step, time.monotonic()

    def finish(self) -> None:
        """Wait until what was begun is written.

        Raises:
            OSError: It could not be.
        """
        self._join()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def abandon(self) -> None:
        """Let a thread that writes come to its end, after an error of the run: it says nothing more."""
        if self._writing is not None:
            self._writing.join()

    def _join(self) -> None:
        if self.settings.async_:
            if self._writing is not None:
                self._writing.join()
                self._writing = None
            self._tell()

    def _tell(self) -> None:
        """Let all ranks learn how rank 0's writing went."""
        failure, self._failure = self._failure, None
        told = None if failure is None else (isinstance(failure, OSError), str(failure))
        told, self.last = self._session.broadcast((told, self.last))
        if failure is not None:
            raise failure
        if told is not None:
            is_os, text = told
            msg = f"the checkpoint could not be written: {text}"
            raise OSError(msg) if is_os else StateError(msg)

    def _scratch(self, step: int, *, shared: bool) -> Path | None:
        """Return the folder that this rank writes into, if it writes.

        Collectives: one broadcast, if all ranks write.
        """
        folder = None
        if self._session.is_main:
            try:
                folder = scratch(self._folder, step)
            except OSError as error:
                self._failed(error, None)
        return self._session.broadcast(folder) if shared else folder

    def _copied(self, tensors: Mapping[str, Tensor | TensorSlice]) -> dict[str, Tensor | TensorSlice]:
        """Copy to the host, into the memory of the last time: new pages cost more than the copy."""
        copies: dict[str, Tensor | TensorSlice] = {}
        for name, value in tensors.items():
            if isinstance(value, TensorSlice):
                parts = [(start, self._copy((name, *start), part)) for start, part in value.parts]
                copies[name] = TensorSlice(value.shape, parts)
            else:
                copies[name] = self._copy((name,), value)
        return copies

    def _copy(self, key: tuple[Any, ...], tensor: Tensor) -> Tensor:
        old = self._host.get(key)
        if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
            return old.copy_(tensor)
        self._host[key] = copy = tensor.to("cpu", copy=True)
        return copy

    def _write(
        self,
        folder: Path,
        state: Mapping[str, Any],
        ranks: list[Any],
        facts: Mapping[str, Any],
        tensors: Mapping[str, Tensor | TensorSlice],
        *,
        together: bool,
    ) -> None:
        """Write the tensors, on all ranks or by rank 0, and the rest by rank 0.

        A failure is kept for all ranks to learn.
        """
        try:
            if together:
                self._write_together(tensors, folder)
            else:
                write_whole(cast("Mapping[str, Tensor]", tensors), folder / _WHOLE)
            if self._session.is_main:
                self._complete(folder, state, ranks, facts)
        except (OSError, StateError) as error:
            self._failed(error, folder if self._session.is_main else None)

    def _write_together(self, tensors: Mapping[str, Tensor | TensorSlice], folder: Path) -> None:
        """Write this rank's part, and raise on rank 0 if any rank could not.

        Collectives: those of writing together, one gather; over the group of the writing threads.
        """
        from tp_core import write_tensors

        failure: OSError | StateError | None = None
        try:
            write_tensors(tensors, folder / _SPLIT, together=True, group=self._group)
        except (OSError, StateError) as error:
            failure = error
        told: list[str | None] = [None] * self._session.world_size
        try:
            dist.all_gather_object(told, failure and str(failure), group=self._group)
        except RuntimeError as error:  # a rank has gone
            msg = f"the ranks that write a checkpoint together lost one: {error}"
            raise StateError(msg) from error
        failed = next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), None)
        if failed is not None and self._session.is_main:
            raise failure or OSError(failed)

    def _complete(
        self, folder: Path, state: Mapping[str, Any], ranks: list[Any], facts: Mapping[str, Any]
    ) -> None:
        write_json(folder / _STATE, state)
        write_json(folder / _RANKS, ranks)
        self.last = commit(folder, facts)
        prune(self._folder, keep=self.settings.keep, best=self._best())

    def _failed(self, error: OSError | StateError, folder: Path | None) -> None:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        before = "; the checkpoints before it are whole" if committed(self._folder) else ""
        error.add_note(f"while a checkpoint was written to {self._folder}{before}")
        self._failure = error

    def _best(self) -> Path | None:
        """Return the checkpoint whose metric is the best, the newest of equals."""
        name = self.settings.best
        if name is None:
            return None
        sign = 1.0 if self.settings.mode == "min" else -1.0
        found: list[tuple[float, Path]] = []
        for path in committed(self._folder):
            value = read_json(path / "manifest.json")["metrics"].get(name)
            if value is not None and not math.isnan(value):
                found.append((sign * value, path))
        return min(found, key=lambda pair: pair[0])[1] if found else None

    # -- reading --------------------------------------------------------------------------------

    def find(self, resume: str | Path) -> Path | None:
        """Return the checkpoint to go on from, the same on all ranks.

        Args:
            resume: A checkpoint, or "auto" for the newest that is whole, if there is one.

        Raises:
            StateError: The checkpoint that was named is not whole.

        Collectives: one broadcast.
        """
        path, failure = None, None
        if self._session.is_main:
            try:
                if resume == "auto":
                    path = newest_whole(self._folder)
                else:
                    path = Path(resume)
                    verify(path)
            except StateError as error:
                failure = str(error)
        path, failure = self._session.broadcast((path, failure))
        if failure is not None:
            raise StateError(failure)
        return path

    def check_free(self, step: int) -> None:
        """Make sure that the folder has no checkpoint after ``step``, where the run begins.

        One of another run would be taken for the newest: kept instead of those of this run, and the
        one to go on from later.

        Raises:
            ConfigError: There is one; on all ranks.

        Collectives: one broadcast.
        """
        later = [path.name for path in committed(self._folder) if step_of(path) > step]
        later = self._session.broadcast(later)
        if later:
            begins = f"begins after step {step}" if step else "begins anew"
            msg = (
                f"{self._folder} has {', '.join(sorted(later))}, and the run {begins}: give resume='auto' to "
                "go on from the newest, or another folder, or delete what is not needed any more"
            )
            raise ConfigError(msg)

    def continues(self, path: Path, step: int) -> None:
        """Note that the run goes on from ``path``, which stands at ``step``."""
        self.last, self._saved_step, self._saved_at = path, step, time.monotonic()

    @staticmethod
    def read(path: Path) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
        """Return the tensors' file or folder, the plain values, and those of each rank.

        Raises:
            StateError: They cannot be read here.
        """
        whole = path / _WHOLE
        return whole if whole.is_file() else path / _SPLIT, read_json(path / _STATE), read_json(path / _RANKS)
