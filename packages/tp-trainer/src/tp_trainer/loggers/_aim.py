"""Numbers in a run of Aim."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tp_core.internal import check_installed
from tp_core.plugins import Logger, RunInfo, RunStatus


class AimLogger(Logger):
    """Logs to Aim. Its store is a folder, which ``aim up`` shows.

    A resumed run keeps its hash, and repeated steps replace the earlier ones. Hyperparameters are the run's
    ``hparams``; its ``run`` has environment, versions and selection.

    Args:
        experiment: The experiment; by default Aim's own.
        run_name: The name of the run.
        repo: The folder of the store ``.aim``, or the address of a server; the working folder by default.

    Raises:
        ConfigError: The package aim is not installed.
    """

    name: ClassVar[str] = "aim"

    def __init__(
        self,
        experiment: str | None = None,
        *,
        run_name: str | None = None,
        repo: str | os.PathLike[str] | None = None,
    ) -> None:
        check_installed("aim", by="AimLogger", extra="tp-trainer[aim]")
        if repo is not None and "://" not in os.fspath(repo):
            repo = Path(repo).absolute()
        self._repo = None if repo is None else os.fspath(repo)
        self._experiment, self._run_name = experiment, run_name
        self._hash: str | None = None
        self._run: Any = None

    def open(self, info: RunInfo) -> None:
        from aim import Run

        self._run = Run(
            self._hash if info.resumed else None,
            repo=self._repo,
            experiment=self._experiment,
            force_resume=info.resumed,  # a killed process has left its lock
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        self._hash = str(self._run.hash)
        if self._run_name is not None:
            self._run.name = self._run_name
        self._run["hparams"] = _plain(info.hyperparameters)
        self._run["run"] = {
            "environment": _plain(info.environment),
            "versions": _plain(info.versions),
            "selection": str(info.selection),
        }

    def log(self, numbers: Mapping[str, float], *, step: int, epoch: int) -> None:
        if self._run is not None:
            for name, value in numbers.items():
                self._run.track(float(value), name=name, step=step, epoch=epoch)

    def event(self, kind: str, facts: Mapping[str, Any], *, step: int, epoch: int) -> None:  # noqa: ARG002
        """Set the latest event of each kind on the run."""
        if self._run is not None:
            self._run[f"last_{kind}"] = {"step": step, **_plain(facts)}

    def close(self, status: RunStatus) -> None:
        if self._run is not None:
            self._run["status"] = status
            self._run.close()
            self._run = None

    def state_dict(self) -> dict[str, Any]:
        return {"hash": self._hash}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._hash = state["hash"]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that Aim can store: numbers, texts, and lists and dicts of them."""
    return {str(key): _plain_value(value) for key, value in values.items()}


def _plain_value(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, list | tuple):
        return [_plain_value(entry) for entry in value]
    return str(value)
