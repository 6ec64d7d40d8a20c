"""A backward pass that takes part and adds nothing."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["backward_of_nothing"]


def backward_of_nothing(loss: Tensor, backward: Callable[[Tensor], None]) -> None:
    """Call ``backward`` of a loss that counts as nothing, so that zeros are added to the gradients.

    The other ranks wait for this one's gradients, so it takes part. To multiply the loss by 0 is not
    enough: a mean over nothing is NaN, and so is 0 times NaN. The zeros are put where gradients reach the
    parameters.

    Args:
        loss: Any loss, NaN or not.
        backward: Adds its gradients.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> backward_of_nothing(weight.sum() * float("nan"), torch.Tensor.backward)
        >>> weight.grad
        tensor([0., 0.])
    """
    handles = [leaf.register_hook(torch.zeros_like) for leaf in _leaves(loss)]
    try:
        backward(loss)
    finally:
        for handle in handles:
            handle.remove()


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaves of a loss's graph that gradients would be added to."""
    found, seen = [], set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of the node that adds to a leaf's gradient
        if variable is not None:
            found.append(variable)
        nodes.extend(following for following, _ in node.next_functions)
    return found
