"""The backend that gives each rank some stages of the model."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from tp_core import LaunchEnvironment
from tp_core.errors import ConfigError, ModelError
from tp_core.jobs import Axis, Layout, MemoryNeed
from tp_core.plugins import Backend, Job, RanksBackend, Verdict, registry

from tp_pipeline._pipeline_options import PipelineOptions, depth_of

if TYPE_CHECKING:  # backends that are not chosen cost nothing
    from tp_core.sessions import ProcessGroupSession

    from tp_pipeline._pipeline_session import PipelineSession


class PipelineBackend(RanksBackend[PipelineOptions]):
    """Runs one process per device: groups of them hold a model in stages, and divide the samples."""

    name: ClassVar[str] = "pipeline"
    shares_samples = True
    options_type = PipelineOptions

    def assess_ranks(self, job: Job) -> Verdict:
        """Fit a model of whole parameters, below the backends that have all of it on each rank."""
        traits, size = job.traits, job.environment.world_size
        options = self.parse_options(job)
        weights, inner = self._weights(job)
        if weights is not None:
            verdict = weights.assess(inner)
            if not verdict.is_fit:
                return Verdict.unfit(f"weights={weights.name!r}: {verdict.reason}", remedy=verdict.remedy)
            return Verdict.fits(7, f"the stages of the model on groups of ranks: {verdict.reason}")
        if traits is not None and (traits.has_dtensors or traits.has_sharded_parameters):
            return Verdict.unfit(
                "the model has split parameters, and each rank here has whole ones of its stages",
                remedy="give the plain model, or the option weights='shard' for layers of tp-shard",
            )
        ranks = ranks_of_a_model(options, size, job.ranks_per_sample)
        return Verdict.fits(
            8,
            f"the stages of the model on {ranks} of {size} processes, for models that one device has no "
            "memory for; fsdp needs no cut of the model",
        )

    def estimate_memory(self, job: Job) -> MemoryNeed | None:
        """Return what the fullest rank needs; until the first step, each has the weights of all stages."""
        options = self.parse_options(job)
        if job.footprint is None or job.model is None:
            return None
        # Here: with it comes torch.distributed.pipelining, which each start of a job would wait for.
        from tp_pipeline._stage_memory import estimate, with_split_tensors

        weights, inner = self._weights(job)
        split = 1 if weights is None else weights.ranks_per_model(job)
        ranks = options.ranks
        if ranks == -1:
            ranks = job.environment.world_size // (split * max(job.ranks_per_sample, 1))
        is_plain = job.traits is not None and not job.traits.has_sharded_parameters
        if weights is None or not is_plain:
            return estimate(job, ranks, options, split=split)
        # Tensors of a plain model are whole here: the backend that splits them says how much is left.
        whole = replace(job, free_nbytes=None)  # which need not fit
        need = estimate(whole, ranks, options, split=split)
        if need is None:
            return None
        need = replace(need, free=job.free_nbytes)
        of_group = job.footprint.with_batch_of(split * ranks * job.footprint.part)
        environment = LaunchEnvironment(world_size=split, local_world_size=split)
        footprint = replace(of_group, part=1 / split)
        try:
            group = weights.estimate_memory(replace(inner, footprint=footprint, environment=environment))
        except ModelError:  # without blocks that repeat, the tensors are those that the user has split
            return need
        if group is None:
            return None
        return with_split_tensors(need, group, of_group)

    def layouts(self, job: Job) -> Iterable[Layout]:
        """Yield numbers of ranks that hold a model together, schedules, and numbers of micro-batches.

        Data ranks share weights, and groups split them, where ranks are to share no samples.

        Raises:
            ModelError: The model has no blocks to cut between.
        """
        from tp_pipeline._stage_memory import list_layouts

        model, size = job.model, job.environment.world_size
        if model is None or size == 1:
            return
        is_alone = job.ranks_per_sample == 1
        for layout in list_layouts(model, size):
            yield layout
            copies, ranks = layout.axes["data"], layout.axes["pipeline"]
            if is_alone and copies > 1:
                yield _with_axes(layout, {"fsdp": copies, "pipeline": ranks}, {"data": "fsdp"})
        if not is_alone:
            return
        backend = _find_backend("shard")
        if backend is None:
            return
        with suppress(ModelError):  # of a model that it cannot split, as it says itself
            for inner in backend.layouts(job):
                if "fsdp" in inner.axes:  # which are shards of shards
                    continue
                for layout in list_layouts(model, inner.axes["data"]):
                    axes = {**layout.axes, "tensor": inner.axes["tensor"]}
                    yield _with_axes(layout, axes, {"weights": "shard"}, inner)

    def open(self, job: Job) -> "PipelineSession":
        """Join the process group, unless the script has done so, and form the groups.

        Raises:
            ConfigError: The ranks are no multiple of those that hold a model together; or there is no such
                backend for the weights.

        Collective: the ranks' rendezvous, and the creation of the groups.
        """
        from tp_pipeline._pipeline_session import PipelineSession

        options = self.parse_options(job)
        weights, inner = self._weights(job)
        if weights is None:
            ranks = ranks_of_a_model(options, job.environment.world_size, job.ranks_per_sample)
            return PipelineSession(job, options, ranks)
        opened = cast("ProcessGroupSession", weights.open(inner))
        try:
            check_split_stages(opened, options)
            return PipelineSession(job, options, opened.sample_size, inner=opened)
        except ConfigError:
            opened.close()
            raise

    def _weights(self, job: Job) -> tuple[Backend[Any] | None, Job]:
        """Return the backend that splits the weights of a stage, ``None`` for none, and the job for it.

        Raises:
            ConfigError: It is not installed, or ranks are to share samples, too.
        """
        options = self.parse_options(job)
        inner = replace(job, ranks_per_sample=options.ranks, averages_gradients=False, footprint=None)
        if options.weights == "whole":
            return None, inner
        backend = _find_backend(options.weights)
        if backend is None:
            msg = (
                f"the option weights={options.weights!r} of backend 'pipeline' names a backend that is not "
                f"installed: pip install tp-{options.weights}"
            )
            raise ConfigError(msg)
        if job.ranks_per_sample != 1:
            msg = (
                f"the option weights={options.weights!r} of backend 'pipeline' does not go with split "
                "sequences yet; leave it out, or take backend 'context' with weights='shard'"
            )
            raise ConfigError(msg)
        return backend, inner


def _find_backend(name: str) -> Backend[Any] | None:
    """Return the backend of a name, if it is installed."""
    backends = (contribution.item for contribution in registry.backends())
    return next((backend for backend in backends if backend.name == name), None)


def _with_axes(
    layout: Layout, axes: Mapping[Axis, int], more: Mapping[str, str], inner: Layout | None = None
) -> Layout:
    """Return a layout of stages with other axes, more options, and those of the layout of its weights."""
    options = {"pipeline": {**layout.options["pipeline"], **more}}
    if inner is None:
        return replace(layout, axes=axes, options=options, setup="")
    return replace(layout, axes=axes, options={**inner.options, **options}, setup=inner.setup)


def ranks_of_a_model(options: PipelineOptions, size: int, shared: int = 1) -> int:
    """Return the number of ranks that hold a model together.

    Args:
        options: The options.
        size: The number of all ranks.
        shared: The number of models that compute a sample together; -1 for all.

    Raises:
        ConfigError: All ranks are no multiple of it; there are no data ranks that could share weights; or the
            cuts by hand make another number of stages.
    """
    if shared != 1 and options.data == "fsdp":
        msg = (
            "the option data='fsdp' of backend 'pipeline' does not go with split sequences yet; leave it out"
        )
        raise ConfigError(msg)
    if shared == -1 and options.ranks == -1:
        msg = (
            f"backends 'pipeline' and 'context' are each to take all {size} ranks; give one of them a "
            "number, such as {'pipeline': {'ranks': 2}}"
        )
        raise ConfigError(msg)
    ranks = options.ranks
    if ranks == -1:
        ranks = size // max(shared, 1)
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
    check_cuts(options, ranks)
    return ranks


def check_cuts(options: PipelineOptions, ranks: int) -> None:
    """Check the number of cuts by hand.

    Raises:
        ConfigError: They make another number of stages.
    """
    stages = ranks * depth_of(options)
    if options.cuts is not None and len(options.cuts) != stages - 1:
        msg = (
            f"the option cuts of backend 'pipeline' names {len(options.cuts)} modules with which stages "
            f"begin, and {stages} stages ({options.schedule!r} on {ranks} ranks) need {stages - 1}"
        )
        raise ConfigError(msg)


def check_split_stages(opened: "ProcessGroupSession", options: PipelineOptions) -> None:
    """Check that a session of split weights has ranks for several stages, with whole shards.

    Raises:
        ConfigError: It has one group of ranks for a model, or shards shards; or the cuts by hand make another
            number of stages.
    """
    from tp_core.fully_sharded import FullyShardedSession

    if isinstance(opened, FullyShardedSession):
        msg = (
            f"the option weights={options.weights!r} of backend 'pipeline' gives each rank whole shards, and "
            f"backend {options.weights!r} is to shard them over data ranks: give it the option data='ddp'"
        )
        raise ConfigError(msg)
    if opened.sample_size == 1:
        msg = (
            f"backend {options.weights!r} splits tensors over all {opened.world_size} ranks, or ranks=1 is "
            "given, so that there is one stage: form smaller groups, as with "
            f"ts.distributed.init_process_group({max(1, opened.world_size // 2)}), or leave backend "
            "'pipeline' out"
        )
        raise ConfigError(msg)
    check_cuts(options, opened.sample_size)
