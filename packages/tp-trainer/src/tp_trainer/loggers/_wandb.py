"""Numbers in a run of Weights & Biases."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from tp_core.messages import check_installed
from tp_core.plugins import Logger, RunInfo, RunStatus
from tp_core.secrets import mask_arguments

from tp_trainer._peer_names import explain_fields


@explain_fields
class WandbLogger(Logger):
    """Logs to Weights & Biases, under one run for all parts of a resumed run.

    The step of W&B is the number of optimizer steps. A resumed run keeps its id; W&B keeps its first values
    of a step, so repeated steps appear once. With ``mode="offline"`` nothing is sent: later, use ``wandb sync
    --append`` in the order of the folders.

    Args:
        project: The project; by default the environment's.
        mode: "online", "offline" or "disabled"; by default the environment's.
        folder: The folder of W&B's files; by default the folder of the run's checkpoints, or the
            environment's.
        **settings: Further arguments of ``wandb.init``: ``name``, ``entity``, ``tags``, ``settings`` ...

    Raises:
        ConfigError: The package wandb is not installed.
    """

    name: ClassVar[str] = "wandb"

    def __init__(
        self,
        project: str | None = None,
        *,
        mode: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        check_installed("wandb", by="WandbLogger", extra="tp-trainer[wandb]")
        if folder is None:
            self._folder = None
        else:
            self._folder = Path(folder).absolute()
        self._settings = {"project": project, "mode": mode, **settings}
        self._id: str | None = None
        self._run: Any = None

    def open(self, info: RunInfo) -> None:
        import wandb

        folder = self._folder or info.folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "dir": None if folder is None else str(folder),
            "reinit": "finish_previous",
            **self._settings,
        }
        if self._id is not None and info.resumed:
            settings |= {"id": self._id, "resume": "allow"}
        with _masked_command():
            self._run = wandb.init(**settings)
        self._id = str(self._run.id)
        self._run.config.update(dict(info.hyperparameters), allow_val_change=True)
        facts = {
            "environment": dict(info.environment),
            "versions": dict(info.versions),
            "selection": info.selection,
        }
        self._run.config.update({"run": facts}, allow_val_change=True)

    def log(self, numbers: Mapping[str, float], *, step: int, epoch: int) -> None:
        if numbers and self._run is not None:
            self._run.log({**numbers, "epoch": epoch}, step=step)

    def event(self, kind: str, facts: Mapping[str, Any], *, step: int, epoch: int) -> None:  # noqa: ARG002
        """Set the latest event of its kind in the summary."""
        if self._run is not None:
            self._run.summary[f"last_{kind}"] = {"step": step, **facts}

    def close(self, status: RunStatus) -> None:
        """End the run; mark it as failed if it was interrupted or failed."""
        if self._run is not None:
            exit_code = 0 if status == "finished" else 1
            self._run.finish(exit_code=exit_code)
            self._run = None

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"]


@contextmanager
def _masked_command() -> Iterator[None]:
    """Mask secrets in ``sys.argv`` within the context: W&B records the program's arguments by itself."""
    arguments = sys.argv[:]
    sys.argv[:] = mask_arguments(arguments)
    try:
        yield
    finally:
        sys.argv[:] = arguments
