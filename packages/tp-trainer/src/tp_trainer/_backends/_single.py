"""The backend for one device in one process."""

from typing import ClassVar

from tp_core.jobs import MemoryNeed, replicated_memory
from tp_core.plugins import Backend, Job, NoOptions, Session, Verdict


class SingleBackend(Backend[NoOptions]):
    """Runs on one device of any type."""

    name: ClassVar[str] = "single"

    def assess(self, job: Job) -> Verdict:
        """Fit one process with one device; with further devices, name what would use them."""
        processes, devices = job.environment.world_size, job.devices
        if processes > 1:
            return Verdict.unfit(
                f"launched as {processes} processes, and this is for one",
                remedy="start the script without a launcher",
            )
        if job.traits is not None and job.traits.has_sharded_parameters:
            return Verdict.unfit(
                "the model has sharded parameters, and this is one process without others to share them with",
                remedy="give the plain model",
            )
        if len(devices) == 1:
            return Verdict.fits(50, f"one process with one device, {devices[0]}")
        remedy = f"to use all {len(devices)}: tp launch -n {len(devices)} script.py, or pip install tp-tuple"
        if job.explicit_devices:
            return Verdict.unfit(f"{len(devices)} devices in one process", remedy=remedy)
        return Verdict.fits(10, f"would use {devices[0]} alone of {len(devices)} devices", remedy=remedy)

    def estimate_memory(self, job: Job) -> MemoryNeed | None:
        """Return the memory of the device; it gets the whole batch, even if there are other devices."""
        if job.footprint is None:
            return None
        return replicated_memory(job, job.footprint.with_batch_of(len(job.devices)))

    def open(self, job: Job) -> Session:
        """Open a plain session: its defaults are for one device in one process."""
        self.parse_options(job)
        return Session(job)
