"""The backend for training loops whose step needs the whole output of the model."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from tp_core import Backend, Job, Session, Verdict

from tp_dp_gather._data_parallel import DataParallel

__all__ = ["GatherBackend", "GatherOptions", "GatherSession"]


@dataclass(frozen=True, slots=True)
class GatherOptions:
    """The options of the backend ``dp-gather``.

    Attributes:
        dim: The dimension of the rows, in inputs and outputs.
        except_keywords: Keys of the model's output that stay in parts.
    """

    dim: int = 0
    except_keywords: tuple[str, ...] = ()


class GatherBackend(Backend):
    """Runs the model on several devices in one process, and the step on the gathered output."""

    name: ClassVar[str] = "dp-gather"
    options_type: ClassVar[type] = GatherOptions

    def assess(self, job: Job) -> Verdict:
        """Fit one process with several devices, below a backend that gathers nothing."""
        processes, count = job.environment.world_size, len(job.devices)
        if processes > 1:
            return Verdict.unfit(
                f"launched as {processes} processes, and this is for several devices in one",
                remedy="start the script without a launcher",
            )
        if count == 1:
            return Verdict.unfit(f"one device, {job.devices[0]}: nothing to split over")
        traits = job.traits
        if traits is not None and traits.has_sharded_parameters:
            return Verdict.unfit("the model has sharded parameters, and replicas need whole ones")
        return Verdict.fits(
            40,
            f"{count} devices in one process; every output travels to {job.devices[0]}, where the loss "
            "is computed, so it is for steps that need the whole batch's output",
            remedy="without that need: pip install tp-tuple",
        )

    def open(self, job: Job) -> "GatherSession":
        """Open a session."""
        return GatherSession(job, self.parse_options(job))


class GatherSession(Session):
    """Runs the step once per batch, with a model that splits its input and gathers its output.

    Args:
        job: What is to be done.
        options: The backend's options.
    """

    def __init__(self, job: Job, options: GatherOptions) -> None:
        super().__init__(job)
        self._options = options

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move ``model`` to the first device and wrap it in `DataParallel`.

        Raises:
            ModelError: It is no module, or it is wrapped already.
        """
        options = self._options
        return DataParallel(
            super().prepare_model(model),
            list(self.job.devices),
            dim=options.dim,
            except_keywords=options.except_keywords,
        )

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module of a prepared model."""
        inner: nn.Module = model.module if isinstance(model, DataParallel) else model
        return inner
