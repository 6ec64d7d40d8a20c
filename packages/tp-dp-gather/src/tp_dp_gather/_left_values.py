"""Values that a forward pass on parts leaves behind, beside what it returns, and that a loss uses."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from tp_core import tree_leaves
from tp_core.errors import StepError


def check_left_values(loss: Tensor, forwards: Sequence[Sequence[Any]], model: nn.Module) -> None:
    """Check that a loss has of the parts' forward passes nothing but what they returned.

    An attribute that ``forward`` sets (``self.aux_loss = ...``), or what a hook keeps, is of one part. Such a
    loss leads to a node of the graph within a forward pass on another way than through its outputs.

    Args:
        loss: The step's loss, of the whole batch.
        forwards: The outputs of the parts, of each forward pass whose inputs are in no graph.
        model: The module, whose attributes are named.

    Raises:
        StepError: The loss has something else.
    """
    outputs = {
        node
        for parts in forwards
        for leaf in tree_leaves(list(parts))
        if isinstance(leaf, Tensor) and (node := leaf.grad_fn) is not None
    }
    used = _nodes_below([loss.grad_fn], without=outputs)
    within = _nodes_below((node for output in outputs for node in _next(output)), without=set())
    # What has no node below it is a parameter, which a step may use by itself.
    if not any(node in within and _next(node) for node in used):
        return
    names = [
        f"{name}.{attribute}".lstrip(".")
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor) and value.grad_fn in used
    ]
    kept = "what a hook or a list of the program has kept"
    if names:  # the last one is computed from others
        kept = f"{names[-1]!r}, which forward has set"
    msg = (
        f"the loss depends on a value of the model's forward pass that it does not return: {kept}. It is of "
        "the first or the last device's part of the batch alone. Return it from forward, a row for each "
        "sample, or take a backend that runs the step on each part ('tuple', 'ddp')"
    )
    raise StepError(msg)


def _next(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions if following is not None]


def _nodes_below(first: Iterable[Any], *, without: set[Any]) -> set[Any]:
    """Return the nodes of a graph that lead on from the first ones, these too, but not past some."""
    nodes: set[Any] = set()
    left = [node for node in first if node is not None and node not in without]
    while left:
        node = left.pop()
        if node not in nodes:
            nodes.add(node)
            left += [following for following in _next(node) if following not in without]
    return nodes
