"""What a function that explains its arguments says to values of other types."""

import os

import numpy as np
import pytest
from tp_core.arguments import explain_arguments, explain_init
from tp_core.errors import ConfigError


@explain_arguments("write(path, 3)")
def write(
    path: str | os.PathLike[str],
    size: int = 1,
    fast: bool = False,
    *,
    safe: bool = True,
    scale: float | None = None,
):
    return os.fspath(path), size + 0, fast, safe, scale and scale + 0


@explain_init
class Options:
    def __init__(self, sizes: list[int], *, share: bool = False) -> None:
        self.sizes, self.share = [size + 0 for size in sizes], share


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: write("a", 1, "no"), r"write\(fast=...\) must be True or False, got 'no'"),
        (lambda: write("a", safe="no"), r"write\(safe=...\) must be True or False, got 'no'"),
        (lambda: write("a", safe=None), r"write\(safe=...\) must be True or False, got None"),
        (lambda: Options([], share=[]), r"Options\(share=...\) must be True or False, got \[\]"),
        (lambda: write("a", "3"), r"write\(size=...\) must be a number, got '3'"),
        (lambda: write("a", scale="3"), r"write\(scale=...\) must be a number, got '3'"),
        (lambda: write(3), r"write\(path=...\) must be a path, got int: 3"),
    ],
)
def test_a_value_of_another_type_is_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_what_counts_as_a_truth_is_taken():
    assert write("a", 1, 1, safe=np.bool_(False))[2:4] == (1, False)
    assert Options(sizes=[1], share=True).share


def test_another_cause_is_raised_as_it_is():
    with pytest.raises(TypeError, match="unsupported operand"):
        Options([None])
