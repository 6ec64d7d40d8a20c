"""Who judges a program: whether it says that numbers are wrong, and names the place."""

import re
import time
from dataclasses import dataclass

import torch
from tp_core.ranks import RankPool
from tp_verify import verify

from tests.silentbench._operation_logs import apart_by_logs, collectives
from tests.silentbench._programs import Program
from tests.silentbench._runs import curve_of_one_device, curve_of_ranks, looks_apart
from tests.silentbench._types import WHOLE, refused_by_types

__all__ = ["JUDGES", "Outcome", "by_counts", "by_curves", "by_logs", "by_types", "by_verify"]


@dataclass(frozen=True)
class Outcome:
    """What a judge says of one form of a program.

    Attributes:
        found: Whether it says that numbers are wrong.
        said: What it names; may be empty.
        is_placed: Whether this is the true place.
        seconds: The time that it took, on ranks that run already.
        not_for: Why the judge cannot be asked about this program; empty where it can.
    """

    found: bool
    said: str
    is_placed: bool
    seconds: float
    not_for: str = ""


def by_verify(program: Program, pool: RankPool, *, right: bool, dtype: torch.dtype | None = None) -> Outcome:
    """Judge by `tp_verify.verify`, with the program's own arguments."""
    case = {"ranks": pool, **program.case(right=right)}
    if "reload_on" in case:
        case["reload_on"] = pool
    if dtype is not None:
        case["dtype"] = dtype
    began = time.perf_counter()
    report = verify(**case)
    seconds = time.perf_counter() - began
    said = str(report.finding or "")
    return Outcome(not report.ok, said, bool(re.search(program.place, said)), seconds)


def by_curves(program: Program, pool: RankPool, *, right: bool) -> Outcome:
    """Judge by the loss curves of one device and of ranks: does a smoothed one part by 1 % in 100 steps?

    A program with a checkpoint of its own is resumed half-way.
    """
    is_resumed = "reload_on" in program.case(right=right)
    began = time.perf_counter()
    one = curve_of_one_device(program)
    ranks = curve_of_ranks(program, pool, right=right, resumed=is_resumed)
    found = looks_apart(one.losses, ranks.losses)
    return Outcome(found, "", False, time.perf_counter() - began)


def by_types(program: Program, pool: RankPool, *, right: bool) -> Outcome:
    """Judge by `spmd-types`: does it refuse the step, as declared for the right form?"""
    began = time.perf_counter()
    whole = WHOLE[0]
    for whole in WHOLE:
        said, not_for = refused_by_types(program, pool, right=True, whole=whole)
        if not said:
            break
    if not right:
        said, not_for = refused_by_types(program, pool, right=False, whole=whole)
    return Outcome(bool(said), said, False, time.perf_counter() - began, not_for)


def by_logs(program: Program, pool: RankPool, *, right: bool) -> Outcome:
    """Judge by torch's `DebugMode`: has an operation of a rank's step another output than on one device?"""
    began = time.perf_counter()
    said, not_for = apart_by_logs(program, pool, right=right)
    return Outcome(bool(said), said, False, time.perf_counter() - began, not_for)


def by_counts(program: Program, pool: RankPool, *, right: bool) -> Outcome:
    """Judge by torch's `CommDebugMode`: are there other collectives than the right form has?

    No user has the right form to count in: it stands for one who knows the right counts.
    """
    began = time.perf_counter()
    counts = collectives(program, pool, right=right)
    seconds = time.perf_counter() - began
    expected = counts if right else collectives(program, pool, right=True)
    if counts is None or expected is None:
        return Outcome(False, "", False, seconds, "its tracker of modules raises")
    differing = sorted(k for k in counts | expected if counts.get(k, 0) != expected.get(k, 0))
    return Outcome(bool(differing), ", ".join(differing), False, seconds)


JUDGES = {
    "tp verify": by_verify,
    "loss curves": by_curves,
    "spmd-types": by_types,
    "DebugMode": by_logs,
    "CommDebugMode": by_counts,
}
