"""Classes and functions of the main module, which is another module in a worker.

They are sent once, by value, and then named by a key. Each time they are pickled again and compared, and sent
again when they have changed. A result of the program's class goes back by the key of the class: so it is of
that very class, whatever its name means by then, and the worker's state of the class does not overwrite the
program's (test_results_are_of_the_class_that_their_items_were_of).
"""

import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tp_core.ranks import dumps_by_value

_received: dict[str, Any] = {}  # in a worker: the definition of each key
_keys: dict[Any, str] = {}  # there, too: the keys of classes that came from the parent


class Definitions:
    """The definitions that each worker of a runner has got."""

    def __init__(self) -> None:
        self._sent: dict[int, dict[str, bytes]] = {}
        # Kept alive here: a worker may return instances of classes that the program has dropped.
        self._classes = {key: kind for kind, key in _trackers()[0].items()}

    def key_of(self, referred: dict[str, Any]) -> Callable[[Any], str | None]:
        """Return a function that gives keys to a pickler, and notes their definitions in ``referred``."""
        from cloudpickle import cloudpickle

        def key_of(obj: Any) -> str | None:
            if obj.__module__ != "__main__":
                return None
            current: Any = sys.modules["__main__"]
            for name in obj.__qualname__.split("."):
                current = getattr(current, name, None)
            if current is not obj:
                return None  # by value each time: another object has its name, or it has none
            key: str = obj.__qualname__
            if isinstance(obj, type):
                # Private to cloudpickle: by its own key, cloudpickle gives a class back as the same object.
                key = cloudpickle._get_or_create_tracker_id(obj)
            referred[key] = obj
            return key

        return key_of

    def unsent(self, worker: int, referred: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the definitions, pickled, that a worker lacks for something that refers to them."""
        sent = self._sent.get(worker, {})
        unsent = {}
        for key, obj in referred.items():
            pickled = dumps_by_value(obj, protocol=5)
            if sent.get(key) != pickled:
                unsent[key] = pickled
        return unsent

    def note_sent(self, worker: int, unsent: Mapping[str, bytes], referred: Mapping[str, Any]) -> None:
        self._sent.setdefault(worker, {}).update(unsent)
        self._classes.update({key: referred[key] for key in unsent})

    def forget(self, worker: int) -> None:
        """Note that a worker has no definitions, or may have failed to unpickle some."""
        self._sent.pop(worker, None)


class SentDefinitions:
    """Definitions that travel ahead of items; the worker learns them by unpickling this object."""

    def __init__(self, unsent: Mapping[str, bytes]) -> None:
        self._unsent = dict(unsent)

    def __reduce__(self) -> tuple[Any, ...]:
        return _define, (self._unsent,)


def _define(unsent: Mapping[str, bytes]) -> None:
    for key, data in unsent.items():
        definition = pickle.loads(data)
        _received[key] = definition
        if isinstance(definition, type):
            _keys[definition] = key


def find_definition(key: str) -> Any:
    """Return the definition of a key, in a worker or in the program."""
    definition = _received.get(key)
    if definition is None:
        return _trackers()[1][key]
    return definition


def remember_program() -> None:
    """Note, in a worker, which classes came with the program."""
    _keys.update(_trackers()[0])


def key_in_worker(obj: Any) -> str | None:
    """Return the key of a class that came from the parent."""
    return _keys.get(obj)


def _trackers() -> tuple[Any, Any]:
    """Return cloudpickle's tables: keys by class, and classes by key."""
    module: Any = sys.modules.get("cloudpickle.cloudpickle")
    if module is None:  # nothing was pickled by value
        return {}, {}
    # Private to cloudpickle: test_results_are_of_the_class_that_their_items_were_of notices their loss.
    return module._DYNAMIC_CLASS_TRACKER_BY_CLASS, module._DYNAMIC_CLASS_TRACKER_BY_ID
