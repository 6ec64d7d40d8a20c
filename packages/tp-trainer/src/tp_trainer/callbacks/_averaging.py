"""Averages of a model's weights over the steps or epochs of a run, to evaluate and to export."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn
from tp_core.arguments import explain_init
from tp_core.errors import ConfigError
from tp_core.plugins import Callback, RunView
from tp_core.state import SliceBuffer, fill_from_whole
from tp_core.tensors import is_dtensor

from tp_trainer._checks import check_positive


class _AveragedWeights(Callback):
    """Keeps averages of the trained parameters. They start as a copy, as in torch's ``AveragedModel``.

    Args:
        move: One of torch's functions for ``AveragedModel(multi_avg_fn=...)``.
    """

    def __init__(self, move: Callable[[Any, Any, int], None]) -> None:
        self._move = move
        self._averages: dict[str, Tensor] = {}
        self._updates = 0

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """The averages by parameter names, of this rank's own shards; empty until the first update."""
        return self._averages

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Put the averaged weights into the model within a ``with``, to save or export them."""
        parameters = dict(model.named_parameters())
        if not self._averages or not self._averages.keys() <= parameters.keys():
            msg = (
                "there is no average of this model's weights: give the plain model that the run with this "
                "callback has trained, after the first update of the averages"
            )
            raise ConfigError(msg)
        self._swap(parameters)
        try:
            yield
        finally:
            self._swap(parameters)

    def on_fit_start(self, run: RunView) -> None:
        """Move restored averages to the devices and shards of the model's parameters."""
        if not self._averages:
            return
        parameters = dict(run.model.named_parameters())
        averages: dict[str, Tensor] = {}
        for name, average in self._averages.items():
            weight = parameters.get(name)
            if weight is None:
                moved = None
            else:
                moved = _held_as(weight, average)
            if moved is None:
                msg = (
                    "the average is one of another model's weights, or of other shards of them; give the "
                    "run a new callback"
                )
                raise ConfigError(msg)
            averages[name] = moved
        self._averages = averages

    @torch.no_grad()
    def _update(self, model: nn.Module) -> None:
        earlier = self._averages
        parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad or n in earlier}
        began = {name: p.clone() for name, p in parameters.items() if name not in earlier}
        if earlier:
            by_kind: dict[tuple[torch.device, torch.dtype], list[str]] = {}
            for name, average in self._averages.items():
                by_kind.setdefault((average.device, average.dtype), []).append(name)
            for names in by_kind.values():  # torch's functions need tensors of one device and type
                averages = [self._averages[n] for n in names]
                self._move(averages, [parameters[n] for n in names], self._updates)
        self._averages = earlier | began
        self._updates += 1

    @torch.no_grad()
    def _swap(self, parameters: Mapping[str, Tensor]) -> None:
        """Exchange values in place: optimizers, replicas and buckets refer to the parameters themselves."""
        for name, average in self._averages.items():
            parameter = parameters[name]
            value = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self._averages, "updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._averages = {name: average.clone() for name, average in state["averages"].items()}
        # A checkpoint without the number has a moving average, which only needs to know that it has begun.
        self._updates = int(state.get("updates", bool(self._averages)))


@explain_init
class ExponentialMovingAverage(_AveragedWeights):
    """Keeps an exponential moving average of the parameters, and uses it in validations.

    The first update copies the weights, as in torch's ``AveragedModel``; until then validations use the
    model's own. Later updates are ``average = decay * average + (1 - decay) * parameter``, by torch's own
    function. For a sharded model each rank averages its shards. Buffers, for example the statistics of batch
    norm, are not averaged.

    Args:
        decay: The part of the average that stays, from 0 up to but not including 1.
        every_steps: Update the average every this many steps of the run.
        validate: Whether validations use the averaged weights instead of the model's.

    Raises:
        ConfigError: A value is out of its range.

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; with
    exponential weights Tarvainen and Valpola, "Mean teachers are better role models", 2017, section 2.

    Example:
        >>> average = ExponentialMovingAverage(0.999)
        >>> trainer.fit(
        ...     model, optimizer, loader, step=step, validation=val_loader, callbacks=[average]
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
        super().__init__(get_ema_multi_avg_fn(decay))
        self._every_steps = every_steps
        self._validate = validate
        self._is_in_place = False

    def on_step_end(self, run: RunView) -> None:
        if run.step % self._every_steps == 0:
            self._update(run.model)

    def on_validation_start(self, run: RunView) -> None:
        if self._validate and self._averages:
            self._swap(dict(run.model.named_parameters()))
            self._is_in_place = True

    def on_validation_end(self, run: RunView, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - contract
        self._restore(run.model)

    def on_exception(self, run: RunView, error: BaseException) -> None:  # noqa: ARG002 - contract
        """Put the model's own weights back after a failed validation."""
        self._restore(run.model)

    def _restore(self, model: nn.Module) -> None:
        if self._is_in_place:
            self._is_in_place = False
            self._swap(dict(model.named_parameters()))


@explain_init
class StochasticWeightAveraging(_AveragedWeights):
    """Keeps the mean of the parameters at the ends of epochs: stochastic weight averaging (SWA).

    It equals ``AveragedModel(model)`` of ``torch.optim.swa_utils``, updated once an epoch, on every backend
    and after a resume. For a sharded model each rank averages its shards. Training and validations use the
    model's own weights. For SWA's learning rate, give ``fit`` a scheduler: ``SWALR``.

    Buffers are not averaged. The statistics of batch norm do not fit averaged weights: call
    ``torch.optim.swa_utils.update_bn(loader, model)`` in the body of :meth:`in_place_of`.

    Args:
        start_epoch: The first epoch, from 1, that ends with an update.
        start_step: Average at the ends of epochs from this optimizer step on, instead.

    Raises:
        ConfigError: Neither or both are given, or one is not a whole number from 1.

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", 2018.

    Example:
        >>> average = StochasticWeightAveraging(start_epoch=8)
        >>> trainer.fit(model, optimizer, loader, step=step, epochs=10, callbacks=[average])  # doctest: +SKIP
        >>> with average.in_place_of(model):  # doctest: +SKIP
        ...     torch.optim.swa_utils.update_bn(loader, model)
        ...     trainer.export(model, "averaged.safetensors")
    """

    def __init__(self, start_epoch: int | None = None, *, start_step: int | None = None) -> None:
        if (start_epoch is None) == (start_step is None):
            msg = (
                "StochasticWeightAveraging takes either start_epoch or start_step, got "
                f"start_epoch={start_epoch!r}, start_step={start_step!r}"
            )
            raise ConfigError(msg)
        if start_epoch is not None:
            check_positive("start_epoch", start_epoch)
        if start_step is not None:
            check_positive("start_step", start_step)
        super().__init__(get_swa_multi_avg_fn())
        self._start_epoch, self._start_step = start_epoch or 1, start_step or 1

    def on_epoch_end(self, run: RunView) -> None:
        if run.epoch >= self._start_epoch and run.step >= self._start_step:
            self._update(run.model)


def _held_as(parameter: Tensor, average: Tensor) -> Tensor | None:
    """Return an average in the layout of its parameter, this rank's shard; ``None`` if it does not fit."""
    if not is_dtensor(parameter) or is_dtensor(average):
        if average.shape == parameter.shape:
            return average.to(parameter.device)
        return None
    if average.shape == parameter.shape:
        place = SliceBuffer(lambda _, whole: whole, parameter, average.dtype)
        fill_from_whole(place.target, average)
        return place.take()
    sharded: Any = parameter.detach().clone()
    if average.shape != sharded.to_local().shape:
        return None
    sharded.to_local().copy_(average)
    result: Tensor = sharded
    return result
