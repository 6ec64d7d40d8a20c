"""The evaluation of a model on a loader, the validation of a run, and predictions."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from tp_core import tree_map
from tp_core.data import PreparedLoader, StepOutput
from tp_core.errors import ConfigError, LoaderError, StepError
from tp_core.internal import SampleRows, join_rows, row_count, write_atomically
from tp_core.plugins import Session

from tp_trainer._checkpoint._model_files import write_on_main
from tp_trainer._metrics._metric import Metric, MetricSet, OrderedGather, on_cpu
from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._steps._meter import Meter
from tp_trainer._steps._step import RunStep, Step, guard_stop_iteration, loss_of, restore_modes

# -- The evaluation of a model on a loader --------------------------------------------------------


def named_loaders(what: str, given: Any) -> dict[str, Iterable[Any]]:
    """Return loaders by the prefix of their results' names; the prefix of a single loader is empty.

    Raises:
        ConfigError: There are several without names, or their names cannot be used.
    """
    if not isinstance(given, Mapping):
        return {"": given}
    bad = [name for name in given if not isinstance(name, str) or not name or "/" in name]
    if bad or not given:
        msg = (
            f"{what} must be a loader, or a dict of loaders by names without '/', got the names {list(given)}"
        )
        raise ConfigError(msg)
    return {f"{name}/": loader for name, loader in given.items()}


def evaluate(
    session: Session,
    run: RunStep,
    step: Step,
    model: nn.Module,
    batches: PreparedLoader,
    metrics: Mapping[str, Metric] | None = None,
    *,
    boundaries: StepBoundaries | None = None,
    most: int | None = None,
) -> dict[str, Any]:
    """Return the means of the step's outputs over the samples, or units, of all data ranks, and metrics.

    The model runs in evaluation mode, without gradients. Each submodule gets its own mode back.

    Args:
        session: The session that runs the step.
        run: Runs the step.
        step: The user's step; it need not return a loss.
        model: The prepared model.
        batches: The prepared loader.
        metrics: Metrics of the whole set, by the names under which the step returns their arguments.
        boundaries: As for `OrderedGather`, for an evaluation that signals may end.
        most: The most batches; ``None`` for all.

    Raises:
        GatherInterruptedError: A rank has seen a signal; on all ranks, between the same two batches.

    Collectives: broadcasts of buffers before, one gather and one all-reduce after; as in `MetricSet`.
    """
    meter = Meter(session, what="validation")
    metric_set = MetricSet(session, metrics or {}, boundaries=boundaries)
    collecting = metric_set.collecting(step)
    with guard_stop_iteration(), evaluating(session, model), batches.whole(), torch.no_grad():
        for batch in islice(batches, most):
            share = batches.share
            output = metric_set.take(batches.number, run(collecting, model, batch), share)
            has_no_loss = isinstance(output, Mapping) and "loss" not in output
            meter.add(None if has_no_loss else loss_of(output, training=False), output, share)
        metric_set.finish()
        means = meter.means()
        return {**means, **metric_set.compute()} if meter.samples else {}


@contextmanager
def evaluating(session: Session, model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, with equal buffers on all ranks; restore each module's mode.

    Collectives: broadcasts of buffers.
    """
    with restore_modes(model):
        model.eval()
        with torch.no_grad():
            session.sync_buffers(model)
        yield


# -- The validation of a run ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Evaluates a model on the validation loaders of a run.

    Attributes:
        run: Returns what runs the step on a loader's batches.
        step: The user's step.
        loaders: The prepared loaders, by the prefix of their results' names.
        metrics: Metrics of each loader's whole set, by name.
    """

    run: Callable[[PreparedLoader], RunStep]
    step: Step
    loaders: Mapping[str, PreparedLoader]
    metrics: Mapping[str, Metric]

    def evaluate(
        self,
        session: Session,
        model: nn.Module,
        *,
        epoch: int,
        boundaries: StepBoundaries | None = None,
        most: int | None = None,
    ) -> dict[str, float]:
        """Return the means and the scalar metrics of all loaders.

        Args:
            session: The session that runs the step.
            model: The prepared model.
            epoch: The epoch of the loaders.
            boundaries: As for `OrderedGather`, for a validation that signals may end.
            most: The most batches of each loader.

        Raises:
            GatherInterruptedError: A rank has seen a signal; on all ranks, between the same two batches.
            LoaderError: A loader has yielded no sample, on any rank.

        Collectives: as in `evaluate`, for each loader.
        """
        results: dict[str, float] = {}
        for prefix, batches in self.loaders.items():
            batches.set_epoch(epoch)
            cut: dict[str, Any] = {"boundaries": boundaries, "most": most}
            found = evaluate(session, self.run(batches), self.step, model, batches, self.metrics, **cut)
            if not found:
                which = f" {prefix.rstrip('/')!r}" if prefix else ""
                msg = (
                    f"the validation's loader{which} has yielded no sample, so there is no result; an "
                    "iterator, such as a generator, is gone through once: give what begins anew, such as a "
                    "list or a DataLoader"
                )
                raise LoaderError(msg)
            results |= {prefix + name: value for name, value in numbers_in(found).items()}
        return results


def numbers_in(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalar results of an evaluation: histories and loggers take no matrices."""
    return {name: float(value) for name, value in results.items() if isinstance(value, Real)}


def without_metrics(step: Step, metrics: Mapping[str, Metric]) -> Step:
    """Return the step for training, without its outputs for the validation's metrics."""

    def trained(model: nn.Module, batch: Any) -> StepOutput:
        output = step(model, batch)
        if not isinstance(output, Mapping):
            return output
        return {name: value for name, value in output.items() if name not in metrics}

    return trained


def metric_for_scheduler(
    name: str | None, train: Mapping[str, float], val: Mapping[str, float], *, validates: bool
) -> float:
    """Return the metric for a scheduler such as ``ReduceLROnPlateau``.

    Args:
        name: As in the history, "val_f1" or "loss"; ``None`` for the validation loss, or without a validation
            the training loss.
        train: The means of the epoch's training.
        val: The results of its validation.
        validates: Whether the run has a validation.

    Raises:
        ConfigError: The run has no metric of that name.
    """
    known = {**train, **{f"val_{key}": value for key, value in val.items()}}
    wanted = name or ("val_loss" if validates else "loss")
    if wanted not in known:
        msg = (
            f"the scheduler looks at {wanted!r}, which is none of the metrics of the run: "
            f"{', '.join(known) or 'none'}; name one of them: SchedulerOptions(scheduler, monitor=...)"
        )
        raise ConfigError(msg)
    return known[wanted]


# -- Predictions for the samples of a loader ------------------------------------------------------


_FORMATS = (".jsonl", ".safetensors")


class Predictions:
    """The step's outputs for the samples of a loader, in the loader's order, each sample once.

    Iterate over it on every rank, and to the end. Each rank gets all predictions, in pieces of some rows, on
    the CPU. The size of the pieces depends on the backend; joined they are equal everywhere. Each iteration
    predicts again. The model runs in evaluation mode.

    Args:
        session: The session that runs the step.
        run: Runs the step.
        step: The user's step.
        model: The prepared model.
        batches: The prepared loader.
        boundaries: Returns the boundaries for `OrderedGather` when an iteration begins; ``None`` if signals
            do not interrupt it.
    """

    def __init__(
        self,
        session: Session,
        run: RunStep,
        step: Step,
        model: nn.Module,
        batches: PreparedLoader,
        *,
        boundaries: Callable[[], StepBoundaries | None] = lambda: None,
    ) -> None:
        self._session = session
        self._run = run
        self._step = partial(_predicting, step)
        self._model = model
        self._batches = batches
        self._boundaries = boundaries

    def __iter__(self) -> Iterator[Any]:
        """Predict, and yield pieces in the order of the samples.

        Raises:
            StepError: The step returned something without a row for each sample.

        Collectives: broadcasts of buffers, then an all-gather of objects for every few batches.
        """
        rounds, batches = OrderedGather(self._session, boundaries=self._boundaries()), self._batches
        epoch = batches.next_epoch
        try:
            with guard_stop_iteration(), evaluating(self._session, self._model), batches.whole():
                for batch in batches:
                    pieces = self._predicted(batch)
                    yield from rounds.reach(batches.number)
                    for piece in pieces:
                        yield from rounds.add(batches.number, piece)
                yield from rounds.finish()
        finally:
            batches.set_epoch(epoch)

    def _predicted(self, batch: Any) -> tuple[Any, ...]:
        share = self._batches.share
        with torch.no_grad():  # not around the yields: the caller's code would run without gradients
            output = cast("Mapping[str, SampleRows]", self._run(self._step, self._model, batch))
        if share is not None and share.samples == 0:  # a stand-in
            return ()
        pieces = output["rows"].pieces
        for piece in pieces:
            if len(pieces) > 1 or row_count(piece) is None:
                msg = (
                    "a prediction must have one row for each sample of its batch: tensors, arrays or lists, "
                    f"alone or in dicts and tuples; got {_describe(piece)}"
                )
                raise StepError(msg)
        return tuple(tree_map(on_cpu, piece) for piece in pieces)

    def collect(self) -> Any:
        """Return the predictions of all samples, joined by their rows, on every rank.

        Raises:
            StepError: As for an iteration; or the pieces cannot be joined.
            LoaderError: The loader has no sample.

        Collectives: as in an iteration.
        """
        pieces = list(self)
        if not pieces:
            msg = "there is nothing to predict: the loader yielded no sample"
            raise LoaderError(msg)
        return join_rows(pieces)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the predictions to a file; call it on every rank, and rank 0 writes.

        A ".jsonl" file gets a line of JSON for each sample, one by one. A ".safetensors" file gets tensors by
        name, all at the end; a single tensor is named "predictions". A crash leaves the old file unchanged.

        Raises:
            ConfigError: The name has another suffix.
            StepError: As for an iteration; or the predictions for a safetensors file are not all tensors.
            LoaderError: The loader has no sample for a safetensors file.
            OSError: The file cannot be written; on every rank.

        Collectives: as in an iteration, then one broadcast.
        """
        place = Path(path)
        if place.suffix not in _FORMATS:
            msg = (
                f"predictions are written to files that end in {' or '.join(_FORMATS)}, not to {place.name!r}"
            )
            raise ConfigError(msg)
        if place.suffix == ".safetensors":
            tensors = _by_name(self.collect())
            write_on_main(
                self._session, place, lambda: write_atomically(partial(_write_tensors, tensors), place)
            )
            return
        pieces = iter(self)
        if not self._session.is_main:
            _exhaust(pieces)
        write_on_main(self._session, place, lambda: _write_lines(pieces, place))


def _predicting(step: Step, model: nn.Module, batch: Any) -> dict[str, SampleRows]:
    return {"rows": SampleRows((step(model, batch),))}


def _write_lines(pieces: Iterator[Any], place: Path) -> None:
    def write(part: Path) -> None:
        with part.open("w", encoding="utf-8") as file:
            for piece in pieces:
                for row in range(row_count(piece) or 0):
                    file.write(json.dumps(_row(piece, row), ensure_ascii=False) + "\n")

    try:
        write_atomically(write, place)
    finally:
        _exhaust(pieces)  # after a failed write too: the other ranks wait for this one in each gather


def _exhaust(pieces: Iterator[Any]) -> None:
    for _ in pieces:
        pass


def _row(value: Any, number: int) -> Any:
    """Return a row in the form of JSON."""
    if isinstance(value, Mapping):
        return {str(key): _row(entry, number) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_row(entry, number) for entry in value]
    if value is None:
        return None
    row = value[number]
    return row.tolist() if hasattr(row, "tolist") else row


def _by_name(value: Any) -> dict[str, Tensor]:
    tensors = value if isinstance(value, Mapping) else {"predictions": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            msg = (
                f"a safetensors file holds tensors alone, and the predictions have {type(tensor).__name__} "
                f"as {name!r}; write them to a file that ends in .jsonl"
            )
            raise StepError(msg)
    return {str(name): tensor.contiguous() for name, tensor in tensors.items()}


def _write_tensors(tensors: Mapping[str, Tensor], part: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), part)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__}: {value!r:.200}"
