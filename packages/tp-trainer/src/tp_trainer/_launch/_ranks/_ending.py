"""Whether a run that a signal ended has saved its state, or why not."""

import signal
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from tp_trainer._launch._ranks._failure import code_name
from tp_trainer._launch._ranks._monitor import Death, Rank
from tp_trainer._rank_end import RankEnd, read_rank_end

__all__ = ["account", "end_file", "heard_end"]


_ASKED = (-signal.SIGTERM, -signal.SIGUSR1)  # the ends of ranks that do not listen to what they are sent


def end_file(directory: Path) -> Path:
    """Return where a rank whose logs are in a directory reports its end."""
    return directory / "end.json"


def heard_end(rank: Rank, code: int | None) -> RankEnd | None:
    """Return the rank's report of its end by a signal, if its exit code is that of the signal."""
    end = read_rank_end(end_file(rank.directory))
    return end if end is not None and code == 128 + end.signal else None


def account(
    ranks: Iterable[Rank], *, deaths: Mapping[int, Death], killed: Collection[int], grace_s: float
) -> str:
    """Return, in a line, what a launch that was asked to end has saved.

    Args:
        ranks: Those of this host.
        deaths: Their ends, by local rank.
        killed: The local ranks that were killed as they did not end by themselves.
        grace_s: How long they were given.
    """
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    for rank in ranks:
        end = read_rank_end(end_file(rank.directory))
        if end is not None and end.saved is not None:
            return f"saved: {end.saved}"
    if not ranks:
        return "nothing was saved: no rank had been started"
    if killed:
        slow = next(rank for rank in ranks if rank.local_rank in killed)
        return f"nothing was saved by fit: rank {slow.rank} had not ended after {grace_s:g} s and was killed"
    # A rank that failed says more than those which went on until they were asked to end.
    codes = {rank.rank: deaths[rank.local_rank].code for rank in ranks if rank.local_rank in deaths}
    number = next((n for n, code in codes.items() if code not in (None, 0, *_ASKED)), ranks[0].rank)
    code = codes.get(number)
    if code is None:
        how = "has ended"
    elif code in _ASKED:
        how = f"was outside of a fit with checkpoints, where {code_name(code)} ends it at once"
    else:
        how = f"ended with {code_name(code)}" if code >= 0 else f"was ended by {code_name(code)}"
    return f"nothing was saved by fit: rank {number} {how}"
