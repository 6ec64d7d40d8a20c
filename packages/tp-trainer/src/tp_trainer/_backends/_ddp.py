"""The backend for one process per device: torch's DistributedDataParallel."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
from torch import nn
from tp_core.errors import ConfigError
from tp_core.internal import check_above_zero, move_module
from tp_core.jobs import MemoryNeed, replicated_memory
from tp_core.plugins import Backend, Job, Verdict
from tp_core.sessions import ProcessGroupSession, join_process_group


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


class DdpBackend(Backend[DdpOptions]):
    """Runs one process per device, on one host or several, with an all-reduce of gradients."""

    name: ClassVar[str] = "ddp"
    options_type = DdpOptions

    def assess(self, job: Job) -> Verdict:
        """Fit several processes with one device each."""
        environment, devices = job.environment, job.devices
        if not dist.is_available():
            return Verdict.unfit("this build of torch has no torch.distributed")
        if environment.world_size == 1:
            n = max(2, len(devices))
            return Verdict.unfit(
                "one process, and this takes one per device",
                remedy=f"tp launch -n {n} script.py",
            )
        if len(devices) != 1:
            return Verdict.unfit(f"{len(devices)} devices in each process, and this takes one")
        traits = job.traits
        if traits is not None and traits.has_dtensors:
            return Verdict.unfit(
                "the model has DTensors (of fully_shard or distribute_tensor), which cannot be copied",
                remedy="give the plain model",
            )
        if traits is not None and traits.has_sharded_parameters:
            return Verdict.unfit(
                "the model has sharded parameters, whose gradients must not be averaged",
                remedy="pip install tp-shard",
            )
        return Verdict.fits(
            50,
            f"{environment.world_size} processes on {environment.hosts} host(s), "
            f"one device each, {devices[0].type}",
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
        """Join the process group, unless the script has done so already."""
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
            ModelError: ``model`` is not a module, or is wrapped already.
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
        """Return DDP's context in which gradients stay on the ranks.

        Raises:
            ConfigError: The option ``static_graph`` is set.
        """
        if self.options.static_graph and model is not self.unwrap(model):
            msg = (
                "the option static_graph=True does not go with no_sync(): torch's reducer "
                "fails in it; leave static_graph out to accumulate gradients"
            )
            raise ConfigError(msg)
        return super().no_sync(model)
