"""Where the parts of a step meet: each gives rows, and gets those of all, with gradients."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tp_core.errors import StepError

__all__ = ["Meeting", "meeting_here"]

_here = threading.local()


class _Rows(NamedTuple):
    """What one part gives.

    Attributes:
        tensor: Its rows, on its device.
        is_made: An event on an accelerator, after which they are there; ``None`` on the CPU.
    """

    tensor: Tensor
    is_made: Any


class _LeftError(Exception):
    """A part waits for one that has ended."""


class Meeting:
    """One call of a step on several parts, which may meet in it as often as they like.

    Args:
        count: How many parts there are.
        in_turn: Whether they run one after the other, and cannot meet.
        order: Where each row of the concatenated parts stands in the batch; ``None`` if they keep its order.
    """

    def __init__(self, count: int, order: Sequence[int] | None, *, in_turn: bool) -> None:
        self._count, self._in_turn = count, in_turn
        self._place = None if order is None else sorted(range(len(order)), key=order.__getitem__)
        self._changed = threading.Condition()
        self._gathered: list[dict[int, _Rows]] = []
        self._has_ended: set[int] = set()
        self._error: BaseException | None = None

    def run(
        self,
        run_all: Callable[[Callable[[nn.Module, tuple[int, Any]], Any], list[tuple[int, Any]]], list[Any]],
        step: Callable[[nn.Module, Any], Any],
        parts: Sequence[Any],
    ) -> list[Any]:
        """Return ``run_all(step, parts)``, in which each part knows its number and where to meet the others.

        Raises:
            StepError: Some parts wanted to meet others, which did not come.
        """

        def take_part(replica: nn.Module, numbered: tuple[int, Any]) -> Any:
            number, part = numbered
            before = getattr(_here, "meeting", None)
            _here.meeting, _here.number, _here.times = self, number, 0
            try:
                return step(replica, part)
            except _LeftError:
                raise
            except BaseException as error:
                self._error = self._error or error
                raise
            finally:
                _here.meeting = before
                with self._changed:
                    self._has_ended.add(number)
                    self._changed.notify_all()

        try:
            return run_all(take_part, list(enumerate(parts)))
        except _LeftError:
            if self._error is not None:
                raise self._error from None
            msg = (
                "all_gather() was called for some parts of the batch, and not for others: every part of a "
                "step has to call it as often, as all ranks do"
            )
            raise StepError(msg) from None

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all parts, in the order of the batch, on the device of ``rows``.

        Raises:
            StepError: The parts run one after the other, in a mode of torch, say; or their rows differ.
        """
        if self._in_turn:
            msg = (
                "all_gather() cannot bring the parts of the batch together within a TorchFunctionMode or "
                "TorchDispatchMode, or on CPUs with torch.use_deterministic_algorithms(True), in which they "
                "run one after the other; leave that, or take another backend: Trainer(backend='dp-gather')"
            )
            raise StepError(msg)
        number, time = _here.number, _here.times
        _here.times += 1
        with self._changed:
            while len(self._gathered) <= time:
                self._gathered.append({})
            given = self._gathered[time]
            given[number] = _Rows(rows, _event(rows))
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(given) == self._count or self._has_ended - given.keys())
            if len(given) < self._count:
                raise _LeftError
        shapes = {(tuple(given[i].tensor.shape[1:]), given[i].tensor.dtype) for i in range(self._count)}
        if len(shapes) > 1:
            listed = " and ".join(sorted(f"(n, {', '.join(map(str, s))}) {d}" for s, d in shapes))
            msg = f"the parts of the batch gather rows that do not go together: {listed}"
            raise StepError(msg)
        whole = torch.cat([_brought(given[i], rows.device) for i in range(self._count)])
        if self._place is None or len(self._place) != len(whole):
            return whole
        return whole[torch.tensor(self._place, device=whole.device)]


def meeting_here() -> Meeting | None:
    """Return where the part meets the others which this thread runs; ``None`` outside of such steps."""
    return getattr(_here, "meeting", None)


def _event(rows: Tensor) -> Any:
    if rows.device.type == "cpu":
        return None
    event = torch.Event(device=rows.device)
    event.record(torch.accelerator.current_stream(rows.device))
    return event


def _brought(rows: _Rows, device: torch.device) -> Tensor:
    """Return rows on the device of a part, once they are made."""
    source = rows.tensor.device
    if rows.is_made is not None:
        for each in {source, device}:
            if each.type != "cpu":
                torch.accelerator.current_stream(each).wait_event(rows.is_made)
    return rows.tensor.to(device)
