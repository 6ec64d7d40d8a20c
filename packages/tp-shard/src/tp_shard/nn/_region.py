"""Checks of the region between column and row layers, where each rank works on its own part of the features.

Autograd's graph shows the region, whatever the modules are called. The walk back from the input of a row
layer ends at column layers. Each rank uses any other parameter on the way for its own part alone.
"""

import weakref

from torch import Tensor, nn
from tp_core.errors import ModelError

from tp_shard._groups._collectives import _Copy, _Scatter
from tp_shard._groups._random import RandomTracker
from tp_shard._shards._attributes import check_dim, holds_shard, register_parallel_dim
from tp_shard.nn._sequence import _Gather, _ReduceScatter, _SumAll
from tp_shard.nn._sequence import _Scatter as _SequenceScatter
from tp_shard.nn._split_products import _Column, _Row

# Private: torch has no public name for the class of a Function's graph nodes. Without it the walk would stop
# nowhere; `a_plan_that_forgets_what_stands_inside_names_it_at_the_first_forward` notices its loss.
_BEGIN = (_Column._backward_cls, _Gather._backward_cls)
_SUMMED = (
    _Copy._backward_cls,
    _SumAll._backward_cls,
    _Scatter._backward_cls,
    _SequenceScatter._backward_cls,
)
_END = (_Row._backward_cls, _ReduceScatter._backward_cls)
_PASSING = "RegisterPostBackwardFunctionBackward"
"""The node that ``fully_shard`` puts under all inputs of a unit: each input passes through it separately."""

# Weak on both sides: a reference from a module to its model would keep the model alive.
_models: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def remember_names(model: nn.Module) -> None:
    """Remember the model of its modules, so that messages name them by their paths."""
    reference = weakref.ref(model)
    for module in model.modules():
        _models[module] = reference


def check_region(x: Tensor, layer: nn.Module) -> bool:
    """Raise if a row layer's input depends on a whole parameter with a gradient that is not summed.

    Returns:
        Whether there was a graph to check.

    Raises:
        ModelError: The input depends on such a parameter, on every rank. The message names it and the styles
            to add.
    """
    if x.grad_fn is None:
        return False
    _, leaves = _walk(x, (*_BEGIN, *_SUMMED))
    found = [p for p in leaves if isinstance(p, nn.Parameter) and not holds_shard(p)]
    if found:
        named = sorted(filter(None, (_parameter_name(p, layer) for p in found)))
        shapes = ", ".join(str(tuple(p.shape)) for p in found)
        what = ", ".join(named) or f"parameters of shape {shapes}"
        owners = sorted({name.rpartition(".")[0] for name in named}) or ["..."]
        pairs = ", ".join(f'"{owner}": ts.Replicated()' for owner in owners)
        msg = (
            f"{_name(layer)} takes this rank's part of the features, and {what}, on the way to it, is the "
            "same on all ranks: each would get the gradient of its own part alone. Add "
            f"{{{pairs}}} to the plan, which sums these gradients, or leave the "
            "block whole"
        )
        raise ModelError(msg)
    return True


def check_inside(x: object, module: nn.Module) -> bool:
    """Raise if the input of a replicated module is whole, and not this rank's part of the features.

    Returns:
        Whether there was a graph to check.

    Raises:
        ModelError: The input is the same on all ranks, so the sum of the gradients would be too large.
    """
    if not isinstance(x, Tensor) or x.grad_fn is None:
        return False
    stops, leaves = _walk(x, (*_BEGIN, *_SUMMED, *_END))
    if stops & {*_BEGIN, _Scatter._backward_cls}:
        return True
    if any(not isinstance(leaf, nn.Parameter) or holds_shard(leaf) for leaf in leaves):
        return False  # only a piece of the graph is visible, as when a checkpoint recomputes it
    msg = (
        f"{_name(module)} is Replicated() in the plan, and its input comes from no column layer: all ranks "
        "have the same, and summing their gradients would multiply them; leave it out of the plan"
    )
    raise ModelError(msg)


def _walk(x: Tensor, stops: tuple[type, ...]) -> tuple[set[type], list[Tensor]]:
    """Walk the graph back from a tensor; return the classes of the nodes that ended it, and its leaves."""
    met: set[type] = set()
    leaves: list[Tensor] = []
    seen = set()
    waiting = [(x.grad_fn, x.output_nr)]
    while waiting:
        node, output = waiting.pop()
        # Through this node only the input of the same number is followed: through all of them every tensor of
        # the unit would seem to depend on every other one (T5 under `fully_shard`).
        passes = type(node).__name__ == _PASSING
        edge = node, output if passes else None
        if node is None or edge in seen:
            continue
        seen.add(edge)
        if isinstance(node, stops):
            met.add(type(node))
        elif hasattr(node, "variable"):
            leaves.append(node.variable)
        else:
            waiting += node.next_functions[output : output + 1] if passes else node.next_functions
    return met, leaves


def _parameter_name(parameter: Tensor, near: nn.Module) -> str | None:
    root = _root(near)
    names = () if root is None else root.named_parameters()
    return next((name for name, p in names if p is parameter), None)


def _name(module: nn.Module) -> str:
    root = _root(module)
    names = () if root is None else root.named_modules()
    kind = f"{type(module).__name__}({module.extra_repr()})"
    return next((name for name, m in names if m is module and name), kind)


def _root(module: nn.Module) -> nn.Module | None:
    reference = _models.get(module)
    return None if reference is None else reference()


# -- Layers without parameters: dropout of split features, and a mark on activations --------------


class RegisterParallelDim(nn.Module):
    """A layer that marks its input as split along a dimension, and returns a view of it.

    Args:
        dim: 1 or -1 for split output features, 0 for split input features; ``None`` for a whole tensor.

    Raises:
        ConfigError: ``dim`` is another number.

    Example:
        >>> marked = RegisterParallelDim(0)(torch.empty(3))
        >>> get_parallel_dim(marked)
        0
    """

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        check_dim(dim)
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        """Return a view of ``input``, of any shape, with the mark."""
        # A view, so that the caller's own tensor does not get the mark.
        output = input.view_as(input)
        register_parallel_dim(output, self.dim)
        return output

    def extra_repr(self) -> str:
        """Return the layer's options."""
        return f"dim={self.dim}"


class ParallelDropout(nn.Dropout):
    """A dropout of split features: each rank draws its own mask.

    The masks follow torch's generator, so ``torch.utils.checkpoint`` draws the same ones again.

    Args:
        p: The probability, from 0 to 1, with which an element is dropped.
        inplace: Whether the input is overwritten.
        tracker: The rank's own random numbers; the layers of one model share it.

    Collectives: none.

    Example:
        >>> drop = ParallelDropout(0.5, tracker=ts.RandomTracker(1))
        >>> drop(torch.ones(4)).shape
        torch.Size([4])
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, *, tracker: RandomTracker) -> None:
        super().__init__(p, inplace)
        self.tracker = tracker

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements of this rank's shard, of any shape, and scale the others, in training alone."""
        if not self.training or self.p == 0:
            return input
        with self.tracker.fork(input.device):
            return super().forward(input)
