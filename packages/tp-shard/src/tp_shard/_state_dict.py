"""Whole states from sharded models and optimizers, and back."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.errors import ConfigError, StateError
from tp_core.fully_sharded import reshard
from tp_core.state import SliceBuffer, fill_from_whole, optimizer_names, whole
from tp_core.tensors import is_dtensor

from tp_shard._groups import _debug
from tp_shard._groups._group import current_mesh, ranks_of_model
from tp_shard._shards import Shard, ShardTable, slice_of

Destination = Literal["all", "rank0"]


def collect_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], prefix: str = "", *, to: Destination = "all"
) -> "OrderedDict[str, Any]":
    """Return the whole state of a model with parallel layers, from each rank's state.

    One tensor is gathered at a time, shard by shard, so at most one shard is in memory beside the result.
    Tensors that are not split are returned as they are.

    Args:
        model: The model; it may be wrapped in ``DistributedDataParallel``, and ``fully_shard`` may have
            sharded its shards once more.
        state_dict: The result of ``model.state_dict()``, on every rank.
        prefix: A prefix for every name of the result.
        to: "all" for the whole state on all ranks, on the shards' device; "rank0" for rank 0 only, in host
            memory, with an empty result on the others. In a mesh with an axis for the stages of a pipeline,
            the first rank of each stage has the stage's state.

    Returns:
        The whole state, in the order of ``state_dict``.

    Raises:
        ModelError: The model is not a module.
        StateError: An entry has another shape than the model's own shard.
        ConfigError: ``to`` has another value.

    Collectives: a broadcast of every shard, or with "rank0" a point-to-point message; an all-gather of every
    DTensor.

    Example:
        >>> layer = ts.nn.ParallelLinear(20, 30, dim=-1)
        >>> collect_state_dict(layer, layer.state_dict(), prefix="head.")["head.weight"].shape
        torch.Size([30, 20])
    """
    result: OrderedDict[str, Any] = OrderedDict()
    for name, value in stream(model, state_dict, to=to):
        result[prefix + name] = value
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        result._metadata = metadata  # type: ignore[attr-defined]  # as torch keeps versions of modules
    return result


def relocate_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], prefix: str = ""
) -> "OrderedDict[str, Any]":
    """Return this rank's part of a whole state, for ``model.load_state_dict``.

    The state may come from any number of ranks, if it is whole. Entries are read one by one and each shard
    gets its own storage. So a state in a memory-mapped file needs memory for one whole tensor at a time.

    Args:
        model: The model with parallel layers. It may be wrapped; under ``fully_shard`` the parts of its
            parameters are returned as DTensors.
        state_dict: A whole state, from :func:`collect_state_dict` or a plain model.
        prefix: A prefix for every name of the result.

    Returns:
        The state, with this rank's shard in place of each split tensor.

    Raises:
        ModelError: The model is not a module.
        StateError: An entry has another shape than the whole tensor; it is named.

    Example:
        >>> layer = ts.nn.ParallelLinear(20, 30, dim=-1)
        >>> state = torch.nn.Linear(20, 30).state_dict()
        >>> layer.load_state_dict(relocate_state_dict(layer, state))
        <All keys matched successfully>
    """
    table = ShardTable(model)
    result: OrderedDict[str, Any] = OrderedDict()
    for name, value in state_dict.items():
        shard = table.get(name)
        if not isinstance(value, Tensor):
            result[prefix + name] = value
            continue
        if shard is None:
            own = table.own(name)
            fits = own is not None and own.shape == value.shape  # otherwise load_state_dict raises
            if fits:
                result[prefix + name] = take_part(value, own, None)
            else:
                result[prefix + name] = value
            continue
        if tuple(value.shape) != shard.full_shape:
            msg = (
                f"{name} has shape {tuple(value.shape)} in the state, and the model's whole tensor has "
                f"{shard.full_shape} ({tuple(shard.tensor.shape)} on this rank); give a whole state, as "
                "ts.collect_state_dict returns it"
            )
            raise StateError(msg)
        result[prefix + name] = take_part(value.detach(), shard.tensor, shard)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        result._metadata = metadata  # type: ignore[attr-defined]  # as above
    return result


def take_part(value: Tensor, own: Tensor | None, shard: Shard | None) -> Tensor:
    """Return this rank's part of a whole tensor, in the form of the model's ``own`` tensor."""
    if own is None or not is_dtensor(own) or is_dtensor(value):
        if shard is None:
            return value
        return shard.split.take(value, shard.group.rank)
    place = SliceBuffer(lambda _, part: slice_of(part, shard), own, value.dtype)
    fill_from_whole(place.target, value)
    return place.take()


def check_destination(to: Destination) -> None:
    if to not in ("all", "rank0"):
        msg = f"a state is collected to 'all' ranks or to 'rank0', got {to!r}"
        raise ConfigError(msg)


def stream(model: nn.Module, state_dict: Mapping[str, Any], *, to: Destination) -> Iterator[tuple[str, Any]]:
    """Yield the entries of the whole state one by one; every rank has to iterate to the end.

    With "rank0" the other ranks yield nothing.

    Collectives: those of :func:`collect_state_dict`, in the order of the entries.
    """
    check_destination(to)
    table = ShardTable(model)
    receives = to == "all" or is_first_rank()
    collected: dict[int, Tensor] = {}  # tied tensors are collected once, and stay tied
    for name, value in state_dict.items():
        shard = table.get(name)
        if shard is None or not isinstance(value, Tensor):
            if isinstance(value, Tensor) and is_dtensor(value):
                value = whole(value.detach())  # noqa: PLW2901 - the same entry, put together
            if receives:
                if to == "rank0" and isinstance(value, Tensor):
                    value = value.detach().cpu()  # noqa: PLW2901 - the same entry
                yield name, value
            continue
        key = id(shard.tensor)
        if key not in collected:
            full = gather_shard(name, value.detach(), shard, to=to)
            tied = sum(s.tensor is shard.tensor for s in table.exact.values()) > 1
            if not tied:
                if receives:
                    yield name, full
                continue
            collected[key] = full
        if receives:
            yield name, collected[key]


def gather_shard(name: str, local: Tensor, shard: Shard, *, to: Destination) -> Tensor:
    """Return the whole tensor of a shard; an empty tensor on ranks that do not get it.

    Collectives: a broadcast of each rank's shard, or with "rank0" a point-to-point message; under
    ``fully_shard`` first an all-gather of this rank's shard.
    Ranks hold: sharded -> replicated.
    """
    group, split = shard.group, shard.split
    if local.shape != shard.tensor.shape:
        msg = (
            f"{name} has shape {tuple(local.shape)} in the state, and the model's shard has "
            f"{tuple(shard.tensor.shape)}; give what model.state_dict() returns on each rank"
        )
        raise StateError(msg)
    local = whole(local)  # of the data mesh, under fully_shard
    if _debug.state.enabled:
        _debug.check(f"collect {name}", local, group, None, uneven_dim=split.dim)
    if to == "rank0":
        return _to_first(local.contiguous(), shard)
    full = local.new_empty(shard.full_shape)
    for rank in range(group.size):
        if rank == group.rank:
            piece = local.contiguous()
        else:
            piece = local.new_empty(split.local_shape(shard.full_shape, rank))
        # Shard by shard, and no all-gather: so only one shard is in memory beside the whole tensor.
        dist.broadcast(piece, group_src=rank, group=group.handle)
        split.put(full, piece, rank)
    return full


def _to_first(local: Tensor, shard: Shard) -> Tensor:
    """Send the shards, one after another, to the first rank that holds the model, into host memory.

    Collectives: a point-to-point message from each other rank of its group.
    Ranks hold: sharded -> varying.
    """
    group, split = shard.group, shard.split
    # The first of all ranks need not be the first of its group: a group may have its ranks in any order.
    first = first_rank()
    if first not in dist.get_process_group_ranks(group.handle):
        return local.new_empty(0)  # another copy of the model is collected
    target = dist.get_group_rank(group.handle, first)
    if group.rank != target:
        dist.send(local, group_dst=target, group=group.handle)
        return local.new_empty(0)
    full = torch.empty(shard.full_shape, dtype=local.dtype)
    split.put(full, local, target)
    for rank in range(group.size):  # one at a time, so that only one shard is in memory beside the whole
        if rank != target:
            piece = local.new_empty(split.local_shape(shard.full_shape, rank))
            dist.recv(piece, group_src=rank, group=group.handle)
            split.put(full, piece, rank)
    return full


def first_rank() -> int:
    """Return the first rank, of all, that holds this rank's model; with stages of a pipeline not always 0."""
    mesh = current_mesh()
    if mesh is None:
        return 0
    return min(ranks_of_model(mesh))


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == first_rank()


# -- Whole states from optimizers over shards, and back -------------------------------------------


def collect_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, *, to: Destination = "all"
) -> dict[str, Any]:
    """Return the state of an optimizer over a model with parallel layers, with whole tensors.

    It has torch's own form, as of an optimizer over the unsharded model.

    Args:
        model: The model with the optimizer's parameters.
        optimizer: The optimizer.
        to: "all" ranks, or "rank0" only, in host memory; the others then get an empty dict.

    Raises:
        ConfigError: ``to`` has another value.
        ModelError: The optimizer has a parameter that is not the model's.
        StateError: The optimizer's state has a tensor of another shape than its shard.

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
    if to == "rank0" and not is_first_rank():
        return {}
    return {**state, "state": collected}


def relocate_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return this rank's part of an optimizer's whole state, for ``optimizer.load_state_dict``.

    Args:
        model: The model with parallel layers and the optimizer's parameters.
        optimizer: The optimizer.
        state: A whole state, from :func:`collect_optimizer_state_dict` or an optimizer over the unsharded
            model.

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
    """Return the shard with the split of an optimizer's entry, ``None`` if it is the same on all ranks."""
    shard = table.get(name)
    if shard is None or not isinstance(value, Tensor) or value.dim() == 0:
        return None
    if value.shape != shard.tensor.shape:
        msg = (
            f"the optimizer keeps {key} of shape {tuple(value.shape)} of {name}; its shard has shape "
            f"{tuple(shard.tensor.shape)}: how it would be cut is not known"
        )
        raise StateError(msg)
    return shard


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    return [name for group in optimizer_names(model, optimizer) for name in group]
