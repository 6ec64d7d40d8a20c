"""What is computed from the samples of all ranks: evaluation, predictions, gathered rows."""

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tp_trainer._checks._objects import check_loader, check_model
from tp_trainer._checks._values import check_callable
from tp_trainer._steps._step import Step
from tp_trainer._trainer._base import TrainerBase

if TYPE_CHECKING:
    from tp_trainer._metrics._evaluation import Predictions
    from tp_trainer._metrics._metric import Metric

__all__ = ["WholeSets"]

log = logging.getLogger("tp_trainer")


class WholeSets(TrainerBase):
    """Evaluates and predicts over whole sets, and gathers the rows of all ranks."""

    def evaluate(
        self,
        model: nn.Module,
        loader: Iterable[Any] | Mapping[str, Iterable[Any]],
        *,
        step: Step,
        metrics: "Mapping[str, Metric] | None" = None,
        shard: bool = True,
    ) -> dict[str, Any]:
        """Return the means of what ``step`` returns over the samples of ``loader``, and metrics, by name.

        Each sample, or unit of the step's weights, counts once, whatever the number of ranks and the
        size of the last batch. Training goes on afterwards as if nothing had been.

        Args:
            model: The plain model, or the prepared one.
            loader: Yields the batches. Of several, by name, the results are named "name/...".
            step: ``step(model, batch)`` returns the loss, or a dict of numbers to be averaged, with or
                without "loss". Under a metric's name it returns the arguments of its ``update``: a tuple, a
                dict, or one value, which are not averaged.
            metrics: Objects with ``update``, ``compute`` and ``reset``, by name: of torchmetrics, torcheval,
                or :class:`FunctionMetric`. Each is fed with all samples in the order of the data, on every
                rank alike, and is left as it is then.
            shard: Whether the loader is split over the data ranks.

        Returns:
            Means and numbers of metrics as floats, larger results of metrics as tensors on
            the CPU; nothing for a loader without samples.

        Raises:
            ConfigError: The model, a loader, the step, a metric or a name cannot be used.
            LoaderError: A loader cannot be split over the ranks.
            StepError: The step returned what cannot be averaged, or nothing for a metric; or the metric
                raised an error.
        """
        from tp_trainer._metrics._evaluation import evaluate, named_loaders
        from tp_trainer._metrics._metric import check_metrics

        check_model("evaluate()", model)
        check_callable("step", step)
        loaders, checked = named_loaders("loader", loader), check_metrics(metrics)
        for each in loaders.values():
            check_loader("loader", each)
        model = self._prepare_model(model)
        results: dict[str, Any] = {}
        for prefix, each in loaders.items():
            batches = self._loader(each, shard=shard, training=False)
            epoch = batches.next_epoch
            try:
                run = self._run_step()
                cut = self._boundaries
                found = evaluate(self.session, run, step, model, batches, checked, boundaries=cut)
            finally:
                batches.set_epoch(epoch)
            if not found and self.is_main:
                log.warning(
                    "evaluate() has no result: the loader has yielded no sample; an iterator, such as a "
                    "generator, is gone through once"
                )
            results |= {prefix + name: value for name, value in found.items()}
        return results

    def predict(
        self, model: nn.Module, loader: Iterable[Any], step: Step, *, shard: bool = True
    ) -> "Predictions":
        """Return what ``step`` returns for the samples of ``loader``, in their order and each once.

        Args:
            model: The plain model, or the prepared one. It is in evaluation mode and records no gradients.
            loader: Yields the batches.
            step: ``step(model, batch)`` returns values with a row for each sample of the batch: tensors,
                arrays or lists, alone or in dicts and tuples.
            shard: Whether the loader is split over the data ranks.

        Returns:
            What iterates over pieces of the predictions, on every rank; or call its ``collect()`` or
            ``save(path)``.

        Raises:
            ConfigError: The model, the loader or the step cannot be used.
            LoaderError: The loader cannot be split over the ranks.

        Example:
            >>> def step(model, batch):
            ...     return {"class": model(batch[0]).argmax(1)}
            >>> trainer.predict(model, loader, step).save("classes.jsonl")  # doctest: +SKIP
        """
        from tp_trainer._metrics._evaluation import Predictions

        check_model("predict()", model)
        check_loader("loader", loader)
        check_callable("step", step)
        model = self._prepare_model(model)
        batches = self._loader(loader, shard=shard, training=False)
        run = self._run_step()
        return Predictions(self.session, run, step, model, batches, boundaries=lambda: self._boundaries)

    def gather_for_metrics(self, value: Any, *, batch: Any = None) -> Any:
        """Return the rows of all data ranks, each sample once, on every rank: to compute metrics from.

        Of a rank that has a stand-in in place of a sample nothing is taken.

        Args:
            value: A tensor whose first dimension goes over the samples of this rank's batch, or a dict,
                list or tuple of such. A scalar is one row.
            batch: Which batch it is of, where several loaders are iterated at once.

        Returns:
            The same with the rows of all ranks, in the order of the global batch, without gradients.

        Raises:
            StepError: ``value`` holds something else than tensors; or the batch that it is of is not known;
                or this is a step, or the forward of a model, that has one device's part of the batch.
            DisagreementError: The ranks' tensors differ in more than their first dimension.

        Collectives: an all-gather of the shapes, then `Session.gather` for each tensor.
        """
        session, shares = self._open(by="gather_for_metrics()"), self._shares
        session.check_in_step("gather_for_metrics()")
        is_nothing = shares is not None and shares.holds_nothing(batch)
        from tp_trainer._steps._loaders import gather_rows

        return gather_rows(session, value, is_nothing=is_nothing)

    def all_gather(self, rows: Tensor, *, batch: Any = None) -> Tensor:
        """Return the rows of all data ranks and devices, with gradients: for losses that compare samples.

        To be called in a step or in a custom loop, on all ranks alike. A loss that every rank computes
        from all rows, the same on all of them, then has the gradient of one device on the whole batch.

        Args:
            rows: Of this rank's samples, (samples, ...).
            batch: Which batch they are of, where several loaders are iterated at once in a custom loop.

        Returns:
            The rows of all ranks in the order of the global batch, (samples of all ranks, ...).

        Raises:
            StepError: The backend runs the step or the model's forward on parts of the batch, and this is not
                such a step, or is such a forward; or not all parts take part; or there are no rows; or a rank
                without a sample does not take part.
            DisagreementError: The ranks' tensors differ in more than their first dimension.

        Collectives: an all-gather of the shapes and two of `Session.gather`; in the backward pass one
        all-reduce.
        """
        session = self.session
        session.check_in_step("all_gather()", may_meet=True)
        from tp_trainer._steps._loaders import gather_with_gradients, has_nothing

        return gather_with_gradients(session, rows, is_nothing=has_nothing(session, self._shares, batch))
