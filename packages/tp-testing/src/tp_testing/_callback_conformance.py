"""The conformance tests of callbacks, for their authors to subclass."""

import abc
import inspect
import math
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.discovery import PluginRegistry
from tp_core.plugins import Callback, NamedCallback, RunView, hookimpl, registry
from tp_core.random import preserve_rng_state, seed_torch
from tp_core.ranks import run_ranks
from tp_trainer import Checkpoints, Trainer

from tp_testing._kit import DeclaredLimits

_EVENTS = [name for name in vars(Callback) if name.startswith("on_")]
_EPOCHS = 2  # of five steps each
_STOPS = [3, 5, 8]  # within an epoch, at its end, within the next


class _RunResult(NamedTuple):
    """The result of a run: its weights, the callback's state, the number of steps."""

    weights: dict[str, Tensor]
    state: dict[str, Any]
    step: int


class _RunStoppedError(Exception):
    """Raised to end a run in its middle."""


class _Fail(Callback):
    """Ends a run after a step, like an error of the user's code."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, run: RunView) -> None:
        if run.step == self._step:
            raise _RunStoppedError


class CallbackConformance(DeclaredLimits, abc.ABC):
    """The conformance tests of a callback. A subclass in a test module makes the callback.

    The callback takes part in short runs of two epochs with validation, on one device and on several ranks.
    Its state goes through checkpoints, so a resumed run must equal an uninterrupted one. Ranks must stay
    equal. The error that ends a run must be raised. A run must continue if a self-joined callback fails.

    Attributes:
        processes: The number of ranks.

    Example:
        >>> class TestMine(CallbackConformance):
        ...     def make(self, folder):
        ...         return MyCallback(folder / "numbers.txt")
    """

    processes: ClassVar[int] = 2

    @abc.abstractmethod
    def make(self, folder: Path) -> Callback:
        """Return a new callback; its files go into ``folder``."""

    def make_model(self) -> nn.Module:
        """Return the model of the runs, with inputs (batch, 3) and outputs (batch, 1).

        Override it for a callback that needs certain parameters.
        """
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))

    # -- the tests ------------------------------------------------------------------------------

    def test_it_overrides_events_with_the_arguments_that_they_have(self, tmp_path: Path) -> None:
        callback = self.make(tmp_path)
        assert isinstance(callback, Callback)
        assert _overridden(callback), f"it overrides none of {', '.join(_EVENTS)}"
        for name in _overridden(callback):
            wanted = len(inspect.signature(getattr(Callback, name)).parameters) - 1
            inspect.signature(getattr(callback, name)).bind(*range(wanted))

    def test_a_resumed_run_is_the_uninterrupted_one(self, tmp_path: Path) -> None:
        whole = _run(self, tmp_path / "whole")
        for stop in _STOPS:
            folder = tmp_path / f"stopped-{stop}"
            try:
                _run(self, folder, stop_at=stop)
            except _RunStoppedError:
                resumed = _run(self, folder, resume="auto")
                _assert_same(resumed, whole, f"resumed at step {stop}")
            else:
                assert whole.step < stop, "the run was not stopped"  # the callback had ended it before

    def test_it_takes_part_in_one_run_after_another(self, tmp_path: Path) -> None:
        callback = self.make(tmp_path)
        for n in range(2):
            _run(self, tmp_path / str(n), callback=callback)

    def test_ranks_stay_alike(self, tmp_path: Path) -> None:
        first, *others = run_ranks(_run, self.processes, self, tmp_path)
        for rank, other in enumerate(others, start=1):
            _assert_same(other.weights, first.weights, f"the weights on rank {rank}")
            assert other.step == first.step

    def test_the_error_that_ends_a_run_stays_the_error_that_is_raised(self, tmp_path: Path) -> None:
        with pytest.raises(_RunStoppedError):
            _run(self, tmp_path, stop_at=1)

    def test_where_it_fails_the_run_ends_or_goes_on_without_it(self, tmp_path: Path) -> None:
        for name in _overridden(self.make(tmp_path)):
            met = _failing(self, tmp_path, name)
            try:
                _run(self, tmp_path / f"{name}-given", callback=met)
            except _RunStoppedError:
                # Self-joined it must be logged and left out.
                plugins = PluginRegistry()
                plugins.register(_Joins(_failing(self, tmp_path, name)), name="fails")
                _run(self, tmp_path / f"{name}-joined", callback=None, plugins=plugins)


class _Joins:
    """A plugin with a callback that joins every run."""

    tp_contract = 1

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    @hookimpl
    def tp_callbacks(self) -> list[NamedCallback]:
        return [NamedCallback("fails", "fails in an event", lambda: self._callback, joins=True)]


def _failing(kit: CallbackConformance, folder: Path, name: str) -> Callback:
    def fail(*_: object) -> None:
        raise _RunStoppedError

    callback = kit.make(folder)
    setattr(callback, name, fail)
    return callback


def _overridden(callback: Callback) -> list[str]:
    return [name for name in _EVENTS if getattr(type(callback), name) is not getattr(Callback, name)]


_MAKE: Any = object()


def _run(
    kit: CallbackConformance,
    folder: Path,
    *,
    callback: Any = _MAKE,
    stop_at: int = 0,
    resume: str | None = None,
    plugins: PluginRegistry = registry,
) -> _RunResult:
    """Train with the callback; with ``stop_at``, raise after that step."""
    folder.mkdir(exist_ok=True)
    callback = kit.make(folder) if callback is _MAKE else callback
    callbacks = [] if callback is None else [callback]
    if stop_at:
        callbacks.append(_Fail(stop_at))
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    with preserve_rng_state(), Trainer(seed=3, devices="cpu", progress=False, plugins=plugins) as trainer:
        seed_torch(1)
        model = kit.make_model().double()
        history = trainer.fit(
            model,
            torch.optim.Adam(model.parameters(), lr=0.05),
            DataLoader(data, batch_size=4, shuffle=True),
            step=_step,
            validation=DataLoader(data, batch_size=4),
            epochs=_EPOCHS,
            checkpoint=Checkpoints(folder / "checkpoints", every_steps=1),
            resume=resume,
            callbacks=callbacks,
        )
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    state = {} if callback is None else callback.state_dict()
    steps = history[-1].steps if len(history) else 0
    return _RunResult(weights, state, steps)


def _step(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def _assert_same(actual: Any, expected: Any, where: str) -> None:
    """Compare nested states bit for bit."""
    if isinstance(expected, Tensor):
        assert torch.equal(actual, expected), where
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            _assert_same(actual[key], expected[key], f"{where}, {key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for i, (item, other) in enumerate(zip(actual, expected, strict=True)):
            _assert_same(item, other, f"{where}, {i}")
    elif not (isinstance(expected, float) and isinstance(actual, float) and math.isnan(expected)):
        assert actual == expected, where
    else:
        assert math.isnan(actual), where
