"""Sharded checkpoints: each rank writes its own, and any number of ranks reads them again."""

import os
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from tp_core.internal import Ownership
from tp_core.state import collect_state, open_tensors, restore_state, write_tensors

from tp_shard._shards._dtensors import reshard
from tp_shard._shards._pieces import cut_of
from tp_shard._shards._table import unwrap
from tp_shard._state._digests import check_digests, forget_digests, is_writer, together, write_digests

__all__ = ["load_sharded", "save_sharded"]


def save_sharded(
    model: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None
) -> None:
    """Write a model, and an optimizer over it, into a folder; each rank writes its own shards.

    The files are those of ``torch.distributed.checkpoint``, with the names that the trainer's checkpoints
    have too: see :mod:`tp_core.state`. Of several copies of the model the first one is written. Digests of
    the files come last: without them a folder is not loaded.

    Args:
        model: The model; call it on every rank.
        path: The folder, which every rank can reach.
        optimizer: An optimizer over its parameters.

    Raises:
        ModelError: The optimizer has a parameter that is not the model's.
        StateError: The state has something that is neither a tensor nor a plain value.
        OSError: A rank could not write.
        ConfigError: Another program writes there.

    Collectives: those of ``torch.distributed.checkpoint``, and some of small objects, over all ranks.
    """
    model = unwrap(model)
    reshard(model)
    folder = Path(path)
    tensors = together(lambda: collect_state(model, optimizer, cut=cut_of(model, own=True)))
    with ExitStack() as owned:
        together(lambda: owned.enter_context(Ownership(folder, is_folder=True)) if is_writer() else None)
        forget_digests(folder)
        written = write_tensors(tensors, folder, together=dist.is_available() and dist.is_initialized())
        write_digests(folder, written)


def load_sharded(
    model: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None
) -> None:
    """Load what :func:`save_sharded` wrote, or a trainer, on this or another number of ranks.

    Parameters are known by their names: the optimizer may have them in another order. Everything is read
    before anything is changed: after its own error a rank's model and optimizer are as they were, and an
    error on one rank is one on all.

    Args:
        model: The model, however it is split; call it on every rank.
        path: The folder, or the checkpoint of a trainer.
        optimizer: An optimizer over its parameters, to be loaded too.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        StateError: A key is missing, new or of another shape, and is named; a file is cut off or changed
            since it was written; or another rank failed.
        ModelError: The optimizer has a parameter that is not the model's.

    Collectives: two all-gathers of small objects, over all ranks.
    """
    model = unwrap(model)
    reshard(model)
    check_digests(Path(path))
    together(lambda: restore_state(model, optimizer, open_tensors(path), cut=cut_of(model)))
