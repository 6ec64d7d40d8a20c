"""Items and results beyond 4 GiB of shared memory."""

import numpy as np
import pytest
from tp_runner import OrderedRunner

LARGE = 5 << 30


@pytest.mark.parametrize(
    "make", [lambda n: np.full(50_000, n), lambda n: bytes([n]) * 50_000], ids=["array", "bytes"]
)
def test_items_and_results_lie_beyond_4_gib_of_shared_memory(make):
    with OrderedRunner(1, start_method="fork") as runner:
        memory = runner._pool.fleet._memory  # private: 5 GiB of items take a machine with as much memory
        memory.allocate(LARGE)  # nobody touches it, so that it is not there
        items = [make(n) for n in range(5)]
        for got, item in zip(runner.stream(items), items, strict=True):
            np.testing.assert_array_equal(got, item)
        assert memory._end > LARGE
