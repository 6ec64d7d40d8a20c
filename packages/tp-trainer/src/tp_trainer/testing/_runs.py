"""The runs of the conformance tests on each rank, and the reference that they are compared with."""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.data import StepOutput
from tp_core.discovery import PluginRegistry
from tp_core.testing import ConformanceKit

from tp_trainer import Checkpoints, GradientRules, Interrupted, SchedulerOptions, Trainer

# -- Ways to train that must equal a plain loop on one device -------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train.

    Attributes:
        trainer: Arguments of the trainer.
        gradients: The rules for the gradients.
        fits: The number of calls of ``fit`` in one session that share the epochs.
        gamma: The factor of a scheduler on the learning rate after each step, or ``None``.
        bad_target: A bad target for one sample, or ``None``; its batch must be skipped.
        dtype: The type of the model and the data before they are prepared.
    """

    trainer: Mapping[str, Any] = field(default_factory=dict)
    gradients: GradientRules = field(default_factory=GradientRules)
    fits: int = 1
    gamma: float | None = None
    bad_target: float | None = None
    dtype: torch.dtype = torch.float64


WAYS = {
    "plain": Way(),
    "two fits": Way(fits=2),
    "schedule": Way(gamma=0.7),
    "accumulate": Way({"accumulate": 3}),
    "clip_norm": Way(gradients=GradientRules(clip_norm=0.05)),
    "clip_value": Way(gradients=GradientRules(clip_value=0.005)),
    "accumulate and clip": Way({"accumulate": 2}, GradientRules(clip_norm=0.05, clip_value=0.02)),
    "nonfinite skip": Way(gradients=GradientRules(nonfinite="skip"), bad_target=float("nan")),
    "compile": Way({"compile": True}),
    "bf16-mixed": Way({"precision": "bf16-mixed"}, dtype=torch.float32),
    "fp16-mixed": Way({"precision": "fp16-mixed"}, bad_target=1e15, dtype=torch.float32),
    "bf16-true": Way({"precision": "bf16-true"}, dtype=torch.float32),
}


# -- The runs, and their reference ----------------------------------------------------------------


SAMPLES, BATCH_SIZE, EPOCHS, RATE = 22, 4, 2, 0.1
BAD = 5  # the sample of the ways that have a bad one

State = dict[str, Tensor]


class StoppedError(Exception):
    """Raised to end a run in its middle."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run: the whole model's state, and the records of its epochs as plain values."""

    state: State
    epochs: list[dict[str, Any]]


def samples(count: int = SAMPLES, *, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Return the data: the same on every call, and small enough for the first loss scale of fp16."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(count, 6, dtype=torch.float64, generator=generator) / 4
    y = torch.randn(count, 3, dtype=torch.float64, generator=generator) / 4
    return TensorDataset(x.to(dtype), y.to(dtype))


def mean_error(model: nn.Module, batch: Any) -> StepOutput:
    """Return the mean error: a step without randomness."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


@dataclass(slots=True)
class NoisyStep:
    """A step with random noise, which calls a function at its n-th call in training."""

    at: int = 0
    then: Callable[[], None] = lambda: None
    _calls: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        if model.training:
            with self._lock:  # a backend may run it on several devices at once
                self._calls += 1
                is_now = self._calls == self.at
            if is_now:
                self.then()
        noise = 0.01 * torch.randn((), dtype=torch.float64)
        return {"loss": nn.functional.mse_loss(model(batch[0]), batch[1]) + noise, "noise": noise}


def make_trainer(kit: ConformanceKit, **arguments: Any) -> Trainer:
    """Return a trainer on the kit's backend, installed or not."""
    plugins, name = PluginRegistry(), kit.backend.name
    installed = {c.item.name: type(c.item) for c in plugins.backends()}
    if installed.setdefault(name, kit.backend) is not kit.backend:
        msg = f"the backend {name!r} that is installed is not the one under test: {installed[name]}"
        raise TypeError(msg)
    if all(c.item.name != name for c in plugins.backends()):
        plugins.register(kit.backend())
    return Trainer(
        backend=name,
        devices=list(kit.devices) * kit.processes,
        seed=5,
        progress=False,
        plugins=plugins,
        options={name: kit.options},
        **arguments,
    )


def fit(
    trainer: Trainer,
    model: nn.Module,
    *,
    step: Callable[[nn.Module, Any], StepOutput] = mean_error,
    data: TensorDataset | None = None,
    shuffle: bool = False,
    fits: int = 1,
    gamma: float | None = None,
    **arguments: Any,
) -> Outcome:
    """Train as in every test here; for ``fits`` and ``gamma`` see `Way`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    if gamma is not None:
        arguments["scheduler"] = SchedulerOptions(_decaying(optimizer, gamma), every="step")
    loader = DataLoader(samples() if data is None else data, batch_size=BATCH_SIZE, shuffle=shuffle)
    arguments = {"epochs": EPOCHS // fits} | arguments
    records = []
    for _ in range(fits):
        history = trainer.fit(model, optimizer, loader, step=step, **arguments)
        records += [{"samples": r.samples, "train": dict(r.train), "val": dict(r.val)} for r in history]
    state = {n: t.detach().cpu().clone() for n, t in trainer.session.model_state(model).items()}
    return Outcome(state, records)


def _decaying(optimizer: torch.optim.Optimizer, gamma: float) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=gamma)


def by_hand(kit: ConformanceKit, way: Way) -> Outcome:
    """Train the reference on one device with a loop by hand, in the precision of the data."""
    model = kit.make_reference().to(way.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    scheduler = _decaying(optimizer, way.gamma or 1.0)
    few = samples(5, dtype=way.dtype).tensors
    records = []
    for _ in range(EPOCHS):
        count, total = 0, 0.0
        for x, y in _steps(way):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if way.gradients.clip_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), way.gradients.clip_value)
            if way.gradients.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), way.gradients.clip_norm)
            optimizer.step()
            scheduler.step()
            count, total = count + len(x), total + len(x) * loss.item()
        with torch.no_grad():
            val = nn.functional.mse_loss(model(few[0]), few[1]).item()
        records.append({"samples": count, "train": {"loss": total / count}, "val": {"loss": val}})
    return Outcome(dict(model.state_dict()), records)


def _steps(way: Way) -> list[tuple[Tensor, Tensor]]:
    """Return the data of each optimizer step of an epoch, as one batch."""
    x, y = samples(dtype=way.dtype).tensors
    size = BATCH_SIZE * way.trainer.get("accumulate", 1)
    steps = [(x[i : i + size], y[i : i + size]) for i in range(0, SAMPLES, size)]
    if way.bad_target is not None:
        del steps[BAD // size]
    return steps


# -- on every rank --------------------------------------------------------------------------------


def trained_in_all_ways(kit: ConformanceKit) -> dict[str, Outcome]:
    """Train in every way, one after the other in the same processes."""
    # aot_eager tests the place of the compiler; inductor would take many seconds.
    quick = partialmethod(nn.Module.compile, backend="aot_eager")
    with patch.object(nn.Module, "compile", quick):
        return {name: _trained(kit, way) for name, way in WAYS.items()}


def _trained(kit: ConformanceKit, way: Way) -> Outcome:
    data = samples(dtype=way.dtype)
    if way.bad_target is not None:
        data.tensors[1][BAD] = way.bad_target
    # An odd number of samples: some ranks have none of the last batch.
    few = DataLoader(samples(5, dtype=way.dtype), batch_size=BATCH_SIZE)
    model = kit.make_model().to(way.dtype)
    with make_trainer(kit, **way.trainer) as trainer:
        return fit(
            trainer, model, data=data, validation=few, fits=way.fits, gamma=way.gamma, gradients=way.gradients
        )


def _noisy(kit: ConformanceKit, folder: str | None, step: NoisyStep, **arguments: Any) -> Outcome:
    with make_trainer(kit, accumulate=2) as trainer:
        model = nn.Sequential(nn.Dropout(0.2), kit.make_model())
        if folder is not None:
            arguments |= {"checkpoint": Checkpoints(folder, every_steps=1, background=True)}
        return fit(trainer, model, step=step, shuffle=True, **arguments)


def _stop() -> None:
    raise StoppedError


def resumed(kit: ConformanceKit, folder: str, stops: list[int]) -> tuple[Outcome, list[Outcome]]:
    """Return an uninterrupted run, and runs that were stopped at batches and resumed."""
    outcomes = []
    for at in stops:
        place = str(Path(folder, str(at)))
        try:
            _noisy(kit, place, NoisyStep(at, _stop))
        except StoppedError:
            outcomes.append(_noisy(kit, place, NoisyStep(), resume="auto"))
    return _noisy(kit, None, NoisyStep()), outcomes


def resumed_after(kit: ConformanceKit, folder: str) -> tuple[Outcome, Outcome]:
    """Return an uninterrupted run, and one that resumes from the checkpoints of another run."""
    return _noisy(kit, None, NoisyStep()), _noisy(kit, folder, NoisyStep(), resume="auto")


def stopped(kit: ConformanceKit, folder: str, at: int) -> None:
    """Train without noise up to a batch, and leave the checkpoints."""
    count = 0

    def step(model: nn.Module, batch: Any) -> StepOutput:
        nonlocal count
        count += 1
        if count > at:
            _stop()
        return mean_error(model, batch)

    checkpoint = Checkpoints(folder, every_steps=1)
    with make_trainer(kit) as trainer:
        try:
            fit(trainer, kit.make_model(), step=step, checkpoint=checkpoint)
        except StoppedError:
            return


def interrupted(kit: ConformanceKit, folder: str) -> tuple[str, str, Outcome, Outcome]:
    """Send SIGTERM to the last rank, resume; return the signal, the checkpoint, both outcomes."""
    is_last = int(os.environ.get("RANK", "0")) == kit.processes - 1

    def send() -> None:
        if is_last:
            os.kill(os.getpid(), signal.SIGTERM)

    expected = _noisy(kit, None, NoisyStep())
    try:
        _noisy(kit, folder, NoisyStep(5, send))
    except Interrupted as end:
        found = _noisy(kit, folder, NoisyStep(), resume="auto")
        return end.signal.name, Path(end.checkpoint).name, expected, found
    msg = "the signal did not end the run"
    raise RuntimeError(msg)


def killed(kit: ConformanceKit, folder: str) -> None:
    """Kill the last rank in its fifth batch; the others must end soon after."""
    is_last = int(os.environ["RANK"]) == kit.processes - 1

    def die() -> None:
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)

    _noisy(kit, folder, NoisyStep(5, die))
