"""The backend that runs the user's step on every device of one process at once."""

from typing import TYPE_CHECKING, ClassVar

from tp_core.plugins import DevicesBackend, Job, Verdict

from tp_tuple._options import TupleOptions

if TYPE_CHECKING:  # backends that are not chosen cost nothing
    from tp_tuple._session import TupleSession


class TupleBackend(DevicesBackend[TupleOptions]):
    """Backend for several devices in one process: the step, and its loss, run on each of them."""

    name: ClassVar[str] = "tuple"
    options_type = TupleOptions

    def assess_devices(self, job: Job) -> Verdict:
        names = ", ".join(map(str, job.devices))
        return Verdict.fits(60, f"{len(job.devices)} devices in one process ({names}), the step runs on each")

    def open(self, job: Job) -> "TupleSession":
        from tp_tuple._session import TupleSession

        return TupleSession(job, self.parse_options(job))
