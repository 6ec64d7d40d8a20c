"""The fixture ``tp_verify`` of pytest: `verify` on ranks that all tests of a session share."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tp_verify._report import VerifyReport


@pytest.fixture(scope="session")
def tp_verify() -> "Iterator[Callable[..., VerifyReport]]":
    """Verify as `tp_verify.verify` does, and fail the test with the report where something parts.

    Example:
        >>> def test_training_is_that_of_one_device(tp_verify):
        ...     tp_verify(build, batches, parallel=parallelize, step=step, ranks=2)
    """
    from tp_core.ranks import RankPool

    from tp_verify._verify import verify

    pools: dict[int, RankPool] = {}

    def check(*args: Any, ranks: int = 2, **options: Any) -> "VerifyReport":
        pool = pools.setdefault(ranks, RankPool(ranks))
        report = verify(*args, ranks=pool, **options)
        if not report:
            pytest.fail(str(report), pytrace=False)
        return report

    yield check
    for pool in pools.values():
        pool.close()
