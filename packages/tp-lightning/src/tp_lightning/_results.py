"""What a module logs: values of steps, and of epochs over the samples of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tp_core.data import count_samples
from tp_core.errors import ConfigError


@dataclass(slots=True)
class LoggedValue:
    """What was logged under a name in an epoch: a weighted sum, an extreme, or a metric object."""

    reduction: str
    total: float | Tensor = 0.0
    weight: float = 0.0
    metric: Any = None
    forked: bool = False
    on_epoch: bool = True


class LoggedResults:
    """Collects what a module logs: values of steps, and of epochs over the samples of all ranks.

    Attributes:
        newest: The newest values, by all names that a callback may ask for.
        forked: Names of the last epoch that have values of steps, too.
    """

    def __init__(self) -> None:
        self.newest: dict[str, Tensor] = {}
        self.loader: int | None = None
        self.forked: set[str] = set()
        self._values: dict[tuple[str, str], LoggedValue] = {}
        self._function, self._batch = "", None

    def begin(self, function: str, batch: Any) -> None:
        """Note the function of the module that runs now, and its batch."""
        self._function, self._batch = function, batch

    def add(
        self,
        name: str,
        value: Any,
        *,
        on_step: bool | None,
        on_epoch: bool | None,
        reduction: str,
        indexed: bool,
        weight: float | None,
    ) -> Any:
        """Add a value; return it if loggers are to have it for this step."""
        if reduction not in ("mean", "sum", "min", "max", "avg"):
            msg = f"log(reduce_fx={reduction!r}) is not here: 'mean', 'sum', 'min', 'max', or a metric object"
            raise ConfigError(msg)
        is_step = self._function == "training_step" or self._function.startswith("on_train_batch")
        on_step = is_step if on_step is None else on_step
        on_epoch = not is_step if on_epoch is None else on_epoch
        stage = next((s for s in ("validation", "test", "predict") if s in self._function), "train")
        if indexed and self.loader is not None:
            name = f"{name}/dataloader_idx_{self.loader}"
        logged = self._values.setdefault((stage, name), LoggedValue(reduction))
        logged.forked, logged.on_epoch = on_step and on_epoch, on_epoch
        if hasattr(value, "compute") and hasattr(value, "update"):
            logged.metric = value
            return None
        if not isinstance(value, Tensor):
            try:
                number = torch.tensor(float(value))
            except (TypeError, ValueError) as error:
                msg = f"log({name!r}) takes a number, a tensor or a metric, got {value!r:.80}"
                raise ConfigError(msg) from error
        elif value.dtype is torch.float64:
            number = value.detach()
        else:
            number = value.detach().float()
        if on_epoch:
            if reduction in ("min", "max"):
                if reduction == "min":
                    pick = torch.minimum
                else:
                    pick = torch.maximum
                if not logged.weight:
                    logged.total = number
                else:
                    logged.total = pick(torch.as_tensor(logged.total), number)
                logged.weight = 1.0
            else:
                if reduction == "sum":
                    count = 1.0
                elif weight is not None:
                    count = weight
                elif self._batch is None:
                    count = 1.0
                else:
                    count = float(count_samples(self._batch))
                logged.total = logged.total + number * count
                logged.weight += count
        if on_step:
            self.newest[name] = number
            if logged.forked:
                self.newest[forked_name(name, "step")] = number
        if on_step or stage == "train":
            return number
        return None

    def finish(self, stage: str, session: Any) -> dict[str, Tensor]:
        """Return the values of an epoch, over all ranks, and forget them.

        Collective: one gather of objects.
        """
        of_stage = {n: v for (s, n), v in self._values.items() if s == stage}
        self.forked = {name for name, value in of_stage.items() if value.forked}
        for name in of_stage:
            del self._values[stage, name]
        sums = {n: (v.reduction, float(v.total), v.weight) for n, v in of_stage.items() if v.metric is None}
        everyone = session.gather_objects(sums, where="means of logged values")
        results: dict[str, Tensor] = {}
        for name, value in of_stage.items():
            if value.metric is not None:
                result = value.metric.compute()
                value.metric.reset()
                results[name] = torch.as_tensor(result)
            elif value.on_epoch:
                results[name] = torch.tensor(_joined([each[name] for each in everyone if name in each]))
            if name in results:
                self.newest[name] = results[name]
                if value.forked:
                    self.newest[forked_name(name, "epoch")] = results[name]
        return {n: v for n, v in results.items() if v.numel() == 1}


def forked_name(name: str, word: str) -> str:
    """Return the name of the steps' values, or of the epoch's, where a module logs both."""
    own, mark, loader = name.partition("/dataloader_idx_")
    return f"{own}_{word}{mark}{loader}"


def _joined(parts: Sequence[tuple[str, float, float]]) -> float:
    reduction = parts[0][0]
    if reduction in ("min", "max"):
        extreme = min if reduction == "min" else max
        return extreme(total for _, total, _ in parts)
    total, weight = sum(p[1] for p in parts), sum(p[2] for p in parts)
    if reduction == "sum":
        return total
    return total / weight
