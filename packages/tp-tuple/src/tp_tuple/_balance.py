"""Shares of a batch: even, by weights, by free memory, or by measured speed."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from tp_core import free_nbytes, resolve_devices
from tp_core.data import split_evenly
from tp_core.errors import ConfigError

if TYPE_CHECKING:  # loader workers import this module, and run no replicas
    from tp_core.replicas import Replicas


class Speeds(Sequence[float]):
    """Samples per second of each device, measured over the first steps and constant afterwards.

    `TupleParallel` and the backend write the measurements. `tp_collate` reads them, also in a loader's
    worker processes: the numbers are in shared memory. As a sequence it holds the current weights: ones,
    until all steps are measured.

    Args:
        parts: The number of devices.
        steps: The number of measured steps.
        warmup: The number of steps before them, in which kernels are chosen and caches filled.

    Raises:
        ConfigError: ``parts`` or ``steps`` is less than 1, or ``warmup`` less than 0.

    Example:
        >>> speeds = Speeds(2, steps=1, warmup=0)
        >>> speeds.weights() is None
        True
        >>> speeds.note(counts=[4, 4], seconds=[1.0, 2.0])
        >>> speeds.weights()
        [4.0, 2.0]
    """

    def __init__(self, parts: int, *, steps: int = 8, warmup: int = 2) -> None:
        if parts < 1 or steps < 1 or warmup < 0:
            msg = f"expected parts >= 1, steps >= 1, warmup >= 0, got {parts}, {steps}, {warmup}"
            raise ConfigError(msg)
        self.parts = parts
        self._steps = steps
        self._warmup = warmup
        # Models in threads may note steps into one object; loader workers in other processes only read.
        self._lock = threading.Lock()
        # Rows: samples, seconds, and in the last one how many steps were noted.
        self._sums = torch.zeros(3, parts, dtype=torch.float64)
        self._sums.share_memory_()

    @property
    def is_settled(self) -> bool:
        """``True`` once all steps are measured."""
        return int(self._sums[2, 0].item()) >= self._warmup + self._steps

    def note(self, *, counts: list[int], seconds: list[float]) -> None:
        """Note one step: the samples of each part, and how many seconds each took.

        A step with fewer parts than devices does not measure all of them, and is not counted.
        """
        if len(counts) != self.parts:
            return
        with self._lock:
            if self.is_settled:
                return
            if int(self._sums[2, 0].item()) >= self._warmup:
                self._sums[0] += torch.tensor(counts, dtype=torch.float64)
                self._sums[1] += torch.tensor(seconds, dtype=torch.float64)
            self._sums[2] += 1

    def weights(self) -> list[float] | None:
        """Return samples per second of each device, or ``None`` before all were measured."""
        if not self.is_settled:
            return None
        samples, seconds, _ = self._sums
        rates: list[float] = (samples / seconds.clamp_min(1e-9)).tolist()
        return rates

    def __len__(self) -> int:
        return self.parts

    def __getitem__(self, key: Any) -> Any:
        return (self.weights() or [1.0] * self.parts)[key]

    def __reduce__(self) -> tuple[object, ...]:
        # Without the lock, which cannot be pickled. Between processes the sums travel as shared memory.
        return _rebuild, (self.parts, self._steps, self._warmup, self._sums)


def _rebuild(parts: int, steps: int, warmup: int, sums: torch.Tensor) -> Speeds:
    speeds = Speeds(parts, steps=steps, warmup=warmup)
    speeds._sums = sums
    return speeds


Weights = Sequence[float] | Literal["memory", "auto"] | Speeds | None


def resolve_weights(
    weights: Weights, count: int, devices: Sequence[Any] | None
) -> Sequence[float] | Speeds | None:
    """Return the weights as numbers, or where they are measured; ``None`` for even shares."""
    if weights is None:
        return None
    if isinstance(weights, Speeds):
        if weights.parts != count:
            msg = f"the speeds are of {weights.parts} devices, and there are {count}"
            raise ConfigError(msg)
        return weights
    if isinstance(weights, str):
        if weights == "auto":
            return Speeds(count)
        if weights == "memory":
            chosen = count if devices is None else list(devices)
            return free_memory(resolve_devices(chosen))
        msg = f"weights must be numbers, 'memory', 'auto' or a Speeds, got {weights!r}"
        raise ConfigError(msg)
    return check_weights(weights, count)


def check_weights(weights: Sequence[float], parts: int) -> tuple[float, ...]:
    checked = tuple(float(w) for w in weights)
    if len(checked) != parts:
        msg = f"{parts} parts need {parts} weights, got {len(checked)}: {list(weights)!r}"
        raise ConfigError(msg)
    if not all(math.isfinite(w) and w > 0 for w in checked):
        msg = f"weights must be positive numbers, got {list(weights)!r}"
        raise ConfigError(msg)
    return checked


def free_memory(devices: Sequence[torch.device]) -> list[float]:
    """Return the bytes that are free on each device; a device that occurs twice gives half each."""
    # Asked once for each device, as the answer changes at any moment. At least 1: weights must be positive.
    free = {device: max(1.0, _free(device) / times) for device, times in Counter(devices).items()}
    return [free[device] for device in devices]


def _free(device: torch.device) -> float:
    free = free_nbytes(device)
    if free is None:
        msg = f"weights='memory' needs the free memory of {device}, which does not report it: give numbers"
        raise ConfigError(msg)
    return float(free)


def consecutive_rows(length: int, parts: int, weights: Sequence[float] | None) -> list[range]:
    """Cut ``range(length)`` into consecutive pieces, none of them empty.

    Fewer items than parts make fewer pieces. Without weights sizes differ by at most one; with
    weights they are proportional, to rounding by the largest remainders.
    """
    parts = min(parts, length)
    if weights is None:
        return [range(piece.start, piece.stop) for piece in split_evenly(length, parts)]
    sizes = _proportional(length, weights[:parts])
    ends = [sum(sizes[: i + 1]) for i in range(parts)]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _proportional(length: int, weights: Sequence[float]) -> list[int]:
    """Give each one item, so that no device is skipped, and share what is left by weight."""
    total = sum(weights)
    shares = [length * w / total for w in weights]
    sizes = [max(1, math.floor(s)) for s in shares]
    while sum(sizes) > length:  # small shares were rounded up to 1, at the cost of the largest
        i = max(range(len(sizes)), key=lambda k: sizes[k] - shares[k] if sizes[k] > 1 else -math.inf)
        sizes[i] -= 1
    while sum(sizes) < length:
        i = max(range(len(sizes)), key=lambda k: shares[k] - sizes[k])
        sizes[i] += 1
    return sizes


def balanced_rows(costs: Sequence[float], parts: int, weights: Sequence[float] | None) -> list[list[int]]:
    """Deal items out so that the parts' total costs are nearly equal (or proportional to weights).

    The longest-processing-time rule: the dearest item goes first, each to the part that is least
    loaded. At most 4/3 of the best possible maximum (Graham, 1969). Inside a part the items keep
    their order.
    """
    for i, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            msg = f"the cost of an item must be a number, not below 0; for item {i} it is {cost!r}"
            raise ConfigError(msg)
    parts = min(parts, len(costs))
    if weights is None:
        speeds = [1.0] * parts
    else:
        speeds = list(weights[:parts])
    rows: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        # An empty part first: each device that takes part needs an item.
        # Of the others the one that would be done first if it took the item too.
        part = min(range(parts), key=lambda p: (bool(rows[p]), (loads[p] + costs[item]) / speeds[p], p))
        rows[part].append(item)
        loads[part] += costs[item]
    return [sorted(r) for r in rows]


class Stopwatch:
    """Timer of the work that is queued on the current stream between its creation and `stop`.

    On an accelerator it measures by events, which leave out earlier work, other streams and the host.
    On the CPU it measures by the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._mark()
        self._end = self._begin

    def stop(self) -> None:
        self._end = self._mark()

    def seconds(self) -> float:
        """Return the measured seconds; wait until the device has done the work."""
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


def run_timed(
    replicas: "Replicas",
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
        # After all replicas have run: reading a watch waits for its device.
        seconds = [0.0 if watch is None else watch.seconds() for watch in watches]
        speeds.note(counts=list(counts), seconds=seconds)
    return outputs
