"""Whole states out of optimizers over shards, and back."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.errors import ModelError, StateError

from tp_shard._state import Destination, gather_shard, is_writer
from tp_shard._table import Shard, ShardTable

__all__ = ["collect_optimizer_state_dict", "optimizer_entries", "relocate_optimizer_state_dict"]


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
        ModelError: The optimizer has a parameter that is not the model's.
        StateError: It keeps something of a shard that has another shape than the shard.

    Collectives: those of :func:`collect_state_dict`.
    """
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
            elif to == "rank0" and isinstance(value, Tensor):
                value = value.cpu()  # noqa: PLW2901 - the same entry, elsewhere
            collected[index][key] = value
    if to == "rank0" and not is_writer():
        return {}
    return {**state, "state": collected}


def relocate_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return this rank's part of an optimizer's whole state, for ``optimizer.load_state_dict``.

    Raises:
        ModelError: The optimizer has a parameter that is not the model's.
        StateError: An entry has another shape than the whole tensor; it is named.
    """
    table = ShardTable(model)
    names = _names(model, optimizer)
    placed: dict[int, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        shard = table.get(names[index])
        placed[index] = {}
        for key, value in entries.items():
            if shard is not None and isinstance(value, Tensor) and value.dim() > 0:
                if tuple(value.shape) != shard.full_shape:
                    msg = (
                        f"{names[index]}.{key} has shape {tuple(value.shape)} in the optimizer's state, "
                        f"and the whole parameter has {shard.full_shape}"
                    )
                    raise StateError(msg)
                value = shard.split.take(value, shard.group.rank)  # noqa: PLW2901 - as above
            placed[index][key] = value
    return {**state, "state": placed}


def optimizer_entries(
    model: nn.Module, optimizer: Optimizer, table: ShardTable
) -> Iterator[tuple[str, str, Any, Shard | None]]:
    """Yield the parameter's name, the key, the value and the shard of each entry of the state."""
    names = _names(model, optimizer)
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            yield names[index], key, value, _shard_of(names[index], key, value, table)


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
    known = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stranger = next((p for p in parameters if id(p) not in known), None)
    if stranger is not None:
        msg = (
            f"the optimizer has a parameter of shape {tuple(stranger.shape)} that is not the model's; make "
            "it from model.parameters() after the model was converted"
        )
        raise ModelError(msg)
    return [known[id(p)] for p in parameters]
