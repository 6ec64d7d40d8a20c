"""The figures of workers while they work: items, seconds, and a timeline."""

import collections
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tp_runner._workers._work import Timing

if TYPE_CHECKING:
    from tp_runner._stats import RunnerStats

MOST_EVENTS = 200_000  # of a timeline: a long run keeps the newest
BARS = " ▁▂▃▄▅▆▇█"


# No dataclasses: making them is a large part of the time of a first start.


class _Counts:
    __slots__ = ("chunks", "deaths", "items", "sending_s", "waiting_s", "working_s")

    def __init__(self) -> None:
        self.items = 0
        self.chunks = 0
        self.waiting_s = 0.0
        self.working_s = 0.0
        self.sending_s = 0.0
        self.deaths = 0


class StatsCollector:
    """The counts of each worker.

    Args:
        devices: The workers' devices.
        timeline: Whether to keep when each chunk was worked on.
    """

    def __init__(self, devices: tuple[str, ...], timeline: bool = False) -> None:
        self.devices = devices
        self.timeline = timeline
        self.delivered = 0  # how many results the caller was given
        self._began = time.monotonic()
        self._counts = [_Counts() for _ in devices]
        self._events: collections.deque[tuple[int, int, int, Timing]] = collections.deque(maxlen=MOST_EVENTS)

    def done(self, worker: int, index: int, n_items: int, timing: Timing) -> None:
        counts = self._counts[worker]
        counts.items += n_items
        counts.chunks += 1
        counts.waiting_s += timing.waited_s
        counts.working_s += timing.worked_s
        counts.sending_s += timing.sent_s
        if self.timeline:
            self._events.append((worker, index, n_items, timing))

    def died(self, worker: int) -> None:
        self._counts[worker].deaths += 1

    def snapshot(self, where: Callable[[int], str]) -> "RunnerStats":
        """Return the figures of this moment; ``where`` returns the machine of a worker."""
        from tp_runner._stats import RunnerStats, WorkerStats  # no start of workers waits for them

        workers = tuple(
            WorkerStats(
                worker,
                self.devices[worker],
                counts.items,
                counts.chunks,
                counts.waiting_s,
                counts.working_s,
                counts.sending_s,
                counts.deaths,
                where(worker),
            )
            for worker, counts in enumerate(self._counts)
        )
        return RunnerStats(self.delivered, time.monotonic() - self._began, workers)

    def draw_timeline(self, width: int) -> str:
        """Draw how busy each worker was over time, from the first to the last of what was kept."""
        if not self._events:
            return ""
        began = min(timing.began for *_, timing in self._events)
        ended = max(timing.began + timing.worked_s for *_, timing in self._events)
        step = max(ended - began, 1e-9) / width
        busy = [[0.0] * width for _ in self.devices]
        for worker, _, _, timing in self._events:
            at, end = (timing.began - began) / step, (timing.began + timing.worked_s - began) / step
            for column in range(int(at), min(int(end) + 1, width)):
                busy[worker][column] += max(0.0, min(end, column + 1) - max(at, column))
        plural = "s" if len(busy) > 1 else ""
        head = f"{len(busy)} worker{plural} over {ended - began:.2f} s, how busy:"
        return "\n".join([head, *(f"  {worker:3} {_bars(row)}" for worker, row in enumerate(busy))])

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write what was kept in the Chrome trace format."""
        events: list[dict[str, Any]] = [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": 0,
                "tid": worker,
                "args": {"name": f"worker {worker} on {device}"},
            }
            for worker, device in enumerate(self.devices)
        ]
        for worker, index, n_items, timing in self._events:
            base = {"ph": "X", "pid": 0, "tid": worker}
            began_us = (timing.began - self._began) * 1e6
            if timing.waited_s > 0:
                waited_us = timing.waited_s * 1e6
                events.append({**base, "name": "waiting", "ts": began_us - waited_us, "dur": waited_us})
            last = index + n_items - 1
            events.append(
                {
                    **base,
                    "name": f"item {index}" if n_items == 1 else f"items {index} to {last}",
                    "ts": began_us,
                    "dur": timing.worked_s * 1e6,
                    "args": {"items": n_items},
                }
            )
        import json  # no start of workers waits for these

        from tp_core.files import atomic_part

        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        with atomic_part(path) as part:
            part.write_text(text)


def _bars(shares: list[float]) -> str:
    return "".join(BARS[min(round(share * (len(BARS) - 1)), len(BARS) - 1)] for share in shares)
