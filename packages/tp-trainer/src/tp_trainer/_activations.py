"""Activation checkpointing of modules, chosen by class."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from tp_core.errors import ConfigError, ModelError


class _Checkpointed:
    """A marker base of the classes made here."""


_made: dict[type[nn.Module], type[nn.Module]] = {}  # one per class: modules of one class must keep one class


def checkpoint_activations(model: nn.Module, *kinds: type[nn.Module] | str) -> None:
    """Recompute the activations of modules of some classes in the backward pass, instead of storing them.

    It trades a second forward pass of these modules for memory. Call it before the model is prepared, on
    every rank. The numbers are the same, also with dropout; names, parameters and checkpoints do not change.
    For the units of ``fsdp`` there is also ``FsdpOptions(activation_checkpointing=True)``.

    Args:
        model: The model; its modules are changed in place.
        *kinds: Classes of its modules, or their names: ``nn.TransformerEncoderLayer``, ``"GPT2Block"``.

    Raises:
        ModelError: The model has no module of a class.
        ConfigError: No class is given.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> checkpoint_activations(model, nn.Linear)
        >>> list(model.state_dict())
        ['0.weight', '0.bias']
    """
    if not kinds or not all(isinstance(kind, str | type) for kind in kinds):
        msg = f"checkpoint_activations() needs classes of modules, or their names, got {kinds!r}"
        raise ConfigError(msg)
    for kind in kinds:
        found = list(_modules_of(model, kind))
        if not found:
            names = sorted({type(module).__name__ for module in model.modules()})
            name = kind if isinstance(kind, str) else kind.__name__
            close = get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(names)}"
            msg = f"the model has no module of the class {name!r}; {hint}"
            raise ModelError(msg)
        for module in found:
            # The class, and not module.forward: copies of the module, such as replicas, must have it, too.
            if not isinstance(module, _Checkpointed):
                module.__class__ = _checkpointed(type(module))


def _modules_of(model: nn.Module, kind: type[nn.Module] | str) -> Iterator[nn.Module]:
    for module in model.modules():
        if type(module).__name__ == kind if isinstance(kind, str) else isinstance(module, kind):
            yield module


def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of ``kind`` with the same name, which recomputes its forward pass in backward."""
    if kind in _made:
        return _made[kind]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        return checkpoint(kind.forward, self, *args, use_reentrant=False, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    _made[kind] = type(kind.__name__, (_Checkpointed, kind), {**names, "forward": forward})
    return _made[kind]
