"""The two products with a split weight, each one autograd function with its collective inside."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone calls it
from torch import Tensor

from tp_shard._collectives import copy, reduce
from tp_shard._comm import all_reduce_, start_all_reduce_
from tp_shard._group import Group

__all__ = ["autocast", "column_linear", "row_linear"]


def column_linear(input: Tensor, weight: Tensor, bias: Tensor | None, group: Group, layer: Any) -> Tensor:  # noqa: A002 - torch's name
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
    return _Column.apply(*autocast(input, weight, bias), group, layer)  # type: ignore[no-any-return,no-untyped-call]  # torch leaves apply untyped


def row_linear(input: Tensor, weight: Tensor, bias: Tensor | None, group: Group, layer: Any) -> Tensor:  # noqa: A002 - torch's name
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
    return _Row.apply(*autocast(input, weight, bias), group, layer)  # type: ignore[no-any-return,no-untyped-call]  # as above


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast as autocast would; the backward pass runs outside of it and must find one type."""
    device = tensors[0].device.type  # type: ignore[union-attr]  # the first one is the input
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )


def _flat(tensor: Tensor) -> Tensor:
    if tensor.dim() == 2:
        return tensor
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, layer: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.layer = group, layer
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = work = None
        if needs_input:
            grad_input = grad.matmul(weight)
            if torch.is_grad_enabled():  # a second derivative will be asked for
                grad_input = reduce(grad_input, group=ctx.group)
            else:
                work = start_all_reduce_(grad_input, ctx.group, layer=ctx.layer)
        flat = _flat(grad)
        if needs_weight:
            grad_weight = flat.t().mm(_flat(x))
        if needs_bias:
            grad_bias = flat.sum(0)
        if work is not None:
            work.wait()
        return grad_input, grad_weight, grad_bias, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, layer: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        output = all_reduce_(F.linear(x, weight), group, layer=layer)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        if torch.is_grad_enabled():  # a second derivative will be asked for
            grad = copy(grad, group=ctx.group)
        flat = _flat(grad)
        if needs_input:
            grad_input = grad.matmul(weight)
        if needs_weight:
            grad_weight = flat.t().mm(_flat(x))
        if needs_bias:
            grad_bias = flat.sum(0)
        return grad_input, grad_weight, grad_bias, None, None
