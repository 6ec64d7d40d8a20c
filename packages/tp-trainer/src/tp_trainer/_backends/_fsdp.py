"""The backend for sharded models: torch's ``fully_shard``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch.distributed as dist
from tp_core.errors import ConfigError, ModelError
from tp_core.internal import (
    check_above_zero,
    check_offload,
    describe_presharded,
    find_units,
    resolve_options,
    sharded_memory,
)
from tp_core.jobs import MemoryNeed
from tp_core.plugins import Backend, Job, Verdict
from tp_core.sessions import FullyShardOptions, join_process_group

if TYPE_CHECKING:
    from tp_trainer._backends._fsdp_session import FsdpSession


@dataclass(frozen=True, slots=True)
class FsdpOptions(FullyShardOptions):
    """The options of the backend ``fsdp``: `tp_core.sessions.FullyShardOptions`, and a timeout.

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


class FsdpBackend(Backend[FsdpOptions]):
    """Runs one process per device; each process holds a shard of every parameter."""

    name: ClassVar[str] = "fsdp"
    options_type = FsdpOptions

    def assess(self, job: Job) -> Verdict:
        """Fit several processes with one device each, or one that offloads; name the sharded units."""
        environment, devices = job.environment, job.devices
        if not dist.is_available():
            return Verdict.unfit("this build of torch has no torch.distributed")
        try:
            options = self.parse_options(job)
            has_use_alone = options.offload is True and len(devices) == 1 and devices[0].type != "cpu"
            if environment.world_size == 1 and not has_use_alone:
                n = max(2, len(devices))
                return Verdict.unfit(
                    "one process, and this shards over several", remedy=f"tp launch -n {n} script.py"
                )
            if len(devices) != 1:
                return Verdict.unfit(f"{len(devices)} devices in each process, and this takes one")
            _check_ranks(options, environment.world_size)
            return self._assess_model(job, options)
        except (ConfigError, ModelError) as error:
            return Verdict.unfit(str(error))

    def _assess_model(self, job: Job, options: FsdpOptions) -> Verdict:
        model, size = job.model, job.environment.world_size
        over = (
            f"{size} process{'es' * (size > 1)}"
            if options.replicas == 1
            else f"{size // options.replicas} of {size} processes"
        )
        if model is None:
            return Verdict.fits(40, f"parameters sharded over {over}; ddp is faster where a model fits")
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

    def open(self, job: Job) -> "FsdpSession":
        """Join the process group, unless the script has, and leave it when the session is closed.

        Raises:
            ConfigError: The options do not fit the ranks or the device.
        """
        from tp_trainer._backends._fsdp_session import FsdpSession

        options = self.parse_options(job)  # before the process group is joined
        _check_ranks(options, job.environment.world_size)
        options = resolve_options(job, options, ranks=job.environment.world_size // options.replicas)
        device = job.devices[0]
        check_offload(options, job)
        leave = join_process_group(job.environment, device=device, timeout_s=options.timeout_s)
        return FsdpSession(job, options, leave=leave)


def _check_ranks(options: FsdpOptions, size: int) -> None:
    """Make sure that the ranks can be divided into replicas.

    Raises:
        ConfigError: The number of ranks is not a multiple of ``replicas``.
    """
    if size % options.replicas:
        msg = (
            f"the option replicas={options.replicas} of backend 'fsdp' spreads the ranks over as many copies "
            f"of the model, and {size} ranks are not a multiple of it"
        )
        raise ConfigError(msg)
