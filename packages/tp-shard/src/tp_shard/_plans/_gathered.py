"""Where sequences are split, joined and gathered around the modules of others, by hooks on them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tp_shard._groups._collectives import copy
from tp_shard._groups._group import Group
from tp_shard._groups._random import RandomTracker
from tp_shard.nn._sequence import SequenceState, gather_sequence, join_sequence, scatter_sequence

__all__ = ["gather_at", "split_at"]


@dataclass(slots=True)
class _Gather:
    """Gives a module the whole of what it gets in parts.

    Forward: an all-gather for each argument. Backward: a reduce-scatter, as its column layers leave their sum
    to it; where all ranks do the same in the module, nothing.
    """

    state: SequenceState
    group: Group
    inputs: tuple[str, ...]
    whole: bool

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        join = join_sequence if self.whole else gather_sequence
        given, named = list(args), dict(kwargs)
        if not self.inputs:
            given, named = _on_first(given, named, lambda t: join(t, self.state, self.group))
        for name in self.inputs:
            if isinstance(named.get(name), Tensor):
                named[name] = join(named[name], self.state, self.group)
        if not self.whole:  # column layers leave the sum of its gradient to what came whole, too
            named = {n: self._shared(n, v) for n, v in named.items()}
        return tuple(given), named

    def _shared(self, name: str, value: Any) -> Any:
        is_whole = isinstance(value, Tensor) and value.requires_grad and name in _WHOLE_INPUTS
        return copy(value, group=self.group) if is_whole and name not in self.inputs else value


_WHOLE_INPUTS = ("key_value_states", "encoder_hidden_states")
"""Arguments by which cross-attention gets the sequence of an encoder, which is whole again at its end."""


@dataclass(slots=True)
class _Scatter:
    """Takes a rank's part of what a module returns, the same on all ranks. Backward: an all-gather."""

    state: SequenceState
    group: Group

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return _first_of(output, lambda t: scatter_sequence(t, self.state, self.group))


@dataclass(slots=True)
class _Enter:
    """Splits the sequence that the first block of a list gets. Backward: an all-gather."""

    state: SequenceState
    group: Group

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, named = _on_first(
            list(args), dict(kwargs), lambda t: scatter_sequence(t, self.state, self.group)
        )
        return tuple(given), named


@dataclass(slots=True)
class _Leave:
    """Joins the sequence that the last block of a list returns. Forward: an all-gather. Backward: nothing."""

    state: SequenceState
    group: Group

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return _first_of(output, lambda t: join_sequence(t, self.state, self.group))


@dataclass(slots=True)
class _OwnNumbers:
    """Lets a block draw the rank's own random numbers: parts of a sequence drop different elements.

    What all ranks draw alike afterwards goes on as if the block had drawn one number. What works on whole
    sequences in the block draws alike, or its parameters would get other gradients on each rank.
    """

    tracker: RandomTracker
    alike: bool = False
    before: list[Any] = field(default_factory=list)

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training:
            device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
            fork = self.tracker._alike(device) if self.alike else self.tracker.fork(device)
            fork.__enter__()
            self.before.append(fork)

    def leave(self, _module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        if self.before:
            self.before.pop().__exit__(None, None, None)


def gather_at(
    module: nn.Module,
    state: SequenceState,
    group: Group,
    inputs: tuple[str, ...],
    *,
    whole: bool,
    tracker: RandomTracker,
) -> None:
    """Let a module work on whole sequences, though what is around it has parts."""
    module.register_forward_pre_hook(_Gather(state, group, inputs, whole), with_kwargs=True)
    if whole:
        _draw(module, _OwnNumbers(tracker, alike=True))
        module.register_forward_hook(_Scatter(state, group))


def split_at(blocks: list[nn.Module], state: SequenceState, group: Group, tracker: RandomTracker) -> None:
    """Let a list of blocks work on parts of the sequence."""
    blocks[0].register_forward_pre_hook(_Enter(state, group), with_kwargs=True)
    for block in dict.fromkeys(blocks):
        _draw(block, _OwnNumbers(tracker))
    blocks[-1].register_forward_hook(_Leave(state, group))


def _draw(module: nn.Module, numbers: _OwnNumbers) -> None:
    module.register_forward_pre_hook(numbers.enter)
    module.register_forward_hook(numbers.leave, always_call=True)


def _on_first(args: list[Any], kwargs: dict[str, Any], function: Any) -> tuple[list[Any], dict[str, Any]]:
    """Apply a function to the first floating-point tensor of some arguments."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            args[index] = function(value)
            return args, kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            kwargs[name] = function(value)
            return args, kwargs
    return args, kwargs


def _first_of(output: Any, function: Any) -> Any:
    if isinstance(output, Tensor):
        return function(output)
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        return (function(output[0]), *output[1:])
    return output
