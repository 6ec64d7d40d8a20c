"""The head of a fused loss whose logits are ``x @ weight.T + bias``."""

from typing import Any

import torch
from torch import Tensor

from tp_shard._groups._comm import start_all_reduce_
from tp_shard.nn._loss._options import LossOptions, Rows, computed_in

__all__ = ["LinearHead", "LinearKind", "Products"]


class LinearKind:
    """A head without settings."""

    def open(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: LossOptions,
        needed: tuple[bool, ...],
    ) -> "LinearHead":
        """Return the head over these tensors."""
        return LinearHead(x, weight, bias, options, needed)

    def place(self, grad: Tensor, shape: torch.Size, options: LossOptions) -> Tensor:  # noqa: ARG002 - the protocol's
        """Return the weight's gradient as it is."""
        return grad


class LinearHead:
    """Logits of a linear layer.

    Args:
        x: Of shape (rows, in).
        weight: Of shape (local classes, in).
        bias: Of shape (local classes,).
        options: Who communicates.
        needed: Whether the gradients of the three are needed.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: LossOptions,
        needed: tuple[bool, ...],
    ) -> None:
        self._x, self._weight, self._bias = x, weight, bias
        self._products = Products(x, weight, options, needed)
        dtype = computed_in(weight.dtype)
        self._grad_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None

    def logits(self, start: int, stop: int, rows: Rows) -> Tensor:  # noqa: ARG002 - the protocol's
        """Return the logits of some rows."""
        x, weight = self._x[start:stop], self._weight
        return x.mm(weight.t()) if self._bias is None else torch.addmm(self._bias, x, weight.t())

    def add(self, grad: Tensor, start: int, stop: int, rows: Rows) -> None:  # noqa: ARG002 - as above
        """Add what the gradient of some rows' logits gives.

        Collectives: begins an all-reduce of the features' gradient.
        """
        self._products.add(grad, start, stop)
        if self._grad_bias is not None:
            self._grad_bias.add_(grad.sum(0, dtype=self._grad_bias.dtype))

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients that are needed."""
        return (*self._products.wait(), self._grad_bias)


class Products:
    """The gradients of the two factors of ``x @ weight.T``, summed up over chunks of rows."""

    def __init__(self, x: Tensor, weight: Tensor, options: LossOptions, needed: tuple[bool, ...]) -> None:
        dtype = computed_in(weight.dtype)
        self._x, self._weight, self._options = x, weight, options
        self._grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needed[0] else None
        self._grad_weight = torch.empty_like(weight, dtype=dtype) if needed[1] else None
        self._is_first = True
        self._works: list[Any] = []

    def add(self, grad: Tensor, start: int, stop: int) -> None:
        """Add what the product's gradient of some rows gives.

        Collectives: begins an all-reduce of the gradient of ``x``.
        """
        if self._grad_x is not None:
            mine = self._grad_x[start:stop]
            torch.mm(grad, self._weight, out=mine)
            if self._options.group.size > 1:
                layer = self._options.layer or "the head and loss"
                self._works.append(start_all_reduce_(mine, self._options.group, layer=layer))
        if self._grad_weight is not None:
            total, part = self._grad_weight, self._x[start:stop]
            if total.dtype == grad.dtype:
                # A factor of 0 leaves out what is there: nothing has to be filled with zeros first.
                torch.addmm(total, grad.t(), part, beta=0 if self._is_first else 1, out=total)
            elif self._is_first:
                total.copy_(grad.t().mm(part))
            else:
                total.add_(grad.t().mm(part))
        self._is_first = False

    def wait(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients, after the ranks have summed that of ``x``."""
        for work in self._works:
            work.wait()
        return self._grad_x, self._grad_weight
