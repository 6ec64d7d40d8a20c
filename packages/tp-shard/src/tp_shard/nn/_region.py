"""What lies between column and row layers, where each rank works on its own part of the features.

Autograd's graph says it, whatever the modules are called: going back from the input of a row layer, one
meets column layers, and any other parameter met on the way is used by each rank for its own part alone.
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

# The nodes of a Function are of a class that torch keeps under a private name; the tests of regions
# would find nothing without it.
_BEGIN = (_Column._backward_cls, _Gather._backward_cls)
_SUMMED = (
    _Copy._backward_cls,
    _SumAll._backward_cls,
    _Scatter._backward_cls,
    _SequenceScatter._backward_cls,
)
_END = (_Row._backward_cls, _ReduceScatter._backward_cls)
_PASSING = "RegisterPostBackwardFunctionBackward"
"""The node that torch's ``fully_shard`` puts under all inputs of a unit: each goes through it by itself."""

_models: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def remember_names(model: nn.Module) -> None:
    """Let messages about the modules of a model call them by their names in it."""
    reference = weakref.ref(model)
    for module in model.modules():
        _models[module] = reference


def check_region(x: Tensor, layer: nn.Module) -> bool:
    """Make sure that each rank's part of a row layer's input depends on no unsummed whole parameter.

    Returns:
        Whether there was a graph to look at.

    Raises:
        ModelError: The input depends on such a parameter; the message names it and what to write. On every
            rank alike.
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
    """Make sure that a replicated module's input is this rank's part of some features.

    Returns:
        Whether there was a graph to look at.

    Raises:
        ModelError: Its input is the same on all ranks, so that sums of gradients would be too large.
    """
    if not isinstance(x, Tensor) or x.grad_fn is None:
        return False
    stops, leaves = _walk(x, (*_BEGIN, *_SUMMED, *_END))
    if stops & {*_BEGIN, _Scatter._backward_cls}:
        return True
    if any(not isinstance(leaf, nn.Parameter) or holds_shard(leaf) for leaf in leaves):
        return False  # a graph of which only a piece is seen, as in a recomputation
    msg = (
        f"{_name(module)} is Replicated() in the plan, and its input comes from no column layer: all ranks "
        "have the same, and summing their gradients would multiply them; leave it out of the plan"
    )
    raise ModelError(msg)


def _walk(x: Tensor, stops: tuple[type, ...]) -> tuple[set[type], list[Tensor]]:
    """Go back from a tensor; return the kinds of nodes at which it stopped, and the leaves it met."""
    met: set[type] = set()
    leaves: list[Tensor] = []
    seen = set()
    waiting = [(x.grad_fn, x.output_nr)]
    while waiting:
        node, output = waiting.pop()
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


# -- Layers without parameters: dropout of what is split, and a mark on what goes through ---------


class RegisterParallelDim(nn.Module):
    """Marks a tensor as split along a dimension, and hands on a view of it.

    Args:
        dim: 1 or -1 where output features are split, 0 where input features are; ``None`` for a tensor
            that is whole.

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
        # A view: the mark is not meant for those who hold the argument.
        output = input.view_as(input)
        register_parallel_dim(output, self.dim)
        return output

    def extra_repr(self) -> str:
        """Return what the layer was made with."""
        return f"dim={self.dim}"


class ParallelDropout(nn.Dropout):
    """Dropout of what is split over ranks: each of them draws its own mask.

    Args:
        p: The probability, from 0 to 1, with which an element is dropped.
        inplace: Whether the input is overwritten.
        tracker: The rank's own random numbers; layers of one model share one.

    Under ``torch.utils.checkpoint`` masks are drawn alike the second time: they follow torch's generator.

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
        """Return this rank's shard, of any shape; in training some elements are 0, the others scaled."""
        if not self.training or self.p == 0:
            return input
        with self.tracker.fork(input.device):
            return super().forward(input)
