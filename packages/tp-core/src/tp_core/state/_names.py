"""Names in a model as its author wrote it, whatever has been compiled since."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["named_parameters", "plain_name", "plain_state"]

_COMPILED = "_orig_mod"
"""The name under which ``torch.compile(module)`` holds the module; it is part of every name in its state."""


def plain_name(name: str) -> str:
    """Return a name without what ``torch.compile`` puts into it.

    Example:
        >>> plain_name("_orig_mod.head._orig_mod.weight")
        'head.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED) if _COMPILED in name else name


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's state under plain names."""
    return {plain_name(name): value for name, value in state.items()}


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters under all of their plain names: a tied one has several."""
    return {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
