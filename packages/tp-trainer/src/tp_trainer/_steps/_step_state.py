"""What a step keeps from call to call, beside the model: counters, lists and tensors of its own."""

import functools
import inspect
import itertools
import logging
from collections import deque
from typing import Any

from torch import Tensor, nn
from tp_core.data import StepOutput
from tp_core.plugins import Session

from tp_trainer._steps._step import RunStep, Step

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


class StepStateWatch:
    """A check that a step changes nothing of its own where it runs several times for a batch.

    It looks at the first call of `run`, the second, the fourth and so on: a step may begin to count later.

    Attributes:
        looks: Whether the check is of use: a step may run several times, and has not been warned of.
    """

    def __init__(self, session: Session) -> None:
        self.looks = session.runs_step_in_parts or len(session.job.devices) > 1
        self._calls = 0

    def run(self, run: RunStep, step: Step, model: nn.Module, batch: Any, *, own: Step) -> StepOutput:
        """Run ``step``, and warn of what the user's ``own`` step within it changes."""
        self._calls += 1
        if not self.looks or self._calls & (self._calls - 1):
            return run(step, model, batch)
        calls = itertools.count()  # which threads may share

        def counted(model: Any, batch: Any) -> StepOutput:
            next(calls)
            return step(model, batch)

        counted.wrapped_step = step  # type: ignore[attr-defined]  # functions take any
        before = step_values(own)
        output = run(counted, model, batch)
        after = step_values(own)
        changed = [name for name in after if after[name] != before.get(name)]
        if changed and next(calls) > 1:
            self.looks = False
            log.warning(
                "the step changes %s, and runs once for each part of a batch: a count of steps counts "
                "parts, and results may depend on which part comes first. For the number of the step read "
                "run.step of the run that a callback gets; change other state in a callback's on_step_end, "
                "which comes once a step; or take a backend that runs the step once: ddp, fsdp",
                ", ".join(map(repr, changed)),
            )
        return output


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
