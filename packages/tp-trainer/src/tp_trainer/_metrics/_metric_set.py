"""The metrics of an evaluation, fed with each sample once, in the order of the data."""

from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from tp_core import recursive_to
from tp_core.errors import ConfigError, StepError
from tp_core.internal import SampleRows
from tp_core.plugins import Session, StepOutput

from tp_trainer._metrics._metric import Metric
from tp_trainer._metrics._rounds import Rounds
from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._steps._precision import Step

__all__ = ["MetricSet", "check_metrics"]


def check_metrics(metrics: Mapping[str, Metric] | None) -> dict[str, Metric]:
    """Return the metrics by name.

    Raises:
        ConfigError: ``metrics`` is not a dict of objects that are fed and compute; or a name is taken.
    """
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
    """Feeds metrics with what a step returns under their names, and computes them.

    Every rank feeds its own metrics with the rows of all ranks, so they hold afterwards what those of one
    device do. What a metric does to synchronize itself over ranks is switched off: it would count twice.

    Args:
        session: Where the step runs.
        metrics: By name. They are reset.
        boundaries: As `Rounds` takes it.
    """

    def __init__(
        self, session: Session, metrics: Mapping[str, Metric], *, boundaries: StepBoundaries | None = None
    ) -> None:
        self._session = session
        self._metrics = dict(metrics)
        self._rounds = Rounds(session, boundaries=boundaries, keeps=bool(metrics))
        self._fed: set[str] = set()
        self._places = {name: _place(metric) for name, metric in metrics.items()}
        for metric in metrics.values():
            _leave_alone(metric)
            metric.reset()

    def collecting(self, step: Step) -> Step:
        """Return the step, whose arguments of metrics come through the session as rows."""
        return _Collecting(step, self._metrics.keys()) if self._metrics else step

    def take(self, number: int, output: StepOutput) -> StepOutput:
        """Take the arguments of the metrics out of a step's output, and return the rest.

        Args:
            number: Which of the batches of all data ranks it is.
            output: What the collecting step returned.

        Raises:
            CutShortError: A rank has seen a signal.

        Collectives: those of `Rounds.add`, if there are metrics or signals are asked for.
        """
        if not self._metrics or not isinstance(output, Mapping):
            self._feed(self._rounds.reach(number))
            return output
        share = self._session.share
        is_nothing = share is not None and share.samples == 0  # a stand-in
        mine = {k: v.pieces for k, v in output.items() if isinstance(v, SampleRows)}
        self._feed(self._rounds.add(number, {} if is_nothing else mine))
        return {k: v for k, v in output.items() if k not in mine}

    def finish(self) -> None:
        """Feed what is left of the batches, on all ranks.

        Raises:
            CutShortError: A rank has seen a signal.

        Collectives: those of `Rounds.finish`, if there are metrics or signals are asked for.
        """
        self._feed(self._rounds.finish())

    def compute(self) -> dict[str, Any]:
        """Return the results, numbers as floats and others as tensors on the CPU; the same on all ranks.

        What a metric returns as a dict is named "metric/key".

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
        # Decisions hang on them, and devices may round differently.
        return self._session.broadcast(results)

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
    """A step whose values of some names come as rows, which backends join and do not average."""

    def __init__(self, step: Step, names: Any) -> None:
        self._step = step
        self._names = names

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        output = self._step(model, batch)
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
    """Return where a metric wants its arguments; ``None`` for anywhere."""
    members = metric.modules() if isinstance(metric, nn.Module) else [metric]
    devices = [getattr(member, "device", None) for member in members]
    return next((device for device in devices if isinstance(device, torch.device)), None)


def _leave_alone(metric: Metric) -> None:
    """Switch off that a metric of torchmetrics gathers the states of all ranks: it is fed with all rows."""
    for member in metric.modules() if isinstance(metric, nn.Module) else ():
        if hasattr(member, "distributed_available_fn"):
            vars(member)["distributed_available_fn"] = _is_alone


def _is_alone() -> bool:
    return False


def _flat(name: str, result: Any) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return {k: v for key, value in result.items() for k, v in _flat(f"{name}/{key}", value).items()}
    if isinstance(result, Tensor):
        return {name: float(result) if result.numel() == 1 else result.detach().cpu()}
    return {name: float(result) if isinstance(result, Real) else result}
