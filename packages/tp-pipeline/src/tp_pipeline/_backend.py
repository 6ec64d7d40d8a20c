"""The backend that gives each rank some stages of the model."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from tp_core.errors import ConfigError
from tp_core.internal import RanksBackend
from tp_core.jobs import Forecast, Layout, MemoryNeed
from tp_core.plugins import Job, Verdict

from tp_pipeline._options import PipelineOptions

if TYPE_CHECKING:  # backends that are not chosen cost nothing
    from tp_pipeline._session import PipelineSession


class PipelineBackend(RanksBackend[PipelineOptions]):
    """Runs one process per device: groups of them hold a model in stages, and divide the samples."""

    name: ClassVar[str] = "pipeline"
    options_type = PipelineOptions

    def assess_ranks(self, job: Job) -> Verdict:
        """Fit a model of whole parameters, below the backends that have all of it on each rank."""
        traits = job.traits
        if traits is not None and (traits.has_dtensors or traits.has_sharded_parameters):
            return Verdict.unfit(
                "the model has split parameters, and each rank here has whole ones of its stages",
                remedy="give the plain model; the option data='fsdp' shares stages over the data ranks",
            )
        options, size = self.parse_options(job), job.environment.world_size
        ranks = ranks_of_a_model(options, size)
        return Verdict.fits(
            8,
            f"the stages of the model on {ranks} of {size} processes, for models that one device has no "
            "memory for; fsdp needs no cut of the model",
        )

    def estimate_memory(self, job: Job) -> MemoryNeed | None:
        """Return what the fullest rank needs; until the first step, each has all weights."""
        from tp_pipeline._forecast import estimate

        options = self.parse_options(job)
        return estimate(job, ranks_of_a_model(options, job.environment.world_size), options)

    def layouts(self, job: Job) -> Iterable[Layout]:
        """Return numbers of ranks that hold a model together, schedules, and numbers of micro-batches.

        Raises:
            ModelError: The model has no blocks to cut between.
        """
        from tp_pipeline._forecast import list_layouts

        size = job.environment.world_size
        return [] if job.model is None or size == 1 else list_layouts(job.model, size)

    def forecast(self, job: Job, layout: Layout) -> Forecast | None:
        """Return the stages of the fullest rank, the bubble, and what neighbors send each other."""
        from tp_pipeline._forecast import forecast

        return forecast(job, layout, self.parse_options(job))

    def open(self, job: Job) -> "PipelineSession":
        """Join the process group, unless the script has done so, and form the groups.

        Raises:
            ConfigError: The ranks are no multiple of those that hold a model together.

        Collective: the ranks' rendezvous, and the creation of the groups.
        """
        from tp_pipeline._session import PipelineSession

        options = self.parse_options(job)
        return PipelineSession(job, options, ranks_of_a_model(options, job.environment.world_size))


def ranks_of_a_model(options: PipelineOptions, size: int) -> int:
    """Return the number of ranks that hold a model together.

    Raises:
        ConfigError: All ranks are no multiple of it; there are no data ranks that could share weights; or the
            cuts by hand make another number of stages.
    """
    ranks = size if options.ranks == -1 else options.ranks
    if size % ranks:
        msg = (
            f"the option ranks={ranks} of backend 'pipeline' puts each model on this many ranks, and {size} "
            "ranks are not a multiple of it"
        )
        raise ConfigError(msg)
    if options.data == "fsdp" and ranks == size:
        msg = (
            f"the option data='fsdp' of backend 'pipeline' shares weights over data ranks, and all {size} "
            f"ranks hold one model: give ranks=..., a divisor of {size} below it, or leave data out"
        )
        raise ConfigError(msg)
    stages = ranks * options.depth
    if options.cuts is not None and len(options.cuts) != stages - 1:
        msg = (
            f"the option cuts of backend 'pipeline' names {len(options.cuts)} modules with which stages "
            f"begin, and {stages} stages ({options.schedule!r} on {ranks} ranks) need {stages - 1}"
        )
        raise ConfigError(msg)
    return ranks
