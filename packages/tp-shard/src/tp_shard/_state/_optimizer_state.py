"""Whole states out of optimizers over shards, and back."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.errors import StateError
from tp_core.state import optimizer_names, whole

from tp_shard._shards._dtensors import reshard
from tp_shard._shards._table import Shard, ShardTable
from tp_shard._state._state_dict import Destination, check_destination, gather_shard, is_writer, take_part

__all__ = ["collect_optimizer_state_dict", "relocate_optimizer_state_dict"]


def collect_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, *, to: Destination = "all"
) -> dict[str, Any]:
    """Return the state of an optimizer over a model with parallel layers, with whole tensors.

    It is in torch's own form, that of an optimizer over the unsharded model.

    Args:
        model: The model whose parameters it optimizes.
        optimizer: The optimizer.
        to: "all" ranks, or "rank0" only, in host memory; the others then get an empty dict.

    Raises:
        ConfigError: ``to`` is something else.
        ModelError: The optimizer has a parameter that is not the model's.
        StateError: The optimizer keeps something of a shard that has another shape than the shard.

    Collectives: those of :func:`collect_state_dict`.
    """
    check_destination(to)
    reshard(model)
    table = ShardTable(model)
    names = _names(model, optimizer)
    state = optimizer.state_dict()
    collected: dict[int, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        collected[index] = {}
        for key, value in entries.items():
            shard = _shard_of(names[index], key, value, table)
            if shard is not None:
                value = gather_shard(f"{names[index]}.{key}", value, shard, to=to)  # noqa: PLW2901
            elif isinstance(value, Tensor):
                value = whole(value)  # noqa: PLW2901 - the same entry, put together
                value = value.cpu() if to == "rank0" else value  # noqa: PLW2901 - and elsewhere
            collected[index][key] = value
    if to == "rank0" and not is_writer():
        return {}
    return {**state, "state": collected}


def relocate_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return this rank's part of an optimizer's whole state, for ``optimizer.load_state_dict``.

    Args:
        model: The model with parallel layers whose parameters it optimizes.
        optimizer: The optimizer.
        state: A whole state, as :func:`collect_optimizer_state_dict` or an optimizer of the unsharded model
            gives it.

    Raises:
        ModelError: The optimizer has a parameter that is not the model's.
        StateError: An entry has another shape than the whole tensor; it is named.
    """
    reshard(model)
    table = ShardTable(model)
    names = _names(model, optimizer)
    placed: dict[int, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        shard, own = table.get(names[index]), table.own(names[index])
        placed[index] = {}
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                if shard is not None and tuple(value.shape) != shard.full_shape:
                    msg = (
                        f"{names[index]}.{key} has shape {tuple(value.shape)} in the optimizer's state, "
                        f"and the whole parameter has {shard.full_shape}"
                    )
                    raise StateError(msg)
                if shard is not None or (own is not None and value.shape == own.shape):
                    value = take_part(value, own, shard)  # noqa: PLW2901 - as above
            placed[index][key] = value
    return {**state, "state": placed}


def _shard_of(name: str, key: str, value: Any, table: ShardTable) -> Shard | None:
    """Return the shard like which an optimizer's entry is cut, ``None`` if it is the same on all ranks."""
    shard = table.get(name)
    if shard is None or not isinstance(value, Tensor) or value.dim() == 0:
        return None
    if value.shape != shard.tensor.shape:
        msg = (
            f"the optimizer keeps {key} of shape {tuple(value.shape)} of {name}, whose shard has shape "
            f"{tuple(shard.tensor.shape)}: how it would be cut is not known"
        )
        raise StateError(msg)
    return shard


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in its order."""
    return [name for group in optimizer_names(model, optimizer) for name in group]
