"""All-gather among the parts of a step: each part gives rows and gets those of all, with gradients."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tp_core.errors import StepError
from tp_core.internal import leave_to_others

# Each part runs in a thread of its own: the gather of its step, its number, and how often it has gathered.
_part = threading.local()


def current_part_gather() -> "PartGather | None":
    """Return the gather of the step that this thread runs a part of; ``None`` outside of such steps."""
    return getattr(_part, "gather", None)


class PartGather:
    """The all-gathers in one call of a step on several parts, as many as the step asks for.

    Args:
        count: The number of parts.
        order: The place in the batch of each row of the concatenated parts; ``None`` if they are in order.
        in_turn: If ``True``, the parts run one after the other and cannot wait for each other.
    """

    def __init__(self, count: int, order: Sequence[int] | None, *, in_turn: bool) -> None:
        self._count, self._in_turn = count, in_turn
        self._positions = None if order is None else sorted(range(len(order)), key=order.__getitem__)
        # Guards the rows and the ended parts; each part's thread waits here for the rows of the others.
        self._changed = threading.Condition()
        self._gathered: list[dict[int, _Rows]] = []  # of each gather, the rows by the number of the part
        self._ended_parts: set[int] = set()
        self._error: BaseException | None = None

    def run(
        self,
        run_all: Callable[[Callable[[nn.Module, tuple[int, Any]], Any], list[tuple[int, Any]]], list[Any]],
        step: Callable[[nn.Module, Any], Any],
        parts: Sequence[Any],
    ) -> list[Any]:
        """Return ``run_all(step, parts)``; within it, each part can gather.

        Raises:
            StepError: Some parts gathered more often than others.
        """

        def run_part(replica: nn.Module, numbered: tuple[int, Any]) -> Any:
            number, part = numbered
            outer = current_part_gather()
            _part.gather, _part.number, _part.times = self, number, 0
            try:
                return step(replica, part)
            except _PartEndedError:  # it follows from the end of another part, which has the cause
                raise
            except BaseException as error:
                self._error = self._error or error
                raise
            finally:
                _part.gather = outer
                # A part that waits for this one, which has returned or failed, would do so for ever.
                with self._changed:
                    self._ended_parts.add(number)
                    self._changed.notify_all()

        try:
            return run_all(run_part, list(enumerate(parts)))
        except _PartEndedError:
            if self._error is not None:  # why the part ended that another one waited for
                raise self._error from None
            msg = (
                "all_gather() was called for some parts of the batch, and not for others: every part of a "
                "step has to call it as often, as all ranks do"
            )
            raise StepError(msg) from None

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all parts, in the order of the batch, on the device of ``rows``.

        Collectives: forward all-gathers the rows by copies between devices; backward copies each part's
        share of the gradient back, where autograd sums the shares.

        Raises:
            StepError: The parts run one after the other, in a mode of torch, say; or their rows differ.
        """
        if self._in_turn:
            msg = (
                "all_gather() cannot bring the parts of the batch together within a TorchFunctionMode or "
                "TorchDispatchMode, in which they run one after the other; leave the mode, or take another "
                "backend: Trainer(backend='dp-gather')"
            )
            raise StepError(msg)
        number, time = _part.number, _part.times
        _part.times += 1
        with self._changed:
            if len(self._gathered) == time:  # the first part here; none is two gathers ahead of another
                self._gathered.append({})
            given = self._gathered[time]
            given[number] = _Rows(rows, _record_event(rows))
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(given) == self._count or self._ended_parts - given.keys())
            if len(given) < self._count:
                raise _PartEndedError
        in_order = [given[i] for i in range(self._count)]
        leave_to_others([part.tensor for i, part in enumerate(in_order) if i != number])
        shapes = {(tuple(part.tensor.shape[1:]), part.tensor.dtype) for part in in_order}
        if len(shapes) > 1:
            listed = " and ".join(sorted(f"(n, {', '.join(map(str, s))}) {d}" for s, d in shapes))
            msg = f"the parts of the batch gather rows that do not go together: {listed}"
            raise StepError(msg)
        whole = torch.cat([_copy_to(rows.device, part) for part in in_order])
        if self._positions is None or len(self._positions) != len(whole):
            return whole
        return whole[torch.tensor(self._positions, device=whole.device)]


class _Rows(NamedTuple):
    """The rows that one part gives.

    Attributes:
        tensor: The rows, on the part's device.
        ready: An event on an accelerator, after which they are computed; ``None`` on the CPU.
    """

    tensor: Tensor
    ready: Any


class _PartEndedError(Exception):
    """Error of a part that waits for one that has ended."""


def _record_event(rows: Tensor) -> Any:
    if rows.device.type == "cpu":
        return None
    # The host does not wait for the rows; the stream of each part that copies them does, see _copy_to.
    event = torch.Event(device=rows.device)
    event.record(torch.accelerator.current_stream(rows.device))
    return event


def _copy_to(device: torch.device, rows: _Rows) -> Tensor:
    """Return rows on a device, ordered after the work that computes them.

    A thread has current streams of its own: the copy is queued on those of this thread, the rows on those of
    the part that computes them. Without the event the copy could read memory that is not written yet.
    """
    if rows.ready is not None:
        for end in {rows.tensor.device, device}:
            if end.type != "cpu":
                torch.accelerator.current_stream(end).wait_event(rows.ready)
    return rows.tensor.to(device)
