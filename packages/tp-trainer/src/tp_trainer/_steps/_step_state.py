"""What a step keeps from call to call, beside its models: counters, lists, tensors, modules of its own."""

import functools
import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tp_core import tree_leaves
from tp_core.plugins import Session

from tp_trainer._steps._step import Step

log = logging.getLogger("tp_trainer")

Output = TypeVar("Output")
Values = Mapping[str, list[object]]
"""A step's numbers and tensors by the names of the variables that have them, after their number."""

_MOST_COMPARED = 64  # items of a list or dict


def step_values(step: Step, models: Sequence[nn.Module] = ()) -> Values:
    """Return a step's numbers, tensors, and those in lists and dicts, by their names.

    These are the variables that a function takes from around it, and the attributes of a method's object. Of
    a module, as a loss with a running mean, these are buffers and attributes, unless it is one of ``models``.
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
    trained = {id(module) for model in models for module in model.modules()}
    return {name: _items_of(value, trained) for name, value in variables.items()}


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
        parts = _Parts(step, functools.partial(step_values, own, models))

        def call(*models_and_batch: Any) -> Any:
            return parts.call(*models_and_batch)

        call.wrapped_step = step  # type: ignore[attr-defined]  # functions take any
        output = run(call)
        changed = parts.changed()
        if changed:
            self.looks = False
            log.warning(
                "the step changes %s, and runs once for each part of a batch: a count of steps counts "
                "parts, and results may depend on which part comes first. For the number of the step read "
                "run.step of the run that a callback gets; change other state in a callback's on_step_end, "
                "which comes once a step; or take a backend that runs the step once: ddp, fsdp",
                ", ".join(map(repr, changed)),
            )
        return output


class _Parts:
    """The calls of a step for the parts of one batch, and what one of them leaves to the next.

    A step may change what it has for itself: hooks of modules leave features in a dict, where the step finds
    them. It differs from one device only if a part finds what another one has left there. None does where
    each part begins after the one before has ended, uses no tensor of that one, and leaves new tensors alone.
    """

    def __init__(self, step: Callable[..., Any], values: Callable[[], Values]) -> None:
        self._step, self._values = step, values
        self._before = {name: _marks(items) for name, items in values().items()}
        self._lock = threading.Lock()  # parts may run in threads
        self._count = self._running = 0
        self._threads: set[int] = set()
        self._overlap = False
        self._renewed: set[str] | None = None  # the names of what each part but the first has left anew

    @property
    def _in_turn(self) -> bool:
        return len(self._threads) == 1 and not self._overlap

    def call(self, *models_and_batch: Any) -> Any:
        """Run the step for a part."""
        with self._lock:
            is_first = self._count == 0
            self._count += 1
            self._threads.add(threading.get_ident())
            self._overlap = self._overlap or self._running > 0
            self._running += 1
        try:
            if is_first or not self._in_turn:
                return self._step(*models_and_batch)
            return self._call_next(models_and_batch)
        finally:
            with self._lock:
                self._running -= 1

    def _call_next(self, models_and_batch: Sequence[Any]) -> Any:
        """Run the step for a part after others, and note what it leaves anew."""
        found = {n: items for n, items in self._values().items() if _marks(items) != self._before.get(n)}
        left: dict[str, list[Tensor]] = {}
        for name, items in found.items():
            before = self._before.get(name, [])
            left[name] = [item for item in items if isinstance(item, Tensor) and _mark(item) not in before]
        with _noting_uses([tensor for tensors in left.values() for tensor in tensors]) as used:
            output = self._step(*models_and_batch)
        after = self._values()
        renewed = set()
        for name, items in found.items():
            if used.isdisjoint(map(id, left[name])) and _is_new(after.get(name, []), items):
                renewed.add(name)
        self._renewed = renewed if self._renewed is None else self._renewed & renewed
        return output

    def changed(self) -> list[str]:
        """Return the names of what the parts have changed, and may have found of each other."""
        after = self._values()
        if self._count < 2:
            return []
        names = [name for name, items in after.items() if _marks(items) != self._before.get(name)]
        renewed = self._renewed if self._in_turn and self._renewed is not None else set()
        return [name for name in names if name not in renewed]


def _is_new(after: Sequence[object], items: Sequence[object]) -> bool:
    """Return whether items are the same, but for tensors that are none of those there were."""
    if len(after) != len(items):
        return False
    there = set(map(id, items))
    for new, old in zip(after, items, strict=True):
        if isinstance(new, Tensor) and isinstance(old, Tensor):
            if new is not old and id(new) in there:
                return False
        elif _mark(new) != _mark(old):
            return False
    return True


@contextmanager
def _noting_uses(tensors: Sequence[Tensor]) -> Iterator[set[int]]:
    """Yield a set that gets the ids of those of the tensors that operations use within the context.

    For it they change their class, as torch's lazy parameters do: a mode would be in the step's way. Those
    that have a class of their own already count as used.
    """
    used = {id(tensor) for tensor in tensors if type(tensor) is not Tensor}
    plain = [tensor for tensor in tensors if type(tensor) is Tensor]

    class Left(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
        ) -> Any:
            leaves = tree_leaves([list(args), kwargs or {}])
            # It may be within an object that is no container.
            used.update({id(leaf) for leaf in leaves if type(leaf) is cls} or map(id, plain))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    try:
        for tensor in plain:
            tensor.__class__ = Left
        yield used
    finally:
        for tensor in plain:
            tensor.__class__ = Tensor


def _items_of(value: object, trained: set[int]) -> list[object]:
    """Return what is looked at of a value; nothing of the models that are trained."""
    if isinstance(value, nn.Module):
        modules = list(value.modules())
        if any(id(each) in trained for each in modules):
            return []
        return [*value.buffers(), *(kept for each in modules for kept in vars(each).values())]
    if isinstance(value, list | deque):
        return [len(value), *list(value)[:_MOST_COMPARED]]
    if isinstance(value, dict):
        return [len(value), *list(value.values())[:_MOST_COMPARED]]
    return [value]


def _marks(items: Sequence[object]) -> list[object]:
    return [_mark(item) for item in items]


def _mark(item: object) -> object:
    """Return what shows a change of a number or a tensor."""
    if isinstance(item, int | float):
        return repr(item)  # NaN equals itself so
    if isinstance(item, Tensor):
        # Private to torch: there is no public counter of a tensor's changes in place.
        return id(item), 0 if item.is_inference() else item._version
    return None
