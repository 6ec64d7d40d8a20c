"""Early stopping."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from tp_core.errors import ConfigError
from tp_core.plugins import Callback, RunView

from tp_trainer._checkpoint import check_mode
from tp_trainer._checks import check_positive, metrics_hint
from tp_trainer._peer_names import explain_fields


@explain_fields
class EarlyStopping(Callback):
    """Ends a run when a metric has stopped improving.

    A validation metric is checked after each validation, a training metric after each epoch. NaN is never
    better. All ranks have the same metrics and decide the same.

    Args:
        metric: Its name in the history: "val_loss", "val_f1", "val_clean/loss", or "loss" of the training.
        patience: The number of checks in a row without an improvement that ends the run.
        mode: Whether "min" or "max" of the metric is the best. ``None`` is "min", and an error where the
            name says that more is better, as for an accuracy.
        min_delta: The least improvement on the best value.
        check_finite: End the run at once where the metric is NaN or infinite.

    Raises:
        ConfigError: A value is out of its range.

    Source: Prechelt, "Early Stopping - But When?", 1998; patience as in Goodfellow et al., "Deep Learning",
    2016, algorithm 7.1.

    Example:
        >>> EarlyStopping("val_f1", mode="max", patience=5).patience
        5
    """

    def __init__(
        self,
        metric: str = "val_loss",
        *,
        patience: int = 3,
        mode: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
        check_finite: bool = False,
    ) -> None:
        check_positive("patience", patience)
        check_mode("EarlyStopping", metric, mode)
        if not 0 <= min_delta < math.inf:
            msg = f"EarlyStopping(min_delta=...) must be a finite number from 0, got {min_delta!r}"
            raise ConfigError(msg)
        self.metric = metric
        self.patience = patience
        self._sign = -1.0 if mode == "max" else 1.0
        self._min_delta = min_delta
        self._check_finite = check_finite
        self._best = math.inf
        self._waited = 0

    @property
    def best(self) -> float:
        """The best value so far; NaN before the first."""
        if self._best < math.inf:
            return self._sign * self._best
        return math.nan

    def on_validation_end(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """Check a metric of the validation.

        Raises:
            ConfigError: The validation has no metric of that name.
        """
        if self.metric.startswith("val_") and metrics:
            self._look(run, {f"val_{name}": value for name, value in metrics.items()})

    def on_epoch_end(self, run: RunView) -> None:
        """Check a metric of the training.

        Raises:
            ConfigError: The run has no metric of that name.
        """
        if not self.metric.startswith("val_"):
            self._look(run, run.metrics)
        else:
            self._check_known(run.metrics)

    def _check_known(self, metrics: Iterable[str]) -> None:
        """Check that the metrics of a run have the one that this looks at.

        Raises:
            ConfigError: None of them has its name.
        """
        if self.metric not in metrics:
            raise ConfigError(self._unknown(metrics))

    def _look(self, run: RunView, metrics: Mapping[str, float]) -> None:
        self._check_known(metrics)
        value = self._sign * metrics[self.metric]
        if self._check_finite and not math.isfinite(value):
            run.stop(f"{self.metric} is {metrics[self.metric]}")
            return
        if value < self._best - self._min_delta:
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            run.stop(f"{self.metric} was {self.best:g} at best, and no better {self._waited} times in a row")

    def _unknown(self, metrics: Iterable[str]) -> str:
        hint = metrics_hint(self.metric, metrics)
        return f"EarlyStopping({self.metric!r}) looks at none of the metrics of the run, {hint}"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._waited = float(state["best"]), int(state["waited"])
