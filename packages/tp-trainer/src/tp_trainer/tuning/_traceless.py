"""Training steps that leave no trace: afterwards all is as it was before."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tp_trainer._checkpoint import _generators as generators
from tp_trainer._steps._step import modes_kept
from tp_trainer._trainer import Trainer

__all__ = ["traceless"]


@contextmanager
def traceless(trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Put model, optimizer, gradients, loss scale and random generators back at the end of a ``with``.

    What they were is kept on the CPU, so that accelerators have as much memory as in a run.
    """
    tensors = [*model.parameters(), *model.buffers()]
    values = [t.detach().to("cpu", copy=True) for t in tensors]
    gradients = [None if p.grad is None else p.grad.detach().to("cpu", copy=True) for p in model.parameters()]
    state = {parameter: _on_cpu(kept) for parameter, kept in optimizer.state.items()}
    groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    scaler = trainer._scaler
    scale = None if scaler is None else scaler.state_dict()
    preserve_rng_state = generators.capture(trainer.session.job.devices)
    try:
        with modes_kept(model):
            yield
    finally:
        optimizer.state.clear()
        for parameter, kept in state.items():
            optimizer.state[parameter] = _back(kept)
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            for key in [key for key in group if key != "params" and key not in settings]:
                del group[key]
            group.update(settings)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
        if scaler is not None and scale is not None:
            scaler.load_state_dict(scale)
        generators.restore(preserve_rng_state)


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state of one parameter, its tensors on the CPU with where they were."""
    return {
        key: (v.device, v.detach().to("cpu", copy=True)) if isinstance(v, Tensor) else copy.deepcopy(v)
        for key, v in state.items()
    }


def _back(kept: dict[str, Any]) -> dict[str, Any]:
    return {
        key: v[1].to(v[0]) if isinstance(v, tuple) and len(v) == 2 and isinstance(v[1], Tensor) else v
        for key, v in kept.items()
    }
