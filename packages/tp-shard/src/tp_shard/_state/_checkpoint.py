"""Sharded checkpoints: saved and loaded by all ranks, with a digest of each file.

Digests are written last, and checked before anything is read: what was cut off, changed or not finished
is not loaded. Ranks share the work among them.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from tp_core.errors import StateError, TpError
from tp_core.internal import DIGESTS, INDEX, Ownership, read_digests, write_atomically
from tp_core.state import (
    FileRecord,
    collect_state,
    open_tensors,
    record_of,
    restore_state,
    to_json,
    write_tensors,
)

from tp_shard._shards._dtensors import reshard
from tp_shard._shards._slices import shard_spec, unwrap
from tp_shard._state._state_dict import is_writer

T = TypeVar("T")

_MANIFEST = "manifest.json"  # a trainer's checkpoint has the digests of its files there


def agree_on_failure(do: Callable[[], T]) -> T:
    """Do something that may fail on some ranks, and then fails on all.

    Raises:
        OSError: This rank could not read or write.
        TpError: This rank's own error.
        StateError: Another rank failed; the message names it.

    Collectives: an all-gather of pickled objects.
    """
    failure: OSError | TpError | None = None
    try:
        done = do()
    except (OSError, TpError) as error:
        failure = error
    # Every rank comes here, also after an error: one that raised at once would leave the others waiting.
    messages = _gather_objects(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            msg = f"rank {rank} failed: {message}"
            raise StateError(msg)
    return done


def _gather_objects(mine: T) -> list[T]:
    """Return what all ranks bring, by rank.

    Collectives: an all-gather of pickled objects.
    """
    if not dist.is_available() or not dist.is_initialized():
        return [mine]
    everyones = [mine] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def delete_digests(folder: Path) -> None:
    """Take away the digests of a checkpoint that will be overwritten.

    Collectives: those of :func:`agree_on_failure`.
    """

    def forget() -> None:
        if is_writer() and folder.is_dir():
            (folder / DIGESTS).unlink(missing_ok=True)

    agree_on_failure(forget)


def write_digests(folder: Path, mine: Mapping[str, FileRecord]) -> None:
    """Write the digests of what all ranks have written.

    Args:
        folder: The checkpoint.
        mine: The files that this rank has written.

    Raises:
        OSError: A file cannot be read or written; on the rank where that is.
        StateError: Another rank could not write.

    Collectives: all-gathers of pickled objects.
    """
    records = {name: record for part in _gather_objects(mine) for name, record in part.items()}

    def write(path: Path) -> None:
        records[INDEX] = record_of(folder / INDEX)
        listed = {name: record.to_dict() for name, record in sorted(records.items())}
        path.write_text(to_json(DIGESTS, listed, indent=1))

    agree_on_failure(lambda: write_atomically(write, folder / DIGESTS) if is_writer() else None)


def check_digests(folder: Path) -> None:
    """Make sure that a folder of ``save_sharded`` is as it was written.

    What a trainer wrote has its digests elsewhere, and is left to the trainer.

    Raises:
        FileNotFoundError: The folder has no checkpoint.
        StateError: A file is missing, cut off or changed, or the checkpoint was never finished; on all ranks.

    Collectives: those of :func:`agree_on_failure`.
    """
    agree_on_failure(lambda: _check_share(folder))


def _check_share(folder: Path) -> None:
    if folder.is_file() or any((place / _MANIFEST).is_file() for place in (folder, folder.parent)):
        return
    records = read_digests(folder)
    for name in _share(set(records)):
        difference = records[name].difference(folder / name)
        if difference is not None:
            msg = f"the checkpoint {folder} is damaged: {name} {difference}"
            raise StateError(msg)


def _share(names: set[str]) -> list[str]:
    """Return this rank's share of the files."""
    if not dist.is_available() or not dist.is_initialized():
        return sorted(names)
    return sorted(names)[dist.get_rank() :: dist.get_world_size()]


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
    tensors = agree_on_failure(lambda: collect_state(model, optimizer, cut=shard_spec(model, own=True)))
    with ExitStack() as owned:
        agree_on_failure(
            lambda: owned.enter_context(Ownership(folder, is_folder=True)) if is_writer() else None
        )
        delete_digests(folder)  # before the first file changes: what a crash cuts off has none
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
    agree_on_failure(lambda: restore_state(model, optimizer, open_tensors(path), cut=shard_spec(model)))
