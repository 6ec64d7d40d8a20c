"""What ``save_state`` writes, and where; random numbers, which are a part of it."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from tp_core import LaunchEnvironment, recursive_to
from tp_core.arguments import explain_arguments
from tp_core.errors import ConfigError
from tp_core.files import atomic_part
from tp_core.random import seed_everything

STATE_FILE = "state.pt"


@explain_arguments("set_seed(0)")
def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, numpy (if it is loaded) and torch.

    Args:
        seed: The seed.
        device_specific: Whether to add the rank to it.
        deterministic: Whether torch is to use deterministic algorithms alone.
    """
    if device_specific:
        seed += LaunchEnvironment.read().rank
    seed_everything(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


class StateFolders:
    """The folders of states: of any names, or the automatic ones of a project.

    Args:
        project: An object with ``automatic_checkpoint_naming`` and ``total_limit``, or nothing.
        project_dir: The folder of the project.
    """

    def __init__(self, project: Any, project_dir: Any) -> None:
        self.is_automatic = bool(getattr(project, "automatic_checkpoint_naming", False))
        self._limit = getattr(project, "total_limit", None)
        self._project_dir = project_dir

    def next(self, number: int, *, deletes: bool) -> Path:
        """Return the folder of a number, after the oldest ones have made room for it."""
        if self._limit is not None and deletes:
            folders = self._known()
            for old in folders[: max(0, len(folders) + 1 - self._limit)]:
                shutil.rmtree(old)
        return self._parent() / f"checkpoint_{number}"

    def newest(self) -> Path | None:
        """Return the folder with the highest number, if there is one."""
        return max(self._known(), key=_number_of, default=None)

    def _parent(self) -> Path:
        return require_folder(self._project_dir, "project_dir") / "checkpoints"

    def _known(self) -> list[Path]:
        return sorted(self._parent().glob("checkpoint_*"), key=_number_of)


def require_folder(folder: Any, what: str) -> Path:
    """Return a folder that was given.

    Raises:
        ConfigError: None was, or something else than a path.
    """
    if folder is None:
        msg = f"{what} is missing: give a folder, or a project_config with automatic_checkpoint_naming=True"
        raise ConfigError(msg)
    if not isinstance(folder, str | os.PathLike):
        msg = f"{what} must be the path of a folder, got {folder!r:.80}"
        raise ConfigError(msg)
    return Path(folder)


def _number_of(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])


def write(value: Any, path: Path) -> None:
    """Write a value whole or not at all, with its tensors on the CPU."""
    with atomic_part(path) as part, part.open("wb") as file:
        torch.save(recursive_to(value, torch.device("cpu")), file)
