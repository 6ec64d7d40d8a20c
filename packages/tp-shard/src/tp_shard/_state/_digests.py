"""Digests of the files of a sharded checkpoint: what was cut off, changed or not finished is not loaded.

They are written last, and checked before anything is read. Ranks share the work among them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from tp_core.errors import StateError, TpError
from tp_core.internal import DIGESTS, INDEX, read_digests, write_atomically
from tp_core.state import FileRecord, record_of, to_json

from tp_shard._state._state_dict import is_writer

__all__ = ["check_digests", "forget_digests", "is_writer", "together", "write_digests"]

T = TypeVar("T")

_MANIFEST = "manifest.json"  # a trainer's checkpoint has the digests of its files there


def together(do: Callable[[], T]) -> T:
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


def forget_digests(folder: Path) -> None:
    """Take away the digests of a checkpoint that will be overwritten.

    Collectives: those of :func:`together`.
    """

    def forget() -> None:
        if is_writer() and folder.is_dir():
            (folder / DIGESTS).unlink(missing_ok=True)

    together(forget)


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

    together(lambda: write_atomically(write, folder / DIGESTS) if is_writer() else None)


def check_digests(folder: Path) -> None:
    """Make sure that a folder of ``save_sharded`` is as it was written.

    What a trainer wrote has its digests elsewhere, and is left to the trainer.

    Raises:
        FileNotFoundError: The folder has no checkpoint.
        StateError: A file is missing, cut off or changed, or the checkpoint was never finished; on all ranks.

    Collectives: those of :func:`together`.
    """
    together(lambda: _check_share(folder))


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
