"""Checkpoints as folders: whole or not there, and known to be what was written.

A checkpoint is written into a folder with another name, brought onto the disk, and renamed. Its
manifest has the size and the digest of every file, so that what was cut off or changed later
is found before anything of it is used::

    run/.step-0000000010.1f3a9c07.tmp   being written, under a name of its own
    run/step-0000000010                 a checkpoint
    run/step-0000000010.damaged         one that is not what was written; nothing deletes it
    run/.step-0000000010.old            being deleted
"""

import logging
import math
import os
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from tp_core.errors import StateError
from tp_core.internal import sync_folder
from tp_core.plugins import Session
from tp_core.state import FileRecord, record_of

from tp_trainer._checkpoint._files import delete, sync_file
from tp_trainer._checkpoint._manifest import (
    FormatError,
    read_manifest,
    write_manifest,
)
from tp_trainer._checkpoint._verifying import DIGITS, PREFIX, name_of, step_of, verify

__all__ = ["RunFolder"]

log = logging.getLogger("tp_trainer")


Signature = tuple[tuple[str, int, int, int, int], ...]


class RunFolder:
    """The folder with the checkpoints of one run.

    Args:
        path: Where it is; it need not be there yet. A relative one is taken from where the process
            stands now.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._seen_whole: dict[Path, Signature] = {}

    def committed(self) -> list[Path]:
        """Return the checkpoints, the newest first."""
        pattern = f"{PREFIX}{'[0-9]' * DIGITS}"
        return sorted(self.path.glob(pattern), reverse=True) if self.path.is_dir() else []

    # -- writing --------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Delete what runs have left that ended while they wrote or deleted."""
        for ending in ("tmp", "old"):
            for path in self.path.glob(f".{PREFIX}*.{ending}"):
                delete(path)

    def scratch(self, step: int) -> Path:
        """Return a new folder to write the checkpoint of ``step`` into."""
        path = self.path / f".{name_of(step)}.{secrets.token_hex(4)}.tmp"
        path.mkdir(parents=True)
        return path

    def commit(
        self, written: Path, facts: Mapping[str, Any], known: Mapping[str, FileRecord] | None = None
    ) -> Path:
        """Add the manifest to a written folder, bring all of it onto the disk, give it its name.

        Args:
            written: What :meth:`scratch` returned, with the files in it.
            facts: What the manifest says besides the files.
            known: The files that are on the disk already, with their digests.

        Raises:
            OSError: The disk is full, or writing is not allowed.
        """
        files = dict(known or {})
        found = sorted(written.rglob("*"))
        paths = [p for p in found if not p.is_dir() and str(p.relative_to(written)) not in files]
        with ThreadPoolExecutor(1) as beside:  # the disk has its time while the processors have theirs
            syncing = [beside.submit(sync_file, path) for path in paths]
            files |= {str(path.relative_to(written)): record_of(path) for path in paths}
            for sync in syncing:
                sync.result()
        final = self.path / written.name.removeprefix(".").split(".")[0]
        sync_file(write_manifest(written, step_of(final), facts, files))
        for path in (written, *(path for path in found if path.is_dir())):
            sync_folder(path)
        if os.path.lexists(final):  # this run has not written it
            log.warning("%s is in the way of a checkpoint; it is now %s", final, self._set_aside(final))
        written.rename(final)
        sync_folder(self.path)
        self._seen_whole[final] = _signature(final)
        return final

    def prune(
        self, written: Path, *, keep: int, best: str | None = None, mode: Literal["min", "max"] = "min"
    ) -> None:
        """Delete all checkpoints but the newest ones that are whole, and the best.

        Damaged ones that are met are set aside: none of them is kept in the place of a good one.

        Args:
            written: The one that was just written, which is kept.
            keep: How many of the newest are kept.
            best: The metric that decides which one is the best, if one is kept.
            mode: Whether its "min" or its "max" is the best.
        """
        kept = [written]
        for path in self.committed():
            if len(kept) == keep:
                break
            if path != written and self._is_whole(path):
                kept.append(path)
        if best is not None:
            kept += self._best(best, 1.0 if mode == "min" else -1.0)
        for path in self.committed():
            if path not in kept:
                self._remove(path)

    def _best(self, metric: str, sign: float) -> list[Path]:
        """Return the whole checkpoint whose metric is the best, the newest of equals, if there is one."""
        found: list[tuple[float, Path]] = []
        for path in self.committed():
            try:
                value = read_manifest(path).metrics.get(metric)
            except StateError as error:
                self._on_damage(path, error)
                continue
            if isinstance(value, int | float) and not math.isnan(value):
                found.append((sign * value, path))
        found.sort(key=lambda pair: pair[0])  # stable: the newest of equals stays the first
        return next(([path] for _, path in found if self._is_whole(path)), [])

    def _is_whole(self, path: Path) -> bool:
        """Whether a checkpoint is what was written; one that is not is set aside."""
        try:
            self._check(path)
        except StateError as error:
            self._on_damage(path, error)
            return False
        return True

    def _check(self, path: Path) -> None:
        """Verify a checkpoint, once: later, files with the same sizes and times are taken for the same.

        Raises:
            StateError: The checkpoint is not what was written.
        """
        now = _signature(path)
        if self._seen_whole.get(path) != now:
            verify(path)
            self._seen_whole[path] = now

    def _on_damage(self, path: Path, error: StateError) -> None:
        """Set a damaged checkpoint aside, and name it in the log."""
        try:
            log.warning("%s; it does not count any more and is now %s", error, self._set_aside(path))
        except OSError as failure:
            log.warning("%s; it could not be moved aside: %s", error, failure)

    def _set_aside(self, path: Path) -> Path:
        """Give another name to what is in the place of a checkpoint, and return it."""
        self._seen_whole.pop(path, None)
        aside, number = path.with_name(f"{path.name}.damaged"), 1
        while os.path.lexists(aside):
            number += 1
            aside = path.with_name(f"{path.name}.damaged-{number}")
        path.rename(aside)
        return aside

    def _remove(self, path: Path) -> None:
        """Delete a checkpoint; a process that is killed meanwhile leaves none that is half there."""
        self._seen_whole.pop(path, None)
        old = path.with_name(f".{path.name}.old")
        delete(old)
        try:
            path.rename(old)
        except OSError as error:
            log.warning("%s could not be deleted: %s", path, error)
        else:
            delete(old)

    # -- reading --------------------------------------------------------------------------------

    def newest_whole(self, session: Session | None = None) -> Path | None:
        """Return the newest checkpoint that is whole; the damaged ones are set aside, and named in the log.

        Args:
            session: Whose ranks share the work, if all of them call this.

        Raises:
            FormatError: The newest one is of a format that this version does not read.

        Collectives: with a session one broadcast, and for each checkpoint those of :func:`verify`.
        """
        found = self.committed()
        if session is not None:
            found = session.broadcast(found)
        is_main = session is None or session.is_main
        damaged = 0
        for path in found:
            try:
                verify(path, session)
            except FormatError:
                raise
            except StateError as error:
                damaged += 1
                if is_main:
                    self._on_damage(path, error)
                continue
            if is_main:
                self._seen_whole[path] = _signature(path)
            if is_main and damaged:
                log.warning("the run goes on from %s, which is whole", path)
            return path
        if is_main and damaged:
            log.warning(
                "%s had %d checkpoints and none is whole: the run begins anew, from its first step",
                self.path,
                damaged,
            )
        return None


def _signature(path: Path) -> Signature:
    """Return what the system says of each file: another one after every change."""
    found = [(file, file.lstat()) for file in sorted(path.rglob("*"))]
    return tuple((str(f), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for f, s in found)
