"""The backend for steps that need the model's output for the whole batch."""

from typing import TYPE_CHECKING, ClassVar

from tp_core.plugins import DevicesBackend, Job, Verdict

from tp_dp_gather._options import GatherOptions

if TYPE_CHECKING:  # backends that are not chosen cost nothing
    from tp_dp_gather._session import GatherSession


class GatherBackend(DevicesBackend[GatherOptions]):
    """Backend that runs the model on several devices in one process, and the step on the gathered output."""

    name: ClassVar[str] = "dp-gather"
    options_type = GatherOptions

    def assess_devices(self, job: Job) -> Verdict:
        """Fit below a backend that gathers nothing."""
        return Verdict.fits(
            40,
            f"{len(job.devices)} devices in one process; every output travels to {job.devices[0]}, where the "
            "loss is computed, so it is for steps that need the whole batch's output",
            remedy="without that need: pip install tp-tuple",
        )

    def open(self, job: Job) -> "GatherSession":
        from tp_dp_gather._session import GatherSession

        return GatherSession(job, self.parse_options(job))
