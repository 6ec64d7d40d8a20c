"""Sequence parallelism: between the split layers each rank has a part of the sequence.

As in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198):
a row layer reduce-scatters its output along the sequence, where it would all-reduce it. A column layer
gathers its input again. Norms and dropout between them work on a part each.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tp_core.sessions import reduce_scatter_single
from tp_core.tensors import is_dtensor

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

# -- The sequence lengths of a model --------------------------------------------------------------


@dataclass(slots=True)
class SequenceState:
    """The lengths of sequences so far, by which a rank finds the whole length from its part.

    Lengths that differ by less than the number of ranks may give a rank parts of the same length. Then, and
    only then, the ranks exchange their lengths. Whether they do depends on nothing but the lengths so far,
    which all ranks have seen: so all of them take part, or none.

    Several lengths may be in use at once, as in an encoder and a decoder, or where a checkpoint recomputes
    the activations of an earlier batch.

    Attributes:
        dim: The sequence dimension, counted from the end.
        lengths: All lengths so far.
        is_split_here: Whether a layer of the model splits sequences; if not, the caller passes parts.
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
        """Return the length of the whole sequence, from this rank's ``part`` of it.

        Collectives: an all-gather of a number, if the lengths so far are ambiguous.
        """
        if self.is_split_here:
            fitting = [n for n in self.lengths if _part(n, group) == part]
            if fitting and not self._has_neighbors(fitting[0], group.size):
                return fitting[0]
        return self.note(sum(gather_sizes(part, group, device)))

    def _has_neighbors(self, length: int, ranks: int) -> bool:
        """Return whether another length may give some rank the same part: the same answer on all ranks.

        A rank may confuse ``length`` with a near one, and another rank that one with the next. So the whole
        chain counts: with direct neighbors alone some ranks would communicate and others not.
        """
        chain = {length}
        pending = [length]
        while pending:
            current = pending.pop()
            near = {n for n in self.lengths if abs(n - current) < ranks} - chain
            chain |= near
            pending += near
        return len(chain) > 1


def _part(length: int, group: Group) -> int:
    start, stop = bounds(length, group.size, group.rank)
    return stop - start


# -- Scatter and gather along the sequence --------------------------------------------------------


def scatter_sequence(tensor: Tensor, state: SequenceState, group: Group) -> Tensor:
    """Return this rank's part of a sequence that all ranks have.

    Forward: nothing. Backward: an all-gather.
    Ranks hold: replicated -> sharded; gradient: sharded -> replicated.
    """
    size = state.note(tensor.size(state.dim), is_split=True)
    if group.size == 1:
        return tensor
    return apply(_ScatterSequence, tensor, state.dim, size, group)


def gather_sequence(tensor: Tensor, state: SequenceState, group: Group) -> Tensor:
    """Return the whole sequence from the ranks' parts, for a layer with split outputs.

    Forward: an all-gather; one more of a number, if the lengths so far are ambiguous. Backward: a
    reduce-scatter, because each rank has the gradient of its own features alone.
    Ranks hold: sharded -> replicated; gradient: partial -> sharded.
    """
    if group.size == 1:
        return tensor
    size = state.whole(tensor.size(state.dim), group, tensor.device)
    return apply(_GatherSequence, tensor, state.dim, size, group, False)


def reduce_scatter_sequence(tensor: Tensor, state: SequenceState, group: Group) -> Tensor:
    """Return this rank's part of the sum of the ranks' sequences.

    Forward: a reduce-scatter. Backward: an all-gather.
    Ranks hold: partial -> sharded; gradient: sharded -> replicated.
    """
    size = state.note(tensor.size(state.dim))
    if group.size == 1:
        return tensor
    return apply(_ReduceScatter, tensor, state.dim, size, group)


def join_sequence(tensor: Tensor, state: SequenceState, group: Group) -> Tensor:
    """Return the whole sequence from the ranks' parts, if all ranks compute the same with it.

    Forward: an all-gather; one more of a number, if the lengths so far are ambiguous. Backward: nothing, each
    rank takes its own part of the gradient.
    Ranks hold: sharded -> replicated; gradient: replicated -> sharded.
    """
    if group.size == 1:
        return tensor
    size = state.whole(tensor.size(state.dim), group, tensor.device)
    return apply(_GatherSequence, tensor, state.dim, size, group, True)


def _take(tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
    start, stop = bounds(size, group.size, group.rank)
    return tensor.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def _sum_and_take(tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """Sum over the ranks and return this rank's part.

    Collectives: one reduce-scatter, of parts padded to the longest.
    Ranks hold: partial -> sharded.
    """
    if _debug.state.enabled:
        _debug.check("reduce_scatter", tensor, group, "the sequence")
    sizes = shard_sizes(size, group.size)
    whole = tensor.detach().movedim(dim, 0)  # (seq, ...)
    padded = whole.new_zeros((group.size, max(sizes), *whole.shape[1:]))
    for place, part in zip(padded.unbind(), torch.split(whole, sizes), strict=True):
        place[: part.size(0)] = part
    summed = padded.new_empty(padded.shape[1:])  # (longest part, ...)
    reduce_scatter_single(summed.view(-1), padded.view(-1), group=group.handle)
    return summed[: sizes[group.rank]].movedim(0, dim).contiguous()


# Each backward pass applies another autograd function, so that all of them can be differentiated twice.


class _ScatterSequence(torch.autograd.Function):
    # Forward: nothing. Backward: an all-gather.
    # Ranks hold: replicated -> sharded; gradient: sharded -> replicated.
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
        ctx.args = dim, size, group
        return _take(tensor, dim, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_GatherSequence, grad, *ctx.args, True), None, None, None


class _GatherSequence(torch.autograd.Function):
    # Forward: an all-gather. Backward: a reduce-scatter; or nothing, this rank's part of the gradient, where
    # every rank has the gradient of all.
    # Ranks hold: sharded -> replicated; gradient: partial -> sharded.
    # Ranks hold: sharded -> replicated; gradient: replicated -> sharded. That is with `replicated_grad`.
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, group: Group, replicated_grad: bool) -> Tensor:
        ctx.args = dim, size, group
        ctx.replicated_grad = replicated_grad
        return all_gather(tensor, dim, shard_sizes(size, group.size), group, layer="the sequence")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        adjoint = _ScatterSequence if ctx.replicated_grad else _ReduceScatter
        return apply(adjoint, grad, *ctx.args), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    # Forward: a reduce-scatter. Backward: an all-gather.
    # Ranks hold: partial -> sharded; gradient: sharded -> replicated.
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
        ctx.args = dim, size, group
        return as_output(_sum_and_take(tensor, dim, size, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_GatherSequence, grad, *ctx.args, False), None, None, None


# -- Gradients of parameters that work on parts of a sequence: one all-reduce for all of them -----


class SummedGradients:
    """The parameters of one model with gradients that are summed over the ranks.

    At the beginning of the model's ``forward`` all of them pass through one autograd function. Its backward
    runs when the last of their gradients is there, and sums all of them together. A parameter is summed alone
    if its module is called outside the model's ``forward``, as in a recomputation, or if ``fully_shard`` has
    replaced the parameter.

    Forward: nothing. Backward: one all-reduce for each type of parameters.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.owners: list[tuple[nn.Module, str]] = []
        self._passed: dict[int, Tensor] = {}

    def add(self, module: nn.Module, name: str) -> None:
        self.owners.append((module, name))

    def passed(self, parameter: Tensor) -> Tensor:
        """Return a parameter, for use on a part of the sequence."""
        passed = self._passed.get(id(parameter))
        if passed is None:
            return copy(parameter, group=self.group)
        return passed

    def begin(self, _model: nn.Module, _args: Any) -> None:
        """Pass all parameters through the function; a hook before the model's ``forward``."""
        self._passed.clear()
        # Without a graph there is no backward, and a compiler orders collectives itself.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.group.size == 1:
            return
        own = {}
        for module, name in self.owners:
            parameter = module._parameters.get(name)
            if parameter is not None and parameter.requires_grad:
                own[id(parameter)] = parameter
        if len(own) > 1 and not any(map(is_dtensor, own.values())):
            through = apply(_SumAll, self.group, *own.values())
            self._passed.update(zip(own, through, strict=True))

    def end(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        """Forget the passed parameters; a hook after the model's ``forward``, even if it raised."""
        # A later call of a module alone must not find a parameter of a graph that may be freed by then.
        self._passed.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_passed": {}}


class _SumAll(torch.autograd.Function):
    # Forward: nothing. Backward: one all-reduce for each type and device.
    # Ranks hold: replicated -> replicated; gradient: partial -> replicated.
    @staticmethod
    def forward(group: Group, *parameters: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004 - it is for backward
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004 - torch's signature
        ctx.group = inputs[0]
        ctx.set_materialize_grads(False)  # an unused parameter keeps no gradient, where zeros would be one

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # for a second derivative: a plain collective has none
            return (None, *(None if g is None else reduce(g, group=ctx.group) for g in grads))
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
        for index, grad in enumerate(grads):
            if grad is not None:
                kinds.setdefault((grad.dtype, grad.device), []).append((index, grad))
        summed = list(grads)
        for of_kind in kinds.values():
            flat = torch.cat([grad.reshape(-1) for _, grad in of_kind])
            all_reduce_(flat, ctx.group, layer="norms on parts of a sequence")
            pieces = flat.split([grad.numel() for _, grad in of_kind])
            for (index, grad), piece in zip(of_kind, pieces, strict=True):
                summed[index] = piece.view_as(grad)
        return (None, *summed)
