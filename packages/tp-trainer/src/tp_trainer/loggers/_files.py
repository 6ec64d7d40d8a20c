"""Files that loggers write: where they are, what is kept of an older one, what is safe on the disk."""

import importlib.util
import os
from pathlib import Path
from typing import IO

from tp_core.errors import ConfigError
from tp_core.plugins import RunInfo

__all__ = ["check_installed", "keep_aside", "place_for", "sync"]


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


def keep_aside(path: Path) -> None:
    """Give what another run has left at ``path`` the next free name with a number: ``metrics-1.csv``."""
    if not os.path.lexists(path):
        return
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.stem}-{number}{path.suffix}")):
        number += 1
    path.rename(aside)


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
