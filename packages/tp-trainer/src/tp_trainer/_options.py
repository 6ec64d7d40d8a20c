"""The options of the backends ``ddp`` and ``fsdp``."""

from dataclasses import dataclass

from tp_core.arguments import check_above_zero, explain_init
from tp_core.fully_sharded import FullyShardOptions


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
        bind_device: Whether to bind NCCL's process group to the device, as by ``device_id`` of torch's
            ``init_process_group``, so that it connects at once; ``False`` where it hangs so.

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
    bind_device: bool = True

    def __post_init__(self) -> None:
        check_above_zero(self, "bucket_cap_mb", "timeout_s")


@explain_init
@dataclass(frozen=True, slots=True)
class FsdpOptions(FullyShardOptions):
    """The options of the backend ``fsdp``: `FullyShardOptions` of tp-core, and the process group's.

    Attributes:
        timeout_s: How many seconds a collective waits for the other ranks.
        bind_device: Whether to bind NCCL's process group to the device, as by ``device_id`` of torch's
            ``init_process_group``, so that it connects at once; ``False`` where it hangs so.

    Raises:
        ConfigError: A value is out of its range.

    Example:
        >>> FsdpOptions(units="GPT2Block", reshard_after_forward=False)  # doctest: +SKIP
    """

    timeout_s: float = 600.0
    bind_device: bool = True

    def __post_init__(self) -> None:
        FullyShardOptions.__post_init__(self)  # not super(): slots=True makes a new class, and super() fails
        check_above_zero(self, "timeout_s")
