"""Who judges a program: whether it says that numbers are wrong, and names the place."""

import re
import time
from dataclasses import dataclass

import torch
from tp_core.ranks import RankPool
from tp_verify import verify

from tests.silentbench._programs import Program
from tests.silentbench._runs import curve_of_one_device, curve_of_ranks, looks_apart

__all__ = ["JUDGES", "Outcome", "by_curves", "by_verify"]


@dataclass(frozen=True)
class Outcome:
    """What a judge says of one form of a program.

    Attributes:
        found: Whether it says that numbers are wrong.
        said: What it names; may be empty.
        is_placed: Whether this is the true place.
        seconds: The time that it took, on ranks that run already.
    """

    found: bool
    said: str
    is_placed: bool
    seconds: float


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


JUDGES = {"tp verify": by_verify, "loss curves": by_curves}
