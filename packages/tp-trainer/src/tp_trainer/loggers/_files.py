"""Files that loggers write: where they are, and belong to one run; what is safe on the disk."""

import importlib.util
import itertools
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from tp_core.errors import ConfigError
from tp_core.internal import Ownership, lock_file_of, run_in, showing_system_errors
from tp_core.plugins import RunInfo

log = logging.getLogger("tp_trainer")

_OF_FOLDER = "the run of this folder's checkpoints"


def place_for(kind: str, given: Path | None, info: RunInfo) -> Path:
    """Return the folder that a logger writes into, and make it.

    Args:
        kind: The class of the logger, for messages.
        given: The folder that the user gave.
        info: The run, whose folder is taken where the user gave none.

    Raises:
        ConfigError: Neither the user nor the run has a folder.
        OSError: The folder cannot be made.
    """
    folder = given if given is not None else info.folder
    if folder is None:
        msg = f"the run has no folder to log to; give {kind}(folder), or checkpoint=folder"
        raise ConfigError(msg)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class LogPlace:
    """The file or folder that a logger writes to as long as a run goes; each run has its own.

    It is locked as long as the run goes. In a folder that the user gave, where several runs may write, the
    lock file stays: it says which run has written there, so that one which is resumed goes on with no other's
    file. In the folder of the run's checkpoints, which is the run's, it is deleted in the end.

    Args:
        kind: The class of the logger, for messages.
        folder: The folder that the user gave.
        name: The name of the file, or of a folder in the run's folder.
        files: Where the place is a folder, the pattern of the files that a run leaves there; the folder that
            the user gave is the place itself then.

    Attributes:
        path: Where it is.
    """

    def __init__(
        self, kind: str, folder: str | os.PathLike[str] | None, name: str, *, files: str | None = None
    ) -> None:
        self._kind, self._name, self._files = kind, name, files
        self._folder = None if folder is None else Path(folder).absolute()
        self.path = Path(name)
        self._run = ""
        self._ownership: Ownership | None = None

    def open(self, info: RunInfo) -> bool:
        """Find the place, and return whether the run goes on with what is there.

        What another run has left gets the next free name with a number, ``metrics-1.csv``. What another run
        still writes to stays as it is, and this one takes such a name.

        Raises:
            ConfigError: Neither the user nor the run has a folder; or the run that is to be resumed is alive.
            OSError: The folder or the lock file cannot be made.
        """
        folder = place_for(self._kind, self._folder, info)
        path = folder / self._name if self._files is None or self._folder is None else folder
        if self._folder is None:
            before = self._run_at(path)
            goes_on = info.resumed and before in {None, _OF_FOLDER}  # else a run was given this folder since
            self._ownership = Ownership(path, is_folder=self._files is not None, run=_OF_FOLDER)
            if not goes_on:
                keep_aside(path, self._files, run=before)
                if not self._ownership.is_held():  # the folder has another name now, with its lock file in it
                    self._ownership.renew()
            self.path = path
            return goes_on
        found = self._place_of_run(path) if info.resumed else None
        if found is not None:
            self._take(found)
            return True
        self._run = self._run if info.resumed and self._run else secrets.token_hex(8)
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
                self.close()  # a whole run has written there meanwhile
        log.warning("another run writes to %s: %s writes to %s", path, self._kind, self.path)
        return False

    @contextmanager
    def opening(self, info: RunInfo) -> Iterator[bool]:
        """Open the place for a block that opens the file; it is released again if that fails."""
        try:
            goes_on = self.open(info)
            with showing_system_errors(self.path):
                yield goes_on
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the place for others."""
        if self._ownership is not None:
            self._ownership.release()
            self._ownership = None

    def state_dict(self) -> dict[str, Any]:
        """Return which run it is, as the lock files say it."""
        return {"run": self._run} if self._run else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take which run it is."""
        self._run = state.get("run", "")

    def _take(self, path: Path, *, grace_s: float | None = None) -> None:
        self._run = self._run or secrets.token_hex(8)
        self._ownership = self._owned(path, self._run, grace_s=grace_s)
        self.path = path

    def _owned(self, path: Path, run: str, *, grace_s: float | None) -> Ownership:
        is_folder = self._files is not None
        return Ownership(path, is_folder=is_folder, run=run, leaves_file=True, grace_s=grace_s)

    def _run_at(self, path: Path) -> str | None:
        return run_in(lock_file_of(path, is_folder=self._files is not None))

    def _place_of_run(self, path: Path) -> Path | None:
        """Return where the run that is resumed has written; where no run is named, it may have."""
        places = takewhile(os.path.lexists, (_numbered(path, n) for n in itertools.count()))
        runs = {place: self._run_at(place) for place in places}
        mine = (place for place, run in runs.items() if run is not None and run == self._run)
        return next(mine, path if runs and runs[path] is None else None)


def keep_aside(path: Path, files: str | None = None, *, run: str | None = None) -> None:
    """Give what another run has left at ``path`` the next free name with a number: ``metrics-1.csv``.

    Args:
        path: A file, or a folder.
        files: The pattern of the files that a run leaves in a folder; ``None`` for a file.
        run: Which run has left the file.
    """
    if not (os.path.lexists(path) if files is None else any(path.glob(files))):
        return
    for aside in _next_names(path):
        if files is not None:
            with suppress(OSError):  # somebody else has taken that name
                path.rename(aside)  # with the lock file in it
                return
        else:
            with suppress(ConfigError), Ownership(aside, run=run, leaves_file=run is not None, grace_s=0):
                if not os.path.lexists(aside):
                    path.rename(aside)
                    return


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number}{path.suffix}") if number else path


def _next_names(path: Path) -> Iterator[Path]:
    """Yield names with numbers that nothing has."""
    return (place for n in itertools.count(1) if not os.path.lexists(place := _numbered(path, n)))


def sync(file: IO[str]) -> None:
    """Bring what was written onto the disk."""
    file.flush()
    os.fsync(file.fileno())


def check_installed(kind: str, module: str, extra: str) -> None:
    """Make sure that the package is there which a logger writes with.

    Raises:
        ConfigError: The package is not installed.
    """
    if importlib.util.find_spec(module) is None:
        msg = f"{kind} needs the package {module}: pip install 'tp-trainer[{extra}]'"
        raise ConfigError(msg)
