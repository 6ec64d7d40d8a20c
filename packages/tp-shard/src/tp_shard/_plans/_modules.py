"""Users' modules in split models: their own shards, hooks around their sequences, errors that name them."""

import functools
import inspect
from collections.abc import Iterable, Iterator
from copy import copy as shallow_copy
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core.errors import ConfigError, ModelError, TpError
from tp_core.modules import Mixin, mix_in

from tp_shard._groups._collectives import copy, reduce
from tp_shard._groups._group import Group
from tp_shard._groups._random import RandomTracker
from tp_shard._plans._styles import Column, Experts, Gathered, Local, Style
from tp_shard._shards import ParallelLayer, mark_parameter
from tp_shard._split import Split
from tp_shard.nn._convert import Conversion
from tp_shard.nn._heads import Heads, section_ranges
from tp_shard.nn._layers import ParallelLinear
from tp_shard.nn._planned import SequenceMixin
from tp_shard.nn._sequence import SequenceState, gather_sequence, join_sequence, scatter_sequence

# -- Users' modules that hold shards of their own parameters: attentions with sinks, experts ------


class PartialMixin(Mixin, ParallelLayer):
    """A module of any class, with some split parameters."""

    dim = None

    def mark_parameters(self) -> None:
        super().mark_parameters()
        for name, split in self.splits.items():
            parameter = self._parameters.get(name)
            if parameter is not None:  # its dimensions are counted as they are
                mark_parameter(parameter, split.dim, 1, split=split, sharded=self.group.size > 1)


class LocalMixin(PartialMixin):
    """An attention that takes its rank's heads out of arguments with all heads.

    Collectives: an all-gather backward for such an argument with a gradient.
    """

    head_counts: Heads
    head_inputs: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.group.size == 1:
            return super().forward(*args, **kwargs)
        positional = list(args)
        names = _argument_names(type(self).__bases__[1])
        for name in self.head_inputs:
            if name in kwargs:
                kwargs[name] = self._local_heads(name, kwargs[name])
            elif name in names and names.index(name) < len(positional):
                index = names.index(name)
                positional[index] = self._local_heads(name, positional[index])
        return super().forward(*positional, **kwargs)

    def _local_heads(self, name: str, value: Any) -> Any:
        """Return this rank's heads of a tensor with all heads; what is no tensor as it is.

        So is a tensor with one head for all, and one that another split block has made, which has this rank's
        heads: T5's layers hand on the biases of positions.

        Raises:
            ModelError: The tensor has other heads.
        """
        if not isinstance(value, Tensor):
            return value
        count = self.head_counts.query
        start, stop = self.head_counts.query_bounds(self.group.rank)
        is_alone = value.dim() == 4  # (batch, heads, ...), or (batch, 1, ...) for all heads
        if is_alone:
            if value.size(1) in {1, stop - start}:
                return value
            has_all = value.size(1) == count
        else:
            has_all = value.dim() > 0 and value.size(0) % count == 0
        if not has_all:
            msg = (
                f"{name!r} of {type(self).__bases__[1].__name__} has shape {tuple(value.shape)}, and "
                f"Local(inputs=({name!r},)) says that it has {count} heads: in the second of four "
                "dimensions, or in the first one, alone or inside each sample"
            )
            raise ModelError(msg)
        value = _copy_to_ranks(value, self.group)
        if is_alone:
            return value.narrow(1, start, stop - start)
        # Without a dimension of their own, heads are folded into the first one: (batch * heads, ...)
        if value.size(0) == count:
            return value.narrow(0, start, stop - start)
        return value.unflatten(0, (-1, count))[:, start:stop].flatten(0, 1)


class ExpertsMixin(PartialMixin):
    """Experts with hidden features that are split over ranks.

    Forward: an all-reduce of the outputs. Backward: an all-reduce of the gradient of each input.
    """

    once: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        group = self.group
        if group.size == 1:
            return super().forward(*args, **kwargs)
        own = self.__dict__["_parameters"]
        # A bias after the row weights is whole on all ranks: each adds its share, so that the sum has it
        # once.
        shares = {name: copy(own[name], group=group) / group.size for name in self.once}
        inputs = [_copy_to_ranks(value, group) for value in args]
        named_inputs = {name: _copy_to_ranks(value, group) for name, value in kwargs.items()}
        self.__dict__["_parameters"] = {**own, **shares}
        try:
            output = super().forward(*inputs, **named_inputs)
        finally:
            self.__dict__["_parameters"] = own
        return reduce(output, group=group)


def _copy_to_ranks(value: Any, group: Group) -> Any:
    """Return a value of which each rank uses its part: the gradients of a tensor are summed."""
    if isinstance(value, Tensor) and value.requires_grad:
        return copy(value, group=group)
    return value


def _argument_names(kind: type[nn.Module]) -> list[str]:
    return list(inspect.signature(kind.forward).parameters)[1:]


# -- Head counts and parameters of modules around split layers ------------------------------------


def count_local_groups(attention: nn.Module, style: Style, group: Group) -> None:
    """Set the number of this rank's query heads that share a key head, in an attention of transformers.

    The attention repeats key heads this many times. With fewer key heads than ranks the number is not the one
    of the whole model.
    """
    if not isinstance(style, Column) or style.holds != "kv" or style.heads is None or style.kv_heads is None:
        return
    if style.kv_heads < group.size and isinstance(getattr(attention, "num_key_value_groups", None), int):
        first, last = Heads(style.heads, style.kv_heads, group.size).query_bounds(group.rank)
        attention.num_key_value_groups = last - first  # type: ignore[assignment]  # an int, as it was


def check_parts(path: str, module: nn.Module, style: Style, group: Group) -> None:
    """Raise unless a module has the numbers and parameters that its style names; nothing is changed."""
    if isinstance(style, Gathered) and style.local is not None:
        style = style.local
    if isinstance(style, Local):
        _local_parts(path, module, style, group)
    elif isinstance(style, Experts):
        _expert_splits(path, module, style, group)


def _local_parts(
    path: str, module: nn.Module, style: Local, group: Group
) -> tuple[Heads, dict[str, int], dict[str, Split]]:
    """Return the heads of an attention, its own numbers on this rank, and the splits of its parameters."""
    counts = Heads(style.heads, style.kv_heads or style.heads, group.size)
    q0, q1 = counts.query_bounds(group.rank)
    k0, k1 = counts.kv_bounds(group.rank)
    numbers: dict[str, int] = {}
    for names, whole, local in (
        (style.query, counts.query, q1 - q0),
        (style.shared, counts.kv, k1 - k0),
        (style.groups, counts.query // counts.kv, (q1 - q0) // (k1 - k0)),
    ):
        for name in names:
            numbers[name] = _number(path, module, name, whole) // whole * local
    splits = {}
    ranges = counts.ranges(1, "q")
    for name in style.parameters:
        parameter = _parameter(path, module, name)
        if parameter.dim() == 0 or parameter.size(0) != counts.query:
            msg = (
                f"{path}.{name} has shape {tuple(parameter.shape)}, and not {counts.query} heads "
                f"first, as {style} says"
            )
            raise ConfigError(msg)
        splits[name] = Split(0, counts.query, ranges)
    return counts, numbers, splits


def make_local(path: str, module: nn.Module, style: Local, group: Group) -> nn.Module:
    """Change an attention's own numbers to count the heads of its rank, in place."""
    counts, numbers, splits = _local_parts(path, module, style, group)
    config_numbers = {}
    for name, number in numbers.items():
        if name.startswith("config."):
            config_numbers[name.removeprefix("config.")] = number
        else:
            setattr(module, name, number)
    if config_numbers:
        module.config = shallow_copy(module.config)  # other modules share it, and may count all heads
        for name, number in config_numbers.items():
            setattr(module.config, name, number)
    if style.inputs or style.parameters:
        hold(module, LocalMixin, splits, group, head_counts=counts, head_inputs=style.inputs)
    return module


def _expert_splits(path: str, module: nn.Module, style: Experts, group: Group) -> dict[str, Split]:
    out_dim, in_dim = 1, 2  # (experts, out, in)
    if style.transposed:
        out_dim, in_dim = 2, 1
    splits = {}
    for name in (*style.columns, *style.rows):
        shape = _parameter(path, module, name).shape
        is_column = name in style.columns
        is_bias = is_column and len(shape) == 2  # (experts, out)
        if len(shape) != 3 and not is_bias:
            msg = f"{path}.{name} has shape {tuple(shape)}; weights of experts have three dimensions"
            raise ConfigError(msg)
        dim = in_dim
        sections = 1
        if is_column:
            dim = 1 if is_bias else out_dim
            sections = style.sections
        if shape[dim] // sections < group.size:
            msg = (
                f"{path}.{name} has {shape[dim]} features in {sections} sections, too few for "
                f"{group.size} ranks"
            )
            raise ConfigError(msg)
        splits[name] = Split(dim, shape[dim], section_ranges(shape[dim], sections, group.size))
    for name in style.once:
        _parameter(path, module, name)
    if style.sections == 1 and group.size > 1:
        _pair_features(splits, style)
    return splits


def make_experts(path: str, module: nn.Module, style: Experts, group: Group) -> nn.Module:
    splits = _expert_splits(path, module, style, group)
    hold(module, ExpertsMixin, splits, group, once=style.once)
    return module


def _pair_features(splits: dict[str, Split], style: Experts) -> None:
    """Split alternating gates and ups as the row weights are split: two features for each of theirs."""
    row = splits[style.rows[0]]
    for name in style.columns:
        fused, rest = divmod(splits[name].size, row.size)
        if rest == 0 and fused > 1:
            ranges = tuple(tuple((a * fused, b * fused) for a, b in pieces) for pieces in row.ranges)
            splits[name] = Split(splits[name].dim, splits[name].size, ranges)


def hold(
    module: nn.Module, mixin: type[PartialMixin], splits: dict[str, Split], group: Group, **attributes: Any
) -> None:
    """Replace parameters of a module by this rank's shards."""
    mixed = mix_in(mixin, module, group=group, splits=splits, **attributes)
    for name, split in splits.items():
        mixed._parameters[name] = Conversion.take(_parameter("", mixed, name), split, group)
    mixed.mark_parameters()


def _number(path: str, module: nn.Module, name: str, whole: int) -> int:
    owner: object = getattr(module, "config", None) if name.startswith("config.") else module
    value = getattr(owner, name.removeprefix("config."), None)
    if not isinstance(value, int) or isinstance(value, bool) or value % whole:
        msg = (
            f"{path} has {name} = {value!r}, which is not in proportion to {whole} heads, as its Local() in "
            "the plan says; name attributes that count heads or their features"
        )
        raise ConfigError(msg)
    return value


def _parameter(path: str, module: nn.Module, name: str) -> nn.Parameter:
    parameter = module._parameters.get(name)
    if parameter is None:
        msg = (
            f"{path} is a {type(module).__name__} without a parameter {name}; it has "
            f"{list(module._parameters)}"
        )
        raise ModelError(msg)
    return parameter


# -- Hooks that split, join and gather sequences around users' modules ----------------------------


@dataclass(slots=True)
class _GatherArguments:
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
        positional = list(args)
        named = dict(kwargs)
        if not self.inputs:
            positional, named = _on_first(positional, named, lambda t: join(t, self.state, self.group))
        for name in self.inputs:
            if isinstance(named.get(name), Tensor):
                named[name] = join(named[name], self.state, self.group)
        # The column layers inside do not sum the gradient of their input, so the one of a whole argument is
        # summed here, or each rank would have the gradient of its own heads alone.
        if not self.whole:
            for name in _WHOLE_INPUTS:
                if name in named and name not in self.inputs:
                    named[name] = _copy_to_ranks(named[name], self.group)
        return tuple(positional), named


_WHOLE_INPUTS = ("key_value_states", "encoder_hidden_states")
"""The arguments of cross-attention with the sequence of an encoder, which is whole at the encoder's end."""


def _part_of_input(
    state: SequenceState, group: Group, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Take this rank's part of a block's input. Forward: nothing. Backward: an all-gather."""
    positional, named = _on_first(list(args), dict(kwargs), lambda t: scatter_sequence(t, state, group))
    return tuple(positional), named


def _part_of_output(state: SequenceState, group: Group, _module: nn.Module, _args: Any, output: Any) -> Any:
    """Take this rank's part of a whole output. Forward: nothing. Backward: an all-gather."""
    return _first_of(output, lambda t: scatter_sequence(t, state, group))


def _whole_output(state: SequenceState, group: Group, _module: nn.Module, _args: Any, output: Any) -> Any:
    """Join the parts of an output. Forward: an all-gather. Backward: nothing."""
    return _first_of(output, lambda t: join_sequence(t, state, group))


@dataclass(slots=True)
class _RandomNumberHooks:
    """Hooks that make a block draw the rank's own random numbers, so that parts drop different elements.

    For later draws that are the same on all ranks, the block counts as one number. Modules inside that work
    on whole sequences draw the same: otherwise their parameters would get different gradients on each rank.
    """

    tracker: RandomTracker
    shared: bool = False
    forks: list[Any] = field(default_factory=list)  # a stack: blocks may contain blocks

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training:
            device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
            if self.shared:
                fork = self.tracker._shared(device)
            else:
                fork = self.tracker.fork(device)
            fork.__enter__()
            self.forks.append(fork)

    def leave(self, _module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        if self.forks:
            self.forks.pop().__exit__(None, None, None)


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
    module.register_forward_pre_hook(_GatherArguments(state, group, inputs, whole), with_kwargs=True)
    if whole:
        _draw(module, _RandomNumberHooks(tracker, shared=True))
        module.register_forward_hook(functools.partial(_part_of_output, state, group))


def split_at(blocks: list[nn.Module], state: SequenceState, group: Group, tracker: RandomTracker) -> None:
    """Hook a list of blocks so that they work on parts of the sequence."""
    blocks[0].register_forward_pre_hook(functools.partial(_part_of_input, state, group), with_kwargs=True)
    for block in dict.fromkeys(blocks):
        _draw(block, _RandomNumberHooks(tracker))
    blocks[-1].register_forward_hook(functools.partial(_whole_output, state, group))


def draw_replicated(modules: Iterable[nn.Module], tracker: RandomTracker) -> None:
    """Hook modules on whole sequences, in blocks that have gathered them, to draw the same on all ranks."""
    for module in modules:
        _draw(module, _RandomNumberHooks(tracker, shared=True))


def _draw(module: nn.Module, hooks: _RandomNumberHooks) -> None:
    module.register_forward_pre_hook(hooks.enter)
    # Also after an error, or the generator would stay in the rank's own state.
    module.register_forward_hook(hooks.leave, always_call=True)


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


# What code that counts all heads or features raises where it meets a rank's part of them.
_SHAPE_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


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
            except _SHAPE_ERRORS as error:
                msg = _explain(self, error)
                if msg is None:
                    raise
                raise ModelError(msg) from error

        return {"forward": forward}


def guard_forward(model: nn.Module, blocks: frozenset[str]) -> None:
    """Make errors of a split model name the module with code that does not expect the shape of a shard."""
    if isinstance(model, _Guarded | ParallelLayer | SequenceMixin):
        return  # its class was made already, or it is a block on its own
    mix_in(_Guarded, model, split_blocks=blocks)


def _explain(model: Any, error: Exception) -> str | None:
    """Return the message for an error inside a block with split layers; ``None`` for any other."""
    if isinstance(error, TpError | torch.OutOfMemoryError | dist.DistError):
        return None
    module = _innermost(model, error.__traceback__)
    name = next((n for n, m in model.named_modules() if m is module), None)
    if name is None:
        return None
    block = next((n for n in ancestors(name) if n in model.split_blocks), None)
    if block is None:
        return None
    described = []
    for n, layer in model.get_submodule(block).named_modules():
        if isinstance(layer, ParallelLinear) and layer.dim not in (0, None) and not layer.gather_output:
            local_size = layer.splits["weight"].local_size(layer.group.rank)
            if local_size != layer.out_features:
                described.append(f"{n or 'it'} makes {local_size} of {layer.out_features} features")
    layers = ", ".join(described)
    text = str(error).strip().splitlines() or [""]
    inside = "" if name == block else f", in {name}"
    return (
        f"{block or 'the model'}{inside}: {type(error).__name__}: {text[0]}. On this rank {layers}; where "
        "its code counts all heads or features, add "
        f'{{"{block}": ts.Local(heads=..., query=("num_heads", ...))}} to the plan '
        "with the names of those numbers, or leave the block whole. ts.verify() says whether a plan is "
        "right, and ts.plans.auto() finds one"
    )


def _innermost(model: nn.Module, trace: TracebackType | None) -> nn.Module | None:
    """Return the innermost module of the model that was running, from the frames of a traceback."""
    modules = set(map(id, model.modules()))
    innermost = None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in modules:
            innermost = owner
        trace = trace.tb_next
    return innermost


def ancestors(path: str) -> Iterator[str]:
    """Yield the names of a module and of the modules around it, innermost first."""
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        yield ".".join(parts[:length])
