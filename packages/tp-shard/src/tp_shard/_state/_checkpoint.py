"""Sharded checkpoints: saved and loaded by all ranks, with a digest of each file.

Digests are written last and checked before anything is read. So a checkpoint that was truncated, changed or
never finished is not loaded. The ranks divide the work.
"""

import os
from collections.abc import Callable
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

from tp_shard._shards import reshard, shard_spec, unwrap

T = TypeVar("T")

_MANIFEST = "manifest.json"  # the file with the digests of a trainer's checkpoint


def agree_on_failure(do: Callable[[], T]) -> T:
    """Call a function that may fail on some ranks, and fail on all ranks if it does.

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
    # Also after an error: a rank that raised at once would leave the others waiting here.
    messages = gather_objects(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            msg = f"rank {rank} failed: {message}"
            raise StateError(msg)
    return done


def gather_objects(mine: T) -> list[T]:
    """Return the objects of all ranks, by rank.

    Collectives: an all-gather of pickled objects.
    """
    if not dist.is_available() or not dist.is_initialized():
        return [mine]
    everyones = [mine] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def _is_writer() -> bool:
    """Return whether this process is rank 0 of all, which writes what all ranks share."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def _delete_digests(folder: Path) -> None:
    if _is_writer() and folder.is_dir():
        (folder / DIGESTS).unlink(missing_ok=True)


def _write_digests(folder: Path, records: dict[str, FileRecord]) -> None:
    def write(path: Path) -> None:
        records[INDEX] = record_of(folder / INDEX)
        listed = {name: record.to_dict() for name, record in sorted(records.items())}
        path.write_text(to_json(DIGESTS, listed, indent=1))

    if _is_writer():
        write_atomically(write, folder / DIGESTS)


def _check_digests(folder: Path) -> None:
    """Raise unless this rank's share of the files is as ``save_sharded`` wrote them.

    A trainer's checkpoint keeps its digests elsewhere, and the trainer checks them.

    Raises:
        FileNotFoundError: The folder has no checkpoint.
        StateError: A file is missing, truncated or changed, or the checkpoint was never finished.
    """
    if folder.is_file() or any((place / _MANIFEST).is_file() for place in (folder, folder.parent)):
        return
    records = read_digests(folder)
    is_alone = not dist.is_available() or not dist.is_initialized()
    mine = slice(None) if is_alone else slice(dist.get_rank(), None, dist.get_world_size())
    for name in sorted(records)[mine]:
        difference = records[name].difference(folder / name)
        if difference is not None:
            msg = f"the checkpoint {folder} is damaged: {name} {difference}"
            raise StateError(msg)


def save_sharded(
    model: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None
) -> None:
    """Write a model, and an optimizer over it, into a folder; each rank writes its own shards.

    The files have the format of ``torch.distributed.checkpoint`` and the names of a trainer's checkpoint: see
    :mod:`tp_core.state`. Of several copies of the model the first one is written. Digests of the files come
    last: without them a folder is not loaded.

    Args:
        model: The model; call it on every rank.
        path: The folder, on a file system that all ranks share.
        optimizer: An optimizer over its parameters.

    Raises:
        ModelError: The optimizer has a parameter that is not the model's.
        StateError: The state contains an object that is neither a tensor nor a plain value.
        OSError: A rank could not write.
        ConfigError: Another program writes to the folder.

    Collectives: those of ``torch.distributed.checkpoint``, and some of small objects, over all ranks.
    """
    model = unwrap(model)
    reshard(model)
    folder = Path(path)
    tensors = agree_on_failure(lambda: collect_state(model, optimizer, cut=shard_spec(model, own=True)))
    with ExitStack() as owned:
        agree_on_failure(
            lambda: owned.enter_context(Ownership(folder, is_folder=True)) if _is_writer() else None
        )
        # Before the first file changes: after a crash in between the folder has no digests and is not loaded.
        agree_on_failure(lambda: _delete_digests(folder))
        written = write_tensors(tensors, folder, together=dist.is_available() and dist.is_initialized())
        records = {name: record for part in gather_objects(written) for name, record in part.items()}
        agree_on_failure(lambda: _write_digests(folder, records))


def load_sharded(
    model: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None
) -> None:
    """Load a checkpoint of :func:`save_sharded` or of a trainer, on this or another number of ranks.

    Parameters are matched by name: the optimizer may have them in another order. Everything is read before
    anything is changed. After its own error a rank's model and optimizer are as they were. An error on one
    rank raises on all ranks.

    Args:
        model: The model, with any split; call it on every rank.
        path: The folder, or the checkpoint of a trainer.
        optimizer: An optimizer over its parameters, to load too.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        StateError: A key is missing, new or of another shape, and is named; a file was truncated or changed
            since it was written; or another rank failed.
        ModelError: The optimizer has a parameter that is not the model's.

    Collectives: two all-gathers of small objects, over all ranks.
    """
    model = unwrap(model)
    reshard(model)
    agree_on_failure(lambda: _check_digests(Path(path)))
    agree_on_failure(lambda: restore_state(model, optimizer, open_tensors(path), cut=shard_spec(model)))
