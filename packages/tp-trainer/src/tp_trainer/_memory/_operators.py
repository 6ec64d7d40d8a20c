"""The operators of a step: how much each computes and moves, counted on tensors without memory."""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor


class Operator(NamedTuple):
    """What an operator does: floating-point operations, and the bytes that it reads and writes."""

    flops: float
    nbytes: float


class OperatorLog:
    """The operators of one step in their order, and the keys of its attentions.

    Attributes:
        forward: The operators of the forward pass.
        backward: Those of the backward pass, with what it computes again.
        update: Those of an optimizer step.
        keys: The bytes of keys and values of all calls of torch's attention in the forward pass.
        attentions: The number of these calls.
    """

    def __init__(self) -> None:
        self.forward: list[Operator] = []
        self.backward: list[Operator] = []
        self.update: list[Operator] = []
        self.keys = self.attentions = 0
        self.phase = self.forward

    def note(self, operator: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Add an operator; one that returns a view takes no time."""
        if operator.is_view or _only_allocates(operator):
            return
        name = str(operator)
        moved = sum(t.numel() * t.element_size() for t in _tensors((args, outputs)))
        if "scaled_dot_product" not in name:
            from torch.utils.flop_counter import flop_registry

            count = flop_registry.get(operator.overloadpacket)
            flops = 0 if count is None else count(*args, **kwargs, out_val=outputs)
            self.phase.append(Operator(flops, moved))
            return
        is_backward = "backward" in name
        query, key, value = args[1:4] if is_backward else args[:3]
        is_causal = kwargs.get("is_causal", any(a is True for a in args))
        pairs = query.shape[:-1].numel() * key.shape[-2] * (0.5 if is_causal else 1.0)
        products = 2.0 * pairs * (query.shape[-1] + value.shape[-1])
        self.phase.append(Operator(products * (2.5 if is_backward else 1.0), moved))
        if self.phase is self.forward:
            self.attentions += 1
            self.keys += sum(t.numel() * t.element_size() for t in (key, value))


@cache
def _only_allocates(operator: Any) -> bool:
    return str(operator).startswith(("aten.empty", "aten.new_empty", "aten.detach", "aten.lift"))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
