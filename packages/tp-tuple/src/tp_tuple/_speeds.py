"""How fast each device is, as measured, where also a loader's worker processes can read it."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from tp_core.errors import ConfigError

__all__ = ["Speeds"]


class Speeds(Sequence[float]):
    """Samples per second of each device, measured over the first steps and then left as they are.

    What measures (`TupleParallel`, the backend) writes; what splits (`tp_collate`) reads, also in
    the worker processes of a loader: the numbers are in shared memory. As a sequence it has the
    weights of the moment: ones, until everything is measured.

    Args:
        parts: The number of devices.
        steps: Steps that are measured.
        warmup: Steps before, in which kernels are chosen and caches filled.

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
        self._lock = threading.Lock()
        # Rows: samples, seconds, and in the last one how many steps were noted.
        self._sums = torch.zeros(3, parts, dtype=torch.float64)
        self._sums.share_memory_()

    @property
    def is_settled(self) -> bool:
        """Whether everything that was to be measured is measured."""
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
        return _rebuild, (self.parts, self._steps, self._warmup, self._sums)


def _rebuild(parts: int, steps: int, warmup: int, sums: torch.Tensor) -> Speeds:
    speeds = Speeds(parts, steps=steps, warmup=warmup)
    speeds._sums = sums
    return speeds
