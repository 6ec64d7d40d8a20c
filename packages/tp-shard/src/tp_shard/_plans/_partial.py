"""Modules of others that hold shards of their own parameters: attentions with sinks, experts."""

import inspect
from typing import Any

from torch import Tensor, nn

from tp_shard._groups._collectives import copy, reduce
from tp_shard._groups._group import Group
from tp_shard._shards._layer import ParallelLayer
from tp_shard._shards._marks import mark_parameter
from tp_shard.nn._heads import Heads
from tp_shard.nn._mixed import Mixin

__all__ = ["ExpertsMixin", "LocalMixin", "PartialMixin"]


class PartialMixin(Mixin, ParallelLayer):
    """A module of any class, some of whose parameters are split."""

    dim = None

    def mark_parameters(self) -> None:
        super().mark_parameters()
        for name, split in self.splits.items():
            parameter = self._parameters.get(name)
            if parameter is not None:  # its dimensions are counted as they are
                mark_parameter(parameter, split.dim, 1, split=split, sharded=self.group.size > 1)


class LocalMixin(PartialMixin):
    """An attention that takes the heads of its rank out of arguments that come with all of them.

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
        """Return this rank's heads of a tensor with all heads; what has others already stays as it is."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        count = self.head_counts.query
        start, stop = self.head_counts.query_bounds(self.group.rank)
        dim = 1 if value.dim() == 4 else 0
        has_all = value.size(dim) == count if dim else value.size(0) % count == 0
        if not has_all:
            return value
        if value.requires_grad:
            value = copy(value, group=self.group)  # the gradient of each head comes from one rank
        if dim or value.size(0) == count:
            return value.narrow(dim, start, stop - start)
        return value.unflatten(0, (-1, count))[:, start:stop].flatten(0, 1)


class ExpertsMixin(PartialMixin):
    """Experts of which a rank has a part of the hidden features.

    Forward: an all-reduce of the outputs. Backward: an all-reduce of the gradient of each input.
    """

    once: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        group = self.group
        if group.size == 1:
            return super().forward(*args, **kwargs)
        own = self.__dict__["_parameters"]
        # Each rank adds its share of what is added once: the sum over the ranks has it whole.
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
