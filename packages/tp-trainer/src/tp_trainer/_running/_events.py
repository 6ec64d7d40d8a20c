"""The events of a run, sent to the callbacks that override them and to no others."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tp_core.plugins import Callback

__all__ = ["Events"]

log = logging.getLogger("tp_trainer")

_NAMES = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Events:
    """Sends the events of a run.

    Args:
        callbacks: Those of the run, in the order in which they are called.
        joined: The names of those that no script gave: one that fails is left out, and named in the log.

    Attributes:
        callbacks: Those that are left.
    """

    def __init__(self, callbacks: Iterable[Callback], joined: Mapping[Callback, str]) -> None:
        self.callbacks = list(callbacks)
        self._joined = joined
        self._find()

    def _find(self) -> None:
        self._calls: dict[str, list[tuple[Callable[..., None], Callback | None]]] = {
            name: [
                (getattr(one, name), one if one in self._joined else None)
                for one in self.callbacks
                if _overrides(one, name)
            ]
            for name in _NAMES
        }

    def has(self, name: str) -> bool:
        """Whether somebody wants to know of this event."""
        return bool(self._calls[name])

    def send(self, name: str, *arguments: Any) -> None:
        """Tell of an event."""
        for call, joined in self._calls[name]:
            if joined is None:
                call(*arguments)
                continue
            try:
                call(*arguments)
            except Exception:
                which = self._joined[joined]
                log.exception("the callback %r failed in %s and is left out of the run", which, name)
                self.callbacks = [other for other in self.callbacks if other is not joined]
                self._find()

    def states(self) -> dict[str, Callback]:
        """Return the callbacks by the names under which checkpoints keep their state."""
        numbers: dict[str, int] = {}
        named = {}
        for callback in self.callbacks:
            kind = type(callback).__name__
            number = numbers[kind] = numbers.get(kind, -1) + 1
            named[f"{kind}:{number}"] = callback
        return named


def _overrides(callback: Callback, name: str) -> bool:
    return name in vars(callback) or getattr(type(callback), name) is not getattr(Callback, name)
