"""Sharded checkpoints: each rank writes its own, and any number of ranks reads them again."""

import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.errors import StateError

from tp_shard._optimizer_state import optimizer_entries
from tp_shard._pieces import Piece, load_tensors, read_shapes, save_tensors
from tp_shard._table import ShardTable, unwrap

__all__ = ["load_sharded", "save_sharded"]

_SETTINGS = "optimizer.param_groups"


def save_sharded(
    model: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None
) -> None:
    """Write a model, and an optimizer over it, into a folder; each rank writes its own shards.

    The files are those of ``torch.distributed.checkpoint``. Of several copies of the model the
    first one is written.

    Args:
        model: The model; call it on every rank.
        path: The folder, which every rank can reach.
        optimizer: An optimizer over its parameters.

    Raises:
        ModelError: The optimizer has a parameter that is not the model's.
        OSError: A rank could not write.

    Collectives: those of ``torch.distributed.checkpoint``, over all ranks.
    """
    save_tensors(_pieces(unwrap(model), optimizer), Path(path))


def load_sharded(
    model: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None
) -> None:
    """Load what :func:`save_sharded` wrote, on this or another number of ranks.

    Everything is read before anything is changed: after an error the model and the optimizer are
    as they were.

    Args:
        model: The model, however it is split; call it on every rank.
        path: The folder.
        optimizer: An optimizer over its parameters, to be loaded too.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        StateError: It lacks a key, has another shape, or is damaged; the key is named.
        ModelError: The optimizer has a parameter that is not the model's.

    Collectives: those of ``torch.distributed.checkpoint``, over all ranks.
    """
    folder, model = Path(path), unwrap(model)
    own = _pieces(model, None)
    if optimizer is not None:
        own |= _expected(model, folder)
    read = load_tensors(own, folder)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, Tensor):
                tensor.copy_(read[f"model.{name}"])
    if optimizer is not None:
        optimizer.load_state_dict(_optimizer_state(model, optimizer, read))


def _pieces(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Piece]:
    table = ShardTable(model)
    pieces: dict[str, Piece] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            msg = f"{name} is of type {type(tensor).__name__}, and sharded checkpoints hold tensors"
            raise StateError(msg)
        pieces[f"model.{name}"] = Piece(tensor, table.get(name))
    if optimizer is None:
        return pieces
    for name, key, value, shard in optimizer_entries(model, optimizer, table):
        tensor = value if isinstance(value, Tensor) else torch.tensor(value)
        pieces[f"optimizer.{name}.{key}"] = Piece(tensor, shard)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict()["param_groups"], buffer)
    pieces[_SETTINGS] = Piece(torch.tensor(list(buffer.getvalue()), dtype=torch.uint8), None)
    return pieces


def _expected(model: nn.Module, folder: Path) -> dict[str, Piece]:
    """Return places for the optimizer's entries that a checkpoint has: a new one has none itself."""
    table = ShardTable(model)
    parameters = dict(model.named_parameters())
    places: dict[str, Piece] = {}
    for key, (shape, dtype) in read_shapes(folder).items():
        if not key.startswith("optimizer."):
            continue
        name = key.removeprefix("optimizer.").rpartition(".")[0]
        if key != _SETTINGS and name not in parameters:
            msg = f"{folder} has {key}, and the model has no parameter {name}"
            raise StateError(msg)
        shard = table.get(name) if shape and key != _SETTINGS else None
        local = shape if shard is None else tuple(shard.tensor.shape)
        places[key] = Piece(torch.empty(local, dtype=dtype), shard)
    if _SETTINGS not in places:
        msg = f"{folder} has no state of an optimizer: it lacks {_SETTINGS}"
        raise StateError(msg)
    return places


def _optimizer_state(model: nn.Module, optimizer: Optimizer, read: dict[str, Tensor]) -> dict[str, Any]:
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in read.items():
        if key.startswith("optimizer.") and key != _SETTINGS:
            name, _, entry = key.removeprefix("optimizer.").rpartition(".")
            state.setdefault(order.index(name), {})[entry] = value
    groups = torch.load(io.BytesIO(bytes(read[_SETTINGS].tolist())), weights_only=True)
    return {"state": state, "param_groups": groups}
