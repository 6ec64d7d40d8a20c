"""The backend that runs the user's step on every device of one process at once."""

from typing import TYPE_CHECKING, ClassVar

from tp_core.errors import ConfigError
from tp_core.plugins import Backend, Job, Verdict

from tp_tuple._options import TupleOptions

if TYPE_CHECKING:  # backends that are not chosen cost nothing
    from tp_tuple._session import TupleSession


class TupleBackend(Backend[TupleOptions]):
    """Backend for several devices in one process: the step, and its loss, run on each of them."""

    name: ClassVar[str] = "tuple"
    options_type = TupleOptions

    def assess(self, job: Job) -> Verdict:
        """Fit one process with several devices."""
        processes, count = job.environment.world_size, len(job.devices)
        if processes > 1:
            return Verdict.unfit(
                f"launched as {processes} processes, and this is for several devices in one",
                remedy="start the script without a launcher",
            )
        if count == 1:
            return Verdict.unfit(f"one device, {job.devices[0]}: nothing to run side by side")
        traits = job.traits
        if traits is not None and traits.has_sharded_parameters:
            return Verdict.unfit("the model has sharded parameters, and replicas need whole ones")
        names = ", ".join(map(str, job.devices))
        return Verdict.fits(60, f"{count} devices in one process ({names}), the step runs on each")

    def open(self, job: Job) -> "TupleSession":
        """Open a session.

        Raises:
            ConfigError: An option is wrong.
        """
        from tp_tuple._session import TupleSession

        options = self.parse_options(job)
        if options.cost is not None and not callable(options.cost):
            msg = f"the option cost must be a function of an item, got {options.cost!r}"
            raise ConfigError(msg)
        return TupleSession(job, options)
