"""What a model is called with, and the tensors in what goes in and comes out."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = [
    "Call",
    "Loss",
    "cast",
    "copied",
    "first_alone",
    "first_line",
    "fresh",
    "loss_of",
    "mapped",
    "tensors_of",
]

Loss = Callable[[Any], Tensor]
T = TypeVar("T")
_MOST = 6  # shapes that are written out


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

    def __str__(self) -> str:
        """Return the shapes of what it is called with."""
        given = {**{f"[{i}]": value for i, value in enumerate(self.args)}, **self.kwargs}
        shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors_of(given)]
        return ", ".join([*shapes[:_MOST], *(["..."] if len(shapes) > _MOST else [])]) or "no tensors"


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
    """Return a deep copy of any value with ``function`` of each tensor in it, whatever holds them."""
    with _Mapping(function):
        return copy.deepcopy(value)


def copied(value: T, memo: dict[int, Any] | None = None) -> T:
    """Return a deep copy of a module, even where it keeps results of a computation, which are detached."""
    with _Mapping(
        lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad and tensor.is_leaf)
    ):
        return copy.deepcopy(value, memo)


class _Mapping(TorchFunctionMode):
    """Lets deep copies have a function of each tensor; torch itself refuses to copy what is not a leaf."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = self._function(tensor)
        return memo[id(tensor)]


def first_alone(output: Any) -> Tensor:
    """Return a loss of the first thing that a module returns; others may be a rank's own."""
    return loss_of(None, dict([next(tensors_of(output))]), None)


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


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
