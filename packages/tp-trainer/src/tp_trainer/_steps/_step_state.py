"""What a step keeps from call to call, beside the model: counters, lists and tensors of its own."""

import functools
import inspect
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tp_trainer._steps._step import Step

log = logging.getLogger("tp_trainer")

_MOST_COMPARED = 64  # items of a list or dict


def step_values(step: Step) -> dict[str, object]:
    """Return what shows a change of a step's numbers, tensors, lists and dicts, by their names.

    These are the variables that a function takes from around it, and the attributes of a method's object.
    """
    function: Any = step
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    try:
        found = inspect.getclosurevars(getattr(function, "__func__", function))
    except (TypeError, ValueError):  # not written in Python, or a variable has no value yet
        variables: dict[str, Any] = {}
    else:
        variables = {**found.globals, **found.nonlocals}
    if owner is not None and not isinstance(owner, nn.Module):
        variables |= {f"self.{name}": value for name, value in getattr(owner, "__dict__", {}).items()}
    values = {name: _seen(value) for name, value in variables.items()}
    return {name: value for name, value in values.items() if value is not None}


def warn_step_state(step: Step, before: Mapping[str, object], parts: int) -> None:
    """Warn of what a step has changed since ``before``, where it runs once for each part of a batch."""
    after = step_values(step)
    changed = [name for name in after if after[name] != before.get(name)]
    if changed:
        log.warning(
            "the step changes %s, and runs once for each of the batch's %d parts, side by side: a count of "
            "steps counts parts, and results depend on which part comes first. Change it in a callback's "
            "on_step_end, which comes once a step, or take a backend that runs the step once: ddp, fsdp",
            ", ".join(map(repr, changed)),
            parts,
        )


def _seen(value: object) -> object:
    if isinstance(value, list | deque):
        return len(value), [_seen_item(item) for item in list(value)[:_MOST_COMPARED]]
    if isinstance(value, dict):
        return len(value), [_seen_item(item) for item in list(value.values())[:_MOST_COMPARED]]
    return _seen_item(value)


def _seen_item(value: object) -> object:
    if isinstance(value, int | float):
        return repr(value)  # NaN equals itself so
    if isinstance(value, Tensor):
        # Private to torch: there is no public counter of a tensor's changes in place.
        return id(value), value._version
    return None
