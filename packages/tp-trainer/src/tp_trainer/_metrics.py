"""Evaluations, predictions, and metrics of whole sets."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from tp_core import recursive_to, tree_map
from tp_core.data import PreparedLoader, SampleRows, Share, StepOutput, join_rows, row_count
from tp_core.errors import ConfigError, LoaderError, StepError
from tp_core.files import atomic_part
from tp_core.output import get_logger
from tp_core.plugins import Session

from tp_trainer._checkpoint._model_files import write_on_main
from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._steps._meter import Meter
from tp_trainer._steps._step import (
    RunStep,
    Step,
    guard_stop_iteration,
    loss_of,
    restore_modes,
    weighed,
)

log = get_logger("tp_trainer")

# -- The interface of metrics, and metrics from functions -----------------------------------------


@runtime_checkable
class Metric(Protocol):
    """An object that takes batches and computes one result from all, as in torchmetrics and torcheval."""

    def update(self, *args: Any, **kwargs: Any) -> object:
        """Add a batch: the step's values for it."""

    def compute(self) -> Any:
        """Return the result for all batches since the last reset: a number, or a dict of numbers."""

    def reset(self) -> object:
        """Forget all batches."""


class FunctionMetric:
    """A metric from a function of the whole set, as for the functions of ``sklearn.metrics``.

    It keeps all rows on the CPU until the next evaluation. The step returns the function's arguments: a tuple
    in their order, or a dict by their names.

    Args:
        function: Gets the rows of all samples, in the order of the data, and returns a number, or a dict of
            numbers. Use ``functools.partial`` for further arguments.
        arrays: Whether it gets tensors as "numpy" arrays, or as "torch" tensors.

    Raises:
        ConfigError: ``function`` cannot be called, or ``arrays`` is something else.

    Example:
        >>> from functools import partial
        >>> metric = FunctionMetric(lambda right, said: (right == said).mean())
        >>> metric.update(torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1]))
        >>> metric.update(torch.tensor([0]), torch.tensor([0]))
        >>> metric.compute()
        np.float64(0.75)
    """

    def __init__(self, function: Callable[..., Any], *, arrays: Literal["numpy", "torch"] = "numpy") -> None:
        if not callable(function):
            got = f"{type(function).__name__}: {function!r}"
            msg = f"a FunctionMetric needs a function of all samples, got {got}"
            raise ConfigError(msg)
        if arrays not in {"numpy", "torch"}:
            msg = f"arrays={arrays!r} must be 'numpy' or 'torch': what the function of a metric is given"
            raise ConfigError(msg)
        self._function = function
        self._as_numpy = arrays == "numpy"
        self._pieces: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Keep the rows of a batch."""
        self._pieces.append(tree_map(on_cpu, (args, kwargs)))

    def compute(self) -> Any:
        """Return the function's result for all rows.

        Raises:
            StepError: The rows of the batches cannot be joined.
        """
        args, kwargs = join_rows(self._pieces)
        if self._as_numpy:
            args, kwargs = tree_map(_as_numpy, (args, kwargs))
        return self._function(*args, **kwargs)

    def reset(self) -> None:
        """Forget all rows."""
        self._pieces = []


def _as_numpy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dtype == torch.bfloat16:
        leaf = leaf.float()  # numpy has no bfloat16
    return leaf.numpy()


# -- The metrics of an evaluation -----------------------------------------------------------------


def check_metrics(metrics: Mapping[str, Metric] | None) -> dict[str, Metric]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        msg = f"metrics must be a dict of metrics by name, got {type(metrics).__name__}: {metrics!r:.80}"
        raise ConfigError(msg)
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name or name in {"loss", "weight"}:
            msg = f"a metric's name must be a text other than 'loss' and 'weight', got {name!r}"
            raise ConfigError(msg)
        if isinstance(metric, type) or not isinstance(metric, Metric):
            msg = (
                f"the metric {name!r} must be an object with update(), compute() and reset(), as those of "
                "torchmetrics and torcheval are, or FunctionMetric(function) with a function of all samples; "
                f"got {metric!r:.80}"
            )
            raise ConfigError(msg)
    return dict(metrics)


class MetricSet:
    """Updates metrics with the step's values under their names, and computes them.

    Every rank updates its own metrics with the rows of all ranks, so they end in the same state as on one
    device. The metrics' own synchronization over ranks is switched off: it would count every row again.

    Args:
        metrics: The metrics by name; they are reset.
        boundaries: As for `OrderedGather`.
    """

    def __init__(
        self, session: Session, metrics: Mapping[str, Metric], *, boundaries: StepBoundaries | None
    ) -> None:
        self._session = session
        self._metrics = dict(metrics)
        self._gather = OrderedGather(session, boundaries=boundaries, keeps=bool(metrics))
        self._fed: set[str] = set()
        self._places = {name: _place(metric) for name, metric in metrics.items()}
        for metric in metrics.values():
            _disable_sync(metric)
            metric.reset()

    def collecting(self, step: Step) -> Step:
        """Return the step, wrapped so that the session returns the metrics' arguments as rows."""
        if self._metrics:
            return _Collecting(step, self._metrics.keys())
        return step

    def take(self, number: int, output: StepOutput, share: Share | None) -> StepOutput:
        """Take the arguments of the metrics out of a step's output, and return the rest.

        ``number`` is the batch's, counted over all data ranks. A stand-in's arguments are dropped.

        Raises:
            GatherInterruptedError: A rank has seen a signal.

        Collectives: as in `OrderedGather.add`, if there are metrics, or signals may end the evaluation.
        """
        if not self._metrics or not isinstance(output, Mapping):
            self._feed(self._gather.reach(number))
            return output
        is_nothing = share is not None and share.samples == 0  # a stand-in
        rows = {k: v.pieces for k, v in output.items() if isinstance(v, SampleRows)}
        own_rows = {} if is_nothing else rows
        self._feed(self._gather.add(number, own_rows))
        return {k: v for k, v in output.items() if k not in rows}

    def finish(self) -> None:
        """Update the metrics with the remaining batches, on all ranks.

        Raises:
            GatherInterruptedError: A rank has seen a signal.

        Collectives: as in `OrderedGather.finish`, if there are metrics, or signals may end the evaluation.
        """
        self._feed(self._gather.finish())

    def compute(self) -> dict[str, Any]:
        """Return the results, numbers as floats and others as tensors on the CPU; equal on all ranks.

        The entries of a metric's dict are named "metric/key".

        Raises:
            StepError: The step returned nothing for a metric.

        Collectives: one broadcast, if there are metrics.
        """
        if not self._metrics:
            return {}
        unfed = sorted(self._metrics.keys() - self._fed)
        if unfed:
            msg = (
                f"the step returned nothing for the metrics {unfed}: it must return a dict with the "
                "arguments of a metric's update() under the metric's name"
            )
            raise StepError(msg)
        results: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            results |= _flat(name, _called(name, "compute", metric.compute))
        # Rank 0's for all: devices may round differently, and ranks must not decide differently.
        return self._session.broadcast(results, where="results of metrics")

    def _feed(self, batches: Iterator[Mapping[str, tuple[Any, ...]]]) -> None:
        for values in batches:
            for name, pieces in values.items():
                self._fed.add(name)
                for piece in pieces:
                    self._update(name, piece)

    def _update(self, name: str, piece: Any) -> None:
        place, update = self._places[name], self._metrics[name].update
        moved = piece if place is None else recursive_to(piece, place)
        if isinstance(moved, tuple):
            _called(name, "update", lambda: update(*moved))
        elif isinstance(moved, Mapping):
            _called(name, "update", lambda: update(**moved))
        else:
            _called(name, "update", lambda: update(moved))


class _Collecting:
    """A step that returns the values of some names as rows: backends join these and do not average them."""

    def __init__(self, step: Step, names: Any) -> None:
        self.wrapped_step = step
        self._names = names

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        output = self.wrapped_step(model, batch)
        if not isinstance(output, Mapping):
            return output
        return {k: SampleRows((v,)) if k in self._names else v for k, v in output.items()}


def _called(name: str, method: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        msg = (
            f"{method}() of the metric {name!r} raised {type(error).__name__}: {error}; the step must return "
            "the arguments of its update() under its name, as a tuple, a dict, or one value"
        )
        raise StepError(msg) from error


def _place(metric: Metric) -> torch.device | None:
    """Return the device of a metric's arguments; ``None`` for any device."""
    members = metric.modules() if isinstance(metric, nn.Module) else [metric]
    devices = [getattr(member, "device", None) for member in members]
    return next((device for device in devices if isinstance(device, torch.device)), None)


def _disable_sync(metric: Metric) -> None:
    """Switch off the synchronization of torchmetrics: each rank has all rows, which would count again."""
    if not isinstance(metric, nn.Module):
        return
    for member in metric.modules():
        if hasattr(member, "distributed_available_fn"):
            vars(member)["distributed_available_fn"] = _is_alone


def _is_alone() -> bool:
    return False


def _flat(name: str, result: Any) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return {k: v for key, value in result.items() for k, v in _flat(f"{name}/{key}", value).items()}
    if isinstance(result, Tensor):
        value = float(result) if result.numel() == 1 else result.detach().cpu()
    else:
        value = float(result) if isinstance(result, Real) else result
    return {name: value}


# -- Values of batches, gathered in the order of the data -----------------------------------------


BATCHES_PER_ROUND = 16  # between two exchanges: fewer cost more collectives, more cost memory


class GatherInterruptedError(Exception):
    """Raised on all ranks, between the same two batches, where a signal asks the run to end."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class _Contribution(NamedTuple):
    """One rank's part of an exchange.

    Attributes:
        data_rank: The share of the data; several ranks may have the same share.
        values: The values, each with the number of its batch.
    """

    data_rank: int
    has_more: bool
    signal: int
    values: list[tuple[int, Any]]


class OrderedGather:
    """Gathers values of batches from all data ranks in the order of the data, a few batches at a time.

    Ranks may have different numbers of batches, or skip some: each takes part until all are done. Values are
    moved to the CPU and pickled, so any picklable value will do.

    Args:
        boundaries: The boundaries at which a signal may end the batches: ranks exchange their signals at the
            boundary that they agree on. ``None`` if signals do not end them.
    """

    def __init__(self, session: Session, *, boundaries: StepBoundaries | None, keeps: bool = True) -> None:
        self._session, self._boundaries = session, boundaries
        if boundaries is not None:
            boundaries.begin_phase(evaluates=True)
        self._gathers = keeps and session.data_size > 1
        self._exchanges = self._gathers or (boundaries is not None and session.world_size > 1)
        self._end: float = BATCHES_PER_ROUND if self._gathers else math.inf  # of this round
        self._waiting: list[tuple[int, Any]] = []

    def add(self, number: int, value: Any) -> Iterator[Any]:
        """Add this rank's value of a batch, and yield values of all ranks after an exchange.

        ``number`` is the batch's, counted over all data ranks; from 0 and increasing.

        Collectives: as in `Session.gather_objects`, once for every 16 batches, and where the ranks meet.
        """
        yield from self.reach(number)
        if self._session.data_size == 1:
            yield value
            return
        self._waiting.append((number, tree_map(on_cpu, value)))

    def reach(self, number: int) -> Iterator[Any]:
        """Begin a batch, of which this rank may have no sample, and yield as :meth:`add` does.

        The model may make collectives in each batch, too. So all ranks must come to an exchange between the
        same two batches.

        Raises:
            GatherInterruptedError: A rank has seen a signal.

        Collectives: as in :meth:`add`.
        """
        boundaries = self._boundaries
        if boundaries is not None:
            if boundaries.passed > number:
                return  # it was begun before
            boundaries.passed = number + 1
            if boundaries.calls and boundaries.is_meeting():
                values, _ = self._exchange(has_more=True)
                boundaries.has_met()
                yield from values
        while number >= self._end:
            self._end += BATCHES_PER_ROUND
            yield from self._exchange(has_more=True)[0]

    def finish(self) -> Iterator[Any]:
        """Yield the remaining values, until all ranks are done.

        Raises:
            GatherInterruptedError: A rank has seen a signal.

        Collectives: as in :meth:`add`, as many as the rank with the most batches needs.
        """
        if self._boundaries is not None:
            # Its vote becomes 0, and the others' decide: it waits for them in an exchange wherever they meet.
            self._boundaries.passed = -1
        is_over = not self._exchanges
        while not is_over:
            values, is_over = self._exchange(has_more=False)
            if is_over and self._boundaries is not None:
                self._boundaries.begin_phase(evaluates=True)  # for an enclosing evaluation
            yield from values

    def _exchange(self, *, has_more: bool) -> tuple[list[Any], bool]:
        """Return all ranks' values of this round, and whether it was the last one.

        Collectives: as in `Session.gather_objects`.
        """
        if self._boundaries is None:
            signal = 0
        else:
            signal = self._boundaries.seen
        own = _Contribution(self._session.data_rank, has_more, signal, self._waiting)
        self._waiting = []
        everyones = self._session.gather_objects(own, where="values for metrics")
        if signal := max(theirs.signal for theirs in everyones):
            raise GatherInterruptedError(signal)
        of_data_rank = {theirs.data_rank: theirs for theirs in everyones}
        pieces = [
            (number, rank, value)
            for rank, theirs in sorted(of_data_rank.items())
            for number, value in theirs.values
        ]
        pieces.sort(key=lambda piece: piece[:2])
        return [value for _, _, value in pieces], not any(theirs.has_more for theirs in everyones)


def on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu()
    return leaf


# -- The evaluation of a model on a loader --------------------------------------------------------


def named_loaders(what: str, loaders: Any) -> dict[str, Iterable[Any]]:
    """Return loaders by the prefix of their results' names; the prefix of a single loader is empty."""
    if not isinstance(loaders, Mapping):
        return {"": loaders}
    bad = [name for name in loaders if not isinstance(name, str) or not name or "/" in name]
    if bad or not loaders:
        msg = (
            f"{what} must be a loader, or a dict of loaders by names without '/', got the names "
            f"{list(loaders)}"
        )
        raise ConfigError(msg)
    return {f"{name}/": loader for name, loader in loaders.items()}


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

    Raises:
        GatherInterruptedError: A rank has seen a signal; on all ranks, between the same two batches.

    Collectives: broadcasts of buffers before, one gather and one all-reduce after; as in `MetricSet`.
    """
    meter = Meter(session, what="validation")
    metric_set = MetricSet(session, metrics or {}, boundaries=boundaries)
    collecting = metric_set.collecting(weighed(step))
    with guard_stop_iteration(), evaluating(session, model), batches.whole(), torch.no_grad():
        for batch in islice(batches, most):
            share = batches.share
            output = metric_set.take(batches.number, run(collecting, model, batch), share)
            has_no_loss = isinstance(output, Mapping) and "loss" not in output
            if has_no_loss:
                loss = None
            else:
                loss = loss_of(output, training=False)
            meter.add(loss, output, share)
        metric_set.finish()
        means = meter.means()
        if meter.samples:
            return {**means, **metric_set.compute()}
        return {}


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

        Raises:
            GatherInterruptedError: A rank has seen a signal; on all ranks, between the same two batches.
            LoaderError: A loader has yielded no sample, on any rank.

        Collectives: as in `evaluate`, for each loader.
        """
        results: dict[str, float] = {}
        for prefix, batches in self.loaders.items():
            batches.set_epoch(epoch)
            cut: dict[str, Any] = {"boundaries": boundaries, "most": most}
            measured = evaluate(session, self.run(batches), self.step, model, batches, self.metrics, **cut)
            if not measured:
                if prefix:
                    loader_name = f" {prefix.rstrip('/')!r}"
                else:
                    loader_name = ""
                msg = (
                    f"the validation's loader{loader_name} has yielded no sample, so there is no result; an "
                    "iterator, such as a generator, is gone through once: give what begins again, such as a "
                    "list or a DataLoader"
                )
                raise LoaderError(msg)
            results |= {prefix + name: value for name, value in numbers_in(measured).items()}
        return results


def numbers_in(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalar results of an evaluation: histories and loggers take no matrices."""
    for name, value in results.items():
        if not isinstance(value, Real):
            _warn_left_out(name, type(value).__name__)
    return {name: float(value) for name, value in results.items() if isinstance(value, Real)}


@cache  # once for each, and not after every epoch
def _warn_left_out(name: str, kind: str) -> None:
    log.warning(
        "%r of the validation is no number, but %s: the history and the loggers leave it out. Return its "
        "mean, or a dict of numbers by name; trainer.evaluate() returns it as it is",
        name,
        kind,
    )


def without_metrics(step: Step, metrics: Mapping[str, Metric]) -> Step:
    """Return the step for training, without its outputs for the validation's metrics."""

    def trained(model: nn.Module, batch: Any) -> StepOutput:
        output = step(model, batch)
        if not isinstance(output, Mapping):
            return output
        return {name: value for name, value in output.items() if name not in metrics}

    trained.wrapped_step = step  # type: ignore[attr-defined]  # functions take any
    return trained


def metric_for_scheduler(
    name: str | None, train: Mapping[str, float], val: Mapping[str, float], *, validates: bool
) -> float:
    """Return the metric for a scheduler such as ``ReduceLROnPlateau``, by its name in the history.

    Without a name it is the validation loss, or in a run without validation the training loss.
    """
    metrics = {**train, **{f"val_{key}": value for key, value in val.items()}}
    wanted = scheduler_metric(name, validates=validates)
    check_scheduler_metric(wanted, metrics)
    return metrics[wanted]


def scheduler_metric(name: str | None, *, validates: bool) -> str:
    """Return the name of the metric that a scheduler looks at."""
    if name:
        return name
    if validates:
        return "val_loss"
    return "loss"


def check_scheduler_metric(name: str, known: Iterable[str]) -> None:
    """Check that the metrics of a run have the one that the scheduler looks at.

    Raises:
        ConfigError: None of them has its name.
    """
    known = list(known)
    if name not in known:
        msg = (
            f"the scheduler looks at {name!r}, which is none of the metrics of the run: "
            f"{', '.join(known) or 'none'}; name one of them: SchedulerOptions(scheduler, monitor=...)"
        )
        raise ConfigError(msg)


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

    def __repr__(self) -> str:
        return "Predictions(...): iterate over them, or call collect() or save(path)"

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

        Collectives: as in an iteration, then one all-gather of objects.
        """
        place = Path(path)
        if place.suffix not in _FORMATS:
            msg = (
                f"predictions are written to files that end in {' or '.join(_FORMATS)}, not to {place.name!r}"
            )
            raise ConfigError(msg)
        if place.suffix == ".safetensors":
            tensors = _by_name(self.collect())
            write_on_main(self._session, place, lambda: _write_tensors(tensors, place))
            return
        pieces = iter(self)
        if not self._session.is_main:
            _exhaust(pieces)
        write_on_main(self._session, place, lambda: _write_lines(pieces, place))


def _predicting(step: Step, model: nn.Module, batch: Any) -> dict[str, SampleRows]:
    return {"rows": SampleRows((step(model, batch),))}


def _write_lines(pieces: Iterator[Any], place: Path) -> None:
    try:
        with atomic_part(place) as part, part.open("w", encoding="utf-8") as file:
            for piece in pieces:
                for row in range(row_count(piece) or 0):
                    file.write(json.dumps(_row(piece, row), ensure_ascii=False) + "\n")
    finally:
        _exhaust(pieces)  # after a failed write too: the other ranks wait for this one in each gather


def _exhaust(pieces: Iterator[Any]) -> None:
    for _ in pieces:
        pass


def _row(value: Any, number: int) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _row(entry, number) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_row(entry, number) for entry in value]
    if value is None:
        return None
    row = value[number]
    if hasattr(row, "tolist"):
        return row.tolist()
    return row


def _by_name(value: Any) -> dict[str, Tensor]:
    if isinstance(value, Mapping):
        tensors = value
    else:
        tensors = {"predictions": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            msg = (
                f"a safetensors file holds tensors alone, and the predictions have {type(tensor).__name__} "
                f"as {name!r}; write them to a file that ends in .jsonl"
            )
            raise StepError(msg)
    return {str(name): tensor.contiguous() for name, tensor in tensors.items()}


def _write_tensors(tensors: Mapping[str, Tensor], place: Path) -> None:
    from safetensors.torch import save_file

    with atomic_part(place) as part:
        save_file(dict(tensors), part)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__}: {value!r:.200}"
