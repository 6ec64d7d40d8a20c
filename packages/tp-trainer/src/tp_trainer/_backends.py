"""The backends for one device, and for one process per device: DDP, and sharded parameters (FSDP)."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from tp_core.errors import ConfigError
from tp_core.fully_sharded import (
    check_offload,
    find_units,
    resolve_options,
    sharded_memory,
)
from tp_core.jobs import BUCKET_NBYTES, Layout, MemoryNeed, divisors, replicated_memory
from tp_core.plugins import Backend, Job, NoOptions, RanksBackend, Session, Verdict
from tp_core.sessions import join_process_group

from tp_trainer._options import DdpOptions, FsdpOptions

if TYPE_CHECKING:
    from tp_trainer._ddp_session import DdpSession
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
        if job.environment.world_size == 1:
            return [Layout(axes={})]
        return []

    def open(self, job: Job) -> Session:
        """Open a plain session: its defaults are for one device in one process."""
        self.parse_options(job)
        return Session(job)


# -- one process per device: torch's DistributedDataParallel -----------------------------------------


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
        if options.gradient_as_bucket_view:
            buckets = 0
        else:
            buckets = job.footprint.gradients
        size = BUCKET_NBYTES if options.bucket_cap_mb is None else int(options.bucket_cap_mb * 2**20)
        return replicated_memory(
            job, job.footprint, keeps_gradients=True, communication=buckets, bucket_nbytes=size
        )

    def open(self, job: Job) -> "DdpSession":
        from tp_trainer._ddp_session import DdpSession

        return DdpSession(job, self.parse_options(job))


# -- sharded parameters: torch's fully_shard ---------------------------------------------------------


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
        if options.replicas == 1:
            over = f"{size} process{'es' * (size > 1)}"
        else:
            over = f"{size // options.replicas} of {size} processes"
        if model is None:
            return Verdict.fits(40, f"parameters sharded over {over}; ddp is faster where a model fits")
        from tp_core.fully_sharded import describe_presharded  # to list the backends takes no sharding

        presharded = describe_presharded(model)
        if presharded is not None:
            # Above ddp's score: no other backend trains a model that the user has sharded.
            return Verdict.fits(60, f"{presharded}, over {over}")
        if job.traits is not None and job.traits.has_sharded_parameters:
            return Verdict.unfit(
                "the model's parameters are split otherwise already", remedy="give the plain model"
            )
        units = find_units(model, options.units)
        chosen = ""
        if job.footprint is not None:
            resolved = resolve_options(job, options, ranks=size // options.replicas)
            savings = {
                "kept after the forward pass": resolved.reshard_after_forward is False,
                "with checkpointed activations": resolved.activation_checkpointing,
                "offloaded to the host": resolved.offload,
            }
            chosen = "".join(f", {saving}" for saving, is_on in savings.items() if is_on)
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
        leave = join_process_group(
            job.environment, device=device, timeout_s=options.timeout_s, bind_device=options.bind_device
        )
        return FsdpSession(job, options, leave=leave)


def _check_ranks(options: FsdpOptions, size: int) -> None:
    if size % options.replicas:
        msg = (
            f"the option replicas={options.replicas} of backend 'fsdp' spreads the ranks over as many copies "
            f"of the model, and {size} ranks are not a multiple of it"
        )
        raise ConfigError(msg)
