"""Items and results beyond 4 GiB: messages about them, and places in shared memory so far behind."""

import numpy as np
import pytest
from tp_runner import OrderedRunner
from tp_runner._workers._process import _wire

LARGE = 5 << 30


def test_messages_can_be_about_more_than_4_gib():
    fields = ("blob_nbytes", "blob_at", "block_at", "block_nbytes", "inputs_nbytes", "shared_nbytes")
    request = _wire.Request(_wire.WORK, n_items=1, **{field: LARGE + n for n, field in enumerate(fields)})
    assert _wire.Request._make(_wire.REQUEST.unpack(_wire.REQUEST.pack(*request))) == request
    reply = _wire.Reply(_wire.DONE, n_items=1, blob_nbytes=LARGE, blob_at=LARGE + 1)
    assert _wire.Reply._make(_wire.REPLY.unpack(_wire.REPLY.pack(*reply))) == reply
    table = _wire.encode_table([(LARGE, LARGE + 1)])
    assert _wire.split_blob(table + b"rest", 1) == ([(LARGE, LARGE + 1)], b"rest")


@pytest.mark.parametrize(
    "make", [lambda n: np.full(50_000, n), lambda n: bytes([n]) * 50_000], ids=["array", "bytes"]
)
def test_items_and_results_lie_beyond_4_gib_of_shared_memory(make):
    with OrderedRunner(1, start_method="fork") as runner:
        memory = runner._pool.fleet._memory
        memory.allocate(LARGE)  # nobody touches it, so that it is not there
        items = [make(n) for n in range(5)]
        for got, item in zip(runner.stream(items), items, strict=True):
            np.testing.assert_array_equal(got, item)
        assert memory._end > LARGE
