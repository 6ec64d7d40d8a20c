"""What the ranks of a job make sure of before anything that could hang is started."""

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not say so
from tp_core import LaunchEnvironment, Session, rendezvous_store
from tp_core.errors import DisagreementError, RankFailedError

__all__ = ["agree", "shake_hands"]

_rounds = count()


def shake_hands(
    environment: LaunchEnvironment, facts: Mapping[str, Any], *, seed: int, timeout_s: float = 300.0
) -> int:
    """Compare ``facts`` over all ranks and return rank 0's seed.

    It goes through the launcher's store, before any process group exists: ranks that chose
    different backends would wait for each other for ever in there.

    Args:
        environment: Who this rank is.
        facts: What must be the same everywhere: small, and JSON can say it.
        seed: This rank's proposal for a seed.
        timeout_s: How long to wait for the other ranks.

    Raises:
        DisagreementError: On every rank, if the facts differ.
        RankFailedError: Ranks did not come in time.
    """
    round_ = next(_rounds)
    if environment.world_size == 1:
        return seed
    store = PrefixStore(f"tp/handshake/{round_}", rendezvous_store(environment, timeout_s=timeout_s))
    limit = timedelta(seconds=timeout_s)
    store.set(f"facts/{environment.rank}", json.dumps(facts, sort_keys=True, default=repr))
    # Rank 0 compares and tells: every rank reading every other's would be quadratic.
    if environment.rank == 0:
        missing = None
        everyones = []
        for rank in range(environment.world_size):
            try:
                store.wait([f"facts/{rank}"], limit)
            except RuntimeError:
                missing = rank
                break
            everyones.append(json.loads(store.get(f"facts/{rank}")))
        verdict: dict[str, Any] = {"seed": seed}
        if missing is not None:
            verdict["missing"] = missing
        else:
            verdict["difference"] = _first_difference(everyones)
        store.set("verdict", json.dumps(verdict))
    try:
        # Longer than rank 0 waits, so that its words arrive first.
        store.wait(["verdict"], limit + timedelta(seconds=10))
    except RuntimeError as error:
        msg = f"rank 0 did not come to the job's start within {timeout_s:g} s: {error}"
        raise RankFailedError(msg) from error
    verdict = json.loads(store.get("verdict"))
    if "missing" in verdict or verdict["difference"]:
        _let_everyone_read(store, environment)
    if "missing" in verdict:
        msg = f"rank {verdict['missing']} did not come to the job's start within {timeout_s:g} s"
        raise RankFailedError(msg)
    if verdict["difference"]:
        raise DisagreementError(verdict["difference"])
    return int(verdict["seed"])


def agree(session: Session, facts: Mapping[str, Any]) -> None:
    """Make sure that all ranks of a running job have the same facts.

    Raises:
        DisagreementError: On every rank, with the first fact in which one differs.

    Collectives: those of `Session.gather_objects`.
    """
    difference = _first_difference(session.gather_objects(dict(facts)))
    if difference:
        raise DisagreementError(difference)


def _let_everyone_read(store: PrefixStore, environment: LaunchEnvironment) -> None:
    """Keep rank 0, which may serve the store, alive until the others know why it stops."""
    store.set(f"read/{environment.rank}", "")
    if environment.rank == 0:
        with suppress(RuntimeError):  # a rank that never came does not read either
            store.wait([f"read/{r}" for r in range(environment.world_size)], timedelta(seconds=5))


def _first_difference(everyones: list[dict[str, Any]]) -> str | None:
    first = everyones[0]
    for rank, theirs in enumerate(everyones):
        for key in sorted({*first, *theirs}):
            if first.get(key) != theirs.get(key):
                return (
                    f"ranks disagree on the {key}: rank 0 has {first.get(key)!r}, rank {rank} has "
                    f"{theirs.get(key)!r}; start every rank with the same script, arguments and "
                    "installed packages"
                )
    return None
