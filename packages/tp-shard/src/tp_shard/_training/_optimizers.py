"""What optimizers over shards are given: groups of parameters, and the rows that a sparse gradient has."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.errors import ConfigError

from tp_shard._shards._marks import holds_shard

__all__ = ["parameter_groups", "update_sampled_rows"]


def parameter_groups(model: nn.Module, *, weight_decay: float | None = None) -> list[dict[str, Any]]:
    """Return a model's trained parameters in groups for an optimizer, the same on all ranks.

    Shards and parameters that all ranks have are kept apart, each tied parameter counted once.

    Args:
        model: The model.
        weight_decay: Decay for matrices; vectors (biases, norms) then get none, in groups of their
            own. ``None`` leaves decay to the optimizer.

    Returns:
        Dicts with "params", "name" and "sharded", and "weight_decay" where it was given; none of
        them is empty.

    Example:
        >>> model = ts.nn.ParallelLinear(4, 4, dim=0)
        >>> [(g["name"], len(g["params"])) for g in parameter_groups(model, weight_decay=0.1)]
        [('replicated, decayed', 1), ('replicated', 1)]
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = weight_decay is not None and parameter.dim() > 1
            groups.setdefault((holds_shard(parameter), decays), []).append(parameter)
    found = []
    for (sharded, decays), parameters in sorted(groups.items(), key=lambda item: item[0], reverse=True):
        name = ("sharded" if sharded else "replicated") + (", decayed" if decays else "")
        group: dict[str, Any] = {"params": parameters, "name": name, "sharded": sharded}
        if weight_decay is not None:
            group["weight_decay"] = weight_decay if decays else 0.0
        found.append(group)
    return found


def update_sampled_rows(optimizer: Optimizer) -> None:
    """Let an optimizer touch only the rows that a sparse gradient has: of the parameter and of its state.

    Most of torch's optimizers refuse sparse gradients, and its SGD moves all rows by their momentum. After
    this call each step hands the optimizer those rows, gathered into a small parameter with its part of the
    state, and writes them back. The rest keeps its values, its momentum and its moments; no weight decay
    reaches it. That is how Partial FC (arXiv:2010.05222) updates the centers that were sampled, and what
    :class:`torch.optim.SparseAdam` does for Adam. Parameters with dense gradients are treated as ever.

    Args:
        optimizer: One that treats each element independently: SGD, Adam, AdamW, Adagrad, RMSprop, ... State
            that all elements share, such as the number of steps, counts every step.

    Raises:
        ConfigError: The optimizer is SparseAdam, which does so already; or, at a step with sparse gradients,
            there is a closure.

    Example:
        >>> head = ts.nn.MarginCrossEntropy(16, 1000, sample_rate=0.1, sparse=True)
        >>> optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        >>> update_sampled_rows(optimizer)
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        msg = (
            "SparseAdam touches the rows of a sparse gradient alone as it is: leave update_sampled_rows() out"
        )
        raise ConfigError(msg)
    exchange = _Exchange()
    optimizer.register_step_pre_hook(exchange.before)
    optimizer.register_step_post_hook(exchange.after)


class _Exchange:
    """Puts small parameters in the place of those with sparse gradients during a step."""

    def __init__(self) -> None:
        self._places: list[tuple[list[Tensor], int, Tensor, Tensor, Tensor]] = []

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Gather the rows."""
        for parameters, i, parameter, small, _ in self._places:  # the last step ended in an error
            parameters[i] = parameter
            optimizer.state.pop(small, None)
        self._places = []
        for group in optimizer.param_groups:
            parameters = group["params"]
            for i, parameter in enumerate(parameters):
                if parameter.grad is None or not parameter.grad.is_sparse:
                    continue
                if any(callable(value) for value in (*args, *kwargs.values())):
                    msg = (
                        "a closure computes sparse gradients after update_sampled_rows() has looked at them; "
                        "compute the loss and its gradients before step(), and call it without a closure"
                    )
                    raise ConfigError(msg)
                grad = parameter.grad.coalesce()
                rows = grad.indices()[0]
                small = nn.Parameter(parameter.detach().index_select(0, rows))
                small.grad = grad.values()
                if parameter in optimizer.state:
                    optimizer.state[small] = {
                        key: value.index_select(0, rows) if _is_like(value, parameter) else value
                        for key, value in optimizer.state[parameter].items()
                    }
                self._places.append((parameters, i, parameter, small, rows))
        for parameters, i, _, small, _ in self._places:
            parameters[i] = small

    @torch.no_grad()
    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """Write the rows back."""
        for parameters, i, parameter, small, rows in self._places:
            parameters[i] = parameter
            parameter.index_copy_(0, rows, small)
            state = optimizer.state[parameter]
            for key, value in optimizer.state.pop(small, {}).items():
                if not _is_like(value, small):
                    state[key] = value
                    continue
                if not _is_like(state.get(key), parameter):
                    state[key] = value.new_zeros(parameter.shape)
                state[key].index_copy_(0, rows, value)
        self._places = []


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
