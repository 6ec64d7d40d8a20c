"""The backends for one device, and for one process per device: DDP, and sharded parameters (FSDP)."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn
from tp_core import move_module
from tp_core.arguments import check_above_zero, explain_init
from tp_core.errors import ConfigError
from tp_core.fully_sharded import (
    FullyShardOptions,
    check_offload,
    find_units,
    resolve_options,
    sharded_memory,
)
from tp_core.jobs import Layout, MemoryNeed, divisors, replicated_memory
from tp_core.plugins import Backend, Job, NoOptions, RanksBackend, Session, Verdict
from tp_core.sessions import ProcessGroupSession, join_process_group

if TYPE_CHECKING:
    from tp_trainer._fsdp_session import FsdpSession


# -- one device in one process --------------------------------------------------------------------


class SingleBackend(Backend[NoOptions]):
    """Runs on one device of any type."""

    name: ClassVar[str] = "single"

    def assess(self, job: Job) -> Verdict:
        """Fit one process with one device; with further devices, name what would use them."""
        processes, devices = job.environment.world_size, job.devices
        if processes > 1:
            return Verdict.unfit(
                f"launched as {processes} processes, and this is for one",
                remedy="start the script without a launcher",
            )
        if job.traits is not None and job.traits.has_sharded_parameters:
            return Verdict.unfit(
                "the model has sharded parameters, and this is one process without others to share them with",
                remedy="give the plain model",
            )
        if len(devices) == 1:
            return Verdict.fits(50, f"one process with one device, {devices[0]}")
        count = len(devices)
        launch = f"tp launch -n {count} script.py (pip install tp-launch)"
        remedy = f"to use all {count}: {launch}, or pip install tp-tuple"
        if job.explicit_devices:
            return Verdict.unfit(f"{len(devices)} devices in one process", remedy=remedy)
        return Verdict.fits(10, f"would use {devices[0]} alone of {len(devices)} devices", remedy=remedy)

    def estimate_memory(self, job: Job) -> MemoryNeed | None:
        """Return the memory of the device; it gets the whole batch, even if there are other devices."""
        if job.footprint is None:
            return None
        return replicated_memory(job, job.footprint.with_batch_of(len(job.devices)))

    def layouts(self, job: Job) -> Iterable[Layout]:
        return [Layout(axes={})] if job.environment.world_size == 1 else []

    def open(self, job: Job) -> Session:
        """Open a plain session: its defaults are for one device in one process."""
        self.parse_options(job)
        return Session(job)


# -- one process per device: torch's DistributedDataParallel -----------------------------------------


@explain_init
@dataclass(frozen=True, slots=True)
class DdpOptions:
    """The options of the backend ``ddp``.

    Attributes:
        sync_batchnorm: Turn batch norms into SyncBatchNorm; needs an accelerator.
        find_unused_parameters: For models that do not use every parameter in every step.
        static_graph: For models that use the same parameters in every step.
        gradient_as_bucket_view: Let gradients live in the communication buckets.
        bucket_cap_mb: Size of a communication bucket in MiB; ``None`` is torch's own choice.
        process_group: torch's name of the communication backend; empty chooses by the device.
        timeout_s: How many seconds a collective waits for the other ranks.

    Raises:
        ConfigError: A size or a time is not above 0.
    """

    sync_batchnorm: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    bucket_cap_mb: float | None = None
    process_group: str = ""
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_above_zero(self, "bucket_cap_mb", "timeout_s")


class DdpBackend(RanksBackend[DdpOptions]):
    """Runs one process per device, on one host or several, with an all-reduce of gradients."""

    name: ClassVar[str] = "ddp"
    shares_samples = True
    options_type = DdpOptions

    def assess_ranks(self, job: Job) -> Verdict:
        traits = job.traits
        if traits is not None and traits.has_dtensors:
            return Verdict.unfit(
                "the model has DTensors (of fully_shard or distribute_tensor), which cannot be copied",
                remedy="give the plain model",
            )
        if traits is not None and traits.has_sharded_parameters:
            return Verdict.unfit(
                "the model has sharded parameters: their gradients must not be averaged",
                remedy="pip install tp-shard",
            )
        return Verdict.fits(
            50,
            f"{job.environment.world_size} processes on {job.environment.hosts} host(s), "
            f"one device each, {job.devices[0].type}",
        )

    def estimate_memory(self, job: Job) -> MemoryNeed | None:
        """Return the memory of a rank: a copy of everything, and the communication buckets."""
        if job.footprint is None:
            return None
        options = self.parse_options(job)
        # Gradients are views of the buckets, or are copied into them.
        buckets = 0 if options.gradient_as_bucket_view else job.footprint.gradients
        return replicated_memory(job, job.footprint, keeps_gradients=True, communication=buckets)

    def open(self, job: Job) -> "DdpSession":
        return DdpSession(job, self.parse_options(job))


class DdpSession(ProcessGroupSession):
    """One rank of a data-parallel job."""

    def __init__(self, job: Job, options: DdpOptions) -> None:
        self.options = options
        device = job.devices[0]
        if options.sync_batchnorm and device.type == "cpu":
            msg = "sync_batchnorm=True needs an accelerator: torch's SyncBatchNorm has no CPU form"
            raise ConfigError(msg)
        leave = join_process_group(
            job.environment, device=device, backend=options.process_group, timeout_s=options.timeout_s
        )
        super().__init__(job, leave=leave)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move the model to the device and wrap it in DDP; every rank starts with rank 0's weights.

        Raises:
            DisagreementError: The ranks' parameters differ in name, shape or type.

        Collectives: an all-gather of the parameters' descriptions, a broadcast of the weights.
        """
        self.check_plain(model)
        self.check_same_parameters(model)
        model = move_module(model, self.device)
        options = self.options
        if options.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return self.average_gradients(
            model,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            bucket_cap_mb=options.bucket_cap_mb,
        )

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return DDP's context in which gradients stay on the ranks."""
        if self.options.static_graph and model is not self.unwrap(model):
            msg = (
                "the option static_graph=True does not go with no_sync(): torch's reducer "
                "fails in it; leave static_graph out to accumulate gradients"
            )
            raise ConfigError(msg)
        return super().no_sync(model)


# -- sharded parameters: torch's fully_shard ---------------------------------------------------------


@explain_init
@dataclass(frozen=True, slots=True)
class FsdpOptions(FullyShardOptions):
    """The options of the backend ``fsdp``: `tp_core.fully_sharded.FullyShardOptions`, and a timeout.

    Attributes:
        timeout_s: How many seconds a collective waits for the other ranks.

    Raises:
        ConfigError: A value is out of its range.

    Example:
        >>> FsdpOptions(units="GPT2Block", reshard_after_forward=False)  # doctest: +SKIP
    """

    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        FullyShardOptions.__post_init__(self)  # not super(): slots=True makes a new class, and super() fails
        check_above_zero(self, "timeout_s")


class FsdpBackend(RanksBackend[FsdpOptions]):
    """Runs one process per device; each process holds a shard of every parameter."""

    name: ClassVar[str] = "fsdp"
    shares_samples = True
    options_type = FsdpOptions

    def has_use_alone(self, job: Job) -> bool:
        """Return whether one process can use it: to offload what one accelerator has no memory for."""
        devices = job.devices
        return len(devices) == 1 and devices[0].type != "cpu" and self.parse_options(job).offload is True

    def assess_ranks(self, job: Job) -> Verdict:
        """Fit a plain model, or one that the user has sharded; name the sharded units."""
        options, model, size = self.parse_options(job), job.model, job.environment.world_size
        _check_ranks(options, size)
        over = (
            f"{size} process{'es' * (size > 1)}"
            if options.replicas == 1
            else f"{size // options.replicas} of {size} processes"
        )
        if model is None:
            return Verdict.fits(40, f"parameters sharded over {over}; ddp is faster where a model fits")
        from tp_core.fully_sharded import describe_presharded  # to list the backends takes no sharding

        given = describe_presharded(model)
        if given is not None:
            # Above ddp's score: no other backend trains a model that the user has sharded.
            return Verdict.fits(60, f"{given}, over {over}")
        if job.traits is not None and job.traits.has_sharded_parameters:
            return Verdict.unfit(
                "the model's parameters are split otherwise already", remedy="give the plain model"
            )
        units = find_units(model, options.units)
        chosen = ""
        if job.footprint is not None:
            found = resolve_options(job, options, ranks=size // options.replicas)
            ways = {
                "kept after the forward pass": found.reshard_after_forward is False,
                "with checkpointed activations": found.activation_checkpointing,
                "offloaded to the host": found.offload,
            }
            chosen = "".join(f", {way}" for way, is_on in ways.items() if is_on)
        reason = f"parameters sharded over {over}{chosen}, {units}; ddp is faster where a model fits"
        return Verdict.fits(40, reason)

    def estimate_memory(self, job: Job) -> MemoryNeed | None:
        """Return the memory of a rank: its shards, and the units that are whole for a time."""
        options = self.parse_options(job)
        return sharded_memory(job, options, ranks=job.environment.world_size // options.replicas)

    def layouts(self, job: Job) -> Iterable[Layout]:
        """Return each number of copies, with parameters that are gathered once for a batch or twice."""
        size, model = job.environment.world_size, job.model
        if model is not None and size > 1:
            find_units(model, self.parse_options(job).units)  # which refuses some models
        return [
            Layout(
                axes={"data": size // shards, "fsdp": shards},
                options={
                    "fsdp": {
                        "replicas": size // shards,
                        "reshard_after_forward": again,
                        "activation_checkpointing": False,
                        "offload": False,
                    }
                },
            )
            for shards in divisors(size)
            for again in (False, True)
        ]

    def open(self, job: Job) -> "FsdpSession":
        """Join the process group, unless the script has, and leave it when the session is closed.

        Raises:
            ConfigError: The options do not fit the ranks or the device.
        """
        from tp_trainer._fsdp_session import FsdpSession

        options = self.parse_options(job)  # before the process group is joined
        _check_ranks(options, job.environment.world_size)
        options = resolve_options(job, options, ranks=job.environment.world_size // options.replicas)
        device = job.devices[0]
        check_offload(options, job)
        leave = join_process_group(job.environment, device=device, timeout_s=options.timeout_s)
        return FsdpSession(job, options, leave=leave)


def _check_ranks(options: FsdpOptions, size: int) -> None:
    if size % options.replicas:
        msg = (
            f"the option replicas={options.replicas} of backend 'fsdp' spreads the ranks over as many copies "
            f"of the model, and {size} ranks are not a multiple of it"
        )
        raise ConfigError(msg)
