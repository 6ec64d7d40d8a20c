"""Models that Hugging Face Accelerate prepares, in runs of tp."""

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn
from tp_core.errors import ConfigError
from tp_core.plugins import Backend, Job, Verdict
from tp_core.sessions import ProcessGroupSession, join_process_group

__all__ = ["AccelerateBackend", "AccelerateOptions", "AccelerateSession"]


@dataclass(frozen=True, slots=True)
class AccelerateOptions:
    """The options of the backend ``accelerate``: those of its DistributedDataParallelKwargs.

    Attributes:
        find_unused_parameters: For models that do not use every parameter in every step.
        gradient_as_bucket_view: Let gradients live in the communication buckets.
        bucket_cap_mb: Size of a communication bucket in MiB.
        comm_hook: How gradients travel: "no", "fp16", "bf16", "power_sgd" or "batched_power_sgd".
    """

    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    bucket_cap_mb: int = 25
    comm_hook: str = "no"

    def __post_init__(self) -> None:
        known = [hook.value for hook in DDPCommunicationHookType]
        if self.comm_hook not in known:
            names = ", ".join(map(repr, known))
            raise ConfigError(f"comm_hook must be one of {names}, got {self.comm_hook!r}")


class AccelerateBackend(Backend[AccelerateOptions]):
    """Runs one process per device; Accelerate wraps the model, tp does all else."""

    name: ClassVar[str] = "accelerate"
    options_type = AccelerateOptions

    def assess(self, job: Job) -> Verdict:
        """Fit several processes with one device each and a plain model."""
        environment = job.environment
        if environment.world_size == 1:
            return Verdict.unfit(
                "one process, and this takes one per device", remedy="tp launch -n 2 script.py"
            )
        if len(job.devices) != 1:
            return Verdict.unfit(f"{len(job.devices)} devices in each process, and this takes one")
        traits = job.traits
        if traits is not None and (traits.has_sharded_parameters or traits.has_dtensors):
            return Verdict.unfit("the model's parameters are split", remedy="give the plain model")
        return Verdict.fits(20, f"{environment.world_size} processes, wrapped by Accelerate")

    def open(self, job: Job) -> "AccelerateSession":
        """Join the process group, which Accelerate then takes as it is."""
        options = self.parse_options(job)  # before anything is started
        leave = join_process_group(job.environment, device=job.devices[0])
        return AccelerateSession(job, options, leave=leave)


class AccelerateSession(ProcessGroupSession):
    """One rank of a job whose model Accelerate has prepared.

    A step gets what Accelerate hands out: the wrapper, which can be called. Methods and attributes
    of the user's own module are at ``model.module``.
    """

    def __init__(self, job: Job, options: AccelerateOptions, *, leave: Any) -> None:
        super().__init__(job, leave=leave)
        handler = DistributedDataParallelKwargs(
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            bucket_cap_mb=options.bucket_cap_mb,
            comm_hook=DDPCommunicationHookType(options.comm_hook),
        )
        environ = dict(os.environ)
        try:
            self._accelerator = Accelerator(
                cpu=self.device.type == "cpu",
                device_placement=False,  # devices, data and precision are tp's
                mixed_precision="no",
                kwargs_handlers=[handler],
            )
        except BaseException:
            self.close()
            raise
        finally:
            os.environ.clear()  # where it has written the launcher's variables anew
            os.environ.update(environ)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Have Accelerate wrap the model; every rank starts with rank 0's weights.

        Collectives: an all-gather of the parameters' descriptions, a broadcast of the weights.
        """
        self.check_plain(model)
        self.check_same_parameters(model)
        is_trained = any(
            p.requires_grad for p in model.parameters()
        )  # else torch refuses to wrap it
        prepared: nn.Module = self._accelerator.prepare_model(
            model.to(self.device), evaluation_mode=not is_trained
        )
        return prepared

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return Accelerate's own context that leaves the gradients on the ranks."""
        context: AbstractContextManager[None] = self._accelerator.no_sync(model)
        return context

    def close(self) -> None:
        """Forget Accelerate's state, which is that of the process, and leave the group."""
        if not self.closed:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        super().close()
