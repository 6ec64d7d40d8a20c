"""The choice of "fastest": the best backends train a few steps each, on copies, and leave no trace."""

import copy
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, Subset
from tp_core.discovery import Selection
from tp_core.errors import ConfigError, ModelError, StepError
from tp_core.output import get_logger
from tp_core.plugins import Job
from tp_core.random import preserve_rng_state

from tp_trainer._memory import StepParts
from tp_trainer._preparation import Preparation
from tp_trainer._steps._step import Step

log = get_logger("tp_trainer")

_MOST = 3
"""The backends that are timed: those that fit by memory, and that "auto" would choose first."""
_FIRST, _STEPS = 2, 6
"""The steps that do not count, in which libraries and allocators warm up, and all steps."""


def choose_fastest(
    preparation: Preparation,
    make_trial: Callable[..., Any],
    model: nn.Module,
    optimizer: Optimizer,
    work: StepParts,
) -> None:
    """Time steps on the best backends, and have the session open on the fastest.

    The memory of the job is estimated once: the trials and the session take over what the choice knows.

    Raises:
        ConfigError: The loader's first batches cannot be read again.
        ModelError: No backend trains this model.

    Collectives: those of a session of each backend, and a gather of objects for each.
    """
    selection, job = preparation.choose(model, work)
    name, reason = _find_fastest(selection, job, make_trial, model, optimizer, work)
    preparation.require(name, reason, job)
    if preparation.job.environment.is_main:
        log.info("backend %r is kept: %s", name, reason)


def _find_fastest(
    selection: Selection,
    job: Job,
    make_trial: Callable[..., Any],
    model: nn.Module,
    optimizer: Optimizer,
    work: StepParts,
) -> tuple[str, str]:
    """Return the name of the fastest of the best backends, and the times of all in words.

    The same on all ranks: a step takes as long as on the slowest one. Weights, optimizer, random generators
    and loader are afterwards what they were.

    Collectives: those of a session of each backend, and a gather of objects for each.
    """
    fitting = [c.name for c in selection.candidates if c.verdict.is_fit][:_MOST]
    names = fitting or [selection.chosen.name]  # which the environment names
    if len(names) == 1:
        return names[0], f"fastest: only {names[0]!r} fits"
    batches = _first_batches(work.loader)
    times: dict[str, float] = {}
    refusals: list[str] = []
    for name in names:
        copied, using = copy.deepcopy((model, optimizer))  # together: the copy has the copied parameters
        try:
            with preserve_rng_state():
                trial = make_trial(backend=name)
                trial._preparation.require(name, "a trial of the fastest", job)
                times[name] = _time_steps(trial, copied, using, batches, work.step)
        except (ConfigError, ModelError, StepError) as error:  # which all ranks raise
            refusals.append(f"{name}: {error}")
    if not times:
        msg = f"backend='fastest' found none that trains this model: {'; '.join(refusals)}"
        raise ModelError(msg)
    best = min(times, key=lambda name: times[name])
    measured = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in times.items())
    left_out = f"; left out {'; '.join(refusals)}" if refusals else ""
    return best, f"fastest, by the time of a step: {measured}{left_out}"


def _first_batches(loader: Iterable[Any]) -> DataLoader[Any]:
    """Return a loader of the first samples of another one, and leave its position as it is."""
    has_samples = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not isinstance(loader, DataLoader) or not has_samples or not loader.batch_size:
        msg = (
            "backend='fastest' reads the first batches again for each backend, and needs a DataLoader with a "
            "batch size over a dataset with indices; give it one, or name a backend"
        )
        raise ConfigError(msg)
    count = min(_STEPS * loader.batch_size, len(loader.dataset))  # type: ignore[arg-type]  # it has indices
    samples = Subset(loader.dataset, range(count))
    return DataLoader(samples, batch_size=loader.batch_size, collate_fn=loader.collate_fn)


def _time_steps(
    trainer: Any, model: nn.Module, optimizer: Optimizer, batches: DataLoader[Any], step: Step | None
) -> float:
    """Return the seconds of the fastest step, of the slowest rank."""
    with trainer:
        prepared, using = trainer.prepare(model, optimizer)
        prepared.train()
        session = trainer.session
        seconds: list[float] = []
        loader = trainer.prepare(batches)
        while len(seconds) < _STEPS:
            for batch in loader:
                session.barrier()
                began = perf_counter()
                using.zero_grad()
                trainer.backward(trainer.run(step, prepared, batch))
                trainer.update(prepared, using)
                if session.device.type != "cpu":
                    torch.accelerator.synchronize(session.device)
                seconds.append(perf_counter() - began)
        slowest: float = max(session.gather_objects(min(seconds[_FIRST:]), where="seconds of a backend"))
        return slowest
