"""A model that is built without its memory, and the initial values that it would have had, one by one.

Large tensors that are made meanwhile lie on the meta device, and what is done to them is written down, with
the state of the random generator before each draw. Each draw is also made, in memory that is let go at once,
so that the generator goes on as it would have. The value of any one tensor is computed from what was written
down, without the others. So a rank of many takes its slices of a model that no host has room for, and each
element is the one that a model built in one piece would have.

::

    make()  ->  tensors on the meta device, operations  ->  initial_value(tensor): what leads to it, again
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tp_core._tensors._recorder import OnTheCpu, Recorder

__all__ = ["build_deferred", "initial_value", "is_deferred", "materialize"]

LEAST_NBYTES = 64 * 2**10
"""Smaller tensors are made at once: they may be looked at, as numbers often are while a model is built."""

_recorders: Any = WeakTensorKeyDictionary()  # of each parameter and buffer without memory


def build_deferred(make: Callable[[], nn.Module], *, least_nbytes: int = LEAST_NBYTES) -> nn.Module:
    """Return ``make()`` with its large parameters and buffers on the meta device.

    Args:
        make: Builds a model on the CPU.
        least_nbytes: From how many bytes on a tensor is large. Smaller ones are made at once.

    An error of ``make`` has a note, since it may do with large tensors what cannot be done without memory.

    Example:
        >>> model = build_deferred(lambda: nn.Linear(1000, 1000))
        >>> model.weight.device.type, initial_value(model.weight).device.type
        ('meta', 'cpu')
    """
    recorder = Recorder(least_nbytes)
    try:
        with recorder, OnTheCpu(recorder):
            model = make()
    except Exception as error:
        if not recorder.is_empty:
            error.add_note(
                "The model was being built without the memory of its parameters. If it can be built as "
                "usual, do that, and give it to prepare() or fit()."
            )
        raise
    for tensor in [*model.parameters(), *model.buffers()]:
        if recorder.knows(tensor):
            _recorders[tensor] = recorder
    return model


def is_deferred(tensor: Tensor) -> bool:
    """Whether a parameter or buffer has no memory yet, and :func:`initial_value` knows its value."""
    return tensor in _recorders


def initial_value(tensor: Tensor) -> Tensor:
    """Return the value that a parameter or buffer of :func:`build_deferred` would have had, on the CPU."""
    value: Tensor = _recorders[tensor].value(tensor)
    return value


def materialize(module: nn.Module, value: Callable[[Tensor], Tensor] = initial_value) -> None:
    """Give the parameters and buffers of a module that have no memory yet theirs, one after the other.

    Args:
        module: The module. Its parameters become others, with the attributes that they had; tied ones stay
            tied.
        value: Returns the value of a parameter or buffer.
    """
    done: dict[int, Tensor] = {}
    for owner in module.modules():
        for held in (owner._parameters, owner._buffers):
            for name, tensor in list(held.items()):
                if tensor is None or not is_deferred(tensor):
                    continue
                if id(tensor) not in done:
                    done[id(tensor)] = _in_place_of(tensor, value(tensor))
                held[name] = done[id(tensor)]  # type: ignore[assignment]  # of the same kind as before


def _in_place_of(tensor: Tensor, real: Tensor) -> Tensor:
    """Return what takes the place of a parameter or buffer, with all that it carries."""
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, tensor.requires_grad)
    real.__dict__.update(tensor.__dict__)
    return real
