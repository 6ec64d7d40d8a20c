"""Trackers: loggers of tp by their names, and trackers of Accelerate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tp_core.errors import ConfigError
from tp_core.plugins import Logger, RunInfo, registry

from tp_accelerate._arguments import closest_name


class Trackers:
    """The trackers of ``log_with``, which are open on rank 0.

    Args:
        log_with: Names of tp's loggers, trackers of Accelerate, or both.
        folder: The folder of their files, if there is one.
        is_main: Whether this process is rank 0.
    """

    def __init__(self, log_with: Any, folder: Any, *, is_main: bool) -> None:
        if log_with is None:
            log_with = []
        if isinstance(log_with, list | tuple):
            self._wanted = list(log_with)
        else:
            self._wanted = [log_with]
        self._folder = folder
        self._is_main = is_main
        self._open: list[Any] = []
        self._is_begun = False  # whether `init_trackers` was called
        if self._wanted:
            self._factories()

    def open(self, project_name: str, config: Mapping[str, Any]) -> None:
        """Open all of them on rank 0.

        Raises:
            ConfigError: tp has no logger of a name.
        """
        factories = self._factories()
        self._is_begun = True
        if not self._is_main:
            return
        if self._folder is None:
            folder = None
        else:
            folder = Path(self._folder) / project_name
        info = RunInfo(folder=folder, hyperparameters=dict(config))
        for wanted in self._wanted:
            if _is_tracker(wanted):
                wanted.store_init_configuration(dict(config))
                self._open.append(wanted)
            else:
                logger = factories[str(getattr(wanted, "value", wanted))].make()
                logger.open(info)
                self._open.append(logger)

    def _factories(self) -> dict[str, Any]:
        """Return tp's loggers by name, all that are wanted among them."""
        factories = {contribution.item.name: contribution.item for contribution in registry.loggers()}
        for wanted in self._wanted:
            name = str(getattr(wanted, "value", wanted))
            if not _is_tracker(wanted) and name not in factories:
                meant = closest_name(name, factories)
                hint = f"those there are: {', '.join(sorted(factories))}"
                if meant:
                    hint = f"did you mean {meant!r}?"
                msg = f"log_with has {name!r}, and tp has no logger of that name; {hint}"
                raise ConfigError(msg)
        return factories

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Pass numbers to all that are open.

        Raises:
            ConfigError: ``log_with`` names some, and none was opened.
        """
        if self._wanted and not self._is_begun:
            msg = (
                "log() would write nothing; write accelerator.init_trackers(name) first, which opens log_with"
            )
            raise ConfigError(msg)
        for tracker in self._open:
            if isinstance(tracker, Logger):
                numbers = {name: float(value) for name, value in values.items()}
                tracker.log(numbers, step=step or 0, epoch=1)
            else:
                tracker.log(values, step=step)

    def find(self, name: str) -> Any:
        """Return the tracker of a name; on other ranks than 0 one that does nothing.

        Raises:
            ConfigError: There is no such tracker.
        """
        if not self._is_main:
            return _NoTracker()
        for tracker in self._open:
            if tracker.name == name:
                return tracker
        msg = f"there is no tracker {name!r} in log_with; init_trackers() opens them"
        raise ConfigError(msg)

    def close(self) -> None:
        """Close all that are open."""
        for tracker in self._open:
            if isinstance(tracker, Logger):
                tracker.close("finished")
            else:
                tracker.finish()
        self._open.clear()


def _is_tracker(value: Any) -> bool:
    """Return whether a value is a tracker of Accelerate, rather than a name."""
    return hasattr(value, "store_init_configuration")


class _NoTracker:
    """What ``get_tracker`` returns on ranks without one: everything of it does nothing."""

    name = "none"

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None
