"""The session of the backend ``dp-gather``."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from tp_core.errors import StepError
from tp_core.internal import Envelope, iterates_itself
from tp_core.plugins import Job, PreparedLoader, Session, StepOutput

from tp_dp_gather._by_parts import Step, has_loss_of_each_part, output_by_parts
from tp_dp_gather._data_parallel import DataParallel
from tp_dp_gather._options import GatherOptions
from tp_dp_gather._samples import CountedCollate, Known, Marker

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
        self._batches = Known()
        # The last step that several devices ran, and whether it got a loss of each of them.
        self._known: tuple[Step, bool] | None = None

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move ``model`` to the first device and wrap it in `DataParallel`.

        Raises:
            ModelError: ``model`` is not a module, or it is wrapped already.
        """
        options = self._options
        prepared = DataParallel(
            super().prepare_model(model),
            list(self.job.devices),
            dim=options.dim,
            except_keywords=options.except_keywords,
            broadcast=options.broadcast,
        )
        prepared.scattering = replace(prepared.scattering, known=self._batches)
        return prepared

    def prepare_loader(
        self, loader: Iterable[Any], *, training: bool = True, shard: bool = True
    ) -> PreparedLoader:
        """Return a loader of whole batches, in which lists with an entry for each sample are marked.

        Raises:
            LoaderError: The loader cannot be iterated.
        """
        # A class that iterates itself looks into its batches: their number of samples stays unknown.
        is_counted = (
            isinstance(loader, DataLoader)
            and loader.batch_sampler is not None
            and not iterates_itself(loader)
        )
        marker = Marker(self._options.dim, self._batches)
        return PreparedLoader(
            loader,
            seed=self.job.seed,
            training=training,
            shard=shard,
            move=partial(self.move_batch, marker=marker),
            on_share=self.take_share,
            collate=CountedCollate if is_counted else None,
        )

    def move_batch(self, batch: Any, *, marker: Marker | None = None) -> Any:
        """Move a batch to the first device, and mark what it has of each sample."""
        if not isinstance(batch, Envelope):
            return super().move_batch(batch)
        moved = super().move_batch(batch.batch)
        return moved if marker is None else marker.mark(moved, batch.samples, batch.layout)

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
        with self._batches.in_parts("in a step whose model returns a loss of each device"):
            return output_by_parts(step, model, batch, calls, loss=self.job.loss)

    def check_in_step(self, what: str, *, may_meet: bool = False) -> None:  # noqa: ARG002 - parts never meet
        """Make sure that this is not called where there is one device's part of the batch.

        Raises:
            StepError: It is, in whatever thread.
        """
        for where in tuple(self._batches.running.values()):
            msg = (
                f"{what} was called {where}, where each device has its part of the batch; call it in the "
                "step, on what the model returns of each sample, as the step sees the whole batch, or take "
                "Trainer(backend='tuple')"
            )
            raise StepError(msg)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module of a prepared model."""
        inner: nn.Module = model.module if isinstance(model, DataParallel) else model
        return inner
