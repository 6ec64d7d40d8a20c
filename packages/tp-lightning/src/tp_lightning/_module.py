"""What is asked of a module and its datamodule: steps, hooks, loaders."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from tp_core.errors import ConfigError


def call(holder: Any, name: str, *args: Any) -> Any:
    method = getattr(holder, name, None)
    if callable(method):
        return method(*args)
    return None


def overrides(holder: Any, name: str) -> bool:
    """Return whether a module has a method that is not Lightning's own."""
    method = getattr(type(holder), name, None) or vars(holder).get(name)
    return callable(method) and not str(getattr(method, "__module__", "")).startswith(
        ("lightning.", "pytorch_lightning.")
    )


def call_step(model: Any, name: str, *args: Any) -> Any:
    """Call a step with as many of (batch, batch_idx, dataloader_idx) as it takes."""
    method = getattr(model, name)
    parameters = inspect.signature(method).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return method(*args)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return method(*args[: len(positional)])


def transferred(model: Any, batch: Any) -> Any:
    """Return the batch, which a prepared loader has moved, after the module's hooks around the move."""
    for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
        if overrides(model, name):
            batch = getattr(model, name)(batch, 0)
    return batch


def check_module(model: Any, names: Iterable[str]) -> None:
    """Refuse a module without a method, or with one that is not here."""
    if not isinstance(model, nn.Module):
        msg = f"the first argument is a LightningModule, got {type(model).__name__}"
        if isinstance(model, type):
            msg += f": {model.__name__}; make an object of it: {model.__name__}(...)"
        raise ConfigError(msg)
    for name in names:
        if not overrides(model, name):
            msg = f"{type(model).__name__} has no {name}(), which this call runs; write it"
            raise ConfigError(msg)
    refused = {
        "backward": "self.automatic_optimization = False, and self.manual_backward(loss)",
        "configure_callbacks": "Trainer(callbacks=[...])",
        "configure_sharded_model": "configure_model(), with strategy='fsdp'",
        "transfer_batch_to_device": "a batch of dicts, lists, tuples or dataclasses, which is moved",
    }
    for name, instead in refused.items():
        if overrides(model, name):
            msg = f"{type(model).__name__}.{name}() is not called here; write {instead}"
            raise ConfigError(msg)


def is_datamodule(value: Any) -> bool:
    return hasattr(value, "train_dataloader") or hasattr(value, "test_dataloader")


class ModuleData:
    """The loaders of a call: given, of a datamodule, or of the module."""

    def __init__(self, model: Any, datamodule: Any) -> None:
        self._holders = (datamodule, model)

    def loader(self, name: str, given: Any, *, optional: bool = False) -> Any:
        """Return what was given, or what ``name()`` of the datamodule or the module returns."""
        if given is not None and not is_datamodule(given):
            return given
        for holder in self._holders:
            if holder is not None and overrides(holder, name):
                return getattr(holder, name)()
        if optional:
            return None
        msg = f"there is no loader: give one, or a datamodule with {name}()"
        raise ConfigError(msg)

    def loaders(self, name: str, given: Any, *, optional: bool = False) -> list[Any]:
        several = self.loader(name, given, optional=optional)
        if isinstance(several, Mapping):
            return list(several.values())
        if isinstance(several, list | tuple):
            return list(several)
        if several is None:
            return []
        return [several]


def length_of(loader: Any) -> int | None:
    """Return the number of batches of a loader; ``None`` for a stream."""
    try:
        return len(loader)
    except (TypeError, ValueError):
        return None
