"""Digests of the files of a sharded checkpoint: what was cut off, changed or not finished is not loaded.

They are written last, and checked before anything is read. Ranks share the work among them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from tp_core.errors import StateError, TpError
from tp_core.internal import write_atomically
from tp_core.state import FileRecord, from_json, record_of, to_json

from tp_shard._state._state_dict import is_writer

__all__ = ["DIGESTS", "check_digests", "forget_digests", "together", "write_digests"]

T = TypeVar("T")

DIGESTS = "digests.json"
"""The name of the file with the digests of the others in a folder of ``save_sharded``."""
_MANIFEST = "manifest.json"  # a trainer's checkpoint has the digests of its files there


def together(do: Callable[[], T]) -> T:
    """Do something that may fail on some ranks, and then fails on all.

    Raises:
        OSError: This rank could not read or write.
        TpError: This rank's own error.
        StateError: Another rank failed, which is named.

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


def write_digests(folder: Path) -> None:
    """Write the digests of what all ranks have written.

    Raises:
        OSError: A file cannot be read or written; on the rank where that is.
        StateError: That happened on another rank.

    Collectives: all-gathers of pickled objects.
    """
    names = {name for found in _gather_objects(together(lambda: _names(folder))) for name in found}
    mine = together(lambda: {name: record_of(folder / name) for name in _share(names)})
    records = {name: record for part in _gather_objects(mine) for name, record in part.items()}
    listed = {name: record.to_dict() for name, record in sorted(records.items())}
    text = to_json(DIGESTS, listed, indent=1)

    def write(path: Path) -> None:
        path.write_text(text)

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
    path = folder / DIGESTS
    if not path.is_file():
        if not (folder / ".metadata").is_file():
            msg = f"there is no checkpoint at {folder}: it has no {DIGESTS}"
            raise FileNotFoundError(msg)
        msg = f"{folder} has no {DIGESTS}: ts.save_sharded() was ended before its end, or did not write it"
        raise StateError(msg)
    try:
        records = {str(name): FileRecord(**record) for name, record in from_json(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        msg = f"{path} is damaged: {error}"
        raise StateError(msg) from error
    for name in _share(set(records)):
        difference = records[name].difference(folder / name)
        if difference is not None:
            msg = f"the checkpoint {folder} is damaged: {name} {difference}"
            raise StateError(msg)


def _names(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name == ".metadata" or p.suffix == ".distcp"]


def _share(names: set[str]) -> list[str]:
    """Return this rank's share of the files."""
    if not dist.is_available() or not dist.is_initialized():
        return sorted(names)
    return sorted(names)[dist.get_rank() :: dist.get_world_size()]
