"""What a step keeps from call to call, beside its models: counters, lists, tensors, modules of its own."""

import functools
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from tp_core.output import get_logger
from tp_core.plugins import Session

from tp_trainer._steps._step import Step

log = get_logger("tp_trainer")

Output = TypeVar("Output")
_MOST_COMPARED = 64  # items of a list or dict


def step_values(step: Step, models: Sequence[nn.Module] = ()) -> dict[str, object]:
    """Return what shows a change of a step's numbers, tensors, lists and dicts, by their names.

    These are the variables that a function takes from around it, and the attributes of a method's object. Of
    a module, as a loss with a running mean, these are buffers and attributes, unless it is one of ``models``.
    """
    function: Any = step
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    try:
        closure = inspect.getclosurevars(getattr(function, "__func__", function))
    except (TypeError, ValueError):  # not written in Python, or a variable has no value yet
        variables: dict[str, Any] = {}
    else:
        variables = {**closure.globals, **closure.nonlocals}
    if owner is not None and not isinstance(owner, nn.Module):
        variables |= {f"self.{name}": value for name, value in getattr(owner, "__dict__", {}).items()}
    trained = {id(module) for model in models for module in model.modules()}
    values = {name: _seen(value, trained) for name, value in variables.items()}
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

    def run(
        self,
        run: Callable[[Callable[..., Any]], Output],
        step: Callable[..., Any],
        models: Sequence[nn.Module],
        *,
        own: Callable[..., Any],
    ) -> Output:
        """Return ``run(step)``, and warn of what the user's ``own`` step within it changes.

        Args:
            run: Runs a step with the models and a batch.
            step: The step.
            models: The models.
            own: The user's step within it.
        """
        self._calls += 1
        if not self.looks or self._calls & (self._calls - 1):
            return run(step)
        calls = itertools.count()  # which threads may share

        def counted(*models_and_batch: Any) -> Any:
            next(calls)
            return step(*models_and_batch)

        counted.wrapped_step = step  # type: ignore[attr-defined]  # functions take any
        before = step_values(own, models)
        output = run(counted)
        after = step_values(own, models)
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


def _seen(value: object, trained: set[int]) -> object:
    if isinstance(value, nn.Module):
        return _seen_module(value, trained)
    if isinstance(value, list | deque):
        return len(value), [_seen_item(item) for item in list(value)[:_MOST_COMPARED]]
    if isinstance(value, dict):
        return len(value), [_seen_item(item) for item in list(value.values())[:_MOST_COMPARED]]
    return _seen_item(value)


def _seen_module(module: nn.Module, trained: set[int]) -> object:
    modules = list(module.modules())
    if any(id(each) in trained for each in modules):
        return None
    kept = [value for each in modules for value in vars(each).values()]
    return [_seen_item(value) for value in (*module.buffers(), *kept)]


def _seen_item(value: object) -> object:
    if isinstance(value, int | float):
        return repr(value)  # NaN equals itself so
    if isinstance(value, Tensor):
        # Private to torch: there is no public counter of a tensor's changes in place.
        return id(value), value._version
    return None
