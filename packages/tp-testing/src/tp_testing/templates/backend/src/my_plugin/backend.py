"""One device, with activations that wait for the backward pass in the host's memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn
from torch.autograd.graph import save_on_cpu
from tp_core.data import StepOutput
from tp_core.jobs import MemoryNeed, replicated_memory
from tp_core.plugins import Backend, Job, Session, Verdict

__all__ = ["MyPluginBackend", "MyPluginOptions"]


@dataclass(frozen=True, slots=True)
class MyPluginOptions:
    """The options of the backend.

    Attributes:
        pin_memory: Take page-locked memory, from which copies to the device are faster.
    """

    pin_memory: bool = False


class MyPluginBackend(Backend[MyPluginOptions]):
    """Runs on one device, and keeps there what a step needs at the moment."""

    name: ClassVar[str] = "my-plugin"
    options_type = MyPluginOptions

    def assess(self, job: Job) -> Verdict:
        """Fit one process with one device and a plain model; nothing is started here."""
        if job.environment.world_size > 1:
            return Verdict.unfit(
                f"launched as {job.environment.world_size} processes, and this is for one",
                remedy="start the script without a launcher",
            )
        if len(job.devices) > 1:
            return Verdict.unfit(
                f"{len(job.devices)} devices, and this takes one", remedy="devices=1"
            )
        traits = job.traits
        if traits is not None and (traits.has_sharded_parameters or traits.has_dtensors):
            return Verdict.unfit("the model's parameters are split", remedy="give the plain model")
        # Below "single": it is taken where it is asked for, or where nothing else fits in memory.
        return Verdict.fits(20, f"one device, {job.devices[0]}, with activations on the host")

    def estimate_memory(self, job: Job) -> MemoryNeed | None:
        """Return what the device needs; what is left of the activations there is not known."""
        if job.footprint is None:
            return None
        return replace(replicated_memory(job, job.footprint), activations=None)

    def open(self, job: Job) -> Session:
        """Open a session with the job's options."""
        return MyPluginSession(job, self.parse_options(job))


class MyPluginSession(Session):
    """A session is correct for one device as it is: here is what differs."""

    def __init__(self, job: Job, options: MyPluginOptions) -> None:
        super().__init__(job)
        self._pins = options.pin_memory and self.device.type != "cpu"

    def run(
        self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any
    ) -> StepOutput:
        """Run the step; what autograd keeps of it goes to the host."""
        with save_on_cpu(pin_memory=self._pins):
            return step(model, batch)
