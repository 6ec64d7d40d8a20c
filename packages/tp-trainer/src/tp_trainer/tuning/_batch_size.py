"""The largest batch that fits, found by training steps that leave no trace."""

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from tp_core.errors import ConfigError
from tp_core.random import preserve_rng_state

from tp_trainer._checks import check_callable, check_model, check_optimizer, check_positive
from tp_trainer._memory import is_out_of_memory
from tp_trainer._steps._step import Step, restore_modes
from tp_trainer._trainer import Trainer


@contextmanager
def traceless(trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Restore model, optimizer, gradients, loss scale and random generators at the end of a ``with``.

    The copies are on the CPU, so that accelerators have as much free memory as in a run.
    """
    scaler = trainer._preparation.scaler
    if scaler is not None:
        scaler.begin_backward([model])  # gradients that are kept are at the scale that is kept
    tensors = [*model.parameters(), *model.buffers()]
    values = [t.detach().to("cpu", copy=True) for t in tensors]
    gradients: list[Tensor | None] = []
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            copied = None
        else:
            copied = gradient.detach().to("cpu", copy=True)
        gradients.append(copied)
    state = {parameter: _on_cpu(saved) for parameter, saved in optimizer.state.items()}
    groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    scale = None if scaler is None else scaler.state_dict()
    try:
        with preserve_rng_state(), restore_modes(model):
            yield
    finally:
        optimizer.state.clear()
        for trained, saved in state.items():
            optimizer.state[trained] = _back(saved)
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            for key in [key for key in group if key != "params" and key not in settings]:
                del group[key]
            group.update(settings)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                if gradient is None:
                    parameter.grad = None
                else:
                    parameter.grad = gradient.to(parameter.device)
        if scaler is not None and scale is not None:
            scaler.load_state_dict(scale)


_Saved = dict[str, tuple[torch.device | None, Any]]
"""An optimizer's state of one parameter: the device of what is a tensor, and a copy on the CPU."""


def _on_cpu(state: dict[str, Any]) -> _Saved:
    saved: _Saved = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            saved[key] = (value.device, value.detach().to("cpu", copy=True))
        else:
            saved[key] = (None, copy.deepcopy(value))
    return saved


def _back(saved: _Saved) -> dict[str, Any]:
    state = {}
    for key, (device, value) in saved.items():
        state[key] = value if device is None else value.to(device)
    return state


def largest_batch_size(
    trainer: Trainer,
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[object],
    *,
    step: Step,
    most: int = 4096,
) -> int:
    """Return the largest batch size of a training step that fits into memory, and restore everything.

    It doubles the size until memory runs out, and then bisects. The samples are the first ones of the
    loader's dataset, repeated. If samples differ in size, put the largest first. Leave a margin: a long run
    fragments the memory, and a single step does not.

    Args:
        trainer: The trainer.
        model: The plain model, or the prepared one.
        optimizer: Its optimizer; its state counts too.
        loader: Has the dataset and the function that makes a batch.
        step: As for ``fit``.
        most: The largest size to try, in samples.

    Returns:
        The batch size of the whole job, in samples, as for the loader of ``fit``; the same on all ranks.

    Raises:
        ConfigError: A value is out of its range; or the ranks share one model, and a rank that runs out of
            memory would leave the others waiting.
        MemoryError: Not even the smallest batch fits: one sample for each rank and device.

    Collectives: one gather of objects for each size.
    """
    check_model("largest_batch_size()", model)
    check_optimizer("largest_batch_size()", optimizer)
    check_callable("step", step)
    check_positive("most", most)
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__getitem__"):
        msg = (
            "largest_batch_size() takes samples out of a DataLoader over a dataset with indices, got "
            f"{type(loader).__name__}"
        )
        raise ConfigError(msg)
    prepared, using = trainer.prepare(model, optimizer)
    session = trainer.session
    if session.data_size != session.world_size:
        msg = (
            "the largest batch cannot be searched where ranks hold parts of one model: they exchange values "
            "in each step, and one that runs out of memory would leave the others waiting"
        )
        raise ConfigError(msg)
    plain = session.unwrap(prepared)

    def fits(size: int) -> bool:
        failed = False
        try:
            with trainer.no_sync(prepared):  # no collectives: a rank that fails leaves no other rank waiting
                _try(trainer, prepared, using, step, _batches_of(loader, size))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        using.zero_grad()
        gc.collect()
        if session.device.type != "cpu":
            torch.accelerator.empty_cache()
        return not any(session.gather_objects(failed, where="a batch size that is tried"))

    least = session.data_size
    with traceless(trainer, plain, using):
        prepared.train()
        if least > most or not fits(least):
            msg = f"not even a batch of {least}, one sample for each rank, fits into memory"
            raise MemoryError(msg)
        good, bad = least, most + 1
        while good * 2 < bad:
            if not fits(good * 2):
                bad = good * 2
                break
            good *= 2
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _try(
    trainer: Trainer, model: nn.Module, optimizer: Optimizer, step: Step, loader: DataLoader[object]
) -> None:
    for batch in trainer.prepare(loader):
        optimizer.zero_grad()
        trainer.backward(trainer.run(step, model, batch))
        trainer.update(model, optimizer)


def _batches_of(loader: DataLoader[object], size: int) -> DataLoader[object]:
    samples = _Repeated(loader.dataset, size)
    return DataLoader(samples, batch_size=size, collate_fn=loader.collate_fn)


class _Repeated(Dataset[object]):
    """The first samples of a dataset, repeated if it has too few."""

    def __init__(self, dataset: Dataset[object], size: int) -> None:
        self._dataset = dataset
        length: int = len(dataset)  # type: ignore[arg-type]  # a dataset with indices has a length
        self._indices = list(islice(cycle(range(length)), size))

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> object:
        return self._dataset[self._indices[index]]
