"""The engines of this package, as the registry knows them."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from tp_core import Engine, Pool, Verdict

from tp_runner._open import open_own
from tp_runner._options import make_settings
from tp_runner._pool import RunnerPool

__all__ = ["ENGINES", "InlineEngine", "ProcessEngine", "RayEngine", "ThreadEngine"]

# The pool keeps to the contract without inheriting from it: it would import torch.
Pool.register(RunnerPool)


class _OwnEngine(Engine):
    def open(
        self,
        worker: Callable[..., Any],
        devices: Sequence[torch.device],
        *,
        options: Mapping[str, Any],
    ) -> Pool:
        """Start one worker per device; ``worker(device)`` returns what is applied to each item."""
        names = tuple(str(device) for device in devices)
        settings = make_settings(self.name, len(names), options)
        pool: Any = open_own(self.name, worker, names, settings)
        registered: Pool = pool
        return registered


class ProcessEngine(_OwnEngine):
    """Worker processes on this machine."""

    name: ClassVar[str] = "process"

    def assess(self, devices: Sequence[torch.device]) -> Verdict:
        """Fit for any devices."""
        return Verdict.fits(80, f"{len(devices)} processes, one for each device")


class ThreadEngine(_OwnEngine):
    """Worker threads of this process."""

    name: ClassVar[str] = "thread"

    def assess(self, devices: Sequence[torch.device]) -> Verdict:
        """Fit for any devices, but the threads share one interpreter."""
        return Verdict.fits(
            40,
            f"{len(devices)} threads, which share one interpreter",
            remedy="engine='process' for work in Python",
        )


class InlineEngine(_OwnEngine):
    """The caller's own thread."""

    name: ClassVar[str] = "inline"

    def assess(self, devices: Sequence[torch.device]) -> Verdict:
        """Fit for any devices, one item after the other."""
        del devices
        return Verdict.fits(10, "one item after the other, in the caller's thread")


class RayEngine(_OwnEngine):
    """Actors on a Ray cluster."""

    name: ClassVar[str] = "ray"

    def assess(self, devices: Sequence[torch.device]) -> Verdict:
        """Fit where Ray is installed; never better than processes for one machine."""
        if importlib.util.find_spec("ray") is None:
            return Verdict.unfit("ray is not installed", remedy="pip install tp-runner[ray]")
        return Verdict.fits(20, f"{len(devices)} actors on a Ray cluster")


ENGINES: tuple[type[_OwnEngine], ...] = (InlineEngine, ProcessEngine, RayEngine, ThreadEngine)
