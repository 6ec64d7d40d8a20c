"""The backend that splits each sequence over ranks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from tp_core.errors import ConfigError
from tp_core.internal import RanksBackend
from tp_core.jobs import MemoryNeed, replicated_memory
from tp_core.plugins import Job, Verdict

from tp_context._options import ContextOptions

if TYPE_CHECKING:  # backends that are not chosen cost nothing
    from tp_context._session import ContextSession


class ContextBackend(RanksBackend[ContextOptions]):
    """Runs one process per device: groups of them share each sequence, and the groups divide the samples."""

    name: ClassVar[str] = "context"
    options_type = ContextOptions
    self_test_options: ClassVar[Mapping[str, object]] = {"sequence": {}}  # in whose batches nothing is one

    def assess_ranks(self, job: Job) -> Verdict:
        """Fit a model of whole parameters, below all backends that keep sequences whole."""
        traits = job.traits
        if traits is not None and (traits.has_dtensors or traits.has_sharded_parameters):
            return Verdict.unfit(
                "the model has split parameters, and each rank here has whole ones",
                remedy="give the plain model",
            )
        size = job.environment.world_size
        context = ranks_of_a_sequence(self.parse_options(job), size)
        return Verdict.fits(
            10,
            f"each sequence split over {context} of {size} processes, for sequences that "
            "one device has no memory for; ddp is faster where they fit",
        )

    def estimate_memory(self, job: Job) -> MemoryNeed | None:
        """Return the memory of a rank: a copy of the model, and its slices of its group's sequences.

        A group has as many times the samples of a rank as it has ranks, and cuts each into as many slices.
        """
        if job.footprint is None:
            return None
        return replicated_memory(job, job.footprint, keeps_gradients=True)

    def open(self, job: Job) -> "ContextSession":
        """Join the process group, unless the script has done so, and form the groups.

        Raises:
            ConfigError: The ranks are no multiple of those that share a sequence.

        Collective: the ranks' rendezvous, and the creation of the groups.
        """
        from tp_context._session import ContextSession

        options = self.parse_options(job)
        return ContextSession(job, options, ranks_of_a_sequence(options, job.environment.world_size))


def ranks_of_a_sequence(options: ContextOptions, size: int) -> int:
    """Return the number of ranks that share a sequence.

    Raises:
        ConfigError: All ranks are no multiple of it.
    """
    context = size if options.context == -1 else options.context
    if size % context:
        msg = (
            f"the option context={context} of backend 'context' shares each sequence among so many ranks, "
            f"and {size} ranks are not a multiple of it"
        )
        raise ConfigError(msg)
    return context
