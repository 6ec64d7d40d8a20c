"""The files of loggers: their places, their locks for one run, and syncs to the disk."""

import itertools
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from tp_core.errors import ConfigError
from tp_core.files import Ownership, lock_file_of, run_in, showing_system_errors
from tp_core.output import get_logger
from tp_core.plugins import RunInfo

from tp_trainer._checkpoint import check_folder

log = get_logger("tp_trainer")

_OF_FOLDER = "the run of this folder's checkpoints"


class LogPlace:
    """The file or folder of a logger for one run, locked during the run.

    Several runs may write into a folder of the user. There the lock file of a run with checkpoints stays and
    names its run, so that a resumed run does not continue another run's file. The folder of the run's
    checkpoints belongs to the run, and there the lock file is deleted at the end.

    Args:
        kind: The class of the logger, for messages.
        folder: The user's folder, or ``None``.
        name: The name of the file, or of a folder in the run's folder.
        files: If the place is a folder, the pattern of the files in it; the user's folder itself is then the
            place.

    Attributes:
        path: The path of the file or folder.
    """

    def __init__(
        self, kind: str, folder: str | os.PathLike[str] | None, name: str, *, files: str | None = None
    ) -> None:
        if folder is not None:
            check_folder(f"{kind}(folder)", folder)
        self._kind, self._name, self._files = kind, name, files
        if folder is None:
            self._folder = None
        else:
            self._folder = Path(folder).absolute()
        self.path = Path(name)
        self._run = ""
        self._can_be_resumed = True
        self._ownership: Ownership | None = None

    def open(self, info: RunInfo) -> bool:
        """Lock the place, and return whether the run continues the file there.

        A file of an earlier run gets the next free name with a number, ``metrics-1.csv``. If another run
        still writes to the file, this run takes such a name instead.

        Raises:
            ConfigError: Neither the user nor the run has a folder; or the run to be resumed is still alive.
            OSError: The folder or the lock file cannot be made.
        """
        folder = self._folder or info.folder
        if folder is None:
            msg = f"the run has no folder to log to; give {self._kind}(folder), or checkpoint=folder"
            raise ConfigError(msg)
        folder.mkdir(parents=True, exist_ok=True)
        if self._files is None or self._folder is None:
            path = folder / self._name
        else:
            path = folder
        self._can_be_resumed = info.resumed or info.folder is not None
        if self._folder is None or (self._files is None and self._folder == info.folder):
            before = self._run_at(path)
            goes_on = info.resumed and before in {None, _OF_FOLDER}  # not if another run has used the folder
            self._ownership = Ownership(path, is_folder=self._files is not None, run=_OF_FOLDER)
            if not goes_on:
                keep_aside(path, self._files, run=before)
                if not self._ownership.is_held():  # keep_aside() has renamed the folder with its lock file
                    self._ownership.renew()
            self.path = path
            return goes_on
        place = self._place_of_run(path) if info.resumed else None
        if place is not None:
            self._take(place)
            return True
        if not (info.resumed and self._run):
            self._run = secrets.token_hex(8)
        with suppress(ConfigError):  # another run writes there
            before = self._run_at(path)
            with self._owned(path, before or self._run, grace_s=0):
                keep_aside(path, self._files, run=before)
            self._take(path, grace_s=0)
            return False
        for free in _next_names(path):
            with suppress(ConfigError):
                self._take(free, grace_s=0)
                if not os.path.lexists(free) or self._files is not None:
                    break
                self.close()  # another run has taken and left the name in between
        log.warning("another run writes to %s: %s writes to %s", path, self._kind, self.path)
        return False

    @contextmanager
    def opening(self, info: RunInfo) -> Iterator[bool]:
        """Open the place for a block that opens the file; release it if the block fails."""
        try:
            goes_on = self.open(info)
            with showing_system_errors(self.path):
                yield goes_on
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the place for other runs."""
        if self._ownership is not None:
            self._ownership.release()
            self._ownership = None

    def state_dict(self) -> dict[str, Any]:
        """Return the identity of the run, as in the lock file."""
        if self._run:
            return {"run": self._run}
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the identity of the run."""
        self._run = state.get("run", "")

    def _take(self, path: Path, *, grace_s: float | None = None) -> None:
        self._run = self._run or secrets.token_hex(8)
        self._ownership = self._owned(path, self._run, grace_s=grace_s)
        self.path = path

    def _owned(self, path: Path, run: str, *, grace_s: float | None) -> Ownership:
        is_folder = self._files is not None
        leaves_file = self._can_be_resumed
        return Ownership(path, is_folder=is_folder, run=run, leaves_file=leaves_file, grace_s=grace_s)

    def _run_at(self, path: Path) -> str | None:
        return run_in(lock_file_of(path, is_folder=self._files is not None))

    def _place_of_run(self, path: Path) -> Path | None:
        """Return the place of the resumed run, or the first place if its lock file names no run."""
        places = takewhile(os.path.lexists, (_numbered(path, n) for n in itertools.count()))
        runs = {place: self._run_at(place) for place in places}
        places_of_run = (place for place, run in runs.items() if run is not None and run == self._run)
        unnamed = path if runs and runs[path] is None else None
        return next(places_of_run, unnamed)


def keep_aside(path: Path, files: str | None = None, *, run: str | None = None) -> None:
    """Rename an earlier run's file at ``path`` to the next free name with a number: ``metrics-1.csv``.

    Of a folder, only the files of the pattern ``files``. ``run`` is the identity of the earlier run.
    """
    if files is None:
        exists = os.path.lexists(path)
    else:
        exists = any(path.glob(files))
    if not exists:
        return
    for aside in _next_names(path):
        if files is not None:
            with suppress(OSError):  # another process has taken that name
                path.rename(aside)  # with the lock file in it
                return
        else:
            with suppress(ConfigError), Ownership(aside, run=run, leaves_file=run is not None, grace_s=0):
                if not os.path.lexists(aside):
                    path.rename(aside)
                    return


def _numbered(path: Path, number: int) -> Path:
    if number:
        return path.with_name(f"{path.stem}-{number}{path.suffix}")
    return path


def _next_names(path: Path) -> Iterator[Path]:
    return (place for n in itertools.count(1) if not os.path.lexists(place := _numbered(path, n)))


def sync(file: IO[str]) -> None:
    file.flush()
    os.fsync(file.fileno())
