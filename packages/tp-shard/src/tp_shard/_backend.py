"""The backend for models that are split over processes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from tp_core.arguments import check_above_zero, explain_init
from tp_core.errors import ConfigError
from tp_core.jobs import Footprint, Layout, MemoryNeed, ModelTraits, replicated_memory
from tp_core.plugins import Job, RanksBackend, Verdict

if TYPE_CHECKING:  # backends that are not chosen cost nothing
    from torch import nn
    from tp_core.fully_sharded import FullyShardOptions

    from tp_shard._session import ShardSession


@explain_init
@dataclass(frozen=True, slots=True)
class ShardOptions:
    """The options of the backend ``shard``.

    Attributes:
        group_size: The number of ranks that hold one copy of the model, -1 for all. It counts if
            ``ts.distributed.init_process_group`` has not formed the groups.
        find_unused_parameters: For models that do not use every parameter in every step.
        bucket_cap_mb: Size of a communication bucket between copies, in MiB; ``None`` for torch's default.
        data: The parallelism over copies of the model. "ddp" averages gradients between ranks that hold the
            same shards. "fsdp" shards those once more over the copies, with gradients and optimizer state, by
            torch's ``fully_shard``; `tp_core.fully_sharded.FullyShardOptions` sets its details. "auto" is
            "ddp" if the estimated memory suffices, else "fsdp".

    Raises:
        ConfigError: ``data`` has another value, an option does not apply to it, or a bucket is not above 0.
    """

    group_size: int = -1
    find_unused_parameters: bool = False
    bucket_cap_mb: float | None = None
    data: "Literal['auto', 'ddp', 'fsdp'] | FullyShardOptions" = "auto"

    def __post_init__(self) -> None:
        check_above_zero(self, "bucket_cap_mb")
        if not isinstance(self.group_size, int) or (self.group_size < 1 and self.group_size != -1):
            msg = (
                "ShardOptions(group_size=...) must be -1 for all ranks, or their number, got "
                f"{self.group_size!r}"
            )
            raise ConfigError(msg)
        if self.data in ("auto", "ddp"):
            return
        if self.fully_sharded is None:
            msg = (
                "the option data of backend 'shard' must be 'auto', 'ddp', 'fsdp' or "
                f"FullyShardOptions(...), got {self.data!r}"
            )
            raise ConfigError(msg)
        if self.find_unused_parameters or self.bucket_cap_mb is not None:
            msg = (
                "the options find_unused_parameters and bucket_cap_mb of backend 'shard' are for data='ddp': "
                "fully sharded data has no buckets or unused parameters; leave them out"
            )
            raise ConfigError(msg)

    @property
    def fully_sharded(self) -> "FullyShardOptions | None":
        """The options for sharding shards over the copies; ``None`` if ``data`` does not ask for it."""
        from tp_core.fully_sharded import FullyShardOptions

        if isinstance(self.data, FullyShardOptions):
            return self.data
        if self.data == "fsdp":
            return FullyShardOptions()
        return None


_SEGMENT = 2 * 2**20
"""The bytes of a segment for small blocks; see :class:`tp_core.jobs.CachingAllocator`."""


class ShardBackend(RanksBackend[ShardOptions]):
    """A backend with one process per device: groups of them hold a copy of the model together."""

    name: ClassVar[str] = "shard"
    shares_samples = True
    options_type = ShardOptions

    def assess_ranks(self, job: Job) -> Verdict:
        """Fit a model with split parameters."""
        if job.traits is None:
            return Verdict.fits(5, "no model is known yet; this is for models with split parameters")
        if job.traits.has_dtensors and not _is_fully_sharded(job.model):
            return Verdict.unfit("the model has DTensors, and this takes tp-shard's layers, of plain tensors")
        if not job.traits.has_sharded_parameters:
            return Verdict.unfit(
                "the model has no split parameters",
                remedy="call ts.distributed.init_process_group() before the model is made of parallel layers",
            )
        copies = self._describe_copies(job)
        return Verdict.fits(
            80, f"the model is split over ranks, {job.environment.world_size} processes in all{copies}"
        )

    def _describe_copies(self, job: Job) -> str:
        from tp_core.fully_sharded import find_units

        options = self._fully_sharded(job)
        if options is None:
            return ""
        if job.model is None:
            units = ""
        else:
            units = f", {find_units(job.model, options.units)}"
        return f"; shards are fully sharded over the copies{units}"

    def estimate_memory(self, job: Job) -> MemoryNeed | None:
        """Return the memory of each rank: for its shards, and for the batch of all ranks of its copy.

        A plain model is split as proven plans of transformers do it, in groups of the option ``group_size``.
        """
        if job.footprint is None:
            return None
        if job.model is not None and _is_plain(job.model):
            return self._memory_of_plain(job, job.footprint, job.model)
        need = self._memory_of_split(job, job.footprint)
        if need is None or need.activations is None or job.model is None or self._ranks(job)[0] == 1:
            return need
        from tp_shard._training import comparison_nbytes

        # Of the first gradients, when the optimizer has no state yet.
        compared = comparison_nbytes(job.model) - need.optimizer
        need = replace(need, activations=max(need.activations, compared))
        if need.reserved is None:
            return need
        # Its blocks are small ones, which segments of 2 MiB have.
        reserved = math.ceil(need.total / _SEGMENT) * _SEGMENT
        return replace(need, reserved=max(need.reserved, reserved))

    def _memory_of_split(self, job: Job, footprint: Footprint) -> MemoryNeed | None:
        options = self._fully_sharded(job)
        if options is None:
            return self._need_of_ddp(job, footprint)
        from tp_core.fully_sharded import sharded_memory

        together, copies = self._ranks(job)
        footprint = footprint.with_batch_of(together * footprint.part)
        ranks = max(1, copies // options.replicas)
        return sharded_memory(replace(job, footprint=footprint), options, ranks=ranks)

    def _memory_of_plain(self, job: Job, footprint: Footprint, model: "nn.Module") -> MemoryNeed | None:
        from tp_shard._split_memory import plain_memory

        options = self.parse_options(job)
        ranks = options.group_size
        if ranks == -1:  # all ranks
            ranks = job.environment.world_size
        of_group = footprint.with_batch_of(ranks * footprint.part)
        return plain_memory(job, of_group, model, ranks, options.fully_sharded)

    def ranks_per_model(self, job: Job) -> int:
        """Return the ranks of a group, which is formed or asked for."""
        return self._ranks(job)[0]

    def layouts(self, job: Job) -> Iterable[Layout]:
        """Return numbers of ranks that split tensors, each with how the copies share samples."""
        from tp_shard._split_memory import list_layouts

        world_size = job.environment.world_size
        if job.model is None or world_size == 1:
            return []
        return list_layouts(job.model, world_size)

    def _need_of_ddp(self, job: Job, footprint: Footprint) -> MemoryNeed:
        together, copies = self._ranks(job)
        of_group = footprint.with_batch_of(together * footprint.part)
        return replicated_memory(job, of_group, keeps_gradients=job.accumulate > 1 or copies > 1)

    def _ranks(self, job: Job) -> tuple[int, int]:
        """Return the number of ranks that hold a copy of the model together, and the number of copies."""
        from tp_shard._groups._group import current_group

        world_size = job.environment.world_size
        formed = current_group()
        if formed is not None:
            group_size = formed.size
        else:
            group_size = self.parse_options(job).group_size
            if group_size == -1:  # all ranks
                group_size = world_size
        return group_size, max(1, world_size // group_size)

    def _fully_sharded(self, job: Job) -> "FullyShardOptions | None":
        """Return the options for sharding shards over the copies; ``None`` if they are not."""
        options = self.parse_options(job)
        if options.data != "auto" or job.footprint is None:
            return options.fully_sharded
        is_ddp = options.find_unused_parameters or options.bucket_cap_mb is not None
        if is_ddp or self._ranks(job)[1] == 1 or self._need_of_ddp(job, job.footprint).fits:
            return None
        from tp_core.fully_sharded import FullyShardOptions

        return FullyShardOptions()

    def adapt_model(self, model: "nn.Module", inputs: object) -> "nn.Module":
        """Find a plan for a plain model, and split it over all ranks.

        Where nothing is worth splitting, as in a network with one small head, the outputs of its linear
        layers are split and joined again.

        Collectives: those of forming the groups, if they are not formed yet, and of ``verify``.
        """
        from tp_shard import distributed, plans
        from tp_shard._plans._parallelize import parallelize
        from tp_shard._plans._styles import Column, Style
        from tp_shard._verify._report import verify
        from tp_shard.nn._convert import is_linear

        if not distributed.is_initialized():
            distributed.init_process_group()
        try:
            plan = plans.auto(model, inputs, verbose=False)
        except ConfigError:
            names = [name for name, module in model.named_modules() if is_linear(module)]
            joined: dict[str, Style] = dict.fromkeys(names, Column(gather_output=True))
            if inputs is None or not joined or not verify(model, joined, inputs).ok:
                raise
            return parallelize(model, joined)
        return parallelize(model, plan)

    def open(self, job: Job) -> "ShardSession":
        """Join the process group and form the model-parallel groups, unless the script has.

        Raises:
            ConfigError: The group size does not divide the number of ranks, or the sharding options do not
                fit the ranks or the device.

        Collectives: those of forming the groups, if they are not formed yet.
        """
        options = self.parse_options(job)
        sharded = self._fully_sharded(job)
        if sharded is not None:
            from tp_core.fully_sharded import check_offload, resolve_options

            from tp_shard._session import ShardFsdpSession

            copies = self._ranks(job)[1]
            sharded = resolve_options(job, sharded, ranks=max(1, copies // sharded.replicas))
            check_offload(sharded, job)
            return ShardFsdpSession(job, group_size=options.group_size, options=sharded)
        from tp_shard._session import ShardSession

        return ShardSession(
            job,
            group_size=options.group_size,
            find_unused_parameters=options.find_unused_parameters,
            bucket_cap_mb=options.bucket_cap_mb,
        )


def _is_plain(model: "nn.Module") -> bool:
    traits = ModelTraits.of(model)
    return not (traits.has_sharded_parameters or traits.has_dtensors)


def _is_fully_sharded(model: "nn.Module | None") -> bool:
    """Return whether a model has DTensors that are shards of ours, as after an earlier preparation."""
    from tp_core.tensors import is_dtensor

    from tp_shard._shards import holds_shard

    return model is not None and any(is_dtensor(p) and holds_shard(p) for p in model.parameters())
