"""Comparisons between the ranks of a job, before anything starts that could hang."""

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import timedelta
from numbers import Real
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not say so
from torch.optim import Optimizer
from tp_core import LaunchEnvironment
from tp_core.errors import DisagreementError, RankFailedError
from tp_core.launching import has_exited
from tp_core.plugins import Session
from tp_core.sessions import rendezvous_store

T = TypeVar("T")

_MOST_SLEEP_S = 0.05  # between two looks; less at first, when most ranks arrive


def check_same_at_start(
    environment: LaunchEnvironment, facts: Mapping[str, Any], *, seed: int, timeout_s: float = 300.0
) -> int:
    """Compare ``facts`` over all ranks and return rank 0's seed.

    Raises:
        DisagreementError: On every rank, if the facts differ.
        RankFailedError: Ranks did not arrive in time, or rank 0 could not decide; it raises its own error.

    Collectives: as in :func:`agree_at_start`.
    """
    return int(agree_at_start(environment, facts, message=None, decide=lambda _: seed, timeout_s=timeout_s))


def agree_at_start(
    environment: LaunchEnvironment,
    facts: Mapping[str, Any],
    *,
    message: Any,
    decide: Callable[[list[Any]], Any],
    timeout_s: float = 300.0,
) -> Any:
    """Compare ``facts`` over all ranks, and return rank 0's decision on every rank.

    The exchange goes through the launcher's store, before any process group exists. In a process group, ranks
    that chose different backends would wait for each other forever. Facts, messages and the decision are
    representable in JSON; rank 0 calls ``decide`` with the messages of all ranks.

    Raises:
        DisagreementError: On every rank, if the facts differ.

    Collectives: none; an exchange through the launcher's store.
    """
    if environment.world_size == 1:
        return decide([message])
    job = PrefixStore("tp/handshake", rendezvous_store(environment, timeout_s=timeout_s))
    # The rounds that rank 0 has ended: ranks' own counts differ once an attempt failed on some alone.
    round_ = job.add("ended", 0)
    store = PrefixStore(str(round_), job)
    own = {"facts": facts, "message": message}
    store.set(f"facts/{environment.rank}", json.dumps(own, sort_keys=True, default=_plain))
    failure: Exception | None = None
    # Rank 0 compares for all: if every rank read every other's facts, the reads would be quadratic.
    if environment.rank == 0:
        missing = None
        everyones = []
        for rank in range(environment.world_size):
            try:
                _wait(store, f"facts/{rank}", of=rank, timeout_s=timeout_s)
            except RankFailedError as error:
                missing = str(error)
                break
            everyones.append(json.loads(store.get(f"facts/{rank}")))
        verdict: dict[str, Any] = {"decided": None}
        if missing is not None:
            verdict["missing"] = missing
        else:
            verdict["difference"] = _first_difference([each["facts"] for each in everyones])
            if not verdict["difference"]:
                try:
                    verdict["decided"] = decide([each["message"] for each in everyones])
                except Exception as error:  # noqa: BLE001 - it is raised below, after the others know
                    failure = error
                    verdict["missing"] = f"rank 0 could not decide: {type(error).__name__}: {error}"
        job.add("ended", 1)  # first: a rank that has the verdict may begin the next round at once
        store.set("verdict", json.dumps(verdict))
    try:
        # Longer than rank 0 waits for the others: its verdict, with the missing rank's name, must come first.
        _wait(store, "verdict", of=0, timeout_s=timeout_s + 10)
    except RankFailedError:
        with suppress(RuntimeError):  # so that rank 0 does not take them for those of a later attempt
            store.delete_key(f"facts/{environment.rank}")
        raise
    verdict = json.loads(store.get("verdict"))
    if "missing" in verdict or verdict["difference"]:
        _let_everyone_read(store, environment)
    if "missing" in verdict:
        raise failure or RankFailedError(verdict["missing"])
    if verdict["difference"]:
        raise DisagreementError(verdict["difference"])
    return verdict["decided"]


def check_same(session: Session, facts: Mapping[str, Any]) -> None:
    """Make sure that all ranks of a running job have the same facts.

    Raises:
        DisagreementError: On every rank, with the first fact in which one differs.

    Collectives: as in `Session.gather_objects`.
    """
    difference = _first_difference(session.gather_objects(dict(facts), where="settings of a call"))
    if difference:
        raise DisagreementError(difference)


def check_same_optimizers(session: Session, optimizers: Mapping[str, Optimizer], *, beside: T) -> list[T]:
    """Make sure that all data ranks use the same optimizer settings.

    With different settings their parameters would diverge silently. A relative difference of 1e-6 is
    allowed, for processors that round a schedule differently.

    Args:
        session: The session.
        optimizers: The optimizers by name.
        beside: What is exchanged in the same collective.

    Returns:
        Every rank's ``beside``.

    Raises:
        DisagreementError: On every rank, with the first setting in which one differs.

    Collectives: as in `Session.gather_objects`.
    """
    settings = {
        f"the setting {key!r} of parameter group {number} of the optimizer {name!r}": value
        for name, optimizer in optimizers.items()
        for number, group in enumerate(optimizer.param_groups)
        for key, value in _numbers_in(group).items()
    }
    kinds = {f"the kind of the optimizer {name!r}": type(o).__name__ for name, o in optimizers.items()}
    everyones = session.gather_objects((kinds | settings, beside), where="settings of optimizers")
    (first, _), *others = everyones
    for rank, (theirs, _) in enumerate(others, start=1):
        for what, value in first.items():
            if what in theirs and not _is_same(value, theirs[what]):
                msg = (
                    f"ranks disagree on {what}: rank 0 has {value!r}, rank {rank} has {theirs[what]!r}; "
                    "their parameters would part. Set it on every rank, from what all of them know, as "
                    "trainer.global_loss(loss) for a schedule that follows the loss"
                )
                raise DisagreementError(msg)
    return [theirs for _, theirs in everyones]


def _numbers_in(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric settings of a parameter group; those in tuples, such as betas, one by one."""
    numbers: dict[str, float] = {}
    for key, value in group.items():
        if key == "params":
            continue
        several = value if isinstance(value, tuple) else (value,)
        for i, setting in enumerate(several):
            if isinstance(setting, Real) or (isinstance(setting, Tensor) and setting.numel() == 1):
                name = key if several is not value else f"{key}[{i}]"
                numbers[name] = float(setting)
    return numbers


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-6) or (math.isnan(value) and math.isnan(other))
    return bool(value == other)


def _wait(store: PrefixStore, key: str, *, of: int, timeout_s: float) -> None:
    """Wait until a rank has written a key, as long as that rank lives.

    Raises:
        RankFailedError: The rank did not arrive in time, or has exited.
    """
    began = time.monotonic()
    while True:
        try:
            # Not store.wait() with a short timeout: torch prints a warning at each timeout.
            if store.check([key]):
                return
            is_gone = has_exited(store, of)
        except RuntimeError as error:
            msg = f"the store was lost while rank {of} was waited for at the job's start: {error}"
            raise RankFailedError(msg) from error
        if is_gone:
            msg = f"rank {of} has ended, with status 0, before it came to the job's start"
            raise RankFailedError(msg)
        waited_s = time.monotonic() - began
        if waited_s >= timeout_s:
            msg = f"rank {of} did not come to the job's start within {timeout_s:g} s"
            raise RankFailedError(msg)
        time.sleep(min(_MOST_SLEEP_S, waited_s / 10))


def _let_everyone_read(store: PrefixStore, environment: LaunchEnvironment) -> None:
    """Wait on rank 0, which may serve the store, until the others have read the verdict.

    If it raised first, the store would end with it, and the others would report a lost store.
    """
    store.set(f"read/{environment.rank}", "")
    if environment.rank == 0:
        with suppress(RuntimeError):  # a rank that never came does not read either
            store.wait([f"read/{r}" for r in range(environment.world_size)], timedelta(seconds=5))


def _plain(value: Any) -> Any:
    """Return a value in a form that JSON can hold, equal on ranks with equal values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__} | {f.name: getattr(value, f.name) for f in fields(value)}
    if callable(value) and hasattr(value, "__qualname__"):  # its repr has an address, which differs by rank
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)


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
