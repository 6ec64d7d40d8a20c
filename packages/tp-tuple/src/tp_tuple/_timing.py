"""How long each part takes on its own device."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from tp_core.replicas import Replicas

from tp_tuple._speeds import Speeds

__all__ = ["Stopwatch", "timed"]


class Stopwatch:
    """Measures the work that is started between its making and `stop`, on the current stream.

    On an accelerator by events: what was queued before, and what other streams and the host do
    meanwhile, is not counted. On the CPU by the clock.

    Args:
        device: Where the work is; it must be the current device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._mark()
        self._end = self._begin

    def stop(self) -> None:
        """End the measurement; nothing is waited for."""
        self._end = self._mark()

    def seconds(self) -> float:
        """Return what was measured, when it is over on the device."""
        if self._device.type == "cpu":
            return float(self._end - self._begin)
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


def timed(
    replicas: Replicas,
    call: Callable[[nn.Module, Any], Any],
    parts: Sequence[Any],
    *,
    counts: Sequence[int] | None,
    speeds: Speeds,
) -> list[Any]:
    """Run the replicas and note how long each took, if the sizes of the parts are known."""
    watches: list[Stopwatch | None] = [None] * len(parts)

    def run(replica: nn.Module, numbered: tuple[int, Any]) -> Any:
        number, part = numbered
        watch = watches[number] = Stopwatch(replicas.devices[number])
        result = call(replica, part)
        watch.stop()
        return result

    outputs = replicas.run(run, list(enumerate(parts)))
    if counts is not None:
        seconds = [0.0 if watch is None else watch.seconds() for watch in watches]
        speeds.note(counts=list(counts), seconds=seconds)
    return outputs
