"""What makes a replica leave gradients alone."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

__all__ = ["call_as_replica", "marks_of"]

R = TypeVar("R")


def marks_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that make a replica of ``module`` leave gradients alone.

    ``_is_replica`` is torch's own mark, for classes whose ``zero_grad`` ends in that of ``nn.Module``. By
    itself it warns and then clears the gradients of whatever the replica shares with the module.
    """
    marks: dict[str, Any] = {"_is_replica": True}
    if type(module).zero_grad is nn.Module.zero_grad:
        marks["zero_grad"] = _zero_grad
    return marks


def call_as_replica(module: nn.Module, function: Callable[..., R], *args: Any) -> R:
    """Return ``function(*args)``; meanwhile the module itself counts as a replica, the first of several."""
    attributes = vars(module)
    marks = marks_of(module) if "zero_grad" not in attributes else {}
    attributes.update(marks)
    try:
        return function(*args)
    finally:
        for name in marks:
            attributes.pop(name, None)


def _zero_grad(set_to_none: bool = True) -> None:  # noqa: ARG001, FBT001, FBT002, RUF100 - torch's signature
    # The beginning is that of torch's own warning, so that filters written for it go on working.
    warnings.warn(
        "Calling .zero_grad() from a module created with nn.DataParallel() has no effect: inside of forward "
        "a replica's parameters collect no gradients of their own; call it on the wrapper, before forward, "
        "or use torch.autograd.grad",
        stacklevel=2,
    )
