"""A moving average of a model's weights, to evaluate and to export."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from tp_core.errors import ConfigError
from tp_core.internal import is_dtensor
from tp_core.plugins import Callback, RunView
from tp_core.state import Place, fill_from_whole

from tp_trainer._checks._values import check_positive

__all__ = ["ExponentialMovingAverage"]


class ExponentialMovingAverage(Callback):
    """Keeps an exponential moving average of the parameters, and has validations use it.

    After each optimizer step ``average = decay * average + (1 - decay) * parameter``, by torch's own
    function for ``AveragedModel``. The average begins with the weights before the first step, where
    ``AveragedModel`` and Lightning's callback begin with those after their first update. The average of a
    sharded model is of each rank's shards. Buffers, such as the statistics of batch norm, are the model's
    own.

    Args:
        decay: How much of the average stays, from 0 up to but not including 1.
        every_steps: After how many optimizer steps it moves.
        validate: Whether validations see the averaged weights in the place of the model's.

    Raises:
        ConfigError: A value is out of its range.

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; with
    exponential weights Tarvainen and Valpola, "Mean teachers are better role models", 2017, section 2.

    Example:
        >>> average = ExponentialMovingAverage(0.999)
        >>> trainer.fit(
        ...     model, optimizer, loader, step=step, val_loader=val_loader, callbacks=[average]
        ... )  # doctest: +SKIP
        >>> with average.in_place_of(model):  # doctest: +SKIP
        ...     trainer.export(model, "averaged.safetensors")
    """

    def __init__(self, decay: float = 0.999, *, every_steps: int = 1, validate: bool = True) -> None:
        if not isinstance(decay, float | int) or not 0 <= decay < 1:
            msg = (
                f"ExponentialMovingAverage(decay=...) must be from 0 up to but not including 1, got {decay!r}"
            )
            raise ConfigError(msg)
        check_positive("every_steps", every_steps)
        self._move = get_ema_multi_avg_fn(decay)
        self._every_steps = every_steps
        self._validate = validate
        self._model: nn.Module | None = None
        self._averages: dict[str, Tensor] = {}
        self._step = 0  # at which it has moved last
        self._is_in_place = False

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """The averages by the parameters' names; on each rank those of the shards that it holds."""
        return self._averages

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Have the model compute with the averaged weights in the body of a ``with``: to save or export them.

        Args:
            model: The model that was trained.

        Raises:
            ConfigError: There is no average yet, or it is of another model.
        """
        parameters = dict(model.named_parameters())
        if parameters.keys() != self._averages.keys():
            msg = (
                "there is no average of this model's weights: give the plain model that the run with this "
                "callback has trained, after its beginning"
            )
            raise ConfigError(msg)
        self._swap(parameters)
        try:
            yield
        finally:
            self._swap(parameters)

    def on_fit_start(self, run: RunView) -> None:
        """Begin with the model's weights, or go on with the averages of the run that is resumed.

        Raises:
            ConfigError: The averages are those of another model, or of other shards of it.
        """
        self._model = run.model
        parameters = dict(run.model.named_parameters())
        if not self._averages:
            self._averages = {name: p.detach().clone() for name, p in parameters.items()}
            self._step = run.step
            return
        fits = parameters.keys() == self._averages.keys()
        held = {name: _held_as(parameters[name], a) for name, a in self._averages.items()} if fits else {}
        if not fits or any(average is None for average in held.values()):
            msg = (
                "the moving average is one of another model's weights, or of other shards of them; give the "
                "run a new callback"
            )
            raise ConfigError(msg)
        self._averages = {name: average for name, average in held.items() if average is not None}

    @torch.no_grad()
    def on_step_end(self, run: RunView) -> None:
        """Move the averages."""
        if run.step - self._step < self._every_steps:
            return
        self._step = run.step
        parameters = dict(run.model.named_parameters())
        by_kind: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, average in self._averages.items():
            by_kind.setdefault((average.device, average.dtype), []).append(name)
        for names in by_kind.values():  # torch's function takes tensors of one device and type
            self._move([self._averages[n] for n in names], [parameters[n].detach() for n in names], 1)

    def on_validation_start(self, run: RunView) -> None:
        """Let the validation have the averages."""
        if self._validate:
            self._swap(dict(run.model.named_parameters()))
            self._is_in_place = True

    def on_validation_end(self, run: RunView, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - contract
        """Let the training have its weights again."""
        self._restore(run.model)

    def on_exception(self, run: RunView, error: BaseException) -> None:  # noqa: ARG002 - contract
        """Leave the model with its own weights where a validation has failed."""
        self._restore(run.model)

    def _restore(self, model: nn.Module) -> None:
        if self._is_in_place:
            self._is_in_place = False
            self._swap(dict(model.named_parameters()))

    @torch.no_grad()
    def _swap(self, parameters: Mapping[str, Tensor]) -> None:
        """Exchange values, and not tensors: optimizers, replicas and buckets know the parameters."""
        for name, parameter in parameters.items():
            average = self._averages[name]
            value = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        return {"averages": self._averages, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them."""
        self._averages = {name: average.clone() for name, average in state["averages"].items()}
        self._step = int(state["step"])


def _held_as(parameter: Tensor, average: Tensor) -> Tensor | None:
    """Return an average as its parameter is held: this rank's part of it; ``None`` if it does not fit."""
    if not is_dtensor(parameter) or is_dtensor(average):
        return average.to(parameter.device) if average.shape == parameter.shape else None
    if average.shape == parameter.shape:
        place = Place(lambda _, whole: whole, parameter, average.dtype)
        fill_from_whole(place.target, average)
        return place.take()
    held: Any = parameter.detach().clone()
    if average.shape != held.to_local().shape:
        return None
    held.to_local().copy_(average)
    result: Tensor = held
    return result
