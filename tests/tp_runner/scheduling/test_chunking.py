"""How many chunks a worker may have been given at a time."""

import pytest
from tp_runner._scheduling._run import ChunkFlow  # private: nobody else can say how long an item took
from tp_runner.engines import Chunk, Settings


def learned(item_s):
    flow = ChunkFlow(Settings(), n_workers=2)
    flow.done(Chunk(1, 0, ["an item"], 1), item_s, 100)
    return flow


@pytest.mark.parametrize(
    ("item_s", "remaining", "most"),
    [
        pytest.param(1e-2, 1000, 2, id="the end is far"),
        pytest.param(1e-2, 15, 1, id="near the end, where another worker may be free first"),
        pytest.param(1e-2, None, 1, id="nobody knows how many are left"),
        pytest.param(1.0, 1000, 1, id="next to the work the journey is nothing"),
        pytest.param(1e-4, None, 3, id="short ones"),
    ],
)
def test_a_chunk_waits_behind_a_long_one_only_while_the_end_is_far(item_s, remaining, most):
    assert learned(item_s).credits(remaining) == most


def test_nothing_waits_behind_work_that_nobody_has_measured():
    assert ChunkFlow(Settings(), n_workers=2).credits(1000) == 1
