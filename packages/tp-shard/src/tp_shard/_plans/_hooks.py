"""Hooks that split, join and gather sequences around users' modules, and errors that name the module."""

import functools
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core.errors import ModelError, TpError

from tp_shard._groups._collectives import copy
from tp_shard._groups._group import Group
from tp_shard._groups._random import RandomTracker
from tp_shard._shards import ParallelLayer
from tp_shard.nn._convert import Mixin, mix_in
from tp_shard.nn._layers import ParallelLinear
from tp_shard.nn._planned import SequenceMixin
from tp_shard.nn._sequence import SequenceState, gather_sequence, join_sequence, scatter_sequence


@dataclass(slots=True)
class _Gather:
    """A hook that gathers the arguments of a module from their parts.

    Forward: an all-gather for each argument. Backward: a reduce-scatter, because its column layers do not sum
    their gradients; nothing if all ranks do the same in the module.
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
        # The column layers inside do not sum the gradient of their input, so the one of a whole argument is
        # summed here, or each rank would have the gradient of its own heads alone.
        if not self.whole:
            named = {n: self._shared(n, v) for n, v in named.items()}
        return tuple(given), named

    def _shared(self, name: str, value: Any) -> Any:
        is_whole = isinstance(value, Tensor) and value.requires_grad and name in _WHOLE_INPUTS
        return copy(value, group=self.group) if is_whole and name not in self.inputs else value


_WHOLE_INPUTS = ("key_value_states", "encoder_hidden_states")
"""The arguments of cross-attention with the sequence of an encoder, which is whole at the encoder's end."""


@dataclass(slots=True)
class _Scatter:
    """A hook that takes this rank's part of a whole output. Forward: nothing. Backward: an all-gather."""

    state: SequenceState
    group: Group

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return _first_of(output, lambda t: scatter_sequence(t, self.state, self.group))


@dataclass(slots=True)
class _Enter:
    """A hook that splits the first block's input. Forward: nothing. Backward: an all-gather."""

    state: SequenceState
    group: Group

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, named = _on_first(
            list(args), dict(kwargs), lambda t: scatter_sequence(t, self.state, self.group)
        )
        return tuple(given), named


@dataclass(slots=True)
class _Leave:
    """A hook that joins the last block's output. Forward: an all-gather. Backward: nothing."""

    state: SequenceState
    group: Group

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return _first_of(output, lambda t: join_sequence(t, self.state, self.group))


@dataclass(slots=True)
class _OwnNumbers:
    """Hooks that make a block draw the rank's own random numbers, so that parts drop different elements.

    For later draws that are alike on all ranks, the block counts as one number. Modules inside that work on
    whole sequences draw alike: otherwise their parameters would get different gradients on each rank.
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
    """Hook a module so that it works on whole sequences, inside a model with parts of them."""
    module.register_forward_pre_hook(_Gather(state, group, inputs, whole), with_kwargs=True)
    if whole:
        _draw(module, _OwnNumbers(tracker, alike=True))
        module.register_forward_hook(_Scatter(state, group))


def split_at(blocks: list[nn.Module], state: SequenceState, group: Group, tracker: RandomTracker) -> None:
    """Hook a list of blocks so that they work on parts of the sequence."""
    blocks[0].register_forward_pre_hook(_Enter(state, group), with_kwargs=True)
    for block in dict.fromkeys(blocks):
        _draw(block, _OwnNumbers(tracker))
    blocks[-1].register_forward_hook(_Leave(state, group))


def _draw(module: nn.Module, numbers: _OwnNumbers) -> None:
    module.register_forward_pre_hook(numbers.enter)
    # Also after an error, or the generator would stay in the rank's own state.
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


# -- Errors of a split model that name the module -------------------------------------------------


_KINDS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


class _Guarded(Mixin):
    """A split model with a ``forward`` that names the block if an error comes from one with split layers."""

    split_blocks: frozenset[str]

    @classmethod
    def members(cls, kind: type[nn.Module]) -> dict[str, Any]:
        """Return a ``forward`` with the signature of the model's own."""

        @functools.wraps(kind.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return kind.forward(self, *args, **kwargs)
            try:
                return kind.forward(self, *args, **kwargs)
            except _KINDS as error:
                msg = _explain(self, error)
                if msg is None:
                    raise
                raise ModelError(msg) from error

        return {"forward": forward}


def guard_forward(model: nn.Module, blocks: frozenset[str]) -> None:
    """Make errors of a model name the module with code that does not expect the shape of a shard.

    Args:
        model: The split model, which is changed in place.
        blocks: The names of the modules around its split layers.
    """
    if isinstance(model, _Guarded | ParallelLayer | SequenceMixin):
        return  # its class was made already, or it is a block on its own
    mix_in(_Guarded, model, split_blocks=blocks)


def _explain(model: Any, error: Exception) -> str | None:
    """Return the message for an error inside a block with split layers; ``None`` for any other."""
    if isinstance(error, TpError | torch.OutOfMemoryError | dist.DistError):
        return None
    module = _innermost(model, error.__traceback__)
    name = next((n for n, m in model.named_modules() if m is module), None)
    block = next(
        (
            b
            for b in sorted(model.split_blocks, key=len, reverse=True)
            if name is not None and _is_in(name, b)
        ),
        None,
    )
    if block is None:
        return None
    layers = ", ".join(
        f"{n or 'it'} makes {made} of {layer.out_features} features"
        for n, layer in model.get_submodule(block).named_modules()
        if isinstance(layer, ParallelLinear)
        and layer.dim not in (0, None)
        and not layer.gather_output
        and (made := layer.splits["weight"].local_size(layer.group.rank)) != layer.out_features
    )
    text = str(error).strip().splitlines() or [""]
    inside = "" if name == block else f", in {name}"
    return (
        f"{block or 'the model'}{inside}: {type(error).__name__}: {text[0]}. On this rank "
        f"{layers}; where its code "
        "counts all heads or features, add "
        f'{{"{block}": ts.Local(heads=..., query=("num_heads", ...))}} to the plan '
        "with the names of those numbers, or leave the block whole. ts.verify() says whether "
        "a plan is right, and "
        "ts.plans.auto() finds one"
    )


def _innermost(model: nn.Module, trace: TracebackType | None) -> nn.Module | None:
    """Return the innermost module of the model that was running, from the frames of a traceback."""
    mine = set(map(id, model.modules()))
    found = None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in mine:
            found = owner
        trace = trace.tb_next
    return found


def _is_in(name: str, block: str) -> bool:
    return not block or name == block or name.startswith(f"{block}.")
