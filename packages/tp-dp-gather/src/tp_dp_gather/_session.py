"""The session of the backend ``dp-gather``."""

from typing import Any

from torch import nn
from tp_core.plugins import Job, Session, StepOutput

from tp_dp_gather._by_parts import Step, has_loss_of_each_part, output_by_parts
from tp_dp_gather._data_parallel import DataParallel
from tp_dp_gather._options import GatherOptions

__all__ = ["GatherSession"]


class GatherSession(Session):
    """Runs the step once per batch, with a model that splits its input and gathers its output.

    Args:
        job: What is to be done.
        options: The backend's options.
    """

    def __init__(self, job: Job, options: GatherOptions) -> None:
        super().__init__(job)
        self._options = options
        # The last step that several devices ran, and whether it got a loss of each of them.
        self._known: tuple[Step, bool] | None = None

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move ``model`` to the first device and wrap it in `DataParallel`.

        Raises:
            ModelError: ``model`` is not a module, or it is wrapped already.
        """
        options = self._options
        return DataParallel(
            super().prepare_model(model),
            list(self.job.devices),
            dim=options.dim,
            except_keywords=options.except_keywords,
        )

    def compile_model(self, model: nn.Module) -> None:
        """Compile the user's module and its replicas; scattering and gathering stay outside."""
        if isinstance(model, DataParallel):
            model.replicas.compile()
        else:
            super().compile_model(model)

    def refresh(self, model: nn.Module) -> None:
        """Copy all parameters and buffers to the other devices before the next step."""
        if isinstance(model, DataParallel):
            model.refresh()

    def run(self, step: Step, model: nn.Module, batch: Any) -> StepOutput:
        """Run the step on the whole batch.

        Where the model computes its loss itself (as those of transformers do when they are given labels)
        the devices' losses come as a vector. The step is then called once more for each device's part, with
        what the model has returned for it, and the outputs are combined by the parts' weights, or samples.

        Raises:
            StepError: The batch cannot be split as the model's input was.
        """
        # Parts are held on to until the end of a step: not by steps that are known to need none.
        known = self._known
        if not isinstance(model, DataParallel) or (known and known[0] is step and not known[1]):
            return step(model, batch)
        with model.recorded() as calls:
            output = step(model, batch)
        if not any(len(parts) > 1 for parts in calls):
            return output
        self._known = step, has_loss_of_each_part(output, calls)
        if not self._known[1]:
            return output
        return output_by_parts(step, model, batch, calls, loss=self.job.loss)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module of a prepared model."""
        inner: nn.Module = model.module if isinstance(model, DataParallel) else model
        return inner
