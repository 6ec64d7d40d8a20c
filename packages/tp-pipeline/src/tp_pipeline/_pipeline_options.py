"""The options of the backend ``pipeline``."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from tp_core.arguments import as_names, check_above_zero, explain_init
from tp_core.errors import ConfigError

ScheduleName = Literal[
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "auto",
]
_CHOICES = {
    "schedule": get_args(ScheduleName),
    "data": ("ddp", "fsdp"),
    "weights": ("whole", "shard"),
    "statistics": ("refuse", "microbatch"),
}
_ONE_STAGE = frozenset({"GPipe", "1F1B"})
"""The schedules in which each rank has one stage."""
V_SCHEDULES = frozenset({"ZBVZeroBubble", "DualPipeV"})
"""Those in which the last rank has two stages in the middle, and the first rank the first and the last."""


def default_depth(schedule: str) -> int:
    """Return the number of stages of each rank, where the options do not say it."""
    if schedule in _ONE_STAGE:
        return 1
    return 2


_explain_options = partial(
    explain_init,
    instead={
        "chunks": "PipelineOptions(microbatches=4)",
        "num_microbatches": "PipelineOptions(microbatches=4)",
        "num_stages": "PipelineOptions(ranks=2)",
        "split_spec": "PipelineOptions(cuts=['layers.4'])",
    },
)


@_explain_options
@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """The options of the backend ``pipeline``.

    Attributes:
        ranks: The number of ranks that hold a model together, -1 for all. The others divide the samples.
            With split weights, the number of groups of ranks.
        schedule: The order of the work, by torch's name: "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B",
            "InterleavedZeroBubble", "ZBVZeroBubble" or "DualPipeV"; or "auto" for the one of least predicted
            idle time among those that keep no more activations than "1F1B".
        stages_per_rank: The number of stages of each rank; 0 takes 1 for "GPipe" and "1F1B", and 2 for the
            others.
        microbatches: The number of parts of each batch, which follow each other through the stages; 0 for
            four for each rank, or one for each sample where there are fewer.
        microbatch_size: The number of samples of each part, in place of their number; 0 for none.
        samples: What has an entry for each sample, as a list of texts has, and is split like tensors. Keys or
            fields of the batch at any depth; several with dots between them are a path: ``"batch.1.names"``.
        broadcast: What each micro-batch gets whole, named in the same manner: tensors without a row for each
            sample, and lists that are as long as the batch without an entry for each.
        cuts: The names of the modules with which stages begin, without the first stage:
            ``["layers.4", "layers.8"]``. ``None`` cuts between repeated blocks, so that the stages have about
            as many parameters.
        data: How data ranks hold the weights of their stage. "ddp" gives each of them all. "fsdp" gives each
            some rows, and of gradients and optimizer state, too; weights are gathered for each batch.
        weights: How a stage's weights are held: "whole" by one rank, or "shard" by a group of ranks of
            tp-shard, which splits their tensors. Its own options are given by its own name.
        statistics: What is done with models whose forward writes buffers, as batch norm and running means do:
            "refuse" them, or let each micro-batch write in turn, as a batch of its own ("microbatch"). The
            numbers are then others than one device's.
        trace: A file for the work of all stages in the third batch, for Perfetto (ui.perfetto.dev) and
            chrome://tracing; ``None`` for none. `tp report` draws a ``NAME.trace.json`` in a run's folder.
        timeout_s: How many seconds a rank waits for another one; on accelerators, how many its groups do.
        bind_device: Whether to bind NCCL's process group to the device, as by ``device_id`` of torch's
            ``init_process_group``, so that it connects at once; ``False`` where it hangs so.

    Raises:
        ConfigError: A value is out of its range.
    """

    ranks: int = -1
    schedule: ScheduleName = "1F1B"
    stages_per_rank: int = 0
    microbatches: int = 0
    microbatch_size: int = 0
    samples: Collection[str] | str = ()
    broadcast: Collection[str] | str = ()
    cuts: Sequence[str] | None = None
    data: Literal["ddp", "fsdp"] = "ddp"
    weights: Literal["whole", "shard"] = "whole"
    statistics: Literal["refuse", "microbatch"] = "refuse"
    trace: str | None = None
    timeout_s: float = 600.0
    bind_device: bool = True

    def __post_init__(self) -> None:
        check_above_zero(self, "timeout_s")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                choices = ", ".join(map(repr, allowed))
                msg = f"PipelineOptions({name}=...) must be one of {choices}, got {getattr(self, name)!r}"
                raise ConfigError(msg)
        for name in ("ranks", "stages_per_rank", "microbatches", "microbatch_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                msg = f"PipelineOptions({name}=...) must be a whole number, got {value!r}"
                raise ConfigError(msg)
        if self.ranks != -1 and self.ranks < 1:
            msg = f"PipelineOptions(ranks=...) must be -1 for all ranks, or their number, got {self.ranks}"
            raise ConfigError(msg)
        if self.cuts is not None and not isinstance(self.cuts, Collection):
            msg = f"PipelineOptions(cuts=...) must be a list of the names of modules, got {self.cuts!r:.80}"
            raise ConfigError(msg)
        for name in ("stages_per_rank", "microbatches", "microbatch_size"):
            value = getattr(self, name)
            if value < 0:
                msg = f"PipelineOptions({name}=...) must not be negative, got {value}"
                raise ConfigError(msg)
        if self.weights != "whole" and self.data != "ddp":
            msg = (
                f"PipelineOptions(data={self.data!r}) shares whole weights over data ranks, and "
                f"weights={self.weights!r} splits them; leave one of both out"
            )
            raise ConfigError(msg)
        if self.microbatches and self.microbatch_size:
            msg = (
                "PipelineOptions takes microbatches=..., the number of parts, or microbatch_size=..., their "
                f"samples, and not both; got {self.microbatches} and {self.microbatch_size}"
            )
            raise ConfigError(msg)
        if self.schedule in V_SCHEDULES and self.stages_per_rank not in {0, 2}:
            msg = (
                f"the schedule {self.schedule!r} has two stages on each rank; leave stages_per_rank out, got "
                f"{self.stages_per_rank}"
            )
            raise ConfigError(msg)
        if self.schedule in _ONE_STAGE and self.stages_per_rank not in {0, 1}:
            msg = (
                f"the schedule {self.schedule!r} has one stage on each rank, got stages_per_rank="
                f"{self.stages_per_rank}; take 'Interleaved1F1B' for several"
            )
            raise ConfigError(msg)
        if self.schedule == "auto" and (self.stages_per_rank or self.cuts is not None):
            msg = (
                "the schedule 'auto' decides how many stages a rank has; name a schedule to give "
                "stages_per_rank or cuts"
            )
            raise ConfigError(msg)
        samples = as_names("PipelineOptions(samples=...)", self.samples)
        broadcast = as_names("PipelineOptions(broadcast=...)", self.broadcast)
        both = sorted(set(samples) & set(broadcast))
        if both:
            msg = (
                f"PipelineOptions(samples=...) has an entry for each sample, and broadcast=... what each "
                f"micro-batch needs whole: {both} cannot be both"
            )
            raise ConfigError(msg)
        if isinstance(self.trace, bool):
            msg = (
                "PipelineOptions(trace=...) must be the path of a file, as 'run/stages.trace.json', got "
                f"{self.trace!r}"
            )
            raise ConfigError(msg)
        if self.cuts is not None:
            _check_names(self.cuts)
            object.__setattr__(self, "cuts", tuple(self.cuts))


def _check_names(cuts: Sequence[str]) -> None:
    """Check that cuts are a list of different names.

    Raises:
        ConfigError: They are not.
    """
    is_text = isinstance(cuts, str)
    if is_text or not all(isinstance(name, str) for name in cuts) or len(set(cuts)) < len(cuts):
        msg = (
            "PipelineOptions(cuts=...) must be a list of the names of modules with which stages begin, "
            f"each once, as in ['layers.4', 'layers.8']; got {cuts!r}"
        )
        raise ConfigError(msg)


def depth_of(options: PipelineOptions) -> int:
    """Return the number of stages of each rank."""
    return options.stages_per_rank or default_depth(options.schedule)
