"""Classes and functions of the main module, which is another one in a worker: sent once, then named by a key.

What a worker gets is pickled by value, and again when it has changed: each time it is pickled anew, and
compared. Results whose class came from the program go back by its key alone, so that they are of that very
class, whatever its name means by then, and nothing of the worker's is written into it.
"""

import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

_told: dict[str, Any] = {}  # in a worker: what each key stands for
_keys: dict[Any, str] = {}  # there, too: the keys of classes that came from the parent


class Definitions:
    """What the workers of a runner have been told."""

    def __init__(self) -> None:
        self._told: dict[int, dict[str, bytes]] = {}
        # A worker may return instances of classes that nobody else remembers.
        self._kept = {key: kind for kind, key in _trackers()[0].items()}

    def key_of(self, found: dict[str, Any]) -> Callable[[Any], str | None]:
        """Return what gives keys to a pickler, and notes in ``found`` what they stand for."""
        from cloudpickle import cloudpickle

        def key_of(obj: Any) -> str | None:
            if obj.__module__ != "__main__":
                return None
            current: Any = sys.modules["__main__"]
            for name in obj.__qualname__.split("."):
                current = getattr(current, name, None)
            if current is not obj:
                return None  # it is of no use to keep: another one has its name, or it never had one
            is_class = isinstance(obj, type)
            key: str = cloudpickle._get_or_create_tracker_id(obj) if is_class else obj.__qualname__
            found[key] = obj
            return key

        return key_of

    def news(self, worker: int, found: Mapping[str, Any]) -> dict[str, bytes]:
        """Return what a worker must be told before it is sent something that refers to ``found``.

        Raises:
            Exception: Something cannot be pickled.
        """
        import cloudpickle

        told = self._told.get(worker, {})
        data = {key: cloudpickle.dumps(obj, protocol=5) for key, obj in found.items()}
        return {key: pickled for key, pickled in data.items() if told.get(key) != pickled}

    def tell(self, worker: int, news: Mapping[str, bytes], found: Mapping[str, Any]) -> None:
        """Note that a worker is told."""
        self._told.setdefault(worker, {}).update(news)
        self._kept.update({key: found[key] for key in news})

    def forget(self, worker: int) -> None:
        """Note that a worker knows nothing, or may not have understood."""
        self._told.pop(worker, None)


class Told:
    """What is pickled before items: unpickling it tells the worker."""

    def __init__(self, news: Mapping[str, bytes]) -> None:
        self._news = dict(news)

    def __reduce__(self) -> tuple[Any, ...]:
        return _define, (self._news,)


def _define(news: Mapping[str, bytes]) -> None:
    for key, data in news.items():
        _told[key] = found = pickle.loads(data)
        if isinstance(found, type):
            _keys[found] = key


def find(key: str) -> Any:
    """Return what a key stands for, in a worker or in the program."""
    found = _told.get(key)
    return _trackers()[1][key] if found is None else found


def remember_program() -> None:
    """Note, in a worker, which classes came with the program."""
    _keys.update(_trackers()[0])


def key_in_worker(obj: Any) -> str | None:
    """Return the key of a class that came from the parent."""
    return _keys.get(obj)


def _trackers() -> tuple[Any, Any]:
    """Return cloudpickle's keys of classes and classes by keys, by which it keeps them the same."""
    module: Any = sys.modules.get("cloudpickle.cloudpickle")
    if module is None:  # nothing was pickled by value
        return {}, {}
    # Its own names for this are private; tests notice if they go.
    return module._DYNAMIC_CLASS_TRACKER_BY_CLASS, module._DYNAMIC_CLASS_TRACKER_BY_ID
