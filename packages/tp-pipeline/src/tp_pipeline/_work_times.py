"""When a device began and ended the work of a batch."""

import time
from typing import Any

import torch

from tp_pipeline._schedule import StageWork


class WorkTimes:
    """Notes when a device does work.

    On an accelerator the host only queues work, and its clock says nothing of the work itself: events on the
    current stream do.

    Args:
        device: The device. The host waits once for what is queued on an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted: list[tuple[StageWork, Any, Any]] = []
        self._first = self.mark()
        if device.type != "cpu":
            self._first.synchronize()
        self._first_s = time.time()

    def mark(self) -> Any:
        """Return a mark of the moment at which the device has done what was queued before."""
        if self._device.type == "cpu":
            return time.time()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def note(self, work: StageWork, begin: Any, end: Any) -> None:
        self._noted.append((work, begin, end))

    def spans(self) -> list[tuple[StageWork, float, float]]:
        """Return what was noted, with times in seconds; wait until the device has done it."""
        if self._device.type == "cpu":
            return self._noted
        if self._noted:
            self._noted[-1][2].synchronize()
        return [(work, self._seconds(begin), self._seconds(end)) for work, begin, end in self._noted]

    def _seconds(self, event: Any) -> float:
        since_ms: float = self._first.elapsed_time(event)
        return self._first_s + since_ms / 1000
