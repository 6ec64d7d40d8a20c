"""Statistics of workers and of stages, as users ask for them."""

from dataclasses import dataclass


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
