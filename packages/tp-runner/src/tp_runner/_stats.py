"""Statistics of workers: items, seconds, and a timeline."""

import collections
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from tp_runner._workers._fleet import Timing

MOST_EVENTS = 200_000  # of a timeline: a long run keeps the newest
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """The statistics of one worker since its first start.

    Attributes:
        worker: Its number.
        device: Its device.
        items: How many items it has finished.
        chunks: In how many chunks of items that traveled together.
        waiting_s: Seconds it waited for items.
        working_s: Seconds it worked on them.
        sending_s: Seconds it spent on sending results.
        deaths: How often it died.
        where: Its node of a cluster; empty without a cluster, or while the worker is not there.
    """

    worker: int
    device: str
    items: int
    chunks: int
    waiting_s: float
    working_s: float
    sending_s: float
    deaths: int
    where: str = ""

    @property
    def utilization(self) -> float:
        """The share of its time that it worked, from 0 to 1."""
        whole = self.waiting_s + self.working_s + self.sending_s
        if whole:
            return self.working_s / whole
        return 0.0


@dataclass(frozen=True, slots=True)
class RunnerStats:
    """The statistics of a runner since the first start of its workers.

    Attributes:
        delivered: How many results the caller was given.
        elapsed_s: Seconds since the workers were started.
        workers: One entry for each worker.
    """

    delivered: int
    elapsed_s: float
    workers: tuple[WorkerStats, ...]

    @property
    def rate(self) -> float:
        """Results per second, on average since the workers were started."""
        if self.elapsed_s:
            return self.delivered / self.elapsed_s
        return 0.0

    def __str__(self) -> str:
        head = f"{self.delivered} results in {self.elapsed_s:.2f} s ({self.rate:.1f}/s)"
        lines = [
            f"  worker {w.worker} on {w.device}{w.where and f' of {w.where}'}: {w.items} items in {w.chunks} "
            f"chunks, {w.utilization:.0%} working ({w.working_s:.2f} s; waiting {w.waiting_s:.2f} s, sending "
            f"{w.sending_s:.2f} s), died {w.deaths} times"
            for w in self.workers
        ]
        return "\n".join([head, *lines])


@dataclass(slots=True)
class StageStats:
    """The statistics of one stage in a pipeline's newest stream.

    Attributes:
        name: Its name.
        devices: The devices of its workers.
        is_shared: Whether other stages use these workers, too.
        taken: How many items it has taken.
        given: How many results it has given.
    """

    name: str
    devices: tuple[str, ...]
    is_shared: bool
    taken: int = 0
    given: int = 0


@dataclass(slots=True)
class _Counts:
    items: int = 0
    chunks: int = 0
    waiting_s: float = 0.0
    working_s: float = 0.0
    sending_s: float = 0.0
    deaths: int = 0


@dataclass(slots=True)
class StatsCollector:
    devices: tuple[str, ...]  # the workers' devices
    timeline: bool = False  # whether to keep when each chunk was worked on
    delivered: int = 0  # how many results the caller was given
    _began: float = field(default_factory=time.monotonic)
    _counts: list[_Counts] = field(default_factory=list)
    _events: collections.deque[tuple[int, int, int, Timing]] = field(
        default_factory=lambda: collections.deque(maxlen=MOST_EVENTS)
    )

    def __post_init__(self) -> None:
        self._counts = [_Counts() for _ in self.devices]

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

    def snapshot(self, where: Callable[[int], str]) -> RunnerStats:
        """Return the figures of this moment; ``where`` returns the machine of a worker."""
        workers = tuple(
            WorkerStats(worker, device, **asdict(counts), where=where(worker))
            for worker, (device, counts) in enumerate(zip(self.devices, self._counts, strict=True))
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
