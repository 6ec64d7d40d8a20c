"""Values of options against the types of their fields."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.errors import ConfigError
from tp_core.plugins import Backend, Job, Session, Verdict


@dataclass(frozen=True)
class Options:
    fast: bool = False
    size: int = 1
    share: float | None = None
    name: str = ""
    way: Literal["auto", 2] | bool = "auto"
    cost: Callable[[int], int] | None = None
    later: "Unknown" = 0  # noqa: F821  # as a name that is only imported for typing


class Mine(Backend[Options]):
    name = "mine"
    options_type = Options

    def assess(self, job):
        return Verdict.fits(60, "a test asked for it")

    def open(self, job):
        return Session(job)


def job(options):
    return Job(
        devices=resolve_devices("cpu"), environment=LaunchEnvironment.read({}), options={"mine": options}
    )


def parse(**values):
    by_name = Mine().parse_options(job(values))
    assert Mine().parse_options(job(Options(**values))) == by_name
    return by_name


@pytest.mark.parametrize(
    "values",
    [
        {"fast": True, "size": 3, "share": 1, "name": "x", "way": 2},
        {"share": 0.5, "way": False},
        {"cost": 3, "later": object()},  # left to who reads them
    ],
)
def test_values_of_the_fields_types_are_taken(values):
    assert parse(**values) == Options(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"fast": "yes"}, r"Options\(fast=\.\.\.\) must be True or False, got 'yes'"),
        ({"fast": 1}, "must be True or False, got 1"),
        ({"size": 1.0}, r"must be a whole number, got 1\.0"),
        ({"size": True}, "must be a whole number, got True"),
        ({"share": "0.5"}, "must be a number or None, got '0.5'"),
        ({"share": True}, "must be a number or None, got True"),
        ({"name": None}, "must be text, got None"),
        ({"way": "autp"}, "must be 'auto' or 2 or True or False, got 'autp'"),
        ({"way": 2.0}, r"got 2\.0"),
    ],
)
def test_values_of_other_types_are_refused_by_name(values, words):
    with pytest.raises(ConfigError, match=words):
        Mine().parse_options(job(values))
    with pytest.raises(ConfigError, match=words):
        Mine().parse_options(job(Options(**values)))
