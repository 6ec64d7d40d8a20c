"""Copies of an optimizer's plain values, to make several steps from the same ones."""

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class PlainValues:
    """The plain values in a dict as they are now, to put them back: numbers, tensors, containers of these.

    A key that is made later is removed then. Tensors, lists and dicts get their values back in place: others
    may have the same, as a scheduler holds the tensor of the learning rate.

    Args:
        values: The dict.
        without: Keys that it leaves alone.
    """

    def __init__(self, values: dict[Any, Any], *, without: Collection[Any] = ()) -> None:
        self._values, self._without = values, without
        self._before = self._now()
        self._objects = {key: values[key] for key in self._before}
        self._left = self._before

    def restore(self) -> None:
        """Put the values back."""
        for key in self._now().keys() - self._before.keys():
            del self._values[key]
        for key, value in self._before.items():
            self._put(key, value)

    def note(self) -> None:
        """Record the present values, for `commit`."""
        self._left = self._now()

    def commit(self) -> None:
        """Take the values of the last `note` where nothing has changed since the first ones were put back."""
        now = self._now()
        for key, value in self._left.items():
            if _same(now.get(key), self._before.get(key)):
                self._put(key, value)

    def _put(self, key: Any, value: Any) -> None:
        own = self._objects.get(key)
        if isinstance(value, Tensor) and isinstance(own, Tensor) and own.shape == value.shape:
            self._values[key] = own.copy_(value)
            return
        self._values[key] = copied = copy_of(value)
        if type(own) is list and type(copied) is list:
            own[:] = copied
            self._values[key] = own
        elif type(own) is dict and type(copied) is dict:
            own.clear()
            own.update(copied)
            self._values[key] = own

    def _now(self) -> dict[Any, Any]:
        return {
            key: copy_of(value)
            for key, value in self._values.items()
            if key not in self._without and self._takes(value)
        }

    def _takes(self, value: object) -> bool:
        if isinstance(value, dict):
            # Not one by parameter, say: its keys would be copied.
            return all(isinstance(key, str | int) for key in value) and all(map(self._takes, value.values()))
        if isinstance(value, list | tuple):
            return all(map(self._takes, value))
        return type(value) is Tensor or value is None or isinstance(value, int | float | complex)


class CommonValues:
    """The values of an optimizer that belong to no parameter: its attributes, and state under other keys.

    Some optimizers count their steps there.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = {p for group in optimizer.param_groups for p in group["params"]}
        attributes = vars(optimizer)
        hooks = [name for name in attributes if name.startswith("_optimizer_")]
        self._attributes = PlainValues(attributes, without={"defaults", "param_groups", "state", *hooks})
        self._state = PlainValues(optimizer.state, without=parameters)

    def restore(self) -> None:
        """Put the values back."""
        self._attributes.restore()
        self._state.restore()

    def note(self) -> None:
        """Record what the steps of single matrices have left."""
        self._attributes.note()
        self._state.note()

    def commit(self) -> None:
        """Take what these steps have left where the step after them has changed nothing.

        One that counts within its loop over groups counts nothing if no group is left for that step.
        """
        self._attributes.commit()
        self._state.commit()


def copy_of(value: Any) -> Any:
    """Return a copy that stays as it is when tensors and containers are changed in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict | list | tuple):
        return copy.deepcopy(value)
    return value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)
