"""Users' modules that hold shards of their own parameters: attentions with sinks, experts."""

import inspect
from copy import copy as shallow_copy
from typing import Any

from torch import Tensor, nn
from tp_core.errors import ConfigError, ModelError

from tp_shard._groups._collectives import copy, reduce
from tp_shard._groups._group import Group
from tp_shard._plans._styles import Column, Experts, Gathered, Local, Style
from tp_shard._shards import ParallelLayer, mark_parameter
from tp_shard._split import Split
from tp_shard.nn._convert import Conversion, Mixin, mix_in
from tp_shard.nn._heads import Heads, section_ranges


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
        given = list(args)
        names = _names(type(self).__bases__[1])
        for name in self.head_inputs if self.group.size > 1 else ():
            if name in kwargs:
                kwargs[name] = self._mine(kwargs[name])
            elif name in names and names.index(name) < len(given):
                given[names.index(name)] = self._mine(given[names.index(name)])
        return super().forward(*given, **kwargs)

    def _mine(self, value: Any) -> Any:
        """Return this rank's heads of a tensor with all heads; any other value as it is."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        count = self.head_counts.query
        start, stop = self.head_counts.query_bounds(self.group.rank)
        dim = 1 if value.dim() == 4 else 0
        has_all = value.size(dim) == count if dim else value.size(0) % count == 0
        if not has_all:
            return value
        if value.requires_grad:
            value = copy(value, group=self.group)  # sums the gradients of heads, each from another rank
        if dim or value.size(0) == count:
            return value.narrow(dim, start, stop - start)
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
        self.__dict__["_parameters"] = {**own, **shares}
        try:
            output = super().forward(
                *(_copied(value, group) for value in args),
                **{name: _copied(value, group) for name, value in kwargs.items()},
            )
        finally:
            self.__dict__["_parameters"] = own
        return reduce(output, group=group)


def _copied(value: Any, group: Group) -> Any:
    wanted = isinstance(value, Tensor) and value.requires_grad
    return copy(value, group=group) if wanted else value


def _names(kind: type[nn.Module]) -> list[str]:
    return list(inspect.signature(kind.forward).parameters)[1:]


# -- Head counts and parameters of modules around split layers ------------------------------------


def count_local_groups(attention: nn.Module, style: Style, group: Group) -> None:
    """Set the number of this rank's query heads that share a key head, in an attention of transformers.

    The attention repeats key heads so many times. With fewer key heads than ranks the number is not the one
    of the whole model.
    """
    if not isinstance(style, Column) or style.holds != "kv" or style.heads is None or style.kv_heads is None:
        return
    if style.kv_heads < group.size and isinstance(getattr(attention, "num_key_value_groups", None), int):
        first, last = Heads(style.heads, style.kv_heads, group.size).query_bounds(group.rank)
        attention.num_key_value_groups = last - first  # type: ignore[assignment]  # an int, as it was


def check_parts(path: str, module: nn.Module, style: Style, group: Group) -> None:
    """Raise unless a module has the numbers and parameters that its style names; nothing is changed.

    Raises:
        ConfigError: One is missing, or not in proportion to the heads, or has no shape of experts.
        ModelError: A parameter is missing.
    """
    style = style.local if isinstance(style, Gathered) and style.local is not None else style
    if isinstance(style, Local):
        _local_parts(path, module, style, group)
    elif isinstance(style, Experts):
        _expert_splits(path, module, style, group)


def _local_parts(
    path: str, module: nn.Module, style: Local, group: Group
) -> tuple[Heads, dict[str, int], dict[str, Split]]:
    """Return the heads of an attention, its own numbers on this rank, and the splits of its parameters."""
    counts = Heads(style.heads, style.kv_heads or style.heads, group.size)
    (q0, q1), (k0, k1) = counts.query_bounds(group.rank), counts.kv_bounds(group.rank)
    numbers: dict[str, int] = {}
    for names, whole, mine in (
        (style.query, counts.query, q1 - q0),
        (style.shared, counts.kv, k1 - k0),
        (style.groups, counts.query // counts.kv, (q1 - q0) // (k1 - k0)),
    ):
        for name in names:
            numbers[name] = _number(path, module, name, whole) // whole * mine
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
    for name, number in numbers.items():
        if name.startswith("config."):
            continue
        setattr(module, name, number)
    of_config = {name.removeprefix("config."): n for name, n in numbers.items() if name.startswith("config.")}
    if of_config:
        module.config = shallow_copy(module.config)  # other modules share it, and may count all heads
        for name, number in of_config.items():
            setattr(module.config, name, number)
    if style.inputs or style.parameters:
        hold(module, LocalMixin, splits, group, head_counts=counts, head_inputs=style.inputs)
    return module


def _expert_splits(path: str, module: nn.Module, style: Experts, group: Group) -> dict[str, Split]:
    out_dim, in_dim = (-1, -2) if style.transposed else (-2, -1)
    splits = {}
    for name in (*style.columns, *style.rows):
        shape = _parameter(path, module, name).shape
        is_column = name in style.columns
        if len(shape) not in ((2, 3) if is_column else (3,)):
            msg = f"{path}.{name} has shape {tuple(shape)}; weights of experts have three dimensions"
            raise ConfigError(msg)
        dim = len(shape) + (-1 if len(shape) == 2 else out_dim if is_column else in_dim)
        sections = style.sections if is_column else 1
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
    """Split the experts of one module, in place."""
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
    held = mix_in(mixin, module, group=group, splits=splits, **attributes)
    for name, split in splits.items():
        held._parameters[name] = Conversion.take(_parameter("", held, name), split, group)
    held.mark_parameters()


def _number(path: str, module: nn.Module, name: str, whole: int) -> int:
    owner: object = getattr(module, "config", None) if name.startswith("config.") else module
    value = getattr(owner, name.removeprefix("config."), None)
    if not isinstance(value, int) or isinstance(value, bool) or value % whole:
        msg = (
            f"{path} has {name} = {value!r}, which is not in proportion to {whole} heads, as "
            "its Local() in the "
            "plan says; name attributes that count heads or their features"
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
