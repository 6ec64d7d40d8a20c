"""The two products with a split weight, each one autograd function with its collective inside."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_shard._groups._autograd import apply, as_output
from tp_shard._groups._collectives import copy, reduce
from tp_shard._groups._comm import all_reduce_, start_all_reduce_
from tp_shard._groups._group import Group

__all__ = ["autocast", "column_linear", "row_linear"]


def column_linear(input: Tensor, weight: Tensor, bias: Tensor | None, group: Group, layer: Any) -> Tensor:
    """Apply a weight whose output features are split to an input that all ranks have.

    Forward: nothing. Backward: an all-reduce of the input's gradient, which runs while the
    weight's gradient is computed.

    Args:
        input: Of shape (..., in).
        weight: Of shape (local out, in).
        bias: Of shape (local out,).
        group: The ranks.
        layer: Who communicates, for messages.

    Returns:
        A tensor of shape (..., local out).
    """
    if torch.is_autocast_enabled(input.device.type):
        input, weight, bias = autocast(input, weight, bias)
    return apply(_Column, input, weight, bias, (group, layer))


def row_linear(input: Tensor, weight: Tensor, bias: Tensor | None, group: Group, layer: Any) -> Tensor:
    """Apply a weight whose input features are split to an input that is split alike.

    Forward: an all-reduce of the output. Backward: nothing.

    Args:
        input: Of shape (..., local in).
        weight: Of shape (out, local in).
        bias: Of shape (out,), the same on all ranks; added once.
        group: The ranks.
        layer: Who communicates, for messages.

    Returns:
        A tensor of shape (..., out), the same on all ranks.
    """
    if torch.is_autocast_enabled(input.device.type):
        input, weight, bias = autocast(input, weight, bias)
    return apply(_Row, input, weight, bias, (group, layer))


def autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as autocast would; the backward pass runs outside of it and must find one type."""
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return cast(x), cast(weight), None if bias is None else cast(bias)


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor of other than two dimensions as (rows, features)."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


# The order of what follows is that of a hot path: what a tiny layer costs is mostly Python. torch looks at
# each argument of a function by itself, so that the group and the layer are one.
_Where = tuple[Group, Any]


def _keep(ctx: Any, x: Tensor, weight: Tensor, _bias: Tensor | None, where: _Where) -> None:
    ctx.save_for_backward(x, weight)
    ctx.where = where


class _Column(torch.autograd.Function):
    keep = staticmethod(_keep)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, where: _Where) -> Tensor:
        ctx.save_for_backward(x, weight)  # as keep does
        ctx.where = where
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        group, layer = ctx.where
        grad_input = grad_weight = grad_bias = work = None
        if needs[0]:
            grad_input = grad.matmul(weight)
            if torch.is_grad_enabled():  # a second derivative will be asked for
                grad_input = reduce(grad_input, group=group)
            elif torch.compiler.is_compiling():  # what overlaps is the compiler's to say
                grad_input = all_reduce_(grad_input, group, layer=layer)
            else:
                work = start_all_reduce_(grad_input, group, layer=layer)
        if grad.dim() != 2:
            grad, x = _flat(grad), _flat(x)
        if needs[1]:
            grad_weight = grad.t().mm(x)
        if needs[2]:
            grad_bias = grad.sum(0)
        if work is not None:
            work.wait()
        return grad_input, grad_weight, grad_bias, None


class _Row(torch.autograd.Function):
    keep = staticmethod(_keep)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, where: _Where) -> Tensor:
        ctx.save_for_backward(x, weight)  # as keep does
        ctx.where = where
        group, layer = where
        output = all_reduce_(F.linear(x, weight), group, layer=layer)
        return as_output(output if bias is None else output.add_(bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        if torch.is_grad_enabled():  # a second derivative will be asked for
            grad = copy(grad, group=ctx.where[0])
        if needs[0]:
            grad_input = grad.matmul(weight)
        if grad.dim() != 2:
            grad, x = _flat(grad), _flat(x)
        if needs[1]:
            grad_weight = grad.t().mm(x)
        if needs[2]:
            grad_bias = grad.sum(0)
        return grad_input, grad_weight, grad_bias, None
