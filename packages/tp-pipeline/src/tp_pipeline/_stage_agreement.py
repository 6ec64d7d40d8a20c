"""What ranks tell each other between the steps, so that all of them go on, or all of them fail."""

import pickle
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tp_core.errors import RankFailedError
from tp_core.sessions import all_gather_single

_FIRST_NBYTES = 2**14
"""The size of the first all-gather's buffers; longer values take a second one."""


class _ReportedError(NamedTuple):
    """An error of a rank.

    Attributes:
        time: When the rank reported it.
        pickled: The error, or ``None`` if it cannot be pickled.
        text: Its class and message.
    """

    time: float
    pickled: bytes | None
    text: str


def gather_or_raise(value: Any, failure: Exception | None, *, group: dist.ProcessGroup) -> list[Any]:
    """Return the value of each rank of a group, unless one has failed.

    Args:
        value: This rank's value, which is pickled.
        failure: The error of this rank, or ``None``.
        group: The ranks, with a backend for memory of the host. So no rank waits for its device.

    Raises:
        Exception: A rank has failed: its error, on all of them.

    Collective: an all-gather over the group, and a second one if a value is long.
    """
    reported = None if failure is None else _describe_failure(failure)
    try:
        gathered = _all_gather_pickled((value, reported), group)
    except RuntimeError as error:
        if failure is not None:
            raise failure from error
        msg = f"a rank that trains the model with this one has ended, or hangs: {error}"
        raise RankFailedError(msg) from error
    failures = {rank: reported for rank, (_, reported) in enumerate(gathered) if reported is not None}
    if not failures:
        return [each for each, _ in gathered]
    # The earliest one: the others may follow from it.
    rank = min(failures, key=lambda failed: failures[failed].time)
    if failure is not None and rank == dist.get_rank(group):
        raise failure
    global_rank = dist.get_global_rank(group, rank)
    first = failures[rank]
    if first.pickled is None:
        msg = f"rank {global_rank} has failed in its stages: {first.text}"
        raise RankFailedError(msg)
    theirs: Exception = pickle.loads(first.pickled)
    theirs.add_note(f"It was raised in the stages of rank {global_rank}.")
    raise theirs


def _describe_failure(error: Exception) -> _ReportedError:
    pickled: bytes | None
    try:
        pickled = pickle.dumps(error)
        if str(pickle.loads(pickled)) != str(error):
            pickled = None
    except Exception:  # noqa: BLE001 - an error of any class, which may do anything when it is pickled
        pickled = None
    return _ReportedError(time.time(), pickled, f"{type(error).__name__}: {error}")


def _all_gather_pickled(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return each rank's value. torch's ``all_gather_object`` always takes two all-gathers.

    Collective: an all-gather, and a second one if a value is long.
    """
    raw = pickle.dumps(value)
    framed = bytearray(len(raw).to_bytes(8, "little") + raw)
    rows: list[bytes] = []
    nbytes = _FIRST_NBYTES
    while not rows or nbytes > len(rows[0]):
        padded = torch.zeros(nbytes, dtype=torch.uint8)
        padded[: len(framed)] = torch.frombuffer(framed, dtype=torch.uint8)[:nbytes]
        received = torch.empty(dist.get_world_size(group), nbytes, dtype=torch.uint8)
        all_gather_single(received.view(-1), padded, group=group)
        rows = [row.numpy().tobytes() for row in received]
        nbytes = max(8 + int.from_bytes(row[:8], "little") for row in rows)
    return [pickle.loads(row[8:]) for row in rows]
