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
from tp_core.errors import ConfigError, LoaderError, StepError
from tp_core.internal import SampleRows, join_rows, row_count, write_atomically
from tp_core.plugins import PreparedLoader, Session, StepOutput

from tp_trainer._checkpoint._model_files import write_on_main
from tp_trainer._metrics._metric import Metric, MetricSet, OrderedGather, on_cpu
from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._steps._meter import Meter
from tp_trainer._steps._step import RunStep, Step, guard_stop_iteration, loss_of, restore_modes

# -- The evaluation of a model on a loader: means over its samples, and metrics of all of them ----


def named_loaders(what: str, given: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Iterable[Any]]:
    """Return loaders by what their results' names begin with: nothing where there is one alone.

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
    """Return the means of what ``step`` returns over all samples, or units, of all data ranks, and metrics.

    The model is in evaluation mode and records no gradients meanwhile; each submodule gets its
    own mode back.

    Args:
        session: Where the step runs.
        run: Runs the step.
        step: The user's step; it need not return a loss.
        model: The prepared model.
        batches: The prepared loader.
        metrics: Of the whole set, by the names under which the step returns their arguments.
        boundaries: As `OrderedGather` takes it, for an evaluation that signals cut short.
        most: On how many batches; ``None`` for all.

    Raises:
        GatherInterruptedError: A rank has seen a signal; on all ranks, between the same two batches.

    Collectives: the buffers' broadcasts before, one gather and one all-reduce after; those of `MetricSet`.
    """
    meter = Meter(session, what="validation")
    metric_set = MetricSet(session, metrics or {}, boundaries=boundaries)
    collecting = metric_set.collecting(step)
    with guard_stop_iteration(), evaluating(session, model), batches.whole(), torch.no_grad():
        for batch in islice(batches, most):
            output = metric_set.take(batches.number, run(collecting, model, batch))
            has_no_loss = isinstance(output, Mapping) and "loss" not in output
            meter.add(None if has_no_loss else loss_of(output, training=False), output)
        metric_set.finish()
        means = meter.means()
        return {**means, **metric_set.compute()} if meter.samples else {}


@contextmanager
def evaluating(session: Session, model: nn.Module) -> Iterator[None]:
    """Have the model in evaluation mode, with the same buffers on all ranks; then each module in its own.

    Collectives: the buffers' broadcasts.
    """
    with restore_modes(model):
        model.eval()
        with torch.no_grad():
            session.sync_buffers(model)
        yield


# -- The validation of a run: on one loader, or several by name, with metrics ---------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What a run is evaluated on, and how.

    Attributes:
        run: Runs the step.
        step: The user's step.
        loaders: The prepared loaders, by what the names of their results begin with.
        metrics: Of each loader's whole set, by name.
    """

    run: RunStep
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
        """Return the means and the metrics that are numbers, of all loaders.

        Args:
            session: Where the step runs.
            model: The prepared model.
            epoch: Which epoch of the loaders it is.
            boundaries: As `OrderedGather` takes it, for a validation that signals cut short.
            most: On how many batches of each loader.

        Raises:
            GatherInterruptedError: A rank has seen a signal; on all ranks, between the same two batches.
            LoaderError: A loader has yielded no sample, on any rank.

        Collectives: as in `evaluate`, for each loader.
        """
        results: dict[str, float] = {}
        for prefix, batches in self.loaders.items():
            batches.set_epoch(epoch)
            cut: dict[str, Any] = {"boundaries": boundaries, "most": most}
            found = evaluate(session, self.run, self.step, model, batches, self.metrics, **cut)
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
    """Return those results of an evaluation that are numbers: a matrix is not for histories and loggers."""
    return {name: float(value) for name, value in results.items() if isinstance(value, Real)}


def without_metrics(step: Step, metrics: Mapping[str, Metric]) -> Step:
    """Return a step for training, without what it returns for metrics: they are of the validation."""
    if not metrics:
        return step

    def trained(model: nn.Module, batch: Any) -> StepOutput:
        output = step(model, batch)
        if not isinstance(output, Mapping):
            return output
        return {name: value for name, value in output.items() if name not in metrics}

    return trained


def metric_for_scheduler(
    name: str | None, train: Mapping[str, float], val: Mapping[str, float], *, validates: bool
) -> float:
    """Return what a scheduler looks at that looks at a metric.

    Args:
        name: As in the history, "val_f1" or "loss"; ``None`` for the loss of the validation, or else of the
            training.
        train: The means of the epoch's training.
        val: The results of its validation.
        validates: Whether there is one.

    Raises:
        ConfigError: The run has no metric of that name.
    """
    known = {**train, **{f"val_{key}": value for key, value in val.items()}}
    wanted = name or ("val_loss" if validates else "loss")
    if wanted not in known:
        msg = (
            f"the scheduler looks at {wanted!r}, which is none of the metrics of the run: "
            f"{', '.join(known) or 'none'}; name one of them: fit(monitor=...)"
        )
        raise ConfigError(msg)
    return known[wanted]


# -- Predictions for the samples of a loader, in their order, each once, on any number of devices


_FORMATS = (".jsonl", ".safetensors")


class Predictions:
    """What a step returns for the samples of a loader: in the loader's order, each sample once.

    Iterate it on every rank, and to its end: each rank gets all predictions, in pieces of some rows, on the
    CPU. Where the pieces begin and end depends on the backend; joined they are the same everywhere. Each
    iteration predicts anew. The model is in evaluation mode meanwhile.

    Args:
        session: Where the step runs.
        run: Runs the step.
        step: The user's step.
        model: The prepared model.
        batches: The prepared loader.
        boundaries: Returns, when an iteration begins, what `OrderedGather` takes; ``None`` where signals
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

        Collectives: the buffers' broadcasts before, then an all-gather of objects for some batches each.
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
        with torch.no_grad():  # not while the caller has what was yielded
            output = cast("Mapping[str, SampleRows]", self._run(self._step, self._model, batch))
        share = self._session.share
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
            StepError: As in iterating; or the pieces do not go together.
            LoaderError: The loader has no sample.
        """
        pieces = list(self)
        if not pieces:
            msg = "there is nothing to predict: the loader yielded no sample"
            raise LoaderError(msg)
        return join_rows(pieces)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the predictions to a file; call it on every rank, and rank 0 writes.

        A name that ends in ".jsonl" gets a line of JSON for each sample, written as they come. One that
        ends in ".safetensors" gets tensors by name, all at once; a lone tensor is named "predictions".
        A crash meanwhile leaves the old file as it was.

        Raises:
            ConfigError: The name ends in something else.
            StepError: As in iterating; or a safetensors file is to hold something besides tensors.
            LoaderError: A safetensors file is to be written, and the loader has no sample.
            OSError: The file cannot be written; on every rank.
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
        _exhaust(pieces)  # the other ranks need this one


def _exhaust(pieces: Iterator[Any]) -> None:
    for _ in pieces:
        pass


def _row(value: Any, number: int) -> Any:
    """Return a row as JSON has it."""
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
