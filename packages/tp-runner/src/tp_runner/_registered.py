"""The engines of this package, as tp_core's registry knows them."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from tp_core.plugins import Engine, Pool, Verdict

from tp_runner._engines import ENGINES, open_pool
from tp_runner._options import make_settings
from tp_runner._scheduling._pool import RunnerPool

__all__ = ["InlineEngine", "ProcessEngine", "RayEngine", "ThreadEngine"]

# The pool keeps to the contract without inheriting from it: it would import torch.
Pool.register(RunnerPool)


class _OwnEngine(Engine):
    def assess(self, devices: Sequence[torch.device]) -> Verdict:
        """Fit for any devices, better or worse."""
        del devices
        spec = ENGINES[self.name]
        return Verdict.fits(spec.score, spec.summary, remedy=spec.remedy)

    def open(
        self,
        worker: Callable[..., Any],
        devices: Sequence[torch.device],
        *,
        options: Mapping[str, Any],
    ) -> Pool:
        """Start one worker per device; ``worker(device)`` returns what is applied to each item."""
        spec, names = ENGINES[self.name], tuple(str(device) for device in devices)
        settings = make_settings(self.name, len(names), options, spec.unfit)
        pool: Any = open_pool(spec, worker, names, settings)
        registered: Pool = pool
        return registered


class ProcessEngine(_OwnEngine):
    """Worker processes on this machine."""

    name: ClassVar[str] = "process"


class ThreadEngine(_OwnEngine):
    """Worker threads of this process."""

    name: ClassVar[str] = "thread"


class InlineEngine(_OwnEngine):
    """The caller's own thread."""

    name: ClassVar[str] = "inline"


class RayEngine(_OwnEngine):
    """Actors on a Ray cluster."""

    name: ClassVar[str] = "ray"

    def assess(self, devices: Sequence[torch.device]) -> Verdict:
        """Fit where Ray is installed; never better than processes for one machine."""
        if importlib.util.find_spec("ray") is None:
            return Verdict.unfit("ray is not installed", remedy="pip install tp-runner[ray]")
        return super().assess(devices)
