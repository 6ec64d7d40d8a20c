"""Sequence parallelism: between the split layers each rank has a part of the sequence.

As in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198): what a row layer would all-reduce is reduce-scattered along the sequence, and
what a column layer takes is gathered again, so that norms and dropout work on a part each.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core.internal import is_dtensor

from tp_shard._groups import _debug
from tp_shard._groups._collectives import (
    all_gather,
    all_reduce_,
    apply,
    as_output,
    copy,
    gather_sizes,
    reduce,
)
from tp_shard._groups._group import Group
from tp_shard._split import bounds, shard_sizes

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# -- What the layers of one model know about the lengths of its sequences -------------------------


@dataclass(slots=True)
class SequenceState:
    """The lengths that sequences have had: with a rank's part, they give the length of the whole.

    Lengths that differ by less than the number of ranks may have parts of the same length. Then, and
    only then, ranks have to ask one another: whether they do depends on nothing but the lengths that all
    have seen, so that all ask or none does. Several lengths may be under way at once, as in an encoder and
    a decoder, or where activations are computed again for a batch before the last one.

    Attributes:
        dim: Which dimension the sequence is, counted from the end.
        lengths: All lengths so far.
        is_split_here: Whether a layer of the model splits sequences; else they come in parts, from someone
            who knows their lengths.
    """

    dim: int = -2
    lengths: set[int] = field(default_factory=set)
    is_split_here: bool = False

    def note(self, length: int, *, is_split: bool = False) -> int:
        """Remember the length of a whole sequence, and return it."""
        self.lengths.add(length)
        self.is_split_here = self.is_split_here or is_split
        return length

    def whole(self, part: int, group: Group, device: torch.device) -> int:
        """Return the length of the sequence of which this rank has ``part`` places.

        Collectives: an all-gather of a number, where the lengths so far are ambiguous.
        """
        if self.is_split_here:
            fitting = [n for n in self.lengths if _part(n, group) == part]
            if fitting and not self._has_neighbors(fitting[0], group.size):
                return fitting[0]
        return self.note(sum(gather_sizes(part, group, device)))

    def _has_neighbors(self, length: int, ranks: int) -> bool:
        """Return whether other lengths may have the same part on some rank; the same on all ranks.

        Any rank may take ``length`` for one nearby, and that for the next: the whole chain counts.
        """
        chain, waiting = {length}, [length]
        while waiting:
            at = waiting.pop()
            near = {n for n in self.lengths if abs(n - at) < ranks} - chain
            chain |= near
            waiting += near
        return len(chain) > 1


def _part(length: int, group: Group) -> int:
    start, stop = bounds(length, group.size, group.rank)
    return stop - start


# -- Scattering and gathering sequences -----------------------------------------------------------


def scatter_sequence(tensor: Tensor, state: SequenceState, group: Group) -> Tensor:
    """Return this rank's part of a sequence that all ranks have.

    Forward: nothing. Backward: an all-gather.
    """
    size = state.note(tensor.size(state.dim), is_split=True)
    return tensor if group.size == 1 else apply(_Scatter, tensor, state.dim, size, group)


def gather_sequence(tensor: Tensor, state: SequenceState, group: Group) -> Tensor:
    """Return the whole sequence of the ranks' parts, for a layer whose outputs are split.

    Forward: an all-gather; one more of a number, where the lengths so far are ambiguous.
    Backward: a reduce-scatter.
    """
    if group.size == 1:
        return tensor
    size = state.whole(tensor.size(state.dim), group, tensor.device)
    return apply(_Gather, tensor, state.dim, size, group)


def reduce_scatter_sequence(tensor: Tensor, state: SequenceState, group: Group) -> Tensor:
    """Return this rank's part of the sum of the ranks' sequences.

    Forward: a reduce-scatter. Backward: an all-gather.
    """
    size = state.note(tensor.size(state.dim))
    return tensor if group.size == 1 else apply(_ReduceScatter, tensor, state.dim, size, group)


def join_sequence(tensor: Tensor, state: SequenceState, group: Group) -> Tensor:
    """Return the whole sequence of the ranks' parts, for what all ranks go on with alike.

    Forward: an all-gather. Backward: nothing, each rank takes its own part of the gradient.
    """
    if group.size == 1:
        return tensor
    size = state.whole(tensor.size(state.dim), group, tensor.device)
    return apply(_GatherAlike, tensor, state.dim, size, group)


def sum_gradient(parameter: Tensor, group: Group) -> Tensor:
    """Return a parameter that all ranks have, for use on a part of the sequence.

    Forward: nothing. Backward: an all-reduce.
    """
    return copy(parameter, group=group)


def _take(tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
    start, stop = bounds(size, group.size, group.rank)
    return tensor.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def _sum_and_take(tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """Sum over the ranks and keep one part; shorter parts are padded for the journey."""
    if _debug.state.enabled:
        _debug.check("reduce_scatter", tensor, group, "the sequence")
    sizes = shard_sizes(size, group.size)
    whole = tensor.detach().movedim(dim, 0)
    sent = whole.new_zeros((group.size, max(sizes), *whole.shape[1:]))
    for place, part in zip(sent.unbind(), torch.split(whole, sizes), strict=True):
        place[: part.size(0)] = part
    mine = sent.new_empty(sent.shape[1:])
    _reduce_scatter(mine.view(-1), sent.view(-1), group=group.handle)
    return mine[: sizes[group.rank]].movedim(0, dim).contiguous()


# Each backward pass applies the counterpart, which makes them differentiable twice.


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
        ctx.args = dim, size, group
        return _take(tensor, dim, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_GatherAlike, grad, *ctx.args), None, None, None


class _GatherAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
        ctx.args = dim, size, group
        return all_gather(tensor, dim, shard_sizes(size, group.size), group, layer="the sequence")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_Scatter, grad, *ctx.args), None, None, None


class _Gather(_GatherAlike):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_ReduceScatter, grad, *ctx.args), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
        ctx.args = dim, size, group
        return as_output(_sum_and_take(tensor, dim, size, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_Gather, grad, *ctx.args), None, None, None


# -- The gradients of all parameters that work on parts of a sequence, in one all-reduce of each step


class SummedGradients:
    """Parameters of one model whose gradients are sums over the ranks.

    At the beginning of the model's ``forward`` all of them pass one function, whose backward comes when the
    last of their gradients is there, and sums them together. Where a module is called alone, or computes
    again what was not kept, or the parameters are another's by then (``fully_shard``), each is summed alone.

    Forward: nothing. Backward: one all-reduce, for each type that parameters have.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.owners: list[tuple[nn.Module, str]] = []
        self._passed: dict[int, Tensor] = {}

    def add(self, module: nn.Module, name: str) -> None:
        """Let a parameter be one of them."""
        self.owners.append((module, name))

    def passed(self, parameter: Tensor) -> Tensor:
        """Return a parameter, for use on a part of the sequence."""
        found = self._passed.get(id(parameter))
        return sum_gradient(parameter, self.group) if found is None else found

    def begin(self, _model: nn.Module, _args: Any) -> None:
        """Let all parameters pass; a hook before the model's ``forward``."""
        self._passed.clear()
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.group.size == 1:
            return
        own = {
            id(p): p for m, n in self.owners if (p := m._parameters.get(n)) is not None and p.requires_grad
        }
        if len(own) > 1 and not any(map(is_dtensor, own.values())):
            through = apply(_SumAll, self.group, *own.values())
            self._passed.update(zip(own, through, strict=True))

    def end(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        """Forget what has passed; a hook after the model's ``forward``, even if it raised."""
        self._passed.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_passed": {}}


class _SumAll(torch.autograd.Function):
    @staticmethod
    def forward(group: Group, *parameters: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004 - it is for backward
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004 - torch's signature
        ctx.group = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # a second derivative will be asked for
            return (None, *(None if g is None else reduce(g, group=ctx.group) for g in grads))
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
        for index, grad in enumerate(grads):
            if grad is not None:
                kinds.setdefault((grad.dtype, grad.device), []).append((index, grad))
        summed = list(grads)
        for alike in kinds.values():
            flat = torch.cat([grad.reshape(-1) for _, grad in alike])
            all_reduce_(flat, ctx.group, layer="norms on parts of a sequence")
            pieces = flat.split([grad.numel() for _, grad in alike])
            for (index, grad), piece in zip(alike, pieces, strict=True):
                summed[index] = piece.view_as(grad)
        return (None, *summed)
