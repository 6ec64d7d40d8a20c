"""The gradients of all parameters that work on parts of a sequence, in one all-reduce of each step."""

from typing import Any

import torch
from torch import Tensor, nn
from tp_core.internal import is_dtensor

from tp_shard._groups._autograd import apply
from tp_shard._groups._collectives import reduce
from tp_shard._groups._comm import all_reduce_
from tp_shard._groups._group import Group
from tp_shard.nn._sequence._collectives import sum_gradient

__all__ = ["SummedGradients"]


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
