"""A replica's own lists, dicts and sets, where a module has some as plain attributes."""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

__all__ = ["OwnContainers", "is_container"]

_DICTS = {dict, OrderedDict, defaultdict}
_CONTAINERS = {list, set, deque, *_DICTS}
_TORCHS_OWN = {
    *vars(nn.Module()),
    "_flat_weights",
    "_flat_weights_names",
    "_flat_weight_refs",
    "_all_weights",
}


def is_container(name: str, value: Any) -> bool:
    """Return whether an attribute is a container of the module's author, which forward may fill."""
    return type(value) in _CONTAINERS and name not in _TORCHS_OWN


class OwnContainers:
    """Containers of one replica in place of the module's, with what those have when a call begins.

    A forward that leaves something there, such as losses of its layers, would find that of the other parts
    beside its own, and in no order. What is one container in several modules is one in the replica, too.

    Args:
        replica_of: The replica's modules, by the ``id`` of the real ones, whose places they take.
    """

    def __init__(self, replica_of: Mapping[int, nn.Module]) -> None:
        self._replica_of = replica_of
        self._pairs: dict[int, tuple[Any, Any]] = {}

    def own(self, real: Any) -> Any:
        """Return the replica's own container in place of the real one; `refill` has to follow."""
        pair = self._pairs.get(id(real))
        if pair is None:
            pair = self._pairs[id(real)] = real, copy.copy(real)  # the real one is kept, and so its id
        return pair[1]

    def keep(self, real: Iterable[Any]) -> None:
        """Let go of all but these."""
        kept = set(map(id, real))
        self._pairs = {key: pair for key, pair in self._pairs.items() if key in kept}

    def refill(self) -> None:
        """Put into the replica's containers what the real ones have now."""
        known = {key: own for key, (_, own) in self._pairs.items()}
        for real, own in self._pairs.values():
            self._fill(own, real, known)

    def _fill(self, own: Any, real: Any, known: dict[int, Any]) -> None:
        kind = type(real)
        values = real.values() if kind in _DICTS else real
        is_plain = not any(k in _CONTAINERS or issubclass(k, nn.Module) for k in set(map(type, values)))
        if kind is list:
            own[:] = real if is_plain else [self._version(v, known) for v in real]
            return
        own.clear()
        if kind in _DICTS:
            own.update(real if is_plain else {k: self._version(v, known) for k, v in real.items()})
        else:
            (own.extend if kind is deque else own.update)(
                real if is_plain else [self._version(v, known) for v in real]
            )

    def _version(self, value: Any, known: dict[int, Any]) -> Any:
        """Return what stands in the replica's containers for a value in a real one."""
        if isinstance(value, nn.Module):
            return self._replica_of.get(id(value), value)
        if type(value) not in _CONTAINERS:
            return value
        if id(value) not in known:
            known[id(value)] = own = copy.copy(value)
            self._fill(own, value, known)
        return known[id(value)]
