"""The order in which backward passes the nodes of replicas, whichever threads have made them."""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tp_core._devices._tree import containers
from tp_core.replicas._mirror import LINK

# Autograd runs the node with the largest number first, of those that are ready. It numbers nodes as they are
# made, in each thread on its own, from 0. So how the nodes of a replica's thread stand to the caller's would
# follow from what both threads did before, and from whether the part ran inline. Sums of three and more
# gradients would be rounded differently from run to run. So each part but the first numbers its nodes again:
# by call, part and place. These numbers are larger than any that torch gives.

_CALL_BITS, _PART_BITS = 32, 24
_calls = itertools.count(1 << 24)  # the first number is beyond what a process makes of nodes
_CONTAINERS = containers()


class _Thread(threading.local):
    """What this thread knows of the part that it runs: the nodes in its graph that others have made."""

    foreign: set[Any] | None = None


_thread = _Thread()


class BackwardOrder:
    """The numbers of the autograd nodes that the parts of one call make."""

    def __init__(self) -> None:
        self._base = next(_calls) << _CALL_BITS
        self._caller = threading.get_ident()

    def call(self, task: Callable[[], Any], *, number: int, part: Any) -> Any:
        """Return ``task()``, and number the nodes of what it returns.

        Args:
            task: What to run. Modes must not be active around it: they would see how nodes are read.
            number: The number of the part.
            part: What the caller gives to the part.
        """
        is_inline = threading.get_ident() == self._caller
        # Nodes of other threads may have the same numbers as those made here.
        foreign = set() if is_inline else set(_nodes_of(part))
        outer, _thread.foreign = _thread.foreign, foreign
        # Private, as the methods of nodes below: torch has no public way to ask for these numbers.
        first = torch._C._autograd._get_sequence_nr()
        try:
            result = task()
        finally:
            _thread.foreign = outer
        last = torch._C._autograd._get_sequence_nr()
        if last != first:
            offset = self._base + (number << _PART_BITS) - first
            are_own = is_inline and not foreign
            nodes = _nodes_of(result)
            for node in nodes:
                place = node._sequence_nr()
                if first <= place < last and (are_own or (node not in foreign and type(node) is not LINK)):
                    node._set_sequence_nr(place + offset)
                    nodes += [following for following, _ in node.next_functions if following is not None]
        return result


def leave_to_others(tensors: Sequence[Tensor]) -> None:
    """Leave the nodes of these tensors, which other parts have made, to the numbers of those parts."""
    if _thread.foreign is not None:
        _thread.foreign.update(_nodes_of(tensors))


def _nodes_of(value: Any) -> list[Any]:
    """Return the last node of each tensor in a value."""
    if type(value) is Tensor:
        return [] if value.grad_fn is None else [value.grad_fn]
    values, seen, nodes = [value], set(), []
    while values:
        found = values.pop()
        if isinstance(found, Tensor):
            if found.grad_fn is not None:
                nodes.append(found.grad_fn)
        elif (container := _CONTAINERS[type(found)]) is not None and id(found) not in seen:
            seen.add(id(found))  # it may contain itself
            values.extend(container.children(found))
    return nodes
