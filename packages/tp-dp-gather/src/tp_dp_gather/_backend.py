"""The backend for training loops whose step needs the whole output of the model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tp_core import Backend, Job, Verdict

if TYPE_CHECKING:  # backends that are not chosen cost nothing
    from tp_dp_gather._session import GatherSession

__all__ = ["GatherBackend", "GatherOptions"]


@dataclass(frozen=True, slots=True)
class GatherOptions:
    """The options of the backend ``dp-gather``.

    Attributes:
        dim: The dimension of the rows, in inputs and outputs.
        except_keywords: Keys of the model's output that stay in parts.
    """

    dim: int = 0
    except_keywords: tuple[str, ...] = ()


class GatherBackend(Backend):
    """Runs the model on several devices in one process, and the step on the gathered output."""

    name: ClassVar[str] = "dp-gather"
    options_type: ClassVar[type] = GatherOptions

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
