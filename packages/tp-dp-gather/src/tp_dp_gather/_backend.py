"""The backend for steps that need the model's output for the whole batch."""

from typing import TYPE_CHECKING, ClassVar

from tp_core.plugins import Backend, Job, Verdict

from tp_dp_gather._options import GatherOptions

if TYPE_CHECKING:  # backends that are not chosen cost nothing
    from tp_dp_gather._session import GatherSession


class GatherBackend(Backend[GatherOptions]):
    """Backend that runs the model on several devices in one process, and the step on the gathered output."""

    name: ClassVar[str] = "dp-gather"
    options_type = GatherOptions

    def assess(self, job: Job) -> Verdict:
        """Fit one process with several devices, below a backend that gathers nothing."""
        processes, count = job.environment.world_size, len(job.devices)
        if processes > 1:
            return Verdict.unfit(
                f"launched as {processes} processes, and this is for several devices in one",
                remedy="start the script without a launcher",
            )
        if count == 1:
            return Verdict.unfit(f"one device, {job.devices[0]}: nothing to split over")
        traits = job.traits
        if traits is not None and traits.has_sharded_parameters:
            return Verdict.unfit("the model has sharded parameters, and replicas need whole ones")
        return Verdict.fits(
            40,
            f"{count} devices in one process; every output travels to {job.devices[0]}, where the loss "
            "is computed, so it is for steps that need the whole batch's output",
            remedy="without that need: pip install tp-tuple",
        )

    def open(self, job: Job) -> "GatherSession":
        """Open a session."""
        from tp_dp_gather._session import GatherSession

        return GatherSession(job, self.parse_options(job))
