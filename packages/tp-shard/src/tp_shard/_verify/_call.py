"""What a model is called with, and the tensors in what goes in and comes out."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Call", "Loss", "cast", "first_alone", "fresh", "loss_of", "mapped", "tensors_of"]

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """What a module is called with, and what becomes of it.

    Attributes:
        args: Positional arguments.
        kwargs: Arguments by name.
        loss: Makes the loss of what it returns; by default its own, or a fixed sum of all it returns.
        training: Whether the module trains; dropout leaves all as it is then, too.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Loss | None = None
    training: bool = False


def tensors_of(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested tuples, lists, mappings and dataclasses, and where they stand."""
    if isinstance(value, Tensor):
        yield place or "output", value
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    elif hasattr(value, "__dataclass_fields__"):
        items = ((name, getattr(value, name, None)) for name in value.__dataclass_fields__)
    for key, inner in items:
        yield from tensors_of(inner, f"{place}.{key}" if place else str(key))


def fresh(value: Any) -> Any:
    """Return arguments of their own for one run; those with gradients get their own, too."""
    return mapped(value, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments on the CPU, what is floating-point in ``dtype`` and with gradients."""

    def one(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.detach().cpu()
        return tensor.detach().cpu().to(dtype).clone().requires_grad_()

    return mapped(value, one)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return nested tuples, lists and dicts with ``function`` of each tensor, and copies of all else."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(v, function) for v in value)
    if type(value) is dict:
        return {name: mapped(v, function) for name, v in value.items()}
    return copy.deepcopy(value)


def first_alone(output: Any) -> Tensor:
    """Return a loss of the first thing that a module returns; others may be a rank's own."""
    return loss_of(None, dict([next(tensors_of(output))]), None)


def loss_of(output: Any, tensors: Mapping[str, Tensor], loss: Loss | None) -> Tensor:
    if loss is not None:
        return loss(output)
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.requires_grad:
        return own
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.requires_grad and tensor.numel():
            weights = torch.arange(tensor.numel(), dtype=torch.float64).mul_(0.7).cos_().view(tensor.shape)
            wide = tensor.double()
            finite = wide.isfinite()
            wide = torch.where(finite, wide, torch.zeros_like(wide))
            total = total + (wide * weights).sum() + 0.1 * wide.square().mean()
    return total
