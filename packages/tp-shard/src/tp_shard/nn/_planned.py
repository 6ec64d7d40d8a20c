"""The layers that a plan makes: with heads that ranks share, and with split sequences between the layers."""

from dataclasses import replace
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tp_shard._groups import _debug
from tp_shard._groups._collectives import gather
from tp_shard._groups._group import Group
from tp_shard._split import Ranges
from tp_shard.nn._convert import Mixin
from tp_shard.nn._draws import SplitDraws, mark
from tp_shard.nn._embedding import ParallelEmbedding
from tp_shard.nn._heads import sum_shared
from tp_shard.nn._kinds import is_transposed, widths
from tp_shard.nn._linear import ParallelLinear
from tp_shard.nn._region import check_inside, check_region
from tp_shard.nn._sequence import (
    SequenceState,
    SummedGradients,
    gather_sequence,
    reduce_scatter_sequence,
    scatter_sequence,
    sum_gradient,
)
from tp_shard.nn.functional import linear, mark_output, wrong_width


class PlannedLinear(ParallelLinear):
    """A :class:`ParallelLinear` with pieces that ranks may share, and with sequence parallelism.

    Collectives, with a sequence: for split outputs an all-gather forward and a reduce-scatter backward. For
    split inputs a reduce-scatter forward, and backward an all-gather and an all-reduce of the bias's
    gradient. Pieces that ranks share cost an all-reduce of their gradients.

    Attributes:
        sequence: The sequence lengths of the model; ``None`` if the sequence is whole.
        takes_whole: Whether the block around the layer gathers the sequence, and sums its gradient.
        summed: The parameters that share one all-reduce with the bias of a row layer.
        region_is_checked: Whether the region before a row layer was checked.
        draws: The random numbers of the model between column and row layers.
    """

    sequence: SequenceState | None = None
    takes_whole = False
    summed: SummedGradients | None = None
    region_is_checked = False
    draws: SplitDraws | None = None

    @classmethod
    def from_plan(
        cls,
        linear: nn.Module,
        dim: int,
        *,
        gather_output: bool,
        group: Group,
        ranges: tuple[Ranges, ...] | None,
        sequence: SequenceState | None,
    ) -> Self:
        """Return a layer with the options of a plain one, without parameters."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.__dict__.update({k: v for k, v in linear.__dict__.items() if k != "_parameters"})
        inputs, outputs = widths(linear)
        layer._describe(
            inputs,
            outputs,
            dim,
            gather_output=gather_output,
            input_is_parallel=True if dim == 0 and ranges is not None else None,
            group=group,
            ranges=ranges,
        )
        if is_transposed(linear):
            layer.order_type = 1
            weight = layer.splits["weight"]
            layer.splits = {**layer.splits, "weight": replace(weight, dim=1 - weight.dim)}
        layer.sequence = sequence
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``, as :class:`ParallelLinear` does.

        Args:
            input: The input, of shape (..., in_features), or this rank's shard of it. With a sequence and
                split outputs, this rank's part of the sequence.

        Returns:
            A tensor of shape (..., out_features), or with split outputs this rank's shard of it; with a
            sequence and split inputs, this rank's part of the sequence.
        """
        # The states of generators are no part of a compiled graph: without an open visit no dropout is
        # active.
        if self.draws is None or (_compiling() and not self.draws.visits):
            return self._product(input)
        if self.dim == 0:
            self.draws.end()
        output = self._product(input)
        is_split = self.dim != 0 and not self.gather_output
        is_watched = self.draws.begin(input) if is_split else self.draws.is_watching
        if is_watched:
            mark(output, is_split=is_split)
        return output

    def _product(self, input: Tensor) -> Tensor:
        self.refuse_norms()
        group = self.group
        if (
            self.dim == 0
            and group.size > 1
            and not _compiling()
            and (_debug.state.enabled or not self.region_is_checked)
        ):
            # Once is enough outside of debug mode: the modules of a region do not change from step to step. A
            # whole input is scattered by this layer, so it has no region.
            is_part = input.dim() > 0 and input.size(-1) != self.in_features
            self.region_is_checked = is_part and check_region(input, self)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if "weight" in self.splits:
            weight = sum_shared(weight, self.splits["weight"], group)
        if bias is not None and "bias" in self.splits:
            bias = sum_shared(bias, self.splits["bias"], group)
        if self.order_type:  # a weight that is kept as (in, out)
            weight = weight.t()
        if self.sequence is None or group.size == 1:
            return linear(input, weight, bias, self, group, self)
        if input.size(-1) != weight.size(1):
            raise wrong_width(input, weight.size(1), self)
        if self.dim == 0:
            output = reduce_scatter_sequence(F.linear(input, weight), self.sequence, group)
            if bias is None:
                return output
            return output + (sum_gradient(bias, group) if self.summed is None else self.summed.passed(bias))
        gathered = input if self.takes_whole else gather_sequence(input, self.sequence, group)
        output = F.linear(gathered, weight, bias)
        if self.gather_output:
            return gather(output, -1, size=self.out_features, group=group)
        return mark_output(output, self.out_features)


class PlannedEmbedding(ParallelEmbedding):
    """A :class:`ParallelEmbedding` with an output that is split along the sequence.

    Collectives: those of its table, and an all-gather backward.

    Attributes:
        sequence: The sequence lengths of the model; ``None`` if the sequence is whole.
        takes_whole: Whether the block around it works on whole sequences.
    """

    sequence: SequenceState | None = None
    takes_whole = False

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of ``input``, this rank's part of the sequence."""
        output = super().forward(input)
        # A look-up in a shard reads as split to whoever watches, and the ranks have joined it since.
        mark(output, is_split=not self.gather_output and self.dim == 1)
        if self.sequence is None or self.takes_whole:
            return output
        return scatter_sequence(output, self.sequence, self.group)


class SequenceMixin(Mixin):
    """A module with parameters that all ranks have, on a part of the sequence or of the features.

    Forward: nothing. Backward: an all-reduce of the parameters' gradients, one for all of the model.
    """

    sequence_group: Group
    summed: SummedGradients | None = None
    part_of: Literal["sequence", "features"] = "sequence"
    region_is_checked = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.part_of == "features" and not self.region_is_checked and not _compiling():
            alone = self.sequence_group.size == 1
            self.region_is_checked = alone or check_inside(next(iter(args), None), self)  # type: ignore[arg-type]  # mixed into a module
        own = self.__dict__["_parameters"]
        # Replaced for this call alone, past `__setattr__`: what takes their place are no parameters but
        # results that sum their gradients. The optimizer and the state must not see them, also after an
        # error.
        self.__dict__["_parameters"] = {
            name: None if p is None else self._passed(p) for name, p in own.items()
        }
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # of the class it is mixed into
        finally:
            self.__dict__["_parameters"] = own

    def _passed(self, parameter: Tensor) -> Tensor:
        if self.summed is None:
            return sum_gradient(parameter, self.sequence_group)
        return self.summed.passed(parameter)


def _compiling() -> bool:
    return torch.compiler.is_compiling()
